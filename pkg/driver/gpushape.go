// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"reflect"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mig"
)

// gpuShape is what a GPU can be cut into beside the partitions that stand on it, whoever has any of that. It is built once and
// kept as long as the GPU looks the same: a GPU has dozens of devices, and the ledger changes with every pod.
type gpuShape struct {
	// gpu is without what says nothing about its shape.
	gpu      device.GPU
	geometry mig.Geometry
	// all is what the whole GPU takes.
	all mig.Counters
	// standing are the partitions that exist without us. Each has a counter of its own name, since what it takes of the GPU is
	// gone whether or not anybody uses it.
	standing []device.Partition
	// free is what the GPU instances without us leave, the unusable ones counted.
	free mig.Counters
	// devices are published where the whole GPU can be had, partitions where not.
	devices, partitions []resourceslice.Slice
	// possible are the partitions that could be made on the empty GPU, by name.
	possible map[string]device.Partition
}

// shapes keeps what was built, by the names of the GPUs. Its zero value is empty.
type shapes struct {
	strict bool
	built  map[string]*gpuShape
}

// of returns the GPU's shape. Nobody changes it.
func (s *shapes) of(g device.GPU, strict bool) *gpuShape {
	if s.built == nil || s.strict != strict {
		s.built, s.strict = map[string]*gpuShape{}, strict
	}
	g = bare(g)
	known := s.built[g.Name()]
	if known == nil || !reflect.DeepEqual(known.gpu, g) {
		known = newGPUShape(g, strict)
		s.built[g.Name()] = known
	}
	return known
}

// bare leaves out what comes and goes with claims, and health.
func bare(g device.GPU) device.GPU {
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
	s := &gpuShape{gpu: g, geometry: mig.NewGeometry(g.Profiles), possible: map[string]device.Partition{}}
	s.all = s.geometry.Total()
	s.standing, _ = standing(g)
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
			devices[i] = strictly(devices[i])
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

// build returns the partitions that stand, those that could be made, small ones first, and the whole GPU: the scheduler takes the
// first that suits a request. What cannot be had beside a standing partition is there all the same, without the counters that it
// needs: a claim may have been allocated it a moment ago.
func (s *gpuShape) build() []resourceapi.Device {
	var devices []resourceapi.Device
	for _, p := range s.standing {
		devices = append(devices, s.consuming(device.Device{GPU: s.gpu, Partition: p}, mig.Counters{p.Name(): 1}))
	}
	places := map[mig.Instance]device.Partition{}
	for _, p := range (device.GPU{UUID: s.gpu.UUID, Minor: s.gpu.Minor, Profiles: s.geometry.Profiles()}).Possible() {
		places[mig.Instance{ProfileID: p.ProfileID, Placement: p.Ref.Placement}] = p
		s.possible[p.Name()] = p
	}
	for _, instance := range s.geometry.Order() {
		p, known := places[instance]
		if _, stands := s.standingAt(p.Ref, p.ProfileID); known && !stands {
			devices = append(devices, s.consuming(device.Device{GPU: s.gpu, Partition: p}, s.geometry.Takes(instance)))
		}
	}
	return append(devices, s.consuming(device.Device{GPU: s.gpu}, s.all))
}

// standingAt finds the partition that stands there, if it is the one that is meant: an administrator may have replaced it.
func (s *gpuShape) standingAt(ref device.Ref, profileID int) (device.Partition, bool) {
	i := slices.IndexFunc(s.standing, func(p device.Partition) bool {
		return p.Ref == ref && (profileID == noProfile || profileID == p.ProfileID)
	})
	if i < 0 {
		return device.Partition{}, false
	}
	return s.standing[i], true
}

// publishes reports whether there is a device with that ref, now or possibly.
func (s *gpuShape) publishes(ref device.Ref, profileID int) bool {
	if _, stands := s.standingAt(ref, profileID); stands || ref.Whole() {
		return true
	}
	return ref.Compute == device.Placement{} && slices.ContainsFunc(s.geometry.Profiles(), func(p device.Profile) bool {
		return slices.Contains(p.Placements, ref.Placement)
	})
}

// counterSet is named as in NVIDIA's driver.
func (s *gpuShape) counterSet() string { return fmt.Sprintf("gpu-%d-counter-set", s.gpu.Minor) }

func (s *gpuShape) consuming(d device.Device, takes mig.Counters) resourceapi.Device {
	published := publishedDevice(d)
	consumed := asCounters(takes)
	for name, c := range consumed {
		if c.Value.IsZero() {
			delete(consumed, name)
		}
	}
	published.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: s.counterSet(), Counters: consumed}}
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
