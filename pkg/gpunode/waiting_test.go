// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/mps"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// wait runs RunWaiting of an agent in a boot until the returned function is called.
func (f *fixture) wait(boot string, w Waiting) (stop func()) {
	f.Helper()
	o, err := New(Config{REST: f.api.config(), NodeName: "node-1", Registerer: prometheus.NewRegistry(), Facts: Facts{BootID: boot}})
	if err != nil {
		f.Fatal(err)
	}
	o.times.firstRetry, o.times.lastRefused = time.Millisecond, 10*time.Millisecond
	ctx, cancel := context.WithCancel(f.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); o.RunWaiting(ctx, w) }()
	return func() {
		cancel()
		<-ended
	}
}

// After a reboot without a driver, the GPUs and holders of yesterday are not shown.
func TestWaiting(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.daemons.set([]sharing.Daemon{{Name: "daemon", Settings: mps.Settings{Devices: []string{"GPU-0"}, DriverRoot: "/"}}})
	f.hold("c1", "GPU-0")
	_, stop := f.start()
	f.awaitStatus("a holder", func(s v1alpha1.GPUNodeStatus) bool { return s.Holders != "" && len(s.Daemons) == 1 })
	stop()
	f.api.set(func() { f.api.broken = true })
	var reasons broadcast.Signal
	reason := newSource("no driver")
	stop = f.wait("boot-2", Waiting{Reason: reason.get, Changed: reasons.Changed})
	f.api.set(func() { f.api.broken = false })
	f.awaitStatus("the reason", func(s v1alpha1.GPUNodeStatus) bool { return s.Waiting == "no driver" })
	status := f.api.object("node-1").Status
	if len(status.Devices) > 0 || status.Holders != "" || status.Counts != (v1alpha1.DeviceCounts{}) || status.ExtendedResource != "" || status.Mode != "" {
		t.Errorf("still shown: %+v", status)
	}
	if len(status.Daemons) != 1 || status.BootID != "boot-2" {
		t.Errorf("daemons %v, boot %s", status.Daemons, status.BootID)
	}
	reason.set("no GPU")
	reasons.Notify()
	f.awaitStatus("another reason", func(s v1alpha1.GPUNodeStatus) bool { return s.Waiting == "no GPU" })
	stop()
	f.start()
	f.awaitStatus("what is true with a driver", func(s v1alpha1.GPUNodeStatus) bool { return s.Waiting == "" && s.Holders != "" })
}

// While the agent scans, the holders in a status of this boot stay, because they are still true. A node without a GPU gets no object.
func TestWaitingLeavesWhatMayBeTrue(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	w := Waiting{Reason: func() string { return "reads GPUs" }, Changed: f.node.Changed, OnlyEarlierBoots: true}
	gone := w
	gone.OnlyEarlierBoots = false
	stop := f.wait("boot-1", gone)
	f.quiet()
	stop()
	if f.api.object("node-1") != nil {
		t.Error("an object for a node without a GPU")
	}
	f.hold("c1", "GPU-0")
	_, stop = f.start()
	f.awaitStatus("a holder", func(s v1alpha1.GPUNodeStatus) bool { return s.Holders != "" })
	stop()
	for boot, before := range map[string]string{"boot-1": "boot-1", "boot-2": ""} {
		f.api.set(func() {
			o := f.api.objects["node-1"].DeepCopy()
			o.Status.BootID = before
			f.api.store(o)
		})
		stop = f.wait(boot, w)
		f.awaitStatus("what the agent does", func(s v1alpha1.GPUNodeStatus) bool {
			return s.Waiting == "reads GPUs" && s.Holders != "" && s.BootID == before
		})
		f.quiet()
		stop()
		f.api.set(func() {
			o := f.api.objects["node-1"].DeepCopy()
			o.Status.Waiting = availability.Stopped
			f.api.store(o)
		})
	}
	f.api.set(func() {
		o := f.api.objects["node-1"].DeepCopy()
		o.Status.BootID = "boot-1"
		f.api.store(o)
	})
	stop = f.wait("boot-2", w)
	f.awaitStatus("another boot", func(s v1alpha1.GPUNodeStatus) bool { return s.Waiting == "reads GPUs" && s.Holders == "" })
	stop()
}

// A holder stays visible although its GPU is not in the inventory, as after an agent restarted without a driver.
func TestHoldersWithoutADriver(t *testing.T) {
	pod := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: "GPU-1"}, Device: device.Ref{GPU: "GPU-1"}, State: ledger.StateHeld}
	part := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "c2"}, State: ledger.StateHeld, Namespace: "apps", Name: "c2",
		Device: device.Ref{GPU: "GPU-0", Placement: device.Placement{Start: 2, Size: 1}}}
	for range 2 {
		s := Status(Facts{Holds: []ledger.Hold{pod, part}, Waiting: "no driver"})
		if len(s.Devices) != 2 || s.Devices[0].Name != "GPU-0" || s.Devices[1].Name != "GPU-1" || s.Devices[0].UnhealthyReason == "" {
			t.Errorf("devices: %+v", s.Devices)
		}
		if s.Holders != "GPU-0=apps/c2(claim) GPU-1=?(pod)" || s.Waiting != "no driver" {
			t.Errorf("holders: %s", s.Holders)
		}
		pod, part = part, pod
	}
}

// TestDriverThatReturns: the facts of the moment at which a driver returns are those of before or after, and name no held GPU lost.
func TestDriverThatReturns(t *testing.T) {
	f := newFixture(t)
	f.inventory.set(device.Inventory{})
	o := &Object{config: Config{Ledger: f.ledger, Inventory: f.inventory, Sharing: f.daemons, Waiting: f.waiting, Unread: func() bool { return true }}}
	if facts := o.facts(); !facts.Unread {
		t.Error("without a driver GPUs count as read")
	}
	o.config.Unread = func() bool {
		f.inventory.set(device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0")}})
		return false
	}
	if facts := o.facts(); facts.Unread || len(facts.Inventory.GPUs) == 0 {
		t.Errorf("the driver has returned: %+v", facts)
	}
}
