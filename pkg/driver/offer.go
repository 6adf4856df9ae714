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
	"github.com/tandem-gpu/tandem/pkg/mig"
)

// Capabilities are fields of ResourceSlices that API servers before 1.36 drop by default (feature gates DRADeviceTaints,
// DRADeviceBindingConditions, DRAPartitionableDevices and DRAConsumableCapacity).
type Capabilities struct{ Taints, BindingConditions, Counters, Shares bool }

// Facts are what an Offer depends on, all read at one moment.
type Facts struct {
	Inventory device.Inventory
	Holds     []ledger.Hold
	// Claims are allocated devices of this node, as far as the controller reported them; nil is fine.
	Claims []v1alpha1.AllocatedClaim
	// ClaimsLate means that Claims may be incomplete: no GPU changes its pool.
	ClaimsLate bool
	// Kept are the fields that the API server keeps.
	Kept Capabilities
	Now  time.Time
}

// Offer decides what the node's slices offer, from one set of Facts to the next. The publisher has one, and so have simulations.
// It is not safe for concurrent use.
type Offer struct {
	// NodeName is the name of the node pool, and the prefix of the names of GPU pools.
	NodeName string
	// ReturnDelay is how long hardware must be available again before it is offered. Zero offers it at once.
	ReturnDelay time.Duration
	// Offered selects the GPUs that serve claims; nil means all.
	Offered func(device.GPU) bool
	// Strict adds binding conditions, where the API server keeps them.
	Strict bool

	debounce debounce
	// orphanSince is when a created partition was first found without a hold.
	orphanSince map[device.Ref]time.Time
	// inGPUPool records by GPU name whether the GPU was published in its GPU pool last.
	inGPUPool map[string]bool
	// shapes are those of the last build by GPU name.
	shapes map[string]*gpuShape
	// profiles are the last known ones by GPU UUID.
	profiles map[string][]device.Profile
}

// layout is what should be published.
type layout struct {
	pools    map[string]resourceslice.Pool
	counts   deviceCounts
	excluded []excluded
	// next is when the layout changes although the Facts do not; zero: never.
	next time.Time
}

// Pools returns the pools of the node by name, and when they change although the Facts do not (zero: never).
func (o *Offer) Pools(f Facts) (map[string]resourceslice.Pool, time.Time) {
	l := o.build(f)
	return l.pools, l.next
}

// SetPublished takes the slices that earlier agents published. Called once, before the first build: a GPU stays in the pool from
// which claims were allocated its devices (TestPoolsOutliveAnAgent). A GPU in both pools was changing its pool when an agent
// ended; its claims decide, and without claims the node configuration (TestGPUPublishedInBothPools).
func (o *Offer) SetPublished(published []resourceapi.ResourceSlice) {
	found := map[string]sourcePools{}
	for _, slice := range published {
		for _, d := range slice.Spec.Devices {
			gpu := device.GPUName(d.Name)
			found[gpu] = found[gpu].or(sourcePools{node: slice.Spec.Pool.Name == o.NodeName, gpu: slice.Spec.Pool.Name != o.NodeName})
		}
	}
	o.inGPUPool = map[string]bool{}
	for gpu, pools := range found {
		if pools.gpu != pools.node {
			o.inGPUPool[gpu] = pools.gpu
		}
	}
}

// build lays out all pools: it withdraws what is unavailable, chooses the pool of each GPU, and describes the devices.
func (o *Offer) build(f Facts) layout {
	if o.inGPUPool == nil {
		o.inGPUPool = map[string]bool{}
	}
	if o.shapes == nil {
		o.shapes, o.profiles = map[string]*gpuShape{}, map[string][]device.Profile{}
	}
	inv, holds := f.Inventory, f.Holds
	if o.Offered != nil {
		// The metric must not count withdrawals of GPUs that are not offered.
		inv.GPUs = slices.DeleteFunc(slices.Clone(inv.GPUs), func(g device.GPU) bool { return !o.Offered(g) })
		holds = slices.DeleteFunc(slices.Clone(holds), func(h ledger.Hold) bool { _, ours := inv.ByUUID(h.Device.GPU); return !ours })
	}
	withdrawn, next := o.withdrawn(inv, holds, f.Now)
	gpus, left := publishable(inv)
	l := layout{pools: map[string]resourceslice.Pool{}, excluded: left, next: next}
	l.counts.withdrawals = o.debounce.withdrawals
	strict := o.Strict && f.Kept.BindingConditions

	var inNodePool []device.Device
	allocations := map[string]allocated{}
	for _, g := range gpus {
		from, inUse := o.sourcePools(g, holds, f.Claims)
		g = o.withKnownProfiles(g, inUse)
		var shape *gpuShape
		if len(g.Profiles) > 0 && (g.Dynamic || o.inGPUPool[g.Name()] || from.gpu) {
			shape = o.shape(g, strict)
		}
		a := o.allocated(g, shape, holds, f.Claims)
		canPartition := f.Kept.Counters && shape != nil && len(shape.possible) > 0
		switch ownPool := o.choosePool(g, from, inUse || f.ClaimsLate, canPartition); {
		case ownPool && canPartition:
			p := newGPUPool(g, shape, a, withdrawn)
			l.pools[device.OwnPool(o.NodeName, g)] = resourceslice.Pool{Slices: p.slices()}
			l.counts.add(p.counts())
		case ownPool:
			// Claims have devices from its GPU pool, which cannot be published any more, and the node pool cannot count them.
			l.counts.withdrawn++
		default:
			devices, unusable := nodePoolDevices(g)
			inNodePool, l.excluded = append(inNodePool, devices...), append(l.excluded, unusable...)
			allocations[g.UUID] = a
		}
	}
	built, counts := nodeSlices(inNodePool, withdrawn, allocations, f.Kept)
	l.pools[o.NodeName] = resourceslice.Pool{Slices: built}
	l.counts.add(counts)
	l.counts.excluded = len(l.excluded)
	if strict {
		for _, slice := range built {
			for i := range slice.Devices {
				slice.Devices[i] = withBindingConditions(slice.Devices[i])
			}
		}
	}
	return l
}

// choosePool decides whether the GPU belongs to its GPU pool, and records the answer. It goes where its devices were allocated from:
// the scheduler identifies an allocated device by pool and name, and returns its counters when that device disappears. A GPU that
// is in use, from both pools or from an unknown one, stays where it is.
func (o *Offer) choosePool(g device.GPU, from sourcePools, inUse, canPartition bool) bool {
	own := canPartition && g.Dynamic && (g.MIGEnabled || mig.Switchable(g))
	before, known := o.inGPUPool[g.Name()]
	switch {
	case from.gpu != from.node:
		own = from.gpu
	case known && inUse:
		own = before
	}
	o.inGPUPool[g.Name()] = own
	return own
}

// withKnownProfiles returns the GPU with the profiles of the last build if NVML returned none this time, or fewer while claims use
// the GPU: an NVML error must not remove allocated devices from the slices (TestGPUWithUnreadableProfiles).
func (o *Offer) withKnownProfiles(g device.GPU, inUse bool) device.GPU {
	known := o.profiles[g.UUID]
	fewer := slices.ContainsFunc(known, func(p device.Profile) bool {
		return !slices.ContainsFunc(g.Profiles, func(q device.Profile) bool { return q.ID == p.ID })
	})
	if len(g.Profiles) == 0 || inUse && fewer {
		g.Profiles = known
		return g
	}
	o.profiles[g.UUID] = g.Profiles
	return g
}

// earlier returns the earlier of two times; zero is never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}
