// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func inject(t *testing.T, dir string, faults Faults) {
	t.Helper()
	if err := WriteFaults(dir, faults); err != nil {
		t.Fatal(err)
	}
}

func TestLostGPU(t *testing.T) {
	dir := t.TempDir()
	lib := start(t, "l4x4", WithDir(dir))
	lost, fine := handle(t, lib, 1), handle(t, lib, 2)
	uuid, _ := lost.GetUUID()
	inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: uuid, Lost: true}}})
	if count, ret := lib.DeviceGetCount(); count != 4 || ret != nvml.SUCCESS {
		t.Errorf("count = %d, %v", count, ret)
	}
	for call, ret := range map[string]nvml.Return{
		"GetName":                second(lost.GetName()),
		"DeviceGetHandleByIndex": second(lib.DeviceGetHandleByIndex(1)),
		"DeviceGetHandleByUUID":  second(lib.DeviceGetHandleByUUID(uuid)),
		"topology with it":       second(fine.GetTopologyCommonAncestor(lost)),
	} {
		if ret != nvml.ERROR_GPU_IS_LOST {
			t.Errorf("%s: %v", call, ret)
		}
	}
	if _, ret := fine.GetName(); ret != nvml.SUCCESS {
		t.Errorf("another GPU: %v", ret)
	}
	inject(t, dir, Faults{})
	if _, ret := lost.GetName(); ret != nvml.SUCCESS {
		t.Errorf("after recovery: %v", ret)
	}
}

func second[T any](_ T, ret nvml.Return) nvml.Return { return ret }

func TestAbsentGPU(t *testing.T) {
	dir := t.TempDir()
	lib := start(t, "l4x4", WithDir(dir))
	gone, last := handle(t, lib, 1), handle(t, lib, 3)
	uuid, _ := gone.GetUUID()
	inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: "1", Absent: true}}})
	if count, _ := lib.DeviceGetCount(); count != 4 {
		t.Errorf("count before the next Init = %d", count)
	}
	if _, ret := gone.GetName(); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("GetName: %v", ret)
	}
	lib.Shutdown()
	lib.Init()
	if count, _ := lib.DeviceGetCount(); count != 3 {
		t.Errorf("count after the next Init = %d", count)
	}
	if _, ret := lib.DeviceGetHandleByUUID(uuid); ret != nvml.ERROR_NOT_FOUND {
		t.Errorf("handle of the absent GPU: %v", ret)
	}
	if index, ret := last.GetIndex(); index != 2 || ret != nvml.SUCCESS {
		t.Errorf("index of the last GPU = %d, %v", index, ret)
	}
	if minor, _ := last.GetMinorNumber(); minor != 3 {
		t.Errorf("minor of the last GPU = %d", minor)
	}
	inject(t, dir, Faults{})
	if _, ret := gone.GetName(); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("GetName of a GPU that came back after Init: %v", ret)
	}
}

func TestFailingCalls(t *testing.T) {
	dir := t.TempDir()
	lib := start(t, "l4x4", WithDir(dir))
	a, b := handle(t, lib, 0), handle(t, lib, 1)
	inject(t, dir, Faults{
		Calls: map[string]CallFault{"DeviceGetCount": {Return: "ERROR_UNKNOWN"}, "Init": {Return: "ERROR_DRIVER_NOT_LOADED"}},
		GPUs: []GPUFaults{{GPU: "0", Calls: map[string]CallFault{
			"GetMemoryInfo": {Return: "ERROR_NO_PERMISSION"}, "GetMinorNumber": {}, "DeviceGetHandleByIndex": {Return: "ERROR_IRQ_ISSUE"},
		}}},
	})
	for call, got := range map[string][2]nvml.Return{
		"DeviceGetCount":             {second(lib.DeviceGetCount()), nvml.ERROR_UNKNOWN},
		"Init":                       {lib.Init(), nvml.ERROR_DRIVER_NOT_LOADED},
		"GetMemoryInfo":              {second(a.GetMemoryInfo()), nvml.ERROR_NO_PERMISSION},
		"GetMemoryInfo of another":   {second(b.GetMemoryInfo()), nvml.SUCCESS},
		"GetName":                    {second(a.GetName()), nvml.SUCCESS},
		"handle by index":            {second(lib.DeviceGetHandleByIndex(0)), nvml.ERROR_IRQ_ISSUE},
		"handle by index of another": {second(lib.DeviceGetHandleByIndex(1)), nvml.SUCCESS},
	} {
		if got[0] != got[1] {
			t.Errorf("%s: %v, want %v", call, got[0], got[1])
		}
	}
}

