// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/golden"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

func gpu(minor int, uuid string) device.GPU {
	return device.GPU{UUID: uuid, Minor: minor, ProductName: "NVIDIA H100 80GB HBM3"}
}

func unhealthy(g device.GPU, reason, message string) device.GPU {
	g.Health = device.Health{Reason: reason, Message: message}
	return g
}

func claim(uid, name, gpu string, state ledger.State, pods ...ledger.Pod) ledger.Hold {
	h := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: uid}, Device: device.Ref{GPU: gpu}, State: state, Pods: pods}
	if name != "" {
		h.Namespace, h.Name = "apps", name
	}
	return h
}

func limit(gpu string, state ledger.State, pods ...ledger.Pod) ledger.Hold {
	return ledger.Hold{
		Holder: ledger.Holder{Kind: ledger.KindPod, ID: gpu}, Device: device.Ref{GPU: gpu}, State: state,
		Resource: "nvidia.com/gpu", Pods: pods,
	}
}

func pod(uid, name string) ledger.Pod {
	if name == "" {
		return ledger.Pod{UID: uid}
	}
	return ledger.Pod{UID: uid, Namespace: "apps", Name: name}
}

func facts() Facts {
	partition := claim("c4", "slice", "GPU-6", ledger.StateHeld)
	partition.Device.Placement = device.Placement{Start: 2, Size: 1}
	another := partition
	another.Device.Placement = device.Placement{Start: 4, Size: 1}
	return Facts{
		Mode: "Dual", Limits: device.Resources{GPU: "nvidia.com/gpu"}, Generation: 3,
		Inventory: device.Inventory{GPUs: []device.GPU{
			gpu(0, "GPU-0"), gpu(1, "GPU-1"), gpu(2, "GPU-2"), unhealthy(gpu(3, "GPU-3"), device.ReasonLost, "fell off the bus"),
			gpu(4, "GPU-4"), gpu(5, "GPU-5"), gpu(6, "GPU-6"),
			unhealthy(gpu(7, "GPU-7-before"), device.ReasonMissing, ""), gpu(7, "GPU-7"),
		}},
		Holds: []ledger.Hold{
			claim("c1", "train", "GPU-0", ledger.StateHeld, pod("p2", "train-b"), pod("p1", "train-a")),
			claim("c2", "", "GPU-1", ledger.StateRestored),
			limit("GPU-2", ledger.StateHeld, pod("p3", "infer")),
			claim("c3", "lost", "GPU-3", ledger.StateDraining),
			limit("GPU-4", ledger.StateHeld),
			limit("GPU-5", ledger.StateDraining, pod("p4", "")),
			another, partition,
		},
		Conflicts: []ledger.Conflict{
			{UID: "c9", Namespace: "apps", Name: "late", Devices: []device.Ref{{GPU: "GPU-4"}, {GPU: "GPU-2"}, {GPU: "GPU-4"}},
				Since: time.Date(2026, 11, 21, 10, 0, 0, 123456789, time.UTC), PendingEviction: true, Message: "device gpu-2 is held by a pod"},
			{UID: "c8", Namespace: "apps", Name: "bare", Devices: []device.Ref{{GPU: "GPU-gone"}},
				Since: time.Date(2026, 11, 21, 10, 0, 1, 0, time.UTC), Message: "device GPU-gone is held by a pod"},
		},
		Allocatable: map[string][]string{"nvidia.com/gpu": {"GPU-2", "GPU-4", "GPU-7"}},
	}
}

