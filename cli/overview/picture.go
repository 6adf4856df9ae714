// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Picture is one node, for drawing.
type Picture struct {
	Node Node
	// Groups are the GPUs by NUMA node, those of an unknown one last.
	Groups []Group
}

// Group are the GPUs of one NUMA node.
type Group struct {
	// NUMANode is device.UnknownNUMANode if no slice reports it.
	NUMANode int
	GPUs     []GPU
}

// GPU is a GPU with its partitions.
type GPU struct {
	Device
	// NVLink is a letter for the GPUs that are connected by NVLink; empty for a GPU without NVLink peers. Clique is that of a multi-node
	// fabric.
	NVLink, Clique string
	// Slices is the number of memory slices, and Parts what takes them, in order and with the free ones. Both are empty for a GPU
	// without partitions.
	Slices int
	Parts  []Part
}

// Part are adjacent memory slices of a GPU: a partition, or free ones.
type Part struct {
	device.Placement
	// Partition is nil for free slices.
	Partition *Device
}

// Slices names the memory slices, such as "slices 0-3".
func (p Part) Slices() string {
	if p.Size == 1 {
		return fmt.Sprintf("slice %d", p.Start)
	}
	return fmt.Sprintf("slices %d-%d", p.Start, p.Start+p.Size-1)
}

// PictureOf describes a node with its ResourceSlices, of which it uses those of the driver. Without slices the sizes of partitions are
// usual ones, and NUMA nodes and NVLink are not known.
func PictureOf(node Node, published []resourceapi.ResourceSlice, driver string) Picture {
	p := Picture{Node: node}
	seen := newPublished(published, driver)
	byNUMA := map[int]*Group{}
	letters := map[string]string{}
	for _, d := range p.Node.Devices {
		if d.Parent != "" {
			continue
		}
		gpu := GPU{Device: d, Clique: seen.text(d.Name, "fabricClique")}
		if domain := seen.text(d.Name, "nvlinkDomain"); domain != "" {
			if letters[domain] == "" {
				letters[domain] = letter(len(letters))
			}
			gpu.NVLink = letters[domain]
		}
		gpu.Slices, gpu.Parts = seen.parts(d, p.Node.Devices)
		numa := seen.numaNode(d.Name, p.Node.Devices)
		if byNUMA[numa] == nil {
			byNUMA[numa] = &Group{NUMANode: numa}
		}
		byNUMA[numa].GPUs = append(byNUMA[numa].GPUs, gpu)
	}
	for _, numa := range slices.SortedFunc(maps.Keys(byNUMA), func(a, b int) int {
		unknown := func(n int) int { return explain.Count(n == device.UnknownNUMANode) }
		return cmp.Or(cmp.Compare(unknown(a), unknown(b)), cmp.Compare(a, b))
	}) {
		p.Groups = append(p.Groups, *byNUMA[numa])
	}
	return p
}

func letter(n int) string {
	if n < 26 {
		return string(rune('A' + n))
	}
	return strconv.Itoa(n)
}

// publishedDevices are the devices of a node's slices by name.
type publishedDevices struct {
	devices map[string]resourceapi.Device
	// slices are the memory slices of the GPUs whose counters are published, by the name of the counter set.
	slices map[string]int
}

func newPublished(from []resourceapi.ResourceSlice, driver string) publishedDevices {
	p := publishedDevices{map[string]resourceapi.Device{}, map[string]int{}}
	for _, s := range from {
		if s.Spec.Driver != driver {
			continue
		}
		for _, set := range s.Spec.SharedCounters {
			for name := range set.Counters {
				if i, ok := memorySlice(name, "memory-slice-"); ok {
					p.slices[set.Name] = max(p.slices[set.Name], i+1)
				}
			}
		}
		for _, d := range s.Spec.Devices {
			p.devices[d.Name] = d
		}
	}
	return p
}

