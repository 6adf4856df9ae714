// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/pkg/cdi"
)

func pipe(from string) specs.ContainerEdits {
	return specs.ContainerEdits{
		Env:    []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"},
		Mounts: []*specs.Mount{{HostPath: from, ContainerPath: "/tmp/nvidia-mps", Options: []string{"rw", "bind"}}},
	}
}

func TestClientDevices(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	from := newSource(entry("GPU-a", "/dev/nvidia0", 0))
	s := newSpecs(t, dir, from, nil)
	check(t, s.Ensure(t.Context()))
	write := func(s *cdi.Specs, name string, edits specs.ContainerEdits) string {
		t.Helper()
		qualified, err := s.WriteClientDevice(name, edits)
		check(t, err)
		return qualified
	}
	var names []string
	for range 2 {
		names = []string{s.QualifiedName("GPU-a"), write(s, "uid-1-abc", pipe("/run/1")), write(s, "uid-2-abc", pipe("/run/2"))}
	}
	if want := "k8s.gpu.nvidia.com/sharing=uid-1-abc"; names[1] != want {
		t.Errorf("named %s, want %s", names[1], want)
	}
	same := func(when string, want ...string) {
		t.Helper()
		if diff := cmp.Diff(want, resolves(t, dir)); diff != "" {
			t.Errorf("devices %s (-want +got):\n%s", when, diff)
		}
	}
	same("at first", names...)
	path := filepath.Join(dir, "tandem-k8s.gpu.nvidia.com-sharing-uid-1-abc.json")
	before, err := os.Stat(path)
	check(t, err)
	write(s, "uid-1-abc", pipe("/run/1"))
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Error("rewritten without a change", err)
	}

	// A removed file is restored by the next write, and by Run.
	check(t, os.Remove(path))
	write(s, "uid-1-abc", pipe("/run/1"))
	same("after a removal", names...)
	check(t, os.Remove(path))
	stop := run(t, s)
	await(t, func() bool { _, err := os.Stat(path); return err == nil })
	stop()

	// New edits replace the old.
	write(s, "uid-1-abc", pipe("/run/other"))
	if data, err := os.ReadFile(path); err != nil || !strings.Contains(string(data), "/run/other") {
		t.Errorf("%s, %v", data, err)
	}

	// The next process keeps the named devices, and those it has written itself.
	check(t, os.WriteFile(filepath.Join(dir, ".tandem-k8s.gpu.nvidia.com-sharing-x.json.1.tmp"), nil, 0o600))
	other := filepath.Join(dir, "k8s.gpu.nvidia.com-claim_uid-1.json")
	check(t, os.WriteFile(other, []byte("theirs"), 0o600))
	next := newSpecs(t, dir, from, nil)
	third := write(next, "uid-3-abc", pipe("/run/3"))
	check(t, next.RetainClientDevices([]string{"uid-1-abc"}))
	left, err := os.ReadDir(dir)
	check(t, err)
	if len(left) != 4 {
		t.Errorf("left are %v", left)
	}
	check(t, os.Remove(other))
	same("after a restart", names[0], names[1], third)
	for range 2 {
		check(t, next.RemoveClientDevices("uid-1-abc"))
		check(t, next.RemoveClientDevices("uid-3-abc"))
	}
	same("after removal", names[0])
	if _, err := s.WriteClientDevice("no/name", pipe("/run/1")); err == nil {
		t.Error("an invalid name was accepted")
	}
}

// Devices named name.<suffix> are retained and removed with name, also those of an earlier process.
func TestClientDeviceSuffixes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	from := newSource()
	s := newSpecs(t, dir, from, nil)
	write := func(s *cdi.Specs, name string) {
		t.Helper()
		_, err := s.WriteClientDevice(name, pipe("/run/"+name))
		check(t, err)
	}
	same := func(when string, want ...string) {
		t.Helper()
		for i := range want {
			want[i] = "k8s.gpu.nvidia.com/sharing=" + want[i]
		}
		if diff := cmp.Diff(append([]string(nil), want...), append([]string(nil), resolves(t, dir)...)); diff != "" {
			t.Errorf("devices %s (-want +got):\n%s", when, diff)
		}
	}
	for _, name := range []string{"gpu-0-a", "gpu-0-a.1024m", "gpu-0-a.2048m", "gpu-0-a2", "gpu-1-a.1024m"} {
		write(s, name)
	}
	next := newSpecs(t, dir, from, nil)
	write(next, "gpu-2-a.5m")
	check(t, next.RetainClientDevices([]string{"gpu-0-a", "gpu-0-a2"}))
	same("that are retained", "gpu-0-a", "gpu-0-a.1024m", "gpu-0-a.2048m", "gpu-0-a2", "gpu-2-a.5m")
	suffixed, err := next.ClientDevices("gpu-0-a")
	check(t, err)
	if diff := cmp.Diff([]string{"gpu-0-a.1024m", "gpu-0-a.2048m"}, suffixed); diff != "" {
		t.Error(diff)
	}
	check(t, next.RemoveClientDevices("gpu-0-a.2048m"))
	same("without one suffix", "gpu-0-a", "gpu-0-a.1024m", "gpu-0-a2", "gpu-2-a.5m")
	for range 2 {
		check(t, next.RemoveClientDevices("gpu-0-a"))
	}
	same("without one device and its suffixes", "gpu-0-a2", "gpu-2-a.5m")
	check(t, next.RemoveClientDevices("gpu-2-a"))
	stop := run(t, next)
	stop()
	same("after Run, which does not restore removed devices", "gpu-0-a2")
}

// Client devices get no placeholder: they have the same name after a reboot.
func TestNoPlaceholdersForClientDevices(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	s := newSpecs(t, dir, newSource(entry("GPU-a", "/dev/nvidia0", 0)), nil)
	s.AddPlaceholders([]string{"k8s.gpu.nvidia.com/sharing=MIG-1"})
	check(t, s.Ensure(t.Context()))
	if diff := cmp.Diff([]string{s.QualifiedName("GPU-a")}, resolves(t, dir)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}