// partitioned is a node with MIG: who has a partition is told there, who has a GPU at the GPU, and numbers are of GPUs.
func partitioned() Facts {
	part := func(minor, start int, profile string) device.Partition {
		size := 1
		if profile == "3g.40gb" {
			size = 4
		}
		return device.Partition{
			UUID: fmt.Sprintf("MIG-%d-%d", minor, start), Parent: minor, Profile: profile, ProfileID: 19,
			Ref: device.Ref{GPU: fmt.Sprintf("GPU-%d", minor), Placement: device.Placement{Start: start, Size: size}},
		}
	}
	cut := func(g device.GPU, parts ...device.Partition) device.GPU {
		g.MIGCapable, g.MIGEnabled, g.Partitions = true, true, parts
		return g
	}
	made, odd := part(3, 0, "1g.10gb"), part(2, 6, "1g.10gb")
	made.Made = true
	odd.Health = device.Health{Reason: device.ReasonUnreachable, Message: "does not answer"}
	dynamic := cut(gpu(3, "GPU-3"), made)
	dynamic.Dynamic = true
	of := func(h ledger.Hold, ref device.Ref, id, resource string) ledger.Hold {
		h.Device, h.Resource = ref, resource
		if h.Holder.Kind == ledger.KindPod {
			h.Holder.ID = id
		}
		return h
	}
	first, second, empty := part(1, 0, "1g.10gb"), part(1, 4, "3g.40gb"), part(4, 1, "1g.10gb")
	empty.UUID = ""
	return Facts{
		Mode: "Dual", Limits: device.Resources{GPU: "nvidia.com/gpu", Strategy: device.MIGStrategyMixed},
		Inventory: device.Inventory{GPUs: []device.GPU{
			gpu(0, "GPU-0"), cut(gpu(1, "GPU-1"), first, part(1, 1, "1g.10gb"), second), cut(gpu(2, "GPU-2"), part(2, 0, "1g.10gb"), odd), dynamic,
			cut(gpu(4, "GPU-4"), part(4, 0, "1g.10gb"), empty),
		}},
		Holds: []ledger.Hold{
			of(limit("GPU-1", ledger.StateHeld, pod("p1", "small")), first.Ref, "MIG-1-0", "nvidia.com/mig-1g.10gb"),
			of(claim("c1", "big", "GPU-1", ledger.StateHeld), second.Ref, "", ""),
			of(claim("c2", "made", "GPU-3", ledger.StateHeld), made.Ref, "", ""),
			of(claim("c3", "being-made", "GPU-3", ledger.StateHeld), device.Ref{GPU: "GPU-3", Placement: device.Placement{Start: 4, Size: 4}}, "", ""),
			claim("c4", "whole", "GPU-4", ledger.StateHeld),
		},
		Conflicts: []ledger.Conflict{
			{UID: "c9", Namespace: "apps", Name: "late", Devices: []device.Ref{first.Ref}, Since: time.Unix(0, 0).UTC()},
			{
				UID: "d0", Namespace: "apps", Name: "never-made", Since: time.Unix(0, 0).UTC(),
				Devices: []device.Ref{{GPU: "GPU-3", Placement: device.Placement{Start: 6, Size: 2}}}, Names: []string{"gpu-3-mig-2g20gb-14-6"},
			},
		},
		Allocatable: map[string][]string{"nvidia.com/gpu": {"GPU-0"}, "nvidia.com/mig-1g.10gb": {"MIG-1-0", "MIG-1-1", "MIG-2-0"}},
	}
}

// TestStatus compares with testdata/*.yaml, which -update rewrites.
func TestStatus(t *testing.T) {
	for name, change := range map[string]func(*Facts){
		"busy":            func(*Facts) {},
		"unacknowledged":  func(f *Facts) { f.Allocatable = nil },
		"no-limits":       func(f *Facts) { f.Mode, f.Limits = "ClaimsOnly", device.Resources{} },
		"no-gpus-at-all":  func(f *Facts) { *f = Facts{Mode: "Dual", Limits: device.Resources{GPU: "nvidia.com/gpu"}} },
		"partitions":      func(f *Facts) { *f = partitioned() },
		"nothing-is-held": func(f *Facts) { f.Holds, f.Conflicts = nil, nil },
	} {
		t.Run(name, func(t *testing.T) {
			f := facts()
			change(&f)
			got, err := yaml.Marshal(Status(f))
			if err != nil {
				t.Fatal(err)
			}
			golden.Compare(t, filepath.Join("testdata", name+".yaml"), got)
		})
	}
}

