// SPDX-License-Identifier: Apache-2.0

// Loads libnvidia-ml, and keeps calls away from functions that it lacks.

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/broadcast"
)

func (o Options) openLibrary(l layout) (gonvml.Interface, error) {
	open := o.OpenLibrary
	if open == nil {
		open = func() (gonvml.Interface, error) {
			return gonvml.New(gonvml.WithLibraryPath(l.library)), bind(l.library)
		}
	}
	library, err := open()
	if err != nil {
		return nil, err
	}
	if o.WrapLibrary != nil {
		library = o.WrapLibrary(library)
	}
	return &guard{Interface: library}, nil
}

// bound is the library whose functions this process runs. It is a package variable because the dynamic linker binds once per
// process.
var bound struct {
	sync.Mutex
	to os.FileInfo
}

// bind checks a library before go-nvml opens it, and returns an error if this process can no longer use it. Name, size and time
// distinguish builds of a library, wherever it is mounted.
func bind(path string) error {
	bound.Lock()
	defer bound.Unlock()
	file, err := os.Stat(path)
	if err == nil && bound.to == nil {
		err = checkSymbols(path)
	}
	if err != nil {
		return &NoDriverError{Cause: err}
	}
	to := cmp.Or(bound.to, file)
	if to.Name() != file.Name() || to.Size() != file.Size() || !to.ModTime().Equal(file.ModTime()) {
		return ErrDriverReplaced
	}
	bound.to = file
	return nil
}

// requiredSymbols are functions that every driver since R450 has; alternatives are later versions of one function. go-nvml calls
// nvmlErrorString to print an error.
var requiredSymbols = [][]string{
	{"nvmlInit_v2", "nvmlInit"},
	{"nvmlShutdown"},
	{"nvmlErrorString"},
	{"nvmlSystemGetDriverVersion"},
	{"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"},
	{"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"},
	{"nvmlSystemGetCudaDriverVersion"},
	{"nvmlDeviceGetHandleByUUID"},
	{"nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetHandleByPciBusId"},
	{"nvmlDeviceGetUUID"},
	{"nvmlDeviceGetIndex"},
	{"nvmlDeviceGetMinorNumber"},
	{"nvmlDeviceGetName"},
	{"nvmlDeviceGetBrand"},
	{"nvmlDeviceGetCudaComputeCapability"},
	{"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo"},
	{"nvmlDeviceGetMemoryInfo"},
	{"nvmlDeviceGetEccMode"},
	{"nvmlDeviceGetComputeMode"},
	{"nvmlDeviceSetComputeMode"},
	{"nvmlDeviceGetPersistenceMode"},
	{"nvmlDeviceGetNvLinkState"},
	{"nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetNvLinkRemotePciInfo"},
	{"nvmlDeviceGetTopologyCommonAncestor"},
}

func checkSymbols(path string) (err error) {
	library := dl.New(path, dl.RTLD_LAZY|dl.RTLD_LOCAL)
	if err := library.Open(); err != nil {
		return fmt.Errorf("open library: %w", err)
	}
	defer func() { err = errors.Join(err, library.Close()) }()
	if lacking := lacks(library.Lookup, requiredSymbols); lacking != "" {
		return fmt.Errorf("%s lacks %s", path, lacking)
	}
	return nil
}

// lacks returns the first function that the library has in none of its versions; empty if it has all functions.
func lacks(lookup func(string) error, symbols [][]string) string {
	for _, versions := range symbols {
		if !slices.ContainsFunc(versions, func(symbol string) bool { return lookup(symbol) == nil }) {
			return versions[0]
		}
	}
	return ""
}

// guard wraps a library that may lack functions: it returns ERROR_FUNCTION_NOT_FOUND where the call would end the process. It
// covers the calls of this package, go-nvlib and nvcdi that drivers older than R535 may lack; required symbols need no guard.
type guard struct {
	gonvml.Interface
}

// has reports whether the library has a version of a function.
func (g *guard) has(versions ...string) bool {
	return lacks(g.Extensions().LookupSymbol, [][]string{versions}) == ""
}

