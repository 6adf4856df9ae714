// SPDX-License-Identifier: Apache-2.0

package simnode

import (
	"errors"
	"io"
	"os"
	"sync"
	"time"
)

// kernelLog reads the kernel's log of a simulated machine as /dev/kmsg is read: a read waits at the end for more, and Close ends that.
type kernelLog struct {
	file   *os.File
	closed chan struct{}
	close  func() error
}

// logInterval is how often a reader looks for more.
const logInterval = 50 * time.Millisecond

func openKernelLog(path string) (io.ReadCloser, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	l := &kernelLog{file: file, closed: make(chan struct{})}
	l.close = sync.OnceValue(func() error {
		close(l.closed)
		return file.Close()
	})
	return l, nil
}

// Read implements io.Reader.
func (l *kernelLog) Read(into []byte) (int, error) {
	ticker := time.NewTicker(logInterval)
	defer ticker.Stop()
	for {
		n, err := l.file.Read(into)
		if n > 0 || !errors.Is(err, io.EOF) {
			return n, err
		}
		select {
		case <-l.closed:
			return 0, os.ErrClosed
		case <-ticker.C:
		}
	}
}

// Close implements io.Closer.
func (l *kernelLog) Close() error { return l.close() }