// TestLimitsState: a GPU that limits cannot have is withdrawn before kubelet says so, and is back when kubelet does.
func TestLimitsState(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Facts)
		want   v1alpha1.ExtendedResourceState
	}{
		"free":              {func(*Facts) {}, v1alpha1.ExtendedResourceAllocatable},
		"a limit has it":    {func(f *Facts) { f.Holds = []ledger.Hold{limit("GPU-0", ledger.StateHeld)} }, v1alpha1.ExtendedResourceAllocatable},
		"its limit runs on": {func(f *Facts) { f.Holds = []ledger.Hold{limit("GPU-0", ledger.StateDraining)} }, v1alpha1.ExtendedResourceWithdrawn},
		"a claim drains":    {func(f *Facts) { f.Holds = []ledger.Hold{claim("c", "c", "GPU-0", ledger.StateDraining)} }, v1alpha1.ExtendedResourceWithdrawn},
		"a fault":           {func(f *Facts) { f.Inventory.GPUs[0] = unhealthy(gpu(0, "GPU-0"), device.ReasonLost, "") }, v1alpha1.ExtendedResourceWithdrawn},
		"a pause":           {func(f *Facts) { f.Inventory.GPUs[0] = unhealthy(gpu(0, "GPU-0"), device.ReasonPaused, "") }, v1alpha1.ExtendedResourceWithdrawn},
		"a limit has it in a pause": {func(f *Facts) {
			f.Holds = []ledger.Hold{limit("GPU-0", ledger.StateHeld)}
			f.Inventory.GPUs[0] = unhealthy(gpu(0, "GPU-0"), device.ReasonPaused, "")
		}, v1alpha1.ExtendedResourceAllocatable},
		"a limit has it with a fault": {func(f *Facts) {
			f.Holds = []ledger.Hold{limit("GPU-0", ledger.StateHeld)}
			f.Inventory.GPUs[0] = unhealthy(gpu(0, "GPU-0"), device.ReasonLost, "")
		}, v1alpha1.ExtendedResourceWithdrawn},
		"kubelet has less":    {func(f *Facts) { f.Allocatable["nvidia.com/gpu"] = nil }, v1alpha1.ExtendedResourceWithdrawn},
		"kubelet has no word": {func(f *Facts) { f.Allocatable = nil }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := Facts{
				Mode: "Dual", Limits: device.Resources{GPU: "nvidia.com/gpu"}, Inventory: device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0")}},
				Allocatable: map[string][]string{"nvidia.com/gpu": {"GPU-0"}},
			}
			before := Status(f)
			c.change(&f)
			after := Status(f)
			if got := after.Devices[0].ExtendedResourceState; got != c.want {
				t.Errorf("%q", got)
			}
			unhealthy := after.Devices[0].UnhealthyReason != ""
			if got, want := Urgent(before, after), unhealthy || c.want == v1alpha1.ExtendedResourceWithdrawn && name != "a claim drains"; got != want {
				t.Errorf("urgent: %t", got)
			}
			if Urgent(after, before) || Urgent(after, after) {
				t.Error("what comes back, or stays, is urgent")
			}
		})
	}
}

// TestSplit: what a partition is to limits is decided by the GPUs that are for limits.
func TestSplit(t *testing.T) {
	f := Facts{
		Limits:        device.Resources{GPU: "nvidia.com/gpu", Strategy: device.MIGStrategySingle},
		OfferedToPods: func(g device.GPU) bool { return g.Minor == 3 },
	}
	for minor, profile := range []string{"3g.40gb", "3g.40gb", "3g.40gb", "1g.10gb"} {
		g := gpu(minor, fmt.Sprintf("GPU-%d", minor))
		g.MIGCapable, g.MIGEnabled = true, true
		g.Partitions = []device.Partition{{
			UUID: fmt.Sprintf("MIG-%d", minor), Ref: device.Ref{GPU: g.UUID, Placement: device.Placement{Size: 4}}, Parent: minor, Profile: profile,
		}}
		f.Inventory.GPUs = append(f.Inventory.GPUs, g)
	}
	for _, d := range Status(f).Devices {
		if got, want := d.ExtendedResource != "", d.Parent == "gpu-3"; got != want {
			t.Errorf("%s is asked for by %q", d.Name, d.ExtendedResource)
		}
	}
}

