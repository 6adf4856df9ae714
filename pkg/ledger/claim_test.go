// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/fileclock"
	"github.com/tandem-gpu/tandem/internal/records"
	"github.com/tandem-gpu/tandem/pkg/device"
)

func openWith(t *testing.T, podState func(Hold) PodState) *Ledger {
	t.Helper()
	l, err := Open(t.Context(), Options{Dir: t.TempDir(), BootID: "boot", PodStates: judge(podState)})
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// A pod state that was determined before a repeated Prepare does not include the pod of that Prepare.
func TestARepeatedPrepareOutlivesAnOldRelease(t *testing.T) {
	tests := map[string]func(l *Ledger) error{
		"same pod": func(l *Ledger) error { return second(l.ReserveClaim(t.Context(), claimOf("c", whole("a")))) },
		"another pod": func(l *Ledger) error {
			return second(l.ReserveClaim(t.Context(), ClaimRequest{UID: "c", Pods: []Pod{{UID: "p2"}}, Devices: []device.Ref{whole("a")}}))
		},
		"expected with another pod": func(l *Ledger) error {
			return l.Expect(Hold{Holder: Holder{KindClaim, "c"}, Device: whole("a"), Pods: []Pod{{UID: "p2"}}})
		},
	}
	for name, again := range tests {
		t.Run(name, func(t *testing.T) {
			l := openWith(t, neverRunningOut)
			must(t, second(l.ReserveClaim(t.Context(), claimOf("c", whole("a")))))
			old := find(l, "c")
			must(t, again(l))
			must(t, l.Release(old))
			must(t, l.SetState(old, StateDraining))
			if h := find(l, "c"); h.State != StateHeld {
				t.Errorf("became %+v", h)
			}
		})
	}
}

// A claim gets all of its devices or none, also if the record of the last one cannot be written.
func TestHalfOfAReservation(t *testing.T) {
	l := openWith(t, neverRunningOut)
	unnamed := device.Ref{GPU: "b", Placement: device.Placement{Start: -1, Size: 1}} // no record has such a name
	if err := second(l.ReserveClaim(t.Context(), claimOf("c", whole("a"), unnamed))); err == nil {
		t.Error("a device without a record is reserved")
	}
	if holds := l.Holds(); len(holds) > 0 {
		t.Errorf("held: %v", holds)
	}
	must(t, l.ReservePod(limitsOf("a")))
}

// A call that failed for another claim of its pod gives back what it took, and nothing that others count on.
func TestCancelReservation(t *testing.T) {
	tests := []struct {
		name                  string
		held, taken, repeated []device.Ref
		podState              PodState
		want                  map[string]State
	}{
		{"no other call", nil, []device.Ref{whole("a"), whole("b")}, nil, Gone, nil},
		{"a container may use it", nil, []device.Ref{whole("a")}, nil, Running, map[string]State{"a": StateDraining}},
		{"confirmed for another pod", nil, []device.Ref{whole("a")}, []device.Ref{whole("a")}, Gone, map[string]State{"a": StateHeld}},
		{"held before", []device.Ref{whole("a")}, []device.Ref{whole("a")}, nil, Gone, map[string]State{"a": StateHeld}},
		{"half of it held before", []device.Ref{whole("a")}, []device.Ref{whole("a"), whole("b")}, nil, Gone, map[string]State{"a": StateHeld}},
		{"whose pods were updated", nil, []device.Ref{whole("a")}, nil, Gone, nil},
		{"whose pods were updated, and a container may use it", nil, []device.Ref{whole("a")}, nil, Running, map[string]State{"a": StateDraining}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			l := openWith(t, func(Hold) PodState { return test.podState })
			if test.held != nil {
				must(t, second(l.ReserveClaim(t.Context(), claimOf("c", test.held...))))
			}
			reservation, err := l.ReserveClaim(t.Context(), claimOf("c", test.taken...))
			must(t, err)
			if test.repeated != nil {
				must(t, second(l.ReserveClaim(t.Context(), claimOf("c", test.repeated...))))
			}
			if strings.HasPrefix(test.name, "whose pods were updated") {
				must(t, l.SetPods(find(l, "c"), []Pod{{UID: "another"}}))
			}
			for range 2 {
				must(t, l.CancelReservation(reservation))
			}
			got := map[string]State{}
			for _, h := range l.Holds() {
				got[h.Device.GPU] = h.State
			}
			if !maps.Equal(got, test.want) {
				t.Errorf("left %v, want %v", got, test.want)
			}
		})
	}
}

