// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/filewatch"
)

// errDirectoryGone ends Run: a mount of a removed directory never shows its successor. A new container does.
var errDirectoryGone = errors.New("kubelet's device-plugins directory was removed")

// directory reports changes in kubelet's device-plugins directory. Its readers read the files: events get lost, files do not.
type directory struct {
	path    string
	changes broadcast.Signal
}

// checkEvery is how often the directory is checked while inotify fails.
const checkEvery = time.Second

// run reports changes until ctx is done.
func (d *directory) run(ctx context.Context) error {
	watcher := filewatch.New(ctx, filewatch.Options{Dirs: []string{d.path}, Interval: checkEvery})
	defer watcher.Close()
	for {
		if gone(d.path) {
			return fmt.Errorf("%s: %w", d.path, errDirectoryGone)
		}
		d.changes.Notify()
		select {
		case <-ctx.Done():
			return nil
		case <-watcher.C:
		}
	}
}

// changed returns a channel that is closed at the next change. Take it before reading.
func (d *directory) changed() <-chan struct{} { return d.changes.Changed() }

// gone reports whether the directory was removed. A mount of a removed directory can still be read.
func gone(path string) bool {
	var stat syscall.Stat_t
	err := syscall.Stat(path, &stat)
	return err != nil || stat.Nlink == 0
}

// kubeletSocket is where kubelet's device manager takes registrations.
func (d *directory) kubeletSocket() string { return filepath.Join(d.path, "kubelet.sock") }

// fileID distinguishes a file from a later one of the same name. The zero value is no file.
type fileID struct {
	device, inode uint64
	// A file system may reuse an inode at once.
	modified syscall.Timespec
}

func identify(path string) (fileID, error) {
	var stat syscall.Stat_t
	if err := syscall.Lstat(path, &stat); err != nil {
		return fileID{}, &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	return fileID{device: uint64(stat.Dev), inode: stat.Ino, modified: stat.Mtim}, nil
}

// is reports whether the file under the path is still this one.
func (id fileID) is(path string) bool {
	now, err := identify(path)
	return err == nil && now == id
}
