// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

func openInBubble(t *testing.T, podState func(Hold) PodState) *Ledger {
	t.Helper()
	l, err := Open(t.Context(), Options{Dir: t.TempDir(), BootID: "boot", PodStates: judge(podState), Now: time.Now})
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func conflict(uid string, pendingEviction bool, devices ...device.Ref) Conflict {
	return Conflict{UID: uid, Namespace: "ns", Name: uid, Devices: devices, PendingEviction: pendingEviction, Message: "lost"}
}

func isPendingEviction(err error) bool {
	_, pendingEviction := errors.AsType[*PendingEvictionError](err)
	return pendingEviction
}

func TestClaimPendingEvictionIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := openInBubble(t, neverRunningOut)
		l.RecordConflict(conflict("c", true, whole("a")))
		if err := second(l.ReserveClaim(t.Context(), claimOf("c", whole("a")))); !isPendingEviction(err) {
			t.Fatalf("the device is free, and the eviction is pending: %v", err)
		}
		must(t, second(l.ReserveClaim(t.Context(), claimOf("other", whole("b")))))
		if got := l.Conflicts(); len(got) != 1 || !got[0].PendingEviction || got[0].Until().Sub(got[0].Since) != 30*time.Second { // kubelet tries again after a minute
			t.Errorf("conflicts: %+v", got)
		}
		time.Sleep(30 * time.Second)
		if got := l.Conflicts(); len(got) != 1 || got[0].PendingEviction || !got[0].Until().IsZero() {
			t.Errorf("conflicts after it expired: %+v", got)
		}
		must(t, second(l.ReserveClaim(t.Context(), claimOf("c", whole("a")))))
		if got := l.Conflicts(); len(got) != 0 {
			t.Errorf("conflicts after the claim got its device: %+v", got)
		}
	})
}

func TestPendingEvictionExpiresUnwatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := openInBubble(t, neverRunningOut)
		l.RecordConflict(conflict("c", true, whole("a")))
		time.Sleep(30 * time.Second)
		must(t, second(l.ReserveClaim(t.Context(), claimOf("c", whole("a")))))
	})
}

func TestClockSetBackDoesNotProlongEviction(t *testing.T) {
	clock := time.Now()
	l, err := Open(t.Context(), Options{Dir: t.TempDir(), BootID: "boot", PodStates: judge(neverRunningOut), Now: func() time.Time { return clock }})
	must(t, err)
	defer l.Close()
	l.RecordConflict(conflict("c", true, whole("a")))
	clock = clock.Add(-time.Hour)
	must(t, second(l.ReserveClaim(t.Context(), claimOf("c", whole("a")))))
}

func TestWhatEndsAConflict(t *testing.T) {
	tests := map[string]func(t *testing.T, l *Ledger) error{
		"its pods are gone": func(_ *testing.T, l *Ledger) error { l.ClearConflict("c"); return nil },
		"unprepare":         func(t *testing.T, l *Ledger) error { return l.DrainClaim(t.Context(), "c") },
		"it gets its devices": func(t *testing.T, l *Ledger) error {
			l.RecordConflict(conflict("c", false, whole("a")))
			return second(l.ReserveClaim(t.Context(), claimOf("c", whole("a"))))
		},
	}
	for name, end := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := openInBubble(t, neverRunningOut)
				l.RecordConflict(conflict("c", true, whole("a")))
				time.Sleep(announceDelay)
				changed := l.Changed()
				must(t, end(t, l))
				if got := l.Conflicts(); len(got) != 0 {
					t.Errorf("conflicts: %+v", got)
				}
				<-changed
			})
		})
	}
}

// A shared claim is asked for by two pods: one call loses, and the other finds the device free before the loss is recorded.
func TestClaimThatHoldsItsDevicesHasNoConflict(t *testing.T) {
	l := openWith(t, neverRunningOut)
	must(t, second(l.ReserveClaim(t.Context(), claimOf("c", whole("a")))))
	l.RecordConflict(conflict("c", true, whole("a")))
	if got := l.Conflicts(); len(got) != 0 {
		t.Errorf("conflicts: %+v", got)
	}
	l.RecordConflict(conflict("c", true, whole("a"), whole("b")))
	if got := l.Conflicts(); len(got) != 1 {
		t.Errorf("half of it is lost: %+v", got)
	}
}

