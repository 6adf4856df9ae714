// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/mps"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// source is a value that notifies of changes.
type source[T any] struct {
	broadcast.Signal
	mu    sync.Mutex
	value T
}

func newSource[T any](value T) *source[T] { return &source[T]{value: value} }

func (s *source[T]) get() T {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.value
}

func (s *source[T]) set(value T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.value = value
	s.Notify()
}

type fakeNode struct{ *source[types.UID] }

func (f fakeNode) UID() types.UID { return f.get() }

type fakeInventory struct{ *source[device.Inventory] }

func (f fakeInventory) Inventory() device.Inventory { return f.get() }

type fakeClaims struct {
	*source[map[string]*resourceapi.ResourceClaim]
	namespace string
}

func (f fakeClaims) Get(_ context.Context, name string, _ metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	claim, ok := f.get()[f.namespace+"/"+name]
	switch {
	case !ok:
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "resourceclaims"}, name)
	case claim == nil:
		return nil, apierrors.NewInternalError(errors.New("etcd is away"))
	default:
		return claim, nil
	}
}

// running is the pod state of every holder.
type running struct{}

func (running) PodState(ledger.Hold) ledger.PodState    { return ledger.Running }
func (running) Started(ledger.Hold, []ledger.Hold) bool { return true }
func (running) Reuses(ledger.Hold) bool                 { return true }

// fixture is a node with two GPUs, an agent's ledger, and an API server.
type fixture struct {
	*testing.T
	api       *fakeAPI
	node      fakeNode
	ledger    *ledger.Ledger
	inventory fakeInventory
	registry  *prometheus.Registry
	// claims by namespace/name.
	claims  *source[map[string]*resourceapi.ResourceClaim]
	daemons fakeSharing
	logger  klog.Logger
	// recorder keeps the events on the node.
	recorder *record.FakeRecorder
}

type fakeSharing struct{ *source[[]sharing.Daemon] }

func (f fakeSharing) Daemons() []sharing.Daemon {
	return slices.DeleteFunc(slices.Clone(f.get()), unknown)
}

// UnknownDaemons are those of which there is nothing but a name.
func (f fakeSharing) UnknownDaemons() (names []string) {
	for _, d := range f.get() {
		if unknown(d) {
			names = append(names, d.Name)
		}
	}
	return names
}

func unknown(d sharing.Daemon) bool { return d.Settings.DriverRoot == "" }

func newFixture(t *testing.T) *fixture {
	book, err := ledger.Open(t.Context(), ledger.Options{Dir: t.TempDir(), BootID: "boot", PodStates: running{}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := book.Close(); err != nil {
			t.Error(err)
		}
	})
	return &fixture{
		T: t, api: newFakeAPI(t), node: fakeNode{newSource[types.UID]("node-uid")}, ledger: book,
		inventory: fakeInventory{newSource(device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0"), gpu(1, "GPU-1")}})},
		claims:    newSource(map[string]*resourceapi.ResourceClaim{}),
		daemons:   fakeSharing{newSource[[]sharing.Daemon](nil)},
		recorder:  record.NewFakeRecorder(100),
		logger:    ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true))),
	}
}

// start runs an Object until the test ends or the returned function is called.
func (f *fixture) start(shorten ...func(*times)) (o *Object, stop func()) {
	f.Helper()
	f.registry = prometheus.NewRegistry()
	o, err := New(Config{
		REST: f.api.config(), DriverName: "gpu.nvidia.com", NodeName: "node-1",
		Claims: func(namespace string) Claims { return fakeClaims{f.claims, namespace} },
		Facts:  Facts{Mode: "Dual", Limits: device.Resources{GPU: "nvidia.com/gpu"}},
		Node:   f.node, Ledger: f.ledger, Inventory: f.inventory, Registerer: f.registry, Sharing: f.daemons,
		Recorder: f.recorder, Waiting: f.waiting,
	})
	if err != nil {
		f.Fatal(err)
	}
	o.times = times{settle: time.Millisecond, interval: 10 * time.Millisecond, firstRetry: 10 * time.Millisecond,
		lastRetry: 20 * time.Millisecond, lastRefused: 50 * time.Millisecond, verify: time.Hour, heartbeat: time.Hour}
	for _, s := range shorten {
		s(&o.times)
	}
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), f.logger))
	done := make(chan error, 1)
	go func() { done <- o.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			f.Errorf("Run: %v", err)
		}
	})
	f.Cleanup(stop)
	return o, stop
}

// waiting is the reason of the agent's program.
func (f *fixture) waiting() string {
	if withheld := f.ledger.Withheld(); withheld != nil {
		return withheld.Error()
	}
	return ""
}

// patience bounds every wait; a test that needs it has failed.
const patience = time.Minute

func (f *fixture) await(what string, condition func() bool) {
	f.Helper()
	for deadline := time.Now().Add(patience); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			f.Fatalf("never: %s; object %+v, writes %q", what, f.api.object("node-1"), f.api.written())
		}
	}
}

