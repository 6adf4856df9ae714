// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/device"
)

func TestAdd(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	gpu := entry("GPU-a", "/dev/nvidia0", 0)
	from := newSource(gpu)
	s := newSpecs(t, dir, from, nil)
	name := s.QualifiedName
	for range 2 {
		check(t, s.Add(t.Context(), device.Partition{UUID: "MIG-1"}))
	}
	check(t, s.Add(t.Context(), device.Partition{UUID: "MIG-2"}))
	check(t, s.Ensure(t.Context(), "GPU-a", "MIG-1", "MIG-2"))
	if diff := cmp.Diff([]string{name("GPU-a"), name("MIG-1"), name("MIG-2")}, resolves(t, dir)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if from.count() != 1 {
		t.Errorf("all devices were described %d times for one partition", from.count())
	}
	path := strings.TrimSuffix(s.Path(), ".json") + "-MIG-1.json"
	data, err := os.ReadFile(path)
	check(t, err)
	if !strings.Contains(string(data), "NVIDIA_VISIBLE_DEVICES=void") {
		t.Errorf("a container with nothing else lacks what all need: %s", data)
	}

	// A file that somebody removes is put back before it is needed.
	check(t, os.Remove(path))
	check(t, s.Ensure(t.Context(), "MIG-1"))
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}

	// The next process takes them over, with what a crash has left, and drops what is gone. What the driver knows as well stays
	// where it is: a name that is defined twice is nobody's.
	leftover := filepath.Join(dir, "."+filepath.Base(path)+".1.tmp")
	check(t, os.WriteFile(leftover, nil, 0o600))
	garbage := strings.TrimSuffix(s.Path(), ".json") + "-MIG-9.json"
	check(t, os.WriteFile(garbage, []byte("{"), 0o644))
	next := newSpecs(t, dir, newSource(gpu, entry("MIG-1", "/dev/nvidia0", 0)), nil)
	check(t, next.Ensure(t.Context()))
	runOnce(t, next)
	if diff := cmp.Diff([]string{name("GPU-a"), name("MIG-1")}, resolves(t, dir)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	for _, gone := range []string{leftover, garbage, strings.TrimSuffix(s.Path(), ".json") + "-MIG-2.json"} {
		if _, err := os.Stat(gone); !os.IsNotExist(err) {
			t.Errorf("%s is still there (%v)", gone, err)
		}
	}
	if _, err := os.Stat(path); err != nil {
		t.Error("what was added has moved:", err)
	}
}

// An entry of a partition that was found, and is no more, goes: its GPU's device node has another owner.
func TestFoundPartitionsGo(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	gpu := entry("GPU-a", "/dev/nvidia0", 0)
	from := newSource(gpu, entry("MIG-1", "/dev/nvidia0", 0))
	s := newSpecs(t, dir, from, nil)
	runOnce(t, s)
	check(t, s.Add(t.Context(), device.Partition{UUID: "MIG-1"}))
	if diff := cmp.Diff([]string{s.QualifiedName("GPU-a"), s.QualifiedName("MIG-1")}, resolves(t, dir)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	stop := run(t, s)
	from.set(editsOf(gpu), nil)
	await(t, func() bool { return len(resolves(t, dir)) == 1 })
	stop()
}

// A partition that is made while the driver is asked about all devices is not taken for one that is gone.
func TestAddWhileRefreshing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	from := newSource(entry("GPU-a", "/dev/nvidia0", 0))
	s := newSpecs(t, dir, from, nil)
	check(t, s.Ensure(t.Context()))
	asked, answer := make(chan struct{}), make(chan struct{})
	from.during(func() { close(asked); <-answer })
	stop := run(t, s)
	<-asked
	check(t, s.Add(t.Context(), device.Partition{UUID: "MIG-1"}))
	close(answer)
	stop()
	check(t, s.Ensure(t.Context(), "MIG-1"))
	if got := len(resolves(t, dir)); got != 2 {
		t.Errorf("%d devices, want 2", got)
	}
}

// A partition that all devices are described with while its own file is about to be written has none: a name that two files
// define is nobody's.
func TestAddIsOvertaken(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	gpu := entry("GPU-a", "/dev/nvidia0", 0)
	from := newSource(gpu)
	s := newSpecs(t, dir, from, nil)
	check(t, s.Ensure(t.Context()))
	stop := run(t, s)
	await(t, func() bool { return from.count() >= 2 })
	from.during(func() {
		from.set(editsOf(gpu, entry("MIG-1", "/dev/nvidia0", 0)), nil)
		await(t, func() bool { return len(resolves(t, dir)) == 2 })
	})
	check(t, s.Add(t.Context(), device.Partition{UUID: "MIG-1"}))
	stop()
	if diff := cmp.Diff([]string{s.QualifiedName("GPU-a"), s.QualifiedName("MIG-1")}, resolves(t, dir)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// Another driver, or another place of the hook, reaches the files of partitions too.
func TestAddedFollowWhatIsCommon(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	gpu, part := entry("GPU-a", "/dev/nvidia0", 0), entry("MIG-1", "/dev/nvidia0", 0)
	check(t, newSpecs(t, dir, newSource(gpu), nil).Add(t.Context(), device.Partition{UUID: "MIG-1"}))
	from := newSource(gpu, part)
	from.edits.Common.Env = []string{"DRIVER=next"}
	check(t, newSpecs(t, dir, from, nil).Ensure(t.Context()))
	files, err := filepath.Glob(filepath.Join(dir, "*-MIG-1.json"))
	check(t, err)
	if len(files) != 1 {
		t.Fatalf("files of the partition: %v", files)
	}
	data, err := os.ReadFile(files[0])
	check(t, err)
	if !strings.Contains(string(data), "DRIVER=next") {
		t.Errorf("it still says %s", data)
	}
}

// run starts it, and returns what ends it.
func run(t *testing.T, s *cdi.Specs) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	return func() {
		t.Helper()
		cancel()
		check(t, <-done)
	}
}

// runOnce lets it look at its source at least once.
func runOnce(t *testing.T, s *cdi.Specs) {
	t.Helper()
	stop := run(t, s)
	await(t, func() bool { return s.Ensure(t.Context()) == nil })
	stop()
}
