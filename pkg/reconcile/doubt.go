// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/evidence"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// doubt looks into holds that nobody confirms: claims that kubelet's state does not name, limits without a pod. Nothing is
// asked while every hold is confirmed.
func (r *Reconciler) doubt(ctx context.Context) (time.Duration, error) {
	claims, err := evidence.ReadClaimState(r.KubeletDir, r.DriverName)
	if err != nil {
		return doubtInterval, err
	}
	now := time.Now()
	wait := never
	current := map[unconfirmedKey]*doubt{}
	var errs []error
	for _, h := range r.Ledger.Holds() {
		if confirmed(h, claims) {
			continue
		}
		k := unconfirmedKey{h.Holder, h.Device, h.Generation}
		d := r.unconfirmed[k]
		if d == nil {
			d = &doubt{since: now}
		}
		current[k] = d
		due := d.due()
		if now.Before(due) {
			wait = min(wait, due.Sub(now))
			continue
		}
		d.checked = now
		errs = append(errs, r.look(ctx, h, d))
		wait = min(wait, d.due().Sub(now))
	}
	r.unconfirmed = current
	return wait, errors.Join(errs...)
}

func (d *doubt) due() time.Time {
	switch {
	case d.checked.IsZero():
		return d.since.Add(doubtAfter)
	case d.clean > 0:
		return d.checked.Add(limitDoubtInterval)
	default:
		return d.checked.Add(doubtInterval)
	}
}

func confirmed(h ledger.Hold, claims []evidence.KubeletClaim) bool {
	if h.Holder.Kind == ledger.KindLimit {
		return len(h.Pods) > 0
	}
	if h.State == ledger.StateDraining || h.Name == "" {
		return false
	}
	return slices.ContainsFunc(claims, func(c evidence.KubeletClaim) bool { return c.UID == h.Holder.ID })
}

func (r *Reconciler) look(ctx context.Context, h ledger.Hold, d *doubt) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if h.Holder.Kind == ledger.KindLimit {
		return r.lookIntoLimit(ctx, h, d)
	}
	return r.lookIntoClaim(ctx, h)
}

// lookIntoClaim ends the hold of a claim that is gone, or no longer allocated here, once no pod of it has a process.
func (r *Reconciler) lookIntoClaim(ctx context.Context, h ledger.Hold) error {
	if h.Name != "" {
		allocated, err := r.allocatedHere(ctx, h)
		if err != nil || allocated {
			return err
		}
	}
	// Judged as after an Unprepare, which will not come any more.
	h.State = ledger.StateDraining
	if r.Pods.Verdict(h) != ledger.Gone {
		return nil
	}
	klog.FromContext(ctx).Info("Releasing a device whose claim is gone", "claim", klog.KRef(h.Namespace, h.Name),
		"claimUID", h.Holder.ID, "device", h.Device.String())
	return r.Ledger.Release(h)
}

func (r *Reconciler) allocatedHere(ctx context.Context, h ledger.Hold) (bool, error) {
	claim, err := r.Claims(h.Namespace).Get(ctx, h.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look into the hold of %s: get claim: %w", h, err)
	case string(claim.UID) != h.Holder.ID:
		return false, nil
	}
	return slices.Contains(r.heldDevices(claim), h.Device), nil
}

// lookIntoLimit ends the hold of an Allocate whose pod was never admitted: kubelet, asked twice, neither lists the device
// nor has written who got it.
func (r *Reconciler) lookIntoLimit(ctx context.Context, h ledger.Hold, d *doubt) error {
	used, _, err := r.Resources.List(ctx, r.Resource, r.DriverName)
	if err != nil {
		d.clean = 0
		return err
	}
	if slices.ContainsFunc(used, func(u evidence.UsedDevice) bool { return u.ID == h.Holder.ID }) {
		d.clean = 0
		return nil
	}
	if d.clean++; d.clean < 2 {
		return nil
	}
	klog.FromContext(ctx).Info("Releasing a device that was allocated to no pod", "device", h.Device.String(), "resource", h.Resource)
	return r.Ledger.Release(h)
}
