// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
)

// openSessions counts sessions, and reports persistence mode off: the node keeps its session open.
type openSessions struct {
	*hangingLibrary
	open *atomic.Int32
}

func (l openSessions) Init() gonvml.Return {
	l.open.Add(1)
	return l.hangingLibrary.Init()
}

func (l openSessions) Shutdown() gonvml.Return {
	ret := l.hangingLibrary.Shutdown()
	l.open.Add(-1)
	return ret
}

func (l openSessions) DeviceGetHandleByIndex(index int) (gonvml.Device, gonvml.Return) {
	d, ret := l.hangingLibrary.DeviceGetHandleByIndex(index)
	return persistent{d, gonvml.FEATURE_DISABLED}, ret
}

func newPauseNode(t *testing.T) (n *hangNode, open *atomic.Int32) {
	t.Helper()
	n, open = newHangNode(t), &atomic.Int32{}
	library := openSessions{n.library, open}
	n.options.OpenLibrary = func() (gonvml.Interface, error) { return library, nil }
	n.find()
	if open.Load() != 1 {
		t.Fatalf("%d sessions, want the one that is held", open.Load())
	}
	return n, open
}

func (n *hangNode) all(reason string) bool {
	for _, g := range n.Inventory().GPUs {
		if g.Health.Reason != reason {
			return false
		}
	}
	return len(n.Inventory().GPUs) == 2
}

// A paused node has no session, makes no call, and says so of each GPU, until it is resumed.
func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, open := newPauseNode(t)
		uuid := n.Inventory().GPUs[0].UUID
		changed := n.Changed()
		for range 2 {
			if err := n.Pause(t.Context(), "label=paused"); err != nil {
				t.Fatal(err)
			}
		}
		<-changed
		if open.Load() != 0 || !n.all(gpu.ReasonPaused) {
			t.Errorf("%d sessions, inventory %+v", open.Load(), n.Inventory())
		}
		_, modeErr := n.ComputeMode(t.Context(), uuid)
		_, editsErr := n.ContainerEdits(t.Context())
		for what, err := range map[string]error{
			"an operation": modeErr, "container edits": editsErr, "a scan": n.Scan(t.Context()), "a reset": n.Reset(t.Context(), uuid),
			"nvidia-smi": n.SetTimeSlice(t.Context(), uuid, 1),
		} {
			if paused := new(PausedError); !errors.As(err, &paused) || paused.Reason != "label=paused" || !errors.Is(err, ErrNoDriver) {
				t.Errorf("%s: %v, want a PausedError", what, err)
			}
		}
		if open.Load() != 0 || !n.all(gpu.ReasonPaused) {
			t.Errorf("%d sessions, inventory %+v", open.Load(), n.Inventory())
		}
		if err := n.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		if open.Load() != 1 || !n.all("") {
			t.Errorf("resumed: %d sessions, inventory %+v", open.Load(), n.Inventory())
		}
	})
}

// TestPauseEndsNoFault: a lost GPU keeps its fault during a pause, and its neighbour gets none, also after a scan.
func TestPauseEndsNoFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, _ := newPauseNode(t)
		n.fault(simulated.GPUFaults{Lost: true})
		if err := n.Scan(t.Context()); err != nil {
			t.Fatal(err)
		}
		pause := func() error { return n.Pause(t.Context(), "label=paused") }
		for i, step := range []func() error{pause, pause, func() error { return ignoring(n.Scan(t.Context()), ErrNoDriver) }, pause} {
			if err := step(); err != nil {
				t.Fatal(err)
			}
			gpus := n.Inventory().GPUs
			if faults := gpus[1].Faults; !n.all(gpu.ReasonPaused) || len(gpus[0].Faults) > 0 || len(faults) != 1 || faults[0].Reason != gpu.ReasonLost {
				t.Errorf("step %d: %+v", i, gpus)
			}
		}
		n.fault(simulated.GPUFaults{})
		if err := n.Resume(t.Context()); err != nil || !n.all("") || len(n.Inventory().GPUs[1].Faults) > 0 {
			t.Errorf("resumed: %v, %+v", err, n.Inventory().GPUs)
		}
	})
}

func ignoring(err, ignored error) error {
	if errors.Is(err, ignored) {
		return nil
	}
	return err
}

