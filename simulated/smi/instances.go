// SPDX-License-Identifier: Apache-2.0

package smi

import (
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// profile is a GPU instance profile with its name.
type profile struct {
	nvml.GpuInstanceProfileInfo
	name string
	// whole is the compute instance profile that takes all of it.
	whole int
}

func (c *command) profiles(d nvml.Device) ([]profile, error) {
	memory, ret := d.GetMemoryInfo()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read memory: %w", ret)
	}
	computes := map[uint32]int{
		1: nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 2: nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 3: nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE,
		4: nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE, 7: nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE,
	}
	var all []profile
	for number := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := d.GetGpuInstanceProfileInfo(number)
		if ret != nvml.SUCCESS {
			continue
		}
		name, err := c.devices.NewMigProfile(number, computes[info.SliceCount], 0, info.MemorySizeMB, memory.Total)
		if err != nil {
			return nil, err
		}
		all = append(all, profile{info, name.String(), computes[info.SliceCount]})
	}
	return all, nil
}

// find is a profile by name or ID.
func (c *command) find(d nvml.Device, wanted string) (profile, error) {
	all, err := c.profiles(d)
	if err != nil {
		return profile{}, err
	}
	for _, p := range all {
		if p.name == wanted || fmt.Sprint(p.Id) == wanted {
			return p, nil
		}
	}
	return profile{}, fmt.Errorf("it has no MIG profile %q", wanted)
}

func (c *command) listProfiles(index int, d nvml.Device) error {
	all, err := c.profiles(d)
	if err != nil {
		return err
	}
	for _, p := range all {
		// Not with MIG off.
		free, _ := d.GetGpuInstanceRemainingCapacity(&p.GpuInstanceProfileInfo) //nolint:errcheck // it is none then
		places, ret := d.GetGpuInstancePossiblePlacements(&p.GpuInstanceProfileInfo)
		if ret != nvml.SUCCESS {
			return fmt.Errorf("read the placements of %s: %w", p.name, ret)
		}
		var at []string
		for _, place := range places {
			at = append(at, fmt.Sprintf("%d:%d", place.Start, place.Size))
		}
		c.print("%d MIG %-12s %2d %d/%d %s", index, p.name, p.Id, free, p.InstanceCount, strings.Join(at, ","))
	}
	return nil
}

// instances visits the GPU instances that were named.
func (c *command) instances(d nvml.Device, do func(i nvml.GpuInstance, info nvml.GpuInstanceInfo, p profile) error) error {
	all, err := c.profiles(d)
	if err != nil {
		return err
	}
	for _, p := range all {
		found, ret := d.GetGpuInstances(&p.GpuInstanceProfileInfo)
		if ret != nvml.SUCCESS {
			return fmt.Errorf("list GPU instances: %w", ret)
		}
		for _, i := range found {
			info, ret := i.GetInfo()
			if ret != nvml.SUCCESS {
				return fmt.Errorf("read a GPU instance: %w", ret)
			}
			if c.gpuInstance != c.none && int(info.Id) != c.gpuInstance {
				continue
			}
			if err := do(i, info, p); err != nil {
				return fmt.Errorf("GPU instance %d: %w", info.Id, err)
			}
		}
	}
	return nil
}

func (c *command) listInstances(index int, d nvml.Device) error {
	return c.instances(d, func(_ nvml.GpuInstance, info nvml.GpuInstanceInfo, p profile) error {
		c.print("%d MIG %-12s %2d %2d %d:%d", index, p.name, info.ProfileId, info.Id, info.Placement.Start, info.Placement.Size)
		return nil
	})
}

func (c *command) createInstances(index int, d nvml.Device) error {
	for _, wanted := range split(c.cgi) {
		name, start, placed := strings.Cut(wanted, ":")
		p, err := c.find(d, name)
		if err != nil {
			return err
		}
		var i nvml.GpuInstance
		var ret nvml.Return
		if placed {
			first, err := parseID(start, "placement")
			if err != nil {
				return err
			}
			places, ret := d.GetGpuInstancePossiblePlacements(&p.GpuInstanceProfileInfo)
			if ret != nvml.SUCCESS || len(places) == 0 {
				return fmt.Errorf("read the placements of %s: %w", name, ret)
			}
			at := nvml.GpuInstancePlacement{Start: uint32(first), Size: places[0].Size}
			i, ret = d.CreateGpuInstanceWithPlacement(&p.GpuInstanceProfileInfo, &at)
			if ret != nvml.SUCCESS {
				return fmt.Errorf("create a %s at %s: %w", p.name, start, ret)
			}
		} else if i, ret = d.CreateGpuInstance(&p.GpuInstanceProfileInfo); ret != nvml.SUCCESS {
			return fmt.Errorf("create a %s: %w", p.name, ret)
		}
		info, ret := i.GetInfo()
		if ret != nvml.SUCCESS {
			return fmt.Errorf("read the GPU instance: %w", ret)
		}
		c.print("Created GPU instance %d on GPU %d with profile %s (ID %d)", info.Id, index, p.name, p.Id)
		if c.whole {
			if err := c.createCompute(i, int(info.Id), p.whole); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *command) destroyInstances(index int, d nvml.Device) error {
	return c.instances(d, func(i nvml.GpuInstance, info nvml.GpuInstanceInfo, _ profile) error {
		if ret := i.Destroy(); ret != nvml.SUCCESS {
			return fmt.Errorf("destroy: %w", ret)
		}
		c.print("Destroyed GPU instance %d on GPU %d", info.Id, index)
		return nil
	})
}
