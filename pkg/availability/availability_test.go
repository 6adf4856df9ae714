// SPDX-License-Identifier: Apache-2.0

package availability_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

type use = availability.Use[device.Ref]

var (
	gpu      = device.Ref{GPU: "GPU-a"}
	otherGPU = device.Ref{GPU: "GPU-b"}
	left     = device.Ref{GPU: "GPU-a", Placement: device.Placement{Start: 0, Size: 4}}
	right    = device.Ref{GPU: "GPU-a", Placement: device.Placement{Start: 4, Size: 4}}
	claim    = availability.Holder{Kind: availability.Claim, ID: "uid"}
	other    = availability.Holder{Kind: availability.Claim, ID: "other"}
	pod      = availability.Holder{Kind: availability.Pod, ID: "GPU-a"}
)

func share(bytes uint64) device.Share { return device.Share{Bytes: bytes, Of: 100} }

// counted is a share of a device with four equal shares.
func counted(bytes, count uint64) device.Share {
	return device.Share{Bytes: bytes, Of: 100, Count: count, OfCount: 4}
}

func TestCheck(t *testing.T) {
	for _, c := range []struct {
		name      string
		unhealthy bool
		request   use
		uses      []use
		want      availability.Reason
		conflicts int
	}{
		{name: "free", request: use{Device: gpu}},
		{name: "unhealthy and held", unhealthy: true, request: use{Device: gpu}, uses: []use{{Holder: pod, Device: gpu, Reason: availability.HeldByPod}},
			want: availability.Unhealthy, conflicts: 1},
		{name: "held by a pod", request: use{Holder: claim, Device: gpu}, uses: []use{{Holder: pod, Device: gpu, Reason: availability.HeldByPod}},
			want: availability.HeldByPod, conflicts: 1},
		{name: "another GPU is held", request: use{Holder: claim, Device: gpu}, uses: []use{{Holder: pod, Device: otherGPU, Reason: availability.HeldByPod}}},
		{name: "held by the requester", request: use{Holder: claim, Device: gpu}, uses: []use{{Holder: claim, Device: gpu, Reason: availability.HeldByClaim}}},
		{name: "two holders that are not identified", request: use{Device: gpu}, uses: []use{{Device: gpu, Reason: availability.HeldByPod}},
			want: availability.HeldByPod, conflicts: 1},
		{name: "a partition of the GPU is held", request: use{Holder: claim, Device: gpu}, uses: []use{{Holder: other, Device: left, Reason: availability.HeldByClaim}},
			want: availability.HeldByClaim, conflicts: 1},
		{name: "the GPU of the partition is draining", request: use{Holder: claim, Device: left}, uses: []use{{Holder: other, Device: gpu, Reason: availability.Draining}},
			want: availability.Draining, conflicts: 1},
		{name: "another partition is held", request: use{Holder: claim, Device: left}, uses: []use{{Holder: other, Device: right, Reason: availability.HeldByClaim}}},
		{name: "claims come before pods", request: use{Device: gpu},
			uses: []use{{Holder: pod, Device: left, Reason: availability.HeldByPod}, {Holder: claim, Device: right, Reason: availability.HeldByClaim}},
			want: availability.HeldByClaim, conflicts: 2},
		{name: "shares fit", request: use{Holder: claim, Device: gpu, Share: share(40)},
			uses: []use{{Holder: other, Device: gpu, Share: share(60), Reason: availability.HeldByClaim}}},
		{name: "shares exceed the memory", request: use{Holder: claim, Device: gpu, Share: share(41)},
			uses: []use{{Holder: other, Device: gpu, Share: share(60), Reason: availability.HeldByClaim}}, want: availability.HeldByClaim, conflicts: 1},
		{name: "equal shares fit", request: use{Holder: claim, Device: gpu, Share: counted(0, 2)},
			uses: []use{{Holder: other, Device: gpu, Share: counted(0, 2), Reason: availability.HeldByClaim}}},
		{name: "more equal shares than there are", request: use{Holder: claim, Device: gpu, Share: counted(0, 2)},
			uses: []use{{Holder: other, Device: gpu, Share: counted(0, 3), Reason: availability.HeldByClaim}}, want: availability.HeldByClaim, conflicts: 1},
		{name: "equal shares that exceed the memory", request: use{Holder: claim, Device: gpu, Share: counted(50, 1)},
			uses: []use{{Holder: other, Device: gpu, Share: counted(51, 1), Reason: availability.HeldByPod}}, want: availability.HeldByPod, conflicts: 1},
		{name: "shares without memory", request: use{Holder: claim, Device: gpu, Share: share(0)},
			uses: []use{{Holder: other, Device: gpu, Share: share(100), Reason: availability.HeldByClaim}}},
		{name: "the whole device beside a share without memory", request: use{Holder: claim, Device: gpu},
			uses: []use{{Holder: other, Device: gpu, Share: share(0), Reason: availability.HeldByClaim}}, want: availability.HeldByClaim, conflicts: 1},
		{name: "an equal share beside a share of memory", request: use{Holder: claim, Device: gpu, Share: counted(0, 1)},
			uses: []use{{Holder: other, Device: gpu, Share: share(1), Reason: availability.HeldByClaim}}, want: availability.HeldByClaim, conflicts: 1},
		{name: "shares of different totals", request: use{Holder: claim, Device: gpu, Share: share(10)},
			uses: []use{{Holder: other, Device: gpu, Share: device.Share{Bytes: 1, Of: 99}, Reason: availability.HeldByClaim}},
			want: availability.HeldByClaim, conflicts: 1},
		{name: "a share beside the whole device", request: use{Holder: claim, Device: gpu, Share: share(10)},
			uses: []use{{Holder: other, Device: gpu, Reason: availability.Allocated}}, want: availability.Allocated, conflicts: 1},
		{name: "the whole device beside a share", request: use{Holder: claim, Device: gpu},
			uses: []use{{Holder: other, Device: gpu, Share: share(1), Reason: availability.HeldByClaim}}, want: availability.HeldByClaim, conflicts: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := availability.Check(!c.unhealthy, c.request, slices.Values(c.uses)); got != c.want {
				t.Errorf("Check is %q, want %q", got, c.want)
			}
			if got := availability.Conflicts(c.request, slices.Values(c.uses)); len(got) != c.conflicts {
				t.Errorf("Conflicts are %v, want %d", got, c.conflicts)
			}
		})
	}
}

