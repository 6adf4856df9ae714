// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// event returns the next event that the reconciler recorded, or fails when there is none.
func (g *rig) event() string {
	g.t.Helper()
	if recorder, ok := g.r.Recorder.(*record.FakeRecorder); ok {
		select {
		case event := <-recorder.Events:
			return event
		case <-time.After(time.Minute):
		}
	}
	g.t.Fatal("no event was recorded")
	return ""
}

// awaitServing waits until devices are given to new holders.
func (g *rig) awaitServing() {
	g.t.Helper()
	deadline := time.After(time.Minute)
	for {
		changed := g.book.Changed()
		if g.book.Withheld() == nil {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			g.t.Fatal(g.book.Withheld())
		}
	}
}

// refuses checks that neither API gets a device, and why.
func (g *rig) refuses(words ...string) {
	g.t.Helper()
	pod := g.book.ReservePod([]ledger.PodRequest{{ID: "GPU-0", Resource: resource, Device: device.Ref{GPU: "GPU-0"}}})
	ctx, cancel := context.WithTimeout(g.t.Context(), time.Second)
	defer cancel()
	_, claim := g.book.ReserveClaim(ctx, ledger.ClaimRequest{UID: "new", Devices: []device.Ref{{GPU: "GPU-0"}}})
	for _, err := range []error{pod, claim} {
		var withheld *ledger.WithheldError
		if !errors.As(err, &withheld) {
			g.t.Errorf("a new holder gets %v", err)
			continue
		}
	}
	for _, word := range words {
		if reasons := fmt.Sprint(g.book.Withheld()); !strings.Contains(reasons, word) {
			g.t.Errorf("%q does not say %q", reasons, word)
		}
	}
}

// An ID whose GPU is not known holds no device that does not exist: the node serves nothing new until the pod has ended.
func TestUnknownDeviceKeepsTheNodeFromServing(t *testing.T) {
	for name, id := range map[string]string{
		"a minor that no GPU has":  "nvidia9",
		"a share of HAMi":          "GPU-1-3",
		"a share of gpushare":      "GPU-1-_-12",
		"an ID of another plugin":  "card-a",
		"a partition in that form": "nvidia9/gi1/vgpu0",
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, "GPU-0", "GPU-1")
			g.group("p1", true)
			g.addPod(g.pod("p1"))
			g.checkpoint("p1", id)
			must(t, g.r.Restore(t.Context()))
			g.want()
			g.refuses("DeviceOfUnknownGPU")
			if reasons := g.book.Withheld().Error(); strings.Contains(reasons, "p1") {
				t.Errorf("%q names a pod", reasons)
			}
			event := g.event()
			for _, word := range []string{"Warning DeviceOfUnknownGPU", id, resource, "pod p1"} {
				if !strings.Contains(event, word) {
					t.Errorf("%q does not say %q", event, word)
				}
			}
			// The agent dies and comes back.
			g.r.latePodHolds = nil
			g.book.Withhold(sourceUnknown, nil)
			must(t, g.r.Restore(t.Context()))
			g.refuses("DeviceOfUnknownGPU")
			g.run()
			g.stays()
			g.refuses("DeviceOfUnknownGPU")
			// The pod ends. kubelet's checkpoint still names it.
			g.noGroup("p1")
			g.deletePod("p1")
			g.awaitServing()
			g.want()
		})
	}
}

// An ID whose GPU comes later resolves.
func TestUnknownDeviceBecomesKnown(t *testing.T) {
	g := newRig(t, "GPU-0")
	g.group("p1", true)
	g.addPod(g.pod("p1"))
	g.checkpoint("p1", "nvidia2")
	must(t, g.r.Restore(t.Context()))
	g.run()
	g.refuses("DeviceOfUnknownGPU")
	g.setGPUs("GPU-0", "GPU-2")
	g.await("GPU-2: pod nvidia2 held [p1]")
	g.awaitServing()
}

// A GPU that was lost is known by its UUID, and keeps nothing else from being served.
func TestLostGPUIsNoUnknownDevice(t *testing.T) {
	const lost, partition = "GPU-00000000-0000-0000-0000-00000000000c", "MIG-00000000-0000-0000-0000-000000000003"
	g := newRig(t, "GPU-0")
	g.group("p1", true)
	g.checkpoint("p1", lost, "p1", partition)
	must(t, g.r.Restore(t.Context()))
	g.want(lost + ": pod " + lost + " restored [p1]")
	must(t, g.book.Withheld())
}

