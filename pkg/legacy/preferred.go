// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"cmp"
	"slices"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Preferred answers every request as well as it can and refuses none: kubelet fails the pod on an error, but fills up
// whatever is missing from an answer. Called for kubelet and by simulations; it changes nothing. Safe for concurrent use.
func (p *Plugin) Preferred(resource string, request *pluginapi.PreferredAllocationRequest) *pluginapi.PreferredAllocationResponse {
	response := &pluginapi.PreferredAllocationResponse{}
	// kubelet's list of available devices is as old as the last ListAndWatch message; the ledger is not.
	owners := p.lists.owners()
	known := p.lists.catalog(resource)
	for _, container := range request.GetContainerRequests() {
		response.ContainerResponses = append(response.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{
			DeviceIDs: known.prefer(container, owners),
		})
	}
	return response
}

// prefer returns IDs without duplicates, as many as requested if available. Devices that are promised to claims come last:
// kubelet would use them anyway when nothing else is left, and the ledger gives them to the first caller. Devices that a pod
// still holds come before these: that pod has just ended, or kubelet lost its checkpoint and does not know the holder.
func (c *catalog) prefer(request *pluginapi.ContainerPreferredAllocationRequest, o owners) []string {
	size := int(request.GetAllocationSize())
	required, unknownPods := c.places(request.GetMustIncludeDeviceIDs())
	available, others := c.places(request.GetAvailableDeviceIDs())
	unpromised := o.room(o.promised)
	var lingering, promised, single []int
	available = slices.DeleteFunc(available, func(at int) bool {
		i := c.items[at]
		taken, mine := o.hold(c.resource, i)
		if taken || !i.offered || i.unready || !i.Health().Healthy() || slices.Contains(required, at) {
			return true
		}
		if mine {
			lingering = append(lingering, at)
			return true
		}
		if o.promises(i) || !unpromised.has(i) {
			promised = append(promised, at)
			return true
		}
		if size > 1 && i.Sharing().Strategy == device.MPS {
			single = append(single, at)
			return true
		}
		return false
	})
	// What must be included is kubelet's to know, even where it makes no sense here.
	ids := unknownPods[:max(0, min(len(unknownPods), size))]
	chosen := c.choose(required, available, size-len(ids), o)
	for _, at := range chosen {
		ids = append(ids, c.items[at].id)
	}
	// Replicas that find no room beside those.
	crowded := slices.DeleteFunc(available, func(at int) bool { return slices.Contains(chosen, at) })
	// Allocate refuses those of MPS beside others, so that they come when there is nothing else.
	for _, at := range slices.Concat(descending(lingering), descending(promised), descending(crowded), descending(single)) {
		others = append(others, c.items[at].id)
	}
	for _, id := range others {
		if len(ids) < size && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// choose takes whole GPUs by their links, and partitions and replicas by what is held of their GPUs: among equals the one of which
// this call has taken least, and then the one that claims get last. What finds no room beside the others is not chosen.
func (c *catalog) choose(required, available []int, size int, o owners) []int {
	if c.planner != nil {
		return c.planner.choose(slices.Concat(required, available), required, size)
	}
	chosen := descending(slices.Clone(required))
	chosen = chosen[:max(0, min(len(chosen), size))]
	held, picked := map[string]int{}, map[string]int{}
	for gpu, holds := range o.holds {
		held[gpu] = len(holds)
	}
	left := o.room(o.promised)
	take := func(at int) {
		left.take(c.items[at])
		held[c.items[at].GPU.UUID]++
		picked[c.items[at].GPU.UUID]++
	}
	for _, at := range chosen {
		take(at)
	}
	better := func(a, b string) bool {
		if c.packed {
			return held[a] > held[b]
		}
		return cmp.Or(cmp.Compare(held[a], held[b]), cmp.Compare(picked[a], picked[b])) < 0
	}
	rest := descending(slices.Clone(available))
	for len(chosen) < size {
		rest = slices.DeleteFunc(rest, func(at int) bool { return !left.has(c.items[at]) })
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

// places returns where the devices of the IDs are in the catalog, each once, and the IDs that are not there, highest first.
func (c *catalog) places(ids []string) (places []int, unknownPods []string) {
	seen := make(map[string]bool, len(ids))
	for _, id := range ids {
		i, known := c.index[id]
		switch {
		case seen[id]:
		case known:
			places = append(places, i)
		default:
			unknownPods = append(unknownPods, id)
		}
		seen[id] = true
	}
	slices.Sort(unknownPods)
	slices.Reverse(unknownPods)
	return places, unknownPods
}
