// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"context"
	"errors"
	"maps"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// queue is what the scheduler has bound to the node.
type queue struct {
	mu      sync.Mutex
	bound   []PendingPods
	changed chan struct{}
}

func newQueue(bound ...PendingPods) *queue { return &queue{bound: bound, changed: make(chan struct{})} }

func (q *queue) PendingPods() []PendingPods {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.bound
}

func (q *queue) Changed() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.changed
}

func (q *queue) set(bound ...PendingPods) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.bound = bound
	close(q.changed)
	q.changed = make(chan struct{})
}

func openWithQueue(t *testing.T, q Queue) *Ledger {
	t.Helper()
	l, err := Open(t.Context(), Options{Dir: t.TempDir(), BootID: "boot", PodStates: judge(neverRunningOut), Queue: q, Now: time.Now})
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// yielding asks for a device of a node with two.
func yielding(uid string, devices ...device.Ref) ClaimRequest {
	r := claimOf(uid, devices...)
	r.PodsFirst = &PodsFirst{Slots: map[string][]Slot{"nvidia.com/gpu": {{Device: whole("a")}, {Device: whole("b")}}}, WaitBudget: 2 * time.Second}
	return r
}

func TestClaimsYieldToBoundLimits(t *testing.T) {
	one, two := PendingPods{"p1", "nvidia.com/gpu", 1}, PendingPods{"p2", "nvidia.com/gpu", 1}
	limitOf := func(t *testing.T, l *Ledger, gpu, pod string) {
		must(t, l.ReservePod(limitsOf(gpu)))
		if pod != "" {
			must(t, l.Identify(find(l, gpu), Pod{UID: pod}))
		}
	}
	partitions := func(r *ClaimRequest) {
		r.PodsFirst.Slots = map[string][]Slot{"nvidia.com/gpu": {{Device: whole("a")}}, "nvidia.com/mig-1g.10gb": {{Device: part("b", 0, 1)}, {Device: part("b", 1, 1)}}}
	}
	tests := []struct {
		name  string
		bound []PendingPods
		held  func(t *testing.T, l *Ledger)
		adapt func(*ClaimRequest)
		want  time.Duration
	}{
		{name: "no pod waits"},
		{name: "enough for both", bound: []PendingPods{one}},
		{name: "not enough", bound: []PendingPods{one, two}, want: 2 * time.Second},
		{name: "one pod wants both", bound: []PendingPods{{"p1", "nvidia.com/gpu", 2}}, want: 2 * time.Second},
		{name: "one has got its own", bound: []PendingPods{one}, held: func(t *testing.T, l *Ledger) { limitOf(t, l, "b", "p1") }},
		{name: "one has a device, and its hold names no pod", bound: []PendingPods{one}, held: func(t *testing.T, l *Ledger) { limitOf(t, l, "b", "") }},
		{name: "another's limit leaves none", bound: []PendingPods{one}, held: func(t *testing.T, l *Ledger) { limitOf(t, l, "b", "p9") }, want: 2 * time.Second},
		{name: "held before", bound: []PendingPods{one, two}, held: func(t *testing.T, l *Ledger) {
			must(t, second(l.ReserveClaim(t.Context(), claimOf("c", whole("a")))))
		}},
		{name: "a device that limits cannot use", bound: []PendingPods{one, two}, adapt: func(r *ClaimRequest) { r.Devices = []device.Ref{whole("z")} }},
		{name: "who wants partitions has enough of them", bound: []PendingPods{{"p1", "nvidia.com/mig-1g.10gb", 2}}, adapt: partitions},
		{name: "who wants partitions would lack one", bound: []PendingPods{{"p1", "nvidia.com/mig-1g.10gb", 2}}, adapt: func(r *ClaimRequest) {
			partitions(r)
			r.Devices = []device.Ref{part("b", 0, 2)}
		}, want: 2 * time.Second},
		{name: "what others have by another resource is no help", bound: []PendingPods{{"p1", "nvidia.com/gpu", 1}}, held: func(t *testing.T, l *Ledger) {
			must(t, l.ReservePod([]PodRequest{{ID: "MIG-1", Resource: "nvidia.com/mig-1g.10gb", Device: part("b", 0, 1)}}))
		}, want: 2 * time.Second},
		{name: "a caller without patience", bound: []PendingPods{one, two}, adapt: func(r *ClaimRequest) { r.PodsFirst = nil }},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := openWithQueue(t, newQueue(test.bound...))
				if test.held != nil {
					test.held(t, l)
				}
				request := yielding("c", whole("a"))
				if test.adapt != nil {
					test.adapt(&request)
				}
				start := time.Now()
				must(t, second(l.ReserveClaim(t.Context(), request)))
				if waited := time.Since(start); waited != test.want {
					t.Errorf("waited %v, want %v", waited, test.want)
				}
			})
		})
	}
}

