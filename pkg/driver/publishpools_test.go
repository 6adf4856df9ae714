// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// awaitPools waits until the published pools have that summary.
func (r *rig) awaitPools(want map[string]string) {
	r.t.Helper()
	eventually(r.t, "pools", func() error {
		pools := map[string]resourceslice.Pool{}
		for _, slice := range r.api.slices() {
			pool := pools[slice.Spec.Pool.Name]
			pool.Slices = append(pool.Slices, resourceslice.Slice{Devices: slice.Spec.Devices, SharedCounters: slice.Spec.SharedCounters})
			pools[slice.Spec.Pool.Name] = pool
		}
		if diff := cmp.Diff(want, summary(pools)); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
}

// threeGPUs are two dynamic GPUs and one other.
func threeGPUs() device.Inventory {
	inv := machine(3)
	dynamic(&inv.GPUs[1])
	dynamic(&inv.GPUs[2])
	return inv
}

func TestPublishPools(t *testing.T) {
	t.Parallel()
	r := newRig(t, threeGPUs())
	r.run().ready()
	all := func(first, second int) map[string]string {
		return map[string]string{
			"": "gpu-0", "/gpu-01": fmt.Sprintf("%d slices 26 devices", first), "/gpu-02": fmt.Sprintf("%d slices 26 devices", second),
		}
	}
	r.awaitPools(all(8, 8))
	if n := r.metric("tandem_published_devices", "offered"); n != 3 {
		t.Errorf("%v devices", n)
	}
	before := r.api.writeCount()
	r.takeByPod(2, nil)
	r.awaitPools(all(8, 0))
	if n := r.api.writeCount() - before; n != 1 {
		t.Errorf("%d writes for a withdrawal", n)
	}
	if n := r.metric("tandem_published_devices", "withdrawn"); n != 1 {
		t.Errorf("%v devices withdrawn", n)
	}
	r.releasePodHold(2)
	r.awaitPools(all(8, 8))
	if n := r.api.writeCount() - before; n != 2 {
		t.Errorf("%d writes for a withdrawal and the return", n)
	}
}

// With the option, a partition that was created for a claim has its UUID in the slices while it exists. That is one write in place: a pool of
// another generation would be incomplete for a moment.
func TestUUIDOfAMadePartition(t *testing.T) {
	t.Parallel()
	r := newRig(t, threeGPUs(), func(c *Config) { c.PartitionUUIDs = true })
	r.run().ready()
	uuids := func() (found []string) {
		for _, slice := range r.api.slices() {
			if slice.Spec.Pool.Generation != 1 {
				t.Errorf("pool %s has generation %d", slice.Spec.Pool.Name, slice.Spec.Pool.Generation)
			}
			for _, d := range slice.Spec.Devices {
				if uuid := d.Attributes["uuid"].StringValue; uuid != nil && *d.Attributes["type"].StringValue == "mig" {
					found = append(found, d.Name+" "+*uuid)
				}
			}
		}
		return found
	}
	awaitUUIDs := func(want ...string) {
		t.Helper()
		eventually(t, "UUIDs of partitions", func() error {
			if found := uuids(); !slices.Equal(found, want) {
				return fmt.Errorf("the slices have %q, not %q", found, want)
			}
			return nil
		})
	}
	inv := threeGPUs()
	made := cut(&inv.GPUs[2], "3g.40gb", 4)
	inv.GPUs[2].Partitions[0].Made = true
	before := r.api.writeCount()
	r.inventory.set(inv)
	awaitUUIDs(made.Name() + " " + made.UUID)
	r.inventory.set(threeGPUs())
	awaitUUIDs()
	if n := r.api.writeCount() - before; n != 2 {
		t.Errorf("%d writes for a partition and its end", n)
	}
}

// Without the option no slice is written for a partition.
func TestMadePartitionsWriteNoSlice(t *testing.T) {
	offer := Offer{NodeName: testNode}
	pools, _ := offer.Pools(Facts{Inventory: threeGPUs(), Kept: everything})
	inv := threeGPUs()
	cut(&inv.GPUs[2], "3g.40gb", 4)
	inv.GPUs[2].Partitions[0].Made = true
	now, _ := offer.Pools(Facts{Inventory: inv, Kept: everything})
	if diff := cmp.Diff(pools, now); diff != "" {
		t.Error(diff)
	}
}

// Allocated devices stay published, whether the ledger or the controller reports them.
func TestAllocatedDevicesStayPublished(t *testing.T) {
	t.Parallel()
	allocations := &fakeAllocations{changed: make(chan struct{})}
	inv := threeGPUs()
	inv.GPUs[2].Health = device.Health{Reason: device.ReasonLost}
	r := newRig(t, inv, func(c *Config) { c.Allocations = allocations })
	claim := newClaim("a", "gpu-2-mig-3g40gb-9-4")
	claim.Status.Allocation.Devices.Results[0].Pool = testNode + "/gpu-02"
	allocations.set(claim)
	r.run().ready()
	r.awaitPools(map[string]string{"": "gpu-0", "/gpu-01": "8 slices 26 devices", "/gpu-02": "4 slices 26 devices"})
	allocations.set()
	r.awaitPools(map[string]string{"": "gpu-0", "/gpu-01": "8 slices 26 devices", "/gpu-02": "0 slices 26 devices"})
}

// Without counters the scheduler could not tell that partitions exclude each other: none are published, and an event reports that.
func TestServersThatDropCounters(t *testing.T) {
	t.Parallel()
	onlyWhole := map[string]string{"": "gpu-0 gpu-1 gpu-2"}
	t.Run("from the beginning", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, threeGPUs())
		r.api.dropTaints = true
		r.run().ready()
		r.awaitPools(onlyWhole)
		reported := func() error {
			if n := strings.Count(r.events.all(), "Node/node1 NoPartitionsOnDemand: gpu-1, gpu-2 cannot be partitioned on demand"); n != 1 {
				return fmt.Errorf("reported %d times: %s", n, r.events.all())
			}
			return nil
		}
		eventually(t, "an event", reported)
		r.takeByPod(1, nil)
		r.awaitPools(map[string]string{"": "gpu-0 gpu-2"})
		if err := reported(); err != nil {
			t.Error(err)
		}
	})
	t.Run("later, and no more", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, threeGPUs())
		// Long enough to publish in between for a server that drops fields.
		r.driver.probeAgain = time.Second
		r.api.dropTaints, r.api.keepProbeTaints = true, true
		r.run().ready()
		r.awaitPools(onlyWhole)
		r.api.upgrade()
		r.awaitPools(map[string]string{"": "gpu-0", "/gpu-01": "8 slices 26 devices", "/gpu-02": "8 slices 26 devices"})
	})
}

