// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
)

// The steps of a shutdown, in the order of this file, are in docs/design/0014-paths.md.

// Stop makes the supervisor end its daemon and start no other one before Make is called. It waits until the directory has no daemon,
// whether its supervisor ended it or was killed. A missing directory has none. It is idempotent. The agent calls it.
func Stop(ctx context.Context, dir string) error {
	err := os.Remove(filepath.Join(dir, requestedFile))
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = wait.PollUntilContextCancel(ctx, lockInterval, true, func(context.Context) (bool, error) {
			held, err := Held(dir)
			return !held, err
		})
	}
	if err != nil {
		return fmt.Errorf("stop MPS daemon %s: %w", filepath.Base(dir), err)
	}
	return nil
}

// Held reports whether a supervisor has a daemon of this directory, ready or not. The agent calls it.
func Held(dir string) (bool, error) {
	file, err := os.Open(filepath.Join(dir, lockFile))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer file.Close()
	return locked(file, unix.LOCK_SH)
}

// ErrStopped means that the agent does not request the daemon.
var ErrStopped = errors.New("the agent does not request the daemon")

// ErrGone means that the daemon's directory was removed: no claim needs the daemon.
var ErrGone = errors.New("the daemon's directory was removed")

// Await waits until the daemon has to end. It returns why: ErrStopped, ErrGone, the cause of ctx, or an error of a file.
func (h *Holder) Await(ctx context.Context) error {
	return watch(ctx, h.dir, func() (bool, error) { return false, h.ended() })
}

// ended returns why the daemon has to end, and nil while it may run.
func (h *Holder) ended() error {
	// A mount of a removed directory can still be read, but is empty.
	own, err := h.lock.Stat()
	if err != nil {
		return fmt.Errorf("read lock of MPS daemon: %w", err)
	}
	switch now, err := os.Stat(filepath.Join(h.dir, lockFile)); {
	case errors.Is(err, fs.ErrNotExist), err == nil && !os.SameFile(own, now):
		return ErrGone
	case err != nil:
		return fmt.Errorf("read lock of MPS daemon: %w", err)
	}
	switch _, err := os.Stat(filepath.Join(h.dir, requestedFile)); {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return ErrStopped
	default:
		return fmt.Errorf("read whether MPS daemon is requested: %w", err)
	}
}

// Retract ends what Publish published, so that the agent connects no new client. It is idempotent. It leaves the file of another
// supervisor, in a directory that was made again.
func (h *Holder) Retract() error {
	if h.ready == nil {
		return nil
	}
	path := filepath.Join(h.dir, readyFile)
	own, err := h.ready.Stat()
	if err == nil {
		var now fs.FileInfo
		if now, err = os.Stat(path); err == nil && os.SameFile(own, now) {
			err = os.Remove(path)
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	err = errors.Join(err, h.ready.Close())
	h.ready = nil
	return err
}

// end ends the daemon by its own command, and by signals where that fails. Its servers end with it.
func (d Daemon) end(ctx context.Context, p program, r *process) (err error) {
	group := -r.cmd.Process.Pid
	defer func() {
		if killed := kill(group, syscall.SIGKILL); killed != nil {
			err = errors.Join(err, fmt.Errorf("end the servers of the MPS daemon: %w", killed))
		}
	}()
	logger := klog.FromContext(ctx)
	// ctx is usually done by now.
	ctx = context.WithoutCancel(ctx)
	for _, way := range []struct {
		name string
		do   func() error
	}{
		{"quit", func() error { _, err := p.tell(ctx, "quit"); return err }},
		{"SIGTERM", func() error { return kill(group, syscall.SIGTERM) }},
		{"SIGKILL", func() error { return kill(group, syscall.SIGKILL) }},
	} {
		select {
		case <-r.ended:
			return nil
		default:
		}
		if err := way.do(); err != nil {
			logger.Info("Cannot ask the MPS daemon to end", "by", way.name, "err", err)
			continue
		}
		select {
		case <-r.ended:
			return nil
		case <-time.After(d.Grace):
			logger.Info("The MPS daemon has not ended", "by", way.name, "after", d.Grace)
		}
	}
	return fmt.Errorf("end the MPS daemon: process %d cannot be killed", -group)
}

// kill signals a process group, if there is one.
func kill(group int, signal syscall.Signal) error {
	if err := syscall.Kill(group, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	return nil
}

// Release gives up the right to run the daemon once it has ended. Stop returns then.
func (h *Holder) Release() error { return errors.Join(h.Retract(), h.lock.Close()) }
