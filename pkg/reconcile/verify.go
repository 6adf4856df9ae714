// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// unconfirmed is a hold that kubelet or the API server has not confirmed.
type unconfirmed struct {
	since, checked time.Time
	// unlisted counts the last checks in which kubelet did not list the device of a pod's hold.
	unlisted int
	// soon is set while the hold is ending or contested.
	soon bool
	// allocated is set once the API server has confirmed the allocation.
	allocated bool
	// replaced is set while kubelet's state has the claim with devices of other GPUs.
	replaced bool
}

// verifyAll checks unconfirmed holds until ctx is done. It is a separate loop because kubelet and the API server may answer late.
func (r *Reconciler) verifyAll(ctx context.Context) {
	complaint := &complaint{message: "Cannot check unconfirmed holds"}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for r.Pods.AwaitSync(ctx) && ctx.Err() == nil {
		changed := r.Ledger.Changed()
		wait, err := r.Verify(ctx)
		if ctx.Err() == nil {
			complaint.say(ctx, err)
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
		case <-changed:
		case <-timer.C:
		}
		broadcast.Sleep(ctx, r.times.verifyGather)
	}
}

// verify checks claims that kubelet's state does not name, that the API server has not confirmed after a restart, or that are contested,
// and holds without a pod that the API server has reported. It sends no request while every hold is confirmed.
func (r *Reconciler) verify(ctx context.Context) (time.Duration, error) {
	holds := r.Ledger.Holds()
	claims, err := podstate.ReadClaimState(r.KubeletDir, r.DriverName)
	expectErr := r.expectUsed(ctx, holds, claims)
	errs := []error{err, expectErr}
	if len(holds) == 0 && len(claims) == 0 && r.unexplained.IsZero() && err == nil {
		r.unconfirmed = map[holdKey]*unconfirmed{}
		return never, expectErr
	}
	now := time.Now()
	// kubelet's state may change while no hold does.
	wait := r.times.verify
	if expectErr != nil {
		wait = min(wait, r.times.retryMost)
	}
	current := map[holdKey]*unconfirmed{}
	for _, h := range holds {
		d := cmp.Or(r.unconfirmed[keyOf(h)], &unconfirmed{since: now})
		d.soon, d.replaced = isEnding(h) || h.Contested, r.replaced(h, claims)
		current[keyOf(h)] = d
		if h.Holder.Kind == ledger.KindClaim && err != nil {
			continue
		}
		if r.confirmed(h, d, claims) {
			*d = unconfirmed{since: now, allocated: d.allocated}
			continue
		}
		if due := r.due(d); now.Before(due) {
			wait = min(wait, due.Sub(now))
			continue
		}
		d.checked = now
		errs = append(errs, r.check(ctx, h, d))
		wait = min(wait, r.due(d).Sub(now))
	}
	r.unconfirmed = current
	return wait, errors.Join(errs...)
}

func (r *Reconciler) due(d *unconfirmed) time.Time {
	delay := r.times.verify
	switch {
	case d.soon:
		delay = r.times.ending
	case d.unlisted > 0:
		delay = r.times.podHoldCheck
	}
	return cmp.Or(d.checked, d.since).Add(delay)
}

// isEnding reports whether only the end of processes, or of the claim, is missing for a claim's hold to end.
func isEnding(h ledger.Hold) bool {
	return h.Holder.Kind == ledger.KindClaim && h.Name != "" && (h.State == ledger.StateDraining || h.Deserted)
}

// resourcesOf returns the resource by which a pod's hold was requested: its own, or any where its record cannot be read.
func (r *Reconciler) resourcesOf(h ledger.Hold) func(resource string) bool {
	if h.Resource == "" {
		return r.Limits.Has
	}
	return func(resource string) bool { return resource == h.Resource }
}

func (r *Reconciler) confirmed(h ledger.Hold, d *unconfirmed, claims []podstate.KubeletClaim) bool {
	switch {
	case h.Unreadable:
		return false
	case h.Holder.Kind == ledger.KindPod:
		return slices.ContainsFunc(h.Pods, func(p ledger.Pod) bool { return r.Pods.Known(p.UID) })
	case h.State == ledger.StateDraining, h.Name == "", h.Contested, d.replaced:
		return false
	case h.State == ledger.StateRestored && !d.allocated:
		return false // kubelet's state does not tell admin access from holding
	}
	return slices.ContainsFunc(claims, func(c podstate.KubeletClaim) bool { return c.UID == h.Holder.ID })
}