// The slices follow partitions that an administrator creates and removes.
func TestPublishFollowsPartitions(t *testing.T) {
	t.Parallel()
	inv := machine(1, ampere)
	r := newRig(t, inv)
	r.run().ready()
	r.awaitPools(map[string]string{"": ""})
	if n := r.metric("tandem_published_devices", "excluded"); n != 1 {
		t.Errorf("%v excluded", n)
	}
	inv = machine(1, ampere)
	cut(&inv.GPUs[0], "3g.20gb", 4)
	r.inventory.set(inv)
	r.awaitPools(map[string]string{"": "gpu-0-mig-3g20gb-9-4"})
	inv = machine(1, ampere)
	cut(&inv.GPUs[0], "3g.20gb", 4)
	cut(&inv.GPUs[0], "1g.5gb", 0)
	inv.GPUs[0].Partitions[1].UUID = "" // has no compute instance yet
	inv.GPUs[0].Partitions[0].Health = device.Health{Reason: device.ReasonUnreachable}
	r.inventory.set(inv)
	r.awaitPools(map[string]string{"": "gpu-0-mig-3g20gb-9-4!unhealthy"})
	r.inventory.set(machine(1))
	r.awaitPools(map[string]string{"": "gpu-0"})
}

// A starting kubelet removes all slices of its node; all of them are written again at once.
func TestManyPoolsAreBackSoon(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(8, dynamic)).run()
	r.ready()
	want := map[string]string{"": ""}
	for i := range 8 {
		want[fmt.Sprintf("/gpu-%02d", i)] = "8 slices 26 devices"
	}
	r.awaitPools(want)
	r.api.wipeSlices()
	wiped := time.Now()
	r.awaitPools(want)
	t.Logf("published again after %v", time.Since(wiped))
}

