// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/pkg/device"
)

const noInstance = device.NoInstance

// xidWorld has two GPUs, the second with partitions in the GPU instances 3 and 5.
func xidWorld() *world {
	return &world{inventory: device.Inventory{GPUs: []device.GPU{
		{UUID: "GPU-0", Minor: 0, PCIBusID: "0000:1b:00.0", Recovery: device.RecoveryNone},
		{UUID: "GPU-1", Minor: 1, PCIBusID: "0000:3b:00.0", Recovery: device.RecoveryNone, MIGEnabled: true, Partitions: []device.Partition{
			{UUID: "MIG-3", Parent: 1, Profile: "1g.10gb", ProfileID: 19, GPUInstance: 3, Ref: device.Ref{GPU: "GPU-1", Placement: device.Placement{Start: 0, Size: 1}}},
			{UUID: "MIG-5", Parent: 1, Profile: "1g.10gb", ProfileID: 19, GPUInstance: 5, Ref: device.Ref{GPU: "GPU-1", Placement: device.Placement{Start: 1, Size: 1}}},
		}},
	}}}
}

func loaded(t *testing.T, dir string) *Records {
	t.Helper()
	records := NewRecords(dir, "boot")
	problems, err := records.Load()
	if err := errors.Join(append(problems, err)...); err != nil {
		t.Fatal(err)
	}
	return records
}

// unhealthyOnes returns "device=reason/XID" of each unhealthy device, by its effective health.
func unhealthyOnes(i *Inventory) string {
	var all []string
	for _, d := range i.Inventory().Devices() {
		if h := d.Health(); !h.Healthy() {
			all = append(all, fmt.Sprintf("%s=%s/%d", d.UUID(), h.Reason, h.XID))
		}
	}
	return strings.Join(all, " ")
}

// review is one look of Run at the XIDs.
func review(t *testing.T, i *Inventory, w *world) {
	t.Helper()
	reads := map[string]time.Time{}
	for _, g := range w.Inventory().GPUs {
		reads[g.UUID] = w.LastRead(g.UUID)
	}
	i.xids.review(t.Context(), w.Inventory(), reads)
}

func want(t *testing.T, i *Inventory, want string) {
	t.Helper()
	if got := unhealthyOnes(i); got != want {
		t.Errorf("unhealthy: %q, want %q", got, want)
	}
}

// An XID of a GPU is one of all its partitions, one of a partition stays there. The worst counts, an application's does not.
func TestXIDs(t *testing.T) {
	w := xidWorld()
	i, _ := newInventoryWith(w, loaded(t, t.TempDir()))
	now := time.Now()
	at := func(pci string, xid, gi int) {
		i.xids.take(t.Context(), device.XIDEvent{PCI: pci, XID: xid, GPUInstance: gi, ComputeInstance: noInstance, Time: now})
	}
	for _, benign := range []int{13, 31, 43, 45, 68, 109, 154} {
		at("0000:1b:00", benign, noInstance)
		want(t, i, "")
	}
	at("0000:3b:00", 94, 5)
	want(t, i, "MIG-5=XID/94")
	at("0000:3b:00", 95, noInstance)
	want(t, i, "GPU-1=XID/95 MIG-3=XID/95 MIG-5=XID/95")
	at("0000:1b:00", 79, noInstance)
	at("0000:1b:00", 94, noInstance)
	want(t, i, "GPU-0=XID/79 GPU-1=XID/95 MIG-3=XID/95 MIG-5=XID/95")
	w.change(func() { w.inventory.GPUs[0].Health = device.Health{Reason: device.ReasonLost, Message: "lost"} })
	want(t, i, "GPU-0=Lost/79 GPU-1=XID/95 MIG-3=XID/95 MIG-5=XID/95")
	at("", 0, noInstance) // the driver was loaded again
	want(t, i, "GPU-0=Lost/0")
	w.change(func() { w.inventory.GPUs[1].PCIBusID = "00010000:3b:00.0" })
	at("10000:3b:00", 48, noInstance)
	want(t, i, "GPU-0=Lost/0 GPU-1=XID/48 MIG-3=XID/48 MIG-5=XID/48")
	if got := testutil.ToFloat64(i.metrics.xids.WithLabelValues("0000:1b:00", "79")); got != 1 {
		t.Errorf("XID 79 is counted %v times", got)
	}
}

