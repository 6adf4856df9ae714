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

// drainGrace is how long a claim's hold may drain before the scheduler is told. The hold of a pod that ends normally drains for
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
	current, drained := findWithdrawn(inv, holds, now)
	orphans, orphaned := o.findOrphans(inv, holds, now)
	for _, orphan := range orphans {
		if !slices.ContainsFunc(current, func(w withdrawal) bool { return w.Device == orphan.Device }) {
			current = append(current, orphan)
		}
	}
	o.debounce.delay = o.ReturnDelay
	withdrawn, returned := o.debounce.update(now, current)
	return withdrawn, earlier(earlier(drained, orphaned), returned)
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

// findOrphans returns the partitions that were created for a claim and have no hold since drainGrace. They occupy their placement
// until the reconciler destroys them (TestCountersFollowHolds). Inventory and holds are read one after the other, so a new
// partition may look like an orphan for a moment.
func (o *Offer) findOrphans(inv device.Inventory, holds []ledger.Hold, now time.Time) (orphans []withdrawal, next time.Time) {
	since := map[device.Ref]time.Time{}
	for _, g := range inv.GPUs {
		for _, p := range g.Partitions {
			if !p.Made || slices.ContainsFunc(holds, func(h ledger.Hold) bool { return h.Device.Overlaps(p.Ref) }) {
				continue
			}
			first, known := o.orphanSince[p.Ref]
			if !known {
				first = now
			}
			since[p.Ref] = first
			if due := first.Add(drainGrace); due.After(now) {
				next = earlier(next, due)
			} else {
				orphans = append(orphans, withdrawal{use: use{Device: p.Ref, Reason: availability.Draining}})
			}
		}
	}
	o.orphanSince = since
	return orphans, next
}

// debounce delays the return of hardware, so that a device which goes from one holder to the next is withdrawn once
// (TestAGPUThatChangesHandsCostsNoWrite): each update of a slice makes the scheduler retry all pods that wait for a claim.
type debounce struct {
	delay   time.Duration
	entries map[holding]debounced
	// withdrawals counts what the last update withdrew because of a holder.
	withdrawals int
}

type debounced struct {
	withdrawn []withdrawal
	// availableSince is zero while a withdrawal is current.
	availableSince time.Time
}

// update returns the withdrawals to publish, and when to call it again (zero: at the next change). A new withdrawal counts at once;
// the last one of a device stays for the delay.
func (d *debounce) update(now time.Time, current []withdrawal) ([]withdrawal, time.Time) {
	if d.entries == nil {
		d.entries = map[holding]debounced{}
	}
	d.withdrawals = 0
	present := map[holding][]withdrawal{}
	for _, w := range current {
		at := holding{w.Device, w.Holder}
		present[at] = append(present[at], w)
	}
	for at, withdrawn := range present {
		if hasHolder(withdrawn) && !hasHolder(d.entries[at].withdrawn) {
			d.withdrawals++
		}
		d.entries[at] = debounced{withdrawn: withdrawn}
	}
	var next time.Time
	var all []withdrawal
	for at, entry := range d.entries {
		if len(present[at]) == 0 {
			if entry.availableSince.IsZero() {
				entry.availableSince = now
				d.entries[at] = entry
			}
			due := entry.availableSince.Add(d.delay)
			if !due.After(now) {
				delete(d.entries, at)
				continue
			}
			next = earlier(next, due)
		}
		all = append(all, entry.withdrawn...)
	}
	slices.SortFunc(all, compareWithdrawals)
	return all, next
}

func hasHolder(withdrawn []withdrawal) bool {
	return slices.ContainsFunc(withdrawn, func(w withdrawal) bool { return w.Reason != availability.Unhealthy })
}