func (g *guard) device(d gonvml.Device, ret gonvml.Return) (gonvml.Device, gonvml.Return) {
	if ret != gonvml.SUCCESS {
		return nil, ret
	}
	return &guardedDevice{Device: d, guard: g}, ret
}

func (g *guard) DeviceGetHandleByIndex(index int) (gonvml.Device, gonvml.Return) {
	return g.device(g.Interface.DeviceGetHandleByIndex(index))
}

func (g *guard) DeviceGetHandleByUUID(uuid string) (gonvml.Device, gonvml.Return) {
	return g.device(g.Interface.DeviceGetHandleByUUID(uuid))
}

func (g *guard) DeviceGetHandleByPciBusId(address string) (gonvml.Device, gonvml.Return) { //nolint:revive // the name is go-nvml's
	return g.device(g.Interface.DeviceGetHandleByPciBusId(address))
}

// guardedDevice embeds the Device under that name, by which go-nvml finds the handle.
type guardedDevice struct {
	gonvml.Device
	guard *guard
}

// Wrapped implements record.Wrapper.
func (d *guardedDevice) Wrapped() gonvml.Device { return d.Device }

// guarded calls a function with one result if the library has a version of it.
func guarded[T any](d *guardedDevice, call func() (T, gonvml.Return), versions ...string) (T, gonvml.Return) {
	if !d.guard.has(versions...) {
		var zero T
		return zero, gonvml.ERROR_FUNCTION_NOT_FOUND
	}
	return call()
}

func (d *guardedDevice) GetArchitecture() (gonvml.DeviceArchitecture, gonvml.Return) {
	return guarded(d, d.Device.GetArchitecture, "nvmlDeviceGetArchitecture")
}

// migSymbols are the functions that are called on GPUs whose MIG mode can be read, their instances and MIG devices. R470 is the first
// driver that has a version of each.
var migSymbols = [][]string{
	{"nvmlDeviceGetMigMode"}, {"nvmlDeviceSetMigMode"}, {"nvmlDeviceGetMaxMigDeviceCount"}, {"nvmlDeviceGetMigDeviceHandleByIndex"},
	{"nvmlDeviceGetDeviceHandleFromMigDeviceHandle"}, {"nvmlDeviceGetGpuInstanceId"}, {"nvmlDeviceGetComputeInstanceId"},
	{"nvmlDeviceGetGpuInstanceProfileInfo"}, {"nvmlDeviceGetGpuInstances"}, {"nvmlDeviceGetGpuInstanceById"},
	{"nvmlDeviceGetGpuInstancePossiblePlacements_v2", "nvmlDeviceGetGpuInstancePossiblePlacements"},
	{"nvmlDeviceCreateGpuInstanceWithPlacement"}, {"nvmlGpuInstanceGetInfo"}, {"nvmlGpuInstanceDestroy"},
	{"nvmlGpuInstanceGetComputeInstanceProfileInfo"}, {"nvmlGpuInstanceGetComputeInstances"},
	{"nvmlGpuInstanceGetComputeInstanceById"}, {"nvmlGpuInstanceCreateComputeInstance"},
	{"nvmlComputeInstanceGetInfo_v2", "nvmlComputeInstanceGetInfo"}, {"nvmlComputeInstanceDestroy"},
	{"nvmlDeviceGetAttributes_v2", "nvmlDeviceGetAttributes"},
	computeProcesses,
}

// GetMigMode returns NOT_SUPPORTED if any MIG function is missing: such a driver is older than MIG, or than this package's use of
// it.
func (d *guardedDevice) GetMigMode() (int, int, gonvml.Return) {
	if lacks(d.guard.Extensions().LookupSymbol, migSymbols) != "" {
		return 0, 0, gonvml.ERROR_NOT_SUPPORTED
	}
	return d.Device.GetMigMode()
}

// IsMigDeviceHandle returns false without the function: there are no MIG devices then.
func (d *guardedDevice) IsMigDeviceHandle() (bool, gonvml.Return) {
	if !d.guard.has("nvmlDeviceIsMigDeviceHandle") {
		return false, gonvml.SUCCESS
	}
	is, ret := d.Device.IsMigDeviceHandle()
	if unsupported(ret) {
		return false, gonvml.SUCCESS
	}
	return is, ret
}

