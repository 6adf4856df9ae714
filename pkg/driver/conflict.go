// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Pods are the pods of the node. *podstate.Pods implements it.
type Pods interface {
	// Movable reports whether the controller may evict the pods of a claim. It may take a second.
	Movable(ctx context.Context, claim ledger.ClaimRequest) bool
	// WaitForPods waits until the pod watch has reported the pods that were bound before the claim's own, or ctx is done.
	WaitForPods(ctx context.Context, claim ledger.ClaimRequest)
}

// Reasons of events on claims.
const (
	reasonDeviceHeld         = "DeviceHeld"
	reasonPendingEviction    = "ClaimPendingEviction"
	reasonDeviceUnhealthy    = "DeviceUnhealthy"
	reasonUnknownDevice      = "UnknownDevice"
	reasonInvalidParameters  = "InvalidParameters"
	reasonUnmanagedPartition = "UnmanagedPartition"
	reasonPartitionNotMade   = "PartitionNotMade"
	reasonNotShared          = "SharingNotApplied"
	reasonDaemonNotReady     = "DaemonNotReady"
)

// Outcomes of a conflict, for the metric: the controller evicts the claim's pods; the claim is prepared once the device is free; the
// holder was draining, but did not end in time.
const outcomePendingEviction, outcomeWaiting, outcomeDeadline = "pending_eviction", "waiting", "deadline"

// refusal is an error that becomes an event on the claim.
type refusal struct{ reason, message string }

func (r *refusal) Error() string { return r.message }

func refuse(reason, format string, args ...any) error {
	return &refusal{reason: reason, message: fmt.Sprintf(format, args...)}
}

func refuseParameters(request string, err error) error {
	return refuse(reasonInvalidParameters, "request %s: %v: retrying does not help, correct the claim or its class and create the claim again", request, err)
}

// explain returns the refusal for an error of ReserveClaim. kubelet copies it into an event on the pod, so it must not name
// objects of other namespaces; the log does.
func (d *Driver) explain(ctx context.Context, p *preparation, err error) error {
	if pendingEviction, ok := errors.AsType[*ledger.PendingEvictionError](err); ok {
		return refuse(reasonPendingEviction, "Tandem's controller is evicting the pod, so that its owner's next pod is placed elsewhere: %s", pendingEviction.Conflict.Message)
	}
	conflict, ok := errors.AsType[*ledger.ConflictError](err)
	switch {
	case !ok:
		return fmt.Errorf("reserve devices: %w", err)
	case errors.Is(ctx.Err(), context.Canceled):
		// kubelet or the agent stopped during the wait for a draining holder: that is no conflict yet, and kubelet retries.
		return fmt.Errorf("%s: the wait for it to end was interrupted: %w", describeConflict(conflict, p), context.Cause(ctx))
	}
	klog.FromContext(ctx).Info("Refusing a claim whose device has another holder", "claim", klog.KObj(p.claim), "claimUID", p.claim.UID, "conflict", conflict.Error())
	devices := slices.DeleteFunc(slices.Clone(p.request.Devices), func(ref device.Ref) bool {
		return !slices.ContainsFunc(conflict.Holds, func(h ledger.Hold) bool { return h.Device.Overlaps(ref) })
	})
	return d.recordConflict(ctx, p, string(conflict.Holds[0].Holder.Kind), reasonDeviceHeld, describeConflict(conflict, p), devices)
}

// recordConflict records a conflict on these devices, and decides whether the controller evicts the claim's pods.
func (d *Driver) recordConflict(ctx context.Context, p *preparation, kind, reason, message string, devices []device.Ref) error {
	outcome, what := outcomeWaiting, "the claim waits, and is prepared when the device is free"
	switch {
	// answerMargin is enough time to ask.
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
	d.metrics.conflicts.WithLabelValues(kind, outcome).Inc()
	klog.FromContext(ctx).Info("Recorded a conflict of a claim", "claim", klog.KObj(p.claim), "claimUID", p.claim.UID, "outcome", outcome)
	return refuse(reason, "%s: %s", message, what)
}

// describeConflict names each device and its holder, as far as the claim's namespace may know.
func describeConflict(conflict *ledger.ConflictError, p *preparation) string {
	parts := make([]string, 0, len(conflict.Holds))
	for _, h := range conflict.Holds {
		part := fmt.Sprintf("device %s is held by %s", p.nameOf(h.Device), describeHolder(h, p.claim.Namespace))
		if !slices.Contains(parts, part) {
			parts = append(parts, part)
		}
	}
	return strings.Join(parts, "; ")
}

// nameOf adds the published name to the ref, where the claim has the device or a part of it.
func (p *preparation) nameOf(ref device.Ref) string {
	if name, ok := p.names[ref]; ok {
		return fmt.Sprintf("%s (%s)", name, ref)
	}
	for _, requested := range p.request.Devices {
		if requested.Overlaps(ref) {
			return fmt.Sprintf("%s, which overlaps %s,", ref, p.names[requested])
		}
	}
	return ref.String()
}

// describeHolder names the holder only to its own namespace.
func describeHolder(h ledger.Hold, namespace string) string {
	draining := ""
	if h.State == ledger.StateDraining {
		draining = ", which is draining"
	}
	switch {
	case h.Holder.Kind == ledger.KindClaim && h.Namespace == "":
		return "a claim" + draining
	case h.Holder.Kind == ledger.KindClaim && h.Namespace != namespace:
		return "a claim in another namespace" + draining
	case h.Holder.Kind == ledger.KindClaim:
		return fmt.Sprintf("claim %s/%s%s", h.Namespace, h.Name, draining)
	case len(h.Pods) == 0 || h.Pods[0].Namespace == "":
		return "a pod by its resource limits" + draining
	case h.Pods[0].Namespace != namespace:
		return "a pod in another namespace by its resource limits" + draining
	default:
		return fmt.Sprintf("pod %s/%s by its %s limit%s", h.Pods[0].Namespace, h.Pods[0].Name, h.Resource, draining)
	}
}
