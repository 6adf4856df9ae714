// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// gpuHandle is what callers hold: every call asks the gate, then the GPU.
type gpuHandle struct {
	nvml.Device
	gpu *gpu
}

var _ nvml.Device = (*gpuHandle)(nil)

// gate answers for a GPU that is not in a state to answer itself.
func (h *gpuHandle) gate(method string) nvml.Return {
	g := h.gpu
	if !g.sys.initialized() {
		return nvml.ERROR_UNINITIALIZED
	}
	find := func(state *faultState) *callFault { return named(state.gpus[g.place].calls, method) }
	state, ret := g.sys.faults.answer(find, g.sys.stop())
	if ret != nvml.SUCCESS {
		return ret
	}
	faults := state.gpus[g.place]
	if faults.lost || faults.absent || !slices.Contains(g.sys.handles(), h) {
		return nvml.ERROR_GPU_IS_LOST
	}
	if g.sys.privileges < neededPrivileges[method] {
		return nvml.ERROR_NO_PERMISSION
	}
	return nvml.SUCCESS
}

// obtain hands out the handle, unless the GPU has failed: then the call for a handle fails already.
func (h *gpuHandle) obtain(method string) (nvml.Device, nvml.Return) {
	if ret := h.gate(method); ret != nvml.SUCCESS {
		return nil, ret
	}
	return h, nvml.SUCCESS
}

// gpu is a GPU in working order.
type gpu struct {
	sys     *system
	place   int // in the profile
	spec    GPU
	model   Model
	uuid    string
	address pciAddress
	links   []link
	// geometry is what the GPU can be cut into; empty where it has no MIG.
	geometry geometry
}

// handle is the one that callers hold.
func (g *gpu) handle() *gpuHandle { return g.sys.all[g.place] }

func newGPU(sys *system, place int) *gpuHandle {
	spec := sys.profile.GPUs[place]
	address, _ := parseAddress(spec.PCI) //nolint:errcheck // validated with the profile
	g := &gpu{
		sys: sys, place: place, spec: spec, model: sys.profile.Models[spec.Model], uuid: spec.UUID,
		address: address,
		links:   linksOf(sys.profile, place),
	}
	g.geometry = geometryOf(g.model)
	return &gpuHandle{gpu: g}
}

func majorMinor(text string) (major, minor int) {
	before, after, _ := strings.Cut(text, ".")
	major, _ = strconv.Atoi(before) //nolint:errcheck // validated with the profile
	minor, _ = strconv.Atoi(after)  //nolint:errcheck // validated with the profile
	return major, minor
}

func enabled(on bool) nvml.EnableState {
	if on {
		return nvml.FEATURE_ENABLED
	}
	return nvml.FEATURE_DISABLED
}

func (g *gpu) GetUUID() (string, nvml.Return) { return g.uuid, nvml.SUCCESS }
func (g *gpu) GetName() (string, nvml.Return) { return g.model.ProductName, nvml.SUCCESS }

// GetMinorNumber is the one that the GPU had at the first Init.
func (g *gpu) GetMinorNumber() (int, nvml.Return) {
	g.sys.mu.RLock()
	defer g.sys.mu.RUnlock()
	return g.sys.minors[g.place], nvml.SUCCESS
}

func (g *gpu) GetIndex() (int, nvml.Return) {
	index := slices.IndexFunc(g.sys.handles(), func(h *gpuHandle) bool { return h.gpu == g })
	if index < 0 {
		return 0, nvml.ERROR_GPU_IS_LOST
	}
	return index, nvml.SUCCESS
}

func (g *gpu) GetBrand() (nvml.BrandType, nvml.Return) { return brands[g.model.Brand], nvml.SUCCESS }

func (g *gpu) GetArchitecture() (nvml.DeviceArchitecture, nvml.Return) {
	return architectures[g.model.Architecture], nvml.SUCCESS
}

func (g *gpu) GetCudaComputeCapability() (major, minor int, ret nvml.Return) {
	major, minor = majorMinor(g.model.ComputeCapability)
	return major, minor, nvml.SUCCESS
}

const mebibyte = 1 << 20

// GetMemoryInfo counts what the driver keeps as used, as version 1 of the call does.
func (g *gpu) GetMemoryInfo() (nvml.Memory, nvml.Return) {
	total, reserved := g.model.MemoryMiB*mebibyte, g.model.ReservedMiB*mebibyte
	return nvml.Memory{Total: total, Used: reserved, Free: total - reserved}, nvml.SUCCESS
}

