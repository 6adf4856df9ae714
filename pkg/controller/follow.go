// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// follower measures how long healing takes: until a pod runs that the owner of an evicted one has made afterwards. What it
// remembers ends with the process, and with patience: a pod may wait for a free GPU for hours.
type follower struct {
	live    client.Reader
	metrics *metrics
	now     func() time.Time

	mu     sync.Mutex
	awaits map[types.UID][]awaited // by owner, oldest first
}

// awaited is a pod that is to come.
type awaited struct {
	evicted types.UID
	// since is when the conflict was final, at when the pod was evicted.
	since, at time.Time
}

// followFor is longer than any healing that is worth a number.
const followFor = 5 * time.Minute

// expect remembers that the owner of a pod that is evicted now will make another; forget takes that back.
func (f *follower) expect(owner, evicted types.UID, since, now time.Time) (forget func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.awaits == nil {
		f.awaits = map[types.UID][]awaited{}
	}
	for owner, list := range f.awaits {
		f.keep(owner, slices.DeleteFunc(list, func(a awaited) bool { return now.Sub(a.at) > followFor }))
	}
	// An eviction that is repeated, because the pod takes its time, is one and the same.
	if !slices.ContainsFunc(f.awaits[owner], func(a awaited) bool { return a.evicted == evicted }) {
		f.awaits[owner] = append(f.awaits[owner], awaited{evicted, since, now})
	}
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.keep(owner, slices.DeleteFunc(f.awaits[owner], func(a awaited) bool { return a.evicted == evicted }))
	}
}

func (f *follower) keep(owner types.UID, list []awaited) {
	if len(list) == 0 {
		delete(f.awaits, owner)
		return
	}
	f.awaits[owner] = list
}

// of reports whether a pod is one that is awaited.
func (f *follower) of(pod client.Object) bool {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.find(owner.UID, pod) >= 0
}

// find is the place of the oldest that the pod may stand for, or -1. Times of creation are whole seconds.
func (f *follower) find(owner types.UID, pod client.Object) int {
	list := f.awaits[owner]
	if slices.ContainsFunc(list, func(a awaited) bool { return a.evicted == pod.GetUID() }) {
		return -1
	}
	return slices.IndexFunc(list, func(a awaited) bool { return !pod.GetCreationTimestamp().Time.Before(a.at.Truncate(time.Second)) })
}

func (f *follower) register(m manager.Manager) error {
	err := builder.ControllerManagedBy(m).Named("follow").
		Watches(&corev1.Pod{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(leftPending(f.of))).
		WithOptions(options(1)).
		Complete(f)
	if err != nil {
		return fmt.Errorf("register follow: %w", err)
	}
	return nil
}

// Reconcile implements reconcile.Reconciler for one pod that is not Pending any more.
func (f *follower) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	pod := &corev1.Pod{}
	if err := f.live.Get(ctx, request.NamespacedName, pod); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	owner := metav1.GetControllerOf(pod)
	if owner == nil || pod.Status.Phase == corev1.PodPending {
		return reconcile.Result{}, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	at := f.find(owner.UID, pod)
	if at < 0 {
		return reconcile.Result{}, nil
	}
	f.metrics.heal.Observe(f.now().Sub(f.awaits[owner.UID][at].since).Seconds())
	f.keep(owner.UID, slices.Delete(f.awaits[owner.UID], at, at+1))
	return reconcile.Result{}, nil
}
