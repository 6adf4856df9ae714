// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

// Await waits until the daemon is ready with the settings of this hash (Settings.Hash). It ends with an error when ctx does, or the
// directory goes. The agent calls it.
func Await(ctx context.Context, dir, hash string) (Ready, error) {
	var ready Ready
	err := watch(ctx, dir, func() (bool, error) {
		r, alive, err := Alive(dir)
		ready = r
		return alive && r.Hash == hash, err
	})
	if err != nil {
		return Ready{}, fmt.Errorf("wait for MPS daemon %s: %w", filepath.Base(dir), err)
	}
	return ready, nil
}

// lookAgain is how often a lock is checked: the kernel does not report its release.
const lookAgain = 50 * time.Millisecond

// Stop has the supervisor end its daemon, and not start another before Make is called, and waits until no daemon of the directory
// lives, whether its supervisor ended it or was killed. A directory that is not there has none. Idempotent. The agent calls it.
func Stop(ctx context.Context, dir string) error {
	if err := os.Remove(filepath.Join(dir, wantedFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("stop MPS daemon %s: %w", filepath.Base(dir), err)
	}
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	for {
		switch held, err := Held(dir); {
		case err != nil:
			return fmt.Errorf("stop MPS daemon %s: %w", filepath.Base(dir), err)
		case !held:
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for MPS daemon %s to end: %w", filepath.Base(dir), context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// Held reports whether a supervisor has a daemon of this directory, ready or not. The agent calls it.
func Held(dir string) (bool, error) {
	file, err := os.Open(filepath.Join(dir, lockFile))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer file.Close()
	return locked(file, unix.LOCK_SH)
}

// newWatcher is replaced by a test.
var newWatcher = fsnotify.NewWatcher

// watch calls done until it is, at once and whenever something changes in the directory. Where the kernel has no inotify instance left,
// of which all processes of a user share a few hundred, it looks every now and then.
func watch(ctx context.Context, dir string, done func() (bool, error)) error {
	// Mostly there is nothing to wait for, and then a watch is what takes longest.
	if over, err := done(); over || err != nil {
		return err
	}
	var events <-chan fsnotify.Event
	var problems <-chan error
	var tick <-chan time.Time
	watcher, err := newWatcher()
	if err == nil {
		defer watcher.Close()
		events, problems = watcher.Events, watcher.Errors
		err = watcher.Add(dir)
	}
	if err != nil {
		ticker := time.NewTicker(lookAgain)
		defer ticker.Stop()
		tick = ticker.C
	}
	for {
		if over, err := done(); over || err != nil {
			return err
		}
		if _, err := os.Stat(dir); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick:
		case <-events:
		case <-problems:
			// The queue overflowed, which is a reason to look.
		}
	}
}
