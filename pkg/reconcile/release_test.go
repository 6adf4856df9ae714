// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/apimachinery/pkg/api/resource"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// asking is a pod that is bound to the node for its limit.
func (g *rig) asking(uid, gpus string) *corev1.Pod {
	p := g.pod(uid)
	p.Status.Phase = corev1.PodPending
	requests := corev1.ResourceList{resource: resourceapi.MustParse(gpus)}
	p.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: requests, Limits: requests}}}
	return p
}

func (g *rig) updatePod(p *corev1.Pod, phase corev1.PodPhase) {
	g.t.Helper()
	p = p.DeepCopy()
	p.Status.Phase = phase
	must(g.t, g.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), p, "apps"))
}

func TestPodThatFinishes(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.group("p1", true)
	p := g.asking("p1", "1")
	g.addPod(p)
	g.run()
	g.allocate("GPU-1")
	g.checkpoint("p1", "GPU-1")
	g.await("GPU-1: pod GPU-1 held [p1]")
	// Its status may come before its last process ends.
	g.updatePod(p, corev1.PodSucceeded)
	g.await("GPU-1: pod GPU-1 draining [p1]")
	g.group("p1", false)
	g.await()
}

// Kubelet asks for each container: what an init container had is reused by those after it.
func TestInitContainersAndRestarts(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.verifySoon()
	p := g.asking("p1", "1")
	// The checkpoint of these tests names the container "main".
	first := p.Spec.Containers[0]
	first.Name, p.Spec.Containers[0].Name = "main", "work"
	p.Spec.InitContainers = []corev1.Container{first}
	g.addPod(p)
	g.run()
	g.allocate("GPU-1")
	g.checkpoint("p1", "GPU-1")
	g.await("GPU-1: pod GPU-1 held [p1]")
	g.allocate("GPU-1")
	g.checkpoint("p1", "GPU-1", "p1", "GPU-1")
	g.await("GPU-1: pod GPU-1 held [p1]")
	g.group("p1", true)
	g.updatePod(p, corev1.PodRunning)
	// Between two starts of its container there is no process.
	g.group("p1", false)
	g.stays("GPU-1: pod GPU-1 held [p1]")
	g.group("p1", true)
	g.stays("GPU-1: pod GPU-1 held [p1]")
}

// An Allocate that kubelet throws away, since another device or container of the pod could not be had.
func TestFailedAdmissionAfterAllocate(t *testing.T) {
	t.Parallel()
	for name, written := range map[string]bool{"kubelet has written it down": true, "kubelet has not": false} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, "GPU-1", "GPU-2")
			g.noGroup("anchor")
			must(t, os.MkdirAll(filepath.Join(g.groups, "kubepods"), 0o755))
			g.verifySoon()
			p, other := g.asking("p1", "1"), g.asking("p2", "1")
			g.addPod(p)
			g.addPod(other)
			g.run()
			g.allocate("GPU-1", "GPU-2")
			if written {
				g.checkpoint("p1", "GPU-1", "p2", "GPU-2")
				g.await("GPU-1: pod GPU-1 held [p1]", "GPU-2: pod GPU-2 held [p2]")
			} else {
				g.change(func() {
					g.used = []podstate.UsedDevice{{Namespace: "apps", Pod: other.Name, Resource: resource, ID: "GPU-2"}}
				})
				g.checkpoint("p2", "GPU-2")
			}
			g.updatePod(p, corev1.PodFailed)
			g.await("GPU-2: pod GPU-2 held [p2]")
		})
	}
}

// A hold without a pod stays while kubelet lists its device, or does not answer.
func TestHoldWithoutPodThatKubeletLists(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.verifySoon()
	g.used = []podstate.UsedDevice{{ID: "GPU-1", Resource: resource}}
	g.run()
	g.allocate("GPU-1")
	for deadline := time.Now().Add(time.Minute); g.calls() == 0 && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
	}
	if g.calls() == 0 {
		t.Error("kubelet was not asked")
	}
	g.stays("GPU-1: pod GPU-1 held []")
	g.change(func() { g.away, g.used = true, nil })
	g.stays("GPU-1: pod GPU-1 held []")
	g.change(func() { g.away = false })
	g.await()
}

