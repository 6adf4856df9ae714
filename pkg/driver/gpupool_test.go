// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"k8s.io/dynamic-resource-allocation/resourceslice"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/golden"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/mig"
	"github.com/tandem-gpu/tandem/simulated/models"
)

var everything = Capabilities{Taints: true, BindingConditions: true, Counters: true}

// dynamic makes a GPU dynamic.
func dynamic(g *device.GPU) {
	model, _ := models.Named("H100-80GB")
	g.Profiles, g.Dynamic = model.Offered(), true
}

// ampere makes it an A100 in MIG mode.
func ampere(g *device.GPU) {
	model, _ := models.Named("A100-40GB")
	g.Profiles, g.MIGEnabled = model.Offered(), true
	g.ProductName, g.Architecture, g.ComputeCapability, g.MemoryBytes = model.Product, "Ampere", "8.0", model.Total.MemoryBytes
}

// cut creates a partition on a GPU, as an administrator would.
func cut(g *device.GPU, profile string, start int) device.Partition {
	i := slices.IndexFunc(g.Profiles, func(p device.Profile) bool { return p.Name == profile })
	p := g.Profiles[i]
	made := device.Partition{
		UUID: fmt.Sprintf("MIG-%08d-%02d-%02d", g.Minor, p.ID, start), Parent: g.Minor, Profile: p.Name, ProfileID: p.ID, Capacity: p.Capacity,
		Ref: device.Ref{GPU: g.UUID, Placement: device.Placement{Start: start, Size: p.Placements[0].Size}}, GPUInstance: len(g.Partitions) + 1,
	}
	g.Partitions, g.MIGEnabled = append(g.Partitions, made), true
	return made
}

// share turns the last partition of a GPU into compute instances of one slice each.
func share(g *device.GPU, into int) {
	last := g.Partitions[len(g.Partitions)-1]
	g.Partitions = g.Partitions[:len(g.Partitions)-1]
	for i := range into {
		part := last
		part.UUID, part.Profile = fmt.Sprintf("%s-%d", last.UUID, i), "1c."+last.Profile
		part.Ref.Compute, part.ComputeInstance = device.Placement{Start: i, Size: 1}, i
		part.Capacity.Multiprocessors /= into
		g.Partitions = append(g.Partitions, part)
	}
}

// a100s have unmanaged partitions of several profiles; the last GPU has none.
func a100s() device.Inventory {
	inv := machine(4, ampere)
	cut(&inv.GPUs[0], "3g.20gb", 0)
	cut(&inv.GPUs[0], "2g.10gb", 4)
	cut(&inv.GPUs[1], "3g.20gb", 4)
	share(&inv.GPUs[1], 3)
	cut(&inv.GPUs[1], "1g.5gb", 0)
	inv.GPUs[2].Partitions = nil // in MIG mode without any
	inv.GPUs[3].MIGEnabled = false
	return inv
}

// mixed has static and dynamic GPUs, with and without unmanaged partitions.
func mixed() device.Inventory {
	inv := machine(4)
	cutAndDynamic := &inv.GPUs[1]
	dynamic(cutAndDynamic)
	cut(cutAndDynamic, "1g.10gb", 6)
	cut(cutAndDynamic, "3g.40gb", 0)
	share(cutAndDynamic, 2)
	dynamic(&inv.GPUs[2])
	ampere(&inv.GPUs[3])
	cut(&inv.GPUs[3], "7g.40gb", 0)
	return inv
}

func poolsOf(t *testing.T, f Facts) map[string]resourceslice.Pool {
	t.Helper()
	offer := Offer{NodeName: testNode}
	pools, _ := offer.Pools(f)
	return pools
}

