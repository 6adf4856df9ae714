// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
)

// gate stops calls while it is closed.
type gate struct {
	mu     sync.Mutex
	closed chan struct{}
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = make(chan struct{})
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed != nil {
		close(g.closed)
		g.closed = nil
	}
}

func (g *gate) pass() {
	g.mu.Lock()
	closed := g.closed
	g.mu.Unlock()
	if closed != nil {
		<-closed
	}
}

// hangingLibrary hangs in the calls that the faults of a simulated machine do not cover.
type hangingLibrary struct {
	*simulated.Library
	shutdown, byUUID gate
}

func (l *hangingLibrary) Shutdown() gonvml.Return {
	l.shutdown.pass()
	return l.Library.Shutdown()
}

func (l *hangingLibrary) DeviceGetHandleByUUID(uuid string) (gonvml.Device, gonvml.Return) {
	l.byUUID.pass()
	return l.Library.DeviceGetHandleByUUID(uuid)
}

// hangNode is a node with two GPUs, whose calls may hang.
type hangNode struct {
	*Node
	t       *testing.T
	library *hangingLibrary
	faults  string
}

func newHangNode(t *testing.T) *hangNode {
	t.Helper()
	options := fixture(t, "host-rhel")
	profile := load(t, "l4x4")
	profile.GPUs = profile.GPUs[:2]
	n := &hangNode{t: t, faults: t.TempDir()}
	n.library = &hangingLibrary{Library: simulated.New(profile, simulated.WithDir(n.faults))}
	options.patience = 200 * time.Millisecond
	options.OpenLibrary = func() (gonvml.Interface, error) { return n.library, nil }
	n.Node = New(options)
	t.Cleanup(func() {
		n.library.shutdown.open()
		n.library.byUUID.open()
		n.faultBoth(simulated.GPUFaults{}, simulated.GPUFaults{})
		time.Sleep(2 * lookAgain) // in which calls that hang end: a bubble must be left by all
	})
	return n
}

// fault replaces the faults of the GPU with index 1.
func (n *hangNode) fault(faults simulated.GPUFaults) {
	n.t.Helper()
	faults.GPU = "1"
	if err := simulated.WriteFaults(n.faults, simulated.Faults{GPUs: []simulated.GPUFaults{faults}}); err != nil {
		n.t.Fatal(err)
	}
}

// find scans while nothing hangs, with patience for a slow machine: it finds both GPUs.
func (n *hangNode) find() {
	n.t.Helper()
	patience := n.options.patience
	defer func() { n.options.patience = patience }()
	n.options.patience = defaultPatience
	if err := n.Scan(n.t.Context()); err != nil {
		n.t.Fatal(err)
	}
}

// lookAgain is when a call that hangs has looked for its fault again. A scan that waits for nothing takes no time in a bubble of synctest.
const lookAgain = 10 * time.Millisecond

// scan fails the test if a scan takes far longer than one call may.
func (n *hangNode) scan() error {
	n.t.Helper()
	time.Sleep(lookAgain)
	ended := make(chan error, 1)
	go func() { ended <- n.Scan(n.t.Context()) }()
	select {
	case err := <-ended:
		return err
	case <-time.After(20 * n.options.patience):
		n.t.Fatal("a scan does not end while a call hangs")
		return nil
	}
}

