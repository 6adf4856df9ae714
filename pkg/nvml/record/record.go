// SPDX-License-Identifier: Apache-2.0

// Package record keeps all calls of an NVML library with their answers, for a report of a node, and from which a
// simulated machine can be made.
package record

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

//go:generate go run ./internal/gen zz_generated.record.go

// Call is a call of NVML with its answer. Equal calls with the same return code are one Call.
type Call struct {
	// On is the handle: empty for the library, "gpu0" for the GPU at index 0, "gpu0/mig1" for its MIG device 1, "gpu0/gi3" for GPU instance
	// 3, "gpu0/gi3/ci0" for a compute instance, "events" for an event set. A MIG device that was looked up by UUID has the UUID.
	On string `json:"on,omitempty"`
	// Method is go-nvml's, LookupSymbol included: it asks whether the library has a function.
	Method string `json:"method"`
	// Args and Values are arrays. A struct is an object with go-nvml's field names, a handle its name, a byte array hexadecimal. Values has
	// what the last of the calls returned besides the code, and then each slice in Args as the call left it.
	Args   json.RawMessage `json:"args,omitempty"`
	Values json.RawMessage `json:"values,omitempty"`
	// Return is NVML's return code, Code its name in nvml.h without the prefix NVML_. Both are absent while the call has not returned.
	Return int    `json:"return"`
	Code   string `json:"code"`
	// Count is the number of calls. Slowest is the duration of the longest one.
	Count   int           `json:"count"`
	Slowest time.Duration `json:"slowestNanoseconds"`
}

// NoAnswer is the Code of a call that has not returned.
const NoAnswer = "NO_ANSWER"

// Recorder keeps the calls of the libraries that it wraps, with what they themselves answer. It is safe for concurrent use. The zero value is
// empty.
type Recorder struct {
	mu    sync.Mutex
	calls []*Call
	known map[string]*Call
	// open has the calls that have not returned.
	open []*openCall
	// names has the names of GPUs by handle.
	names map[gonvml.Device]string
}

type openCall struct {
	Call
	since time.Time
}

// Calls returns the calls so far, in the order of their first answers, and then those that have not returned.
func (r *Recorder) Calls() []Call {
	r.mu.Lock()
	defer r.mu.Unlock()
	var calls []Call
	for _, c := range r.calls {
		calls = append(calls, *c)
	}
	for _, o := range r.open {
		c := o.Call
		c.Code, c.Count, c.Slowest = NoAnswer, 1, time.Since(o.since)
		calls = append(calls, c)
	}
	return calls
}

// Wrap returns the library with all calls recorded.
func (r *Recorder) Wrap(library gonvml.Interface) gonvml.Interface {
	return &recordedLibrary{Interface: library, recorded: recorded{recorder: r}}
}

func (r *Recorder) begin(on, method string, args []any) *openCall {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := &openCall{Call: Call{On: on, Method: method, Args: encoded(args)}, since: time.Now()}
	r.open = append(r.open, o)
	return o
}

func (r *Recorder) end(o *openCall, ret gonvml.Return, values []any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open = slices.DeleteFunc(r.open, func(other *openCall) bool { return other == o })
	key := fmt.Sprint(o.On, "\n", o.Method, "\n", string(o.Args), "\n", int(ret))
	c := r.known[key]
	if c == nil {
		c = &o.Call
		c.Return, c.Code = int(ret), codeOf(ret)
		if r.known == nil {
			r.known = map[string]*Call{}
		}
		r.known[key] = c
		r.calls = append(r.calls, c)
	}
	c.Count++
	c.Slowest = max(c.Slowest, time.Since(o.since))
	if ret == gonvml.SUCCESS {
		c.Values = encoded(values)
	}
}

// recorded is what the wrappers of all handles have in common.
type recorded struct {
	recorder *Recorder
	name     string
}

func (h recorded) handleName() string { return h.name }

// call records the beginning of a call. The function that it returns records the end: it wraps the handles among the results.
func (h recorded) call(method string, args ...any) func(ret *gonvml.Return, results ...any) {
	o := h.recorder.begin(h.name, method, args)
	return func(ret *gonvml.Return, results ...any) {
		var values []any
		if *ret == gonvml.SUCCESS {
			for _, result := range results {
				h.wrap(method, args, result)
				values = append(values, result)
			}
			for _, arg := range args {
				if reflect.ValueOf(arg).Kind() == reflect.Slice {
					values = append(values, arg)
				}
			}
		}
		h.recorder.end(o, *ret, values)
	}
}

