// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// observable is a value with a channel that is closed when it changes.
type observable[T any] struct {
	mu      sync.Mutex
	value   T
	changed chan struct{}
}

func newObservable[T any](value T) *observable[T] {
	return &observable[T]{value: value, changed: make(chan struct{})}
}

func (b *observable[T]) get() T {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.value
}

func (b *observable[T]) set(change func(T) T) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.value = change(b.value)
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *observable[T]) Changed() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.changed
}

type fakeInventory struct{ *observable[device.Inventory] }

func (f fakeInventory) Inventory() device.Inventory { return f.get() }

// setHealth replaces the health of one GPU.
func (f fakeInventory) setHealth(uuid string, h device.Health) {
	f.set(func(inv device.Inventory) device.Inventory {
		inv.GPUs = slices.Clone(inv.GPUs)
		for i := range inv.GPUs {
			if inv.GPUs[i].UUID == uuid {
				inv.GPUs[i].Health = h
			}
		}
		return inv
	})
}

// book is the real ledger; every holder runs, and a draining hold has lost its pod.
type book struct {
	*ledger.Ledger
	tb testing.TB
	// asking is closed when Reuses is called, which then waits for slow.
	asking chan struct{}
	slow   time.Duration
}

func (b *book) Started(ledger.Hold, []ledger.Hold) bool { return false }

func (b *book) Reuses(ledger.Hold) bool {
	if b.slow > 0 {
		close(b.asking)
		time.Sleep(b.slow)
	}
	return true
}

func (b *book) PodState(h ledger.Hold) ledger.PodState {
	if h.State == ledger.StateDraining {
		return ledger.Orphaned
	}
	return ledger.Running
}

func openBook(tb testing.TB) *book {
	tb.Helper()
	b := &book{tb: tb}
	var err error
	if b.Ledger, err = ledger.Open(context.Background(), ledger.Options{Dir: tb.TempDir(), BootID: "boot", PodStates: b}); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := b.Close(); err != nil {
			tb.Error(err)
		}
	})
	return b
}

// claim takes GPUs for a claim.
func (b *book) claim(uid string, gpus ...int) {
	b.tb.Helper()
	request := ledger.ClaimRequest{UID: uid, Namespace: "secret-namespace", Name: "secret-claim"}
	for _, i := range gpus {
		request.Devices = append(request.Devices, device.Ref{GPU: uuid(i)})
	}
	if _, err := b.ReserveClaim(context.Background(), request); err != nil {
		b.tb.Fatal(err)
	}
}

// amend changes each hold of a holder.
func (b *book) amend(id string, change func(ledger.Hold) error) {
	b.tb.Helper()
	for _, h := range b.Holds() {
		if h.Holder.ID == id {
			if err := change(h); err != nil {
				b.tb.Fatal(err)
			}
		}
	}
}

func (b *book) release(id string) { b.tb.Helper(); b.amend(id, b.Release) }

func (b *book) drain(id string) {
	b.tb.Helper()
	b.amend(id, func(h ledger.Hold) error { return b.SetState(h, ledger.StateDraining) })
}

// specState is what the specs lack.
type specState struct {
	err  error
	lack []string
}

type fakeSpecs struct{ *observable[specState] }

func (fakeSpecs) Verify()                          {}
func (fakeSpecs) QualifiedName(uuid string) string { return "k8s.gpu.nvidia.com/gpu=" + uuid }
func (f fakeSpecs) Has(uuid string) bool           { return !slices.Contains(f.get().lack, uuid) }
func (f fakeSpecs) fail(err error)                 { f.set(func(specState) specState { return specState{err: err} }) }
func (f fakeSpecs) Problem(uuid string) error {
	if !f.Has(uuid) {
		return errTest
	}
	return f.get().err
}
func (f fakeSpecs) lack(uuids ...string) {
	f.set(func(specState) specState { return specState{lack: uuids} })
}

// fixture is a node: a directory, a kubelet, an inventory, a ledger.
type fixture struct {
	testing.TB
	dir       string
	kubelet   *fakeKubelet
	inventory fakeInventory
	ledger    *book
	specs     fakeSpecs
	events    *record.FakeRecorder
	registry  *prometheus.Registry
	config    Config
}

