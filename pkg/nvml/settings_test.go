// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/programs"
	"github.com/tandem-gpu/tandem/simulated/simdriver"
)

func TestComputeMode(t *testing.T) {
	m := newMachine(t, "h100x8")
	node := m.open(t)
	uuid, other := node.Inventory().GPUs[2].UUID, node.Inventory().GPUs[3].UUID
	set := func(mode, want device.ComputeMode) {
		t.Helper()
		if before, err := node.SetComputeMode(t.Context(), uuid, mode); err != nil || before != want {
			t.Errorf("set %s: before %q, %v", mode, before, err)
		}
	}
	set(device.ComputeModeExclusiveProcess, device.ComputeModeDefault)
	set(device.ComputeModeExclusiveProcess, device.ComputeModeExclusiveProcess)
	// Another process of the node sees it, and no other GPU has it.
	second := m.open(t)
	for gpu, want := range map[string]device.ComputeMode{uuid: device.ComputeModeExclusiveProcess, other: device.ComputeModeDefault} {
		if mode, err := second.ComputeMode(t.Context(), gpu); err != nil || mode != want {
			t.Errorf("compute mode of %s: %q, %v", gpu, mode, err)
		}
	}
	set(device.ComputeModeProhibited, device.ComputeModeExclusiveProcess)
	set(device.ComputeModeDefault, device.ComputeModeProhibited)

	m.fault(t, simulated.GPUFaults{GPU: uuid, Calls: map[string]simulated.CallFault{"SetComputeMode": {Return: "ERROR_NO_PERMISSION"}}})
	_, err := node.SetComputeMode(t.Context(), uuid, device.ComputeModeExclusiveProcess)
	if err == nil || errors.Is(err, device.ErrUnsupported) || !strings.Contains(err.Error(), uuid) {
		t.Errorf("without permission: %v", err)
	}
	set(device.ComputeModeDefault, device.ComputeModeDefault)
	if _, err := node.SetComputeMode(t.Context(), "GPU-none", device.ComputeModeDefault); err == nil {
		t.Error("a GPU that is not there has a mode")
	}
	if _, err := node.SetComputeMode(t.Context(), strings.Replace(uuid, "GPU-", "GPU-f", 1)[:len(uuid)], device.ComputeModeDefault); !errors.Is(err, device.ErrNoGPU) {
		t.Errorf("a GPU that the driver does not have: %v", err)
	}
	if _, err := node.SetComputeMode(t.Context(), uuid, "Exclusive_Thread"); err == nil {
		t.Error("a mode that is not there was set")
	}
	m.fault(t)
	if err := node.EnableMIG(t.Context(), uuid); err != nil {
		t.Fatal(err)
	}
	if _, err := node.SetComputeMode(t.Context(), uuid, device.ComputeModeExclusiveProcess); !errors.Is(err, device.ErrUnsupported) {
		t.Errorf("with MIG mode on: %v", err)
	}
}

func TestTimeSlice(t *testing.T) {
	m := newMachineWithPrograms(t, "h100x8")
	node := m.open(t)
	uuid, other := node.Inventory().GPUs[2].UUID, node.Inventory().GPUs[3].UUID
	for _, interval := range []int{3, 3, 1, 0, 2} {
		if err := node.SetTimeSlice(t.Context(), uuid, interval); err != nil {
			t.Fatal(err)
		}
		if slice, err := simulated.TimeSlice(m.dir, uuid); err != nil || slice != interval {
			t.Errorf("time slice %d, %v, want %d", slice, err, interval)
		}
	}
	if slice, err := simulated.TimeSlice(m.dir, other); err != nil || slice != 0 {
		t.Errorf("time slice of another GPU %d, %v", slice, err)
	}
	for _, interval := range []int{-1, 4} {
		if err := node.SetTimeSlice(t.Context(), uuid, interval); err == nil {
			t.Errorf("time slice %d was set", interval)
		}
	}
}

