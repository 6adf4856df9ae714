// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nodelabels"
	"github.com/tandem-gpu/tandem/simulated"
)

// What discovery finds has the resource names of NVIDIA's device plugin.
func TestOffersOfStaticPartitions(t *testing.T) {
	gpus := newMachine(t, "a100x8-mig").open(t).Inventory().GPUs
	for strategy, want := range map[device.MIGStrategy]map[string]int{
		device.MIGStrategyNone: {"nvidia.com/gpu": 8},
		// Two of eight GPUs are whole, and three have a 3g.40gb.
		device.MIGStrategySingle: {"nvidia.com/gpu": 4},
		device.MIGStrategyMixed: {
			"nvidia.com/gpu": 2, "nvidia.com/mig-1g.10gb": 8, "nvidia.com/mig-1g.10gb.me": 1, "nvidia.com/mig-1g.20gb": 1,
			"nvidia.com/mig-2g.20gb": 1, "nvidia.com/mig-3g.40gb": 4, "nvidia.com/mig-4g.40gb": 1,
			"nvidia.com/mig-1c.3g.40gb": 1, "nvidia.com/mig-2c.3g.40gb": 1,
		},
	} {
		offers, _ := device.Resources{GPU: "nvidia.com/gpu", Strategy: strategy}.Offers(gpus)
		got := map[string]int{}
		for _, o := range offers {
			got[o.Resource]++
			if !o.Device.Whole() && (o.Device.UUID() == "" || o.Device.Partition.Caps[0] == 0 || o.Device.Partition.Caps[1] == 0) {
				t.Errorf("%s: %+v", o.Device.Name(), o.Device.Partition)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", strategy, diff)
		}
	}
}

// While a GPU does not say which profiles it has, its partitions have no name, and so no resource and no labels.
func TestPartitionsOfUnknownProfiles(t *testing.T) {
	for call, answer := range map[string]string{"GetMemoryInfo": "ERROR_NO_PERMISSION", "GetGpuInstancePossiblePlacements": "ERROR_UNKNOWN"} {
		m := newMachine(t, "a100x8-mig")
		m.fault(t, simulated.GPUFaults{GPU: "1", Calls: map[string]simulated.CallFault{call: {Return: answer}}})
		gpus := m.open(t).Inventory().GPUs[1:2]
		for _, strategy := range []device.MIGStrategy{device.MIGStrategyMixed, device.MIGStrategySingle} {
			resources := device.Resources{GPU: "nvidia.com/gpu", Strategy: strategy}
			offers, leftOut := resources.Offers(gpus)
			if fixed := gpus[0].Fixed(); len(fixed) == 0 || len(leftOut) != len(fixed) {
				t.Errorf("%s, %s: %d of %d partitions are left out", call, strategy, len(leftOut), len(fixed))
			}
			for _, o := range offers {
				t.Errorf("%s, %s: %s is offered as %s", call, strategy, o.Device.Name(), o.Resource)
			}
			for key, value := range nodelabels.Of(device.Inventory{GPUs: gpus}, nodelabels.Options{Resources: resources}) {
				if strings.Contains(key, "mig-unknown") || strings.Contains(value, "MIG-unknown") {
					t.Errorf("%s, %s: label %s=%s", call, strategy, key, value)
				}
			}
		}
	}
}
