// SPDX-License-Identifier: Apache-2.0

// The pool of the node: its other devices in slices that each fit into one object.

package driver

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/capacity"
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
	// claims is how claims share the device, which is published with what is left of it. It is empty if they cannot have a share now.
	claims device.ClaimShares
	left   device.Share
	// taints withdraw the device.
	taints []resourceapi.DeviceTaint
}

// build lays out devices, which it sorts: the least memory first, and otherwise in the given order. The scheduler takes the first that
// fits, so a claim for little memory leaves the large devices to others. With taints, a withdrawn device is published tainted; without, it
// is omitted. Which slice a device is in does not depend on withdrawals, so a withdrawal changes one slice
// (TestWithdrawalChangesOneSlice).
func (n *nodeSlices) build(
	devices []device.Device, withdrawn []withdrawal, allocations map[string]allocated, kept Capabilities, counts *deviceCounts,
) []resourceslice.Slice {
	before := *n
	*n = nodeSlices{byRef: make(map[device.Ref]*nodeDevice, len(devices))}
	slices.SortStableFunc(devices, func(a, b device.Device) int { return cmp.Compare(a.MemoryBytes(), b.MemoryBytes()) })
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
	if policy := d.Sharing(); kept.Shares && policy.Claims != "" {
		whole := device.Share{Of: d.MemoryBytes(), OfCount: uint64(policy.Shares)}
		left := leftOf(d.Ref(), whole, withdrawn, a)
		if shareable(policy.Claims, left) {
			facts.claims, facts.left, request.Share = policy.Claims, left, whole
		}
	}
	var reasons []withdrawal
	for _, w := range withdrawn {
		if request.Excludes(w.use) {
			reasons = append(reasons, w)
		}
	}
	reasons = ownHealth(d.Ref(), reasons)
	miscounted := slices.ContainsFunc(a.shares[d.Ref()], func(has device.Share) bool { return miscounts(facts.claims, request.Share, has) })
	if a.blocks(d.Ref()) || miscounted {
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

// ownHealth drops the health of other devices if the device is unhealthy itself: a partition's health includes the faults of its GPU, and whether
// they evict pods.
func ownHealth(ref device.Ref, reasons []withdrawal) []withdrawal {
	own := func(w withdrawal) bool { return w.Reason == availability.Unhealthy && w.Device == ref }
	if !slices.ContainsFunc(reasons, own) {
		return reasons
	}
	return slices.DeleteFunc(reasons, func(w withdrawal) bool { return w.Reason == availability.Unhealthy && w.Device != ref })
}

// miscounts reports whether the scheduler would place a claim where what another claim has leaves no room by the ledger. The other claim
// got it under an earlier sharing policy.
func miscounts(claims device.ClaimShares, whole, has device.Share) bool {
	switch {
	case claims == "":
		return !has.Whole()
	case has.Whole(): // the scheduler counts all of the memory, which keeps out only claims that need some
		return claims != device.ByMemory
	case claims == device.ByMemory && has.Bytes == 0: // a claim for all of the memory would still fit
		return true
	default:
		return !has.SameWhole(whole)
	}
}

func (f nodeDeviceFacts) publish() resourceapi.Device {
	published := publishedDevice(f.device)
	if f.claims != "" {
		shareOut(published, f.claims, f.left)
		published.AllowMultipleAllocations = ptr.To(true)
	}
	published.Taints = f.taints
	if f.kept.BindingConditions {
		published = withBindingConditions(published)
	}
	return published
}

// shareable reports whether enough of a device is left to share it. For memory the API requires a range of at least two steps.
func shareable(claims device.ClaimShares, left device.Share) bool {
	switch {
	case int64(left.Of) <= 0: // unknown, or more than the API can express
		return false
	case claims == device.ByMemory:
		return left.Bytes >= 2*device.ShareUnit
	case claims == device.ByCount:
		return left.Count > 0
	default:
		return true
	}
}

// shareOut makes a device's capacities consumable (KEP-5075), with what is left of them. With ByMemory, a claim that requests no memory
// needs all of it, and so a device without other holders. Otherwise it consumes none, and with ByCount one of the equal shares. Of other
// capacities a claim consumes what it requests.
func shareOut(d resourceapi.Device, claims device.ClaimShares, left device.Share) {
	for name, of := range d.Capacity {
		of.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: resource.NewQuantity(0, resource.BinarySI)}
		d.Capacity[name] = of
	}
	memory := resourceapi.DeviceCapacity{Value: *resource.NewQuantity(int64(left.Bytes), resource.BinarySI)}
	unit := resource.NewQuantity(device.ShareUnit, resource.BinarySI)
	if claims == device.ByMemory {
		all := resource.NewQuantity(int64(left.Of/device.ShareUnit*device.ShareUnit), resource.BinarySI)
		memory.RequestPolicy = requestPolicy(memory.Value, all, unit, unit)
	} else {
		none := resource.NewQuantity(0, resource.BinarySI)
		memory.RequestPolicy = requestPolicy(memory.Value, none, none, unit)
	}
	d.Capacity[capacity.Memory] = memory
	if claims == device.ByCount {
		one := resource.NewQuantity(1, resource.DecimalSI)
		shares := resourceapi.DeviceCapacity{Value: *resource.NewQuantity(int64(left.Count), resource.DecimalSI)}
		shares.RequestPolicy = requestPolicy(shares.Value, one, one, one)
		d.Capacity[capacity.Shares] = shares
	}
}

// requestPolicy omits the step if less than one step is left, because the API refuses it.
func requestPolicy(value resource.Quantity, byDefault, least, step *resource.Quantity) *resourceapi.CapacityRequestPolicy {
	policy := &resourceapi.CapacityRequestPolicy{
		Default: ptr.To(byDefault.DeepCopy()), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(least.DeepCopy())},
	}
	next := least.DeepCopy()
	next.Add(*step)
	if next.Cmp(value) <= 0 {
		policy.ValidRange.Step = ptr.To(step.DeepCopy())
	}
	return policy
}

// leftOf subtracts from a device what its holders have and the scheduler does not count. A draining claim is still
// allocated, or is allocated again, where kubelet unprepares a claim that another pod uses (TestDrainingShares).
func leftOf(ref device.Ref, whole device.Share, withdrawn []withdrawal, a allocated) device.Share {
	left := whole.Full()
	for _, w := range withdrawn {
		if w.Device != ref {
			continue
		}
		counted := a.counted[holding{ref, w.Holder}]
		left.Bytes -= min(left.Bytes, beyond(w.Share.Bytes, counted.Memory))
		left.Count -= min(left.Count, beyond(w.Share.Count, counted.Shares))
	}
	return left
}

// beyond returns by how much has exceeds counted; zero if it does not.
func beyond(has uint64, counted int64) uint64 { return has - min(has, uint64(max(counted, 0))) }

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
