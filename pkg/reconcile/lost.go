// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// expectNamed takes a hold for each device that kubelet's checkpoint names for a pod that may run and that no hold has. It returns the
// devices that the inventory lacks. The caller has read holds after the checkpoint: kubelet records a device after the ledger does.
func (r *Reconciler) expectNamed(ctx context.Context, checkpoint podstate.DeviceCheckpoint, holds map[ledger.Holder]ledger.Hold,
) (late []podstate.PodDevice, err error) {
	var errs []error
	for _, d := range checkpoint.Devices {
		_, held := holds[ledger.Holder{Kind: ledger.KindPod, ID: d.ID}]
		if held || !r.Limits.Has(d.Resource) || !r.mayRun(ctx, checkpoint, d) {
			continue
		}
		done, err := r.expectDevice(ctx, d)
		errs = append(errs, err)
		switch {
		case err == nil && !done:
			late = append(late, d)
		case err == nil:
			klog.FromContext(ctx).Info("Took a hold for a device that kubelet's checkpoint names for a pod and that no hold had",
				"device", d.ID, "resource", d.Resource, "pod", describePod(r.Pods.Name(d.PodUID)))
		}
	}
	return late, errors.Join(errs...)
}

// expectLost takes holds of pods again that were released by mistake. It returns when to look again if nothing changes.
func (r *Reconciler) expectLost(ctx context.Context, checkpoint podstate.DeviceCheckpoint) (time.Duration, error) {
	late, err := r.expectNamed(ctx, checkpoint, r.holders())
	if !r.comeLate(ctx, late, nil) {
		return r.times.retry, err
	}
	return never, err
}

// comeLate passes devices and claims that the inventory lacks to RestoreLate. It returns false while RestoreLate is sending requests.
func (r *Reconciler) comeLate(ctx context.Context, devices []podstate.PodDevice, claims []podstate.KubeletClaim) bool {
	if len(devices)+len(claims) == 0 {
		return true
	}
	if !r.lateMu.TryLock() {
		return false
	}
	defer r.lateMu.Unlock()
	before := len(r.latePodHolds) + len(r.late)
	r.addLate(ctx, devices...)
	for _, claim := range claims {
		r.addLateClaim(claim)
	}
	if len(r.latePodHolds)+len(r.late) > before {
		r.lateAdded.Notify()
	}
	return true
}

// expectUsed takes holds of the devices that kubelet's state names for a claim and that the claim does not hold, and of devices that only
// kubelet's pod resources name because kubelet could not write its checkpoint. The caller has read holds before claims: kubelet's state has
// the devices of a claim until it has the answer to Unprepare. It asks the API server once for each claim: a device for admin access, or of
// a claim that has ended, has no hold. Without an answer it takes none, because kubelet's state does not tell.
func (r *Reconciler) expectUsed(ctx context.Context, holds []ledger.Hold, claims []podstate.KubeletClaim) error {
	settled := map[string][]podstate.PoolDevice{}
	var errs []error
	var late []podstate.KubeletClaim
	for _, claim := range claims {
		lacking := r.lacking(claim, holds)
		if len(lacking) == 0 {
			continue
		}
		if slices.Equal(r.settled[claim.UID], lacking) {
			settled[claim.UID] = lacking
			continue
		}
		callCtx, cancel := context.WithTimeout(ctx, r.times.call)
		current, err := r.claim(callCtx, claim.Namespace, claim.Name, claim.UID)
		cancel()
		if err != nil {
			errs = append(errs, fmt.Errorf("find out whether claim %s/%s needs a hold: %w", claim.Namespace, claim.Name, err))
			continue
		}
		missing, err := r.expectClaim(ctx, claim, current, true)
		errs = append(errs, err)
		if missing {
			late = append(late, claim)
		}
		if left := r.lacking(claim, r.Ledger.Holds()); err == nil && len(left) > 0 {
			settled[claim.UID] = left
		}
	}
	devices, err := r.expectUnexplained(ctx, time.Now(), holds, claims)
	if !r.comeLate(ctx, devices, late) {
		for _, claim := range late {
			delete(settled, claim.UID)
		}
	}
	r.settled = settled
	return errors.Join(append(errs, err)...)
}

// lacking returns the devices that kubelet's state names for a claim, on this node, and that the claim does not hold, or that the inventory
// lacks.
func (r *Reconciler) lacking(claim podstate.KubeletClaim, holds []ledger.Hold) []podstate.PoolDevice {
	found := r.resolve(claim.Devices)
	return slices.DeleteFunc(r.ofNode(claim.Devices), func(named podstate.PoolDevice) bool {
		d, known := found[named]
		return known && slices.ContainsFunc(holds, func(h ledger.Hold) bool {
			return h.Holder == ledger.Holder{Kind: ledger.KindClaim, ID: claim.UID} && h.Device == d.Ref()
		})
	})
}

// expectUnexplained reads kubelet's pod resources if, for a minute, an admitted pod has requested more devices than there are holds that name
// it. It returns the devices that the inventory lacks.
func (r *Reconciler) expectUnexplained(ctx context.Context, now time.Time, holds []ledger.Hold, claims []podstate.KubeletClaim,
) (late []podstate.PodDevice, err error) {
	unexplained := r.Pods.Unexplained(r.Limits.Has, holds)
	switch {
	case !unexplained:
		r.unexplained = time.Time{}
		return nil, nil
	case r.unexplained.IsZero():
		r.unexplained = now
	}
	if now.Sub(r.unexplained) < r.times.verify {
		return nil, nil
	}
	r.unexplained = now
	checkpoint, err := podstate.ReadDeviceCheckpoint(r.KubeletDir)
	if err != nil {
		return nil, err
	}
	return r.restoreUsed(ctx, checkpoint, claims)
}
