// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// node has GPUs with time slices by policy, by UUID.
type node map[string]string

func (n node) Inventory() device.Inventory {
	var inv device.Inventory
	for _, uuid := range []string{"GPU-0", "GPU-1"} {
		d := gpuNamed(uuid)
		if interval, shared := n[uuid]; shared {
			d.GPU.Sharing = device.Sharing{Strategy: device.TimeSlicing, Interval: interval, Claims: "memory"}
		}
		inv.GPUs = append(inv.GPUs, d.GPU)
	}
	return inv
}

func (node) Changed() <-chan struct{} { return nil }

// The time slice that policy says holds from the start, through restarts, until policy says otherwise; a claim's own comes first.
func TestPolicy(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	settle := func(n node, want string) {
		t.Helper()
		for range 2 {
			if err := settleAll(t, NewPolicy(k, n, &book{}, &book{})); err != nil {
				t.Fatal(err)
			}
			var parts []string
			for _, part := range strings.Split(w.state(), ", ") {
				if !strings.HasPrefix(part, "sharing ") && part != "" {
					parts = append(parts, part)
				}
			}
			if got := strings.Join(parts, ", "); got != want {
				t.Fatalf("GPUs are set: %q, want %q", got, want)
			}
		}
		if len(k.All()) > 0 {
			t.Fatalf("the policy's are taken for claims': %v", k.All())
		}
	}
	settle(node{"GPU-0": "", "GPU-1": "Short"}, "GPU-1 slice 1")
	settle(node{"GPU-0": "Long", "GPU-1": "Medium"}, "GPU-0 slice 3, GPU-1 slice 2")
	k = w.process()
	settle(node{"GPU-0": "Long"}, "GPU-0 slice 3")

	claim := group("uid-a", sliced(parametersv1beta1.IntervalShort), gpuNamed("GPU-0"))
	if _, err := apply(t.Context(), k, claim, always); err != nil {
		t.Fatal(err)
	}
	if err := settleAll(t, NewPolicy(k, node{"GPU-0": "Long"}, &book{}, &book{})); err != nil || w.slices["GPU-0"] != 1 {
		t.Fatalf("a claim has time slice %d, not its own: %v", w.slices["GPU-0"], err)
	}
	k.revertAll(t)
	settle(node{"GPU-0": "Long"}, "GPU-0 slice 3")
	settle(node{}, "")
	if got := w.state(); got != "" {
		t.Errorf("left: %s", got)
	}
}

// lost is a node of which no GPU is well.
type lost struct{ node }

func (l lost) Inventory() device.Inventory {
	inv := l.node.Inventory()
	for i := range inv.GPUs {
		inv.GPUs[i].Health = device.Health{Reason: device.ReasonLost}
	}
	return inv
}

// A GPU that was lost may have forgotten its time slice when it is back: policy sets it again, and so does a claim's next Apply.
func TestSliceOfAGPUThatWasLost(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	n := node{"GPU-0": "Long"}
	p := NewPolicy(k, n, &book{}, &book{})
	check(t, settleAll(t, p))
	claim := group("uid-a", sliced(parametersv1beta1.IntervalShort), gpuNamed("GPU-1"))
	_, err := apply(t.Context(), k, claim, always)
	check(t, err)
	p.inventory = lost{n}
	check(t, settleAll(t, p))
	clear(w.slices)
	p.inventory = n
	check(t, settleAll(t, p))
	_, err = apply(t.Context(), k, claim, always)
	check(t, err)
	if w.slices["GPU-0"] != 3 || w.slices["GPU-1"] != 1 {
		t.Errorf("time slices %v", w.slices)
	}
	k.revertAll(t)
}

// What fails is tried again, not all the time, and keeps no other GPU from its policy.
func TestPolicyThatFails(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	w.step = func() error { return errors.New("no such tool") }
	done := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	go func() { done <- NewPolicy(k, node{"GPU-0": "Long", "GPU-1": "Short"}, &book{}, &book{}).Run(ctx) }()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if w.calls == 0 || w.calls > 4 {
		t.Errorf("the driver was asked %d times", w.calls)
	}
}

// meddler has something happen while the mode of a GPU is read, which is before anything is recorded.
type meddler struct {
	*world
	meanwhile func()
}

func (m *meddler) ComputeMode(ctx context.Context, gpu string) (device.ComputeMode, error) {
	if do := m.meanwhile; do != nil {
		m.meanwhile = nil
		do()
	}
	return m.world.ComputeMode(ctx, gpu)
}

