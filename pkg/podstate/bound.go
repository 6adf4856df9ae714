// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Queue returns the pods that are bound to this node and request some resources, for the ledger. It is safe for concurrent use.
func (p *Pods) Queue(counts func(resource string) bool) ledger.Queue {
	return queue{Pods: p, counts: counts}
}

type queue struct {
	*Pods
	counts func(resource string) bool
}

// WaitForPods waits until the watch has reported a pod of a claim, at most until ctx is done. The watch reports pods in the order
// in which they were bound, so PendingPods then contains the pods that were bound earlier. The DRA front-end calls it before it
// reserves devices. It is safe for concurrent use.
func (p *Pods) WaitForPods(ctx context.Context, claim ledger.ClaimRequest) {
	known := func(pod ledger.Pod) bool { return p.Known(pod.UID) }
	p.await(ctx, func() bool { return len(claim.Pods) == 0 || slices.ContainsFunc(claim.Pods, known) })
}

// PendingPods returns the pods that kubelet has not admitted yet.
func (q queue) PendingPods() []ledger.PendingPods {
	q.mu.Lock()
	defer q.mu.Unlock()
	var bound []ledger.PendingPods
	for uid, pod := range q.pods {
		if !pod.isPending() {
			continue
		}
		for resource, devices := range asked(pod.Pod, q.counts) {
			bound = append(bound, ledger.PendingPods{PodUID: string(uid), Resource: resource, Devices: devices})
		}
	}
	return bound
}

// Unexplained reports whether an admitted pod with a cgroup requests more devices than holds name it: a hold that names no pod
// may belong to it. The reconciler calls it before it releases such a hold.
func (p *Pods) Unexplained(counts func(resource string) bool, holds []ledger.Hold) bool {
	admitted := func(pod seenPod) bool { return pod.Status.StartTime != nil }
	return slices.ContainsFunc(p.wanting(counts, holds, admitted), func(uid string) bool {
		cgroup, err := p.cgroups.Pod(uid)
		return err != nil || cgroup != CgroupAbsent
	})
}

// wanting returns the pods for which of is true and that request more devices of a resource than they have holds. Deleted pods are
// included.
func (p *Pods) wanting(counts func(resource string) bool, holds []ledger.Hold, of func(seenPod) bool) []string {
	type account struct{ pod, resource string }
	has := map[account]int{}
	for _, h := range holds {
		if h.Holder.Kind != ledger.KindPod {
			continue
		}
		// A record may name an earlier pod as well, which had the device before another driver gave it to this one.
		for _, pod := range h.Pods {
			has[account{pod.UID, h.Resource}]++
		}
	}
	var uids []string
	p.mu.Lock()
	defer p.mu.Unlock()
	for uid, pod := range p.pods {
		if !of(pod) {
			continue
		}
		for resource, devices := range asked(pod.Pod, counts) {
			if devices > has[account{string(uid), resource}] {
				uids = append(uids, string(uid))
				break
			}
		}
	}
	return uids
}

// asked returns how many devices of each such resource kubelet will allocate to a trimmed pod.
func asked(pod *corev1.Pod, counts func(resource string) bool) map[string]int {
	var devices map[string]int
	for _, container := range pod.Spec.Containers {
		for name, quantity := range container.Resources.Requests {
			resource := string(name)
			if quantity.Value() <= 0 || !counts(resource) || byClaim(pod, resource) {
				continue
			}
			if devices == nil {
				devices = map[string]int{}
			}
			devices[resource] += int(quantity.Value())
		}
	}
	return devices
}

// byClaim reports whether the scheduler made a claim for the pod's extended resources (KEP-5004).
func byClaim(pod *corev1.Pod, resource string) bool {
	extended := pod.Status.ExtendedResourceClaimStatus
	return extended != nil && slices.ContainsFunc(extended.RequestMappings, func(m corev1.ContainerExtendedResourceRequest) bool {
		return m.ResourceName == resource
	})
}

// limitsOf returns a pod's requests to device plugins, as one container without a name.
func limitsOf(pod *corev1.Pod) []corev1.Container {
	requests := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{})
	for name, quantity := range requests {
		if !isExtended(name) || quantity.IsZero() {
			delete(requests, name)
		}
	}
	if len(requests) == 0 {
		return nil
	}
	return []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: requests}}}
}

// isExtended reports whether Kubernetes itself does not define the resource (k8s.io/component-helpers has no such function;
// k8s.io/kubernetes/pkg/apis/core/helper is internal).
func isExtended(name corev1.ResourceName) bool {
	domain, _, qualified := strings.Cut(string(name), "/")
	return qualified && domain != "kubernetes.io" && !strings.HasSuffix(domain, ".kubernetes.io")
}

// Asks returns how many devices of a resource a pod requests; zero for a pod that the API server does not have.
func (p *Pods) Asks(uid, resource string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod, known := p.pods[types.UID(uid)]
	if !known || pod.deleted {
		return 0
	}
	return asked(pod.Pod, func(name string) bool { return name == resource })[resource]
}
