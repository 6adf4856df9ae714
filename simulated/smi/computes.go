// SPDX-License-Identifier: Apache-2.0

package smi

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// computes visits the compute instances that were named.
func (c *command) computes(d nvml.Device, do func(compute nvml.ComputeInstance, info nvml.ComputeInstanceInfo, gpuInstance int) error) error {
	return c.instances(d, func(i nvml.GpuInstance, parent nvml.GpuInstanceInfo, _ profile) error {
		for number := range nvml.COMPUTE_INSTANCE_PROFILE_COUNT {
			p, ret := i.GetComputeInstanceProfileInfo(number, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
			if ret != nvml.SUCCESS {
				continue
			}
			found, ret := i.GetComputeInstances(&p)
			if ret != nvml.SUCCESS {
				return fmt.Errorf("list compute instances: %w", ret)
			}
			for _, compute := range found {
				info, ret := compute.GetInfo()
				if ret != nvml.SUCCESS {
					return fmt.Errorf("read a compute instance: %w", ret)
				}
				if c.computeInstance != c.none && int(info.Id) != c.computeInstance {
					continue
				}
				if err := do(compute, info, int(parent.Id)); err != nil {
					return fmt.Errorf("compute instance %d: %w", info.Id, err)
				}
			}
		}
		return nil
	})
}

func (c *command) listComputes(index int, d nvml.Device) error {
	return c.computes(d, func(_ nvml.ComputeInstance, info nvml.ComputeInstanceInfo, gpuInstance int) error {
		c.print("%d %2d %d %d %d:%d", index, gpuInstance, info.ProfileId, info.Id, info.Placement.Start, info.Placement.Size)
		return nil
	})
}

func (c *command) createComputes(_ int, d nvml.Device) error {
	if c.gpuInstance == c.none {
		return errors.New("-cci needs -gi")
	}
	return c.instances(d, func(i nvml.GpuInstance, info nvml.GpuInstanceInfo, _ profile) error {
		for _, wanted := range split(c.cci) {
			id, err := parseID(wanted, "compute instance profile")
			if err != nil {
				return err
			}
			if err := c.createCompute(i, int(info.Id), id); err != nil {
				return err
			}
		}
		return nil
	})
}

func (c *command) createCompute(i nvml.GpuInstance, gpuInstance, id int) error {
	p, ret := i.GetComputeInstanceProfileInfo(id, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
	if ret != nvml.SUCCESS {
		return fmt.Errorf("read compute instance profile %d: %w", id, ret)
	}
	compute, ret := i.CreateComputeInstance(&p)
	if ret != nvml.SUCCESS {
		return fmt.Errorf("create a compute instance in GPU instance %d: %w", gpuInstance, ret)
	}
	info, ret := compute.GetInfo()
	if ret != nvml.SUCCESS {
		return fmt.Errorf("read the compute instance: %w", ret)
	}
	c.print("Created compute instance %d in GPU instance %d", info.Id, gpuInstance)
	return nil
}

func (c *command) destroyComputes(index int, d nvml.Device) error {
	return c.computes(d, func(compute nvml.ComputeInstance, info nvml.ComputeInstanceInfo, gpuInstance int) error {
		if ret := compute.Destroy(); ret != nvml.SUCCESS {
			return fmt.Errorf("destroy: %w", ret)
		}
		c.print("Destroyed compute instance %d in GPU instance %d on GPU %d", info.Id, gpuInstance, index)
		return nil
	})
}
