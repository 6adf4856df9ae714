// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated/models"
)

// partitionHandle is a MIG device as callers hold it. It is void when its compute instance is destroyed, and valid again when the same
// is made again.
type partitionHandle struct {
	nvml.Device
	partition *partition
}

type partition struct {
	parent *gpu
	uuid   string
}

var _ nvml.Device = (*partitionHandle)(nil)

func (h *partitionHandle) gate(method string) nvml.Return {
	return h.partition.parent.handle().gate("MigDevice." + method)
}

// migDevice is a MIG device as it is now.
type migDevice struct {
	index    int
	instance GPUInstance
	compute  ComputeInstance
	profile  *models.Profile
	// part is the compute instance's profile.
	part *models.Compute
}

// find looks the device up; it is INVALID_ARGUMENT once it is gone.
func (p *partition) find() (migDevice, nvml.Return) {
	own, ret := p.parent.migEnabled()
	if ret != nvml.SUCCESS {
		return migDevice{}, nvml.ERROR_INVALID_ARGUMENT
	}
	index := 0
	for _, i := range own.Instances {
		for _, c := range i.Compute {
			if c.UUID == p.uuid {
				profile := p.parent.geometry.byID(i.Profile)
				if profile == nil || computeByID(profile, c.Profile) == nil {
					return migDevice{}, nvml.ERROR_UNKNOWN
				}
				return migDevice{index, i, c, profile, computeByID(profile, c.Profile)}, nvml.SUCCESS
			}
			index++
		}
	}
	return migDevice{}, nvml.ERROR_INVALID_ARGUMENT
}

// obtainMIG finds a MIG device by UUID.
func (s *system) obtainMIG(uuid string) (nvml.Device, nvml.Return) {
	for _, h := range s.handles() {
		if !h.gpu.hasMIG() {
			continue
		}
		p := &partition{parent: h.gpu, uuid: uuid}
		if _, ret := p.find(); ret != nvml.SUCCESS {
			continue
		}
		if ret := h.gate("DeviceGetHandleByUUID"); ret != nvml.SUCCESS {
			return nil, ret
		}
		return &partitionHandle{partition: p}, nvml.SUCCESS
	}
	return nil, nvml.ERROR_NOT_FOUND
}

func (p *partition) IsMigDeviceHandle() (bool, nvml.Return) { return true, nvml.SUCCESS }

func (p *partition) GetUUID() (string, nvml.Return) {
	_, ret := p.find()
	return p.uuid, ret
}

func (p *partition) GetIndex() (int, nvml.Return) {
	d, ret := p.find()
	return d.index, ret
}

func (p *partition) GetName() (string, nvml.Return) {
	d, ret := p.find()
	if ret != nvml.SUCCESS {
		return "", ret
	}
	return p.parent.model.ProductName + " MIG " + d.part.Name, nvml.SUCCESS
}

func (p *partition) GetGpuInstanceId() (int, nvml.Return) { //nolint:revive // the name is go-nvml's
	d, ret := p.find()
	return d.instance.ID, ret
}

func (p *partition) GetComputeInstanceId() (int, nvml.Return) { //nolint:revive // the name is go-nvml's
	d, ret := p.find()
	return d.compute.ID, ret
}

func (p *partition) GetDeviceHandleFromMigDeviceHandle() (nvml.Device, nvml.Return) {
	if _, ret := p.find(); ret != nvml.SUCCESS {
		return nil, ret
	}
	return p.parent.handle(), nvml.SUCCESS
}

// GetAttributes counts engines that all compute instances of a GPU instance share.
func (p *partition) GetAttributes() (nvml.DeviceAttributes, nvml.Return) {
	d, ret := p.find()
	if ret != nvml.SUCCESS {
		return nvml.DeviceAttributes{}, ret
	}
	info := computeInfo(d.profile, d.part)
	return nvml.DeviceAttributes{
		MultiprocessorCount: info.MultiprocessorCount, SharedCopyEngineCount: info.SharedCopyEngineCount,
		SharedDecoderCount: info.SharedDecoderCount, SharedEncoderCount: info.SharedEncoderCount,
		SharedJpegCount: info.SharedJpegCount, SharedOfaCount: info.SharedOfaCount,
		GpuInstanceSliceCount: uint32(d.profile.Compute), ComputeInstanceSliceCount: uint32(d.compute.Size),
		MemorySizeMB: d.profile.Capacity.MemoryBytes / mebibyte,
	}, nvml.SUCCESS
}

func (p *partition) GetMemoryInfo() (nvml.Memory, nvml.Return) {
	d, ret := p.find()
	if ret != nvml.SUCCESS {
		return nvml.Memory{}, ret
	}
	total := d.profile.Capacity.MemoryBytes
	return nvml.Memory{Total: total, Free: total}, nvml.SUCCESS
}

func (p *partition) GetComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return p.processes(false)
}

func (p *partition) GetGraphicsRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return p.processes(true)
}

func (p *partition) processes(graphics bool) ([]nvml.ProcessInfo, nvml.Return) {
	d, ret := p.find()
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	var processes []nvml.ProcessInfo
	for _, c := range p.parent.clients() {
		if c.graphics == graphics && c.uses(&d.instance, &d.compute) {
			processes = append(processes, nvml.ProcessInfo{
				Pid: c.pid, GpuInstanceId: uint32(d.instance.ID), ComputeInstanceId: uint32(d.compute.ID),
			})
		}
	}
	return processes, nvml.SUCCESS
}

func (p *partition) GetMPSComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	_, ret := p.find()
	return nil, ret
}

// client is a process that uses a GPU, or the partition of it at ref.
type client struct {
	pid uint32
	ref device.Ref
	// graphics is set if it has no CUDA context.
	graphics bool
}

func (g *gpu) clients() []client { return g.sys.faults.current().gpus[g.place].clients }

// in reports whether the client is in a GPU instance. A client of the whole GPU is in none.
func (c client) in(i *GPUInstance) bool {
	return !c.ref.Whole() && c.ref.Placement == i.place()
}

// uses reports whether the client uses a compute instance: one that names none uses all of its GPU instance's.
func (c client) uses(i *GPUInstance, compute *ComputeInstance) bool {
	return c.in(i) && (c.ref.Compute.Size == 0 || c.ref.Compute == compute.place())
}

func (g *gpu) GetComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return g.processes(false)
}

func (g *gpu) GetGraphicsRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return g.processes(true)
}

func (g *gpu) processes(graphics bool) ([]nvml.ProcessInfo, nvml.Return) {
	var processes []nvml.ProcessInfo
	for _, c := range g.clients() {
		if c.graphics == graphics {
			processes = append(processes, nvml.ProcessInfo{Pid: c.pid, GpuInstanceId: noInstance, ComputeInstanceId: noInstance})
		}
	}
	return processes, nvml.SUCCESS
}
