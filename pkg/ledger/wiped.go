// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// onDisk does something to the records. Where their directory has been wiped it is made anew before from memory, which
// knows everything that was there: an Allocate that fails is the end of a pod, and the next process must not start with
// nothing. Under l.mu.
func (l *Ledger) onDisk(do func() error) error {
	if l.wiped() {
		if err := l.restore(); err != nil {
			return fmt.Errorf("make wiped ledger anew: %w", err)
		}
	}
	return do()
}

// wiped reports whether the lock is not where others would look for it, or one of the directories is gone. Every Allocate
// asks: hence the bare system calls.
func (l *Ledger) wiped() bool {
	if l.disk.closed {
		return false
	}
	var now unix.Stat_t
	if err := unix.Lstat(l.lock.Name(), &now); err != nil || now.Dev != l.locked.Dev || now.Ino != l.locked.Ino {
		return true
	}
	for _, dir := range []string{l.disk.holds(), l.disk.spare()} {
		if errors.Is(unix.Lstat(dir, &now), unix.ENOENT) {
			return true
		}
	}
	return false
}

func (l *Ledger) restore() error {
	if err := l.retakeLock(); err != nil {
		return err
	}
	if err := l.disk.makeAnew(); err != nil {
		return err
	}
	for k, h := range l.holds {
		written, err := l.disk.restore(*h)
		if err != nil {
			return err
		}
		if written {
			// What the newer version had written is gone.
			delete(l.newer, k)
		}
	}
	return l.disk.provision(l.disk.wanted)
}

// retakeLock locks the lock file that other processes would open. It returns ErrLocked if another process was faster.
func (l *Ledger) retakeLock() error {
	if err := os.MkdirAll(l.disk.root, 0o700); err != nil {
		return err
	}
	held, err := l.lock.Stat()
	if err != nil {
		return err
	}
	if now, err := os.Lstat(l.lock.Name()); err == nil && os.SameFile(now, held) {
		return nil
	}
	lock, err := takeLock(l.lock.Name())
	if err != nil {
		return err
	}
	old := l.lock
	l.lock = lock
	return errors.Join(unix.Fstat(int(lock.Fd()), &l.locked), old.Close())
}

// makeAnew makes what is missing of the directories and forgets the files that were in them.
func (d *directory) makeAnew() error {
	for _, dir := range []string{d.holds(), d.spare()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	var left []string
	for _, path := range d.spares {
		if usableAsSpare(path) {
			left = append(left, path)
		}
	}
	d.spares, d.limits = left, 0
	return nil
}

// restore writes the record of a hold if it is missing, and counts it. A record that was unreadable stays empty: its name
// suffices.
func (d *directory) restore(h Hold) (written bool, err error) {
	switch _, err := os.Lstat(d.path(h)); {
	case err == nil:
		if h.Holder.Kind == KindPod {
			d.limits++
		}
		return false, nil
	case !errors.Is(err, fs.ErrNotExist):
		return false, err
	}
	if !h.Unreadable {
		return true, d.record(h, false, false)
	}
	if err := d.write(d.path(h), unix.O_CREAT|unix.O_EXCL, nil); err != nil {
		return false, err
	}
	if h.Holder.Kind == KindPod {
		d.limits++
	}
	return true, nil
}
