// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Keys of the taints by which a device is withdrawn from the scheduler, effect NoSchedule. They are part of the API: people
// write tolerations and dashboards for them.
const (
	// TaintHeldByPod marks a device that a pod has through an extended resource limit; the value is "true".
	TaintHeldByPod = "tandem-gpu.dev/held-by-pod"
	// TaintHeldByClaim marks a device of which a claim has a part, or which is a part of what a claim has; the value is "true".
	// The devices of a GPU exclude each other by counters where it is partitioned on demand, so this is rare: policy has
	// changed while claims had it. It also marks what a claim has from another pool, where the scheduler does not see it, and what
	// claims have parts of that is not shared any more.
	TaintHeldByClaim = "tandem-gpu.dev/held-by-claim"
	// TaintDraining marks a device that containers may still use although no claim or limit is entitled to it any more; the
	// value is "true".
	TaintDraining = "tandem-gpu.dev/draining"
	// TaintUnhealthy marks a device on which work must not be placed; the value is the reason (device.Health).
	TaintUnhealthy = "tandem-gpu.dev/unhealthy"
)

// drainGrace is how long a claim's hold may drain before the scheduler is told. A pod that ends in order drains for less,
// and is not worth two writes.
const drainGrace = 2 * time.Second

// Capabilities are fields of ResourceSlices that servers before 1.36 drop silently by default (feature gates DRADeviceTaints,
// DRADeviceBindingConditions, DRAPartitionableDevices and DRAConsumableCapacity).
type Capabilities struct{ Taints, BindingConditions, Counters, Shares bool }

// Facts are what an Offer depends on, all of one moment.
type Facts struct {
	Inventory device.Inventory
	Holds     []ledger.Hold
	// Claims are those to which the scheduler has given devices, as far as that is known beyond Holds; nil is fine.
	Claims []v1alpha1.AllocatedClaim
	// ClaimsLate says that Claims may lack some that were allocated before: no GPU goes to another pool meanwhile.
	ClaimsLate bool
	// Kept is what the API server keeps.
	Kept Capabilities
	Now  time.Time
}

// Offer decides which devices the slices offer as time goes by. The publisher has one, and so have simulations. It is not safe
// for concurrent use.
type Offer struct {
	// NodeName is the name of the node's pool, and begins the names of the others.
	NodeName string
	// ReturnDelay is how long hardware must have been free before it is offered again. Zero returns it at once.
	ReturnDelay time.Duration
	// Offered tells the GPUs that are for claims; nil means all.
	Offered func(device.GPU) bool
	// Strict makes the scheduler wait for the ledger before it binds a pod, where the API server keeps binding conditions.
	Strict  bool
	waiting offers
	orphans orphans
	// own says of a GPU by name whether it is published in a pool of its own.
	own    map[string]bool
	shapes shapes
	// profiles are those that a GPU had last, by UUID.
	profiles map[string][]device.Profile
}

// layout is what should be published.
type layout struct {
	pools  map[string]resourceslice.Pool
	counts deviceCounts
	left   []excluded
	// next is when time alone will change it; zero: never.
	next time.Time
}

// Pools are what the node's pools should say, by name, and when time alone will change that (zero: never).
func (o *Offer) Pools(f Facts) (map[string]resourceslice.Pool, time.Time) {
	l := o.look(f)
	return l.pools, l.next
}

// Found tells which slices of the node the API server has; called once, before anything is published. A GPU stays in the pool
// from which claims have got it. One that is found in both was on its way when an agent ended: then the claims decide, and where
// there are none, policy.
func (o *Offer) Found(published []resourceapi.ResourceSlice) {
	found := map[string]origin{}
	for _, slice := range published {
		for _, d := range slice.Spec.Devices {
			gpu := device.GPUName(d.Name)
			found[gpu] = found[gpu].or(o.origin(slice.Spec.Pool.Name))
		}
	}
	o.own = map[string]bool{}
	for gpu, from := range found {
		if from.own != from.node {
			o.own[gpu] = from.own
		}
	}
}

