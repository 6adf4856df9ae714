// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"strconv"
	"strings"
)

// Profile is one kind of partition of a GPU, as its driver offers it (NVML: nvmlGpuInstanceProfileInfo_v3_t,
// nvmlGpuInstancePlacement_t, nvmlComputeInstanceProfileInfo_v3_t).
type Profile struct {
	// ID is NVML's GPU instance profile ID. It differs between models for the same Name, and is part of the published name.
	ID int
	// Name is "1g.10gb", with attributes "1g.10gb+me", and with a compute instance that does not take the whole GPU
	// instance "1c.3g.40gb" (github.com/NVIDIA/go-nvlib/pkg/nvlib/device, MigProfile.String).
	Name string
	// ComputeID is NVML's compute instance profile ID.
	ComputeID int
	// Compute is the number of compute slices of the GPU instance, or of the partition if it has only some of them.
	Compute int
	// Placements are the possible placements, ascending; all have the same size.
	Placements []Placement
	// Instances is the maximum number on a GPU. It can be less than the number of disjoint Placements: all "+me" partitions share
	// one set of media engines.
	Instances int
	Capacity  Capacity
}

// Capacity is the capacity of a GPU or a partition.
type Capacity struct {
	MemoryBytes     uint64
	Multiprocessors int
	CopyEngines     int
	Decoders        int
	Encoders        int
	JPEGEngines     int
	OFAEngines      int
}

// Partition is a MIG device: a compute instance in a GPU instance of its parent, existing or possible.
type Partition struct {
	// UUID is NVML's ("MIG-" and a UUID), empty while the partition is not complete. The driver derives it from the GPU and the
	// instance IDs, so that a partition that is created again at the same placement may have the same UUID or another one.
	UUID string
	// Ref has its placement.
	Ref Ref
	// Parent is the minor of the parent GPU.
	Parent int
	// Profile is as in Profile.Name, or UnknownProfile. ProfileID is as in Profile.ID.
	Profile   string
	ProfileID int
	// GPUInstance and ComputeInstance are its IDs in NVML and in the driver's capability files.
	GPUInstance     int
	ComputeInstance int
	// Index is NVML's index of the MIG device on its GPU: NVIDIA's container runtime calls the partition "<index of the
	// GPU>:<index>".
	Index int
	// Caps are the numbers of the device nodes that give access to the GPU instance and to the compute instance,
	// /dev/nvidia-caps/nvidia-cap<number> (/proc/driver/nvidia-caps/mig-minors); zero where they are not known.
	Caps     [2]int
	Capacity Capacity
	// Made is set on partitions that were created for a claim. Other partitions are the administrator's.
	Made bool
	// Health does not include the GPU's: see Device.Health.
	Health Health
}

// UnknownProfile is Partition.Profile while the GPU does not say what its profiles are, or does not have the partition's.
const UnknownProfile = "unknown"

// Known reports whether the partition's profile has a name, by which resources and labels are called.
func (p Partition) Known() bool { return p.Profile != "" && p.Profile != UnknownProfile }

// Possible returns all partitions that the GPU offers, each by itself, by profile ID and placement.
func (g GPU) Possible() []Partition {
	var possible []Partition
	for _, profile := range g.Profiles {
		for _, place := range profile.Placements {
			possible = append(possible, Partition{
				Ref: Ref{GPU: g.UUID, Placement: place}, Parent: g.Minor,
				Profile: profile.Name, ProfileID: profile.ID, Capacity: profile.Capacity,
			})
		}
	}
	return possible
}

// Name returns the published name, as in NVIDIA's DRA driver.
func (p Partition) Name() string {
	name := PartitionName(p.Parent, p.Profile, p.ProfileID, p.Ref.Placement)
	if p.Ref.Compute.Size > 0 {
		// Several partitions share one GPU instance. NVIDIA's driver does not publish these.
		name += fmt.Sprintf("-%d", p.Ref.Compute.Start)
	}
	return name
}

// PartitionName returns the published name of a partition with its own GPU instance: "gpu-<minor>-mig-<profile>-<profile
// ID>-<start>". The profile has no dot, and other characters that a DNS label cannot have are hyphens: "gpu-0-mig-1g10gb-me-20-0"
// (dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin/mig.go).
func PartitionName(minor int, profile string, id int, place Placement) string {
	return fmt.Sprintf("gpu-%d"+partitionInfix+"%s-%d-%d", minor, profileLabel(profile), id, place.Start)
}

// StartOf returns the first memory slice of a partition by its published name and its profile; false for another name. The name does not
// contain the size.
func StartOf(name, profile string) (int, bool) {
	ids, ok := strings.CutPrefix(name, GPUName(name)+partitionInfix+profileLabel(profile)+"-")
	if !ok {
		return 0, false
	}
	parts := strings.Split(ids, "-") // profile ID, start, and compute slice if it shares its GPU instance
	if len(parts) < 2 {
		return 0, false
	}
	start, err := strconv.Atoi(parts[1])
	return start, err == nil
}

func profileLabel(profile string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r == '.':
			return -1
		default:
			return '-'
		}
	}, strings.ToLower(profile))
}
