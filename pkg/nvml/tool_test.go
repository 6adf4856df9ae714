// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
)

// SIGKILL may not end a process that sleeps in the driver. Scans and operations of the GPUs go on all the same, and no other such tool starts
// until the process has ended.
func TestToolThatCannotBeKilled(t *testing.T) {
	for name, test := range map[string]struct {
		run func(n *Node, ctx context.Context, uuid string) error
		// again is the index of the GPU for which the tool does not start meanwhile.
		again int
	}{
		"reset":      {(*Node).Reset, 1},
		"time slice": {func(n *Node, ctx context.Context, uuid string) error { return n.SetTimeSlice(ctx, uuid, 1) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newHangNode(t)
				writeFile(t, filepath.Join(n.options.HostRoot, "usr/bin/nvidia-smi"), "")
				var started atomic.Int32
				var process gate
				n.options.runTool = func(*exec.Cmd) ([]byte, error) {
					started.Add(1)
					process.pass()
					return nil, nil
				}
				n.find()
				gpus := n.Inventory().GPUs
				process.close()
				began := time.Now()
				err := test.run(n.Node, t.Context(), gpus[0].UUID)
				if took := time.Since(began); !errors.Is(err, errToolStays) || took > toolPatience*n.options.patience+3*toolDelay {
					t.Errorf("error %v after %v, want %v", err, took, errToolStays)
				}
				n.fault(simulated.GPUFaults{Calls: map[string]simulated.CallFault{"GetMemoryInfo": {Return: "ERROR_GPU_IS_LOST"}}})
				if err := n.scan(); err != nil || n.Inventory().GPUs[1].Health.Reason != gpu.ReasonLost {
					t.Errorf("scan: %v, health %+v, want lost", err, n.Inventory().GPUs[1].Health)
				}
				for _, g := range gpus {
					if _, err := n.ComputeMode(t.Context(), g.UUID); err != nil {
						t.Error(err)
					}
				}
				if err := test.run(n.Node, t.Context(), gpus[test.again].UUID); !errors.Is(err, errToolStays) || started.Load() != 1 {
					t.Errorf("again: %v, %d processes started, want 1", err, started.Load())
				}
				process.open()
				time.Sleep(lookAgain)
				if err := test.run(n.Node, t.Context(), gpus[test.again].UUID); err != nil || started.Load() != 2 {
					t.Errorf("after the end of the process: %v, %d started, want 2", err, started.Load())
				}
			})
		})
	}
}