// A draining hold that a failed Prepare made held drains again, for the pods that it had.
func TestCancelReservationOfDrainingHold(t *testing.T) {
	l := openWith(t, neverRunningOut)
	first := claimOf("c", whole("a"))
	first.Pods = []Pod{{UID: "p1"}}
	must(t, second(l.ReserveClaim(t.Context(), first)))
	must(t, l.DrainClaim(t.Context(), "c"))
	next := claimOf("c", whole("a"))
	next.Pods = []Pod{{UID: "p2"}}
	reservation, err := l.ReserveClaim(t.Context(), next)
	must(t, err)
	h := find(l, "c")
	if h.State != StateHeld || len(h.Pods) != 2 {
		t.Fatalf("reserved again: %+v", h)
	}
	must(t, l.SetPods(h, append(h.Pods, Pod{UID: "p3"})))
	for range 2 {
		must(t, l.CancelReservation(reservation))
	}
	if h := find(l, "c"); h.State != StateDraining || len(h.Pods) != 1 || h.Pods[0].UID != "p1" {
		t.Errorf("cancelled: %+v", h)
	}
}

// How long a claim has been draining is counted from when it was asked to go, not from its Prepare.
func TestDrainingSince(t *testing.T) {
	l := openWith(t, neverRunningOut)
	must(t, second(l.ReserveClaim(t.Context(), claimOf("c", whole("a")))))
	l.mu.Lock()
	l.holds[key{Holder{KindClaim, "c"}, whole("a")}].Since = fileclock.Now().Add(-time.Hour)
	l.mu.Unlock()
	must(t, l.DrainClaim(t.Context(), "c"))
	if h := find(l, "c"); h.State != StateDraining || fileclock.Now().Sub(h.Since) > time.Minute {
		t.Errorf("draining since an hour: %+v", h)
	}
}

func TestUnprepareCancelsPreparesThatQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := openWith(t, func(Hold) PodState { return Terminating })
		must(t, second(l.ReserveClaim(t.Context(), claimOf("holder", whole("a")))))
		start := time.Now()
		answers := make(chan error)
		reserve := func(ctx context.Context) {
			_, err := l.ReserveClaim(ctx, claimOf("c", whole("a")))
			answers <- err
		}
		for range 3 {
			go reserve(t.Context())
			synctest.Wait()
		}
		impatient, leave := context.WithCancel(t.Context())
		go reserve(impatient)
		synctest.Wait()
		leave()
		if err := <-answers; !errors.Is(err, context.Canceled) {
			t.Errorf("queued call whose caller left: %v", err)
		}
		drained := make(chan error, 2)
		for range cap(drained) {
			go func() { drained <- l.DrainClaim(t.Context(), "c") }()
		}
		for range 3 {
			if err := <-answers; !errors.Is(err, ErrCancelled) {
				t.Error(err)
			}
		}
		for range cap(drained) {
			must(t, <-drained)
		}
		if waited := time.Since(start); waited > 0 {
			t.Errorf("waited %v", waited)
		}
		// What comes after the Unprepare is not its business.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, conflict := errors.AsType[*ConflictError](second(l.ReserveClaim(ctx, claimOf("c", whole("a"))))); !conflict || time.Since(start) != time.Second {
			t.Errorf("a later Prepare ended after %v", time.Since(start))
		}
		if len(l.claims.byUID) > 0 {
			t.Error("the queue stays behind")
		}
	})
}

// A claim may be shared by more pods than fit on a page.
func TestClaimOfManyPods(t *testing.T) {
	dir := t.TempDir()
	l := reopen(t, dir)
	request := claimOf("c", whole("a"))
	request.Pods = nil
	for i := range 60 {
		request.Pods = append(request.Pods, Pod{UID: fmt.Sprintf("00000000-0000-4000-8000-%012d", i), Namespace: "ns", Name: strings.Repeat("x", 60)})
	}
	must(t, second(l.ReserveClaim(t.Context(), request)))
	must(t, l.Close())
	l = reopen(t, dir)
	h := find(l, "c")
	if !slices.Equal(h.Pods, request.Pods) {
		t.Errorf("on disk: %+v", h)
	}
	must(t, l.SetPods(h, h.Pods[:2]))
	if now := find(l, "c"); len(now.Pods) != 2 || now.Generation == h.Generation {
		t.Errorf("after most pods were removed: %+v", now)
	}
	must(t, l.SetPods(h, nil))
	if now := find(l, "c"); len(now.Pods) != 2 {
		t.Errorf("after a call with an earlier generation: %+v", now)
	}
	must(t, l.Close())
	if h := find(reopen(t, dir), "c"); len(h.Pods) != 2 || h.Unreadable {
		t.Errorf("on disk, over a longer record: %+v", h)
	}
}