// GetApplicationsClock is deprecated in later drivers, which may lack it.
func (d *guardedDevice) GetApplicationsClock(clock gonvml.ClockType) (uint32, gonvml.Return) {
	call := func() (uint32, gonvml.Return) { return d.Device.GetApplicationsClock(clock) }
	return guarded(d, call, "nvmlDeviceGetApplicationsClock")
}

func (d *guardedDevice) SetApplicationsClocks(memory, graphics uint32) gonvml.Return {
	if !d.guard.has("nvmlDeviceSetApplicationsClocks") {
		return gonvml.ERROR_FUNCTION_NOT_FOUND
	}
	return d.Device.SetApplicationsClocks(memory, graphics)
}

func (d *guardedDevice) GetComputeRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return guarded(d, d.Device.GetComputeRunningProcesses, computeProcesses...)
}

// GetMPSComputeRunningProcesses came with R470.
func (d *guardedDevice) GetMPSComputeRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return guarded(d, d.Device.GetMPSComputeRunningProcesses, threeVersions("nvmlDeviceGetMPSComputeRunningProcesses")...)
}

func (d *guardedDevice) GetGraphicsRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return guarded(d, d.Device.GetGraphicsRunningProcesses, threeVersions("nvmlDeviceGetGraphicsRunningProcesses")...)
}

var computeProcesses = threeVersions("nvmlDeviceGetComputeRunningProcesses")

// threeVersions are those of a list of processes. A driver may drop the first ones.
func threeVersions(name string) []string { return []string{name + "_v3", name + "_v2", name} }

func (d *guardedDevice) GetAddressingMode() (gonvml.DeviceAddressingMode, gonvml.Return) {
	return guarded(d, d.Device.GetAddressingMode, "nvmlDeviceGetAddressingMode")
}

func (d *guardedDevice) GetGpuFabricInfo() (gonvml.GpuFabricInfo, gonvml.Return) {
	return guarded(d, d.Device.GetGpuFabricInfo, "nvmlDeviceGetGpuFabricInfo")
}

// GetFieldValues came with R384.
func (d *guardedDevice) GetFieldValues(values []gonvml.FieldValue) gonvml.Return {
	if !d.guard.has("nvmlDeviceGetFieldValues") {
		return gonvml.ERROR_FUNCTION_NOT_FOUND
	}
	return d.Device.GetFieldValues(values)
}

// GetCurrentClocksEventReasons has the name that it had before R535 where the library lacks the later one.
func (d *guardedDevice) GetCurrentClocksEventReasons() (uint64, gonvml.Return) {
	if d.guard.has("nvmlDeviceGetCurrentClocksEventReasons") {
		return d.Device.GetCurrentClocksEventReasons()
	}
	return guarded(d, d.Device.GetCurrentClocksThrottleReasons, "nvmlDeviceGetCurrentClocksThrottleReasons")
}

func (d *guardedDevice) GetNvLinkRemoteDeviceType(link int) (gonvml.IntNvLinkDeviceType, gonvml.Return) {
	call := func() (gonvml.IntNvLinkDeviceType, gonvml.Return) { return d.Device.GetNvLinkRemoteDeviceType(link) }
	return guarded(d, call, "nvmlDeviceGetNvLinkRemoteDeviceType")
}

// GetTopologyCommonAncestor unwraps the other GPU, of which go-nvml needs the handle.
func (d *guardedDevice) GetTopologyCommonAncestor(other gonvml.Device) (gonvml.GpuTopologyLevel, gonvml.Return) {
	if o, ok := other.(*guardedDevice); ok {
		other = o.Device
	}
	return d.Device.GetTopologyCommonAncestor(other)
}

// unsupported reports whether the GPU or the driver lacks a feature, which says nothing about the GPU's health.
func unsupported(ret gonvml.Return) bool {
	switch ret {
	case gonvml.ERROR_NOT_SUPPORTED, gonvml.ERROR_FUNCTION_NOT_FOUND, gonvml.ERROR_NO_PERMISSION,
		gonvml.ERROR_ARGUMENT_VERSION_MISMATCH, gonvml.ERROR_DEPRECATED:
		return true
	}
	return false
}

