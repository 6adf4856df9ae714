// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// FaultsFile is the name of the faults file in a simulated machine's directory.
const FaultsFile = "faults.yaml"

// Faults is the content of the faults file: everything that is wrong with the machine at present. What is not named works.
type Faults struct {
	// GPUs holds the faults of single GPUs.
	GPUs []GPUFaults `json:"gpus,omitempty"`
	// Calls are faults of library calls that take no handle, by method of nvml.Interface ("Init", "DeviceGetCount") or of nvml.EventSet
	// ("EventSet.Wait"); "*" stands for all that are not named.
	Calls map[string]CallFault `json:"calls,omitempty"`
	// Events are delivered once to each event set that was registered for the GPU before they were written.
	Events []Event `json:"events,omitempty"`
}

// GPUFaults are the faults of one GPU.
type GPUFaults struct {
	// GPU is a UUID, or an index in the profile's order.
	GPU string `json:"gpu"`
	// Lost makes every call on the GPU, and those for its handle, answer ERROR_GPU_IS_LOST; it stays enumerated.
	Lost bool `json:"lost,omitempty"`
	// Absent is a GPU that has fallen off the bus: it is lost for a library that is initialized, and at the next Init it is
	// not enumerated, so the count is smaller, the indices behind it close up, and its UUID and address are NOT_FOUND.
	Absent bool `json:"absent,omitempty"`
	// Minor is the minor number that the GPU has from the next Init on, as after the driver was loaded again. To swap the minors of two
	// GPUs, name both. The capabilities of MIG and nvidia-smi keep to the profile.
	Minor *int `json:"minor,omitempty"`
	// PersistenceOff says that persistence mode is off: without clients the driver lets go of the GPU when the last Shutdown of a
	// library ends its session, and the GPU forgets compute mode and application clocks.
	PersistenceOff bool `json:"persistenceOff,omitempty"`
	// Calls are faults by method of nvml.Device ("GetMemoryInfo"), or by the call that hands out its handle
	// ("DeviceGetHandleByIndex", ...ByUUID, ...ByPciBusId). They come before Lost. Methods of what is on the GPU
	// have a prefix: "GpuInstance.Destroy", "ComputeInstance.GetInfo", "MigDevice.GetUUID". "*" stands for all that are not named.
	Calls map[string]CallFault `json:"calls,omitempty"`
	// Clients are processes that use the GPU: MIG mode cannot be changed then, nor an instance be destroyed that they use.
	Clients []Client `json:"clients,omitempty"`
	// Condition is what a GPU that works reports of its health.
	Condition `json:",inline"`
}

// Client is a process that uses a GPU or a partition.
type Client struct {
	PID uint32 `json:"pid"`
	// Partition is the place of what it uses, as in device.Ref after the "@": "4+4", or "4+4.0+1" for one of several compute
	// instances. Empty is the whole GPU.
	Partition string `json:"partition,omitempty"`
	// Graphics is set if it has a graphics context and no CUDA context.
	Graphics bool `json:"graphics,omitempty"`
}

// CallFault is what happens to a call.
type CallFault struct {
	// Return is the answer, "ERROR_UNKNOWN"; the call succeeds as usual where it is empty.
	Return string `json:"return,omitempty"`
	// Delay passes before the call goes on. It ends early when the faults file changes or the library is shut down.
	Delay Duration `json:"delay,omitempty"`
	// Hang makes the call wait until the faults file no longer says so, or the library is shut down.
	Hang bool `json:"hang,omitempty"`
	// Skip is the number of calls, in each process and since the faults file was written, that are left alone before the first
	// that fails; Times is the number that fail then, all where it is 0.
	Skip  int `json:"skip,omitempty"`
	Times int `json:"times,omitempty"`
}

