// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

const gpu, otherGPU = "GPU-0", "GPU-1"

// driver is a Hardware of two GPUs.
type driver struct {
	mu        sync.Mutex
	processes map[string][]int
	graphics  map[string][]int
	settings  map[string]device.Settings
	resets    []string
	// hung are GPUs whose calls wait for ctx, and broken those whose calls fail.
	hung, broken map[string]bool
}

func newDriver() *driver {
	idle := device.Settings{ComputeMode: device.ComputeModeDefault, MemoryClock: 2619, GraphicsClock: 1980}
	return &driver{processes: map[string][]int{}, settings: map[string]device.Settings{gpu: idle, otherGPU: idle}, hung: map[string]bool{}, broken: map[string]bool{}}
}

func (d *driver) Processes(ctx context.Context, uuid string) (compute, graphics []int, err error) {
	d.mu.Lock()
	hung, broken := d.hung[uuid], d.broken[uuid]
	compute, graphics = d.processes[uuid], d.graphics[uuid]
	d.mu.Unlock()
	if broken {
		return nil, nil, errNoAnswer
	}
	if hung {
		<-ctx.Done()
		return nil, nil, ctx.Err()
	}
	return compute, graphics, nil
}

func (d *driver) Settings(_ context.Context, uuid string) (device.Settings, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.settings[uuid], nil
}

func (d *driver) RestoreSettings(_ context.Context, uuid string, wanted device.Settings) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if wanted.ComputeMode == "" {
		wanted.ComputeMode = d.settings[uuid].ComputeMode
	}
	d.settings[uuid] = wanted
	return nil
}

func (d *driver) Reset(_ context.Context, uuid string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.resets = append(d.resets, uuid)
	return nil
}

func (d *driver) set(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
}

// book is a Ledger.
type book struct {
	mu      sync.Mutex
	holds   []ledger.Hold
	changed broadcast.Signal
}

func (b *book) Holds() []ledger.Hold {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.holds)
}

func (b *book) Changed() <-chan struct{} { return b.changed.Changed() }

func (b *book) hold(holds ...ledger.Hold) {
	b.mu.Lock()
	b.holds = holds
	b.mu.Unlock()
	b.changed.Notify()
}

func claim(uid, uuid string) ledger.Hold {
	return ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: uid}, Device: device.Ref{GPU: uuid}}
}

func pod(generation uint64) ledger.Hold {
	return ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: gpu}, Device: device.Ref{GPU: gpu}, Generation: generation, Since: time.Unix(int64(generation), 0)}
}

// inventory has both GPUs.
type inventory struct {
	changed broadcast.Signal
	mu      sync.Mutex
	lost    bool
}

func (i *inventory) Inventory() device.Inventory {
	i.mu.Lock()
	defer i.mu.Unlock()
	inventory := device.Inventory{GPUs: []device.GPU{{UUID: gpu}, {UUID: otherGPU}}}
	if i.lost {
		inventory.GPUs[1].Health.Reason = device.ReasonLost
	}
	return inventory
}

func (i *inventory) Changed() <-chan struct{} { return i.changed.Changed() }

type fixture struct {
	*Cleaner
	hardware *inventory
	driver   *driver
	book     *book
	dir      string
	mu       sync.Mutex
	// pods are the processes that run in pods.
	pods, reports []string
	// names are those of the pods of processes that may not stay; asked counts the calls of Outsiders.
	names   map[int]string
	asked   int
	managed bool
	node    nodePods
	// damaged is how many records cannot be read.
	damaged int
}

// nodePods are the node's pods, which may be unknown.
type nodePods struct{ unknown atomic.Bool }

func (p *nodePods) Synced() bool { return !p.unknown.Load() }

func (p *nodePods) AwaitSync(ctx context.Context) bool {
	for !p.Synced() && ctx.Err() == nil {
		time.Sleep(time.Millisecond) // of the bubble
	}
	return ctx.Err() == nil
}

