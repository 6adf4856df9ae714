// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"slices"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Conditions in a claim's status by which strict delays the binding of a pod until the ledger reserved its devices. The scheduler
// binds the pod once every binding condition is true, and allocates again once a failure condition is (KEP-5007).
const (
	ConditionReserved = "tandem-gpu.dev/reserved"
	// ConditionRefused means that another holder has the device.
	ConditionRefused = "tandem-gpu.dev/refused"
)

// Allocations are the claims that the scheduler allocated GPUs of this node, also for pods that are not bound yet.
type Allocations interface {
	Claims() []v1alpha1.AllocatedClaim
	// Synced reports whether Claims includes the allocations from before this agent's start. It stays false without a controller.
	Synced() bool
	// Changed returns a channel that is closed at the next change. It is taken before Claims is called.
	Changed() <-chan struct{}
}

// withBindingConditions makes the scheduler wait for the ledger before it binds a pod with the device.
func withBindingConditions(device resourceapi.Device) resourceapi.Device {
	device.BindsToNode = ptr.To(true)
	device.BindingConditions = []string{ConditionReserved}
	device.BindingFailureConditions = []string{ConditionRefused}
	return device
}

// confirmations reserve the devices of claims whose pods wait to be bound, and write the result to the claims' status. Each claim has
// a goroutine: a claim that waits for a draining device must not delay other claims (TestStrictWaitsForOneAndAnswersTheOther).
type confirmations struct {
	*Driver
	running map[types.UID]confirmation
}

// confirmation is the work for one allocation. A claim may be allocated again with other devices.
type confirmation struct {
	devices []string
	cancel  context.CancelFunc
}

func newConfirmations(d *Driver) *confirmations {
	return &confirmations{Driver: d, running: map[types.UID]confirmation{}}
}

// run confirms until ctx is done. Reservations stay: the pods of these claims are being bound.
func (c *confirmations) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for ctx.Err() == nil {
		changed := c.Allocations.Changed()
		c.follow(ctx, group, c.Allocations.Claims())
		select {
		case <-ctx.Done():
		case <-changed:
		}
	}
	return group.Wait()
}

// follow starts confirmations of new allocations and ends those of allocations that ended.
func (c *confirmations) follow(ctx context.Context, group *errgroup.Group, claims []v1alpha1.AllocatedClaim) {
	allocated := make(map[types.UID]v1alpha1.AllocatedClaim, len(claims))
	for _, claim := range claims {
		allocated[claim.UID] = claim
	}
	for uid, known := range c.running {
		if claim, still := allocated[uid]; !still || !slices.Equal(known.devices, claim.Devices) {
			known.cancel()
			delete(c.running, uid)
		}
	}
	for uid, claim := range allocated {
		if _, known := c.running[uid]; known {
			continue
		}
		allocation, cancel := context.WithCancel(ctx)
		c.running[uid] = confirmation{devices: claim.Devices, cancel: cancel}
		group.Go(func() error {
			c.confirm(ctx, allocation, claim)
			return nil
		})
	}
}

// confirm reserves, answers the scheduler, and waits until the allocation ends. It then cancels the reservation, unless kubelet has
// prepared the claim. The context allocation ends when the claim is no longer allocated these devices, and with the agent's context.
func (c *confirmations) confirm(agent, allocation context.Context, allocated v1alpha1.AllocatedClaim) {
	logger := klog.FromContext(agent).WithValues("claim", klog.KRef(allocated.Namespace, allocated.Name), "claimUID", allocated.UID)
	var reservation ledger.Reservation
	var condition *metav1.Condition
	retry(allocation, logger, "Cannot reserve the devices of a claim whose pod is not bound yet", func() (err error) {
		reservation, condition, err = c.decide(allocation, allocated)
		return err
	})
	if condition != nil {
		retry(allocation, logger, "Cannot write the condition of a claim whose pod is not bound yet", func() error {
			return c.answer(allocation, allocated, *condition)
		})
	}
	<-allocation.Done()
	if agent.Err() != nil {
		return
	}
	if err := c.Ledger.CancelReservation(reservation); err != nil {
		// The reconciler releases a claim that is not allocated to this node.
		logger.Error(err, "Cannot cancel the reservation of a claim that is no longer allocated")
	}
}