// awaitStatus waits for an object with a status that satisfies.
func (f *fixture) awaitStatus(what string, condition func(v1alpha1.GPUNodeStatus) bool) *v1alpha1.GPUNode {
	f.Helper()
	f.await(what, func() bool {
		o := f.api.object("node-1")
		return o != nil && condition(o.Status)
	})
	return f.api.object("node-1")
}

// metric returns a counter or gauge with these values of its labels.
func (f *fixture) metric(name string, labels ...string) float64 {
	f.Helper()
	families, err := f.registry.Gather()
	if err != nil {
		f.Fatal(err)
	}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}
			if family.GetName() == name && slices.Equal(values, labels) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}

func free(n int32) func(v1alpha1.GPUNodeStatus) bool {
	return func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Total == 2 && s.Counts.Free == n }
}

func (f *fixture) hold(uid string, gpus ...string) {
	f.Helper()
	request := ledger.ClaimRequest{UID: uid, Namespace: "apps", Name: uid}
	for _, g := range gpus {
		request.Devices = append(request.Devices, device.Ref{GPU: g})
	}
	if _, err := f.ledger.ReserveClaim(f.Context(), request); err != nil {
		f.Fatal(err)
	}
}

func (f *fixture) release(uid string) {
	f.Helper()
	for _, h := range f.ledger.Holds() {
		if h.Holder.ID == uid {
			if err := f.ledger.Release(h); err != nil {
				f.Fatal(err)
			}
		}
	}
}

// quiet fails when anything is written within a few intervals.
func (f *fixture) quiet() {
	f.Helper()
	before := f.api.written()
	time.Sleep(100 * time.Millisecond) // nothing to wait for: nothing is to happen
	if now := f.api.written(); len(now) != len(before) {
		f.Errorf("wrote %q though nothing had changed", now[len(before):])
	}
}

func TestCreatesAndReports(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	object, _ := f.start()
	o := f.awaitStatus("a status with two free GPUs", free(2))
	if len(o.OwnerReferences) > 0 {
		t.Errorf("owned by %+v", o.OwnerReferences)
	}
	if got, want := f.api.written(), []string{"post node-1", "put node-1/status"}; !slices.Equal(got, want) {
		t.Errorf("wrote %q, want %q", got, want)
	}
	f.quiet()

	f.hold("c1", "GPU-0")
	f.awaitStatus("the claim as holder", func(s v1alpha1.GPUNodeStatus) bool { return s.Holders == "gpu-0=apps/c1(claim)" })
	for range 2 {
		object.Acknowledge("nvidia.com/gpu", []string{"GPU-1"}, true)
		f.awaitStatus("what kubelet says", func(s v1alpha1.GPUNodeStatus) bool {
			return s.Devices[0].ExtendedResourceState == v1alpha1.ExtendedResourceWithdrawn && s.Devices[1].ExtendedResourceState == v1alpha1.ExtendedResourceAllocatable
		})
	}
	object.Acknowledge("nvidia.com/gpu", nil, false)
	f.awaitStatus("that kubelet says nothing", func(s v1alpha1.GPUNodeStatus) bool { return s.Devices[0].ExtendedResourceState == "" })
	f.ledger.RecordConflict(ledger.Conflict{UID: "c2", Namespace: "apps", Name: "c2", Devices: []device.Ref{{GPU: "GPU-0"}}, PendingEviction: true})
	f.awaitStatus("the conflict", func(s v1alpha1.GPUNodeStatus) bool { return len(s.Conflicts) == 1 && s.Conflicts[0].PendingEviction })
	f.ledger.ClearConflict("c2")
	f.awaitStatus("no conflict", func(s v1alpha1.GPUNodeStatus) bool { return len(s.Conflicts) == 0 })
	f.inventory.set(device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0"), unhealthy(gpu(1, "GPU-1"), device.ReasonLost, "")}})
	f.awaitStatus("the fault", func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Unhealthy == 1 })
	f.release("c1")
	f.awaitStatus("no holder", func(s v1alpha1.GPUNodeStatus) bool { return s.Holders == "" })
	f.quiet()
	if got := f.metric("tandem_gpunode_writes_total", "create", "ok"); got != 1 {
		t.Errorf("%v creations are counted, want 1", got)
	}
}

