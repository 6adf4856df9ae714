// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"cmp"
	"math/big"
	"slices"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Preferred answers every request as well as it can and refuses none: kubelet fails the pod on an error, but completes an
// incomplete answer. kubelet and simulations call it. It changes nothing and is safe for concurrent use.
func (p *Plugin) Preferred(resource string, request *pluginapi.PreferredAllocationRequest) *pluginapi.PreferredAllocationResponse {
	response := &pluginapi.PreferredAllocationResponse{}
	// kubelet's list of available devices is as old as the last ListAndWatch message; the ledger is not.
	u := usageOf(p.config.Ledger, p.config.Allocations)
	devices := p.lists.devices(resource)
	for _, container := range request.GetContainerRequests() {
		response.ContainerResponses = append(response.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{
			DeviceIDs: devices.prefer(container, u),
		})
	}
	return response
}

// prefer returns IDs without duplicates, as many as requested if available. Devices of pending claims come near the end: without other
// devices kubelet would use them anyway, and the ledger gives them to the first caller. Devices that a pod still holds come last: kubelet
// has forgotten them (docs/design/0002-ledger.md), and the ledger refuses them, which fails the pod. Devices out of service come last for the
// same reason.
func (c *resourceDevices) prefer(request *pluginapi.ContainerPreferredAllocationRequest, u usage) []string {
	size := int(request.GetAllocationSize())
	required, unknown := c.places(request.GetMustIncludeDeviceIDs())
	available, others := c.places(request.GetAvailableDeviceIDs())
	held, all := u.held(), u.heldOrPending()
	var forgotten, pending, single []int
	available = slices.DeleteFunc(available, func(at int) bool {
		i := c.items[at]
		mine, conflict := u.availability(c.resource, i, held)
		if conflict || !i.offered || i.unready || !i.Health().Healthy() || slices.Contains(required, at) {
			return true
		}
		if mine || u.outOfService(i.Device) != "" {
			forgotten = append(forgotten, at)
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
	for _, at := range slices.Concat(descending(pending), descending(crowded), descending(single), descending(forgotten)) {
		others = append(others, c.items[at].id)
	}
	for _, id := range others {
		if len(ids) < size && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// choose selects whole GPUs by their links, and partitions and replicas by the number of holds on their GPU. If these are equal, it
// prefers the GPU from which this call has taken fewest, then the GPU that the scheduler allocates last. It does not choose a replica for
// which there is no memory.
func (c *resourceDevices) choose(required, available []int, size int, u usage, all uses) []int {
	if c.wholeGPUs {
		gpus := make([]device.GPU, len(c.items))
		for at, i := range c.items {
			gpus[at] = i.GPU
		}
		return newPlanner(gpus, c.inventory).choose(slices.Concat(required, available), required, size)
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
	compare := func(a, b int) int {
		gpu, other := c.items[a].GPU.UUID, c.items[b].GPU.UUID
		if c.config.Packed {
			return cmp.Compare(holds[other], holds[gpu])
		}
		return cmp.Or(cmp.Compare(holds[gpu], holds[other]), cmp.Compare(picked[gpu], picked[other]))
	}
	rest := descending(slices.Clone(available))
	for len(chosen) < size {
		rest = slices.DeleteFunc(rest, func(at int) bool { return slices.Contains(chosen, at) || all.exclude(c.items[at].use()) })
		if len(rest) == 0 {
			break
		}
		best := slices.MinFunc(rest, compare)
		take(best)
		chosen = append(chosen, best)
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
	return places, descending(unknown)
}

// planner chooses GPUs that a container gets together. It is a pure function of its topology, without locks and I/O, and its work
// is bounded. GPUs are numbered by their index in the device list, which follows the minors. The best choice has the
// best-connected GPUs; among equals, the one that leaves the most NVLinks to the other GPUs; among equals again, the one with the
// highest minors, because claims are allocated from the lowest up. PCIe and NUMA distances of the remaining GPUs count less than
// the distance from claims: a conflict delays a pod.
type planner struct {
	weight [][]int64
}

// The three parts of a pair's weight. No sum over a machine of 256 GPUs (32,640 pairs) carries from one into the next: any NVLink
// counts more than all PCIe distances, and these count more than a shared NUMA node.
const (
	weightNVLink = int64(1) << 40
	weightPCIe   = int64(1) << 20
	weightNUMA   = int64(1)
)

// searchLimit bounds exhaustive search, in sets. C(16, 8) is 12,870.
const searchLimit = 13000

// newPlanner makes a planner for gpus with the links of inv. A GPU that inv lacks has no links.
func newPlanner(gpus []device.GPU, inv device.Inventory) *planner {
	place := make(map[string]int, len(inv.GPUs))
	for i, gpu := range inv.GPUs {
		place[gpu.UUID] = i
	}
	p := &planner{weight: make([][]int64, len(gpus))}
	for i, a := range gpus {
		p.weight[i] = make([]int64, len(gpus))
		for j, b := range gpus {
			if i == j || a.UUID == b.UUID { // it, or what is left in the list of its partitions
				continue
			}
			from, known := place[a.UUID]
			to, knownToo := place[b.UUID]
			if known && knownToo && from < len(inv.Links) && to < len(inv.Links[from]) {
				link := inv.Links[from][to]
				p.weight[i][j] += int64(link.NVLinks)*weightNVLink + int64(link.PCIe)*weightPCIe
			}
			if a.NUMANode == b.NUMANode && a.NUMANode != device.UnknownNUMANode {
				p.weight[i][j] += weightNUMA
			}
		}
	}
	return p
}

// plan is an incomplete choice.
type plan struct {
	chosen []int
	score  int64 // of the pairs inside
	reach  int64 // NVLinks between each chosen GPU and everything available: what the rest loses
}

// choose returns size GPUs of available, among them all of required, highest first. Both lists have no duplicates, and required
// is part of available. If that is impossible it returns as many as it can, required ones first.
func (p *planner) choose(available, required []int, size int) []int {
	required = descending(slices.Clone(required))
	free := descending(slices.DeleteFunc(slices.Clone(available), func(i int) bool { return slices.Contains(required, i) }))
	switch {
	case size <= len(required):
		return required[:max(size, 0)]
	case size >= len(required)+len(free):
		return descending(append(required, free...))
	}
	s := search{planner: p, free: free, want: size, reach: p.reach(slices.Concat(required, free))}
	start := plan{chosen: make([]int, 0, size)}
	for _, i := range required {
		start = s.with(start, i)
	}
	sets := new(big.Int).Binomial(int64(len(free)), int64(size-len(required)))
	switch {
	case sets.Cmp(big.NewInt(searchLimit)) <= 0:
		s.exhaust(start, 0)
	case len(required) > 0:
		s.grow(start)
	default:
		for _, seed := range free {
			s.grow(s.with(start, seed))
		}
	}
	return descending(s.best.chosen)
}

// reach returns for each GPU of the set its NVLinks into the set.
func (p *planner) reach(set []int) []int64 {
	reach := make([]int64, len(p.weight))
	for _, i := range set {
		for _, j := range set {
			reach[i] += p.weight[i][j] / weightNVLink
		}
	}
	return reach
}

type search struct {
	*planner
	free  []int // candidates, highest first
	want  int
	reach []int64
	best  plan
}

// with extends a plan. The result shares its backing array with the argument: use one branch at a time.
func (s *search) with(to plan, i int) plan {
	for _, j := range to.chosen {
		to.score += s.weight[i][j]
	}
	to.reach += s.reach[i]
	to.chosen = append(to.chosen, i)
	return to
}

// offer keeps the plan with the best connections. The order of search decides among equals.
func (s *search) offer(candidate plan) {
	if better := cmp.Or(cmp.Compare(candidate.score, s.best.score), cmp.Compare(s.best.reach, candidate.reach)); s.best.chosen == nil || better > 0 {
		candidate.chosen = slices.Clone(candidate.chosen)
		s.best = candidate
	}
}

// exhaust compares all sets. Sets come in descending order, so the first of equals has the highest minors.
func (s *search) exhaust(from plan, next int) {
	missing := s.want - len(from.chosen)
	if missing == 0 {
		s.offer(from)
		return
	}
	for i := next; i <= len(s.free)-missing; i++ {
		s.exhaust(s.with(from, s.free[i]), i+1)
	}
}

// grow extends a plan by the best-connected GPU until it is complete.
func (s *search) grow(from plan) {
	rest := slices.DeleteFunc(slices.Clone(s.free), func(i int) bool { return slices.Contains(from.chosen, i) })
	gain := make([]int64, len(s.weight))
	connect := func(i int) {
		for _, j := range rest {
			gain[j] += s.weight[i][j]
		}
	}
	for _, i := range from.chosen {
		connect(i)
	}
	for len(from.chosen) < s.want {
		pick := slices.MaxFunc(rest, func(i, j int) int { return cmp.Or(cmp.Compare(gain[i], gain[j]), cmp.Compare(s.reach[j], s.reach[i])) })
		rest = slices.DeleteFunc(rest, func(i int) bool { return i == pick })
		from = s.with(from, pick)
		connect(pick)
	}
	s.offer(from)
}

func descending[T cmp.Ordered](list []T) []T {
	slices.SortFunc(list, func(a, b T) int { return cmp.Compare(b, a) })
	return list
}
