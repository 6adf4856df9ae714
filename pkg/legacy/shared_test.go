// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

const gib = uint64(1) << 30

// shared are GPUs of 24 GiB, the first of which has so many replicas.
func shared(gpus, first int, replicas device.Replicas) device.Inventory {
	inv := islands(gpus, gpus, 0)
	for i := range inv.GPUs {
		inv.GPUs[i].MemoryBytes = 24 * gib
		if i < first {
			inv.GPUs[i].Sharing = device.Sharing{
				Strategy: device.TimeSlicing, Claims: "memory", Replicas: map[string]device.Replicas{"": replicas},
			}
		}
	}
	return inv
}

func sharingNode(t *testing.T, inv device.Inventory) (*fixture, *Plugin) {
	f := newFixture(t, release137)
	f.inventory.set(func(device.Inventory) device.Inventory { return inv })
	p, err := New(f.config)
	if err != nil {
		t.Fatal(err)
	}
	return f, p
}

// health is what a list says, by ID.
func health(list *pluginapi.ListAndWatchResponse) map[string]string {
	all := map[string]string{}
	for _, d := range list.GetDevices() {
		all[d.ID] = d.Health
	}
	return all
}

func TestReplicas(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		replicas device.Replicas
		want     map[string]int
	}{
		"under the same name":   {device.Replicas{Count: 3}, map[string]int{"nvidia.com/gpu": 7}},
		"under a name of their": {device.Replicas{Count: 3, Renamed: true}, map[string]int{"nvidia.com/gpu": 1, "nvidia.com/gpu.shared": 6}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, p := sharingNode(t, shared(3, 2, c.replicas))
			lists, _ := p.Refresh(time.Now())
			got := map[string]int{}
			for resource, list := range lists {
				for id, health := range health(list) {
					uuid, _, replica := strings.Cut(id, "::")
					if health != pluginapi.Healthy || replica != (uuid != uuid2) {
						t.Errorf("%s of %s is %s", id, resource, health)
					}
					got[resource]++
				}
			}
			if !maps.Equal(got, c.want) {
				t.Errorf("limits are offered %v, want %v", got, c.want)
			}
		})
	}
}

var uuid2 = uuid(2)

// Pods keep their replicas when the number of equal shares changes that claims have of the GPU. No other replica is offered until they end.
func TestReplicasKeptWhenSharesChange(t *testing.T) {
	t.Parallel()
	byCount := func(shares int) device.Sharing {
		s := device.Sharing{Strategy: device.TimeSlicing, Replicas: map[string]device.Replicas{"": {Count: 4}}}
		if shares > 0 {
			s.Claims, s.Shares = device.ByCount, shares
		}
		return s
	}
	for name, c := range map[string]struct {
		before, after device.Sharing
		others        string // replicas that no pod has, after the change
	}{
		"more":           {byCount(4), byCount(8), pluginapi.Unhealthy},
		"fewer":          {byCount(8), byCount(4), pluginapi.Unhealthy},
		"added":          {byCount(0), byCount(4), pluginapi.Unhealthy},
		"removed":        {byCount(4), byCount(0), pluginapi.Unhealthy},
		"not shared now": {byCount(4), device.Sharing{}, pluginapi.Unhealthy},
		"unchanged":      {byCount(4), byCount(4), pluginapi.Healthy},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inv := shared(1, 1, device.Replicas{})
			inv.GPUs[0].Sharing = c.before
			f, p := sharingNode(t, inv)
			offers, _ := p.config.Resources.Offers(inv.GPUs)
			for _, o := range offers[:2] {
				if err := f.ledger.ReservePod([]ledger.PodRequest{{ID: o.ID(), Resource: o.Resource, Device: o.Device.Ref(), Share: o.Share}}); err != nil {
					t.Fatal(err)
				}
			}
			compare := func(when, others string) {
				t.Helper()
				lists, _ := p.Refresh(time.Now())
				for i, o := range offers {
					want := others
					if i < 2 {
						want = pluginapi.Healthy
					}
					if got := health(lists[o.Resource])[o.ID()]; got != want {
						t.Errorf("%s replica %d is %s, want %s", when, i, got, want)
					}
				}
			}
			compare("before the change", pluginapi.Healthy)
			f.inventory.set(func(inv device.Inventory) device.Inventory {
				inv.GPUs = slices.Clone(inv.GPUs)
				inv.GPUs[0].Sharing = c.after
				return inv
			})
			compare("after the change", c.others)
		})
	}
}

