// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/capacity"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

const gib = uint64(1) << 30

// sharedMachine has L4 GPUs that pods and claims share, claims by memory. The memory of one is not a multiple of a MiB.
func sharedMachine(n int) device.Inventory { return dividedMachine(n, device.ByMemory) }

// dividedMachine is sharedMachine where claims share in that way.
func dividedMachine(n int, claims device.ClaimShares) device.Inventory {
	return machine(n, func(g *device.GPU) {
		g.MIGCapable, g.MemoryBytes = false, 24*gib+uint64(g.Minor)*12345
		g.Sharing = device.Sharing{Strategy: device.TimeSlicing, Claims: claims, Replicas: map[string]device.Replicas{"": {Count: 4}}}
		if claims == device.ByCount {
			g.Sharing.Shares = 8
		}
	})
}

// market is a node with shared GPUs, its scheduler and its ledger.
type market struct {
	*testing.T
	inv    device.Inventory
	ledger *ledger.Ledger
	// allocated are the scheduler's results by claim.
	allocated map[string]resourceapi.DeviceRequestAllocationResult
	// claims are all of them; claim is the last one.
	claims map[string]*resourceapi.ResourceClaim
	claim  *resourceapi.ResourceClaim
	cache  *cel.Cache
	serial int
}

func newMarket(t *testing.T, gpus int) *market { return newDividedMarket(t, gpus, device.ByMemory) }

func newDividedMarket(t *testing.T, gpus int, claims device.ClaimShares) *market {
	l, err := ledger.Open(t.Context(), ledger.Options{Dir: t.TempDir(), BootID: "boot", PodStates: &fakePodStates{}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return &market{
		T: t, inv: dividedMachine(gpus, claims), ledger: l, allocated: map[string]resourceapi.DeviceRequestAllocationResult{},
		claims: map[string]*resourceapi.ResourceClaim{},
		cache:  cel.NewCache(100, cel.Features{}),
	}
}

// schedule allocates a claim for some memory, or for what a GPU gives by default.
func (m *market) schedule(memory *resource.Quantity) (resourceapi.DeviceRequestAllocationResult, bool) {
	m.Helper()
	asked := map[resourceapi.QualifiedName]resource.Quantity{}
	if memory != nil {
		asked["memory"] = *memory
	}
	return m.scheduleAmounts(asked)
}

func (m *market) scheduleAmounts(asked map[resourceapi.QualifiedName]resource.Quantity) (resourceapi.DeviceRequestAllocationResult, bool) {
	m.Helper()
	pools, _ := (&Offer{NodeName: testNode}).Pools(Facts{
		Inventory: m.inv, Holds: m.ledger.Holds(), Claims: m.relayed(), Kept: Capabilities{Taints: true, Shares: true}, Now: time.Now(),
	})
	built := pools[testNode].Slices
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "slice"}, Spec: resourceapi.ResourceSliceSpec{
		Driver: "gpu.nvidia.com", NodeName: ptr.To(testNode), Devices: built[0].Devices,
		Pool: resourceapi.ResourcePool{Name: testNode, Generation: 1, ResourceSliceCount: 1},
	}}
	state := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	for _, r := range m.allocated {
		id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
		if r.ShareID == nil {
			state.AllocatedDevices.Insert(id)
			continue
		}
		state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
		state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
	}
	features := structured.Features{DeviceTaints: true, PrioritizedList: true, ConsumableCapacity: true}
	allocator, err := structured.NewAllocator(m.Context(), features, state, nvidiaClasses, []*resourceapi.ResourceSlice{slice}, m.cache)
	if err != nil {
		m.Fatal(err)
	}
	m.serial++
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "team-a", UID: types.UID(fmt.Sprintf("claim-%d", m.serial))}}
	request := &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}
	if len(asked) > 0 {
		request.Capacity = &resourceapi.CapacityRequirements{Requests: asked}
	}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: request}}
	m.claim, m.claims[string(claim.UID)] = claim, claim
	results, err := allocator.Allocate(m.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testNode}}, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		m.Fatal(err)
	}
	if len(results) == 0 {
		return resourceapi.DeviceRequestAllocationResult{}, false
	}
	result := results[0].Devices.Results[0]
	m.allocated[string(claim.UID)] = result
	return result, true
}