func TestLeft(t *testing.T) {
	for _, c := range []struct {
		name          string
		uses          []use
		memory, count uint64
	}{
		{"free", nil, 100, 4},
		{"two shares", []use{{Device: gpu, Share: counted(30, 1)}, {Device: gpu, Share: counted(20, 2)}}, 50, 1},
		{"more shares than memory", []use{{Device: gpu, Share: counted(80, 0)}, {Device: gpu, Share: counted(80, 0)}}, 0, 4},
		{"a share of another whole", []use{{Device: gpu, Share: share(30)}}, 0, 0},
		{"more shares than there are", []use{{Device: gpu, Share: counted(0, 3)}, {Device: gpu, Share: counted(0, 3)}}, 100, 0},
		{"the whole device", []use{{Device: gpu}}, 0, 0},
		{"a partition of it", []use{{Device: left, Share: share(1)}}, 0, 0},
		{"another GPU", []use{{Device: otherGPU}}, 100, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := availability.Left(gpu, device.Share{Of: 100, OfCount: 4}, slices.Values(c.uses))
			if got.Bytes != c.memory || got.Count != c.count {
				t.Errorf("left are %d bytes and %d shares, want %d and %d", got.Bytes, got.Count, c.memory, c.count)
			}
		})
	}
}

// asks is a claim that the scheduler allocated so much memory of a device, or all of it for zero.
func asks(name string, memory int64) (claim v1alpha1.AllocatedClaim) {
	if memory > 0 {
		claim.Shares = []v1alpha1.AllocatedShare{{Device: name, Memory: memory}}
	}
	return claim
}

