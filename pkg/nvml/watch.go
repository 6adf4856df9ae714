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

	"github.com/tandem-gpu/tandem/internal/filewatch"
)

// traces are the driver's traces in the file system. They change when the driver is removed, upgraded or loaded again, or when
// device nodes come, go or change their numbers.
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

// settle merges changes: a driver installs many files.
const settle = 200 * time.Millisecond

// watch reports changes of the driver's files and device nodes between the regular scans.
func (n *Node) watch(ctx context.Context) *filewatch.Watcher {
	n.scanning.Lock()
	defer n.scanning.Unlock()
	dev := filepath.Join(n.options.onHost(n.layout.devRoot), "dev")
	return filewatch.New(ctx, filewatch.Options{
		// Nodes come and go with partitions in the last one.
		Dirs:     []string{dev, filepath.Dir(n.layout.library), filepath.Join(dev, "nvidia-caps")},
		Interval: n.options.Interval, Settle: settle,
		Relevant: func(event fsnotify.Event) bool {
			name := filepath.Base(event.Name)
			return strings.HasPrefix(name, "nvidia") || strings.HasPrefix(name, "libnvidia-ml.so")
		},
	})
}