// Event is an event that NVML reports.
type Event struct {
	// Sequence orders events and tells new ones from old ones: a writer counts up from 1.
	Sequence uint64 `json:"sequence"`
	// GPU is a UUID, or an index in the profile's order.
	GPU string `json:"gpu"`
	// XID is the number of the error.
	XID uint64 `json:"xid"`
	// GPUInstance and ComputeInstance are the IDs of those that the error is attributed to; nil for an error of the whole GPU, or of
	// the whole GPU instance. They are not delivered while MIG is off.
	GPUInstance     *int `json:"gpuInstance,omitempty"`
	ComputeInstance *int `json:"computeInstance,omitempty"`
	// PID and Process are those that the kernel's log names, and Message is the end of the line; the driver's where it is empty.
	PID     uint32 `json:"pid,omitempty"`
	Process string `json:"process,omitempty"`
	Message string `json:"message,omitempty"`
}

// Duration is a time.Duration that reads and writes as "1m30s".
type Duration time.Duration

// MarshalJSON implements json.Marshaler.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

// UnmarshalJSON implements json.Unmarshaler.
func (d *Duration) UnmarshalJSON(data []byte) error {
	var text string
	if err := json.Unmarshal(data, &text); err != nil {
		return err
	}
	parsed, err := time.ParseDuration(text)
	if err != nil {
		return err
	}
	*d = Duration(parsed)
	return nil
}

// WriteFaults puts the faults of the machine in dir into force, in place of those before, in one step. It returns when the
// next call of any library that watches dir sees them. Events that were not in the file before are appended to the kernel's log.
func WriteFaults(dir string, faults Faults) error {
	before, err := ReadFaults(dir)
	if err != nil {
		before = Faults{} // an unusable file has had no effect
	}
	data, err := yaml.Marshal(faults)
	if err != nil {
		return fmt.Errorf("write faults: %w", err)
	}
	if err := replaceNewer(filepath.Join(dir, FaultsFile), data, 0o644); err != nil {
		return err
	}
	return logXIDs(dir, before, faults)
}

// ReadFaults reads the faults in force for the machine in dir, so that a test can add to them. A missing file is no fault.
func ReadFaults(dir string) (Faults, error) {
	var faults Faults
	data, err := os.ReadFile(filepath.Join(dir, FaultsFile))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return Faults{}, fmt.Errorf("read faults: %w", err)
	}
	if err := decodeStrict(data, &faults); err != nil {
		return Faults{}, fmt.Errorf("read faults %s: %w", filepath.Join(dir, FaultsFile), err)
	}
	return faults, nil
}

// faultState is a Faults checked and indexed for a profile.
type faultState struct {
	library map[string]*callFault
	gpus    []gpuFaults // by place in the profile
	events  []event
	newest  uint64 // the highest sequence among events
}

type gpuFaults struct {
	lost, absent bool
	minor        *int // nil for the profile's
	calls        map[string]*callFault
	clients      []client
	// persistenceOff is that of GPUFaults.
	persistenceOff bool
	condition      condition
}

// everyCall is the name that stands for all calls.
const everyCall = "*"

// named is the fault of a call; nil for none.
func named(calls map[string]*callFault, method string) *callFault {
	if fault := calls[method]; fault != nil {
		return fault
	}
	return calls[everyCall]
}

type callFault struct {
	hang        bool
	ret         nvml.Return
	delay       time.Duration
	skip, times int64
	// made counts the calls.
	made atomic.Int64
}

// hits counts a call, and reports whether it fails. A nil fault never does.
func (f *callFault) hits() bool {
	if f == nil {
		return false
	}
	n := f.made.Add(1)
	return n > f.skip && (f.times == 0 || n <= f.skip+f.times)
}

type event struct {
	sequence uint64
	place    int
	xid      uint64
	// gi and ci are noInstance for none.
	gi, ci uint32
}

var handleGetters = map[string]bool{
	"DeviceGetHandleByIndex": true, "DeviceGetHandleByUUID": true, "DeviceGetHandleByPciBusId": true,
}

