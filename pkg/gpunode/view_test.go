// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"fmt"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// divisible is a node with GPUs that have a partition each, and room for others that can be made.
func divisible(gpus int) device.Inventory {
	var inv device.Inventory
	for minor := range gpus {
		g := gpu(minor, fmt.Sprintf("GPU-%d", minor))
		g.MIGCapable, g.MIGEnabled, g.Dynamic = true, true, true
		profile := device.Profile{ID: 19, Name: "1g.10gb"}
		for start := range 7 {
			profile.Placements = append(profile.Placements, device.Placement{Start: start, Size: 1})
		}
		g.Profiles = []device.Profile{profile, {ID: 9, Name: "3g.40gb", Placements: []device.Placement{{Start: 0, Size: 4}, {Start: 4, Size: 4}}}}
		g.Partitions = g.Possible()[:1]
		inv.GPUs = append(inv.GPUs, g)
	}
	return inv
}

// object is one that has read a spec, and is not run.
func object(inv device.Inventory, devices ...string) *Object {
	o := &Object{config: Config{Inventory: fakeInventory{newSource(inv)}}}
	o.spec(devices...)
	return o
}

func (o *Object) spec(devices ...string) {
	o.view.observe(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{UID: "o"}, Spec: v1alpha1.GPUNodeSpec{Claims: []v1alpha1.AllocatedClaim{{UID: "u", Devices: devices}}}})
}

// TestAllocatedFollows the spec and the inventory.
func TestAllocatedFollows(t *testing.T) {
	made, unmade := "gpu-0-mig-1g10gb-19-0", "gpu-1-mig-3g40gb-9-4"
	o := object(divisible(2), "gpu-1", made, "gpu-7", "gpu-0-mig-7g80gb-0-0")
	want := func(refs ...string) {
		t.Helper()
		for range 2 {
			var got []string
			for _, ref := range refsOf(o.Allocated()) {
				got = append(got, ref.String())
			}
			if !slices.Equal(got, refs) {
				t.Errorf("allocated %v, want %v", got, refs)
			}
		}
	}
	want("GPU-1", "GPU-0@0+1")
	o.spec(unmade)
	want("GPU-1@4+4")
	inv := divisible(2)
	inv.GPUs[1].Dynamic = false
	o.config.Inventory.(fakeInventory).set(inv)
	want()
	o.config.Inventory.(fakeInventory).set(divisible(2))
	o.spec()
	want()
	o.spec(unmade)
	want("GPU-1@4+4")
	o.Allocated()[0] = ledger.Hold{} // The caller's own.
	want("GPU-1@4+4")
}

func BenchmarkAllocated(b *testing.B) {
	inv := divisible(8)
	var names []string
	for _, g := range inv.GPUs {
		for _, p := range g.Possible()[:7] {
			names = append(names, p.Name())
		}
	}
	o := object(inv, names...)
	for b.Loop() {
		if len(o.Allocated()) != len(names) {
			b.Fatal("not all are found")
		}
	}
}

// refsOf are the devices of holds.
func refsOf(holds []ledger.Hold) []device.Ref {
	var refs []device.Ref
	for _, h := range holds {
		refs = append(refs, h.Device)
	}
	return refs
}

// A claim has a device whole unless the spec lists its share.
func TestAllocatedShares(t *testing.T) {
	const gib = 1 << 30
	inv := device.Inventory{GPUs: []device.GPU{
		{UUID: "GPU-0", Minor: 0, MemoryBytes: 24 * gib}, {UUID: "GPU-1", Minor: 1, MemoryBytes: 24 * gib},
	}}
	o := object(inv)
	o.observe(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{UID: "o"}, Spec: v1alpha1.GPUNodeSpec{Claims: []v1alpha1.AllocatedClaim{{
		UID: "u", Devices: []string{"gpu-0", "gpu-1"}, Shares: []v1alpha1.AllocatedShare{{Device: "gpu-1", Memory: gib}},
	}}}})
	got := o.Allocated()
	if len(got) != 2 || !got[0].Share.Whole() || got[1].Share != (device.Share{Bytes: gib, Of: 24 * gib}) {
		t.Errorf("allocated %v", got)
	}
}
