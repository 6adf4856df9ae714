// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Rejected returns Tandem's resources that made kubelet reject a pod, sorted; none if kubelet rejected it for another reason. Such a
// pod has failed permanently, and its owner creates the next one within milliseconds. kubelet's device manager names a resource
// without a healthy device, with too few devices or without a plugin in the message of UnexpectedAdmissionError; kubelet's
// accounting names it in the reason. A refusal by the plugin, such as Tandem's after a race, contains "rpc error". It is a pure
// function.
func Rejected(pod *corev1.Pod, limits device.Resources) []corev1.ResourceName {
	if pod.Status.Phase != corev1.PodFailed {
		return nil
	}
	words := strings.FieldsFunc(pod.Status.Message, func(r rune) bool { return unicode.IsSpace(r) || r == ',' })
	return slices.DeleteFunc(requested(pod, limits), func(name corev1.ResourceName) bool {
		named := slices.ContainsFunc(words, func(word string) bool { return strings.TrimRight(word, ".") == string(name) })
		return pod.Status.Reason != "OutOf"+string(name) &&
			(pod.Status.Reason != "UnexpectedAdmissionError" || !named || strings.Contains(pod.Status.Message, "rpc error"))
	})
}

// requested returns Tandem's resources in a pod's limits, sorted.
func requested(pod *corev1.Pod, limits device.Resources) []corev1.ResourceName {
	asked := resourcehelper.PodLimits(pod, resourcehelper.PodResourcesOptions{})
	maps.DeleteFunc(asked, func(name corev1.ResourceName, n resource.Quantity) bool {
		return n.IsZero() || !limits.Has(string(name))
	})
	return slices.Sorted(maps.Keys(asked))
}