// The daemons that are wanted are told as soon as they are, and what the controller says of them is known.
func TestDaemons(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	object, _ := f.start()
	f.awaitStatus("a status", free(2))
	percentage := int32(50)
	f.daemons.set([]sharing.Daemon{{Name: "uid-1-abc", Settings: mps.Settings{
		Devices: []string{"GPU-0"}, ActiveThreadPercentage: &percentage, PinnedMemoryMiB: []int64{1024}, MultiUser: true, DriverRoot: "/",
		Generation: 7,
	}}, {Name: "uid-2-def"}})
	want := []v1alpha1.MPSDaemon{{
		Name: "uid-1-abc", MPSSettings: v1alpha1.MPSSettings{
			Devices: []string{"GPU-0"}, ActiveThreadPercentage: &percentage, PinnedMemoryMiB: []int64{1024}, MultiUser: true, DriverRoot: "/",
			Generation: 7,
		},
	}}
	f.awaitStatus("the daemon", func(s v1alpha1.GPUNodeStatus) bool {
		return apiequality.Semantic.DeepEqual(s.Daemons, want) && slices.Equal(s.UnknownDaemons, []string{"uid-2-def"})
	})
	if trouble := object.DaemonTrouble("uid-1-abc"); trouble != "" {
		t.Errorf("trouble before the controller reported it: %s", trouble)
	}
	f.api.set(func() {
		o := f.api.objects["node-1"].DeepCopy()
		o.Spec.Daemons = []v1alpha1.WaitingDaemon{{Name: "uid-1-abc", Message: "image cannot be pulled"}}
		f.api.store(o)
	})
	f.await("what its pod waits for", func() bool {
		return object.DaemonTrouble("uid-1-abc") == "image cannot be pulled" && object.DaemonTrouble("uid-2-abc") == ""
	})
	f.daemons.set(nil)
	f.awaitStatus("that no daemon is wanted", func(s v1alpha1.GPUNodeStatus) bool { return len(s.Daemons) == 0 })
}

// TestAdoptsWhatIsThere: an agent that starts after one that was killed writes only that it is there when nothing has changed.
func TestAdoptsWhatIsThere(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	_, stop := f.start()
	f.awaitStatus("a status", free(2))
	f.api.set(func() { f.api.broken = true })
	stop()
	f.api.set(func() { f.api.broken = false })
	before := len(f.api.written())
	o, _ := f.start()
	f.await("the object", func() bool { _, synced := o.view.current(); return synced })
	f.await("a write", func() bool { return len(f.api.written()) > before })
	f.quiet()
	if now := f.api.written()[before:]; !slices.Equal(now, []string{"patch node-1/status"}) {
		t.Errorf("wrote %q though nothing had changed", now)
	}
}

// TestSeen: an unchanged status is written again by a patch of one field, and no other field changes.
func TestSeen(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.hold("c1", "GPU-0")
	old := metav1.NewTime(time.Unix(1000, 0))
	f.start(func(s *times) { s.heartbeat = 50 * time.Millisecond })
	before := f.awaitStatus("a holder", func(s v1alpha1.GPUNodeStatus) bool { return s.Holders != "" })
	f.api.set(func() {
		o := f.api.objects["node-1"].DeepCopy()
		o.Status.Seen = &old
		f.api.store(o)
	})
	after := f.awaitStatus("that it is there", func(s v1alpha1.GPUNodeStatus) bool { return s.Seen.After(old.Time) })
	if !same(before.Status, after.Status) || after.Status.WaitingSince != nil {
		t.Errorf("changed from %+v to %+v", before.Status, after.Status)
	}
	if got := f.api.written(); !slices.Equal(got[:2], []string{"post node-1", "put node-1/status"}) || len(slices.Compact(got[2:])) != 1 || got[2] != "patch node-1/status" {
		t.Errorf("wrote %q", got)
	}
	f.await("the write in the metric", func() bool { return f.metric("tandem_gpunode_writes_total", "seen", "ok") > 0 })
}

