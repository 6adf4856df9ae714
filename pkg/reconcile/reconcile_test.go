// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/internal/filewatch"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

var long = time.Now().Add(-time.Hour)

func TestLimitFromAllocateToEnd(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.group("p1", true)
	g.addPod(g.pod("p1"))
	// A file of before names another pod, which is gone.
	g.checkpoint("before", "GPU-1")
	must(t, os.Chtimes(podstate.DeviceCheckpointPath(g.dir), long, long))
	g.run()
	g.allocate("GPU-1")
	g.stays("GPU-1: pod GPU-1 held []")
	g.checkpoint("p1", "GPU-1")
	g.await("GPU-1: pod GPU-1 held [p1]")
	// Force-deleted while it runs, and while its cgroup is merely empty.
	g.deletePod("p1")
	g.await("GPU-1: pod GPU-1 draining [p1]")
	g.group("p1", false)
	g.stays("GPU-1: pod GPU-1 draining [p1]")
	g.noGroup("p1")
	g.await()
}

// While the kernel does not tell about a pod that is gone, its device is not given on, and is let go as soon as it does.
func TestUnreadableCgroup(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.group("p1", true)
	g.checkpoint("p1", "GPU-1")
	must(t, g.r.Restore(t.Context()))
	events := filepath.Join(g.groups, "kubepods", "podp1", "cgroup.events")
	must(t, os.Remove(events))
	g.run()
	g.await("GPU-1: pod GPU-1 draining [p1]")
	if err := g.book.ReservePod([]ledger.PodRequest{{ID: "GPU-1", Resource: resource, Device: device.Ref{GPU: "GPU-1"}}}); err == nil {
		t.Error("given on")
	}
	g.stays("GPU-1: pod GPU-1 draining [p1]")
	g.noGroup("p1")
	g.await()
}

// The mirror of a static pod is deleted, and kubelet creates it again.
func TestOrphanComesBack(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.group("static", true)
	mirror := g.pod("mirror")
	mirror.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "static"}
	g.addPod(mirror)
	g.checkpoint("static", "GPU-1")
	must(t, g.r.Restore(t.Context()))
	g.run()
	g.await("GPU-1: pod GPU-1 held [static]")
	g.deletePod("mirror")
	g.await("GPU-1: pod GPU-1 draining [static]")
	g.addPod(mirror)
	g.await("GPU-1: pod GPU-1 held [static]")
}

// A pod that ended before the Allocate cannot have got it, whatever a file says that kubelet wrote afterwards.
func TestCheckpointOfAPodThatHadEnded(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	ended := g.pod("ended")
	ended.Status.Phase = corev1.PodSucceeded
	g.addPod(ended)
	g.addPod(g.pod("p2"))
	g.run()
	g.allocate("GPU-1")
	g.checkpoint("ended", "GPU-1")
	g.stays("GPU-1: pod GPU-1 held []")
	g.checkpoint("p2", "GPU-1")
	g.await("GPU-1: pod GPU-1 held [p2]")
}

// A pod that is force-deleted as soon as it has its device keeps it while it runs, and the next pod is refused.
func TestForceDeletedRightAfterAllocate(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.group("p1", true)
	g.addPod(g.pod("p1"))
	g.run()
	g.allocate("GPU-1")
	g.checkpoint("p1", "GPU-1")
	g.await("GPU-1: pod GPU-1 held [p1]")
	g.deletePod("p1")
	// The next pod is kept away before it is refused.
	g.await("GPU-1: pod GPU-1 draining [p1]")
	err := g.book.ReservePod([]ledger.PodRequest{{ID: "GPU-1", Resource: resource, Device: device.Ref{GPU: "GPU-1"}}})
	if _, conflict := errors.AsType[*ledger.ConflictError](err); !conflict {
		t.Errorf("a second owner: %v", err)
	}
	g.noGroup("p1")
	// A hold within the settling time does not block the next pod.
	g.await("GPU-1: pod GPU-1 held [p1]")
	g.await()
}

