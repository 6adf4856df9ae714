// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// fakeSettings exist until they are reverted. All devices of a claim have the same daemon.
type fakeSettings struct {
	mu      sync.Mutex
	applied map[sharing.Key]error
	unused  map[sharing.Key]bool
	// slow claims are locked until their channel is closed.
	slow    map[string]chan struct{}
	changed chan struct{}
	// reverts counts the calls of Revert.
	reverts int
}

func newSettings(keys ...sharing.Key) *fakeSettings {
	f := &fakeSettings{applied: map[sharing.Key]error{}, unused: map[sharing.Key]bool{}, slow: map[string]chan struct{}{}, changed: make(chan struct{})}
	for _, key := range keys {
		f.applied[key] = nil
	}
	return f
}

func (f *fakeSettings) Applied(claim string, ref device.Ref) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, ok := f.applied[sharing.Key{Owner: sharing.OwnerOf(claim), Device: ref}]
	return ok
}

func (f *fakeSettings) All() []sharing.Key {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Keys(f.applied))
}

func (f *fakeSettings) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

func (f *fakeSettings) Repair() error { return nil }

func (f *fakeSettings) Revert(_ context.Context, key sharing.Key, unused func() bool) error {
	f.mu.Lock()
	f.reverts++
	slow := f.slow[key.Owner.Claim()]
	f.mu.Unlock()
	if slow != nil {
		<-slow
	}
	if !unused() {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unused[key] = true
	for other, err := range f.applied {
		switch {
		case other.Owner != key.Owner:
		case err != nil:
			return err
		case !f.unused[other]:
			return fmt.Errorf("revert: %w", sharing.ErrStillShared)
		}
	}
	maps.DeleteFunc(f.applied, func(other sharing.Key, _ error) bool { return other.Owner == key.Owner })
	return nil
}

func (f *fakeSettings) set(key sharing.Key, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.applied[key] = err
	f.tell()
}

func (f *fakeSettings) tell() {
	close(f.changed)
	f.changed = make(chan struct{})
}

func onGPU(claim, gpu string) sharing.Key {
	return sharing.Key{Owner: sharing.OwnerOf(claim), Device: device.Ref{GPU: gpu}}
}

// newSettingsRig is a node where this was set, and these partitions were made.
func newSettingsRig(t *testing.T, f *fakeSettings, made ...device.Ref) (*rig, *fakePartitions, *record.FakeRecorder) {
	g, partitions, events := newPartitionRig(t, made...)
	must(t, g.book.Close())
	var err error
	g.book, err = ledger.Open(t.Context(), ledger.Options{
		Dir: t.TempDir(), BootID: "boot", PodStates: g.pods,
		CleanupPending: func(h ledger.Hold) bool { return partitions.Made(h.Device) || f.Applied(h.Holder.ID, h.Device) },
	})
	must(t, err)
	g.r.Ledger, g.r.Settings = g.book, f
	return g, partitions, events
}

// The holds of a claim end with what was set for it, and not before, and the next holder finds the GPU as it was.
func TestSettingEndsWithItsClaim(t *testing.T) {
	t.Parallel()
	f := newSettings(onGPU("c1", "GPU-1"), onGPU("c1", "GPU-2"))
	g, _, _ := newSettingsRig(t, f)
	g.group("p1", true)
	g.addPod(g.pod("p1", "c1"))
	g.reserve("c1", []device.Ref{{GPU: "GPU-1"}, {GPU: "GPU-2"}}, "p1")
	g.run()
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.await("GPU-1: claim c1 draining [p1]", "GPU-2: claim c1 draining [p1]")
	g.stays("GPU-1: claim c1 draining [p1]", "GPU-2: claim c1 draining [p1]")
	if len(f.All()) != 2 {
		t.Error("undone while a pod has the GPUs")
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := g.book.ReserveClaim(t.Context(), ledger.ClaimRequest{UID: "c2", Namespace: "apps", Name: "c2", Devices: []device.Ref{{GPU: "GPU-1"}}})
		if err == nil && len(f.All()) > 0 {
			err = errors.New("given out before it was as before")
		}
		waiting <- err
	}()
	g.noGroup("p1")
	g.deletePod("p1")
	must(t, <-waiting)
	g.await("GPU-1: claim c2 held []")
}

// A device whose daemon others of the claim still use is looked at every now and then, without a word, and is free with them.
func TestSettingWaitsForTheRestOfItsGroup(t *testing.T) {
	t.Parallel()
	f := newSettings(onGPU("c1", "GPU-1"), onGPU("c1", "GPU-2"))
	g, _, events := newSettingsRig(t, f)
	g.group("p1", true)
	g.addPod(g.pod("p1", "c1"))
	// The first has no holder.
	g.reserve("c1", []device.Ref{{GPU: "GPU-2"}}, "p1")
	g.run()
	time.Sleep(500 * time.Millisecond)
	f.mu.Lock()
	undos := f.reverts
	// As a Prepare of the claim does.
	f.tell()
	f.mu.Unlock()
	if most := int(500 * time.Millisecond / g.r.times.retry); undos == 0 || undos > most {
		t.Errorf("asked to undo it %d times, %d at most", undos, most)
	}
	if len(f.All()) != 2 || len(events.Events) > 0 {
		t.Errorf("undone while it is used, or %d events", len(events.Events))
	}
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.noGroup("p1")
	g.deletePod("p1")
	g.await()
	awaitTrue(t, "all settings are reverted", func() bool { return len(f.All()) == 0 })
}

// A daemon that does not end delays no other holder, not even of a partition of the same GPU, and the claim gets an event.
func TestSlowDaemon(t *testing.T) {
	t.Parallel()
	slow, other, part := onGPU("c1", "GPU-1"), onGPU("c2", "GPU-2"), place("GPU-1", 4, 4)
	slow.Device = place("GPU-1", 0, 4)
	f := newSettings(slow, other)
	g, partitions, events := newSettingsRig(t, f, slow.Device, part)
	goOn := make(chan struct{})
	f.slow["c1"] = goOn
	f.set(slow, errors.New("MPS daemon c1 does not end"))
	g.reserve("c1", []device.Ref{slow.Device})
	g.reserve("c2", []device.Ref{other.Device})
	g.reserve("c3", []device.Ref{part})
	g.run()
	for _, uid := range []string{"c1", "c2", "c3"} {
		must(t, g.book.DrainClaim(t.Context(), uid))
	}
	g.await("GPU-1@0+4: claim c1 draining []")
	if !partitions.Made(slow.Device) {
		t.Error("a partition was destroyed before its daemon had ended")
	}
	close(goOn)
	if event := <-events.Events; !strings.Contains(event, "SharingNotEnded") || !strings.Contains(event, "MPS daemon c1 does not end") {
		t.Errorf("event %q", event)
	}
	f.set(slow, nil)
	g.await()
	if left := append(partitions.All(), device.Ref{})[0]; left != (device.Ref{}) || len(f.All()) > 0 {
		t.Errorf("left %v and %v", partitions.All(), f.All())
	}
}

// What a process has set, or recorded, for a claim that never got the device goes; so does what appears later.
func TestSettingWithoutHolder(t *testing.T) {
	t.Parallel()
	f := newSettings(onGPU("c1", "GPU-1"), onGPU("c2", "GPU-2"))
	g, _, _ := newSettingsRig(t, f)
	g.reserve("c2", []device.Ref{{GPU: "GPU-2"}})
	// It has the same GPU, and nothing is set for it.
	g.reserve("c3", []device.Ref{{GPU: "GPU-1"}})
	g.run()
	awaitTrue(t, "the settings without a hold are reverted", func() bool { return !f.Applied("c1", device.Ref{GPU: "GPU-1"}) })
	f.set(onGPU("c4", "GPU-1"), nil)
	awaitTrue(t, "the next is reverted, too", func() bool { return !f.Applied("c4", device.Ref{GPU: "GPU-1"}) })
	if !f.Applied("c2", device.Ref{GPU: "GPU-2"}) {
		t.Error("a setting that is in use was undone")
	}
	g.want("GPU-1: claim c3 held []", "GPU-2: claim c2 held []")
}

// A claim that is prepared again before its settings are reverted keeps them.
func TestSettingIsWantedAgain(t *testing.T) {
	t.Parallel()
	f := newSettings(onGPU("c1", "GPU-1"))
	g, _, _ := newSettingsRig(t, f)
	goOn := make(chan struct{})
	f.slow["c1"] = goOn
	g.reserve("c1", []device.Ref{{GPU: "GPU-1"}})
	g.run()
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.await("GPU-1: claim c1 draining []")
	g.reserve("c1", []device.Ref{{GPU: "GPU-1"}})
	close(goOn)
	g.stays("GPU-1: claim c1 held []")
	if !f.Applied("c1", device.Ref{GPU: "GPU-1"}) {
		t.Error("what is in use was undone")
	}
}

// A claim that is gone without an Unprepare leaves nothing.
func TestSettingOfAClaimThatIsGone(t *testing.T) {
	t.Parallel()
	f := newSettings(onGPU("c1", "GPU-1"), onGPU("c1", "GPU-2"))
	g, _, _ := newSettingsRig(t, f)
	g.verifySoon()
	g.reserve("c1", []device.Ref{{GPU: "GPU-1"}, {GPU: "GPU-2"}})
	g.run()
	g.await()
	if len(f.All()) > 0 {
		t.Errorf("left %v", f.All())
	}
}

// A slow cleanup does not delay the check of other holds.
func TestSlowSettingOfAClaimThatIsGone(t *testing.T) {
	t.Parallel()
	f := newSettings(onGPU("c1", "GPU-1"))
	f.slow["c1"] = make(chan struct{})
	g, _, _ := newSettingsRig(t, f)
	g.verifySoon()
	g.reserve("c1", []device.Ref{{GPU: "GPU-1"}})
	g.reserve("c2", []device.Ref{{GPU: "GPU-2"}})
	g.run()
	g.await("GPU-1: claim c1 draining []")
	// The API server is not asked again while the settings are reverted.
	time.Sleep(2 * g.r.times.ending)
	before := g.calls()
	time.Sleep(5 * g.r.times.ending)
	if calls := g.calls() - before; calls > 0 {
		t.Errorf("%d calls meanwhile", calls)
	}
	close(f.slow["c1"])
	g.await()
}
