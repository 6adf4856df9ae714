// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated/models"
)

// geometry says what a model of GPU can be cut into. What fits is worked out here anew, from slices and engines, so that
// package mig is told when it is wrong.
type geometry struct{ models.Model }

func geometryOf(m Model) geometry {
	model, _ := models.Named(m.MIG) // validated with the profile; empty for a GPU without
	return geometry{model}
}

func (g geometry) byID(id int) *models.Profile {
	i := slices.IndexFunc(g.Profiles, func(p models.Profile) bool { return p.ID == id })
	if i < 0 {
		return nil
	}
	return &g.Profiles[i]
}

func (g geometry) byName(name string) *models.Profile {
	i := slices.IndexFunc(g.Profiles, func(p models.Profile) bool { return p.Name == name })
	if i < 0 {
		return nil
	}
	return &g.Profiles[i]
}

// fits reports whether there is room for a profile at a place beside the instances: memory slices of its own, and enough left
// of everything else that the GPU has some of.
func (g geometry) fits(instances []GPUInstance, p *models.Profile, at device.Placement) bool {
	same, computes, used := 1, p.Compute, p.Capacity
	for _, i := range instances {
		other := g.byID(i.Profile)
		if other == nil || at.Overlaps(i.place()) {
			return false
		}
		if i.Profile == p.ID {
			same++
		}
		computes += other.Compute
		used.Decoders += other.Capacity.Decoders
		used.Encoders += other.Capacity.Encoders
		used.JPEGEngines += other.Capacity.JPEGEngines
		used.OFAEngines += other.Capacity.OFAEngines
	}
	return same <= p.Instances && computes <= g.ComputeSlices &&
		used.Decoders <= g.Total.Decoders && used.Encoders <= g.Total.Encoders &&
		used.JPEGEngines <= g.Total.JPEGEngines && used.OFAEngines <= g.Total.OFAEngines
}

func (i GPUInstance) place() device.Placement { return device.Placement{Start: i.Start, Size: i.Size} }

func (c ComputeInstance) place() device.Placement {
	return device.Placement{Start: c.Start, Size: c.Size}
}

// freeID is the ID that the driver gives an instance at a place: 0 for one that takes all memory, 1 and 2 for halves, 3 to 6
// for quarters, 7 to 14 for eighths (as the listings of the MIG User Guide have them), or the first that is free.
func (g geometry) freeID(own *MIGGPU, at device.Placement) (id int, ok bool) {
	first := 0
	for size := at.Size; size*2 <= g.Slices; size *= 2 {
		first = first*2 + 1
	}
	id = first + at.Start/at.Size
	for try := range migInstances {
		if candidate := (id + try) % migInstances; own.instance(candidate) == nil {
			return candidate, true
		}
	}
	return 0, false
}

// profileInfo is a profile as NVML describes it. None of the models here lets partitions talk to each other (P2P).
func profileInfo(p *models.Profile) nvml.GpuInstanceProfileInfo {
	return nvml.GpuInstanceProfileInfo{
		Id: uint32(p.ID), SliceCount: uint32(p.Compute), InstanceCount: uint32(p.Instances),
		MultiprocessorCount: uint32(p.Capacity.Multiprocessors), CopyEngineCount: uint32(p.Capacity.CopyEngines),
		DecoderCount: uint32(p.Capacity.Decoders), EncoderCount: uint32(p.Capacity.Encoders),
		JpegCount: uint32(p.Capacity.JPEGEngines), OfaCount: uint32(p.Capacity.OFAEngines),
		MemorySizeMB: p.Capacity.MemoryBytes / mebibyte,
	}
}

// computeByID is nil for a compute instance profile that a GPU instance of p does not have.
func computeByID(p *models.Profile, id int) *models.Compute {
	i := slices.IndexFunc(p.Computes, func(c models.Compute) bool { return c.ID == id })
	if i < 0 {
		return nil
	}
	return &p.Computes[i]
}

func computeInfo(p *models.Profile, c *models.Compute) nvml.ComputeInstanceProfileInfo {
	return nvml.ComputeInstanceProfileInfo{
		Id: uint32(c.ID), SliceCount: uint32(c.Slices), InstanceCount: uint32(c.Instances),
		MultiprocessorCount: uint32(c.Multiprocessors), SharedCopyEngineCount: uint32(p.Capacity.CopyEngines),
		SharedDecoderCount: uint32(p.Capacity.Decoders), SharedEncoderCount: uint32(p.Capacity.Encoders),
		SharedJpegCount: uint32(p.Capacity.JPEGEngines), SharedOfaCount: uint32(p.Capacity.OFAEngines),
	}
}
