// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

func TestRestore(t *testing.T) {
	tests := []struct {
		name string
		make func(*rig)
		want []string
	}{
		{"nothing", func(*rig) {}, nil},
		{"limits of pods that live", func(g *rig) {
			g.group("p1", true)
			g.group("p2", false)
			g.checkpoint("p1", "GPU-1", "p2", "GPU-2", "ended", "GPU-3")
		}, []string{"GPU-1: pod GPU-1 restored [p1]", "GPU-2: pod GPU-2 restored [p2]"}},
		{"replicas of another plugin", func(g *rig) {
			g.group("p1", true)
			g.checkpoint("p1", "GPU-1::3")
		}, []string{"GPU-1: pod GPU-1::3 restored [p1]"}},
		{"partitions of another plugin's naming", func(g *rig) {
			g.group("p1", true)
			g.checkpoint("p1", "MIG-GPU-1/7/0", "p1", "MIG-b::0")
		}, []string{"GPU-1: pod MIG-GPU-1/7/0 restored [p1]", "GPU-4@1+1: pod MIG-b::0 restored [p1]"}},
		{"partitions", func(g *rig) {
			g.group("p1", true)
			g.claim("one", "c1", "gpu-4-mig-1g10gb-19-2")
			g.claimState(kubeletClaim{"c1", "one", []string{"p2"}, []string{"gpu-4-mig-1g10gb-19-2"}})
			g.checkpoint("p1", "MIG-a", "ended", "MIG-b")
			g.used = []podstate.UsedDevice{{ID: "MIG-a", Resource: migResource}, {ID: "MIG-gone", Resource: migResource}}
		}, []string{"GPU-4@0+1: pod MIG-a restored [p1]", "GPU-4@2+1: claim c1 restored [p2]"}},
		{"another plugin's minors", func(g *rig) {
			g.group("p1", true)
			g.checkpoint("p1", "nvidia1", "p1", "nvidia2/vgpu3")
		}, []string{"GPU-1: pod nvidia1 restored [p1]", "GPU-2: pod nvidia2/vgpu3 restored [p1]"}},
		{"no cgroups to be seen", func(g *rig) {
			must(g.t, os.RemoveAll(filepath.Join(g.groups, "kubepods")))
			g.checkpoint("p1", "GPU-1")
		}, []string{"GPU-1: pod GPU-1 restored [p1]"}},
		{"pod resources", func(g *rig) {
			g.checkpoint("ended", "GPU-2")
			g.used = []podstate.UsedDevice{{ID: "GPU-1", Resource: resource}, {ID: "GPU-2", Resource: resource}}
			g.usedBy = []podstate.KubeletClaim{
				{Namespace: "apps", Name: "one", Devices: []podstate.PoolDevice{{Pool: node, Device: "gpu-0"}}},
				{Namespace: "apps", Name: "deleted", Devices: []podstate.PoolDevice{{Pool: node, Device: "gpu-3"}}},
			}
			g.claim("one", "c1", "gpu-0")
		}, []string{"GPU-0: claim c1 restored []", "GPU-1: pod GPU-1 restored []"}},
		{"claims after a reboot, one of them for admin access", func(g *rig) {
			g.claim("one", "c1", "gpu-1", "gpu-2")
			g.claim("monitor", "c2", "admin:gpu-0", "admin:gpu-1", "admin:gpu-2")
			g.claimState(kubeletClaim{"c1", "one", []string{"p1"}, []string{"gpu-1", "gpu-2"}}, kubeletClaim{"c2", "monitor", []string{"p2"}, []string{"gpu-0", "gpu-1", "gpu-2"}})
		}, []string{"GPU-1: claim c1 restored [p1]", "GPU-2: claim c1 restored [p1]"}},
		{"a claim with a share of a GPU and admin access to all", func(g *rig) {
			g.claim("one", "c1", "4Gi:gpu-1", "admin:gpu-1", "admin:gpu-2")
			g.claimState(kubeletClaim{"c1", "one", []string{"p1"}, []string{"gpu-1", "gpu-1", "gpu-2"}})
		}, []string{"GPU-1: claim c1 restored [p1]"}},
		{"a claim that kubelet has begun to prepare and was not given", func(g *rig) {
			g.claim("one", "c1", "gpu-1")
			g.claimState(kubeletClaim{"c1", "one", []string{"p1"}, nil})
		}, nil},
		{"a claim that was allocated anew while a pod still runs with what it had", func(g *rig) {
			g.claim("one", "c1", "gpu-2")
			g.group("p1", true)
			g.claimState(kubeletClaim{"c1", "one", []string{"p1"}, []string{"gpu-1"}})
		}, []string{"GPU-1: claim c1 restored [p1]"}},
		{"claims with the API server away", func(g *rig) {
			g.away = true
			g.claimState(kubeletClaim{"c1", "one", []string{"p1"}, []string{"gpu-1"}})
		}, []string{"GPU-1: claim c1 restored [p1]"}},
		{"claims that are gone, deallocated or others now, without processes", func(g *rig) {
			g.claim("deallocated", "c2")
			g.claim("again", "c4", "gpu-1")
			g.claimState(kubeletClaim{"c1", "gone", []string{"p1"}, []string{"gpu-1"}}, kubeletClaim{"c2", "deallocated", []string{"p2"}, []string{"gpu-2"}}, kubeletClaim{"c3", "again", []string{"p3"}, []string{"gpu-3"}})
		}, nil},
		{"the same, and their pods still run", func(g *rig) {
			g.claim("deallocated", "c2")
			g.claim("again", "c4", "gpu-1")
			for _, uid := range []string{"p1", "p2", "p3"} {
				g.group(uid, true)
			}
			g.claimState(kubeletClaim{"c1", "gone", []string{"p1"}, []string{"gpu-1"}}, kubeletClaim{"c2", "deallocated", []string{"p2"}, []string{"gpu-2"}}, kubeletClaim{"c3", "again", []string{"p3"}, []string{"gpu-3"}})
		}, []string{"GPU-1: claim c1 restored [p1]", "GPU-2: claim c2 restored [p2]", "GPU-3: claim c3 restored [p3]"}},
		{"a GPU in two hands", func(g *rig) {
			g.group("p1", true)
			g.checkpoint("p1", "GPU-1")
			g.claim("one", "c1", "gpu-1")
			g.claimState(kubeletClaim{"c1", "one", []string{"p2"}, []string{"gpu-1"}})
		}, []string{"GPU-1: claim c1 restored [p2]", "GPU-1: pod GPU-1 restored [p1]"}},
		{"a device that is not there", func(g *rig) {
			g.claim("one", "c1", "gpu-1", "gpu-9")
			g.claimState(kubeletClaim{"c1", "one", nil, []string{"gpu-1", "gpu-9"}})
		}, []string{"GPU-1: claim c1 restored []"}},
		{"own records", func(g *rig) {
			g.allocate("GPU-1")
			g.prepare("c1", "one", "GPU-2", "p2")
			g.claim("one", "c1", "gpu-2")
			g.claimState(kubeletClaim{"c1", "one", []string{"p2", "p3"}, []string{"gpu-2"}})
		}, []string{"GPU-1: pod GPU-1 held []", "GPU-2: claim c1 held [p2 p3]"}},
		{"a checkpoint that is older than the own record", func(g *rig) {
			g.group("before", false)
			g.checkpoint("before", "GPU-1")
			must(g.t, os.Chtimes(podstate.DeviceCheckpointPath(g.dir), long, long))
			g.allocate("GPU-1")
		}, []string{"GPU-1: pod GPU-1 held []"}},
		{"files that cannot be read", func(g *rig) {
			g.replace(podstate.DeviceCheckpointPath(g.dir), []byte("{"))
			g.replace(filepath.Join(g.dir, "dra_manager_state"), []byte("{"))
			g.prepare("c1", "one", "GPU-2", "p2")
		}, []string{"GPU-2: claim c1 held [p2]"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			g := newRig(t, "GPU-0", "GPU-1", "GPU-2", "GPU-3", "GPU-4:MIG-a,MIG-b,MIG-c")
			test.make(g)
			must(t, g.r.Restore(t.Context()))
			g.want(test.want...)
		})
	}
}

