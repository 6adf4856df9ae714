// SPDX-License-Identifier: Apache-2.0

package ledger_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

type podStates map[string]ledger.PodState

func (v podStates) PodState(h ledger.Hold) ledger.PodState { return v[h.Holder.ID] }
func (podStates) Started(ledger.Hold, []ledger.Hold) bool  { return false }
func (podStates) Reuses(ledger.Hold) bool                  { return true }

func open(t *testing.T, dir string, e ledger.PodStates) *ledger.Ledger {
	t.Helper()
	l, err := ledger.Open(t.Context(), ledger.Options{Dir: dir, BootID: "boot", PodStates: e})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func claim(uid string, gpus ...string) ledger.ClaimRequest {
	r := ledger.ClaimRequest{UID: uid, Namespace: "ns", Name: uid}
	for _, gpu := range gpus {
		r.Devices = append(r.Devices, device.Ref{GPU: gpu})
	}
	return r
}

func limit(gpu string) []ledger.PodRequest {
	return []ledger.PodRequest{{ID: gpu, Resource: "nvidia.com/gpu", Device: device.Ref{GPU: gpu}}}
}

func TestEitherAPIExcludesTheOther(t *testing.T) {
	l := open(t, t.TempDir(), podStates{})
	if _, err := l.ReserveClaim(t.Context(), claim("c1", "a", "b")); err != nil {
		t.Fatal(err)
	}
	var conflict *ledger.ConflictError
	if err := l.ReservePod(limit("a")); !errors.As(err, &conflict) || conflict.Holds[0].Name != "c1" {
		t.Errorf("limit on a claimed GPU: %v", err)
	}
	if err := l.ReservePod(limit("c")); err != nil {
		t.Fatal(err)
	}
	if _, err := l.ReserveClaim(t.Context(), claim("c2", "d", "c")); !errors.As(err, &conflict) {
		t.Errorf("claim on a GPU held by a limit: %v", err)
	}
	if got := len(l.Holds()); got != 3 {
		t.Errorf("%d holds, want 3: the refused claim must not keep d", got)
	}
}

func TestClaimWaitsForADrainingHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := open(t, t.TempDir(), podStates{"c1": ledger.Orphaned})
		if _, err := l.ReserveClaim(t.Context(), claim("c1", "a")); err != nil {
			t.Fatal(err)
		}
		if err := l.DrainClaim(t.Context(), "c1"); err != nil {
			t.Fatal(err)
		}
		held := l.Holds()[0]
		if held.State != ledger.StateDraining {
			t.Fatalf("state %s after Unprepare with a running pod", held.State)
		}
		done := make(chan error, 1)
		go func() {
			_, err := l.ReserveClaim(t.Context(), claim("c2", "a"))
			done <- err
		}()
		synctest.Wait()
		if len(done) > 0 {
			t.Fatalf("did not wait: %v", <-done)
		}
		if err := l.Release(held); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestUnprepareCancelsAWaitingPrepare(t *testing.T) {
	l := open(t, t.TempDir(), podStates{"c1": ledger.Terminating})
	if _, err := l.ReserveClaim(t.Context(), claim("c1", "a")); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		_, err := l.ReserveClaim(context.Background(), claim("c2", "a"))
		done <- err
	}()
	for {
		if err := l.DrainClaim(t.Context(), "c2"); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-done:
			if !errors.Is(err, ledger.ErrCancelled) {
				t.Error(err)
			}
			return
		default:
		}
	}
}

func TestHoldsSurviveTheProcess(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir, podStates{})
	if _, err := l.ReserveClaim(t.Context(), claim("c1", "a")); err != nil {
		t.Fatal(err)
	}
	if err := l.ReservePod(limit("b")); err != nil {
		t.Fatal(err)
	}
	if _, err := ledger.Open(t.Context(), ledger.Options{Dir: dir, BootID: "boot", PodStates: podStates{}}); !errors.Is(err, ledger.ErrLocked) {
		t.Fatalf("second owner: %v", err)
	}
	before := l.Holds()
	l.Close()
	l = open(t, dir, podStates{})
	after := l.Holds()
	if len(after) != len(before) {
		t.Fatalf("%v became %v", before, after)
	}
	for i := range after {
		if after[i].Holder != before[i].Holder || after[i].State != before[i].State || after[i].Generation != before[i].Generation {
			t.Errorf("%v became %v", before[i], after[i])
		}
	}
	l.Close()
	next, err := ledger.Open(t.Context(), ledger.Options{Dir: dir, BootID: "next", PodStates: podStates{}})
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	if holds := next.Holds(); len(holds) != 0 {
		t.Errorf("holds of an earlier boot: %v", holds)
	}
}

func TestAReusedLimitOutlivesAnOldRelease(t *testing.T) {
	v := podStates{}
	l := open(t, t.TempDir(), v)
	if err := l.ReservePod(limit("a")); err != nil {
		t.Fatal(err)
	}
	old := l.Holds()[0]
	if err := l.ReservePod(limit("a")); err != nil {
		t.Fatalf("reuse: %v", err)
	}
	if err := l.Release(old); err != nil {
		t.Fatal(err)
	}
	if len(l.Holds()) != 1 {
		t.Error("a release for the earlier pod freed the GPU of the present one")
	}
	v["a"] = ledger.Orphaned
	var conflict *ledger.ConflictError
	if err := l.ReservePod(limit("a")); !errors.As(err, &conflict) {
		t.Errorf("reuse of the GPU of an orphaned pod: %v", err)
	}
}

// started says of every pod that it runs.
type started struct{ podStates }

func (started) Started(ledger.Hold, []ledger.Hold) bool { return true }

// TestARunningPodAsksForNothing: what has a process is not the pod that is being admitted, whatever the API server has told
// of it so far.
func TestARunningPodAsksForNothing(t *testing.T) {
	l := open(t, t.TempDir(), started{})
	if err := l.ReservePod(limit("a")); err != nil {
		t.Fatal(err)
	}
	var conflict *ledger.ConflictError
	if err := l.ReservePod(limit("a")); !errors.As(err, &conflict) {
		t.Errorf("a second pod got the GPU of one that runs: %v", err)
	}
}
