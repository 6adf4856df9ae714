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

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
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
		pod.CreationTimestamp = metav1.NewTime(w.clock.Add(time.Second))
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
	w.clock = w.clock.Add(10 * time.Minute)
	if got := play(t, w, h, []round{{"rs", "gpu-0"}, {"rs", "gpu-0"}}); !slices.Equal(got, []time.Duration{s, 11 * s}) {
		t.Errorf("after a while without a loss: at %v", got)
	}
	if len(h.evictions.losses) != 1 {
		t.Errorf("remembers %v", h.evictions.losses)
	}
}

// Pods of one owner that lose one device together, as with memory shares, do not wait for each other. Their successors do.
func TestEvictionsOfOneLoss(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode())
	h := w.healer()
	lose := func(wave string) (evicted int) {
		var conflicts []v1alpha1.ConflictingClaim
		for i := range 8 {
			name := fmt.Sprint(wave, i)
			pod := newPod(name)
			pod.CreationTimestamp = metav1.NewTime(w.clock)
			for _, o := range []client.Object{newClaim(name, "gpu-0"), pod} {
				if err := w.client.Create(t.Context(), o); err != nil {
					t.Fatal(err)
				}
			}
			conflicts = append(conflicts, pendingEviction(name, "gpu-0"))
		}
		w.set(losing(conflicts...))
		w.clock = w.clock.Add(2 * time.Second)
		w.once(h, requestFor("node-1").NamespacedName)
		for i := range 8 {
			evicted += w.writes[fmt.Sprint("eviction pod-", wave, i)]
		}
		return evicted
	}
	if n := lose("a"); n != 8 {
		t.Errorf("%d of 8 evicted", n)
	}
	w.clock = w.clock.Add(time.Second)
	if n := lose("b"); n != 0 {
		t.Errorf("%d evicted again after three seconds", n)
	}
	w.clock = w.clock.Add(10 * time.Second)
	w.once(h, requestFor("node-1").NamespacedName)
	if n := w.writes["eviction pod-b0"] + w.writes["eviction pod-b7"]; n != 2 {
		t.Errorf("%d of 2 evicted after the interval", n)
	}
	if v := h.evictions.losses[loss{"uid-rs", "node-1", "gpu-0"}]; v == nil || v.interval != 40*time.Second {
		t.Errorf("16 pods in two waves: %+v", v)
	}
}

// What was not evicted does not count: a budget that refuses, or a pod that has changed since it was read.
func TestRefusedEvictionsDoNotCount(t *testing.T) {
	answer := error(apierrors.NewTooManyRequests("no disruption allowed", 10))
	w := newWorld(t, interceptor.Funcs{
		SubResourceCreate: func(ctx context.Context, c client.Client, sub string, obj, subObj client.Object, opts ...client.SubResourceCreateOption) error {
			if answer != nil {
				return answer
			}
			return c.SubResource(sub).Create(ctx, obj, subObj, opts...)
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
	const most = 4096 // 2 MiB
	for i := range 2 * most {
		now = now.Add(time.Millisecond)
		e.record(map[loss]time.Time{{types.UID(fmt.Sprint(i)), "node-1", "gpu-0"}: now})
	}
	last := map[loss]time.Time{{types.UID(fmt.Sprint(2*most - 1)), "node-1", "gpu-0"}: now.Add(time.Second)}
	first := map[loss]time.Time{{types.UID(fmt.Sprint(most - 1)), "node-1", "gpu-0"}: now.Add(time.Second)}
	if len(e.losses) != most || e.wait(last) != 10*time.Second || e.wait(first) != 0 {
		t.Errorf("%d losses, the last waits %v, one before the others %v", len(e.losses), e.wait(last), e.wait(first))
	}
}

func TestLossesOf(t *testing.T) {
	a, b := newPod("a"), newPod("b")
	b.OwnerReferences = append([]metav1.OwnerReference{{UID: "no controller"}}, b.OwnerReferences...)
	newest := time.Unix(1700000000, 0)
	a.CreationTimestamp = metav1.NewTime(newest)
	got := lossesOf("node-1", []string{"gpu-0", "gpu-1"}, a, b)
	if len(got) != 2 || !got[loss{"uid-rs", "node-1", "gpu-0"}].Equal(newest) || !got[loss{"uid-rs", "node-1", "gpu-1"}].Equal(newest) {
		t.Errorf("%v", got)
	}
}
