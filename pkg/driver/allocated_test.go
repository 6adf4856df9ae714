// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// asFound returns the slices of published pools.
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

// buildStep is one build for a machine with one GPU.
type buildStep struct {
	Facts
	want map[string]string
	// restarted starts a new agent before the step.
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

// A failed read of the profiles changes no pool, above all not one with devices that are allocated and not prepared yet.
func TestGPUWithUnreadableProfiles(t *testing.T) {
	onDemand, unread, fewer := machine(1, dynamic), machine(1, dynamic), machine(1, dynamic)
	unread.GPUs[0].Profiles = nil
	fewer.GPUs[0].Profiles = fewer.GPUs[0].Profiles[:1]
	free := map[string]string{"": "", "/gpu-00": "8 slices 26 devices"}
	claims := []v1alpha1.AllocatedClaim{allocatedFrom("a", "", "gpu-0-mig-3g40gb-9-4")}
	facts := func(inv device.Inventory, claims []v1alpha1.AllocatedClaim) Facts {
		return Facts{Inventory: inv, Claims: claims, Kept: everything}
	}
	t.Run("while the agent runs", func(t *testing.T) {
		buildInSteps(t, []buildStep{
			{Facts: facts(onDemand, claims), want: free},
			{Facts: facts(unread, claims), want: free},
			{Facts: facts(fewer, claims), want: free},
			{Facts: facts(onDemand, claims), want: free},
			{Facts: facts(unread, nil), want: free},
			{Facts: facts(fewer, nil), want: map[string]string{"": "", "/gpu-00": "7 slices 8 devices"}},
		})
	})
	t.Run("when the agent starts", func(t *testing.T) {
		late := facts(unread, nil)
		late.ClaimsLate = true
		buildInSteps(t, []buildStep{
			{Facts: facts(onDemand, claims), want: free},
			{Facts: late, want: map[string]string{"": ""}, restarted: true},
			{Facts: facts(unread, claims), want: map[string]string{"": ""}},
			{Facts: facts(onDemand, claims), want: free},
		})
	})
}

// The scheduler does not count in one pool what it allocated from the other.
func TestAllocatedFromAnotherPool(t *testing.T) {
	plain, onDemand := machine(1, dynamic, func(g *device.GPU) { g.Dynamic = false }), machine(1, dynamic)
	made := machine(1, dynamic)
	part := cut(&made.GPUs[0], "3g.40gb", 4)
	made.GPUs[0].Partitions[0].Made = true
	ownPool := testNode + "/gpu-00"
	free, fixed := map[string]string{"": "", "/gpu-00": "8 slices 26 devices"}, map[string]string{"": "gpu-0"}
	taken, nothing := map[string]string{"": "gpu-0!held-by-claim"}, map[string]string{"": "", "/gpu-00": "0 slices 26 devices"}
	facts := func(inv device.Inventory, claims ...v1alpha1.AllocatedClaim) Facts {
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
	withoutCounters := func(f Facts) Facts {
		f.Kept.Counters = false
		return f
	}
	for name, steps := range map[string][]buildStep{
		"it returns to the pool from which it is allocated": {
			{Facts: facts(plain), want: fixed},
			{Facts: facts(onDemand), want: free},
			{Facts: facts(onDemand, allocatedFrom("a", testNode, "gpu-0")), want: fixed},
			{Facts: holds(facts(onDemand, allocatedFrom("a", testNode, "gpu-0")), refOf(0)), want: fixed},
			{Facts: facts(onDemand), want: free},
		},
		"the same for the GPU pool": {
			{Facts: facts(onDemand), want: free},
			{Facts: facts(plain), want: fixed},
			{Facts: facts(plain, allocatedFrom("a", ownPool, "gpu-0-mig-3g40gb-9-4")), want: taken},
			{Facts: facts(onDemand, allocatedFrom("a", ownPool, "gpu-0-mig-3g40gb-9-4")), want: free},
			{Facts: facts(plain), want: fixed},
		},
		"a created partition is from the GPU pool": {
			{Facts: facts(plain), want: fixed},
			{Facts: holds(facts(made), part.Ref), want: free},
		},
		// No claim can have it, so it keeps none from the GPU.
		"an allocated device no longer exists": {
			{Facts: facts(onDemand), want: free},
			{Facts: facts(plain, allocatedFrom("a", ownPool, "gpu-0-mig-1c3g40gb-9-4-0-1")), want: fixed},
		},
		"static, and it is not known from which pool it is allocated": {
			{Facts: facts(onDemand), want: free},
			{Facts: facts(plain, allocatedFrom("a", "", "gpu-0-mig-3g40gb-9-4")), want: nothing},
			{Facts: holds(facts(plain), part.Ref), want: nothing},
			{Facts: facts(plain), want: fixed},
		},
		// The ledger refuses the second claim, and the scheduler allocates to no third one.
		"allocated from both pools": {
			{Facts: facts(plain), want: fixed},
			{Facts: facts(onDemand), want: free},
			{Facts: facts(onDemand, allocatedFrom("a", testNode, "gpu-0"), allocatedFrom("b", ownPool, "gpu-0-mig-3g40gb-9-4")),
				want: map[string]string{"": "", "/gpu-00": "4 slices 26 devices"}},
			{Facts: facts(onDemand, allocatedFrom("a", testNode, "gpu-0"), allocatedFrom("b", ownPool, "gpu-0")), want: free},
		},
		"allocated from both, published in the node pool": {
			{Facts: facts(plain), want: fixed},
			{Facts: facts(plain, allocatedFrom("a", testNode, "gpu-0"), allocatedFrom("b", ownPool, "gpu-0-mig-3g40gb-9-4")), want: taken},
		},
		"the API server drops counters": {
			{Facts: facts(onDemand), want: free},
			{Facts: withoutCounters(facts(onDemand)), want: fixed},
			{Facts: withoutCounters(facts(onDemand, allocatedFrom("a", ownPool, "gpu-0"))), want: map[string]string{"": ""}},
		},
		"the allocations are not known yet": {
			{Facts: facts(onDemand), want: free},
			{Facts: late(facts(plain)), want: nothing, restarted: true},
			{Facts: facts(plain), want: fixed},
			{Facts: late(facts(onDemand)), want: fixed, restarted: true},
			{Facts: facts(onDemand), want: free},
		},
	} {
		t.Run(name, func(t *testing.T) { buildInSteps(t, steps) })
	}
}

// An agent that ended while a GPU changed its pool leaves it in both.
func TestGPUPublishedInBothPools(t *testing.T) {
	plain, onDemand := machine(1, dynamic, func(g *device.GPU) { g.Dynamic = false }), machine(1, dynamic)
	free, fixed := map[string]string{"": "", "/gpu-00": "8 slices 26 devices"}, map[string]string{"": "gpu-0"}
	both := asFound(poolsOf(t, Facts{Inventory: plain, Kept: everything}), poolsOf(t, Facts{Inventory: onDemand, Kept: everything}))
	for name, test := range map[string]struct {
		inv    device.Inventory
		claims []v1alpha1.AllocatedClaim
		want   map[string]string
	}{
		"dynamic":                      {inv: onDemand, want: free},
		"static":                       {inv: plain, want: fixed},
		"a claim from the node pool":   {inv: onDemand, claims: []v1alpha1.AllocatedClaim{allocatedFrom("a", testNode, "gpu-0")}, want: fixed},
		"a claim from the GPU pool":    {inv: plain, claims: []v1alpha1.AllocatedClaim{allocatedFrom("a", testNode+"/gpu-00", "gpu-0")}, want: map[string]string{"": "gpu-0!held-by-claim"}},
		"a claim from an unknown pool": {inv: plain, claims: []v1alpha1.AllocatedClaim{allocatedFrom("a", "", "gpu-0")}, want: fixed},
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

// The scheduler gives a claim no device of a static GPU that Prepare would refuse, whatever the ledger and GPUNode.spec say about claims that
// the API server does not have.
func TestAStaticGPUOffersWhatExists(t *testing.T) {
	ownPool := testNode + "/gpu-00"
	static := func(changes ...func(*device.GPU)) device.Inventory {
		return machine(1, append([]func(*device.GPU){dynamic, func(g *device.GPU) { g.Dynamic = false }}, changes...)...)
	}
	unmanaged := static(func(g *device.GPU) { cut(g, "1g.10gb", 0) })
	created := static(func(g *device.GPU) {
		cut(g, "1g.10gb", 0)
		cut(g, "1g.20gb", 6)
		g.Partitions[1].Made = true
	})
	held := device.Ref{GPU: uuidOf(0), Placement: device.Placement{Start: 6, Size: 2}}
	hold := []ledger.Hold{{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "uid-gone"}, Device: held, State: ledger.StateHeld}}
	from := func(pool string) []v1alpha1.AllocatedClaim {
		return []v1alpha1.AllocatedClaim{allocatedFrom("gone", pool, "gpu-0-mig-1g20gb-15-6")}
	}
	cache := cel.NewCache(100, cel.Features{})
	for name, test := range map[string]struct {
		Facts
		// want are the devices that a claim gets, one after the other.
		want []string
	}{
		"a GPU, spec":                              {Facts{Inventory: static(), Claims: from(ownPool)}, nil},
		"a GPU, spec of an older controller":       {Facts{Inventory: static(), Claims: from("")}, nil},
		"a GPU, hold":                              {Facts{Inventory: static(), Holds: hold}, nil},
		"a GPU, spec late":                         {Facts{Inventory: static(), ClaimsLate: true}, nil},
		"a partition, spec":                        {Facts{Inventory: unmanaged, Claims: from(ownPool)}, []string{"gpu-0-mig-1g10gb-19-0"}},
		"a partition, spec of an older controller": {Facts{Inventory: unmanaged, Claims: from("")}, nil},
		"a partition, hold":                        {Facts{Inventory: unmanaged, Holds: hold}, nil},
		"a partition, hold and spec":               {Facts{Inventory: unmanaged, Holds: hold, Claims: from(ownPool)}, []string{"gpu-0-mig-1g10gb-19-0"}},
		"a partition, hold and spec late":          {Facts{Inventory: unmanaged, Holds: hold, ClaimsLate: true}, nil},
		"a created partition, hold":                {Facts{Inventory: created, Holds: hold}, []string{"gpu-0-mig-1g10gb-19-0"}},
		"a created partition, hold and spec":       {Facts{Inventory: created, Holds: hold, Claims: from(ownPool)}, []string{"gpu-0-mig-1g10gb-19-0"}},
		"a created partition, spec late":           {Facts{Inventory: created, Holds: hold, ClaimsLate: true}, nil},
		"a created partition, nothing":             {Facts{Inventory: created}, []string{"gpu-0-mig-1g10gb-19-0"}},
	} {
		t.Run(name, func(t *testing.T) {
			test.Kept, test.Now = everything, time.Unix(1000, 0)
			offer := Offer{NodeName: testNode}
			before := machine(1, dynamic)
			offer.SetPublished(asFound(poolsOf(t, Facts{Inventory: before, Kept: everything})))
			pools, _ := offer.Pools(test.Facts)
			var taken []allocation
			for _, class := range []string{"mig.nvidia.com", "mig.nvidia.com", "gpu.nvidia.com"} {
				taken = append(taken, allocate(t, asStored(pools), taken, cache, asking(fmt.Sprint(len(taken)), class, "", 1, false))...)
			}
			var got []string
			for _, a := range taken {
				got = append(got, a.device)
				result := resourceapi.DeviceRequestAllocationResult{Driver: "gpu.nvidia.com", Pool: a.pool, Device: a.device}
				if _, _, err := (&Driver{Config: Config{NodeName: testNode}}).resolve(result, test.Inventory, false); err != nil {
					t.Errorf("the scheduler allocates %v, and Prepare refuses it: %v", a, err)
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}
