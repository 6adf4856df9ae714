// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"maps"
	"reflect"
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
// toleration bypasses them, and one small slice changes.
//
// The scheduler (k8s.io/dynamic-resource-allocation/structured, checkAvailableCounters) subtracts the allocated devices in the
// slices from the published counters. A device that is not in the slices consumes nothing, and one counter below zero blocks every
// device of the pool. So each GPU has a pool of its own, and allocated devices stay published and are never subtracted here
// (allocations_test.go).
type gpuPool struct {
	*gpuShape
	gpu device.GPU
	// allocated are the devices that the scheduler counts, with their profile IDs.
	allocated map[device.Ref]int
	// withdrawn are the devices that the scheduler cannot count, heldByPods those of them that pods hold.
	withdrawn, heldByPods []device.Ref
	// closed offers nothing but what is allocated.
	closed bool
}

func newGPUPool(g device.GPU, shape *gpuShape, a allocated, withdrawn []withdrawal) gpuPool {
	p := gpuPool{gpuShape: shape, gpu: g, allocated: map[device.Ref]int{}, closed: !g.Dynamic}
	for ref, profileID := range a.profiles {
		if p.publishes(ref, profileID) && !a.fromOther(ref, true) {
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
		// The scheduler counts a draining device that it allocated again.
		if counted := w.Reason == availability.Draining && p.isAllocated(w.Device); !counted && !slices.Contains(p.withdrawn, w.Device) {
			p.withdrawn = append(p.withdrawn, w.Device)
		}
		if w.Reason == availability.HeldByPod {
			p.heldByPods = append(p.heldByPods, w.Device)
		}
	}
	return p
}

func (p gpuPool) isAllocated(ref device.Ref) bool {
	_, allocated := p.allocated[ref]
	return allocated
}

// slices returns the counters first, then the devices.
func (p gpuPool) slices() []resourceslice.Slice {
	set := resourceapi.CounterSet{Name: p.counterSet(), Counters: publishedCounters(p.counters())}
	built := []resourceslice.Slice{{SharedCounters: []resourceapi.CounterSet{set}}}
	if !p.gpu.MIGEnabled || mig.Switchable(p.gpu) || p.isAllocated(p.gpu.Ref()) {
		return append(built, p.devices...)
	}
	return append(built, p.partitions...)
}

// counters returns what the hardware has less what is withdrawn, but at least what is allocated (TestCountersFollowHolds).
func (p gpuPool) counters() mig.Counters {
	counters := maps.Clone(p.free)
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
	if p.closed {
		for name := range counters {
			counters[name] = 0
		}
	}
	floor := mig.Counters{}
	for ref, profileID := range p.allocated {
		if slices.ContainsFunc(p.heldByPods, ref.Overlaps) {
			// The claim is in conflict with a pod. If the counters included it, its placement would look free as soon as the claim is
			// deleted, and the next pod would meet the same conflict. Without it the pool goes below zero and is blocked.
			continue
		}
		// Several profiles may be possible: guarantee the least, since the scheduler would allocate the rest.
		for name, n := range p.takes(ref, profileID, func(a, b int64) int64 { return min(a, b) }) {
			floor[name] += n
		}
	}
	for name, n := range floor {
		if total, ofGPU := p.all[name]; ofGPU {
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
		return p.all
	}
	if s, found := p.unmanagedAt(ref, profileID); found {
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

// counts has the GPU once, and each unmanaged partition.
func (p gpuPool) counts() deviceCounts {
	var c deviceCounts
	c.count(p.gpu.Health, p.closed || slices.ContainsFunc(p.withdrawn, device.Ref.Whole))
	for _, s := range p.gpu.Partitions {
		if _, found := p.unmanagedAt(s.Ref, s.ProfileID); found {
			c.count(device.Device{GPU: p.gpu, Partition: s}.Health(), p.isTaken(s))
		}
	}
	return c
}

// gpuShape is what of a gpuPool does not depend on who uses the GPU. It is built once for a GPU and kept while the GPU looks the
// same: a GPU has dozens of devices, and the ledger changes with every pod (BenchmarkOffer).
type gpuShape struct {
	// gpu is without fields that do not affect the shape.
	gpu device.GPU
	// strict adds binding conditions to the devices.
	strict   bool
	geometry mig.Geometry
	// all is what the whole GPU consumes.
	all mig.Counters
	// unmanaged partitions have a counter of their own name: their part of the hardware is occupied whether they are used or not.
	unmanaged []device.Partition
	// free is what the unmanaged GPU instances leave, also those without a compute instance.
	free mig.Counters
	// devices are published where the whole GPU can be allocated, partitions where not.
	devices, partitions []resourceslice.Slice
	// possible are the partitions that fit on the empty GPU, by name.
	possible map[string]device.Partition
}

// shape returns the GPU's shape. It is not modified any more.
func (o *Offer) shape(g device.GPU, strict bool) *gpuShape {
	g = withoutUse(g)
	known := o.shapes[g.Name()]
	if known == nil || known.strict != strict || !reflect.DeepEqual(known.gpu, g) {
		known = newGPUShape(g, strict)
		o.shapes[g.Name()] = known
	}
	return known
}

// withoutUse returns the GPU without what claims and health change.
func withoutUse(g device.GPU) device.GPU {
	g.Dynamic, g.MIGEnabled, g.Sharing, g.Health = false, false, device.Sharing{}, device.Health{}
	var partitions []device.Partition
	for _, p := range g.Partitions {
		if !p.Made {
			p.Health = device.Health{}
			partitions = append(partitions, p)
		}
	}
	g.Partitions = partitions
	return g
}

func newGPUShape(g device.GPU, strict bool) *gpuShape {
	s := &gpuShape{gpu: g, strict: strict, geometry: mig.NewGeometry(g.Profiles), possible: map[string]device.Partition{}}
	s.all = s.geometry.Total()
	s.unmanaged, _ = unmanagedPartitions(g)
	var occupied []mig.Instance
	for _, p := range g.Partitions {
		if !slices.ContainsFunc(occupied, func(i mig.Instance) bool { return i.Placement == p.Ref.Placement }) {
			occupied = append(occupied, mig.Instance{ProfileID: p.ProfileID, Placement: p.Ref.Placement, Capacity: p.Capacity})
		}
	}
	s.free = s.geometry.Left(occupied)
	devices := s.build()
	if strict {
		for i := range devices {
			devices[i] = withBindingConditions(devices[i])
		}
	}
	s.devices, s.partitions = chunks(devices), chunks(devices[:len(devices)-1])
	return s
}

func chunks(devices []resourceapi.Device) []resourceslice.Slice {
	var built []resourceslice.Slice
	for chunk := range slices.Chunk(devices, resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures) {
		built = append(built, resourceslice.Slice{Devices: chunk})
	}
	return built
}

// build returns the unmanaged partitions, the possible ones, small ones first, and the whole GPU: the scheduler takes the first that
// fits a request. A partition that cannot exist beside an unmanaged one is published without enough counters, since a claim may
// have been allocated it.
func (s *gpuShape) build() []resourceapi.Device {
	var devices []resourceapi.Device
	for _, p := range s.unmanaged {
		devices = append(devices, s.consuming(device.Device{GPU: s.gpu, Partition: p}, mig.Counters{p.Name(): 1}))
	}
	byInstance := map[mig.Instance]device.Partition{}
	for _, p := range (device.GPU{UUID: s.gpu.UUID, Minor: s.gpu.Minor, Profiles: s.geometry.Profiles()}).Possible() {
		byInstance[mig.Instance{ProfileID: p.ProfileID, Placement: p.Ref.Placement}] = p
		s.possible[p.Name()] = p
	}
	for _, instance := range s.geometry.Order() {
		p, known := byInstance[instance]
		if _, exists := s.unmanagedAt(p.Ref, p.ProfileID); known && !exists {
			devices = append(devices, s.consuming(device.Device{GPU: s.gpu, Partition: p}, s.geometry.Takes(instance)))
		}
	}
	return append(devices, s.consuming(device.Device{GPU: s.gpu}, s.all))
}

// unmanagedAt returns the unmanaged partition at that placement if it has the profile: an administrator may have replaced it.
func (s *gpuShape) unmanagedAt(ref device.Ref, profileID int) (device.Partition, bool) {
	i := slices.IndexFunc(s.unmanaged, func(p device.Partition) bool {
		return p.Ref == ref && (profileID == noProfile || profileID == p.ProfileID)
	})
	if i < 0 {
		return device.Partition{}, false
	}
	return s.unmanaged[i], true
}

// publishes reports whether a device with that ref exists or is possible.
func (s *gpuShape) publishes(ref device.Ref, profileID int) bool {
	if _, exists := s.unmanagedAt(ref, profileID); exists || ref.Whole() {
		return true
	}
	return ref.Compute == device.Placement{} && slices.ContainsFunc(s.geometry.Profiles(), func(p device.Profile) bool {
		return slices.Contains(p.Placements, ref.Placement)
	})
}

// counterSet has the name that NVIDIA's DRA driver uses.
func (s *gpuShape) counterSet() string { return fmt.Sprintf("gpu-%d-counter-set", s.gpu.Minor) }

func (s *gpuShape) consuming(d device.Device, takes mig.Counters) resourceapi.Device {
	published := publishedDevice(d)
	consumed := publishedCounters(takes)
	for name, c := range consumed {
		if c.Value.IsZero() {
			delete(consumed, name)
		}
	}
	published.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: s.counterSet(), Counters: consumed}}
	return published
}

// publishedCounters converts counters to the API's type; memory is in bytes.
func publishedCounters(c mig.Counters) map[string]resourceapi.Counter {
	counters := make(map[string]resourceapi.Counter, len(c))
	for name, n := range c {
		counters[name] = resourceapi.Counter{Value: *resource.NewQuantity(n, resource.BinarySI)}
	}
	return counters
}