// The next pod gets the device between the decision about the last pod and the release.
func TestReuseBetweenDecisionAndRelease(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.group("anchor", false) // no pods are known here, and one that runs might have any GPU
	g.allocate("GPU-1")
	judged := g.book.Holds()[0]
	must(t, g.book.Release(judged))
	g.allocate("GPU-1")
	must(t, g.book.Release(judged))
	g.want("GPU-1: pod GPU-1 held []")
	if _, err := g.r.settle(judged, nil, podstate.DeviceCheckpoint{Written: time.Now().Add(time.Hour), Devices: []podstate.PodDevice{{PodUID: "p1", Resource: resource, ID: "GPU-1"}}}); err != nil {
		t.Error(err)
	}
	g.want("GPU-1: pod GPU-1 held []")
}

func TestDrainingClaim(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.group("p1", true)
	g.addPod(g.pod("p1", "one"))
	g.run()
	g.prepare("c1", "one", "GPU-1", "p1")
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.stays("GPU-1: claim c1 draining [p1]")
	g.prepare("c1", "one", "GPU-1", "p1")
	g.await("GPU-1: claim c1 held [p1]")
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.group("p1", false)
	// Prepared again, and not yet started.
	g.stays("GPU-1: claim c1 draining [p1]")
	g.deletePod("p1")
	g.await()
}

// A claim that is shared for long sees many pods. Those that are gone are struck off, those that may still use it are not.
func TestPodsOfALongSharedClaim(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	var pods, others []string
	for i := range 10 {
		pods, others = append(pods, fmt.Sprintf("p%02d", i)), append(others, fmt.Sprintf("q%02d", i))
		g.addPod(g.pod(pods[i], "one"))
		g.addPod(g.pod(others[i], "two"))
	}
	g.group("p00", true)
	g.watchPods()
	g.prepare("c1", "one", "GPU-1", pods...)
	g.prepare("c2", "two", "GPU-2", others...)
	gone := append(pods[:8:8], others...)
	for _, uid := range gone {
		g.deletePod(uid)
	}
	g.awaitDeleted(gone...)
	g.settle()
	// A hold without a pod would count as unknown.
	g.want("GPU-1: claim c1 held [p00 p08 p09]", fmt.Sprintf("GPU-2: claim c2 held %v", others))
}

func TestNothingIsReleasedWhileServersAreAway(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2", "GPU-3")
	g.verifySoon()
	g.verifySoon()
	g.run()
	g.change(func() { g.away = true })
	g.allocate("GPU-1")
	g.prepare("c1", "one", "GPU-2")
	g.stays("GPU-1: pod GPU-1 held []", "GPU-2: claim c1 held []")
	g.change(func() { g.away = false })
	g.await()
}

func TestNothingHappensBeforeThePodsAreKnown(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	g.verifySoon()
	g.checkpoint("ended", "GPU-1")
	g.group("ended", false)
	must(t, g.r.Restore(t.Context()))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.r.Run(ctx) }()
	g.prepare("c1", "one", "GPU-2")
	calls := g.calls()
	g.stays("GPU-1: pod GPU-1 restored [ended]", "GPU-2: claim c1 held []")
	if g.calls() != calls {
		t.Error("kubelet or the API server was asked")
	}
	cancel()
	must(t, <-done)
}

func TestUnconfirmedClaim(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2", "GPU-3")
	g.verifySoon()
	g.group("p2", true)
	g.addPod(g.pod("p2"))
	g.claim("one", "c1", "gpu-1")
	g.claim("two", "other-uid", "gpu-2")
	g.prepare("c1", "one", "GPU-1")       // allocated, whatever kubelet knows
	g.prepare("c2", "two", "GPU-2", "p2") // another claim of its name, and its pod runs
	g.prepare("c3", "three", "GPU-3")     // gone
	g.run()
	g.await("GPU-1: claim c1 held []", "GPU-2: claim c2 held [p2]")
	g.noGroup("p2")
	g.deletePod("p2")
	g.await("GPU-1: claim c1 held []")
	g.claim("one", "c1")
	g.await()
}

