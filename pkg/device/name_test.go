// SPDX-License-Identifier: Apache-2.0

package device

import "testing"

// TestNamesUndone: what the names of devices, pools and NVIDIA's replicas are made of is found in them again.
func TestNamesUndone(t *testing.T) {
	gpu := GPU{UUID: "GPU-a", Minor: 12}
	partition := Partition{Parent: 12, Profile: "1g.10gb+me", ProfileID: 20, Ref: Ref{GPU: "GPU-a", Placement: Placement{3, 1}}}
	half := Partition{Parent: 12, Profile: "1c.3g.40gb", ProfileID: 9, Ref: Ref{GPU: "GPU-a", Placement: Placement{4, 4}, Compute: Placement{1, 1}}}
	for _, test := range []struct {
		undo       func(string) string
		name, want string
	}{
		{GPUName, gpu.Name(), "gpu-12"},
		{GPUName, partition.Name(), "gpu-12"},
		{GPUName, half.Name(), "gpu-12"},
		{NodeOfPool, "node-1", "node-1"},
		{NodeOfPool, OwnPool("node-1", gpu), "node-1"},
		{NodeOfPool, OwnPool("node-1.example", gpu), "node-1.example"},
		{HardwareUUID, "GPU-a", "GPU-a"},
		{HardwareUUID, "GPU-a::3", "GPU-a"},
		{HardwareUUID, "MIG-b", "MIG-b"},
		{HardwareUUID, "MIG-b::0", "MIG-b"},
		{HardwareUUID, "MIG-GPU-a/1/0", "GPU-a"},
		{HardwareUUID, "MIG-GPU-a/1/0::2", "GPU-a"},
	} {
		if got := test.undo(test.name); got != test.want {
			t.Errorf("%q: %q, want %q", test.name, got, test.want)
		}
	}
}

func TestStartOf(t *testing.T) {
	for _, p := range []Partition{
		{Parent: 12, Profile: "1g.10gb+me", ProfileID: 20, Ref: Ref{GPU: "GPU-a", Placement: Placement{3, 1}}},
		{Profile: "1c.3g.40gb", ProfileID: 9, Ref: Ref{GPU: "GPU-a", Placement: Placement{4, 4}, Compute: Placement{1, 1}}},
	} {
		if start, ok := StartOf(p.Name(), p.Profile); !ok || start != p.Ref.Placement.Start {
			t.Errorf("%s: %d, %t", p.Name(), start, ok)
		}
	}
	for _, name := range []string{"gpu-0", "", "MIG-5f2c", "gpu-0-mig-1g10gb-19", "gpu-0-mig-1g10gb-x-y", "gpu-0-mig-2g20gb-14-0"} {
		if start, ok := StartOf(name, "1g.10gb"); ok {
			t.Errorf("%q: %d", name, start)
		}
	}
}
