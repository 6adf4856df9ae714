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

// Remove removes a daemon's directory. The supervisor, if there is one, ends with it. Idempotent. The agent calls it after Stop.
// Clients have written to it, however much and however deep: it takes a few file descriptors, and is an error when it takes too
// long.
func Remove(dir string) error {
	r := &removal{until: time.Now().Add(removalPatience)}
	if err := r.remove(dir); err != nil {
		return fmt.Errorf("remove directory of MPS daemon %s: %w", filepath.Base(dir), err)
	}
	return nil
}

const (
	// removalPatience is far longer than the removal of what a daemon and its clients leave. A retry continues where it stopped.
	removalPatience = 5 * time.Second
	// removals are how often it is tried: a supervisor that waits for its turn makes the lock's file anew, every now and then.
	removals = 10
	// batch is how many names are read at a time.
	batch = 1024
)

// removal moves what is deep into the directory that is removed itself, and so needs no descriptor for each level, as
// os.RemoveAll does, and no long path.
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
		return os.Remove(dir) // whoever made that
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

// empty removes what is in a directory, and for a while what comes into it meanwhile.
func (r *removal) empty(dir *os.File) error {
	for {
		// What changes while it is read may be left out.
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
				return fmt.Errorf("there is so much in it that it takes more than %s", removalPatience)
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
		// What has come meanwhile is there when the directory is read again.
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
