// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// world is a node: source, specs and ledger.
type world struct {
	broadcast.Signal
	mu         sync.Mutex
	inventory  device.Inventory
	problems   map[string]error
	unclean    map[string]error
	unwritable error
	unrecorded error
	probes     int
	// ledger announces changes of unrecorded only.
	ledger broadcast.Signal
	// handover announces changes of unclean only.
	handover broadcast.Signal
	// read is when all GPUs were last read. xids are delivered to WatchXIDs.
	read time.Time
	xids chan device.XIDEvent
	// actions are what to do by reason; NoSchedule for others. resets are the GPUs that were reset, held those that have a holder.
	actions map[string]device.FaultAction
	resets  []string
	held    bool
	// refused is why no GPU can be reset.
	refused error
}

func (w *world) change(change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change()
	w.Notify()
}

func (w *world) Inventory() device.Inventory { w.mu.Lock(); defer w.mu.Unlock(); return w.inventory }

func (w *world) Problem(uuid string) error { w.mu.Lock(); defer w.mu.Unlock(); return w.problems[uuid] }

func (w *world) Unwritable() error { w.mu.Lock(); defer w.mu.Unlock(); return w.unwritable }

// cleaner hands over the GPUs of a world.
type cleaner struct{ *world }

func (c cleaner) Changed() <-chan struct{}  { return c.handover.Changed() }
func (c cleaner) Unclean(uuid string) error { c.mu.Lock(); defer c.mu.Unlock(); return c.unclean[uuid] }

// book is the ledger of a world.
type book struct{ *world }

func (b book) Probe()                   { b.mu.Lock(); defer b.mu.Unlock(); b.probes++ }
func (b book) Changed() <-chan struct{} { return b.ledger.Changed() }
func (b book) Unwritable() error        { b.mu.Lock(); defer b.mu.Unlock(); return b.unrecorded }

func (w *world) LastRead(string) time.Time { w.mu.Lock(); defer w.mu.Unlock(); return w.read }

func (w *world) WatchXIDs(ctx context.Context, handle func(device.XIDEvent)) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-w.xids:
			handle(e)
		}
	}
}

func (w *world) action(_ device.GPU, fault device.Health) device.FaultAction {
	w.mu.Lock()
	defer w.mu.Unlock()
	if action := w.actions[fault.Reason]; action != "" {
		return action
	}
	return device.FaultNoSchedule
}

func (w *world) resetIdle(_ context.Context, uuid string) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.held || w.refused != nil {
		return false, w.refused
	}
	w.resets = append(w.resets, uuid)
	return true, nil
}

func newInventory(w *world) (*Inventory, *record.FakeRecorder) {
	return newInventoryWith(w, NewRecords("/nowhere", ""))
}

func newInventoryWith(w *world, records *Records) (*Inventory, *record.FakeRecorder) {
	if w.xids == nil {
		w.xids = make(chan device.XIDEvent)
	}
	events := record.NewFakeRecorder(100)
	return New(Config{
		Source: w, Hardware: w, Handover: cleaner{w}, Records: records, CountsXID: config.Config{}.CountsXID,
		Action: w.action, ResetIdle: w.resetIdle, Specs: w, Ledger: book{w}, NodeName: "node", Recorder: events,
		Registerer: prometheus.NewRegistry(),
	}), events
}

var errDisk = errors.New("write /var/run/cdi/x: no space left on device")

var errReadOnly = errors.New("read-only file system")

