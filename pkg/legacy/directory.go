// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
)

// errDirectoryGone ends Run: a mount of a directory that was removed never shows its successor, so only a new container
// can help.
var errDirectoryGone = errors.New("kubelet's device-plugins directory was removed")

// directory tells that something happened in kubelet's device-plugins directory. What it was is for the reader to find
// out from the files: events get lost, files do not.
type directory struct {
	path string
	// watcher is nil while the kernel has no inotify instance left, of which all processes of a user share a few.
	watcher *fsnotify.Watcher

	mu   sync.Mutex
	next chan struct{}
}

func openDirectory(ctx context.Context, path string) (*directory, error) {
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("open kubelet's device-plugins directory: %w", err)
	}
	d := &directory{path: path, next: make(chan struct{})}
	if err := d.watch(); err != nil {
		klog.FromContext(ctx).Error(err, "Looking at intervals only until that is possible", "interval", lookAgain)
	}
	return d, nil
}

// newWatcher is replaced by a test.
var newWatcher = fsnotify.NewWatcher

// lookAgain is how often the directory is checked while it cannot be watched.
const lookAgain = time.Second

func (d *directory) watch() error {
	watcher, err := newWatcher()
	if err != nil {
		return fmt.Errorf("watch kubelet's device-plugins directory %s: %w", d.path, err)
	}
	if err := watcher.Add(d.path); err != nil {
		return errors.Join(fmt.Errorf("watch kubelet's device-plugins directory %s: %w", d.path, err), watcher.Close())
	}
	d.watcher = watcher
	return nil
}

// changed returns a channel that is closed at the next event; take it before looking.
func (d *directory) changed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.next
}

func (d *directory) announce() {
	d.mu.Lock()
	defer d.mu.Unlock()
	close(d.next)
	d.next = make(chan struct{})
}

// run passes events on until ctx is done.
func (d *directory) run(ctx context.Context) (err error) {
	defer func() {
		if d.watcher != nil {
			err = errors.Join(err, d.watcher.Close())
		}
	}()
	for {
		var events <-chan fsnotify.Event
		var problems <-chan error
		var tick <-chan time.Time
		if d.watcher == nil {
			tick = time.After(lookAgain)
		} else {
			events, problems = d.watcher.Events, d.watcher.Errors
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick:
			_ = d.watch() // that it is not possible has been said
			if gone(d.path) {
				return fmt.Errorf("%s: %w", d.path, errDirectoryGone)
			}
			d.announce()
		case event := <-events:
			if filepath.Clean(event.Name) == filepath.Clean(d.path) && event.Has(fsnotify.Remove|fsnotify.Rename) {
				return fmt.Errorf("%s: %w", d.path, errDirectoryGone)
			}
			d.announce()
		case <-problems:
			// The queue overflowed, which is a reason to look too.
			d.announce()
		}
	}
}

// gone is true also of a mounted directory that was removed, which can be looked at still.
func gone(path string) bool {
	var stat syscall.Stat_t
	err := syscall.Stat(path, &stat)
	return err != nil || stat.Nlink == 0
}

// kubeletSocket is where kubelet's device manager takes registrations.
func (d *directory) kubeletSocket() string { return filepath.Join(d.path, "kubelet.sock") }

// fileID tells a file from another that came later under the same name. The zero value is no file.
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
