// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/controller"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/driver"
)

// TestClaimsAsTheProductReadsThem: what the scheduler's allocator calls a part of a GPU is one to the product, and nothing else is.
func TestClaimsAsTheProductReadsThem(t *testing.T) {
	share := func(gib, shares int64) []v1alpha1.AllocatedShare {
		return []v1alpha1.AllocatedShare{{Device: "gpu-0", Memory: gib << 30, Shares: shares}}
	}
	for name, c := range map[string]struct {
		version int
		sharing []policy
		asks    amount
		want    []v1alpha1.AllocatedShare
	}{
		"a part":                                {36, byMemory, amount{mib: 10 << 10}, share(10, 0)},
		"all of a GPU that is shared out":       {36, byMemory, amount{}, nil},
		"a part, where GPUs are not shared out": {34, byMemory, amount{mib: 10 << 10}, nil},
		"a whole GPU there":                     {34, byMemory, amount{}, nil},
		"an equal share by default":             {36, equalShares, amount{}, share(0, 1)},
		"equal shares":                          {36, equalShares, amount{shares: 2}, share(0, 2)},
		"one with memory":                       {36, equalShares, amount{mib: 10 << 10}, share(10, 1)},
		"a whole GPU where there are none":      {34, equalShares, amount{shares: 2}, nil},
		"a GPU without a limit":                 {36, noLimit, amount{}, share(0, 0)},
		"memory of it":                          {36, noLimit, amount{mib: 10 << 10}, share(10, 0)},
	} {
		t.Run(name, func(t *testing.T) {
			k := &claim{uid: "claim-1", name: "claim-1", count: 1, asks: c.asks}
			results, err := allocate(c.version, published(c.version, c.sharing), nil, []*claim{k})
			if err != nil || len(results) != 1 {
				t.Fatalf("allocated are %v, error %v", results, err)
			}
			k = &claim{uid: k.uid, name: k.name, count: 1, asks: c.asks, allocation: results[0]}
			relayed := controller.Relay([]resourceapi.ResourceClaim{*resourceClaim(k)}, driverName, nodeName)
			if len(relayed) != 1 {
				t.Fatalf("relayed are %v", relayed)
			}
			if diff := cmp.Diff(c.want, relayed[0].Shares); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// published is the slice of a node with one shared GPU.
func published(version int, sharing []policy) *slice {
	s := &simulation{profile: profile{sharing: sharing}, version: version}
	s.inventory.GPUs = []device.GPU{{UUID: gpuUUID(0)}}
	s.shareGPUs()
	offer := driver.Offer{NodeName: nodeName}
	pools, _ := offer.Pools(driver.Facts{Inventory: s.inventory, Kept: kept(version)})
	return resourceSlices(pools)
}
