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
	counts := map[string]int{"h100x8": 8, "a100x8": 8, "l4x4": 4, "mixed": 6, "bench256": 256}
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) {
			lib := start(t, name)
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
				if on, err := d.IsMigEnabled(); on || err != nil {
					t.Errorf("%s: MIG enabled %v, %v", uuid, on, err)
				}
				if migs, err := d.GetMigDevices(); len(migs) != 0 || err != nil {
					t.Errorf("%s: MIG devices %v, %v", uuid, migs, err)
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
