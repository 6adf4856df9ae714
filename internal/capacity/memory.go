// SPDX-License-Identifier: Apache-2.0

// Package capacity reads what the scheduler has given a claim of a device that is shared (KEP-5075, consumable capacity).
package capacity

import (
	resourceapi "k8s.io/api/resource/v1"
)

// Memory is the capacity that claims share a device by. It is published without a domain, and asked for so.
const Memory = "memory"

// Share is how many bytes of its device's memory a result gives its claim beside others; shared is false where the claim has all of
// the device. That is so unless the claim asks for an amount: one that does not is given all that there is, and a driver that
// reports a little more memory after a reboot must not make a part of it. It is a pure function; the front-end of claims, the
// reconciler and the controller ask.
func Share(claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult) (bytes int64, shared bool) {
	consumed, counted := result.ConsumedCapacity[Memory]
	if result.ShareID == nil || !counted || consumed.Sign() <= 0 || !asks(claim, result.Request) {
		return 0, false
	}
	return consumed.Value(), true
}

// asks reports whether a request, or a subrequest ("request/subrequest"), is for an amount of memory.
func asks(claim *resourceapi.ResourceClaim, request string) bool {
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