// session keeps NVML initialised while it has users or is held (see the package documentation).
type session struct {
	library gonvml.Interface
	// paused is the node's. While it is set no use begins, and the session is not held.
	paused *atomic.Pointer[PausedError]

	mu    sync.Mutex
	users int
	// holding counts as one user between uses.
	holding bool
	// lingering ends the session some time after the last operation; nil unless it is open for no other reason.
	lingering *time.Timer
	// handles are GPUs by UUID. They are valid until the session ends.
	handles map[string]gonvml.Device
	// suspended is set while no use may begin. It is read without mu, which a hung driver keeps locked. idle is announced when the last
	// use ends, or suspended or wanted changes to zero.
	suspended atomic.Bool
	idle      broadcast.Signal
	// wanted counts the callers of suspend: a long use should end, and none begin.
	wanted atomic.Int32
	// outdated is set if the session should end with its last use. A long use should end, and none begin.
	outdated atomic.Bool
}

// errSuspended means that no use may begin now.
var errSuspended = errors.New("a GPU is being reset")

// open starts a use; close ends it. It waits while the session is suspended. After an error there is nothing to close.
func (s *session) open() error {
	for {
		err := s.tryOpen()
		if !errors.Is(err, errSuspended) {
			return err
		}
		broadcast.Await(context.Background(), s.idle.Changed, func() bool { return !s.suspended.Load() })
	}
}

// tryOpen is open for callers that do not wait while the session is suspended: they get errSuspended.
func (s *session) tryOpen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if paused := s.paused.Load(); paused != nil {
		return paused
	}
	if s.suspended.Load() {
		return errSuspended
	}
	if !s.isOpen() {
		if ret := s.library.Init(); ret != gonvml.SUCCESS {
			return initError(ret)
		}
	}
	s.stay()
	s.users++
	return nil
}

// join starts another use within one that is open.
func (s *session) join() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.users++
}

// isOpen, stay and shutdown need s.mu.
func (s *session) isOpen() bool { return s.users > 0 || s.holding || s.lingering != nil }

// stay keeps a session open that lingers.
func (s *session) stay() {
	if s.lingering != nil {
		s.lingering.Stop()
		s.lingering = nil
	}
}

func (s *session) shutdown() {
	s.stay()
	s.handles, s.holding = nil, false
	s.outdated.Store(false)
	s.library.Shutdown()
}

func (s *session) close() { s.endUse(false) }

// linger is how long the session stays open after an operation. A claim for a partition needs several operations, and each Init and each
// first handle of a GPU takes the driver milliseconds to seconds under load.
const linger = time.Second

// closeLater is close for an operation: the next one is likely to follow.
func (s *session) closeLater() { s.endUse(true) }

func (s *session) endUse(another bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users--; s.users > 0 {
		return
	}
	switch {
	case s.holding && !s.outdated.Load():
	case !another || s.outdated.Load() || s.paused.Load() != nil:
		s.shutdown()
	default:
		var timer *time.Timer
		timer = time.AfterFunc(linger, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.lingering == timer {
				s.shutdown()
			}
		})
		s.lingering = timer
	}
	s.idle.Notify()
}