// An XID ends when the driver has said that the GPU needs nothing, in a reading that began after it.
func TestXIDEnds(t *testing.T) {
	w := xidWorld()
	i, _ := newInventoryWith(w, loaded(t, t.TempDir()))
	at := time.Now()
	for _, pci := range []string{"0000:1b:00", "0000:3b:00"} {
		i.xids.take(t.Context(), device.XIDEvent{PCI: pci, XID: 48, GPUInstance: noInstance, ComputeInstance: noInstance, Time: at})
	}
	after := func(d time.Duration, wanted string) {
		t.Helper()
		w.change(func() { w.read = at.Add(d) })
		review(t, i, w)
		want(t, i, wanted)
	}
	at = i.xids.gpus["0000:1b:00"].XIDs[0].Time
	both := "GPU-0=XID/48 GPU-1=XID/48 MIG-3=XID/48 MIG-5=XID/48"
	after(0, both)
	after(quiet-time.Millisecond, both)
	w.change(func() {
		w.inventory.GPUs[0].Recovery = device.RecoveryReset
		w.inventory.GPUs[1].Recovery = "" // an old driver
	})
	after(time.Hour, both)
	w.change(func() { w.inventory.GPUs[0].Recovery = device.RecoveryNone })
	after(time.Hour, "GPU-1=XID/48 MIG-3=XID/48 MIG-5=XID/48")
	// Nothing else ends it there but a reset.
	i.xids.take(t.Context(), device.XIDEvent{PCI: "0000:3b:00", GPUInstance: noInstance, ComputeInstance: noInstance})
	want(t, i, "")
}

// The kernel's clock does not follow the corrections of the time. An XID that the agent sees come counts from then, whatever the kernel's
// time of it. Only one that the log had before the agent started counts from the kernel's time.
func TestXIDOfAnotherClock(t *testing.T) {
	for name, test := range map[string]struct {
		ahead, read time.Duration // from when the agent takes the XID
		want        string
	}{
		"the kernel is behind, read before":   {-100 * time.Second, -time.Second, "GPU-0=XID/48"},
		"the kernel is behind, read too soon": {-100 * time.Second, time.Second, "GPU-0=XID/48"},
		"the kernel is behind, read after":    {-100 * time.Second, 3 * time.Second, ""},
		"the kernel is ahead, read too soon":  {100 * time.Second, time.Second, "GPU-0=XID/48"},
		"the kernel is ahead, read after":     {100 * time.Second, 3 * time.Second, ""},
		"long before the agent":               {-time.Hour, -time.Second, ""},
	} {
		w := xidWorld()
		i, _ := newInventoryWith(w, loaded(t, t.TempDir()))
		now := time.Now()
		i.xids.take(t.Context(), device.XIDEvent{
			PCI: "0000:1b:00", XID: 48, GPUInstance: noInstance, ComputeInstance: noInstance, Sequence: 7, Time: now.Add(test.ahead),
		})
		w.change(func() { w.read = now.Add(test.read) })
		review(t, i, w)
		if got := unhealthyOnes(i); got != test.want {
			t.Errorf("%s: unhealthy: %q, want %q", name, got, test.want)
		}
	}
}

// moving is a world in which a scan ends at the first call of LastRead.
type moving struct{ *world }

func (m moving) LastRead(string) time.Time {
	if m.Inventory().GPUs[0].Recovery == device.RecoveryNone {
		m.change(func() {
			m.inventory.GPUs = slices.Clone(m.inventory.GPUs)
			m.inventory.GPUs[0].Recovery, m.read = device.RecoveryReset, time.Now().Add(time.Hour)
		})
	}
	return m.world.LastRead("")
}

// An XID does not end by an inventory that is older than the reading it is judged by.
func TestXIDEndsByItsOwnReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := xidWorld()
		i, _ := newInventoryWith(w, loaded(t, t.TempDir()))
		i.config.Hardware = moving{w}
		i.xids.take(t.Context(), device.XIDEvent{PCI: "0000:1b:00", XID: 48, GPUInstance: noInstance, ComputeInstance: noInstance, Time: time.Now()})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- i.Run(ctx) }()
		synctest.Wait()
		want(t, i, "GPU-0=XID/48")
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// readWhileReviewed is a world in which someone reads the inventory after an XID came and before it is reviewed.
type readWhileReviewed struct {
	*world
	read func()
}

