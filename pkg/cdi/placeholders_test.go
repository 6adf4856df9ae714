// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// After a reboot kubelet also passes the names of partitions that no longer exist. They resolve to placeholders without device
// nodes, until a partition has that name again.
func TestPlaceholders(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	from := newSource(entry("GPU-a", "/dev/nvidia0", 0))
	s := newSpecs(t, dir, from, nil)
	name := s.QualifiedName
	s.AddPlaceholders([]string{name("MIG-old"), name("MIG-1"), name("GPU-a"), name("MIG-old"), "k8s.gpu.nvidia.com/claim=x", "nonsense"})
	check(t, s.Ensure(t.Context(), "GPU-a"))
	wants := func(nodes map[string]int) {
		t.Helper()
		found := map[string]int{}
		cache, err := cdilib.NewCache(cdilib.WithSpecDirs(dir), cdilib.WithAutoRefresh(false))
		check(t, err)
		for _, device := range cache.ListDevices() {
			found[device] = len(cache.GetDevice(device).ContainerEdits.DeviceNodes)
		}
		if len(cache.GetErrors()) > 0 {
			t.Errorf("errors: %v", cache.GetErrors())
		}
		if diff := cmp.Diff(nodes, found); diff != "" {
			t.Errorf("device nodes by name (-want +got):\n%s", diff)
		}
	}
	wants(map[string]int{name("GPU-a"): 1, name("MIG-old"): 0, name("MIG-1"): 0})
	if s.Has("MIG-old") || s.Ensure(t.Context(), "MIG-old") == nil {
		t.Error("a placeholder counts as a device")
	}
	check(t, s.Add(t.Context(), device.Partition{UUID: "MIG-1"}))
	wants(map[string]int{name("GPU-a"): 1, name("MIG-old"): 0, name("MIG-1"): 1})

	// An administrator creates one of them again.
	from.set(editsOf(entry("GPU-a", "/dev/nvidia0", 0), entry("MIG-old", "/dev/nvidia0", 0), entry("MIG-1", "/dev/nvidia0", 0)), nil)
	stop := run(t, s)
	await(t, func() bool { return s.Has("MIG-old") })
	stop()
	wants(map[string]int{name("GPU-a"): 1, name("MIG-old"): 1, name("MIG-1"): 1})

	// The next process reads them from the spec and adds none: a device that is lost in this boot must fail its containers.
	from.set(editsOf(entry("GPU-a", "/dev/nvidia0", 0)), nil)
	dir = filepath.Join(t.TempDir(), "cdi")
	first := newSpecs(t, dir, from, nil)
	first.AddPlaceholders([]string{name("MIG-old"), name("GPU-gone")})
	check(t, first.Ensure(t.Context()))
	next := newSpecs(t, dir, from, nil)
	next.AddPlaceholders([]string{name("MIG-old"), name("MIG-lost")})
	check(t, next.Ensure(t.Context()))
	wants(map[string]int{name("GPU-a"): 1, name("MIG-old"): 0})
	check(t, next.Add(t.Context(), device.Partition{UUID: "MIG-old"}))
	wants(map[string]int{name("GPU-a"): 1, name("MIG-old"): 1})
}

// A placeholder that could not be removed keeps the partition of that name from being defined a second time.
func TestPlaceholderThatCannotBeRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	from := newSource(entry("GPU-a", "/dev/nvidia0", 0))
	s := newSpecs(t, dir, from, nil)
	s.AddPlaceholders([]string{s.QualifiedName("MIG-1")})
	check(t, s.Ensure(t.Context()))
	away := dir + ".away"
	from.during(func() {
		check(t, os.Rename(dir, away))
		check(t, os.WriteFile(dir, nil, 0o600))
	})
	if s.Add(t.Context(), device.Partition{UUID: "MIG-1"}) == nil {
		t.Fatal("added to a directory that is not writable")
	}
	check(t, os.Remove(dir))
	check(t, os.Rename(away, dir))
	check(t, s.Add(t.Context(), device.Partition{UUID: "MIG-1"}))
	if diff := cmp.Diff([]string{s.QualifiedName("GPU-a"), s.QualifiedName("MIG-1")}, resolves(t, dir)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}