// wrap replaces the handles in a result by recorded ones.
func (h recorded) wrap(method string, args []any, result any) {
	switch to := result.(type) {
	case *gonvml.Device:
		h.wrapDevice(to, method, args)
	case *[]gonvml.Device:
		for i := range *to {
			h.wrapDevice(&(*to)[i], method, nil)
		}
	case *gonvml.GpuInstance:
		h.wrapGpuInstance(to)
	case *[]gonvml.GpuInstance:
		for i := range *to {
			h.wrapGpuInstance(&(*to)[i])
		}
	case *gonvml.ComputeInstance:
		h.wrapComputeInstance(to)
	case *[]gonvml.ComputeInstance:
		for i := range *to {
			h.wrapComputeInstance(&(*to)[i])
		}
	case *gonvml.GpuInstanceInfo:
		h.wrapDevice(&to.Device, method, nil)
	case *gonvml.ComputeInstanceInfo:
		h.wrapDevice(&to.Device, method, nil)
		h.wrapGpuInstance(&to.GpuInstance)
	case *gonvml.EventSet:
		*to = &recordedEventSet{EventSet: *to, recorded: recorded{h.recorder, "events"}}
	case *gonvml.EventData:
		h.wrapDevice(&to.Device, method, nil)
	}
}

func (h recorded) wrapDevice(d *gonvml.Device, method string, args []any) {
	if *d == nil {
		return
	}
	*d = &recordedDevice{Device: *d, recorded: recorded{h.recorder, h.deviceName(*d, method, args)}}
}

// deviceName names a device by how it was looked up. A GPU has the same handle however it was looked up.
func (h recorded) deviceName(d gonvml.Device, method string, args []any) string {
	comparable := reflect.TypeOf(d).Comparable()
	h.recorder.mu.Lock()
	defer h.recorder.mu.Unlock()
	switch {
	case method == "DeviceGetHandleByIndex":
		name := fmt.Sprint("gpu", args[0])
		if h.recorder.names == nil {
			h.recorder.names = map[gonvml.Device]string{}
		}
		if comparable {
			h.recorder.names[d] = name
		}
		return name
	case method == "GetMigDeviceHandleByIndex":
		return fmt.Sprint(h.name, "/mig", args[0])
	case comparable && h.recorder.names[d] != "":
		return h.recorder.names[d]
	case len(args) > 0:
		return fmt.Sprint(args[0])
	}
	return "device"
}

// wrapGpuInstance names an instance by its ID, which only NVML knows.
func (h recorded) wrapGpuInstance(instance *gonvml.GpuInstance) {
	if *instance == nil {
		return
	}
	gpu, _, _ := strings.Cut(h.name, "/")
	name := gpu + "/gi?"
	if info, ret := (*instance).GetInfo(); ret == gonvml.SUCCESS {
		name = fmt.Sprint(gpu, "/gi", info.Id)
	}
	*instance = &recordedGpuInstance{GpuInstance: *instance, recorded: recorded{h.recorder, name}}
}

func (h recorded) wrapComputeInstance(instance *gonvml.ComputeInstance) {
	if *instance == nil {
		return
	}
	name := h.name + "/ci?"
	if info, ret := (*instance).GetInfo(); ret == gonvml.SUCCESS {
		name = fmt.Sprint(h.name, "/ci", info.Id)
	}
	*instance = &recordedComputeInstance{ComputeInstance: *instance, recorded: recorded{h.recorder, name}}
}

// The wrappers embed go-nvml's interfaces under their names, by which go-nvml finds the handle in a Device.
type (
	recordedLibrary struct {
		gonvml.Interface
		recorded
	}
	recordedDevice struct {
		gonvml.Device
		recorded
	}
	recordedGpuInstance struct {
		gonvml.GpuInstance
		recorded
	}
	recordedComputeInstance struct {
		gonvml.ComputeInstance
		recorded
	}
	recordedEventSet struct {
		gonvml.EventSet
		recorded
	}
)

