// SPDX-License-Identifier: Apache-2.0

package config

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// gather lets the several steps in which kubelet replaces a ConfigMap's files become one change.
const gather = 100 * time.Millisecond

// Watch calls changed whenever the configuration file may have changed, until ctx is done. It watches the file's directory: a
// ConfigMap's files are links through a link that is replaced, and editors replace files, too. Call it before reading.
func Watch(ctx context.Context, file string, changed func()) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch node configuration: %w", err)
	}
	defer watcher.Close()
	if err := watcher.Add(filepath.Dir(file)); err != nil {
		return fmt.Errorf("watch node configuration: %w", err)
	}
	changed()
	var due <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case _, open := <-watcher.Events:
			if !open {
				return errors.New("watch node configuration: the watch has ended")
			}
			if due == nil {
				due = time.After(gather)
			}
		case <-watcher.Errors:
			// Events were lost, so any may have been.
			due = time.After(gather)
		case <-due:
			due = nil
			changed()
		}
	}
}
