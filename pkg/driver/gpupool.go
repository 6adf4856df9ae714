// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
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
	gpu      device.GPU
	geometry mig.Geometry
	// all is what the whole GPU takes.
	all mig.Counters
	// standing are the partitions that exist without us. Each has a counter of its own name, since what it takes of the GPU is
	// gone whether or not anybody uses it.
	standing []device.Partition
	// occupied are the GPU instances without us, the unusable ones too.
	occupied []mig.Instance
	// allocated is what the scheduler has given to claims, and that it counts itself.
	allocated []device.Ref
	// withdrawn is what others have.
	withdrawn []device.Ref
	// retiring offers nothing but what is allocated already.
	retiring bool
}

// newGPUPool takes the refs that claims have of the GPU, and the node's obstacles.
func newGPUPool(g device.GPU, allocated []device.Ref, obstacles map[device.Ref][]obstacle) gpuPool {
	p := gpuPool{gpu: g, geometry: mig.NewGeometry(g.Profiles), retiring: !g.Dynamic}
	p.all = p.geometry.Total()
	p.standing, _ = standing(g)
	for _, s := range g.Partitions {
		if !s.Made && !slices.ContainsFunc(p.occupied, func(i mig.Instance) bool { return i.Placement == s.Ref.Placement }) {
			p.occupied = append(p.occupied, mig.Instance{ProfileID: s.ProfileID, Placement: s.Ref.Placement, Capacity: s.Capacity})
		}
	}
	for _, ref := range allocated {
		if p.publishes(ref) {
			p.allocated = append(p.allocated, ref)
		} else {
			// An administrator has removed a partition that a claim has. Its place is not free before the claim has ended.
			p.withdrawn = append(p.withdrawn, ref)
		}
	}
	for ref, found := range obstacles {
		drains := !slices.ContainsFunc(found, func(o obstacle) bool { return o.key != TaintDraining })
		// What has been given out again meanwhile is the scheduler's business.
		if ref.GPU == g.UUID && !(drains && slices.Contains(p.allocated, ref)) {
			p.withdrawn = append(p.withdrawn, ref)
		}
	}
	return p
}

// publishes reports whether ref is, or could be, a device of the pool.
func (p gpuPool) publishes(ref device.Ref) bool {
	_, stands := p.standingAt(ref)
	return ref.Whole() || stands || ref.Compute == device.Placement{} && slices.ContainsFunc(p.geometry.Profiles(), func(profile device.Profile) bool {
		return slices.Contains(profile.Placements, ref.Placement)
	})
}

func (p gpuPool) standingAt(ref device.Ref) (device.Partition, bool) {
	i := slices.IndexFunc(p.standing, func(s device.Partition) bool { return s.Ref == ref })
	if i < 0 {
		return device.Partition{}, false
	}
	return p.standing[i], true
}

// slices are the counters first, then the devices.
func (p gpuPool) slices() []resourceslice.Slice {
	built := []resourceslice.Slice{{SharedCounters: []resourceapi.CounterSet{{Name: p.counterSet(), Counters: asCounters(p.counters())}}}}
	for chunk := range slices.Chunk(p.devices(), resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures) {
		built = append(built, resourceslice.Slice{Devices: chunk})
	}
	return built
}

// counterSet is named as in NVIDIA's driver.
func (p gpuPool) counterSet() string { return fmt.Sprintf("gpu-%d-counter-set", p.gpu.Minor) }

// counters are what the scheduler may count on: what there is less what others have, but at least what it has given out itself.
func (p gpuPool) counters() mig.Counters {
	counters := p.geometry.Left(p.occupied)
	for _, s := range p.standing {
		counters[s.Name()] = 1
		if p.isTaken(s.Ref) {
			counters[s.Name()] = 0
		}
	}
	for _, ref := range p.withdrawn {
		for name, n := range p.takes(ref) {
			counters[name] = max(counters[name]-n, 0)
		}
	}
	if p.retiring {
		clearAll(counters)
	}
	floor := mig.Counters{}
	for _, ref := range p.allocated {
		for name, n := range p.takes(ref) {
			floor[name] += n
		}
	}
	for name, n := range floor {
		counters[name] = max(counters[name], n)
	}
	return counters
}

func clearAll(counters mig.Counters) {
	for name := range counters {
		counters[name] = 0
	}
}

