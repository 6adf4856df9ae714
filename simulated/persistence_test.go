// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func TestPersistenceModeOff(t *testing.T) {
	dir := t.TempDir()
	lib := start(t, "h100x8", WithDir(dir))
	off, busy, on := handle(t, lib, 0), handle(t, lib, 1), handle(t, lib, 2)
	inject(t, dir, Faults{GPUs: []GPUFaults{
		{GPU: "0", PersistenceOff: true}, {GPU: "1", PersistenceOff: true, Clients: []Client{{PID: 1}}},
	}})
	for d, want := range map[nvml.Device]nvml.EnableState{off: nvml.FEATURE_DISABLED, on: nvml.FEATURE_ENABLED} {
		if mode, ret := d.GetPersistenceMode(); mode != want || ret != nvml.SUCCESS {
			t.Errorf("persistence mode %v, %v, want %v", mode, ret, want)
		}
	}
	for _, d := range []nvml.Device{off, busy, on} {
		if ret := d.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS); ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
		if ret := d.SetApplicationsClocks(1000, 900); ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
	}
	// Not the last of two.
	lib.Init()
	lib.Shutdown()
	if mode, _ := off.GetComputeMode(); mode != nvml.COMPUTEMODE_EXCLUSIVE_PROCESS {
		t.Errorf("compute mode %v within the session", mode)
	}
	lib.Shutdown()
	lib.Init()
	for d, want := range map[nvml.Device]nvml.ComputeMode{
		off: nvml.COMPUTEMODE_DEFAULT, busy: nvml.COMPUTEMODE_EXCLUSIVE_PROCESS, on: nvml.COMPUTEMODE_EXCLUSIVE_PROCESS,
	} {
		clock, _ := d.GetApplicationsClock(nvml.CLOCK_SM)
		if mode, _ := d.GetComputeMode(); mode != want || (clock == 900) != (want != nvml.COMPUTEMODE_DEFAULT) {
			t.Errorf("after the session: compute mode %v, want %v, clock %d", mode, want, clock)
		}
	}
}
