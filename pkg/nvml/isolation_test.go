// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
)

// hangs is a fault of calls that do not return.
func hangs(calls ...string) simulated.GPUFaults {
	faults := simulated.GPUFaults{Calls: map[string]simulated.CallFault{}}
	for _, call := range calls {
		faults.Calls[call] = simulated.CallFault{Hang: true}
	}
	return faults
}

// faultBoth replaces the faults of the GPUs with index 0 and 1.
func (n *hangNode) faultBoth(first, second simulated.GPUFaults) {
	n.t.Helper()
	first.GPU, second.GPU = "0", "1"
	if err := simulated.WriteFaults(n.faults, simulated.Faults{GPUs: []simulated.GPUFaults{first, second}}); err != nil {
		n.t.Fatal(err)
	}
}

// A scan beside a reset that takes longer than a call may leaves all as it was.
func TestScansBesideALongReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newHangNode(t)
		n.options.patience = 100 * time.Millisecond
		n.find()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		resets := make(chan struct{})
		go func() {
			defer close(resets)
			for ctx.Err() == nil {
				_ = n.session.suspend(time.Second, func() error { time.Sleep(250 * time.Millisecond); return nil })
				time.Sleep(20 * time.Millisecond)
			}
		}()
		for ctx.Err() == nil {
			if err := n.scan(); err != nil {
				t.Errorf("a scan: %v", err)
			}
			if !n.all("") {
				t.Errorf("a GPU is unhealthy during a reset: %+v", n.Inventory().GPUs)
				cancel()
			}
		}
		<-resets
	})
}

// A GPU that hangs keeps its state for some time and delays no scan for long, whatever is wrong with another one.
func TestHangBesideABrokenGPU(t *testing.T) {
	lost, absent := simulated.GPUFaults{Lost: true}, simulated.GPUFaults{Absent: true}
	for name, test := range map[string]struct{ first, then simulated.GPUFaults }{
		"never identified": {lost, lost},
		"gone":             {simulated.GPUFaults{}, absent},
		"appears again":    {absent, simulated.GPUFaults{}},
		"lost":             {simulated.GPUFaults{}, lost},
		"healthy":          {},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newHangNode(t)
				n.options.patience = 4 * time.Second
				n.faultBoth(simulated.GPUFaults{}, test.first)
				if err := n.Scan(t.Context()); err != nil {
					t.Fatal(err)
				}
				n.faultBoth(simulated.GPUFaults{}, test.then)
				if err := n.Scan(t.Context()); err != nil {
					t.Fatal(err)
				}
				n.faultBoth(hangs("GetMemoryInfo"), test.then)
				began := time.Now()
				if err := n.Scan(t.Context()); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(began); took > 3*time.Second {
					t.Errorf("the scan took %v", took)
				}
				if g := n.Inventory().GPUs[0]; !g.Health.Healthy() {
					t.Errorf("the GPU that hangs is unhealthy at once: %+v", g.Health)
				}
			})
		})
	}
}

// The number of GPUs changes while one hangs: that one keeps its state all the same.
func TestGPUVanishesWhileAnotherHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newHangNode(t)
		n.options.patience = time.Second
		n.find()
		n.faultBoth(hangs("GetMemoryInfo"), simulated.GPUFaults{Absent: true})
		for range 2 {
			if err := n.Scan(t.Context()); err != nil {
				t.Fatal(err)
			}
			if g := n.Inventory().GPUs[0]; !g.Health.Healthy() {
				t.Errorf("the GPU that hangs is unhealthy at once: %+v", g.Health)
			}
		}
	})
}

// Container edits of a GPU make no call that another GPU can delay, and scans go on beside them.
func TestEditsDelayNoScan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newHangNode(t)
		n.options.patience = 5 * time.Second
		if err := n.Scan(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.library.byUUID.close() // it initialises all GPUs, of which one hangs
		edits, err := n.ContainerEdits(t.Context())
		if err != nil || len(edits.Devices) != 2 {
			t.Errorf("%d devices with edits (%v; %v), want 2", len(edits.Devices), err, edits.Failed)
		}
		n.library.byUUID.open()

		n.fault(hangs("GetIndex")) // which a scan does not call
		done := make(chan struct{})
		go func() {
			defer close(done)
			edits, err := n.ContainerEdits(t.Context())
			if err != nil || len(edits.Devices) != 1 || !errors.Is(edits.Failed[n.Inventory().GPUs[1].UUID], errNoAnswer) {
				t.Errorf("%d devices with edits (%v; %v), want 1", len(edits.Devices), err, edits.Failed)
			}
		}()
		time.Sleep(50 * time.Millisecond)
		began := time.Now()
		if err := n.Scan(t.Context()); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > 900*time.Millisecond {
			t.Errorf("a scan beside container edits took %v", took)
		}
		<-done
		n.fault(simulated.GPUFaults{})
	})
}

