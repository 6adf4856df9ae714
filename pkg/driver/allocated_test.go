// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// asFound is what the API server has once the pools are published.
func asFound(published ...map[string]resourceslice.Pool) []resourceapi.ResourceSlice {
	var found []resourceapi.ResourceSlice
	for _, pools := range published {
		for name, pool := range pools {
			for _, slice := range pool.Slices {
				found = append(found, resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{
					Pool: resourceapi.ResourcePool{Name: name}, Devices: slice.Devices, SharedCounters: slice.SharedCounters,
				}})
			}
		}
	}
	return found
}

// buildStep is a look at a machine with one GPU.
type buildStep struct {
	Facts
	want map[string]string
	// restarted has another agent look from here on.
	restarted bool
}

func buildInSteps(t *testing.T, steps []buildStep) {
	t.Helper()
	offer := Offer{NodeName: testNode}
	var published map[string]resourceslice.Pool
	for i, s := range steps {
		if s.restarted {
			offer = Offer{NodeName: testNode}
			offer.SetPublished(asFound(published))
		}
		s.Now = time.Unix(int64(i), 0)
		published, _ = offer.Pools(s.Facts)
		if diff := cmp.Diff(s.want, summary(published)); diff != "" {
			t.Errorf("step %d: %s", i, diff)
		}
	}
}

func allocatedFrom(uid, pool string, devices ...string) v1alpha1.AllocatedClaim {
	c := v1alpha1.AllocatedClaim{UID: types.UID("uid-" + uid), Devices: devices}
	if pool != "" {
		c.Pools = []string{pool}
	}
	return c
}

// What could not be read for a moment moves nothing, above all not what is allocated and that nobody has prepared yet.
func TestGPUWithUnreadableProfiles(t *testing.T) {
	onDemand, unread, fewer := machine(1, dynamic), machine(1, dynamic), machine(1, dynamic)
	unread.GPUs[0].Profiles = nil
	fewer.GPUs[0].Profiles = fewer.GPUs[0].Profiles[:1]
	free := map[string]string{"": "", "/gpu-00": "8 slices 26 devices"}
	claims := []v1alpha1.AllocatedClaim{allocatedFrom("a", "", "gpu-0-mig-3g40gb-9-4")}
	look := func(inv device.Inventory, claims []v1alpha1.AllocatedClaim) Facts {
		return Facts{Inventory: inv, Claims: claims, Kept: everything}
	}
	t.Run("for a while", func(t *testing.T) {
		buildInSteps(t, []buildStep{
			{Facts: look(onDemand, claims), want: free},
			{Facts: look(unread, claims), want: free},
			{Facts: look(fewer, claims), want: free},
			{Facts: look(onDemand, claims), want: free},
			{Facts: look(unread, nil), want: free},
			{Facts: look(fewer, nil), want: map[string]string{"": "", "/gpu-00": "7 slices 8 devices"}},
		})
	})
	t.Run("when an agent starts", func(t *testing.T) {
		late := look(unread, nil)
		late.ClaimsLate = true
		buildInSteps(t, []buildStep{
			{Facts: look(onDemand, claims), want: free},
			{Facts: late, want: map[string]string{"": ""}, restarted: true},
			{Facts: look(unread, claims), want: map[string]string{"": ""}},
			{Facts: look(onDemand, claims), want: free},
		})
	})
}

