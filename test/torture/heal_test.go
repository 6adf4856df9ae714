// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"io"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// healing describes the conflicts some seconds after the race.
type healing struct {
	*heals
	statistics *statistics
	pods       map[string]*podHistory
	began      time.Time
}

func newHealing(t *testing.T) *healing {
	trace, err := openTrace(t.TempDir(), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(trace.close)
	h := &healing{statistics: &statistics{}, pods: map[string]*podHistory{}, began: time.Now().Add(-time.Minute)}
	h.heals = &heals{statistics: h.statistics, trace: trace, known: map[string]bool{}, userOf: func(_, claim string) *podHistory { return h.pods[claim] }}
	return h
}

func (h *healing) after(d time.Duration) time.Time { return h.began.Add(d) }

// pod is one of a Deployment's, with a claim of its own name.
func (h *healing) pod(claim, owner string, made time.Duration) *podHistory {
	l := &podHistory{
		pod:   &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: claim, Labels: map[string]string{workloadLabel: "of-" + owner}}},
		owner: owner, replaced: true, since: h.after(made),
	}
	h.pods[claim] = l
	return l
}

func (h *healing) recordConflict(at time.Duration, pendingEviction bool, claims ...string) {
	var entries []any
	for _, claim := range claims {
		entries = append(entries, map[string]any{
			"uid": claim, "namespace": "n", "name": claim, "since": h.after(at).Format(time.RFC3339Nano), "pendingEviction": pendingEviction,
		})
	}
	h.seen(&unstructured.Unstructured{Object: map[string]any{"status": map[string]any{"conflicts": entries}}})
}

func (h *healing) want(t *testing.T, healed int, times ...time.Duration) {
	t.Helper()
	c := h.statistics.now()
	for i := range c.HealTimes {
		c.HealTimes[i] = c.HealTimes[i].Round(time.Millisecond)
	}
	if c.Healed != healed || !slices.Equal(c.HealTimes, times) {
		t.Errorf("%d healed in %s, not %d in %s", c.Healed, []time.Duration(c.HealTimes), healed, times)
	}
}

// TestALossIsHealedByTheOwnersNextPod, and by nothing that was there before.
func TestALossIsHealedByTheOwnersNextPod(t *testing.T) {
	h := newHealing(t)
	first := h.pod("lost", "owner", 0)
	h.pod("bare", "", 0)
	h.pod("waits", "owner", 0)
	h.recordConflict(time.Second, true, "lost", "bare", "unknown")
	h.recordConflict(time.Second, false, "waits")
	h.recordConflict(time.Second, true, "lost")
	if c := h.statistics.now(); c.PendingEviction != 1 {
		t.Fatalf("%d pending evictions", c.PendingEviction)
	}
	h.placed(first, h.after(2*time.Second))
	h.placed(h.pod("", "other", 1500*time.Millisecond), h.after(2*time.Second))
	h.want(t, 0)
	next := h.pod("next", "owner", 1500*time.Millisecond)
	h.placed(next, h.after(1800*time.Millisecond))
	h.placed(next, h.after(1900*time.Millisecond))
	h.want(t, 1, 800*time.Millisecond)
	if made := h.statistics.now().MadeTimes; len(made) != 1 || made[0].Round(time.Millisecond) != 500*time.Millisecond {
		t.Errorf("the next pod was made after %s", []time.Duration(made))
	}
}

// TestALossGoesOnWithTheNextPodThatLoses: it is healed once, and timed from where it began.
func TestALossGoesOnWithTheNextPodThatLoses(t *testing.T) {
	h := newHealing(t)
	h.pod("first", "owner", 0)
	h.recordConflict(time.Second, true, "first")
	h.pod("second", "owner", 2*time.Second)
	h.recordConflict(3*time.Second, true, "second")
	h.placed(h.pod("third", "owner", 4*time.Second), h.after(5*time.Second))
	h.want(t, 1, 4*time.Second)
	h.placed(h.pod("scaled", "owner", 30*time.Second), h.after(31*time.Second))
	h.want(t, 1, 4*time.Second)
}

// TestWhatDelaysAHealAndIsNotOurs: users who change the workload, and a node that is full, unless there is room for all.
func TestWhatDelaysAHealAndIsNotOurs(t *testing.T) {
	h := newHealing(t)
	h.pod("a", "a", 0)
	h.pod("b", "b", 0)
	h.pod("c", "c", 0)
	h.recordConflict(time.Second, true, "a", "b", "c")
	h.noteUserChange("of-a")
	h.noteUserChange("")
	h.placed(h.pod("", "a", 2*time.Second), h.after(3*time.Second))
	waited := h.pod("", "b", 2*time.Second)
	waited.unschedulable = true
	h.placed(waited, h.after(3*time.Second))
	h.want(t, 2)
	h.room(true)
	waited = h.pod("", "c", 2*time.Second)
	waited.unschedulable = true
	h.placed(waited, h.after(4*time.Second))
	h.want(t, 3, 3*time.Second)
}
