// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
)

// traces is what of the driver can be seen in the file system: when it differs, the driver was removed, upgraded or
// loaded anew, or device nodes came, went or changed their numbers.
type traces struct {
	library, module, nodes string
}

func (o Options) traces(l layout) traces {
	t := traces{library: "absent", module: o.moduleVersion()}
	if info, err := os.Stat(l.library); err == nil {
		t.library = fmt.Sprintf("%s %d %s", l.library, info.Size(), info.ModTime())
		if sys, ok := info.Sys().(*syscall.Stat_t); ok {
			t.library += fmt.Sprintf(" %d:%d", sys.Dev, sys.Ino)
		}
	}
	if now, err := o.locate(); err == nil && (now.library != l.library || now.devRoot != l.devRoot) {
		t.library = "moved"
	}
	var nodes strings.Builder
	for _, node := range deviceNodes(o.onHost(l.devRoot)) {
		if info, err := os.Lstat(node); err == nil {
			if sys, ok := info.Sys().(*syscall.Stat_t); ok {
				fmt.Fprintf(&nodes, "%s=%x ", filepath.Base(node), sys.Rdev)
			}
		}
	}
	t.nodes = nodes.String()
	return t
}

// settle is how long after a change nothing more must happen: a driver installs many files.
const settle = 200 * time.Millisecond

// watch reports, beyond the regular scans, when something of the driver comes or goes. Where the kernel gives no watch, the
// regular scans have to do.
func (n *Node) watch(ctx context.Context) (kicks <-chan struct{}, stop func()) {
	logger := klog.FromContext(ctx)
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		logger.V(2).Info("No file notifications, only regular scans", "reason", err.Error())
		return nil, func() {}
	}
	n.scanning.Lock()
	dev := filepath.Join(n.options.onHost(n.layout.devRoot), "dev")
	// The last has nodes come and go with partitions.
	dirs := []string{dev, filepath.Dir(n.layout.library), filepath.Join(dev, "nvidia-caps")}
	n.scanning.Unlock()
	for _, dir := range dirs {
		if err := watcher.Add(dir); err != nil {
			logger.V(2).Info("Directory cannot be watched, only scanned", "path", dir, "reason", err.Error())
		}
	}
	out, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		pump(ctx, watcher, out)
	}()
	return out, func() {
		_ = watcher.Close()
		<-done
	}
}

// pump passes on one kick for a burst of events that concern NVIDIA's files.
func pump(ctx context.Context, watcher *fsnotify.Watcher, kicks chan<- struct{}) {
	timer := time.NewTimer(settle)
	timer.Stop()
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case event, ok := <-watcher.Events:
			if !ok {
				return
			}
			name := filepath.Base(event.Name)
			if strings.HasPrefix(name, "nvidia") || strings.HasPrefix(name, "libnvidia-ml.so") {
				timer.Reset(settle)
			}
		case _, ok := <-watcher.Errors:
			if !ok {
				return
			}
			timer.Reset(settle)
		case <-timer.C:
			select {
			case kicks <- struct{}{}:
			case <-ctx.Done():
				return
			}
		}
	}
}