// A process that keeps changing the slices of one pool does not delay repairs of other pools.
func TestRepairsOfOnePoolDoNotDelayOthers(t *testing.T) {
	q := newSyncQueue(func() {})
	defer q.ShutDown()
	for i := range 16 {
		pool := fmt.Sprintf("%s/gpu-%02d", testNode, i)
		for n := range 11 {
			if soon := q.repair(pool); soon != (n < 10) {
				t.Errorf("repair %d of %s at once: %v", n, pool, soon)
			}
		}
	}
}

// Ready reports a node as published once all of its pools are.
func TestReadyWhenAllPoolsArePublished(t *testing.T) {
	t.Parallel()
	r := newRig(t, threeGPUs())
	r.api.failPool = testNode + "/gpu-01"
	r.run()
	startKubelet(t, r.dir, "gpu.nvidia.com")
	r.awaitPools(map[string]string{"": "gpu-0", "/gpu-02": "8 slices 26 devices"})
	eventually(t, "Ready to name the error", func() error {
		if err := r.driver.Ready(); err == nil || !strings.Contains(err.Error(), "no pool node1/gpu-01 today") {
			return fmt.Errorf("Ready: %v", err)
		}
		return nil
	})
	r.api.set(func() { r.api.failPool = "" })
	eventually(t, "Ready", r.driver.Ready)
}

// A restarted agent keeps GPUs in the pools in which it finds them, and writes nothing. The pool of one that becomes static while a claim has
// it offers nothing.
func TestPoolsOutliveAnAgent(t *testing.T) {
	t.Parallel()
	r := newRig(t, threeGPUs())
	r.run().ready()
	want := map[string]string{"": "gpu-0", "/gpu-01": "8 slices 26 devices", "/gpu-02": "8 slices 26 devices"}
	r.awaitPools(want)
	if _, err := r.ledger.ReserveClaim(t.Context(), ledger.ClaimRequest{UID: "a", Devices: []device.Ref{refOf(2)}}); err != nil {
		t.Fatal(err)
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	before := r.api.writeCount()
	r.run().ready()
	r.awaitPools(want)
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	if n := r.api.writeCount() - before; n != 0 {
		t.Errorf("%d writes", n)
	}
	plain := threeGPUs()
	plain.GPUs[2].Dynamic = false
	r.inventory.set(plain)
	r.run().ready()
	want["/gpu-02"] = "0 slices 26 devices"
	r.awaitPools(want)
}

// A GPU stays in the pool in which an earlier agent published it until the allocations are known.
func TestPoolsStayUntilClaimsAreKnown(t *testing.T) {
	t.Parallel()
	allocations := &fakeAllocations{changed: make(chan struct{})}
	r := newRig(t, threeGPUs(), func(c *Config) { c.Allocations = allocations })
	r.run().ready()
	r.awaitPools(map[string]string{"": "gpu-0", "/gpu-01": "8 slices 26 devices", "/gpu-02": "8 slices 26 devices"})
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	plain := threeGPUs()
	plain.GPUs[1].Dynamic, plain.GPUs[2].Dynamic = false, false
	r.inventory.set(plain)
	allocations.mu.Lock()
	allocations.late = true
	allocations.mu.Unlock()
	r.run().ready()
	r.awaitPools(map[string]string{"": "gpu-0", "/gpu-01": "0 slices 26 devices", "/gpu-02": "0 slices 26 devices"})
	claim := newClaim("a", "gpu-2-mig-3g40gb-9-4")
	claim.Status.Allocation.Devices.Results[0].Pool = testNode + "/gpu-02"
	allocations.set(claim)
	r.awaitPools(map[string]string{"": "gpu-0 gpu-1 gpu-2!held-by-claim"})
}
