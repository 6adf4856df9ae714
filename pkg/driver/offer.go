// SPDX-License-Identifier: Apache-2.0

// Which devices are published, with which taints: a pure function of inventory, holds and allocations.

package driver

import (
	"cmp"
	"maps"
	"reflect"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/mig"
)

// Capabilities are fields of ResourceSlices that API servers before 1.36 drop by default (feature gates DRADeviceTaints,
// DRADeviceBindingConditions, DRAPartitionableDevices and DRAConsumableCapacity).
type Capabilities struct{ Taints, BindingConditions, Counters, Shares bool }

// Facts are what an Offer depends on, all read at one moment.
type Facts struct {
	Inventory device.Inventory
	Holds     []ledger.Hold
	// Claims are allocated devices of this node, as far as the controller reported them; nil is fine.
	Claims []v1alpha1.AllocatedClaim
	// Maintenance are the UUIDs of GPUs that get no new holder.
	Maintenance map[string]bool
	// ClaimsLate means that Claims may be incomplete: no GPU changes its pool.
	ClaimsLate bool
	// Withheld means that the ledger gives no device to a new holder.
	Withheld bool
	// Kept are the fields that the API server keeps.
	Kept Capabilities
	Now  time.Time
}

// Offer decides what the node's slices offer, from one set of Facts to the next. It is not safe for concurrent use.
type Offer struct {
	// NodeName is the name of the node pool, and the prefix of the names of GPU pools.
	NodeName string
	// ReturnDelay is how long hardware must be available again before it is offered. Zero offers it at once.
	ReturnDelay time.Duration
	// Offered selects the GPUs that serve claims; nil means all.
	Offered func(device.GPU) bool
	// Strict adds binding conditions, where the API server keeps them.
	Strict bool
	// PartitionUUIDs is as in Config.
	PartitionUUIDs bool

	debounce debounce
	// orphanSince is when a created partition was first found without a hold.
	orphanSince map[device.Ref]time.Time
	// inGPUPool records by GPU name whether the GPU was published in its GPU pool last.
	inGPUPool map[string]bool
	// profiles are the last known ones by GPU UUID, geometries what follows from them.
	profiles   map[string][]device.Profile
	geometries map[string]mig.Geometry
	// built are the GPU pools of the last build by GPU UUID. Most changes concern one GPU (BenchmarkOffer).
	built map[string]builtPool
	node  nodeSlices
}

type builtPool struct {
	pool   gpuPool
	slices []resourceslice.Slice
}

// layout is what should be published.
type layout struct {
	pools map[string]resourceslice.Pool
	// own are the names of the GPU pools by GPU UUID.
	own      map[string]string
	counts   deviceCounts
	excluded []excluded
	// next is when the layout changes although the Facts do not; zero: never.
	next time.Time
}

// Pools returns the pools of the node by name, and when they change although the Facts do not (zero: never).
func (o *Offer) Pools(f Facts) (map[string]resourceslice.Pool, time.Time) {
	l := o.build(f)
	return l.pools, l.next
}

// SetPublished takes the slices that earlier agents published. Called once, before the first build: a GPU stays in the pool from
// which claims were allocated its devices (TestPoolsOutliveAnAgent). A GPU in both pools was changing its pool when an agent
// ended; its claims decide, and without claims the node configuration (TestGPUPublishedInBothPools).
func (o *Offer) SetPublished(published []resourceapi.ResourceSlice) {
	found := map[string]sourcePools{}
	for _, slice := range published {
		from := ownPool
		if slice.Spec.Pool.Name == o.NodeName {
			from = nodePool
		}
		for _, d := range slice.Spec.Devices {
			found[device.GPUName(d.Name)] |= from
		}
	}
	o.inGPUPool = map[string]bool{}
	for gpu, pools := range found {
		if pools != nodePool|ownPool {
			o.inGPUPool[gpu] = pools == ownPool
		}
	}
}