func TestGoldenPools(t *testing.T) {
	pod := func(ref device.Ref) ledger.Hold {
		return ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: ref.String()}, Device: ref, State: ledger.StateHeld}
	}
	a100, all := a100s(), mixed()
	few := machine(1, dynamic, func(g *device.GPU) {
		g.Profiles = slices.DeleteFunc(g.Profiles, func(p device.Profile) bool { return p.Name != "3g.40gb" })
	})
	tests := map[string]Facts{
		"mig-h100x8.txt":           {Inventory: machine(8, dynamic), Kept: everything},
		"mig-h100.yaml":            {Inventory: few, Kept: everything},
		"mig-a100x4.yaml":          {Inventory: a100, Kept: everything},
		"mig-a100x4-held.txt":      {Inventory: a100, Kept: everything, Holds: []ledger.Hold{pod(a100.GPUs[0].Partitions[0].Ref), pod(a100.GPUs[1].Partitions[1].Ref)}},
		"mig-mixed.txt":            {Inventory: all, Kept: everything},
		"mig-mixed-held.txt":       {Inventory: all, Kept: everything, Holds: []ledger.Hold{pod(all.GPUs[1].Partitions[0].Ref), pod(refOf(2)), pod(all.GPUs[3].Partitions[0].Ref)}},
		"mig-mixed-nocounters.txt": {Inventory: all},
	}
	for name, facts := range tests {
		t.Run(name, func(t *testing.T) {
			pools := poolsOf(t, facts)
			if strings.HasSuffix(name, ".txt") {
				golden.Compare(t, filepath.Join("testdata", name), []byte(listing(pools)))
				return
			}
			got, err := yaml.Marshal(pools)
			if err != nil {
				t.Fatal(err)
			}
			golden.Compare(t, filepath.Join("testdata", name), got)
		})
	}
}

// listing returns a line for each counter set and device, without attributes and capacities.
func listing(pools map[string]resourceslice.Pool) string {
	var text strings.Builder
	counters := func(counters map[string]resourceapi.Counter) {
		for _, name := range slices.Sorted(maps.Keys(counters)) {
			c := counters[name]
			fmt.Fprintf(&text, " %s=%s", name, c.Value.String())
		}
	}
	for _, name := range slices.Sorted(maps.Keys(pools)) {
		fmt.Fprintln(&text, name)
		for i, slice := range pools[name].Slices {
			for _, set := range slice.SharedCounters {
				fmt.Fprintf(&text, "%d %s:", i, set.Name)
				counters(set.Counters)
				fmt.Fprintln(&text)
			}
			for _, d := range slice.Devices {
				fmt.Fprintf(&text, "%d %s", i, d.Name)
				for _, taint := range d.Taints {
					fmt.Fprintf(&text, " !%s", taint.Key)
				}
				for _, c := range d.ConsumesCounters {
					fmt.Fprintf(&text, ": %s", c.CounterSet)
					counters(c.Counters)
				}
				fmt.Fprintln(&text)
			}
		}
	}
	return text.String()
}

// The API server accepts the slices of every machine.
func TestPoolsAreWithinLimits(t *testing.T) {
	machines := map[string]device.Inventory{"a100s": a100s(), "mixed": mixed(), "unusable": unusableMachine()}
	for _, model := range models.All() {
		machines[model.Name] = machine(16, func(g *device.GPU) { g.Profiles, g.Dynamic = model.Offered(), true })
		machines[model.Name+" cut"] = machine(2, func(g *device.GPU) {
			g.Profiles, g.Dynamic = model.Offered(), true
			for _, at := range g.Profiles[0].Placements {
				cut(g, g.Profiles[0].Name, at.Start)
			}
		})
	}
	for name, inv := range machines {
		for pool, p := range poolsOf(t, Facts{Inventory: inv, Kept: everything}) {
			sets, seen := map[string]map[string]resourceapi.Counter{}, map[string]bool{}
			for _, slice := range p.Slices {
				if len(slice.SharedCounters) > 0 && slice.Devices != nil || len(slice.SharedCounters) > resourceapi.ResourceSliceMaxCounterSets ||
					len(slice.Devices) > resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures {
					t.Errorf("%s, %s: %d counter sets and %d devices in one slice", name, pool, len(slice.SharedCounters), len(slice.Devices))
				}
				for _, set := range slice.SharedCounters {
					sets[set.Name] = set.Counters
					if len(set.Counters) > resourceapi.ResourceSliceMaxCountersPerCounterSet {
						t.Errorf("%s, %s: %d counters", name, pool, len(set.Counters))
					}
				}
				for _, d := range slice.Devices {
					if n := len(d.Attributes) + len(d.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
						t.Errorf("%s, %s: %s has %d attributes and capacities", name, pool, d.Name, n)
					}
					if seen[d.Name] || len(d.Name) > 63 {
						t.Errorf("%s, %s: device %s is there twice, or too long", name, pool, d.Name)
					}
					seen[d.Name] = true
					if pool != testNode && len(d.ConsumesCounters) != 1 {
						t.Errorf("%s, %s: %s consumes nothing, so it looks independent", name, pool, d.Name)
					}
					for _, c := range d.ConsumesCounters {
						for counter := range c.Counters {
							if _, known := sets[c.CounterSet][counter]; !known {
								t.Errorf("%s, %s: %s consumes %s of %s, which is not there", name, pool, d.Name, counter, c.CounterSet)
							}
						}
						if len(c.Counters) == 0 {
							t.Errorf("%s, %s: %s consumes nothing of %s", name, pool, d.Name, c.CounterSet)
						}
					}
				}
			}
		}
	}
}

