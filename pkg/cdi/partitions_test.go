// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"context"
	"errors"
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
		t.Errorf("the source was asked %d times for one partition", from.count())
	}
	path := strings.TrimSuffix(s.Path(), ".json") + "-MIG-1.json"
	data, err := os.ReadFile(path)
	check(t, err)
	if !strings.Contains(string(data), "NVIDIA_VISIBLE_DEVICES=void") {
		t.Errorf("the file lacks the common edits: %s", data)
	}

	// Ensure restores a removed file.
	check(t, os.Remove(path))
	check(t, s.Ensure(t.Context(), "MIG-1"))
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}

	// The next process adopts the files, removes temporary files of a crash, and removes partitions that are gone. A partition
	// that the driver reports as well keeps its own file: a runtime rejects a name that two files define.
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
		t.Error("the file of the partition is gone:", err)
	}
}

// The entry of a partition that the source no longer reports is removed: the device node belongs to its GPU.
func TestReportedPartitionsAreRemoved(t *testing.T) {
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
	await(t, func() bool { return readable(dir) == 1 })
	stop()
}

// A partition that is added during a refresh does not count as gone.
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

// The UUIDs of partitions recur. A refresh that was asked while a place was empty does not remove the
// entry of the partition that was made again there meanwhile, whichever file has it.
func TestRemadeWhileRefreshing(t *testing.T) {
	gpu, again := entry("GPU-a", "/dev/nvidia0", 0), device.Partition{UUID: "MIG-1"}
	for name, reported := range map[string]bool{"in a file of its own": false, "in the main file": true} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "cdi")
			from := newSource(gpu)
			s := newSpecs(t, dir, from, nil)
			if !reported {
				check(t, s.Add(t.Context(), again))
			}
			from.set(editsOf(gpu, entry("MIG-1", "/dev/nvidia0", 0)), nil)
			runOnce(t, s)
			if !s.Has("MIG-1") {
				t.Fatal("the partition has no entry")
			}
			from.set(editsOf(gpu), nil) // the partition is gone
			asked, answer := make(chan struct{}), make(chan struct{})
			from.during(func() { close(asked); <-answer })
			stop := run(t, s)
			<-asked
			check(t, s.Add(t.Context(), again))
			close(answer)
			stop()
			if got := len(resolves(t, dir)); got != 2 || !s.Has("MIG-1") {
				t.Errorf("%d devices, want 2: kubelet was answered with the partition", got)
			}
			// It goes when the source says so afterwards.
			from.set(editsOf(gpu), nil)
			stop = run(t, s)
			await(t, func() bool { return readable(dir) == 1 })
			stop()
		})
	}
}

// A partition that is made again may have other device nodes, as after the GPU's minor number has changed.
func TestRemadeWithOtherNodes(t *testing.T) {
	gpu := entry("GPU-a", "/dev/nvidia0", 0)
	for name, reported := range map[string]bool{"in a file of its own": false, "in the main file": true} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "cdi")
			from := newSource(gpu)
			if reported {
				from = newSource(gpu, entry("MIG-1", "/dev/nvidia0", 0))
			}
			s := newSpecs(t, dir, from, nil)
			check(t, s.Add(t.Context(), device.Partition{UUID: "MIG-1"}))
			for node, caps := range map[string][2]int{"/dev/nvidia3": {}, "/dev/nvidia-caps/nvidia-cap21": {21, 22}} {
				check(t, s.Add(t.Context(), device.Partition{UUID: "MIG-1", Parent: 3, Caps: caps}))
				files, err := filepath.Glob(filepath.Join(dir, "*.json"))
				check(t, err)
				var all string
				for _, file := range files {
					data, err := os.ReadFile(file)
					check(t, err)
					all += string(data)
				}
				if !strings.Contains(all, node) {
					t.Errorf("the entry has the device nodes of before, and not %s: %s", node, all)
				}
			}
		})
	}
}

// A partition that a refresh finds during Add gets no file of its own: a runtime rejects a name that two files define.
func TestRefreshDuringAdd(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	gpu := entry("GPU-a", "/dev/nvidia0", 0)
	from := newSource(gpu)
	s := newSpecs(t, dir, from, nil)
	check(t, s.Ensure(t.Context()))
	stop := run(t, s)
	await(t, func() bool { return from.count() >= 2 })
	from.during(func() {
		from.set(editsOf(gpu, entry("MIG-1", "/dev/nvidia0", 0)), nil)
		await(t, func() bool { return readable(dir) == 2 })
	})
	check(t, s.Add(t.Context(), device.Partition{UUID: "MIG-1"}))
	stop()
	if diff := cmp.Diff([]string{s.QualifiedName("GPU-a"), s.QualifiedName("MIG-1")}, resolves(t, dir)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// The files of partitions get new common edits too, such as those of another driver.
func TestPartitionFilesFollowCommonEdits(t *testing.T) {
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
		t.Errorf("the file has the old edits: %s", data)
	}
}

// run runs s until stop is called.
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

// runOnce runs s until it has written the spec.
func runOnce(t *testing.T, s *cdi.Specs) {
	t.Helper()
	stop := run(t, s)
	await(t, func() bool { return s.Ensure(t.Context()) == nil })
	stop()
}

// UUIDs of partitions may recur after the driver was loaded again, when their GPU may have another minor number.
func TestPartitionOfAGPUWithAnotherNumber(t *testing.T) {
	silent := map[string]error{"MIG-1": errors.New("silent")}
	for name, test := range map[string]struct {
		edits cdi.Edits
		want  string
	}{
		"same number":                     {editsOf(entry("GPU-a", "/dev/nvidia0", 0), entry("MIG-1", "/dev/nvidia0", 0)), "/dev/nvidia0"},
		"another number":                  {editsOf(entry("GPU-a", "/dev/nvidia1", 1), entry("MIG-1", "/dev/nvidia1", 1)), "/dev/nvidia1"},
		"same number, it is silent":       {cdi.Edits{Devices: editsOf(entry("GPU-a", "/dev/nvidia0", 0)).Devices, Failed: silent, Nodes: map[string]string{"MIG-1": "/dev/nvidia0"}}, "/dev/nvidia0"},
		"another number, it is silent":    {cdi.Edits{Devices: editsOf(entry("GPU-a", "/dev/nvidia1", 1)).Devices, Failed: silent, Nodes: map[string]string{"MIG-1": "/dev/nvidia1"}}, ""},
		"an unknown number, it is silent": {cdi.Edits{Devices: editsOf(entry("GPU-a", "/dev/nvidia0", 0)).Devices, Failed: silent}, "/dev/nvidia0"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "cdi")
			s := newSpecs(t, dir, newSource(entry("GPU-a", "/dev/nvidia0", 0)), nil)
			check(t, s.Add(t.Context(), device.Partition{UUID: "MIG-1"}))
			source := newSource()
			source.edits = test.edits
			next := newSpecs(t, dir, source, nil)
			runOnce(t, next)
			data, err := os.ReadFile(strings.TrimSuffix(s.Path(), ".json") + "-MIG-1.json")
			if got := err == nil; got != (test.want != "") || got && !strings.Contains(string(data), test.want) {
				t.Errorf("the partition's file (%v) should have %q: %s", err, test.want, data)
			}
		})
	}
}
