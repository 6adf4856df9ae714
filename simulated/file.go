// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// file is one file of a machine, at a path relative to the machine's directory: a device node where device is not nil, a
// symbolic link where target is not empty, a regular file otherwise. With keep, whatever is there stays.
type file struct {
	path    string
	mode    os.FileMode
	content []byte
	target  string
	device  *deviceNumber
	keep    bool
}

type deviceNumber struct{ major, minor uint32 }

func (d deviceNumber) rdev() uint64 { return unix.Mkdev(d.major, d.minor) }

// ensure makes the file what it should be, replacing another in one step.
func (f file) ensure(dir string) error {
	path := filepath.Join(dir, f.path)
	if f.right(path) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if f.target == "" && f.device == nil {
		return writeAtomically(path, f.content, f.mode)
	}
	beside := filepath.Join(filepath.Dir(path), fmt.Sprintf(".%s-%d", filepath.Base(path), os.Getpid()))
	if err := f.make(beside); err != nil {
		return fmt.Errorf("make %s: %w", path, err)
	}
	if err := os.Rename(beside, path); err != nil {
		return errors.Join(err, os.Remove(beside))
	}
	return nil
}

func (f file) right(path string) bool {
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		return false
	case f.keep:
		return true
	case f.target != "":
		target, err := os.Readlink(path)
		return err == nil && target == f.target
	case f.device != nil:
		var stat unix.Stat_t
		err := unix.Lstat(path, &stat)
		return err == nil && stat.Mode == unix.S_IFCHR|uint32(f.mode.Perm()) && stat.Rdev == f.device.rdev()
	case !info.Mode().IsRegular() || info.Mode().Perm() != f.mode:
		return false
	}
	content, err := os.ReadFile(path)
	return err == nil && bytes.Equal(content, f.content)
}

func (f file) make(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if f.target != "" {
		return os.Symlink(f.target, path)
	}
	if err := unix.Mknod(path, unix.S_IFCHR|uint32(f.mode.Perm()), int(f.device.rdev())); err != nil {
		return fmt.Errorf("make device node %d:%d (this needs root and CAP_MKNOD): %w", f.device.major, f.device.minor, err)
	}
	// mknod heeds the umask.
	return os.Chmod(path, f.mode.Perm())
}