func (r readWhileReviewed) LastRead(uuid string) time.Time { r.read(); return r.world.LastRead(uuid) }

// An XID of before a reset comes from the kernel's log and ends at once. Who has read the inventory in between hears of the end.
// Otherwise the device plugin would withdraw the GPU until the next change.
func TestEndOfAnXIDIsAnnounced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := xidWorld()
		w.read = time.Now()
		i, _ := newInventoryWith(w, loaded(t, t.TempDir()))
		var seen string
		var changed <-chan struct{}
		i.config.Hardware = readWhileReviewed{w, func() {
			if now := unhealthyOnes(i); now != "" && seen == "" {
				seen, changed = now, i.Changed()
			}
		}}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- i.Run(ctx) }()
		synctest.Wait()
		w.xids <- device.XIDEvent{PCI: "0000:1b:00", XID: 79, GPUInstance: noInstance, ComputeInstance: noInstance, Time: time.Now().Add(-time.Hour)}
		synctest.Wait()
		if seen == "" {
			t.Fatal("the XID was not seen")
		}
		want(t, i, "")
		select {
		case <-changed:
		default:
			t.Errorf("the end of %s was not announced", seen)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// The XID of a partition ends with the partition, also if another one is made at its place.
func TestXIDEndsWithItsPartition(t *testing.T) {
	w := xidWorld()
	w.inventory.GPUs[1].Recovery = ""
	i, _ := newInventoryWith(w, loaded(t, t.TempDir()))
	at := func(xid, gi int) {
		i.xids.take(t.Context(), device.XIDEvent{PCI: "0000:3b:00", XID: xid, GPUInstance: gi, ComputeInstance: noInstance, Time: time.Now()})
		review(t, i, w)
	}
	at(94, 3)
	at(94, 5)
	want(t, i, "MIG-3=XID/94 MIG-5=XID/94")
	at(0, 3) // the agent destroyed it
	want(t, i, "MIG-5=XID/94")
	partitions := w.inventory.GPUs[1].Partitions
	w.change(func() { w.inventory.GPUs[1].Partitions = partitions[:1] }) // an administrator did
	review(t, i, w)
	w.change(func() { w.inventory.GPUs[1].Partitions = partitions })
	want(t, i, "")
}

// A new agent knows the XIDs that have not ended, and does not count again what the kernel's log still has of those that have.
func TestXIDsSurviveARestart(t *testing.T) {
	dir := t.TempDir()
	log := []device.XIDEvent{
		{Sequence: 10, GPUInstance: noInstance}, // the driver is loaded
		{PCI: "0000:1b:00", XID: 48, Sequence: 20, GPUInstance: noInstance, ComputeInstance: noInstance, Time: time.Now()},
		{PCI: "0000:3b:00", XID: 95, Sequence: 30, GPUInstance: noInstance, ComputeInstance: noInstance, Time: time.Now()},
	}
	w := xidWorld()
	agent := func() *Inventory {
		records := loaded(t, dir)
		t.Cleanup(func() { records.Close() })
		i, _ := newInventoryWith(w, records)
		return i
	}
	read := func(i *Inventory) {
		for _, e := range log {
			i.xids.take(t.Context(), e)
		}
	}
	first := agent()
	read(first)
	first.xids.take(t.Context(), device.XIDEvent{PCI: "0000:1b:00", GPUInstance: noInstance}) // it was reset
	left := "GPU-1=XID/95 MIG-3=XID/95 MIG-5=XID/95"
	want(t, first, left)
	if err := first.config.Records.Close(); err != nil {
		t.Fatal(err)
	}
	second := agent()
	want(t, second, left) // before it has read the log
	read(second)
	want(t, second, left)
	log = append(log, device.XIDEvent{PCI: "0000:1b:00", XID: 95, Sequence: 40, GPUInstance: noInstance, ComputeInstance: noInstance, Time: time.Now()})
	read(second)
	want(t, second, "GPU-0=XID/95 "+left)
	log = append(log, device.XIDEvent{Sequence: 50, GPUInstance: noInstance})
	read(second)
	want(t, second, "")
}

// running is an agent with the records in dir, that has read the log.
func running(t *testing.T, w *world, dir string, log ...device.XIDEvent) (i *Inventory, events *record.FakeRecorder, stop func()) {
	t.Helper()
	records := loaded(t, dir)
	i, events = newInventoryWith(w, records)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- i.Run(ctx) }()
	for _, e := range log {
		w.xids <- e
	}
	time.Sleep(3 * interval)
	synctest.Wait()
	return i, events, func() {
		cancel()
		if err := errors.Join(<-done, records.Close()); err != nil {
			t.Error(err)
		}
	}
}

