// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/pkg/device"
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
