// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/simulated"
)

// TestFaultsOfTwoGPUs: the fault of one GPU neither hides nor ends that of another. A node that is down, or has just booted, has none.
func TestFaultsOfTwoGPUs(t *testing.T) {
	root, down := t.TempDir(), error(nil)
	b := &broken{root: func() (string, error) { return root, down }}
	if err := b.lose(1); err != nil {
		t.Error("a node without GPUs:", err)
	}
	machine := filepath.Join(root, machineDir)
	if err := os.MkdirAll(machine, 0o755); err != nil {
		t.Fatal(err)
	}
	lost := func() (gpus string) {
		all, err := simulated.ReadFaults(machine)
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range all.GPUs {
			if g.Lost {
				gpus += g.GPU
			}
		}
		return gpus
	}
	for _, step := range []struct {
		do   func() error
		want string
	}{
		{func() error { return b.lose(5) }, "15"},
		{func() error { return b.find(1) }, "5"},
		{func() error { return b.set(2, &simulated.GPUFaults{GPU: "2"}) }, "5"},
		{func() error { return b.find(5) }, ""},
	} {
		if err := step.do(); err != nil || lost() != step.want {
			t.Errorf("%v, lost: %q, want %q", err, lost(), step.want)
		}
	}
	down = errors.New("down")
	if err := b.lose(1); !errors.Is(err, down) {
		t.Error(err)
	}
}
