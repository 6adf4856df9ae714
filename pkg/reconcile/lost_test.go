// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// An Allocate may have waited for the watch, and then follows the end of the previous pod at once. A checkpoint that kubelet collected before
// the Allocate and wrote after it names the previous pod. The write that names the next pod comes late, because the disk is slow.
func TestEndJustBeforeAllocate(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.group("old", true)
	g.addPod(g.pod("old"))
	next := g.pod("next")
	next.Status.Phase = corev1.PodPending
	g.addPod(next)
	g.watchPods()
	g.allocate("GPU-1")
	g.checkpoint("old", "GPU-1")
	g.settle()
	time.Sleep(podstate.Settling) // the hold of old is no longer within it
	g.group("old", false)
	allocated := make(chan error, 1)
	go func() {
		allocated <- g.book.ReservePod([]ledger.PodRequest{{ID: "GPU-1", Resource: resource, Device: device.Ref{GPU: "GPU-1"}}})
	}()
	ended := g.pod("old")
	ended.Status.Phase = corev1.PodSucceeded
	_, err := g.client.CoreV1().Pods("apps").UpdateStatus(context.Background(), ended, metav1.UpdateOptions{})
	must(t, err)
	must(t, <-allocated)
	g.checkpoint("old", "GPU-1")
	g.settle()
	g.want("GPU-1: pod GPU-1 held []")
	time.Sleep(podstate.Settling)
	g.settle()
	g.want("GPU-1: pod GPU-1 held []")
	g.checkpoint("next", "GPU-1")
	g.settle()
	g.want("GPU-1: pod GPU-1 held [next]")
}

// If the hold of a pod that may run was released by mistake, the device is held again, because kubelet's checkpoint names it.
func TestLostHoldOfAPod(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		pod   func(g *rig) *corev1.Pod // nil: the API server does not have it
		group string                   // of the pod: "", "busy", "empty", or "left" after its deletion
		held  bool
	}{
		{"running", func(g *rig) *corev1.Pod { return g.pod("p1") }, "busy", true},
		{"admitted, not started", func(g *rig) *corev1.Pod { return g.asking("p1", "1") }, "", true},
		{"force-deleted, with a process", nil, "busy", true},
		{"ended, with a process", func(g *rig) *corev1.Pod { return g.ended("p1") }, "busy", true},
		{"ended", func(g *rig) *corev1.Pod { return g.ended("p1") }, "empty", false},
		{"ended and deleted, its cgroup stays", func(g *rig) *corev1.Pod { return g.ended("p1") }, "left", false},
		{"gone", nil, "", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			g := newRig(t, "GPU-1", "GPU-2")
			if test.pod != nil {
				g.addPod(test.pod(g))
			}
			if test.group != "" {
				g.group("p1", test.group == "busy")
			}
			g.watchPods()
			if test.group == "left" {
				g.deletePod("p1")
				g.awaitDeleted("p1")
			}
			g.allocate("GPU-2")
			g.checkpoint("p1", "GPU-1")
			g.settle()
			want := []string{"GPU-2: pod GPU-2 held []"}
			if test.held {
				want = []string{"GPU-1: pod GPU-1 restored [p1]", want[0]}
			}
			g.want(want...)
		})
	}
}

// A claim got the GPU while its pod's hold was lost: from then on both hold it, as on the node.
func TestLostHoldOfAPodThatAClaimGot(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.group("p1", true)
	g.addPod(g.pod("p1"))
	g.watchPods()
	g.prepare("c1", "one", "GPU-1", "p2")
	g.checkpoint("p1", "GPU-1")
	g.settle()
	g.want("GPU-1: claim c1 held [p2]", "GPU-1: pod GPU-1 restored [p1]")
}

// A device that the inventory lacks is held once it has it.
func TestLostHoldOfADeviceThatComesLate(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.group("p1", true)
	g.addPod(g.pod("p1"))
	g.run()
	g.checkpoint("p1", "MIG-a")
	g.setGPUs("GPU-1:MIG-a")
	g.await("GPU-1@0+1: pod MIG-a held [p1]")
}