// TestReason: a fault counts first, then maintenance, a taint, and a holder.
func TestReason(t *testing.T) {
	taints, maintained := []v1alpha1.DeviceTaint{{Rule: "rule"}}, &v1alpha1.DeviceMaintenance{}
	held := []v1alpha1.DeviceHolder{{Kind: v1alpha1.HolderClaim, State: v1alpha1.HoldHeld}}
	for name, c := range map[string]struct {
		d    v1alpha1.DeviceStatus
		want availability.Reason
	}{
		"all":                   {v1alpha1.DeviceStatus{UnhealthyReason: "Lost", Maintenance: maintained, Taints: taints, Holders: held}, availability.Unhealthy},
		"maintenance and taint": {v1alpha1.DeviceStatus{Maintenance: maintained, Taints: taints, Holders: held}, availability.Maintenance},
		"a taint":               {v1alpha1.DeviceStatus{Taints: taints, Holders: held}, availability.Tainted},
		"a holder":              {v1alpha1.DeviceStatus{Holders: held}, availability.HeldByClaim},
		"nothing":               {v1alpha1.DeviceStatus{}, availability.Available},
	} {
		c.d.Name = "gpu-0"
		node := availability.NewNode(v1alpha1.GPUNodeStatus{Devices: []v1alpha1.DeviceStatus{c.d}}, nil)
		if got := node.Reason(c.d); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestNode(t *testing.T) {
	status := v1alpha1.GPUNodeStatus{Devices: []v1alpha1.DeviceStatus{
		{Name: "gpu-0", Holders: []v1alpha1.DeviceHolder{
			{Kind: v1alpha1.HolderClaim, UID: "uid", State: v1alpha1.HoldHeld}, {Kind: v1alpha1.HolderClaim, UID: "other", State: v1alpha1.HoldDraining},
		}},
		{Name: "gpu-1", Sharing: &v1alpha1.DeviceSharing{Memory: 100}, Holders: []v1alpha1.DeviceHolder{
			{Kind: v1alpha1.HolderClaim, UID: "sharer", State: v1alpha1.HoldHeld, Memory: 60},
		}},
		{Name: "gpu-2"}, {Name: "gpu-2-mig-1g10gb-19-0", Parent: "gpu-2", Holders: []v1alpha1.DeviceHolder{{Kind: v1alpha1.HolderPod, State: v1alpha1.HoldHeld}}},
		{Name: "MIG-unnamed", Parent: "gpu-2"},
		{Name: "gpu-3", Holders: []v1alpha1.DeviceHolder{{Kind: v1alpha1.HolderClaim, UID: "sharer", State: v1alpha1.HoldHeld, Memory: 60}}},
	}}
	node := availability.NewNode(status, []v1alpha1.AllocatedClaim{
		{UID: "uid", Devices: []string{"gpu-0-mig-1g10gb-19-0"}},
		{UID: "other", Devices: []string{"gpu-0-mig-1g10gb-19-1"}},
		{UID: "sharer", Devices: []string{"gpu-1", "gpu-3"}, Shares: []v1alpha1.AllocatedShare{{Device: "gpu-1", Memory: 60}, {Device: "gpu-3", Memory: 60}}},
	})
	for _, c := range []struct {
		device string
		holder availability.Holder
		memory int64
		want   availability.Reason
	}{
		{"gpu-0", availability.Holder{}, 0, availability.HeldByClaim},
		{"gpu-0-mig-1g10gb-19-0", claim, 0, availability.Available},
		{"gpu-0-mig-1g10gb-19-1", claim, 0, availability.Draining},
		{"gpu-0-mig-1g10gb-19-2", claim, 0, availability.Available},
		{"gpu-1", claim, 0, availability.HeldByClaim},
		{"gpu-1", claim, 40, availability.Available},
		{"gpu-1", claim, 41, availability.HeldByClaim},
		{"gpu-2", claim, 0, availability.HeldByPod},
		{"gpu-2-mig-1g10gb-19-0", availability.Holder{}, 0, availability.HeldByPod},
		{"gpu-2-mig-1g10gb-19-1", claim, 0, availability.Available},
		// It does not report its memory: the agent checks.
		{"gpu-3", claim, 80, availability.Available},
	} {
		request := availability.Use[availability.Name]{
			Holder: c.holder, Device: availability.NameOf(c.device), Share: node.AllocatedShare(asks(c.device, c.memory), c.device),
		}
		if got := availability.Check(true, request, slices.Values(node.Held)); got != c.want {
			t.Errorf("Check of %s (%d bytes) for %v is %q, want %q", c.device, c.memory, c.holder, got, c.want)
		}
	}
	if got := availability.StatusName(status.Devices[4]); !got.Overlaps(availability.NameOf("gpu-2")) || got.Overlaps(availability.NameOf("gpu-2-mig-1g10gb-19-0")) {
		t.Errorf("StatusName of %s is %v", status.Devices[4].Name, got)
	}
	request := availability.Use[availability.Name]{Device: availability.NameOf("gpu-0")}
	if got := availability.Check(true, request, slices.Values(node.Allocated)); got != availability.Allocated {
		t.Errorf("Check against allocations is %q, want %q", got, availability.Allocated)
	}
	if status, known := node.Status("gpu-0-mig-1g10gb-19-0"); !known || status.Name != "gpu-0" {
		t.Errorf("Status of a partition that does not exist is %q, %v; want that of gpu-0", status.Name, known)
	}
}

// TestIsSilent: an agent is silent if it has not written "seen" for longer than SilentAfter. An agent of a version that never writes it is not.
func TestIsSilent(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		since time.Duration
		want  bool
	}{{0, false}, {availability.SilentAfter, false}, {availability.SilentAfter + time.Second, true}} {
		var status v1alpha1.GPUNodeStatus
		if err := json.Unmarshal(fmt.Appendf(nil, `{"seen": %q}`, now.Add(-c.since).Format(time.RFC3339)), &status); err != nil {
			t.Fatal(err)
		}
		if got := availability.IsSilent(now, status); got != c.want {
			t.Errorf("seen %s ago: %t", c.since, got)
		}
	}
	if availability.IsSilent(now, v1alpha1.GPUNodeStatus{}) {
		t.Error("an agent that never writes it is silent")
	}
}
