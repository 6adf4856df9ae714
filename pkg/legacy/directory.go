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

	"github.com/fsnotify/fsnotify"
)

// errDirectoryGone ends Run: a mount of a directory that was removed never shows its successor, so only a new container
// can help.
var errDirectoryGone = errors.New("kubelet's device-plugins directory was removed")

// directory tells that something happened in kubelet's device-plugins directory. What it was is for the reader to find
// out from the files: events get lost, files do not.
type directory struct {
	path    string
	watcher *fsnotify.Watcher

	mu   sync.Mutex
	next chan struct{}
}

func openDirectory(path string) (*directory, error) {
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("open kubelet's device-plugins directory: %w", err)
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch kubelet's device-plugins directory: %w", err)
	}
	if err := watcher.Add(path); err != nil {
		return nil, errors.Join(fmt.Errorf("watch kubelet's device-plugins directory %s: %w", path, err), watcher.Close())
	}
	return &directory{path: path, watcher: watcher, next: make(chan struct{})}, nil
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
	defer func() { err = errors.Join(err, d.watcher.Close()) }()
	for {
		select {
		case <-ctx.Done():
			return nil
		case event := <-d.watcher.Events:
			if filepath.Clean(event.Name) == filepath.Clean(d.path) && event.Has(fsnotify.Remove|fsnotify.Rename) {
				return fmt.Errorf("%s: %w", d.path, errDirectoryGone)
			}
			d.announce()
		case <-d.watcher.Errors:
			// The queue overflowed, which is a reason to look too.
			d.announce()
		}
	}
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