func (m *market) must(err error) {
	m.Helper()
	if err != nil {
		m.Fatal(err)
	}
}

// relayed are the allocations as the controller reports them.
func (m *market) relayed() (claims []v1alpha1.AllocatedClaim) {
	for uid, result := range m.allocated {
		claim := v1alpha1.AllocatedClaim{UID: types.UID(uid), Devices: []string{result.Device}, Pools: []string{testNode}}
		if c, shared := capacity.Consumed(m.claims[uid], result); shared {
			claim.Shares = []v1alpha1.AllocatedShare{{Device: result.Device, Memory: c.Memory, Shares: c.Shares}}
		}
		claims = append(claims, claim)
	}
	return claims
}

// prepare reserves the devices of the last claim.
func (m *market) prepare(result resourceapi.DeviceRequestAllocationResult) error {
	return m.prepareClaim(string(m.claim.UID), result)
}

func (m *market) prepareClaim(uid string, results ...resourceapi.DeviceRequestAllocationResult) error {
	p := &preparation{names: map[device.Ref]string{}, consumed: map[device.Ref]device.Consumed{}}
	p.request = ledger.ClaimRequest{UID: uid, Shares: map[device.Ref]device.Share{}}
	for _, result := range results {
		found, ok := m.inv.ByName(result.Device)
		if !ok {
			m.Fatalf("no device %s", result.Device)
		}
		consumed, shared := capacity.Consumed(m.claims[uid], result)
		p.addDevice(found, result.Device, consumed, shared)
	}
	_, err := m.ledger.ReserveClaim(m.Context(), p.request)
	return err
}

// fits reports whether some GPU has room for so many bytes and equal shares, by the ledger. A claim that asks for neither gets the default.
func (m *market) fits(memory, shares uint64) bool {
	for _, g := range m.inv.GPUs {
		holders, whole := 0, false
		used := device.Share{}
		for _, h := range m.ledger.Holds() {
			if h.Device == g.Ref() {
				holders, whole, used = holders+1, whole || h.Share.Whole(), used.Plus(h.Share)
			}
		}
		left := g.MemoryBytes - used.Bytes
		switch claims := g.Sharing.Claims; {
		case whole:
		case claims == device.ByMemory && memory == 0:
			if shares == 0 && holders == 0 {
				return true
			}
		case claims == device.ByMemory:
			if shares == 0 && memory <= left && left >= 2*device.ShareUnit {
				return true
			}
		case claims == device.Unlimited:
			if shares == 0 && memory <= left {
				return true
			}
		case memory <= left && max(1, shares)+used.Count <= uint64(g.Sharing.Shares):
			return true
		}
	}
	return false
}

// The scheduler allocates exactly what the ledger then grants, while pods take replicas of the same GPUs.
func TestSchedulerAndLedgerAgreeOnShares(t *testing.T) {
	for _, claims := range []device.ClaimShares{device.ByMemory, device.ByCount, device.Unlimited} {
		t.Run(string(claims), func(t *testing.T) {
			for seed := range uint64(6) {
				compareShares(t, claims, seed)
			}
		})
	}
}

