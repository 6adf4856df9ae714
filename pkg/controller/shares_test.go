// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
)

const gib = int64(1) << 30

// sharedNode has two GPUs of 24 GiB with four replicas each.
func sharedNode(holders ...v1alpha1.DeviceHolder) v1alpha1.GPUNode {
	node := v1alpha1.GPUNode{}
	node.Name = "node-1"
	node.Status = v1alpha1.GPUNodeStatus{ExtendedResource: testResource}
	for _, name := range []string{"gpu-0", "gpu-1"} {
		node.Status.Devices = append(node.Status.Devices, v1alpha1.DeviceStatus{
			Name: name, ExtendedResource: testResource, ExtendedResourceState: v1alpha1.ExtendedResourceAllocatable,
			Sharing: &v1alpha1.DeviceSharing{
				Strategy: "TimeSlicing", Claims: "memory", Memory: 24 * gib, Replicas: 4, ReplicaMemory: 6 * gib, Allocatable: 4,
			},
		})
	}
	node.Status.Devices[0].Holders = holders
	return node
}

func limitShare(state v1alpha1.HoldState) v1alpha1.DeviceHolder {
	return v1alpha1.DeviceHolder{Kind: v1alpha1.HolderPod, State: state, Memory: 6 * gib}
}

func claimShare(uid types.UID, memory int64) v1alpha1.DeviceHolder {
	return v1alpha1.DeviceHolder{Kind: v1alpha1.HolderClaim, UID: uid, State: v1alpha1.HoldHeld, Memory: memory}
}

// allocatedShare is a claim for so much of gpu-0; for all of it with zero.
func allocatedShare(uid types.UID, memory int64) v1alpha1.AllocatedClaim {
	claim := v1alpha1.AllocatedClaim{UID: uid, Namespace: "ns", Name: string(uid), Devices: []string{"gpu-0"}}
	if memory > 0 {
		claim.Shares = []v1alpha1.AllocatedShare{{Device: "gpu-0", Memory: memory}}
	}
	return claim
}

// Replicas of a GPU with equal shares count as long as there are shares for them.
func TestAllocatableEqualShares(t *testing.T) {
	node := sharedNode()
	node.Status.Devices = node.Status.Devices[:1]
	node.Status.Devices[0].Sharing = &v1alpha1.DeviceSharing{
		Strategy: "TimeSlicing", Claims: "shares", Memory: 24 * gib, Shares: 8, Replicas: 4, ReplicaShares: 2, Allocatable: 4,
	}
	claim := v1alpha1.AllocatedClaim{UID: "a", Devices: []string{"gpu-0"}, Shares: []v1alpha1.AllocatedShare{{Device: "gpu-0", Shares: 3}}}
	for name, c := range map[string]struct {
		claims []v1alpha1.AllocatedClaim
		want   int64
	}{"free": {nil, 4}, "three shares are allocated": {[]v1alpha1.AllocatedClaim{claim}, 2}} {
		node.Spec.Claims = c.claims
		held, more := replicas(node.Status.Devices[0], availability.NewNode(node.Status, c.claims))
		if got := held + more; got != c.want {
			t.Errorf("%s: %d replicas, want %d", name, got, c.want)
		}
	}
}