func (o *Offer) look(f Facts) layout {
	o.waiting.returnDelay = o.ReturnDelay
	inv, holds := f.Inventory, f.Holds
	if o.Offered != nil {
		// Obstacles of the others would count as withdrawals.
		inv.GPUs = slices.DeleteFunc(slices.Clone(inv.GPUs), func(g device.GPU) bool { return !o.Offered(g) })
		holds = slices.DeleteFunc(slices.Clone(holds), func(h ledger.Hold) bool { _, ours := inv.ByUUID(h.Device.GPU); return !ours })
	}
	found, drained := findObstacles(inv, holds, f.Now)
	orphaned := o.orphans.find(inv, holds, f.Now, found)
	obstacles, returns := o.waiting.settle(f.Now, found)

	gpus, left := publishable(inv)
	l := layout{pools: map[string]resourceslice.Pool{}, left: left, next: earlier(earlier(drained, orphaned), returns)}
	l.counts.withdrawals = o.waiting.withdrawals
	strict := o.Strict && f.Kept.BindingConditions
	origins := o.origins(gpus, holds, f.Claims)
	shaped := make(map[string]*gpuShape, len(gpus))
	for i, g := range gpus {
		from, pinned := origins[g.Name()]
		g = o.remembered(g, pinned)
		gpus[i] = g
		if len(g.Profiles) > 0 && (g.Dynamic || o.own[g.Name()] || from.own) {
			shaped[g.Name()] = o.shapes.of(g, strict)
		}
	}
	given := o.givenOut(gpus, shaped, holds, f.Claims)
	var inPool []device.Device
	for _, g := range gpus {
		held, shape := given[g.UUID], shaped[g.Name()]
		from, pinned := origins[g.Name()]
		switch o.place(g, from, pinned || f.ClaimsLate, f.Kept.Counters && shape != nil && len(shape.possible) > 0) {
		case inNodePool:
			devices, odd := whole(g)
			inPool, l.left = append(inPool, devices...), append(l.left, odd...)
		case inOwnPool:
			p := newGPUPool(g, shape, held, obstacles)
			l.pools[device.OwnPool(o.NodeName, g)] = resourceslice.Pool{Slices: p.slices()}
			l.counts.add(p.counts())
		case nowhere:
			l.counts.withdrawn++
		}
	}
	built, counts := nodeSlices(inPool, obstacles, given, f.Kept)
	l.pools[o.NodeName] = resourceslice.Pool{Slices: built}
	l.counts.add(counts)
	l.counts.excluded = len(l.left)
	if strict {
		for _, slice := range built {
			for i := range slice.Devices {
				slice.Devices[i] = strictly(slice.Devices[i])
			}
		}
	}
	return l
}

// noProfile is the ID of none: of a whole GPU, or of a partition of which only the place is known.
const noProfile = -1

// offers delays the return of hardware, so that a device which changes hands does not make the scheduler look twice. Every
// ResourceSlice update makes it retry all pods that wait for devices.
type offers struct {
	returnDelay time.Duration
	withheld    map[what]withheld
	// withdrawals counts what the last settle withdrew because of who holds it.
	withdrawals int
}

// what is withheld: hardware, or what of it one of several holders has.
type what struct {
	device device.Ref
	holder ledger.Holder
}

type withheld struct {
	obstacles []obstacle
	// freeSince is zero while an obstacle exists.
	freeSince time.Time
}

// settle takes the obstacles of this moment and returns those to publish, and when to ask again (zero: at the next
// change). A new obstacle counts at once, the last one to go lingers for the return delay.
func (o *offers) settle(now time.Time, current map[device.Ref][]obstacle) (map[device.Ref][]obstacle, time.Time) {
	if o.withheld == nil {
		o.withheld = map[what]withheld{}
	}
	o.withdrawals = 0
	present := map[what][]obstacle{}
	for ref, obstacles := range current {
		for _, found := range obstacles {
			at := what{ref, found.holder}
			present[at] = append(present[at], found)
		}
	}
	for at, obstacles := range present {
		if isHeld(obstacles) && !isHeld(o.withheld[at].obstacles) {
			o.withdrawals++
		}
		o.withheld[at] = withheld{obstacles: obstacles}
	}
	var next time.Time
	settled := make(map[device.Ref][]obstacle, len(o.withheld))
	for at, w := range o.withheld {
		if len(present[at]) == 0 {
			if w.freeSince.IsZero() {
				w.freeSince = now
				o.withheld[at] = w
			}
			due := w.freeSince.Add(o.returnDelay)
			if !due.After(now) {
				delete(o.withheld, at)
				continue
			}
			next = earlier(next, due)
		}
		settled[at.device] = append(settled[at.device], w.obstacles...)
	}
	for _, obstacles := range settled {
		slices.SortFunc(obstacles, byKey)
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
