// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// harm makes a directory useless for new files.
type harm struct {
	do, undo func(t *testing.T, dir string)
	says     string
}

// mount puts a small file system in the directory's place.
func mount(t *testing.T, dir string) {
	t.Helper()
	check(t, os.MkdirAll(dir, 0o755))
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("a full or read-only directory needs the right to mount a tmpfs: %v", err)
	}
	t.Cleanup(func() { check(t, unix.Unmount(dir, unix.MNT_DETACH)) })
}

// mountAtOnce does so with a file system that was prepared before: Run may write at any time.
func mountAtOnce(t *testing.T, dir string, prepare func(t *testing.T, dir string)) {
	t.Helper()
	aside := t.TempDir()
	mount(t, aside)
	prepare(t, aside)
	check(t, os.MkdirAll(dir, 0o755))
	check(t, unix.Mount(aside, dir, "", unix.MS_BIND, ""))
	t.Cleanup(func() { check(t, unix.Unmount(dir, unix.MNT_DETACH)) })
}

func remount(flags uintptr) func(t *testing.T, dir string) {
	return func(t *testing.T, dir string) {
		t.Helper()
		check(t, unix.Mount("", dir, "", unix.MS_REMOUNT|flags, ""))
	}
}

func fill(t *testing.T, dir string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "filler"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}

func empty(t *testing.T, dir string) {
	t.Helper()
	check(t, os.Remove(filepath.Join(dir, "filler")))
}

var harms = map[string]harm{
	"a file in its place": {
		func(t *testing.T, dir string) {
			t.Helper()
			check(t, os.MkdirAll(dir, 0o755))
			file := filepath.Join(t.TempDir(), "file")
			check(t, os.WriteFile(file, nil, 0o600))
			check(t, unix.Renameat2(unix.AT_FDCWD, file, unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE))
		},
		func(t *testing.T, dir string) { t.Helper(); check(t, os.Remove(dir)) },
		"not a directory",
	},
	"read-only": {
		func(t *testing.T, dir string) { t.Helper(); mountAtOnce(t, dir, remount(unix.MS_RDONLY)) },
		remount(0), "read-only file system",
	},
	"full": {
		func(t *testing.T, dir string) { t.Helper(); mountAtOnce(t, dir, fill) },
		empty, "no space left on device",
	},
}

// A device has a problem until its entry is on disk, and again when the files are damaged and cannot be restored. The problem names the
// path, and does not change while its cause does not.
func TestProblem(t *testing.T) {
	for name, harm := range harms {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "cdi")
			from := newSource(entry("GPU-a", "/dev/nvidia0", 0))
			from.edits.Failed = map[string]error{"GPU-b": errors.New("/dev/nvidia1 does not exist")}
			s := newSpecs(t, dir, from, nil)
			if s.Problem("GPU-a") == nil {
				t.Error("no problem before the first write")
			}
			harm.do(t, dir)
			t.Cleanup(run(t, s))
			if !s.Await(t.Context()) {
				t.Fatal(t.Context().Err())
			}
			wanted := func() string {
				t.Helper()
				err := s.Problem("GPU-a")
				if err == nil || !strings.Contains(err.Error(), harm.says) || !strings.Contains(err.Error(), dir) {
					t.Fatalf("problem %v, want %q and the path", err, harm.says)
				}
				return err.Error()
			}
			first := wanted()
			// A partition that a claim asks for could not be given to its container either.
			if err := s.Unwritable(); err == nil || !strings.Contains(err.Error(), harm.says) {
				t.Errorf("unwritable: %v, want %q", err, harm.says)
			}
			calls := from.count()
			if err := s.Ensure(t.Context(), "GPU-a"); err == nil || err.Error() != first {
				t.Errorf("a second attempt fails with %v, the first with %s: it would be logged again", err, first)
			}
			if from.count() > calls+1 {
				t.Errorf("the source was asked %d times to repeat a write", from.count()-calls)
			}
			harm.undo(t, dir)
			await(t, func() bool { return s.Problem("GPU-a") == nil && s.Unwritable() == nil })
			if got := resolves(t, dir); len(got) != 1 {
				t.Errorf("without a problem a runtime finds %v", got)
			}
			if err := s.Problem("GPU-b"); err == nil || !strings.Contains(err.Error(), "/dev/nvidia1 does not exist") {
				t.Errorf("problem of a device without edits: %v", err)
			}
			check(t, os.Remove(s.Path()))
			harm.do(t, dir)
			s.Verify()
			await(t, func() bool { return s.Problem("GPU-a") != nil })
			wanted()
			if !s.Has("GPU-a") {
				t.Error("the entry is forgotten: Allocate would fail a pod that kubelet admits now")
			}
			harm.undo(t, dir)
			await(t, func() bool { return s.Problem("GPU-a") == nil })
		})
	}
}

