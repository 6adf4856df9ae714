// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/evidence"
)

// kubeletFiles notices when kubelet writes its device checkpoint or its record of claims, also after its directories were
// removed and made again.
type kubeletFiles struct {
	*fsnotify.Watcher
	dir string
	// changed gets a value after a change that matters.
	changed chan struct{}
}

// watch makes sure that what is there is watched. Cheap when it is. An error means that something cannot be for now.
func (f *kubeletFiles) watch() error {
	for _, dir := range []string{f.dir, filepath.Dir(evidence.DeviceCheckpointPath(f.dir))} {
		if err := f.Add(dir); err != nil {
			return fmt.Errorf("watch kubelet's state in %s: %w", dir, err)
		}
	}
	return nil
}

// matters leaves out most of what happens in kubelet's directory.
func (f *kubeletFiles) matters(event fsnotify.Event) bool {
	checkpoint := evidence.DeviceCheckpointPath(f.dir)
	switch event.Name {
	case checkpoint, evidence.ClaimStatePath(f.dir):
		return event.Op != fsnotify.Chmod
	case filepath.Dir(checkpoint), f.dir:
		return event.Has(fsnotify.Create) || event.Has(fsnotify.Remove) || event.Has(fsnotify.Rename)
	}
	return false
}

func (f *kubeletFiles) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case event, ok := <-f.Events:
			if !ok {
				return
			}
			if !f.matters(event) {
				continue
			}
		case err, ok := <-f.Errors:
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