// TestUrgentPartitions: that a claim of one device withdraws another that overlaps is no more urgent than that it withdraws its
// own.
func TestUrgentPartitions(t *testing.T) {
	g := gpu(0, "GPU-0")
	g.MIGCapable, g.MIGEnabled = true, true
	for i := range 2 {
		g.Partitions = append(g.Partitions, device.Partition{
			UUID: fmt.Sprintf("MIG-%d", i), Ref: device.Ref{GPU: g.UUID, Placement: device.Placement{Start: i, Size: 1}}, Profile: "1g.10gb", ProfileID: 19,
		})
	}
	whole, part := g.Ref(), g.Partitions[0].Ref
	for _, c := range []struct {
		strategy device.MIGStrategy
		held     device.Ref
		left     []string // of two partitions
		want     bool
	}{
		{device.MIGStrategyNone, part, nil, false},
		{device.MIGStrategySingle, whole, nil, false},
		{device.MIGStrategySingle, part, []string{"MIG-1"}, false},
		{device.MIGStrategySingle, part, nil, true},
	} {
		f := Facts{
			Limits: device.Resources{GPU: "nvidia.com/gpu", Strategy: c.strategy}, Inventory: device.Inventory{GPUs: []device.GPU{g}},
			Allocatable: map[string][]string{"nvidia.com/gpu": {"MIG-0", "MIG-1"}},
		}
		if c.strategy == device.MIGStrategyNone {
			f.Allocatable["nvidia.com/gpu"] = []string{"GPU-0"}
		}
		before := Status(f)
		h := claim("c", "c", "GPU-0", ledger.StateHeld)
		h.Device = c.held
		f.Holds, f.Allocatable = []ledger.Hold{h}, map[string][]string{"nvidia.com/gpu": c.left}
		if got := Urgent(before, Status(f)); got != c.want {
			t.Errorf("%s, %s held, %v left: urgent is %t", c.strategy, c.held, c.left, got)
		}
	}
}

// TestStatusIsStable: the same facts in another order, and what the API server gives back, must not look like a change.
func TestStatusIsStable(t *testing.T) {
	want := Status(facts())
	for range 20 {
		f := facts()
		shuffle(f.Holds)
		shuffle(f.Conflicts)
		shuffle(f.Allocatable["nvidia.com/gpu"])
		for _, h := range f.Holds {
			shuffle(h.Pods)
		}
		if got := Status(f); !apiequality.Semantic.DeepEqual(got, want) {
			t.Fatalf("another order gives another status:\n%s", cmp.Diff(want, got))
		}
	}
	stored, err := yaml.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var back v1alpha1.GPUNodeStatus
	if err := yaml.Unmarshal(stored, &back); err != nil {
		t.Fatal(err)
	}
	if !apiequality.Semantic.DeepEqual(back, want) {
		t.Errorf("stored and read, the status is another:\n%s", cmp.Diff(want, back))
	}
}

func shuffle[T any](list []T) {
	rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
}

// A shared device reports its shares; an excluded device is in no count.
func TestStatusOfSharedDevices(t *testing.T) {
	const gib = uint64(1) << 30
	inv := device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0"), gpu(1, "GPU-1"), gpu(2, "GPU-2")}}
	for i := range inv.GPUs {
		inv.GPUs[i].MemoryBytes = 24 * gib
	}
	inv.GPUs[0].Sharing = device.Sharing{
		Strategy: device.TimeSlicing, Claims: "memory", Replicas: map[string]device.Replicas{"": {Count: 4, Renamed: true}},
	}
	limit := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: "GPU-0::1"}, Device: device.Ref{GPU: "GPU-0"}, Share: device.Replica(24*gib, 4), State: ledger.StateHeld}
	draining := limit
	draining.Holder.ID, draining.State = "GPU-0::2", ledger.StateDraining
	status := Status(Facts{
		Mode: "Dual", Inventory: inv, Limits: device.Resources{GPU: "nvidia.com/gpu"}, Holds: []ledger.Hold{limit, draining},
		Allocatable: map[string][]string{"nvidia.com/gpu": {"GPU-1"}, "nvidia.com/gpu.shared": {"GPU-0::0", "GPU-0::1", "GPU-0::3"}},
		Excluded:    func(g device.GPU) bool { return g.Minor == 2 },
	})
	first := status.Devices[0]
	want := v1alpha1.DeviceSharing{Strategy: "TimeSlicing", Claims: "memory", Memory: 24 << 30, Replicas: 4, ReplicaMemory: 6 << 30, Allocatable: 3}
	if first.Sharing == nil || *first.Sharing != want || first.ExtendedResourceState != v1alpha1.ExtendedResourceAllocatable || first.ExtendedResource != "nvidia.com/gpu.shared" {
		t.Errorf("gpu-0 is told as %+v, sharing %+v", first, first.Sharing)
	}
	if len(first.Holders) != 2 || first.Holders[0].Memory != 6<<30 {
		t.Errorf("holders %+v", first.Holders)
	}
	if second := status.Devices[1]; second.Sharing != nil || second.ExtendedResource != "nvidia.com/gpu" || second.Excluded {
		t.Errorf("gpu-1 is told as %+v", second)
	}
	if !status.Devices[2].Excluded || status.Counts.Total != 2 || status.Counts.Free != 1 {
		t.Errorf("gpu-2 is told as %+v, counts %+v", status.Devices[2], status.Counts)
	}
}

