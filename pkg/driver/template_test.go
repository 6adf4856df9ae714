// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// sharedByMemory is a machine whose claims share GPUs by memory.
func sharedByMemory() device.Inventory {
	return machine(2, func(g *device.GPU) { g.Sharing = device.Sharing{Claims: device.ByMemory} })
}

// The template is what a driver publishes for the same GPUs, whatever the state of those from which it is made.
func TestTemplateIsWhatIsPublished(t *testing.T) {
	t.Parallel()
	partitioned := func() device.Inventory {
		inv := machine(2)
		dynamic(&inv.GPUs[1])
		inv.GPUs[1].Dynamic = false
		cut(&inv.GPUs[1], "3g.40gb", 4)
		return inv
	}
	for name, build := range map[string]func() device.Inventory{
		"whole GPUs": l4x4, "dynamic": threeGPUs, "static partitions": partitioned, "shared": sharedByMemory, "none": func() device.Inventory { return machine(0) },
	} {
		for _, strict := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, strict %t", name, strict), func(t *testing.T) {
				t.Parallel()
				offered := func(g device.GPU) bool { return g.Minor != 0 }
				r := newRig(t, build(), func(c *Config) { c.OfferedToClaims, c.Strict = offered, strict })
				r.run().ready()
				used := build()
				for i := range used.GPUs {
					g := &used.GPUs[i]
					g.Health = device.Health{Reason: device.ReasonLost}
					for j := range g.Partitions {
						g.Partitions[j].Health = g.Health
					}
					if g.Dynamic {
						cut(g, "1g.10gb", 6)
					}
				}
				published, template := map[string]resourceapi.ResourceSliceSpec{}, map[string]resourceapi.ResourceSliceSpec{}
				for _, slice := range r.api.slices() {
					published[slice.Spec.Pool.Name+" "+slice.GenerateName] = slice.Spec
				}
				for _, slice := range Template("gpu.nvidia.com", testNode, used, offered, strict) {
					template[slice.Spec.Pool.Name+" "+slice.GenerateName] = slice.Spec
					if slice.Kind != "ResourceSlice" || slice.APIVersion != "resource.k8s.io/v1" {
						t.Errorf("a slice is %s of %s", slice.Kind, slice.APIVersion)
					}
				}
				if diff := cmp.Diff(published, template, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("published, and template:\n%s", diff)
				}
			})
		}
	}
}

// TestDevicesThatKAICounts: KAI counts the devices of all slices of a node as GPUs (docs/user/with/kai.md).
func TestDevicesThatKAICounts(t *testing.T) {
	every := func(device.GPU) bool { return true }
	for name, test := range map[string]struct {
		inv     device.Inventory
		offered func(device.GPU) bool
		want    int
	}{
		"ClaimsOnly":                      {machine(8), every, 8},
		"ClaimsOnly, with dynamic GPUs":   {machine(8, dynamic), every, 208},
		"Split, five GPUs are for limits": {machine(8), func(g device.GPU) bool { return g.Minor >= 5 }, 3},
	} {
		devices := 0
		for _, slice := range Template("gpu.nvidia.com", testNode, test.inv, test.offered, false) {
			devices += len(slice.Spec.Devices)
		}
		if devices != test.want {
			t.Errorf("%s: %d devices, want %d", name, devices, test.want)
		}
	}
}
