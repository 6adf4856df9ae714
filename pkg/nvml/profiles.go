// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"fmt"
	"slices"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// computeProfiles are the compute instance profiles, NVML_COMPUTE_INSTANCE_PROFILE_*, that cover a GPU instance with so many
// slices. NVML reports the profiles of a GPU instance only once it exists.
var computeProfiles = map[uint32]int{
	1: gonvml.COMPUTE_INSTANCE_PROFILE_1_SLICE,
	2: gonvml.COMPUTE_INSTANCE_PROFILE_2_SLICE,
	3: gonvml.COMPUTE_INSTANCE_PROFILE_3_SLICE,
	4: gonvml.COMPUTE_INSTANCE_PROFILE_4_SLICE,
	6: gonvml.COMPUTE_INSTANCE_PROFILE_6_SLICE,
	7: gonvml.COMPUTE_INSTANCE_PROFILE_7_SLICE,
	8: gonvml.COMPUTE_INSTANCE_PROFILE_8_SLICE,
}

const mebibyte = 1 << 20

// readProfiles returns the possible partitions of a GPU, by ID. odd says what cannot be read.
func (r *reader) readProfiles(memory uint64, d gonvml.Device) (profiles []gpu.Profile, odd []string) {
	for number := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := d.GetGpuInstanceProfileInfo(number)
		switch {
		case absent(ret):
			continue
		case ret != gonvml.SUCCESS:
			odd = append(odd, fmt.Sprintf("MIG profile %d cannot be read: %v", number, returnError{ret}))
			continue
		}
		p, err := r.profile(number, info, memory, d)
		if err != nil {
			odd = append(odd, fmt.Sprintf("MIG profile %d (ID %d) is not offered: %v", number, info.Id, err))
			continue
		}
		profiles = append(profiles, p)
	}
	slices.SortFunc(profiles, func(a, b gpu.Profile) int { return cmp.Compare(a.ID, b.ID) })
	return profiles, odd
}

// absent reports whether NVML or the GPU lacks a profile (nvml.h, nvmlDeviceGetGpuInstanceProfileInfo).
func absent(ret gonvml.Return) bool {
	return ret == gonvml.ERROR_INVALID_ARGUMENT || ret == gonvml.ERROR_NOT_SUPPORTED
}

func (r *reader) profile(number int, info gonvml.GpuInstanceProfileInfo, memory uint64, d gonvml.Device) (gpu.Profile, error) {
	compute, ok := computeProfiles[info.SliceCount]
	if !ok {
		return gpu.Profile{}, fmt.Errorf("no compute instance is known that takes %d slices", info.SliceCount)
	}
	name, err := r.lib.NewMigProfile(number, compute, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, info.MemorySizeMB, memory)
	if err != nil {
		return gpu.Profile{}, err
	}
	places, ret := d.GetGpuInstancePossiblePlacements(&info)
	if ret != gonvml.SUCCESS {
		return gpu.Profile{}, fmt.Errorf("read its placements: %w", returnError{ret})
	}
	p := gpu.Profile{
		ID: int(info.Id), Name: name.String(), ComputeID: compute, Compute: int(info.SliceCount), Instances: int(info.InstanceCount),
		Capacity: gpu.Capacity{
			MemoryBytes: info.MemorySizeMB * mebibyte, Multiprocessors: int(info.MultiprocessorCount),
			CopyEngines: int(info.CopyEngineCount), Decoders: int(info.DecoderCount), Encoders: int(info.EncoderCount),
			JPEGEngines: int(info.JpegCount), OFAEngines: int(info.OfaCount),
		},
	}
	for _, place := range places {
		p.Placements = append(p.Placements, gpu.Placement{Start: int(place.Start), Size: int(place.Size)})
	}
	slices.SortFunc(p.Placements, func(a, b gpu.Placement) int { return cmp.Compare(a.Start, b.Start) })
	return p, nil
}
