// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/tandem-gpu/tandem/internal/filewatch"
)

// Await waits until the daemon is ready with the settings of this hash (Settings.Hash). It returns an error when ctx is done or the
// directory is removed. The agent calls it.
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

// lockInterval is how often a lock is checked: the kernel does not report its release.
const lockInterval = 50 * time.Millisecond

// watch calls done now and after each change in the directory, until it returns true or an error.
func watch(ctx context.Context, dir string, done func() (bool, error)) error {
	// In most cases there is nothing to wait for, and a watch would take longest.
	if over, err := done(); over || err != nil {
		return err
	}
	watcher := filewatch.New(ctx, filewatch.Options{Dirs: []string{dir}, Interval: lockInterval})
	defer watcher.Close()
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
		case <-watcher.C:
		}
	}
}
