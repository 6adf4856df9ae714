// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"testing"
	"time"

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

// TestPartitionIsTaintedByItsOwnHealth: its health has the faults of its GPU, and says whether pods are evicted.
func TestPartitionIsTaintedByItsOwnHealth(t *testing.T) {
	t.Parallel()
	part := device.Partition{UUID: "MIG-0", Profile: "1g.10gb", Health: device.Health{Reason: device.ReasonXID, XID: 94, Evict: true}}
	part.Ref = device.Ref{GPU: "GPU-0", Placement: device.Placement{Size: 1}}
	gpu := device.GPU{UUID: "GPU-0", MIGEnabled: true, Health: device.Health{Reason: device.ReasonXID, XID: 119}, Partitions: []device.Partition{part}}
	withdrawn, _ := findWithdrawn(device.Inventory{GPUs: []device.GPU{gpu}}, nil, nil, time.Now())
	for _, d := range (device.Inventory{GPUs: []device.GPU{gpu}}).Devices() {
		want := resourceapi.DeviceTaintEffectNoSchedule
		if d.Ref() == part.Ref {
			want = resourceapi.DeviceTaintEffectNoExecute
		}
		for pool, taints := range map[string][]resourceapi.DeviceTaint{
			"of the node": factsOf(d, withdrawn, allocated{}, Capabilities{Taints: true}).taints, "of the GPU": gpuPool{tainted: withdrawn}.taints(d.Ref()),
		} {
			if len(taints) == 0 || taints[0].Effect != want {
				t.Errorf("pool %s: %s has %v, want %s", pool, d.Name(), taints, want)
			}
		}
	}
}
