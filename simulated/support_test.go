// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"reflect"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// supported are the methods that answer otherwise than NOT_SUPPORTED, by interface.
var supported = map[reflect.Type][]string{
	reflect.TypeFor[nvml.Interface](): {
		"DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetHandleByPciBusId", "DeviceGetHandleBySerial", "DeviceGetHandleByUUID",
		"EventSetCreate", "GetExcludedDeviceCount", "Init", "InitWithFlags", "Shutdown", "SystemGetCudaDriverVersion",
		"SystemGetCudaDriverVersion_v2", "SystemGetDriverVersion", "SystemGetNVMLVersion", "UnitGetCount",
	},
	reflect.TypeFor[nvml.Device](): {
		"CreateGpuInstance", "CreateGpuInstanceWithPlacement", "GetGpuInstanceById", "GetGpuInstancePossiblePlacements",
		"GetGpuInstanceProfileInfo", "GetGpuInstanceRemainingCapacity", "GetGpuInstances", "SetMigMode",
		"GetAddressingMode", "GetApplicationsClock", "GetArchitecture", "GetBoardId", "GetBrand", "GetBusType", "GetComputeMode", "GetComputeRunningProcesses",
		"GetCudaComputeCapability", "GetCurrentClocksEventReasons", "GetCurrentClocksThrottleReasons", "GetCurrPcieLinkGeneration", "GetCurrPcieLinkWidth", "GetDefaultEccMode", "GetDisplayActive",
		"GetDisplayMode", "GetEccMode", "GetEnforcedPowerLimit", "GetFieldValues", "GetGpuFabricInfo", "GetGpuFabricInfo_v4", "GetGpuMaxPcieLinkGeneration",
		"GetGraphicsRunningProcesses", "GetIndex", "GetMaxMigDeviceCount", "GetMaxPcieLinkGeneration", "GetMaxPcieLinkWidth",
		"GetMemoryBusWidth", "GetMemoryInfo", "GetMemoryInfo_v2", "GetMigDeviceHandleByIndex", "GetMigMode", "GetMinorNumber",
		"GetModuleId", "GetMPSComputeRunningProcesses", "GetMultiGpuBoard", "GetName", "GetNumGpuCores", "GetNvLinkCapability",
		"GetNvLinkRemoteDeviceType", "GetNvLinkRemotePciInfo", "GetNvLinkState", "GetNvLinkVersion", "GetP2PStatus", "GetPciInfo",
		"GetPciInfoExt", "GetPersistenceMode", "GetPowerManagementDefaultLimit", "GetPowerManagementLimit", "GetRemappedRows", "GetSerial",
		"GetSramEccErrorStatus", "GetSupportedClocksEventReasons", "GetTotalEccErrors",
		"GetSupportedEventTypes", "GetTemperature", "GetTopologyCommonAncestor", "GetTopologyNearestGpus", "GetUUID",
		"GetUtilizationRates", "GetVirtualizationMode", "IsMigDeviceHandle", "OnSameBoard", "RegisterEvents", "SetApplicationsClocks",
	},
	reflect.TypeFor[nvml.EventSet](): {"Free", "Wait"},
}

// calls calls every method of an interface with zero arguments and gives the last return code of each that has one.
func calls(t *testing.T, iface reflect.Type, value any, visit func(method string, ret nvml.Return)) {
	t.Helper()
	v := reflect.ValueOf(value)
	for i := range iface.NumMethod() {
		m := v.MethodByName(iface.Method(i).Name)
		in := make([]reflect.Value, m.Type().NumIn())
		for k := range in {
			in[k] = reflect.Zero(m.Type().In(k))
		}
		out := m.Call(in)
		if ret, ok := out[len(out)-1].Interface().(nvml.Return); ok {
			visit(iface.Method(i).Name, ret)
		}
	}
}