// The scheduler does not see in one pool what it has given out from the other.
func TestAllocatedFromAnotherPool(t *testing.T) {
	plain, onDemand := machine(1, dynamic, func(g *device.GPU) { g.Dynamic = false }), machine(1, dynamic)
	made := machine(1, dynamic)
	part := cut(&made.GPUs[0], "3g.40gb", 4)
	made.GPUs[0].Partitions[0].Made = true
	ownPool := testNode + "/gpu-00"
	free, fixed := map[string]string{"": "", "/gpu-00": "8 slices 26 devices"}, map[string]string{"": "gpu-0"}
	taken := map[string]string{"": "gpu-0!held-by-claim"}
	look := func(inv device.Inventory, claims ...v1alpha1.AllocatedClaim) Facts {
		return Facts{Inventory: inv, Claims: claims, Kept: everything}
	}
	holds := func(f Facts, ref device.Ref) Facts {
		f.Holds = []ledger.Hold{{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "uid-a"}, Device: ref, State: ledger.StateHeld}}
		return f
	}
	late := func(f Facts) Facts {
		f.ClaimsLate = true
		return f
	}
	blind := func(f Facts) Facts {
		f.Kept.Counters = false
		return f
	}
	for name, steps := range map[string][]buildStep{
		"it goes back where a claim has it from": {
			{Facts: look(plain), want: fixed},
			{Facts: look(onDemand), want: free},
			{Facts: look(onDemand, allocatedFrom("a", testNode, "gpu-0")), want: fixed},
			{Facts: holds(look(onDemand, allocatedFrom("a", testNode, "gpu-0")), refOf(0)), want: fixed},
			{Facts: look(onDemand), want: free},
		},
		"and the other way round": {
			{Facts: look(onDemand), want: free},
			{Facts: look(plain), want: fixed},
			{Facts: look(plain, allocatedFrom("a", ownPool, "gpu-0-mig-3g40gb-9-4")), want: map[string]string{"": "", "/gpu-00": "4 slices 26 devices"}},
			{Facts: look(plain), want: fixed},
		},
		"a partition was made, so it is from the GPU's own pool": {
			{Facts: look(plain), want: fixed},
			{Facts: holds(look(made), part.Ref), want: free},
		},
		"a claim has something that is not there any more": {
			{Facts: look(onDemand), want: free},
			{Facts: look(plain, allocatedFrom("a", ownPool, "gpu-0-mig-1c3g40gb-9-4-0-1")), want: map[string]string{"": "", "/gpu-00": "0 slices 26 devices"}},
		},
		// Whoever comes second is refused by the ledger, and nobody comes third.
		"claims have it from both, in a race": {
			{Facts: look(plain), want: fixed},
			{Facts: look(onDemand), want: free},
			{Facts: look(onDemand, allocatedFrom("a", testNode, "gpu-0"), allocatedFrom("b", ownPool, "gpu-0-mig-3g40gb-9-4")),
				want: map[string]string{"": "", "/gpu-00": "4 slices 26 devices"}},
			{Facts: look(onDemand, allocatedFrom("a", testNode, "gpu-0"), allocatedFrom("b", ownPool, "gpu-0")), want: free},
		},
		"in the node's pool": {
			{Facts: look(plain), want: fixed},
			{Facts: look(plain, allocatedFrom("a", testNode, "gpu-0"), allocatedFrom("b", ownPool, "gpu-0-mig-3g40gb-9-4")), want: taken},
		},
		"there are no counters": {
			{Facts: look(onDemand), want: free},
			{Facts: blind(look(onDemand)), want: fixed},
			{Facts: blind(look(onDemand, allocatedFrom("a", ownPool, "gpu-0"))), want: map[string]string{"": ""}},
		},
		"the claims are not known yet": {
			{Facts: look(onDemand), want: free},
			{Facts: late(look(plain)), want: map[string]string{"": "", "/gpu-00": "0 slices 26 devices"}, restarted: true},
			{Facts: look(plain), want: fixed},
			{Facts: late(look(onDemand)), want: fixed, restarted: true},
			{Facts: look(onDemand), want: free},
		},
	} {
		t.Run(name, func(t *testing.T) { buildInSteps(t, steps) })
	}
}

// An agent that ended while a GPU went from one pool to the other leaves it in both.
func TestGPUPublishedInBothPools(t *testing.T) {
	plain, onDemand := machine(1, dynamic, func(g *device.GPU) { g.Dynamic = false }), machine(1, dynamic)
	free, fixed := map[string]string{"": "", "/gpu-00": "8 slices 26 devices"}, map[string]string{"": "gpu-0"}
	both := asFound(poolsOf(t, Facts{Inventory: plain, Kept: everything}), poolsOf(t, Facts{Inventory: onDemand, Kept: everything}))
	for name, test := range map[string]struct {
		inv    device.Inventory
		claims []v1alpha1.AllocatedClaim
		want   map[string]string
	}{
		"policy":                        {inv: onDemand, want: free},
		"the other policy":              {inv: plain, want: fixed},
		"a claim from the node's pool":  {inv: onDemand, claims: []v1alpha1.AllocatedClaim{allocatedFrom("a", testNode, "gpu-0")}, want: fixed},
		"a claim from the GPU's":        {inv: plain, claims: []v1alpha1.AllocatedClaim{allocatedFrom("a", testNode+"/gpu-00", "gpu-0")}, want: free},
		"a claim, and who knows whence": {inv: plain, claims: []v1alpha1.AllocatedClaim{allocatedFrom("a", "", "gpu-0")}, want: fixed},
	} {
		t.Run(name, func(t *testing.T) {
			offer := Offer{NodeName: testNode}
			offer.SetPublished(both)
			for range 2 {
				pools, _ := offer.Pools(Facts{Inventory: test.inv, Claims: test.claims, Kept: everything})
				if diff := cmp.Diff(test.want, summary(pools)); diff != "" {
					t.Error(diff)
				}
			}
		})
	}
}
