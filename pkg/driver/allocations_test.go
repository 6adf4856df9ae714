// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/mig"
)

// asStored returns slices with the names and the order of the API server.
func asStored(pools map[string]resourceslice.Pool) []*resourceapi.ResourceSlice {
	var stored []*resourceapi.ResourceSlice
	for name, pool := range pools {
		for i, slice := range pool.Slices {
			stored = append(stored, &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%05x-gpu.nvidia.com-node1-%s", i, strings.ReplaceAll(name, "/", "-"))},
				Spec: resourceapi.ResourceSliceSpec{
					Driver: "gpu.nvidia.com", NodeName: ptr.To(testNode), Devices: slice.Devices, SharedCounters: slice.SharedCounters,
					Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(pool.Slices))},
				},
			})
		}
	}
	return stored
}

// allocation is a device that the scheduler allocated to a claim.
type allocation struct{ claim, pool, device string }

// allocate calls the scheduler's allocator. Nil means that no device is free.
func allocate(t testing.TB, stored []*resourceapi.ResourceSlice, taken []allocation, cache *cel.Cache, claim *resourceapi.ResourceClaim) []allocation {
	t.Helper()
	ids := sets.New[structured.DeviceID]()
	for _, a := range taken {
		ids.Insert(structured.MakeDeviceID("gpu.nvidia.com", a.pool, a.device))
	}
	features := structured.Features{DeviceTaints: true, AdminAccess: true, PrioritizedList: true, PartitionableDevices: true, DeviceBindingAndStatus: true}
	allocator, err := structured.NewAllocator(t.Context(), features, structured.AllocatedState{AllocatedDevices: ids}, nvidiaClasses, stored, cache)
	if err != nil {
		t.Fatal(err)
	}
	results, err := allocator.Allocate(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testNode}}, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		t.Fatal(err)
	}
	var got []allocation
	for _, result := range results {
		for _, d := range result.Devices.Results {
			got = append(got, allocation{claim.Name, d.Pool, d.Device})
		}
	}
	return got
}

// asking returns a claim for devices of a class, optionally all of one profile, and all on one GPU if together.
func asking(name, class, profile string, count int64, together bool) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "team-a", UID: types.UID(name)}}
	request := resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}
	if profile != "" {
		request.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: "device.attributes['gpu.nvidia.com'].profile == '" + profile + "'",
		}}}
	}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "devices", Exactly: &request}}
	if together {
		claim.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: ptr.To(resourceapi.FullyQualifiedName("gpu.nvidia.com/parentUUID"))}}
	}
	return claim
}

// world is the complete state of a node: hardware, holds and the scheduler's allocations.
type world struct {
	t     *testing.T
	r     *rand.Rand
	inv   device.Inventory
	offer Offer
	now   time.Time
	holds []ledger.Hold
	taken []allocation
	// unseen are the allocations that the node has not received.
	unseen map[string]bool
	cache  *cel.Cache
	serial int
	log    []string

	allocated, nothing int
}

func (w *world) say(format string, args ...any) { w.log = append(w.log, fmt.Sprintf(format, args...)) }

func (w *world) fail(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("%s\nafter\n%s", fmt.Sprintf(format, args...), strings.Join(w.log, "\n"))
}

// step plays one random event.
func (w *world) step() {
	w.now = w.now.Add(time.Duration(w.r.IntN(1500)) * time.Millisecond)
	switch w.r.IntN(13) {
	case 0, 1, 2, 3:
		w.allocate()
	case 4:
		w.hear()
	case 5:
		w.prepare()
	case 6, 7:
		w.deallocate()
	case 8:
		w.release()
	case 9:
		w.pod()
	case 10:
		w.administer()
	case 11:
		w.health()
	case 12:
		w.configure()
	}
}

func (w *world) facts() Facts {
	f := Facts{Inventory: w.inv, Holds: w.holds, Kept: everything, Now: w.now}
	byClaim := map[string]*v1alpha1.AllocatedClaim{}
	for _, a := range w.taken {
		if w.unseen[a.claim] {
			continue
		}
		if byClaim[a.claim] == nil {
			byClaim[a.claim] = &v1alpha1.AllocatedClaim{UID: types.UID(a.claim)}
		}
		byClaim[a.claim].Devices = append(byClaim[a.claim].Devices, a.device)
		byClaim[a.claim].Pools = append(byClaim[a.claim].Pools, a.pool)
	}
	for _, c := range byClaim {
		f.Claims = append(f.Claims, *c)
	}
	return f
}

// device returns the device of a name. A claim may have one that no longer exists.
func (w *world) device(name string) (device.Device, bool) {
	inv := w.inv
	inv.GPUs = slices.Clone(inv.GPUs)
	for i := range inv.GPUs {
		inv.GPUs[i].Dynamic = true
	}
	return inv.ByName(name)
}

