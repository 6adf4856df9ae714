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
	"time"

	"golang.org/x/sys/unix"
)

// ErrGone means that the daemon's directory is gone: no claim needs the daemon.
var ErrGone = errors.New("the daemon's directory is gone")

// Holder is the supervisor's side of a directory: the right to run its daemon. It is not safe for concurrent use.
type Holder struct {
	dir         string
	lock, ready *os.File
}

// Hold waits until no other supervisor has a daemon of the directory, and until the agent wants one. The supervisor
// calls it, and tests that play one.
func Hold(ctx context.Context, dir string) (*Holder, error) {
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	for {
		h, err := tryHold(dir)
		if h != nil || err != nil {
			return h, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the right to run MPS daemon %s: %w", filepath.Base(dir), context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// tryHold returns nil without an error where another supervisor has the daemon or the agent wants none.
func tryHold(dir string) (_ *Holder, err error) {
	lock, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o644)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("lock MPS daemon: %w", err)
	}
	h := &Holder{dir: dir, lock: lock}
	others, err := locked(lock, unix.LOCK_EX)
	if err == nil && !others {
		// Only now: an agent that sees the lock free after it has asked to stop relies on it.
		if why := h.Ended(); why == nil {
			return h, nil
		} else if !errors.Is(why, ErrStopped) {
			err = why
		}
	}
	return nil, errors.Join(err, lock.Close())
}

// ErrStopped says that the agent wants no daemon to run, now or any more.
var ErrStopped = errors.New("the agent wants the daemon to stop")

// Ended says why the daemon is to end: ErrGone, ErrStopped, or an error in looking. It is nil while the daemon may run.
func (h *Holder) Ended() error {
	// A mounted directory that was removed can be looked at still, but has nothing in it.
	held, err := h.lock.Stat()
	if err != nil {
		return fmt.Errorf("look at the lock of MPS daemon: %w", err)
	}
	switch now, err := os.Stat(filepath.Join(h.dir, lockFile)); {
	case errors.Is(err, fs.ErrNotExist):
		return ErrGone
	case err != nil:
		return fmt.Errorf("look at the lock of MPS daemon: %w", err)
	case !os.SameFile(held, now):
		return ErrGone
	}
	switch _, err := os.Stat(filepath.Join(h.dir, wantedFile)); {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return ErrStopped
	default:
		return fmt.Errorf("look whether MPS daemon is wanted: %w", err)
	}
}

// Await waits until the daemon is to end and says why, as Ended does.
func (h *Holder) Await(ctx context.Context) error {
	var why error
	err := watch(ctx, h.dir, func() (bool, error) {
		why = h.Ended()
		return why != nil, nil
	})
	if why != nil {
		return why
	}
	if errors.Is(err, fs.ErrNotExist) {
		return ErrGone
	}
	return err
}

// Publish says that the daemon is ready, for as long as this process lives and until Retract.
func (h *Holder) Publish(ready Ready) error {
	file, err := h.write(ready)
	if err != nil {
		return fmt.Errorf("say that MPS daemon is ready: %w", err)
	}
	h.ready = file
	return nil
}

func (h *Holder) write(ready Ready) (_ *os.File, err error) {
	file, err := os.CreateTemp(h.dir, "."+readyFile+"-*")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(file.Name()), file.Close())
		}
	}()
	if err := json.NewEncoder(file).Encode(ready); err != nil {
		return nil, err
	}
	if err := file.Chmod(0o644); err != nil {
		return nil, err
	}
	// Locked before it has its name: what is there without a lock was written by one who is dead.
	if _, err := locked(file, unix.LOCK_EX); err != nil {
		return nil, err
	}
	return file, os.Rename(file.Name(), filepath.Join(h.dir, readyFile))
}

// Retract takes back what Publish said. Idempotent.
func (h *Holder) Retract() error {
	if h.ready == nil {
		return nil
	}
	err := h.removeReady()
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	err = errors.Join(err, h.ready.Close())
	h.ready = nil
	return err
}

// removeReady leaves what another says in a directory that was made anew.
func (h *Holder) removeReady() error {
	own, err := h.ready.Stat()
	if err != nil {
		return err
	}
	path := filepath.Join(h.dir, readyFile)
	if now, err := os.Stat(path); err != nil || !os.SameFile(own, now) {
		return err
	}
	return os.Remove(path)
}

// Lock is the file that is locked while the daemon lives: a process that inherits it has the lock, too.
func (h *Holder) Lock() *os.File { return h.lock }

// Release gives up the right to run the daemon, when it has ended.
func (h *Holder) Release() error { return errors.Join(h.Retract(), h.lock.Close()) }
