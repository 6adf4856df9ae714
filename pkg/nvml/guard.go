// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"sync/atomic"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// guard wraps a library that may lack functions: it returns ERROR_FUNCTION_NOT_FOUND where the call would end the process. It
// covers the calls of this package, go-nvlib and nvcdi that drivers older than R535 may lack; required symbols need no guard.
type guard struct {
	gonvml.Interface
	mig atomic.Bool
}

// hasMIG is called for each GPU at each scan. A library does not lose functions.
func (g *guard) hasMIG() bool {
	if g.mig.Load() {
		return true
	}
	for _, symbol := range migSymbols {
		if !g.has(symbol) {
			return false
		}
	}
	// Later versions of the function have other names.
	processes := "nvmlDeviceGetComputeRunningProcesses"
	all := g.has("nvmlDeviceGetGpuInstancePossiblePlacements_v2", "nvmlDeviceGetGpuInstancePossiblePlacements") &&
		g.has("nvmlDeviceGetAttributes_v2", "nvmlDeviceGetAttributes") &&
		g.has("nvmlComputeInstanceGetInfo_v2", "nvmlComputeInstanceGetInfo") &&
		g.has(processes+"_v3", processes+"_v2", processes)
	g.mig.Store(all)
	return all
}

func (g *guard) has(symbols ...string) bool { return hasAny(g.Extensions().LookupSymbol, symbols) }

func (g *guard) device(d gonvml.Device, ret gonvml.Return) (gonvml.Device, gonvml.Return) {
	if ret != gonvml.SUCCESS {
		return nil, ret
	}
	return &guardedDevice{Device: d, guard: g}, ret
}

func (g *guard) DeviceGetHandleByIndex(index int) (gonvml.Device, gonvml.Return) {
	return g.device(g.Interface.DeviceGetHandleByIndex(index))
}

func (g *guard) DeviceGetHandleByUUID(uuid string) (gonvml.Device, gonvml.Return) {
	return g.device(g.Interface.DeviceGetHandleByUUID(uuid))
}

// guardedDevice embeds the Device under that name, by which go-nvml finds the handle.
type guardedDevice struct {
	gonvml.Device
	guard *guard
}

// guarded calls a function with one result if the library has a version of it.
func guarded[T any](d *guardedDevice, call func() (T, gonvml.Return), symbols ...string) (T, gonvml.Return) {
	if !d.guard.has(symbols...) {
		var zero T
		return zero, gonvml.ERROR_FUNCTION_NOT_FOUND
	}
	return call()
}

func (d *guardedDevice) GetArchitecture() (gonvml.DeviceArchitecture, gonvml.Return) {
	return guarded(d, d.Device.GetArchitecture, "nvmlDeviceGetArchitecture")
}

// migSymbols are the functions that are called on GPUs whose MIG mode can be read, their instances and MIG devices; the last of
// them came with R470.
var migSymbols = []string{
	"nvmlDeviceGetMigMode", "nvmlDeviceSetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
	"nvmlDeviceGetDeviceHandleFromMigDeviceHandle", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId",
	"nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetGpuInstances", "nvmlDeviceGetGpuInstanceById",
	"nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceGetInfo", "nvmlGpuInstanceDestroy",
	"nvmlGpuInstanceGetComputeInstanceProfileInfo", "nvmlGpuInstanceGetComputeInstances", "nvmlGpuInstanceGetComputeInstanceById",
	"nvmlGpuInstanceCreateComputeInstance", "nvmlComputeInstanceDestroy",
}

// GetMigMode returns NOT_SUPPORTED if any MIG function is missing: such a driver is older than MIG, or than this package's use of
// it.
func (d *guardedDevice) GetMigMode() (int, int, gonvml.Return) {
	if !d.guard.hasMIG() {
		return 0, 0, gonvml.ERROR_NOT_SUPPORTED
	}
	return d.Device.GetMigMode()
}

// IsMigDeviceHandle returns false without the function: there are no MIG devices then.
func (d *guardedDevice) IsMigDeviceHandle() (bool, gonvml.Return) {
	if !d.guard.has("nvmlDeviceIsMigDeviceHandle") {
		return false, gonvml.SUCCESS
	}
	is, ret := d.Device.IsMigDeviceHandle()
	if unsupported(ret) {
		return false, gonvml.SUCCESS
	}
	return is, ret
}

func (d *guardedDevice) GetAddressingMode() (gonvml.DeviceAddressingMode, gonvml.Return) {
	return guarded(d, d.Device.GetAddressingMode, "nvmlDeviceGetAddressingMode")
}

func (d *guardedDevice) GetGpuFabricInfo() (gonvml.GpuFabricInfo, gonvml.Return) {
	return guarded(d, d.Device.GetGpuFabricInfo, "nvmlDeviceGetGpuFabricInfo")
}

func (d *guardedDevice) GetNvLinkRemoteDeviceType(link int) (gonvml.IntNvLinkDeviceType, gonvml.Return) {
	call := func() (gonvml.IntNvLinkDeviceType, gonvml.Return) { return d.Device.GetNvLinkRemoteDeviceType(link) }
	return guarded(d, call, "nvmlDeviceGetNvLinkRemoteDeviceType")
}

// GetTopologyCommonAncestor unwraps the other GPU, of which go-nvml needs the handle.
func (d *guardedDevice) GetTopologyCommonAncestor(other gonvml.Device) (gonvml.GpuTopologyLevel, gonvml.Return) {
	if o, ok := other.(*guardedDevice); ok {
		other = o.Device
	}
	return d.Device.GetTopologyCommonAncestor(other)
}

// unsupported reports whether the GPU or the driver lacks a feature, which says nothing about the GPU's health.
func unsupported(ret gonvml.Return) bool {
	switch ret {
	case gonvml.ERROR_NOT_SUPPORTED, gonvml.ERROR_FUNCTION_NOT_FOUND, gonvml.ERROR_NO_PERMISSION,
		gonvml.ERROR_ARGUMENT_VERSION_MISMATCH, gonvml.ERROR_DEPRECATED:
		return true
	}
	return false
}