// kubelet's state has the devices of a claim until it has the answer to Unprepare, so a claim there that has no hold has lost it.
func TestLostHoldOfAClaim(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	g.verifySoon()
	g.addPod(g.pod("p1", "one"))
	g.claim("one", "c1", "gpu-1")
	g.claim("admin", "c2", "admin:gpu-2")
	g.watchPods()
	g.claimState(kubeletClaim{uid: "c1", name: "one", pods: []string{"p1"}, devices: []string{"gpu-1"}},
		kubeletClaim{uid: "c2", name: "admin", pods: []string{"p1"}, devices: []string{"gpu-2"}})
	g.change(func() { g.away = true })
	_, err := g.r.Verify(t.Context())
	if err == nil {
		t.Error("no error without an answer")
	}
	g.want() // one of them may be for admin access
	g.change(func() { g.away = false })
	g.verify()
	g.want("GPU-1: claim c1 restored [p1]")
	for range 3 { // it confirms the hold
		g.verify()
		time.Sleep(2 * g.r.times.verify)
	}
	before := g.calls()
	for range 3 {
		time.Sleep(2 * g.r.times.verify)
		g.verify()
	}
	if after := g.calls(); after != before {
		t.Errorf("%d more requests for a claim with admin access", after-before)
	}
	// Another change of its devices may give it one to hold.
	g.claimState(kubeletClaim{uid: "c2", name: "admin", pods: []string{"p1"}, devices: []string{"gpu-2", "gpu-1"}})
	g.verify()
	if g.calls() == before {
		t.Error("nothing was asked about other devices")
	}
}

// One of two holds of a running claim was released by mistake.
func TestLostHoldOfOneDeviceOfAClaim(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2", "GPU-3")
	g.addPod(g.pod("p1", "one"))
	g.claim("one", "c1", "gpu-1", "gpu-2", "admin:gpu-3")
	g.watchPods()
	_, err := g.book.ReserveClaim(t.Context(), ledger.ClaimRequest{
		UID: "c1", Namespace: "apps", Name: "one", Pods: []ledger.Pod{{UID: "p1"}}, Devices: []device.Ref{{GPU: "GPU-1"}, {GPU: "GPU-2"}},
	})
	must(t, err)
	g.claimState(kubeletClaim{"c1", "one", []string{"p1"}, []string{"gpu-1", "gpu-2", "gpu-3"}})
	g.verify() // it asks for whom the third device is
	must(t, g.book.Release(g.book.Holds()[1]))
	g.verify()
	g.want("GPU-1: claim c1 held [p1]", "GPU-2: claim c1 restored [p1]")
	before := g.calls()
	for range 3 {
		claims, err := podstate.ReadClaimState(g.dir, driver)
		must(t, errors.Join(err, g.r.expectUsed(t.Context(), g.book.Holds(), claims)))
	}
	if after := g.calls(); after != before {
		t.Errorf("%d more requests for a device with admin access", after-before)
	}
}

// The disk of kubelet's checkpoint is full: only its pod resources name the device.
func TestLostHoldThatTheCheckpointLacks(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	p := g.asking("p1", "1")
	p.Status.Phase, p.Status.StartTime = corev1.PodRunning, &metav1.Time{Time: time.Now()}
	g.addPod(p)
	g.group("p1", true)
	g.watchPods()
	g.change(func() {
		g.used = []podstate.UsedDevice{{Namespace: "apps", Pod: "p1", Resource: resource, ID: "GPU-1"}}
	})
	g.verify() // it may be about to be recorded
	if g.calls() != 0 {
		t.Errorf("%d requests at once", g.calls())
	}
	g.verifySoon()
	time.Sleep(g.r.times.verify)
	g.verify()
	g.want("GPU-1: pod GPU-1 restored []")
}

func (g *rig) ended(uid string) *corev1.Pod {
	p := g.pod(uid)
	p.Status.Phase = corev1.PodSucceeded
	return p
}

func (g *rig) verify() {
	g.t.Helper()
	_, err := g.r.Verify(g.t.Context())
	must(g.t, err)
}