// build lays out all pools: it withdraws what is unavailable, chooses the pool of each GPU, and describes the devices.
func (o *Offer) build(f Facts) layout {
	if o.inGPUPool == nil {
		o.inGPUPool = map[string]bool{}
	}
	if o.profiles == nil {
		o.profiles, o.geometries = map[string][]device.Profile{}, map[string]mig.Geometry{}
	}
	builtBefore := o.built
	o.built = map[string]builtPool{}
	inv, holds, kept := f.Inventory, f.Holds, f.Kept
	kept.BindingConditions = kept.BindingConditions && o.Strict
	if o.Offered != nil {
		// The metric must not count withdrawals of GPUs that are not offered.
		inv.GPUs = slices.DeleteFunc(slices.Clone(inv.GPUs), func(g device.GPU) bool { return !o.Offered(g) })
		holds = slices.DeleteFunc(slices.Clone(holds), func(h ledger.Hold) bool { _, ours := inv.ByUUID(h.Device.GPU); return !ours })
	}
	withdrawn, next := o.withdrawn(Facts{Inventory: inv, Holds: holds, Claims: f.Claims, Maintenance: f.Maintenance, Now: f.Now})
	if f.Withheld {
		withdrawn = withdrawAll(inv, withdrawn)
	}
	gpus, left := publishable(inv)
	l := layout{pools: map[string]resourceslice.Pool{}, own: map[string]string{}, excluded: left, next: next}
	l.counts.withdrawals = o.debounce.withdrawals

	var inNodePool []device.Device
	allocations := map[string]allocated{}
	for _, g := range gpus {
		a := o.allocated(g, holds, f.Claims)
		g, geometry := o.withKnownProfiles(g, a.inUse)
		canPartition := kept.Counters && len(geometry.Profiles()) > 0
		switch own := o.choosePool(g, a, f.ClaimsLate, canPartition); {
		case own && canPartition:
			p := newGPUPool(g, geometry, a, withdrawn, kept)
			p.uuids = o.PartitionUUIDs
			b, known := builtBefore[g.UUID]
			if !known || !reflect.DeepEqual(b.pool, p) {
				b = builtPool{p, p.slices()}
			}
			o.built[g.UUID] = b
			l.own[g.UUID] = device.OwnPool(o.NodeName, g)
			l.pools[l.own[g.UUID]] = resourceslice.Pool{Slices: b.slices}
			p.count(&l.counts)
		case own:
			// Claims have devices from its GPU pool, which cannot be published any more, and the node pool cannot count them.
			l.counts.withdrawn++
		default:
			devices, unusable := nodePoolDevices(g)
			inNodePool, l.excluded = append(inNodePool, devices...), append(l.excluded, unusable...)
			allocations[g.UUID] = a
		}
	}
	l.pools[o.NodeName] = resourceslice.Pool{Slices: o.node.build(inNodePool, withdrawn, allocations, kept, &l.counts)}
	l.counts.excluded = len(l.excluded)
	return l
}

// choosePool decides whether the GPU belongs to its GPU pool, and records the answer. It goes where its devices were allocated from:
// the scheduler identifies an allocated device by pool and name, and returns its counters when that device disappears. A GPU that
// is in use, from both pools or from an unknown one, stays where it is. A static GPU goes to the node pool, which offers only devices that
// exist, as soon as the pool of each allocated device is known: the node pool withdraws what was allocated from the other pool
// (TestAStaticGPUOffersWhatExists).
func (o *Offer) choosePool(g device.GPU, a allocated, late, canPartition bool) bool {
	own := canPartition && g.Dynamic && (g.MIGEnabled || mig.Switchable(g))
	before, known := o.inGPUPool[g.Name()]
	switch {
	case !g.Dynamic && !late && a.poolsKnown():
	case a.pools == ownPool, a.pools == nodePool:
		own = a.pools == ownPool
	case known && (a.inUse || late):
		own = before
	}
	o.inGPUPool[g.Name()] = own
	return own
}

// withKnownProfiles returns the GPU with the profiles of the last build if NVML returned none this time, or fewer while claims use
// the GPU: an NVML error must not remove allocated devices from the slices (TestGPUWithUnreadableProfiles).
func (o *Offer) withKnownProfiles(g device.GPU, inUse bool) (device.GPU, mig.Geometry) {
	known := o.profiles[g.UUID]
	fewer := slices.ContainsFunc(known, func(p device.Profile) bool {
		return !slices.ContainsFunc(g.Profiles, func(q device.Profile) bool { return q.ID == p.ID })
	})
	if len(g.Profiles) == 0 || inUse && fewer {
		g.Profiles = known
	}
	if same := len(known) == len(g.Profiles) && (len(known) == 0 || &known[0] == &g.Profiles[0]); !same {
		o.profiles[g.UUID], o.geometries[g.UUID] = g.Profiles, mig.NewGeometry(g.Profiles)
	}
	return g, o.geometries[g.UUID]
}