// Replicas of before are told as long as there are some, and are not what the device is asked for by now.
func TestStatusOfReplicasOfBefore(t *testing.T) {
	const gib = uint64(1) << 30
	replica := func(n int, resource string) ledger.Hold {
		return ledger.Hold{
			Holder: ledger.Holder{Kind: ledger.KindPod, ID: device.ReplicaID("GPU-0", n)}, Device: device.Ref{GPU: "GPU-0"},
			Share: device.Replica(24*gib, 4), State: ledger.StateHeld, Resource: resource,
		}
	}
	shared := device.Sharing{Strategy: device.TimeSlicing, Replicas: map[string]device.Replicas{"": {Count: 4}}}
	for name, c := range map[string]struct {
		policy      device.Sharing
		memory      uint64
		holds       []ledger.Hold
		allocatable map[string][]string
		want        v1alpha1.DeviceSharing
	}{
		"the policy is gone": {
			memory: 24 * gib, holds: []ledger.Hold{replica(0, "nvidia.com/gpu"), replica(2, "nvidia.com/gpu")},
			allocatable: map[string][]string{"nvidia.com/gpu": {"GPU-0::0", "GPU-0::2", "GPU-1"}},
			want:        v1alpha1.DeviceSharing{Memory: 24 << 30, Replicas: 2, ReplicaMemory: 6 << 30, Allocatable: 2},
		},
		"they had another name": {
			policy: shared, memory: 24 * gib, holds: []ledger.Hold{replica(0, "nvidia.com/gpu.shared")},
			allocatable: map[string][]string{"nvidia.com/gpu": {"GPU-0::1", "GPU-0::2", "GPU-0::3"}, "nvidia.com/gpu.shared": {"GPU-0::0"}},
			want:        v1alpha1.DeviceSharing{Strategy: "TimeSlicing", Memory: 24 << 30, Replicas: 4, ReplicaMemory: 6 << 30, Allocatable: 3},
		},
		"its memory is not known": {
			policy: shared, allocatable: map[string][]string{"nvidia.com/gpu": {"GPU-0::0", "GPU-0::1", "GPU-0::2", "GPU-0::3"}},
			want: v1alpha1.DeviceSharing{Strategy: "TimeSlicing", Memory: 4 << 20, Replicas: 4, ReplicaMemory: 1 << 20, Allocatable: 4},
		},
	} {
		inv := device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0"), gpu(1, "GPU-1")}}
		inv.GPUs[0].Sharing, inv.GPUs[0].MemoryBytes = c.policy, c.memory
		first := Status(Facts{
			Mode: "Dual", Inventory: inv, Limits: device.Resources{GPU: "nvidia.com/gpu"}, Holds: c.holds, Allocatable: c.allocatable,
		}).Devices[0]
		if first.Sharing == nil || *first.Sharing != c.want || first.ExtendedResourceState != v1alpha1.ExtendedResourceAllocatable || first.ExtendedResource != "nvidia.com/gpu" {
			t.Errorf("%s: %s, %s, sharing %+v, want %+v", name, first.ExtendedResource, first.ExtendedResourceState, first.Sharing, c.want)
		}
	}
}

