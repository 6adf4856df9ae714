// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"strings"
)

// Profile is one way to cut a partition out of a GPU, as the driver of that GPU offers it
// (NVML: nvmlGpuInstanceProfileInfo_v3_t, nvmlGpuInstancePlacement_t, nvmlComputeInstanceProfileInfo_v3_t).
type Profile struct {
	// ID is NVML's GPU instance profile ID: what creating takes, what the placements of MIG are listed by, and a part of
	// the published name. It differs between models for the same Name.
	ID int
	// Name is "1g.10gb", with attributes "1g.10gb+me", and with a compute instance that does not take the whole GPU
	// instance "1c.3g.40gb" (github.com/NVIDIA/go-nvlib/pkg/nvlib/device, MigProfile.String).
	Name string
	// ComputeID is NVML's compute instance profile ID.
	ComputeID int
	// Compute is the number of compute slices of the GPU instance, and of the partition where it has only some of them.
	Compute int
	// Placements are where on the GPU it may start, ascending; all have the same size.
	Placements []Placement
	// Instances is how many of it the GPU holds at most. It can be less than the Placements that fit beside each other:
	// there is one set of media engines for all of the "+me" partitions.
	Instances int
	Capacity  Capacity
}

// Capacity is what a GPU has, and what a partition takes of it.
type Capacity struct {
	MemoryBytes     uint64
	Multiprocessors int
	CopyEngines     int
	Decoders        int
	Encoders        int
	JPEGEngines     int
	OFAEngines      int
}

// Partition is a MIG device: a compute instance in a GPU instance of its parent, or the place where one can be made.
type Partition struct {
	// UUID is NVML's name for it ("MIG-" and a UUID), empty while it is not made, or half made. A partition that is made again in
	// the same place has another one.
	UUID string
	// Ref is its place.
	Ref Ref
	// Parent is the minor of the parent GPU.
	Parent int
	// Profile is as in Profile.Name, ProfileID as in Profile.ID.
	Profile   string
	ProfileID int
	// GPUInstance and ComputeInstance are the IDs under which NVML and the driver's capability files know it.
	GPUInstance     int
	ComputeInstance int
	// Index is NVML's number for the MIG device on its GPU: NVIDIA's container runtime knows the partition as
	// "<index of the GPU>:<index>".
	Index int
	// Caps are the numbers of the device nodes that give access to the GPU instance and to the compute instance,
	// /dev/nvidia-caps/nvidia-cap<number> (/proc/driver/nvidia-caps/mig-minors); zero where they are not known.
	Caps     [2]int
	Capacity Capacity
	// Made is set on partitions that were made for a claim, and that go with it. The others are the administrator's.
	Made   bool
	Health Health
}

// Possible are the partitions that GPU could be cut into, each by itself, by profile ID and place.
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

// Name is the name under which the partition is published, as NVIDIA's DRA driver has it.
func (p Partition) Name() string {
	name := PartitionName(p.Parent, p.Profile, p.ProfileID, p.Ref.Placement)
	if p.Ref.Compute.Size > 0 {
		// Several of them share one GPU instance. NVIDIA's driver does not publish these.
		name += fmt.Sprintf("-%d", p.Ref.Compute.Start)
	}
	return name
}

// PartitionName is the published name of a partition that takes a whole GPU instance, made already or not:
// "gpu-<minor>-mig-<profile>-<profile ID>-<start>", where the profile has lost its dot and everything else that a DNS label
// may not have is a hyphen: "gpu-0-mig-1g10gb-me-20-0" (dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin/mig.go).
func PartitionName(minor int, profile string, id int, place Placement) string {
	label := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r == '.':
			return -1
		default:
			return '-'
		}
	}, strings.ToLower(profile))
	return fmt.Sprintf("gpu-%d"+partitionInfix+"%s-%d-%d", minor, label, id, place.Start)
}