// scheduled returns the condition PodScheduled if it is true, without the fields that the breaker does not read. The API server sets it
// when a scheduler binds the pod, and drops every condition from a pod that is created
// (k8s.io/kubernetes pkg/registry/core/pod, setPodNodeAndMetadata and PrepareForCreate). Until kubelet has admitted it, a pod that
// was created with spec.nodeName lacks the condition. The ClusterRoles edit and admin grant neither pods/binding nor writes of pods/status
// (plugin/pkg/auth/authorizer/rbac/bootstrappolicy).
func scheduled(pod *corev1.Pod) []corev1.PodCondition {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionTrue {
			return []corev1.PodCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	return nil
}

// breaker stops the scheduler from sending pods to a node that rejects one after the other. A node does that when its agent was
// killed and a pod ends there: the scheduler believes the GPU free, and an owner creates ten pods per second or more for it. The
// breaker may miss pods of a StatefulSet, which have the same name. TestAgentKilledOnAFullNode fails without the breaker.
//
// Tenants create pods, so it counts only pods that a scheduler bound to the node and that ask for no more than the node has: each
// of them shows that the scheduler's number is wrong. And it bounds how often the pods of one namespace open it.
type breaker struct {
	cluster
	// opened requests a reconciliation of a node's allocatable numbers.
	opened chan event.GenericEvent

	mu     sync.Mutex
	offers map[offer]*rejections
}

type offer struct {
	node     string
	resource corev1.ResourceName
}

// rejections records recent rejections of pods that requested an offer.
type rejections struct {
	recent []rejection
	// openings are the last openings by the namespaces of the pods.
	openings map[string][]time.Time
	open     bool
	// status is the agent's status when the breaker opened.
	status v1alpha1.GPUNodeStatus
	// zero is set once the node's number has been zero since the breaker opened.
	zero bool
}

type rejection struct {
	at        time.Time
	namespace string
}

const (
	// breakerPods rejections within breakerWindow open the breaker.
	breakerPods   = 3
	breakerWindow = 3 * time.Second
	// The pods of one namespace open the breaker of an offer at most namespaceOpenings times in namespaceWindow. An agent that is killed
	// again and again needs no more, and a tenant with a scheduler of its own gets no more.
	namespaceOpenings = 3
	namespaceWindow   = 5 * time.Minute
	// staleAfter excludes pods that a controller sees late, as after an interrupted watch.
	staleAfter = time.Minute
)

func newBreaker(c cluster) *breaker {
	return &breaker{cluster: c, opened: make(chan event.GenericEvent), offers: map[offer]*rejections{}}
}

func (b *breaker) register(m manager.Manager) error {
	return builder.TypedControllerManagedBy[boundPod](m).Named("breaker").
		Watches(&corev1.Pod{}, handler.TypedEnqueueRequestsFromMapFunc(boundPodOf), builder.WithPredicates(leftPending(b.of))).
		WithOptions(optionsFor[boundPod](4)).
		Complete(b)
}

// boundPod is a pod that a scheduler bound. Another pod of its name may have been created with spec.nodeName.
type boundPod struct {
	types.NamespacedName
	uid types.UID
}

func boundPodOf(_ context.Context, o client.Object) []boundPod {
	return []boundPod{{client.ObjectKeyFromObject(o), o.GetUID()}}
}

// of reports whether a pod was bound by a scheduler and requests Tandem's resources.
func (b *breaker) of(o client.Object) bool {
	pod, ok := o.(*corev1.Pod)
	return ok && pod.Spec.NodeName != "" && len(requested(pod, b.limits)) > 0 && scheduled(pod) != nil
}

// Reconcile implements reconcile.TypedReconciler for one pod that is no longer Pending.
func (b *breaker) Reconcile(ctx context.Context, request boundPod) (reconcile.Result, error) {
	pod, core := &corev1.Pod{}, &corev1.Node{}
	if err := b.live.Get(ctx, request.NamespacedName, pod); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	resources := Rejected(pod, b.limits)
	if len(resources) == 0 || pod.UID != request.uid || pod.Status.StartTime != nil && b.now().Sub(pod.Status.StartTime.Time) > staleAfter {
		return reconcile.Result{}, nil
	}
	node := &v1alpha1.GPUNode{}
	if err := b.client.Get(ctx, types.NamespacedName{Name: pod.Spec.NodeName}, node); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if err := b.client.Get(ctx, types.NamespacedName{Name: pod.Spec.NodeName}, core); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	for _, resource := range resources {
		// Another device plugin may serve the resource.
		if !served(node.Status, resource) || !fits(pod, core, resource) ||
			!b.count(offer{node.Name, resource}, pod.Namespace, node.Status) {
			continue
		}
		b.metrics.openings.Inc()
		klog.FromContext(ctx).Info("Node rejects pods one after the other, setting its allocatable devices to zero until its agent reports",
			"node", node.Name, "resource", resource, "pod", klog.KObj(pod), "message", pod.Status.Message)
		select {
		case b.opened <- event.GenericEvent{Object: node}:
		case <-ctx.Done():
			return reconcile.Result{}, context.Cause(ctx)
		}
	}
	return reconcile.Result{}, nil
}

// fits reports whether the empty node could run the pod, as far as a resource is concerned. No scheduler binds another one.
func fits(pod *corev1.Pod, node *corev1.Node, resource corev1.ResourceName) bool {
	asked, capacity := resourcehelper.PodLimits(pod, resourcehelper.PodResourcesOptions{})[resource], node.Status.Capacity[resource]
	return asked.Cmp(capacity) <= 0
}

// count reports whether one more pod of a namespace opens the breaker.
func (b *breaker) count(of offer, namespace string, status v1alpha1.GPUNodeStatus) (opened bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	maps.DeleteFunc(b.offers, func(_ offer, n *rejections) bool {
		n.recent = slices.DeleteFunc(n.recent, func(r rejection) bool { return now.Sub(r.at) >= breakerWindow })
		for namespace, at := range n.openings {
			if now.Sub(at[len(at)-1]) >= namespaceWindow {
				delete(n.openings, namespace)
			}
		}
		return len(n.recent) == 0 && len(n.openings) == 0 && !n.open
	})
	n := b.offers[of]
	if n == nil {
		n = &rejections{openings: map[string][]time.Time{}}
		b.offers[of] = n
	}
	before := n.openings[namespace]
	if n.open || len(before) >= namespaceOpenings && now.Sub(before[len(before)-namespaceOpenings]) < namespaceWindow {
		return false
	}
	if n.recent = append(n.recent, rejection{now, namespace}); len(n.recent) < breakerPods {
		return false
	}
	namespaces := map[string]bool{}
	for _, r := range n.recent {
		namespaces[r.namespace] = true
	}
	for name := range namespaces {
		at := append(n.openings[name], now)
		n.openings[name] = at[max(0, len(at)-namespaceOpenings):]
	}
	n.recent, n.open, n.status = nil, true, status
	return true
}

// shut closes the breaker. The openings still count.
func (n *rejections) shut() {
	n.open, n.zero, n.status = false, false, v1alpha1.GPUNodeStatus{}
}

// closes closes the breaker of a node once the agent's status differs from that at the opening, or once kubelet has replaced the zero
// with its own number, as it does within ten seconds if it has another. allocatable calls it for each state of the node in order.
func (b *breaker) closes(node *corev1.Node, status v1alpha1.GPUNodeStatus) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for of, n := range b.offers {
		if of.node != node.Name || !n.open {
			continue
		}
		current := node.Status.Allocatable[of.resource]
		putBack := n.zero && !current.IsZero()
		n.zero = current.IsZero()
		if putBack || !apiequality.Semantic.DeepEqual(n.status, status) {
			n.shut()
		}
	}
}

// open reports whether the allocatable number of an offer has to be zero.
func (b *breaker) open(of offer) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := b.offers[of]
	return n != nil && n.open
}

// close closes the breaker of an offer whose number the controller no longer writes. TestBreakerOfANodeLeftAlone fails
// without it.
func (b *breaker) close(of offer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := b.offers[of]; n != nil {
		n.recent = nil
		n.shut()
	}
}

// forget drops the state of a node that is gone.
func (b *breaker) forget(node string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	maps.DeleteFunc(b.offers, func(of offer, _ *rejections) bool { return of.node == node })
}