// A GPU that was lost when the agent started still belongs to its claim when it recovers.
func TestRestoreOfLateGPU(t *testing.T) {
	g := newRig(t, "GPU-0")
	g.claim("one", "c1", "gpu-0", "gpu-1")
	g.claim("two", "c2", "gpu-2")
	state := []kubeletClaim{{"c1", "one", []string{"p1"}, []string{"gpu-0", "gpu-1"}}, {"c2", "two", nil, []string{"gpu-2"}}}
	g.claimState(state...)
	must(t, g.r.Restore(t.Context()))
	// kubelet has unprepared the other one meanwhile. A pass that has read its state of before may still take a hold, which ends later.
	g.claimState(state[0])
	g.run()
	g.await("GPU-0: claim c1 restored [p1]")
	g.setGPUs("GPU-0", "GPU-1")
	g.await("GPU-0: claim c1 restored [p1]", "GPU-1: claim c1 restored [p1]")
	g.setGPUs("GPU-0", "GPU-1", "GPU-2")
	g.stays("GPU-0: claim c1 restored [p1]", "GPU-1: claim c1 restored [p1]")
}

// A claim whose device comes late is prepared anew with another one meanwhile.
func TestRestoreOfLateClaimWithAnotherDevice(t *testing.T) {
	g := newRig(t, "GPU-1")
	g.claim("one", "c1", "gpu-9")
	g.claimState(kubeletClaim{"c1", "one", []string{"p1"}, []string{"gpu-9"}})
	must(t, g.r.Restore(t.Context()))
	g.claim("one", "c1", "gpu-1")
	g.claimState(kubeletClaim{"c1", "one", []string{"p1"}, []string{"gpu-1"}})
	left, err := g.r.RestoreLate(t.Context())
	must(t, err)
	g.want("GPU-1: claim c1 restored [p1]")
	if left {
		t.Error("the claim is late still")
	}
}