// summary returns the devices of each pool; of a GPU pool, the free memory slices and the number of devices.
func summary(pools map[string]resourceslice.Pool) map[string]string {
	text := map[string]string{}
	for name, pool := range pools {
		var parts []string
		for _, slice := range pool.Slices {
			for _, set := range slice.SharedCounters {
				free := 0
				for counter, c := range set.Counters {
					if strings.HasPrefix(counter, "memory-slice-") {
						free += int(c.Value.Value())
					}
				}
				parts = append(parts, fmt.Sprintf("%d slices", free))
			}
			if n := len(slice.Devices); n > 3 {
				parts = append(parts, fmt.Sprintf("%d devices", n))
				continue
			}
			for _, d := range slice.Devices {
				taint := ""
				if len(d.Taints) > 0 {
					taint = "!" + strings.TrimPrefix(d.Taints[0].Key, "tandem-gpu.dev/")
				}
				parts = append(parts, d.Name+taint)
			}
		}
		text[strings.TrimPrefix(name, testNode)] = strings.Join(parts, " ")
	}
	return text
}

// A GPU stays in the pool from which its devices are allocated, over changes of the configuration, the API server and the agent.
func TestAGPUStaysWhereClaimsHaveGotIt(t *testing.T) {
	plain, onDemand := machine(1, dynamic, func(g *device.GPU) { g.Dynamic = false }), machine(1, dynamic)
	whole := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "c"}, Device: refOf(0), State: ledger.StateHeld}
	half := whole
	half.Device.Placement = device.Placement{Start: 4, Size: 4}
	free, fixed := map[string]string{"": "", "/gpu-00": "8 slices 26 devices"}, map[string]string{"": "gpu-0"}
	type step struct {
		inv   device.Inventory
		holds []ledger.Hold
		kept  Capabilities
		want  map[string]string
		// restarted starts a new agent before the step.
		restarted bool
	}
	blind := Capabilities{Taints: true}
	for name, steps := range map[string][]step{
		"no longer on demand": {
			{inv: onDemand, holds: []ledger.Hold{half}, kept: everything, want: free},
			{inv: plain, holds: []ledger.Hold{half}, kept: everything, want: map[string]string{"": "", "/gpu-00": "0 slices 26 devices"}, restarted: true},
			{inv: plain, holds: []ledger.Hold{half}, kept: everything, want: map[string]string{"": "", "/gpu-00": "0 slices 26 devices"}, restarted: true},
			{inv: plain, kept: everything, want: fixed},
		},
		"on demand from now on": {
			{inv: plain, holds: []ledger.Hold{whole}, kept: everything, want: fixed},
			{inv: onDemand, holds: []ledger.Hold{whole}, kept: everything, want: fixed, restarted: true},
			{inv: onDemand, holds: []ledger.Hold{whole}, kept: everything, want: fixed, restarted: true},
			{inv: onDemand, kept: everything, want: free},
		},
		"counters are dropped": {
			{inv: onDemand, holds: []ledger.Hold{half}, kept: everything, want: free},
			{inv: onDemand, holds: []ledger.Hold{half}, kept: blind, want: map[string]string{"": ""}},
			{inv: onDemand, holds: []ledger.Hold{half}, kept: blind, want: map[string]string{"": "gpu-0!held-by-claim"}, restarted: true},
			{inv: onDemand, kept: blind, want: fixed},
			{inv: onDemand, kept: everything, want: free},
		},
	} {
		t.Run(name, func(t *testing.T) {
			offer := Offer{NodeName: testNode}
			var published map[string]resourceslice.Pool
			for i, s := range steps {
				if s.restarted {
					offer = Offer{NodeName: testNode}
					offer.SetPublished(asFound(published))
				}
				published, _ = offer.Pools(Facts{Inventory: s.inv, Holds: s.holds, Kept: s.kept, Now: time.Unix(int64(i), 0)})
				if diff := cmp.Diff(s.want, summary(published)); diff != "" {
					t.Errorf("step %d: %s", i, diff)
				}
			}
		})
	}
}