// TestUnhealthySince: the time since when a device is unhealthy outlives the agent and another reason, and goes with the fault.
func TestUnhealthySince(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	set := func(reason string) {
		f.inventory.set(device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0"), unhealthy(gpu(1, "GPU-1"), reason, "")}})
	}
	_, stop := f.start()
	set(device.ReasonLost)
	f.awaitStatus("the fault", func(s v1alpha1.GPUNodeStatus) bool {
		return len(s.Devices) == 2 && s.Devices[1].UnhealthySince != nil && s.Devices[0].UnhealthySince == nil && s.Devices[1].Repair == v1alpha1.RepairReboot
	})
	old := metav1.NewTime(time.Unix(1000, 0))
	f.api.set(func() {
		o := f.api.objects["node-1"].DeepCopy()
		o.Status.Devices[1].UnhealthySince = &old
		f.api.store(o)
	})
	stop()
	set(device.ReasonRowRemapFailure)
	f.start()
	f.awaitStatus("another fault, since the first", func(s v1alpha1.GPUNodeStatus) bool {
		return len(s.Devices) == 2 && s.Devices[1].Repair == v1alpha1.RepairReplace && s.Devices[1].UnhealthySince.Equal(&old)
	})
	f.inventory.set(device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0"), gpu(1, "GPU-1")}})
	f.awaitStatus("no fault", func(s v1alpha1.GPUNodeStatus) bool {
		return s.Devices[1].UnhealthyReason == "" && s.Devices[1].UnhealthySince == nil
	})
}

// TestWithheld: the reason to withhold the GPUs is written with the time since when there is one, and goes with it.
func TestWithheld(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	_, stop := f.start()
	f.awaitStatus("a status", func(s v1alpha1.GPUNodeStatus) bool { return free(2)(s) && s.Waiting == "" && s.Seen != nil })
	f.ledger.Withhold("a test", errors.New("another device plugin"))
	f.awaitStatus("the reason", func(s v1alpha1.GPUNodeStatus) bool {
		return s.Waiting == "another device plugin" && s.WaitingSince != nil
	})
	old := metav1.NewTime(time.Unix(1000, 0))
	f.api.set(func() {
		o := f.api.objects["node-1"].DeepCopy()
		o.Status.WaitingSince = &old
		f.api.store(o)
	})
	f.ledger.Withhold("a test", errors.New("another DRA driver"))
	f.awaitStatus("the other reason, since the first", func(s v1alpha1.GPUNodeStatus) bool {
		return s.Waiting == "another DRA driver" && s.WaitingSince.Equal(&old)
	})
	stop()
	if left := f.api.object("node-1").Status; left.Waiting != availability.Stopped || !left.WaitingSince.Equal(&old) {
		t.Errorf("it left %q since %v", left.Waiting, left.WaitingSince)
	}
	f.ledger.Withhold("a test", nil)
	f.start()
	f.awaitStatus("no reason", func(s v1alpha1.GPUNodeStatus) bool { return s.Waiting == "" && s.WaitingSince == nil })
}

// TestPruned: what an API server with an older definition of the resource drops is not sent again and again.
func TestPruned(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.api.prune = func(s *v1alpha1.GPUNodeStatus) {
		for i := range s.Devices {
			s.Devices[i].ExtendedResource = ""
		}
	}
	o, _ := f.start()
	f.awaitStatus("a status", free(2))
	f.quiet()
	if got, want := f.api.written(), []string{"post node-1", "put node-1/status"}; !slices.Equal(got, want) {
		t.Errorf("wrote %q, want %q", got, want)
	}
	for range 3 {
		f.hold("c1", "GPU-0")
		f.awaitStatus("the claim", func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Claims == 1 })
		f.release("c1")
		f.awaitStatus("no claim", free(2))
	}
	// What another one has written may be kept better.
	f.api.set(func() { f.api.prune = nil })
	f.api.writeSpec("node-1", v1alpha1.AllocatedClaim{UID: "c2", Devices: []string{"gpu-1"}})
	f.awaitStatus("all of it", func(s v1alpha1.GPUNodeStatus) bool { return s.Devices[0].ExtendedResource != "" })
	if len(o.Allocated()) != 1 {
		t.Error("the spec is not read")
	}
	output := f.logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if n := strings.Count(output, "does not keep all"); n != 1 {
		t.Errorf("the log has it %d times:\n%s", n, output)
	}
}

// TestLeaves: an agent that ends says that it does and that limits are served no more, and leaves what else it knew.
func TestLeaves(t *testing.T) {
	t.Parallel()
	for name, meanwhile := range map[string]func(*fixture){
		"alone": func(*fixture) {},
		"while another client writes": func(f *fixture) {
			f.api.set(func() {
				o := f.api.objects["node-1"].DeepCopy()
				o.ResourceVersion, f.api.version = "1000", 1000
				f.api.objects["node-1"] = o
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			o, stop := f.start()
			f.awaitStatus("a status", free(2))
			f.hold("c1", "GPU-0")
			o.Acknowledge("nvidia.com/gpu", []string{"GPU-1"}, true)
			f.awaitStatus("what kubelet says", func(s v1alpha1.GPUNodeStatus) bool {
				return s.Devices[1].ExtendedResourceState != "" && s.Counts.Free == 1
			})
			meanwhile(f)
			stop()
			left := f.api.object("node-1").Status
			if left.Waiting != availability.Stopped || left.WaitingSince == nil || left.ExtendedResource != "" || left.Devices[1].ExtendedResourceState != "" || left.Holders != "gpu-0=apps/c1(claim)" || left.Mode != "Dual" {
				t.Errorf("it left %+v", left)
			}
			f.start()
			f.awaitStatus("that limits are served", func(s v1alpha1.GPUNodeStatus) bool { return s.ExtendedResource != "" })
		})
	}
}

// TestLeavesWithoutAnObject: there is nothing to write without an object.
func TestLeavesWithoutAnObject(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.api.set(func() { f.api.absent = true })
	_, stop := f.start()
	f.await("a request", func() bool {
		asked := false
		f.api.set(func() { asked = f.api.requests > 0 })
		return asked
	})
	stop()
	if got := f.api.written(); len(got) > 0 {
		t.Errorf("wrote %q", got)
	}
}

// TestUrgent: what limits can have no more is written though the pace has been used up, and well before what else changes.
func TestUrgent(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o, _ := f.start(func(s *times) { s.interval = time.Hour })
	f.awaitStatus("a status", free(2))
	o.Acknowledge("nvidia.com/gpu", []string{"GPU-0", "GPU-1"}, true)
	f.awaitStatus("what kubelet says", func(s v1alpha1.GPUNodeStatus) bool {
		return s.Devices[0].ExtendedResourceState == v1alpha1.ExtendedResourceAllocatable
	})
	f.hold("early", "GPU-0")
	f.awaitStatus("a holder", func(s v1alpha1.GPUNodeStatus) bool { return s.Holders == "gpu-0=apps/early(claim)" })
	f.release("early")
	f.hold("late", "GPU-0")
	f.quiet()
	f.inventory.set(device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0"), unhealthy(gpu(1, "GPU-1"), device.ReasonLost, "")}})
	f.awaitStatus("the fault", func(s v1alpha1.GPUNodeStatus) bool {
		return s.Devices[1].ExtendedResourceState == v1alpha1.ExtendedResourceWithdrawn && s.Holders == "gpu-0=apps/late(claim)"
	})
}

// TestPace: one write an interval in the mean, whatever it was before, and bad news ahead of the others.
func TestPace(t *testing.T) {
	start := time.Unix(1000, 0)
	p := Pace{Interval: time.Second}
	at := func(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }
	for i, want := range []struct {
		urgent bool
		due    float64 // after which the write is made; negative for at once
	}{{false, -1}, {false, -1}, {false, -1}, {false, 1}, {true, 1}, {true, 2}, {false, 4}, {true, 4}, {false, 6}} {
		due := p.Due(want.urgent)
		if got := due.Sub(start).Seconds(); want.due < 0 && due.After(start) && due.After(at(1)) || want.due >= 0 && got != want.due {
			t.Fatalf("write %d is due %.1f s after the start, want %.0f", i, got, want.due)
		}
		now := start
		if due.After(now) {
			now = due
		}
		p.Took(now)
	}
	p = Pace{Interval: time.Second}
	p.Took(start)
	p.Took(at(3600))
	if due := p.Due(false); due.After(at(3600)) {
		t.Errorf("a quiet hour leaves %s to wait", due.Sub(at(3600)))
	}
}

// TestOneWriteAnInterval in the mean, while things change all the time.
func TestOneWriteAnInterval(t *testing.T) {
	f := newFixture(t)
	const interval = 200 * time.Millisecond
	f.start(func(s *times) { s.interval = interval })
	f.awaitStatus("a status", free(2))
	for i := range 60 {
		f.hold(fmt.Sprint("c", i), "GPU-0")
		time.Sleep(5 * time.Millisecond) // changes come one by one
		f.release(fmt.Sprint("c", i))
	}
	f.hold("last", "GPU-0")
	f.awaitStatus("the last change", func(s v1alpha1.GPUNodeStatus) bool { return s.Holders == "gpu-0=apps/last(claim)" })
	f.api.set(func() {
		if len(f.api.statuses) < 3 {
			t.Errorf("%d writes, want one an interval while things change", len(f.api.statuses))
		}
		n := len(f.api.statuses)
		if took := f.api.statuses[n-1].Sub(f.api.statuses[0]); n > int(took/interval)+4 { // two at once, and the first and the last
			t.Errorf("%d writes in %s", n, took)
		}
	})
}

func TestSpec(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o, _ := f.start()
	f.awaitStatus("a status", free(2))
	if got := o.Allocated(); len(got) != 0 {
		t.Errorf("%v are allocated before the spec lists them", got)
	}
	changed := o.Changed()
	f.api.writeSpec("node-1",
		v1alpha1.AllocatedClaim{UID: "c1", Namespace: "apps", Name: "c1", Devices: []string{"gpu-1", "gpu-9"}})
	<-changed
	f.await("the allocation", func() bool { return slices.Equal(refsOf(o.Allocated()), []device.Ref{{GPU: "GPU-1"}}) })
	if !o.Synced() {
		t.Error("what the spec says is known, and not said to be")
	}
	f.awaitStatus("the generation", func(s v1alpha1.GPUNodeStatus) bool { return s.ObservedGeneration == 2 })
	// While the API server is away what it said last counts.
	f.api.set(func() { f.api.broken = true })
	f.api.interrupt()
	if got := o.Allocated(); len(got) != 1 {
		t.Errorf("%v are allocated while the API server is away, want what it said last", got)
	}
	f.api.set(func() { f.api.broken = false })
	f.api.writeSpec("node-1")
	f.await("that nothing is allocated", func() bool { return len(o.Allocated()) == 0 })
}

// TestVerify: while the controller is down, claims of the spec that were released are found, and only those.
func TestVerify(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	// All of the spec is to be seen before the second check.
	o, _ := f.start(func(s *times) { s.verify = 500 * time.Millisecond })
	f.awaitStatus("a status", free(2))
	allocated := func(uid, driver, pool, device string) *resourceapi.ResourceClaim {
		c := &resourceapi.ResourceClaim{}
		c.UID = types.UID(uid)
		c.Status.Allocation = &resourceapi.AllocationResult{}
		c.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{{Driver: driver, Pool: pool, Device: device}}
		return c
	}
	f.inventory.set(device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0"), gpu(1, "GPU-1"), gpu(2, "GPU-2"), gpu(3, "GPU-3"),
		gpu(4, "GPU-4"), gpu(5, "GPU-5"), gpu(6, "GPU-6"), gpu(7, "GPU-7")}})
	unallocated := &resourceapi.ResourceClaim{}
	unallocated.UID = "c3"
	f.claims.set(map[string]*resourceapi.ResourceClaim{
		"apps/c0": allocated("c0", "gpu.nvidia.com", "node-1", "gpu-0"),
		"apps/c1": allocated("another", "gpu.nvidia.com", "node-1", "gpu-1"),
		"apps/c2": allocated("c2", "gpu.nvidia.com", "node-2", "gpu-2"),
		"apps/c3": unallocated,
		"apps/c4": nil, // the API server does not say
		"apps/c5": allocated("c5", "gpu.nvidia.com", "node-1/gpu-5", "gpu-5"),
		// c6 is gone, but prepared; c7 is gone
	})
	f.hold("c6", "GPU-6")
	var claims []v1alpha1.AllocatedClaim
	for i := range 8 {
		name := fmt.Sprint("c", i)
		claims = append(claims, v1alpha1.AllocatedClaim{UID: types.UID(name), Namespace: "apps", Name: name, Devices: []string{fmt.Sprint("gpu-", i)}})
	}
	claims[5].Pools = []string{"node-1/gpu-5"}
	f.api.writeSpec("node-1", claims...)
	f.await("all of the spec", func() bool { return len(o.Allocated()) == 8 })
	believed := []device.Ref{{GPU: "GPU-0"}, {GPU: "GPU-4"}, {GPU: "GPU-5"}, {GPU: "GPU-6"}}
	f.await("those that are believed", func() bool { return slices.Equal(refsOf(o.Allocated()), believed) })
	if got := len(o.Claims()); got != len(believed) {
		t.Errorf("%d claims are believed, want %d", got, len(believed))
	}
	f.release("c6")
	f.await("that the last is found out", func() bool { return slices.Equal(refsOf(o.Allocated()), believed[:3]) })
	f.claims.set(map[string]*resourceapi.ResourceClaim{
		"apps/c0": nil, "apps/c4": nil, "apps/c5": nil, "apps/c7": nil,
		"apps/c1": allocated("c1", "gpu.nvidia.com", "node-1", "gpu-1"),
	})
	f.await("that one is allocated again, and nothing else has changed", func() bool {
		return slices.Equal(refsOf(o.Allocated()), []device.Ref{{GPU: "GPU-0"}, {GPU: "GPU-1"}, {GPU: "GPU-4"}, {GPU: "GPU-5"}})
	})
}

// TestVerifyAtStart: an agent that starts, with no controller, believes no claim of the spec that the API server does not have, for example
// from a backup or from an earlier installation. What the API server does not say stays, and so does an unprepared claim.
func TestVerifyAtStart(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	allocated := &resourceapi.ResourceClaim{}
	allocated.UID = "c0"
	allocated.Status.Allocation = &resourceapi.AllocationResult{}
	allocated.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{{Driver: "gpu.nvidia.com", Pool: "node-1", Device: "gpu-0"}}
	f.claims.set(map[string]*resourceapi.ResourceClaim{"apps/c0": allocated, "apps/c2": nil})
	_, stop := f.start()
	f.awaitStatus("a status", free(2))
	stop()
	var claims []v1alpha1.AllocatedClaim
	for _, name := range []string{"c0", "c1", "c2", "c3"} {
		claims = append(claims, v1alpha1.AllocatedClaim{UID: types.UID(name), Namespace: "apps", Name: name, Devices: []string{"gpu-0"}, Pools: []string{"node-1"}})
	}
	f.api.writeSpec("node-1", claims...)
	f.hold("c3", "GPU-0")
	o, _ := f.start() // its next check is in an hour
	believed := func(want ...string) func() bool {
		return func() bool {
			var got []string
			for _, claim := range o.Claims() {
				got = append(got, claim.Name)
			}
			return slices.Equal(got, want)
		}
	}
	f.await("those that are believed", believed("c0", "c2", "c3"))
	if !o.Synced() {
		t.Error("claims are believed before the spec is known")
	}
}

// TestVerifyDraining: a hold that drains does not confirm that its claim is allocated.
func TestVerifyDraining(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o, _ := f.start(func(s *times) { s.verify = 20 * time.Millisecond })
	f.awaitStatus("a status", free(2))
	f.hold("c1", "GPU-0")
	f.api.writeSpec("node-1", v1alpha1.AllocatedClaim{UID: "c1", Namespace: "apps", Name: "c1", Devices: []string{"gpu-0"}})
	f.await("the allocation", func() bool { return len(o.Claims()) == 1 })
	time.Sleep(100 * time.Millisecond) // nothing to wait for: it is held
	if len(o.Claims()) != 1 {
		t.Error("a claim that holds its device is not believed")
	}
	if err := f.ledger.DrainClaim(t.Context(), "c1"); err != nil {
		t.Fatal(err)
	}
	if holds := f.ledger.Holds(); len(holds) != 1 || holds[0].State != ledger.StateDraining {
		t.Fatalf("holds %v, want one that drains", holds)
	}
	f.await("that it has ended", func() bool { return len(o.Claims()) == 0 })
}

// TestConflict: another client writes at the same time.
func TestConflict(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.start()
	f.awaitStatus("a status", free(2))
	f.api.set(func() {
		// The watch keeps silent about it.
		o := f.api.objects["node-1"].DeepCopy()
		o.ResourceVersion, o.Labels = "1000", map[string]string{"by": "other"}
		f.api.version = 1000
		f.api.objects["node-1"] = o
	})
	f.hold("c1", "GPU-0")
	o := f.awaitStatus("the claim as holder", free(1))
	if o.Labels["by"] != "other" {
		t.Error("the other's change is lost")
	}
	if got := f.metric("tandem_gpunode_writes_total", "status", "conflict"); got != 1 {
		t.Errorf("%v conflicts are counted, want 1", got)
	}
}

// The status has the taints of a GPU whose holders are evicted, since when it has them, also after a restart.
func TestTaintsOfFaults(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	broken := unhealthy(gpu(1, "GPU-1"), device.ReasonLost, "")
	broken.Health.Evict, broken.Health.XID = true, 79
	breaks := func() { f.inventory.set(device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0"), broken}}) }
	breaks()
	_, stop := f.start()
	f.awaitStatus("the fault", func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Unhealthy == 1 })
	f.quiet()
	stop()
	old := metav1.NewTime(time.Unix(1000, 0))
	f.api.set(func() {
		d := &f.api.objects["node-1"].Status.Devices[1]
		d.UnhealthySince = &old
		for i := range d.Taints {
			d.Taints[i].Since = &old
		}
	})
	f.start()
	s := f.awaitStatus("the fault again", func(s v1alpha1.GPUNodeStatus) bool { return s.Waiting == "" }).Status
	want := []string{"tandem-gpu.dev/unhealthy=Lost:NoExecute", "gpu.nvidia.com/xid=79:NoExecute", "gpu.nvidia.com/gpu-lost:NoExecute"}
	var got []string
	for _, taint := range s.Devices[1].Taints {
		if got = append(got, taint.String()); !taint.Since.Time.Equal(old.Time) {
			t.Errorf("%s since %s", taint, taint.Since)
		}
	}
	if !slices.Equal(got, want) || s.Devices[0].Taints != nil {
		t.Errorf("taints %q, want %q", got, want)
	}
	broken.Health = device.Health{Reason: device.ReasonResetRequired, Evict: true}
	breaks()
	f.awaitStatus("the taint of another fault", func(s v1alpha1.GPUNodeStatus) bool {
		of := s.Devices[1].Taints
		return len(of) == 1 && of[0].Value == device.ReasonResetRequired && time.Since(of[0].Since.Time) < time.Hour
	})
	broken.Health.Evict = false
	breaks()
	f.awaitStatus("no taint of a fault that evicts no pod", func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Unhealthy == 1 && s.Devices[1].Taints == nil })
}

func TestDeletedByHand(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.start()
	before := f.awaitStatus("a status", free(2))
	f.api.drop("node-1")
	f.await("another object", func() bool {
		o := f.api.object("node-1")
		return o != nil && o.UID != before.UID && o.Status.Counts.Free == 2
	})
	f.quiet()
}

// TestAnswerAfterDeletion: the watch says that the object is gone before the answer to our write arrives.
func TestAnswerAfterDeletion(t *testing.T) {
	v, object := &view{}, &v1alpha1.GPUNode{}
	object.UID, object.ResourceVersion = "1", "5"
	v.observe(object)
	v.vanish(object.UID)
	v.observe(object)
	if latest, _ := v.current(); latest != nil {
		t.Error("an object that is gone was adopted")
	}
}

// TestDeletedWhileAway: the watch never says that it is another object. The agent writes the status of an object that it did not create.
func TestDeletedWhileAway(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.start()
	f.awaitStatus("a status", free(2))
	f.api.set(func() {
		f.api.version += 10
		o := &v1alpha1.GPUNode{TypeMeta: f.api.objects["node-1"].TypeMeta}
		o.Name, o.UID, o.ResourceVersion = "node-1", "made-by-hand", fmt.Sprint(f.api.version)
		f.api.objects["node-1"] = o
	})
	f.hold("c1", "GPU-0")
	if o := f.awaitStatus("a status of the object", free(1)); o.UID != "made-by-hand" {
		t.Errorf("another object %s", o.UID)
	}
}

// TestNodeReplaced: the agent keeps the GPUNode of a former Node, and the maintenance in it. While another client deletes it, it waits.
func TestNodeReplaced(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o, _ := f.start()
	before := f.awaitStatus("a status", free(2))
	f.api.maintain("node-1", v1alpha1.GPUMaintenance{UUID: "GPU-1"})
	f.awaitStatus("the maintenance", func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Maintenance == 1 })
	f.node.set("")
	f.quiet()
	f.node.set("another-uid")
	f.hold("c1", "GPU-0")
	f.awaitStatus("the status in the GPUNode of the former node", free(0))
	if now := f.api.object("node-1"); now.UID != before.UID || !o.Maintenance()["GPU-1"] {
		t.Errorf("the agent has GPUNode %+v", now.ObjectMeta)
	}
	f.release("c1")
	f.awaitStatus("more of it", free(1))
	f.api.terminate("node-1")
	f.quiet()
	f.api.drop("node-1")
	f.await("another object", func() bool {
		o := f.api.object("node-1")
		return o != nil && o.UID != before.UID && o.Status.Counts.Free == 2
	})
	f.quiet()
	for _, request := range f.api.written() {
		if !strings.HasPrefix(request, "post") && !strings.HasSuffix(request, "/status") {
			t.Errorf("the agent sent %q", request)
		}
	}
}