func memorySlice(name, prefix string) (int, bool) {
	number, ok := strings.CutPrefix(name, prefix)
	if !ok {
		return 0, false
	}
	i, err := strconv.Atoi(number)
	return i, err == nil
}

func (p publishedDevices) text(name string, attribute resourceapi.QualifiedName) string {
	return ptr.Deref(p.devices[name].Attributes[attribute].StringValue, "")
}

// numaNode returns the NUMA node of a GPU, or of one of its partitions where the GPU is not published.
func (p publishedDevices) numaNode(gpu string, devices []Device) int {
	for _, d := range devices {
		if d.Name != gpu && d.Parent != gpu {
			continue
		}
		if value := p.devices[d.Name].Attributes[deviceattribute.StandardDeviceAttributeNUMANode].IntValue; value != nil {
			return int(*value)
		}
	}
	return device.UnknownNUMANode
}

// parts returns the memory slices of a GPU, and what takes them.
func (p publishedDevices) parts(gpu Device, devices []Device) (total int, parts []Part) {
	for i, d := range devices {
		if d.Parent != gpu.Name {
			continue
		}
		start, ok := device.StartOf(d.Name, d.Profile)
		if !ok {
			continue
		}
		parts = append(parts, Part{device.Placement{Start: start, Size: p.size(d)}, &devices[i]})
	}
	if len(parts) == 0 {
		return 0, nil
	}
	slices.SortStableFunc(parts, func(a, b Part) int { return cmp.Compare(a.Start, b.Start) })
	for set, n := range p.slices {
		if strings.HasPrefix(set, gpu.Name+"-") {
			total = n
		}
	}
	last := parts[len(parts)-1]
	total = max(total, last.Start+last.Size)
	if total < usualSlices && len(p.slices) == 0 {
		total = usualSlices
	}
	var all []Part
	at := 0
	for i, part := range parts {
		if part.Start > at {
			all = append(all, Part{Placement: device.Placement{Start: at, Size: part.Start - at}})
		}
		if i+1 < len(parts) && parts[i+1].Start > part.Start {
			part.Size = min(part.Size, parts[i+1].Start-part.Start)
		}
		all = append(all, part)
		at = max(at, part.Start+part.Size)
	}
	if at < total {
		all = append(all, Part{Placement: device.Placement{Start: at, Size: total - at}})
	}
	return total, all
}

// usualSlices is the number of memory slices of most GPUs (MIG user guide; an A30 has four).
const usualSlices = 8

// usualSizes are the memory slices of profiles by their compute slices (MIG user guide), for partitions that no slice describes.
var usualSizes = map[string]int{"1g": 1, "2g": 2, "3g": 4, "4g": 4, "7g": 8}

// size returns how many memory slices a partition takes: as published, else as a published partition of the same profile takes.
func (p publishedDevices) size(d Device) int {
	if n := sizeOf(p.devices[d.Name]); n > 0 {
		return n
	}
	for _, other := range p.devices {
		if profile := other.Attributes["profile"].StringValue; profile != nil && *profile == d.Profile {
			if n := sizeOf(other); n > 0 {
				return n
			}
		}
	}
	for _, part := range strings.Split(d.Profile, ".") {
		if n := usualSizes[part]; n > 0 {
			return n
		}
	}
	return 1
}

func sizeOf(d resourceapi.Device) (n int) {
	for name := range d.Capacity {
		if _, ok := memorySlice(string(name), "memorySlice"); ok {
			n++
		}
	}
	if n > 0 {
		return n
	}
	for _, set := range d.ConsumesCounters {
		for name := range set.Counters {
			if _, ok := memorySlice(name, "memory-slice-"); ok {
				n++
			}
		}
	}
	return n
}

// Title names the GPUs of a group.
func (g Group) Title() string {
	if g.NUMANode == device.UnknownNUMANode {
		return "NUMA node unknown"
	}
	return fmt.Sprintf("NUMA node %d", g.NUMANode)
}
