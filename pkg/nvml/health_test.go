// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
)

// Each fault of the hardware is a fault of its GPU and of no other, and goes when the hardware recovers.
func TestFaults(t *testing.T) {
	m := newMachine(t, "h100x8")
	node := m.open(t)
	old := map[string]string{"230": "ERROR_NOT_SUPPORTED"}
	errors := simulated.ECCErrors{Volatile: simulated.ECCCounts{Uncorrected: 1}}
	for name, test := range map[string]struct {
		condition simulated.Condition
		want      []string
	}{
		"reset":                    {simulated.Condition{RecoveryAction: "reset"}, []string{device.ReasonResetRequired}},
		"bus reset":                {simulated.Condition{RecoveryAction: "busReset"}, []string{device.ReasonResetRequired}},
		"reboot":                   {simulated.Condition{RecoveryAction: "reboot"}, []string{device.ReasonRebootRequired}},
		"drain peers":              {simulated.Condition{RecoveryAction: "drainP2P"}, []string{device.ReasonDrainP2P}},
		"drain and reset":          {simulated.Condition{RecoveryAction: "drainAndReset"}, []string{device.ReasonResetRequired}},
		"IMEX domain":              {simulated.Condition{RecoveryAction: "recoverIMEXDomain"}, []string{device.ReasonFabric}},
		"pending remap":            {simulated.Condition{RowRemap: simulated.RowRemap{Pending: true}}, []string{device.ReasonRowRemapPending}},
		"failed remap":             {simulated.Condition{RowRemap: simulated.RowRemap{Pending: true, Failure: true}}, []string{device.ReasonRowRemapFailure}},
		"remapped rows":            {simulated.Condition{RowRemap: simulated.RowRemap{Uncorrectable: 3}}, nil},
		"ECC, the driver recovers": {simulated.Condition{ECC: errors}, nil},
		"ECC, an old driver":       {simulated.Condition{ECC: errors, Fields: old}, []string{device.ReasonUncorrectableECC}},
		"no fabric manager":        {simulated.Condition{Fabric: &simulated.FabricState{State: "notStarted"}}, []string{device.ReasonFabric}},
		"fabric in progress":       {simulated.Condition{Fabric: &simulated.FabricState{State: "inProgress"}}, []string{device.ReasonFabric}},
		"fabric failed":            {simulated.Condition{Fabric: &simulated.FabricState{State: "completed", Status: "ERROR_UNKNOWN"}}, []string{device.ReasonFabric}},
		"fabric completed":         {simulated.Condition{Fabric: &simulated.FabricState{State: "completed"}}, nil},
		"slowdown":                 {simulated.Condition{Slowdown: []string{"hwThermal", "swPower"}}, nil},
		"two, the worst comes first": {
			simulated.Condition{RecoveryAction: "reboot", RowRemap: simulated.RowRemap{Failure: true}},
			[]string{device.ReasonRebootRequired, device.ReasonRowRemapFailure},
		},
	} {
		m.fault(t, simulated.GPUFaults{GPU: "2", Condition: test.condition})
		scan(t, node)
		for i, g := range node.Inventory().GPUs {
			var reasons, want []string
			for _, f := range g.Faults {
				reasons = append(reasons, f.Reason)
			}
			if i == 2 {
				want = test.want
			}
			if diff := cmp.Diff(want, reasons); diff != "" {
				t.Errorf("%s: GPU %d: %s", name, i, diff)
			}
			if !g.Health.Healthy() {
				t.Errorf("%s: GPU %d: a GPU that answers has health %+v", name, i, g.Health)
			}
			if slow := i == 2 && name == "slowdown"; slow != (g.Slowdown == "thermal (hardware)") {
				t.Errorf("%s: GPU %d: slowdown %q", name, i, g.Slowdown)
			}
		}
	}
	m.fault(t)
	scan(t, node)
	if g := node.Inventory().GPUs[2]; g.Faults != nil || g.Recovery != device.RecoveryNone {
		t.Errorf("after the fault: %+v, recovery action %q", g.Faults, g.Recovery)
	}
}