// A scan ends whichever call hangs, other GPUs are served meanwhile, and everything is as before once the call returns.
func TestScanEndsWhicheverCallHangs(t *testing.T) {
	hang := func(call string) simulated.GPUFaults {
		return simulated.GPUFaults{Calls: map[string]simulated.CallFault{call: {Delay: simulated.Duration(time.Hour)}}}
	}
	for name, test := range map[string]struct {
		begin func(*hangNode)
		end   func(*hangNode)
		// silent: the driver as a whole does not answer.
		silent bool
		// topology: it is read, which happens at the first scan only.
		topology bool
	}{
		"NVLink state": {
			begin: func(n *hangNode) { n.fault(hang("GetNvLinkState")) },
			end:   func(n *hangNode) { n.fault(simulated.GPUFaults{}) }, topology: true,
		},
		"common ancestor": {
			begin: func(n *hangNode) { n.fault(hang("GetTopologyCommonAncestor")) },
			end:   func(n *hangNode) { n.fault(simulated.GPUFaults{}) }, topology: true,
		},
		"a missing GPU, by its UUID": {
			begin: func(n *hangNode) { n.fault(simulated.GPUFaults{Absent: true}); n.library.byUUID.close() },
			end:   func(n *hangNode) { n.fault(simulated.GPUFaults{}); n.library.byUUID.open() },
		},
		"Shutdown": {
			begin: func(n *hangNode) { n.library.shutdown.close() },
			end:   func(n *hangNode) { n.library.shutdown.open() }, silent: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newHangNode(t)
				if !test.topology {
					n.find()
				}
				test.begin(n)
				defer test.end(n)
				for range 3 {
					if err := n.scan(); err != nil && !test.silent {
						t.Fatal(err)
					}
				}
				gpus := n.Inventory().GPUs
				if len(gpus) != 2 {
					t.Fatalf("%d GPUs, want 2", len(gpus))
				}
				for _, g := range gpus {
					if g.Index != 1 && !test.silent && !g.Health.Healthy() {
						t.Errorf("%s is unhealthy: %+v", g.Name(), g.Health)
					}
				}
				if !test.silent {
					limited, cancel := context.WithTimeout(t.Context(), 20*n.options.patience)
					defer cancel()
					if _, err := n.ComputeMode(limited, gpus[0].UUID); err != nil {
						t.Errorf("an operation on another GPU: %v", err)
					}
				}
				test.end(n)
				for !n.recovered() {
					_ = n.scan()
					if t.Context().Err() != nil {
						t.Fatalf("never recovered: %+v", n.Inventory())
					}
				}
			})
		})
	}
}

// recovered: all GPUs are healthy, their connections are known, and no call and no use of the session is left.
func (n *hangNode) recovered() bool {
	inventory := n.Inventory()
	for i, g := range inventory.GPUs {
		if !g.Health.Healthy() || len(inventory.Links) == 0 || inventory.Links[i][1-i].PCIe == gpu.LinkUnknown {
			return false
		}
	}
	n.session.mu.Lock()
	defer n.session.mu.Unlock()
	return len(n.late) == 0 && n.session.users == 0
}

// An agent that is to end does so, also while the driver does not let go of a session.
func TestRunEndsWhileShutdownHangs(t *testing.T) {
	n := newHangNode(t)
	n.find()
	n.session.mu.Lock()
	n.session.holding = true // as on a node without persistence mode
	n.library.Library.Init()
	n.session.mu.Unlock()
	n.library.shutdown.close()
	defer n.library.shutdown.open()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * n.options.patience):
		t.Error("Run does not end")
	}
}

// lastShutdownHangs hangs where the session really ends.
type lastShutdownHangs struct {
	openSessions
	last gate
}

func (l *lastShutdownHangs) Shutdown() gonvml.Return {
	if l.openSessions.open.Load() == 1 {
		l.last.pass()
	}
	return l.openSessions.Shutdown()
}

// A call that hangs keeps a session that should end. Once the driver was found again, the events of the other GPUs are read from the next
// session.
func TestEventsAfterASessionThatDoesNotEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newHangNode(t)
		n.find()
		old := n.session
		if err := old.tryOpen(); err != nil { // the call
			t.Fatal(err)
		}
		defer old.close()
		old.endSession()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- n.watchGPU(ctx, old, n.Inventory().GPUs[0], func(gpu.XIDEvent) {}) }()
		synctest.Wait()
		n.scanning.Lock()
		err := n.attach()
		n.scanning.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		default:
			t.Error("it still waits for the old session")
		}
		cancel()
	})
}

// An inspection ends also while the driver does not let go of its session.
func TestInspectEndsWhileShutdownHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newHangNode(t)
		library := &lastShutdownHangs{openSessions: openSessions{n.library, &atomic.Int32{}}}
		n.options.OpenLibrary = func() (gonvml.Interface, error) { return library, nil }
		library.last.close()
		defer library.last.open()
		ended := make(chan Report, 1)
		go func() { ended <- Inspect(t.Context(), n.options) }()
		select {
		case r := <-ended:
			if len(r.inventory.GPUs) != 2 {
				t.Errorf("%d GPUs, want 2", len(r.inventory.GPUs))
			}
		case <-time.After(100 * n.options.patience):
			t.Error("Inspect does not end")
		}
	})
}
