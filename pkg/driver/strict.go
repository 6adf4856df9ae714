// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Conditions on a claim's devices by which Strict holds a pod back until the ledger has reserved them (KEP-5007: the scheduler
// binds when every binding condition is true, and takes the allocation back when a failure condition is).
const (
	// ConditionReserved is true once the device is the claim's.
	ConditionReserved = "tandem-gpu.dev/reserved"
	// ConditionRefused is true when somebody else has the device.
	ConditionRefused = "tandem-gpu.dev/refused"
)

// Allocations are the claims that the scheduler has given GPUs of this node, also those whose pods are not bound yet.
type Allocations interface {
	Claims() []v1alpha1.AllocatedClaim
	// Synced reports whether Claims knows what was allocated before this agent started. It may never come.
	Synced() bool
	// Changed returns a channel that is closed at the next change; take it before reading.
	Changed() <-chan struct{}
}

// strictly adds to a device what makes the scheduler wait for the ledger.
func withBindingConditions(device resourceapi.Device) resourceapi.Device {
	device.BindsToNode = ptr.To(true)
	device.BindingConditions = []string{ConditionReserved}
	device.BindingFailureConditions = []string{ConditionRefused}
	return device
}

// strictRetry is how soon what failed is tried again at first, strictRetryMost in the end. The scheduler looks every 5 s.
const (
	strictRetry     = time.Second
	strictRetryMost = 30 * time.Second
)

// confirmations reserve devices for claims while their pods wait to be bound, and say so in the claims' status. One goroutine
// a claim: one that waits for a device to drain must not delay the others.
type confirmations struct {
	*Driver
	running map[types.UID]confirmation
}

// confirmation is the work for one allocation. The same claim may come again with other devices.
type confirmation struct {
	devices []string
	cancel  context.CancelFunc
}

func newConfirmations(d *Driver) *confirmations {
	return &confirmations{Driver: d, running: map[types.UID]confirmation{}}
}

// run confirms until ctx is done. What is reserved then stays: the pods of these claims are on their way.
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

// follow starts what is new and ends what is no longer allocated.
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

// confirm reserves, answers the scheduler, and waits for the allocation to end: what was reserved for a pod that never came is
// given back. The context allocation ends with the agent's, and when the claim is no longer allocated as it was.
func (c *confirmations) confirm(agent, allocation context.Context, allocated v1alpha1.AllocatedClaim) {
	logger := klog.FromContext(agent).WithValues("claim", klog.KRef(allocated.Namespace, allocated.Name), "claimUID", allocated.UID)
	var taken ledger.Taken
	var podState *metav1.Condition
	insist(allocation, logger, "Cannot reserve the devices of a claim whose pod is not bound yet", func() (err error) {
		taken, podState, err = c.decide(allocation, allocated)
		return err
	})
	if podState != nil {
		insist(allocation, logger, "Cannot tell the scheduler whether a claim has its devices", func() error {
			return c.answer(allocation, allocated, *podState)
		})
	}
	<-allocation.Done()
	if agent.Err() != nil {
		return
	}
	if err := c.Ledger.GiveBack(string(allocated.UID), taken); err != nil {
		// The reconciler finds a claim that is not allocated here.
		logger.Error(err, "Cannot give back the devices of a claim whose pod did not come")
	}
}

// insist tries, ever more rarely, until it succeeds or ctx is done.
func insist(ctx context.Context, logger klog.Logger, message string, try func() error) {
	for wait := strictRetry; ; wait = min(2*wait, strictRetryMost) {
		err := try()
		if err == nil || ctx.Err() != nil {
			return
		}
		logger.Error(err, message)
		if !pause(ctx, wait) {
			return
		}
	}
}

