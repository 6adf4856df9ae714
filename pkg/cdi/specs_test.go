// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// source is a Source for tests.
type source struct {
	mu      sync.Mutex
	edits   cdi.Edits
	err     error
	calls   int
	changed chan struct{}
	// asked runs during the next call, once.
	asked func()
}

// during runs do during the next call.
func (s *source) during(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = do
}

func newSource(devices ...specs.Device) *source {
	return &source{edits: editsOf(devices...), changed: make(chan struct{})}
}

func (s *source) ContainerEdits(context.Context) (cdi.Edits, error) {
	s.mu.Lock()
	asked := s.asked
	s.asked = nil
	s.calls++
	edits, err := s.edits, s.err
	s.mu.Unlock()
	if asked != nil {
		asked()
	}
	return edits, err
}

func (s *source) PartitionEdits(_ context.Context, p device.Partition) (specs.Device, error) {
	s.mu.Lock()
	asked := s.asked
	s.asked = nil
	s.mu.Unlock()
	if asked != nil {
		asked()
	}
	made := entry(p.UUID, fmt.Sprintf("/dev/nvidia%d", p.Parent), int64(p.Parent))
	if number := p.Caps[0]; number > 0 {
		made.ContainerEdits.DeviceNodes[0].Path = fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", number)
	}
	return made, nil
}

func (s *source) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

func (s *source) set(edits cdi.Edits, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.edits, s.err = edits, err
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *source) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls
}

func editsOf(devices ...specs.Device) cdi.Edits {
	return cdi.Edits{
		Common:  specs.ContainerEdits{Env: []string{"NVIDIA_VISIBLE_DEVICES=void"}},
		Devices: devices,
	}
}

func entry(name, node string, minor int64) specs.Device {
	return specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{{Path: node, Major: 195, Minor: minor}},
	}}
}

func newSpecs(t *testing.T, dir string, from cdi.Source, hook *cdi.Hook) *cdi.Specs {
	t.Helper()
	return cdi.New(cdi.Options{Dir: dir, Source: from, Hook: hook, Interval: 5 * time.Millisecond})
}

func ensure(t *testing.T, s *cdi.Specs) {
	t.Helper()
	if err := s.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// resolves lists the qualified names that a container runtime finds in the directory.
func resolves(t *testing.T, dir string) []string {
	t.Helper()
	devices, err := find(dir)
	if err != nil {
		t.Error(err)
	}
	return devices
}

// readable returns how many devices runtimes find. It is -1 while a file is written or removed.
func readable(dir string) int {
	devices, err := find(dir)
	if err != nil {
		return -1
	}
	return len(devices)
}

// find returns the devices that a runtime finds, and what is wrong with the files.
func find(dir string) (devices []string, err error) {
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(dir), cdilib.WithAutoRefresh(false))
	if err != nil {
		return nil, err
	}
	for path, errs := range cache.GetErrors() {
		err = errors.Join(err, fmt.Errorf("%s: %w", path, errors.Join(errs...)))
	}
	return cache.ListDevices(), err
}

func TestNewTouchesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	newSpecs(t, dir, newSource(entry("GPU-a", "/dev/nvidia0", 0)), nil)
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("directory: %v, want none", err)
	}
}