func TestDelayEndsWithTheFault(t *testing.T) {
	dir := t.TempDir()
	lib := start(t, "l4x4", WithDir(dir))
	d := handle(t, lib, 0)
	slow := Faults{GPUs: []GPUFaults{{GPU: "0", Calls: map[string]CallFault{"GetName": {Delay: Duration(time.Hour)}}}}}
	ask := func() <-chan nvml.Return {
		answer := make(chan nvml.Return, 1)
		go func() { answer <- second(d.GetName()) }()
		select {
		case ret := <-answer:
			t.Fatalf("a delayed call returned %v", ret)
		case <-time.After(3 * lookEvery):
		}
		return answer
	}
	inject(t, dir, slow)
	answer := ask()
	inject(t, dir, Faults{})
	if ret := <-answer; ret != nvml.SUCCESS {
		t.Errorf("when the fault is over: %v", ret)
	}
	inject(t, dir, slow)
	answer = ask()
	lib.Shutdown()
	if ret := <-answer; ret != nvml.ERROR_UNINITIALIZED {
		t.Errorf("when the library is shut down: %v", ret)
	}
	inject(t, dir, Faults{})
	lib.Init()
	inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: "0", Calls: map[string]CallFault{"GetName": {Delay: 1, Return: "ERROR_TIMEOUT"}}}}})
	if _, ret := d.GetName(); ret != nvml.ERROR_TIMEOUT {
		t.Errorf("after a delay that ran out: %v", ret)
	}
}

// A call that hangs does so while the faults say so, whatever else is in them.
func TestCallsThatHang(t *testing.T) {
	dir := t.TempDir()
	lib := start(t, "h100x8-mig", WithDir(dir))
	whole, another, cut := handle(t, lib, 0), handle(t, lib, 1), handle(t, lib, 4)
	uuid, _ := whole.GetUUID()
	partition := gotten[nvml.Device](t)(cut.GetMigDeviceHandleByIndex(0))
	instance := gotten[nvml.GpuInstance](t)(cut.GetGpuInstanceById(1))
	compute := gotten[nvml.ComputeInstance](t)(instance.GetComputeInstanceById(0))
	set, _ := lib.EventSetCreate()
	gpu := func(index, method string) Faults {
		return Faults{GPUs: []GPUFaults{{GPU: index, Calls: map[string]CallFault{method: {Hang: true}}}}}
	}
	library := func(method string) Faults { return Faults{Calls: map[string]CallFault{method: {Hang: true}}} }
	for name, test := range map[string]struct {
		faults Faults
		call   func() nvml.Return
	}{
		"any call of a GPU":              {gpu("0", "*"), func() nvml.Return { return second(whole.GetName()) }},
		"a GPU by UUID":                  {gpu("0", "*"), func() nvml.Return { return second(lib.DeviceGetHandleByUUID(uuid)) }},
		"links":                          {gpu("0", "GetNvLinkState"), func() nvml.Return { return second(whole.GetNvLinkState(0)) }},
		"the topology of another":        {gpu("0", "*"), func() nvml.Return { return second(cut.GetTopologyCommonAncestor(whole)) }},
		"a MIG device":                   {gpu("4", "MigDevice.GetUUID"), func() nvml.Return { return second(partition.GetUUID()) }},
		"a GPU instance":                 {gpu("4", "*"), func() nvml.Return { return second(instance.GetInfo()) }},
		"a compute instance":             {gpu("4", "ComputeInstance.GetInfo"), func() nvml.Return { return second(compute.GetInfo()) }},
		"the count":                      {library("DeviceGetCount"), func() nvml.Return { return second(lib.DeviceGetCount()) }},
		"any call of the library":        {library("*"), func() nvml.Return { return second(lib.SystemGetDriverVersion()) }},
		"Init":                           {library("Init"), lib.Init},
		"Shutdown":                       {library("Shutdown"), lib.Shutdown},
		"the registration for an event":  {gpu("0", "RegisterEvents"), func() nvml.Return { return whole.RegisterEvents(nvml.EventTypeXidCriticalError, set) }},
		"the release of a set of events": {library("EventSet.Free"), set.Free},
	} {
		t.Run(name, func(t *testing.T) {
			lib.Init() // so that Shutdown does not end it
			inject(t, dir, test.faults)
			answer := make(chan nvml.Return, 1)
			go func() { answer <- test.call() }()
			hangs := func() {
				t.Helper()
				select {
				case ret := <-answer:
					t.Fatalf("returned %v", ret)
				case <-time.After(3 * lookEvery):
				}
			}
			hangs()
			more := test.faults
			more.GPUs = append(slices.Clone(more.GPUs), GPUFaults{GPU: "7", Lost: true})
			inject(t, dir, more)
			hangs()
			if ret := second(another.GetName()); ret != nvml.SUCCESS {
				t.Errorf("another GPU: %v", ret)
			}
			inject(t, dir, Faults{})
			if ret := <-answer; ret != nvml.SUCCESS {
				t.Errorf("when the fault is over: %v", ret)
			}
		})
	}
}

