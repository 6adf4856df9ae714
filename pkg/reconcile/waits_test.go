// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// awaitWait waits until the ledger describes what the only hold waits for.
func (g *rig) awaitWait(want ...string) (h ledger.Hold) {
	g.t.Helper()
	deadline := time.After(10 * time.Second)
	for {
		changed := g.book.Changed()
		holds := g.book.Holds()
		missing := len(holds) != 1
		for _, part := range want {
			missing = missing || part == "" && holds[0].WaitsFor != "" || !strings.Contains(holds[0].WaitsFor, part)
		}
		if !missing {
			return holds[0]
		}
		select {
		case <-changed:
		case <-deadline:
			g.t.Fatalf("holds %+v, want %q", holds, want)
		}
	}
}

// A process of a force-deleted pod does not end. Ledger, event and metrics name it, for a claim and for a limit.
func TestWhatAHungHoldWaitsFor(t *testing.T) {
	t.Parallel()
	for _, kind := range []ledger.Kind{ledger.KindClaim, ledger.KindPod} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			g := newRig(t, "GPU-1")
			events := record.NewFakeRecorder(100)
			g.r.Recorder, g.r.ProcRoot = events, t.TempDir()
			g.r.times.waitShown, g.r.times.waitReported = time.Millisecond, 20*time.Millisecond
			process := filepath.Join(g.r.ProcRoot, "4711")
			must(t, os.Mkdir(process, 0o755))
			must(t, os.WriteFile(filepath.Join(process, "cgroup"), []byte("0::/kubepods/podp1/main"), 0o600))
			must(t, os.WriteFile(filepath.Join(process, "stat"), []byte("4711 (train) D 1"), 0o600))
			g.group("p1", true)
			g.addPod(g.pod("p1", "one"))
			g.run()
			if kind == ledger.KindClaim {
				g.claimState(kubeletClaim{"c1", "one", []string{"p1"}, []string{"gpu-1"}})
				g.prepare("c1", "one", "GPU-1", "p1")
			} else {
				g.allocate("GPU-1")
				g.checkpoint("p1", "GPU-1")
				g.await("GPU-1: pod GPU-1 held [p1]")
			}
			g.deletePod("p1")
			h := g.awaitWait("pod apps/p1 (p1)", "process 4711 (train, state D)")
			if h.WaitsSince.IsZero() || time.Since(h.WaitsSince) > time.Minute {
				t.Errorf("waits since %v", h.WaitsSince)
			}
			if n := g.metric("tandem_waiting_holds", string(kind)); n != 1 {
				t.Errorf("%v waiting holds", n)
			}
			select {
			case event := <-events.Events:
				for _, part := range []string{"DeviceNotFreed", "gpu-1 (GPU-1)", "apps/", "process 4711 (train, state D)", "restart the node"} {
					if !strings.Contains(event, part) {
						t.Errorf("event %q lacks %q", event, part)
					}
				}
			case <-time.After(10 * time.Second):
				t.Error("no event")
			}
			if kind == ledger.KindPod {
				g.noGroup("p1")
				g.await()
				return
			}
			must(t, os.RemoveAll(process))
			g.awaitWait("which the agent cannot see")
			g.group("p1", false)
			g.awaitWait("kubelet has not unprepared the claim")
			g.addPod(g.pod("p2", "one"))
			g.awaitWait("")
			select {
			case event := <-events.Events:
				t.Errorf("another event: %s", event)
			default:
			}
		})
	}
}

// A claim that runs does not wait for anything, also while another claim was refused because of it.
func TestContestedHoldsDoNotWait(t *testing.T) {
	g := newRig(t, "GPU-1")
	events := record.NewFakeRecorder(100)
	g.r.Recorder, g.r.ProcRoot = events, t.TempDir()
	g.r.times.waitShown, g.r.times.waitReported = time.Millisecond, 2*time.Millisecond
	g.group("p1", true)
	g.addPod(g.pod("p1", "one"))
	g.run()
	g.claimState(kubeletClaim{"c1", "one", []string{"p1"}, []string{"gpu-1"}})
	g.prepare("c1", "one", "GPU-1", "p1")
	if _, err := g.book.ReserveClaim(t.Context(), ledger.ClaimRequest{UID: "c2", Devices: []device.Ref{{GPU: "GPU-1"}}}); err == nil {
		t.Fatal("two claims have a GPU")
	}
	if h := g.book.Holds()[0]; !h.Contested {
		t.Fatalf("hold %+v", h)
	}
	time.Sleep(100 * time.Millisecond)
	if h := g.book.Holds()[0]; h.WaitsFor != "" || len(events.Events) > 0 {
		t.Errorf("waits for %q, with %d events", h.WaitsFor, len(events.Events))
	}
	g.deletePod("p1")
	g.awaitWait("apps/p1")
}
