// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// obstacle is one reason not to offer hardware, as a taint says it.
type obstacle struct {
	key, value string
	// share is what the obstacle is in the way of, by holder; zero for all of the hardware.
	share  device.Share
	holder ledger.Holder
}

// by is an obstacle to what a holder has.
func by(h ledger.Hold, key string) obstacle {
	o := obstacle{key: key, value: "true", share: h.Share}
	if !h.Share.Whole() {
		o.holder = h.Holder
	}
	return o
}

// findObstacles says which hardware must not be offered to the scheduler and why, and when time alone will change the answer
// (zero: never). Holds of claims are none: the scheduler made them and knows them.
func findObstacles(inv device.Inventory, holds []ledger.Hold, now time.Time) (map[device.Ref][]obstacle, time.Time) {
	found := map[device.Ref]map[obstacle]bool{}
	add := func(ref device.Ref, o obstacle) {
		if found[ref] == nil {
			found[ref] = map[obstacle]bool{}
		}
		found[ref][o] = true
	}
	var next time.Time
	for _, g := range inv.GPUs {
		if !g.Health.Healthy() {
			add(g.Ref(), obstacle{key: TaintUnhealthy, value: g.Health.Reason})
		}
		for _, p := range g.Partitions {
			if !p.Health.Healthy() {
				add(p.Ref, obstacle{key: TaintUnhealthy, value: p.Health.Reason})
			}
		}
	}
	for _, h := range holds {
		switch {
		case h.Holder.Kind == ledger.KindPod:
			add(h.Device, by(h, TaintHeldByPod))
		case h.Unreadable:
			add(h.Device, by(h, TaintDraining))
		case h.State == ledger.StateDraining:
			if due := h.Since.Add(drainGrace); due.After(now) {
				next = earlier(next, due)
			} else {
				add(h.Device, by(h, TaintDraining))
			}
		}
	}
	obstacles := make(map[device.Ref][]obstacle, len(found))
	for ref, set := range found {
		obstacles[ref] = slices.SortedFunc(maps.Keys(set), byKey)
	}
	return obstacles, next
}

func byKey(a, b obstacle) int {
	return cmp.Or(strings.Compare(a.key, b.key), strings.Compare(a.value, b.value), strings.Compare(a.holder.ID, b.holder.ID))
}

// against are the obstacles to giving out that hardware: those of everything that it overlaps.
func against(ref device.Ref, obstacles map[device.Ref][]obstacle) []obstacle {
	return compact(overlapping(ref, obstacles))
}

// besides are the obstacles to giving out shares of a device, and how much of its memory others have beyond what the scheduler
// counts: the part of a claim drains while it is still allocated, or allocated again, where kubelet unprepares what a pod uses.
func besides(ref device.Ref, obstacles map[device.Ref][]obstacle, held given) (found []obstacle, taken uint64) {
	for _, o := range obstacles[ref] {
		taken += o.share.Bytes - min(o.share.Bytes, held.counted[what{ref, o.holder}])
	}
	found = slices.DeleteFunc(overlapping(ref, obstacles), func(o obstacle) bool { return slices.Contains(obstacles[ref], o) && !o.share.Whole() })
	return compact(found), taken
}

func overlapping(ref device.Ref, obstacles map[device.Ref][]obstacle) []obstacle {
	var all []obstacle
	for other, found := range obstacles {
		if other.Overlaps(ref) {
			all = append(all, found...)
		}
	}
	return all
}

// compact has each key once, as a device can have it as a taint.
func compact(obstacles []obstacle) []obstacle {
	slices.SortFunc(obstacles, byKey)
	return slices.CompactFunc(obstacles, func(a, b obstacle) bool { return a.key == b.key })
}

// orphans are partitions that were made for a claim and that nobody holds. They are in the way until they are destroyed.
type orphans struct {
	since map[device.Ref]time.Time
}

// find adds those that have been without a holder for the usual while to obstacles, and says when the next will have been.
// Inventory and holds are read one after the other, so that one which comes or goes may look like an orphan for a moment.
func (o *orphans) find(inv device.Inventory, holds []ledger.Hold, now time.Time, obstacles map[device.Ref][]obstacle) time.Time {
	var next time.Time
	since := map[device.Ref]time.Time{}
	for _, g := range inv.GPUs {
		for _, p := range g.Partitions {
			if !p.Made || slices.ContainsFunc(holds, func(h ledger.Hold) bool { return h.Device.Overlaps(p.Ref) }) {
				continue
			}
			first, known := o.since[p.Ref]
			if !known {
				first = now
			}
			since[p.Ref] = first
			if due := first.Add(drainGrace); due.After(now) {
				next = earlier(next, due)
			} else if len(obstacles[p.Ref]) == 0 {
				obstacles[p.Ref] = []obstacle{{key: TaintDraining, value: "true"}}
			}
		}
	}
	o.since = since
	return next
}
