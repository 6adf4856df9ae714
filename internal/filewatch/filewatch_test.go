// SPDX-License-Identifier: Apache-2.0

package filewatch

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

// soon is the interval of tests in which the watcher checks at intervals; never is that of the other tests.
const (
	soon  = 10 * time.Millisecond
	never = time.Hour
)

func newWatcher(t *testing.T, options Options) *Watcher {
	t.Helper()
	w := New(t.Context(), options)
	t.Cleanup(w.Close)
	return w
}

func write(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func mkdir(t *testing.T, path string) {
	t.Helper()
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
}

func expectReport(t *testing.T, w *Watcher, after string) {
	t.Helper()
	select {
	case <-w.C:
	case <-time.After(time.Minute):
		t.Fatalf("no report after %s", after)
	}
}

func expectNoReport(t *testing.T, w *Watcher, after string) {
	t.Helper()
	select {
	case <-w.C:
		t.Fatalf("report after %s", after)
	case <-time.After(100 * time.Millisecond):
	}
}

// drain discards the reports of the change before, which can be several.
func drain(w *Watcher) {
	for {
		select {
		case <-w.C:
		case <-time.After(50 * time.Millisecond):
			return
		}
	}
}

func TestReportsChangesInEachDirectory(t *testing.T) {
	one, two := t.TempDir(), t.TempDir()
	w := newWatcher(t, Options{Dirs: []string{one, two + "/"}, Interval: never})
	expectNoReport(t, w, "no change")
	write(t, filepath.Join(one, "file"))
	expectReport(t, w, "a file was created")
	drain(w)
	write(t, filepath.Join(two, "file"))
	expectReport(t, w, "a file was created in the second directory")
	drain(w)
	if err := os.Remove(filepath.Join(two, "file")); err != nil {
		t.Fatal(err)
	}
	expectReport(t, w, "a file was removed")
}

func TestMergesUnreadChanges(t *testing.T) {
	dir := t.TempDir()
	w := newWatcher(t, Options{Dirs: []string{dir}, Interval: never})
	for range 3 {
		write(t, filepath.Join(dir, "file"))
	}
	time.Sleep(50 * time.Millisecond)
	expectReport(t, w, "three changes")
	expectNoReport(t, w, "the merged report")
}

func TestRelevantFiltersChanges(t *testing.T) {
	dir := t.TempDir()
	w := newWatcher(t, Options{Dirs: []string{dir}, Interval: never, Relevant: func(event fsnotify.Event) bool {
		return filepath.Base(event.Name) == "file"
	}})
	write(t, filepath.Join(dir, "other"))
	expectNoReport(t, w, "an irrelevant change")
	write(t, filepath.Join(dir, "file"))
	expectReport(t, w, "a relevant change")
}

func TestSettleMergesABurst(t *testing.T) {
	dir := t.TempDir()
	w := newWatcher(t, Options{Dirs: []string{dir}, Interval: never, Settle: 200 * time.Millisecond})
	for range 5 {
		write(t, filepath.Join(dir, "file"))
		time.Sleep(5 * time.Millisecond)
	}
	expectReport(t, w, "a burst")
	expectNoReport(t, w, "the report of the burst")
}

func TestMissingDirectoryIsFoundAtTheInterval(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "late")
	w := newWatcher(t, Options{Dirs: []string{dir}, Interval: soon})
	expectNoReport(t, w, "a directory was missing")
	mkdir(t, dir)
	expectReport(t, w, "the directory was created")
	drain(w)
	write(t, filepath.Join(dir, "file"))
	expectReport(t, w, "a file was created in it")
}

func TestReplacedDirectoryIsWatchedAtOnceThroughItsParent(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "dir")
	mkdir(t, dir)
	w := newWatcher(t, Options{Dirs: []string{parent, dir}, Interval: never})
	for _, gone := range []func() error{
		func() error { return os.Remove(dir) },
		func() error { return os.Rename(dir, dir+".old") },
	} {
		if err := gone(); err != nil {
			t.Fatal(err)
		}
		expectReport(t, w, "the directory went away")
		drain(w)
		mkdir(t, dir)
		expectReport(t, w, "the directory was created again")
		drain(w)
		file := filepath.Join(dir, "file")
		write(t, file)
		expectReport(t, w, "a file was created in the new directory")
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		drain(w)
	}
}

func TestReplacedDirectoryIsWatchedAfterTheInterval(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dir")
	mkdir(t, dir)
	w := newWatcher(t, Options{Dirs: []string{dir}, Interval: soon})
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	expectReport(t, w, "the directory was removed")
	drain(w)
	mkdir(t, dir)
	expectReport(t, w, "the directory was created again")
	drain(w)
	write(t, filepath.Join(dir, "file"))
	expectReport(t, w, "a file was created in the new directory")
}

func TestWithoutInotifyReportsAtIntervals(t *testing.T) {
	t.Cleanup(func() { NewWatcher = fsnotify.NewWatcher })
	for name, exhausted := range map[string]func() (*fsnotify.Watcher, error){
		"no instances": func() (*fsnotify.Watcher, error) { return nil, unix.EMFILE },
		"no watches": func() (*fsnotify.Watcher, error) {
			closed, err := fsnotify.NewWatcher()
			if err == nil {
				err = closed.Close() // a closed watcher cannot add watches
			}
			return closed, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			NewWatcher = exhausted
			w := newWatcher(t, Options{Dirs: []string{t.TempDir()}, Interval: soon})
			for range 3 {
				expectReport(t, w, "an interval")
			}
			w.Close()
		})
	}
}

func TestUsesInotifyAsSoonAsAnInstanceIsFree(t *testing.T) {
	var attempts atomic.Int32
	NewWatcher = func() (*fsnotify.Watcher, error) {
		if attempts.Add(1) < 3 {
			return nil, unix.EMFILE
		}
		return fsnotify.NewWatcher()
	}
	t.Cleanup(func() { NewWatcher = fsnotify.NewWatcher })
	dir := t.TempDir()
	w := newWatcher(t, Options{Dirs: []string{dir}, Interval: soon})
	for attempts.Load() < 3 {
		expectReport(t, w, "an interval")
	}
	drain(w)
	expectNoReport(t, w, "inotify was available")
	write(t, filepath.Join(dir, "file"))
	expectReport(t, w, "a file was created")
	w.Close()
}

func TestCloseIsIdempotent(t *testing.T) {
	w := New(t.Context(), Options{Dirs: []string{t.TempDir()}, Interval: never})
	w.Close()
	w.Close()
}