func TestTimeSliceFails(t *testing.T) {
	m := newMachineWithPrograms(t, "h100x8")
	node := m.open(t)
	uuid := node.Inventory().GPUs[0].UUID
	fault := func(word, text string) {
		t.Helper()
		if err := simulated.WriteProgramFault(m.dir, programs.SMI, word, text); err != nil {
			t.Fatal(err)
		}
	}
	fault(programs.FaultFail, "Unknown Error\nof the driver")
	err := node.SetTimeSlice(t.Context(), uuid, 1)
	if err == nil || errors.Is(err, device.ErrUnsupported) || !strings.Contains(err.Error(), "nvidia-smi compute-policy -i "+uuid+
		" --set-timeslice=1: exit status 255: Unknown Error of the driver") {
		t.Errorf("failure: %v", err)
	}
	fault(programs.FaultUnsupported, "")
	if err := node.SetTimeSlice(t.Context(), uuid, 1); !errors.Is(err, device.ErrUnsupported) || !strings.Contains(err.Error(), "Timeslice is not supported") {
		t.Errorf("not supported: %v", err)
	}
	fault("", "")
	if err := node.SetTimeSlice(t.Context(), uuid, 1); err != nil {
		t.Errorf("after the fault: %v", err)
	}
	tool := filepath.Join(m.dir, simulated.DriverDir, programs.Dir, programs.SMI)
	if err := os.Remove(tool); err != nil {
		t.Fatal(err)
	}
	if err := node.SetTimeSlice(t.Context(), uuid, 1); !errors.Is(err, device.ErrUnsupported) || !strings.Contains(err.Error(), "find nvidia-smi") {
		t.Errorf("without the tool: %v", err)
	}
	// nvidia-smi(1), return value: 2 is an invalid argument (a driver without compute-policy), 4 no permission, 13 a missing function. Nothing
	// was set then. After 1, 6 (a query failed) or 255 it may be.
	for code, nothingSet := range map[int]bool{1: false, 2: true, 4: true, 6: false, 13: true, 255: false} {
		if err := os.WriteFile(tool, fmt.Appendf(nil, "#!/bin/sh\necho said why\nexit %d\n", code), 0o755); err != nil {
			t.Fatal(err)
		}
		err := node.SetTimeSlice(t.Context(), uuid, 1)
		if errors.Is(err, device.ErrUnsupported) != nothingSet || err == nil || !strings.Contains(err.Error(), "said why") {
			t.Errorf("exit status %d: %v", code, err)
		}
	}
}

func newMachineWithPrograms(t *testing.T, profile string) machine {
	t.Helper()
	m := newMachine(t, profile)
	options := simulated.MaterializeOptions{Programs: simdriver.Build(t)}
	if err := simulated.Materialize(m.dir, m.profile, options); err != nil {
		t.Fatal(err)
	}
	return m
}

// A tool that hangs keeps the GPU's next operation waiting until it is killed, and its caller as long as that wants to wait.
func TestAToolThatHangsIsKilled(t *testing.T) {
	m := newMachineWithPrograms(t, "h100x8")
	node := nvml.OpenImpatient(t, m.options, 300*time.Millisecond)
	uuid := node.Inventory().GPUs[0].UUID
	if err := simulated.WriteProgramFault(m.dir, programs.SMI, programs.FaultHang, ""); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := node.SetTimeSlice(short, uuid, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with little patience: %v", err)
	}
	if err := node.SetTimeSlice(t.Context(), uuid, 1); err == nil || !strings.Contains(err.Error(), "did not end within") {
		t.Errorf("hang: %v", err)
	}
	if err := simulated.WriteProgramFault(m.dir, programs.SMI, "", ""); err != nil {
		t.Fatal(err)
	}
	if err := node.SetTimeSlice(t.Context(), uuid, 1); err != nil {
		t.Errorf("after the hang: %v", err)
	}
}