func TestUnusableFaultsFileKeepsTheStateBefore(t *testing.T) {
	for name, content := range map[string]string{
		"not YAML":         "gpus: [",
		"unknown field":    "gpus: [{gpu: \"0\", lots: true}]",
		"unknown GPU":      "gpus: [{gpu: GPU-unknown, lost: true}]",
		"unknown method":   "gpus: [{gpu: \"0\", calls: {GetNothing: {}}}]",
		"unknown code":     "calls: {DeviceGetCount: {return: ERROR_SOON}}",
		"not a duration":   "calls: {DeviceGetCount: {delay: soon}}",
		"event of no GPU":  "events: [{sequence: 1, gpu: \"9\", xid: 79}]",
		"device in system": "calls: {GetName: {return: ERROR_UNKNOWN}}",
		"unknown instance": "gpus: [{gpu: \"0\", calls: {GpuInstance.Eat: {}}}]",
		"odd partition":    "gpus: [{gpu: \"0\", clients: [{pid: 1, partition: half}]}]",
		"event of no GI":   "events: [{sequence: 1, gpu: \"0\", xid: 94, computeInstance: 0}]",
		"negative count":   "gpus: [{gpu: \"0\", calls: {GetName: {skip: -1}}}]",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			var reported []error
			lib := start(t, "l4x4", WithDir(dir), WithReport(func(err error) { reported = append(reported, err) }))
			d := handle(t, lib, 0)
			inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: "0", Lost: true}}})
			d.GetName()
			if err := os.WriteFile(filepath.Join(dir, FaultsFile), []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
			for range 3 {
				if _, ret := d.GetName(); ret != nvml.ERROR_GPU_IS_LOST {
					t.Errorf("GetName = %v", ret)
				}
			}
			if len(reported) != 1 || !strings.Contains(reported[0].Error(), FaultsFile) {
				t.Errorf("reported %v", reported)
			}
		})
	}
}

func TestFaultsOfSomeCalls(t *testing.T) {
	dir := t.TempDir()
	d := handle(t, start(t, "l4x4", WithDir(dir)), 0)
	inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: "0", Calls: map[string]CallFault{"GetName": {Return: "ERROR_UNKNOWN", Skip: 2, Times: 1}}}}})
	for i, want := range []nvml.Return{nvml.SUCCESS, nvml.SUCCESS, nvml.ERROR_UNKNOWN, nvml.SUCCESS} {
		if _, ret := d.GetName(); ret != want {
			t.Errorf("call %d: %v, want %v", i, ret, want)
		}
	}
}

func TestErrorsNameTheField(t *testing.T) {
	p, err := Load("l4x4")
	if err != nil {
		t.Fatal(err)
	}
	_, err = Faults{GPUs: []GPUFaults{{GPU: "7"}}, Calls: map[string]CallFault{"Nothing": {Return: "MAYBE"}}}.compile(p)
	for _, want := range []string{"gpus[0].gpu: ", "calls.Nothing.return: ", "calls.Nothing: no such method"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %q", err, want)
		}
	}
}

