// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// Adopt adds holds of the devices that another driver gave to pods and claims and that these do not hold. The agent calls it once the node's pods are
// listed, before it serves either API: Restore misses pods that kubelet has admitted and not started. Both front-ends call it when a
// conflicting driver is gone, before they serve again. It is idempotent and safe for concurrent use with Run. After an error the caller
// gives no device to a new holder, and tries again.
func (r *Reconciler) Adopt(ctx context.Context) error {
	checkpoint, err := podstate.ReadDeviceCheckpoint(r.KubeletDir)
	if err != nil {
		return err
	}
	claims, err := podstate.ReadClaimState(r.KubeletDir, r.DriverName)
	if err != nil {
		return err
	}
	r.lateMu.Lock()
	defer r.lateMu.Unlock()
	defer r.lateAdded.Notify()
	defer r.withholdUnknown(ctx)
	all := r.Ledger.Holds()
	late, err := r.expectNamed(ctx, checkpoint, byHolder(all))
	errs := []error{err}
	r.addLate(ctx, late...)
	// The agent registers neither API before Adopt has returned, so the requests have one deadline. After it
	// kubelet's list of a claim's devices counts, and a claim of shared devices is late.
	asking, cancel := context.WithTimeout(ctx, r.times.restore)
	defer cancel()
	for _, claim := range claims {
		if len(r.lacking(claim, all)) == 0 {
			continue
		}
		r.AddPlaceholders(claim.CDIDevices)
		callCtx, cancel := context.WithTimeout(asking, r.times.call)
		missing, err := r.restoreClaim(callCtx, claim)
		cancel()
		if !errors.Is(err, errUnasked) {
			errs = append(errs, err)
		}
		if missing {
			r.addLateClaim(claim)
		}
	}
	return errors.Join(errs...)
}

// AdoptClaims is Adopt after another DRA driver of our name. A call of kubelet to that driver may still be in flight, although its
// sockets are gone. So AdoptClaims returns an error while kubelet has begun to prepare a claim and has no devices for it, until the
// call must have ended: then kubelet calls us. It adopts the others.
func (r *Reconciler) AdoptClaims(ctx context.Context) error {
	unprepared := r.checkUnprepared(time.Now())
	return errors.Join(unprepared, r.Adopt(ctx))
}

func (r *Reconciler) checkUnprepared(now time.Time) error {
	claims, err := podstate.ReadClaimState(r.KubeletDir, r.DriverName)
	if err != nil {
		return err
	}
	r.lateMu.Lock()
	defer r.lateMu.Unlock()
	before := r.unprepared
	r.unprepared = map[string]time.Time{}
	var errs []error
	for _, claim := range claims {
		lives := slices.ContainsFunc(claim.PodUIDs, func(uid string) bool { return r.Pods.EndedAt(uid).IsZero() })
		if len(claim.Devices) > 0 || !lives {
			continue
		}
		r.unprepared[claim.UID] = cmp.Or(before[claim.UID], now)
		if now.Sub(r.unprepared[claim.UID]) < r.times.prepare {
			errs = append(errs, fmt.Errorf("adopt claim %s/%s: kubelet has not prepared it yet", claim.Namespace, claim.Name))
		}
	}
	return errors.Join(errs...)
}

// addLate remembers devices to be restored once the inventory has them. Under lateMu, or before Run.
func (r *Reconciler) addLate(ctx context.Context, devices ...podstate.PodDevice) {
	for _, d := range devices {
		if !slices.Contains(r.latePodHolds, d) {
			klog.FromContext(ctx).Info("A device that a pod has is not in the inventory", "device", d.ID, "resource", d.Resource, "podUID", d.PodUID)
			r.latePodHolds = append(r.latePodHolds, d)
		}
	}
}

// addLateClaim is addLate for a claim.
func (r *Reconciler) addLateClaim(claim podstate.KubeletClaim) {
	if !slices.ContainsFunc(r.late, func(c podstate.KubeletClaim) bool { return c.UID == claim.UID }) {
		r.late = append(r.late, claim)
	}
}

