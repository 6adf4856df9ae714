// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/test/oracle"
)

func TestTheLastLine(t *testing.T) {
	c := Counters{
		Ops: 5000, PlacedClaims: 1, PlacedPods: 2, Contended: 3, Kills: 4, Conflicts: 5, Healed: 6, FailedAdmissions: 7,
		HealTimes:  []time.Duration{3 * time.Second, 300 * time.Millisecond, 400 * time.Millisecond},
		DrainTimes: []time.Duration{2 * time.Second, 100 * time.Millisecond}, StruckDrains: []time.Duration{11 * time.Second},
	}
	line := "torture: seed=9 ops=5000 placed_claims=1 placed_limits=2 contended=3 kills=4 doubly_owned=0 stuck=0 leaked=0 " +
		"conflicts=5 healed=6 heal_p50=400ms heal_p99=3s drains=2 drain_p50=100ms drain_p99=2s failed_admissions=7 evicted_by_taint=0 wrongly_evicted=0 failed_unusable=0 undecided=0"
	if got := c.Line(9); got != line {
		t.Errorf("got\n%s\nwant\n%s", got, line)
	}
	want := "holds after their last pod's end, in peace: 2 p50=100ms p99=2s max=2s; met by a fault: 1 p50=11s p99=11s max=11s; " +
		"failed admissions for 1000 contended placements: 2333"
	if got := c.DrainLine(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	c.MIG, c.PartitionsMade, c.PartitionsDestroyed = true, 8, 7
	if got := c.Line(9); got != line+" partitions_made=8 partitions_destroyed=7 unmanaged_changed=0" {
		t.Errorf("got\n%s", got)
	}
	c.MIG, c.Sharing, c.PlacedShares, c.PlacedEqual, c.PlacedUnlimited, c.PlacedReplicas = false, true, 8, 6, 5, 7
	if got := c.Line(9); got != line+" placed_shares=8 placed_equal=6 placed_unlimited=5 placed_replicas=7" {
		t.Errorf("got\n%s", got)
	}
}

func TestResult(t *testing.T) {
	good := Counters{PlacedClaims: 1, PlacedPods: 1, Contended: 1, Kills: 1}
	if err := good.Err(); err != nil {
		t.Error(err)
	}
	for _, spoil := range []func(*Counters){
		func(c *Counters) { c.DoublyOwned = 1 }, func(c *Counters) { c.Stuck = 1 }, func(c *Counters) { c.Leaked = 1 },
		func(c *Counters) { c.UnmanagedChanged = 1 }, func(c *Counters) { c.WronglyEvicted = 1 }, func(c *Counters) { c.FailedUnusable = 1 },
	} {
		bad := good
		spoil(&bad)
		if err := bad.Err(); !errors.Is(err, ErrFaults) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	sharing := func(spoil func(*Counters)) func(*Counters) {
		return func(c *Counters) {
			c.Sharing, c.PlacedShares, c.PlacedEqual, c.PlacedUnlimited, c.PlacedReplicas = true, 1, 1, 1, 1
			spoil(c)
		}
	}
	all := good
	if sharing(func(*Counters) {})(&all); all.Err() != nil {
		t.Error(all.Err())
	}
	for _, spoil := range []func(*Counters){
		func(c *Counters) { c.PlacedClaims = 0 }, func(c *Counters) { c.PlacedPods = 0 },
		func(c *Counters) { c.Contended = 0 }, func(c *Counters) { c.Kills = 0 }, func(c *Counters) { c.MIG = true },
		sharing(func(c *Counters) { c.PlacedShares = 0 }), sharing(func(c *Counters) { c.PlacedReplicas = 0 }),
		func(c *Counters) { c.Undecided = 1 },
		sharing(func(c *Counters) { c.PlacedEqual = 0 }), sharing(func(c *Counters) { c.PlacedUnlimited = 0 }),
	} {
		empty := good
		spoil(&empty)
		if err := empty.Err(); !errors.Is(err, ErrNothingTested) {
			t.Errorf("%+v: %v", empty, err)
		}
	}
}

// TestHealsAreTimedWhereTheyMayBe: apart with a fault at work, and not without a free GPU.
func TestHealsAreTimedWhereTheyMayBe(t *testing.T) {
	var counted statistics
	now := time.Now()
	counted.healed(now.Add(-time.Second), now, now, true)
	counted.healed(now.Add(-time.Second), now, now, false)
	ended := counted.faultBegins(time.Minute)
	counted.healed(now.Add(-time.Second), now, time.Now().Add(time.Second), true)
	ended()
	counted.healed(time.Now().Add(time.Second), now, time.Now().Add(2*time.Second), true)
	counted.healed(time.Now().Add(time.Minute+time.Second), now, time.Now().Add(time.Minute+3*time.Second), true)
	if c := counted.now(); c.Healed != 5 || len(c.HealTimes) != 2 || len(c.MadeTimes) != 2 || len(c.StruckTimes) != 2 || c.Faults != 1 {
		t.Errorf("counted %+v", c)
	}
}

func TestCountersOutliveTheProcessesThatCount(t *testing.T) {
	counted := statistics{counters: Counters{Conflicts: 10}}
	s := scraper{statistics: &counted, last: map[string]reading{}}
	for _, step := range []struct {
		address string
		now     reading
		want    int
	}{
		{"a", reading{started: 1, conflicts: 3}, 13},
		{"a", reading{started: 1, conflicts: 5}, 15},
		{"b", reading{started: 1, conflicts: 1}, 16},
		{"a", reading{started: 2, conflicts: 6}, 22},
		{"a", reading{started: 2, conflicts: 6}, 22},
		{"a", reading{conflicts: 1}, 23},
	} {
		s.count(step.address, step.now)
		if got := counted.now().Conflicts; got != step.want {
			t.Errorf("after %+v: %d conflicts, not %d", step, got, step.want)
		}
	}
}

func TestReadingMetrics(t *testing.T) {
	text := "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 17\n" +
		"# TYPE tandem_prepare_conflicts_total counter\ntandem_prepare_conflicts_total 2\n" +
		"# TYPE tandem_allocate_conflicts_total counter\ntandem_allocate_conflicts_total{a=\"b\"} 3\ntandem_allocate_conflicts_total{a=\"c\"} 4\n"
	if got, err := parse(strings.NewReader(text)); err != nil || got != (reading{17, 9}) {
		t.Errorf("read %+v: %v", got, err)
	}
}

// TestContended: a pod that waits while the other API has what it lacks counts once.
func TestContended(t *testing.T) {
	var counted statistics
	two := room{enabled: map[int]bool{2: true, 3: true, 4: true, 5: true, 6: true, 7: true}}
	w := &watch{room: func() room { return two }, statistics: &counted, podHistories: map[string]*podHistory{}, seen: map[string][]oracle.Device{}}
	waiting := &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodPending}}
	w.podHistories["claim"] = &podHistory{pod: waiting, ask: ask{api: oracle.Claim, gpus: 1}}
	w.podHistories["limits"] = &podHistory{pod: waiting, ask: ask{api: oracle.Limits, gpus: 2}}
	holder := func(api oracle.API, gpus ...uint32) {
		w.podHistories["holder"] = &podHistory{pod: &corev1.Pod{}, ask: ask{api: api, gpus: len(gpus)}, placed: true}
		w.seen = map[string][]oracle.Device{}
		for _, g := range gpus {
			w.seen["holder"] = append(w.seen["holder"], gpu(g))
		}
	}
	for _, step := range []struct {
		api  oracle.API
		gpus []uint32
		want int
	}{
		{oracle.Limits, []uint32{0}, 0},    // one is free for the claim, and its own API has what the limits lack
		{oracle.Limits, []uint32{0, 1}, 1}, // the claim waits for limits
		{oracle.Limits, []uint32{0, 1}, 1},
		{oracle.Claim, []uint32{0}, 2}, // the limits wait for a claim
	} {
		holder(step.api, step.gpus...)
		w.compare(two)
		if got := counted.now().Contended; got != step.want {
			t.Errorf("%+v: contended %d", step, got)
		}
	}
}