func TestReadFaultsRoundTrip(t *testing.T) {
	dir := t.TempDir()
	if faults, err := ReadFaults(dir); err != nil || len(faults.GPUs) != 0 {
		t.Errorf("without a file: %+v, %v", faults, err)
	}
	inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: "0", Calls: map[string]CallFault{"GetName": {Delay: Duration(90 * time.Second)}}}}})
	faults, err := ReadFaults(dir)
	if err != nil || len(faults.GPUs) != 1 || faults.GPUs[0].Calls["GetName"].Delay != Duration(90*time.Second) {
		t.Errorf("read %+v, %v", faults, err)
	}
	if err := WriteFaults(filepath.Join(dir, "missing"), Faults{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("write to a missing directory: %v", err)
	}
}

func TestEvents(t *testing.T) {
	dir := t.TempDir()
	lib := start(t, "l4x4", WithDir(dir))
	a, b := handle(t, lib, 0), handle(t, lib, 1)
	uuid, _ := b.GetUUID()
	old := Event{Sequence: 1, GPU: "0", XID: 43}
	inject(t, dir, Faults{Events: []Event{old}})
	set, _ := lib.EventSetCreate()
	for _, d := range []nvml.Device{a, b} {
		if ret := d.RegisterEvents(nvml.EventTypeXidCriticalError, set); ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
	}
	if _, ret := set.Wait(0); ret != nvml.ERROR_TIMEOUT {
		t.Errorf("an event from before the registration: %v", ret)
	}
	waiting := make(chan nvml.EventData)
	go func() {
		data, _ := set.Wait(60_000)
		waiting <- data
	}()
	inject(t, dir, Faults{Events: []Event{old, {Sequence: 3, GPU: "0", XID: 48}, {Sequence: 2, GPU: uuid, XID: 79}, {Sequence: 4, GPU: "3", XID: 13}}})
	if data := <-waiting; data.Device != b || data.EventData != 79 || data.EventType != nvml.EventTypeXidCriticalError || data.GpuInstanceId != noInstance {
		t.Errorf("first event %+v", data)
	}
	if data, ret := set.Wait(0); ret != nvml.SUCCESS || data.Device != a || data.EventData != 48 {
		t.Errorf("second event %+v, %v", data, ret)
	}
	if data, ret := set.Wait(0); ret != nvml.ERROR_TIMEOUT {
		t.Errorf("event of a GPU that is not registered: %+v, %v", data, ret)
	}
	if ret := a.RegisterEvents(1<<40, set); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("unknown event type: %v", ret)
	}
	ended := make(chan nvml.Return)
	go func() { ended <- second(set.Wait(60_000)) }()
	set.Free()
	if ret := <-ended; ret != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("Wait on a set that is freed: %v", ret)
	}
	if ret := set.Free(); ret != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("second Free: %v", ret)
	}
}

// Users of one library come and go while faults change; the race detector watches.
func TestConcurrentUse(t *testing.T) {
	dir := t.TempDir()
	lib := start(t, "mixed", WithDir(dir))
	d := handle(t, lib, 0)
	var all sync.WaitGroup
	for worker := range 8 {
		all.Go(func() {
			for round := range 50 {
				lib.Init()
				d.GetIndex()
				lib.DeviceGetHandleByIndex(round % 6)
				if set, ret := lib.EventSetCreate(); ret == nvml.SUCCESS {
					d.RegisterEvents(nvml.EventTypeXidCriticalError, set)
					set.Wait(0)
					set.Free()
				}
				if worker == 0 {
					if err := WriteFaults(dir, Faults{GPUs: []GPUFaults{{GPU: "1", Lost: round%2 == 0}}}); err != nil {
						t.Error(err)
					}
				}
				lib.Shutdown()
			}
		})
	}
	all.Wait()
	if _, ret := d.GetName(); ret != nvml.SUCCESS {
		t.Errorf("GetName = %v", ret)
	}
}
