// SPDX-License-Identifier: Apache-2.0

// Conditions that a claim carries: what the scheduler waits for before it binds pods, and why a device was refused.

package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Conditions on shared devices of a claim (status.devices[].conditions).
const (
	// ConditionSharing is true once the sharing settings are applied; the reason is the strategy.
	ConditionSharing = "SharingApplied"
	// ConditionMemoryLimit is true if a memory limit is enforced. The reason names what enforces it: the claim's own MPS "Daemon", or
	// CUDA's library in each "Client". Of a limit that is not enforced it is "Advisory"; without a limit it is "None".
	ConditionMemoryLimit = "MemoryLimit"
)

// fieldManager owns the conditions that the agent writes.
const fieldManager = "tandem-agent"

// claimStatus is the conditions of a claim's devices that have to be written.
type claimStatus struct {
	uid             types.UID
	namespace, name string
	devices         []resourceapi.AllocatedDeviceStatus
}

// addConditions queues the conditions of a prepared claim, if it shares a device. They are written after kubelet was answered: no pod
// waits for them. The next Prepare queues those that are missing then.
func (d *Driver) addConditions(p *preparation) {
	s := claimStatus{uid: p.claim.UID, namespace: p.claim.Namespace, name: p.claim.Name}
	for _, g := range p.groups {
		if g.sharing.Strategy == "" || g.sharing.Strategy == sharing.Exclusive {
			continue
		}
		for _, i := range g.answers {
			answer := p.answer[i]
			status := resourceapi.AllocatedDeviceStatus{
				Driver: d.DriverName, Pool: answer.PoolName, Device: answer.DeviceName, ShareID: (*string)(answer.ShareID),
			}
			for _, member := range g.devices {
				if member.Name() == answer.DeviceName {
					status.Conditions = conditionsOf(g, member, p.request.Shares[member.Ref()])
				}
			}
			s.devices = append(s.devices, status)
		}
	}
	if len(s.devices) > 0 {
		select {
		case d.statuses <- s:
		default: // writeConditions does not run now
		}
	}
}

// conditionsOf returns the conditions of a shared device, of which the claim has a share.
func conditionsOf(g *sharedGroup, d device.Device, share device.Share) []metav1.Condition {
	applied := metav1.Condition{Type: ConditionSharing, Status: metav1.ConditionTrue, Reason: string(g.sharing.Strategy)}
	limit := metav1.Condition{Type: ConditionMemoryLimit, Status: metav1.ConditionFalse}
	switch {
	case g.sharing.Strategy == parametersv1beta1.TimeSlicing:
		applied.Message = fmt.Sprintf("processes take turns, time slice %s", cmp.Or(string(g.sharing.Interval), "of the device"))
		limit.Reason, limit.Message = "Advisory", "processes that take turns share the memory without a limit"
		if !share.Whole() {
			limit.Message = fmt.Sprintf("time-slicing does not enforce the claim's share (%s), nor the shares of other holders", share)
		}
	case g.share:
		applied.Message = "processes are clients of the GPU's MPS daemon, together with those of other holders"
		limit.Reason, limit.Message = "None", "the claim has all of the memory"
		if !share.Whole() {
			limit.Status, limit.Reason = metav1.ConditionTrue, "Client"
			limit.Message = fmt.Sprintf("CUDA limits each process to %d MiB by CUDA_MPS_PINNED_DEVICE_MEM_LIMIT in its environment: "+
				"a process without that variable has no limit", share.Bytes/device.ShareUnit)
		}
	default:
		applied.Message = "processes are clients of the claim's own MPS daemon"
		limit.Reason, limit.Message = "None", "no limit was requested"
		settings := sharing.Settings(g.devices, *g.sharing.MPS, "")
		at := slices.Index(settings.Devices, d.UUID())
		if at >= 0 && at < len(settings.PinnedMemoryMiB) && settings.PinnedMemoryMiB[at] > 0 {
			limit.Status, limit.Reason = metav1.ConditionTrue, "Daemon"
			// The daemon takes commands through the pipe directory, which is mounted into its clients.
			limit.Message = fmt.Sprintf("the claim's own MPS daemon limits each client to %d MiB, "+
				"which clients that run as root in their container can change", settings.PinnedMemoryMiB[at])
		}
	}
	return []metav1.Condition{applied, limit}
}

