// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

// confirmAllocations reserves the devices of claims whose pods wait to be bound, and writes the result to the claims' status, until ctx
// is done. Each allocation has a goroutine: a claim that waits for a draining device must not delay other claims
// (TestStrictWaitsForOneAndAnswersTheOther). Reservations stay: the pods of these claims are being bound.
func (d *Driver) confirmAllocations(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	running := map[string]context.CancelFunc{}
	for ctx.Err() == nil {
		changed := d.Allocations.Changed()
		current := map[string]v1alpha1.AllocatedClaim{}
		for _, claim := range d.Allocations.Claims() {
			// A claim may be allocated again with other devices.
			current[fmt.Sprint(claim.UID, claim.Devices)] = claim
		}
		for key, end := range running {
			if _, still := current[key]; !still {
				end()
				delete(running, key)
			}
		}
		for key, claim := range current {
			if running[key] != nil {
				continue
			}
			allocation, end := context.WithCancel(ctx)
			running[key] = end
			group.Go(func() error {
				d.confirm(ctx, allocation, claim)
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

// confirm reserves, answers the scheduler, and waits until the allocation ends. It then cancels the reservation, unless kubelet has
// prepared the claim. The context allocation ends when the claim is no longer allocated these devices, and with the agent's context.
func (d *Driver) confirm(agent, allocation context.Context, allocated v1alpha1.AllocatedClaim) {
	logger := klog.FromContext(agent).WithValues("claim", klog.KRef(allocated.Namespace, allocated.Name), "claimUID", allocated.UID)
	var reservation ledger.Reservation
	answer := claimStatus{uid: allocated.UID, namespace: allocated.Namespace, name: allocated.Name}
	retry(allocation, logger, "Cannot reserve the devices of a claim whose pod is not bound yet", func() (err error) {
		reservation, err = d.reserveUnbound(allocation, &answer)
		return err
	})
	retry(allocation, logger, "Cannot write the condition of a claim whose pod is not bound yet", func() error {
		return d.updateStatus(allocation, answer)
	})
	<-allocation.Done()
	if agent.Err() != nil {
		return
	}
	if err := d.Ledger.CancelReservation(reservation); err != nil {
		// The reconciler releases a claim that is not allocated to this node.
		logger.Error(err, "Cannot cancel the reservation of a claim that is no longer allocated")
	}
}

// reserveUnbound reserves the devices of a claim and sets the conditions of those for which the scheduler waits.
func (d *Driver) reserveUnbound(ctx context.Context, answer *claimStatus) (reservation ledger.Reservation, err error) {
	claim, err := d.getClaim(ctx, *answer)
	if claim == nil || err != nil {
		return ledger.Reservation{}, err
	}
	waiting := d.unanswered(claim)
	if len(waiting) == 0 {
		return ledger.Reservation{}, nil
	}
	inv := d.Inventory.Inventory()
	p := d.plan(ctx, claim, inv, &ledger.PodsFirst{Slots: d.podSlots(inv), WaitBudget: podsFirstBudget})
	refused, _ := errors.AsType[*refusal](p.err)
	switch {
	case p.err != nil && refused == nil:
		return ledger.Reservation{}, p.err
	case refused != nil && refused.reason == reasonInvalidParameters:
		// Another node would refuse wrong parameters, too. Prepare reports them.
		refused = nil
	case refused == nil && len(p.request.Devices) > 0:
		reservation, err = d.Ledger.ReserveClaim(ctx, p.request)
		if conflict, lost := errors.AsType[*ledger.ConflictError](err); lost {
			refused = &refusal{reasonDeviceHeld, describeConflict(conflict, p)}
		} else if err != nil {
			return reservation, err
		}
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
	answer.devices = waiting
	return reservation, nil
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