// A claim keeps a GPU that the inventory does not have, also without a driver.
func TestClaimOfAGPUThatIsNotThere(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.verifySoon()
	g.claim("one", "c1", "gpu-1")
	g.prepare("c1", "one", "GPU-1")
	g.setGPUs()
	g.run()
	g.stays("GPU-1: claim c1 held []")
	g.claim("one", "c1")
	g.await()
}

// With the API server away at start a claim for admin access passes for a holder, until it is back.
func TestAdminAccessIsFoundOut(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	g.verifySoon()
	g.away = true
	g.group("p1", true)
	g.claimState(kubeletClaim{"c1", "monitor", []string{"p1"}, []string{"gpu-1"}}, kubeletClaim{"c2", "two", nil, []string{"gpu-2"}})
	must(t, g.r.Restore(t.Context()))
	g.addPod(g.pod("p1", "monitor"))
	g.run()
	g.stays("GPU-1: claim c1 restored [p1]", "GPU-2: claim c2 restored []")
	g.claim("monitor", "c1", "admin:gpu-1")
	g.claim("two", "c2", "gpu-2")
	g.change(func() { g.away = false })
	g.await("GPU-2: claim c2 restored []")
}

// TestAdminAccessIsAskedForAgain: what was held because the API server did not answer is free soon after it does.
func TestAdminAccessIsAskedForAgain(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	g.away = true
	g.group("p1", true)
	g.claimState(kubeletClaim{"c1", "monitor", []string{"p1"}, []string{"gpu-1", "gpu-2"}})
	must(t, g.r.Restore(t.Context()))
	g.addPod(g.pod("p1", "monitor"))
	g.claim("monitor", "c1", "admin:gpu-1", "gpu-2")
	g.run()
	g.stays("GPU-1: claim c1 restored [p1]", "GPU-2: claim c1 restored [p1]")
	g.change(func() { g.away = false })
	g.await("GPU-2: claim c1 restored [p1]")
}

func TestLimitWithoutPod(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2", "GPU-3")
	g.verifySoon()
	g.used = []podstate.UsedDevice{{ID: "GPU-1", Resource: resource}}
	g.used = append(g.used, podstate.UsedDevice{ID: "GPU-3", Resource: resource})
	// An unknown pod, whose cgroup exists.
	g.group("unseen", true)
	g.run()
	g.allocate("GPU-1", "GPU-2", "GPU-3")
	g.checkpoint("unseen", "GPU-3")
	g.await("GPU-1: pod GPU-1 held []", "GPU-3: pod GPU-3 held [unseen]")
	g.change(func() { g.used = nil })
	g.await("GPU-3: pod GPU-3 held [unseen]")
	g.stays("GPU-3: pod GPU-3 held [unseen]")
	g.noGroup("unseen")
	g.await()
}

func TestNoRequestWhileAllIsConfirmed(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	g.verifySoon()
	g.addPod(g.asking("p1", "1"))
	g.addPod(g.pod("p2", "one"))
	// kubelet records a claim before it calls Prepare, and the devices after the answer.
	g.claimState(kubeletClaim{"c1", "one", []string{"p2"}, nil})
	g.run()
	g.allocate("GPU-1")
	g.checkpoint("p1", "GPU-1")
	g.prepare("c1", "one", "GPU-2", "p2")
	g.claimState(kubeletClaim{"c1", "one", []string{"p2"}, []string{"gpu-2"}})
	g.await("GPU-1: pod GPU-1 held [p1]", "GPU-2: claim c1 held [p2]")
	g.change(func() { g.gets, g.lists = 0, 0 })
	g.client.ClearActions()
	g.stays("GPU-1: pod GPU-1 held [p1]", "GPU-2: claim c1 held [p2]")
	if calls, actions := g.calls(), len(g.client.Actions()); calls > 0 || actions > 0 {
		t.Errorf("%d questions, %d calls to the API server", calls, actions)
	}
}