func compareShares(t *testing.T, claims device.ClaimShares, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 11))
	m := newDividedMarket(t, 2, claims)
	offers, _ := (device.Resources{GPU: "nvidia.com/gpu"}).Offers(m.inv.GPUs)
	placed, refused := 0, 0
	for range 250 {
		switch operation := random.IntN(10); {
		case operation < 5:
			asked, bytes, shares := map[resourceapi.QualifiedName]resource.Quantity{}, uint64(0), uint64(0)
			if random.IntN(4) > 0 {
				memory := resource.NewQuantity(1+random.Int64N(14)*int64(gib)+random.Int64N(3), resource.BinarySI)
				bytes = (uint64(memory.Value()) + device.ShareUnit - 1) / device.ShareUnit * device.ShareUnit
				asked["memory"] = *memory
			}
			if random.IntN(3) == 0 {
				shares = uint64(1 + random.IntN(5))
				asked["shares"] = *resource.NewQuantity(int64(shares), resource.DecimalSI)
			}
			fits := m.fits(bytes, shares)
			result, ok := m.scheduleAmounts(asked)
			if ok != fits {
				t.Fatalf("seed %d: the scheduler places a claim of %d bytes and %d shares: %v; the ledger has room: %v\n%v",
					seed, bytes, shares, ok, fits, m.ledger.Holds())
			}
			if !ok {
				refused++
				continue
			}
			placed++
			if err := m.prepare(result); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		case operation < 8:
			o := offers[random.IntN(len(offers))]
			err := m.ledger.ReservePod([]ledger.PodRequest{{ID: o.ID(), Resource: o.Resource, Device: o.Device.Ref(), Share: o.Share}})
			if err != nil && !strings.Contains(err.Error(), "held by") {
				t.Fatal(err)
			}
		default:
			holds := m.ledger.Holds()
			if len(holds) == 0 {
				continue
			}
			h := holds[random.IntN(len(holds))]
			if err := m.ledger.Release(h); err != nil {
				t.Fatal(err)
			}
			delete(m.allocated, h.Holder.ID)
		}
	}
	if placed < 20 || refused < 20 {
		t.Errorf("seed %d: %d placed, %d refused", seed, placed, refused)
	}
}

// A claim that requests no memory gets an unused GPU, of which no other claim gets a part.
func TestExclusiveAmongShares(t *testing.T) {
	m := newMarket(t, 3)
	part := resource.MustParse("10Gi")
	names := func(memory *resource.Quantity, n int) (got []string) {
		for range n {
			result, ok := m.schedule(memory)
			if !ok {
				got = append(got, "-")
				continue
			}
			if err := m.prepare(result); err != nil {
				t.Fatal(err)
			}
			got = append(got, result.Device)
		}
		return got
	}
	if got, want := names(&part, 1), []string{"gpu-0"}; !slices.Equal(got, want) {
		t.Errorf("a share is on %v, want %v", got, want)
	}
	if got, want := names(nil, 1), []string{"gpu-1"}; !slices.Equal(got, want) {
		t.Errorf("a whole GPU is %v, want %v", got, want)
	}
	if got, want := names(&part, 4), []string{"gpu-0", "gpu-2", "gpu-2", "-"}; !slices.Equal(got, want) {
		t.Errorf("shares are on %v, want %v", got, want)
	}
	if got, want := names(nil, 1), []string{"-"}; !slices.Equal(got, want) {
		t.Errorf("a whole GPU is %v, want %v", got, want)
	}
}

