// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
)

// calls counts calls by name.
type calls struct {
	mu   sync.Mutex
	made map[string]int
}

func (c *calls) count(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.made[name]++
}

// reset returns what was counted since the last reset.
func (c *calls) reset() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	made := c.made
	c.made = map[string]int{}
	return made
}

// countingLibrary counts the calls that are slow on a GPU under load.
type countingLibrary struct {
	*simulated.Library
	*calls
}

func (l countingLibrary) Init() gonvml.Return {
	l.count("Init")
	return l.Library.Init()
}

func (l countingLibrary) DeviceGetHandleByUUID(uuid string) (gonvml.Device, gonvml.Return) {
	l.count("DeviceGetHandle")
	d, ret := l.Library.DeviceGetHandleByUUID(uuid)
	return countingDevice{d, l.calls}, ret
}

func (l countingLibrary) DeviceGetHandleByPciBusId(address string) (gonvml.Device, gonvml.Return) { //nolint:revive // the name is go-nvml's
	l.count("DeviceGetHandle")
	d, ret := l.Library.DeviceGetHandleByPciBusId(address)
	return countingDevice{d, l.calls}, ret
}

type countingDevice struct {
	gonvml.Device
	*calls
}

func (d countingDevice) GetMigDeviceHandleByIndex(index int) (gonvml.Device, gonvml.Return) {
	d.count("GetMigDeviceHandleByIndex")
	return d.Device.GetMigDeviceHandleByIndex(index)
}

func (d countingDevice) GetGpuInstances(info *gonvml.GpuInstanceProfileInfo) ([]gonvml.GpuInstance, gonvml.Return) {
	d.count("GetGpuInstances")
	return d.Device.GetGpuInstances(info)
}

// A partition is created and destroyed with a few calls: no walk of all MIG devices and instances, one session, and one search of the GPU.
// The inventory is the same as after a scan.
func TestCallsOfAnOperation(t *testing.T) {
	options := fixture(t, "host-rhel")
	profile := load(t, "h100x8-mig")
	made := &calls{made: map[string]int{}}
	library := countingLibrary{simulated.New(profile), made}
	options.OpenLibrary = func() (gonvml.Interface, error) { return library, nil }
	node := mustOpen(t, options)
	at := -1
	for i, g := range node.Inventory().GPUs {
		if len(g.Partitions) > 2 {
			at = i
		}
	}
	if at < 0 {
		t.Fatal("no GPU with partitions")
	}
	g := node.Inventory().GPUs[at]
	victim := g.Partitions[0]
	whole, _ := profileByID(g, victim.ProfileID)
	made.reset()
	if err := node.Destroy(t.Context(), victim.Ref); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]int{"Init": 1, "DeviceGetHandle": 1}, made.reset()); diff != "" {
		t.Errorf("calls of Destroy (-want +got):\n%s", diff)
	}
	// pkg/partition calls EnableMIG before each Create.
	if err := node.EnableMIG(t.Context(), g.UUID); err != nil {
		t.Fatal(err)
	}
	got := made.reset()
	delete(got, "Init")
	delete(got, "DeviceGetHandle")
	if len(got) > 0 {
		t.Errorf("calls of EnableMIG: %v, want none of these", got)
	}
	p, err := node.Create(t.Context(), victim.Ref, whole)
	if err != nil {
		t.Fatal(err)
	}
	got = made.reset()
	if walked := got["GetMigDeviceHandleByIndex"]; walked > 7 {
		t.Errorf("Create looked at %d MIG devices", walked)
	}
	delete(got, "GetMigDeviceHandleByIndex")
	if len(got) > 0 {
		t.Errorf("calls of Create: %v, want none of these", got)
	}
	known := node.Inventory().GPUs[at]
	if err := node.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(node.Inventory().GPUs[at], known, cmpopts.IgnoreFields(gpu.Partition{}, "Index")); diff != "" {
		t.Errorf("known after Create (-scanned +known):\n%s", diff)
	}
	if p.Profile != victim.Profile || p.Ref != victim.Ref || p.UUID == "" {
		t.Errorf("made %+v, before %+v", p, victim)
	}
}

