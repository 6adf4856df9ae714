// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// watchDelay is how long the watch may take to report a pod that kubelet has seen. kubelet's sync loop waits meanwhile.
const watchDelay = 2 * time.Second

// admit returns an error if a device is only for some namespaces and the pod may be of another one. kubelet does not say for which pod it
// calls Allocate: it is one of those that request the resource and were not admitted yet, and all of them must be of these namespaces. It is
// an error, too, if no such pod is reported in time.
func (p *Plugin) admit(ctx context.Context, resource string, containers [][]item) error {
	for _, i := range slices.Concat(containers...) {
		policy := i.Sharing()
		if len(policy.Namespaces) == 0 {
			continue
		}
		waiting, cancel := context.WithTimeout(ctx, watchDelay)
		requesters := p.config.Requesters.Requesters(waiting, resource)
		cancel()
		if len(requesters) > 0 && !slices.ContainsFunc(requesters, func(namespace string) bool { return !policy.Admits(namespace) }) {
			continue
		}
		klog.FromContext(ctx).Info("Refused Allocate because the pod may be of a namespace that may not share the device",
			"resource", resource, "device", i.id, "requestedBy", requesters, "admitted", policy.Namespaces)
		why := "a pod that requests it is in a namespace that the node's sharing policy does not admit"
		if len(requesters) == 0 {
			why = "the node's sharing policy admits some namespaces only, and the API server has reported no pod that requests it"
		}
		return status.Errorf(codes.PermissionDenied, "allocate %s: device %s: %s (sharing.namespaces of the node configuration)",
			resource, i.id, why)
	}
	return nil
}

// admitPod checks the namespace again before a container starts, when kubelet's checkpoint names its pod.
func (p *Plugin) admitPod(ctx context.Context, resource string, items []item) error {
	if p.config.NamespaceOf == nil {
		return nil
	}
	holds := p.config.Ledger.Holds()
	for _, i := range items {
		policy := i.Sharing()
		if len(policy.Namespaces) == 0 {
			continue
		}
		at := slices.IndexFunc(holds, func(h ledger.Hold) bool {
			return h.Holder == ledger.Holder{Kind: ledger.KindPod, ID: i.id} && h.Resource == resource
		})
		if at < 0 {
			return status.Errorf(codes.Unavailable, "start a container with %s: no pod holds device %s", resource, i.id)
		}
		namespace, known, err := p.config.NamespaceOf(holds[at])
		switch {
		case err != nil:
			return status.Errorf(codes.Unavailable, "start a container with %s: find the pod of device %s: %v", resource, i.id, err)
		case !known:
			return status.Errorf(codes.Unavailable, "start a container with %s: the API server has not reported the pod of device %s yet", resource, i.id)
		case !policy.Admits(namespace):
			klog.FromContext(ctx).Info("Refused to start a container because its namespace may not share the device",
				"resource", resource, "device", i.id, "namespace", namespace, "admitted", policy.Namespaces)
			return status.Errorf(codes.PermissionDenied, "start a container with %s: the node's sharing policy does not admit namespace %s to device %s "+
				"(sharing.namespaces of the node configuration)", resource, namespace, i.id)
		}
	}
	return nil
}