func newFixture(t testing.TB, release kubeletRelease) *fixture {
	t.Helper()
	// Not t.TempDir, whose names leave no room for a socket's.
	root, err := os.MkdirTemp("", "tdm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	dir := filepath.Join(root, "device-plugins")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	f := &fixture{
		TB:        t,
		dir:       dir,
		kubelet:   newFakeKubelet(dir, release),
		inventory: fakeInventory{newObservable(islands(8, 4, 0))},
		ledger:    openBook(t),
		specs:     fakeSpecs{newObservable(specState{})},
		events:    record.NewFakeRecorder(1000),
		registry:  prometheus.NewRegistry(),
	}
	f.config = Config{
		Resources: device.Resources{GPU: "nvidia.com/gpu"}, NodeName: "node-a", Directory: dir,
		Strategies: []Strategy{StrategyCDI}, DevRoot: func() (string, string) { return "/", "/" },
		Inventory: f.inventory, Ledger: f.ledger, Specs: f.specs, Kubelet: f.kubelet,
		Sharing: newFakeSharing(), Allocations: noAllocations,
		Acknowledge: func(string, []string, bool) {}, AnnotationPrefix: "cdi.k8s.io/",
		Adopt:    func(context.Context) error { return nil },
		Recorder: f.events, Registerer: f.registry,
	}
	t.Cleanup(f.kubelet.Stop)
	return f
}

func (f *fixture) startKubelet() {
	f.Helper()
	if err := f.kubelet.Start(); err != nil {
		f.Fatal(err)
	}
}

// start runs the plugin until the test ends or the returned function is called.
func (f *fixture) start(shorten ...func(*times)) (p *Plugin, stop func()) {
	f.Helper()
	// Each process has its own metrics.
	f.registry = prometheus.NewRegistry()
	f.config.Registerer = f.registry
	p, err := New(f.config)
	if err != nil {
		f.Fatal(err)
	}
	// Nothing is lost by being quicker than in production.
	p.times.pluginInterval, p.times.confirmPoll, p.times.takeOver = 300*time.Millisecond, 50*time.Millisecond, time.Millisecond
	for _, s := range shorten {
		s(&p.times)
	}
	logger := ktesting.NewLogger(f.TB, ktesting.NewConfig())
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), logger))
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			f.Errorf("Run: %v", err)
		}
	})
	f.Cleanup(stop)
	return p, stop
}

// patience bounds every wait; a test that needs it has failed.
const patience = time.Minute

// await waits for a state of kubelet.
func (f *fixture) await(what string, condition func(kubeletState) bool) kubeletState {
	f.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	state, err := f.kubelet.Await(ctx, condition)
	if err != nil {
		f.Fatalf("wait for %s: %v; state %+v", what, err, state)
	}
	return state
}

// awaitReady waits for what Ready says: a part of the error, or nothing for ready.
func (f *fixture) awaitReady(p *Plugin, want string) {
	f.Helper()
	var err error
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		err = p.Ready()
		if want == "" && err == nil || want != "" && err != nil && strings.Contains(err.Error(), want) {
			return
		}
	}
	f.Fatalf("Ready is %v, want %q", err, want)
}

func healthyCount(n int) func(kubeletState) bool {
	return func(s kubeletState) bool { return len(s.Healthy()) == n && len(s.Connected) == 1 }
}

func registrations(n int) func(kubeletState) bool {
	return func(s kubeletState) bool {
		return len(s.Endpoints) >= n && len(s.Connected) == 1 && len(s.Healthy()) > 0
	}
}

// mySockets lists the plugin's sockets in the directory.
func (f *fixture) mySockets() []string {
	f.Helper()
	names, err := filepath.Glob(filepath.Join(f.dir, "tandem-gpu-*.sock"))
	if err != nil {
		f.Fatal(err)
	}
	return names
}

// counter returns the value of a counter or gauge with the labels given as "name=value".
func (f *fixture) metric(name string, label ...string) float64 {
	f.Helper()
	families, err := f.registry.Gather()
	if err != nil {
		f.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			labels := []string{}
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			if slices.Equal(labels, label) || len(labels) == 0 && len(label) == 0 {
				if h := m.GetHistogram(); h != nil {
					return float64(h.GetSampleCount())
				}
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}

// event returns the next event, or fails when there is none.
func (f *fixture) event() string {
	f.Helper()
	select {
	case e := <-f.events.Events:
		return e
	case <-time.After(patience):
		f.Fatal("no event was recorded")
		return ""
	}
}

var errTest = errors.New("spec directory is read-only")
