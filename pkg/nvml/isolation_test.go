// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/simulated"
)

// hangs is a fault of calls that do not return.
func hangs(calls ...string) simulated.GPUFaults {
	faults := simulated.GPUFaults{Calls: map[string]simulated.CallFault{}}
	for _, call := range calls {
		faults.Calls[call] = simulated.CallFault{Hang: true}
	}
	return faults
}

// faultBoth replaces the faults of the GPUs with index 0 and 1.
func (n *hangNode) faultBoth(first, second simulated.GPUFaults) {
	n.t.Helper()
	first.GPU, second.GPU = "0", "1"
	if err := simulated.WriteFaults(n.faults, simulated.Faults{GPUs: []simulated.GPUFaults{first, second}}); err != nil {
		n.t.Fatal(err)
	}
}

// A scan beside a reset that takes longer than a call may leaves all as it was.
func TestScansBesideALongReset(t *testing.T) {
	n := newHangNode(t)
	n.options.patience = 100 * time.Millisecond
	if err := n.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	resets := make(chan struct{})
	go func() {
		defer close(resets)
		for ctx.Err() == nil {
			_ = n.session.suspend(time.Second, func() error { time.Sleep(250 * time.Millisecond); return nil })
			time.Sleep(20 * time.Millisecond)
		}
	}()
	for ctx.Err() == nil {
		if err := n.Scan(t.Context()); err != nil {
			t.Errorf("a scan: %v", err)
		}
		if !n.all("") {
			t.Errorf("a GPU is unhealthy during a reset: %+v", n.Inventory().GPUs)
			cancel()
		}
	}
	<-resets
}

// A GPU that hangs keeps its state for some time and delays no scan for long, whatever is wrong with another one.
func TestHangBesideABrokenGPU(t *testing.T) {
	lost, absent := simulated.GPUFaults{Lost: true}, simulated.GPUFaults{Absent: true}
	for name, test := range map[string]struct{ first, then simulated.GPUFaults }{
		"never identified": {lost, lost},
		"gone":             {simulated.GPUFaults{}, absent},
		"appears again":    {absent, simulated.GPUFaults{}},
		"lost":             {simulated.GPUFaults{}, lost},
		"healthy":          {},
	} {
		t.Run(name, func(t *testing.T) {
			n := newHangNode(t)
			n.options.patience = 4 * time.Second
			n.faultBoth(simulated.GPUFaults{}, test.first)
			if err := n.Scan(t.Context()); err != nil {
				t.Fatal(err)
			}
			n.faultBoth(simulated.GPUFaults{}, test.then)
			if err := n.Scan(t.Context()); err != nil {
				t.Fatal(err)
			}
			n.faultBoth(hangs("GetMemoryInfo"), test.then)
			began := time.Now()
			if err := n.Scan(t.Context()); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took > 3*time.Second {
				t.Errorf("the scan took %v", took)
			}
			if g := n.Inventory().GPUs[0]; !g.Health.Healthy() {
				t.Errorf("the GPU that hangs is unhealthy at once: %+v", g.Health)
			}
		})
	}
}

// The number of GPUs changes while one hangs: that one keeps its state all the same.
func TestGPUVanishesWhileAnotherHangs(t *testing.T) {
	n := newHangNode(t)
	n.options.patience = time.Second
	if err := n.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.faultBoth(hangs("GetMemoryInfo"), simulated.GPUFaults{Absent: true})
	for range 2 {
		if err := n.Scan(t.Context()); err != nil {
			t.Fatal(err)
		}
		if g := n.Inventory().GPUs[0]; !g.Health.Healthy() {
			t.Errorf("the GPU that hangs is unhealthy at once: %+v", g.Health)
		}
	}
}

// Container edits of a GPU make no call that another GPU can delay, and scans go on beside them.
func TestEditsDelayNoScan(t *testing.T) {
	n := newHangNode(t)
	n.options.patience = 5 * time.Second
	if err := n.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.library.byUUID.close() // it initialises all GPUs, of which one hangs
	edits, err := n.ContainerEdits(t.Context())
	if err != nil || len(edits.Devices) != 2 {
		t.Errorf("%d devices with edits (%v; %v), want 2", len(edits.Devices), err, edits.Failed)
	}
	n.library.byUUID.open()

	n.fault(hangs("GetIndex")) // which a scan does not call
	done := make(chan struct{})
	go func() {
		defer close(done)
		edits, err := n.ContainerEdits(t.Context())
		if err != nil || len(edits.Devices) != 1 || !errors.Is(edits.Failed[n.Inventory().GPUs[1].UUID], errNoAnswer) {
			t.Errorf("%d devices with edits (%v; %v), want 1", len(edits.Devices), err, edits.Failed)
		}
	}()
	time.Sleep(50 * time.Millisecond)
	began := time.Now()
	if err := n.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 900*time.Millisecond {
		t.Errorf("a scan beside container edits took %v", took)
	}
	<-done
	n.fault(simulated.GPUFaults{})
}