// Four claims that ask for nothing share a GPU with four equal shares, and a pod with a replica takes one of them.
func TestEqualShares(t *testing.T) {
	m := newDividedMarket(t, 1, device.ByCount)
	m.inv.GPUs[0].Sharing.Shares = 4
	offers, _ := (device.Resources{GPU: "nvidia.com/gpu"}).Offers(m.inv.GPUs)
	o := offers[0]
	if err := m.ledger.ReservePod([]ledger.PodRequest{{ID: o.ID(), Resource: o.Resource, Device: o.Device.Ref(), Share: o.Share}}); err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		result, ok := m.schedule(nil)
		if want := i < 3; ok != want {
			t.Fatalf("claim %d is placed: %v, want %v", i, ok, want)
		}
		if ok {
			if err := m.prepare(result); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := fmt.Sprint(m.ledger.Holds()[0].Share); got != "1 of 4 shares" {
		t.Errorf("the first holder has %s", got)
	}
	// What the controller reports of the allocations withdraws nothing.
	allocated := v1alpha1.AllocatedClaim{UID: "claim-1", Devices: []string{"gpu-0"}, Pools: []string{testNode}, Shares: []v1alpha1.AllocatedShare{{Device: "gpu-0", Shares: 1}}}
	pools, _ := (&Offer{NodeName: testNode}).Pools(Facts{
		Inventory: m.inv, Claims: []v1alpha1.AllocatedClaim{allocated}, Kept: Capabilities{Taints: true, Shares: true}, Now: time.Now(),
	})
	if taints := pools[testNode].Slices[0].Devices[0].Taints; len(taints) > 0 {
		t.Errorf("the GPU of an allocated share has taints %v", taints)
	}
	// The API refuses a capacity of no shares of which each claim needs one.
	var pods []ledger.Hold
	for _, o := range offers {
		pods = append(pods, ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: o.ID()}, Device: o.Device.Ref(), Share: o.Share, State: ledger.StateHeld})
	}
	pools, _ = (&Offer{NodeName: testNode}).Pools(Facts{Inventory: m.inv, Holds: pods, Kept: Capabilities{Taints: true, Shares: true}, Now: time.Now()})
	full := pools[testNode].Slices[0].Devices[0]
	if _, published := full.Capacity["shares"]; published || len(full.Taints) != 1 || full.Taints[0].Key != "tandem-gpu.dev/held-by-pod" {
		t.Errorf("a GPU of which pods have all shares has the capacities %v and taints %v", full.Capacity, full.Taints)
	}
}

// policies are the ways in which claims share a GPU, or not.
var policies = map[string]device.Sharing{
	"none":      {},
	"memory":    {Strategy: device.TimeSlicing, Claims: device.ByMemory},
	"4 shares":  {Strategy: device.TimeSlicing, Claims: device.ByCount, Shares: 4},
	"8 shares":  {Strategy: device.TimeSlicing, Claims: device.ByCount, Shares: 8},
	"unlimited": {Strategy: device.TimeSlicing, Claims: device.Unlimited},
}

// After each change of policy the scheduler places no claim that the ledger refuses, whether the claims before were prepared or only
// allocated, and each of them keeps what it has when kubelet prepares it again.
func TestPolicyOfSharesChanges(t *testing.T) {
	amounts := func(memory string) map[resourceapi.QualifiedName]resource.Quantity {
		if memory == "" {
			return nil
		}
		return map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)}
	}
	for from, before := range policies {
		for to, after := range policies {
			for _, claims := range [][]string{{"", ""}, {"1Gi", "1Gi"}, {"24Gi", ""}, {"", "24Gi"}} {
				for _, prepared := range []bool{false, true} {
					if !prepared && claims[0] != claims[1] {
						continue // that both were allocated is known once one of them is prepared
					}
					t.Run(fmt.Sprintf("%s to %s, %q, prepared %t", from, to, claims, prepared), func(t *testing.T) {
						m := newMarket(t, 1)
						m.inv.GPUs[0].Sharing = before
						held := map[string]resourceapi.DeviceRequestAllocationResult{}
						for _, memory := range claims {
							result, ok := m.scheduleAmounts(amounts(memory))
							if !ok {
								continue
							}
							held[string(m.claim.UID)] = result
							if prepared {
								m.must(m.prepare(result))
							}
						}
						m.inv.GPUs[0].Sharing = after
						for uid, result := range held {
							if err := m.prepareClaim(uid, result); err != nil {
								t.Errorf("%s is refused what it was allocated: %v", uid, err)
							}
						}
						for _, next := range []string{"", "1Gi"} {
							if result, ok := m.scheduleAmounts(amounts(next)); ok {
								if err := m.prepare(result); err != nil {
									t.Errorf("a claim for %q is placed and refused: %v", next, err)
								}
							}
						}
					})
				}
			}
		}
	}
}