// registrations counts RegisterEvents, by GPU.
type registrations struct {
	*hangingLibrary
	mu    sync.Mutex
	count map[string]int
}

func (l *registrations) watch(d gonvml.Device, ret gonvml.Return) (gonvml.Device, gonvml.Return) {
	return registered{d, l}, ret
}

func (l *registrations) DeviceGetHandleByPciBusId(address string) (gonvml.Device, gonvml.Return) { //nolint:revive // go-nvml's name
	return l.watch(l.hangingLibrary.DeviceGetHandleByPciBusId(address))
}

func (l *registrations) DeviceGetHandleByUUID(uuid string) (gonvml.Device, gonvml.Return) {
	return l.watch(l.hangingLibrary.DeviceGetHandleByUUID(uuid))
}

func (l *registrations) of(uuid string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count[uuid]
}

type registered struct {
	gonvml.Device
	of *registrations
}

func (d registered) RegisterEvents(types uint64, set gonvml.EventSet) gonvml.Return {
	ret := d.Device.RegisterEvents(types, set)
	if uuid, known := d.Device.GetUUID(); known == gonvml.SUCCESS && ret == gonvml.SUCCESS {
		d.of.mu.Lock()
		defer d.of.mu.Unlock()
		d.of.count[uuid]++
	}
	return ret
}

// eventsNode reads XIDs from NVML's events.
type eventsNode struct {
	*hangNode
	library *registrations
	xids    chan gpu.XIDEvent
	endings chan gpu.XIDEvent
	stop    context.CancelFunc
	ended   chan error
}

func newEventsNode(t *testing.T, first, second simulated.GPUFaults) *eventsNode {
	t.Helper()
	return watchEvents(newHangNode(t), first, second)
}

// watchEvents scans, brings the faults of both GPUs, and begins WatchXIDs.
func watchEvents(hang *hangNode, first, second simulated.GPUFaults) *eventsNode {
	hang.t.Helper()
	n := &eventsNode{
		hangNode: hang, xids: make(chan gpu.XIDEvent, 100), endings: make(chan gpu.XIDEvent, 100), ended: make(chan error, 1),
	}
	n.library = &registrations{hangingLibrary: hang.library, count: map[string]int{}}
	n.options.OpenLibrary = func() (gonvml.Interface, error) { return n.library, nil }
	n.options.OpenKernelLog = func() (io.ReadCloser, error) { return nil, errors.New("not permitted") }
	n.find()
	n.faultBoth(first, second)
	var ctx context.Context
	ctx, n.stop = context.WithCancel(n.t.Context())
	go func() {
		n.ended <- n.WatchXIDs(ctx, func(e gpu.XIDEvent) {
			if e.XID != 0 {
				n.xids <- e
			} else {
				n.endings <- e
			}
		})
	}()
	return n
}

// raise reports an XID of a GPU, beside its faults.
func (n *eventsNode) raise(index string, xid uint64) {
	n.t.Helper()
	if err := simulated.RaiseXID(n.faults, simulated.Event{GPU: index, XID: xid}); err != nil {
		n.t.Fatal(err)
	}
}

// await waits for the next XID.
func (n *eventsNode) await(limit time.Duration) (xid int) {
	select {
	case e := <-n.xids:
		return e.XID
	case <-time.After(limit):
		return 0
	}
}

// registered waits for a GPU's registration.
func (n *eventsNode) registered(index, times int) bool {
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if n.library.of(n.Inventory().GPUs[index].UUID) >= times {
			return true
		}
	}
	return false
}

// end ends the test's WatchXIDs, which may not wait for a call that hangs.
func (n *eventsNode) end() {
	n.t.Helper()
	n.stop()
	select {
	case err := <-n.ended:
		if err != nil {
			n.t.Error(err)
		}
	case <-time.After(10 * time.Second):
		n.t.Error("WatchXIDs does not end")
	}
}

// A GPU that hangs costs no other one its XIDs, and does not keep the agent from its end.
func TestEventsBesideAHang(t *testing.T) {
	for _, call := range []string{"DeviceGetHandleByPciBusId", "RegisterEvents", "by UUID"} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var second simulated.GPUFaults
				if call != "by UUID" {
					second = hangs(call)
				}
				n := newEventsNode(t, simulated.GPUFaults{}, second)
				if call == "by UUID" {
					n.library.byUUID.close()
					defer n.library.byUUID.open()
				}
				defer n.faultBoth(simulated.GPUFaults{}, simulated.GPUFaults{})
				defer n.end()
				if !n.registered(0, 1) {
					t.Fatal("no events of the other GPU")
				}
				n.raise("0", 79)
				if xid := n.await(10 * time.Second); xid != 79 {
					t.Errorf("XID %d, want 79", xid)
				}
			})
		})
	}
}

