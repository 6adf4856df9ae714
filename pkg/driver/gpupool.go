// SPDX-License-Identifier: Apache-2.0

// The pool of one dynamic GPU: counters, and devices for each partition that fits.

package driver

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mig"
)

// gpuPool is the pool of one dynamic GPU: the GPU, every possible partition, and counters. From the counters the scheduler computes
// which devices exclude each other (KEP-4815). A device that pods hold, or that drains, is subtracted from the counters: no
// toleration bypasses them, and one small slice changes. A device that is unhealthy or under maintenance is subtracted, too, and tainted:
// users see why, and a taint can evict.
//
// The scheduler (k8s.io/dynamic-resource-allocation/structured, checkAvailableCounters) subtracts the allocated devices in the
// slices from the published counters. A device that is not in the slices consumes nothing, and one counter below zero blocks every
// device of the pool. So each GPU has a pool of its own, and allocated devices stay published and are never subtracted here
// (allocations_test.go).
type gpuPool struct {
	gpu      device.GPU
	geometry mig.Geometry
	// unmanaged partitions have a counter of their own name: their part of the hardware is occupied whether they are used or not.
	unmanaged []device.Partition
	// allocated are the devices that the scheduler counts, with their profile IDs.
	allocated map[device.Ref]int
	// withdrawn are the devices that the scheduler cannot count. uncounted are those of them that a pod holds, or a claim that the
	// scheduler does not count.
	withdrawn, uncounted []device.Ref
	// tainted are withdrawals that no holder causes, nil if the API server drops taints.
	tainted []withdrawal
	// strict adds binding conditions to the devices.
	strict bool
	// uuids publishes those of partitions that were created for claims.
	uuids bool
}

func newGPUPool(g device.GPU, geometry mig.Geometry, a allocated, withdrawn []withdrawal, kept Capabilities) gpuPool {
	p := gpuPool{gpu: g, geometry: geometry, allocated: map[device.Ref]int{}, strict: kept.BindingConditions}
	p.unmanaged, _ = unmanagedPartitions(g)
	for ref, profileID := range a.profiles {
		if p.publishes(ref, profileID) && a.from[ref] != nodePool {
			p.allocated[ref] = profileID
		} else {
			// It was allocated from the node pool, or an administrator removed the partition. Its placement is free once the claim
			// ends.
			p.withdrawn = append(p.withdrawn, ref)
		}
	}
	for _, w := range withdrawn {
		if w.Device.GPU != g.UUID {
			continue
		}
		if !w.Reason.ByHolder() && kept.Taints {
			p.tainted = append(p.tainted, w)
		}
		// The scheduler counts a draining device that it allocated again.
		counted := w.Reason == availability.Draining && p.isAllocated(w.Device) && !w.uncounted
		if !counted && !slices.Contains(p.withdrawn, w.Device) {
			p.withdrawn = append(p.withdrawn, w.Device)
		}
		if w.Reason == availability.HeldByPod || w.uncounted {
			p.uncounted = append(p.uncounted, w.Device)
		}
	}
	return p
}

func (p gpuPool) isAllocated(ref device.Ref) bool {
	_, allocated := p.allocated[ref]
	return allocated
}

