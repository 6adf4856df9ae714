// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// TurnedAway are our resources for want of which kubelet has not admitted a pod, sorted; none where that had another reason.
// Such a pod has failed for good, and its owner makes the next within milliseconds. Kubelet's device manager names the resource
// of which it has no healthy device, or too few, or no plugin, in a message of UnexpectedAdmissionError, and its own accounting
// in the reason. A plugin that refuses, which ours does to who comes late in a race, is an "rpc error" there, and other
// resources have other names. It is a pure function.
func TurnedAway(pod *corev1.Pod, limits device.Resources) []corev1.ResourceName {
	if pod.Status.Phase != corev1.PodFailed {
		return nil
	}
	words := strings.FieldsFunc(pod.Status.Message, func(r rune) bool { return unicode.IsSpace(r) || r == ',' })
	return asks(pod, func(name corev1.ResourceName) bool {
		named := slices.ContainsFunc(words, func(word string) bool { return strings.TrimRight(word, ".") == string(name) })
		return limits.Has(string(name)) && (pod.Status.Reason == "OutOf"+string(name) ||
			pod.Status.Reason == "UnexpectedAdmissionError" && named && !strings.Contains(pod.Status.Message, "rpc error"))
	})
}

// breaker stops the scheduler from sending pods to a node that turns one after the other away, as one does whose agent was
// killed and on which a pod ends: nobody has said that its GPU is not to be had, and an owner makes ten pods a second for it, or
// more. Pods of a StatefulSet come again by the same name and are not always seen; it makes one at a time.
type breaker struct {
	client client.Reader
	// live reads pods from the API server: those that are not Pending are not watched.
	live    client.Reader
	limits  device.Resources
	metrics *metrics
	now     func() time.Time
	// opened tells of nodes whose allocatable numbers should be looked at.
	opened chan event.GenericEvent

	mu     sync.Mutex
	offers map[offer]*turnedAway
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
	// told is what the agent said when it opened.
	told v1alpha1.GPUNodeStatus
	// zero is set once the node's number has been zero since.
	zero bool
}

const (
	// So many pods turned away in so short a time open the breaker.
	breakerPods   = 3
	breakerWindow = 3 * time.Second
	// staleAfter is for pods of which a controller hears late, as after it could not watch for a while.
	staleAfter = time.Minute
)

func newBreaker(cached, live client.Reader, limits device.Resources, measured *metrics, now func() time.Time) *breaker {
	return &breaker{
		client: cached, live: live, limits: limits, metrics: measured, now: now,
		opened: make(chan event.GenericEvent), offers: map[offer]*turnedAway{},
	}
}

func (b *breaker) register(m manager.Manager) error {
	err := builder.ControllerManagedBy(m).Named("breaker").
		Watches(&corev1.Pod{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(leftPending(b.of))).
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

// of reports whether a pod was bound with limits of ours.
func (b *breaker) of(o client.Object) bool {
	pod, ok := o.(*corev1.Pod)
	return ok && pod.Spec.NodeName != "" && len(asks(pod, func(name corev1.ResourceName) bool { return b.limits.Has(string(name)) })) > 0
}

// Reconcile implements reconcile.Reconciler for one pod that is not Pending any more. A pod counts once, as it leaves once.
func (b *breaker) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	pod := &corev1.Pod{}
	if err := b.live.Get(ctx, request.NamespacedName, pod); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	wanted := TurnedAway(pod, b.limits)
	if len(wanted) == 0 || pod.Status.StartTime != nil && b.now().Sub(pod.Status.StartTime.Time) > staleAfter {
		return reconcile.Result{}, nil
	}
	node := &v1alpha1.GPUNode{}
	if err := b.client.Get(ctx, types.NamespacedName{Name: pod.Spec.NodeName}, node); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	for _, resource := range wanted {
		// What another device plugin serves is not ours to take back.
		if !served(node.Status, resource) || !b.count(offer{node.Name, resource}, node.Status) {
			continue
		}
		b.metrics.openings.Inc()
		klog.FromContext(ctx).Info("A node turns away pods that the scheduler sends, offering it nothing for now",
			"node", node.Name, "resource", resource, "pod", klog.KObj(pod), "message", pod.Status.Message)
		select {
		case b.opened <- event.GenericEvent{Object: node}:
		case <-ctx.Done():
			return reconcile.Result{}, context.Cause(ctx)
		}
	}
	return reconcile.Result{}, nil
}

// count reports whether one more pod opens the breaker.
func (b *breaker) count(of offer, told v1alpha1.GPUNodeStatus) (opened bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	maps.DeleteFunc(b.offers, func(_ offer, n *turnedAway) bool {
		n.at = slices.DeleteFunc(n.at, func(at time.Time) bool { return now.Sub(at) >= breakerWindow })
		return len(n.at) == 0 && !n.open
	})
	n := b.offers[of]
	if n == nil {
		n = &turnedAway{}
		b.offers[of] = n
	}
	if n.open {
		return false
	}
	if n.at = append(n.at, now); len(n.at) < breakerPods {
		return false
	}
	*n = turnedAway{open: true, told: told}
	return true
}

// closes hears what is known of a node, in the order in which it comes to be, and closes what somebody knows better: the agent,
// which says something else, or kubelet, which has put its own number back in place of the zero, as it does within ten seconds if
// it has another. A kubelet that leaves the zero alone has found out for itself.
func (b *breaker) closes(node *corev1.Node, status v1alpha1.GPUNodeStatus) {
	b.mu.Lock()
	defer b.mu.Unlock()
	maps.DeleteFunc(b.offers, func(of offer, n *turnedAway) bool {
		if of.node != node.Name || !n.open {
			return false
		}
		current := node.Status.Allocatable[of.resource]
		putBack := n.zero && !current.IsZero()
		n.zero = current.IsZero()
		return putBack || !apiequality.Semantic.DeepEqual(n.told, status)
	})
}

// open reports whether nothing should be offered of a resource of a node.
func (b *breaker) open(of offer) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := b.offers[of]
	return n != nil && n.open
}

// close is for an offer that is left alone: what has opened for it does not wait until it is not.
func (b *breaker) close(of offer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.offers, of)
}

// forget closes all of a node that is gone.
func (b *breaker) forget(node string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	maps.DeleteFunc(b.offers, func(of offer, _ *turnedAway) bool { return of.node == node })
}