// A claim and the policy apply settings at once: the claim gets its own, whichever comes first.
func TestPolicyBesideAClaim(t *testing.T) {
	claim := group("uid-a", sliced(parametersv1beta1.IntervalShort), gpuNamed("GPU-0"))
	policy := node{"GPU-0": "Long"}
	for name, policyFirst := range map[string]bool{"the claim comes while the policy is applied": true, "the policy comes while the claim is applied": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			k := w.process()
			m := &meddler{world: w}
			k.Hardware = m
			apply := func() {
				if _, err := apply(t.Context(), k, claim, always); err != nil {
					t.Error(err)
				}
			}
			settle := func() {
				if err := settleAll(t, NewPolicy(k, policy, &book{}, &book{})); err != nil {
					t.Error(err)
				}
			}
			if policyFirst {
				m.meanwhile = apply
				settle()
			} else {
				m.meanwhile = settle
				apply()
			}
			if w.slices["GPU-0"] != 1 || len(k.Records.Keys()) != 1 {
				t.Errorf("the claim has time slice %d; records %v", w.slices["GPU-0"], k.Records.Keys())
			}
			k.revertAll(t)
			settle()
			if w.slices["GPU-0"] != 3 {
				t.Errorf("without the claim, the time slice is %d", w.slices["GPU-0"])
			}
		})
	}
}

// A claim that comes while a daemon begins leaves the GPU in the compute mode of before both.
func TestModeBeforeAClaimAndADaemon(t *testing.T) {
	w := newTown(t, byMPS(4, false))
	w.manager = w.process()
	m := &meddler{world: w.world}
	w.manager.Hardware = m
	m.meanwhile = func() { check(t, w.look()) }
	_, err := apply(t.Context(), w.manager, Group{Claim: Claim{"uid-a", "team-a", "a"}, Devices: []device.Device{w.device()}, Sharing: parametersv1beta1.Sharing{Strategy: Exclusive}}, always)
	check(t, err)
	if want := "sharing uid-a~GPU-0"; w.state() != want {
		t.Errorf("the claim finds %s, want %s", w.state(), want)
	}
	w.manager.revertAll(t)
	if w.state() != "" {
		t.Errorf("left: %s", w.state())
	}
}

// A claim that ends between its record and its settings leaves the GPU as the policy set it, also if the agent restarts in between.
func TestClaimCancelledBesideAPolicy(t *testing.T) {
	for name, restart := range map[string]bool{"at once": false, "after a restart": true} {
		t.Run(name, func(t *testing.T) {
			w := newTown(t, byMPS(4, false))
			w.manager = w.process()
			check(t, w.look())
			want := w.state()
			if w.modes["GPU-0"] != device.ComputeModeExclusiveProcess {
				t.Fatalf("the policy leaves the GPU in mode %q", w.modes["GPU-0"])
			}
			// Like a claim's UID, this comes before the policy's key.
			claim := group("0a", sliced(parametersv1beta1.IntervalLong), w.device())
			unlock, err := w.manager.lock(t.Context(), "0a")
			check(t, err)
			_, err = w.manager.recordGroup(t.Context(), claim)
			unlock()
			check(t, err)
			if restart {
				w.manager = w.process()
				check(t, w.manager.resume(t.Context(), w.manager.Records.Keys()))
			}
			check(t, w.manager.Revert(t.Context(), Key{"0a", device.Ref{GPU: "GPU-0"}}, always))
			if w.state() != want || w.modes["GPU-0"] != device.ComputeModeExclusiveProcess || w.slices["GPU-0"] != 0 {
				t.Errorf("the claim left %s, mode %q and time slice %d, not %s", w.state(), w.modes["GPU-0"], w.slices["GPU-0"], want)
			}
		})
	}
}

// book tells who has what.
type book struct {
	mu      sync.Mutex
	holds   []ledger.Hold
	changed chan struct{}
	// asked happens before an answer.
	asked func()
	// busy are the holders that have processes.
	busy map[string]bool
}

func (b *book) Busy(h ledger.Hold) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.busy[h.Holder.ID]
}

// settleAll looks at every GPU once.
func settleAll(t *testing.T, p *Policy) error {
	var errs []error
	for _, gpu := range p.inventory.Inventory().GPUs {
		errs = append(errs, p.apply(t.Context(), gpu.UUID))
	}
	return errors.Join(errs...)
}

func (b *book) Holds() []ledger.Hold {
	b.mu.Lock()
	asked := b.asked
	b.mu.Unlock()
	if asked != nil {
		asked()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.holds)
}

func (b *book) Changed() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.changed == nil {
		b.changed = make(chan struct{})
	}
	return b.changed
}

func (b *book) set(holds ...ledger.Hold) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.holds = holds
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
}