// handle returns a GPU. Needs an open use. It asks by PCI address: a search by UUID initialises other GPUs, too (nvml.h,
// nvmlDeviceGetHandleByUUID), and hangs if one of them does.
func (s *session) handle(uuid, address string) (gonvml.Device, gonvml.Return) {
	s.mu.Lock()
	known := s.handles[uuid]
	s.mu.Unlock()
	if known != nil {
		return known, gonvml.SUCCESS
	}
	d, ret := s.find(uuid, address)
	if ret != gonvml.SUCCESS {
		return nil, ret
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.handles == nil {
		s.handles = map[string]gonvml.Device{}
	}
	s.handles[uuid] = d
	return d, ret
}

func (s *session) find(uuid, address string) (gonvml.Device, gonvml.Return) {
	if address == "" {
		return s.library.DeviceGetHandleByUUID(uuid)
	}
	d, ret := s.library.DeviceGetHandleByPciBusId(address)
	if ret != gonvml.SUCCESS {
		return nil, ret
	}
	switch found, ret := d.GetUUID(); {
	case ret != gonvml.SUCCESS:
		return nil, ret
	case found != uuid:
		return nil, gonvml.ERROR_NOT_FOUND // another GPU is at that address now
	}
	return d, ret
}

// setHold sets whether the session stays open between uses. setHold(true) needs an open use; setHold(false) may close the session.
func (s *session) setHold(hold bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	hold = hold && s.paused.Load() == nil
	if !hold && s.users == 0 && s.isOpen() {
		s.shutdown()
	}
	s.holding = hold
}

// endSession ends the session, even if it is held; now, or with its last use.
func (s *session) endSession() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users > 0 {
		s.outdated.Store(true)
	} else if s.isOpen() {
		s.shutdown()
	}
}

// suspend waits for the uses that are open, closes NVML and calls do. Other uses wait. It fails if a use stays open for longer than limit.
// A session that was held open is so again from the next scan on.
func (s *session) suspend(limit time.Duration, do func() error) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	s.wanted.Add(1)
	defer func() {
		s.wanted.Add(-1)
		s.idle.Notify()
	}()
	if !broadcast.Await(ctx, s.idle.Changed, s.trySuspend) {
		return errors.New("a call of the agent to the driver does not return")
	}
	defer s.suspended.Store(false)
	return do()
}

// trySuspend suspends a session without users. The session counts as suspended once it is closed: while Shutdown hangs, a scan finds that
// the driver does not answer.
func (s *session) trySuspend() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users > 0 || s.suspended.Load() {
		return false
	}
	if s.isOpen() {
		s.shutdown()
	}
	s.suspended.Store(true)
	return true
}

// initError adds what an administrator can do.
func initError(ret gonvml.Return) error {
	e := &NoDriverError{Cause: returnError{ret}}
	switch ret {
	case gonvml.ERROR_DRIVER_NOT_LOADED:
		e.Looked = []string{"kernel: the nvidia module is not loaded"}
	case gonvml.ERROR_LIB_RM_VERSION_MISMATCH:
		e.Looked = []string{"kernel: the nvidia module that is loaded has another version than the library"}
	case gonvml.ERROR_NO_PERMISSION, gonvml.ERROR_UNKNOWN:
		e.Looked = []string{"/dev/nvidiactl: opening it must be allowed (a privileged container, or a runtime class)"}
	}
	return e
}

// returnError is NVML's answer as an error.
type returnError struct{ ret gonvml.Return }

func (e returnError) Error() string {
	text := "NVML answers " + e.ret.Error()
	if e.ret == gonvml.ERROR_NO_PERMISSION {
		text += " (the agent needs CAP_SYS_ADMIN: access privileged, or runtimeClass with migAccess, in the chart's values)"
	}
	return text
}

// ErrNoDriver means that the node has no working NVIDIA driver now. Run waits for one.
var ErrNoDriver = errors.New("no NVIDIA driver")

// ErrDriverReplaced means that the driver's library on disk is not the one that this process has bound. Only a new process can use
// the new library (see the package documentation).
var ErrDriverReplaced = errors.New("the NVIDIA driver was replaced")

// NoDriverError is an ErrNoDriver with the checked paths.
type NoDriverError struct {
	// Looked has one "<path>: <result>" for each checked path.
	Looked []string
	// Cause is set if a library was found and did not work.
	Cause error
	// NoHardware is set if sysfs shows no NVIDIA GPU: no driver is missing then.
	NoHardware bool
}

func (e *NoDriverError) Error() string {
	text := ErrNoDriver.Error()
	if e.Cause != nil {
		text += fmt.Sprintf(": %v", e.Cause)
	}
	if len(e.Looked) > 0 {
		text += " (looked at " + strings.Join(e.Looked, "; ") + ")"
	}
	return text
}

// Is makes a NoDriverError an ErrNoDriver.
func (e *NoDriverError) Is(target error) bool { return target == ErrNoDriver }

func (e *NoDriverError) Unwrap() error { return e.Cause }
