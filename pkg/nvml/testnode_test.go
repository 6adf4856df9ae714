// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/simnode"
)

// machine is a simulated machine on a host of its own.
type machine struct {
	options nvml.Options
	// dir is where the machine's files are, as the test sees them.
	dir     string
	profile simulated.Profile
}

func newMachine(t *testing.T, profile string) machine {
	t.Helper()
	p, err := simulated.Load(profile)
	if err != nil {
		t.Fatal(err)
	}
	host := t.TempDir()
	m := machine{
		dir:     filepath.Join(host, "run/nvidia/simulated"),
		profile: p,
	}
	m.options = simnode.Options(nvml.Options{
		Host: nvml.Host{
			HostRoot: host, Library: simnode.Library + filepath.Join(m.dir, simulated.ProfileFile), SysfsRoot: filepath.Join(m.dir, simulated.SysfsDir),
		},
		HookPath: "/var/lib/kubelet/plugins/gpu.nvidia.com/nvidia-cdi-hook",
	}, "")
	m.materialize(t)
	return m
}

func (m machine) materialize(t *testing.T) {
	t.Helper()
	if err := simulated.Materialize(m.dir, m.profile, simulated.MaterializeOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (m machine) open(t *testing.T) *nvml.Node {
	t.Helper()
	node, err := nvml.Open(t.Context(), m.options)
	if err != nil {
		t.Fatal(err)
	}
	return node
}

func (m machine) fault(t *testing.T, faults ...simulated.GPUFaults) {
	t.Helper()
	if err := simulated.WriteFaults(m.dir, simulated.Faults{GPUs: faults}); err != nil {
		t.Fatal(err)
	}
}

// procDevices is the machine's list of character devices.
func (m machine) procDevices(t *testing.T, lines string) {
	t.Helper()
	text := "Character devices:\n" + lines + "\nBlock devices:\n"
	if err := os.WriteFile(filepath.Join(m.dir, simulated.ProcDir, "devices"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// major is the major number of one of the machine's nodes.
func (m machine) major(t *testing.T, node string) uint32 {
	t.Helper()
	var info unix.Stat_t
	if err := unix.Stat(filepath.Join(m.dir, "driver/dev", node), &info); err != nil {
		t.Fatal(err)
	}
	return unix.Major(info.Rdev)
}
