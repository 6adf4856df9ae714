// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

func unhealthy(minor int, reason string) withdrawal {
	return withdrawal{use: use{Device: refOf(minor), Reason: availability.Unhealthy}, health: device.Health{Reason: reason}}
}

func lost(minor int) withdrawal { return unhealthy(minor, device.ReasonLost) }

func heldByPod(minor int) withdrawal {
	return withdrawal{use: use{Device: refOf(minor), Reason: availability.HeldByPod}}
}

func draining(minor int) withdrawal {
	return withdrawal{use: use{Device: refOf(minor), Reason: availability.Draining}}
}

func TestFindWithdrawn(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	inv := machine(8)
	inv.GPUs[6].Health = device.Health{Reason: device.ReasonLost}
	inv.GPUs[7].Health = device.Health{Reason: device.ReasonNoNode}
	hold := func(minor int, kind ledger.Kind, state ledger.State, age time.Duration, unreadable bool) ledger.Hold {
		return ledger.Hold{Holder: ledger.Holder{Kind: kind, ID: "x"}, Device: device.Ref{GPU: uuidOf(minor)}, State: state, Began: now.Add(-age), Unreadable: unreadable}
	}
	deserted, contested, allocated := hold(0, ledger.KindClaim, ledger.StateHeld, 0, false), hold(1, ledger.KindClaim, ledger.StateHeld, 0, false),
		hold(2, ledger.KindClaim, ledger.StateHeld, 0, false)
	deserted.Deserted, contested.Contested, allocated.Contested, allocated.Holder.ID = true, true, true, "allocated"
	overdue, _ := findWithdrawn(inv, []ledger.Hold{deserted, contested, allocated}, []v1alpha1.AllocatedClaim{{UID: "allocated"}}, now)
	for minor, uncounted := range []bool{true, true, false} {
		want := draining(minor)
		want.uncounted = uncounted
		if !slices.Contains(overdue, want) {
			t.Errorf("an overdue hold on gpu-%d: %v", minor, overdue)
		}
	}
	got, next := findWithdrawn(inv, []ledger.Hold{
		hold(0, ledger.KindClaim, ledger.StateHeld, time.Hour, false),
		hold(1, ledger.KindClaim, ledger.StateRestored, time.Hour, false),
		hold(2, ledger.KindClaim, ledger.StateDraining, time.Second, false),
		hold(3, ledger.KindClaim, ledger.StateDraining, 2*time.Second, false),
		hold(4, ledger.KindClaim, ledger.StateHeld, 0, true),
		hold(5, ledger.KindPod, ledger.StateRestored, 0, false),
		hold(6, ledger.KindPod, ledger.StateHeld, 0, false),
		hold(6, ledger.KindPod, ledger.StateDraining, 0, false),
	}, nil, now)
	want := []withdrawal{draining(3), draining(4), heldByPod(5), heldByPod(6), lost(6), unhealthy(7, device.ReasonNoNode)}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(withdrawal{})); diff != "" {
		t.Error(diff)
	}
	if want := now.Add(time.Second); !next.Equal(want) {
		t.Errorf("next change at %v, want %v", next, want)
	}
}

func TestWithdrawAtOnceAndReturnLate(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	held, lost := []withdrawal{heldByPod(0)}, []withdrawal{lost(0)}
	d := debounce{delay: 200 * time.Millisecond}
	steps := []struct {
		at      time.Duration
		current []withdrawal
		want    []withdrawal
		next    time.Duration
	}{
		{0, nil, nil, 0},
		{10, held, held, 0}, // withdrawn
		{20, nil, held, 220},
		{100, nil, held, 220},
		{150, held, held, 0},  // taken again: no write
		{160, nil, held, 360}, //
		{170, lost, lost, 0},  // another reason counts at once
		{180, nil, lost, 380}, //
		{379, nil, lost, 380}, //
		{380, nil, nil, 0},    //
		{390, held, held, 0},  // withdrawn
		{400, held, held, 0},  //
	}
	withdrawals := 0
	for _, step := range steps {
		got, next := d.update(start.Add(step.at*time.Millisecond), step.current)
		if diff := cmp.Diff(step.want, got, cmp.AllowUnexported(withdrawal{})); diff != "" {
			t.Errorf("at %d: %s", step.at, diff)
		}
		want := time.Time{}
		if step.next != 0 {
			want = start.Add(step.next * time.Millisecond)
		}
		if !next.Equal(want) {
			t.Errorf("at %d: next %v, want %v", step.at, next, want)
		}
		withdrawals += d.withdrawals
	}
	if withdrawals != 2 {
		t.Errorf("%d withdrawals, want 2", withdrawals)
	}
}
