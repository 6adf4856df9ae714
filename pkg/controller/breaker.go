// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// TurnedAway are our resources that a pod asked for which kubelet has not admitted, sorted; none where that had another reason, or
// where the pod was admitted. Such a pod has failed for good, and its owner makes the next within milliseconds (kubelet's
// device manager: UnexpectedAdmissionError if Allocate fails or no device is healthy; its own accounting: "OutOf" and the resource).
// It is a pure function.
func TurnedAway(pod *corev1.Pod, limits device.Resources) []corev1.ResourceName {
	if pod.Status.Phase != corev1.PodFailed {
		return nil
	}
	var asked []corev1.ResourceName
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for name := range c.Resources.Limits {
			if limits.Has(string(name)) && (pod.Status.Reason == "UnexpectedAdmissionError" || pod.Status.Reason == "OutOf"+string(name)) {
				asked = append(asked, name)
			}
		}
	}
	slices.Sort(asked)
	return slices.Compact(asked)
}

// breaker stops the scheduler from sending pods to a node that turns one after the other away, as one does whose agent was killed and
// on which a pod ends: nobody has said that its GPU is not to be had, and an owner makes ten pods a second for it. A race costs one
// or two and does not open it.
type breaker struct {
	live    client.Reader
	limits  device.Resources
	metrics *metrics
	now     func() time.Time
	// opened tells of nodes whose allocatable numbers should be looked at.
	opened chan event.GenericEvent

	mu    sync.Mutex
	nodes map[offer]*turnedAway
}

// offer is a resource of a node.
type offer struct {
	node     string
	resource corev1.ResourceName
}

// turnedAway is what is remembered of an offer.
type turnedAway struct {
	at   []time.Time // the pods of late
	open bool
	// told is what the agent said when it was first asked after that.
	told *v1alpha1.GPUNodeStatus
}

// So many pods turned away in so short a time open the breaker.
const (
	breakerPods   = 3
	breakerWindow = 3 * time.Second
)

func newBreaker(live client.Reader, limits device.Resources, measured *metrics, now func() time.Time) *breaker {
	return &breaker{live: live, limits: limits, metrics: measured, now: now, opened: make(chan event.GenericEvent), nodes: map[offer]*turnedAway{}}
}

func (b *breaker) register(m manager.Manager) error {
	// Only Pending pods are watched: one that failed leaves the watch as if it were deleted.
	left := predicate.Funcs{
		CreateFunc:  func(event.CreateEvent) bool { return false },
		UpdateFunc:  func(event.UpdateEvent) bool { return false },
		GenericFunc: func(event.GenericEvent) bool { return false },
		DeleteFunc:  func(e event.DeleteEvent) bool { return b.of(e.Object) },
	}
	err := builder.ControllerManagedBy(m).Named("breaker").
		Watches(&corev1.Pod{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(left)).
		WithOptions(options(4)).
		Complete(b)
	if err != nil {
		return fmt.Errorf("register breaker: %w", err)
	}
	return nil
}

// source is the events of nodes that should be looked at.
func (b *breaker) source() source.Source {
	return source.Channel(b.opened, &handler.EnqueueRequestForObject{})
}

// of reports whether a pod was bound to a node with limits of ours.
func (b *breaker) of(o client.Object) bool {
	pod, ok := o.(*corev1.Pod)
	return ok && pod.Spec.NodeName != "" && total(pod, func(name corev1.ResourceName) bool { return b.limits.Has(string(name)) }) > 0
}

// Reconcile implements reconcile.Reconciler for one pod that is not Pending any more. A pod counts once, as it leaves once.
func (b *breaker) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	pod := &corev1.Pod{}
	if err := b.live.Get(ctx, request.NamespacedName, pod); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	for _, resource := range TurnedAway(pod, b.limits) {
		if !b.count(offer{pod.Spec.NodeName, resource}) {
			continue
		}
		b.metrics.openings.Inc()
		klog.FromContext(ctx).Info("A node turns away pods that the scheduler sends, offering it nothing for now",
			"node", pod.Spec.NodeName, "resource", resource, "pod", klog.KObj(pod), "reason", pod.Status.Message)
		node := &v1alpha1.GPUNode{}
		node.Name = pod.Spec.NodeName
		select {
		case b.opened <- event.GenericEvent{Object: node}:
		case <-ctx.Done():
			return reconcile.Result{}, context.Cause(ctx)
		}
	}
	return reconcile.Result{}, nil
}

// count reports whether one more pod opens the breaker.
func (b *breaker) count(of offer) (opened bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	maps.DeleteFunc(b.nodes, func(_ offer, n *turnedAway) bool {
		n.at = slices.DeleteFunc(n.at, func(at time.Time) bool { return now.Sub(at) >= breakerWindow })
		return len(n.at) == 0 && !n.open
	})
	n := b.nodes[of]
	if n == nil {
		n = &turnedAway{}
		b.nodes[of] = n
	}
	n.at = append(n.at, now)
	if n.open || len(n.at) < breakerPods {
		return false
	}
	*n = turnedAway{open: true}
	return true
}

// open reports whether nothing should be offered of a resource of a node. It closes as soon as somebody knows better: the agent, which
// says something else, or kubelet, which has put its own number back in place of the zero, as it does within ten seconds if it
// has another. A kubelet that leaves the zero alone has found out for itself.
func (b *breaker) open(of offer, status *v1alpha1.GPUNodeStatus, putBack bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := b.nodes[of]
	if n == nil || !n.open {
		return false
	}
	if n.told == nil {
		n.told = status
	}
	n.open = !putBack && apiequality.Semantic.DeepEqual(n.told, status)
	return n.open
}

// forget closes it for a node that is gone.
func (b *breaker) forget(node string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	maps.DeleteFunc(b.nodes, func(of offer, _ *turnedAway) bool { return of.node == node })
}
