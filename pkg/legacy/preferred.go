// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"cmp"
	"slices"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Preferred answers every request as well as it can and refuses none: kubelet fails the pod on an error, but completes an
// incomplete answer. kubelet and simulations call it. It changes nothing and is safe for concurrent use.
func (p *Plugin) Preferred(resource string, request *pluginapi.PreferredAllocationRequest) *pluginapi.PreferredAllocationResponse {
	response := &pluginapi.PreferredAllocationResponse{}
	// kubelet's list of available devices is as old as the last ListAndWatch message; the ledger is not.
	u := p.lists.usage()
	devices := p.lists.devices(resource)
	for _, container := range request.GetContainerRequests() {
		response.ContainerResponses = append(response.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{
			DeviceIDs: devices.prefer(container, u),
		})
	}
	return response
}

// prefer returns IDs without duplicates, as many as requested if available. Devices of pending claims come last: kubelet would use them
// anyway when nothing else is left, and the ledger gives them to the first caller. Devices that a pod still holds come before these: that
// pod has just ended, or kubelet lost its checkpoint and does not know the holder.
func (c *resourceDevices) prefer(request *pluginapi.ContainerPreferredAllocationRequest, u usage) []string {
	size := int(request.GetAllocationSize())
	required, unknown := c.places(request.GetMustIncludeDeviceIDs())
	available, others := c.places(request.GetAvailableDeviceIDs())
	held, all := u.held(), u.heldOrPending()
	var lingering, pending, single []int
	available = slices.DeleteFunc(available, func(at int) bool {
		i := c.items[at]
		mine, conflict := u.availability(c.resource, i, held)
		if conflict || !i.offered || i.unready || !i.Health().Healthy() || slices.Contains(required, at) {
			return true
		}
		if mine {
			lingering = append(lingering, at)
			return true
		}
		if all.exclude(i.use()) {
			pending = append(pending, at)
			return true
		}
		if size > 1 && i.Sharing().Strategy == device.MPS {
			single = append(single, at)
			return true
		}
		return false
	})
	// kubelet decides what must be included, also if the device list does not contain it.
	ids := unknown[:max(0, min(len(unknown), size))]
	chosen := c.choose(required, available, size-len(ids), u, all)
	for _, at := range chosen {
		ids = append(ids, c.items[at].id)
	}
	// Replicas for which the chosen ones leave no memory.
	crowded := slices.DeleteFunc(available, func(at int) bool { return slices.Contains(chosen, at) })
	// Allocate refuses a device shared by MPS together with other devices, so these come only if nothing else is left.
	for _, at := range slices.Concat(descending(lingering), descending(pending), descending(crowded), descending(single)) {
		others = append(others, c.items[at].id)
	}
	for _, id := range others {
		if len(ids) < size && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// choose takes whole GPUs by their links, and partitions and replicas by the holds of their GPUs: among equals the GPU of which this call
// took least, and then the one that the scheduler allocates last. It does not choose a replica for which there is no memory.
func (c *resourceDevices) choose(required, available []int, size int, u usage, all uses) []int {
	if c.planner != nil {
		return c.planner.choose(slices.Concat(required, available), required, size)
	}
	chosen := descending(slices.Clone(required))
	chosen = chosen[:max(0, min(len(chosen), size))]
	holds, picked := map[string]int{}, map[string]int{}
	for gpu, of := range u.holds {
		holds[gpu] = len(of)
	}
	take := func(at int) {
		all.addShare(c.items[at].use())
		holds[c.items[at].GPU.UUID]++
		picked[c.items[at].GPU.UUID]++
	}
	for _, at := range chosen {
		take(at)
	}
	better := func(a, b string) bool {
		if c.packed {
			return holds[a] > holds[b]
		}
		return cmp.Or(cmp.Compare(holds[a], holds[b]), cmp.Compare(picked[a], picked[b])) < 0
	}
	rest := descending(slices.Clone(available))
	for len(chosen) < size {
		rest = slices.DeleteFunc(rest, func(at int) bool { return all.exclude(c.items[at].use()) })
		if len(rest) == 0 {
			break
		}
		best := 0
		for n, at := range rest {
			if better(c.items[at].GPU.UUID, c.items[rest[best]].GPU.UUID) {
				best = n
			}
		}
		take(rest[best])
		chosen = append(chosen, rest[best])
		rest = slices.Delete(rest, best, best+1)
	}
	return chosen
}

// places returns where the devices of the IDs are among the devices, each once, and the IDs that are not there, highest first.
func (c *resourceDevices) places(ids []string) (places []int, unknown []string) {
	seen := make(map[string]bool, len(ids))
	for _, id := range ids {
		i, known := c.index[id]
		switch {
		case seen[id]:
		case known:
			places = append(places, i)
		default:
			unknown = append(unknown, id)
		}
		seen[id] = true
	}
	slices.Sort(unknown)
	slices.Reverse(unknown)
	return places, unknown
}
