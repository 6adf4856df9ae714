// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"slices"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Preferred answers every request as well as it can and refuses none: kubelet fails the pod on an error, but fills up
// whatever is missing from an answer. Called for kubelet and by simulations; it changes nothing. Safe for concurrent use.
func (p *Plugin) Preferred(request *pluginapi.PreferredAllocationRequest) *pluginapi.PreferredAllocationResponse {
	response := &pluginapi.PreferredAllocationResponse{}
	// kubelet's list of available devices is as old as the last ListAndWatch message; the ledger is not.
	owners := p.roster.owners()
	known := p.roster.catalog()
	for _, container := range request.GetContainerRequests() {
		response.ContainerResponses = append(response.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{
			DeviceIDs: known.prefer(container, owners),
		})
	}
	return response
}

// prefer returns IDs without duplicates, as many as were asked for where that many are left. What a claim is about to ask for
// comes last: kubelet would fill up with it anyway, or with a device that is held, and the ledger gives it to whoever is first.
// Before it comes what a limit still has: either that pod has ended a moment ago, or kubelet's checkpoint was lost and it does
// not know who has the device.
func (c *catalog) prefer(request *pluginapi.ContainerPreferredAllocationRequest, o owners) []string {
	size := int(request.GetAllocationSize())
	required, strangers := c.places(request.GetMustIncludeDeviceIDs())
	available, others := c.places(request.GetAvailableDeviceIDs())
	var lingering, promised []int
	available = slices.DeleteFunc(available, func(i int) bool {
		gpu := c.gpus[i]
		if o.taken[gpu.UUID] || !c.offers(gpu) || !gpu.Health.Healthy() || slices.Contains(required, i) {
			return true
		}
		if o.limits[gpu.UUID] {
			lingering = append(lingering, i)
			return true
		}
		if o.promised[gpu.UUID] {
			promised = append(promised, i)
			return true
		}
		return false
	})
	// What must be included is kubelet's to know, even where it makes no sense here.
	ids := strangers[:max(0, min(len(strangers), size))]
	for _, i := range c.planner.choose(slices.Concat(required, available), required, size-len(ids)) {
		ids = append(ids, c.gpus[i].UUID)
	}
	for _, i := range slices.Concat(descending(lingering), descending(promised)) {
		others = append(others, c.gpus[i].UUID)
	}
	for _, id := range others {
		if len(ids) < size && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// places returns where the GPUs of the IDs are in the catalog, each once, and the IDs that are not there, highest first.
func (c *catalog) places(ids []string) (places []int, strangers []string) {
	seen := make(map[string]bool, len(ids))
	for _, id := range ids {
		i, known := c.index[id]
		switch {
		case seen[id]:
		case known:
			places = append(places, i)
		default:
			strangers = append(strangers, id)
		}
		seen[id] = true
	}
	slices.Sort(strangers)
	slices.Reverse(strangers)
	return places, strangers
}
