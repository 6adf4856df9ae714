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
	// allocated is what the scheduler has given to claims, and that it counts itself, with the profile as far as it is known.
	allocated map[device.Ref]int
	// withdrawn is what others have.
	withdrawn []device.Ref
	// retiring offers nothing but what is allocated already.
	retiring bool
}

// newGPUPool takes what claims have of the GPU, and the node's obstacles.
func newGPUPool(g device.GPU, allocated map[device.Ref]int, obstacles map[device.Ref][]obstacle) gpuPool {
	p := gpuPool{gpu: g, geometry: mig.NewGeometry(g.Profiles), allocated: map[device.Ref]int{}, retiring: !g.Dynamic}
	p.all = p.geometry.Total()
	p.standing, _ = standing(g)
	for _, s := range g.Partitions {
		if !s.Made && !slices.ContainsFunc(p.occupied, func(i mig.Instance) bool { return i.Placement == s.Ref.Placement }) {
			p.occupied = append(p.occupied, mig.Instance{ProfileID: s.ProfileID, Placement: s.Ref.Placement, Capacity: s.Capacity})
		}
	}
	for ref, profileID := range allocated {
		if p.publishes(ref, profileID) {
			p.allocated[ref] = profileID
		} else {
			// An administrator has removed a partition that a claim has. Its place is not free before the claim has ended.
			p.withdrawn = append(p.withdrawn, ref)
		}
	}
	for ref, found := range obstacles {
		drains := !slices.ContainsFunc(found, func(o obstacle) bool { return o.key != TaintDraining })
		// What has been given out again meanwhile is the scheduler's business.
		if ref.GPU == g.UUID && !(drains && p.isAllocated(ref)) {
			p.withdrawn = append(p.withdrawn, ref)
		}
	}
	return p
}

func (p gpuPool) isAllocated(ref device.Ref) bool {
	_, allocated := p.allocated[ref]
	return allocated
}

// publishes reports whether ref is, or could be, a device of the pool.
func (p gpuPool) publishes(ref device.Ref, profileID int) bool {
	_, stands := p.standingAt(ref, profileID)
	return ref.Whole() || stands || ref.Compute == device.Placement{} && slices.ContainsFunc(p.geometry.Profiles(), func(profile device.Profile) bool {
		return slices.Contains(profile.Placements, ref.Placement)
	})
}

// standingAt finds the partition that stands there, if it is the one that is meant: an administrator may have replaced it.
func (p gpuPool) standingAt(ref device.Ref, profileID int) (device.Partition, bool) {
	i := slices.IndexFunc(p.standing, func(s device.Partition) bool {
		return s.Ref == ref && (profileID == noProfile || profileID == s.ProfileID)
	})
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
		clearAll(counters)
	}
	floor := mig.Counters{}
	for ref, profileID := range p.allocated {
		// The least: more than is allocated would be given out.
		for name, n := range p.takes(ref, profileID, func(a, b int64) int64 { return min(a, b) }) {
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
func (p gpuPool) isTaken(s device.Partition) bool {
	profileID, allocated := p.allocated[s.Ref]
	replaced := allocated && profileID != noProfile && profileID != s.ProfileID
	return replaced || slices.ContainsFunc(p.withdrawn, s.Ref.Overlaps) || given{profiles: p.allocated}.anotherPartOf(s.Ref)
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

// devices are the partitions that stand, those that could be made, small ones first, and the whole GPU: the scheduler takes the
// first that suits a request. What cannot be had beside a standing partition is there all the same, without the counters that it
// needs: a claim may have been allocated it a moment ago.
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
		q, known := places[instance]
		if _, stands := p.standingAt(q.Ref, q.ProfileID); known && !stands {
			devices = append(devices, p.consuming(device.Device{GPU: p.gpu, Partition: q}))
		}
	}
	if !p.gpu.MIGEnabled || mig.Switchable(p.gpu) || p.isAllocated(p.gpu.Ref()) {
		devices = append(devices, p.consuming(device.Device{GPU: p.gpu}))
	}
	return devices
}

func (p gpuPool) consuming(d device.Device) resourceapi.Device {
	published := publishedDevice(d)
	consumed := asCounters(p.takes(d.Ref(), d.Partition.ProfileID, nil))
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
		c.count(device.Device{GPU: p.gpu, Partition: s}.Health(), p.isTaken(s))
	}
	return c
}
