// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

func TestFindObstacles(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	inv := machine(8)
	inv.GPUs[6].Health = device.Health{Reason: device.ReasonLost}
	inv.GPUs[7].Health = device.Health{Reason: device.ReasonNoNode}
	hold := func(minor int, kind ledger.Kind, state ledger.State, age time.Duration, unreadable bool) ledger.Hold {
		return ledger.Hold{Holder: ledger.Holder{Kind: kind, ID: "x"}, Device: device.Ref{GPU: uuidOf(minor)}, State: state, Since: now.Add(-age), Unreadable: unreadable}
	}
	got, next := findObstacles(inv, []ledger.Hold{
		hold(0, ledger.KindClaim, ledger.StateHeld, time.Hour, false),
		hold(1, ledger.KindClaim, ledger.StateRestored, time.Hour, false),
		hold(2, ledger.KindClaim, ledger.StateDraining, drainGrace-time.Second, false),
		hold(3, ledger.KindClaim, ledger.StateDraining, drainGrace, false),
		hold(4, ledger.KindClaim, ledger.StateHeld, 0, true),
		hold(5, ledger.KindPod, ledger.StateRestored, 0, false),
		hold(6, ledger.KindPod, ledger.StateHeld, 0, false),
		hold(6, ledger.KindPod, ledger.StateDraining, 0, false),
	}, now)
	want := map[device.Ref][]obstacle{
		refOf(3): {{key: TaintDraining, value: "true"}},
		refOf(4): {{key: TaintDraining, value: "true"}},
		refOf(5): {{key: TaintHeldByPod, value: "true"}},
		refOf(6): {{key: TaintHeldByPod, value: "true"}, {key: TaintUnhealthy, value: "Lost"}},
		refOf(7): {{key: TaintUnhealthy, value: "NoDeviceNode"}},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(obstacle{})); diff != "" {
		t.Error(diff)
	}
	if want := now.Add(time.Second); !next.Equal(want) {
		t.Errorf("next look at %v, want %v", next, want)
	}
}

func TestOffersWithdrawAtOnceAndReturnLate(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	held := map[device.Ref][]obstacle{refOf(0): {{key: TaintHeldByPod, value: "true"}}}
	lost := map[device.Ref][]obstacle{refOf(0): {{key: TaintUnhealthy, value: "Lost"}}}
	o := offers{returnDelay: 200 * time.Millisecond}
	steps := []struct {
		at      time.Duration
		current map[device.Ref][]obstacle
		want    map[device.Ref][]obstacle
		next    time.Duration
	}{
		{0, nil, map[device.Ref][]obstacle{}, 0},
		{10, held, held, 0}, // withdrawn
		{20, nil, held, 220},
		{100, nil, held, 220},
		{150, held, held, 0},                       // taken again: the scheduler never noticed
		{160, nil, held, 360},                      //
		{170, lost, lost, 0},                       // another reason counts at once
		{180, nil, lost, 380},                      //
		{379, nil, lost, 380},                      //
		{380, nil, map[device.Ref][]obstacle{}, 0}, //
		{390, held, held, 0},                       // withdrawn
		{400, held, held, 0},                       //
	}
	withdrawals := 0
	for _, step := range steps {
		got, next := o.settle(start.Add(step.at*time.Millisecond), step.current)
		if diff := cmp.Diff(step.want, got, cmp.AllowUnexported(obstacle{})); diff != "" {
			t.Errorf("at %d: %s", step.at, diff)
		}
		want := time.Time{}
		if step.next != 0 {
			want = start.Add(step.next * time.Millisecond)
		}
		if !next.Equal(want) {
			t.Errorf("at %d: next %v, want %v", step.at, next, want)
		}
		withdrawals += o.withdrawals
	}
	if withdrawals != 2 {
		t.Errorf("%d withdrawals, want 2", withdrawals)
	}
}
