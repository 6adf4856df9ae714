// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Counts by state, for the metric.
type deviceCounts struct {
	offered, withdrawn, unhealthy, excluded int
	// withdrawals are those that are withdrawn since the last count.
	withdrawals int
}

// excluded is a GPU that is not published at all, and why.
type excluded struct {
	uuid, reason string
}

// buildSlices lays the inventory out as the slices of this node's pool. The order is that of minors: the scheduler takes
// the first that fits. With taints, a GPU with obstacles is published tainted; without, it is left out. The GPUs of a slice do
// not depend on obstacles, so that withdrawing one changes one slice, which the API server sees as a single update.
func buildSlices(inv device.Inventory, obstacles map[string][]obstacle, taints bool) ([]resourceslice.Slice, deviceCounts, []excluded) {
	gpus, left := publishable(inv)
	counts := deviceCounts{excluded: len(left)}
	perSlice := resourceapi.ResourceSliceMaxDevices
	if taints {
		perSlice = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	}
	// A pool without devices is one empty slice: it tells "no GPUs" from "no driver".
	built := make([]resourceslice.Slice, 0, 1)
	for chunk := range slices.Chunk(gpus, perSlice) {
		slice := resourceslice.Slice{Devices: make([]resourceapi.Device, 0, len(chunk))}
		for _, g := range chunk {
			counts.count(g, obstacles[g.UUID])
			published := publishedDevice(g)
			if against := obstacles[g.UUID]; len(against) > 0 {
				if !taints {
					continue
				}
				published.Taints = taintsFor(against)
			}
			slice.Devices = append(slice.Devices, published)
		}
		built = append(built, slice)
	}
	if len(built) == 0 {
		built = append(built, resourceslice.Slice{Devices: []resourceapi.Device{}})
	}
	return built, counts, left
}

func (c *deviceCounts) count(g device.GPU, against []obstacle) {
	switch {
	case !g.Health.Healthy():
		c.unhealthy++
	case len(against) > 0:
		c.withdrawn++
	default:
		c.offered++
	}
}

func taintsFor(obstacles []obstacle) []resourceapi.DeviceTaint {
	taints := make([]resourceapi.DeviceTaint, len(obstacles))
	for i, o := range obstacles {
		taints[i] = resourceapi.DeviceTaint{Key: o.key, Value: o.value, Effect: resourceapi.DeviceTaintEffectNoSchedule}
	}
	return taints
}

// publishable picks the GPUs that can be published as whole GPUs, ascending by minor. An odd one must not stop the others:
// the API refuses a whole pool for one duplicate name.
func publishable(inv device.Inventory) ([]device.GPU, []excluded) {
	var gpus []device.GPU
	var left []excluded
	exclude := func(g device.GPU, format string, args ...any) {
		left = append(left, excluded{uuid: g.UUID, reason: fmt.Sprintf(format, args...)})
	}
	sorted := slices.Clone(inv.GPUs)
	slices.SortStableFunc(sorted, func(a, b device.GPU) int { return a.Minor - b.Minor })
	names, uuids := map[string]bool{}, map[string]bool{}
	for _, g := range sorted {
		switch {
		case g.UUID == "":
			exclude(g, "GPU with index %d reports no UUID", g.Index)
		case g.Minor < 0:
			exclude(g, "its minor number is not known")
		case names[g.Name()]:
			exclude(g, "another GPU has the same minor number %d", g.Minor)
		case uuids[g.UUID]:
			exclude(g, "another GPU has the same UUID")
		case g.MIGEnabled:
			exclude(g, "it is in MIG mode, so it cannot be given out as a whole")
		default:
			names[g.Name()], uuids[g.UUID] = true, true
			gpus = append(gpus, g)
		}
	}
	return gpus, left
}
