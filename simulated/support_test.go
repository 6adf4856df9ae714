// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// calls calls methods of a handle with zero arguments and gives the last return code of each.
func calls(t *testing.T, handle any, methods map[string]bool, prefix string, visit func(method string, ret nvml.Return)) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(methods)) {
		method := strings.TrimPrefix(name, prefix)
		m := reflect.ValueOf(handle).MethodByName(method)
		in := make([]reflect.Value, m.Type().NumIn())
		for k := range in {
			in[k] = reflect.Zero(m.Type().In(k))
		}
		out := m.Call(in)
		visit(method, out[len(out)-1].Interface().(nvml.Return)) //nolint:forcetypeassert // it panics
	}
}

// These methods answer NOT_SUPPORTED on an H100 in MIG mode: it has no compute mode, and the others are for MIG devices.
func TestWhatIsNotSupported(t *testing.T) {
	lib := start(t, "h100x8")
	set, _ := lib.EventSetCreate()
	d := handle(t, lib, 0)
	// The calls below turn MIG mode off again, but SetMigMode is the last of them.
	d.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	var lacking []string
	visit := func(method string, ret nvml.Return) {
		if ret == nvml.ERROR_NOT_SUPPORTED {
			lacking = append(lacking, method)
		}
	}
	calls(t, lib, libraryMethods, "", visit)
	calls(t, d, deviceMethods, "", visit)
	calls(t, set, eventSetMethods, "EventSet.", visit)
	want := []string{
		"GetAttributes", "GetComputeInstanceId", "GetDeviceHandleFromMigDeviceHandle", "GetGpuInstanceId", "SetComputeMode",
	}
	if !slices.Equal(lacking, want) {
		t.Errorf("not supported are %q, want %q", lacking, want)
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
	calls(t, d, deviceMethods, "", func(method string, ret nvml.Return) {
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