func (g *gpu) GetEccMode() (current, pending nvml.EnableState, ret nvml.Return) {
	if !g.model.ECC {
		return 0, 0, nvml.ERROR_NOT_SUPPORTED
	}
	return nvml.FEATURE_ENABLED, nvml.FEATURE_ENABLED, nvml.SUCCESS
}

func (g *gpu) GetAddressingMode() (nvml.DeviceAddressingMode, nvml.Return) {
	if g.model.AddressingMode == "" {
		return nvml.DeviceAddressingMode{}, nvml.ERROR_NOT_SUPPORTED
	}
	mode := nvml.DeviceAddressingMode{Value: uint32(addressingModes[g.model.AddressingMode])}
	mode.Version = nvml.STRUCT_VERSION(mode, 1)
	return mode, nvml.SUCCESS
}

func (g *gpu) IsMigDeviceHandle() (bool, nvml.Return) { return false, nvml.SUCCESS }

func (g *gpu) GetComputeMode() (nvml.ComputeMode, nvml.Return) {
	state, ret := g.sys.mig.current()
	return state.ComputeModes[g.uuid], ret
}

// SetComputeMode is refused as the driver refuses it: EXCLUSIVE_THREAD is history, and a GPU that is partitioned has no mode.
func (g *gpu) SetComputeMode(mode nvml.ComputeMode) nvml.Return {
	switch mode {
	case nvml.COMPUTEMODE_DEFAULT, nvml.COMPUTEMODE_PROHIBITED, nvml.COMPUTEMODE_EXCLUSIVE_PROCESS:
	case nvml.COMPUTEMODE_EXCLUSIVE_THREAD:
		return nvml.ERROR_NOT_SUPPORTED
	default:
		return nvml.ERROR_INVALID_ARGUMENT
	}
	return g.sys.mig.change(func(state *MIGState) nvml.Return {
		if own := state.gpu(g.uuid); own != nil && own.Enabled {
			return nvml.ERROR_NOT_SUPPORTED
		}
		if state.ComputeModes == nil {
			state.ComputeModes = map[string]nvml.ComputeMode{}
		}
		state.ComputeModes[g.uuid] = mode
		return nvml.SUCCESS
	})
}

func (g *gpu) GetApplicationsClock(clock nvml.ClockType) (uint32, nvml.Return) {
	state, ret := g.sys.mig.current()
	clocks, set := state.Clocks[g.uuid]
	if !set {
		clocks = defaultClocks
	}
	switch clock {
	case nvml.CLOCK_MEM:
		return clocks.Memory, ret
	case nvml.CLOCK_GRAPHICS, nvml.CLOCK_SM:
		return clocks.Graphics, ret
	}
	return 0, nvml.ERROR_INVALID_ARGUMENT
}

func (g *gpu) SetApplicationsClocks(memory, graphics uint32) nvml.Return {
	if memory == 0 || graphics == 0 {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	return g.sys.mig.change(func(state *MIGState) nvml.Return {
		if state.Clocks == nil {
			state.Clocks = map[string]Clocks{}
		}
		state.Clocks[g.uuid] = Clocks{Memory: memory, Graphics: graphics}
		return nvml.SUCCESS
	})
}

func (g *gpu) GetPersistenceMode() (nvml.EnableState, nvml.Return) {
	return enabled(!g.sys.faults.current().gpus[g.place].persistenceOff), nvml.SUCCESS
}

// forgetSettings is what happens to GPUs that the driver lets go of. Sessions of other processes are not known: only the clients that
// the faults file names keep a GPU.
func (s *system) forgetSettings() nvml.Return {
	var forgetful []string
	for place, faults := range s.faults.current().gpus {
		if faults.persistenceOff && len(faults.clients) == 0 {
			forgetful = append(forgetful, s.profile.GPUs[place].UUID)
		}
	}
	if len(forgetful) == 0 {
		return nvml.SUCCESS
	}
	return s.mig.change(func(state *MIGState) nvml.Return {
		for _, uuid := range forgetful {
			delete(state.ComputeModes, uuid)
			delete(state.Clocks, uuid)
		}
		return nvml.SUCCESS
	})
}

func (g *gpu) GetMPSComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return nil, nvml.SUCCESS
}