// decide reserves the devices of a claim and returns the condition to write; nil if the scheduler does not wait for one.
func (c *confirmations) decide(ctx context.Context, allocated v1alpha1.AllocatedClaim) (ledger.Reservation, *metav1.Condition, error) {
	claim, err := c.waiting(ctx, allocated)
	if claim == nil || err != nil {
		return ledger.Reservation{}, nil, err
	}
	granted := &metav1.Condition{
		Type: ConditionReserved, Status: metav1.ConditionTrue, Reason: "Reserved", Message: "the node reserved the device for this claim",
	}
	inv := c.Inventory.Inventory()
	p := c.plan(ctx, claim, inv)
	p.request.PodsFirst = &ledger.PodsFirst{Slots: c.podSlots(inv), WaitBudget: podsFirstBudget}
	refused, _ := errors.AsType[*refusal](p.err)
	switch {
	case p.err != nil && refused == nil:
		return ledger.Reservation{}, nil, p.err
	case refused != nil && refused.reason != reasonInvalidParameters:
		return ledger.Reservation{}, c.refusal(refused.reason, refused.message), nil
	case p.err != nil, len(p.request.Devices) == 0:
		// Another node would refuse wrong parameters, too. Prepare reports them.
		return ledger.Reservation{}, granted, nil
	}
	reservation, err := c.Ledger.ReserveClaim(ctx, p.request)
	if conflict, lost := errors.AsType[*ledger.ConflictError](err); lost {
		return reservation, c.refusal(reasonDeviceHeld, describeConflict(conflict, p)), nil
	}
	return reservation, granted, err
}

// refusal returns the condition that makes the scheduler allocate again.
func (c *confirmations) refusal(reason, message string) *metav1.Condition {
	c.metrics.strictRefusals.Inc()
	return &metav1.Condition{Type: ConditionRefused, Status: metav1.ConditionTrue, Reason: reason, Message: message}
}

// waiting returns the claim if the scheduler waits for its conditions, otherwise nil.
func (c *confirmations) waiting(ctx context.Context, allocated v1alpha1.AllocatedClaim) (*resourceapi.ResourceClaim, error) {
	claim, err := c.getClaim(ctx, nameOfClaim(allocated), allocated.UID)
	if claim == nil || err != nil || len(c.unanswered(claim)) == 0 {
		return nil, err
	}
	return claim, nil
}

// answer writes the condition for every device of the claim that has none.
func (c *confirmations) answer(ctx context.Context, allocated v1alpha1.AllocatedClaim, condition metav1.Condition) error {
	return c.updateStatus(ctx, nameOfClaim(allocated), allocated.UID, func(claim *resourceapi.ResourceClaim) (changed bool) {
		for _, d := range c.unanswered(claim) {
			changed = setCondition(claim, d, condition) || changed
		}
		return changed
	})
}

func nameOfClaim(c v1alpha1.AllocatedClaim) types.NamespacedName {
	return types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
}

// unanswered returns the devices whose conditions the scheduler waits for.
func (c *confirmations) unanswered(claim *resourceapi.ResourceClaim) (waiting []resourceapi.AllocatedDeviceStatus) {
	if claim.Status.Allocation == nil {
		return nil
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != c.DriverName || !slices.Contains(result.BindingConditions, ConditionReserved) {
			continue
		}
		d := resourceapi.AllocatedDeviceStatus{Driver: result.Driver, Pool: result.Pool, Device: result.Device, ShareID: (*string)(result.ShareID)}
		known := statusOf(claim, d)
		if known == nil || !meta.IsStatusConditionTrue(known.Conditions, ConditionReserved) && !meta.IsStatusConditionTrue(known.Conditions, ConditionRefused) {
			waiting = append(waiting, d)
		}
	}
	return waiting
}
