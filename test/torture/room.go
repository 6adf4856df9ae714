// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/test/oracle"
)

// profile is one way to partition an H100 with 80 GB, as nvidia-smi mig -lgip and -lgipp print it.
type profile struct {
	name string
	id   int
	// size is in memory slices, starts are the first of them.
	size   int
	starts []int
}

// label is the name as a published device has it.
func (p profile) label() string { return strings.ReplaceAll(p.name, ".", "") }

// profiles are those that the torture uses. Those with media engines are not among them, so memory slices alone decide what fits.
var profiles = []profile{
	{"1g.10gb", 19, 1, []int{0, 1, 2, 3, 4, 5, 6}},
	{"1g.20gb", 15, 2, []int{0, 2, 4, 6}},
	{"2g.20gb", 14, 2, []int{0, 2, 4}},
	{"3g.40gb", 9, 4, []int{0, 4}},
	{"4g.40gb", 5, 4, []int{0}},
	{"7g.80gb", 0, 8, []int{0}},
}

func profileNamed(name string) profile {
	return profiles[slices.IndexFunc(profiles, func(p profile) bool { return p.name == name })]
}

// The GPUs of a machine with MIG (the profile h100x8-mig) by their minors: on dynamicGPUs partitions are made for claims, on
// staticGPUs only an administrator makes some. He has made one on a dynamic GPU, too.
const (
	dynamicGPUs = 4
	staticGPUs  = 2
	sharedGPU   = 3
	// wholeGPUs are those that limits can have when nothing is given out.
	wholeGPUs = gpusANode - staticGPUs - 1
)

// room is what the node has for those who ask. The zero value has eight whole GPUs.
type room struct {
	mig bool
	// enabled are the GPUs in MIG mode, standing the partitions that an administrator has made.
	enabled  map[int]bool
	standing []oracle.Instance
	// memory of each GPU in MiB, by its minor, where GPUs are shared; nil where they are not.
	memory map[int]int
}

// fits reports whether a request fits beside what is allocated.
func (r room) fits(a ask, taken []place) bool {
	if a.profile == "" {
		return a.gpus <= r.free(taken)
	}
	total := 0
	for gpu := range gpusANode {
		units := r.units(gpu, profileNamed(a.profile), a.api, taken)
		if a.together && units >= a.gpus {
			return true
		}
		total += units
	}
	return !a.together && total >= a.gpus
}

// free returns the number of GPUs of which no part is allocated.
func (r room) free(taken []place) int {
	free := 0
	for gpu := range gpusANode {
		if !r.enabled[gpu] && !overlapsAny(place{gpu: gpu}, taken) {
			free++
		}
	}
	return free
}

// units is how many partitions of a profile could still be had of a GPU.
func (r room) units(gpu int, wanted profile, api oracle.API, taken []place) int {
	units := 0
	var standing []place
	for _, i := range r.standing {
		if i.GPU != gpu {
			continue
		}
		at := place{gpu, i.Start, i.Size}
		standing = append(standing, at)
		if i.Profile == wanted.id && i.UUID != "" && !overlapsAny(at, taken) {
			units++
		}
	}
	if api == oracle.Limits || gpu >= dynamicGPUs {
		return units
	}
	full := slices.Concat(taken, standing)
	for _, start := range wanted.starts {
		if at := (place{gpu, start, wanted.size}); !overlapsAny(at, full) {
			full = append(full, at)
			units++
		}
	}
	return units
}

func overlapsAny(p place, others []place) bool {
	return slices.ContainsFunc(others, p.overlaps)
}