// BenchmarkStatus computes the status of a node with 256 GPUs, of which 200 have a holder: it is computed after each change.
func BenchmarkStatus(b *testing.B) {
	facts := Facts{Mode: "Dual", Limits: device.Resources{GPU: "nvidia.com/gpu"}, Allocatable: map[string][]string{}}
	for i := range 256 {
		uuid := fmt.Sprintf("GPU-%08d", i)
		facts.Inventory.GPUs = append(facts.Inventory.GPUs, device.GPU{UUID: uuid, Minor: i, Index: i, ProductName: "NVIDIA H100 80GB HBM3"})
		if i < 200 {
			facts.Holds = append(facts.Holds, ledger.Hold{
				Holder: ledger.Holder{Kind: ledger.KindClaim, ID: fmt.Sprint("claim-", i)}, Device: device.Ref{GPU: uuid}, State: ledger.StateHeld,
			})
			continue
		}
		facts.Allocatable["nvidia.com/gpu"] = append(facts.Allocatable["nvidia.com/gpu"], uuid)
	}
	before := Status(facts)
	b.ReportAllocs()
	for b.Loop() {
		if status := Status(facts); Urgent(before, status) {
			b.Fatal("an unchanged status is urgent")
		}
	}
}

// A hold that the scheduler does not count, and one that waits, show it.
func TestStatusOfAHungHold(t *testing.T) {
	f := facts()
	f.Holds[0].Deserted, f.Holds[0].WaitsFor, f.Holds[0].WaitsSince = true, "process 4711 (train, state D)", time.Unix(1000, 123456789)
	status := Status(f)
	h := status.Devices[0].Holders[0]
	if h.State != v1alpha1.HoldDraining || h.WaitsFor != "process 4711 (train, state D)" || h.WaitsSince == nil || !h.WaitsSince.Time.Equal(time.Unix(1000, 123456000)) {
		t.Errorf("holder %+v", h)
	}
	if other := status.Devices[1].Holders[0]; other.WaitsFor != "" || other.WaitsSince != nil {
		t.Errorf("holder %+v", other)
	}
}

// A device that becomes unhealthy is urgent, with any holder and without one. Slowdown is shown, and is not.
func TestStatusOfFaults(t *testing.T) {
	f := Facts{Mode: "ClaimsOnly", Inventory: device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0"), gpu(1, "GPU-1")}}}
	before := Status(f)
	f.Inventory.GPUs[1].Slowdown = "thermal"
	slow := Status(f)
	if slow.Devices[1].Slowdown != "thermal" || slow.Devices[1].UnhealthyReason != "" || Urgent(before, slow) {
		t.Errorf("slow: %+v, urgent %v", slow.Devices[1], Urgent(before, slow))
	}
	f.Inventory.GPUs[0].Health = device.Health{Reason: device.ReasonXID, Message: "XID 48", XID: 48}
	broken := Status(f)
	if broken.Devices[0].UnhealthyReason != "XID: 48" || !Urgent(slow, broken) || Urgent(broken, slow) {
		t.Errorf("broken: %+v, urgent %v", broken.Devices[0], Urgent(slow, broken))
	}
}

// A GPU that a restarted agent does not find has the taints that the node configuration asks for: its pod waits for its eviction. One that it
// cannot read without a driver has none, and needs no repair.
func TestTaintsOfAMissingGPU(t *testing.T) {
	for action, want := range map[device.FaultAction]int{device.FaultNoSchedule: 0, device.FaultNoExecute: 2} {
		facts := Facts{
			Holds:       []ledger.Hold{{Holder: ledger.Holder{Kind: ledger.KindPod, ID: "GPU-lost"}, Device: device.Ref{GPU: "GPU-lost"}, State: ledger.StateHeld}},
			FaultAction: func(device.GPU, device.Health) device.FaultAction { return action },
		}
		status := Status(facts)
		if len(status.Devices) != 1 || len(status.Devices[0].Taints) != want || status.Devices[0].Repair != v1alpha1.RepairReboot {
			t.Errorf("%s: %+v", action, status.Devices)
		}
		facts.Unread = true
		if d := Status(facts).Devices[0]; len(d.Taints) > 0 || d.Repair != "" || device.ParseHealth(d.UnhealthyReason).Reason != device.ReasonNotRead {
			t.Errorf("%s, without a driver: %+v", action, d)
		}
	}
}