// A fault that cannot be read is not gone, nor is a value that cannot be read another fault.
func TestFaultsThatCannotBeRead(t *testing.T) {
	broken := simulated.Condition{RecoveryAction: "reset", RowRemap: simulated.RowRemap{Failure: true}, Fabric: &simulated.FabricState{State: "inProgress"}}
	unread := func(c simulated.Condition, field string) simulated.Condition {
		c.Fields = map[string]string{field: "ERROR_UNKNOWN"}
		return c
	}
	calls := func(call, answer string) map[string]simulated.CallFault {
		return map[string]simulated.CallFault{call: {Return: answer}}
	}
	healthy := simulated.Condition{ECC: simulated.ECCErrors{Volatile: simulated.ECCCounts{Uncorrected: 1}}}
	for name, test := range map[string]struct {
		before simulated.Condition
		now    simulated.GPUFaults
		stale  bool
	}{
		"recovery action":           {broken, simulated.GPUFaults{Condition: unread(broken, "230")}, true},
		"row remapping":             {broken, simulated.GPUFaults{Condition: unread(broken, "145")}, false},
		"all fields":                {broken, simulated.GPUFaults{Condition: broken, Calls: calls("GetFieldValues", "ERROR_TIMEOUT")}, true},
		"fabric":                    {broken, simulated.GPUFaults{Condition: broken, Calls: calls("GetGpuFabricInfo", "ERROR_UNKNOWN")}, false},
		"recovery action, with ECC": {healthy, simulated.GPUFaults{Condition: unread(healthy, "230")}, true},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, "h100x8")
			m.fault(t, simulated.GPUFaults{GPU: "2", Condition: test.before})
			node := m.open(t)
			before := node.Inventory().GPUs[2]
			test.now.GPU = "2"
			m.fault(t, test.now)
			began := time.Now()
			scan(t, node)
			g := node.Inventory().GPUs[2]
			if diff := cmp.Diff(before, g); diff != "" {
				t.Error(diff)
			}
			// A reading without the recovery action says nothing about the end of an XID.
			if read := node.LastRead(g.UUID); read.Before(began) != test.stale {
				t.Errorf("last read %v after the scan began", read.Sub(began))
			}
			m.fault(t)
			scan(t, node)
			if g := node.Inventory().GPUs[2]; len(g.Faults) != 0 || g.Recovery != device.RecoveryNone || node.LastRead(g.UUID).Before(began) {
				t.Errorf("after the fault: %+v, recovery action %q, read %v", g.Faults, g.Recovery, node.LastRead(g.UUID))
			}
		})
	}
}

// An old driver answers each reading that it lacks with an error from the first one on: that is no fault.
func TestFieldsThatNeverAnswer(t *testing.T) {
	m := newMachine(t, "h100x8")
	errors := simulated.ECCErrors{Volatile: simulated.ECCCounts{Uncorrected: 1}}
	m.fault(t, simulated.GPUFaults{GPU: "2", Condition: simulated.Condition{ECC: errors, Fields: map[string]string{"230": "ERROR_UNKNOWN"}}})
	node := m.open(t)
	if g := node.Inventory().GPUs[2]; len(g.Faults) != 0 || g.Recovery != "" {
		t.Errorf("faults %+v, recovery action %q", g.Faults, g.Recovery)
	}
}

