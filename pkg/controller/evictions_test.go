// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

// round is a claim of an owner's next pod that lost a device.
type round struct {
	owner, device string
}

// play lets the claims lose one after the other, every second, until each pod is evicted, and returns when that was.
func play(t *testing.T, w *world, h *healer, rounds []round) (at []time.Duration) {
	t.Helper()
	began := w.clock
	for i, r := range rounds {
		name := fmt.Sprint("r", len(w.writes), "-", i)
		pod := newPod(name)
		pod.OwnerReferences[0].UID = types.UID(r.owner)
		for _, o := range []client.Object{newClaim(name, r.device), pod} {
			if err := w.client.Create(t.Context(), o); err != nil {
				t.Fatal(err)
			}
		}
		w.set(losing(pendingEviction(name, r.device)))
		for w.writes["eviction pod-"+name] == 0 {
			if w.clock.Sub(began) > time.Hour {
				t.Fatalf("round %d: not evicted, so far %v", i, at)
			}
			w.clock = w.clock.Add(time.Second)
			w.twice(h, "node-1")
		}
		at = append(at, w.clock.Sub(began))
	}
	return at
}

// An owner whose pods get the same device again and again loses them less and less often; others do not wait for that.
func TestEvictionsOfOneOwnerAreBounded(t *testing.T) {
	const s = time.Second
	w := newWorld(t, interceptor.Funcs{}, gpuNode())
	h := w.healer()
	same := slices.Repeat([]round{{"rs", "gpu-0"}}, 8)
	want := []time.Duration{1 * s, 11 * s, 31 * s, 71 * s, 151 * s, 311 * s, 611 * s, 911 * s}
	if got := play(t, w, h, same); !slices.Equal(got, want) {
		t.Errorf("evicted at %v, want %v", got, want)
	}
	if got := play(t, w, h, []round{{"rs", "gpu-1"}, {"other", "gpu-0"}}); !slices.Equal(got, []time.Duration{s, 2 * s}) {
		t.Errorf("another device, and another owner: at %v", got)
	}
	w.clock = w.clock.Add(evictionIntervalMax + evictionForget)
	if got := play(t, w, h, []round{{"rs", "gpu-0"}, {"rs", "gpu-0"}}); !slices.Equal(got, []time.Duration{s, 11 * s}) {
		t.Errorf("after a while without a loss: at %v", got)
	}
	if len(h.evictions.losses) != 1 {
		t.Errorf("remembers %v", h.evictions.losses)
	}
}

// What was not evicted does not count: a budget that refuses, or a pod that has changed since it was read.
func TestRefusedEvictionsDoNotCount(t *testing.T) {
	answer := error(apierrors.NewTooManyRequests("no disruption allowed", 10))
	w := newWorld(t, interceptor.Funcs{
		SubResourceCreate: func(context.Context, client.Client, string, client.Object, client.Object, ...client.SubResourceCreateOption) error {
			return answer
		},
	}, gpuNode(losing(pendingEviction("a", "gpu-0"))), newClaim("a", "gpu-0"), newPod("a"))
	h := w.healer()
	w.twice(h, "node-1")
	answer = apierrors.NewConflict(corev1.Resource("pods"), "pod-a", nil)
	for range 2 {
		if _, err := h.Reconcile(t.Context(), requestFor("node-1")); !apierrors.IsConflict(err) {
			t.Fatal(err)
		}
	}
	if len(h.evictions.losses) > 0 {
		t.Errorf("remembers %v", h.evictions.losses)
	}
	answer = nil
	w.twice(h, "node-1")
	if n := w.writes["eviction pod-a"]; n != 5 || len(h.evictions.losses) != 1 {
		t.Errorf("%d attempts, remembers %v", n, h.evictions.losses)
	}
}

func TestEvictionsAreForgotten(t *testing.T) {
	now := time.Unix(0, 0)
	e := newEvictions(func() time.Time { return now })
	for i := range 2 * evictionsMax {
		now = now.Add(time.Millisecond)
		e.record(map[loss]bool{{types.UID(fmt.Sprint(i)), "node-1", "gpu-0"}: true})
	}
	last := map[loss]bool{{types.UID(fmt.Sprint(2*evictionsMax - 1)), "node-1", "gpu-0"}: true}
	first := map[loss]bool{{types.UID(fmt.Sprint(evictionsMax - 1)), "node-1", "gpu-0"}: true}
	if len(e.losses) != evictionsMax || e.wait(last) != evictionInterval || e.wait(first) != 0 {
		t.Errorf("%d losses, the last waits %v, one before the others %v", len(e.losses), e.wait(last), e.wait(first))
	}
}

func TestLossesOf(t *testing.T) {
	a, b := newPod("a"), newPod("b")
	b.OwnerReferences = append([]metav1.OwnerReference{{UID: "no controller"}}, b.OwnerReferences...)
	got := lossesOf(EvictionPlan{Conflict: pendingEviction("a", "gpu-0", "gpu-1"), Evict: []*corev1.Pod{a, b}}, "node-1")
	if len(got) != 2 || !got[loss{"uid-rs", "node-1", "gpu-0"}] || !got[loss{"uid-rs", "node-1", "gpu-1"}] {
		t.Errorf("%v", got)
	}
}
