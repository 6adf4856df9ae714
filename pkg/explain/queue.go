// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// Queue describes waiting pods for a list of them. It uses only the pods and the GPUNodes, so that a long list needs no requests. Why reads
// more and says more. A Queue is for one goroutine.
type Queue struct {
	nodes []v1alpha1.GPUNode
	// whole are the extended resources of GPUs on the nodes, and parts those of their devices.
	whole, parts map[string]bool
	// reasons are kept by request, because many pods request the same.
	reasons map[Request]string
}

// NewQueue returns a queue for the GPUNodes of a cluster.
func NewQueue(nodes []v1alpha1.GPUNode) *Queue {
	q := &Queue{nodes: nodes, whole: map[string]bool{}, parts: map[string]bool{}, reasons: map[Request]string{}}
	for _, n := range nodes {
		q.whole[n.Status.ExtendedResource] = true
		for _, d := range n.Status.Devices {
			q.parts[d.ExtendedResource] = true
		}
	}
	return q
}

// Requests returns what a pod requests that may be GPUs: extended resources that Tandem serves, and claims, whose classes only Why reads.
// It is empty for other pods.
func (q *Queue) Requests(pod *corev1.Pod) (texts []string) {
	for _, asked := range q.limits(pod) {
		texts = append(texts, fmt.Sprintf("%d %s", asked.Devices, asked.resource()))
	}
	for _, claim := range pod.Spec.ResourceClaims {
		texts = append(texts, "claim "+claim.Name)
	}
	if more := len(texts) - mostQueued; more > 0 {
		texts = append(texts[:mostQueued], fmt.Sprintf("and %d more", more))
	}
	return texts
}

func (q *Queue) limits(pod *corev1.Pod) (found []Request) {
	limits := resourcehelper.PodLimits(pod, resourcehelper.PodResourcesOptions{})
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		quantity, resource := limits[name], string(name)
		implicit := strings.HasPrefix(resource, resourceapi.ResourceDeviceClassPrefix)
		switch n := quantity.Value(); {
		case n <= 0 || !strings.Contains(resource, "/"):
		case q.whole[resource]:
			found = append(found, Request{Devices: n, Limits: resource})
		case q.parts[resource] || usualResources.Has(resource) || implicit:
			found = append(found, Request{Devices: n, Resource: resource})
		}
	}
	return found
}

const (
	// mostReason bounds a reason, in runes.
	mostReason = 240
	// mostReasons bounds the requests for which the nodes are counted. Tenants can make each pod request another number.
	mostReasons = 64
	// mostQueued bounds the requests of one pod in a list.
	mostQueued = 8
)

// Reason returns why a pod waits, in one line without a full stop. It names no holder.
func (q *Queue) Reason(pod *corev1.Pod) string {
	if pod.Spec.NodeName != "" {
		text := "starts on " + pod.Spec.NodeName
		if waiting := waitingContainer(pod); waiting != "" {
			text += ": " + waiting
		}
		return Bounded(text, mostReason)
	}
	if len(pod.Spec.SchedulingGates) > 0 {
		return Bounded(gated(pod), mostReason)
	}
	if asked := q.limits(pod); len(asked) == 1 && len(pod.Spec.ResourceClaims) == 0 {
		reason, known := q.reasons[asked[0]]
		if !known && len(q.reasons) < mostReasons {
			reason = Explain(q.nodes, asked[0])
			q.reasons[asked[0]] = reason
		}
		if reason != "" {
			return reason
		}
	}
	if says := (Facts{Pod: pod}).scheduler(); says != "" {
		return Bounded(says, mostReason)
	}
	return "the scheduler has not reported a reason"
}
