// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
)

// socketWatch tells when something happened in the two directories with sockets. It may miss things (inotify can run out),
// so await has an interval too.
type socketWatch struct {
	watcher *fsnotify.Watcher
	events  <-chan fsnotify.Event
	// errors says that events were lost, which is reason enough to look.
	errors <-chan error
}

func (d *Driver) watchSockets(ctx context.Context) socketWatch {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		klog.FromContext(ctx).Info("Cannot watch socket directories, looking at intervals only", "interval", d.ForeignInterval, "err", err)
		return socketWatch{}
	}
	for _, dir := range []string{d.registryDir(), d.pluginDir()} {
		if err := watcher.Add(dir); err != nil {
			klog.FromContext(ctx).Info("Cannot watch socket directory, looking at intervals only", "directory", dir, "interval", d.ForeignInterval, "err", err)
		}
	}
	return socketWatch{watcher: watcher, events: watcher.Events, errors: watcher.Errors}
}

func (w socketWatch) close() {
	if w.watcher != nil {
		_ = w.watcher.Close() // it only releases memory and a descriptor
	}
}

// await returns true after a change of a file or the interval, and false when ctx is done.
func (w socketWatch) await(ctx context.Context, interval time.Duration) bool {
	timer := time.NewTimer(interval)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
	case <-w.events:
	case <-w.errors:
	}
	return true
}