// Whatever claims have or are allocated, limits can have all that is offered to them at once, and no more than that.
func TestWhatIsOfferedOfSharedDevicesCanBeHad(t *testing.T) {
	t.Parallel()
	for seed := range uint64(40) {
		random := rand.New(rand.NewPCG(seed, 5))
		f, p := sharingNode(t, shared(3, 2, device.Replicas{Count: 4}))
		for n := range 1 + random.IntN(4) {
			gpu := f.inventory.get().GPUs[random.IntN(3)]
			share := device.ShareOf(uint64(1+random.IntN(20))*gib, gpu.MemoryBytes)
			if gpu.Minor == 2 || random.IntN(4) == 0 {
				share = device.Share{}
			}
			_, _ = f.ledger.ReserveClaim(t.Context(), ledger.ClaimRequest{
				UID: fmt.Sprint("claim-", n), Devices: []device.Ref{gpu.Ref()}, Shares: map[device.Ref]device.Share{gpu.Ref(): share},
			})
		}
		took := map[string]bool{}
		take := func(id string) error {
			uuid, _, _ := strings.Cut(id, "::")
			gpu, _ := f.inventory.get().ByUUID(uuid)
			share := device.Replica(gpu.MemoryBytes, 4)
			if id == uuid {
				share = device.Share{}
			}
			return f.ledger.ReservePod([]ledger.PodRequest{{ID: id, Resource: "nvidia.com/gpu", Device: gpu.Ref(), Share: share}})
		}
		lists, _ := p.Refresh(time.Now())
		offered := health(lists["nvidia.com/gpu"])
		ids := slices.Collect(maps.Keys(offered))
		random.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
		for _, id := range ids {
			if offered[id] != pluginapi.Healthy {
				continue
			}
			if err := take(id); err != nil {
				t.Fatalf("seed %d: %s is offered: %v", seed, id, err)
			}
			took[id] = true
			if random.IntN(3) > 0 {
				continue
			}
			// Kubelet sees the list anew, and what it has given out stays in it.
			lists, _ = p.Refresh(time.Now())
			for id, health := range health(lists["nvidia.com/gpu"]) {
				if health != offered[id] {
					t.Fatalf("seed %d: %s was %s and is %s, though limits took only what was offered", seed, id, offered[id], health)
				}
			}
		}
		for id := range offered {
			if !took[id] && take(id) == nil {
				t.Fatalf("seed %d: %s was not offered and can be had", seed, id)
			}
		}
	}
}