// TestSilentAfterAPause: a GPU that has not answered since the pause is not healthy.
func TestSilentAfterAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, _ := newPauseNode(t)
		if err := n.Pause(t.Context(), "label=paused"); err != nil {
			t.Fatal(err)
		}
		_ = n.Scan(t.Context())
		n.fault(simulated.GPUFaults{Calls: map[string]simulated.CallFault{"GetMemoryInfo": {Delay: simulated.Duration(time.Hour)}}})
		if err := n.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		if gpus := n.Inventory().GPUs; !gpus[0].Health.Healthy() || gpus[1].Health.Healthy() {
			t.Errorf("inventory %+v", gpus)
		}
	})
}

// A pause waits for the calls that run, and says when they do not end. What they do not use is free of the driver at once.
func TestPauseDuringCalls(t *testing.T) {
	for name, begin := range map[string]func(*hangNode){
		"a scan":       func(n *hangNode) { _ = n.Scan(context.Background()) },
		"an operation": func(n *hangNode) { _, _ = n.ComputeMode(context.Background(), n.Inventory().GPUs[1].UUID) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n, open := newPauseNode(t)
				hang := simulated.CallFault{Delay: simulated.Duration(time.Hour)}
				n.fault(simulated.GPUFaults{Calls: map[string]simulated.CallFault{"GetMemoryInfo": hang, "GetComputeMode": hang}})
				began := make(chan struct{})
				go func() { begin(n); close(began) }()
				for {
					n.session.mu.Lock()
					users := n.session.users
					n.session.mu.Unlock()
					if users > 0 {
						break
					}
					time.Sleep(time.Millisecond)
				}
				limited, cancel := context.WithTimeout(t.Context(), 3*n.options.patience)
				defer cancel()
				if err := n.Pause(limited, "label=paused"); !errors.Is(err, context.DeadlineExceeded) || !n.all(gpu.ReasonPaused) {
					t.Errorf("%v; inventory %+v", err, n.Inventory())
				}
				n.fault(simulated.GPUFaults{})
				if err := n.Pause(t.Context(), "label=paused"); err != nil {
					t.Error(err)
				}
				<-began
				if open.Load() != 0 || !n.all(gpu.ReasonPaused) {
					t.Errorf("%d sessions, inventory %+v", open.Load(), n.Inventory())
				}
				for n.Resume(t.Context()) != nil || !n.all("") {
					time.Sleep(lookAgain)
					if t.Context().Err() != nil {
						t.Fatal("never resumed")
					}
				}
			})
		})
	}
}

// A pause ends with the reset that runs. The next reset, which waits for its turn, does not begin.
func TestPauseBeforeTheTurnOfAReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, _ := newPauseNode(t)
		unlock, err := n.turns.Lock(t.Context(), aReset)
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- n.Reset(t.Context(), n.Inventory().GPUs[0].UUID) }()
		synctest.Wait()
		if err := n.Pause(t.Context(), "label=paused"); err != nil {
			t.Error(err)
		}
		unlock()
		if err, paused := <-ended, new(PausedError); !errors.As(err, &paused) {
			t.Errorf("the reset: %v, want a PausedError", err)
		}
	})
}

// A pause waits for a reset that runs: the driver cannot be unloaded meanwhile.
func TestPauseDuringAReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, open := newPauseNode(t)
		resetting, reset, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
		go func() {
			ended <- n.session.suspend(n.options.patience, func() error { close(resetting); <-reset; return nil })
		}()
		<-resetting
		limited, cancel := context.WithTimeout(t.Context(), n.options.patience)
		defer cancel()
		if err := n.Pause(limited, "label=paused"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a pause during a reset: %v", err)
		}
		close(reset)
		if err := n.Pause(t.Context(), "label=paused"); err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil || open.Load() != 0 {
			t.Errorf("%v; %d sessions", err, open.Load())
		}
		if err := n.Resume(t.Context()); err != nil || !n.all("") || open.Load() != 1 {
			t.Errorf("%v; inventory %+v; %d sessions", err, n.Inventory(), open.Load())
		}
	})
}

// A node that is paused before its first scan opens no session.
func TestPauseBeforeTheFirstScan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, open := newHangNode(t), &atomic.Int32{}
		library := openSessions{n.library, open}
		n.options.OpenLibrary = func() (gonvml.Interface, error) { return library, nil }
		if err := n.Pause(t.Context(), "label=paused"); err != nil {
			t.Fatal(err)
		}
		paused := new(PausedError)
		if err := n.scan(); !errors.As(err, &paused) || !errors.As(n.Missing(), &paused) || open.Load() != 0 {
			t.Errorf("%v; missing %v; %d sessions", err, n.Missing(), open.Load())
		}
		if err := n.Resume(t.Context()); err != nil || !n.all("") {
			t.Errorf("%v; inventory %+v", err, n.Inventory())
		}
	})
}
