// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/capacity"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// Restore adds holds that the ledger's records may lack: of pods with a cgroup, from kubelet's device checkpoint and pod
// resources; of claims in kubelet's claim state, which survive a reboot and must find their devices free. It is called once,
// before either API is registered. It logs and skips a source that it cannot read: the other sources and the ledger's records
// remain. An error means that another process has the ledger.
func (r *Reconciler) Restore(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	checkpoint, err := podstate.ReadDeviceCheckpoint(r.KubeletDir)
	if err != nil {
		logger.Error(err, "Restoring holds without kubelet's device checkpoint")
	}
	claims, err := podstate.ReadClaimState(r.KubeletDir, r.DriverName)
	if err != nil {
		logger.Error(err, "Restoring holds without kubelet's claim state")
	}
	for _, claim := range claims {
		r.AddPlaceholders(claim.CDIDevices)
	}
	callCtx, cancel := context.WithTimeout(ctx, r.times.restore)
	defer cancel()
	holds := r.holders()
	for _, d := range checkpoint.Devices {
		done, err := r.restorePodHold(ctx, checkpoint, holds, d)
		if err != nil {
			return err
		}
		if !done {
			r.addLate(ctx, d)
		}
	}
	for _, claim := range claims {
		missing, err := r.restoreClaim(callCtx, claim)
		if err != nil && !errors.Is(err, errUnasked) {
			return err
		}
		if missing {
			logger.Info("A device of the claim does not exist yet, or the API server has not returned the claim", "claim", klog.KRef(claim.Namespace, claim.Name), "claimUID", claim.UID)
			r.addLateClaim(claim)
		}
	}
	late, err := r.restoreUsed(ctx, checkpoint, claims)
	r.addLate(ctx, late...)
	r.withholdUnknown(ctx)
	return err
}

// restoreLate restores holds on devices that come into the inventory later, such as a GPU that was lost when the agent started.
// It retries what it cannot restore.
func (r *Reconciler) restoreLate(ctx context.Context) {
	complaint := &complaint{message: "Cannot restore all holders of devices that came late, retrying"}
	retry := r.times.retry
	for ctx.Err() == nil {
		changed, added, podsChanged := r.Inventory.Changed(), r.lateAdded.Changed(), r.Pods.Changed()
		_, err := r.RestoreLate(ctx)
		complaint.say(ctx, err)
		var again <-chan time.Time
		switch {
		case err != nil:
			if errors.Is(err, errUnasked) {
				podsChanged = nil // each pass asks the API server
			}
			again = time.After(retry)
			retry = min(2*retry, r.times.retryMost)
		case r.isUnknown():
			// Nothing reports the end of a cgroup.
			again, retry = time.After(r.times.retry), r.times.retry
		default:
			podsChanged, retry = nil, r.times.retry
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-added:
		case <-podsChanged:
		case <-again:
		}
	}
}

// RestoreLate tries once to restore what Restore and Adopt could not, and reports whether anything is left. Run calls it.
func (r *Reconciler) RestoreLate(ctx context.Context) (left bool, err error) {
	r.lateMu.Lock()
	defer r.lateMu.Unlock()
	err = errors.Join(r.tryLateClaims(ctx), r.tryLatePodHolds(ctx))
	r.withholdUnknown(ctx)
	return len(r.late)+len(r.latePodHolds) > 0, err
}

// tryLateClaims drops claims that have all their devices, and claims that kubelet has unprepared.
func (r *Reconciler) tryLateClaims(ctx context.Context) error {
	if len(r.late) == 0 {
		return nil
	}
	claims, err := podstate.ReadClaimState(r.KubeletDir, r.DriverName)
	if err != nil {
		return err
	}
	// Adopt waits for this pass, and the agent registers neither API before Adopt has returned.
	ctx, cancel := context.WithTimeout(ctx, r.times.restore)
	defer cancel()
	var errs []error
	r.late = slices.DeleteFunc(r.late, func(claim podstate.KubeletClaim) bool {
		i := slices.IndexFunc(claims, func(c podstate.KubeletClaim) bool { return c.UID == claim.UID })
		if i < 0 {
			return true
		}
		callCtx, cancel := context.WithTimeout(ctx, r.times.call)
		defer cancel()
		missing, err := r.restoreClaim(callCtx, claims[i]) // it may have other devices by now
		errs = append(errs, err)
		return err == nil && !missing
	})
	return errors.Join(errs...)
}

