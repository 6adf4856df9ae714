// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func TestIPCComesAndGoes(t *testing.T) {
	dir := t.TempDir()
	materialize(t, dir, "h100x8", MaterializeOptions{PlainDeviceFiles: true})
	modes := map[IPC]os.FileMode{PersistencedSocket: os.ModeSocket, FabricManagerSocket: os.ModeSocket, MPSDirectory: os.ModeDir}
	for _, there := range [][]IPC{
		nil, {PersistencedSocket, FabricManagerSocket, MPSDirectory}, {PersistencedSocket, MPSDirectory}, {FabricManagerSocket}, nil,
	} {
		if err := SetIPC(dir, there...); err != nil {
			t.Fatal(err)
		}
		for ipc, mode := range modes {
			info, err := os.Lstat(filepath.Join(dir, DriverDir, string(ipc)))
			wanted := false
			for _, other := range there {
				wanted = wanted || other == ipc
			}
			if (err == nil) != wanted || err == nil && info.Mode().Type() != mode {
				t.Errorf("with %v: %s: %v", there, ipc, err)
			}
		}
	}
}

func TestSELinux(t *testing.T) {
	dir := t.TempDir()
	enforcing := func() bool {
		text, err := os.ReadFile(filepath.Join(dir, SysfsDir, selinuxEnforce))
		return err == nil && string(text) == "1"
	}
	for _, want := range []bool{false, true, true, false} {
		if err := SetSELinux(dir, want); err != nil || enforcing() != want {
			t.Errorf("enforcing %v: %v, %v", want, enforcing(), err)
		}
	}
}

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
