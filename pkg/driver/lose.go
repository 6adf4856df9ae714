// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Pods knows the pods of the node. *evidence.Pods implements it.
type Pods interface {
	// Movable reports whether the pods of a claim may be evicted for its sake. It may take a second.
	Movable(ctx context.Context, claim ledger.ClaimRequest) bool
	// WaitForPods waits, at most until ctx is done, until those pods are known that were bound before the claim's own.
	WaitForPods(ctx context.Context, claim ledger.ClaimRequest)
}

// Outcomes of a conflict, for the metric.
const (
	// outcomePendingEviction claims have pods that may be moved.
	outcomePendingEviction = "pending_eviction"
	// outcomeWaiting claims have one that may not: it is prepared when the device is free.
	outcomeWaiting = "waiting"
	// outcomeDeadline is waiting for a holder that was about to go and has not gone in time.
	outcomeDeadline = "deadline"
)

// explain turns what the ledger says into something the claim's owner may read. kubelet copies it into an event on the
// pod, so it must not name what lives in other namespaces; the log does.
func (d *Driver) explain(ctx context.Context, p *preparation, err error) error {
	if pendingEviction, ok := errors.AsType[*ledger.PendingEvictionError](err); ok {
		return refuse(reasonPendingEviction, "Tandem's controller is evicting the pod, so that its owner's next pod is placed elsewhere: %s", pendingEviction.Conflict.Message)
	}
	conflict, ok := errors.AsType[*ledger.ConflictError](err)
	switch {
	case !ok:
		return fmt.Errorf("reserve devices: %w", err)
	case errors.Is(ctx.Err(), context.Canceled):
		// Kubelet or we stopped while the claim waited for a holder on its way out: it has lost nothing, and kubelet asks again.
		return fmt.Errorf("%s: waiting for that to end was interrupted: %w", describeConflict(conflict, p), context.Cause(ctx))
	}
	klog.FromContext(ctx).Info("Refusing a claim whose device is in other hands", "claim", klog.KObj(p.claim), "claimUID", p.claim.UID, "conflict", conflict.Error())
	return d.recordConflict(ctx, p, string(conflict.Holds[0].Holder.Kind), reasonDeviceHeld, describeConflict(conflict, p), inOtherHands(p.request.Devices, conflict))
}

// recordConflict records that a claim was refused, and decides what becomes of it: somebody who would make another pod need not wait for
// these devices.
func (d *Driver) recordConflict(ctx context.Context, p *preparation, to, reason, message string, devices []device.Ref) error {
	outcome, what := outcomeWaiting, "the claim waits, and is prepared when the device is free"
	switch {
	// What is left until kubelet gives up is enough to ask.
	case d.Pods.Movable(context.WithoutCancel(ctx), p.request):
		outcome, what = outcomePendingEviction, "the pod is evicted, so that its owner's next pod is placed elsewhere"
	case ctx.Err() != nil:
		outcome = outcomeDeadline
	}
	var names []string
	for _, ref := range devices {
		names = append(names, p.names[ref])
	}
	d.Ledger.RecordConflict(ledger.Conflict{
		UID: p.request.UID, Namespace: p.request.Namespace, Name: p.request.Name, Pods: p.request.Pods,
		Devices: devices, Names: names, PendingEviction: outcome == outcomePendingEviction, Message: message,
	})
	d.metrics.conflicts.WithLabelValues(to, outcome).Inc()
	klog.FromContext(ctx).Info("A claim has lost its device", "claim", klog.KObj(p.claim), "claimUID", p.claim.UID, "outcome", outcome)
	return refuse(reason, "%s: %s", message, what)
}

func inOtherHands(devices []device.Ref, conflict *ledger.ConflictError) []device.Ref {
	return slices.DeleteFunc(slices.Clone(devices), func(ref device.Ref) bool {
		return !slices.ContainsFunc(conflict.Holds, func(h ledger.Hold) bool { return h.Device.Overlaps(ref) })
	})
}
