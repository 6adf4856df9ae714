// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/programs"
)

func TestSettingsOfAGPU(t *testing.T) {
	m := newMachine(t, "h100x8")
	node := m.open(t)
	uuid := node.Inventory().GPUs[2].UUID
	before, err := node.Settings(t.Context(), uuid)
	if want := (device.Settings{ComputeMode: device.ComputeModeDefault, MemoryClock: 2619, GraphicsClock: 1980}); err != nil || before != want {
		t.Fatalf("settings %+v, %v, want %+v", before, err, want)
	}
	changed := device.Settings{ComputeMode: device.ComputeModeProhibited, MemoryClock: 1593, GraphicsClock: 210}
	for _, want := range []device.Settings{changed, before} {
		if err := node.RestoreSettings(t.Context(), uuid, want); err != nil {
			t.Fatal(err)
		}
		if got, err := node.Settings(t.Context(), uuid); err != nil || got != want {
			t.Errorf("settings %+v, %v, want %+v", got, err, want)
		}
	}
	if err := node.RestoreSettings(t.Context(), uuid, device.Settings{}); err != nil {
		t.Error(err)
	}
	if got, err := node.Settings(t.Context(), uuid); err != nil || got != before {
		t.Errorf("settings %+v, %v, although nothing was wanted", got, err)
	}

	m.fault(t, simulated.GPUFaults{GPU: uuid, Calls: map[string]simulated.CallFault{
		"GetApplicationsClock": {Return: "ERROR_NOT_SUPPORTED"}, "GetComputeMode": {Return: "ERROR_NOT_SUPPORTED"},
	}})
	if got, err := node.Settings(t.Context(), uuid); err != nil || got != (device.Settings{}) {
		t.Errorf("settings %+v, %v of a GPU that has none", got, err)
	}
	if err := node.RestoreSettings(t.Context(), uuid, before); err != nil {
		t.Errorf("restore settings that the GPU no longer has: %v", err)
	}
	m.fault(t, simulated.GPUFaults{GPU: uuid, Calls: map[string]simulated.CallFault{"SetApplicationsClocks": {Return: "ERROR_UNKNOWN"}}})
	if err := node.RestoreSettings(t.Context(), uuid, changed); err == nil || !strings.Contains(err.Error(), uuid) {
		t.Errorf("a driver that fails: %v", err)
	}
	m.fault(t, simulated.GPUFaults{GPU: uuid, Calls: map[string]simulated.CallFault{"SetApplicationsClocks": {Return: "ERROR_NOT_SUPPORTED"}}})
	if err := node.RestoreSettings(t.Context(), uuid, before); err != nil {
		t.Errorf("a driver whose clocks cannot be set: %v", err)
	}
}

func TestProcessesOfAGPU(t *testing.T) {
	m := newMachine(t, "h100x8")
	node := m.open(t)
	uuid := node.Inventory().GPUs[2].UUID
	if compute, graphics, err := node.Processes(t.Context(), uuid); err != nil || len(compute)+len(graphics) > 0 {
		t.Errorf("processes %v and %v, %v on an idle GPU", compute, graphics, err)
	}
	clients := []simulated.Client{{PID: 9}, {PID: 7}, {PID: 9}, {PID: 8, Graphics: true}, {PID: 7, Graphics: true}}
	answer := func(of, code string) {
		t.Helper()
		m.fault(t, simulated.GPUFaults{GPU: uuid, Clients: clients, Calls: map[string]simulated.CallFault{of: {Return: code}}})
	}
	for list, want := range map[string][2][]int{
		"GetComputeMode":                {{7, 9}, {8}}, // not called
		"GetGraphicsRunningProcesses":   {{7, 9}, nil},
		"GetMPSComputeRunningProcesses": {{7, 9}, {8}},
	} {
		answer(list, "ERROR_NOT_SUPPORTED")
		compute, graphics, err := node.Processes(t.Context(), uuid)
		if err != nil || !slices.Equal(compute, want[0]) || !slices.Equal(graphics, want[1]) {
			t.Errorf("without %s: processes %v and %v, %v, want %v", list, compute, graphics, err, want)
		}
	}
	for _, list := range []string{"GetComputeRunningProcesses", "GetGraphicsRunningProcesses"} {
		answer(list, "ERROR_UNKNOWN")
		if compute, graphics, err := node.Processes(t.Context(), uuid); err == nil {
			t.Errorf("processes %v and %v although %s fails", compute, graphics, list)
		}
	}
}

func TestReset(t *testing.T) {
	m := newMachineWithPrograms(t, "h100x8")
	node := m.open(t)
	uuid := node.Inventory().GPUs[2].UUID
	for range 2 {
		if err := node.Reset(t.Context(), uuid); err != nil {
			t.Fatal(err)
		}
	}
	resets, err := os.ReadFile(filepath.Join(m.dir, simulated.MIGDir, programs.ResetsFile(uuid)))
	if err != nil || strings.Count(string(resets), "\n") != 2 {
		t.Errorf("resets %q, %v, want two", resets, err)
	}
	// NVML works again, and as before.
	if err := node.Scan(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := node.Settings(t.Context(), uuid); err != nil {
		t.Error(err)
	}
	if err := node.Reset(t.Context(), "GPU-none"); err == nil {
		t.Error("a GPU that does not exist was reset")
	}
	fault := func(word string) {
		t.Helper()
		if err := simulated.WriteProgramFault(m.dir, programs.SMI, word, ""); err != nil {
			t.Fatal(err)
		}
	}
	fault(programs.FaultUnsupported)
	if err := node.Reset(t.Context(), uuid); !errors.Is(err, device.ErrUnsupported) {
		t.Errorf("a GPU without reset: %v", err)
	}
	fault(programs.FaultFail)
	if err := node.Reset(t.Context(), uuid); err == nil || errors.Is(err, device.ErrUnsupported) {
		t.Errorf("a reset that fails: %v", err)
	}
}

// The XIDs of a GPU end with its reset: a driver without recovery actions does not say so.
func TestResetEndsXIDs(t *testing.T) {
	m := newMachineWithPrograms(t, "h100x8")
	node := m.open(t)
	if err := node.Reset(t.Context(), node.Inventory().GPUs[2].UUID); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	ended := 0
	err := node.WatchXIDs(ctx, func(e device.XIDEvent) {
		if e.XID == 0 && e.PCI+".0" == m.profile.GPUs[2].PCI && e.GPUInstance == device.NoInstance {
			ended++
			cancel()
		}
	})
	if ended == 0 || err != nil {
		t.Errorf("%d GPUs, %v", ended, err)
	}
}

// Resets beside each other, scans and other operations wait for each other.
func TestResetsBesideEachOther(t *testing.T) {
	m := newMachineWithPrograms(t, "h100x8")
	node := m.open(t)
	var group errgroup.Group
	for _, g := range node.Inventory().GPUs {
		group.Go(func() error { return node.Reset(t.Context(), g.UUID) })
		group.Go(func() error { return node.Scan(t.Context()) })
		group.Go(func() error { _, _, err := node.Processes(t.Context(), g.UUID); return err })
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
	for _, g := range node.Inventory().GPUs {
		if !g.Health.Healthy() {
			t.Errorf("GPU %d is %v", g.Index, g.Health)
		}
	}
}
