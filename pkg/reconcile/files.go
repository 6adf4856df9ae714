// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// kubeletFiles notices when kubelet writes its device checkpoint or its record of claims, also after its directories were
// removed and made again.
type kubeletFiles struct {
	dir string
	// changed gets a value after a change that matters.
	changed chan struct{}
	// watcher is nil while the kernel has no inotify instance left, of which all processes of a user share a few.
	watcher *fsnotify.Watcher
	running sync.WaitGroup
}

// newWatcher is replaced by a test.
var newWatcher = fsnotify.NewWatcher

// watch makes sure that what is there is watched, until ctx is done or close. Cheap when it is. An error means that something cannot be for now.
// It is not safe for concurrent use.
func (f *kubeletFiles) watch(ctx context.Context) error {
	if f.watcher == nil {
		watcher, err := newWatcher()
		if err != nil {
			return fmt.Errorf("watch kubelet's state in %s: %w", f.dir, err)
		}
		f.watcher = watcher
		f.running.Go(func() { f.run(ctx) })
	}
	for _, dir := range []string{f.dir, filepath.Dir(podstate.DeviceCheckpointPath(f.dir))} {
		if err := f.watcher.Add(dir); err != nil {
			return fmt.Errorf("watch kubelet's state in %s: %w", dir, err)
		}
	}
	return nil
}

// matters leaves out most of what happens in kubelet's directory.
func (f *kubeletFiles) matters(event fsnotify.Event) bool {
	checkpoint := podstate.DeviceCheckpointPath(f.dir)
	switch event.Name {
	case checkpoint, podstate.ClaimStatePath(f.dir):
		return event.Op != fsnotify.Chmod
	case filepath.Dir(checkpoint), f.dir:
		return event.Has(fsnotify.Create) || event.Has(fsnotify.Remove) || event.Has(fsnotify.Rename)
	}
	return false
}

// close ends the watch.
func (f *kubeletFiles) close() {
	if f.watcher != nil {
		_ = f.watcher.Close() // it only releases memory and a descriptor
	}
	f.running.Wait()
}

func (f *kubeletFiles) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case event, ok := <-f.watcher.Events:
			if !ok {
				return
			}
			if !f.matters(event) {
				continue
			}
		case err, ok := <-f.watcher.Errors:
			if !ok {
				return
			}
			// Events may have been lost.
			klog.FromContext(ctx).Error(err, "Watching kubelet's state")
		}
		signal(f.changed)
	}
}

// complaint logs an error once, until it changes.
type complaint struct{ message, said string }

func (c *complaint) say(ctx context.Context, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if err != nil && text != c.said {
		klog.FromContext(ctx).Error(err, c.message)
	}
	c.said = text
}