// A device of an unknown GPU that only kubelet's pod resources name keeps the node from serving until kubelet no longer lists it.
func TestUnknownDeviceWithoutCheckpoint(t *testing.T) {
	g := newRig(t, "GPU-0")
	g.used = []podstate.UsedDevice{{Namespace: "apps", Pod: "p1", Resource: resource, ID: "card-a"}}
	g.r.times.podHoldCheck = 20 * time.Millisecond
	must(t, g.r.Restore(t.Context()))
	g.run()
	g.stays()
	g.refuses("DeviceOfUnknownGPU")
	g.change(func() { g.used = nil })
	g.awaitServing()
}

// What a conflicting driver gave to pods and claims while this process ran is held before anything is served again.
func TestAdopt(t *testing.T) {
	g := newRig(t, "GPU-0", "GPU-1", "GPU-2", "GPU-3", "GPU-4")
	must(t, g.r.Restore(t.Context()))
	g.allocate("GPU-4")
	g.group("p1", true)
	g.group("own", true)
	for _, uid := range []string{"p1", "p2", "own"} {
		g.addPod(g.pod(uid))
	}
	g.run()
	g.checkpoint("own", "GPU-4", "p1", "nvidia1", "p2", "nvidia2", "ended", "nvidia3")
	g.claim("one", "c1", "gpu-3")
	g.claimState(kubeletClaim{"c1", "one", []string{"p1"}, []string{"gpu-3"}})
	for range 2 {
		must(t, g.r.Adopt(t.Context()))
	}
	// p2 has no cgroup yet: kubelet has just admitted it.
	g.await("GPU-1: pod nvidia1 held [p1]", "GPU-2: pod nvidia2 held [p2]", "GPU-3: claim c1 restored [p1]", "GPU-4: pod GPU-4 held [own]")
	must(t, g.book.Withheld())
	g.checkpoint("own", "GPU-4", "p1", "nvidia1", "p1", "card-a")
	must(t, g.r.Adopt(t.Context()))
	g.refuses("DeviceOfUnknownGPU")
	g.replace(podstate.DeviceCheckpointPath(g.dir), []byte("{"))
	if err := g.r.Adopt(t.Context()); err == nil {
		t.Error("adopted without kubelet's checkpoint")
	}
}

// A pod that kubelet has admitted for another plugin and not started, before this process began, has no cgroup: Restore takes it for one
// that has ended.
func TestAdoptAfterTheStart(t *testing.T) {
	g := newRig(t, "GPU-0", "GPU-1", "GPU-2")
	for _, uid := range []string{"p1", "p2", "p3"} {
		g.addPod(g.asking(uid, "1"))
	}
	ended := g.asking("ended", "1")
	ended.Status.Phase = corev1.PodSucceeded
	g.addPod(ended)
	g.group("ended", false) // kubelet removes it late
	g.checkpoint("p1", "GPU-1", "p2", "GPU-7", "p3", "card-a", "ended", "GPU-2")
	g.prepare("c1", "one", "GPU-2", "p4")
	must(t, g.r.Restore(t.Context()))
	g.want("GPU-2: claim c1 held [p4]", "GPU-2: pod GPU-2 restored [ended]")
	g.run()
	for range 2 {
		must(t, g.r.Adopt(t.Context()))
	}
	want := []string{"GPU-1: pod GPU-1 held [p1]", "GPU-2: claim c1 held [p4]"}
	g.await(want...)
	g.refuses("DeviceOfUnknownGPU")
	// Devices that come late are not forgotten while their pods have started nothing.
	g.stays(want...)
	g.refuses("DeviceOfUnknownGPU")
	g.setGPUs("GPU-0", "GPU-1", "GPU-2", "GPU-7")
	g.await(append(want, "GPU-7: pod GPU-7 held [p2]")...)
	g.deletePod("p3")
	g.stays(append(want, "GPU-7: pod GPU-7 held [p2]")...)
	g.refuses("DeviceOfUnknownGPU") // a frozen kubelet may start it yet
}

