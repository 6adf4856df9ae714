// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"
	kjson "sigs.k8s.io/json"

	"github.com/tandem-gpu/tandem/simulated/programs"
)

// MIGDir is the directory in a machine's directory that holds MIGStateFile and its lock: the only thing there that a library
// writes to.
const MIGDir = programs.StateDir

// MIGStateFile is the name of the state file in MIGDir.
const MIGStateFile = "state.json"

// MIGState is the content of the state file: MIG modes and instances, and compute modes, which a GPU keeps when its users end.
// All libraries of the machine share it. It belongs to one boot; the next boot begins with the profile's state.
type MIGState struct {
	// Boot is the boot's ID (proc(5), random/boot_id).
	Boot string `json:"boot"`
	// GPUs are those that have MIG, in the profile's order.
	GPUs []MIGGPU `json:"gpus"`
	// ComputeModes are those of GPUs whose mode was ever set, by UUID, as NVML numbers them.
	ComputeModes map[string]nvml.ComputeMode `json:"computeModes,omitempty"`
	// Clocks are the application clocks of GPUs whose clocks were ever set, by UUID.
	Clocks map[string]Clocks `json:"clocks,omitempty"`
}

// Clocks are a GPU's application clocks in MHz.
type Clocks struct {
	Memory   uint32 `json:"memory"`
	Graphics uint32 `json:"graphics"`
}

// defaultClocks are those of an H100 SXM (nvidia-smi -q -d CLOCK).
var defaultClocks = Clocks{Memory: 2619, Graphics: 1980}

// MIGGPU is the state of one GPU.
type MIGGPU struct {
	UUID string `json:"uuid"`
	// Enabled is the mode in force, Pending the one that the next reset puts in force.
	Enabled   bool          `json:"enabled"`
	Pending   bool          `json:"pending"`
	Instances []GPUInstance `json:"instances,omitempty"`
}

// GPUInstance is a GPU instance, with its place in memory slices and the compute instances in it.
type GPUInstance struct {
	ID int `json:"id"`
	// Profile is the GPU instance profile ID.
	Profile int               `json:"profile"`
	Start   int               `json:"start"`
	Size    int               `json:"size"`
	Compute []ComputeInstance `json:"compute,omitempty"`
}

// ComputeInstance is a compute instance, with its place in the compute slices of its GPU instance.
type ComputeInstance struct {
	ID int `json:"id"`
	// Profile is the compute instance profile ID.
	Profile int    `json:"profile"`
	Start   int    `json:"start"`
	Size    int    `json:"size"`
	UUID    string `json:"uuid"`
}

func (s MIGState) clone() MIGState {
	s.GPUs, s.ComputeModes, s.Clocks = slices.Clone(s.GPUs), maps.Clone(s.ComputeModes), maps.Clone(s.Clocks)
	for i := range s.GPUs {
		s.GPUs[i].Instances = slices.Clone(s.GPUs[i].Instances)
		for k := range s.GPUs[i].Instances {
			s.GPUs[i].Instances[k].Compute = slices.Clone(s.GPUs[i].Instances[k].Compute)
		}
	}
	return s
}

func (s *MIGState) gpu(uuid string) *MIGGPU {
	for i := range s.GPUs {
		if s.GPUs[i].UUID == uuid {
			return &s.GPUs[i]
		}
	}
	return nil
}

func (g *MIGGPU) instance(id int) *GPUInstance {
	for i := range g.Instances {
		if g.Instances[i].ID == id {
			return &g.Instances[i]
		}
	}
	return nil
}

func (i *GPUInstance) compute(id int) *ComputeInstance {
	for k := range i.Compute {
		if i.Compute[k].ID == id {
			return &i.Compute[k]
		}
	}
	return nil
}

// migStore keeps the state: in the file, or in memory where there is no directory.
type migStore struct {
	dir     string
	boot    string
	initial MIGState
	report  func(error)

	mu    sync.Mutex
	stamp fileStamp
	state MIGState
}

func newMIGStore(dir, boot string, initial MIGState, report func(error)) *migStore {
	s := &migStore{boot: boot, initial: initial, report: report}
	if dir != "" {
		s.dir = filepath.Join(dir, MIGDir)
	}
	s.initial.Boot = s.boot
	s.state = s.initial
	return s
}

