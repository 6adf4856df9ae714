// SPDX-License-Identifier: Apache-2.0

package config

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/tandem-gpu/tandem/internal/filewatch"
)

var (
	// watchInterval is how often Watch reports a change where inotify is exhausted.
	watchInterval = 10 * time.Second
	// settle merges the steps in which kubelet replaces the files of a ConfigMap.
	settle = 100 * time.Millisecond
)

// Watch calls changed at once and whenever the configuration file may have changed, until ctx is done. It watches the file's
// directory, because kubelet replaces the files of a ConfigMap through a symbolic link.
func Watch(ctx context.Context, file string, changed func()) error {
	dir := filepath.Dir(file)
	if _, err := os.Stat(dir); err != nil {
		return fmt.Errorf("watch node configuration: %w", err)
	}
	watcher := filewatch.New(ctx, filewatch.Options{Dirs: []string{dir}, Interval: watchInterval, Settle: settle})
	defer watcher.Close()
	for {
		changed()
		select {
		case <-ctx.Done():
			return nil
		case <-watcher.C:
		}
	}
}