// TestWithoutTheResource: neither the resource nor the right to it needs to be there, before or after.
func TestWithoutTheResource(t *testing.T) {
	t.Parallel()
	for name, reason := range map[string]func(*fakeAPI) *bool{
		"absent":  func(f *fakeAPI) *bool { return &f.absent },
		"refused": func(f *fakeAPI) *bool { return &f.refused },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.api.set(func() { *reason(f.api) = true })
			o, _ := f.start()
			f.await("several requests", func() bool { f.api.mu.Lock(); defer f.api.mu.Unlock(); return f.api.requests > 2 })
			if got := o.Allocated(); got != nil {
				t.Errorf("%v are allocated though the spec cannot be read", got)
			}
			if got := f.metric("tandem_gpunode_served"); got != 0 {
				t.Errorf("served is %v, want 0", got)
			}
			f.api.set(func() { *reason(f.api) = false })
			f.awaitStatus("a status once it is there", free(2))
			if got := f.metric("tandem_gpunode_served"); got != 1 {
				t.Errorf("served is %v, want 1", got)
			}
			buffer := f.logger.GetSink().(ktesting.Underlier).GetBuffer().String()
			if got := strings.Count(buffer, "Going on without GPUNodes"); got != 1 {
				t.Errorf("said %d times that there are no GPUNodes, want once:\n%s", got, buffer)
			}
		})
	}
}