// A claim may have several shares of a GPU. Its record can be read again, also after a change of policy.
func TestSeveralSharesOfOneGPU(t *testing.T) {
	for name, after := range policies {
		m := newDividedMarket(t, 1, device.ByCount)
		result, _ := m.schedule(nil)
		m.inv.GPUs[0].Sharing = after
		m.must(m.prepareClaim(string(m.claim.UID), result, result))
		if share := m.ledger.Holds()[0].Share; share.Count != 2 || !share.Fits() {
			t.Errorf("with policy %s it has %s", name, share)
		}
	}
	m := newMarket(t, 1)
	half := resource.MustParse("12Gi")
	result, _ := m.schedule(&half)
	m.must(m.prepareClaim(string(m.claim.UID), result, result))
	if share := m.ledger.Holds()[0].Share; !share.Whole() {
		t.Errorf("two halves are %s", share)
	}
}

// The slice has the memory that is left; a GPU with less than a share left is withdrawn.
func TestPublishedShares(t *testing.T) {
	inv := sharedMachine(1)
	gpu := device.Device{GPU: inv.GPUs[0]}
	replica := func(n int, bytes uint64) withdrawal {
		held := ledger.Hold{
			Holder: ledger.Holder{Kind: ledger.KindPod, ID: device.ReplicaID(gpu.UUID(), n)}, Device: gpu.Ref(),
			Share: device.ShareOf(bytes, gpu.MemoryBytes()),
		}
		return withdrawal{use: held.Use()}
	}
	for name, c := range map[string]struct {
		withdrawn []withdrawal
		kept      Capabilities
		// want is the published memory, and the taints.
		want string
	}{
		"free":                       {kept: Capabilities{Taints: true, Shares: true}, want: "24Gi of 24Gi shared"},
		"pods have some":             {withdrawn: []withdrawal{replica(0, 6*gib), replica(2, 6*gib)}, kept: Capabilities{Taints: true, Shares: true}, want: "12Gi of 24Gi shared"},
		"pods have nearly all":       {withdrawn: []withdrawal{replica(0, 24*gib-device.ShareUnit)}, kept: Capabilities{Taints: true, Shares: true}, want: "24Gi held-by-pod"},
		"unhealthy":                  {withdrawn: []withdrawal{replica(0, 6*gib), lost(0)}, kept: Capabilities{Taints: true, Shares: true}, want: "18Gi of 24Gi shared unhealthy gpu.nvidia.com/gpu-lost"},
		"a pod has all of it":        {withdrawn: []withdrawal{replica(0, 24*gib)}, kept: Capabilities{Taints: true, Shares: true}, want: "24Gi of 24Gi shared held-by-pod"},
		"a server that drops shares": {withdrawn: []withdrawal{replica(0, 6*gib), replica(1, 6*gib)}, kept: Capabilities{Taints: true}, want: "24Gi held-by-pod"},
		"a server that drops taints": {withdrawn: []withdrawal{replica(0, 6*gib)}, want: ""},
	} {
		t.Run(name, func(t *testing.T) {
			built := new(nodeSlices).build([]device.Device{gpu}, c.withdrawn, nil, c.kept, &deviceCounts{})
			got := ""
			for _, d := range built[0].Devices {
				memory := d.Capacity["memory"]
				got = memory.Value.String()
				if ptr.Deref(d.AllowMultipleAllocations, false) {
					got += " of " + memory.RequestPolicy.Default.String() + " shared"
				}
				for _, taint := range d.Taints {
					got += " " + strings.TrimPrefix(taint.Key, "tandem-gpu.dev/")
				}
			}
			if got != c.want {
				t.Errorf("published as %q, want %q", got, c.want)
			}
		})
	}
}

