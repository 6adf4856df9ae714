// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"slices"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// noProfile is the profile ID of a whole GPU, and of a partition of which only the placement is known.
const noProfile = -1

// sourcePools are the kinds of pools from which devices were allocated. Neither is set if that is not known.
type sourcePools struct{ node, gpu bool }

func (a sourcePools) or(b sourcePools) sourcePools {
	return sourcePools{node: a.node || b.node, gpu: a.gpu || b.gpu}
}

// allocated is what claims have of one GPU, from the ledger and from the scheduler's allocations.
type allocated struct {
	// profiles has the profile ID of each device: a placement alone does not identify a partition.
	profiles map[device.Ref]int
	// from has the pools of each device.
	from map[device.Ref]sourcePools
	// shared are the devices of which claims have a part.
	shared map[device.Ref]bool
	// counted is the memory that the scheduler counts for a claim.
	counted map[holding]uint64
}

// holding identifies what one holder has of a device.
type holding struct {
	device device.Ref
	holder availability.Holder
}

func (o *Offer) allocated(g device.GPU, shape *gpuShape, holds []ledger.Hold, claims []v1alpha1.AllocatedClaim) allocated {
	a := allocated{
		profiles: map[device.Ref]int{}, from: map[device.Ref]sourcePools{}, shared: map[device.Ref]bool{}, counted: map[holding]uint64{},
	}
	add := func(ref device.Ref, profileID int, from sourcePools) {
		if _, known := a.profiles[ref]; !known || profileID != noProfile {
			a.profiles[ref] = profileID
		}
		a.from[ref] = a.from[ref].or(from)
	}
	for _, h := range holds {
		if h.Device.GPU == g.UUID && h.Use().Reason == availability.HeldByClaim {
			add(h.Device, noProfile, poolOfHold(h, g))
			a.shared[h.Device] = a.shared[h.Device] || !h.Share.Whole()
		}
	}
	for _, c := range claims {
		for _, name := range c.Devices {
			p, known := partitionNamed(name, g, shape)
			if !known {
				continue
			}
			add(p.Ref, p.ProfileID, o.poolOfClaim(c, g))
			for _, share := range c.Shares {
				if share.Device == name {
					a.shared[p.Ref] = true
					a.counted[holding{p.Ref, availability.Holder{Kind: availability.Claim, ID: string(c.UID)}}] = uint64(max(share.Memory, 0))
				}
			}
		}
	}
	return a
}

// sourcePools returns the pools from which any device of the GPU was allocated, and whether claims use the GPU. A draining hold
// counts, and so does the allocation of a device that no longer exists.
func (o *Offer) sourcePools(g device.GPU, holds []ledger.Hold, claims []v1alpha1.AllocatedClaim) (from sourcePools, inUse bool) {
	for _, h := range holds {
		if h.Holder.Kind == ledger.KindClaim && h.Device.GPU == g.UUID {
			from, inUse = from.or(poolOfHold(h, g)), true
		}
	}
	for _, c := range claims {
		if slices.ContainsFunc(c.Devices, func(name string) bool { return device.GPUName(name) == g.Name() }) {
			from, inUse = from.or(o.poolOfClaim(c, g)), true
		}
	}
	return from, inUse
}

func (o *Offer) poolOfClaim(c v1alpha1.AllocatedClaim, g device.GPU) sourcePools {
	if slices.Contains(c.Pools, device.OwnPool(o.NodeName, g)) {
		return sourcePools{gpu: true}
	}
	return sourcePools{node: slices.Contains(c.Pools, o.NodeName)}
}

// poolOfHold returns the pool of a held device if the hold implies it: only GPU pools offer partitions that Tandem creates.
func poolOfHold(h ledger.Hold, g device.GPU) sourcePools {
	return sourcePools{gpu: slices.ContainsFunc(g.Partitions, func(p device.Partition) bool { return p.Made && p.Ref == h.Device })}
}

// partitionNamed returns the partition of the GPU with that published name, existing or possible. The whole GPU is one without a
// profile.
func partitionNamed(name string, g device.GPU, shape *gpuShape) (device.Partition, bool) {
	if name == g.Name() {
		return device.Partition{Ref: g.Ref(), ProfileID: noProfile}, true
	}
	for _, p := range g.Partitions {
		if p.Name() == name {
			return p, true
		}
	}
	if shape == nil {
		return device.Partition{}, false
	}
	p, known := shape.possible[name]
	return p, known
}

// fromOther reports whether ref was allocated from a pool the GPU is not published in, where the scheduler cannot count it.
func (a allocated) fromOther(ref device.Ref, inGPUPool bool) bool {
	from := a.from[ref]
	if inGPUPool {
		return from.node && !from.gpu
	}
	return from.gpu && !from.node
}

// blocks reports whether allocations prevent ref from being allocated in the node pool: those of other devices that overlap it, and
// its own from the GPU pool.
func (a allocated) blocks(ref device.Ref) bool {
	return a.fromOther(ref, false) || overlapsAnother(a.profiles, ref)
}

// overlapsAnother reports whether another device overlaps ref.
func overlapsAnother(devices map[device.Ref]int, ref device.Ref) bool {
	for other := range devices {
		if other != ref && other.Overlaps(ref) {
			return true
		}
	}
	return false
}