// replaced reports whether kubelet has the claim of a hold prepared with devices of other GPUs: another driver of our name has unprepared the
// claim and prepared it again. GPUs are compared by name, so that a device that the inventory lacks, or a GPU of the same name, ends no hold.
func (r *Reconciler) replaced(h ledger.Hold, claims []podstate.KubeletClaim) bool {
	if h.Holder.Kind != ledger.KindClaim {
		return false
	}
	inventory := r.Inventory.Inventory()
	gpu, known := inventory.ByUUID(h.Device.GPU)
	i := slices.IndexFunc(claims, func(c podstate.KubeletClaim) bool { return c.UID == h.Holder.ID })
	if !known || i < 0 {
		return false
	}
	devices := r.ofNode(claims[i].Devices)
	return len(devices) > 0 && !slices.ContainsFunc(devices, func(d podstate.PoolDevice) bool {
		name := device.GPUName(d.Device)
		_, exists := inventory.ByName(name)
		return name == gpu.Name() || !exists
	})
}

func (r *Reconciler) check(ctx context.Context, h ledger.Hold, d *unconfirmed) error {
	ctx, cancel := context.WithTimeout(ctx, r.times.call)
	defer cancel()
	var err error
	switch {
	case h.Holder.Kind == ledger.KindPod:
		err = r.checkPodHold(ctx, h, d)
	case h.Holder.Kind != ledger.KindClaim:
		return nil // of a newer version
	case h.Name == "":
		err = r.verifyNameless(ctx, h)
	default:
		err = r.verifyClaim(ctx, h, d)
	}
	if err != nil {
		return fmt.Errorf("verify the hold of %s on %s: %w", h, h.Device, err)
	}
	return nil
}

// verifyClaim ends the hold of a claim that is deleted or no longer allocated the device, once no pod of it has a process.
func (r *Reconciler) verifyClaim(ctx context.Context, h ledger.Hold, d *unconfirmed) error {
	if isEnding(h) && r.Pods.StateWithoutClaim(h) != ledger.Gone {
		return nil // whatever became of the claim
	}
	if h.State == ledger.StateDraining && !h.Unreadable && r.hasCleanup(h) {
		return nil // Clear ends it
	}
	claim, err := r.claim(ctx, h.Namespace, h.Name, h.Holder.ID)
	var podState ledger.PodState
	switch {
	case err != nil:
		return err
	case claim == nil:
		podState = r.Pods.StateWithoutClaim(h)
	default:
		uses := r.usesOf(claim)
		held := r.refs(uses.held)
		if slices.Contains(held, h.Device) {
			d.allocated = true
			if h.Contested {
				r.Ledger.SetCounted(h) // its memory would count twice (TestContestedClaimThatIsAllocated)
			}
			return nil
		}
		if len(held) < len(r.ofNode(uses.held)) {
			return nil // it may be one that the inventory does not have at the moment
		}
		if slices.Contains(r.refs(uses.admin), h.Device) {
			klog.FromContext(ctx).Info("Releasing a device that its claim has for admin access only", "claim", klog.KObj(claim), "device", h.Device.String())
			return r.release(h)
		}
		if d.replaced && h.State != ledger.StateDraining && !h.Unreadable && len(h.Pods) > 0 {
			return r.endReplaced(ctx, h)
		}
		// As after Unprepare, which will not come any more.
		drained := h
		drained.State = ledger.StateDraining
		podState = r.Pods.PodState(drained)
	}
	if podState != ledger.Gone {
		return nil
	}
	klog.FromContext(ctx).Info("Releasing a device whose claim is gone", "claim", klog.KRef(h.Namespace, h.Name),
		"claimUID", h.Holder.ID, "device", h.Device.String())
	if !h.Unreadable && r.hasCleanup(h) {
		// As after Unprepare: the cleanup may take longer than this check (TestSlowSettingOfAClaimThatIsGone).
		return r.Ledger.SetState(h, ledger.StateDraining)
	}
	return r.end(ctx, h)
}

// endReplaced ends the hold of a claim that is prepared with other devices by now, once its own pods have no process. Clear cannot end one
// that has a cleanup while the claim is prepared, so that stays until Unprepare.
func (r *Reconciler) endReplaced(ctx context.Context, h ledger.Hold) error {
	if r.Pods.StateBefore(h) != ledger.Gone || r.hasCleanup(h) {
		return nil
	}
	klog.FromContext(ctx).Info("Releasing a device that its claim had before it was prepared with others",
		"claim", klog.KRef(h.Namespace, h.Name), "claimUID", h.Holder.ID, "device", h.Device.String())
	return r.release(h)
}

// hasCleanup reports whether a partition or sharing settings of a hold are to be removed before it ends.
func (r *Reconciler) hasCleanup(h ledger.Hold) bool {
	return r.applied(h) || r.Partitions.Made(h.Device)
}

