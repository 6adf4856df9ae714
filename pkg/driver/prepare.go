// SPDX-License-Identifier: Apache-2.0

// Prepare and Unprepare, from top to bottom.

package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/partition"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

const (
	// kubeletTimeout is kubelet's deadline for NodePrepareResources (pkg/kubelet/cm/dra/plugin).
	kubeletTimeout = 45 * time.Second
	// answerMargin is the part of the deadline that remains for the answer: kubelet must get the reason, not a timeout.
	answerMargin = 3 * time.Second
	// podsFirstBudget is how long a call waits for pods.
	podsFirstBudget = 2 * time.Second
)

// PrepareResourceClaims answers one NodePrepareResources call: all claims of one pod. It prepares all of them or none, because the
// pod cannot start with less, and holds of a part would block other holders. The helper calls it (kubeletplugin.DRAPlugin), and so
// do simulations. Idempotent; safe for concurrent use. The error is nil.
//
// Undo: planning has no effect. cancel cancels the reservations. Partitions and sharing settings are recorded before they
// exist; the reconciler destroys and reverts them after their hold has ended (pkg/reconcile/partitions.go).
func (d *Driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	ctx, cancel := callContext(ctx)
	defer cancel()
	inv := d.Inventory.Inventory()
	podsFirst := &ledger.PodsFirst{Slots: d.podSlots(inv), WaitBudget: podsFirstBudget}
	preparations, ok := d.planAll(ctx, claims, inv, podsFirst)
	d.recordUnusable(ctx, preparations, time.Now())
	if ok && len(podsFirst.Slots) > 0 {
		d.waitForPods(ctx, preparations)
	}
	ok = ok && each(ctx, preparations, d.reserve) && each(ctx, preparations, d.handOver) && d.createPartitions(ctx, preparations) &&
		d.applySharing(ctx, preparations) && d.ensureSpecs(ctx, preparations)
	for _, p := range preparations {
		if !ok && !p.keepOnError {
			d.cancel(ctx, p)
		}
	}
	if waited := podsFirstBudget - podsFirst.WaitBudget; waited > 0 {
		d.metrics.podsFirst.Observe(waited.Seconds())
	}
	return d.results(preparations, ok), nil
}

// each runs a step for each claim, until it fails for one.
func each(ctx context.Context, preparations []*preparation, step func(context.Context, *preparation) error) bool {
	for _, p := range preparations {
		if p.err = step(ctx, p); p.err != nil {
			return false
		}
	}
	return true
}

// callContext ends early enough for the answer to reach kubelet.
func callContext(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithTimeout(ctx, kubeletTimeout-answerMargin)
	}
	margin := min(answerMargin, time.Until(deadline)/2)
	return context.WithDeadline(ctx, deadline.Add(-margin))
}

// Step 1: look up the allocated devices and plan the answer (plan.go).
func (d *Driver) planAll(
	ctx context.Context, claims []*resourceapi.ResourceClaim, inv device.Inventory, podsFirst *ledger.PodsFirst,
) (preparations []*preparation, ok bool) {
	ok = true
	for _, claim := range claims {
		p := d.plan(ctx, claim, inv, podsFirst)
		preparations = append(preparations, p)
		ok = ok && p.err == nil
	}
	return preparations, ok
}

// Step 2: wait until the pod watch has reported the pods that come first: kubelet may see them earlier.
func (d *Driver) waitForPods(ctx context.Context, preparations []*preparation) {
	ctx, cancel := context.WithTimeout(ctx, podsFirstBudget)
	defer cancel()
	for _, p := range preparations {
		if len(p.request.Devices) > 0 {
			d.Pods.WaitForPods(ctx, p.request)
		}
	}
}

// Step 3: reserve the devices in the ledger.
func (d *Driver) reserve(ctx context.Context, p *preparation) (err error) {
	if len(p.request.Devices) == 0 {
		return nil
	}
	if p.reservation, err = d.Ledger.ReserveClaim(ctx, p.request); err != nil {
		return d.explain(ctx, p, err)
	}
	return nil
}

// cancel cancels the reservation of this call. Holds from earlier calls stay, and so do those that a concurrent call for another pod of
// the claim has answered with.
func (d *Driver) cancel(ctx context.Context, p *preparation) {
	if err := d.Ledger.CancelReservation(p.reservation); err != nil {
		// kubelet retries or unprepares; both settle the hold.
		klog.FromContext(ctx).Error(err, "Cannot cancel the reservation of a claim that was not prepared", "claim", klog.KObj(p.claim), "claimUID", p.claim.UID)
	}
}

