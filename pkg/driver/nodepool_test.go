// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/internal/golden"
	"github.com/tandem-gpu/tandem/pkg/device"
)

func TestGoldenSlices(t *testing.T) {
	held := []withdrawal{heldByPod(1), heldByPod(3), lost(3)}
	lost := []withdrawal{lost(1)}
	tests := []struct {
		name      string
		inv       device.Inventory
		withdrawn []withdrawal
		taints    bool
	}{
		{"h100x8", machine(8), nil, true},
		{"h100x8-held-taints", machine(8), held, true},
		{"h100x8-held-left-out", machine(8), held, false},
		{"l4x4", l4x4(), nil, true},
		{"odd", unusableMachine(), lost, true},
		{"empty", device.Inventory{}, nil, true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			built, _, _ := buildSlices(test.inv, test.withdrawn, test.taints)
			got, err := yaml.Marshal(built)
			if err != nil {
				t.Fatal(err)
			}
			golden.Compare(t, filepath.Join("testdata", test.name+".yaml"), got)
		})
	}
}

func TestSlicesOfManyGPUs(t *testing.T) {
	for name, test := range map[string]struct {
		gpus   int
		taints bool
		want   []int
	}{
		"64 with taints":     {64, true, []int{64}},
		"65 with taints":     {65, true, []int{64, 1}},
		"256 with taints":    {256, true, []int{64, 64, 64, 64}},
		"128 without taints": {128, false, []int{128}},
		"256 without taints": {256, false, []int{128, 128}},
	} {
		t.Run(name, func(t *testing.T) {
			built, counts, _ := buildSlices(machine(test.gpus), nil, test.taints)
			var got []int
			next := 0
			for _, slice := range built {
				got = append(got, len(slice.Devices))
				for _, d := range slice.Devices {
					if want := fmt.Sprintf("gpu-%d", next); d.Name != want {
						t.Fatalf("got %s, want %s", d.Name, want)
					}
					next++
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
			if counts.offered != test.gpus {
				t.Errorf("%+v", counts)
			}
		})
	}
}

// buildSlices returns the node pool of a machine without dynamic GPUs.
func buildSlices(inv device.Inventory, withdrawn []withdrawal, taints bool) ([]resourceslice.Slice, deviceCounts, []excluded) {
	gpus, left := publishable(inv)
	var devices []device.Device
	for _, g := range gpus {
		found, unusable := nodePoolDevices(g)
		devices, left = append(devices, found...), append(left, unusable...)
	}
	counts := deviceCounts{excluded: len(left)}
	built := new(nodeSlices).build(devices, withdrawn, nil, Capabilities{Taints: taints}, &counts)
	return built, counts, left
}

// One withdrawn GPU costs one update, whatever the size of the node.
func TestWithdrawalChangesOneSlice(t *testing.T) {
	for _, taints := range []bool{true, false} {
		before, _, _ := buildSlices(machine(256), nil, taints)
		after, counts, _ := buildSlices(machine(256), []withdrawal{heldByPod(70)}, taints)
		changed := 0
		for i := range before {
			if !cmp.Equal(before[i], after[i]) {
				changed++
			}
		}
		if len(before) != len(after) || changed != 1 {
			t.Errorf("taints %v: %d of %d slices changed", taints, changed, len(before))
		}
		if counts != (deviceCounts{offered: 255, withdrawn: 1}) {
			t.Errorf("%+v", counts)
		}
	}
}

func TestUnusableGPUsAreExcluded(t *testing.T) {
	built, counts, left := buildSlices(unusableMachine(), nil, true)
	if len(built) != 1 || len(built[0].Devices) != 4 {
		t.Errorf("%d devices", len(built[0].Devices))
	}
	if counts != (deviceCounts{offered: 3, unhealthy: 1, excluded: 4}) {
		t.Errorf("%+v", counts)
	}
	var reasons []string
	for _, e := range left {
		reasons = append(reasons, e.reason)
	}
	want := []string{
		"its minor number is not known",
		"another GPU has the same minor number 0",
		"GPU with index 2 reports no UUID",
		"it is in MIG mode, so it cannot be allocated as a whole",
	}
	if diff := cmp.Diff(want, reasons); diff != "" {
		t.Error(diff)
	}
}

func TestSemanticVersion(t *testing.T) {
	for text, want := range map[string]string{
		"535.54.03": "535.54.3", "580.95.05": "580.95.5", "12.4": "12.4.0", "9": "9.0.0", "9.0": "9.0.0", "0.0": "0.0.0",
		"": "", "unknown": "", "1.2.3.4": "", "1.": "", ".1": "", "1..2": "", "v1.2": "", "-1.2": "", "1.2 ": "", "99999999999999999999.0": "",
	} {
		got, ok := semanticVersion(text)
		if got != want || ok != (want != "") {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

// The API server accepts every value that discovery may report.
func FuzzPublishedDevice(f *testing.F) {
	f.Add("GPU-1", "H100", "580.1.2", "0000:01:00.0", 1, 0, uint64(1))
	f.Add("\xff", strings.Repeat("y", 100), "1.01.001", "", -1, -5, ^uint64(0))
	f.Fuzz(func(t *testing.T, uuid, product, version, pci string, minor, numa int, memory uint64) {
		d := publishedDevice(device.Device{GPU: device.GPU{UUID: uuid, ProductName: product, DriverVersion: version, PCIBusID: pci, Minor: minor, NUMANode: numa, MemoryBytes: memory}})
		if len(d.Attributes)+len(d.Capacity) > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
			t.Errorf("%d attributes and capacities", len(d.Attributes)+len(d.Capacity))
		}
		for name, a := range d.Attributes {
			for _, text := range []*string{a.StringValue, a.VersionValue} {
				if text != nil && (*text == "" || len(*text) > resourceapi.DeviceAttributeMaxValueLength || strings.ToValidUTF8(*text, "") != *text) {
					t.Errorf("%s: %q", name, *text)
				}
			}
		}
		for name, c := range d.Capacity {
			if c.Value.Sign() <= 0 {
				t.Errorf("%s: %v", name, c.Value)
			}
		}
	})
}
