// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"path/filepath"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/filewatch"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// watchKubeletFiles reports when kubelet writes its device checkpoint or its record of claims, also after its directories were
// removed and created again.
func (r *Reconciler) watchKubeletFiles(ctx context.Context) *filewatch.Watcher {
	return filewatch.New(ctx, filewatch.Options{
		Dirs:     []string{r.KubeletDir, filepath.Dir(podstate.DeviceCheckpointPath(r.KubeletDir))},
		Interval: r.times.retry,
		Relevant: func(event fsnotify.Event) bool { return relevant(r.KubeletDir, event) },
	})
}

// relevant excludes most changes in kubelet's directory.
func relevant(kubeletDir string, event fsnotify.Event) bool {
	checkpoint := podstate.DeviceCheckpointPath(kubeletDir)
	switch event.Name {
	case checkpoint, filepath.Dir(checkpoint), podstate.ClaimStatePath(kubeletDir), kubeletDir:
		return event.Op != fsnotify.Chmod
	}
	return false
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
