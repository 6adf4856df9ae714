// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated/models"
)

// gpuInstanceHandle is what callers hold. It is void when the instance is destroyed, and valid again when the driver gives its
// ID to another.
type gpuInstanceHandle struct {
	nvml.GpuInstance
	instance *instance
}

type instance struct {
	gpu *gpu
	id  int
}

func (g *gpu) instanceHandle(i GPUInstance) *gpuInstanceHandle {
	return &gpuInstanceHandle{instance: &instance{gpu: g, id: i.ID}}
}

func (h *gpuInstanceHandle) gate(method string) nvml.Return {
	return h.instance.gpu.handle().gate("GpuInstance." + method)
}

// state is that of the instance with its profile; neither is nil on success.
func (i *instance) state() (*GPUInstance, *models.Profile, nvml.Return) {
	own, ret := i.gpu.migEnabled()
	if ret != nvml.SUCCESS {
		return nil, nil, ret
	}
	return i.in(own)
}

func (i *instance) in(own *MIGGPU) (*GPUInstance, *models.Profile, nvml.Return) {
	state := own.instance(i.id)
	if state == nil {
		return nil, nil, nvml.ERROR_INVALID_ARGUMENT
	}
	p := i.gpu.geometry.byID(state.Profile)
	if p == nil {
		return nil, nil, nvml.ERROR_UNKNOWN
	}
	return state, p, nvml.SUCCESS
}

func (i *instance) GetInfo() (nvml.GpuInstanceInfo, nvml.Return) {
	state, _, ret := i.state()
	if ret != nvml.SUCCESS {
		return nvml.GpuInstanceInfo{}, ret
	}
	return nvml.GpuInstanceInfo{
		Device: i.gpu.handle(), Id: uint32(state.ID), ProfileId: uint32(state.Profile),
		Placement: nvml.GpuInstancePlacement{Start: uint32(state.Start), Size: uint32(state.Size)},
	}, nvml.SUCCESS
}

// Destroy refuses while anything is in the instance.
func (i *instance) Destroy() nvml.Return {
	clients := i.gpu.clients()
	return i.gpu.changeMIG(func(own *MIGGPU) nvml.Return {
		state, _, ret := i.in(own)
		if ret != nvml.SUCCESS {
			return ret
		}
		busy := func(c client) bool { return c.in(state) }
		if len(state.Compute) > 0 || slices.ContainsFunc(clients, busy) {
			return nvml.ERROR_IN_USE
		}
		own.Instances = slices.DeleteFunc(own.Instances, func(other GPUInstance) bool { return other.ID == i.id })
		return nvml.SUCCESS
	})
}

func (i *instance) GetComputeInstanceProfileInfo(profile, engines int) (nvml.ComputeInstanceProfileInfo, nvml.Return) {
	_, p, ret := i.state()
	switch {
	case ret != nvml.SUCCESS:
		return nvml.ComputeInstanceProfileInfo{}, ret
	case profile < 0 || profile >= nvml.COMPUTE_INSTANCE_PROFILE_COUNT || engines != nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
		return nvml.ComputeInstanceProfileInfo{}, nvml.ERROR_INVALID_ARGUMENT
	}
	c := computeByID(p, profile)
	if c == nil {
		return nvml.ComputeInstanceProfileInfo{}, nvml.ERROR_NOT_SUPPORTED
	}
	return computeInfo(p, c), nvml.SUCCESS
}

// computeProfile looks up the compute instance profile whose ID is in info; not nil on success.
func computeProfile(p *models.Profile, info *nvml.ComputeInstanceProfileInfo) (*models.Compute, nvml.Return) {
	if info == nil {
		return nil, nvml.ERROR_INVALID_ARGUMENT
	}
	c := computeByID(p, int(info.Id))
	if c == nil {
		return nil, nvml.ERROR_NOT_SUPPORTED
	}
	return c, nvml.SUCCESS
}

// free reports whether no compute instance has any slice of a place.
func (i *GPUInstance) free(place device.Placement) bool {
	return !slices.ContainsFunc(i.Compute, func(c ComputeInstance) bool {
		return place.Overlaps(c.place())
	})
}