// obstructed returns the devices that must not be allocated, as far as the node knows.
func (w *world) obstructed() []device.Ref {
	var refs []device.Ref
	for _, h := range w.holds {
		grace := h.Holder.Kind == ledger.KindClaim && h.State == ledger.StateDraining && !h.Unreadable && h.Began.Add(drainGrace).After(w.now)
		if !grace {
			refs = append(refs, h.Device)
		}
	}
	for _, a := range w.taken {
		if d, known := w.device(a.device); known {
			refs = append(refs, d.Ref())
		}
	}
	for _, g := range w.inv.GPUs {
		if !g.Health.Healthy() {
			refs = append(refs, g.Ref())
		}
	}
	return refs
}

// instances returns the GPU instances that exist, or that a claim may create at any moment.
func (w *world) instances(g device.GPU) []mig.Instance {
	var held []mig.Instance
	add := func(p device.Partition) {
		i := mig.Instance{ProfileID: p.ProfileID, Placement: p.Ref.Placement, Capacity: p.Capacity}
		if !slices.ContainsFunc(held, func(h mig.Instance) bool { return h.Placement == i.Placement }) {
			held = append(held, i)
		}
	}
	for _, p := range g.Partitions {
		if !p.Made || slices.ContainsFunc(w.obstructed(), func(ref device.Ref) bool { return ref == p.Ref }) {
			add(p)
		}
	}
	for _, a := range w.taken {
		if d, known := w.device(a.device); known && !d.Whole() && d.GPU.UUID == g.UUID {
			add(d.Partition)
		}
	}
	return held
}

// available returns the devices that a claim could get now.
func (w *world) available(whole bool, profile string) []device.Device {
	obstructed := w.obstructed()
	free := func(ref device.Ref) bool { return !slices.ContainsFunc(obstructed, ref.Overlaps) }
	var all []device.Device
	for _, g := range w.inv.GPUs {
		own := w.offer.inGPUPool[g.Name()]
		partitioned := slices.ContainsFunc(g.Partitions, func(p device.Partition) bool { return !p.Made })
		if whole {
			if free(g.Ref()) && !partitioned && (!g.MIGEnabled || g.Dynamic && mig.Switchable(g)) {
				all = append(all, device.Device{GPU: g})
			}
			continue
		}
		for _, p := range g.Partitions {
			if !p.Made && p.Profile == profile && free(p.Ref) {
				all = append(all, device.Device{GPU: g, Partition: p})
			}
		}
		if !own || !g.Dynamic {
			continue
		}
		geometry, held := mig.NewGeometry(g.Profiles), w.instances(g)
		for _, p := range g.Possible() {
			if p.Profile == profile && free(p.Ref) && geometry.Fits(held, mig.Instance{ProfileID: p.ProfileID, Placement: p.Ref.Placement}) {
				all = append(all, device.Device{GPU: g, Partition: p})
			}
		}
	}
	return all
}

// allocate lets the scheduler allocate one kind of device and compares the result with the state of the world.
func (w *world) allocate() {
	profiles := []string{"1g.10gb", "1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.5gb", "2g.10gb", "3g.20gb", "1c.3g.40gb"}
	w.serial++
	name, class, profile, count, together := fmt.Sprintf("c%d", w.serial), "mig.nvidia.com", profiles[w.r.IntN(len(profiles))], int64(1+w.r.IntN(2)), w.r.IntN(2) == 0
	if w.r.IntN(5) == 0 {
		class, profile, together = "gpu.nvidia.com", "", false
	}
	pools, _ := w.offer.Pools(w.facts())
	got := allocate(w.t, asStored(pools), w.taken, w.cache, asking(name, class, profile, count, together))
	w.say("%s asks for %d %s%s: %v", name, count, class, profile, got)
	if got == nil {
		w.nothing++
		free := slices.DeleteFunc(w.available(profile == "", profile), w.contested)
		if len(free) > 0 && count == 1 && len(w.unseen) == 0 {
			w.fail("nothing is allocated, but %s is free", free[0].Name())
		}
		return
	}
	w.allocated++
	for _, a := range got {
		free := w.available(profile == "", profile)
		d, known := w.device(a.device)
		if known && w.unheard(d) {
			continue
		}
		if !known || !slices.ContainsFunc(free, func(f device.Device) bool { return f.Name() == a.device }) {
			w.fail("%s is allocated, which is not free: %v %v, held: %v, instances: %v", a.device, d.Ref(), known, w.obstructed(), w.instances(d.GPU))
		}
		w.taken = append(w.taken, a)
	}
	w.unseen[name] = true
	if w.r.IntN(3) > 0 {
		w.hear()
	}
}

