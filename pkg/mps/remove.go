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
	// batch is how many names are read at a time.
	batch = 1024
)

// Remove removes a daemon's directory. The agent calls it after Stop. It is idempotent. Clients may have written any number of files and
// levels of directories, so it moves subdirectories up into dir: os.RemoveAll needs a file descriptor for each level, and a path can be
// too long (TestRemoveWhatClientsLeave). It returns an error when it takes too long.
func Remove(dir string) error {
	deadline := time.Now().Add(removalTimeout)
	for {
		// A supervisor that waits for the lock creates its file again, so the directory may have to be emptied more than once.
		err := os.Remove(dir)
		if errors.Is(err, unix.ENOTEMPTY) {
			if err = empty(dir, dir, deadline); err == nil {
				continue
			}
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove directory of MPS daemon %s: %w", filepath.Base(dir), err)
		}
		return nil
	}
}

// empty removes the entries of top, or of a directory in it. It moves directories of the latter up into top. It never opens a deeper
// one: a client could replace that by a link.
func empty(top, dir string, deadline time.Time) error {
	names, err := readNames(dir)
	for ; err == nil && len(names) > 0; names, err = readNames(dir) {
		for _, name := range names {
			if time.Now().After(deadline) {
				return fmt.Errorf("it has more files than can be removed in %s", removalTimeout)
			}
			path := filepath.Join(dir, name)
			err := os.Remove(path)
			switch {
			case errors.Is(err, fs.ErrNotExist):
				continue
			case errors.Is(err, unix.ENOTEMPTY) && dir == top:
				err = empty(top, path, deadline)
			case errors.Is(err, unix.ENOTEMPTY):
				err = raise(top, path)
			}
			if err != nil {
				return err
			}
		}
	}
	return err
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