func TestEnsureWritesWhatRuntimesRead(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	s := newSpecs(t, dir, newSource(entry("GPU-b", "/dev/nvidia1", 1), entry("GPU-a", "/dev/nvidia0", 0)), nil)
	ensure(t, s)
	want := []string{s.QualifiedName("GPU-a"), s.QualifiedName("GPU-b")}
	if diff := cmp.Diff(want, resolves(t, dir)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if got := s.QualifiedName("GPU-a"); got != "k8s.gpu.nvidia.com/gpu=GPU-a" {
		t.Errorf("qualified name %q", got)
	}
	spec, err := cdilib.ReadSpec(s.Path(), 0)
	if err != nil {
		t.Fatal(err)
	}
	// Nothing here needs more than CDI 0.3; a runtime of that time must be able to read it. (0.5 is where vendor names may
	// have more dots.)
	if minimum, err := specs.MinimumRequiredVersion(spec.Spec); err != nil || spec.Version != minimum {
		t.Errorf("version %s, want the minimum, %s (%v)", spec.Version, minimum, err)
	}
}

func TestEnsureRepairs(t *testing.T) {
	damage := map[string]func(t *testing.T, path string){
		"removed":           func(t *testing.T, path string) { check(t, os.Remove(path)) },
		"directory removed": func(t *testing.T, path string) { check(t, os.RemoveAll(filepath.Dir(path))) },
		"truncated":         func(t *testing.T, path string) { check(t, os.Truncate(path, 10)) },
		"emptied":           func(t *testing.T, path string) { check(t, os.Truncate(path, 0)) },
		"replaced": func(t *testing.T, path string) {
			check(t, os.WriteFile(path+".new", []byte("{}"), 0o644))
			check(t, os.Rename(path+".new", path))
		},
		"edited, with its times set back": func(t *testing.T, path string) {
			info, err := os.Stat(path)
			check(t, err)
			data, err := os.ReadFile(path)
			check(t, err)
			check(t, os.WriteFile(path, []byte(strings.Replace(string(data), "nvidia0", "nvidia9", 1)), 0o644))
			check(t, os.Chtimes(path, info.ModTime(), info.ModTime()))
		},
		"unreadable": func(t *testing.T, path string) { check(t, os.Chmod(path, 0o000)) },
		"a link": func(t *testing.T, path string) {
			check(t, os.Rename(path, path+".other"))
			check(t, os.Symlink(path+".other", path))
		},
	}
	for name, harm := range damage {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "cdi")
			from := newSource(entry("GPU-a", "/dev/nvidia0", 0))
			s := newSpecs(t, dir, from, nil)
			ensure(t, s)
			want, err := os.ReadFile(s.Path())
			check(t, err)
			harm(t, s.Path())
			ensure(t, s)
			info, err := os.Lstat(s.Path())
			check(t, err)
			if !info.Mode().IsRegular() || info.Mode().Perm() != 0o644 {
				t.Errorf("mode %s", info.Mode())
			}
			got, err := os.ReadFile(s.Path())
			check(t, err)
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("(-before +after):\n%s", diff)
			}
			if from.count() != 1 {
				t.Errorf("the source was asked %d times, but a repair must not need the driver", from.count())
			}
		})
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestLostGPUsStayResolvable(t *testing.T) {
	dir := t.TempDir()
	a, b, c := entry("GPU-a", "/dev/nvidia0", 0), entry("GPU-b", "/dev/nvidia1", 1), entry("GPU-c", "/dev/nvidia1", 1)
	silent := map[string]error{"GPU-c": errors.New("silent")}
	tests := []struct {
		name  string
		edits cdi.Edits
		want  []string
	}{
		{"both", editsOf(a, b), []string{"GPU-a", "GPU-b"}},
		{"b is lost", editsOf(a), []string{"GPU-a", "GPU-b"}},
		{"c replaces b at the same device node", editsOf(a, c), []string{"GPU-a", "GPU-c"}},
		{"c does not answer", cdi.Edits{Devices: editsOf(a).Devices, Failed: silent, Nodes: map[string]string{"GPU-c": "/dev/nvidia1"}}, []string{"GPU-a", "GPU-c"}},
		{"nor after the minors have changed", cdi.Edits{Devices: editsOf(a).Devices, Failed: silent, Nodes: map[string]string{"GPU-c": "/dev/nvidia2"}}, []string{"GPU-a"}},
	}
	for _, test := range tests {
		// Each in a new Specs, as after a restart of the agent.
		source := newSource()
		source.edits = test.edits
		s := newSpecs(t, dir, source, nil)
		ensure(t, s)
		var want []string
		for _, name := range test.want {
			want = append(want, s.QualifiedName(name))
		}
		if diff := cmp.Diff(want, resolves(t, dir)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
}

func TestUnreadableSpecIsReplaced(t *testing.T) {
	dir := t.TempDir()
	s := newSpecs(t, dir, newSource(entry("GPU-a", "/dev/nvidia0", 0)), nil)
	check(t, os.WriteFile(s.Path(), []byte("{half a sp"), 0o644))
	ensure(t, s)
	if got := resolves(t, dir); !slices.Equal(got, []string{s.QualifiedName("GPU-a")}) {
		t.Errorf("devices %v", got)
	}
}

func TestOtherFilesAreLeftAlone(t *testing.T) {
	dir := t.TempDir()
	others := []string{"nvidia.yaml", ".spec.123.tmp", "spec.456.tmp", "k8s.gpu.nvidia.com-gpu.json"}
	for _, name := range others {
		check(t, os.WriteFile(filepath.Join(dir, name), []byte("theirs"), 0o600))
	}
	s := newSpecs(t, dir, newSource(entry("GPU-a", "/dev/nvidia0", 0)), nil)
	stale := filepath.Join(dir, "."+filepath.Base(s.Path())+".789.tmp")
	check(t, os.WriteFile(stale, []byte("half"), 0o600))
	ensure(t, s)
	for _, name := range others {
		if data, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(data) != "theirs" {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Errorf("our own temporary file still exists (%v)", err)
	}
}

func TestInvalidEditsDoNotReplaceTheSpec(t *testing.T) {
	dir := t.TempDir()
	from := newSource(entry("GPU-a", "/dev/nvidia0", 0))
	s := newSpecs(t, dir, from, nil)
	ensure(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	await(t, func() bool { return from.count() >= 2 })
	from.set(editsOf(entry("GPU/with slashes", "/dev/nvidia0", 0)), nil)
	await(t, func() bool { return from.count() >= 3 })
	check(t, os.Remove(s.Path()))
	await(t, func() bool { _, err := os.Stat(s.Path()); return err == nil })
	cancel()
	check(t, <-done)
	if got := resolves(t, dir); !slices.Equal(got, []string{s.QualifiedName("GPU-a")}) {
		t.Errorf("devices %v", got)
	}
}

func await(t *testing.T, condition func() bool) {
	t.Helper()
	for !condition() {
		if t.Context().Err() != nil {
			t.Fatal("condition not met")
		}
		time.Sleep(time.Millisecond)
	}
}

func TestRun(t *testing.T) {
	dir := t.TempDir()
	from := newSource()
	from.err = errors.New("no driver")
	s := newSpecs(t, dir, from, nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	has := func(names ...string) func() bool {
		return func() bool {
			spec, err := cdilib.ReadSpec(s.Path(), 0)
			if err != nil {
				return false
			}
			var got []string
			for _, d := range spec.Devices {
				got = append(got, d.Name)
			}
			return slices.Equal(got, names)
		}
	}
	from.set(editsOf(entry("GPU-a", "/dev/nvidia0", 0)), nil)
	await(t, has("GPU-a"))
	from.set(editsOf(entry("GPU-a", "/dev/nvidia0", 0), entry("GPU-b", "/dev/nvidia1", 1)), nil)
	await(t, has("GPU-a", "GPU-b"))
	from.set(cdi.Edits{}, errors.New("driver away"))
	check(t, os.Remove(s.Path()))
	await(t, has("GPU-a", "GPU-b")) // repaired from memory
	cancel()
	check(t, <-done)
}

func TestEnsureWithoutAnything(t *testing.T) {
	from := newSource()
	s := newSpecs(t, t.TempDir(), from, nil)
	if err := s.Ensure(t.Context()); err == nil {
		t.Error("no error though there is no GPU")
	}
	from.set(cdi.Edits{}, errors.New("driver away"))
	if err := s.Ensure(t.Context()); err == nil || !strings.Contains(err.Error(), "driver away") {
		t.Errorf("error %v, want the source's", err)
	}
	from.set(editsOf(entry("GPU-a", "/dev/nvidia0", 0)), nil)
	ensure(t, s)
}

func TestCheck(t *testing.T) {
	from := newSource(entry("GPU-a", "/dev/nvidia0", 0))
	from.edits.Failed = map[string]error{"GPU-b": errors.New("/dev/nvidia1 does not exist")}
	s := newSpecs(t, t.TempDir(), from, nil)
	ensure(t, s)
	check(t, s.Ensure(t.Context(), "GPU-a"))
	if err := s.Ensure(t.Context(), "GPU-a", "GPU-b"); err == nil || !strings.Contains(err.Error(), "/dev/nvidia1") {
		t.Errorf("GPU-b: %v, want the reason", err)
	}
	if err := s.Ensure(t.Context(), "GPU-c"); err == nil {
		t.Error("GPU-c: no error for an unknown GPU")
	}
}

func TestConcurrentEnsure(t *testing.T) {
	from := newSource(entry("GPU-a", "/dev/nvidia0", 0))
	target := filepath.Join(t.TempDir(), "plugins/hook")
	s := newSpecs(t, filepath.Join(t.TempDir(), "cdi"), from, cdi.NewHook(binary(t, "#!/bin/true"), target))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for range 20 {
				if i == 0 {
					_ = os.Remove(s.Path())
					_ = os.Remove(target)
				}
				if err := s.Ensure(ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	ensure(t, s)
	cancel()
	check(t, <-done)
	for _, path := range []string{s.Path(), target} {
		if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 1 {
			t.Errorf("beside %s: %v, %v", path, entries, err)
		}
	}
}

func TestEnsureGivesUpWithItsContext(t *testing.T) {
	from := &blocked{entered: make(chan struct{}), release: make(chan struct{})}
	s := newSpecs(t, t.TempDir(), from, nil)
	first := make(chan error, 1)
	go func() { first <- s.Ensure(t.Context()) }()
	<-from.entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Ensure(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want the cancellation", err)
	}
	close(from.release)
	if err := <-first; err == nil {
		t.Error("first call: no error")
	}
}

// blocked is a Source whose driver hangs.
type blocked struct{ entered, release chan struct{} }

func (b *blocked) ContainerEdits(context.Context) (cdi.Edits, error) {
	close(b.entered)
	<-b.release
	return cdi.Edits{}, errors.New("released")
}

func (b *blocked) PartitionEdits(context.Context, device.Partition) (specs.Device, error) {
	return specs.Device{}, errors.New("not called")
}

func (b *blocked) Changed() <-chan struct{} { return nil }

func BenchmarkEnsure(b *testing.B) {
	s := cdi.New(cdi.Options{Dir: b.TempDir(), Source: newSource(entry("GPU-a", "/dev/nvidia0", 0))})
	for b.Loop() {
		if err := s.Ensure(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