// unheard reports whether the node has not received the allocation of overlapping hardware. Without counters the scheduler does not
// know it either if an administrator partitioned the GPU in between.
func (w *world) unheard(d device.Device) bool {
	return !w.offer.inGPUPool[d.GPU.Name()] && slices.ContainsFunc(w.taken, func(a allocation) bool {
		other, known := w.device(a.device)
		return known && w.unseen[a.claim] && other.Name() != d.Name() && other.Ref().Overlaps(d.Ref())
	})
}

// contested reports whether an allocated claim is in conflict on that GPU. Until the claim ends, both holders count.
func (w *world) contested(d device.Device) bool {
	return slices.ContainsFunc(w.taken, func(a allocation) bool {
		lost, known := w.device(a.device)
		if !known || lost.GPU.UUID != d.GPU.UUID {
			return false
		}
		return slices.ContainsFunc(w.holds, func(h ledger.Hold) bool { return h.Holder.ID != a.claim && h.Device.Overlaps(lost.Ref()) }) ||
			slices.ContainsFunc(d.GPU.Partitions, func(p device.Partition) bool { return !p.Made && p.Name() != lost.Name() && p.Ref.Overlaps(lost.Ref()) })
	})
}

// hear makes the node receive all allocations.
func (w *world) hear() { clear(w.unseen) }

// prepare reserves what a claim was allocated, unless another holder has it.
func (w *world) prepare() {
	for _, a := range w.taken {
		d, known := w.device(a.device)
		if !known || slices.ContainsFunc(w.holds, func(h ledger.Hold) bool { return h.Device.Overlaps(d.Ref()) }) {
			continue
		}
		if !d.Whole() && d.Partition.UUID == "" && w.isStatic(d.GPU.UUID) {
			continue
		}
		if !d.Whole() && d.Partition.UUID == "" && !mig.NewGeometry(d.GPU.Profiles).Fits(w.there(d.GPU), mig.Instance{ProfileID: d.Partition.ProfileID, Placement: d.Partition.Ref.Placement}) {
			continue
		}
		w.holds = append(w.holds, ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: a.claim}, Device: d.Ref(), State: ledger.StateHeld, Began: w.now})
		if !d.Whole() && d.Partition.UUID == "" {
			d.Partition.Made, d.Partition.UUID = true, "MIG-made"
			w.change(d.GPU.UUID, func(g *device.GPU) { g.Partitions, g.MIGEnabled = append(g.Partitions, d.Partition), true })
		}
		w.say("%s is prepared", a.device)
		if w.r.IntN(2) == 0 {
			return
		}
	}
}

// isStatic reports whether a GPU is static. The GPU of device is always dynamic.
func (w *world) isStatic(uuid string) bool {
	g, _ := w.inv.ByUUID(uuid)
	return !g.Dynamic
}

// there returns the GPU instances that exist.
func (w *world) there(g device.GPU) []mig.Instance {
	var there []mig.Instance
	for _, p := range g.Partitions {
		if !slices.ContainsFunc(there, func(i mig.Instance) bool { return i.Placement == p.Ref.Placement }) {
			there = append(there, mig.Instance{ProfileID: p.ProfileID, Placement: p.Ref.Placement, Capacity: p.Capacity})
		}
	}
	return there
}

func (w *world) change(uuid string, change func(*device.GPU)) {
	w.inv.GPUs = slices.Clone(w.inv.GPUs)
	for i := range w.inv.GPUs {
		if g := &w.inv.GPUs[i]; g.UUID == uuid {
			g.Partitions = slices.Clone(g.Partitions)
			change(g)
		}
	}
}

// deallocate ends a claim. Its holds drain.
func (w *world) deallocate() {
	if len(w.taken) == 0 {
		return
	}
	ended := w.taken[w.r.IntN(len(w.taken))].claim
	w.taken = slices.DeleteFunc(w.taken, func(a allocation) bool { return a.claim == ended })
	delete(w.unseen, ended)
	for i := range w.holds {
		if h := &w.holds[i]; h.Holder.ID == ended {
			h.State, h.Began, h.Unreadable = ledger.StateDraining, w.now, w.r.IntN(10) == 0
		}
	}
	w.say("%s ends", ended)
}

// release ends a draining hold, or the hold of a pod.
func (w *world) release() {
	i := slices.IndexFunc(w.holds, func(h ledger.Hold) bool { return h.State == ledger.StateDraining || h.Holder.Kind == ledger.KindPod })
	if i < 0 {
		return
	}
	h := w.holds[i]
	w.holds = slices.Delete(slices.Clone(w.holds), i, i+1)
	w.change(h.Device.GPU, func(g *device.GPU) {
		g.Partitions = slices.DeleteFunc(g.Partitions, func(p device.Partition) bool { return p.Made && p.Ref == h.Device })
		// MIG mode may stay enabled on an idle GPU.
	})
	w.say("%s releases %s", h.Holder.ID, h.Device)
}

