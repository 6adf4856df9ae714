// SPDX-License-Identifier: Apache-2.0

// Package filelock lets processes that write the same place take turns. It does not say who has the turn.
package filelock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// again is how often a lock is asked for: flock cannot be told to give up with a context.
const again = 200 * time.Millisecond

// Try takes the lock of a file that exists. ok is false where another process or caller has it.
func Try(path string) (unlock func(), ok bool, err error) {
	file, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, false, fmt.Errorf("open lock: %w", err)
	}
	ok, err = try(file)
	if !ok {
		file.Close()
		return nil, false, err
	}
	return func() { file.Close() }, true, nil
}

// try closes nothing.
func try(file *os.File) (ok bool, err error) {
	err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("lock %s: %w", file.Name(), err)
	}
	return true, nil
}

// Wait waits until the lock is free, also of other callers in this process. The file is made, and stays; the lock ends with
// unlock or with the process.
func Wait(ctx context.Context, path string) (unlock func(), err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	for {
		ok, err := try(file)
		if ok {
			return func() { file.Close() }, nil
		}
		if err != nil {
			file.Close()
			return nil, err
		}
		select {
		case <-ctx.Done():
			file.Close()
			return nil, fmt.Errorf("wait for lock %s: %w", path, context.Cause(ctx))
		case <-time.After(again):
		}
	}
}