// The hold of an unreadable record ends by the state of all pods that could have it.
func TestUnreadableRecords(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2", "GPU-3")
	g.verifySoon()
	must(t, g.book.Close())
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "holds"), 0o700))
	for _, name := range []string{"claim~c1~GPU-1", "claim~c2~GPU-2", "pod~GPU-3~GPU-3"} {
		must(t, os.WriteFile(filepath.Join(dir, "holds", name), []byte("?"), 0o600))
	}
	var err error
	g.book, err = ledger.Open(t.Context(), ledger.Options{Dir: dir, BootID: "boot", PodStates: g.pods})
	must(t, err)
	g.r.Ledger = g.book
	must(t, g.r.Restore(t.Context()))
	g.claim("one", "c1", "gpu-1")
	g.addPod(g.pod("p1", "one"))
	g.group("unknown", true)
	g.run()
	unreadable := []string{"GPU-1: claim c1 restored [] unreadable", "GPU-2: claim c2 restored [] unreadable", "GPU-3: pod GPU-3 restored [] unreadable"}
	g.stays(unreadable...) // the unknown pod may belong to any of them
	g.noGroup("unknown")
	g.await("GPU-1: claim c1 restored []")
}

// A crash before the contents of a record were written must not turn a replica into the whole GPU.
func TestUnreadableReplica(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.gpus[0].MemoryBytes = 40 << 30
	g.gpus[0].Sharing = device.Sharing{Strategy: device.TimeSlicing, Replicas: map[string]device.Replicas{"": {Count: 4}}}
	must(t, g.book.Close())
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "holds"), 0o700))
	must(t, os.WriteFile(filepath.Join(dir, "holds", "pod~GPU-1::0~GPU-1"), nil, 0o600))
	var err error
	g.book, err = ledger.Open(t.Context(), ledger.Options{Dir: dir, BootID: "boot", PodStates: g.pods})
	must(t, err)
	g.r.Ledger = g.book
	g.group("p1", true)
	g.checkpoint("p1", "GPU-1::0")
	must(t, g.r.Restore(t.Context()))
	g.await("GPU-1: pod GPU-1::0 restored [p1] has 10240Mi of 40960Mi")
}

func TestKubeletReset(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	g.addPod(g.pod("p1"))
	g.addPod(g.pod("p2"))
	g.run()
	g.allocate("GPU-1")
	g.checkpoint("p1", "GPU-1")
	g.await("GPU-1: pod GPU-1 held [p1]")
	plugins := filepath.Join(g.dir, "device-plugins")
	must(t, os.RemoveAll(plugins))
	g.stays("GPU-1: pod GPU-1 held [p1]")
	must(t, os.Mkdir(plugins, 0o755))
	g.allocate("GPU-2")
	g.checkpoint("p1", "GPU-1", "p2", "GPU-2")
	g.await("GPU-1: pod GPU-1 held [p1]", "GPU-2: pod GPU-2 held [p2]")
}

// While the checkpoint cannot be read no limit ends, since it may have another pod by now; claims go on.
func TestDamagedCheckpoint(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	g.group("p1", false)
	p1 := g.pod("p1")
	p1.Status.Phase = corev1.PodSucceeded
	g.addPod(p1)
	g.checkpoint("p1", "GPU-1")
	must(t, g.r.Restore(t.Context()))
	g.prepare("c1", "one", "GPU-2", "p2")
	p2 := g.pod("p2")
	p2.Status.Phase = corev1.PodSucceeded
	g.addPod(p2)
	g.group("p2", true)
	must(t, g.book.DrainClaim(t.Context(), "c1"))
	g.replace(podstate.DeviceCheckpointPath(g.dir), []byte("{"))
	g.run()
	g.stays("GPU-1: pod GPU-1 restored [p1]", "GPU-2: claim c1 draining [p2]")
	g.group("p2", false)
	g.await("GPU-1: pod GPU-1 restored [p1]")
	g.checkpoint("p1", "GPU-1")
	g.await()
}