// The session stays open from one operation to the next, ends soon after the last, and at once when a scan ends.
func TestSessionAfterAnOperation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		options := fixture(t, "host-rhel")
		profile := load(t, "l4x4")
		profile.GPUs = profile.GPUs[:2]
		sessions := 0
		options.OpenLibrary = func() (gonvml.Interface, error) {
			return counted{simulated.New(profile), &sessions, gonvml.FEATURE_ENABLED}, nil
		}
		node := mustOpen(t, options)
		open := func() int {
			node.session.mu.Lock()
			defer node.session.mu.Unlock()
			return sessions
		}
		operation := func() {
			t.Helper()
			if _, err := node.ComputeMode(t.Context(), node.Inventory().GPUs[0].UUID); err != nil {
				t.Fatal(err)
			}
			for node.operating(node.Inventory().GPUs[0].UUID) {
				time.Sleep(time.Millisecond)
			}
		}
		operation()
		if open() != 1 {
			t.Errorf("%d sessions after an operation, want 1", open())
		}
		if err := node.Scan(t.Context()); err != nil {
			t.Fatal(err)
		}
		if open() != 0 {
			t.Errorf("%d sessions after a scan, want none", open())
		}
		operation()
		for deadline := time.Now().Add(time.Minute); open() != 0; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("the session stays open")
			}
		}
		operation()
		node.session.setHold(false) // as Run does at its end
		if open() != 0 {
			t.Errorf("%d sessions after the end, want none", open())
		}
	})
}

// A GPU that answers late, as under load, stays as it was. After some time it is unreachable.
func TestOneLateAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newHangNode(t)
		n.find()
		slow := func(calls map[string]simulated.CallFault) { n.fault(simulated.GPUFaults{Calls: calls}) }
		for range 2 {
			slow(map[string]simulated.CallFault{"GetMemoryInfo": {Delay: simulated.Duration(time.Hour)}})
			if err := n.scan(); err != nil || !n.Inventory().GPUs[1].Health.Healthy() {
				t.Fatalf("once late: %v, health %+v", err, n.Inventory().GPUs[1].Health)
			}
			slow(nil)
			for !n.recovered() {
				_ = n.scan()
			}
		}
		slow(map[string]simulated.CallFault{"GetMemoryInfo": {Delay: simulated.Duration(time.Hour)}})
		began := time.Now()
		for n.Inventory().GPUs[1].Health.Healthy() {
			if err := n.scan(); err != nil || t.Context().Err() != nil {
				t.Fatal(err, "never unreachable")
			}
		}
		if h := n.Inventory().GPUs[1].Health; h.Reason != gpu.ReasonUnreachable || time.Since(began) < n.options.patience {
			t.Errorf("late for %v: health %+v", time.Since(began), h)
		}
		slow(nil)
		for !n.recovered() {
			_ = n.scan()
		}
	})
}

// No operation works on another GPU than the one it names.
func TestAnotherGPUAtTheAddress(t *testing.T) {
	n := newHangNode(t)
	n.find()
	gpus := n.Inventory().GPUs
	if err := n.session.open(); err != nil {
		t.Fatal(err)
	}
	defer n.session.close()
	if _, ret := n.session.find(gpus[0].UUID, gpus[1].PCIBusID); ret != gonvml.ERROR_NOT_FOUND {
		t.Errorf("another GPU is at the address: %v", ret)
	}
	for _, address := range []string{"", gpus[0].PCIBusID} {
		d, ret := n.session.find(gpus[0].UUID, address)
		if ret != gonvml.SUCCESS {
			t.Fatal(ret)
		}
		if uuid, _ := d.GetUUID(); uuid != gpus[0].UUID {
			t.Errorf("address %q: found %s", address, uuid)
		}
	}
}
