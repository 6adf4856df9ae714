// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// The API server has no pod any more for a claim's hold, whatever still runs on the node.
func TestDeserted(t *testing.T) {
	held := claimSince(time.Minute, ledger.StateHeld, podA)
	older := claimSince(2*time.Hour, ledger.StateHeld, podA) // the first list was an hour ago
	for name, test := range map[string]struct {
		hold ledger.Hold
		pods []*corev1.Pod
		gone []*corev1.Pod
		want bool
	}{
		"its pod runs":                      {hold: held, pods: []*corev1.Pod{pod(podA, "a", ranOnce)}},
		"its pod is being deleted":          {hold: held, pods: []*corev1.Pod{pod(podA, "a", beingDeleted)}},
		"its pod was force-deleted":         {hold: held, gone: []*corev1.Pod{pod(podA, "a", ranOnce)}, want: true},
		"its pod failed":                    {hold: held, pods: []*corev1.Pod{pod(podA, "a", phase(corev1.PodFailed))}, want: true},
		"another pod came to the claim":     {hold: held, gone: []*corev1.Pod{pod(podA, "a")}, pods: []*corev1.Pod{pod(podB, "b", names("one"))}},
		"another claim has another pod":     {hold: held, gone: []*corev1.Pod{pod(podA, "a")}, pods: []*corev1.Pod{pod(podB, "b", names("two"))}, want: true},
		"its pod is unknown":                {hold: held},
		"its pod was deleted before":        {hold: older, want: true},
		"restored, its pod was deleted":     {hold: claimSince(0, ledger.StateRestored, podA), want: true},
		"no pod is known to use the device": {hold: claimSince(time.Minute, ledger.StateHeld)},
	} {
		t.Run(name, func(t *testing.T) {
			p := known(t, newTree(t), test.pods...)
			for _, gone := range test.gone {
				p.add(t, gone)
				p.forget(gone)
			}
			if got := p.Deserted(test.hold); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
			p.synced = time.Time{}
			if p.Deserted(test.hold) {
				t.Error("before the first list")
			}
		})
	}
}

// The pods of a claim that nothing unprepares: kubelet keeps their cgroups, and the API server keeps them.
func TestUses(t *testing.T) {
	for name, c := range map[string]struct {
		pod    *corev1.Pod // nil for unknown
		delete bool
		group  int
		want   bool
	}{
		"lives":                         {pod(podA, "a"), false, emptyGroup, true},
		"lives, admitted":               {pod(podA, "a", pending), false, noGroup, true},
		"to be deleted, with a process": {pod(podA, "a", beingDeleted), false, busyGroup, true},
		"to be deleted, no process":     {pod(podA, "a", beingDeleted), false, emptyGroup, false},
		"ended":                         {pod(podA, "a", phase(corev1.PodSucceeded)), false, emptyGroup, false},
		"deleted, no process":           {pod(podA, "a"), true, emptyGroup, false},
		"deleted, with a process":       {pod(podA, "a"), true, busyGroup, true},
		"unknown, with a process":       {nil, false, busyGroup, true},
		"unknown":                       {nil, false, noGroup, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newTree(t)
			f.v2("kubepods/burstable", false)
			f.group(podA, c.group)
			p := known(t, f)
			if c.pod != nil {
				p.add(t, c.pod)
			}
			if c.delete {
				p.forget(c.pod)
			}
			if got := p.Uses(claim(ledger.StateHeld, podA)); got != c.want {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}
