// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated/models"
)

// migInstances are the GPU instance IDs that a GPU has: the driver's capability files end at gi14.
const migInstances = 15

// hasMIG is false for a GPU on which no call of MIG is supported.
func (g *gpu) hasMIG() bool { return g.model.MIG != "" }

// migState is what the GPU remembers; not nil on success.
func (g *gpu) migState() (*MIGGPU, nvml.Return) {
	if !g.hasMIG() {
		return nil, nvml.ERROR_NOT_SUPPORTED
	}
	state, ret := g.sys.mig.current()
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	if own := state.gpu(g.uuid); own != nil {
		return own, nvml.SUCCESS
	}
	return nil, nvml.ERROR_UNKNOWN
}

// migEnabled is migState for what needs the mode to be on.
func (g *gpu) migEnabled() (*MIGGPU, nvml.Return) {
	own, ret := g.migState()
	if ret == nvml.SUCCESS && !own.Enabled {
		return nil, nvml.ERROR_NOT_SUPPORTED
	}
	return own, ret
}

// changeMIG changes the GPU's state with the mode on.
func (g *gpu) changeMIG(do func(own *MIGGPU) nvml.Return) nvml.Return {
	return g.sys.mig.change(func(state *MIGState) nvml.Return {
		own := state.gpu(g.uuid)
		if own == nil || !own.Enabled {
			return nvml.ERROR_NOT_SUPPORTED
		}
		return do(own)
	})
}

func (g *gpu) GetMigMode() (current, pending int, ret nvml.Return) {
	own, ret := g.migState()
	if ret != nvml.SUCCESS {
		return 0, 0, ret
	}
	return int(enabled(own.Enabled)), int(enabled(own.Pending)), nvml.SUCCESS
}

// SetMigMode asks for a mode, and says as the activation's outcome whether it is in force (nvml.h, nvmlDeviceSetMigMode). It
// takes an idle GPU without instances; up to Ampere a reset too, which the platform may forbid.
func (g *gpu) SetMigMode(mode int) (activation, ret nvml.Return) {
	switch {
	case !g.hasMIG():
		return 0, nvml.ERROR_NOT_SUPPORTED
	case mode != nvml.DEVICE_MIG_DISABLE && mode != nvml.DEVICE_MIG_ENABLE:
		return 0, nvml.ERROR_INVALID_ARGUMENT
	}
	on, clients := mode == nvml.DEVICE_MIG_ENABLE, g.clients()
	ret = g.sys.mig.change(func(state *MIGState) nvml.Return {
		own := state.gpu(g.uuid)
		if own == nil {
			return nvml.ERROR_UNKNOWN
		}
		own.Pending = on
		switch {
		case own.Enabled == on:
		case len(clients) > 0 || len(own.Instances) > 0:
			activation = nvml.ERROR_IN_USE
		case g.model.Architecture == "Ampere" && g.spec.NoReset:
			activation = nvml.ERROR_RESET_REQUIRED
		default:
			own.Enabled = on
		}
		return nvml.SUCCESS
	})
	return activation, ret
}

// GetMaxMigDeviceCount is 0 where MIG is not to be had or off, which is no error (nvml.h).
func (g *gpu) GetMaxMigDeviceCount() (int, nvml.Return) {
	own, ret := g.migState()
	switch {
	case ret == nvml.ERROR_NOT_SUPPORTED:
		return 0, nvml.SUCCESS
	case ret != nvml.SUCCESS || !own.Enabled:
		return 0, ret
	}
	return g.geometry.ComputeSlices, nvml.SUCCESS
}

// instanceProfiles is how many GPU instance profiles a driver knows. R580 knows 17 (pkg/nvml/testdata/recordings). Older drivers know fewer,
// which the simulation leaves out; later ones are assumed to know as many as go-nvml.
func (d Driver) instanceProfiles() int {
	if branch, _ := majorMinor(d.Version); branch <= 580 {
		return 17
	}
	return nvml.GPU_INSTANCE_PROFILE_COUNT
}

func (g *gpu) GetGpuInstanceProfileInfo(profile int) (nvml.GpuInstanceProfileInfo, nvml.Return) {
	switch {
	case !g.hasMIG():
		return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_NOT_SUPPORTED
	case profile < 0 || profile >= g.sys.profile.Driver.instanceProfiles():
		return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_INVALID_ARGUMENT
	}
	for i := range g.geometry.Profiles {
		if p := &g.geometry.Profiles[i]; p.Enum == profile {
			return profileInfo(p), nvml.SUCCESS
		}
	}
	return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_NOT_SUPPORTED
}

func (g *gpu) profile(info *nvml.GpuInstanceProfileInfo) (*models.Profile, nvml.Return) {
	switch {
	case !g.hasMIG():
		return nil, nvml.ERROR_NOT_SUPPORTED
	case info == nil:
		return nil, nvml.ERROR_INVALID_ARGUMENT
	}
	p := g.geometry.byID(int(info.Id))
	if p == nil {
		return nil, nvml.ERROR_INVALID_ARGUMENT
	}
	return p, nvml.SUCCESS
}