// Step 4: hand the GPUs over from their earlier holders, all at the same time.
func (d *Driver) handOver(ctx context.Context, p *preparation) error {
	var all sync.WaitGroup
	errs := make([]error, len(p.request.Devices))
	for i, ref := range p.request.Devices {
		if slices.ContainsFunc(p.request.Devices[:i], func(before device.Ref) bool { return before.GPU == ref.GPU }) {
			continue
		}
		one := func() {
			if err := d.HandOver(ctx, ref.GPU); err != nil {
				errs[i] = refuse(reasonNotClean, "device %s is not clean, retrying: %v", p.names[ref], err)
			}
		}
		if len(errs) == 1 {
			one() // without the cost of a goroutine
		} else {
			all.Go(one)
		}
	}
	all.Wait()
	return cmp.Or(errs...)
}

// Step 5: create the partitions of all claims, and make dynamic GPUs whole, on all GPUs at the same time. Only the GPU is locked meanwhile. One
// GPU after the other may take longer than kubelet waits, and its next attempt begins anew: the partitions of this one are destroyed.
func (d *Driver) createPartitions(ctx context.Context, preparations []*preparation) bool {
	byGPU := map[string][]func() error{}
	var gpus []string // in the order of the claims, so that a simulation is the same each time
	for _, p := range preparations {
		for i := range p.onDemand {
			o := &p.onDemand[i]
			gpu := o.device.GPU.UUID
			if byGPU[gpu] == nil {
				gpus = append(gpus, gpu)
			}
			byGPU[gpu] = append(byGPU[gpu], func() error { o.err = d.createPartition(ctx, p, o); return o.err })
		}
	}
	var all sync.WaitGroup
	for _, gpu := range gpus {
		one := func() {
			for _, create := range byGPU[gpu] {
				if create() != nil {
					return // before the others of this GPU in showPartitions, too
				}
			}
		}
		if len(byGPU) == 1 {
			one() // without the cost of a goroutine
		} else {
			all.Go(one)
		}
	}
	all.Wait()
	return each(ctx, preparations, d.showPartitions)
}

// createPartition makes o.device exist.
func (d *Driver) createPartition(ctx context.Context, p *preparation, o *onDemand) error {
	reserved := func() error { return d.reserved(p) }
	if o.device.Whole() {
		return d.Partitions.EnsureWhole(ctx, o.device.GPU.UUID, reserved)
	}
	created, err := d.Partitions.Create(ctx, partition.Request{Partition: o.device.Partition, Reserved: reserved, Publish: d.Specs.Add})
	if err == nil {
		o.device.Partition = created
	}
	return err
}

// showPartitions has the answer contain what was created for a claim, or returns the first error.
func (d *Driver) showPartitions(ctx context.Context, p *preparation) error {
	for _, o := range p.onDemand {
		if unmanaged, ok := errors.AsType[*partition.UnmanagedError](o.err); ok {
			// A claim in conflict holds nothing.
			d.cancel(ctx, p)
			conflict := ledger.Conflict{Message: unmanaged.Error(), Devices: []device.Ref{o.device.Ref()}}
			return d.recordConflict(ctx, p, kindPartition, reasonUnmanagedPartition, adviceWait, conflict)
		}
		if o.err != nil {
			return refuse(reasonPartitionNotMade, "device %s cannot be created, retrying: %v", p.answer[o.entry].DeviceName, o.err)
		}
		d.show(p, o.entry, o.device)
		if o.device.Whole() {
			continue
		}
		for _, g := range p.groups {
			for i := range g.devices {
				if g.devices[i].Ref() == o.device.Ref() {
					g.devices[i].Partition = o.device.Partition
				}
			}
		}
	}
	return nil
}

// errUnprepared means that kubelet unprepared the claim during this call.
var errUnprepared = errors.New("its claim was unprepared meanwhile")

// reserved returns an error if kubelet has unprepared the claim since its devices were reserved.
func (d *Driver) reserved(p *preparation) error {
	if !d.Ledger.Valid(p.reservation) {
		return errUnprepared
	}
	return nil
}

