// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
)

func TestMetrics(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2", "GPU-3", "GPU-4")
	finished := g.pod("p1")
	for _, p := range []*corev1.Pod{finished, g.pod("p2", "one"), g.pod("p3", "two")} {
		g.addPod(p)
		g.group(p.Name, true)
	}
	begun, err := testutil.GatherAndCount(g.counts, "tandem_time_to_free_seconds")
	must(t, err)
	if begun != 2 {
		t.Errorf("tandem_time_to_free_seconds begins with %d series, want 2: a rate does not see the first release otherwise", begun)
	}
	// Older than what must settle first.
	g.checkpoint("p1", "GPU-1")
	must(t, g.r.Restore(t.Context()))
	stop := g.run()
	g.await("GPU-1: pod GPU-1 held [p1]")
	g.prepare("c1", "one", "GPU-2", "p2")
	g.prepare("c2", "two", "GPU-3", "p3")
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.stays("GPU-1: pod GPU-1 held [p1]", "GPU-2: claim c1 draining [p2]", "GPU-3: claim c2 held [p3]")
	for labels, want := range map[[2]string]float64{{"pod", "held"}: 1, {"claim", "draining"}: 1, {"claim", "held"}: 1, {"pod", "restored"}: 0} {
		if got := g.metric("tandem_holds", labels[0], labels[1]); got != want {
			t.Errorf("%v holds are %v, want %v", got, labels, want)
		}
	}
	if age := g.metric("tandem_oldest_hold_age_seconds", "claim", "draining"); age <= 0 || age > 60 {
		t.Errorf("the draining claim is %vs old", age)
	}
	if n := g.metric("tandem_time_to_free_seconds", "claim"); n != 0 {
		t.Errorf("%v claims were freed, none was", n)
	}
	// One is released here, one by its Unprepare, one by the next Allocate.
	g.deletePod("p2")
	g.group("p2", false)
	g.await("GPU-1: pod GPU-1 held [p1]", "GPU-3: claim c2 held [p3]")
	g.deletePod("p3")
	g.group("p3", false)
	must(t, g.book.DrainClaim(t.Context(), "c2"))
	g.await("GPU-1: pod GPU-1 held [p1]")
	g.group("p1", false)
	finished = finished.DeepCopy()
	finished.Status.Phase = corev1.PodSucceeded
	must(t, g.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), finished, "apps"))
	g.await()
	stop()
	g.settle()
	if claims, limits := g.metric("tandem_time_to_free_seconds", "claim"), g.metric("tandem_time_to_free_seconds", "pod"); claims != 2 || limits != 1 {
		t.Errorf("freed %v claims and %v limits, want 2 and 1", claims, limits)
	}
}
