// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// acquaintance is how long the watch may take to report a pod of kubelet before the pod counts as unknown.
const acquaintance = time.Second

// Movable reports whether every pod of a claim has an owner that would replace it, and none has ever started a container: such
// pods may be evicted. Pods that are being deleted do not count; a claim without another pod is not movable. It waits a moment
// for pods that kubelet received before the watch, at most until ctx is done.
func (p *Pods) Movable(ctx context.Context, claim ledger.ClaimRequest) bool {
	ctx, cancel := context.WithTimeout(ctx, acquaintance)
	defer cancel()
	for {
		changed := p.Changed()
		movable, unknown := p.movable(claim)
		if !unknown {
			return movable
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

func (p *Pods) movable(claim ledger.ClaimRequest) (movable, unknown bool) {
	uids := p.podsOf(holdOf(claim))
	p.mu.Lock()
	defer p.mu.Unlock()
	for uid := range uids {
		pod, known := p.pods[uid]
		switch {
		case !known:
			unknown = true
		case pod.deleted, isTerminal(pod.Pod), pod.DeletionTimestamp != nil:
		case wasMade(pod.Pod) && len(pod.Status.ContainerStatuses) == 0:
			movable = true
		default:
			return false, false
		}
	}
	return movable, unknown
}

// unseen is how long after a conflict an unknown pod may still be reported. Deleted pods are kept longer.
const unseen = time.Minute

// Ended reports whether no pod is left that could use the claim of a conflict.
func (p *Pods) Ended(lost ledger.Conflict) bool {
	claim := ledger.ClaimRequest{UID: lost.UID, Namespace: lost.Namespace, Name: lost.Name, Pods: lost.Pods}
	uids := p.podsOf(holdOf(claim))
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.synced.IsZero() {
		return false
	}
	for uid := range uids {
		pod, known := p.pods[uid]
		if known && !pod.deleted && !isTerminal(pod.Pod) || !known && time.Since(lost.Since) < unseen {
			return false
		}
	}
	return true
}

func holdOf(claim ledger.ClaimRequest) ledger.Hold {
	return ledger.Hold{
		Holder:    ledger.Holder{Kind: ledger.KindClaim, ID: claim.UID},
		Namespace: claim.Namespace, Name: claim.Name, Pods: claim.Pods,
	}
}

// wasMade reports whether a controller would replace the pod. kubelet would replace a static pod with the same one.
func wasMade(pod *corev1.Pod) bool {
	_, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	return !mirror && metav1.GetControllerOfNoCopy(pod) != nil
}

// controllerOf returns the owner that would replace the pod.
func controllerOf(pod *corev1.Pod) []metav1.OwnerReference {
	i := slices.IndexFunc(pod.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Controller != nil && *o.Controller })
	if i < 0 {
		return nil
	}
	controller := true
	return []metav1.OwnerReference{{UID: types.UID("controller"), Controller: &controller}}
}