// pod takes a device that no hold overlaps, whatever the scheduler allocated.
func (w *world) pod() {
	var free []device.Ref
	for _, d := range w.inv.Devices() {
		if d.Partition.Made || d.Whole() && len(d.GPU.Partitions) > 0 ||
			slices.ContainsFunc(w.holds, func(h ledger.Hold) bool { return h.Device.Overlaps(d.Ref()) }) {
			continue
		}
		free = append(free, d.Ref())
	}
	if len(free) == 0 {
		return
	}
	ref := free[w.r.IntN(len(free))]
	w.holds = append(w.holds, ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: ref.String()}, Device: ref, State: ledger.StateHeld})
	w.say("a pod takes %s", ref)
}

// administer creates or removes a partition on unused hardware.
func (w *world) administer() {
	g := w.inv.GPUs[w.r.IntN(len(w.inv.GPUs))]
	if slices.ContainsFunc(w.holds, func(h ledger.Hold) bool { return h.Device == g.Ref() }) {
		return
	}
	idle := slices.DeleteFunc(slices.Clone(g.Partitions), func(p device.Partition) bool {
		return p.Made || slices.ContainsFunc(w.holds, func(h ledger.Hold) bool { return h.Device.Overlaps(p.Ref) })
	})
	if len(idle) > 0 && w.r.IntN(2) == 0 {
		gone := idle[0].Ref.Placement
		w.change(g.UUID, func(g *device.GPU) {
			g.Partitions = slices.DeleteFunc(g.Partitions, func(p device.Partition) bool {
				return p.Ref.Placement == gone && slices.ContainsFunc(idle, func(i device.Partition) bool { return i.Ref == p.Ref })
			})
		})
		w.say("an administrator removes %v of %s", gone, g.Name())
		return
	}
	possible := g.Possible()
	p := possible[w.r.IntN(len(possible))]
	if !mig.NewGeometry(g.Profiles).Fits(w.there(g), mig.Instance{ProfileID: p.ProfileID, Placement: p.Ref.Placement}) {
		return
	}
	w.change(g.UUID, func(g *device.GPU) {
		cut(g, p.Profile, p.Ref.Placement.Start)
		if strings.HasPrefix(p.Profile, "3g") && w.r.IntN(2) == 0 {
			share(g, 3)
		}
	})
	w.say("an administrator makes %s", p.Name())
}

// configure makes the last GPU dynamic or static. The agent starts again and reads all allocations.
func (w *world) configure() {
	w.hear()
	g := w.inv.GPUs[len(w.inv.GPUs)-1]
	w.change(g.UUID, func(g *device.GPU) { g.Dynamic = !g.Dynamic })
	w.say("%s is dynamic: %t", g.Name(), !g.Dynamic)
}

// health makes a GPU unhealthy or healthy.
func (w *world) health() {
	g := w.inv.GPUs[w.r.IntN(len(w.inv.GPUs))]
	w.change(g.UUID, func(g *device.GPU) {
		if g.Health.Healthy() && w.r.IntN(3) == 0 {
			g.Health = device.Health{Reason: device.ReasonLost}
		} else {
			g.Health = device.Health{}
		}
	})
	w.say("%s is %+v", g.Name(), g.Health)
}

// The scheduler's allocator allocates no device that is held or impossible, and finds every free one.
func TestTheSchedulerAllocatesWhatIsFree(t *testing.T) {
	sequences := 60
	if testing.Short() {
		sequences = 20
	}
	if s, err := strconv.Atoi(os.Getenv("SEQUENCES")); err == nil {
		sequences = s
	}
	cache := cel.NewCache(100, cel.Features{})
	allocated, nothing := 0, 0
	for seed := range sequences {
		w := &world{
			t: t, r: rand.New(rand.NewPCG(uint64(seed), 1)), now: time.Unix(1000, 0), offer: Offer{NodeName: testNode},
			unseen: map[string]bool{}, cache: cache,
		}
		w.inv = machine(3, dynamic)
		ampere(&w.inv.GPUs[1])
		w.inv.GPUs[2].Dynamic = seed%2 == 0
		w.say("seed %d", seed)
		for range 40 {
			w.step()
		}
		allocated, nothing = allocated+w.allocated, nothing+w.nothing
	}
	t.Logf("%d allocations, %d times nothing", allocated, nothing)
	if allocated == 0 || nothing == 0 {
		t.Error("one of the two was never seen")
	}
}