// A claim that is allocated a share takes replicas off the list before it is prepared, and no more of them than it has to.
func TestPromisedShares(t *testing.T) {
	t.Parallel()
	f, p := sharingNode(t, shared(1, 1, device.Replicas{Count: 4}))
	gpu := f.inventory.get().GPUs[0]
	allocated := allocatedShares{newObservable[[]ledger.Hold](nil)}
	p.config.Allocations = allocated
	healthy := func(after time.Duration) (n int) {
		lists, _ := p.Refresh(time.Now().Add(after))
		for _, health := range health(lists["nvidia.com/gpu"]) {
			if health == pluginapi.Healthy {
				n++
			}
		}
		return n
	}
	if n := healthy(0); n != 4 {
		t.Fatalf("%d replicas are offered", n)
	}
	allocated.set(func([]ledger.Hold) []ledger.Hold {
		return []ledger.Hold{{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "a"}, Device: gpu.Ref(), Share: device.ShareOf(10*gib, 24*gib)}}
	})
	if n := healthy(0); n != 4 {
		t.Errorf("%d replicas are offered while a pending claim is recent", n)
	}
	if n := healthy(time.Second); n != 2 {
		t.Errorf("%d replicas are offered beside 10 of 24 GiB", n)
	}
	if err := f.ledger.ReservePod([]ledger.PodRequest{{
		ID: device.ReplicaID(gpu.UUID, 0), Resource: "nvidia.com/gpu", Device: gpu.Ref(), Share: device.Replica(24*gib, 4),
	}}); err != nil {
		t.Fatal(err)
	}
	if n := healthy(2 * time.Second); n != 2 {
		t.Errorf("%d replicas are offered, of which a limit has one", n)
	}
	if _, err := f.ledger.ReserveClaim(t.Context(), ledger.ClaimRequest{
		UID: "a", Devices: []device.Ref{gpu.Ref()}, Shares: map[device.Ref]device.Share{gpu.Ref(): device.ShareOf(10*gib, 24*gib)},
	}); err != nil {
		t.Fatal(err)
	}
	if n := healthy(3 * time.Second); n != 2 {
		t.Errorf("%d replicas are offered once the claim is prepared", n)
	}
}

type allocatedShares struct{ *observable[[]ledger.Hold] }

func (p allocatedShares) Allocated() []ledger.Hold                 { return p.get() }
func (p allocatedShares) OutOfService() func(device.Device) string { return allInService }

// Replicas of one GPU are one device to the container.
func TestAllocateReplicas(t *testing.T) {
	t.Parallel()
	f, p := sharingNode(t, shared(2, 2, device.Replicas{Count: 4}))
	p.config.Strategies = []Strategy{StrategyCDI, StrategyEnvVar}
	p.Refresh(time.Now())
	request := func(ids ...string) *pluginapi.AllocateRequest {
		return &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}}
	}
	a, b := uuid(0), uuid(1)
	for range 2 {
		response, err := p.Allocate(t.Context(), "nvidia.com/gpu", request(a+"::0", a+"::3", b+"::1"))
		if err != nil {
			t.Fatal(err)
		}
		answer := response.ContainerResponses[0]
		if len(answer.CdiDevices) != 2 || answer.Envs[visibleDevicesEnv] != a+","+b {
			t.Errorf("answered with %v and %v", answer.CdiDevices, answer.Envs)
		}
	}
	holds := f.ledger.Holds()
	if len(holds) != 3 || holds[0].Share != device.Replica(24*gib, 4) {
		t.Errorf("held: %v", holds)
	}
	p.config.FailRequestsGreaterThanOne = true
	_, err := p.Allocate(t.Context(), "nvidia.com/gpu", request(a+"::1", b+"::2"))
	if want := "maximum request size for shared resources is 1; found 2"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %s", err, want)
	}
	if len(f.ledger.Holds()) != 3 {
		t.Error("a refused request took something")
	}
	if _, err := p.Allocate(t.Context(), "nvidia.com/gpu", request(a+"::4")); err == nil || !strings.Contains(err.Error(), "unknown device: "+a+"::4") {
		t.Errorf("a replica that there is not: %v", err)
	}
}

func TestPreferredReplicas(t *testing.T) {
	t.Parallel()
	for packed, want := range map[bool]string{
		false: "1::3 0::3",
		true:  "0::3 0::2",
	} {
		f, p := sharingNode(t, shared(2, 2, device.Replicas{Count: 4}))
		p.config.Packed = packed
		if err := f.ledger.ReservePod([]ledger.PodRequest{{
			ID: uuid(0) + "::0", Resource: "nvidia.com/gpu", Device: device.Ref{GPU: uuid(0)}, Share: device.Replica(24*gib, 4),
		}}); err != nil {
			t.Fatal(err)
		}
		lists, _ := p.Refresh(time.Now())
		available := slices.DeleteFunc(slices.Collect(maps.Keys(health(lists["nvidia.com/gpu"]))), func(id string) bool { return id == uuid(0)+"::0" })
		got := p.Preferred("nvidia.com/gpu", &pluginapi.PreferredAllocationRequest{
			ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: available, AllocationSize: 2}},
		}).ContainerResponses[0].DeviceIDs
		text := strings.NewReplacer(uuid(0), "0", uuid(1), "1").Replace(strings.Join(got, " "))
		if text != want {
			t.Errorf("packed %v: %s, want %s", packed, text, want)
		}
	}
}