// fullDisk has no room for the first record.
type fullDisk struct {
	*ledger.Ledger
	err      error
	repaired int
}

func (f *fullDisk) Expect(h ledger.Hold) error {
	err := errors.Join(f.Ledger.Expect(h), f.err)
	f.err = nil
	return err
}

func (f *fullDisk) Repair() error { f.repaired++; return f.Ledger.Repair() }

// Who may have parts only is thought to have all until the API server can be asked, and then has what it says: two claims that
// each keep the other away otherwise wait forever.
func TestRestoreOfParts(t *testing.T) {
	const gib = 1 << 30
	g := newRig(t, "GPU-0", "GPU-1")
	g.change(func() {
		for i := range g.gpus {
			g.gpus[i].MemoryBytes, g.gpus[i].Sharing = 24*gib, device.Sharing{Strategy: device.TimeSlicing, Claims: "memory"}
		}
		g.away = true
	})
	g.claim("four", "c1", "4Gi:gpu-1")
	g.claim("eight", "c2", "8Gi:gpu-1")
	g.claim("all", "c3", "gpu-0")
	g.claimState(
		kubeletClaim{"c1", "four", []string{"p1"}, []string{"gpu-1"}}, kubeletClaim{"c2", "eight", []string{"p2"}, []string{"gpu-1"}},
		kubeletClaim{"c3", "all", []string{"p3"}, []string{"gpu-0"}},
	)
	must(t, g.r.Restore(t.Context()))
	g.want("GPU-0: claim c3 restored [p3]", "GPU-1: claim c1 restored [p1]", "GPU-1: claim c2 restored [p2]")
	g.run()
	g.stays("GPU-0: claim c3 restored [p3]", "GPU-1: claim c1 restored [p1]", "GPU-1: claim c2 restored [p2]")
	g.change(func() { g.away = false })
	g.await("GPU-0: claim c3 restored [p3]", "GPU-1: claim c1 restored [p1] has 4096Mi of 24576Mi", "GPU-1: claim c2 restored [p2] has 8192Mi of 24576Mi")
}

// One hold that cannot be recorded must not keep the agent from holding the others, and is tried again.
func TestRestoreOnAFullDisk(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1", "GPU-2")
	g.group("p1", true)
	g.group("p2", true)
	g.checkpoint("p1", "GPU-1", "p2", "GPU-2")
	disk := &fullDisk{Ledger: g.book, err: fmt.Errorf("write record: %w", syscall.ENOSPC)}
	g.r.Ledger = disk
	must(t, g.r.Restore(t.Context()))
	g.want("GPU-1: pod GPU-1 restored [p1]", "GPU-2: pod GPU-2 restored [p2]")
	g.settle()
	if disk.repaired != 1 {
		t.Error("was not tried again")
	}
	disk.err = fmt.Errorf("write record: %w", syscall.EROFS)
	if err := g.r.Restore(t.Context()); err != nil {
		t.Errorf("on a read-only disk: %v", err)
	}
	disk.err = ledger.ErrLocked
	if err := g.r.Restore(t.Context()); !errors.Is(err, ledger.ErrLocked) {
		t.Errorf("in a directory that is not ours any more: %v", err)
	}
}

