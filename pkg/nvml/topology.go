// SPDX-License-Identifier: Apache-2.0

// How the GPUs of a node are connected.

package nvml

import (
	"cmp"
	"maps"
	"slices"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// pairKey names two GPUs by UUID, the smaller one first.
type pairKey [2]string

func keyOf(a, b string) pairKey {
	if a > b {
		a, b = b, a
	}
	return pairKey{a, b}
}

// topology is the connections of the node's GPUs, by UUID: indices change when GPUs come and go.
type topology struct {
	pairs map[pairKey]gpu.Pair
	// domains has the name of each GPU's NVLink domain, empty for none.
	domains map[string]string
	// of has the GPUs that answered all questions when the topology was read.
	of map[string]bool
}

// endpoint is a GPU that answers.
type endpoint struct {
	uuid, pci string
	device    gonvml.Device
	links
}

// links are what a GPU reports about its connections: active links to other GPUs by PCI address, the number of those that lead to an
// NVSwitch, and the common ancestors with other GPUs by UUID.
type links struct {
	peers     map[string]int
	switches  int
	ancestors map[string]gpu.Link
	// unread is set if a connection could not be read; the next scan reads the topology again.
	unread bool
}

// readTopology reads every pair of endpoints. read returns the links of one of them, with the common ancestors of the others, or false if it
// does not answer. Pairs with a GPU that does not answer stay as they were before.
func readTopology(all []endpoint, before topology, read func(e endpoint, others []endpoint) (links, bool)) topology {
	t := topology{pairs: map[pairKey]gpu.Pair{}, domains: map[string]string{}, of: map[string]bool{}}
	maps.Copy(t.pairs, before.pairs)
	maps.Copy(t.domains, before.domains)
	var endpoints []endpoint
	for _, e := range all {
		if l, answered := read(e, slices.Clone(endpoints)); answered {
			e.links = l
			endpoints = append(endpoints, e)
		}
	}
	// GPUs that NVLink connects, directly or through other GPUs, have the same number in set.
	set := make([]int, len(endpoints))
	for i := range endpoints {
		t.of[endpoints[i].uuid] = !endpoints[i].unread
		set[i] = i
	}
	for i := range endpoints {
		for j := range endpoints[:i] {
			a, b := &endpoints[i], &endpoints[j]
			pair := gpu.Pair{PCIe: a.ancestors[b.uuid], NVLinks: linksBetween(a, b)}
			t.pairs[keyOf(a.uuid, b.uuid)] = pair
			if pair.NVLinks > 0 {
				merge(set, set[i], set[j])
			}
		}
	}
	t.setDomains(endpoints, set)
	return t
}

func merge(set []int, from, to int) {
	for i := range set {
		if set[i] == from {
			set[i] = to
		}
	}
}

// readLinks counts the active NVLinks of a GPU by what is at their other end, and reads its common ancestors with others.
func readLinks(e endpoint, others []endpoint) links {
	l := links{peers: map[string]int{}, ancestors: map[string]gpu.Link{}}
	for _, other := range others {
		l.ancestors[other.uuid] = l.commonAncestor(e.device, other.device)
	}
	for link := range gonvml.NVLINK_MAX_LINKS {
		state, ret := e.device.GetNvLinkState(link)
		if ret == gonvml.ERROR_INVALID_ARGUMENT {
			break
		}
		l.note(ret)
		if ret != gonvml.SUCCESS || state != gonvml.FEATURE_ENABLED {
			continue
		}
		kind, ret := e.device.GetNvLinkRemoteDeviceType(link)
		l.note(ret)
		if ret == gonvml.SUCCESS && kind == gonvml.NVLINK_DEVICE_TYPE_SWITCH {
			l.switches++
			continue
		}
		info, ret := e.device.GetNvLinkRemotePciInfo(link)
		l.note(ret)
		if ret == gonvml.SUCCESS {
			l.peers[busID(info)]++
		}
	}
	return l
}

// note remembers that an answer is missing, unless the GPU or its driver has none.
func (l *links) note(ret gonvml.Return) {
	l.unread = l.unread || ret != gonvml.SUCCESS && !unsupported(ret)
}

// linksBetween returns the number of direct links and of links through NVSwitch, of which two GPUs use as many as the one with
// fewer has. Both ends of a link may differ while one of them trains: the larger count is used.
func linksBetween(a, b *endpoint) int {
	return max(a.peers[b.pci], b.peers[a.pci]) + min(a.switches, b.switches)
}

// busID returns the address of a PciInfo in the form of device.GPU.
func busID(info gonvml.PciInfo) string {
	text := make([]byte, len(info.BusId))
	for i, c := range info.BusId {
		text[i] = byte(c)
	}
	return kernelAddress(unix.ByteSliceToString(text))
}

var linkLevels = map[gonvml.GpuTopologyLevel]gpu.Link{
	gonvml.TOPOLOGY_INTERNAL:   gpu.LinkInternal,
	gonvml.TOPOLOGY_SINGLE:     gpu.LinkSingle,
	gonvml.TOPOLOGY_MULTIPLE:   gpu.LinkMultiple,
	gonvml.TOPOLOGY_HOSTBRIDGE: gpu.LinkHostBridge,
	gonvml.TOPOLOGY_NODE:       gpu.LinkNode,
	gonvml.TOPOLOGY_SYSTEM:     gpu.LinkSystem,
}

func (l *links) commonAncestor(a, b gonvml.Device) gpu.Link {
	level, ret := a.GetTopologyCommonAncestor(b)
	l.note(ret)
	if ret != gonvml.SUCCESS {
		return gpu.LinkUnknown
	}
	return linkLevels[level]
}

// setDomains names each set of two or more GPUs that NVLink connects by the smallest PCI address in it, or by the smallest UUID
// if an address is unknown: the name is the same after a restart. A GPU that does not answer keeps its domain.
func (t *topology) setDomains(endpoints []endpoint, set []int) {
	for i, e := range endpoints {
		var members []string
		for j, other := range endpoints {
			if set[i] == set[j] {
				members = append(members, cmp.Or(other.pci, other.uuid))
			}
		}
		t.domains[e.uuid] = ""
		if len(members) > 1 {
			t.domains[e.uuid] = "nvlink-" + slices.Min(members)
		}
	}
}