// begin writes the state of this boot where there is none, so that who looks from outside of the machine knows which boot it is.
func (s *migStore) begin() error {
	if s.begun() {
		return nil
	}
	if ret := s.change(func(*MIGState) nvml.Return { return nvml.SUCCESS }); ret != nvml.SUCCESS {
		return fmt.Errorf("write the MIG state: NVML would answer %d", int(ret))
	}
	return nil
}

// begun reports whether the state is one of this boot.
func (s *migStore) begun() bool {
	state, err := readMIGState(filepath.Join(s.dir, MIGStateFile))
	return err == nil && state.Boot == s.boot
}

// bootID is empty where the kernel does not tell: all boots are one then.
func bootID() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
}

// current returns the current state. A returned state is immutable.
func (s *migStore) current() (MIGState, nvml.Return) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.read()
}

// read looks at the file when it is another than before. A file that cannot be used is no state at all: guessing at what is on
// a GPU would be worse than an error.
func (s *migStore) read() (MIGState, nvml.Return) {
	if s.dir == "" {
		return s.state, nvml.SUCCESS
	}
	path := filepath.Join(s.dir, MIGStateFile)
	stamp := stampOf(path)
	if stamp == s.stamp {
		return s.state, nvml.SUCCESS
	}
	state, err := readMIGState(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		state = s.initial
	case err != nil:
		s.report(fmt.Errorf("use MIG state file: %w", err))
		return MIGState{}, nvml.ERROR_UNKNOWN
	case state.Boot != s.boot:
		state = s.initial
	}
	for _, own := range s.initial.GPUs {
		// A GPU that has come since.
		if state.gpu(own.UUID) == nil {
			state.GPUs = append(slices.Clip(state.GPUs), own)
		}
	}
	s.stamp, s.state = stamp, state
	return state, nvml.SUCCESS
}

func readMIGState(path string) (MIGState, error) {
	var state MIGState
	data, err := os.ReadFile(path)
	if err != nil {
		return MIGState{}, err
	}
	strict, err := kjson.UnmarshalStrict(data, &state)
	if err := errors.Join(append(strict, err)...); err != nil {
		return MIGState{}, fmt.Errorf("read %s: %w", path, err)
	}
	return state, nil
}

// change puts what do makes of the state in its place, unless do answers with an error. No other process changes it meanwhile.
func (s *migStore) change(do func(*MIGState) nvml.Return) nvml.Return {
	unlock, err := s.lock()
	if err != nil {
		return s.refused(err)
	}
	defer unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	state, ret := s.read()
	if ret != nvml.SUCCESS {
		return ret
	}
	state = state.clone()
	if ret := do(&state); ret != nvml.SUCCESS {
		return ret
	}
	if s.dir == "" {
		s.state = state
		return nvml.SUCCESS
	}
	data, err := json.MarshalIndent(state, "", "  ")
	if err != nil {
		return s.refused(err)
	}
	path := filepath.Join(s.dir, MIGStateFile)
	if err := replaceNewer(path, append(data, '\n'), 0o644); err != nil {
		return s.refused(err)
	}
	s.stamp, s.state = stampOf(path), state
	return nvml.SUCCESS
}

func (s *migStore) refused(err error) nvml.Return {
	s.report(fmt.Errorf("change MIG state: %w", err))
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		return nvml.ERROR_NO_PERMISSION
	}
	return nvml.ERROR_OPERATING_SYSTEM
}

// lock keeps other processes, and other libraries in this one, from changing the state.
func (s *migStore) lock() (unlock func(), err error) {
	if s.dir == "" {
		return func() {}, nil
	}
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(filepath.Join(s.dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := flock(file); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return func() { _ = file.Close() }, nil
}

func flock(file *os.File) error {
	for {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// replaceNewer replaces a file by one that a look at it tells from the one before: within one tick of the clock two versions
// could look alike (inode numbers are used again), so each is newer by force.
func replaceNewer(path string, data []byte, mode os.FileMode) error {
	before, statErr := os.Stat(path)
	if err := writeAtomically(path, data, mode); err != nil || statErr != nil {
		return err
	}
	after, err := os.Stat(path)
	if err != nil || after.ModTime().After(before.ModTime()) {
		return err
	}
	newer := before.ModTime().Add(time.Microsecond)
	return os.Chtimes(path, newer, newer)
}