// compile checks faults against a profile; the error names the field.
func (f Faults) compile(profile Profile) (*faultState, error) {
	state := &faultState{gpus: make([]gpuFaults, len(profile.GPUs))}
	var problems []error
	var err error
	if state.library, err = compileCalls("calls", f.Calls, libraryMethods, eventSetMethods); err != nil {
		problems = append(problems, err)
	}
	for i, g := range f.GPUs {
		at := fmt.Sprintf("gpus[%d]", i)
		place, err := profile.find(g.GPU)
		if err != nil {
			problems = append(problems, fmt.Errorf("%s.gpu: %w", at, err))
			continue
		}
		calls, err := compileCalls(at+".calls", g.Calls,
			deviceMethods, handleGetters, migDeviceMethods, gpuInstanceMethods, computeInstanceMethods)
		if err != nil {
			problems = append(problems, err)
		}
		clients, err := compileClients(at+".clients", profile.GPUs[place].UUID, g.Clients)
		if err != nil {
			problems = append(problems, err)
		}
		condition, err := g.Condition.compile(at)
		if err != nil {
			problems = append(problems, err)
		}
		state.gpus[place] = gpuFaults{
			lost: g.Lost, absent: g.Absent, minor: g.Minor, persistenceOff: g.PersistenceOff,
			calls: calls, clients: clients, condition: condition,
		}
	}
	if err := state.checkMinors(profile); err != nil {
		problems = append(problems, err)
	}
	for i, e := range f.Events {
		place, err := profile.find(e.GPU)
		if err != nil {
			problems = append(problems, fmt.Errorf("events[%d].gpu: %w", i, err))
			continue
		}
		compiled := event{sequence: e.Sequence, place: place, xid: e.XID, gi: noInstance, ci: noInstance}
		if e.GPUInstance != nil {
			compiled.gi = uint32(*e.GPUInstance)
		}
		if e.ComputeInstance != nil {
			compiled.ci = uint32(*e.ComputeInstance)
		}
		if e.ComputeInstance != nil && e.GPUInstance == nil {
			problems = append(problems, fmt.Errorf("events[%d].computeInstance: there is no gpuInstance", i))
		}
		state.events = append(state.events, compiled)
		state.newest = max(state.newest, e.Sequence)
	}
	return state, errors.Join(problems...)
}

// checkMinors requires that GPUs have different minors. A profile that was not resolved has no minors of its own.
func (s *faultState) checkMinors(p Profile) error {
	taken := map[int]int{}
	for place, g := range p.GPUs {
		minor := s.gpus[place].minor
		if minor == nil {
			minor = g.Minor
		}
		if minor == nil {
			continue
		}
		if *minor < 0 || *minor == minorModeset || *minor == minorCtl {
			return fmt.Errorf("gpus: minor %d is no GPU's", *minor)
		}
		if other, ok := taken[*minor]; ok {
			return fmt.Errorf("gpus: GPUs %d and %d both have minor %d", other, place, *minor)
		}
		taken[*minor] = place
	}
	return nil
}

func compileCalls(path string, calls map[string]CallFault, known ...map[string]bool) (map[string]*callFault, error) {
	compiled := map[string]*callFault{}
	var problems []error
	for method, fault := range calls {
		ret, ok := returnByName(fault.Return)
		if !ok {
			problems = append(problems, fmt.Errorf("%s.%s.return: %q is no NVML return code", path, method, fault.Return))
		}
		if method != everyCall && !knownMethod(method, known) {
			problems = append(problems, fmt.Errorf("%s.%s: no such method", path, method))
		}
		if fault.Skip < 0 || fault.Times < 0 {
			problems = append(problems, fmt.Errorf("%s.%s: skip and times cannot be negative", path, method))
		}
		compiled[method] = &callFault{
			hang: fault.Hang, ret: ret, delay: time.Duration(fault.Delay), skip: int64(fault.Skip), times: int64(fault.Times),
		}
	}
	return compiled, errors.Join(problems...)
}

func compileClients(path, gpu string, clients []Client) ([]client, error) {
	var compiled []client
	var problems []error
	for i, c := range clients {
		ref := device.Ref{GPU: gpu}
		if c.Partition != "" {
			var err error
			if ref, err = device.ParseRef(gpu + "@" + c.Partition); err != nil {
				problems = append(problems, fmt.Errorf("%s[%d].partition: %w", path, i, err))
			}
		}
		compiled = append(compiled, client{pid: c.PID, ref: ref, graphics: c.Graphics})
	}
	return compiled, errors.Join(problems...)
}

func knownMethod(method string, sets []map[string]bool) bool {
	for _, set := range sets {
		if set[method] {
			return true
		}
	}
	return false
}

