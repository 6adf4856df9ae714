// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// fakePartitions exist until they are destroyed.
type fakePartitions struct {
	mu sync.Mutex
	// made are the partitions with the error of Destroy.
	made map[device.Ref]error
	// slow GPUs are locked until their channel is closed.
	slow map[string]chan struct{}
	// idle are GPUs in idle MIG mode, switched those where it was ended.
	idle     []device.GPU
	switched []string
}

func newPartitions(refs ...device.Ref) *fakePartitions {
	f := &fakePartitions{made: map[device.Ref]error{}, slow: map[string]chan struct{}{}}
	for _, ref := range refs {
		f.made[ref] = nil
	}
	return f
}

func (f *fakePartitions) Made(ref device.Ref) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, ok := f.made[ref]
	return ok
}

// Complete reports whether the partition is made: creating one takes no time here, unless its error is errCreating.
func (f *fakePartitions) Complete(ref device.Ref) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	err, ok := f.made[ref]
	return ok && !errors.Is(err, errCreating)
}

var errCreating = errors.New("the partition is not complete")

func (f *fakePartitions) All() []device.Ref {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Keys(f.made))
}

// await waits until no other caller changes the GPU.
func (f *fakePartitions) await(gpu string) {
	f.mu.Lock()
	slow := f.slow[gpu]
	f.mu.Unlock()
	if slow != nil {
		<-slow
	}
}

func (f *fakePartitions) Destroy(_ context.Context, ref device.Ref, unused func() bool) error {
	f.await(ref.GPU)
	if !unused() {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.made[ref]; err != nil {
		return err
	}
	delete(f.made, ref)
	return nil
}

func (f *fakePartitions) IdleMIGMode() []device.GPU {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.idle)
}

func (f *fakePartitions) EndIdleMIGMode(_ context.Context, gpu device.GPU, unused func() bool) error {
	f.await(gpu.UUID)
	if !unused() {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.switched, f.idle = append(f.switched, gpu.UUID), nil
	return nil
}

func (f *fakePartitions) Repair() error { return nil }

func (f *fakePartitions) set(ref device.Ref, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.made[ref] = err
}

type busyError struct{}

func (busyError) Error() string { return "in use by another client" }
func (busyError) PIDs() []int   { return []int{4242} }

func place(gpu string, start, size int) device.Ref {
	return device.Ref{GPU: gpu, Placement: device.Placement{Start: start, Size: size}}
}

// newPartitionRig is a node where these partitions were made.
func newPartitionRig(t *testing.T, refs ...device.Ref) (*rig, *fakePartitions, *record.FakeRecorder) {
	f := newPartitions(refs...)
	g := newRig(t, "GPU-1", "GPU-2")
	must(t, g.book.Close())
	var err error
	g.book, err = ledger.Open(t.Context(), ledger.Options{
		Dir: t.TempDir(), BootID: "boot", PodStates: g.pods,
		CleanupPending: func(h ledger.Hold) bool { return f.Made(h.Device) },
	})
	must(t, err)
	events := record.NewFakeRecorder(10)
	g.r.Ledger, g.r.Partitions, g.r.Recorder = g.book, f, events
	return g, f, events
}

// reserve gives a claim devices, for pods.
func (g *rig) reserve(uid string, refs []device.Ref, pods ...string) {
	g.t.Helper()
	r := ledger.ClaimRequest{UID: uid, Namespace: "apps", Name: uid, Devices: refs}
	for _, pod := range pods {
		r.Pods = append(r.Pods, ledger.Pod{UID: pod, Namespace: "apps", Name: pod})
	}
	_, err := g.book.ReserveClaim(g.t.Context(), r)
	must(g.t, err)
}

func awaitTrue(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("waited in vain:", what)
		}
	}
}

// The hold of a claim ends with the partition that was made for it, and not before.
func TestPartitionEndsWithItsClaim(t *testing.T) {
	t.Parallel()
	mine := place("GPU-1", 0, 4)
	g, f, events := newPartitionRig(t, mine)
	g.group("p1", true)
	g.addPod(g.pod("p1", "c1"))
	g.run()
	g.reserve("c1", []device.Ref{mine}, "p1")
	f.set(mine, busyError{})
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.await("GPU-1@0+4: claim c1 draining [p1]")
	g.noGroup("p1")
	g.deletePod("p1")
	event := <-events.Events
	if want := "Warning PartitionInUse partition GPU-1@0+4 is still in use by process 4242 (pod apps/p1 had it): it is destroyed when that ends"; event != want {
		t.Errorf("event %q, want %q", event, want)
	}
	g.stays("GPU-1@0+4: claim c1 draining [p1]")
	if len(events.Events) > 0 {
		t.Errorf("reported again: %s", <-events.Events)
	}
	f.set(mine, nil)
	g.await()
	if f.Made(mine) {
		t.Error("the hold ended and the partition still exists")
	}
}

