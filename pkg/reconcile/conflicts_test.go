// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

func (g *rig) recordConflict(uid, name string, pendingEviction bool, pods ...string) {
	lost := ledger.Conflict{UID: uid, Namespace: "apps", Name: name, Devices: []device.Ref{{GPU: "GPU-1"}}, PendingEviction: pendingEviction}
	for _, uid := range pods {
		lost.Pods = append(lost.Pods, ledger.Pod{UID: uid, Namespace: "apps", Name: uid})
	}
	g.book.RecordConflict(lost)
}

// awaitConflicts waits until exactly these claims have conflicts.
func (g *rig) awaitConflicts(uids ...string) {
	g.t.Helper()
	deadline := time.After(time.Minute)
	for {
		changed := g.book.Changed()
		var got []string
		for _, lost := range g.book.Conflicts() {
			got = append(got, lost.UID)
		}
		if fmt.Sprint(got) == fmt.Sprint(uids) {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			g.t.Fatalf("conflicts are %v, want %v", got, uids)
		}
	}
}

func TestConflictsEndWithTheirPods(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	pending := func(uid, claim string) *corev1.Pod {
		p := g.pod(uid, claim)
		p.Status.Phase = corev1.PodPending
		return p
	}
	evicted, waiting, over := pending("evicted", "one"), pending("waiting", "two"), pending("over", "three")
	for _, p := range []*corev1.Pod{evicted, waiting, over} {
		g.addPod(p)
	}
	g.run()
	g.recordConflict("c1", "one", true, "evicted")
	g.recordConflict("c2", "two", false, "waiting")
	g.recordConflict("c3", "three", false, "over")
	g.awaitConflicts("c1", "c2", "c3")
	if pendingEviction, waiting := g.metric("tandem_conflicting_claims", "pending_eviction"), g.metric("tandem_conflicting_claims", "waiting"); pendingEviction != 1 || waiting != 2 {
		t.Errorf("counted %v pending evictions and %v waiting", pendingEviction, waiting)
	}
	g.deletePod("evicted")
	g.awaitConflicts("c2", "c3")
	over = over.DeepCopy()
	over.Status.Phase = corev1.PodFailed
	must(t, g.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), over, "apps"))
	g.awaitConflicts("c2")
}

// A claim with a name of its own is shared by the next pod of its owner, which must not find it forgiven half-way.
func TestConflictStaysWhileAnotherPodUsesItsClaim(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.addPod(g.pod("first", "one"))
	g.addPod(g.pod("next", "one"))
	g.run()
	g.recordConflict("c1", "one", true, "first")
	g.recordConflict("c2", "two", true, "first")
	g.deletePod("first")
	g.awaitConflicts("c1")
	g.deletePod("next")
	g.awaitConflicts()
}

// A bare pod may wait for a claim that is replaced under its name.
func TestConflictOfReplacedClaim(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	g.verifySoon()
	for _, uid := range []string{"replaced", "elsewhere", "gone", "waits"} {
		g.addPod(g.pod(uid, uid))
		g.claim(uid, "c-"+uid, "gpu-1")
	}
	g.run()
	g.change(func() { g.away = true })
	g.claim("replaced", "another", "gpu-1")
	g.claim("elsewhere", "c-elsewhere", "gpu-2")
	g.change(func() { delete(g.claims, "apps/gone") })
	for _, uid := range []string{"replaced", "elsewhere", "gone", "waits"} {
		g.recordConflict("c-"+uid, uid, false, uid)
	}
	asked := g.calls()
	for deadline := time.Now().Add(time.Minute); g.calls() < asked+8 && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
	}
	if n := len(g.book.Conflicts()); n != 4 {
		t.Errorf("%d conflicts while the API server is away", n)
	}
	g.change(func() { g.away = false })
	g.awaitConflicts("c-waits")
}

// A claim is in conflict because its GPU vanished: while it is allocated that GPU, it stays so.
func TestConflictOfAVanishedDevice(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.verifySoon()
	g.addPod(g.pod("p1", "one"))
	g.claim("one", "c1", "gpu-9")
	g.run()
	g.book.RecordConflict(ledger.Conflict{
		UID: "c1", Namespace: "apps", Name: "one", Devices: []device.Ref{{GPU: "gpu-9"}}, Names: []string{"gpu-9"}, Pods: []ledger.Pod{{UID: "p1"}},
	})
	asked := g.calls()
	for deadline := time.Now().Add(time.Minute); g.calls() < asked+2 && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
	}
	if n := len(g.book.Conflicts()); n != 1 {
		t.Errorf("%d conflicts", n)
	}
	g.claim("one", "c1", "gpu-1")
	g.awaitConflicts()
}
