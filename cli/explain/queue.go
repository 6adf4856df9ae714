// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// Queue describes waiting pods for a list of them, with the rules of Why. It uses the pods, the GPUNodes and a bounded number of other objects,
// so that a long list needs few requests. Why reads more and says more. A Queue is for one goroutine.
type Queue struct {
	objects Requested
	nodes   []v1alpha1.GPUNode
	// whole are the extended resources of GPUs on the nodes, and parts those of their devices.
	whole, parts map[string]bool
	// reasons are kept by request, because many pods request the same; those of pods with claims by what they depend on.
	reasons map[request]string
	claims  map[string]string
}

// Requested is what claims request. A claim or a template that is missing was not read; one that is nil does not exist.
type Requested struct {
	Driver    string
	Classes   []resourceapi.DeviceClass
	Claims    map[types.NamespacedName]*resourceapi.ResourceClaim
	Templates map[types.NamespacedName]*resourceapi.ResourceClaimTemplate
}

// Know tells the queue what claims request. Without it, the queue knows only their names.
func (q *Queue) Know(o Requested) { q.objects, q.claims = o, map[string]string{} }

// NewQueue returns a queue for the GPUNodes of a cluster.
func NewQueue(nodes []v1alpha1.GPUNode) *Queue {
	q := &Queue{
		nodes: nodes, whole: map[string]bool{}, parts: map[string]bool{}, reasons: map[request]string{}, claims: map[string]string{},
	}
	for _, n := range nodes {
		q.whole[n.Status.ExtendedResource] = true
		for _, d := range n.Status.Devices {
			q.parts[d.ExtendedResource] = true
		}
	}
	return q
}

// Requests returns what a pod requests that may be GPUs: extended resources that Tandem serves, and claims, as far as they are known. It is
// empty for other pods.
func (q *Queue) Requests(pod *corev1.Pod) (texts []string) {
	for _, asked := range q.limits(pod) {
		texts = append(texts, fmt.Sprintf("%d %s", asked.Devices, asked.resource()))
	}
	f, claims := q.facts(pod)
	for _, of := range claims {
		if of.spec == nil {
			texts = append(texts, "claim "+of.ref)
		} else {
			texts = append(texts, requestsOf(f.needs(of))...)
		}
	}
	for _, ref := range pod.Spec.ResourceClaims[min(MostClaims, len(pod.Spec.ResourceClaims)):] {
		texts = append(texts, "claim "+ref.Name)
	}
	return FirstOf(texts, mostQueued, "and %d more")
}

func (q *Queue) limits(pod *corev1.Pod) (found []request) {
	limits := resourcehelper.PodLimits(pod, resourcehelper.PodResourcesOptions{})
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		quantity, resource := limits[name], string(name)
		switch n := quantity.Value(); {
		case n <= 0 || !strings.Contains(resource, "/"):
		case q.whole[resource]:
			found = append(found, request{Devices: n, Limits: resource})
		case q.parts[resource] || usualResources.Has(resource) || q.mapped(name):
			found = append(found, request{Devices: n, Resource: resource})
		}
	}
	return found
}

// mapped reports whether claims may serve an extended resource with Tandem's devices.
func (q *Queue) mapped(resource corev1.ResourceName) bool {
	f := Facts{Driver: q.objects.Driver, Classes: q.objects.Classes}
	name := mapsTo(resource, f.Classes)
	return name != "" && f.mayBeOurs(name)
}

// byKubelet reports whether only kubelet serves an extended resource on the nodes that give GPUs to new pods. What claims serve is not counted.
func (q *Queue) byKubelet(resource string) bool {
	if q.objects.Classes != nil && !q.mapped(corev1.ResourceName(resource)) {
		return true
	}
	return !slices.ContainsFunc(q.nodes, func(n v1alpha1.GPUNode) bool {
		offers := func(d v1alpha1.DeviceStatus) bool { return d.ExtendedResource == resource }
		return n.Status.Waiting == "" && n.Status.ExtendedResource != resource && !slices.ContainsFunc(n.Status.Devices, offers)
	})
}

const (
	// mostReason bounds a reason, in runes.
	mostReason = 240
	// mostReasons bounds the requests for which the nodes are counted. Tenants can make each pod request another number.
	mostReasons = 64
	// mostQueued bounds the requests of one pod in a list.
	mostQueued = 8
	// mostOwner bounds the kind and the name of an owner, in runes. Tenants write owner references.
	mostOwner = 253
)

// Reason returns why a pod waits, in one line without a full stop. It names no holder.
func (q *Queue) Reason(pod *corev1.Pod) string {
	if pod.Spec.NodeName != "" {
		return Bounded(starts(pod), mostReason)
	}
	if len(pod.Spec.SchedulingGates) > 0 {
		return Bounded(gated(pod), mostReason)
	}
	if asked := q.limits(pod); len(asked) == 1 && len(pod.Spec.ResourceClaims) == 0 && q.byKubelet(asked[0].resource()) {
		reason, known := q.reasons[asked[0]]
		if !known && len(q.reasons) < mostReasons {
			reason = Bounded(whyNone(q.nodes, asked[0]), mostReason)
			q.reasons[asked[0]] = reason
		}
		if reason != "" {
			return reason
		}
	}
	f, claims := q.facts(pod)
	if len(claims) > 0 && q.objects.Classes != nil {
		of := fmt.Sprint(pod.Namespace, q.limits(pod), claims, f.scheduler())
		reason, known := q.claims[of]
		if !known && len(q.claims) < mostReasons {
			reason = Bounded(q.ofClaims(f, claims), mostReason)
			q.claims[of] = reason
		}
		if reason != "" {
			return reason
		}
	}
	return cmp.Or(Bounded(f.scheduler(), mostReason), "the scheduler has not reported a reason")
}

