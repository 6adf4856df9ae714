// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
)

// ownedFile is a file that must stay as we wrote it. Whether it did is one stat: a file that was replaced, truncated or
// edited in place has another inode, size, mtime or ctime (ctime cannot be set back).
type ownedFile struct {
	path string
	seen atomic.Pointer[stamp]
}

type stamp struct {
	dev, ino     uint64
	size         int64
	mtime, ctime syscall.Timespec
	mode         fs.FileMode
}

func stampOf(path string) (stamp, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return stamp{}, err
	}
	s := stamp{size: info.Size(), mode: info.Mode()}
	if sys, ok := info.Sys().(*syscall.Stat_t); ok {
		s.dev, s.ino, s.mtime, s.ctime = uint64(sys.Dev), sys.Ino, sys.Mtim, sys.Ctim
	}
	return s, nil
}

// intact reports whether the file is the one that was last written or accepted. Safe for concurrent use.
func (f *ownedFile) intact() bool {
	want := f.seen.Load()
	if want == nil {
		return false
	}
	got, err := stampOf(f.path)
	return err == nil && got == *want
}

// accept takes the file as it is on disk for the one that should be there.
func (f *ownedFile) accept() error {
	s, err := stampOf(f.path)
	if err != nil {
		return err
	}
	f.seen.Store(&s)
	return nil
}

// replace puts data in the file's place, all or nothing. Before the rename check is given the path of the complete new
// file; its error leaves the old file as it is.
func (f *ownedFile) replace(data []byte, mode fs.FileMode, check func(path string) error) (err error) {
	dir := filepath.Dir(f.path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("create directory of %s: %w", f.path, err)
	}
	tmp, err := os.CreateTemp(dir, f.tempPattern())
	if err != nil {
		return fmt.Errorf("create temporary file for %s: %w", f.path, err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp.Name())
		}
	}()
	if err := fill(tmp, data, mode); err != nil {
		return fmt.Errorf("write %s: %w", tmp.Name(), err)
	}
	if err := check(tmp.Name()); err != nil {
		return err
	}
	if err := os.Rename(tmp.Name(), f.path); err != nil {
		return fmt.Errorf("put %s in place: %w", f.path, err)
	}
	if err := f.accept(); err != nil {
		// Somebody was quick to remove it: it is as gone as a moment later.
		f.seen.Store(nil)
	}
	return nil
}

// fill writes, syncs and closes: a crash right after the rename must not leave an empty file under the final name.
func fill(tmp *os.File, data []byte, mode fs.FileMode) error {
	_, err := tmp.Write(data)
	if err == nil {
		err = tmp.Chmod(mode)
	}
	if err == nil {
		err = tmp.Sync()
	}
	if closeErr := tmp.Close(); err == nil {
		err = closeErr
	}
	return err
}

// tempPattern starts with a dot and does not end in .json or .yaml, so that no reader of the directory takes an unfinished
// file for a spec.
func (f *ownedFile) tempPattern() string { return "." + filepath.Base(f.path) + ".*.tmp" }

// removeTemporaries deletes what a crash between create and rename left behind.
func (f *ownedFile) removeTemporaries() error {
	leftovers, err := filepath.Glob(filepath.Join(filepath.Dir(f.path), f.tempPattern()))
	if err != nil {
		return fmt.Errorf("look for leftovers of %s: %w", f.path, err)
	}
	for _, path := range leftovers {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("remove leftover: %w", err)
		}
	}
	return nil
}