// writeConditions writes queued conditions until ctx is done.
func (d *Driver) writeConditions(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for {
		select {
		case <-ctx.Done():
			return group.Wait()
		case s := <-d.statuses:
			group.Go(func() error {
				d.writeClaimConditions(ctx, s)
				return nil
			})
		}
	}
}

func (d *Driver) writeClaimConditions(ctx context.Context, s claimStatus) {
	logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(s.namespace, s.name), "claimUID", s.uid)
	retry(ctx, logger, "Cannot write conditions of a claim's shared devices", func() error {
		err := d.updateStatus(ctx, s)
		switch {
		case apierrors.IsInvalid(err):
			logger.V(2).Info("Not writing conditions of a claim that has changed since it was prepared", "reason", err.Error())
			return nil
		case apierrors.IsForbidden(err):
			logger.Error(err, "Not writing conditions of a claim's shared devices")
			return nil
		}
		return err
	})
}

// getClaim returns nil for a claim that does not exist any more, or that another one has replaced.
func (d *Driver) getClaim(ctx context.Context, s claimStatus) (*resourceapi.ResourceClaim, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	claim, err := d.KubeClient.ResourceV1().ResourceClaims(s.namespace).Get(ctx, s.name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("get claim %s/%s: %w", s.namespace, s.name, err)
	case claim.UID != s.uid:
		return nil, nil
	}
	return claim, nil
}