// noProfile is the profile ID of a partition of which only the placement is known.
const noProfile = -1

// sourcePools is the set of pools from which devices were allocated. It is empty if that is not known.
type sourcePools int

const (
	nodePool sourcePools = 1 << iota
	// ownPool is the GPU pool.
	ownPool
)

// allocated is what claims have of one GPU, from the ledger and from the scheduler's allocations.
type allocated struct {
	// inUse means that claims have any device of the GPU, also one that drains or no longer exists. pools are where those are from.
	inUse bool
	pools sourcePools
	// profiles has the profile ID of each device: a placement alone does not identify a partition.
	profiles map[device.Ref]int
	// from has the pools of each device. The scheduler cannot count a device in a pool from which it did not allocate it.
	from map[device.Ref]sourcePools
	// shares are what claims have of devices. The zero Share is the whole device.
	shares map[device.Ref][]device.Share
	// counted is what the scheduler counts for a claim.
	counted map[holding]device.Consumed
}

// holding identifies what one holder has of a device.
type holding struct {
	device device.Ref
	holder availability.Holder
}

func (o *Offer) allocated(g device.GPU, holds []ledger.Hold, claims []v1alpha1.AllocatedClaim) allocated {
	a := allocated{
		profiles: map[device.Ref]int{}, from: map[device.Ref]sourcePools{}, shares: map[device.Ref][]device.Share{}, counted: map[holding]device.Consumed{},
	}
	for _, h := range holds {
		if h.Holder.Kind != ledger.KindClaim || h.Device.GPU != g.UUID {
			continue
		}
		var from sourcePools
		// Only GPU pools offer partitions that Tandem creates.
		if slices.ContainsFunc(g.Partitions, func(p device.Partition) bool { return p.Made && p.Ref == h.Device }) {
			from = ownPool
		}
		a.inUse, a.pools = true, a.pools|from
		if h.Use().Reason == availability.HeldByClaim {
			a.add(h.Device, noProfile, from)
			a.shares[h.Device] = append(a.shares[h.Device], h.Share)
		}
	}
	deserted := map[types.UID]bool{}
	for _, h := range holds {
		if h.Deserted {
			deserted[types.UID(h.Holder.ID)] = true
		}
	}
	// A GPU that is no longer dynamic, or whose profiles cannot be read, may have an allocated partition that does not exist yet.
	named := g
	named.Dynamic, named.Profiles = true, slices.Concat(o.profiles[g.UUID], g.Profiles)
	names := device.Inventory{GPUs: []device.GPU{named}}
	for _, c := range claims {
		var from sourcePools
		switch {
		case slices.Contains(c.Pools, device.OwnPool(o.NodeName, g)):
			from = ownPool
		case slices.Contains(c.Pools, o.NodeName):
			from = nodePool
		}
		for _, name := range c.Devices {
			if device.GPUName(name) != g.Name() {
				continue
			}
			a.inUse, a.pools = true, a.pools|from
			d, known := names.ByName(name)
			if !known || deserted[c.UID] {
				continue
			}
			a.add(d.Ref(), d.Partition.ProfileID, from)
			share, shared := c.ShareOf(name)
			if !shared {
				a.shares[d.Ref()] = append(a.shares[d.Ref()], device.Share{})
				continue
			}
			consumed := device.Consumed{Memory: share.Memory, Shares: share.Shares}
			holder := availability.Holder{Kind: availability.Claim, ID: string(c.UID)}
			d.GPU = g // with its sharing policy
			a.shares[d.Ref()] = append(a.shares[d.Ref()], d.Share(consumed))
			a.counted[holding{d.Ref(), holder}] = consumed
		}
	}
	return a
}

func (a *allocated) add(ref device.Ref, profileID int, from sourcePools) {
	if _, known := a.profiles[ref]; !known || profileID != noProfile {
		a.profiles[ref] = profileID
	}
	a.from[ref] |= from
}

// poolsKnown reports whether it is known from which pool each device was allocated.
func (a *allocated) poolsKnown() bool {
	for _, from := range a.from {
		if from == 0 {
			return false
		}
	}
	return true
}