// slices returns the counters first. The devices follow: the unmanaged partitions, the possible ones, small ones first, and the
// whole GPU: the scheduler takes the first that fits a request. A partition that cannot exist beside an unmanaged one is published
// without enough counters, since a claim may have been allocated it.
func (p gpuPool) slices() []resourceslice.Slice {
	var devices []resourceapi.Device
	for _, partition := range p.unmanaged {
		devices = append(devices, p.consuming(device.Device{GPU: p.gpu, Partition: partition}))
	}
	possible := device.GPU{UUID: p.gpu.UUID, Minor: p.gpu.Minor, Profiles: p.geometry.Profiles()}.Possible()
	for _, instance := range p.geometry.Order() {
		at := slices.IndexFunc(possible, func(q device.Partition) bool {
			return q.ProfileID == instance.ProfileID && q.Ref.Placement == instance.Placement
		})
		if _, exists := p.unmanagedAt(possible[at].Ref, instance.ProfileID); !exists {
			devices = append(devices, p.consuming(device.Device{GPU: p.gpu, Partition: p.withUUID(possible[at])}))
		}
	}
	if !p.gpu.MIGEnabled || mig.Switchable(p.gpu) || p.isAllocated(p.gpu.Ref()) {
		devices = append(devices, p.consuming(device.Device{GPU: p.gpu}))
	}
	set := resourceapi.CounterSet{Name: p.counterSet(), Counters: publishedCounters(p.counters())}
	built := []resourceslice.Slice{{SharedCounters: []resourceapi.CounterSet{set}}}
	for chunk := range slices.Chunk(devices, resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures) {
		built = append(built, resourceslice.Slice{Devices: chunk})
	}
	return built
}

// withUUID adds the UUID of a partition that exists because it was created for a claim.
func (p gpuPool) withUUID(possible device.Partition) device.Partition {
	if !p.uuids {
		return possible
	}
	for _, q := range p.gpu.Partitions {
		if q.Made && q.Ref == possible.Ref && q.ProfileID == possible.ProfileID {
			possible.UUID, possible.Made = q.UUID, true
		}
	}
	return possible
}

// counters returns what the hardware has less what is withdrawn, but at least what is allocated (TestCountersFollowHolds). A static GPU,
// which was dynamic before, has none left.
func (p gpuPool) counters() mig.Counters {
	// GPU instances without a compute instance take their part, too.
	var occupied []mig.Instance
	for _, q := range p.gpu.Partitions {
		if !q.Made && !slices.ContainsFunc(occupied, func(i mig.Instance) bool { return i.Placement == q.Ref.Placement }) {
			occupied = append(occupied, mig.Instance{ProfileID: q.ProfileID, Placement: q.Ref.Placement, Capacity: q.Capacity})
		}
	}
	all, counters := p.geometry.Total(), p.geometry.Left(occupied)
	for _, s := range p.unmanaged {
		counters[s.Name()] = 1
		if p.isTaken(s) {
			counters[s.Name()] = 0
		}
	}
	for _, ref := range p.withdrawn {
		// Several profiles may be possible: subtract the most of each counter.
		for name, n := range p.takes(ref, noProfile, func(a, b int64) int64 { return max(a, b) }) {
			counters[name] = max(counters[name]-n, 0)
		}
	}
	if !p.gpu.Dynamic {
		// It offers nothing: a claim that has a partition may end before the controller reports it, and Prepare would refuse to create that
		// partition again.
		for name := range counters {
			counters[name] = 0
		}
		return counters
	}
	floor := mig.Counters{}
	for ref, profileID := range p.allocated {
		if slices.ContainsFunc(p.uncounted, ref.Overlaps) {
			// The claim is in conflict with that holder. If the counters included it, its placement would look free as soon as the claim is
			// deleted, and the next pod would meet the same conflict. Without it the pool goes below zero and is blocked.
			continue
		}
		// Several profiles may be possible: guarantee the least, since the scheduler would allocate the rest.
		for name, n := range p.takes(ref, profileID, func(a, b int64) int64 { return min(a, b) }) {
			floor[name] += n
		}
	}
	for name, n := range floor {
		if total, ofGPU := all[name]; ofGPU {
			// The scheduler may have allocated a part of what a deleted claim still holds. It counts one of the two; the sum would
			// offer more than the hardware has.
			n = min(n, total)
		}
		counters[name] = max(counters[name], n)
	}
	return counters
}

// isTaken reports whether an unmanaged partition is withdrawn, or claims have its hardware under another name.
func (p gpuPool) isTaken(s device.Partition) bool {
	profileID, allocated := p.allocated[s.Ref]
	replaced := allocated && profileID != noProfile && profileID != s.ProfileID
	return replaced || slices.ContainsFunc(p.withdrawn, s.Ref.Overlaps) || overlapsAnother(p.allocated, s.Ref)
}