// A hold without a pod ends after two checks in a row in which kubelet does not list its device.
func TestHoldThatKubeletListsBetweenTwoChecks(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.watchPods()
	g.allocate("GPU-1")
	h, d := g.book.Holds()[0], &unconfirmed{}
	listed := []podstate.UsedDevice{{ID: "GPU-1", Resource: resource}}
	for i, used := range [][]podstate.UsedDevice{nil, listed, nil, nil} {
		g.change(func() { g.used = used })
		must(t, g.r.checkPodHold(t.Context(), h, d))
		if left := len(g.book.Holds()); left != map[bool]int{true: 1}[i < 3] {
			t.Errorf("%d holds after check %d", left, i+1)
		}
	}
}

// A claim's pod is force-deleted, its claim deallocated and deleted, and its containers live on.
func TestForceDeletedClaimPod(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.verifySoon()
	g.group("p1", true)
	g.addPod(g.pod("p1", "one"))
	g.claim("one", "c1", "gpu-1")
	g.run()
	g.prepare("c1", "one", "GPU-1", "p1")
	g.deletePod("p1")
	g.change(func() { delete(g.claims, "apps/one") })
	g.awaitOverdue(true)
	g.stays("GPU-1: claim c1 held [p1]")
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.stays("GPU-1: claim c1 draining [p1]")
	if err := g.book.ReservePod([]ledger.PodRequest{{ID: "GPU-1", Resource: resource, Device: device.Ref{GPU: "GPU-1"}}}); err == nil {
		t.Error("a limit got what a container still uses")
	}
	g.group("p1", false)
	g.await()
}

// awaitOverdue waits until the only hold is overdue or not: kubelet or the reconciler needs milliseconds, an event a minute.
func (g *rig) awaitOverdue(want bool) {
	g.t.Helper()
	deadline := time.After(10 * time.Second)
	for {
		changed := g.book.Changed()
		if holds := g.book.Holds(); len(holds) == 1 && holds[0].Overdue() == want {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			g.t.Fatalf("holds %v: overdue is not %v", g.book.Holds(), want)
		}
	}
}

// A process of a force-deleted pod does not end, so kubelet still has the claim prepared. The scheduler may not choose its GPU, but
// for the next pod of a shared claim.
func TestHungClaimIsOverdue(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.group("p1", true)
	g.addPod(g.pod("p1", "one"))
	g.claimState(kubeletClaim{"c1", "one", []string{"p1"}, []string{"gpu-1"}})
	g.run()
	g.prepare("c1", "one", "GPU-1", "p1")
	g.awaitOverdue(false)
	g.deletePod("p1")
	g.awaitOverdue(true)
	g.addPod(g.pod("p2", "one"))
	g.awaitOverdue(false)
	g.deletePod("p2")
	g.awaitOverdue(true)
	g.want("GPU-1: claim c1 held [p1]")
}

// A claim was refused because of two others. The API server still has one of them, so the scheduler counts it. It does not have the
// other, which was deleted while its pod lives.
func TestContestedClaimThatIsAllocated(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	g.r.times.ending = 20 * time.Millisecond
	var state []kubeletClaim
	for i, name := range []string{"counted", "deleted"} {
		pod, gpu := fmt.Sprintf("p%d", i+1), i+1
		g.group(pod, true)
		g.addPod(g.pod(pod, name))
		state = append(state, kubeletClaim{name, name, []string{pod}, []string{fmt.Sprintf("gpu-%d", gpu)}})
		g.prepare(name, name, fmt.Sprintf("GPU-%d", gpu), pod)
	}
	g.claimState(state...)
	g.claim("counted", "counted", "gpu-1")
	refused := ledger.ClaimRequest{UID: "c3", Namespace: "apps", Name: "three", Devices: []device.Ref{{GPU: "GPU-1"}, {GPU: "GPU-2"}}}
	if _, err := g.book.ReserveClaim(t.Context(), refused); err == nil {
		t.Fatal("two claims have a device")
	}
	contested := func() (names []string) {
		for _, h := range g.book.Holds() {
			if h.Contested {
				names = append(names, h.Name)
			}
		}
		return names
	}
	if names := contested(); !slices.Equal(names, []string{"counted", "deleted"}) {
		t.Fatalf("contested are %v", names)
	}
	g.run()
	deadline := time.After(10 * time.Second)
	for changed := g.book.Changed(); slices.Contains(contested(), "counted"); changed = g.book.Changed() {
		select {
		case <-changed:
		case <-deadline:
			t.Fatal("the claim that the scheduler counts is still contested")
		}
	}
	if names := contested(); !slices.Equal(names, []string{"deleted"}) {
		t.Errorf("contested are %v", names)
	}
}