// blocks reports whether allocations prevent ref from being allocated in the node pool: those of other devices that overlap it, and
// its own from the GPU pool.
func (a *allocated) blocks(ref device.Ref) bool {
	return a.from[ref] == ownPool || overlapsAnother(a.profiles, ref)
}

// overlapsAnother reports whether another device overlaps ref.
func overlapsAnother(devices map[device.Ref]int, ref device.Ref) bool {
	for other := range devices {
		if other != ref && other.Overlaps(ref) {
			return true
		}
	}
	return false
}

// earlier returns the earlier of two times; zero is never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}

// Keys of the taints by which a healthy device is withdrawn from the scheduler, with the effect NoSchedule. They are part of the API: users
// write tolerations and dashboards for them. device.Health has those of an unhealthy one.
const (
	// TaintHeldByPod marks a device that a pod holds through an extended resource; the value is "true".
	TaintHeldByPod = "tandem-gpu.dev/held-by-pod"
	// TaintHeldByClaim marks a device that a claim holds in a way the scheduler cannot count: a part of the device, hardware that
	// overlaps it, or the device from another pool, after the node configuration changed. The value is "true".
	TaintHeldByClaim = "tandem-gpu.dev/held-by-claim"
	// TaintDraining marks a device that containers may still use although no claim or pod holds it any more; the value is "true".
	TaintDraining = "tandem-gpu.dev/draining"
	// TaintMaintenance marks a device that an administrator has taken out of service, and the partitions of such a GPU; the value is "true".
	TaintMaintenance = "tandem-gpu.dev/maintenance"
)

// drainGrace is how long a claim's hold may drain before its device is withdrawn. The hold of a pod that ends normally drains for
// less, and would cost two writes.
const drainGrace = 2 * time.Second

type use = availability.Use[device.Ref]

// withdrawal is one reason not to offer hardware. Holder is zero for whole devices, so that one holder of a whole device after another
// is the same withdrawal.
type withdrawal struct {
	use
	// health is that of an unhealthy device, without its message.
	health device.Health
	// uncounted means that a claim has the device and the scheduler does not count that.
	uncounted bool
}

func (w withdrawal) holding() holding { return holding{w.Device, w.Holder} }

func compareWithdrawals(a, b withdrawal) int {
	return cmp.Or(cmp.Compare(a.Device.String(), b.Device.String()), a.compareReason(b), cmp.Compare(a.Holder.ID, b.Holder.ID))
}

func (w withdrawal) compareReason(other withdrawal) int {
	return cmp.Or(cmp.Compare(taintKeys[w.Reason], taintKeys[other.Reason]), cmp.Compare(w.health.Reason, other.health.Reason),
		cmp.Compare(w.health.XID, other.health.XID))
}

var taintKeys = map[availability.Reason]string{
	availability.Unhealthy: device.TaintUnhealthy, availability.HeldByPod: TaintHeldByPod,
	availability.HeldByClaim: TaintHeldByClaim, availability.Draining: TaintDraining, availability.Maintenance: TaintMaintenance,
}

// taints returns the taints of a withdrawn device.
func (w withdrawal) taints() []resourceapi.DeviceTaint {
	effect := resourceapi.DeviceTaintEffectNoSchedule
	if w.health.Evict {
		effect = resourceapi.DeviceTaintEffectNoExecute
	}
	of := w.health.Taints()
	if w.Reason != availability.Unhealthy {
		of = []device.Taint{{Key: taintKeys[w.Reason], Value: "true"}}
	}
	taints := make([]resourceapi.DeviceTaint, len(of))
	for i, t := range of {
		taints[i] = resourceapi.DeviceTaint{Key: t.Key, Value: t.Value, Effect: effect}
	}
	return taints
}

// withdrawn returns what must not be offered, and when that changes by time alone (zero: never).
func (o *Offer) withdrawn(f Facts) ([]withdrawal, time.Time) {
	holds := slices.Concat(f.Holds, o.orphans(f.Inventory, f.Holds, f.Now))
	current, drained := findWithdrawn(f.Inventory, holds, f.Claims, f.Now)
	for _, g := range f.Inventory.GPUs {
		if f.Maintenance[g.UUID] {
			current = append(current, withdrawal{use: use{Device: g.Ref(), Reason: availability.Maintenance}})
		}
	}
	o.debounce.delay = o.ReturnDelay
	withdrawn, returned := o.debounce.update(f.Now, current)
	return withdrawn, earlier(drained, returned)
}