// find is the place of the GPU that a faults file names by UUID or by place.
func (p Profile) find(gpu string) (int, error) {
	if place, err := strconv.Atoi(gpu); err == nil && place >= 0 && place < len(p.GPUs) {
		return place, nil
	}
	for place, g := range p.GPUs {
		if g.UUID == gpu {
			return place, nil
		}
	}
	return 0, fmt.Errorf("%q is neither a UUID nor an index of a GPU of %s", gpu, p.Name)
}

func returnByName(name string) (nvml.Return, bool) {
	ret, ok := returns[name]
	return ret, ok
}

// returns are NVML's return codes by name. nvml.Return.Error cannot serve: with a real library loaded it gives prose.
var returns = map[string]nvml.Return{
	"":                                nvml.SUCCESS,
	"SUCCESS":                         nvml.SUCCESS,
	"ERROR_UNINITIALIZED":             nvml.ERROR_UNINITIALIZED,
	"ERROR_INVALID_ARGUMENT":          nvml.ERROR_INVALID_ARGUMENT,
	"ERROR_NOT_SUPPORTED":             nvml.ERROR_NOT_SUPPORTED,
	"ERROR_NO_PERMISSION":             nvml.ERROR_NO_PERMISSION,
	"ERROR_ALREADY_INITIALIZED":       nvml.ERROR_ALREADY_INITIALIZED,
	"ERROR_NOT_FOUND":                 nvml.ERROR_NOT_FOUND,
	"ERROR_INSUFFICIENT_SIZE":         nvml.ERROR_INSUFFICIENT_SIZE,
	"ERROR_INSUFFICIENT_POWER":        nvml.ERROR_INSUFFICIENT_POWER,
	"ERROR_DRIVER_NOT_LOADED":         nvml.ERROR_DRIVER_NOT_LOADED,
	"ERROR_TIMEOUT":                   nvml.ERROR_TIMEOUT,
	"ERROR_IRQ_ISSUE":                 nvml.ERROR_IRQ_ISSUE,
	"ERROR_LIBRARY_NOT_FOUND":         nvml.ERROR_LIBRARY_NOT_FOUND,
	"ERROR_FUNCTION_NOT_FOUND":        nvml.ERROR_FUNCTION_NOT_FOUND,
	"ERROR_CORRUPTED_INFOROM":         nvml.ERROR_CORRUPTED_INFOROM,
	"ERROR_GPU_IS_LOST":               nvml.ERROR_GPU_IS_LOST,
	"ERROR_RESET_REQUIRED":            nvml.ERROR_RESET_REQUIRED,
	"ERROR_OPERATING_SYSTEM":          nvml.ERROR_OPERATING_SYSTEM,
	"ERROR_LIB_RM_VERSION_MISMATCH":   nvml.ERROR_LIB_RM_VERSION_MISMATCH,
	"ERROR_IN_USE":                    nvml.ERROR_IN_USE,
	"ERROR_MEMORY":                    nvml.ERROR_MEMORY,
	"ERROR_NO_DATA":                   nvml.ERROR_NO_DATA,
	"ERROR_VGPU_ECC_NOT_SUPPORTED":    nvml.ERROR_VGPU_ECC_NOT_SUPPORTED,
	"ERROR_INSUFFICIENT_RESOURCES":    nvml.ERROR_INSUFFICIENT_RESOURCES,
	"ERROR_FREQ_NOT_SUPPORTED":        nvml.ERROR_FREQ_NOT_SUPPORTED,
	"ERROR_ARGUMENT_VERSION_MISMATCH": nvml.ERROR_ARGUMENT_VERSION_MISMATCH,
	"ERROR_DEPRECATED":                nvml.ERROR_DEPRECATED,
	"ERROR_NOT_READY":                 nvml.ERROR_NOT_READY,
	"ERROR_GPU_NOT_FOUND":             nvml.ERROR_GPU_NOT_FOUND,
	"ERROR_INVALID_STATE":             nvml.ERROR_INVALID_STATE,
	"ERROR_UNKNOWN":                   nvml.ERROR_UNKNOWN,
}
