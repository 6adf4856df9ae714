// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"reflect"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mig"
)

// deviceCounts are the values of tandem_published_devices.
type deviceCounts struct {
	offered, withdrawn, unhealthy, excluded int
	// withdrawals is how many devices were withdrawn since the last count.
	withdrawals int
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

// excluded is a device that is not published at all, and why.
type excluded struct {
	device, reason string
}

// nodeSlices are the slices of the node pool of the last build. A change of the ledger leaves most devices as they are, and a slice
// that is the same slice of memory is not compared device by device either (BenchmarkOffer).
type nodeSlices struct {
	slices []resourceslice.Slice
	// devices of each slice.
	devices [][]*nodeDevice
	byRef   map[device.Ref]*nodeDevice
}

// nodeDevice is a device of the node pool.
type nodeDevice struct {
	published resourceapi.Device
	nodeDeviceFacts
}

// nodeDeviceFacts are what the description of a device depends on.
type nodeDeviceFacts struct {
	device device.Device
	kept   Capabilities
	// shared means that claims may have a part of the device: it is published with the memory that is left without what is taken.
	shared bool
	taken  uint64
	// taints withdraw the device.
	taints []resourceapi.DeviceTaint
}

// build lays out devices in the given order: the scheduler takes the first that fits. With taints, a withdrawn device is published
// tainted; without, it is omitted. Which slice a device is in does not depend on withdrawals, so a withdrawal changes one slice
// (TestWithdrawalChangesOneSlice).
func (n *nodeSlices) build(
	devices []device.Device, withdrawn []withdrawal, allocations map[string]allocated, kept Capabilities, counts *deviceCounts,
) []resourceslice.Slice {
	before := *n
	*n = nodeSlices{byRef: make(map[device.Ref]*nodeDevice, len(devices))}
	perSlice := resourceapi.ResourceSliceMaxDevices
	if kept.Taints {
		perSlice = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	}
	for chunk := range slices.Chunk(devices, perSlice) {
		entries := make([]*nodeDevice, 0, len(chunk))
		for _, d := range chunk {
			facts := factsOf(d, withdrawn, allocations[d.GPU.UUID], kept)
			counts.count(d.Health(), len(facts.taints) > 0)
			if len(facts.taints) > 0 && !kept.Taints {
				continue
			}
			entry := before.byRef[d.Ref()]
			if entry == nil || !reflect.DeepEqual(entry.nodeDeviceFacts, facts) {
				entry = &nodeDevice{facts.publish(), facts}
			}
			n.byRef[d.Ref()] = entry
			entries = append(entries, entry)
		}
		at := len(n.slices)
		if at < len(before.slices) && slices.Equal(before.devices[at], entries) {
			n.slices = append(n.slices, before.slices[at])
		} else {
			slice := resourceslice.Slice{Devices: make([]resourceapi.Device, len(entries))}
			for i, entry := range entries {
				slice.Devices[i] = entry.published
			}
			n.slices = append(n.slices, slice)
		}
		n.devices = append(n.devices, entries)
	}
	if len(n.slices) == 0 {
		// An empty slice reports a node without GPUs; no slice would report a node without a driver.
		return []resourceslice.Slice{{Devices: []resourceapi.Device{}}}
	}
	return n.slices
}

// maxTaints is how many taints API servers before 1.35 accept for a device (k8s.io/api v0.34, resource/v1, DeviceTaintsMaxLength). NVIDIA's
// keys come last.
const maxTaints = 4

func factsOf(d device.Device, withdrawn []withdrawal, a allocated, kept Capabilities) nodeDeviceFacts {
	facts, request := nodeDeviceFacts{device: d, kept: kept}, use{Device: d.Ref()}
	if kept.Shares && d.Sharing().MemoryShares {
		taken := memoryTaken(d.Ref(), withdrawn, a)
		if facts.shared = shareable(d.MemoryBytes(), taken); facts.shared {
			facts.taken, request.Share.Of = taken, d.MemoryBytes()
		}
	}
	var reasons []withdrawal
	for _, w := range withdrawn {
		if request.Excludes(w.use) {
			reasons = append(reasons, w)
		}
	}
	// The scheduler does not count the parts that claims still have of a device that is no longer shared.
	unshared := !facts.shared && a.shared[d.Ref()]
	if a.blocks(d.Ref()) || unshared {
		reasons = append(reasons, withdrawal{use: use{Reason: availability.HeldByClaim}})
	}
	slices.SortFunc(reasons, withdrawal.compareReason)
	// A device has each taint key once.
	reasons = slices.CompactFunc(reasons, func(x, y withdrawal) bool { return x.Reason == y.Reason })
	for _, w := range reasons {
		facts.taints = append(facts.taints, w.taints()...)
	}
	facts.taints = facts.taints[:min(len(facts.taints), maxTaints)]
	return facts
}

func (f nodeDeviceFacts) publish() resourceapi.Device {
	published := publishedDevice(f.device)
	if f.shared {
		shareOut(published, f.device.MemoryBytes(), f.taken)
		published.AllowMultipleAllocations = ptr.To(true)
	}
	published.Taints = f.taints
	if f.kept.BindingConditions {
		published = withBindingConditions(published)
	}
	return published
}

// shareable reports whether enough of a device's memory is left to share it. The API requires a range of at least two steps.
func shareable(memory, taken uint64) bool {
	return int64(memory) > 0 && memory >= taken+2*device.ShareUnit
}

// shareOut makes a device's capacities consumable (KEP-5075): its memory without what is taken. A claim that requests no memory needs
// all of it, and so a device without other holders. Of other capacities a claim consumes what it requests.
func shareOut(d resourceapi.Device, memory, taken uint64) {
	unit := resource.NewQuantity(device.ShareUnit, resource.BinarySI)
	for name, of := range d.Capacity {
		policy := &resourceapi.CapacityRequestPolicy{Default: resource.NewQuantity(0, resource.BinarySI)}
		if name == capacityMemory {
			of.Value = *resource.NewQuantity(int64(memory-taken), resource.BinarySI)
			policy.Default = resource.NewQuantity(int64(memory/device.ShareUnit*device.ShareUnit), resource.BinarySI)
			policy.ValidRange = &resourceapi.CapacityRequestPolicyRange{Min: unit, Step: ptr.To(unit.DeepCopy())}
		}
		of.RequestPolicy = policy
		d.Capacity[name] = of
	}
}

// memoryTaken returns how much memory of the device holders have beyond what the scheduler counts. A draining claim is still
// allocated, or is allocated again, where kubelet unprepares a claim that another pod uses (TestDrainingShares).
func memoryTaken(ref device.Ref, withdrawn []withdrawal, a allocated) (taken uint64) {
	for _, w := range withdrawn {
		if w.Device == ref {
			taken += w.Share.Bytes - min(w.Share.Bytes, a.counted[holding{ref, w.Holder}])
		}
	}
	return taken
}

// publishable returns the GPUs that can be published, ascending by minor number. The API server refuses a whole pool for one
// duplicate name, so an unusable GPU is excluded.
func publishable(inv device.Inventory) ([]device.GPU, []excluded) {
	var gpus []device.GPU
	var left []excluded
	sorted := slices.Clone(inv.GPUs)
	slices.SortStableFunc(sorted, func(a, b device.GPU) int { return a.Minor - b.Minor })
	for _, g := range sorted {
		switch {
		case g.UUID == "":
			left = append(left, excluded{g.UUID, fmt.Sprintf("GPU with index %d reports no UUID", g.Index)})
		case g.Minor < 0:
			left = append(left, excluded{g.UUID, "its minor number is not known"})
		case len(gpus) > 0 && gpus[len(gpus)-1].Minor == g.Minor:
			left = append(left, excluded{g.UUID, fmt.Sprintf("another GPU has the same minor number %d", g.Minor)})
		default:
			gpus = append(gpus, g)
		}
	}
	return gpus, left
}

// nodePoolDevices returns what a GPU offers in the node pool, which has no counters: the GPU, or its unmanaged partitions.
func nodePoolDevices(g device.GPU) ([]device.Device, []excluded) {
	partitions, left := unmanagedPartitions(g)
	switch {
	case len(partitions)+len(left) > 0:
		var devices []device.Device
		for _, p := range partitions {
			devices = append(devices, device.Device{GPU: g, Partition: p})
		}
		return devices, left
	case g.MIGEnabled && !(g.Dynamic && mig.Switchable(g)):
		return nil, []excluded{{g.UUID, "it is in MIG mode, so it cannot be allocated as a whole"}}
	}
	return []device.Device{{GPU: g}}, nil
}

// unmanagedPartitions returns the usable partitions that Tandem did not create, by placement.
func unmanagedPartitions(g device.GPU) ([]device.Partition, []excluded) {
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
			left = append(left, excluded{name, "its placement on the GPU is not known"})
		default:
			names[name] = true
			partitions = append(partitions, p)
		}
	}
	return partitions, left
}