// tryLatePodHolds drops holds that have their partition, whose pod is gone, or whose partition kubelet has allocated to another
// pod since.
func (r *Reconciler) tryLatePodHolds(ctx context.Context) error {
	if len(r.latePodHolds) == 0 {
		return nil
	}
	checkpoint, err := podstate.ReadDeviceCheckpoint(r.KubeletDir)
	if err != nil {
		return err
	}
	holds := r.holders()
	errs := []error{r.forgetUnlisted(ctx, checkpoint)}
	r.latePodHolds = slices.DeleteFunc(r.latePodHolds, func(d podstate.PodDevice) bool {
		if !slices.Contains(checkpoint.Devices, d) {
			if _, held := holds[ledger.Holder{Kind: ledger.KindPod, ID: d.ID}]; held {
				return true
			}
			sameDevice := func(other podstate.PodDevice) bool { return other.Resource == d.Resource && other.ID == d.ID }
			if i := slices.IndexFunc(checkpoint.Devices, sameDevice); i >= 0 {
				d = checkpoint.Devices[i]
			}
		}
		done, err := r.restorePodHold(ctx, checkpoint, holds, d)
		errs = append(errs, err)
		return err == nil && done
	})
	return errors.Join(errs...)
}

func (r *Reconciler) holders() map[ledger.Holder]ledger.Hold { return byHolder(r.Ledger.Holds()) }

// byHolder returns one hold of each holder.
func byHolder(holds []ledger.Hold) map[ledger.Holder]ledger.Hold {
	holders := map[ledger.Holder]ledger.Hold{}
	for _, h := range holds {
		holders[h.Holder] = h
	}
	return holders
}

// restorePodHold restores a pod's hold from kubelet's checkpoint, or without a pod from its pod resources. It returns false while
// the inventory lacks the partition, or the ID does not tell which device it is.
func (r *Reconciler) restorePodHold(ctx context.Context, checkpoint podstate.DeviceCheckpoint, holds map[ledger.Holder]ledger.Hold,
	d podstate.PodDevice,
) (done bool, err error) {
	h, known := holds[ledger.Holder{Kind: ledger.KindPod, ID: d.ID}]
	if known && !h.Unreadable && r.predates(checkpoint, h) {
		return true, nil // it names the pod before
	}
	if !r.Limits.Has(d.Resource) || d.PodUID != "" && !r.mayRun(ctx, checkpoint, d) {
		return true, nil
	}
	if known {
		return true, r.expectPodHold(ctx, d, h.Device)
	}
	return r.expectDevice(ctx, d)
}

// expectDevice takes the hold of a pod on a device. It returns false while the inventory lacks the partition, or the ID does not tell which
// device it is.
func (r *Reconciler) expectDevice(ctx context.Context, d podstate.PodDevice) (done bool, err error) {
	ref, missing, unknown := r.Inventory.Inventory().ByDeviceID(d.ID)
	if unknown || missing && ref.GPU == "" {
		return false, nil
	}
	return true, r.expectPodHold(ctx, d, ref)
}

// mayRun reports whether the pod of a device may run or start. Until the node's pods are listed, a pod that kubelet has admitted and not
// started looks like one that has ended: then only a cgroup counts, and Adopt comes again. So it is for a device that kubelet's checkpoint
// no longer names.
func (r *Reconciler) mayRun(ctx context.Context, checkpoint podstate.DeviceCheckpoint, d podstate.PodDevice) bool {
	if r.Pods.Synced() && slices.Contains(checkpoint.Devices, d) {
		h := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: d.ID}, State: ledger.StateRestored, Pods: []ledger.Pod{{UID: d.PodUID}}}
		return r.Pods.PodState(h) != ledger.Gone
	}
	cgroup, err := r.Cgroups.Pod(d.PodUID)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Restoring a hold although the cgroup of its pod cannot be read", "podUID", d.PodUID, "device", d.ID)
	}
	return err != nil || cgroup != podstate.CgroupAbsent
}

func (r *Reconciler) expectPodHold(ctx context.Context, d podstate.PodDevice, ref device.Ref) error {
	h := ledger.Hold{
		Holder: ledger.Holder{Kind: ledger.KindPod, ID: d.ID}, Resource: d.Resource, Device: ref,
		// The ledger keeps a share that its record has (TestUnreadableReplica).
		Share: r.Limits.ShareOf(r.Inventory.Inventory(), d.ID),
	}
	if d.PodUID != "" {
		h.Pods = []ledger.Pod{r.Pods.Name(d.PodUID)}
	}
	return r.expect(ctx, h)
}

// errUnasked means that a claim may have shares of devices, or devices for admin access. They are held whole, which blocks other holders, until the
// API server has returned the claim.
var errUnasked = errors.New("the API server has not returned the claim, so its devices are held whole")

