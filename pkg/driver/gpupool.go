// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mig"
)

// gpuPool is what a GPU that is partitioned on demand publishes, in a pool of its own: the whole GPU and every partition that
// could be made, all at once, and counters by which the scheduler sees what excludes what (KEP-4815). What somebody other than
// the scheduler has given out is subtracted from the counters, which no toleration gets around and which changes one small slice.
//
// The scheduler's rules (k8s.io/dynamic-resource-allocation/structured, checkAvailableCounters): available is what is published
// less what allocated devices in the slices consume; a device that is not in the slices any more consumes nothing; one counter
// below zero blocks every device of the pool. Hence the pool of its own, and hence what is allocated stays published and is
// never subtracted.
type gpuPool struct {
	*gpuShape
	gpu device.GPU
	// allocated is what the scheduler has given to claims, and that it counts itself, with the profile as far as it is known.
	allocated map[device.Ref]int
	// withdrawn is what others have, and limited what of it limits have.
	withdrawn, limited []device.Ref
	// retiring offers nothing but what is allocated already.
	retiring bool
}

// newGPUPool takes what claims have of the GPU, and the node's obstacles.
func newGPUPool(g device.GPU, shape *gpuShape, held given, obstacles map[device.Ref][]obstacle) gpuPool {
	p := gpuPool{gpuShape: shape, gpu: g, allocated: map[device.Ref]int{}, retiring: !g.Dynamic}
	for ref, profileID := range held.profiles {
		if p.publishes(ref, profileID) && !held.elsewhere(ref, true) {
			p.allocated[ref] = profileID
		} else {
			// A claim has it from the node's pool, or an administrator has removed a partition that a claim has. Its place is
			// not free before the claim has ended.
			p.withdrawn = append(p.withdrawn, ref)
		}
	}
	for ref, found := range obstacles {
		drains := !slices.ContainsFunc(found, func(o obstacle) bool { return o.key != TaintDraining })
		// What has been given out again meanwhile is the scheduler's business.
		if ref.GPU == g.UUID && !(drains && p.isAllocated(ref)) {
			p.withdrawn = append(p.withdrawn, ref)
		}
		if ref.GPU == g.UUID && slices.ContainsFunc(found, func(o obstacle) bool { return o.key == TaintHeldByPod }) {
			p.limited = append(p.limited, ref)
		}
	}
	return p
}

func (p gpuPool) isAllocated(ref device.Ref) bool {
	_, allocated := p.allocated[ref]
	return allocated
}

// slices are the counters first, then the devices.
func (p gpuPool) slices() []resourceslice.Slice {
	set := resourceapi.CounterSet{Name: p.counterSet(), Counters: asCounters(p.counters())}
	built := []resourceslice.Slice{{SharedCounters: []resourceapi.CounterSet{set}}}
	if !p.gpu.MIGEnabled || mig.Switchable(p.gpu) || p.isAllocated(p.gpu.Ref()) {
		return append(built, p.devices...)
	}
	return append(built, p.partitions...)
}

// counters are what the scheduler may count on: what there is less what others have, but at least what it has given out itself.
func (p gpuPool) counters() mig.Counters {
	counters := maps.Clone(p.free)
	for _, s := range p.standing {
		counters[s.Name()] = 1
		if p.isTaken(s) {
			counters[s.Name()] = 0
		}
	}
	for _, ref := range p.withdrawn {
		// Where it could be several profiles, the most of each counter.
		for name, n := range p.takes(ref, noProfile, func(a, b int64) int64 { return max(a, b) }) {
			counters[name] = max(counters[name]-n, 0)
		}
	}
	if p.retiring {
		for name := range counters {
			counters[name] = 0
		}
	}
	floor := mig.Counters{}
	for ref, profileID := range p.allocated {
		if slices.ContainsFunc(p.limited, ref.Overlaps) {
			// Its claim has lost it. Counted, the room would look free as soon as the claim is deleted, and the pod that comes
			// instead would lose it again. Not counted, it takes the pool below zero, which blocks no other GPU.
			continue
		}
		// The least: more than is allocated would be given out.
		for name, n := range p.takes(ref, profileID, func(a, b int64) int64 { return min(a, b) }) {
			floor[name] += n
		}
	}
	for name, n := range floor {
		if there, ofGPU := p.all[name]; ofGPU {
			// Somebody may have been allocated a part of what a claim still holds that was deleted: the scheduler counts one of
			// the two, and would give out the rest as if there were more than there is.
			n = min(n, there)
		}
		counters[name] = max(counters[name], n)
	}
	return counters
}

// isTaken reports whether somebody has a part of a standing partition's hardware by another name, or others have it.
func (p gpuPool) isTaken(s device.Partition) bool {
	profileID, allocated := p.allocated[s.Ref]
	replaced := allocated && profileID != noProfile && profileID != s.ProfileID
	return replaced || slices.ContainsFunc(p.withdrawn, s.Ref.Overlaps) || overlapsAnother(p.allocated, s.Ref)
}

// takes is what the device at ref consumes. Where its profile is not known and no such partition was made, several may be meant;
// choose says what of each counter is taken of what they take.
func (p gpuPool) takes(ref device.Ref, profileID int, choose func(a, b int64) int64) mig.Counters {
	if ref.Whole() {
		return p.all
	}
	if s, stands := p.standingAt(ref, profileID); stands {
		return mig.Counters{s.Name(): 1}
	}
	made := slices.IndexFunc(p.gpu.Partitions, func(q device.Partition) bool { return q.Made && q.Ref == ref })
	if profileID == noProfile && made >= 0 {
		profileID = p.gpu.Partitions[made].ProfileID
	}
	var takes mig.Counters
	for _, profile := range p.geometry.Profiles() {
		if !slices.Contains(profile.Placements, ref.Placement) || profileID != noProfile && profile.ID != profileID {
			continue
		}
		one := p.geometry.Takes(mig.Instance{ProfileID: profile.ID, Placement: ref.Placement})
		if takes == nil {
			takes = one
			continue
		}
		for name := range p.all {
			takes[name] = choose(takes[name], one[name])
		}
	}
	if takes == nil {
		return p.geometry.Takes(mig.Instance{ProfileID: noProfile, Placement: ref.Placement})
	}
	return takes
}

// counts has the GPU once, however many ways there are to partition it, and each partition that stands.
func (p gpuPool) counts() deviceCounts {
	var c deviceCounts
	c.count(p.gpu.Health, p.retiring || slices.ContainsFunc(p.withdrawn, device.Ref.Whole))
	for _, s := range p.gpu.Partitions {
		if _, stands := p.standingAt(s.Ref, s.ProfileID); stands {
			c.count(device.Device{GPU: p.gpu, Partition: s}.Health(), p.isTaken(s))
		}
	}
	return c
}