// A claim waits for its placement until the earlier partition is destroyed, also one that no pod ever used.
func TestNextClaimWaitsForThePlacement(t *testing.T) {
	t.Parallel()
	mine := place("GPU-1", 0, 4)
	g, f, _ := newPartitionRig(t, mine)
	goOn := make(chan struct{})
	f.slow["GPU-1"] = goOn
	g.run()
	g.reserve("c1", []device.Ref{mine})
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	taken := make(chan error, 1)
	go func() {
		_, err := g.book.ReserveClaim(t.Context(), ledger.ClaimRequest{UID: "c2", Namespace: "apps", Name: "c2", Devices: []device.Ref{place("GPU-1", 2, 2)}})
		taken <- err
	}()
	// A partition on another GPU is not kept waiting.
	other := place("GPU-2", 0, 1)
	f.set(other, nil)
	g.reserve("c3", []device.Ref{other})
	must(t, g.book.DrainClaim(t.Context(), "c3"))
	g.await("GPU-1@0+4: claim c1 draining []")
	select {
	case err := <-taken:
		t.Fatalf("got the placement of a partition that exists: %v", err)
	default:
	}
	close(goOn)
	must(t, <-taken)
	g.await("GPU-1@2+2: claim c2 held []")
}

// A claim that is prepared again before its partition was destroyed keeps it.
func TestPartitionOfARevivedClaim(t *testing.T) {
	t.Parallel()
	mine := place("GPU-1", 0, 4)
	g, f, _ := newPartitionRig(t, mine)
	goOn := make(chan struct{})
	f.slow["GPU-1"] = goOn
	g.run()
	g.reserve("c1", []device.Ref{mine})
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.await("GPU-1@0+4: claim c1 draining []")
	g.reserve("c1", []device.Ref{mine})
	close(goOn)
	g.stays("GPU-1@0+4: claim c1 held []")
	if !f.Made(mine) {
		t.Error("a partition in use was destroyed")
	}
}

// A process that died after it recorded a partition and before the hold leaves the partition to the next process.
func TestPartitionWithoutAHold(t *testing.T) {
	t.Parallel()
	g, f, _ := newPartitionRig(t, place("GPU-1", 0, 4), place("GPU-2", 1, 1))
	g.reserve("c1", []device.Ref{place("GPU-2", 1, 1)})
	// It waits for the placement, and has no partition there yet.
	g.reserve("c2", []device.Ref{place("GPU-1", 2, 2)})
	g.run()
	awaitTrue(t, "the partition without a hold is destroyed", func() bool { return !f.Made(place("GPU-1", 0, 4)) })
	if !f.Made(place("GPU-2", 1, 1)) {
		t.Error("a partition that is held was destroyed")
	}
}

func TestIdleMIGMode(t *testing.T) {
	t.Parallel()
	g, f, _ := newPartitionRig(t)
	f.idle = []device.GPU{{UUID: "GPU-1"}}
	g.reserve("c1", []device.Ref{{GPU: "GPU-1"}})
	g.run()
	g.stays("GPU-1: claim c1 held []")
	f.mu.Lock()
	if len(f.switched) > 0 {
		t.Error("MIG mode of a held GPU was switched off")
	}
	f.mu.Unlock()
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.await()
	g.setGPUs("GPU-1")
	awaitTrue(t, "idle MIG mode of the free GPU ends", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return slices.Equal(f.switched, []string{"GPU-1"})
	})
}

// What fails is tried again.
func TestDestroyFails(t *testing.T) {
	t.Parallel()
	mine := place("GPU-1", 0, 4)
	g, f, events := newPartitionRig(t, mine)
	f.set(mine, errors.New("the GPU does not answer"))
	g.run()
	g.reserve("c1", []device.Ref{mine})
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	if event := <-events.Events; !strings.Contains(event, "PartitionNotDestroyed") || !strings.Contains(event, "the GPU does not answer") {
		t.Errorf("event %q", event)
	}
	f.set(mine, nil)
	g.await()
}

// A partition that was restored with two holders stays for the second.
func TestPartitionOfTwoHolders(t *testing.T) {
	t.Parallel()
	mine := place("GPU-1", 0, 4)
	g, f, _ := newPartitionRig(t, mine)
	g.reserve("c1", []device.Ref{mine})
	err := g.book.Expect(ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "c2"}, Device: mine, Namespace: "apps", Name: "c2"})
	if _, both := errors.AsType[*ledger.ConflictError](err); !both {
		t.Fatal(err)
	}
	g.run()
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.await("GPU-1@0+4: claim c2 restored []")
	if !f.Made(mine) {
		t.Error("destroyed although it has a holder")
	}
}