// restoreClaim reports whether RestoreLate is to try again: the inventory lacks a device of the claim, or the API server has not returned the claim.
// It returns errUnasked in the second case.
func (r *Reconciler) restoreClaim(ctx context.Context, claim podstate.KubeletClaim) (missing bool, err error) {
	if len(claim.Devices) == 0 {
		return false, nil // kubelet has only begun to prepare it
	}
	current, err := r.claim(ctx, claim.Namespace, claim.Name, claim.UID)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Restoring a claim by kubelet's state alone", "claim", klog.KRef(claim.Namespace, claim.Name))
		r.unasked.Store(claim.UID, true)
	} else if _, unasked := r.unasked.LoadAndDelete(claim.UID); unasked {
		if err := r.releaseAdmin(claim, current); err != nil {
			return true, err
		}
	}
	return r.expectClaim(ctx, claim, current, err == nil)
}

// claim returns a claim as the API server has it; nil if that has none of the UID.
func (r *Reconciler) claim(ctx context.Context, namespace, name, uid string) (*resourceapi.ResourceClaim, error) {
	claim, err := r.Claims(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("get claim: %w", err)
	case string(claim.UID) != uid:
		return nil, nil
	}
	return claim, nil
}

// expectClaim is restoreClaim once the API server has returned the claim. asked is false if it has not.
func (r *Reconciler) expectClaim(ctx context.Context, claim podstate.KubeletClaim, current *resourceapi.ResourceClaim, asked bool,
) (missing bool, err error) {
	devices, consumed := r.devicesOf(ctx, claim, current, asked)
	found := r.resolve(devices)
	for named, d := range found {
		h := ledger.Hold{
			Holder: ledger.Holder{Kind: ledger.KindClaim, ID: claim.UID}, Device: d.Ref(),
			Namespace: claim.Namespace, Name: claim.Name,
		}
		if c, shared := consumed[named]; shared {
			h.Share = d.Share(c)
		}
		for _, uid := range claim.PodUIDs {
			h.Pods = append(h.Pods, r.Pods.Name(uid))
		}
		if err := r.expect(ctx, h); err != nil {
			return false, err
		}
	}
	if !asked && len(found) > 0 {
		return true, fmt.Errorf("restore claim %s/%s: %w", claim.Namespace, claim.Name, errUnasked)
	}
	return len(found) < len(r.ofNode(devices)), nil
}

// releaseAdmin ends the holds of devices for admin access that were taken while the API server could not be asked.
func (r *Reconciler) releaseAdmin(claim podstate.KubeletClaim, current *resourceapi.ResourceClaim) error {
	now := r.usesOf(current)
	admin, held := r.refs(now.admin), r.refs(now.held)
	var errs []error
	for _, h := range r.Ledger.Holds() {
		of := ledger.Holder{Kind: ledger.KindClaim, ID: claim.UID}
		if h.Holder == of && h.State == ledger.StateRestored && slices.Contains(admin, h.Device) && !slices.Contains(held, h.Device) {
			errs = append(errs, r.Ledger.Release(h))
		}
	}
	return errors.Join(errs...)
}

// devicesOf returns the claim's devices from kubelet's claim state. Only the API server knows which devices are for admin access and hold nothing. While it is away kubelet's list counts: no Prepare
// can come before it is back. A device that is no longer allocated to the claim stays held while a pod of the claim has a cgroup.
// For shared devices it returns what the claim consumed if the API server could be asked.
func (r *Reconciler) devicesOf(ctx context.Context, claim podstate.KubeletClaim, current *resourceapi.ResourceClaim, asked bool,
) (devices []podstate.PoolDevice, consumed map[podstate.PoolDevice]device.Consumed) {
	if !asked {
		return claim.Devices, nil
	}
	now := r.usesOf(current)
	lives := r.mayLive(ctx, claim)
	return slices.DeleteFunc(slices.Clone(claim.Devices), func(d podstate.PoolDevice) bool {
		return !slices.Contains(now.held, d) && (slices.Contains(now.admin, d) || !lives)
	}), now.consumed
}

// mayLive reports whether a pod of the claim has a cgroup, also if that cannot be determined.
func (r *Reconciler) mayLive(ctx context.Context, claim podstate.KubeletClaim) bool {
	for _, uid := range claim.PodUIDs {
		cgroup, err := r.Cgroups.Pod(uid)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Restoring a claim without knowing whether its pod lives",
				"podUID", uid, "claim", klog.KRef(claim.Namespace, claim.Name))
		}
		if err != nil || cgroup != podstate.CgroupAbsent {
			return true
		}
	}
	return false
}

