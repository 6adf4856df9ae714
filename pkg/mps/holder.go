// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
)

// Holder is the supervisor's right to run the daemon of a directory. It is not safe for concurrent use, except Await.
type Holder struct {
	dir         string
	lock, ready *os.File
}

// Hold waits until no other supervisor has a daemon of the directory and the agent requests one. The supervisor calls it. Errors:
// ErrGone, and the cause of ctx.
func Hold(ctx context.Context, dir string) (h *Holder, err error) {
	err = wait.PollUntilContextCancel(ctx, lockInterval, true, func(context.Context) (bool, error) {
		h, err = tryHold(dir)
		return h != nil, err
	})
	if err != nil {
		return nil, fmt.Errorf("wait for the right to run MPS daemon %s: %w", filepath.Base(dir), err)
	}
	return h, nil
}

// tryHold returns nil without an error if another supervisor has the daemon or the agent does not request one.
func tryHold(dir string) (_ *Holder, err error) {
	lock, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o644)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("lock MPS daemon: %w", err)
	}
	h := &Holder{dir: dir, lock: lock}
	taken, err := locked(lock, unix.LOCK_EX)
	if err == nil && !taken {
		// After the lock was taken: Stop removes the request first and checks the lock next.
		if why := h.ended(); why == nil {
			return h, nil
		} else if !errors.Is(why, ErrStopped) {
			err = why
		}
	}
	return nil, errors.Join(err, lock.Close())
}

// Publish publishes that the daemon is ready, until Retract or the end of this process.
func (h *Holder) Publish(ready Ready) error {
	file, err := os.CreateTemp(h.dir, "."+readyFile+"-*")
	if err != nil {
		return fmt.Errorf("publish that MPS daemon is ready: %w", err)
	}
	if err = json.NewEncoder(file).Encode(ready); err == nil {
		err = file.Chmod(0o644)
	}
	if err == nil {
		// The lock comes before the name: a file without a lock is from a supervisor that died.
		_, err = locked(file, unix.LOCK_EX)
	}
	if err == nil {
		err = os.Rename(file.Name(), filepath.Join(h.dir, readyFile))
	}
	if err != nil {
		return fmt.Errorf("publish that MPS daemon is ready: %w", errors.Join(err, os.Remove(file.Name()), file.Close()))
	}
	h.ready = file
	return nil
}

// Lock returns the locked file. A process that inherits it has the lock as well.
func (h *Holder) Lock() *os.File { return h.lock }