func TestWatchXIDs(t *testing.T) {
	for _, source := range []string{"kernel log", "events"} {
		t.Run(source, func(t *testing.T) {
			m := newMachine(t, "h100x8")
			if source == "events" {
				m.options.OpenKernelLog = func() (io.ReadCloser, error) { return nil, errors.New("not permitted") }
			}
			node := m.open(t)
			ctx, cancel := context.WithCancel(t.Context())
			got, done := make(chan device.XIDEvent, 10), make(chan error, 1)
			go func() { done <- node.WatchXIDs(ctx, func(e device.XIDEvent) { got <- e }) }()
			pci := m.profile.GPUs[3].PCI
			deadline := time.After(time.Minute)
			for raised := false; !raised; {
				if err := simulated.RaiseXID(m.dir, simulated.Event{GPU: "3", XID: 48}); err != nil {
					t.Fatal(err)
				}
				for waiting := true; waiting; {
					select {
					case e := <-got:
						if e.XID == 0 {
							continue // the driver was loaded
						}
						if e.XID != 48 || e.GPUInstance != device.NoInstance || e.PCI+".0" != pci {
							t.Errorf("%+v is not XID 48 of %s", e, pci)
						}
						raised, waiting = true, false
					case <-time.After(time.Second):
						waiting = false // the event set was not registered yet
					case <-deadline:
						t.Fatal("no XID")
					}
				}
			}
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// A GPU that hangs keeps its state at first, and delays no news of the others.
func TestHangingGPUDelaysNoFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, "h100x8")
		node := m.open(t)
		t.Cleanup(func() {
			m.fault(t)
			time.Sleep(time.Second) // in which the call that hangs ends: a bubble must be left by all
		})
		m.fault(t, simulated.GPUFaults{GPU: "0", Calls: map[string]simulated.CallFault{"GetMemoryInfo": {Delay: simulated.Duration(time.Hour)}}},
			simulated.GPUFaults{GPU: "1", Condition: simulated.Condition{RecoveryAction: "reset"}})
		before := time.Now()
		scan(t, node)
		if took := time.Since(before); took > 5*time.Second {
			t.Errorf("the scan took %v", took)
		}
		gpus := node.Inventory().GPUs
		if !gpus[0].Health.Healthy() || len(gpus[1].Faults) != 1 {
			t.Errorf("GPU 0 is %+v, the faults of GPU 1 are %+v", gpus[0].Health, gpus[1].Faults)
		}
	})
}

// What is known to have been read is in the inventory, also while the same scan still waits for another GPU.
func TestLastReadIsInTheInventory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, "h100x8")
		node := m.open(t)
		uuid := node.Inventory().GPUs[0].UUID
		before := node.LastRead(uuid)
		time.Sleep(time.Second) // so that the next reading has another time
		m.fault(t, simulated.GPUFaults{GPU: "0", Condition: simulated.Condition{RecoveryAction: "reset"}},
			simulated.GPUFaults{GPU: "7", Calls: map[string]simulated.CallFault{"GetMemoryInfo": {Delay: simulated.Duration(500 * time.Millisecond)}}})
		done := make(chan error, 1)
		go func() { done <- node.Scan(t.Context()) }()
		for node.LastRead(uuid).Equal(before) {
			time.Sleep(time.Millisecond)
		}
		if g := node.Inventory().GPUs[0]; len(g.Faults) != 1 {
			t.Errorf("the GPU was read at %v, and its faults are %+v", node.LastRead(uuid), g.Faults)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// In MIG mode a GPU needs no fabric. The first scan of an agent knows that, too.
func TestFabricInMIGMode(t *testing.T) {
	m := newMachine(t, "h100x8")
	m.profile.GPUs[2].MIGEnabled = true
	m.materialize(t)
	m.fault(t, simulated.GPUFaults{GPU: "2", Condition: simulated.Condition{Fabric: &simulated.FabricState{State: "notStarted"}}})
	node := m.open(t)
	for range 2 {
		if g := node.Inventory().GPUs[2]; !g.MIGEnabled || len(g.Faults) > 0 {
			t.Errorf("MIG mode %v, faults %+v", g.MIGEnabled, g.Faults)
		}
		scan(t, node)
	}
}

// An XID has the GPUs read well before the next scan, not only at the next interval.
func TestXIDCausesAScan(t *testing.T) {
	m := newMachine(t, "h100x8")
	m.options.Interval = time.Hour
	node := m.open(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() { done <- node.Run(ctx) }()
	go func() { done <- node.WatchXIDs(ctx, func(device.XIDEvent) {}) }()
	m.fault(t, simulated.GPUFaults{GPU: "2", Condition: simulated.Condition{RecoveryAction: "reset"}})
	changed := node.Changed()
	if err := simulated.RaiseXID(m.dir, simulated.Event{GPU: "2", XID: 95}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	case <-time.After(time.Minute):
		t.Fatal("no scan")
	}
	if g := node.Inventory().GPUs[2]; len(g.Faults) != 1 {
		t.Errorf("faults %+v", g.Faults)
	}
	cancel()
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