// Step 6: apply the sharing settings of all claims, in parallel. No lock is held while a daemon starts.
func (d *Driver) applySharing(ctx context.Context, preparations []*preparation) bool {
	var all sync.WaitGroup
	for _, p := range preparations {
		d.addImplicitGroups(p)
		for _, g := range p.groups {
			all.Go(func() {
				if g.share {
					g.clientDevices, g.err = d.joinPolicy(ctx, p, g)
					return
				}
				// What the claim's parameters request.
				group := sharing.Group{Claim: p.sharingClaim(), Devices: g.devices, Sharing: g.sharing}
				g.clientDevices, g.err = d.Sharing.Apply(ctx, group, func() error { return d.reserved(p) })
			})
		}
	}
	all.Wait()
	ok := true
	for _, p := range preparations {
		// Report errors of all groups: each may set keepOnError.
		for _, g := range p.groups {
			if g.err != nil {
				err := d.explainSharing(p, g)
				p.err, ok = cmp.Or(p.err, err), false
				continue
			}
			for _, i := range g.answers {
				p.answer[i].CDIDeviceIDs = append(p.answer[i].CDIDeviceIDs, g.clientDevices...)
			}
		}
	}
	return ok
}

// joinPolicy makes a claim with a share of a GPU a client of the GPU's daemon, if the node's policy is MPS.
func (d *Driver) joinPolicy(ctx context.Context, p *preparation, g *sharedGroup) (clientDevices []string, err error) {
	ref := g.devices[0].Ref()
	clientDevices, err = d.Policy.Join(ctx, p.sharingClaim(), g.devices[0], p.request.Shares[ref])
	switch {
	case err != nil:
		return nil, err
	case d.reserved(p) != nil:
		return nil, errUnprepared
	}
	// The policy may have changed since the plan.
	if byDaemon := len(clientDevices) > 0; byDaemon != (g.sharing.Strategy == parametersv1beta1.MPSStrategy) {
		g.sharing = parametersv1beta1.Sharing{Strategy: parametersv1beta1.TimeSlicing}
		if byDaemon {
			g.sharing.Strategy = parametersv1beta1.MPSStrategy
		}
	}
	return clientDevices, nil
}

// explainSharing returns the refusal for a group's error. A claim whose own daemon is starting keeps its reservation, so that
// the next attempt finds the daemon ready.
func (d *Driver) explainSharing(p *preparation, g *sharedGroup) error {
	if late, ok := errors.AsType[*sharing.NotReadyError](g.err); ok {
		// A daemon of the policy runs without the claim.
		p.keepOnError = p.keepOnError || !g.share
		message := fmt.Sprintf("retrying: %v", g.err)
		if trouble := d.DaemonTrouble(late.Daemon); trouble != "" {
			message += ": its pod does not run: " + trouble
		}
		return refuse(reasonDaemonNotReady, "%s", message)
	}
	if !errors.Is(g.err, device.ErrUnsupported) || g.path == nil {
		return refuse(reasonNotShared, "retrying: %v", g.err)
	}
	path, value := g.path.Child("sharing", "strategy"), string(g.sharing.Strategy)
	if g.sharing.Strategy == parametersv1beta1.TimeSlicing {
		path, value = g.path.Child("sharing", "timeSlicingConfig", "interval"), string(g.sharing.Interval)
	}
	return refuseParameters(g.request, field.Invalid(path, value, g.err.Error()))
}

// Step 7: make sure that the CDI devices are on disk, and answer with their names.
func (d *Driver) ensureSpecs(ctx context.Context, preparations []*preparation) (ok bool) {
	ok = true
	for _, p := range preparations {
		if err := d.Specs.Ensure(ctx, slices.Sorted(maps.Values(p.visible))...); err != nil {
			p.err, ok = fmt.Errorf("write CDI specs: %w", err), false
			continue
		}
		for entry, uuid := range p.visible {
			ids := &p.answer[entry].CDIDeviceIDs
			*ids = slices.Insert(*ids, 0, d.Specs.QualifiedName(uuid))
		}
	}
	return ok
}

// Step 8: answer. After a failure every claim of the call gets an error, because the reservations of all were cancelled.
func (d *Driver) results(preparations []*preparation, ok bool) map[types.UID]kubeletplugin.PrepareResult {
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(preparations))
	failed := slices.IndexFunc(preparations, func(p *preparation) bool { return p.err != nil })
	for _, p := range preparations {
		switch {
		case ok:
			results[p.claim.UID] = kubeletplugin.PrepareResult{Devices: p.answer}
			d.addConditions(p)
		case p.err == nil:
			results[p.claim.UID] = kubeletplugin.PrepareResult{Err: fmt.Errorf("prepare claim %s: not prepared because claim %s of the same pod was not",
				klog.KObj(p.claim), klog.KObj(preparations[failed].claim))}
		default:
			if refused, ok := errors.AsType[*refusal](p.err); ok {
				d.Recorder.Event(p.claim, corev1.EventTypeWarning, refused.reason, refused.message)
			}
			results[p.claim.UID] = kubeletplugin.PrepareResult{Err: fmt.Errorf("prepare claim %s: %w", klog.KObj(p.claim), p.err)}
		}
	}
	return results
}