// TestServerRestarts: whatever fails meanwhile is made up for afterwards, and the log has it once.
func TestServerRestarts(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.start()
	f.awaitStatus("a status", free(2))
	for i := range 3 {
		f.api.set(func() { f.api.broken = true })
		f.api.interrupt()
		f.hold(fmt.Sprint("c", i), "GPU-0")
		f.await("failures", func() bool {
			return strings.Count(f.logger.GetSink().(ktesting.Underlier).GetBuffer().String(), "Cannot write the node's GPUNode") > i
		})
		f.api.set(func() { f.api.broken = false })
		f.awaitStatus("the change", func(s v1alpha1.GPUNodeStatus) bool { return s.Holders == fmt.Sprintf("gpu-0=apps/c%d(claim)", i) })
		f.release(fmt.Sprint("c", i))
		f.awaitStatus("the release", free(2))
	}
	buffer := f.logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if got := strings.Count(buffer, "Cannot write the node's GPUNode"); got != 3 {
		t.Errorf("said %d times that it cannot write, want once each time", got)
	}
}

// TestExpire: a pending eviction expires by itself, and no change announces it.
func TestExpire(t *testing.T) {
	w := writer{Object: &Object{config: Config{Ledger: newFixture(t).ledger}}}
	if at := w.expire(); !at.IsZero() {
		t.Errorf("looks again at %s without a conflict", at)
	}
	book := w.config.Ledger.(*ledger.Ledger)
	book.RecordConflict(ledger.Conflict{UID: "waits", Devices: []device.Ref{{GPU: "GPU-0"}}})
	before := time.Now().Add(-50 * time.Millisecond) // the ledger's clock is coarse
	book.RecordConflict(ledger.Conflict{UID: "pending", Devices: []device.Ref{{GPU: "GPU-0"}}, PendingEviction: true})
	if at, after := w.expire(), time.Now(); at.Before(before.Add(30*time.Second)) || at.After(after.Add(30*time.Second)) {
		t.Errorf("looks again in %s, want 30s", at.Sub(before))
	}
}