// Wrapper is a handle that another package has put around one of this package. A call may have it as an argument.
type Wrapper interface{ Wrapped() gonvml.Device }

// unrecorded returns the handle that the library has given.
func unrecorded[T any](handle T) T {
	var inner any
	switch h := any(handle).(type) {
	case Wrapper:
		return unrecorded(any(h.Wrapped()).(T))
	case *recordedDevice:
		inner = h.Device
	case *recordedGpuInstance:
		inner = h.GpuInstance
	case *recordedComputeInstance:
		inner = h.ComputeInstance
	case *recordedEventSet:
		inner = h.EventSet
	default:
		return handle
	}
	return inner.(T)
}

// Extensions implements gonvml.Interface.
func (h *recordedLibrary) Extensions() gonvml.ExtendedInterface { return h }

// LookupSymbol implements gonvml.ExtendedInterface. A symbol that the library lacks is FUNCTION_NOT_FOUND in the recording.
func (h *recordedLibrary) LookupSymbol(name string) (err error) {
	ret, done := gonvml.SUCCESS, h.call("LookupSymbol", name)
	if err = h.Interface.Extensions().LookupSymbol(name); err != nil {
		ret = gonvml.ERROR_FUNCTION_NOT_FOUND
	}
	done(&ret)
	return err
}

// encoded returns values as a JSON array; nil for none.
func encoded(values []any) json.RawMessage {
	if len(values) == 0 {
		return nil
	}
	text, err := json.Marshal(Document(reflect.ValueOf(values), func(name string) string { return name }))
	if err != nil {
		return nil // no value of NVML is a channel, a function or no number
	}
	return text
}

// Document returns a value for encoding/json. Objects have the fields of structs under the name that rename gives them.
func Document(v reflect.Value, rename func(string) string) any {
	if !v.IsValid() {
		return nil
	}
	if h, ok := v.Interface().(interface{ handleName() string }); ok && !(v.Kind() == reflect.Interface && v.IsNil()) {
		return h.handleName()
	}
	switch v.Kind() {
	case reflect.Interface, reflect.Pointer:
		return Document(v.Elem(), rename)
	case reflect.Struct:
		object := map[string]any{}
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() && !strings.HasPrefix(f.Name, "Pad_cgo") {
				object[rename(f.Name)] = Document(v.Field(i), rename)
			}
		}
		return object
	case reflect.Array, reflect.Slice:
		return list(v, rename)
	case reflect.Map:
		object := map[string]any{}
		for entry := v.MapRange(); entry.Next(); {
			object[fmt.Sprint(entry.Key())] = Document(entry.Value(), rename)
		}
		return object
	default:
		return v.Interface()
	}
}

// list returns C's strings as text and bytes in hexadecimal.
func list(v reflect.Value, rename func(string) string) any {
	items := make([]any, v.Len())
	var text []byte
	for i := range items {
		switch v.Type().Elem().Kind() {
		case reflect.Int8:
			text = append(text, byte(v.Index(i).Int()))
		case reflect.Uint8:
			text = append(text, byte(v.Index(i).Uint()))
		default:
			items[i] = Document(v.Index(i), rename)
		}
	}
	switch v.Type().Elem().Kind() {
	case reflect.Int8:
		before, _, _ := strings.Cut(string(text), "\x00")
		return before
	case reflect.Uint8:
		return hex.EncodeToString(text)
	default:
		return items
	}
}

// codeOf returns the name of a return code in nvml.h without its prefix.
func codeOf(ret gonvml.Return) string {
	return cmp.Or(codes[ret], fmt.Sprint("unknown return code ", int(ret)))
}

// codes are taken before any library is open: from then on go-nvml has the library's texts in place of the names. go-nvml lacks some names.
var codes = func() map[gonvml.Return]string {
	names := map[gonvml.Return]string{
		gonvml.ERROR_NOT_READY: "ERROR_NOT_READY", gonvml.ERROR_GPU_NOT_FOUND: "ERROR_GPU_NOT_FOUND",
		gonvml.ERROR_INVALID_STATE: "ERROR_INVALID_STATE", gonvml.ERROR_UNKNOWN: "ERROR_UNKNOWN",
	}
	for ret := gonvml.SUCCESS; ret <= gonvml.ERROR_DEPRECATED; ret++ {
		names[ret] = ret.Error()
	}
	return names
}()