// A draining share is subtracted unless the scheduler counts it: the claim is still allocated, because kubelet unprepared what
// another pod of it uses, or is allocated again.
func TestDrainingShares(t *testing.T) {
	inv := sharedMachine(2)
	gpu := device.Device{GPU: inv.GPUs[0]}
	drains := func(kind ledger.Kind, uid string, memory uint64) ledger.Hold {
		return ledger.Hold{
			Holder: ledger.Holder{Kind: kind, ID: uid}, Device: gpu.Ref(), State: ledger.StateDraining,
			Share: device.ShareOf(memory, gpu.MemoryBytes()), Since: time.Now().Add(-time.Minute),
		}
	}
	allocated := func(uid types.UID, name string, memory uint64) []v1alpha1.AllocatedClaim {
		shares := []v1alpha1.AllocatedShare{{Device: name, Memory: int64(memory)}}
		return []v1alpha1.AllocatedClaim{{UID: uid, Devices: []string{name}, Pools: []string{testNode}, Shares: shares}}
	}
	of10 := []ledger.Hold{drains(ledger.KindClaim, "a", 10*gib)}
	for name, c := range map[string]struct {
		holds  []ledger.Hold
		claims []v1alpha1.AllocatedClaim
		want   string
	}{
		"not allocated":                    {holds: of10, want: "14Gi"},
		"still allocated":                  {holds: of10, claims: allocated("a", "gpu-0", 10*gib), want: "24Gi"},
		"less of it is allocated":          {holds: of10, claims: allocated("a", "gpu-0", 4*gib), want: "18Gi"},
		"more of it is allocated":          {holds: of10, claims: allocated("a", "gpu-0", 12*gib), want: "24Gi"},
		"another GPU is allocated":         {holds: of10, claims: allocated("a", "gpu-1", 10*gib), want: "14Gi"},
		"allocated to another claim":       {holds: of10, claims: allocated("b", "gpu-0", 10*gib), want: "14Gi"},
		"beside one that is not allocated": {holds: append(of10, drains(ledger.KindClaim, "b", 2*gib)), claims: allocated("a", "gpu-0", 10*gib), want: "22Gi"},
		"a pod with the ID of a claim":     {holds: []ledger.Hold{drains(ledger.KindPod, "a", 6*gib)}, claims: allocated("a", "gpu-0", 6*gib), want: "18Gi"},
	} {
		t.Run(name, func(t *testing.T) {
			pools, _ := (&Offer{NodeName: testNode}).Pools(Facts{
				Inventory: inv, Holds: c.holds, Claims: c.claims, Kept: Capabilities{Taints: true, Shares: true}, Now: time.Now(),
			})
			memory := pools[testNode].Slices[0].Devices[0].Capacity["memory"]
			if got := memory.Value.String(); got != c.want {
				t.Errorf("published are %s, want %s", got, c.want)
			}
		})
	}
}

// A claim for all of a GPU keeps all of it when the driver reports more memory after a reboot.
func TestExclusiveWithMoreMemory(t *testing.T) {
	m := newMarket(t, 1)
	result, ok := m.schedule(nil)
	if !ok {
		t.Fatal("no claim gets a free GPU")
	}
	m.inv.GPUs[0].MemoryBytes += 6 * device.ShareUnit
	if err := m.prepare(result); err != nil {
		t.Fatal(err)
	}
	if holds := m.ledger.Holds(); len(holds) != 1 || !holds[0].Share.Whole() {
		t.Errorf("held: %v", holds)
	}
	little := resource.MustParse("4Mi")
	if second, ok := m.schedule(&little); ok {
		if err := m.prepare(second); err == nil {
			t.Error("another claim got a part of it")
		}
	}
}

// The scheduler does not count the parts that claims have of a GPU that is no longer shared.
func TestSharedNoMore(t *testing.T) {
	m := newMarket(t, 2)
	part := resource.MustParse("10Gi")
	first, ok := m.schedule(&part)
	if !ok || m.prepare(first) != nil {
		t.Fatal("a share is not to be had")
	}
	for i := range m.inv.GPUs {
		m.inv.GPUs[i].Sharing = device.Sharing{}
	}
	for _, memory := range []*resource.Quantity{&part, nil} {
		next, ok := m.schedule(memory)
		if ok && next.Device == first.Device {
			t.Errorf("a claim for %v got %s, of which another has a part", memory, next.Device)
		}
		if ok {
			if err := m.prepare(next); err != nil {
				t.Error(err)
			}
		}
	}
}
