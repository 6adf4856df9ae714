// SPDX-License-Identifier: Apache-2.0

// Package capacity reads a claim's share of a device from its allocation (KEP-5075, consumable capacity).
package capacity

import (
	resourceapi "k8s.io/api/resource/v1"
)

// Memory is the capacity by which claims share a device. It has no domain in slices and in requests.
const Memory = "memory"

// Share returns how many bytes of the device's memory a result allocates. shared is false if the claim has the whole device, which it
// has unless it requests an amount: after a reboot the driver may report a little more memory, and the claim still has all of it. It is
// a pure function. pkg/driver, pkg/reconcile and pkg/controller call it.
func Share(claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult) (bytes int64, shared bool) {
	consumed, counted := result.ConsumedCapacity[Memory]
	if result.ShareID == nil || !counted || consumed.Sign() <= 0 || !requestsMemory(claim, result.Request) {
		return 0, false
	}
	return consumed.Value(), true
}

// requestsMemory reports whether a request, or a subrequest ("request/subrequest"), requests an amount of memory.
func requestsMemory(claim *resourceapi.ResourceClaim, request string) bool {
	amount := func(c *resourceapi.CapacityRequirements) bool {
		if c == nil {
			return false
		}
		_, asked := c.Requests[Memory]
		return asked
	}
	for _, r := range claim.Spec.Devices.Requests {
		if r.Name == request && r.Exactly != nil {
			return amount(r.Exactly.Capacity)
		}
		for _, s := range r.FirstAvailable {
			if r.Name+"/"+s.Name == request {
				return amount(s.Capacity)
			}
		}
	}
	return false
}
