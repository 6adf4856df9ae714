// SPDX-License-Identifier: Apache-2.0

// Package simulated is an NVML without a GPU: nvml.Interface for a machine described by a Profile, the files such a machine
// has (driver root, device nodes, sysfs), and a file through which faults reach it from outside the process. It has the methods
// that Tandem and the libraries in it call, and a few that only tests call. A call of another one panics, because it reaches an
// embedded interface that is nil.
//
// It runs no work and keeps no clock of temperatures or utilization. It lacks the functions that go-nvml calls through a handler value
// (GetGpuFabricInfoV, GetGpuInstanceProfileInfoV and the like), and LookupSymbol reports them as missing.
package simulated

import (
	"fmt"
	"path/filepath"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

//go:generate go run ./internal/gen zz_generated.gates.go

// Library is NVML of one simulated machine. It is safe for concurrent use. Handles stay valid over Shutdown and Init.
type Library struct {
	nvml.Interface
	*system
}

var _ nvml.Interface = (*Library)(nil)

// system is the machine behind a Library. The GPUs it enumerates are fixed at the first Init, as NVML's are: a GPU that is
// absent then has no index, one that goes away later keeps its index and is lost.
type system struct {
	profile Profile
	faults  *faultSource
	mig     *migStore
	all     []*gpuHandle

	// dev is where missing device nodes are made; empty for nowhere.
	dev        string
	report     func(error)
	privileges Privileges

	mu         sync.RWMutex
	users      int
	stopped    chan struct{}
	enumerated []*gpuHandle
	// minors are those of the profile's GPUs, by place.
	minors []int
}

// Option changes what New makes.
type Option func(*settings)

type settings struct {
	seed       string
	dir        string
	dev        string
	boot       string
	onError    func(error)
	privileges Privileges
}

// WithSeed tells machines of the same profile apart: with another seed (a node's name) the derived UUIDs are others.
func WithSeed(seed string) Option { return func(s *settings) { s.seed = seed } }

// WithDir makes the library one of the machine in dir: it obeys the faults file there, which need not exist, and shares the
// state of MIG with all other libraries of that machine. Without, there are no faults, and the state is the library's own.
func WithDir(dir string) Option { return func(s *settings) { s.dir = dir } }

// WithDev names the /dev that the process sees: where the profile says so (Nodes.MadeByNVML), the first Init makes missing device nodes
// in it. Without, no nodes are made.
func WithDev(dir string) Option { return func(s *settings) { s.dev = dir } }

// WithReport has report called when a changed faults file cannot be used (the faults before it stay in force), once for each
// change, and when the MIG state cannot be read or written. It is called from within NVML calls, so it must not make any.
func WithReport(report func(error)) Option { return func(s *settings) { s.onError = report } }

// New makes a library for a profile that Load or Parse gave; nothing happens before Init.
func New(profile Profile, opts ...Option) *Library {
	s := settings{boot: bootID(), privileges: AllPrivileges, onError: func(error) {}}
	for _, opt := range opts {
		opt(&s)
	}
	sys := &system{
		profile:    profile.WithIdentity(s.seed),
		stopped:    make(chan struct{}),
		report:     s.onError,
		privileges: s.privileges,
	}
	if sys.profile.Nodes.MadeByNVML {
		sys.dev = s.dev
	}
	close(sys.stopped)
	sys.faults = newFaultSource(s.dir, sys.profile, s.onError)
	sys.mig = newMIGStore(s.dir, s.boot, initialMIG(sys.profile), s.onError)
	for i := range sys.profile.GPUs {
		sys.all = append(sys.all, newGPU(sys, i))
	}
	return &Library{system: sys}
}

// Machine returns the library of the machine that Materialize made in dir, for a process outside of it: an administrator's
// program or a test, which may have another boot ID. It does nothing before Init.
func Machine(dir string, report func(error)) (*Library, error) {
	profile, err := Load(filepath.Join(dir, ProfileFile))
	if err != nil {
		return nil, err
	}
	state, err := readMIGState(filepath.Join(dir, MIGDir, MIGStateFile))
	if err != nil {
		return nil, fmt.Errorf("read the boot of the machine in %s: %w", dir, err)
	}
	boot := func(s *settings) { s.boot = state.Boot }
	return New(profile, WithDir(dir), WithReport(report), boot), nil
}

// Profile is the machine as this library shows it, every UUID and minor filled in.
func (l *Library) Profile() Profile { return l.profile }

// Init implements nvml.Interface; calls are counted, and as many Shutdowns end it.
func (l *Library) Init() nvml.Return { return l.InitWithFlags(0) }

// InitWithFlags implements nvml.Interface; the flags change nothing, since no GPU here can fail to attach.
func (l *Library) InitWithFlags(uint32) nvml.Return {
	// Nothing ends the wait of Init: there is no library to shut down yet.
	state, ret := l.faults.answer(libraryFault("Init"), nil)
	if ret != nvml.SUCCESS {
		return ret
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.users++
	if l.users > 1 {
		return nvml.SUCCESS
	}
	l.stopped = make(chan struct{})
	l.enumerated = nil
	l.minors = make([]int, len(l.all))
	var minors []int
	for i, h := range l.all {
		l.minors[i] = *l.profile.GPUs[i].Minor
		if moved := state.gpus[i].minor; moved != nil {
			l.minors[i] = *moved
		}
		if !state.gpus[i].absent {
			l.enumerated = append(l.enumerated, h)
			minors = append(minors, l.minors[i])
		}
	}
	if l.dev != "" {
		if err := makeNodes(l.dev, minors); err != nil {
			l.report(fmt.Errorf("make device nodes in %s: %w", l.dev, err))
		}
	}
	return nvml.SUCCESS
}

// libraryFault finds the fault of a library call.
func libraryFault(method string) func(*faultState) *callFault {
	return func(state *faultState) *callFault { return named(state.library, method) }
}

// Shutdown implements nvml.Interface.
func (l *Library) Shutdown() nvml.Return {
	if l.initialized() {
		if _, ret := l.faults.answer(libraryFault("Shutdown"), nil); ret != nvml.SUCCESS {
			return ret
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users == 0 {
		return nvml.ERROR_UNINITIALIZED
	}
	l.users--
	if l.users > 0 {
		return nvml.SUCCESS
	}
	close(l.stopped)
	return l.forgetSettings()
}

// ErrorString implements nvml.Interface.
func (l *Library) ErrorString(r nvml.Return) string { return r.Error() }

// Extensions implements nvml.Interface.
func (l *Library) Extensions() nvml.ExtendedInterface { return l }

// LookupSymbol implements nvml.ExtendedInterface. It finds every function of NVML, as in a current driver, except those that go-nvml calls
// through a handler value.
func (l *Library) LookupSymbol(name string) error {
	if !l.initialized() {
		return fmt.Errorf("look up symbol %s: library not loaded", name)
	}
	if !strings.HasPrefix(name, "nvml") || handlerSymbols[name] {
		return fmt.Errorf("look up symbol %s: not found", name)
	}
	return nil
}

// gate stands in front of each call that has no handle.
func (l *Library) gate(method string) nvml.Return {
	if !l.initialized() {
		return nvml.ERROR_UNINITIALIZED
	}
	_, ret := l.faults.answer(libraryFault(method), l.stop())
	return ret
}

func (s *system) initialized() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.users > 0
}

// stop is closed when the library is shut down.
func (s *system) stop() <-chan struct{} {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.stopped
}

func (s *system) handles() []*gpuHandle {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.enumerated
}

func (s *system) SystemGetDriverVersion() (string, nvml.Return) {
	return s.profile.Driver.Version, nvml.SUCCESS
}

func (s *system) SystemGetCudaDriverVersion() (int, nvml.Return) {
	major, minor := majorMinor(s.profile.Driver.CUDA)
	return major*1000 + minor*10, nvml.SUCCESS
}

func (s *system) DeviceGetCount() (int, nvml.Return) {
	return len(s.handles()), nvml.SUCCESS
}

func (s *system) DeviceGetHandleByIndex(index int) (nvml.Device, nvml.Return) {
	enumerated := s.handles()
	if index < 0 || index >= len(enumerated) {
		return nil, nvml.ERROR_INVALID_ARGUMENT
	}
	return enumerated[index].obtain("DeviceGetHandleByIndex")
}

func (s *system) DeviceGetHandleByUUID(uuid string) (nvml.Device, nvml.Return) {
	if strings.HasPrefix(uuid, "MIG-") {
		return s.obtainMIG(uuid)
	}
	return s.obtain("DeviceGetHandleByUUID", func(g *gpu) bool { return g.uuid == uuid })
}

func (s *system) DeviceGetHandleByPciBusId(address string) (nvml.Device, nvml.Return) { //nolint:revive // the name is go-nvml's
	wanted, err := parseAddress(address)
	if err != nil {
		return nil, nvml.ERROR_INVALID_ARGUMENT
	}
	return s.obtain("DeviceGetHandleByPciBusId", func(g *gpu) bool { return g.address == wanted })
}

func (s *system) obtain(method string, match func(*gpu) bool) (nvml.Device, nvml.Return) {
	for _, h := range s.handles() {
		if match(h.gpu) {
			return h.obtain(method)
		}
	}
	return nil, nvml.ERROR_NOT_FOUND
}

func (s *system) EventSetCreate() (nvml.EventSet, nvml.Return) {
	return &eventSetHandle{set: newEventSet(s)}, nvml.SUCCESS
}
