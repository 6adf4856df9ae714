// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Remove removes a daemon's directory. The agent calls it after Stop. It is idempotent. Clients may have written any number of files and
// levels of directories: Remove needs few file descriptors and returns an error when it takes too long (TestRemoveWhatClientsLeave).
func Remove(dir string) error {
	r := &removal{until: time.Now().Add(removalTimeout)}
	if err := r.remove(dir); err != nil {
		return fmt.Errorf("remove directory of MPS daemon %s: %w", filepath.Base(dir), err)
	}
	return nil
}

const (
	// removalTimeout is far longer than a removal usually takes. A retry continues where it stopped.
	removalTimeout = 5 * time.Second
	// removals is how many attempts there are: a supervisor that waits for the lock creates its file again.
	removals = 10
	// batch is how many names are read at a time.
	batch = 1024
)

// removal moves deep directories up into the one that it removes. So it needs no descriptor for each level, as os.RemoveAll does, and no
// long path.
type removal struct {
	top   *os.File
	until time.Time
	// moved numbers what was moved.
	moved int
}

func (r *removal) remove(dir string) (err error) {
	file, err := os.OpenFile(dir, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return os.Remove(dir)
	case err != nil:
		return err
	}
	r.top = file
	defer func() { err = errors.Join(err, file.Close()) }()
	for range removals {
		if err := r.empty(file); err != nil {
			return err
		}
		if err = os.Remove(dir); err == nil || !errors.Is(err, unix.ENOTEMPTY) {
			break
		}
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// empty removes the contents of a directory, also those that are created meanwhile.
func (r *removal) empty(dir *os.File) error {
	for {
		// A directory that changes while it is read may not list everything.
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return err
		}
		names, err := dir.Readdirnames(batch)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if len(names) == 0 {
			return nil
		}
		for _, name := range names {
			if time.Now().After(r.until) {
				return fmt.Errorf("it has more files than can be removed in %s", removalTimeout)
			}
			if err := r.unlink(dir, name); err != nil {
				return &os.PathError{Op: "remove", Path: name, Err: err}
			}
		}
	}
}

// unlink removes one name of a directory.
func (r *removal) unlink(dir *os.File, name string) error {
	at := int(dir.Fd())
	err := unix.Unlinkat(at, name, 0)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	dirErr := unix.Unlinkat(at, name, unix.AT_REMOVEDIR)
	switch dirErr {
	case nil, unix.ENOENT:
		return nil
	case unix.ENOTDIR:
		return err
	case unix.ENOTEMPTY, unix.EEXIST:
	default:
		return dirErr
	}
	if dir != r.top {
		return r.raise(at, name)
	}
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	below := os.NewFile(uintptr(fd), name)
	err = errors.Join(r.empty(below), below.Close())
	if err == nil {
		// What was created meanwhile is found when the directory is read again.
		if err = unix.Unlinkat(at, name, unix.AT_REMOVEDIR); err == unix.ENOTEMPTY || err == unix.EEXIST || err == unix.ENOENT {
			err = nil
		}
	}
	return err
}

// raise moves a directory that is not empty up into the one that is removed.
func (r *removal) raise(from int, name string) error {
	for {
		r.moved++
		switch err := unix.Renameat(from, name, int(r.top.Fd()), ".removed-"+strconv.Itoa(r.moved)); err {
		case nil, unix.ENOENT:
			return nil
		case unix.ENOTEMPTY, unix.EEXIST, unix.ENOTDIR: // left by an earlier attempt
			if time.Now().After(r.until) {
				return err
			}
		default:
			return err
		}
	}
}
