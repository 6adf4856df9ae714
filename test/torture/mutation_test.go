// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/test/mutation"
)

// TestMutationsCompile: what they replace is still there, and the product compiles without it.
func TestMutationsCompile(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range Mutations() {
		overlay, err := mutation.Overlay(root, t.TempDir(), s.changes)
		if err != nil {
			t.Error(s.Name, err)
			continue
		}
		args := []string{"build", "-overlay", overlay}
		for _, c := range s.changes {
			args = append(args, "./"+c.Dir)
		}
		cmd := exec.Command("go", args...)
		cmd.Dir = root
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", s.Name, err, out)
		}
	}
}

// Every mutation meets operations: its mix can be planned.
func TestMixesOfMutations(t *testing.T) {
	for _, m := range Mutations() {
		for seed := range uint64(20) {
			if round := PlanRound(seed, 0, 100, m.Mix); len(round.Ops) != 100 {
				t.Errorf("%s: %d operations", m.Name, len(round.Ops))
			}
		}
	}
}