// Several are taken where one container can have several: with a replica by MPS it can have nothing else.
func TestPreferredAmongMPS(t *testing.T) {
	t.Parallel()
	inv := shared(2, 2, device.Replicas{Count: 2})
	inv.GPUs[1].Sharing.Strategy = device.MPS
	_, p := sharingNode(t, inv)
	p.Refresh(time.Now())
	available := []string{uuid(1) + "::0", uuid(0) + "::0", uuid(1) + "::1", uuid(0) + "::1"}
	for size, want := range map[int32]string{1: "1::1", 2: "0::1 0::0", 3: "0::1 0::0 1::1"} {
		got := p.Preferred("nvidia.com/gpu", &pluginapi.PreferredAllocationRequest{
			ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: available, AllocationSize: size}},
		}).ContainerResponses[0].DeviceIDs
		if text := strings.NewReplacer(uuid(0), "0", uuid(1), "1").Replace(strings.Join(got, " ")); text != want {
			t.Errorf("%d: %s, want %s", size, text, want)
		}
	}
}

// A claim that waits for a GPU of which limits have replicas gets it when these end: no others are given out.
func TestWaitedForAsAWhole(t *testing.T) {
	t.Parallel()
	f, p := sharingNode(t, shared(1, 1, device.Replicas{Count: 4}))
	gpu := f.inventory.get().GPUs[0]
	p.config.Allocations = allocatedShares{newObservable([]ledger.Hold{{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "a"}, Device: gpu.Ref()}})}
	if err := f.ledger.ReservePod([]ledger.PodRequest{{
		ID: device.ReplicaID(gpu.UUID, 0), Resource: "nvidia.com/gpu", Device: gpu.Ref(), Share: device.Replica(24*gib, 4),
	}}); err != nil {
		t.Fatal(err)
	}
	f.ledger.RecordConflict(ledger.Conflict{UID: "a", Namespace: "ns", Name: "a", Devices: []device.Ref{gpu.Ref()}})
	lists, _ := p.Refresh(time.Now())
	for id, health := range health(lists["nvidia.com/gpu"]) {
		if want := map[bool]string{true: pluginapi.Healthy, false: pluginapi.Unhealthy}[id == device.ReplicaID(gpu.UUID, 0)]; health != want {
			t.Errorf("%s is %s, want %s", id, health, want)
		}
	}
}

// What is preferred can be had together, also where kubelet's list is older than what claims have.
func TestPreferredReplicasFit(t *testing.T) {
	t.Parallel()
	for _, packed := range []bool{true, false} {
		f, p := sharingNode(t, shared(2, 2, device.Replicas{Count: 4}))
		p.config.Packed = packed
		lists, _ := p.Refresh(time.Now())
		available := slices.Collect(maps.Keys(health(lists["nvidia.com/gpu"])))
		gpu := f.inventory.get().GPUs[0]
		if _, err := f.ledger.ReserveClaim(t.Context(), ledger.ClaimRequest{
			UID: "a", Devices: []device.Ref{gpu.Ref()}, Shares: map[device.Ref]device.Share{gpu.Ref(): device.ShareOf(18*gib, 24*gib)},
		}); err != nil {
			t.Fatal(err)
		}
		got := p.Preferred("nvidia.com/gpu", &pluginapi.PreferredAllocationRequest{
			ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: available, AllocationSize: 5}},
		}).ContainerResponses[0].DeviceIDs
		if _, err := p.Allocate(t.Context(), "nvidia.com/gpu", &pluginapi.AllocateRequest{
			ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: got}},
		}); err != nil || len(got) != 5 {
			t.Errorf("packed %v: %v: %v", packed, got, err)
		}
	}
}