// Two claims that were allocated anew get what the other had; neither waits for the other.
func TestClaimsSwapDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := openWith(t, func(h Hold) PodState {
			if h.State == StateDraining {
				return Gone
			}
			return Running
		})
		must(t, second(l.ReserveClaim(t.Context(), claimOf("c1", whole("a")))))
		must(t, second(l.ReserveClaim(t.Context(), claimOf("c2", whole("b")))))
		_, conflict := errors.AsType[*ConflictError](second(l.ReserveClaim(t.Context(), claimOf("c1", whole("b")))))
		if !conflict {
			t.Error("c1 got what c2 still uses")
		}
		must(t, second(l.ReserveClaim(t.Context(), claimOf("c2", whole("a")))))
		must(t, second(l.ReserveClaim(t.Context(), claimOf("c1", whole("b")))))
	})
}

func TestOneAllocateCannotTakeHardwareTwice(t *testing.T) {
	l := openWith(t, neverRunningOut)
	err := l.ReservePod([]PodRequest{{ID: "a", Device: whole("a")}, {ID: "a-0", Device: part("a", 0, 4)}})
	if err == nil || len(l.Holds()) > 0 {
		t.Errorf("%v, holds %v", err, l.Holds())
	}
}

// What goes wrong with the record of one pod is told to another.
func TestErrorsNameNoOtherPod(t *testing.T) {
	l := openWith(t, func(Hold) PodState { return Gone })
	must(t, l.ReservePod([]PodRequest{{ID: "a", Resource: "r", Device: whole("a")}}))
	must(t, l.Identify(find(l, "a"), Pod{UID: "p", Namespace: "secret", Name: "plan"}))
	must(t, l.Close())
	_, err := l.ReserveClaim(t.Context(), claimOf("c", whole("a")))
	if !errors.Is(err, records.ErrClosed) || strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "plan") {
		t.Error(err)
	}
}

func TestAClosedLedgerChangesNothing(t *testing.T) {
	dir := t.TempDir()
	l := reopen(t, dir)
	must(t, l.ReservePod(limitsOf("a")))
	must(t, l.Close())
	next := reopen(t, dir)
	for what, err := range map[string]error{
		"claim":   second(l.ReserveClaim(t.Context(), claimOf("c", whole("b")))),
		"limit":   l.ReservePod(limitsOf("b")),
		"reuse":   l.ReservePod(limitsOf("a")),
		"state":   l.SetState(find(l, "a"), StateDraining),
		"release": l.Release(find(l, "a")),
	} {
		if !errors.Is(err, records.ErrClosed) {
			t.Errorf("%s: %v", what, err)
		}
	}
	before := stateOf(next)
	must(t, next.Close())
	sameState(t, before, stateOf(reopen(t, dir)))
}

// A reservation is valid until a device of it drains, also if another call confirms the holds.
func TestValid(t *testing.T) {
	l := openWith(t, func(Hold) PodState { return Running })
	r, err := l.ReserveClaim(t.Context(), claimOf("c", whole("a"), whole("b")))
	must(t, err)
	must(t, second(l.ReserveClaim(t.Context(), claimOf("c", whole("a"), whole("b")))))
	if !l.Valid(r) {
		t.Error("invalid after another call confirmed it")
	}
	must(t, second(l.ReserveClaim(t.Context(), claimOf("c", whole("a")))))
	if l.Valid(r) {
		t.Error("valid although the claim gave up a device")
	}
	if !l.Valid(Reservation{}) {
		t.Error("a reservation of nothing is invalid")
	}
	must(t, l.DrainClaim(t.Context(), "c"))
	if l.Valid(r) {
		t.Error("valid although the claim was unprepared")
	}
}