// The counters of a GPU pool exclude what the scheduler cannot count, and nothing else.
func TestCountersFollowHolds(t *testing.T) {
	now := time.Unix(1000, 0)
	at := func(start, size int) device.Ref {
		return device.Ref{GPU: uuidOf(0), Placement: device.Placement{Start: start, Size: size}}
	}
	hold := func(kind ledger.Kind, state ledger.State, age time.Duration, ref device.Ref) ledger.Hold {
		return ledger.Hold{Holder: ledger.Holder{Kind: kind, ID: "c"}, Device: ref, State: state, Began: now.Add(-age)}
	}
	deserted, contested := hold(ledger.KindClaim, ledger.StateHeld, 0, at(0, 4)), hold(ledger.KindClaim, ledger.StateHeld, 0, at(0, 4))
	deserted.Deserted, contested.Contested = true, true
	next := []v1alpha1.AllocatedClaim{{UID: "next", Devices: []string{"gpu-0-mig-3g40gb-9-0"}}}
	unreadable := hold(ledger.KindClaim, ledger.StateRestored, 0, at(0, 4))
	unreadable.Unreadable = true
	claim := func(names ...string) []v1alpha1.AllocatedClaim {
		return []v1alpha1.AllocatedClaim{{UID: "c", Devices: names}}
	}
	onDemand := machine(1, dynamic)
	lost := machine(1, dynamic)
	lost.GPUs[0].Health = device.Health{Reason: device.ReasonLost}
	cutGPU := machine(1, dynamic)
	unmanaged := cut(&cutGPU.GPUs[0], "3g.40gb", 4)
	orphan := machine(1, dynamic)
	cut(&orphan.GPUs[0], "3g.40gb", 4)
	orphan.GPUs[0].Partitions[0].Made = true
	tests := map[string]struct {
		inv    device.Inventory
		holds  []ledger.Hold
		claims []v1alpha1.AllocatedClaim
		slices string
		own    int64
	}{
		"free":                            {inv: onDemand, slices: "11111111"},
		"held by a claim":                 {inv: onDemand, holds: []ledger.Hold{hold(ledger.KindClaim, ledger.StateHeld, time.Hour, at(0, 4))}, slices: "11111111"},
		"restored claim":                  {inv: onDemand, holds: []ledger.Hold{hold(ledger.KindClaim, ledger.StateRestored, time.Hour, at(0, 4))}, slices: "11111111"},
		"draining, for a short time":      {inv: onDemand, holds: []ledger.Hold{hold(ledger.KindClaim, ledger.StateDraining, time.Second, at(0, 4))}, slices: "11111111"},
		"draining, for a long time":       {inv: onDemand, holds: []ledger.Hold{hold(ledger.KindClaim, ledger.StateDraining, time.Minute, at(0, 4))}, slices: "00001111"},
		"draining, allocated again":       {inv: onDemand, holds: []ledger.Hold{hold(ledger.KindClaim, ledger.StateDraining, time.Minute, at(0, 4))}, claims: claim("gpu-0-mig-3g40gb-9-0"), slices: "11111111"},
		"unreadable record":               {inv: onDemand, holds: []ledger.Hold{unreadable}, slices: "00001111"},
		"a pod holds the GPU":             {inv: onDemand, holds: []ledger.Hold{hold(ledger.KindPod, ledger.StateHeld, 0, refOf(0))}, slices: "00000000"},
		"a pod, in conflict with a claim": {inv: onDemand, holds: []ledger.Hold{hold(ledger.KindPod, ledger.StateHeld, 0, refOf(0))}, claims: claim("gpu-0-mig-1g10gb-19-2"), slices: "00000000"},
		"without pods":                    {inv: onDemand, holds: []ledger.Hold{deserted}, slices: "00001111"},
		"without pods, still reported":    {inv: onDemand, holds: []ledger.Hold{deserted}, claims: claim("gpu-0-mig-3g40gb-9-0"), slices: "00001111"},
		"contested":                       {inv: onDemand, holds: []ledger.Hold{contested}, claims: next, slices: "00001111"},
		"contested, and allocated":        {inv: onDemand, holds: []ledger.Hold{contested}, claims: claim("gpu-0-mig-3g40gb-9-0"), slices: "11111111"},
		"a lost GPU":                      {inv: lost, slices: "00000000"},
		"a lost GPU of a claim":           {inv: lost, claims: claim("gpu-0"), slices: "11111111"},
		"unmanaged partition":             {inv: cutGPU, slices: "11110000", own: 1},
		"a pod holds it":                  {inv: cutGPU, holds: []ledger.Hold{hold(ledger.KindPod, ledger.StateHeld, 0, unmanaged.Ref)}, slices: "11110000"},
		"a claim holds it":                {inv: cutGPU, holds: []ledger.Hold{hold(ledger.KindClaim, ledger.StateHeld, 0, unmanaged.Ref)}, slices: "11110000", own: 1},
		"a pod and a claim in conflict":   {inv: cutGPU, holds: []ledger.Hold{hold(ledger.KindPod, ledger.StateHeld, 0, unmanaged.Ref)}, claims: claim(unmanaged.Name()), slices: "11110000"},
		"a pod holds the GPU and it":      {inv: cutGPU, holds: []ledger.Hold{hold(ledger.KindPod, ledger.StateHeld, 0, refOf(0))}, slices: "00000000"},
		// The scheduler allocated parts of a force-deleted claim before kubelet unprepared it.
		"two parts of a claim's GPU":    {inv: onDemand, holds: []ledger.Hold{hold(ledger.KindClaim, ledger.StateHeld, 0, refOf(0))}, claims: claim("gpu-0-mig-3g40gb-9-0", "gpu-0-mig-3g40gb-9-4"), slices: "11111111"},
		"a part of a claim's partition": {inv: onDemand, holds: []ledger.Hold{hold(ledger.KindClaim, ledger.StateHeld, 0, at(0, 4))}, claims: claim("gpu-0-mig-1g10gb-19-2"), slices: "11111111"},
		// An administrator changed partitions before kubelet prepared the claim.
		"an allocated GPU was partitioned":       {inv: cutGPU, claims: claim("gpu-0"), slices: "11111111"},
		"a claim's partition was replaced":       {inv: cutGPU, claims: claim("gpu-0-mig-4g40gb-5-0", "gpu-0-mig-1g10gb-19-5"), slices: "11110100"},
		"a claim's compute instance was removed": {inv: onDemand, holds: []ledger.Hold{hold(ledger.KindClaim, ledger.StateHeld, 0, device.Ref{GPU: uuidOf(0), Placement: device.Placement{Size: 4}, Compute: device.Placement{Size: 1}})}, slices: "00001111"},
		"created and without a hold":             {inv: orphan, slices: "11110000"},
		"created for a claim":                    {inv: orphan, holds: []ledger.Hold{hold(ledger.KindClaim, ledger.StateHeld, 0, at(4, 4))}, slices: "11111111"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			offer := Offer{NodeName: testNode}
			offer.Pools(Facts{Inventory: test.inv, Holds: test.holds, Claims: test.claims, Kept: everything, Now: now.Add(-drainGrace)})
			pools, _ := offer.Pools(Facts{Inventory: test.inv, Holds: test.holds, Claims: test.claims, Kept: everything, Now: now})
			counters := pools[testNode+"/gpu-00"].Slices[0].SharedCounters[0].Counters
			got := ""
			for i := range 8 {
				c := counters[fmt.Sprintf("memory-slice-%d", i)]
				got += c.Value.String()
			}
			if got != test.slices {
				t.Errorf("slices %s, want %s", got, test.slices)
			}
			for name, there := range mig.NewGeometry(test.inv.GPUs[0].Profiles).Total() {
				if c := counters[name]; c.Value.Value() > there {
					t.Errorf("%s: %v of %d", name, c.Value.Value(), there)
				}
			}
			if own, exists := counters[unmanaged.Name()]; own.Value.Value() != test.own || exists != (len(test.inv.GPUs[0].Partitions) > 0 && !test.inv.GPUs[0].Partitions[0].Made) {
				t.Errorf("the counter of the unmanaged partition is %v, %v", own.Value.Value(), exists)
			}
		})
	}
}