// A GPU that could not be registered is registered later.
func TestEventsAreRegisteredLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newEventsNode(t, simulated.GPUFaults{}, simulated.GPUFaults{
			Calls: map[string]simulated.CallFault{"RegisterEvents": {Return: "ERROR_UNKNOWN"}},
		})
		defer n.end()
		if !n.registered(0, 1) {
			t.Fatal("no events of the other GPU")
		}
		n.faultBoth(simulated.GPUFaults{}, simulated.GPUFaults{})
		if !n.registered(1, 1) {
			t.Error("the GPU was not registered again")
		}
	})
}

// A GPU stays registered when another one is lost, and a lost one is registered as soon as it is back.
func TestEventsOfOneGPUAreNotThoseOfAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newEventsNode(t, simulated.GPUFaults{}, simulated.GPUFaults{})
		defer n.end()
		if !n.registered(0, 1) || !n.registered(1, 1) {
			t.Fatal("not registered")
		}
		for _, faults := range []simulated.GPUFaults{{Lost: true}, {}} {
			n.fault(faults)
			if err := n.Scan(t.Context()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * eventWait)
		}
		if !n.registered(1, 2) {
			t.Error("the GPU that came back was not registered")
		}
		if times := n.library.of(n.Inventory().GPUs[0].UUID); times != 1 {
			t.Errorf("the GPU that works was registered %d times", times)
		}
	})
}

// A reset waits for the events, and they continue after it without a pause.
func TestEventsAfterAReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newEventsNode(t, simulated.GPUFaults{}, simulated.GPUFaults{})
		defer n.end()
		if !n.registered(0, 1) || !n.registered(1, 1) {
			t.Fatal("not registered")
		}
		if err := n.session.suspend(5*time.Second, func() error { return nil }); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if !n.registered(0, 2) || !n.registered(1, 2) {
			t.Fatal("not registered again")
		}
		if took := time.Since(began); took > sourceRetry/2 {
			t.Errorf("registered %v after the reset: XIDs in that time are lost", took)
		}
	})
}

// XIDs end when the driver is loaded again, also during a pause, in which no scan notices it.
func TestDriverLoadedAgainDuringAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newHangNode(t)
		sysfs := t.TempDir()
		n.options.SysfsRoot = sysfs
		module := filepath.Join(sysfs, "module/nvidia")
		if err := os.MkdirAll(module, 0o755); err != nil {
			t.Fatal(err)
		}
		events := watchEvents(n, simulated.GPUFaults{}, simulated.GPUFaults{})
		defer events.end()
		if !events.registered(0, 1) {
			t.Fatal("not registered")
		}
		if err := n.Pause(t.Context(), "test"); err != nil {
			t.Fatal(err)
		}
		// The former directory stays until the next one exists, so that both have numbers of their own, as in sysfs.
		if err := errors.Join(os.Mkdir(module+"-new", 0o755), os.Remove(module), os.Rename(module+"-new", module)); err != nil {
			t.Fatal(err)
		}
		if err := n.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		select {
		case e := <-events.endings:
			if e.PCI != "" {
				t.Errorf("the XIDs of %s have ended, not those of all GPUs", e.PCI)
			}
		case <-time.After(10 * time.Second):
			t.Error("no XID has ended")
		}
	})
}

// An XID during a scan causes another scan, although that one may have read its GPU.
func TestXIDDuringAScan(t *testing.T) {
	n := newHangNode(t)
	n.options.patience, n.options.Interval = 30*time.Second, time.Hour
	if err := n.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	broken := simulated.GPUFaults{Condition: simulated.Condition{RecoveryAction: "reset"}}
	// The first GPU has been read and the scan waits for the second when the XID of the first comes.
	n.faultBoth(simulated.GPUFaults{}, hangs("GetMemoryInfo"))
	began := time.Now()
	for n.session.busy() < 2 {
		n.reported.Notify()
		time.Sleep(5 * time.Millisecond)
		if time.Since(began) > 10*time.Second {
			t.Fatal("no scan")
		}
	}
	time.Sleep(200 * time.Millisecond)
	n.reported.Notify()
	n.faultBoth(broken, simulated.GPUFaults{})
	for began = time.Now(); len(n.Inventory().GPUs[0].Faults) == 0; time.Sleep(5 * time.Millisecond) {
		if time.Since(began) > 10*time.Second {
			t.Error("no scan after an XID during a scan")
			break
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// busy returns the number of uses.
func (s *session) busy() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.users
}
