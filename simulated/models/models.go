// SPDX-License-Identifier: Apache-2.0

// Package models describes GPU models and their MIG profiles, as NVML reports them: for simulated machines and for tests.
package models

import (
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Model is a GPU model, with what NVML reports about its MIG profiles.
type Model struct {
	// Name is a short name of our own: "H100-80GB".
	Name string
	// Product is the answer of nvmlDeviceGetName.
	Product string
	// Slices is the number of memory slices, ComputeSlices of compute slices.
	Slices, ComputeSlices int
	// Total is what the whole GPU has. MemoryBytes is nvmlDeviceGetMemoryInfo's total; go-nvlib derives the names of the
	// profiles from it. NVML does not report the other figures for a whole GPU: they are those of the largest profile.
	Total device.Capacity
	// Profiles are the GPU instance profiles, smallest first.
	Profiles []Profile
}

// Profile is a GPU instance profile of a Model.
type Profile struct {
	device.Profile
	// Enum is the NVML_GPU_INSTANCE_PROFILE_* by which NVML is asked for the profile; Profile.ID is what it answers.
	Enum int
	// Computes are the compute instance profiles of a GPU instance of it, smallest first; the last takes all of it.
	Computes []Compute
}

// Compute is a compute instance profile. The engines other than multiprocessors are shared in the GPU instance: NVML reports
// those of the GPU instance for every compute instance in it.
type Compute struct {
	// ID is the profile's ID, and the NVML_COMPUTE_INSTANCE_PROFILE_* by which NVML is asked for it: they are the same
	// (nvidia-smi mig -lcip prints 0, 1, 2, 3, 4 for 1c, 2c, 3c, 4c, 7c).
	ID int
	// Name is "1c.3g.40gb", or the GPU instance profile's where it takes all of it.
	Name string
	// Slices is the number of compute slices.
	Slices          int
	Multiprocessors int
	// Placements are in compute slices of the GPU instance.
	Placements []device.Placement
	// Instances is how many of it the GPU instance holds at most.
	Instances int
}

// All returns all models, by name.
func All() []Model {
	all := make([]Model, 0, len(tables))
	for _, t := range tables {
		all = append(all, t.model())
	}
	return all
}

// Named returns the model with that name ("A100-40GB"), and whether there is one.
func Named(name string) (Model, bool) {
	i := slices.IndexFunc(tables, func(t table) bool { return t.name == name })
	if i < 0 {
		return Model{}, false
	}
	return tables[i].model(), true
}

// Offered returns the model's profiles as the driver of such a GPU offers them.
func (m Model) Offered() []device.Profile {
	profiles := make([]device.Profile, 0, len(m.Profiles))
	for _, p := range m.Profiles {
		profiles = append(profiles, p.Profile)
	}
	return profiles
}

const mebibyte = 1 << 20

func (t table) model() Model {
	m := Model{Name: t.name, Product: t.product}
	base := t.rows[0].multiprocessors
	for _, r := range t.rows {
		p := Profile{Enum: r.enum, Profile: device.Profile{
			ID:         r.id,
			Name:       r.name,
			Instances:  r.instances,
			Placements: r.placements(),
			Capacity: device.Capacity{
				MemoryBytes:     r.mib * mebibyte,
				Multiprocessors: r.multiprocessors,
				CopyEngines:     r.copies,
				Decoders:        r.decoders,
				Encoders:        r.encoders,
				JPEGEngines:     r.jpegs,
				OFAEngines:      r.ofas,
			},
		}}
		p.Compute = widths[r.enum]
		p.ComputeID = computeIDs[p.Compute]
		p.Computes = computes(p.Profile, base)
		m.Profiles = append(m.Profiles, p)
		m.Total = largest(m.Total, p.Capacity)
		m.Slices = max(m.Slices, r.starts[len(r.starts)-1]+r.size)
		m.ComputeSlices = max(m.ComputeSlices, p.Compute)
	}
	m.Total.MemoryBytes = t.mib * mebibyte
	return m
}

func (r row) placements() []device.Placement {
	var places []device.Placement
	for _, start := range r.starts {
		places = append(places, device.Placement{Start: start, Size: r.size})
	}
	return places
}

// largest returns the maximum of each figure.
func largest(a, b device.Capacity) device.Capacity {
	return device.Capacity{
		MemoryBytes:     max(a.MemoryBytes, b.MemoryBytes),
		Multiprocessors: max(a.Multiprocessors, b.Multiprocessors),
		CopyEngines:     max(a.CopyEngines, b.CopyEngines),
		Decoders:        max(a.Decoders, b.Decoders),
		Encoders:        max(a.Encoders, b.Encoders),
		JPEGEngines:     max(a.JPEGEngines, b.JPEGEngines),
		OFAEngines:      max(a.OFAEngines, b.OFAEngines),
	}
}

// computeIDs are NVML_COMPUTE_INSTANCE_PROFILE_<slices>_SLICE. NVML also knows 1_SLICE_REV1 and 7_SLICE_NVL, which
// nvidia-smi does not list for the models here.
var computeIDs = map[int]int{1: 0, 2: 1, 3: 2, 4: 3, 7: 4}

// computes are the compute instance profiles of a GPU instance with these compute slices. nvidia-smi mig -lcip lists
// 1c ×3, 2c ×1, 3c ×1 in a 3g and 1c ×4, 2c ×2, 4c ×1 in a 4g; -lci shows where they start. Both follow from one rule: a compute
// instance starts at a multiple of its size, and one of three slices at a multiple of four. What a 7g offers is that rule's
// (go-nvml's mock of an A100 counts the same), and so are the multiprocessors of one that is not the only one: as many 1g as it
// has slices.
func computes(p device.Profile, base int) []Compute {
	var all []Compute
	for _, size := range []int{1, 2, 3, 4, 7} {
		// A 4g has no 3c; only a 7g has one beside the 3g itself.
		if size > p.Compute || size == 3 && p.Compute == 4 {
			continue
		}
		c := Compute{ID: computeIDs[size], Name: fmt.Sprintf("%dc.%s", size, p.Name), Slices: size, Multiprocessors: size * base}
		if size == p.Compute {
			c.Name, c.Multiprocessors = p.Name, p.Capacity.Multiprocessors
		}
		step := size
		if size == 3 {
			step = 4
		}
		for start := 0; start+size <= p.Compute; start += step {
			c.Placements = append(c.Placements, device.Placement{Start: start, Size: size})
		}
		c.Instances = len(c.Placements)
		all = append(all, c)
	}
	return all
}