func logged(sequence uint64, pci string, xid, gi int, at time.Time) device.XIDEvent {
	return device.XIDEvent{Sequence: sequence, PCI: pci, XID: xid, GPUInstance: gi, ComputeInstance: noInstance, Time: at}
}

// A driver without recovery actions does not say whether an XID of long ago still matters. One after which the GPU works does not count if
// it is older than the first agent of this boot. A later agent counts those that came while none ran.
func TestXIDsBeforeTheFirstAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := xidWorld()
		w.inventory.GPUs[0].Recovery, w.inventory.GPUs[1].Recovery = "", ""
		dir := t.TempDir()
		log := []device.XIDEvent{
			logged(5, "0000:1b:00", 94, noInstance, time.Now().Add(-time.Hour)),
			logged(6, "0000:3b:00", 95, noInstance, time.Now().Add(-time.Hour)),
		}
		all := "GPU-1=XID/95 MIG-3=XID/95 MIG-5=XID/95"
		i, _, stop := running(t, w, dir, log...)
		want(t, i, all)
		stop()
		time.Sleep(time.Hour)
		log = append(log, logged(7, "0000:1b:00", 63, noInstance, time.Now()))
		time.Sleep(time.Hour)
		i, _, stop = running(t, w, dir, log...)
		want(t, i, "GPU-0=XID/63 "+all)
		stop()
	})
}

// An administrator who has reset a GPU removes its record, as the event advises, with or without an agent. The XIDs do not return.
func TestRemovedRecordEndsXIDs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := xidWorld()
		w.inventory.GPUs[0].Recovery, w.inventory.GPUs[1].Recovery = "", ""
		dir := t.TempDir()
		remove := func(pci string) {
			t.Helper()
			if err := os.Remove(filepath.Join(dir, pci)); err != nil {
				t.Fatal(err)
			}
		}
		log := []device.XIDEvent{
			logged(5, "0000:1b:00", 95, noInstance, time.Now()), logged(6, "0000:3b:00", 94, noInstance, time.Now().Add(time.Millisecond)),
		}
		i, events, stop := running(t, w, dir, log...)
		rest := "GPU-1=XID/94 MIG-3=XID/94 MIG-5=XID/94"
		want(t, i, "GPU-0=XID/95 "+rest)
		for _, pci := range []string{"0000:1b:00", "0000:3b:00"} {
			if event, advice := <-events.Events, "after it, remove "+filepath.Join(dir, pci)+" on the node"; !strings.Contains(event, advice) {
				t.Errorf("event %q lacks %q", event, advice)
			}
		}
		remove("0000:1b:00")
		time.Sleep(2 * interval)
		synctest.Wait()
		want(t, i, rest)
		stop()
		i, _, stop = running(t, w, dir, log...)
		want(t, i, rest)
		stop()
		remove("0000:3b:00")
		i, _, stop = running(t, w, dir, log...)
		want(t, i, "")
		stop()
	})
}

// The XID of a partition that went while no agent ran, or before the first one, is not that of another one with the same number.
func TestXIDsOfPartitionsThatAreGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := xidWorld()
		w.inventory.GPUs[1].Recovery = ""
		dir := t.TempDir()
		partitions := w.inventory.GPUs[1].Partitions
		log := []device.XIDEvent{
			logged(5, "0000:3b:00", 95, 7, time.Now().Add(-time.Hour)), logged(6, "0000:3b:00", 94, 5, time.Now()),
		}
		i, _, stop := running(t, w, dir, log...)
		want(t, i, "MIG-5=XID/94")
		stop()
		w.change(func() { w.inventory.GPUs[1].Partitions = partitions[:1] })
		i, _, stop = running(t, w, dir, log...)
		again := partitions[1]
		again.GPUInstance, again.UUID, again.Ref.Placement.Start = 7, "MIG-7", 2
		w.change(func() { w.inventory.GPUs[1].Partitions = append(slices.Clone(partitions), again) })
		want(t, i, "")
		stop()
	})
}