// What a limit of before has by the UUID of a partition is known once the partition is.
func TestRestoreOfLatePartition(t *testing.T) {
	g := newRig(t, "GPU-0")
	for _, uid := range []string{"p1", "p2", "p3"} {
		g.group(uid, true)
		g.addPod(g.pod(uid))
	}
	g.checkpoint("p1", "MIG-a", "p2", "MIG-b", "p3", "MIG-c")
	must(t, g.r.Restore(t.Context()))
	g.want()
	g.run()
	g.setGPUs("GPU-0:MIG-a")
	g.await("GPU-0@0+1: pod MIG-a held [p1]")
	_, err := g.r.RestoreLate(t.Context()) // the pass that added the hold may go on
	must(t, err)
	// The second pod has ended meanwhile, and its partition is made again under another name.
	g.noGroup("p2")
	g.checkpoint("p1", "MIG-a", "p3", "MIG-c")
	g.setGPUs("GPU-0:MIG-a,MIG-b,MIG-c")
	g.await("GPU-0@0+1: pod MIG-a held [p1]", "GPU-0@2+1: pod MIG-c held [p3]")
}

// silentClaims counts requests, and answers none before its deadline.
type silentClaims struct{ asked *int }

func (s silentClaims) Get(ctx context.Context, _ string, _ metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	if ctx.Err() == nil {
		*s.asked++
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

// silentRig is a node with five claims of a shared GPU, and an API server that does not answer. asked counts the requests.
func silentRig(t *testing.T) (g *rig, asked *int) {
	t.Helper()
	g, asked = newRig(t, "GPU-0"), new(int)
	g.change(func() {
		g.gpus[0].MemoryBytes, g.gpus[0].Sharing = 24<<30, device.Sharing{Strategy: device.TimeSlicing, Claims: "memory"}
	})
	var claims []kubeletClaim
	for _, uid := range []string{"c1", "c2", "c3", "c4", "c5"} {
		claims = append(claims, kubeletClaim{uid, "claim-" + uid, []string{"p-" + uid}, []string{"gpu-0"}})
	}
	g.claimState(claims...)
	g.r.times.call, g.r.times.restore = 50*time.Millisecond, 50*time.Millisecond
	g.r.Claims = func(string) Claims { return silentClaims{asked} }
	return g, asked
}

// Adopt, and with it the registration of both APIs, waits for a pass over late claims. All their requests together have one deadline.
func TestAPassOverLateClaimsIsBounded(t *testing.T) {
	g, asked := silentRig(t)
	must(t, g.r.Restore(t.Context()))
	*asked = 0
	if left, err := g.r.RestoreLate(t.Context()); !left || err == nil || *asked != 1 {
		t.Errorf("left %t, %v, after %d requests", left, err, *asked)
	}
}

// The requests of Adopt have one deadline, too.
func TestAdoptIsBounded(t *testing.T) {
	g, asked := silentRig(t)
	if err := g.r.Adopt(t.Context()); err != nil || *asked != 1 {
		t.Errorf("adopted with %v, after %d requests", err, *asked)
	}
}

// latePodHolds is a node of two limits whose partitions come late.
func latePodHolds(t *testing.T) *rig {
	t.Helper()
	g := newRig(t, "GPU-0")
	for _, uid := range []string{"p1", "p2"} {
		g.group(uid, true)
		g.addPod(g.pod(uid))
	}
	g.checkpoint("p1", "MIG-a", "p2", "MIG-b")
	return g
}

// What cannot be read when a partition comes is read again.
func TestRestoreOfLatePartitionIsTriedAgain(t *testing.T) {
	g := latePodHolds(t)
	g.claim("one", "c1", "gpu-1")
	g.claimState(kubeletClaim{"c1", "one", []string{"p3"}, []string{"gpu-1"}})
	must(t, g.r.Restore(t.Context()))
	g.replace(podstate.ClaimStatePath(g.dir), []byte("{"))
	g.replace(podstate.DeviceCheckpointPath(g.dir), []byte("{"))
	g.run()
	g.setGPUs("GPU-0:MIG-a,MIG-b", "GPU-1")
	g.stays()
	// The limits do not wait for the claim.
	g.checkpoint("p1", "MIG-a", "p2", "MIG-b")
	limits := []string{"GPU-0@0+1: pod MIG-a held [p1]", "GPU-0@1+1: pod MIG-b held [p2]"}
	g.await(limits...)
	g.claimState(kubeletClaim{"c1", "one", []string{"p3"}, []string{"gpu-1"}})
	g.await(append(limits, "GPU-1: claim c1 restored [p3]")...)
}

// A hold that cannot be recorded is not forgotten, and neither are those after it.
func TestRestoreOfLatePartitionFails(t *testing.T) {
	g := latePodHolds(t)
	must(t, g.r.Restore(t.Context()))
	disk := &brokenDisk{Ledger: g.book}
	disk.fail.Store(3)
	g.r.Ledger = disk
	g.run()
	g.setGPUs("GPU-0:MIG-a,MIG-b")
	g.await("GPU-0@0+1: pod MIG-a held [p1]", "GPU-0@1+1: pod MIG-b held [p2]")
}

// TestSharesOfOneGPUAreAdded: a claim with two shares of a GPU is restored with both.
func TestSharesOfOneGPUAreAdded(t *testing.T) {
	g := newRig(t, "GPU-0", "GPU-1")
	g.claim("shared", "uid-s", "4Gi:gpu-1", "2Gi:gpu-1")
	if got := g.r.usesOf(g.claims["apps/shared"]).consumed[podstate.PoolDevice{Pool: node, Device: "gpu-1"}]; got.Memory != 6<<30 {
		t.Errorf("it has %+v", got)
	}
}

// brokenDisk records nothing at first.
type brokenDisk struct {
	*ledger.Ledger
	fail atomic.Int32
}

func (b *brokenDisk) Expect(h ledger.Hold) error {
	if b.fail.Add(-1) >= 0 {
		return ledger.ErrLocked
	}
	return b.Ledger.Expect(h)
}

// A partition that only kubelet's pod resources name is held once it comes; for the pod that the checkpoint names by then.
func TestRestoreOfUsedLatePartition(t *testing.T) {
	g := latePodHolds(t)
	g.checkpoint()
	for pod, id := range map[string]string{"p1": "MIG-a", "p2": "MIG-b"} {
		g.used = append(g.used, podstate.UsedDevice{Namespace: "apps", Pod: pod, Resource: migResource, ID: id})
	}
	must(t, g.r.Restore(t.Context()))
	g.checkpoint("p2", "MIG-b")
	g.run()
	g.setGPUs("GPU-0:MIG-a,MIG-b")
	g.await("GPU-0@0+1: pod MIG-a restored []", "GPU-0@1+1: pod MIG-b held [p2]")
}

// A limit of a partition is identified by what kubelet says of its own resource.
func TestIdentifyByResource(t *testing.T) {
	g := newRig(t, "GPU-0:MIG-a,MIG-b")
	for _, uid := range []string{"p1", "p2"} {
		g.group(uid, true)
		g.addPod(g.pod(uid))
	}
	must(t, g.book.ReservePod([]ledger.PodRequest{{ID: "MIG-a", Resource: resource, Device: device.Ref{GPU: "GPU-0", Placement: device.Placement{Size: 1}}}}))
	g.allocate("MIG-b")
	g.checkpoint("p1", "MIG-a", "p2", "MIG-b")
	g.run()
	g.await("GPU-0@0+1: pod MIG-a held []", "GPU-0@1+1: pod MIG-b held [p2]")
}

// What kubelet remembers to hand to the runtime is told before either API is served.
func TestRestoreTellsRememberedNames(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-0")
	var told []string
	g.r.AddPlaceholders = func(names []string) { told = append(told, names...) }
	g.claimState(kubeletClaim{"c1", "one", nil, []string{"gpu-0", "gpu-0-mig-1g10gb-19-2"}}, kubeletClaim{"c2", "two", nil, nil})
	must(t, g.r.Restore(t.Context()))
	if want := []string{"vendor/class=gpu-0", "vendor/class=gpu-0-mig-1g10gb-19-2"}; !slices.Equal(told, want) {
		t.Errorf("told %v, want %v", told, want)
	}
}