// forgetUnlisted forgets late devices that only kubelet's pod resources named, once they have been missing there for a while: after
// a kubelet restart the list is empty at first. Under lateMu.
func (r *Reconciler) forgetUnlisted(ctx context.Context, checkpoint podstate.DeviceCheckpoint) error {
	podless := func(d podstate.PodDevice) bool { return d.PodUID == "" && !namesDevice(checkpoint, d) }
	if !slices.ContainsFunc(r.latePodHolds, podless) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.times.call)
	defer cancel()
	used, _, err := r.Resources.List(ctx, r.Limits.Has, r.DriverName)
	if err != nil {
		return fmt.Errorf("check whether pods still have devices of unknown GPUs: %w", err)
	}
	now, before := time.Now(), r.unlisted
	r.unlisted = map[podstate.PodDevice]time.Time{}
	r.latePodHolds = slices.DeleteFunc(r.latePodHolds, func(d podstate.PodDevice) bool {
		listed := func(u podstate.UsedDevice) bool { return u.Resource == d.Resource && u.ID == d.ID }
		if !podless(d) || slices.ContainsFunc(used, listed) {
			return false
		}
		r.unlisted[d] = cmp.Or(before[d], now)
		return now.Sub(r.unlisted[d]) >= r.times.podHoldCheck
	})
	return nil
}

func namesDevice(checkpoint podstate.DeviceCheckpoint, d podstate.PodDevice) bool {
	return slices.ContainsFunc(checkpoint.Devices, func(c podstate.PodDevice) bool { return c.ID == d.ID && c.Resource == d.Resource })
}

// sourceUnknown is the reconciler's source of ledger.Withhold.
const sourceUnknown = "devices of unknown GPUs"

// unknown returns the late devices whose ID does not tell which GPU they are on. Under lateMu, or before Run.
func (r *Reconciler) unknown() []podstate.PodDevice {
	inventory := r.Inventory.Inventory()
	return slices.DeleteFunc(slices.Clone(r.latePodHolds), func(d podstate.PodDevice) bool {
		_, _, unknown := inventory.ByDeviceID(d.ID)
		return !unknown
	})
}

func (r *Reconciler) isUnknown() bool {
	r.lateMu.Lock()
	defer r.lateMu.Unlock()
	return len(r.unknown()) > 0
}

// errUnknown names no pod, because every pod may read /readyz, and more people may read GPUNodes than pods.
var errUnknown = errors.New("another device plugin gave pods devices whose GPUs are not known: end the pods that event DeviceOfUnknownGPU of the node names")

// withholdUnknown keeps the node from serving while a pod has a device and its GPU is not known: any GPU may be the one. It reports
// each change once. Under lateMu, or before Run.
func (r *Reconciler) withholdUnknown(ctx context.Context) {
	unknown := r.unknown()
	if len(unknown) == 0 {
		r.Ledger.Withhold(sourceUnknown, nil)
		if r.unknownBefore != "" {
			klog.FromContext(ctx).Info("The GPU of every pod is known again, serving", "before", r.unknownBefore)
		}
		r.unknownBefore = ""
		return
	}
	var names []string
	for _, d := range unknown {
		names = append(names, fmt.Sprintf("%s of %s in %s", d.ID, d.Resource, describePod(r.Pods.Name(d.PodUID))))
	}
	text := regarding.Some(names)
	r.Ledger.Withhold(sourceUnknown, errUnknown)
	if r.unknownBefore != text {
		klog.FromContext(ctx).Info("Serving nothing new while pods have devices of unknown GPUs", "devices", text)
		r.Recorder.Eventf(regarding.Node(r.NodeName), corev1.EventTypeWarning, "DeviceOfUnknownGPU",
			"Serving no GPU to new pods: another device plugin gave pods devices whose GPUs are not known (%s): end these pods", text)
	}
	r.unknownBefore = text
}

func describePod(pod ledger.Pod) string {
	switch {
	case pod.Name != "":
		return fmt.Sprintf("pod %s/%s", pod.Namespace, pod.Name)
	case pod.UID != "":
		return fmt.Sprintf("pod %s", pod.UID)
	default:
		return "an unknown pod"
	}
}
