// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// TestTheAdministratorsRound: it changes only its own partitions, and in the end the GPUs are as before.
func TestTheAdministratorsRound(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make device nodes")
	}
	profile, err := simulated.Load(profileForMIG)
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if err := simulated.Materialize(filepath.Join(root, machineDir), profile, simulated.MaterializeOptions{}); err != nil {
		t.Fatal(err)
	}
	var used []place
	h := &hardware{root: func() (string, error) { return root, nil }, statistics: &statistics{}, trace: discard(t)}
	a := &administrator{hardware: h, broken: &broken{root: h.root}, used: func(context.Context) ([]place, error) { return used, nil }}
	if err := h.begin(); err != nil {
		t.Fatal(err)
	}
	if r := h.room(); !r.fits(ask{api: oracle.Limits, gpus: 2, profile: "1g.10gb"}, nil) || r.fits(ask{api: oracle.Limits, gpus: 3, profile: "1g.10gb"}, nil) ||
		r.free(nil) != wholeGPUs {
		t.Errorf("the machine is not what the torture takes it for: %+v", r)
	}
	for _, step := range []struct {
		op     Op
		used   []place
		done   bool
		static int
	}{
		{Op{Kind: MakePartition, GPU: 3, Profile: "3g.40gb"}, nil, true, 8},
		{Op{Kind: MakePartition, GPU: 3, Profile: "1g.10gb"}, nil, false, 8},
		{Op{Kind: RemovePartition, GPU: 5}, []place{{5, 2, 2}}, false, 8},
		{Op{Kind: RemovePartition, GPU: 5}, []place{{5, 4, 4}}, true, 7},
		{Op{Kind: RemovePartition, GPU: 5}, nil, false, 7},
		{Op{Kind: UsePartition, GPU: 3, Profile: "3g.40gb"}, nil, true, 7},
		{Op{Kind: FailCall, GPU: 4, Call: "GpuInstance.Destroy", Answer: "ERROR_UNKNOWN"}, nil, true, 7},
		{Op{Kind: SlowCall, GPU: 4, Call: "GpuInstance.Destroy", Delay: 1}, nil, true, 7},
	} {
		used = step.used
		skipped, err := a.operate(t.Context(), step.op)
		if err != nil || (skipped == "") != step.done || len(h.static) != step.static {
			t.Errorf("%s: %v, skipped: %q; %d are static", step.op, err, skipped, len(h.static))
		}
		if err := h.look(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if lines := h.unlike(); len(lines) != 2 {
		t.Errorf("unlike: %v", lines)
	}
	used = nil
	if err := a.tidy(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := h.look(t.Context()); err != nil {
		t.Fatal(err)
	}
	if lines := h.unlike(); len(lines) > 0 || len(h.static) != 7 {
		t.Errorf("unlike: %v; static: %v", lines, h.static)
	}
	if c := h.statistics.now(); c.PartitionsMade+c.PartitionsDestroyed+c.UnmanagedChanged != 0 {
		t.Errorf("counted %+v", c)
	}
	if faults, err := simulated.ReadFaults(filepath.Join(root, machineDir)); err != nil || len(faults.GPUs) > 0 {
		t.Errorf("faults are left: %+v: %v", faults, err)
	}
}