// A claim that has let go of a device, and that the spec says anew has one, is believed at once.
func TestAClaimThatIsAllocatedAgain(t *testing.T) {
	spec := func(version string, devices ...string) *v1alpha1.GPUNode {
		object := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{UID: "one", ResourceVersion: version}}
		if len(devices) > 0 {
			object.Spec.Claims = []v1alpha1.AllocatedClaim{{UID: "claim", Devices: devices}}
		}
		return object
	}
	elsewhere := spec("2", "gpu-0")
	elsewhere.Spec.Claims[0].Pools = []string{"node-1/gpu-00"}
	for _, test := range []struct {
		name     string
		then     []*v1alpha1.GPUNode
		released bool
	}{
		{"the status changes", []*v1alpha1.GPUNode{spec("2", "gpu-0")}, true},
		{"it is gone", []*v1alpha1.GPUNode{spec("2")}, false},
		{"it is gone and back", []*v1alpha1.GPUNode{spec("2"), spec("3", "gpu-0")}, false},
		{"it has another device", []*v1alpha1.GPUNode{spec("2", "gpu-1")}, false},
		{"it has the device from another pool", []*v1alpha1.GPUNode{elsewhere}, false},
	} {
		v := &view{}
		v.observe(spec("1", "gpu-0"))
		v.release(map[types.UID]bool{"claim": true})
		for _, object := range test.then {
			v.observe(object)
		}
		if got := v.released["claim"]; got != test.released {
			t.Errorf("%s: released %v, want %v", test.name, got, test.released)
		}
	}
}