// A dynamic GPU under maintenance keeps what is allocated, offers no partition more, and says why.
func TestMaintenanceOfADynamicGPU(t *testing.T) {
	facts := Facts{
		Inventory: machine(1, dynamic), Kept: everything, Maintenance: map[string]bool{uuidOf(0): true},
		Claims: []v1alpha1.AllocatedClaim{{UID: "c", Devices: []string{"gpu-0-mig-3g40gb-9-4"}, Pools: []string{testNode + "/gpu-00"}}},
	}
	pool := poolsOf(t, facts)[testNode+"/gpu-00"]
	for i, want := range "00001111" {
		counter := pool.Slices[0].SharedCounters[0].Counters[fmt.Sprintf("memory-slice-%d", i)]
		if got := counter.Value.String(); got != string(want) {
			t.Errorf("memory slice %d: %s, want %c", i, got, want)
		}
	}
	n := 0
	for _, slice := range pool.Slices {
		for _, d := range slice.Devices {
			n++
			if len(d.Taints) != 1 || d.Taints[0].Key != "tandem-gpu.dev/maintenance" || d.Taints[0].Effect != resourceapi.DeviceTaintEffectNoSchedule {
				t.Errorf("%s has the taints %v", d.Name, d.Taints)
			}
		}
	}
	if n != 26 {
		t.Errorf("%d devices, want the GPU and 25 placements", n)
	}
}