// Replicas count as long as there is memory for them.
func TestAllocatableReplicas(t *testing.T) {
	for name, c := range map[string]struct {
		holders   []v1alpha1.DeviceHolder
		claims    []v1alpha1.AllocatedClaim
		lists     int32
		conflicts []v1alpha1.ConflictingClaim
		want      int64
	}{
		"none is held":                        {lists: 4, want: 8},
		"a limit has one":                     {holders: []v1alpha1.DeviceHolder{limitShare(v1alpha1.HoldHeld)}, lists: 4, want: 8},
		"a claim has 10 GiB":                  {holders: []v1alpha1.DeviceHolder{claimShare("a", 10*gib)}, claims: []v1alpha1.AllocatedClaim{allocatedShare("a", 10*gib)}, lists: 2, want: 6},
		"allocated, kubelet lists them still": {claims: []v1alpha1.AllocatedClaim{allocatedShare("a", 10*gib)}, lists: 4, want: 6},
		"two claims":                          {claims: []v1alpha1.AllocatedClaim{allocatedShare("a", 10*gib), allocatedShare("b", 10*gib)}, lists: 4, want: 4},
		"a claim beside a limit":              {holders: []v1alpha1.DeviceHolder{limitShare(v1alpha1.HoldHeld)}, claims: []v1alpha1.AllocatedClaim{allocatedShare("a", 10*gib)}, lists: 4, want: 6},
		"all of it":                           {claims: []v1alpha1.AllocatedClaim{allocatedShare("a", 0)}, lists: 4, want: 4},
		"a limit drains":                      {holders: []v1alpha1.DeviceHolder{limitShare(v1alpha1.HoldDraining)}, lists: 4, want: 7},
		"a claim waits for what limits have": {
			holders: []v1alpha1.DeviceHolder{limitShare(v1alpha1.HoldHeld)}, claims: []v1alpha1.AllocatedClaim{allocatedShare("a", 0)},
			conflicts: []v1alpha1.ConflictingClaim{{UID: "a"}}, lists: 4, want: 1 + 4,
		},
		"kubelet has taken some back": {lists: 1, want: 5},
	} {
		t.Run(name, func(t *testing.T) {
			node := sharedNode(c.holders...)
			node.Status.Devices[0].Sharing.Allocatable = c.lists
			node.Status.Conflicts = c.conflicts
			if got, known := Allocatable(node.Status, c.claims, testResource); got != c.want || !known {
				t.Errorf("%d, known %v; want %d", got, known, c.want)
			}
			if got := listed(node.Status, testResource); got != int64(c.lists)+4 {
				t.Errorf("%d are listed", got)
			}
		})
	}
}

func TestRelayShares(t *testing.T) {
	result := func(name string, gi int64) resourceapi.DeviceRequestAllocationResult {
		return resourceapi.DeviceRequestAllocationResult{
			Request: "parts/some", Driver: testDriver, Pool: "node-1", Device: name, ShareID: ptr.To(types.UID("share")),
			ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"memory": *resource.NewQuantity(gi*gib, resource.BinarySI)},
		}
	}
	claim := newClaim("a", "gpu-7")
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "parts", FirstAvailable: []resourceapi.DeviceSubRequest{{
		Name: "some", Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": {}}},
	}}}}
	claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, result("gpu-5", 2), result("gpu-4", 1), result("gpu-5", 3))
	want := []v1alpha1.AllocatedClaim{{
		UID: "uid-a", Namespace: "ns", Name: "a", Devices: []string{"gpu-4", "gpu-5", "gpu-7"}, Pools: []string{"node-1"},
		Shares: []v1alpha1.AllocatedShare{{Device: "gpu-4", Memory: gib}, {Device: "gpu-5", Memory: 5 * gib}},
	}}
	if diff := cmp.Diff(want, Relay([]resourceapi.ResourceClaim{*claim}, testDriver, "node-1")); diff != "" {
		t.Error(diff)
	}
	// A request without an amount gets all of it.
	whole := result("gpu-6", 24)
	whole.Request = "parts"
	claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, whole)
	want[0].Devices = []string{"gpu-4", "gpu-5", "gpu-6", "gpu-7"}
	trimClaim(claim, testDriver)
	if diff := cmp.Diff(want, Relay([]resourceapi.ResourceClaim{*claim}, testDriver, "node-1")); diff != "" {
		t.Error("from the cache: ", diff)
	}
}

// A claim is retried if its share fits beside the other shares.
func TestRetrysOfShares(t *testing.T) {
	for name, c := range map[string]struct {
		holders []v1alpha1.DeviceHolder
		memory  int64
		want    int
	}{
		"beside another share":         {holders: []v1alpha1.DeviceHolder{claimShare("b", 10*gib)}, memory: 14 * gib, want: 1},
		"a share too many":             {holders: []v1alpha1.DeviceHolder{claimShare("b", 10*gib)}, memory: 15 * gib, want: 0},
		"all of it beside a share":     {holders: []v1alpha1.DeviceHolder{limitShare(v1alpha1.HoldHeld)}, want: 0},
		"a share beside all of it":     {holders: []v1alpha1.DeviceHolder{claimShare("b", 0)}, memory: gib, want: 0},
		"all of it, which is free":     {want: 1},
		"its own, for want of waiters": {holders: []v1alpha1.DeviceHolder{claimShare("a", 10*gib)}, memory: 10 * gib, want: 0},
	} {
		node := sharedNode(c.holders...)
		if got := Retries(node.Status, []v1alpha1.AllocatedClaim{allocatedShare("a", c.memory)}, nil); len(got) != c.want {
			t.Errorf("%s: %d retries, want %d", name, len(got), c.want)
		}
	}
}
