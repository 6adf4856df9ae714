// SPDX-License-Identifier: Apache-2.0

package driver

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/capacity"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// shareOut turns a device's capacities into what claims can have parts of (KEP-5075): memory, of which taken is left out. It
// reports whether there is anything to share. A claim that does not say how much gets all of the memory, also of a device of which
// less is left, and so no such device. Of other capacities a claim consumes what it asks for, and nothing where it does not ask.
func shareOut(d resourceapi.Device, memory, taken uint64) bool {
	// The API takes no range of less than two steps.
	if int64(memory) <= 0 || memory < taken+2*device.ShareUnit {
		return false
	}
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
	return true
}

// shareOf is what a result gives its claim of a device.
func shareOf(claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult, d device.Device) device.Share {
	bytes, shared := capacity.Share(claim, result)
	if !shared {
		return device.Share{}
	}
	return device.ShareOf(uint64(bytes), d.MemoryBytes())
}

// plus is what a claim has that has both of a device.
func plus(a, b device.Share) device.Share {
	if a.Whole() || b.Whole() {
		return device.Share{}
	}
	return device.ShareOf(a.Bytes+b.Bytes, a.Of)
}