// Static partitions and shares of a GPU under maintenance have its taint.
func TestMaintenanceOfPartsOfAGPU(t *testing.T) {
	inv := machine(2, dynamic)
	inv.GPUs[0].Dynamic, inv.GPUs[1].Dynamic = false, false
	cut(&inv.GPUs[0], "3g.40gb", 0)
	cut(&inv.GPUs[0], "3g.40gb", 4)
	inv.GPUs[1].Sharing = device.Sharing{Strategy: device.TimeSlicing, Claims: device.ByMemory}
	kept := everything
	kept.Shares = true
	pool := poolsOf(t, Facts{Inventory: inv, Kept: kept, Maintenance: map[string]bool{uuidOf(0): true, uuidOf(1): true}})[testNode]
	n := 0
	for _, slice := range pool.Slices {
		for _, d := range slice.Devices {
			n++
			if len(d.Taints) != 1 || d.Taints[0].Key != "tandem-gpu.dev/maintenance" {
				t.Errorf("%s has the taints %v", d.Name, d.Taints)
			}
		}
	}
	if n != 3 {
		t.Errorf("%d devices, want two partitions and a GPU", n)
	}
}

// A pod on one of eight GPUs costs one write: the slice with the counters of that GPU.
func TestWithdrawalFromCountersChangesOneSmallSlice(t *testing.T) {
	inv := machine(8, dynamic)
	before := poolsOf(t, Facts{Inventory: inv, Kept: everything})
	after := poolsOf(t, Facts{Inventory: inv, Kept: everything, Holds: []ledger.Hold{{
		Holder: ledger.Holder{Kind: ledger.KindPod, ID: "x"}, Device: refOf(3), State: ledger.StateHeld,
	}}})
	size := func(slice resourceslice.Slice) int {
		data, err := json.Marshal(resourceapi.ResourceSliceSpec{Devices: slice.Devices, SharedCounters: slice.SharedCounters})
		if err != nil {
			t.Fatal(err)
		}
		return len(data)
	}
	all, changed, bytes := 0, 0, 0
	for name, pool := range before {
		for i, slice := range pool.Slices {
			all += size(slice)
			if !cmp.Equal(slice, after[name].Slices[i]) {
				changed, bytes = changed+1, bytes+size(after[name].Slices[i])
			}
		}
	}
	own := before[testNode+"/gpu-03"].Slices
	t.Logf("8 GPUs: %d bytes in %d pools; one GPU: %d of counters, %d of %d devices; a withdrawal: %d bytes in %d slice",
		all, len(before), size(own[0]), size(own[1]), len(own[1].Devices), bytes, changed)
	if changed != 1 || bytes > 1000 {
		t.Errorf("%d bytes in %d slices", bytes, changed)
	}
}

// BenchmarkOffer measures a build and the comparison with the one before, after a claim was prepared, on a node with eight dynamic
// GPUs and on one with 256 GPUs.
func BenchmarkOffer(b *testing.B) {
	for name, inv := range map[string]device.Inventory{"dynamic": machine(8, dynamic), "256": machine(256)} {
		b.Run(name, func(b *testing.B) {
			var held []ledger.Hold
			for i, g := range inv.GPUs[:len(inv.GPUs)/2] {
				holder := ledger.Holder{Kind: ledger.KindClaim, ID: fmt.Sprint("claim-", i)}
				held = append(held, ledger.Hold{Holder: holder, Device: g.Ref(), State: ledger.StateHeld})
			}
			offer := Offer{NodeName: testNode}
			before, _ := offer.Pools(Facts{Inventory: inv, Kept: everything, Holds: held[1:]})
			for i := 0; b.Loop(); i++ {
				after, _ := offer.Pools(Facts{Inventory: inv, Kept: everything, Holds: held[i%2:]})
				if !reflect.DeepEqual(before, after) {
					b.Fatal("changed")
				}
			}
		})
	}
}