// findWithdrawn returns what the scheduler cannot know to be unavailable. It made the allocations of claims itself.
func findWithdrawn(
	inv device.Inventory, holds []ledger.Hold, claims []v1alpha1.AllocatedClaim, now time.Time,
) ([]withdrawal, time.Time) {
	found := map[withdrawal]bool{}
	for _, d := range inv.Devices() {
		if health := d.Health(); !health.Healthy() {
			health.Message = "" // it changes more often
			found[withdrawal{use: use{Device: d.Ref(), Reason: availability.Unhealthy}, health: health}] = true
		}
	}
	var next time.Time
	for _, h := range holds {
		held := h.Use()
		if held.Reason == availability.HeldByClaim {
			continue
		}
		// An overdue hold gets no grace: the scheduler would choose its device for each new claim meanwhile.
		if due := h.Began.Add(drainGrace); held.Reason == availability.Draining && !h.Unreadable && !h.Overdue() && due.After(now) {
			next = earlier(next, due)
			continue
		}
		if held.Share.Whole() {
			held.Holder = availability.Holder{}
		}
		found[withdrawal{use: held, uncounted: uncounted(h, claims)}] = true
	}
	return slices.SortedFunc(maps.Keys(found), compareWithdrawals), next
}

// uncounted reports whether the scheduler does not count an overdue hold, whatever the controller reported: a claim without pods is
// about to be deallocated, and one that is not allocated any more is not counted.
func uncounted(h ledger.Hold, claims []v1alpha1.AllocatedClaim) bool {
	allocated := slices.ContainsFunc(claims, func(c v1alpha1.AllocatedClaim) bool { return string(c.UID) == h.Holder.ID })
	return h.Deserted || h.Contested && !allocated
}

// orphans returns a draining hold for each partition that was created for a claim and has none. It occupies its placement until the
// reconciler destroys it (TestCountersFollowHolds). Inventory and holds are read one after the other, so a new partition may look
// like an orphan for less than drainGrace.
func (o *Offer) orphans(inv device.Inventory, holds []ledger.Hold, now time.Time) (orphans []ledger.Hold) {
	since := map[device.Ref]time.Time{}
	for _, d := range inv.Devices() {
		ref := d.Ref()
		if !d.Partition.Made || slices.ContainsFunc(holds, func(h ledger.Hold) bool { return h.Device.Overlaps(ref) }) {
			continue
		}
		since[ref] = now
		if first, known := o.orphanSince[ref]; known {
			since[ref] = first
		}
		orphans = append(orphans, ledger.Hold{Device: ref, State: ledger.StateDraining, Began: since[ref]})
	}
	o.orphanSince = since
	return orphans
}

// debounce delays the return of hardware, so that a device which goes from one holder to the next is withdrawn once
// (TestAGPUThatChangesHandsCostsNoWrite): each update of a slice makes the scheduler retry all pods that wait for a claim.
type debounce struct {
	delay time.Duration
	// available is since when a withdrawal is no longer current; zero while it is.
	available map[withdrawal]time.Time
	// withdrawals counts what the last update withdrew because of a holder.
	withdrawals int
}

// update returns the withdrawals to publish, and when to call it again (zero: at the next change). A new withdrawal counts at once;
// the last one of a device stays for the delay.
func (d *debounce) update(now time.Time, current []withdrawal) (all []withdrawal, next time.Time) {
	present, counted := map[holding]bool{}, map[holding]bool{}
	for w := range d.available {
		counted[w.holding()] = counted[w.holding()] || w.Reason.ByHolder()
	}
	d.withdrawals = 0
	for _, w := range current {
		present[w.holding()] = true
		if w.Reason.ByHolder() && !counted[w.holding()] {
			counted[w.holding()] = true
			d.withdrawals++
		}
	}
	kept := map[withdrawal]time.Time{}
	for w, since := range d.available {
		if since.IsZero() {
			since = now
		}
		if due := since.Add(d.delay); !present[w.holding()] && due.After(now) {
			kept[w], next = since, earlier(next, due)
		}
	}
	for _, w := range current {
		kept[w] = time.Time{}
	}
	d.available = kept
	return slices.SortedFunc(maps.Keys(kept), compareWithdrawals), next
}
