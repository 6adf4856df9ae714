// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"maps"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Keys of the taints by which a device is withdrawn from the scheduler, effect NoSchedule. They are part of the API: users write
// tolerations and dashboards for them.
const (
	// TaintHeldByPod marks a device that a pod holds through an extended resource; the value is "true".
	TaintHeldByPod = "tandem-gpu.dev/held-by-pod"
	// TaintHeldByClaim marks a device that a claim holds in a way the scheduler cannot count: a part of the device, hardware that
	// overlaps it, or the device from another pool, after the node configuration changed. The value is "true".
	TaintHeldByClaim = "tandem-gpu.dev/held-by-claim"
	// TaintDraining marks a device that containers may still use although no claim or pod holds it any more; the value is "true".
	TaintDraining = "tandem-gpu.dev/draining"
	// TaintUnhealthy marks a device that cannot run work; the value is the reason (device.Health).
	TaintUnhealthy = "tandem-gpu.dev/unhealthy"
)

// drainGrace is how long a claim's hold may drain before its device is withdrawn. The hold of a pod that ends normally drains for
// less, and would cost two writes.
const drainGrace = 2 * time.Second

type use = availability.Use[device.Ref]

// withdrawal is one reason not to offer hardware. Holder is zero for whole devices: one whole holder after another is one
// withdrawal.
type withdrawal struct {
	use
	// detail is the health reason of an unhealthy device.
	detail string
}

func (w withdrawal) holding() holding { return holding{w.Device, w.Holder} }

func compareWithdrawals(a, b withdrawal) int {
	return cmp.Or(cmp.Compare(a.Device.String(), b.Device.String()), a.compareReason(b), cmp.Compare(a.Holder.ID, b.Holder.ID))
}

func (w withdrawal) compareReason(other withdrawal) int {
	return cmp.Or(cmp.Compare(taintKeys[w.Reason], taintKeys[other.Reason]), cmp.Compare(w.detail, other.detail))
}

var taintKeys = map[availability.Reason]string{
	availability.Unhealthy: TaintUnhealthy, availability.HeldByPod: TaintHeldByPod,
	availability.HeldByClaim: TaintHeldByClaim, availability.Draining: TaintDraining,
}

func (w withdrawal) taint() resourceapi.DeviceTaint {
	return resourceapi.DeviceTaint{Key: taintKeys[w.Reason], Value: cmp.Or(w.detail, "true"), Effect: resourceapi.DeviceTaintEffectNoSchedule}
}

// withdrawn returns what must not be offered, and when that changes by time alone (zero: never).
func (o *Offer) withdrawn(inv device.Inventory, holds []ledger.Hold, now time.Time) ([]withdrawal, time.Time) {
	current, drained := findWithdrawn(inv, slices.Concat(holds, o.orphans(inv, holds, now)), now)
	o.debounce.delay = o.ReturnDelay
	withdrawn, returned := o.debounce.update(now, current)
	return withdrawn, earlier(drained, returned)
}

// findWithdrawn returns what the scheduler cannot know to be unavailable. It made the allocations of claims itself.
func findWithdrawn(inv device.Inventory, holds []ledger.Hold, now time.Time) ([]withdrawal, time.Time) {
	found := map[withdrawal]bool{}
	for _, d := range inv.Devices() {
		if health := d.Health(); !health.Healthy() {
			found[withdrawal{use{Device: d.Ref(), Reason: availability.Unhealthy}, health.Reason}] = true
		}
	}
	var next time.Time
	for _, h := range holds {
		held := h.Use()
		if held.Reason == availability.HeldByClaim {
			continue
		}
		if due := h.Since.Add(drainGrace); held.Reason == availability.Draining && !h.Unreadable && due.After(now) {
			next = earlier(next, due)
			continue
		}
		if held.Share.Whole() {
			held.Holder = availability.Holder{}
		}
		found[withdrawal{use: held}] = true
	}
	return slices.SortedFunc(maps.Keys(found), compareWithdrawals), next
}

// orphans returns a draining hold for each partition that was created for a claim and has none. It occupies its placement until the
// reconciler destroys it (TestCountersFollowHolds). Inventory and holds are read one after the other, so a new partition may look
// like an orphan for less than drainGrace.
func (o *Offer) orphans(inv device.Inventory, holds []ledger.Hold, now time.Time) (orphans []ledger.Hold) {
	since := map[device.Ref]time.Time{}
	for _, d := range inv.Devices() {
		ref := d.Ref()
		if !d.Partition.Made || slices.ContainsFunc(holds, func(h ledger.Hold) bool { return h.Device.Overlaps(ref) }) {
			continue
		}
		since[ref] = now
		if first, known := o.orphanSince[ref]; known {
			since[ref] = first
		}
		orphans = append(orphans, ledger.Hold{Device: ref, State: ledger.StateDraining, Since: since[ref]})
	}
	o.orphanSince = since
	return orphans
}

// debounce delays the return of hardware, so that a device which goes from one holder to the next is withdrawn once
// (TestAGPUThatChangesHandsCostsNoWrite): each update of a slice makes the scheduler retry all pods that wait for a claim.
type debounce struct {
	delay time.Duration
	// available is since when a withdrawal is no longer current; zero while it is.
	available map[withdrawal]time.Time
	// withdrawals counts what the last update withdrew because of a holder.
	withdrawals int
}

// update returns the withdrawals to publish, and when to call it again (zero: at the next change). A new withdrawal counts at once;
// the last one of a device stays for the delay.
func (d *debounce) update(now time.Time, current []withdrawal) (all []withdrawal, next time.Time) {
	present, counted := map[holding]bool{}, map[holding]bool{}
	for w := range d.available {
		counted[w.holding()] = counted[w.holding()] || w.Reason != availability.Unhealthy
	}
	d.withdrawals = 0
	for _, w := range current {
		present[w.holding()] = true
		if w.Reason != availability.Unhealthy && !counted[w.holding()] {
			counted[w.holding()] = true
			d.withdrawals++
		}
	}
	kept := map[withdrawal]time.Time{}
	for w, since := range d.available {
		if since.IsZero() {
			since = now
		}
		if due := since.Add(d.delay); !present[w.holding()] && due.After(now) {
			kept[w], next = since, earlier(next, due)
		}
	}
	for _, w := range current {
		kept[w] = time.Time{}
	}
	d.available = kept
	return slices.SortedFunc(maps.Keys(kept), compareWithdrawals), next
}