// isTaken reports whether somebody has a part of a standing partition's hardware by another name, or others have it.
func (p gpuPool) isTaken(ref device.Ref) bool {
	return slices.ContainsFunc(p.withdrawn, ref.Overlaps) ||
		slices.ContainsFunc(p.allocated, func(other device.Ref) bool { return other != ref && other.Overlaps(ref) })
}

// takes is what the device at ref consumes. A place says nothing about the profile: where it could be several, it is the most of
// each counter.
func (p gpuPool) takes(ref device.Ref) mig.Counters {
	if ref.Whole() {
		return p.all
	}
	if s, stands := p.standingAt(ref); stands {
		return mig.Counters{s.Name(): 1}
	}
	made := slices.IndexFunc(p.gpu.Partitions, func(q device.Partition) bool { return q.Made && q.Ref == ref })
	takes := p.geometry.Takes(mig.Instance{ProfileID: noProfile, Placement: ref.Placement})
	for _, profile := range p.geometry.Profiles() {
		if !slices.Contains(profile.Placements, ref.Placement) || made >= 0 && profile.ID != p.gpu.Partitions[made].ProfileID {
			continue
		}
		for name, n := range p.geometry.Takes(mig.Instance{ProfileID: profile.ID, Placement: ref.Placement}) {
			takes[name] = max(takes[name], n)
		}
	}
	return takes
}

// noProfile is the ID of none.
const noProfile = -1

// devices are the partitions that stand, those that could be made, small ones first, and the whole GPU: the scheduler takes the
// first that suits a request. What cannot be had beside a standing partition is left out, unless it is allocated.
func (p gpuPool) devices() []resourceapi.Device {
	var devices []resourceapi.Device
	for _, s := range p.standing {
		devices = append(devices, p.consuming(device.Device{GPU: p.gpu, Partition: s}))
	}
	places := map[mig.Instance]device.Partition{}
	for _, q := range (device.GPU{UUID: p.gpu.UUID, Minor: p.gpu.Minor, Profiles: p.geometry.Profiles()}).Possible() {
		places[mig.Instance{ProfileID: q.ProfileID, Placement: q.Ref.Placement}] = q
	}
	for _, instance := range p.geometry.Order() {
		if q, known := places[instance]; known && (p.isFree(q.Ref) || slices.Contains(p.allocated, q.Ref)) {
			devices = append(devices, p.consuming(device.Device{GPU: p.gpu, Partition: q}))
		}
	}
	undivided := len(p.occupied) == 0 && (!p.gpu.MIGEnabled || mig.Switchable(p.gpu))
	if undivided || slices.Contains(p.allocated, p.gpu.Ref()) {
		devices = append(devices, p.consuming(device.Device{GPU: p.gpu}))
	}
	return devices
}

// isFree reports whether no GPU instance without us is in that place.
func (p gpuPool) isFree(ref device.Ref) bool {
	return !slices.ContainsFunc(p.occupied, func(i mig.Instance) bool { return i.Placement.Overlaps(ref.Placement) })
}

func (p gpuPool) consuming(d device.Device) resourceapi.Device {
	published := publishedDevice(d)
	takes := p.all
	if _, stands := p.standingAt(d.Ref()); stands {
		takes = p.takes(d.Ref())
	} else if !d.Whole() {
		takes = p.geometry.Takes(mig.Instance{ProfileID: d.Partition.ProfileID, Placement: d.Partition.Ref.Placement})
	}
	consumed := asCounters(takes)
	for name, c := range consumed {
		if c.Value.IsZero() {
			delete(consumed, name)
		}
	}
	published.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: p.counterSet(), Counters: consumed}}
	return published
}

// asCounters is what the API calls them; memory is in bytes.
func asCounters(c mig.Counters) map[string]resourceapi.Counter {
	counters := make(map[string]resourceapi.Counter, len(c))
	for name, n := range c {
		counters[name] = resourceapi.Counter{Value: *resource.NewQuantity(n, resource.BinarySI)}
	}
	return counters
}

// counts has the GPU once, however many ways there are to partition it, and each partition that stands.
func (p gpuPool) counts() deviceCounts {
	var c deviceCounts
	c.count(p.gpu.Health, p.retiring || slices.ContainsFunc(p.withdrawn, device.Ref.Whole))
	for _, s := range p.standing {
		c.count(device.Device{GPU: p.gpu, Partition: s}.Health(), p.isTaken(s.Ref))
	}
	return c
}