// uses are the devices of a claim's allocation: to hold, or for admin access.
type uses struct {
	held, admin []podstate.PoolDevice
	// consumed is what the claim has of shared devices.
	consumed map[podstate.PoolDevice]device.Consumed
}

// usesOf returns no uses for a nil claim.
func (r *Reconciler) usesOf(claim *resourceapi.ResourceClaim) uses {
	u := uses{consumed: map[podstate.PoolDevice]device.Consumed{}}
	if claim == nil || claim.Status.Allocation == nil {
		return u
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		d := podstate.PoolDevice{Pool: result.Pool, Device: result.Device}
		switch {
		case result.Driver != r.DriverName:
		case result.AdminAccess != nil && *result.AdminAccess:
			u.admin = append(u.admin, d)
		default:
			u.held = append(u.held, d)
			if c, shared := capacity.Consumed(claim, result); shared {
				u.consumed[d] = u.consumed[d].Plus(c)
			}
		}
	}
	return u
}

// resolve finds the devices in the inventory, and leaves out those that it lacks.
func (r *Reconciler) resolve(devices []podstate.PoolDevice) map[podstate.PoolDevice]device.Device {
	inventory := r.Inventory.Inventory()
	all := map[podstate.PoolDevice]device.Device{}
	for _, d := range r.ofNode(devices) {
		if found, ok := inventory.ByName(d.Device); ok {
			all[d] = found
		}
	}
	return all
}

// refs returns the refs of resolve's devices.
func (r *Reconciler) refs(devices []podstate.PoolDevice) []device.Ref {
	var refs []device.Ref
	for _, d := range r.resolve(devices) {
		refs = append(refs, d.Ref())
	}
	return refs
}

// ofNode returns the devices of this node, each once: a claim may have several shares of one.
func (r *Reconciler) ofNode(devices []podstate.PoolDevice) []podstate.PoolDevice {
	var here []podstate.PoolDevice
	for _, d := range devices {
		if device.NodeOfPool(d.Pool) == r.NodeName && !slices.Contains(here, d) {
			here = append(here, d)
		}
	}
	return here
}

// restoreUsed restores devices and claims that kubelet reports in use and that neither checkpoint names. It returns the devices that the
// inventory lacks.
func (r *Reconciler) restoreUsed(ctx context.Context, checkpoint podstate.DeviceCheckpoint, known []podstate.KubeletClaim,
) (late []podstate.PodDevice, err error) {
	callCtx, cancel := context.WithTimeout(ctx, r.times.call)
	defer cancel()
	devices, claims, err := r.Resources.List(callCtx, r.Limits.Has, r.DriverName)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Restoring holds without kubelet's pod resources")
		return nil, nil
	}
	for _, d := range devices {
		podless := podstate.PodDevice{Resource: d.Resource, ID: d.ID}
		if namesDevice(checkpoint, podless) {
			continue
		}
		done, err := r.restorePodHold(ctx, podstate.DeviceCheckpoint{}, nil, podless)
		if err != nil {
			return nil, err
		}
		if !done {
			late = append(late, podless)
		}
	}
	for _, used := range claims {
		named := func(c podstate.KubeletClaim) bool { return c.Namespace == used.Namespace && c.Name == used.Name }
		if slices.ContainsFunc(known, named) {
			continue
		}
		claim, err := r.Claims(used.Namespace).Get(callCtx, used.Name, metav1.GetOptions{})
		if err != nil {
			klog.FromContext(ctx).Error(err, "Skipping a claim that kubelet reports in use",
				"claim", klog.KRef(used.Namespace, used.Name))
			continue
		}
		used.UID, used.PodUIDs = string(claim.UID), podsOf(claim)
		if _, err := r.restoreClaim(callCtx, used); err != nil && !errors.Is(err, errUnasked) {
			return nil, err
		}
	}
	return late, nil
}

// expect restores a hold. It logs a device that has two holders, and a hold that cannot be recorded; later passes record that one. An error
// means that another process has the ledger.
func (r *Reconciler) expect(ctx context.Context, h ledger.Hold) error {
	err := r.Ledger.Expect(h)
	var conflict *ledger.ConflictError
	if errors.As(err, &conflict) {
		klog.FromContext(ctx).Error(conflict, "Two holders have the same device", "device", h.Device.String(), "holder", h.String())
		return nil
	}
	if errors.Is(err, ledger.ErrLocked) {
		return fmt.Errorf("restore the hold of %s: %w", h, err)
	}
	if err != nil {
		// The device is held. A full or read-only disk must not keep kubelet from ending pods.
		klog.FromContext(ctx).Error(err, "Cannot record a hold of before the start, retrying", "device", h.Device.String(), "holder", h.String())
	}
	return nil
}
