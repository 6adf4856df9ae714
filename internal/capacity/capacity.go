// SPDX-License-Identifier: Apache-2.0

// Package capacity reads a claim's share of a device from its allocation (KEP-5075, consumable capacity).
package capacity

import (
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// The capacities by which claims share a device. They have no domain in slices and in requests, as in NVIDIA's DRA driver.
const (
	Memory = "memory"
	Shares = "shares"
)

// Consumed returns what a result allocates of a shared device. shared is false if the claim has the whole device. It has the whole device
// if the default of its capacity is all of the memory and the claim requests no amount: after a reboot the driver may report a little
// more memory, and the claim still has all of it. It is a pure function. pkg/driver, pkg/reconcile and pkg/controller call it.
func Consumed(claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult) (c device.Consumed, shared bool) {
	if result.ShareID == nil {
		return c, false
	}
	memory, byMemory := result.ConsumedCapacity[Memory]
	shares, byCount := result.ConsumedCapacity[Shares]
	c = device.Consumed{Memory: max(0, memory.Value()), Shares: max(0, shares.Value())}
	if byCount && c.Shares > 0 || byMemory && (c.Memory == 0 || requestsMemory(claim, result.Request)) {
		return c, true
	}
	return device.Consumed{}, false
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