// After a start two claims may have a device. The one that asks again has lost it, although it was recorded first.
func TestConflictOverADeviceOfTwoClaims(t *testing.T) {
	l := openWith(t, neverRunningOut)
	must(t, second(l.ReserveClaim(t.Context(), claimOf("c", whole("a")))))
	if _, both := errors.AsType[*ConflictError](l.Expect(Hold{Holder: Holder{KindClaim, "other"}, Device: whole("a")})); !both {
		t.Fatal("the other claim does not have it too")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	found, lost := errors.AsType[*ConflictError](second(l.ReserveClaim(ctx, claimOf("c", whole("a")))))
	if !lost {
		t.Fatal("the claim got what another one has")
	}
	late := conflict("c", true, whole("a"))
	late.Generation = found.Generation
	l.RecordConflict(late)
	if got := l.Conflicts(); len(got) != 1 || !got[0].PendingEviction {
		t.Errorf("conflicts: %+v", got)
	}
	// A faster call for the claim ends the conflict. A change of the hold's pods by the reconciler is no such call.
	l.ClearConflict("c")
	must(t, l.SetPods(find(l, "c"), []Pod{{UID: "p"}}))
	if l.RecordConflict(late); len(l.Conflicts()) != 1 {
		t.Error("no conflict after a change of pods")
	}
	l.ClearConflict("c")
	must(t, l.Release(find(l, "other")))
	must(t, second(l.ReserveClaim(t.Context(), claimOf("c", whole("a")))))
	l.RecordConflict(late)
	if got := l.Conflicts(); len(got) != 0 {
		t.Errorf("conflicts of a prepared claim: %+v", got)
	}
}

func TestConflictAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := openInBubble(t, neverRunningOut)
		l.RecordConflict(conflict("waits", false, whole("a")))
		first := time.Now()
		time.Sleep(time.Minute)
		l.RecordConflict(conflict("waits", true, whole("a")))
		got := l.Conflicts()
		if len(got) != 1 || !got[0].Since.Equal(first) || !got[0].PendingEviction || got[0].Until().Sub(first) != 90*time.Second {
			t.Errorf("conflicts: %+v", got)
		}
	})
}

func TestPendingEvictionEndsAWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := openInBubble(t, func(Hold) PodState { return Terminating })
		must(t, second(l.ReserveClaim(t.Context(), claimOf("holder", whole("a")))))
		answer := make(chan error)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		go func() { answer <- second(l.ReserveClaim(ctx, claimOf("c", whole("a")))) }()
		synctest.Wait()
		l.RecordConflict(conflict("c", true, whole("a")))
		if err := <-answer; !isPendingEviction(err) {
			t.Error(err)
		}
	})
}

// Pods that are created and deleted while a claim waits must not accumulate.
func TestPodsOfAConflictAreBounded(t *testing.T) {
	l := openWith(t, neverRunningOut)
	l.RecordConflict(conflict("c", true, whole("a")))
	for i := range 1000 { // at most 256 have a claim reserved
		request := claimOf("c", whole("a"))
		request.Pods = []Pod{{UID: fmt.Sprint(i)}}
		if err := second(l.ReserveClaim(t.Context(), request)); !isPendingEviction(err) {
			t.Fatal(err)
		}
	}
	pods := l.Conflicts()[0].Pods
	if last := pods[len(pods)-1].UID; len(pods) > 256 || last != "999" {
		t.Errorf("%d pods, the last is %s", len(pods), last)
	}
}

// A claim that was refused because of another claim shows that the scheduler does not count that one, until Prepare confirms it.
func TestContestedHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := openInBubble(t, neverRunningOut)
		must(t, second(l.ReserveClaim(t.Context(), claimOf("hung", whole("a")))))
		must(t, second(l.ReserveClaim(t.Context(), claimOf("other", whole("b")))))
		if err := second(l.ReserveClaim(t.Context(), claimOf("next", whole("a")))); err == nil {
			t.Fatal("two claims have the device")
		}
		want := func(reasons ...availability.Reason) {
			t.Helper()
			for i, h := range l.Holds() {
				if got := h.Use().Reason; got != reasons[i] {
					t.Errorf("hold of %s: %s, want %s", h, got, reasons[i])
				}
			}
		}
		want(availability.Draining, availability.HeldByClaim)
		changed := l.Changed()
		must(t, second(l.ReserveClaim(t.Context(), claimOf("hung", whole("a")))))
		<-changed
		want(availability.HeldByClaim, availability.HeldByClaim)

		h := l.Holds()[0]
		changed = l.Changed()
		l.SetDeserted(h, true)
		<-changed
		want(availability.Draining, availability.HeldByClaim)
		l.SetDeserted(h, false)
		want(availability.HeldByClaim, availability.HeldByClaim)
		must(t, second(l.ReserveClaim(t.Context(), claimOf("hung", whole("a")))))
		l.SetDeserted(h, true)
		want(availability.HeldByClaim, availability.HeldByClaim)

		if err := second(l.ReserveClaim(t.Context(), claimOf("next", whole("a")))); err == nil {
			t.Fatal("two claims have the device")
		}
		want(availability.Draining, availability.HeldByClaim)
		changed = l.Changed()
		l.SetCounted(l.Holds()[0])
		<-changed
		want(availability.HeldByClaim, availability.HeldByClaim)
	})
}
