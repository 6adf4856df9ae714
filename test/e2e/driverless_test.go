// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"path/filepath"
	"strconv"
	"testing"

	"github.com/tandem-gpu/tandem/simulated"
)

// TestPodsEndWithoutADriver: the replacement of a driver waits for its pods to end, and kubelet ends no pod whose claim cannot be
// unprepared.
func TestPodsEndWithoutADriver(t *testing.T) {
	s := begin(t)
	root, err := node().Root()
	if err != nil {
		t.Fatal(err)
	}
	machine := filepath.Join(root, simulatedMachine)
	back := s.undo(func() error { return simulated.WriteFaults(machine, simulated.Faults{}) })
	s.occupy()
	var faults simulated.Faults
	for gpu := range gpusANode {
		faults.GPUs = append(faults.GPUs, simulated.GPUFaults{GPU: strconv.Itoa(gpu), Absent: true})
	}
	if err := simulated.WriteFaults(machine, faults); err != nil {
		t.Fatal(err)
	}
	s.killAgent()
	s.readyz(503, "finds no GPU")
	s.took("pods to end", func() { s.remove("claim-0", "limit-0") })
	s.wantHolds(1, 1)
	back()
	s.ready()
	s.wantHolds(1, 1)
	s.noDoubleOwners()
}