func TestOnlyCheckpointsMatter(t *testing.T) {
	tests := []struct {
		event fsnotify.Event
		want  bool
	}{
		{fsnotify.Event{Name: "/k/device-plugins/kubelet_internal_checkpoint", Op: fsnotify.Create}, true},
		{fsnotify.Event{Name: "/k/device-plugins/kubelet_internal_checkpoint", Op: fsnotify.Write}, true},
		{fsnotify.Event{Name: "/k/device-plugins/kubelet_internal_checkpoint", Op: fsnotify.Chmod}, false},
		{fsnotify.Event{Name: "/k/device-plugins/.123", Op: fsnotify.Write}, false},
		{fsnotify.Event{Name: "/k/device-plugins/tandem.sock", Op: fsnotify.Create}, false},
		{fsnotify.Event{Name: "/k/device-plugins", Op: fsnotify.Create}, true},
		{fsnotify.Event{Name: "/k/device-plugins", Op: fsnotify.Remove}, true},
		{fsnotify.Event{Name: "/k", Op: fsnotify.Remove}, true},
		{fsnotify.Event{Name: "/k/cpu_manager_state", Op: fsnotify.Create}, false},
		{fsnotify.Event{Name: "/k/dra_manager_state", Op: fsnotify.Create}, true},
	}
	for _, test := range tests {
		if got := relevant("/k", test.event); got != test.want {
			t.Errorf("%s: got %v", test.event, got)
		}
	}
}

// An error is looked at again after a while, not at once.
func TestErrorsDoNotSpin(t *testing.T) {
	g := newRig(t, "GPU-1")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.pods.Run(ctx) }()
	if !g.pods.AwaitSync(ctx) {
		t.Fatal("no pods")
	}
	g.allocate("GPU-1")
	g.replace(podstate.DeviceCheckpointPath(g.dir), []byte("{"))
	wait, err := g.r.Settle(t.Context())
	if err == nil || wait != never {
		t.Errorf("got %v, %v", wait, err)
	}
	g.away = true
	d := &unconfirmed{since: long}
	g.r.unconfirmed = map[holdKey]*unconfirmed{keyOf(g.book.Holds()[0]): d}
	before := time.Now()
	wait, err = g.r.verify(ctx)
	if err == nil || wait <= 0 || !g.r.due(d).After(before) {
		t.Errorf("next look in %v, due %v, error %v", wait, g.r.due(d), err)
	}
	cancel()
	must(t, <-done)
}

// Where inotify has run out, as on nodes with many watchers.
func TestWithoutNotifications(t *testing.T) {
	t.Cleanup(func() { filewatch.NewWatcher = fsnotify.NewWatcher })
	filewatch.NewWatcher = func() (*fsnotify.Watcher, error) { return nil, unix.EMFILE }
	t.Run("a limit", TestLimitFromAllocateToEnd)
	t.Run("a checkpoint that goes", TestDeviceCheckpointDeleted)
	t.Run("a claim", TestDrainingClaim)
}

// kubelet has a minute to admit the pod of a hold without a pod, and half a minute between the two checks.
func TestTheMinuteOfALimit(t *testing.T) {
	r := &Reconciler{times: defaultTimes()}
	since := time.Now()
	for _, test := range []struct {
		what string
		d    unconfirmed
		want time.Duration
	}{
		{"at first", unconfirmed{}, time.Minute},
		{"not listed once", unconfirmed{checked: since.Add(time.Minute), unlisted: 1}, 90 * time.Second},
		{"listed", unconfirmed{checked: since.Add(time.Minute)}, 2 * time.Minute},
	} {
		test.d.since = since
		if got := r.due(&test.d).Sub(since); got != test.want {
			t.Errorf("%s: after %s, want %s", test.what, got, test.want)
		}
	}
}