// A claim that was unprepared drains although the pod of its successor, a claim of the same name, runs. The API server knows that the
// pod has another claim, and the agent asks within seconds.
func TestSuccessorDoesNotKeepADrainingClaim(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	g.r.times.ending = 20 * time.Millisecond
	g.group("p2", true)
	p2 := g.pod("p2", "one")
	p2.Status.ContainerStatuses = []corev1.ContainerStatus{{ContainerID: "containerd://1"}}
	g.addPod(p2)
	g.claim("one", "c2", "gpu-2")
	g.claimState(kubeletClaim{"c2", "one", []string{"p2"}, []string{"gpu-2"}})
	g.run()
	g.prepare("c1", "one", "GPU-1", "p1")
	g.prepare("c2", "one", "GPU-2", "p2")
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.awaitWithin(10*time.Second, "GPU-2: claim c2 held [p2]")
}

// The agent was down when a claim's pod and other pods were deleted, and kubelet, which was killed as well, has left their cgroups.
// No process is in them, so the claims drain for no longer than usual.
func TestLeftoverCgroupsKeepNoClaim(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	g.group("p1", false)
	g.group("other", false)
	g.claim("one", "c1", "gpu-1")
	g.claim("two", "c2", "gpu-2")
	g.prepare("c1", "one", "GPU-1", "p1")
	g.addPod(g.pod("p2", "two"))
	g.group("p2", true)
	g.run()
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.awaitWithin(10 * time.Second)
	g.prepare("c2", "two", "GPU-2", "p2")
	g.deletePod("p2")
	must(t, g.book.DrainClaim(t.Context(), "c2"))
	g.noGroup("p2")
	g.awaitWithin(10 * time.Second)
}

// kubelet does not unprepare a claim that it has forgotten.
func TestClaimStateDeleted(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.verifySoon()
	g.group("p1", true)
	p := g.pod("p1", "one")
	g.addPod(p)
	g.claim("one", "c1", "gpu-1")
	g.claimState(kubeletClaim{"c1", "one", []string{"p1"}, []string{"gpu-1"}})
	g.run()
	g.prepare("c1", "one", "GPU-1", "p1")
	must(t, os.Remove(filepath.Join(g.dir, "dra_manager_state")))
	g.stays("GPU-1: claim c1 held [p1]")
	g.updatePod(p, corev1.PodSucceeded)
	g.claim("one", "c1") // deallocated
	g.stays("GPU-1: claim c1 held [p1]")
	g.group("p1", false)
	g.await()
}

// The device checkpoint is deleted, and the agent restarts without records: what it cannot know it must not give away.
func TestDeviceCheckpointDeleted(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.group("p1", true)
	p := g.asking("p1", "1")
	g.addPod(p)
	g.run()
	g.allocate("GPU-1")
	g.checkpoint("p1", "GPU-1")
	g.await("GPU-1: pod GPU-1 held [p1]")
	must(t, os.Remove(podstate.DeviceCheckpointPath(g.dir)))
	g.stays("GPU-1: pod GPU-1 held [p1]")
	g.updatePod(p, corev1.PodSucceeded)
	g.noGroup("p1")
	g.await()
}