func TestEveryOtherMethodIsNotSupported(t *testing.T) {
	lib := start(t, "h100x8")
	set, _ := lib.EventSetCreate()
	// It is the last of the calls that would turn it off again.
	handle(t, lib, 0).SetMigMode(nvml.DEVICE_MIG_ENABLE)
	for iface, value := range map[reflect.Type]any{
		reflect.TypeFor[nvml.Interface](): lib,
		reflect.TypeFor[nvml.Device]():    handle(t, lib, 0),
		reflect.TypeFor[nvml.EventSet]():  set,
	} {
		t.Run(iface.Name(), func(t *testing.T) {
			answered := map[string]bool{}
			calls(t, iface, value, func(method string, ret nvml.Return) {
				answered[method] = true
				switch {
				case slices.Contains(supported[iface], method):
					if ret == nvml.ERROR_NOT_SUPPORTED {
						t.Errorf("%s is not supported", method)
					}
				case ret == nvml.ERROR_INVALID_ARGUMENT && iface == reflect.TypeFor[nvml.Interface](): // no handle was given
				case ret != nvml.ERROR_NOT_SUPPORTED:
					t.Errorf("%s = %v", method, ret)
				}
			})
			for _, method := range supported[iface] {
				if !answered[method] {
					t.Errorf("there is no method %s", method)
				}
			}
		})
	}
}

// A method of nvml.Interface that takes a handle is the handle's own.
func TestLibraryMethodsPassOnToTheHandle(t *testing.T) {
	lib := start(t, "mixed")
	d := handle(t, lib, 2)
	want, _ := d.GetUUID()
	if got, ret := lib.DeviceGetUUID(d); got != want || ret != nvml.SUCCESS {
		t.Errorf("DeviceGetUUID = %s, %v, want %s", got, ret, want)
	}
	if level, ret := lib.DeviceGetTopologyCommonAncestor(d, handle(t, lib, 3)); level != nvml.TOPOLOGY_HOSTBRIDGE || ret != nvml.SUCCESS {
		t.Errorf("DeviceGetTopologyCommonAncestor = %v, %v", level, ret)
	}
	if _, ret := lib.DeviceGetNumaNodeId(d); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("DeviceGetNumaNodeId: %v", ret)
	}
}

func TestNothingAnswersOutsideInitAndShutdown(t *testing.T) {
	p, err := Load("l4x4")
	if err != nil {
		t.Fatal(err)
	}
	lib := New(p)
	check := func(t *testing.T) {
		t.Helper()
		if ret := lib.Shutdown(); ret != nvml.ERROR_UNINITIALIZED {
			t.Errorf("Shutdown = %v", ret)
		}
		if _, ret := lib.DeviceGetCount(); ret != nvml.ERROR_UNINITIALIZED {
			t.Errorf("DeviceGetCount: %v", ret)
		}
		if err := lib.Extensions().LookupSymbol("nvmlInit_v2"); err == nil {
			t.Error("a symbol is found in a library that is not loaded")
		}
	}
	check(t)
	if a, b := lib.Init(), lib.Init(); a != nvml.SUCCESS || b != nvml.SUCCESS {
		t.Fatalf("Init = %v, %v", a, b)
	}
	d := handle(t, lib, 0)
	set, _ := lib.EventSetCreate()
	lib.Shutdown()
	if _, ret := d.GetName(); ret != nvml.SUCCESS {
		t.Errorf("GetName after the first of two Shutdowns: %v", ret)
	}
	lib.Shutdown()
	check(t)
	calls(t, reflect.TypeFor[nvml.Device](), d, func(method string, ret nvml.Return) {
		if ret != nvml.ERROR_UNINITIALIZED {
			t.Errorf("%s after Shutdown = %v", method, ret)
		}
	})
	if _, ret := set.Wait(0); ret != nvml.ERROR_UNINITIALIZED {
		t.Errorf("Wait after Shutdown: %v", ret)
	}
	lib.Init()
	defer lib.Shutdown()
	if again := handle(t, lib, 0); again != d {
		t.Error("the handle is another after a second Init")
	}
}

func TestLookupSymbolKnowsWhatCannotBeCalled(t *testing.T) {
	lib := start(t, "l4x4")
	for symbol, want := range map[string]bool{
		"nvmlDeviceGetMigMode": true, "nvmlDeviceGetGpuFabricInfo": true, "nvmlDeviceGetGpuFabricInfoV": false,
		"nvmlDeviceGetGpuInstanceProfileInfoV": false, "cuInit": false,
	} {
		if err := lib.Extensions().LookupSymbol(symbol); (err == nil) != want {
			t.Errorf("LookupSymbol(%s) = %v", symbol, err)
		}
	}
}