// start runs a Cleaner until the test ends. It is called in a bubble.
func start(t *testing.T, f *fixture, reset bool) *fixture {
	t.Helper()
	if f == nil {
		f = &fixture{driver: newDriver(), book: &book{}, dir: t.TempDir()}
	}
	records := NewRecords(f.dir, "boot")
	if problems, err := records.Load(); err != nil || len(problems) != f.damaged {
		t.Fatal(problems, err)
	}
	f.hardware = &inventory{}
	f.Cleaner = New(Options{
		Pods: &f.node, Hardware: f.driver, Inventory: f.hardware, Ledger: f.book, Records: records, Reset: func(string) bool { return reset },
		Outsiders: func(_ string, compute, graphics []int) (outsiders []Outsider) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.asked++
			for _, pid := range slices.Concat(compute, graphics) {
				if name := fmt.Sprintf("process %d", pid); !slices.Contains(f.pods, name) {
					outsiders = append(outsiders, Outsider{Description: name, Pod: f.names[pid]})
				}
			}
			return outsiders
		},
		Managed: func(string) bool { return f.managed },
		Report: func(uuid string, err error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.reports = append(f.reports, uuid+": "+Detail(err))
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if err := records.Close(); err != nil {
			t.Error(err)
		}
	})
	synctest.Wait()
	return f
}

// life is the life of one agent, which finds the holds when it starts.
func (f *fixture) life(t *testing.T, name string, holds []ledger.Hold, play func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f.book = &book{holds: holds}
			start(t, f, false)
			play(t)
		})
	})
}

// settle waits until the Cleaner has done what it can do.
func (f *fixture) settle() {
	time.Sleep(2 * retryDelay)
	synctest.Wait()
}

// unclean returns why a GPU is not clean; empty for a clean one.
func (f *fixture) unclean(uuid string) string {
	if err := f.Unclean(uuid); err != nil {
		return err.Error()
	}
	return ""
}

func (f *fixture) graphicsClock(uuid string) uint32 {
	settings, _ := f.driver.Settings(context.Background(), uuid)
	return settings.GraphicsClock
}

// change is what a privileged container does to its GPU.
func (f *fixture) change(uuid string) {
	f.driver.set(func() {
		f.driver.settings[uuid] = device.Settings{ComputeMode: device.ComputeModeProhibited, MemoryClock: 1593, GraphicsClock: 210}
	})
}

func TestSettingsAreRestored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, false)
		before := f.driver.settings[gpu]
		f.book.hold(claim("a", gpu))
		f.settle()
		f.change(gpu)
		f.book.hold()
		f.settle()
		if got := f.driver.settings[gpu]; got != before {
			t.Errorf("the GPU is left with %+v, want %+v", got, before)
		}
		if left := f.options.Records.Keys(); len(left) > 0 {
			t.Errorf("records are left: %v", left)
		}
	})
}

func TestAdministratorsSettingsStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, false)
		f.change(gpu) // by an administrator, while it has no holder
		f.book.hold(claim("a", gpu))
		f.settle()
		f.book.hold()
		f.settle()
		if got := f.graphicsClock(gpu); got != 210 {
			t.Errorf("the graphics clock is %d MHz, want 210 as before the claim", got)
		}
	})
}

func TestNextHolderComesBeforeTheHandover(t *testing.T) {
	for name, next := range map[string]ledger.Hold{"claim": claim("b", gpu), "pod with the same device ID": pod(2)} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := start(t, nil, false)
				f.book.hold(pod(1))
				f.settle()
				f.change(gpu)
				f.book.hold(next)
				if err := f.Ensure(t.Context(), gpu); err != nil {
					t.Fatal(err)
				}
				if got := f.graphicsClock(gpu); got != 1980 {
					t.Errorf("the next holder gets a graphics clock of %d MHz, want 1980", got)
				}
			})
		})
	}
}

func TestProcessOfNoPodWithdrawsTheGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, false)
		f.book.hold(claim("a", gpu), claim("b", otherGPU))
		f.settle()
		f.driver.set(func() { f.driver.processes[gpu] = []int{4242} })
		f.book.hold()
		f.settle()
		if got := f.unclean(gpu); !strings.Contains(got, "process 4242") {
			t.Errorf("the GPU is %q, want process 4242", got)
		}
		if got := f.unclean(otherGPU); got != "" {
			t.Errorf("the other GPU is not clean: %s", got)
		}
		f.book.hold(claim("c", gpu))
		var inUse *InUseError
		if err := f.Ensure(t.Context(), gpu); !errors.As(err, &inUse) {
			t.Errorf("Ensure answers %v, want an InUseError", err)
		}
		f.settle()
		if len(f.reports) != 1 {
			t.Errorf("reported %q, want one report", f.reports)
		}
		changed := f.Changed()
		f.driver.set(func() { f.driver.processes[gpu] = nil })
		f.settle()
		if got := f.unclean(gpu); got != "" {
			t.Errorf("the GPU is not clean although the process has ended: %s", got)
		}
		select {
		case <-changed:
		default:
			t.Error("Changed did not report that the GPU is clean again")
		}
	})
}