// verifyNameless completes or ends the hold of a claim of which only the UID is known: either a pod of this node names the
// claim, or the hold is stale once no unknown pod has a process.
func (r *Reconciler) verifyNameless(ctx context.Context, h ledger.Hold) error {
	unknownPods, err := r.Pods.UnknownPods()
	if err != nil || len(unknownPods) > 0 {
		return err
	}
	for _, name := range r.Pods.ClaimNames() {
		claim, err := r.Claims(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return fmt.Errorf("get claim %s: %w", name, err)
		case string(claim.UID) == h.Holder.ID:
			h.Namespace, h.Name = claim.Namespace, claim.Name
			for _, uid := range podsOf(claim) {
				h.Pods = append(h.Pods, r.Pods.Name(uid))
			}
			return r.expect(ctx, h)
		}
	}
	if r.Pods.StateWithoutClaim(h) != ledger.Gone {
		return nil
	}
	klog.FromContext(ctx).Info("Releasing a device whose claim no pod of this node names", "claimUID", h.Holder.ID, "device", h.Device.String())
	return r.end(ctx, h)
}

func podsOf(claim *resourceapi.ResourceClaim) []string {
	var uids []string
	for _, consumer := range claim.Status.ReservedFor {
		if consumer.APIGroup == "" && consumer.Resource == "pods" {
			uids = append(uids, string(consumer.UID))
		}
	}
	return uids
}

// checkPodHold ends the hold of an Allocate whose pod was never admitted or never reported: in two successive checks kubelet does not
// list the device, and the pod that its checkpoint names is gone. kubelet does not list a pod that it is admitting, hence the minute
// before the first check (TestKilledBetweenRecordAndAnswer).
func (r *Reconciler) checkPodHold(ctx context.Context, h ledger.Hold, d *unconfirmed) error {
	used, err := r.usedByPod(ctx, h)
	if err != nil || used {
		d.unlisted = 0
		return err
	}
	if d.unlisted++; d.unlisted < 2 {
		return nil
	}
	klog.FromContext(ctx).Info("Releasing a device that was allocated to no pod", "device", h.Device.String(), "resource", h.Resource)
	return r.Ledger.Release(h)
}

// usedByPod reports whether a pod may have the device of a hold.
func (r *Reconciler) usedByPod(ctx context.Context, h ledger.Hold) (bool, error) {
	for _, pod := range h.Pods {
		if cgroup, err := r.Cgroups.Pod(pod.UID); err != nil || cgroup != podstate.CgroupAbsent {
			return true, err
		}
	}
	// kubelet may have lost its record before the agent read whose device it is.
	if len(h.Pods) == 0 && r.Pods.Unexplained(r.resourcesOf(h), r.Ledger.Holds()) {
		return true, nil
	}
	if h.Unreadable {
		if unknownPods, err := r.Pods.UnknownPods(); err != nil || len(unknownPods) > 0 {
			return true, err
		}
	}
	devices, _, err := r.Resources.List(ctx, r.resourcesOf(h), r.DriverName)
	if err != nil {
		return true, err
	}
	return slices.ContainsFunc(devices, func(u podstate.UsedDevice) bool { return u.ID == h.Holder.ID }), nil
}

// clearConflict clears the conflicts whose claim no pod waits for, and returns when to check again.
func (r *Reconciler) clearConflict() time.Duration {
	wait := never
	for _, conflict := range r.Ledger.Conflicts() {
		if r.Pods.Ended(conflict) {
			r.Ledger.ClearConflict(conflict.UID)
			continue
		}
		wait = min(wait, r.times.verify)
		if conflict.PendingEviction {
			// Conflicts() expires pending evictions.
			wait = min(wait, max(r.times.retry, time.Until(conflict.Until())))
		}
	}
	return wait
}

// checkConflicts asks the API server once a minute for each conflict whether the claim still exists unchanged: a pod may wait for
// a claim that was replaced.
func (r *Reconciler) checkConflicts(ctx context.Context) (time.Duration, error) {
	conflicts := r.Ledger.Conflicts()
	if len(conflicts) == 0 {
		return never, nil
	}
	now := time.Now()
	if due := r.conflictsChecked.Add(r.times.verify); now.Before(due) {
		return due.Sub(now), nil
	}
	r.conflictsChecked = now
	var errs []error
	for _, conflict := range conflicts {
		errs = append(errs, r.checkConflict(ctx, conflict))
	}
	return r.times.verify, errors.Join(errs...)
}

func (r *Reconciler) checkConflict(ctx context.Context, conflict ledger.Conflict) error {
	ctx, cancel := context.WithTimeout(ctx, r.times.call)
	defer cancel()
	claim, err := r.claim(ctx, conflict.Namespace, conflict.Name, conflict.UID)
	if err != nil {
		return fmt.Errorf("verify the conflict of claim %s/%s: %w", conflict.Namespace, conflict.Name, err)
	}
	uses := r.usesOf(claim)
	held := r.refs(uses.held)
	if slices.ContainsFunc(conflict.Devices, func(ref device.Ref) bool { return slices.Contains(held, ref) }) {
		return nil
	}
	// The inventory may lack the device: that can be why the claim is in conflict.
	named := func(d podstate.PoolDevice) bool { return slices.Contains(conflict.Names, d.Device) }
	if slices.ContainsFunc(r.ofNode(uses.held), named) {
		return nil
	}
	r.Ledger.ClearConflict(conflict.UID)
	return nil
}