// facts are those for the rules of Why, and the pod's claims. A claim is described by its template, if that still exists.
func (q *Queue) facts(pod *corev1.Pod) (f Facts, claims []claimOf) {
	f = Facts{
		Driver: q.objects.Driver, Pod: pod, Classes: q.objects.Classes, GPUNodes: q.nodes,
		Claims: map[string]*resourceapi.ResourceClaim{}, Templates: map[string]*resourceapi.ResourceClaimTemplate{},
		NotRead: []NotRead{{Kind: KindNodes}, {Kind: KindSlices}},
	}
	if q.objects.Classes == nil {
		f.NotRead = append(f.NotRead, NotRead{Kind: KindClasses})
	}
	claims = f.claims()
	for i := range claims {
		of, known := &claims[i], false
		if of.template != "" {
			var template *resourceapi.ResourceClaimTemplate
			if template, known = q.objects.Templates[types.NamespacedName{Namespace: pod.Namespace, Name: of.template}]; template != nil {
				f.Templates[of.template], of.spec = template, &template.Spec.Spec
				of.name = "" // pods of one template wait for the same
			}
		}
		if of.name != "" {
			if of.claim, known = q.objects.Claims[types.NamespacedName{Namespace: pod.Namespace, Name: of.name}]; of.claim != nil {
				f.Claims[of.name], of.spec = of.claim, &of.claim.Spec
			}
		}
		if !known {
			f.NotRead = append(f.NotRead, NotRead{Kind: KindClaims}, NotRead{Kind: KindTemplates})
		}
	}
	return f, claims
}

// ofClaims returns why a pod with claims waits, and nothing if it is not known.
func (q *Queue) ofClaims(f Facts, claims []claimOf) string {
	needs, known := f.limitNeeds(), true
	for _, of := range claims {
		known = known && of.spec != nil
		if of.claim == nil || of.claim.Status.Allocation == nil {
			needs = append(needs, f.needs(of)...)
		}
	}
	var a Answer
	// The API server has compiled the selectors: a matcher without a budget compiles none.
	if f.lacks(context.Background(), &a, claims, needs, newMatcher(f, bounds{})) {
		return strings.TrimPrefix(a.Summary, "waits: ")
	}
	says := f.scheduler()
	if _, failed, is := strings.Cut(says, "filter plugin: "); is && allocatorError.MatchString(says) {
		return failed
	}
	if !known || len(needs) == 0 {
		return ""
	}
	if reason := f.counted(needs); reason != "" {
		return reason
	}
	if strings.Contains(says, cannotAllocate) {
		return "no node that may run it has such devices free"
	}
	if others, _ := f.otherResources(); others != "" {
		return "the scheduler says " + others
	}
	return ""
}

// Group are pods of one owner that wait for the same.
type Group struct {
	Namespace string
	// Kind and Name are those of the owner: a Deployment instead of its ReplicaSet; the pod itself if it has none.
	Kind, Name string
	// Pods are never empty. The oldest comes first.
	Pods []*corev1.Pod
	// Requests are those of each pod.
	Requests []string
	// Reason is that of most pods. Others is how many have another one.
	Reason string
	Others int
}

// Owner returns the owner as users write it, such as "Deployment ml/train".
func (g Group) Owner() string { return g.Kind + " " + g.Namespace + "/" + g.Name }

// Since is when the oldest pod was created.
func (g Group) Since() metav1.Time { return g.Pods[0].CreationTimestamp }

// Groups returns the pods that request what may be GPUs by their owners. Groups with the oldest pods come first.
func (q *Queue) Groups(pods []*corev1.Pod) []Group {
	type key struct{ namespace, kind, name, requests string }
	at := map[key]int{}
	var groups []Group
	pods = slices.SortedFunc(slices.Values(pods), func(a, b *corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	for _, pod := range pods {
		requests := q.Requests(pod)
		if len(requests) == 0 {
			continue
		}
		kind, name := ownerOf(pod)
		of := key{pod.Namespace, kind, name, strings.Join(requests, "\n")}
		i, known := at[of]
		if !known {
			i, at[of] = len(groups), len(groups)
			groups = append(groups, Group{Namespace: pod.Namespace, Kind: kind, Name: name, Requests: requests})
		}
		groups[i].Pods = append(groups[i].Pods, pod)
	}
	for i := range groups {
		groups[i].Reason, groups[i].Others = q.mostOften(groups[i].Pods)
	}
	return groups
}

// mostOften returns the reason of most pods, and how many have another. Of reasons that are as frequent it is that of the oldest pod.
func (q *Queue) mostOften(pods []*corev1.Pod) (reason string, others int) {
	count, most := map[string]int{}, 0
	reasons := make([]string, len(pods))
	for i, pod := range pods {
		reasons[i] = q.Reason(pod)
		count[reasons[i]]++
	}
	for _, r := range reasons {
		if count[r] > most {
			reason, most = r, count[r]
		}
	}
	return reason, len(pods) - most
}

// ownerOf returns the owner that users know. The Deployment of a ReplicaSet is known by the label that its controller sets.
func ownerOf(pod *corev1.Pod) (kind, name string) {
	controller := metav1.GetControllerOfNoCopy(pod)
	if controller == nil {
		return "Pod", pod.Name
	}
	kind, name = OneLine(controller.Kind), OneLine(controller.Name)
	if hash := pod.Labels[appsv1.DefaultDeploymentUniqueLabelKey]; kind == "ReplicaSet" && hash != "" {
		if deployment, cut := strings.CutSuffix(name, "-"+hash); cut && deployment != "" {
			return "Deployment", Bounded(deployment, mostOwner)
		}
	}
	return Bounded(kind, mostOwner), Bounded(name, mostOwner)
}