// updateStatus reads a claim, sets the conditions, and writes it if they changed. It does nothing if the claim is gone.
//
// It does not use server-side apply, patches or JSON: those encode the allocation's opaque parameters again, and the API server
// refuses other bytes (order of fields, spaces, escapes) as a change. In protobuf, which the client uses, the bytes stay the same
// (TestClaimStatusBesideOddParameters).
func (d *Driver) updateStatus(ctx context.Context, s claimStatus) error {
	if len(s.devices) == 0 {
		return nil
	}
	claim, err := d.getClaim(ctx, s)
	if claim == nil || err != nil {
		return err
	}
	changed := false
	for _, entry := range s.devices {
		known := statusOf(claim, entry)
		if known == nil {
			claim.Status.Devices = append(claim.Status.Devices, resourceapi.AllocatedDeviceStatus{
				Driver: entry.Driver, Pool: entry.Pool, Device: entry.Device, ShareID: entry.ShareID,
			})
			known = &claim.Status.Devices[len(claim.Status.Devices)-1]
		}
		for _, condition := range entry.Conditions {
			changed = meta.SetStatusCondition(&known.Conditions, condition) || changed
		}
	}
	if !changed {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	options := metav1.UpdateOptions{FieldManager: fieldManager}
	if _, err := d.KubeClient.ResourceV1().ResourceClaims(s.namespace).UpdateStatus(ctx, claim, options); err != nil {
		return fmt.Errorf("update the conditions of claim %s/%s: %w", s.namespace, s.name, err)
	}
	return nil
}

// statusOf returns the claim's status entry for a device, or nil.
func statusOf(claim *resourceapi.ResourceClaim, d resourceapi.AllocatedDeviceStatus) *resourceapi.AllocatedDeviceStatus {
	for i, s := range claim.Status.Devices {
		if s.Driver == d.Driver && s.Pool == d.Pool && s.Device == d.Device && ptr.Equal(s.ShareID, d.ShareID) {
			return &claim.Status.Devices[i]
		}
	}
	return nil
}

// Conditions in a claim's status by which strict delays the binding of a pod until the ledger reserved its devices. The scheduler
// binds the pod once every binding condition is true, and allocates again once a failure condition is (KEP-5007).
const (
	ConditionReserved = "tandem-gpu.dev/reserved"
	// ConditionRefused means that another holder has the device.
	ConditionRefused = "tandem-gpu.dev/refused"
)

// Allocations are what the node's GPUNode tells: the claims that the scheduler allocated GPUs of this node, also for pods that are not bound
// yet, and the UUIDs of the GPUs under maintenance. The scheduler reads the taints of DeviceTaintRules itself.
type Allocations interface {
	Claims() []v1alpha1.AllocatedClaim
	Maintenance() map[string]bool
	// Synced reports whether Claims includes the allocations from before this agent's start. It stays false without a controller.
	Synced() bool
	// Changed returns a channel that is closed at the next change. It is taken before the others are called.
	Changed() <-chan struct{}
}

// withBindingConditions makes the scheduler wait for the ledger before it binds a pod with the device.
func withBindingConditions(device resourceapi.Device) resourceapi.Device {
	device.BindsToNode = ptr.To(true)
	device.BindingConditions = []string{ConditionReserved}
	device.BindingFailureConditions = []string{ConditionRefused}
	return device
}

// confirmAllocations reserves the devices of claims whose pods wait to be bound, and writes the result to the claims' status, until ctx
// is done. Each allocation has a goroutine: a claim that waits for a draining device must not delay other claims
// (TestStrictWaitsForOneAndAnswersTheOther). Reservations stay: the pods of these claims are being bound.
func (d *Driver) confirmAllocations(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	running := map[string]*confirmation{}
	for ctx.Err() == nil {
		changed := d.Allocations.Changed()
		current := map[string]v1alpha1.AllocatedClaim{}
		for _, claim := range d.Allocations.Claims() {
			// A claim may be allocated again with other devices.
			current[fmt.Sprint(claim.UID, claim.Devices)] = claim
		}
		for key, c := range running {
			if _, still := current[key]; !still {
				c.end()
				delete(running, key)
			}
		}
		for key, claim := range current {
			if c := running[key]; c != nil {
				c.repeat(claim.Allocated)
				continue
			}
			allocation, end := context.WithCancel(ctx)
			c := &confirmation{end: end, at: claim.Allocated, again: make(chan *metav1.Time, 1)}
			running[key] = c
			group.Go(func() error {
				d.confirm(ctx, allocation, claim, c.again)
				return nil
			})
		}
		select {
		case <-ctx.Done():
		case <-changed:
		}
	}
	return group.Wait()
}

// confirmation is a call of confirm that runs.
type confirmation struct {
	end context.CancelFunc
	// at is the time of the allocation; nil if the controller has not said.
	at    *metav1.Time
	again chan *metav1.Time
}

// repeat has confirm answer an allocation of the same devices at another time: the API server has dropped the conditions of the one before.
// A controller of an older version does not relay the time.
func (c *confirmation) repeat(at *metav1.Time) {
	if at == nil || at.Equal(c.at) {
		return
	}
	first := c.at == nil
	c.at = at
	if first {
		return
	}
	select {
	case <-c.again: // an older one
	default:
	}
	c.again <- at
}

// confirm reserves, answers the scheduler, and waits until the allocation ends. It then cancels the reservation, unless kubelet has
// prepared the claim. The context allocation ends when the claim is no longer allocated these devices, and with the agent's context. After
// a time from again the scheduler needs another answer; the reservation stays meanwhile.
func (d *Driver) confirm(agent, allocation context.Context, allocated v1alpha1.AllocatedClaim, again <-chan *metav1.Time) {
	logger := klog.FromContext(agent).WithValues("claim", klog.KRef(allocated.Namespace, allocated.Name), "claimUID", allocated.UID)
	u := unboundClaim{at: allocated.Allocated, status: claimStatus{uid: allocated.UID, namespace: allocated.Namespace, name: allocated.Name}}
	for allocation.Err() == nil {
		u.status.devices = nil
		retry(allocation, logger, "Cannot reserve the devices of a claim whose pod is not bound yet", func() error {
			return d.reserveUnbound(allocation, &u)
		})
		retry(allocation, logger, "Cannot write the condition of a claim whose pod is not bound yet", func() error {
			return d.updateStatus(allocation, u.status)
		})
		select {
		case u.at = <-again:
		case <-allocation.Done():
		}
	}
	if agent.Err() != nil {
		return
	}
	if err := d.Ledger.CancelReservation(u.reservation); err != nil {
		// The reconciler releases a claim that is not allocated to this node.
		logger.Error(err, "Cannot cancel the reservation of a claim that is no longer allocated")
	}
}

// unboundClaim is a claim whose pod is not bound yet.
type unboundClaim struct {
	// at is the time of the allocation that is answered; nil if it is not known.
	at *metav1.Time
	// status is the answer.
	status      claimStatus
	reserved    bool
	reservation ledger.Reservation
}

// reserveUnbound reserves the devices of a claim and sets the conditions of those for which the scheduler waits.
func (d *Driver) reserveUnbound(ctx context.Context, u *unboundClaim) error {
	claim, err := d.getClaim(ctx, u.status)
	if claim == nil || err != nil {
		return err
	}
	if a := claim.Status.Allocation; a != nil && u.at != nil && a.AllocationTimestamp != nil && !u.at.Equal(a.AllocationTimestamp) {
		return nil // GPUNode does not have this allocation yet
	}
	waiting := d.unanswered(claim)
	if len(waiting) == 0 {
		return nil
	}
	refused, err := d.reserveFor(ctx, claim, u)
	if err != nil {
		return err
	}
	condition := metav1.Condition{
		Type: ConditionReserved, Status: metav1.ConditionTrue, Reason: "Reserved", Message: "the node reserved the device for this claim",
	}
	if refused != nil {
		// The scheduler allocates again.
		d.metrics.strictRefusals.Inc()
		condition = metav1.Condition{Type: ConditionRefused, Status: metav1.ConditionTrue, Reason: refused.reason, Message: refused.message}
	}
	for i := range waiting {
		waiting[i].Conditions = []metav1.Condition{condition}
	}
	u.status.devices = waiting
	return nil
}

// reserveFor reserves the devices of a claim, unless it has them from an earlier call. refused says why the scheduler has to allocate again.
func (d *Driver) reserveFor(ctx context.Context, claim *resourceapi.ResourceClaim, u *unboundClaim) (refused *refusal, err error) {
	if u.reserved && d.Ledger.Valid(u.reservation) {
		return nil, nil
	}
	inv := d.Inventory.Inventory()
	p := d.plan(ctx, claim, inv, &ledger.PodsFirst{Slots: d.podSlots(inv), WaitBudget: podsFirstBudget})
	refused, _ = errors.AsType[*refusal](p.err)
	switch {
	case p.err != nil && refused == nil:
		return nil, p.err
	case refused != nil && refused.reason == reasonInvalidParameters:
		// Another node would refuse wrong parameters, too. Prepare reports them.
		return nil, nil
	case refused != nil || len(p.request.Devices) == 0:
		return refused, nil
	}
	reservation, err := d.Ledger.ReserveClaim(ctx, p.request)
	if conflict, lost := errors.AsType[*ledger.ConflictError](err); lost {
		return &refusal{reason: reasonDeviceHeld, message: describeConflict(conflict, p)}, nil
	}
	if withheld, ok := errors.AsType[*ledger.WithheldError](err); ok {
		return &refusal{reason: reasonDevicesWithheld, message: withheld.Error()}, nil
	}
	u.reservation, u.reserved = reservation, err == nil
	return nil, err
}

// unanswered returns the devices whose conditions the scheduler waits for.
func (d *Driver) unanswered(claim *resourceapi.ResourceClaim) (waiting []resourceapi.AllocatedDeviceStatus) {
	if claim.Status.Allocation == nil {
		return nil
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != d.DriverName || !slices.Contains(result.BindingConditions, ConditionReserved) {
			continue
		}
		entry := resourceapi.AllocatedDeviceStatus{Driver: result.Driver, Pool: result.Pool, Device: result.Device, ShareID: (*string)(result.ShareID)}
		known := statusOf(claim, entry)
		if known == nil || !meta.IsStatusConditionTrue(known.Conditions, ConditionReserved) && !meta.IsStatusConditionTrue(known.Conditions, ConditionRefused) {
			waiting = append(waiting, entry)
		}
	}
	return waiting
}