// The node configuration can ignore a fault, and evict. What it ignores does not hide a lesser one that counts.
func TestActions(t *testing.T) {
	w := xidWorld()
	w.actions = map[string]device.FaultAction{device.ReasonResetRequired: device.FaultIgnore, device.ReasonFabric: device.FaultNoExecute}
	i, _ := newInventory(w)
	w.inventory.GPUs[0].Faults = []device.Health{{Reason: device.ReasonResetRequired}}
	want(t, i, "")
	w.inventory.GPUs[0].Faults = []device.Health{{Reason: device.ReasonResetRequired}, {Reason: device.ReasonFabric}}
	want(t, i, "GPU-0=Fabric/0")
	if !i.Inventory().GPUs[0].Health.Evict {
		t.Error("the holders are not evicted")
	}
	w.inventory.GPUs[0].Health = device.Health{Reason: device.ReasonNotClean}
	want(t, i, "GPU-0=Fabric/0")
}

// TestPauseHidesNoFault: what a GPU needs, and whether its holders are evicted, is during a pause what it was before (nvml.Node.Pause).
func TestPauseHidesNoFault(t *testing.T) {
	w := xidWorld()
	w.actions = map[string]device.FaultAction{device.ReasonLost: device.FaultNoExecute}
	i, _ := newInventory(w)
	w.inventory.GPUs[0].Health, w.inventory.GPUs[0].Faults = device.Health{Reason: device.ReasonPaused}, []device.Health{{Reason: device.ReasonLost}}
	want(t, i, "GPU-0=Lost/0")
	if h := i.Inventory().GPUs[0].Health; !h.Evict || h.Repair() != device.RepairReboot {
		t.Errorf("%+v needs %q", h, h.Repair())
	}
}

// Bounded memory: a GPU that reports many XIDs keeps the worst, and addresses that no GPU has are limited.
func TestXIDBounds(t *testing.T) {
	w := xidWorld()
	i, _ := newInventoryWith(w, loaded(t, t.TempDir()))
	at := func(pci string, xid, ci int) {
		i.xids.take(t.Context(), device.XIDEvent{PCI: pci, XID: xid, GPUInstance: noInstance, ComputeInstance: ci, Time: time.Now()})
	}
	at("0000:1b:00", 79, noInstance)
	for n := range 100 {
		at("0000:1b:00", 94, n)
	}
	if got := len(i.xids.gpus["0000:1b:00"].XIDs); got != 16 {
		t.Errorf("%d XIDs are kept, want 16", got)
	}
	want(t, i, "GPU-0=XID/79")
	for n := range 1000 {
		at(fmt.Sprintf("%04x:00:00", n), 79, noInstance)
	}
	if got := len(i.xids.gpus); got > 64 {
		t.Errorf("XIDs of %d addresses are kept", got)
	}
}

// Each change of a device's health is one event that says what to do, and the metric follows.
func TestHealthEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := xidWorld()
		i, events := newInventoryWith(w, loaded(t, t.TempDir()))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- i.Run(ctx) }()
		event := func(parts ...string) {
			t.Helper()
			event := <-events.Events
			for _, part := range parts {
				if !strings.Contains(event, part) {
					t.Errorf("event %q lacks %q", event, part)
				}
			}
		}
		changed := i.Changed()
		w.xids <- device.XIDEvent{PCI: "0000:1b:00", XID: 79, GPUInstance: noInstance, ComputeInstance: noInstance, Time: time.Now()}
		<-changed
		event("Warning GPUUnhealthy gpu-0 (GPU-0) is unhealthy (XID): XID 79", "has fallen off the bus (RESTART_BM)", "Drain the node and reboot it")
		synctest.Wait()
		if got := testutil.ToFloat64(i.metrics.unhealthy.WithLabelValues("gpu-0", "GPU-0", "XID", "79")); got != 1 {
			t.Errorf("the metric is %v", got)
		}
		w.change(func() { w.read = time.Now().Add(quiet) })
		event("Normal GPUHealthy gpu-0 (GPU-0) is healthy again. It was unhealthy with reason XID")
		w.change(func() { w.read = time.Time{} })
		w.xids <- device.XIDEvent{PCI: "0000:3b:00", XID: 94, GPUInstance: 5, ComputeInstance: noInstance, Time: time.Now()}
		event("Warning GPUUnhealthy gpu-1-mig-1g10gb-19-1 (MIG-5) is unhealthy (XID): XID 94")
		synctest.Wait()
		if got := testutil.CollectAndCount(i.metrics.unhealthy); got != 1 {
			t.Errorf("%d devices are counted", got)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if len(events.Events) > 0 {
			t.Errorf("another event: %s", <-events.Events)
		}
	})
}

