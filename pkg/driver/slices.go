// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mig"
)

// Counts by state, for the metric.
type deviceCounts struct {
	offered, withdrawn, unhealthy, excluded int
	// withdrawals are those that are withdrawn since the last count.
	withdrawals int
}

// excluded is a device that is not published at all, and why.
type excluded struct {
	device, reason string
}

// nodeSlices lays devices out as the slices of the node's pool, in the order given: the scheduler takes the first that fits.
// With taints, a device with obstacles is published tainted; without, it is left out. The devices of a slice do not depend on
// obstacles, so that withdrawing one changes one slice, which the API server sees as a single update.
func nodeSlices(
	devices []device.Device, obstacles map[device.Ref][]obstacle, held map[string]given, kept Capabilities,
) ([]resourceslice.Slice, deviceCounts) {
	var counts deviceCounts
	perSlice := resourceapi.ResourceSliceMaxDevices
	if kept.Taints {
		perSlice = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	}
	// A pool without devices is one empty slice: it tells "no GPUs" from "no driver".
	built := make([]resourceslice.Slice, 0, 1)
	for chunk := range slices.Chunk(devices, perSlice) {
		slice := resourceslice.Slice{Devices: make([]resourceapi.Device, 0, len(chunk))}
		for _, d := range chunk {
			published, found := offered(d, obstacles, held[d.GPU.UUID], kept)
			// Of what is not shared any more, the scheduler does not count the parts that claims have.
			whole := published.AllowMultipleAllocations == nil
			if held[d.GPU.UUID].blocks(d.Ref()) || whole && held[d.GPU.UUID].shared[d.Ref()] {
				found = append(found, obstacle{key: TaintHeldByClaim, value: "true"})
			}
			counts.count(d.Health(), len(found) > 0)
			if len(found) > 0 {
				if !kept.Taints {
					continue
				}
				published.Taints = taintsFor(found)
			}
			slice.Devices = append(slice.Devices, published)
		}
		built = append(built, slice)
	}
	if len(built) == 0 {
		built = append(built, resourceslice.Slice{Devices: []resourceapi.Device{}})
	}
	return built, counts
}

// offered is the device as a whole, or where policy lets claims have a part of it, what is left of it; and what keeps it from being
// given out.
func offered(d device.Device, obstacles map[device.Ref][]obstacle, held given, kept Capabilities) (resourceapi.Device, []obstacle) {
	published := publishedDevice(d)
	if kept.Shares && d.Sharing().MemoryShares {
		found, taken := besides(d.Ref(), obstacles, held)
		if shareOut(published, d.MemoryBytes(), taken) {
			published.AllowMultipleAllocations = ptr.To(true)
			return published, found
		}
	}
	return published, against(d.Ref(), obstacles)
}

func (c *deviceCounts) count(health device.Health, withdrawn bool) {
	switch {
	case !health.Healthy():
		c.unhealthy++
	case withdrawn:
		c.withdrawn++
	default:
		c.offered++
	}
}

func (c *deviceCounts) add(other deviceCounts) {
	c.offered += other.offered
	c.withdrawn += other.withdrawn
	c.unhealthy += other.unhealthy
}

func taintsFor(obstacles []obstacle) []resourceapi.DeviceTaint {
	taints := make([]resourceapi.DeviceTaint, len(obstacles))
	for i, o := range obstacles {
		taints[i] = resourceapi.DeviceTaint{Key: o.key, Value: o.value, Effect: resourceapi.DeviceTaintEffectNoSchedule}
	}
	return taints
}

// publishable picks the GPUs that can be named, ascending by minor. An odd one must not stop the others: the API refuses a whole
// pool for one duplicate name.
func publishable(inv device.Inventory) ([]device.GPU, []excluded) {
	var gpus []device.GPU
	var left []excluded
	exclude := func(g device.GPU, format string, args ...any) {
		left = append(left, excluded{device: g.UUID, reason: fmt.Sprintf(format, args...)})
	}
	sorted := slices.Clone(inv.GPUs)
	slices.SortStableFunc(sorted, func(a, b device.GPU) int { return a.Minor - b.Minor })
	names, uuids := map[string]bool{}, map[string]bool{}
	for _, g := range sorted {
		switch {
		case g.UUID == "":
			exclude(g, "GPU with index %d reports no UUID", g.Index)
		case g.Minor < 0:
			exclude(g, "its minor number is not known")
		case names[g.Name()]:
			exclude(g, "another GPU has the same minor number %d", g.Minor)
		case uuids[g.UUID]:
			exclude(g, "another GPU has the same UUID")
		default:
			names[g.Name()], uuids[g.UUID] = true, true
			gpus = append(gpus, g)
		}
	}
	return gpus, left
}

// whole is what a GPU offers where its devices have no counters: itself, or the partitions that are on it.
func whole(g device.GPU) ([]device.Device, []excluded) {
	partitions, left := standing(g)
	switch {
	case len(partitions)+len(left) > 0:
		var devices []device.Device
		for _, p := range partitions {
			devices = append(devices, device.Device{GPU: g, Partition: p})
		}
		return devices, left
	case g.MIGEnabled && !(g.Dynamic && mig.Switchable(g)):
		return nil, []excluded{{g.UUID, "it is in MIG mode, so it cannot be given out as a whole"}}
	}
	return []device.Device{{GPU: g}}, nil
}

// standing are the partitions of a GPU that exist without us and can be given out, by place.
func standing(g device.GPU) ([]device.Partition, []excluded) {
	var partitions []device.Partition
	var left []excluded
	names := map[string]bool{}
	for _, p := range g.Partitions {
		name := p.Name()
		switch {
		case p.Made:
		case p.UUID == "":
			left = append(left, excluded{name, "its GPU instance has no compute instance"})
		case p.Ref.GPU != g.UUID || p.Ref.Whole() || names[name]:
			left = append(left, excluded{name, "its place on the GPU is not known"})
		default:
			names[name] = true
			partitions = append(partitions, p)
		}
	}
	return partitions, left
}