// What a tenant reads of another tenant's process does not name its pod; what an administrator reads does.
func TestPodsAreNamedToAdministratorsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, false)
		f.names = map[int]string{7: "secret-project/trainer"}
		f.driver.set(func() { f.driver.processes[gpu] = []int{7, 8} })
		f.book.hold(claim("a", gpu))
		f.settle()
		f.book.hold()
		synctest.Wait()
		before := f.asked
		inUse, ok := errors.AsType[*InUseError](f.free(t.Context(), gpu))
		if !ok || len(inUse.Processes) != 2 || f.asked != before+1 || f.free(t.Context(), otherGPU) != nil || f.asked != before+1 {
			t.Errorf("%v, and asked %d times about two processes and none", inUse, f.asked-before)
		}
		f.book.hold(claim("b", gpu))
		err := f.Ensure(t.Context(), gpu)
		if err == nil || strings.Contains(err.Error(), "secret-project") || !strings.Contains(err.Error(), "process 7, process 8") {
			t.Errorf("the next claim gets %v", err)
		}
		if got := f.unclean(gpu); strings.Contains(got, "secret-project") || !strings.Contains(got, "process 7, process 8") {
			t.Errorf("the GPU's health: %s", got)
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		const want = "GPU-0: used by process 7 (secret-project/trainer), process 8: end the process"
		if len(f.reports) != 1 || f.reports[0] != want {
			t.Errorf("reported %q, want %q", f.reports, want)
		}
		if got := Detail(err); !strings.HasPrefix(got, "hand over GPU GPU-0: used by process 7 (secret-project/trainer)") {
			t.Errorf("detail %q", got)
		}
	})
}

func TestProcessesOfRunningPodsMayStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, false)
		f.pods = []string{"process 7"} // an MPS server, or a monitor
		f.driver.set(func() { f.driver.processes[gpu] = []int{7} })
		f.book.hold(claim("a", gpu))
		f.settle()
		f.book.hold()
		f.settle()
		if got := f.unclean(gpu); got != "" {
			t.Error(got)
		}
	})
}

// A process that only draws on the GPU keeps memory on it, too.
func TestGraphicsProcessMayNotStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, false)
		f.driver.set(func() { f.driver.graphics = map[string][]int{gpu: {7}} })
		f.book.hold(claim("a", gpu))
		f.settle()
		f.book.hold()
		f.settle()
		if got := f.unclean(gpu); !strings.Contains(got, "process 7") {
			t.Errorf("unclean: %q", got)
		}
	})
}

func TestHoldersBesideEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, true)
		f.book.hold(claim("a", gpu), claim("b", gpu))
		f.settle()
		f.change(gpu)
		f.book.hold(claim("b", gpu))
		f.settle()
		f.book.hold(claim("b", gpu), claim("c", gpu))
		if err := f.Ensure(t.Context(), gpu); err != nil {
			t.Fatal(err)
		}
		if got := f.graphicsClock(gpu); got != 210 || len(f.driver.resets) > 0 {
			t.Errorf("a GPU in use was changed: clock %d MHz, resets %v", got, f.driver.resets)
		}
		f.book.hold()
		f.settle()
		if got := f.graphicsClock(gpu); got != 1980 || len(f.driver.resets) != 1 {
			t.Errorf("after the last holder: clock %d MHz, resets %v, want 1980 and one reset", got, f.driver.resets)
		}
	})
}

func TestRestart(t *testing.T) {
	for name, after := range map[string]struct {
		holds []ledger.Hold
		clock uint32
	}{
		"the holder is gone": {nil, 1980},
		"the holder stays":   {[]ledger.Hold{claim("a", gpu)}, 210},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fixture{driver: newDriver(), dir: t.TempDir()}
			f.life(t, "before", nil, func(*testing.T) {
				f.book.hold(claim("a", gpu))
				f.settle()
			})
			f.change(gpu)
			f.node.unknown.Store(true)
			f.life(t, "after", after.holds, func(t *testing.T) {
				f.settle()
				if why, clock := f.unclean(gpu), f.graphicsClock(gpu); why != "" || clock != 210 {
					t.Errorf("before the pods are known the inventory says %q, and the graphics clock is %d MHz", why, clock)
				}
				f.node.unknown.Store(false)
				f.settle()
				if got := f.graphicsClock(gpu); got != after.clock {
					t.Errorf("the graphics clock is %d MHz, want %d", got, after.clock)
				}
				f.book.hold()
				f.settle()
				if got := f.graphicsClock(gpu); got != 1980 {
					t.Errorf("at the end the graphics clock is %d MHz, want 1980", got)
				}
			})
		})
	}
}

func TestHungGPUDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, false)
		f.book.hold(claim("a", gpu), claim("b", otherGPU))
		f.settle()
		f.change(otherGPU)
		f.driver.set(func() { f.driver.hung[gpu] = true })
		f.book.hold()
		f.settle()
		if got := f.graphicsClock(otherGPU); got != 1980 {
			t.Errorf("the other GPU has a graphics clock of %d MHz, want 1980", got)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := f.Ensure(ctx, gpu); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Ensure answers %v for a hung GPU, want its deadline", err)
		}
	})
}

func TestReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, true)
		f.book.hold(pod(1))
		f.settle()
		if len(f.driver.resets) > 0 {
			t.Fatalf("reset before the first holder: %v", f.driver.resets)
		}
		f.book.hold(pod(2)) // the next pod, before Run has seen the GPU without a hold
		f.settle()
		if len(f.driver.resets) > 0 {
			t.Fatalf("reset while a container may run: %v", f.driver.resets)
		}
		for range 2 { // two containers
			if err := f.Ensure(t.Context(), gpu); err != nil {
				t.Fatal(err)
			}
		}
		if len(f.driver.resets) != 1 {
			t.Errorf("%d resets for the second pod, want 1", len(f.driver.resets))
		}
		f.book.hold()
		f.settle()
		if len(f.driver.resets) != 2 {
			t.Errorf("%d resets after the second pod, want 2", len(f.driver.resets))
		}
	})
}

// The ledger changes the generation of a hold when it learns which pod has it.
func TestIdentifiedPodIsTheSameHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, true)
		f.book.hold(pod(1))
		if err := f.Ensure(t.Context(), gpu); err != nil {
			t.Fatal(err)
		}
		identified := pod(1)
		identified.Generation, identified.Pods = 7, []ledger.Pod{{UID: "p1"}}
		f.book.hold(identified)
		f.settle()
		if err := f.Ensure(t.Context(), gpu); err != nil || len(f.driver.resets) > 0 {
			t.Errorf("resets under a running pod: %v, %v", f.driver.resets, err)
		}
	})
}

func TestDriverThatDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, false)
		f.book.hold(claim("a", gpu))
		f.settle()
		f.driver.set(func() { f.driver.hung[gpu] = true })
		f.book.hold()
		time.Sleep(2 * driverPatience)
		synctest.Wait()
		if got := f.unclean(gpu); !strings.Contains(got, errNoAnswer.Error()) {
			t.Errorf("the GPU is %q", got)
		}
	})
}

func TestComputeModeOfSharing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, false)
		f.book.hold(claim("a", gpu))
		f.settle()
		f.change(gpu)
		f.managed = true
		f.book.hold()
		f.settle()
		want := device.Settings{ComputeMode: device.ComputeModeProhibited, MemoryClock: 2619, GraphicsClock: 1980}
		if got := f.driver.settings[gpu]; got != want {
			t.Errorf("the GPU is left with %+v, want %+v", got, want)
		}
	})
}

// A GPU with a fault is reset only while it has no holder and no process outside the pods uses it, whatever the configuration of handovers.
func TestResetIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, false)
		try := func(wantDone bool, wantError string) {
			t.Helper()
			before := len(f.driver.resets)
			done, err := f.ResetIdle(t.Context(), gpu)
			if done != wantDone || len(f.driver.resets)-before != map[bool]int{true: 1}[done] {
				t.Errorf("done %v, %d resets, want %v", done, len(f.driver.resets)-before, wantDone)
			}
			if wantError == "" && err != nil || wantError != "" && (err == nil || !strings.Contains(err.Error(), wantError)) {
				t.Errorf("%v, want %q", err, wantError)
			}
		}
		f.book.hold(pod(1))
		f.settle()
		try(false, "")
		f.book.hold()
		f.settle()
		f.driver.set(func() { f.driver.processes[gpu] = []int{7} })
		try(false, "process 7")
		f.driver.set(func() { f.driver.processes[gpu] = nil })
		try(true, "")
		f.driver.set(func() { f.driver.hung[gpu] = true })
		try(false, "the driver does not answer")
	})
}

