// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
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

// TestKubeletEndedInAllocate: only that end of kubelet, and only if it was the last one, is due to a second device plugin.
func TestKubeletEndedInAllocate(t *testing.T) {
	const stack = "panic: runtime error: invalid memory address or nil pointer dereference\n" +
		"[signal SIGSEGV: segmentation violation code=0x1 addr=0x28 pc=0x3378a1b]\n\ngoroutine 292 [running]:\n" +
		"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.(*ManagerImpl).allocateContainerResources(0x35eb72e97e10, {0x4a21420})\n"
	lines := strings.Repeat("I1129 02:16:19.595168  104601 server.go:177] Pod update broadcasted\n", 200)
	for log, want := range map[string]bool{
		lines + stack: true, stack: true, stack + lines: false, lines: false, "": false,
		lines + strings.Replace(stack, "allocateContainerResources", "writeCheckpoint", 1):                false,
		lines + "ManagerImpl).allocateContainerResources(" + strings.SplitAfter(stack, "[running]:\n")[0]: false,
	} {
		if got := endedInAllocate([]byte(log)); got != want {
			t.Errorf("%t for a log that ends %q", got, log[max(0, len(log)-300):])
		}
	}
}