// Another driver may still be preparing a claim when its sockets are gone. A claim that nothing prepares any more, or whose pods have
// ended, does not keep the node from serving.
func TestAdoptClaimsThatAreBeingPrepared(t *testing.T) {
	g := newRig(t, "GPU-1", "GPU-2")
	must(t, g.r.Restore(t.Context()))
	g.r.times.prepare = 100 * time.Millisecond
	g.group("p1", true)
	g.addPod(g.pod("p1"))
	g.claim("one", "c1", "gpu-1")
	g.claim("two", "c2", "gpu-2")
	one := kubeletClaim{"c1", "one", []string{"p1"}, []string{"gpu-1"}}
	g.claimState(one, kubeletClaim{"c2", "two", []string{"p1"}, nil}, kubeletClaim{"c3", "unused", nil, nil})
	err := g.r.AdoptClaims(t.Context())
	if err == nil || !strings.Contains(err.Error(), "apps/two") || strings.Contains(err.Error(), "unused") {
		t.Errorf("a claim is being prepared: %v", err)
	}
	g.want("GPU-1: claim c1 restored [p1]")
	g.claimState(one, kubeletClaim{"c2", "two", []string{"p1"}, []string{"gpu-2"}})
	must(t, g.r.AdoptClaims(t.Context()))
	g.want("GPU-1: claim c1 restored [p1]", "GPU-2: claim c2 restored [p1]")
	g.claimState(one, kubeletClaim{"c4", "refused", []string{"p1"}, nil})
	if g.r.AdoptClaims(t.Context()) == nil {
		t.Error("another claim is being prepared")
	}
	time.Sleep(g.r.times.prepare)
	must(t, g.r.AdoptClaims(t.Context()))
}

// prepareAnew has another driver of our name prepare claim c1, which held GPU-1 for p1, with GPU-2 for p2.
func (g *rig) prepareAnew() {
	g.t.Helper()
	g.addPod(g.pod("p2", "one"))
	g.group("p2", true)
	g.prepare("c1", "one", "GPU-1", "p1")
	g.claim("one", "c1", "gpu-2")
	g.claimState(kubeletClaim{"c1", "one", []string{"p2"}, []string{"gpu-2"}})
}

// A claim that Tandem had prepared was unprepared, allocated another GPU and prepared by another driver of our name. Its hold on the first GPU
// ends once the pods of that time have no process.
func TestAdoptClaimWithAnotherDevice(t *testing.T) {
	g := newRig(t, "GPU-1", "GPU-2")
	g.verifySoon()
	g.addPod(g.pod("p1", "one"))
	g.group("p1", true)
	g.run()
	g.prepareAnew()
	g.deletePod("p1")
	g.awaitDeleted("p1")
	must(t, g.r.AdoptClaims(t.Context()))
	both := []string{"GPU-1: claim c1 held [p1]", "GPU-2: claim c1 restored [p2]"}
	g.stays(both...)
	g.group("p1", false)
	g.await(both[1])
	g.stays(both[1])
}

// What does not prove that a claim has lost its first GPU ends no hold.
func TestHoldThatMayNotBeReplaced(t *testing.T) {
	for name, change := range map[string]func(g *rig){
		"the API server says it has both":   func(g *rig) { g.claim("one", "c1", "gpu-1", "gpu-2") },
		"kubelet has a device that is lost": func(g *rig) { g.setGPUs("GPU-1"); g.claim("one", "c1") },
		"kubelet has begun to prepare it":   func(g *rig) { g.claimState(kubeletClaim{"c1", "one", []string{"p2"}, nil}) },
		"the GPU has been lost":             func(g *rig) { g.setGPUs("GPU-2") },
		"kubelet has both": func(g *rig) {
			g.noGroup("p2") // else kubelet's state adds the pod to the hold
			g.claimState(kubeletClaim{"c1", "one", []string{"p2"}, []string{"gpu-1", "gpu-2"}})
		},
		"its pod exists":                      func(g *rig) { g.addPod(g.pod("p1")) },
		"its sharing settings are not undone": func(g *rig) { g.r.Settings = newSettings(onGPU("c1", "GPU-1")) },
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, "GPU-1", "GPU-2")
			g.prepareAnew()
			change(g)
			g.watchPods()
			g.r.times.verify = 0
			for range 3 {
				g.verify()
			}
			if !slices.ContainsFunc(g.book.Holds(), func(h ledger.Hold) bool { return h.Device.GPU == "GPU-1" }) {
				t.Errorf("the hold on GPU-1 has ended: %v", g.holds())
			}
		})
	}
}