// A GPU that gets a holder while its reset waits for a handover is not reset.
func TestHolderBeforeAResetBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, false)
		unlock, err := f.turns.Lock(t.Context(), gpu)
		if err != nil {
			t.Fatal(err)
		}
		answered := make(chan bool, 1)
		go func() {
			done, err := f.ResetIdle(t.Context(), gpu)
			if err != nil {
				t.Error(err)
			}
			answered <- done
		}()
		synctest.Wait()
		f.book.hold(claim("a", gpu))
		unlock()
		if done := <-answered; done || len(f.driver.resets) > 0 {
			t.Errorf("done %v, resets %v", done, f.driver.resets)
		}
	})
}

// A claim that is prepared again after its hold had ended, while a process of no pod had the GPU, does not make the GPU clean.
func TestPreparedAgainBesideAProcess(t *testing.T) {
	for _, restarted := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			f := start(t, nil, false)
			f.book.hold(claim("a", gpu))
			f.settle()
			if restarted {
				f.mu.Lock()
				f.users = map[string]map[user]bool{}
				f.mu.Unlock()
			}
			f.driver.set(func() { f.driver.processes[gpu] = []int{4242} })
			f.book.hold()
			f.settle()
			f.book.hold(claim("a", gpu))
			var inUse *InUseError
			if err := f.Ensure(t.Context(), gpu); !errors.As(err, &inUse) || f.unclean(gpu) == "" {
				t.Errorf("Ensure answers %v, the inventory says %q", err, f.unclean(gpu))
			}
			f.driver.set(func() { f.driver.processes[gpu] = nil })
			if err := f.Ensure(t.Context(), gpu); err != nil || f.unclean(gpu) != "" {
				t.Errorf("Ensure answers %v, the inventory says %q", err, f.unclean(gpu))
			}
		})
	}
}

// The agent starts beside a process of no pod. It must not take the next holder for an earlier one: the GPU would count as clean.
func TestNotCleanOverARestart(t *testing.T) {
	f := &fixture{driver: newDriver(), dir: t.TempDir()}
	f.life(t, "before", nil, func(*testing.T) {
		f.book.hold(claim("a", gpu))
		f.settle()
		f.change(gpu)
		f.driver.set(func() { f.driver.processes[gpu] = []int{4242} })
		f.book.hold()
		f.settle()
	})
	next := []ledger.Hold{claim("next", gpu)}
	// Until the pods are known, no process counts as outside them.
	f.pods, f.reports = []string{"process 4242"}, nil
	f.node.unknown.Store(true)
	f.life(t, "after", next, func(t *testing.T) {
		stillUnclean := func() {
			t.Helper()
			f.settle()
			if err := f.Ensure(t.Context(), gpu); err == nil || f.unclean(gpu) == "" {
				t.Errorf("Ensure answers %v, the inventory says %q", err, f.unclean(gpu))
			}
		}
		if got := f.unclean(gpu); got == "" {
			t.Error("the GPU is offered before the first attempt")
		}
		stillUnclean()
		f.mu.Lock()
		f.pods = nil
		f.mu.Unlock()
		f.node.unknown.Store(false)
		stillUnclean()
		if len(f.reports) != 1 {
			t.Errorf("reports: %q", f.reports)
		}
		f.driver.set(func() { f.driver.processes[gpu] = nil })
		if err := f.Ensure(t.Context(), gpu); err != nil || f.unclean(gpu) != "" || f.graphicsClock(gpu) != 1980 {
			t.Errorf("Ensure answers %v, the inventory says %q, the graphics clock is %d MHz", err, f.unclean(gpu), f.graphicsClock(gpu))
		}
	})
	// The next agent finds the same holder.
	f.driver.set(func() { f.driver.processes[gpu] = []int{4242} })
	f.life(t, "clean", next, func(t *testing.T) {
		f.settle()
		if got := f.unclean(gpu); got != "" {
			t.Errorf("the inventory says %q", got)
		}
	})
}

