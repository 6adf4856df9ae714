// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Keys of the taints by which a GPU is withdrawn from the scheduler, effect NoSchedule. They are part of the API: people
// write tolerations and dashboards for them.
const (
	// TaintHeldByLimit marks a GPU that a pod has through an extended resource limit; the value is "true".
	TaintHeldByLimit = "tandem-gpu.dev/held-by-limit"
	// TaintDraining marks a GPU that containers may still use although no claim or limit is entitled to it any more; the
	// value is "true".
	TaintDraining = "tandem-gpu.dev/draining"
	// TaintUnhealthy marks a GPU on which work must not be placed; the value is the reason (device.Health).
	TaintUnhealthy = "tandem-gpu.dev/unhealthy"
)

// drainGrace is how long a claim's hold may drain before the scheduler is told. A pod that ends in order drains for less,
// and is not worth two writes.
const drainGrace = 2 * time.Second

// Offer decides which devices the slices offer as time goes by. The publisher has one, and so have simulations. Its zero value
// withdraws and returns at once; it is not safe for concurrent use.
type Offer struct {
	// ReturnDelay is how long a GPU must have been free before it is offered again.
	ReturnDelay time.Duration
	// Offered tells the GPUs that are for claims; nil means all.
	Offered func(device.GPU) bool
	// Strict makes the scheduler wait for the ledger before it binds a pod.
	Strict  bool
	waiting offers
}

// Slices are what the node's slices should say at a moment, with taints or without, and when time alone will change that (zero:
// never).
func (o *Offer) Slices(inv device.Inventory, holds []ledger.Hold, taints bool, now time.Time) ([]resourceslice.Slice, time.Time) {
	built, _, _, next := o.look(inv, holds, taints, now)
	return built, next
}

func (o *Offer) look(inv device.Inventory, holds []ledger.Hold, taints bool, now time.Time) ([]resourceslice.Slice, deviceCounts, []excluded, time.Time) {
	o.waiting.returnDelay = o.ReturnDelay
	if o.Offered != nil {
		// Obstacles of the others would count as withdrawals.
		inv.GPUs = slices.DeleteFunc(slices.Clone(inv.GPUs), func(g device.GPU) bool { return !o.Offered(g) })
		holds = slices.DeleteFunc(slices.Clone(holds), func(h ledger.Hold) bool { _, ours := inv.ByUUID(h.Device.GPU); return !ours })
	}
	found, next := findObstacles(inv, holds, now)
	obstacles, returns := o.waiting.settle(now, found)
	built, counts, left := buildSlices(inv, obstacles, taints)
	if o.Strict {
		for _, slice := range built {
			for i := range slice.Devices {
				slice.Devices[i] = strictly(slice.Devices[i])
			}
		}
	}
	counts.withdrawals = o.waiting.withdrawals
	return built, counts, left, earlier(next, returns)
}

// obstacle is one reason not to offer a GPU, as a taint says it.
type obstacle struct{ key, value string }

// findObstacles says for each GPU (by UUID) why it must not be offered to the scheduler, and when time alone will change
// the answer (zero: never). Holds of claims are none: the scheduler made them and knows them.
func findObstacles(inv device.Inventory, holds []ledger.Hold, now time.Time) (map[string][]obstacle, time.Time) {
	found := map[string]map[obstacle]bool{}
	add := func(uuid string, o obstacle) {
		if found[uuid] == nil {
			found[uuid] = map[obstacle]bool{}
		}
		found[uuid][o] = true
	}
	var next time.Time
	for _, g := range inv.GPUs {
		if !g.Health.Healthy() {
			add(g.UUID, obstacle{TaintUnhealthy, g.Health.Reason})
		}
	}
	for _, h := range holds {
		switch {
		case h.Holder.Kind == ledger.KindLimit:
			add(h.Device.GPU, obstacle{TaintHeldByLimit, "true"})
		case h.Unreadable:
			add(h.Device.GPU, obstacle{TaintDraining, "true"})
		case h.State == ledger.StateDraining:
			if due := h.Since.Add(drainGrace); due.After(now) {
				next = earlier(next, due)
			} else {
				add(h.Device.GPU, obstacle{TaintDraining, "true"})
			}
		}
	}
	obstacles := make(map[string][]obstacle, len(found))
	for uuid, set := range found {
		obstacles[uuid] = slices.SortedFunc(maps.Keys(set), func(a, b obstacle) int { return strings.Compare(a.key, b.key) })
	}
	return obstacles, next
}

// offers delays the return of GPUs, so that a GPU which changes hands does not make the scheduler look twice. Every
// ResourceSlice update makes it retry all pods that wait for devices.
type offers struct {
	returnDelay time.Duration
	withheld    map[string]withheld
	// withdrawals counts the GPUs that the last settle withdrew because of who holds them.
	withdrawals int
}

type withheld struct {
	obstacles []obstacle
	// freeSince is zero while an obstacle exists.
	freeSince time.Time
}

// settle takes the obstacles of this moment and returns those to publish, and when to ask again (zero: at the next
// change). A new obstacle counts at once, the last one to go lingers for the return delay.
func (o *offers) settle(now time.Time, current map[string][]obstacle) (map[string][]obstacle, time.Time) {
	if o.withheld == nil {
		o.withheld = map[string]withheld{}
	}
	o.withdrawals = 0
	for uuid, obstacles := range current {
		if isHeld(obstacles) && !isHeld(o.withheld[uuid].obstacles) {
			o.withdrawals++
		}
		o.withheld[uuid] = withheld{obstacles: obstacles}
	}
	var next time.Time
	settled := make(map[string][]obstacle, len(o.withheld))
	for uuid, w := range o.withheld {
		if _, present := current[uuid]; !present {
			if w.freeSince.IsZero() {
				w.freeSince = now
				o.withheld[uuid] = w
			}
			due := w.freeSince.Add(o.returnDelay)
			if !due.After(now) {
				delete(o.withheld, uuid)
				continue
			}
			next = earlier(next, due)
		}
		settled[uuid] = w.obstacles
	}
	return settled, next
}

// isHeld reports whether one of the obstacles is a holder.
func isHeld(obstacles []obstacle) bool {
	return slices.ContainsFunc(obstacles, func(o obstacle) bool { return o.key != TaintUnhealthy })
}

// earlier of two moments, where zero is never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}
