// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"testing"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func start(t *testing.T, profile string, opts ...Option) *Library {
	t.Helper()
	p, err := Load(profile)
	if err != nil {
		t.Fatal(err)
	}
	lib := New(p, opts...)
	if ret := lib.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	t.Cleanup(func() { lib.Shutdown() })
	return lib
}

func handle(t *testing.T, lib nvml.Interface, index int) nvml.Device {
	t.Helper()
	d, ret := lib.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		t.Fatalf("handle %d: %v", index, ret)
	}
	return d
}

// go-nvlib, which nvcdi and others build on, reads every profile.
func TestNVLibVisitsEveryProfile(t *testing.T) {
	counts := map[string]int{
		"h100x8": 8, "h100x8-mig": 8, "a100x8": 8, "l4x4": 4, "mixed": 6, "bench256": 256, "a100x8-mig": 8, "a30x4": 4,
		"h200x8": 8, "b200x8": 8, "gb200x4": 4, "l40sx4": 4, "rtxpro6000x4": 4, "t4x4": 4, "a10x4": 4, "a100x8-40gb-mig": 8, "gh200x2": 2,
	}
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) {
			lib := start(t, name)
			partitions := map[string]int{}
			for _, g := range lib.Profile().GPUs {
				for _, p := range g.Partitions {
					partitions[g.UUID] += max(1, len(p.Compute))
				}
			}
			seen := map[string]bool{}
			err := device.New(lib).VisitDevices(func(_ int, d device.Device) error {
				uuid, _ := d.GetUUID()
				seen[uuid] = true
				for _, read := range []func() (string, error){
					d.GetArchitectureAsString, d.GetBrandAsString, d.GetCudaComputeCapabilityAsString, d.GetAddressingModeAsString, d.GetPCIBusID,
				} {
					if text, err := read(); err != nil || text == "" {
						t.Errorf("%s: %q, %v", uuid, text, err)
					}
				}
				migs, err := d.GetMigDevices()
				if len(migs) != partitions[uuid] || err != nil {
					t.Errorf("%s: MIG devices %v, %v", uuid, migs, err)
				}
				for _, m := range migs {
					if profile, err := m.GetProfile(); err != nil {
						t.Errorf("%s: MIG device %v: %v", uuid, profile, err)
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if len(seen) != counts[name] {
				t.Errorf("saw %d GPUs, want %d", len(seen), counts[name])
			}
		})
	}
}
