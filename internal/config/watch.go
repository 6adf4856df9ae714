// SPDX-License-Identifier: Apache-2.0

package config

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
)

// newWatcher is replaced by a test.
var newWatcher = fsnotify.NewWatcher

// lookAgain is how often changed is called where the kernel tells of no changes.
var lookAgain = 10 * time.Second

// gather lets the several steps in which kubelet replaces a ConfigMap's files become one change.
const gather = 100 * time.Millisecond

// Watch calls changed whenever the configuration file may have changed, until ctx is done. It watches the file's directory: a
// ConfigMap's files are links through a link that is replaced, and editors replace files, too. Call it before reading. Where the kernel
// has no inotify instance or watch left, of which all processes of a user share a few, changed is called every now and then.
func Watch(ctx context.Context, file string, changed func()) error {
	dir := filepath.Dir(file)
	if _, err := os.Stat(dir); err != nil {
		return fmt.Errorf("watch node configuration: %w", err)
	}
	watcher, err := newWatcher()
	if err == nil {
		defer watcher.Close()
		err = watcher.Add(dir)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot watch the node configuration, looking at intervals only", "directory", dir, "interval", lookAgain)
		return look(ctx, changed)
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

func look(ctx context.Context, changed func()) error {
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	for {
		changed()
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
