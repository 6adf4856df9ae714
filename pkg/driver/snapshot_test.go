// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// onceInventory has no device from its second read on.
type onceInventory struct{ *fakeInventory }

func (o onceInventory) Inventory() device.Inventory {
	first := o.fakeInventory.Inventory()
	o.set(device.Inventory{})
	return first
}

// TestOneSnapshotOfACall: all claims of a call are planned by what the node had when it began.
func TestOneSnapshotOfACall(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(2), func(c *Config) { c.Inventory = onceInventory{c.Inventory.(*fakeInventory)} })
	claims := []*resourceapi.ResourceClaim{r.claim("first", "gpu-0"), r.claim("second", "gpu-1")}
	results, err := r.driver.PrepareResourceClaims(t.Context(), claims)
	if err != nil {
		t.Fatal(err)
	}
	for _, claim := range claims {
		if result := results[claim.UID]; result.Err != nil || len(result.Devices) != 1 {
			t.Errorf("%s: %v, %v", claim.Name, result.Devices, result.Err)
		}
	}
}