// A GPU whose fault has the action ResetWhenIdle is reset once it has no holder, and no other GPU is.
func TestResetWhenIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := xidWorld()
		w.actions, w.held = map[string]device.FaultAction{device.ReasonResetRequired: device.FaultResetWhenIdle}, true
		w.inventory.GPUs[0].Faults = []device.Health{{Reason: device.ReasonResetRequired}}
		w.inventory.GPUs[1].Faults = []device.Health{{Reason: device.ReasonRebootRequired}}
		i, _ := newInventoryWith(w, loaded(t, t.TempDir()))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- i.Run(ctx) }()
		resets := func() string {
			time.Sleep(3 * interval)
			synctest.Wait()
			w.mu.Lock()
			defer w.mu.Unlock()
			return strings.Join(w.resets, " ")
		}
		if got := resets(); got != "" {
			t.Errorf("reset with a holder: %s", got)
		}
		w.change(func() { w.held = false })
		if got := resets(); got != "GPU-0" {
			t.Errorf("reset: %q, want GPU-0", got)
		}
		time.Sleep(resetRetry)
		if got := resets(); got != "GPU-0 GPU-0" {
			t.Errorf("reset: %q, want GPU-0 a second time, because its fault has not ended", got)
		}
		time.Sleep(resetRetry)
		if got := resets(); got != "GPU-0 GPU-0" {
			t.Errorf("reset: %q, the third comes later", got)
		}
		time.Sleep(24 * time.Hour)
		if got := resets(); got != "GPU-0 GPU-0 GPU-0" {
			t.Errorf("reset: %q, want no more, because its fault does not end", got)
		}
		for _, metric := range []string{"done", "failed"} {
			if got := testutil.ToFloat64(i.metrics.resets.WithLabelValues(metric)); got != 3 {
				t.Errorf("%v resets are counted as %s, want 3: none of them ended the fault", got, metric)
			}
		}
		w.change(func() { w.inventory.GPUs[0].Faults, w.inventory.GPUs[1].Faults = nil, nil })
		resets()
		w.change(func() { w.inventory.GPUs[0].Faults = []device.Health{{Reason: device.ReasonResetRequired}} })
		if got := resets(); got != "GPU-0 GPU-0 GPU-0 GPU-0" {
			t.Errorf("reset: %q, want one more for another fault", got)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestReplaceIsNotReset: a GPU that has to be replaced is not reset, whatever its other faults are and whichever of them is shown. One whose node
// ignores that fault is.
func TestReplaceIsNotReset(t *testing.T) {
	for action, want := range map[device.FaultAction]struct {
		resets int
		remedy string
	}{device.FaultNoSchedule: {0, "Replace the GPU"}, device.FaultIgnore: {mostResets, "resets the GPU once it has no holder"}} {
		synctest.Test(t, func(t *testing.T) {
			w := xidWorld()
			w.actions = map[string]device.FaultAction{device.ReasonXID: device.FaultResetWhenIdle, device.ReasonRowRemapFailure: action}
			w.inventory.GPUs[0].Faults, w.inventory.GPUs[0].Recovery = []device.Health{{Reason: device.ReasonRowRemapFailure}}, ""
			_, events, stop := running(t, w, t.TempDir())
			if action != device.FaultIgnore {
				<-events.Events // that of the row alone
			}
			w.xids <- device.XIDEvent{
				PCI: slotOf(w.inventory.GPUs[0]), XID: 64, GPUInstance: device.NoInstance, ComputeInstance: device.NoInstance, Sequence: 5, Time: time.Now(),
			}
			time.Sleep(24 * time.Hour)
			synctest.Wait()
			if event := <-events.Events; !strings.Contains(event, want.remedy) || len(w.resets) != want.resets {
				t.Errorf("%s: %d resets, event %q", action, len(w.resets), event)
			}
			stop()
		})
	}
}

// A GPU that has to be replaced is not reset, and none is while the node is paused. A reset that is refused is tried less and less often.
func TestResetsThatAreOfNoUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := xidWorld()
		w.actions = map[string]device.FaultAction{
			device.ReasonResetRequired: device.FaultResetWhenIdle, device.ReasonRowRemapFailure: device.FaultResetWhenIdle,
		}
		w.inventory.GPUs[0].Faults = []device.Health{{Reason: device.ReasonRowRemapFailure}}
		w.inventory.GPUs[1].Faults = []device.Health{{Reason: device.ReasonResetRequired}}
		w.inventory.GPUs[1].Health = device.Health{Reason: device.ReasonPaused}
		w.refused = errors.New("the NVIDIA driver is paused")
		i, events, stop := running(t, w, t.TempDir())
		time.Sleep(time.Hour)
		synctest.Wait()
		failed := func() int { return int(testutil.ToFloat64(i.metrics.resets.WithLabelValues("failed"))) }
		if len(w.resets) > 0 || failed() > 0 {
			t.Errorf("reset: %v, %d failed", w.resets, failed())
		}
		if event := <-events.Events; !strings.Contains(event, "Replace the GPU") {
			t.Errorf("event %q", event)
		}
		w.change(func() { w.inventory.GPUs[1].Health, w.refused = device.Health{}, errors.New("it is in use") })
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		if got := failed(); got < 48 || got > 60 {
			t.Errorf("a refused reset was tried %d times in a day", got)
		}
		stop()
	})
}