// CreateComputeInstance takes the first place with room.
func (i *instance) CreateComputeInstance(info *nvml.ComputeInstanceProfileInfo) (nvml.ComputeInstance, nvml.Return) {
	made := &compute{instance: i}
	ret := i.gpu.changeMIG(func(own *MIGGPU) nvml.Return {
		state, p, ret := i.in(own)
		if ret != nvml.SUCCESS {
			return ret
		}
		c, ret := computeProfile(p, info)
		if ret != nvml.SUCCESS {
			return ret
		}
		free := slices.IndexFunc(c.Placements, state.free)
		if free < 0 {
			return nvml.ERROR_INSUFFICIENT_RESOURCES
		}
		made.id = state.freeCompute()
		state.add(i.gpu.uuid, ComputeInstance{
			ID: made.id, Profile: int(info.Id), Start: c.Placements[free].Start, Size: c.Placements[free].Size,
		})
		return nvml.SUCCESS
	})
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	return &computeInstanceHandle{made}, nvml.SUCCESS
}

// add gives a compute instance its UUID. As the driver does, it makes the UUID of the GPU and of what the instance is: one that is
// destroyed and made again has the UUID that it had.
func (i *GPUInstance) add(gpu string, c ComputeInstance) {
	c.UUID = "MIG-" + formatUUID(digest("mig", fmt.Sprintf("%s %d %d %d", gpu, i.ID, i.Profile, c.ID), c.Profile))
	i.Compute = append(i.Compute, c)
	slices.SortFunc(i.Compute, func(a, b ComputeInstance) int { return a.ID - b.ID })
}

// freeCompute is the lowest ID that no compute instance has.
func (i *GPUInstance) freeCompute() int {
	id := 0
	for i.compute(id) != nil {
		id++
	}
	return id
}

func (i *instance) GetComputeInstances(info *nvml.ComputeInstanceProfileInfo) ([]nvml.ComputeInstance, nvml.Return) {
	state, p, ret := i.state()
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	if _, ret := computeProfile(p, info); ret != nvml.SUCCESS {
		return nil, ret
	}
	var found []nvml.ComputeInstance
	for _, c := range state.Compute {
		if c.Profile == int(info.Id) {
			found = append(found, &computeInstanceHandle{&compute{instance: i, id: c.ID}})
		}
	}
	return found, nvml.SUCCESS
}

func (i *instance) GetComputeInstanceById(id int) (nvml.ComputeInstance, nvml.Return) { //nolint:revive // the name is go-nvml's
	state, _, ret := i.state()
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	if state.compute(id) == nil {
		return nil, nvml.ERROR_NOT_FOUND
	}
	return &computeInstanceHandle{&compute{instance: i, id: id}}, nvml.SUCCESS
}

// computeInstanceHandle is what callers hold.
type computeInstanceHandle struct {
	compute *compute
}

type compute struct {
	instance *instance
	id       int
}

func (h *computeInstanceHandle) gate(method string) nvml.Return {
	return h.compute.instance.gpu.handle().gate("ComputeInstance." + method)
}

// GetInfo names the GPU as the device, not the MIG device.
func (c *compute) GetInfo() (nvml.ComputeInstanceInfo, nvml.Return) {
	parent, _, ret := c.instance.state()
	if ret != nvml.SUCCESS {
		return nvml.ComputeInstanceInfo{}, ret
	}
	state := parent.compute(c.id)
	if state == nil {
		return nvml.ComputeInstanceInfo{}, nvml.ERROR_INVALID_ARGUMENT
	}
	return nvml.ComputeInstanceInfo{
		Device: c.instance.gpu.handle(), GpuInstance: &gpuInstanceHandle{instance: c.instance}, Id: uint32(state.ID), ProfileId: uint32(state.Profile),
		Placement: nvml.ComputeInstancePlacement{Start: uint32(state.Start), Size: uint32(state.Size)},
	}, nvml.SUCCESS
}

// Destroy refuses while a client uses the compute instance.
func (c *compute) Destroy() nvml.Return {
	clients := c.instance.gpu.clients()
	return c.instance.gpu.changeMIG(func(own *MIGGPU) nvml.Return {
		parent, _, ret := c.instance.in(own)
		if ret != nvml.SUCCESS {
			return ret
		}
		state := parent.compute(c.id)
		if state == nil {
			return nvml.ERROR_INVALID_ARGUMENT
		}
		if slices.ContainsFunc(clients, func(user client) bool { return user.uses(parent, state) }) {
			return nvml.ERROR_IN_USE
		}
		parent.Compute = slices.DeleteFunc(parent.Compute, func(other ComputeInstance) bool { return other.ID == c.id })
		return nvml.SUCCESS
	})
}
