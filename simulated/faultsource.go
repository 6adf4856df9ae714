// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// lookEvery is how often a call that waits looks at the faults file.
const lookEvery = 10 * time.Millisecond

// faultSource is the faults file as it is now: it is looked at on use, and read when it is another than before.
type faultSource struct {
	path    string
	profile Profile
	report  func(error)

	mu    sync.Mutex
	stamp fileStamp
	state *faultState
}

// fileStamp tells one version of a file from the next; the zero stamp is that of no file.
type fileStamp struct {
	inode   uint64
	size    int64
	changed time.Time
}

func newFaultSource(dir string, profile Profile, report func(error)) *faultSource {
	s := &faultSource{profile: profile, report: report, state: &faultState{gpus: make([]gpuFaults, len(profile.GPUs))}}
	if dir != "" {
		s.path = filepath.Join(dir, FaultsFile)
	}
	return s
}

// current is the state in force. A file that cannot be used leaves the state before it in force and is reported once.
func (s *faultSource) current() *faultState {
	if s.path == "" {
		return s.state
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	stamp := stampOf(s.path)
	if stamp == s.stamp {
		return s.state
	}
	// The stamp is taken before the content, so a file replaced in between is read again by the next call.
	s.stamp = stamp
	state, err := s.read()
	if err != nil {
		s.report(fmt.Errorf("use faults file %s, keeping the faults before: %w", s.path, err))
		return s.state
	}
	s.state = state
	return state
}

func (s *faultSource) read() (*faultState, error) {
	faults, err := ReadFaults(filepath.Dir(s.path))
	if err != nil {
		return nil, err
	}
	return faults.compile(s.profile)
}

// stampOf is the zero stamp for a file that cannot be looked at: if it is there all the same, reading it tells. Not os.Stat: each call of the
// library waits for it.
func stampOf(path string) fileStamp {
	var info syscall.Stat_t
	if syscall.Stat(path, &info) != nil {
		return fileStamp{}
	}
	return fileStamp{inode: info.Ino, size: info.Size, changed: time.Unix(info.Mtim.Unix())}
}

// answer carries out a call's fault, which find looks up: it waits as long as the fault says, and gives the fault's return code and the
// state that is in force afterwards.
func (s *faultSource) answer(find func(*faultState) *callFault, stopped <-chan struct{}) (*faultState, nvml.Return) {
	state := s.current()
	fault := find(state)
	if !fault.hits() {
		return state, nvml.SUCCESS
	}
	for fault != nil && fault.hang {
		if !s.wait(state, math.MaxInt64, stopped) {
			return state, nvml.ERROR_UNINITIALIZED
		}
		state = s.current()
		fault = find(state)
	}
	if fault == nil {
		return state, nvml.SUCCESS
	}
	if fault.delay <= 0 {
		return state, fault.ret
	}
	if !s.wait(state, fault.delay, stopped) {
		return state, nvml.ERROR_UNINITIALIZED
	}
	return s.current(), fault.ret
}

// wait returns when the delay is over or the faults are others than state, and false when stopped is closed.
func (s *faultSource) wait(state *faultState, delay time.Duration, stopped <-chan struct{}) bool {
	over := time.NewTimer(delay)
	defer over.Stop()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		select {
		case <-over.C:
			return true
		case <-stopped:
			return false
		case <-look.C:
			if s.current() != state {
				return true
			}
		}
	}
}

// writeAtomically replaces the file at path, complete or not at all.
func writeAtomically(path string, data []byte, mode os.FileMode) (err error) {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("write %s: %w", path, errors.Join(err, os.Remove(file.Name())))
		}
	}()
	_, err = file.Write(data)
	if err := errors.Join(err, file.Chmod(mode), file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}