// Kubelet loses its account before it has started a pod, and asks for it again: it takes what the pod had before for free.
func TestDevicesReplaced(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		asks string
		// before and after that are the devices that the pod gets.
		before, after []string
		// drains says that it is not to have the former any more.
		drains bool
	}{
		"another":           {asks: "1", before: []string{"GPU-1"}, after: []string{"GPU-2"}, drains: true},
		"two others":        {asks: "2", before: []string{"GPU-1", "GPU-2"}, after: []string{"GPU-3", "GPU-4"}, drains: true},
		"one of two so far": {asks: "2", before: []string{"GPU-1"}, after: []string{"GPU-2"}},
		"none so far":       {asks: "2", before: []string{"GPU-1", "GPU-2"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newRig(t, "GPU-1", "GPU-2", "GPU-3", "GPU-4")
			p := g.asking("p1", c.asks)
			g.addPod(p)
			g.group("p1", true) // its sandbox is there
			g.run()
			give := func(ids []string) (held []string) {
				var named []string
				for _, id := range ids {
					named = append(named, "p1", id)
					held = append(held, id+": pod "+id+" held [p1]")
				}
				g.allocate(ids...)
				g.checkpoint(named...)
				return held
			}
			former := give(c.before)
			g.await(former...)
			time.Sleep(20 * time.Millisecond) // the clock of files ticks
			must(t, os.Remove(podstate.DeviceCheckpointPath(g.dir)))
			latter := give(c.after)
			if !c.drains {
				g.await(append(former, latter...)...)
				time.Sleep(podstate.Settling)
				g.stays(append(former, latter...)...)
				return
			}
			var draining []string
			for _, id := range c.before {
				draining = append(draining, id+": pod "+id+" draining [p1]")
			}
			g.await(append(draining, latter...)...)
			g.stays(append(draining, latter...)...)
			g.updatePod(p, corev1.PodSucceeded)
			g.noGroup("p1")
			g.await()
		})
	}
}

// Everything ends while the agent is down.
func TestWhileTheAgentWasDown(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2", "GPU-3", "GPU-4", "GPU-5")
	g.verifySoon()
	g.allocate("GPU-1", "GPU-2", "GPU-3")
	for _, h := range g.book.Holds() {
		must(t, g.book.Identify(h, ledger.Pod{UID: "p" + h.Holder.ID[len("GPU-"):], Namespace: "apps", Name: "p"}))
	}
	g.prepare("c4", "four", "GPU-4", "p4")
	g.prepare("c5", "five", "GPU-5", "p5")
	must(t, g.book.DrainClaim(t.Context(), "c5"))
	// The first pod is gone; the second has succeeded; the third was force-deleted and runs; the fourth claim is gone; the
	// pod of the fifth, which was unprepared, has ended. An unknown pod that runs may use those claims.
	second := g.pod("p2")
	second.Status.Phase = corev1.PodSucceeded
	g.addPod(second)
	g.group("p2", false)
	g.group("p3", true)
	must(t, g.r.Restore(t.Context()))
	g.run()
	g.await("GPU-3: pod GPU-3 draining [p3]", "GPU-4: claim c4 held [p4]", "GPU-5: claim c5 draining [p5]")
	g.noGroup("p3")
	g.await()
}

// While kubelet is down pods are deleted from the API server, and their containers live on until it is back.
func TestWhileKubeletWasDown(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	g.verifySoon()
	g.group("p1", true)
	g.group("p2", true)
	g.addPod(g.asking("p1", "1"))
	g.addPod(g.pod("p2", "two"))
	g.claim("two", "c2", "gpu-2")
	g.run()
	g.allocate("GPU-1")
	g.checkpoint("p1", "GPU-1")
	g.prepare("c2", "two", "GPU-2", "p2")
	g.await("GPU-1: pod GPU-1 held [p1]", "GPU-2: claim c2 held [p2]")
	g.change(func() { g.away = true })
	g.deletePod("p1")
	g.deletePod("p2")
	g.change(func() { delete(g.claims, "apps/two") })
	g.await("GPU-1: pod GPU-1 draining [p1]", "GPU-2: claim c2 held [p2]")
	g.group("p1", false) // they end, and their cgroups stay
	g.group("p2", false)
	g.stays("GPU-1: pod GPU-1 draining [p1]", "GPU-2: claim c2 held [p2]")
	g.change(func() { g.away = false })
	g.noGroup("p1")
	must(t, g.book.DrainClaim(t.Context(), "c2"))
	g.await()
}