// GetGpuInstancePossiblePlacements are all that there ever are, whatever is in them (nvml.h).
func (g *gpu) GetGpuInstancePossiblePlacements(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstancePlacement, nvml.Return) {
	p, ret := g.profile(info)
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	var places []nvml.GpuInstancePlacement
	for _, place := range p.Placements {
		places = append(places, nvml.GpuInstancePlacement{Start: uint32(place.Start), Size: uint32(place.Size)})
	}
	return places, nvml.SUCCESS
}

// GetGpuInstanceRemainingCapacity is how many more can be created one after the other, each at the first place that is free.
func (g *gpu) GetGpuInstanceRemainingCapacity(info *nvml.GpuInstanceProfileInfo) (int, nvml.Return) {
	own, ret := g.migEnabled()
	if ret != nvml.SUCCESS {
		return 0, ret
	}
	p, ret := g.profile(info)
	if ret != nvml.SUCCESS {
		return 0, ret
	}
	instances, count := slices.Clone(own.Instances), 0
	for _, place := range p.Placements {
		if g.geometry.fits(instances, p, place) {
			instances = append(instances, GPUInstance{Profile: p.ID, Start: place.Start, Size: place.Size})
			count++
		}
	}
	return count, nvml.SUCCESS
}

func (g *gpu) CreateGpuInstance(info *nvml.GpuInstanceProfileInfo) (nvml.GpuInstance, nvml.Return) {
	p, ret := g.profile(info)
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	return g.createInstance(p, p.Placements...)
}

func (g *gpu) CreateGpuInstanceWithPlacement(info *nvml.GpuInstanceProfileInfo, at *nvml.GpuInstancePlacement) (nvml.GpuInstance, nvml.Return) {
	p, ret := g.profile(info)
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	if at == nil {
		return nil, nvml.ERROR_INVALID_ARGUMENT
	}
	place := device.Placement{Start: int(at.Start), Size: int(at.Size)}
	if !slices.Contains(p.Placements, place) {
		return nil, nvml.ERROR_INVALID_ARGUMENT
	}
	return g.createInstance(p, place)
}

// createInstance takes the first of the places where there is room.
func (g *gpu) createInstance(p *models.Profile, places ...device.Placement) (nvml.GpuInstance, nvml.Return) {
	var made GPUInstance
	ret := g.changeMIG(func(own *MIGGPU) nvml.Return {
		at := slices.IndexFunc(places, func(place device.Placement) bool { return g.geometry.fits(own.Instances, p, place) })
		if at < 0 {
			return nvml.ERROR_INSUFFICIENT_RESOURCES
		}
		id, ok := g.geometry.freeID(own, places[at])
		if !ok {
			return nvml.ERROR_INSUFFICIENT_RESOURCES
		}
		made = GPUInstance{ID: id, Profile: p.ID, Start: places[at].Start, Size: places[at].Size}
		own.Instances = append(own.Instances, made)
		slices.SortFunc(own.Instances, func(a, b GPUInstance) int { return a.ID - b.ID })
		return nvml.SUCCESS
	})
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	return g.instanceHandle(made), nvml.SUCCESS
}

func (g *gpu) GetGpuInstances(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstance, nvml.Return) {
	own, ret := g.migEnabled()
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	p, ret := g.profile(info)
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	var found []nvml.GpuInstance
	for _, i := range own.Instances {
		if i.Profile == p.ID {
			found = append(found, g.instanceHandle(i))
		}
	}
	return found, nvml.SUCCESS
}

func (g *gpu) GetGpuInstanceById(id int) (nvml.GpuInstance, nvml.Return) { //nolint:revive // the name is go-nvml's
	own, ret := g.migEnabled()
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	if i := own.instance(id); i != nil {
		return g.instanceHandle(*i), nvml.SUCCESS
	}
	return nil, nvml.ERROR_NOT_FOUND
}

// GetMigDeviceHandleByIndex counts compute instances by the IDs of their GPU instances, then their own.
func (g *gpu) GetMigDeviceHandleByIndex(index int) (nvml.Device, nvml.Return) {
	own, ret := g.migState()
	switch {
	case ret != nvml.SUCCESS:
		return nil, ret
	case index < 0 || index >= g.geometry.ComputeSlices:
		return nil, nvml.ERROR_INVALID_ARGUMENT
	case !own.Enabled:
		return nil, nvml.ERROR_NOT_FOUND
	}
	for _, i := range own.Instances {
		if index < len(i.Compute) {
			return &partitionHandle{partition: &partition{parent: g, uuid: i.Compute[index].UUID}}, nvml.SUCCESS
		}
		index -= len(i.Compute)
	}
	return nil, nvml.ERROR_NOT_FOUND
}
