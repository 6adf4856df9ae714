// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// Dir returns the directory of a daemon, in the agent's run directory.
func Dir(runDir, name string) string { return filepath.Join(runDir, "mps", name) }

// The entries of a daemon's directory.
const (
	// PipeDir is the pipe directory, which clients have at ClientPipeDir.
	PipeDir = "pipe"
	// LogDir has control.log and server.log.
	LogDir = "log"
	// ShmLink is a symbolic link to the memory volume of the daemon's pod on the host, which clients have as /dev/shm.
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
	Hash    string    `json:"hash"`
	Started time.Time `json:"started"`
}

// Make makes a daemon's directory before the daemon is requested: its pod does not start without. It is idempotent. The agent calls it.
func Make(dir string) error {
	for _, d := range []string{dir, filepath.Join(dir, PipeDir), filepath.Join(dir, LogDir)} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return fmt.Errorf("make directory of MPS daemon %s: %w", filepath.Base(dir), err)
		}
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
	for {
		switch err := unix.Flock(int(file.Fd()), how|unix.LOCK_NB); err {
		case nil:
			return false, nil
		case unix.EWOULDBLOCK:
			return true, nil
		case unix.EINTR:
		default:
			return false, &os.PathError{Op: "flock", Path: file.Name(), Err: err}
		}
	}
}
