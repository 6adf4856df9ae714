// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tandem-gpu/tandem/internal/filewatch"
)

// Dir returns the directory of a daemon, in the agent's run directory.
func Dir(runDir, name string) string { return filepath.Join(runDir, "mps", name) }

// The entries of a daemon's directory.
const (
	// PipeDir, LogDir and ShmLink are symbolic links to volumes of the daemon's pod on the host: the pipe directory, which clients have at
	// ClientPipeDir; the directory of control.log and server.log; and what clients have as /dev/shm.
	PipeDir = "pipe"
	LogDir  = "log"
	ShmLink = "shm"

	lockFile  = "lock"
	readyFile = "ready"
	// requestedFile exists while the daemon may run. The directory alone does not mean that: if it was removed and kubelet restarts the
	// supervisor, containerd makes it for the mount. The name stays: supervisors of earlier versions look for it.
	requestedFile = "wanted"
)

// ClientPipeDir is the pipe directory in the containers of daemon and clients: CUDA's default.
const ClientPipeDir = "/tmp/nvidia-mps"

// Ready is what the supervisor publishes of a daemon that answers and has its settings.
type Ready struct {
	// Pod is the UID of the daemon's pod.
	Pod string `json:"pod"`
	// Hash of the daemon's settings.
	Hash string `json:"hash"`
}

// Make makes a daemon's directory before the daemon is requested: its pod does not start without. It is idempotent. The agent calls it.
func Make(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make directory of MPS daemon %s: %w", filepath.Base(dir), err)
	}
	file, err := os.OpenFile(filepath.Join(dir, requestedFile), os.O_CREATE|os.O_WRONLY, 0o644)
	if err == nil {
		err = file.Close()
	}
	if err != nil {
		return fmt.Errorf("request MPS daemon %s: %w", filepath.Base(dir), err)
	}
	return nil
}

// Alive reads what the supervisor published of its daemon, and reports whether the supervisor lives: it keeps the file locked, and the
// kernel unlocks the file when that process ends. The agent and the pod's probes call it.
func Alive(dir string) (Ready, bool, error) {
	fail := func(err error) (Ready, bool, error) {
		return Ready{}, false, fmt.Errorf("read state of MPS daemon %s: %w", filepath.Base(dir), err)
	}
	file, err := os.Open(filepath.Join(dir, readyFile))
	if errors.Is(err, fs.ErrNotExist) {
		return Ready{}, false, nil
	}
	if err != nil {
		return fail(err)
	}
	defer file.Close()
	switch held, err := locked(file, unix.LOCK_SH); {
	case err != nil:
		return fail(err)
	case !held:
		return Ready{}, false, nil
	}
	var ready Ready
	if err := json.NewDecoder(file).Decode(&ready); err != nil {
		return fail(err)
	}
	return ready, true, nil
}

// locked reports whether another process has locked the file. Otherwise it locks the file until it is closed.
func locked(file *os.File, how int) (bool, error) {
	switch err := unix.Flock(int(file.Fd()), how|unix.LOCK_NB); err {
	case nil:
		return false, nil
	case unix.EWOULDBLOCK:
		return true, nil
	default:
		return false, &os.PathError{Op: "flock", Path: file.Name(), Err: err}
	}
}

const (
	// removalTimeout is far longer than a removal usually takes. A retry continues where it stopped.
	removalTimeout = 5 * time.Second
	// batch is how many names are read at a time, so that the deadline is checked often.
	batch = 128
)

// Remove removes a daemon's directory. The agent calls it after Stop. It is idempotent. Clients of an earlier version may have written
// any number of files and levels of directories (empty). It returns an error when it takes too long.
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
		}
		// A supervisor that waits for the lock may create its file again: this repeats until the directory is empty.
		if err := empty(dir, time.Until(deadline)); err != nil {
			return err
		}
	}
}

// empty removes what a directory has. Clients may have written any number of files and levels of directories, and may still write. So it
// moves subdirectories up: os.RemoveAll needs a file descriptor for each level, and a path can be too long (TestRemoveWhatClientsLeave).
// It follows no link out of the directory. A missing directory is empty. It returns an error when it takes too long.
func empty(dir string, timeout time.Duration) error {
	root, err := os.OpenRoot(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer root.Close()
	for deadline := time.Now().Add(timeout); ; {
		switch left, err := emptyOnce(root, ""); {
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return err
		case err == nil && left == 0:
			return nil
		case time.Now().After(deadline):
			return fmt.Errorf("%s has more files than can be removed in %s", dir, timeout)
		}
	}
}

// emptyOnce removes entries of root, or of a directory in it, and returns how many it found. It moves directories of the latter up into
// root.
func emptyOnce(root *os.Root, in string) (found int, err error) {
	dir := root
	if in != "" {
		// A client that is root can close its directory to a supervisor that is root without capabilities.
		if err := root.Chmod(in, 0o700); err != nil {
			return 0, err
		}
		if dir, err = root.OpenRoot(in); err != nil {
			return 0, err
		}
		defer dir.Close()
	}
	names, err := namesOf(dir)
	for _, name := range names {
		err := dir.Remove(name)
		switch {
		case !errors.Is(err, unix.ENOTEMPTY):
		case in == "":
			_, err = emptyOnce(root, name)
		default:
			err = root.Rename(filepath.Join(in, name), ".removed-"+strconv.FormatInt(time.Now().UnixNano(), 10))
		}
		// The caller repeats after a rename to a name that exists.
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
			return len(names), err
		}
	}
	return len(names), err
}

// namesOf returns some names of a directory.
func namesOf(dir *os.Root) ([]string, error) {
	file, err := dir.Open(".")
	if err != nil {
		return nil, err
	}
	names, err := file.Readdirnames(batch)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, errors.Join(err, file.Close())
}

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

// Await waits until the daemon is ready with the settings of this hash (Settings.Hash). It returns an error when ctx is done or the
// directory is removed. The agent calls it.
func Await(ctx context.Context, dir, hash string) (Ready, error) {
	var ready Ready
	err := watch(ctx, dir, func() (bool, error) {
		r, alive, err := Alive(dir)
		if ready = r; err == nil {
			_, err = os.Stat(dir)
		}
		return alive && r.Hash == hash, err
	})
	if err != nil {
		return Ready{}, fmt.Errorf("wait for MPS daemon %s: %w", filepath.Base(dir), err)
	}
	return ready, nil
}

// lockInterval is how often a lock is checked: the kernel does not report its release.
const lockInterval = 50 * time.Millisecond

// watch calls done now and after each change in the directory, until it returns true or an error.
func watch(ctx context.Context, dir string, done func() (bool, error)) error {
	// In most cases there is nothing to wait for, and a watch would take longest.
	if over, err := done(); over || err != nil {
		return err
	}
	watcher := filewatch.New(ctx, filewatch.Options{Dirs: []string{dir}, Interval: lockInterval})
	defer watcher.Close()
	for {
		if over, err := done(); over || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-watcher.C:
		}
	}
}