func TestYieldingEndsEarly(t *testing.T) {
	tests := map[string]func(t *testing.T, l *Ledger, q *queue){
		"the pod is admitted or gone": func(_ *testing.T, _ *Ledger, q *queue) { q.set() },
		"the pod has its device": func(t *testing.T, l *Ledger, _ *queue) {
			must(t, l.ReservePod(limitsOf("b")))
			must(t, l.ReservePod(limitsOf("z")))
		},
	}
	for name, happens := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := newQueue(PendingPods{"p1", "nvidia.com/gpu", 2})
				l := openWithQueue(t, q)
				request := yielding("c", whole("a"))
				start := time.Now()
				answer := make(chan error)
				go func() { answer <- second(l.ReserveClaim(t.Context(), request)) }()
				time.Sleep(500 * time.Millisecond)
				happens(t, l, q)
				must(t, <-answer)
				if waited := time.Since(start); waited > 510*time.Millisecond {
					t.Errorf("waited %v", waited)
				}
				if left := request.PodsFirst.WaitBudget; left > 1500*time.Millisecond || left < 1490*time.Millisecond {
					t.Errorf("%v of the patience is left", left)
				}
			})
		})
	}
}

// All claims of a pod share two seconds.
func TestPatienceIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := openWithQueue(t, newQueue(PendingPods{"p1", "nvidia.com/gpu", 2}))
		first, other := yielding("c1", whole("a")), yielding("c2", whole("b"))
		other.PodsFirst = first.PodsFirst
		start := time.Now()
		must(t, second(l.ReserveClaim(t.Context(), first)))
		must(t, second(l.ReserveClaim(t.Context(), other)))
		if waited := time.Since(start); waited != 2*time.Second {
			t.Errorf("waited %v", waited)
		}
	})
}

func TestYieldingIsCancelled(t *testing.T) {
	tests := map[string]struct {
		cancel func(l *Ledger, leave context.CancelFunc) error
		want   error
	}{
		"by Unprepare":  {func(l *Ledger, _ context.CancelFunc) error { return l.DrainClaim(context.Background(), "c") }, ErrCancelled},
		"by its caller": {func(_ *Ledger, leave context.CancelFunc) error { leave(); return nil }, context.Canceled},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := openWithQueue(t, newQueue(PendingPods{"p1", "nvidia.com/gpu", 2}))
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				start := time.Now()
				answer := make(chan error)
				go func() { answer <- second(l.ReserveClaim(ctx, yielding("c", whole("a")))) }()
				synctest.Wait()
				must(t, test.cancel(l, leave))
				if err := <-answer; !errors.Is(err, test.want) || time.Since(start) > 0 {
					t.Errorf("%v after %v", err, time.Since(start))
				}
				if holds := l.Holds(); len(holds) > 0 {
					t.Errorf("holds: %v", holds)
				}
			})
		})
	}
}

func TestLacking(t *testing.T) {
	l, err := Open(t.Context(), Options{Dir: t.TempDir(), BootID: "boot", PodStates: judge(neverRunningOut), Now: time.Now})
	must(t, err)
	defer l.Close()
	if n, changed := l.Outstanding(); len(n) != 0 || changed != nil {
		t.Errorf("without a queue %v are lacking", n)
	}
	q := newQueue(PendingPods{"p1", "nvidia.com/gpu", 2}, PendingPods{"p2", "nvidia.com/gpu", 1}, PendingPods{"p2", "nvidia.com/mig-1g.10gb", 3})
	l = openWithQueue(t, q)
	must(t, l.ReservePod(limitsOf("a")))
	n, changed := l.Outstanding()
	if !maps.Equal(n, map[string]int{"nvidia.com/gpu": 2, "nvidia.com/mig-1g.10gb": 3}) {
		t.Errorf("%v are lacking", n)
	}
	q.set()
	<-changed
	if n, _ := l.Outstanding(); len(n) != 0 {
		t.Errorf("%v are missing without a pod", n)
	}
}