// Someone removes the directory at run time: Verify makes Run restore it at once.
func TestVerifyRestores(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	s := cdi.New(cdi.Options{Dir: dir, Source: newSource(entry("GPU-a", "/dev/nvidia0", 0)), Interval: 1 << 40})
	t.Cleanup(run(t, s))
	s.Await(t.Context())
	for range 3 {
		check(t, os.RemoveAll(dir))
		s.Verify()
		await(t, func() bool { _, err := os.Stat(s.Path()); return err == nil })
	}
	if err := s.Problem("GPU-a"); err != nil {
		t.Error(err)
	}
}

// The agent has the host's directory mounted. If someone removes that directory, the mount is an empty shell, and only a new container has
// the new one.
func TestRemovedMount(t *testing.T) {
	host, dir := t.TempDir()+"/cdi", t.TempDir()
	mount(t, filepath.Dir(host))
	check(t, os.Mkdir(host, 0o755))
	check(t, unix.Mount(host, dir, "", unix.MS_BIND, ""))
	t.Cleanup(func() { check(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	s := newSpecs(t, dir, newSource(entry("GPU-a", "/dev/nvidia0", 0)), nil)
	done := make(chan error, 1)
	go func() { done <- s.Run(t.Context()) }()
	s.Await(t.Context())
	check(t, os.RemoveAll(host))
	if err := <-done; err == nil || !strings.Contains(err.Error(), "was removed") {
		t.Errorf("Run: %v", err)
	}
	if s.Problem("GPU-a") == nil {
		t.Error("the device has no problem")
	}
}

// The files of the agent before count until this one has written its own, also where it cannot.
func TestEarlierSpecInAReadOnlyDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	mount(t, dir)
	ensure(t, newSpecs(t, dir, newSource(entry("GPU-a", "/dev/nvidia0", 0)), nil))
	remount(unix.MS_RDONLY)(t, dir)
	s := newSpecs(t, dir, newSource(entry("GPU-a", "/dev/nvidia0", 0), entry("GPU-b", "/dev/nvidia1", 1)), nil)
	check(t, s.Load())
	t.Cleanup(run(t, s))
	s.Await(t.Context())
	if err := s.Problem("GPU-a"); err != nil {
		t.Errorf("the entry is on disk: %v", err)
	}
	if s.Problem("GPU-b") == nil {
		t.Error("the entry of a new GPU is not on disk")
	}
	remount(0)(t, dir)
	await(t, func() bool { return s.Problem("GPU-b") == nil })
}

// A missing hook program concerns all devices.
func TestProblemOfTheHook(t *testing.T) {
	source, target := filepath.Join(t.TempDir(), "source"), filepath.Join(t.TempDir(), "plugins/hook")
	s := newSpecs(t, t.TempDir(), newSource(entry("GPU-a", "/dev/nvidia0", 0)), cdi.NewHook(source, target))
	t.Cleanup(run(t, s))
	s.Await(t.Context())
	if err := s.Problem("GPU-a"); err == nil || !strings.Contains(err.Error(), source) {
		t.Errorf("problem %v", err)
	}
	if err := s.Unwritable(); err == nil || !strings.Contains(err.Error(), source) {
		t.Errorf("unwritable: %v", err)
	}
	check(t, os.WriteFile(source, []byte("hook"), 0o755))
	await(t, func() bool { return s.Problem("GPU-a") == nil && s.Unwritable() == nil })
	check(t, os.Remove(source))
	check(t, os.Remove(target))
	await(t, func() bool { return s.Problem("GPU-a") != nil })
}

// A new partition needs a new file.
func TestUnwritable(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	mount(t, dir)
	s := newSpecs(t, dir, newSource(entry("GPU-a", "/dev/nvidia0", 0)), nil)
	t.Cleanup(run(t, s))
	s.Await(t.Context())
	fill(t, dir)
	if err := s.Add(t.Context(), device.Partition{UUID: "MIG-1"}); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if !errors.Is(s.Unwritable(), unix.ENOSPC) {
		t.Errorf("unwritable: %v", s.Unwritable())
	}
	if err := s.Problem("GPU-a"); err != nil {
		t.Errorf("the GPU's entry is on disk: %v", err)
	}
	watcher, err := fsnotify.NewWatcher()
	check(t, err)
	check(t, watcher.Add(dir))
	named := make(chan bool)
	go func() {
		found := false
		for event := range watcher.Events {
			found = found || filepath.Ext(event.Name) == ".json"
		}
		named <- found
	}()
	empty(t, dir)
	await(t, func() bool { return s.Unwritable() == nil })
	if left, err := filepath.Glob(filepath.Join(dir, "*attempt*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	check(t, watcher.Close())
	if <-named {
		t.Error("the attempt has a name that runtimes read")
	}
	check(t, s.Add(t.Context(), device.Partition{UUID: "MIG-1"}))
}
