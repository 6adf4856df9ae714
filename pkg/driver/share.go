// SPDX-License-Identifier: Apache-2.0

package driver

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/capacity"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// shareOut makes a device's capacities consumable (KEP-5075): its memory without what is taken. It reports whether enough is
// left. A claim that requests no memory needs all of it, and so a device without other holders. Of other capacities a claim
// consumes what it requests.
func shareOut(d resourceapi.Device, memory, taken uint64) bool {
	// The API requires a range of at least two steps.
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

// shareOf returns the share that a result allocates.
func shareOf(claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult, d device.Device) device.Share {
	bytes, shared := capacity.Share(claim, result)
	if !shared {
		return device.Share{}
	}
	return device.ShareOf(uint64(bytes), d.MemoryBytes())
}

// addShares returns the share of a claim that has both.
func addShares(a, b device.Share) device.Share {
	if a.Whole() || b.Whole() {
		return device.Share{}
	}
	return device.ShareOf(a.Bytes+b.Bytes, a.Of)
}
