// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// removalTimeout is far longer than a removal usually takes. A retry continues where it stopped.
	removalTimeout = 5 * time.Second
	// batch is how many names are read at a time, so that the deadline is checked often.
	batch = 128
)

// Remove removes a daemon's directory. The agent calls it after Stop. It is idempotent. Clients may have written any number of files and
// levels of directories, so it moves subdirectories up into dir: os.RemoveAll needs a file descriptor for each level, and a path can be
// too long (TestRemoveWhatClientsLeave). It returns an error when it takes too long.
func Remove(dir string) error {
	if err := remove(dir, removalTimeout); err != nil {
		return fmt.Errorf("remove directory of MPS daemon %s: %w", filepath.Base(dir), err)
	}
	return nil
}

func remove(dir string, timeout time.Duration) error {
	for deadline := time.Now().Add(timeout); ; {
		err := os.Remove(dir)
		switch {
		case err == nil, errors.Is(err, fs.ErrNotExist):
			return nil
		case !errors.Is(err, unix.ENOTEMPTY):
			return err
		case time.Now().After(deadline):
			return fmt.Errorf("it has more files than can be removed in %s", timeout)
		}
		// A supervisor that waits for the lock may create its file again: this repeats until the directory is empty.
		if err := empty(dir, dir); err != nil {
			return err
		}
	}
}

// empty removes entries of top, or of a directory in it. It moves directories of the latter up into top. It never opens a deeper
// one: a client could replace that by a link.
func empty(top, dir string) error {
	names, err := readNames(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		path := filepath.Join(dir, name)
		err := os.Remove(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case errors.Is(err, unix.ENOTEMPTY) && dir == top:
			err = empty(top, path)
		case errors.Is(err, unix.ENOTEMPTY):
			err = raise(top, path)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// readNames returns the first names in a directory. Names that are created meanwhile may be missing.
func readNames(dir string) ([]string, error) {
	file, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	names, err := file.Readdirnames(batch)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}

// raise moves a directory into top.
func raise(top, path string) error {
	for {
		err := os.Rename(path, filepath.Join(top, ".removed-"+strconv.FormatInt(time.Now().UnixNano(), 10)))
		switch {
		case err == nil, errors.Is(err, fs.ErrNotExist):
			return nil
		case !errors.Is(err, fs.ErrExist): // ENOTEMPTY is one
			return err
		}
	}
}