// decide reserves the devices of a claim that waits for it. No verdict means that nobody waits for one.
func (c *confirmations) decide(ctx context.Context, allocated v1alpha1.AllocatedClaim) (ledger.Taken, *metav1.Condition, error) {
	claim, err := c.waiting(ctx, allocated)
	if claim == nil || err != nil {
		return ledger.Taken{}, nil, err
	}
	granted := &metav1.Condition{Type: ConditionReserved, Status: metav1.ConditionTrue, Reason: "Reserved", Message: "the node keeps the device for this claim"}
	inv := c.Inventory.Inventory()
	p := c.plan(ctx, claim, inv)
	p.request.PodsFirst = &ledger.PodsFirst{Slots: c.podSlots(inv), WaitBudget: podsFirstBudget}
	refused, _ := errors.AsType[*refusal](p.err)
	switch {
	case p.err != nil && refused == nil:
		return ledger.Taken{}, nil, p.err
	case refused != nil && refused.reason != reasonInvalidParameters:
		return ledger.Taken{}, c.refusal(refused.reason, refused.message), nil
	case p.err != nil, len(p.request.Devices) == 0:
		// What is wrong with the claim itself another node would refuse too, and Prepare explains it.
		return ledger.Taken{}, granted, nil
	}
	taken, err := c.Ledger.ReserveClaim(ctx, p.request)
	if conflict, lost := errors.AsType[*ledger.ConflictError](err); lost {
		return taken, c.refusal(reasonDeviceHeld, describeConflict(conflict, p)), nil
	}
	return taken, granted, err
}

// refusal makes the scheduler allocate anew.
func (c *confirmations) refusal(reason, message string) *metav1.Condition {
	c.metrics.strictRefusals.Inc()
	return &metav1.Condition{Type: ConditionRefused, Status: metav1.ConditionTrue, Reason: reason, Message: message}
}

// waiting returns the claim if the scheduler waits for an answer to it, otherwise nil.
func (c *confirmations) waiting(ctx context.Context, allocated v1alpha1.AllocatedClaim) (*resourceapi.ResourceClaim, error) {
	claim, err := c.KubeClient.ResourceV1().ResourceClaims(allocated.Namespace).Get(ctx, allocated.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("get claim %s/%s: %w", allocated.Namespace, allocated.Name, err)
	case claim.UID != allocated.UID || len(c.unanswered(claim)) == 0:
		return nil, nil
	}
	return claim, nil
}

// answer writes the verdict for every device of the claim that has none.
func (c *confirmations) answer(ctx context.Context, allocated v1alpha1.AllocatedClaim, podState metav1.Condition) error {
	claim, err := c.waiting(ctx, allocated)
	if claim == nil || err != nil {
		return err
	}
	for _, result := range c.unanswered(claim) {
		setCondition(claim, result, podState)
	}
	if _, err := c.KubeClient.ResourceV1().ResourceClaims(claim.Namespace).UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("write condition %s of claim %s/%s: %w", podState.Type, claim.Namespace, claim.Name, err)
	}
	return nil
}

// unanswered are the results that the scheduler waits for.
func (c *confirmations) unanswered(claim *resourceapi.ResourceClaim) []resourceapi.DeviceRequestAllocationResult {
	if claim.Status.Allocation == nil {
		return nil
	}
	var waiting []resourceapi.DeviceRequestAllocationResult
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != c.DriverName || !slices.Contains(result.BindingConditions, ConditionReserved) {
			continue
		}
		known := statusOf(claim, result)
		if known == nil || !meta.IsStatusConditionTrue(known.Conditions, ConditionReserved) && !meta.IsStatusConditionTrue(known.Conditions, ConditionRefused) {
			waiting = append(waiting, result)
		}
	}
	return waiting
}

func setCondition(claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult, condition metav1.Condition) {
	known := statusOf(claim, result)
	if known == nil {
		claim.Status.Devices = append(claim.Status.Devices, resourceapi.AllocatedDeviceStatus{
			Driver: result.Driver, Pool: result.Pool, Device: result.Device, ShareID: (*string)(result.ShareID),
		})
		known = &claim.Status.Devices[len(claim.Status.Devices)-1]
	}
	meta.SetStatusCondition(&known.Conditions, condition)
}

// statusOf finds the entry of a device; nil if there is none yet.
func statusOf(claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult) *resourceapi.AllocatedDeviceStatus {
	i := slices.IndexFunc(claim.Status.Devices, func(s resourceapi.AllocatedDeviceStatus) bool {
		return s.Driver == result.Driver && s.Pool == result.Pool && s.Device == result.Device &&
			ptr.Equal(s.ShareID, (*string)(result.ShareID))
	})
	if i < 0 {
		return nil
	}
	return &claim.Status.Devices[i]
}
