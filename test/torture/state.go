// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// State is what an interrupted run needs to continue from its last quiet point.
type State struct {
	Seed uint64 `json:"seed"`
	// Ops is how many are to be done, Round how many between two quiet points.
	Ops        int    `json:"ops"`
	RoundSize  int    `json:"roundSize"`
	InFlight   int    `json:"inFlight"`
	Kubernetes string `json:"kubernetes"`
	// MIG is for a machine with partitions.
	MIG bool `json:"mig,omitempty"`
	// Sharing is for GPUs that several may have at once.
	Sharing bool `json:"sharing,omitempty"`
	// Next is the first round that has not been finished.
	Next     int      `json:"next"`
	Counters Counters `json:"counters"`
}

const stateFile = "state.json"

// ErrNoState means that there is no state to continue from.
var ErrNoState = errors.New("no interrupted run here")

// ReadState answers what the run in a directory has come to, or ErrNoState.
func ReadState(dir string) (State, error) {
	var state State
	data, err := os.ReadFile(filepath.Join(dir, stateFile))
	if errors.Is(err, fs.ErrNotExist) {
		return state, fmt.Errorf("%s: %w", dir, ErrNoState)
	}
	if err != nil {
		return state, fmt.Errorf("read state: %w", err)
	}
	if err := json.Unmarshal(data, &state); err != nil {
		return state, fmt.Errorf("read state in %s: %w", dir, err)
	}
	return state, nil
}

// Write replaces the state in one step.
func (s State) Write(dir string) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("encode state: %w", err)
	}
	path := filepath.Join(dir, stateFile)
	if err := os.WriteFile(path+".new", data, 0o644); err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	return nil
}

// ErrBusy means that another run is at work in the directory.
var ErrBusy = errors.New("another run is at work here")

// Lock makes the directory and keeps a second run out of it until unlock, or for as long as this process lives.
func Lock(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make directory: %w", err)
	}
	file, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return nil, errors.Join(fmt.Errorf("%s: %w", dir, ErrBusy), file.Close())
	} else if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), file.Close())
	}
	return func() { file.Close() }, nil
}