// Each device has its own entry. What is made for a claim needs room for a new file, and gets its entry with Prepare.
func TestInventory(t *testing.T) {
	w := &world{inventory: device.Inventory{GPUs: []device.GPU{
		{UUID: "GPU-0", Minor: 0},
		{UUID: "GPU-1", Minor: 1},
		{UUID: "GPU-2", Minor: 2, MIGEnabled: true, Partitions: []device.Partition{{UUID: "MIG-a"}, {UUID: "MIG-b"}, {}}},
		{UUID: "GPU-3", Minor: 3, MIGEnabled: true, Dynamic: true, Partitions: []device.Partition{{UUID: "MIG-c", Made: true}}},
		{UUID: "GPU-4", Minor: 4, Dynamic: true},
		{UUID: "GPU-5", Minor: 5, Health: device.Health{Reason: device.ReasonLost}},
	}}}
	i, _ := newInventory(w)
	unhealthy := func(inventory device.Inventory) string {
		var names []string
		for _, g := range inventory.GPUs {
			if !g.Health.Healthy() {
				names = append(names, g.UUID+"="+g.Health.Reason)
			}
			for _, p := range g.Partitions {
				if !p.Health.Healthy() {
					names = append(names, p.UUID+"="+p.Health.Reason)
				}
			}
		}
		return strings.Join(names, " ")
	}
	want := func(want string) {
		t.Helper()
		if got := unhealthy(i.Inventory()); got != want {
			t.Errorf("unhealthy: %s, want %s", got, want)
		}
		wantWithoutCDI := "GPU-5=Lost"
		if w.unrecorded != nil || w.unclean != nil {
			wantWithoutCDI = want
		}
		if got := unhealthy(i.WithoutCDI().Inventory()); got != wantWithoutCDI {
			t.Errorf("unhealthy without CDI: %s, want %s", got, wantWithoutCDI)
		}
	}
	before := w.inventory
	want("GPU-5=Lost")
	w.problems = map[string]error{"GPU-1": errDisk, "GPU-2": errDisk, "MIG-b": errDisk, "GPU-3": errDisk, "MIG-c": errDisk, "GPU-5": errDisk}
	want("GPU-1=NotInjectable MIG-b=NotInjectable GPU-5=Lost")
	w.problems, w.unwritable = nil, errDisk
	want("GPU-3=NotInjectable GPU-4=NotInjectable GPU-5=Lost")
	w.unwritable, w.unrecorded = nil, errDisk
	want("GPU-0=NotRecordable GPU-1=NotRecordable GPU-2=NotRecordable GPU-3=NotRecordable GPU-4=NotRecordable GPU-5=Lost")
	w.unrecorded, w.unclean = nil, map[string]error{"GPU-1": errDisk, "GPU-5": errDisk}
	want("GPU-1=NotClean GPU-5=Lost")
	w.unclean = nil
	if got := i.Inventory(); !reflect.DeepEqual(got, before) {
		t.Errorf("the source's inventory was changed: %v", got)
	}
}

// A problem that lasts is one event, one that passes is none.
func TestRun(t *testing.T) {
	w := &world{inventory: device.Inventory{GPUs: []device.GPU{{UUID: "GPU-0"}, {UUID: "GPU-1", Minor: 1}}}}
	i, events := newInventory(w)
	i.interval = 200 * time.Microsecond
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- i.Run(ctx) }()
	set := func(problems map[string]error) {
		t.Helper()
		changed := i.Changed()
		w.change(func() { w.problems = problems })
		<-changed
	}
	event := func(want ...string) {
		t.Helper()
		select {
		case event := <-events.Events:
			for _, part := range want {
				if !strings.Contains(event, part) {
					t.Errorf("event %q lacks %q", event, part)
				}
			}
		case <-time.After(time.Minute):
			t.Fatal("no event")
		}
	}
	set(map[string]error{"GPU-0": errDisk, "GPU-1": errDisk})
	event("Warning DeviceNotInjectable", "gpu-0, gpu-1", errDisk.Error(), "Make the path writable")
	if got := testutil.ToFloat64(i.metrics.unusable.WithLabelValues(device.ReasonNotInjectable)); got != 2 {
		t.Errorf("%v devices are counted", got)
	}
	set(nil)
	changed := i.WithoutCDI().Changed()
	w.mu.Lock()
	w.unrecorded = errDisk
	w.ledger.Notify()
	w.mu.Unlock()
	<-changed
	event("Warning DeviceNotRecordable", errDisk.Error())
	// Another error of the ledger is another event.
	w.mu.Lock()
	w.unrecorded = errReadOnly
	w.ledger.Notify()
	w.mu.Unlock()
	event("Warning DeviceNotRecordable", errReadOnly.Error())
	for range 500 { // also when a tick comes at the same time
		changed = i.Changed()
		w.change(func() { w.inventory.DriverVersion += "." })
		select {
		case <-changed:
		case <-time.After(time.Minute):
			t.Fatal("a change of the source was not passed on")
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if len(events.Events) > 0 {
		t.Errorf("another event: %s", <-events.Events)
	}
	if w.probes == 0 {
		t.Error("the ledger was not probed")
	}
}

// What the handover finds is announced, and has no event here: the handover reports it.
func TestUncleanGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{inventory: device.Inventory{GPUs: []device.GPU{{UUID: "GPU-0"}}}}
		i, events := newInventory(w)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- i.Run(ctx) }()
		synctest.Wait()
		for _, unclean := range []error{errDisk, nil} {
			changed := i.Changed()
			w.mu.Lock()
			w.unclean = map[string]error{"GPU-0": unclean}
			w.handover.Notify()
			w.mu.Unlock()
			<-changed
			if got := i.Inventory().GPUs[0].Health.Reason == device.ReasonNotClean; got != (unclean != nil) {
				t.Errorf("after %v the GPU is not clean: %t", unclean, got)
			}
		}
		synctest.Wait()
		cancel()
		if err := <-done; err != nil || len(events.Events) > 0 {
			t.Errorf("%v, %d events", err, len(events.Events))
		}
	})
}
