// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"path/filepath"
	"strconv"
	"testing"

	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/test/stories"
)

// TestPodsEndWithoutADriver: the replacement of a driver waits for its pods to end, and kubelet ends no pod whose claim cannot be
// unprepared.
func TestPodsEndWithoutADriver(t *testing.T) {
	s := begin(t)
	root, err := node().Root()
	if err != nil {
		t.Fatal(err)
	}
	machine := filepath.Join(root, stories.SimulatedMachine)
	back := s.Undo(func() error { return simulated.WriteFaults(machine, simulated.Faults{}) })
	s.Occupy()
	var faults simulated.Faults
	for gpu := range gpusANode {
		faults.GPUs = append(faults.GPUs, simulated.GPUFaults{GPU: strconv.Itoa(gpu), Absent: true})
	}
	if err := simulated.WriteFaults(machine, faults); err != nil {
		t.Fatal(err)
	}
	s.KillAgent()
	s.Readyz(503, "finds no GPU")
	s.Took("pods to end", func() { s.remove("claim-0", "limit-0") })
	s.WantHolds(1, 1)
	back()
	s.Ready()
	s.WantHolds(1, 1)
	s.NoDoubleOwners()
}
