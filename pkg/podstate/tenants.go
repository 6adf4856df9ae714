// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"slices"

	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Requesters returns the namespaces, sorted, of the pods that kubelet may be about to admit with a resource. It waits until the watch has
// reported such a pod, at most until ctx is done, and then returns none. kubelet does not tell a device plugin for which pod it calls
// Allocate. The device plugin calls it. It is safe for concurrent use.
func (p *Pods) Requesters(ctx context.Context, resource string) (namespaces []string) {
	p.await(ctx, func() bool {
		namespaces = p.requesters(resource)
		return len(namespaces) > 0
	})
	return namespaces
}

func (p *Pods) requesters(resource string) (namespaces []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pod := range p.pods {
		// kubelet may admit a pod whose deletion it has not received yet.
		if pod.isAdmitted() || slices.Contains(namespaces, pod.Namespace) {
			continue
		}
		if len(asked(pod.Pod, func(name string) bool { return name == resource })) > 0 {
			namespaces = append(namespaces, pod.Namespace)
		}
	}
	slices.Sort(namespaces)
	return namespaces
}

// NamespaceOf returns the namespace of the pod of a hold. The hold names the pod, or kubelet's checkpoint does, which kubelet writes before it
// starts the pod's containers. known is false while neither names the pod, or the watch has not reported it yet. A checkpoint that names the
// previous pod does not count. The device plugin calls it. It is safe for concurrent use.
func (p *Pods) NamespaceOf(h ledger.Hold) (namespace string, known bool, err error) {
	for _, pod := range h.Pods {
		if pod.Namespace != "" {
			return pod.Namespace, true, nil
		}
	}
	checkpoint, err := ReadDeviceCheckpoint(p.kubeletDir)
	if err != nil {
		return "", false, err
	}
	i := slices.IndexFunc(checkpoint.Devices, func(d PodDevice) bool { return d.Resource == h.Resource && d.ID == h.Holder.ID })
	if i < 0 || p.Predates(checkpoint, h) || p.EndedBy(checkpoint.Devices[i].PodUID, h.Began) {
		return "", false, nil
	}
	namespace = p.Name(checkpoint.Devices[i].PodUID).Namespace
	return namespace, namespace != "", nil
}

// isPending reports whether the pod waits for admission by kubelet. A pod that is being deleted does not.
func (p seenPod) isPending() bool { return !p.isAdmitted() && p.DeletionTimestamp == nil }

// isAdmitted reports whether kubelet has admitted or rejected the pod, or never will. kubelet writes the start time of a pod with the first
// status after its admission (k8s.io/kubernetes pkg/kubelet, generateAPIPodStatus), and the phase Failed of a pod that it rejects.
func (p seenPod) isAdmitted() bool {
	return p.deleted || p.Status.StartTime != nil || podstatus.Ended(p.Pod)
}
