// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/mig"
)

// Keys of the taints by which a device is withdrawn from the scheduler, effect NoSchedule. They are part of the API: people
// write tolerations and dashboards for them.
const (
	// TaintHeldByLimit marks a device that a pod has through an extended resource limit; the value is "true".
	TaintHeldByLimit = "tandem-gpu.dev/held-by-limit"
	// TaintHeldByClaim marks a device of which a claim has a part, or which is a part of what a claim has; the value is "true".
	// The devices of a GPU exclude each other by counters where it is partitioned on demand, so this is rare: policy has
	// changed while claims had it.
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
// DRADeviceBindingConditions and DRAPartitionableDevices).
type Capabilities struct{ Taints, BindingConditions, Counters bool }

// Facts are what an Offer depends on, all of one moment.
type Facts struct {
	Inventory device.Inventory
	Holds     []ledger.Hold
	// Claims are those to which the scheduler has given devices, as far as that is known beyond Holds; nil is fine.
	Claims []v1alpha1.AllocatedClaim
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
// from which claims have got it.
func (o *Offer) Found(published []resourceapi.ResourceSlice) {
	o.own = map[string]bool{}
	for _, slice := range published {
		for _, d := range slice.Spec.Devices {
			gpu, _, _ := strings.Cut(d.Name, partitionInfix)
			o.own[gpu] = slice.Spec.Pool.Name != o.NodeName
		}
	}
}

// partitionInfix ends the GPU's name in that of a partition (device.PartitionName).
const partitionInfix = "-mig-"

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
	shaped := make(map[string]*gpuShape, len(gpus))
	for _, g := range gpus {
		if len(g.Profiles) > 0 && (g.Dynamic || o.own[g.Name()]) {
			shaped[g.Name()] = o.shapes.of(g, strict)
		}
	}
	given := givenOut(gpus, shaped, holds, f.Claims)
	var shared []device.Device
	for _, g := range gpus {
		held, shape := given[g.UUID], shaped[g.Name()]
		switch o.place(g, held.pins, f.Kept.Counters && shape != nil && len(shape.possible) > 0) {
		case inNodePool:
			devices, odd := whole(g)
			shared, l.left = append(shared, devices...), append(l.left, odd...)
		case inOwnPool:
			p := newGPUPool(g, shape, held.profiles, obstacles)
			l.pools[OwnPool(o.NodeName, g)] = resourceslice.Pool{Slices: p.slices()}
			l.counts.add(p.counts())
		case nowhere:
			l.counts.withdrawn++
		}
	}
	built, counts := nodeSlices(shared, obstacles, given, f.Kept.Taints)
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

// OwnPool is the name of the pool of a GPU that is partitioned on demand: "<node>/gpu-<minor>". The scheduler tries pools in the
// order of their names.
func OwnPool(node string, g device.GPU) string { return fmt.Sprintf("%s/gpu-%02d", node, g.Minor) }

// servesPool reports whether a pool is the node's, or of one of its GPUs.
func (d *Driver) servesPool(pool string) bool {
	return pool == d.NodeName || strings.HasPrefix(pool, d.NodeName+"/")
}

// place is where a GPU is published.
type place int

const (
	inNodePool place = iota
	// inOwnPool has counters, by which its devices exclude each other.
	inOwnPool
	// nowhere: claims have devices from a pool of its own, which cannot be published as it was.
	nowhere
)

// place decides where the GPU is published, and remembers it; possible says whether it can be in a pool of its own. While claims
// have something of it (pinned), it stays where they got it: the scheduler knows an allocated device by pool and name, and gives
// its counters out again when it goes.
func (o *Offer) place(g device.GPU, pinned, possible bool) place {
	if o.own == nil {
		o.own = map[string]bool{}
	}
	own := possible && g.Dynamic && (g.MIGEnabled || mig.Switchable(g))
	if before, known := o.own[g.Name()]; known && pinned {
		own = before
	}
	o.own[g.Name()] = own
	switch {
	case !own:
		return inNodePool
	case !possible:
		return nowhere
	}
	return inOwnPool
}

// given is what of one GPU claims have.
type given struct {
	// profiles has what the scheduler has given to claims, and of partitions the profile ID: a place alone does not tell it.
	profiles map[device.Ref]int
	// pins reports that claims have, or had until a moment ago, something of it.
	pins bool
}

// givenOut says by GPU what claims have of it, from the ledger and from what the scheduler was seen to allocate.
func givenOut(
	gpus []device.GPU, shaped map[string]*gpuShape, holds []ledger.Hold, claims []v1alpha1.AllocatedClaim,
) map[string]given {
	all := map[string]given{}
	add := func(ref device.Ref, profileID int, allocated bool) {
		of := all[ref.GPU]
		of.pins = true
		if of.profiles == nil {
			of.profiles = map[device.Ref]int{}
		}
		if _, known := of.profiles[ref]; allocated && (!known || profileID != noProfile) {
			of.profiles[ref] = profileID
		}
		all[ref.GPU] = of
	}
	for _, h := range holds {
		if h.Holder.Kind == ledger.KindClaim {
			add(h.Device, noProfile, h.State != ledger.StateDraining && !h.Unreadable)
		}
	}
	if len(claims) == 0 {
		return all
	}
	byName := map[string]device.Partition{}
	for _, g := range gpus {
		byName[g.Name()] = device.Partition{Ref: g.Ref(), ProfileID: noProfile}
		for _, p := range g.Partitions {
			byName[p.Name()] = p
		}
	}
	for _, c := range claims {
		for _, name := range c.Devices {
			p, known := byName[name]
			if gpu, _, _ := strings.Cut(name, partitionInfix); !known && shaped[gpu] != nil {
				p, known = shaped[gpu].possible[name]
			}
			if known {
				add(p.Ref, p.ProfileID, true)
			}
		}
	}
	return all
}

// noProfile is the ID of none: of a whole GPU, or of a partition of which only the place is known.
const noProfile = -1

// offers delays the return of hardware, so that a device which changes hands does not make the scheduler look twice. Every
// ResourceSlice update makes it retry all pods that wait for devices.
type offers struct {
	returnDelay time.Duration
	withheld    map[device.Ref]withheld
	// withdrawals counts what the last settle withdrew because of who holds it.
	withdrawals int
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
		o.withheld = map[device.Ref]withheld{}
	}
	o.withdrawals = 0
	for ref, obstacles := range current {
		if isHeld(obstacles) && !isHeld(o.withheld[ref].obstacles) {
			o.withdrawals++
		}
		o.withheld[ref] = withheld{obstacles: obstacles}
	}
	var next time.Time
	settled := make(map[device.Ref][]obstacle, len(o.withheld))
	for ref, w := range o.withheld {
		if _, present := current[ref]; !present {
			if w.freeSince.IsZero() {
				w.freeSince = now
				o.withheld[ref] = w
			}
			due := w.freeSince.Add(o.returnDelay)
			if !due.After(now) {
				delete(o.withheld, ref)
				continue
			}
			next = earlier(next, due)
		}
		settled[ref] = w.obstacles
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