// The handover of a lost GPU is tried again, also if the attempt ends before Run waits.
func TestLostGPUIsTriedAgain(t *testing.T) {
	f := &fixture{driver: newDriver(), book: &book{}, hardware: &inventory{lost: true}}
	f.driver.broken[otherGPU] = true
	c := New(Options{
		Pods: &f.node, Hardware: f.driver, Inventory: f.hardware, Ledger: f.book, Records: NewRecords(t.TempDir(), "boot"),
		Reset: func(string) bool { return false }, Managed: func(string) bool { return false },
	})
	c.users[otherGPU] = map[user]bool{userOf(claim("a", otherGPU)): true}
	due, wait := c.due()
	for _, uuid := range due {
		if c.attempt(t.Context(), uuid) == nil {
			t.Error("handed over")
		}
		c.finish(uuid)
	}
	if wait != c.retry {
		t.Errorf("waits for %s", wait)
	}
	if again, _ := c.due(); !slices.Equal(again, due) {
		t.Errorf("tries %v again, want %v", again, due)
	}
}

// escape leaves a process on a GPU.
func (f *fixture) escape(uuid string) {
	f.driver.set(func() { f.driver.processes[uuid] = []int{4242} })
}

// An agent that finds the record of a used GPU damaged does not take the GPU for clean.
func TestUnreadableRecordOfAnUncleanGPU(t *testing.T) {
	f := &fixture{driver: newDriver(), dir: t.TempDir()}
	f.life(t, "before", nil, func(t *testing.T) {
		f.book.hold(claim("a", gpu))
		f.settle()
		f.escape(gpu)
		f.book.hold()
		f.settle()
	})
	if err := os.Truncate(f.dir+"/"+gpu, 10); err != nil {
		t.Fatal(err)
	}
	f.damaged = 1
	f.life(t, "after", []ledger.Hold{claim("next", gpu)}, func(t *testing.T) {
		if f.unclean(gpu) == "" {
			t.Error("the GPU is offered")
		}
		if err := f.Ensure(t.Context(), gpu); err == nil {
			t.Error("the next claim is prepared beside a process")
		}
		f.driver.set(func() { f.driver.processes[gpu] = nil })
		f.settle()
		if reason := f.unclean(gpu); reason != "" {
			t.Errorf("the GPU stays unclean: %s", reason)
		}
	})
}

// An attempt fails while the GPU is unhealthy for another reason. The GPU is not offered when that reason ends, and reported then.
func TestUncleanGPUThatGetsHealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil, false)
		setLost := func(lost bool) {
			f.hardware.mu.Lock()
			defer f.hardware.mu.Unlock()
			f.hardware.lost = lost
		}
		f.book.hold(claim("a", otherGPU))
		f.settle()
		setLost(true)
		f.escape(otherGPU)
		f.book.hold()
		f.settle()
		if len(f.reports) > 0 {
			t.Errorf("reported beside the other reason: %v", f.reports)
		}
		setLost(false)
		if f.unclean(otherGPU) == "" {
			t.Error("the GPU is offered beside a process")
		}
		f.settle()
		if len(f.reports) != 1 {
			t.Errorf("reports are %v", f.reports)
		}
	})
}

// The agent dies during a handover to a claim, before an attempt has failed. The next agent does not take the claim for the former holder.
func TestKilledDuringTheHandover(t *testing.T) {
	f := &fixture{driver: newDriver(), dir: t.TempDir()}
	var killed []byte
	f.life(t, "before", nil, func(t *testing.T) {
		f.book.hold(claim("a", gpu))
		f.settle()
		f.escape(gpu)
		f.driver.set(func() { f.driver.hung[gpu] = true })
		f.book.hold(claim("next", gpu))
		synctest.Wait()
		var err error
		if killed, err = os.ReadFile(f.dir + "/" + gpu); err != nil {
			t.Fatal(err)
		}
	})
	if err := os.WriteFile(f.dir+"/"+gpu, killed, 0o600); err != nil {
		t.Fatal(err)
	}
	f.driver.set(func() { f.driver.hung[gpu] = false })
	f.life(t, "after", []ledger.Hold{claim("next", gpu)}, func(t *testing.T) {
		var inUse *InUseError
		if err := f.Ensure(t.Context(), gpu); !errors.As(err, &inUse) {
			t.Errorf("the next claim is prepared beside a process: %v", err)
		}
	})
}