// The clock was nine hours ahead until NTP set it back. The agent restarts after that.
func TestXIDFromAClockAhead(t *testing.T) {
	dir, ahead := t.TempDir(), time.Now().Add(9*time.Hour)
	records := loaded(t, dir)
	if err := records.Put("0000:1b:00", xids{XIDs: []xid{{XID: 95, GPUInstance: noInstance, ComputeInstance: noInstance, Time: ahead}}}); err != nil {
		t.Fatal(err)
	}
	if err := records.Put(logKey, xids{Log: &progress{Since: ahead}}); err != nil {
		t.Fatal(err)
	}
	if err := records.Close(); err != nil {
		t.Fatal(err)
	}
	w := xidWorld() // the driver says that the GPU needs nothing
	i, _ := newInventoryWith(w, loaded(t, dir))
	w.change(func() { w.read = time.Now().Add(time.Hour) })
	review(t, i, w)
	want(t, i, "")
	i.xids.begin(t.Context())
	i.xids.take(t.Context(), device.XIDEvent{PCI: "0000:3b:00", XID: 94, GPUInstance: 5, ComputeInstance: noInstance, Sequence: 11, Time: time.Now()})
	want(t, i, "MIG-5=XID/94")
}

// A second XID comes while the process has no file descriptor left. The GPU stays unhealthy: its record was not removed.
func TestXIDWithoutFileDescriptors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := xidWorld()
		w.inventory.GPUs[0].Recovery, w.inventory.GPUs[1].Recovery = "", "" // only an administrator ends XIDs
		i, _, stop := running(t, w, t.TempDir(), logged(5, "0000:1b:00", 95, noInstance, time.Now()))
		want(t, i, "GPU-0=XID/95")
		var before unix.Rlimit
		next, err := unix.Open("/dev/null", unix.O_RDONLY, 0)
		if err := errors.Join(err, unix.Close(next), unix.Getrlimit(unix.RLIMIT_NOFILE, &before)); err != nil {
			t.Fatal(err)
		}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(next), Max: before.Max}); err != nil {
			t.Fatal(err)
		}
		i.xids.take(t.Context(), logged(6, "0000:1b:00", 48, noInstance, time.Now()))
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * interval)
		synctest.Wait()
		if unhealthyOnes(i) == "" {
			t.Error("the GPU is healthy")
		}
		stop()
	})
}
