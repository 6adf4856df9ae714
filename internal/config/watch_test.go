// SPDX-License-Identifier: Apache-2.0

package config

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/filewatch"
)

// TestWatchConfigMap replaces a file as kubelet does: it writes a new directory, then replaces the symbolic link to it.
func TestWatchConfigMap(t *testing.T) {
	dir := t.TempDir()
	publish := func(name, content string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name, "config.yaml"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(name, filepath.Join(dir, "..data_tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	publish("..1", "first")
	file := filepath.Join(dir, "config.yaml")
	if err := os.Symlink("..data/config.yaml", file); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	seen, done := make(chan string, 100), make(chan error, 1)
	go func() {
		done <- Watch(ctx, file, func() {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Error(err)
			}
			select {
			case seen <- string(data):
			case <-ctx.Done():
			}
		})
	}()
	await := func(want string) {
		t.Helper()
		for {
			select {
			case got := <-seen:
				if got == want {
					return
				}
			case <-time.After(time.Minute):
				t.Fatalf("the content %q was not reported", want)
			}
		}
	}
	await("first")
	publish("..2", "second")
	await("second")
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestWatchMissingDirectory(t *testing.T) {
	if err := Watch(t.Context(), filepath.Join(t.TempDir(), "absent", "config.yaml"), func() {}); err == nil {
		t.Error("watches a directory that does not exist")
	}
}

func TestWatchWithoutInotify(t *testing.T) {
	interval := watchInterval
	watchInterval = 10 * time.Millisecond
	t.Cleanup(func() { filewatch.NewWatcher, watchInterval = fsnotify.NewWatcher, interval })
	filewatch.NewWatcher = func() (*fsnotify.Watcher, error) { return nil, unix.EMFILE }
	t.Run("ConfigMap", TestWatchConfigMap)
	t.Run("missing directory", TestWatchMissingDirectory)
	filewatch.NewWatcher = func() (*fsnotify.Watcher, error) {
		closed, err := fsnotify.NewWatcher()
		if err == nil {
			err = closed.Close() // a closed watcher cannot add watches
		}
		return closed, err
	}
	t.Run("no watches", TestWatchConfigMap)
}