// takes returns the counters that a device consumes. Where its profile is not known, choose combines those of the possible profiles.
func (p gpuPool) takes(ref device.Ref, profileID int, choose func(a, b int64) int64) mig.Counters {
	if ref.Whole() {
		return p.geometry.Total()
	}
	if s, found := p.unmanagedAt(ref, profileID); found {
		return mig.Counters{s.Name(): 1}
	}
	for _, q := range p.gpu.Partitions {
		if profileID == noProfile && q.Made && q.Ref == ref {
			profileID = q.ProfileID
		}
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
		for name := range p.geometry.Total() {
			takes[name] = choose(takes[name], one[name])
		}
	}
	if takes == nil {
		return p.geometry.Takes(mig.Instance{ProfileID: noProfile, Placement: ref.Placement})
	}
	return takes
}

// count counts the GPU once, and each unmanaged partition.
func (p gpuPool) count(c *deviceCounts) {
	c.count(p.gpu.Health, !p.gpu.Dynamic || slices.ContainsFunc(p.withdrawn, device.Ref.Whole))
	for _, s := range p.unmanaged {
		c.count(device.Device{GPU: p.gpu, Partition: s}.Health(), !p.gpu.Dynamic || p.isTaken(s))
	}
}

// unmanagedAt returns the unmanaged partition at that placement if it has the profile: an administrator may have replaced it.
func (p gpuPool) unmanagedAt(ref device.Ref, profileID int) (device.Partition, bool) {
	for _, s := range p.unmanaged {
		if s.Ref == ref && (profileID == noProfile || profileID == s.ProfileID) {
			return s, true
		}
	}
	return device.Partition{}, false
}

// publishes reports whether a device with that ref exists or is possible.
func (p gpuPool) publishes(ref device.Ref, profileID int) bool {
	if _, exists := p.unmanagedAt(ref, profileID); exists || ref.Whole() {
		return true
	}
	return ref.Compute == device.Placement{} && slices.ContainsFunc(p.geometry.Profiles(), func(profile device.Profile) bool {
		return slices.Contains(profile.Placements, ref.Placement)
	})
}

// counterSet has the name that NVIDIA's DRA driver uses.
func (p gpuPool) counterSet() string { return fmt.Sprintf("gpu-%d-counter-set", p.gpu.Minor) }

func (p gpuPool) consuming(d device.Device) resourceapi.Device {
	published := publishedDevice(d)
	consumed := publishedCounters(p.takes(d.Ref(), d.Partition.ProfileID, nil))
	for name, c := range consumed {
		if c.Value.IsZero() {
			delete(consumed, name)
		}
	}
	published.Taints = p.taints(d.Ref())
	if p.strict {
		published = withBindingConditions(published)
	}
	published.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: p.counterSet(), Counters: consumed}}
	return published
}

// taints returns the taints of a device that is unhealthy or under maintenance itself, or whose GPU is. While a withdrawal returns there
// may be two reasons; a device has each key once.
func (p gpuPool) taints(ref device.Ref) (taints []resourceapi.DeviceTaint) {
	concerns := func(w withdrawal) bool { return w.Device == ref || w.Device.Whole() }
	for _, w := range ownHealth(ref, slices.DeleteFunc(slices.Clone(p.tainted), func(w withdrawal) bool { return !concerns(w) })) {
		for _, t := range w.taints() {
			if !slices.ContainsFunc(taints, func(other resourceapi.DeviceTaint) bool { return other.Key == t.Key }) {
				taints = append(taints, t)
			}
		}
	}
	return taints
}

// publishedCounters converts counters to the API's type; memory is in bytes.
func publishedCounters(c mig.Counters) map[string]resourceapi.Counter {
	counters := make(map[string]resourceapi.Counter, len(c))
	for name, n := range c {
		counters[name] = resourceapi.Counter{Value: *resource.NewQuantity(n, resource.BinarySI)}
	}
	return counters
}
