// SPDX-License-Identifier: Apache-2.0

package simnode

import (
	"errors"
	"io"
	"os"

	"github.com/fsnotify/fsnotify"
)

// kernelLog reads the kernel's log of a simulated machine as /dev/kmsg is read: a read waits at the end for more, and Close ends that.
type kernelLog struct {
	file    *os.File
	changes *fsnotify.Watcher
}

func openKernelLog(path string) (io.ReadCloser, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	changes, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	if err := changes.Add(path); err != nil {
		return nil, errors.Join(err, changes.Close(), file.Close())
	}
	return &kernelLog{file, changes}, nil
}

// Read implements io.Reader.
func (l *kernelLog) Read(into []byte) (int, error) {
	for {
		n, err := l.file.Read(into)
		if n > 0 || !errors.Is(err, io.EOF) {
			return n, err
		}
		select {
		case _, open := <-l.changes.Events:
			if !open {
				return 0, os.ErrClosed
			}
		case err := <-l.changes.Errors:
			if err != nil {
				return 0, err
			}
		}
	}
}

// Close implements io.Closer.
func (l *kernelLog) Close() error { return errors.Join(l.changes.Close(), l.file.Close()) }