// UnprepareResourceClaims answers one NodeUnprepareResources call at once. Each hold drains: the ledger and the reconciler end it as
// soon as no container can use its device. Callers, concurrency and error are those of PrepareResourceClaims.
func (d *Driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := make(map[types.UID]error, len(claims))
	for _, claim := range claims {
		err := d.Ledger.DrainClaim(ctx, string(claim.UID))
		if err != nil {
			err = fmt.Errorf("unprepare claim %s: %w", claim.NamespacedName, err)
		}
		results[claim.UID] = err
	}
	return results, nil
}

// Reasons of events on claims.
const (
	reasonDeviceHeld         = "DeviceHeld"
	reasonPendingEviction    = "ClaimPendingEviction"
	reasonNotClean           = "DeviceNotClean"
	reasonDeviceUnhealthy    = "DeviceUnhealthy"
	reasonUnknownDevice      = "UnknownDevice"
	reasonInvalidParameters  = "InvalidParameters"
	reasonUnmanagedPartition = "UnmanagedPartition"
	reasonPartitionNotMade   = "PartitionNotMade"
	reasonNotShared          = "SharingNotApplied"
	reasonDaemonNotReady     = "DaemonNotReady"
	reasonDevicesWithheld    = "DevicesWithheld"
)

// Outcomes of a conflict, for the metric: the controller evicts the claim's pods; the claim is prepared once the device is free; the
// holder was draining, but did not end in time.
const outcomePendingEviction, outcomeWaiting, outcomeDeadline = "pending_eviction", "waiting", "deadline"

// What keeps a device from a claim, for the metric, besides the kinds of holders.
const kindPartition, kindDevice = "partition", "device"

// refusal is an error that becomes an event on the claim.
type refusal struct {
	reason, message string
	// device is the published name of an unhealthy or unknown device, ref its hardware, or the name if that is not known.
	device string
	ref    device.Ref
}

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
	if withheld, ok := errors.AsType[*ledger.WithheldError](err); ok {
		return refuse(reasonDevicesWithheld, "retrying: %v", withheld)
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
	return d.recordConflict(ctx, p, string(conflict.Holds[0].Holder.Kind), reasonDeviceHeld, adviceWait,
		ledger.Conflict{Message: describeConflict(conflict, p), Devices: devices, Generation: conflict.Generation})
}

// What users read of a claim whose pods are not evicted.
const (
	adviceWait     = "the claim waits, and is prepared when the device is free; delete the pod if its next one should be placed elsewhere"
	adviceRecreate = "the pod is not evicted: its owner may not replace it, or a container of the claim has started; " +
		"delete it and create it again, so that its claim is allocated another device (retrying until then)"
)

// recordConflict records the claim's conflict, and decides whether the controller evicts the claim's pods.
func (d *Driver) recordConflict(ctx context.Context, p *preparation, kind, reason, advice string, conflict ledger.Conflict) error {
	outcome, what := outcomeWaiting, advice
	switch {
	// answerMargin is enough time to ask.
	case d.Pods.Movable(context.WithoutCancel(ctx), p.request):
		outcome, what = outcomePendingEviction, "the pod is evicted, so that its owner's next pod is placed elsewhere"
	case ctx.Err() != nil:
		outcome = outcomeDeadline
	}
	conflict.UID, conflict.Namespace, conflict.Name, conflict.Pods = p.request.UID, p.request.Namespace, p.request.Name, p.request.Pods
	for _, ref := range conflict.Devices {
		conflict.Names = append(conflict.Names, p.names[ref])
	}
	conflict.PendingEviction = outcome == outcomePendingEviction
	d.Ledger.RecordConflict(conflict)
	d.metrics.conflicts.WithLabelValues(kind, outcome).Inc()
	klog.FromContext(ctx).Info("Recorded a conflict of a claim", "claim", klog.KObj(p.claim), "claimUID", p.claim.UID, "outcome", outcome)
	return refuse(reason, "%s: %s", conflict.Message, what)
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
