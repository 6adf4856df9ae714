// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// state of a device in the list, of which kubelet sees only healthy or not.
type state string

const (
	stateHealthy   state = "healthy"
	stateUnhealthy state = "unhealthy"
	stateWithdrawn state = "withdrawn"
)

// item is a device as limits see it.
type item struct {
	device.Device
	// id is what kubelet knows it by: its UUID, and of a replica a number as well.
	id string
	// share is what a replica is.
	share device.Share
	// offered is set while new limits may get it.
	offered bool
	// nameless is a partition that cannot be told to the runtime, not yet or because its CDI entry could not be made.
	nameless bool
	// unready marks a device that is not available now because it is not yet shared as the node's policy requires.
	unready bool
	// idle is since when it is not offered and no limit has it; zero while either is so.
	idle time.Time
}

// place orders items as claims are placed, from the lowest up.
func (i item) place(other item) int {
	a, b := i.Ref(), other.Ref()
	return cmp.Or(cmp.Compare(i.GPU.Minor, other.GPU.Minor), cmp.Compare(a.GPU, b.GPU),
		cmp.Compare(a.Placement.Start, b.Placement.Start), cmp.Compare(a.Compute.Start, b.Compute.Start),
		cmp.Compare(len(i.id), len(other.id)), cmp.Compare(i.id, other.id)) // "::9" before "::10"
}

// hardware is the UUID of what stands behind it.
func (i item) hardware() string { return device.HardwareUUID(i.id) }

// catalog is every device of one resource that limits may get or have, seen since the process started, in their places. kubelet
// looks devices of running pods up in the last list without checking that they are there, so an ID that was listed stays listed
// as long as a limit may have it.
type catalog struct {
	resource string
	items    []item
	index    map[string]int
	// planner is nil where partitions or replicas are offered.
	planner *planner
	// packed takes partitions and replicas from the fullest GPU first.
	packed bool
	// retiring calls nothing healthy that is not offered.
	retiring bool
}

// listed is a device ID in the list of a resource: kubelet keeps an account for each resource.
type listed struct{ resource, id string }

// catalogs are those of every resource, as one inventory has them.
type catalogs struct {
	of map[string]*catalog
	// ours are the UUIDs of all hardware that limits may get or have, under whatever strategy.
	ours map[string]bool
	// unready is true for devices that are not available now, and false for other offered devices.
	unready map[device.Ref]bool
	// excluded has no resource.
	excluded []device.LeftOut
}

// offering is what limits are offered.
type offering struct {
	resources device.Resources
	offered   func(device.GPU) bool
	packed    bool
	retiring  bool
	// named reports whether a partition can be told to the runtime; nil means that all can.
	named func(uuid string) bool
	// sharing may be nil.
	sharing Sharing
	// retireAfter is how long a device that is gone stays listed that no limit has: kubelet may be about to allocate what it was
	// told to be healthy a moment ago, and looks it up in its list when it has been given it. Zero is for ever.
	retireAfter time.Duration
}

func newOffering(c Config) offering {
	f := offering{
		resources: c.Resources, offered: c.Offered, packed: c.AllocationPolicy == PolicyPacked, retiring: c.Retiring,
		sharing: c.Sharing,
	}
	if c.uses(Strategy.cdi) {
		f.named = c.Specs.Has
	}
	return f
}

// over makes the catalogs of an inventory, with what limits have that is not offered, and what was listed before.
func (f offering) over(inv device.Inventory, o owners, before *catalogs, now time.Time) *catalogs {
	gpus := slices.DeleteFunc(slices.Clone(inv.GPUs), func(g device.GPU) bool { return f.offered != nil && !f.offered(g) })
	offers, excluded := f.resources.Offers(gpus)
	found := map[listed]item{}
	for _, offer := range offers {
		found[listed{offer.Resource, offer.ID()}] = item{Device: offer.Device, id: offer.ID(), share: offer.Share, offered: true}
	}
	for _, g := range gpus {
		// It is offered again once claims have no partition of it any more.
		if at := (listed{f.resources.GPU, g.UUID}); !found[at].offered && forClaims(g) {
			found[at] = item{Device: device.Device{GPU: g}, id: g.UUID}
		}
	}
	byUUID := map[string]device.Device{}
	for _, d := range inv.Devices() {
		byUUID[d.UUID()] = d
	}
	for at, old := range before.items() {
		if _, still := found[at]; !still {
			found[at] = aged(old, byUUID)
		}
	}
	for at, h := range f.unlisted(o, found) {
		d, known := byUUID[device.HardwareUUID(at.id)]
		if !known {
			d = absent(inv, at.id, h.Device)
		}
		found[at] = item{Device: d, id: at.id, share: h.Share}
	}
	next := &catalogs{of: map[string]*catalog{}, ours: map[string]bool{}, unready: f.unready(found), excluded: excluded}
	for at, i := range found {
		if i.rest(now, o.limited(at)); !i.idle.IsZero() && f.retireAfter > 0 && now.Sub(i.idle) >= f.retireAfter {
			continue
		}
		i.nameless = !i.Whole() && f.named != nil && !f.named(i.hardware())
		i.unready = next.unready[i.Ref()]
		c := next.of[at.resource]
		if c == nil {
			c = &catalog{resource: at.resource, packed: f.packed, retiring: f.retiring}
			next.of[at.resource] = c
		}
		c.items = append(c.items, i)
	}
	for _, c := range next.of {
		c.arrange(inv)
		for _, i := range c.items {
			next.ours[i.GPU.UUID] = true
			for _, p := range i.GPU.Partitions {
				next.ours[p.UUID] = true
			}
		}
	}
	if len(next.of) == 0 {
		next.of[f.resources.GPU] = newCatalog(f.resources.GPU)
	}
	return next
}

// unready returns for each offered device whether it is unavailable now. It asks once per device, however many replicas it has.
func (f offering) unready(items map[listed]item) map[device.Ref]bool {
	unready := map[device.Ref]bool{}
	if f.sharing == nil {
		return unready
	}
	for _, i := range items {
		if _, asked := unready[i.Ref()]; i.offered && !asked {
			_, err := f.sharing.Client(i.Device, i.share)
			unready[i.Ref()] = err != nil
		}
	}
	return unready
}

func newCatalog(resource string) *catalog {
	c := &catalog{resource: resource}
	c.arrange(device.Inventory{})
	return c
}

// arrange sorts the items and prepares what is looked up often.
func (c *catalog) arrange(inv device.Inventory) {
	slices.SortFunc(c.items, item.place)
	c.index = make(map[string]int, len(c.items))
	gpus := make([]device.GPU, len(c.items))
	whole := true
	for at, i := range c.items {
		c.index[i.id], gpus[at], whole = at, i.GPU, whole && (i.Whole() && i.share.Whole() || !i.offered)
	}
	if whole {
		c.planner = newPlanner(gpus, inv)
	}
}

// aged is an item that is not offered any more, as the inventory has it now.
func aged(old item, byUUID map[string]device.Device) item {
	now, there := byUUID[old.hardware()]
	switch {
	case there:
		old.Device = now
	case !old.Health().Healthy():
	case old.Whole():
		old.GPU.Health = missing
	default:
		old.Partition.Health = missing
	}
	old.offered = false
	return old
}

// unlisted is what limits have that is not among the items.
func (f offering) unlisted(o owners, items map[listed]item) map[listed]ledger.Hold {
	unlisted := map[listed]ledger.Hold{}
	for at, h := range o.limits {
		if _, there := items[at]; !there && f.resources.Has(at.resource) {
			unlisted[at] = h
		}
	}
	return unlisted
}

// absent is what a limit has that the inventory does not, such as a GPU that was lost before the agent started.
func absent(inv device.Inventory, id string, ref device.Ref) device.Device {
	gpu, known := inv.ByUUID(ref.GPU)
	if !known {
		gpu = device.GPU{UUID: ref.GPU, NUMANode: device.UnknownNUMANode, Health: missing}
	}
	if ref.Whole() {
		gpu.Health = missing
		return device.Device{GPU: gpu}
	}
	return device.Device{GPU: gpu, Partition: device.Partition{UUID: device.HardwareUUID(id), Ref: ref, Parent: gpu.Minor, Health: missing}}
}

var missing = device.Health{Reason: device.ReasonMissing, Message: "no longer in the inventory"}

// removed reports whether the item is a partition that is gone, which is its administrator's doing and no fault.
func (i item) removed() bool {
	return !i.offered && !i.Whole() && i.GPU.Health.Healthy() && i.Partition.Health == missing
}

// needed reports whether the item has to be listed. A GPU that is missing may come back, and one that is partitioned for claims
// will.
func (i item) needed(held bool) bool {
	return i.offered || held || i.id == i.GPU.UUID && (i.GPU.Health.Reason == device.ReasonMissing || forClaims(i.GPU))
}

// rest records since when the item has had no holder.
func (i *item) rest(now time.Time, held bool) {
	switch {
	case i.needed(held):
		i.idle = time.Time{}
	case i.idle.IsZero():
		i.idle = now
	}
}

// forClaims reports whether a GPU is partitioned, and by claims only.
func forClaims(g device.GPU) bool {
	return g.Dynamic && g.MIGEnabled && !slices.ContainsFunc(g.Partitions, func(p device.Partition) bool { return !p.Made })
}

// items are those of all catalogs; none of nil.
func (c *catalogs) items() map[listed]item {
	items := map[listed]item{}
	if c == nil {
		return items
	}
	for resource, catalog := range c.of {
		for _, i := range catalog.items {
			items[listed{resource, i.id}] = i
		}
	}
	return items
}

// idle is since when the item has been idle that was first; zero for none.
func (c *catalogs) idle() (first time.Time) {
	for _, i := range c.items() {
		if !i.idle.IsZero() && (first.IsZero() || i.idle.Before(first)) {
			first = i.idle
		}
	}
	return first
}

// needsRefresh reports whether an item is listed that has had no holder since the catalogs were built.
func (c *catalogs) needsRefresh(o owners) bool {
	for at, i := range c.items() {
		if i.idle.IsZero() && !i.needed(o.limited(at)) {
			return true
		}
	}
	return false
}

// assess says for every device of the catalog what kubelet should think of it.
func (c *catalog) assess(o owners) []state {
	states := make([]state, len(c.items))
	free := 0
	var promised []int
	// Each replica by itself may fit where not all of them do.
	left, unpromised := o.room(nil), o.room(o.promised)
	for at, i := range c.items {
		taken, mine := o.hold(c.resource, i)
		if !mine {
			taken = taken || !left.has(i)
		}
		switch {
		case !i.Health().Healthy() && !i.removed():
			states[at] = stateUnhealthy
		case taken || i.removed() || !i.offered && (c.retiring || !mine):
			states[at] = stateWithdrawn
		case !mine && i.unready:
			states[at] = stateWithdrawn // nothing is wrong with it
		case !mine && i.nameless:
			states[at] = stateUnhealthy
		case !mine && (o.promises(i) || !unpromised.has(i)):
			states[at] = stateWithdrawn
			promised = append(promised, at)
			left.take(i)
		default:
			states[at] = stateHealthy
			if !mine {
				free++
				left.take(i)
				unpromised.take(i)
			}
		}
	}
	// Pods come first: a pod that kubelet is about to admit fails permanently without a device, and the claim does not.
	for _, at := range descending(promised) {
		if free >= o.lacking[c.resource] {
			break
		}
		states[at] = stateHealthy
		free++
	}
	return states
}

// owners are who limits should keep away from.
type owners struct {
	// holds by the UUID of the GPU.
	holds map[string][]ledger.Hold
	// limits have these, rightly or not.
	limits map[listed]ledger.Hold
	// promised is what claims are about to ask for, whether they wait for it or not: the scheduler has allocated it to the claim, or
	// the claim has lost it before and waits.
	promised map[promise]bool
	// lacking is how many devices of each resource limits pods still ask for that kubelet is about to admit.
	lacking map[string]int
}

// promise is a device, or a share of one, that a claim does not hold yet.
type promise struct {
	claim  ledger.Holder
	device device.Ref
	share  device.Share
}

// keptBy reports whether the hold makes the promise obsolete: it is the claim's own, or it covers the whole device. Otherwise a
// claim that waits for a device with allocated replicas would never get it, if these were offered again.
func (p promise) keptBy(h ledger.Hold) bool {
	return h.Device == p.device && (h.Holder == p.claim || p.share.Whole() && h.Share.Whole())
}

func ownersOf(led Ledger, allocations Allocations) owners {
	o := owners{holds: map[string][]ledger.Hold{}, limits: map[listed]ledger.Hold{}, promised: map[promise]bool{}}
	if allocations != nil {
		for _, h := range allocations.Allocated() {
			o.promised[promise{h.Holder, h.Device, h.Share}] = false
		}
	}
	o.lacking, _ = led.Outstanding()
	for _, lost := range led.Conflicts() {
		for _, ref := range lost.Devices {
			o.wait(promise{claim: ledger.Holder{Kind: ledger.KindClaim, ID: lost.UID}, device: ref})
		}
	}
	for _, h := range led.Holds() {
		o.holds[h.Device.GPU] = append(o.holds[h.Device.GPU], h)
		maps.DeleteFunc(o.promised, func(p promise, _ bool) bool { return p.keptBy(h) })
		if h.Holder.Kind == ledger.KindPod {
			o.limits[listed{h.Resource, h.Holder.ID}] = h
		}
	}
	return o
}

// wait notes that a claim waits for a device, of which it may have been allocated a share.
func (o owners) wait(lost promise) {
	known := false
	for p := range o.promised {
		if p.claim == lost.claim && p.device == lost.device {
			o.promised[p], known = true, true
		}
	}
	if !known {
		o.promised[lost] = true
	}
}

// room is the free memory of shared devices that have holders.
type room map[device.Ref]uint64

// room beside all holds, and beside those promises.
func (o owners) room(promised map[promise]bool) room {
	left := room{}
	use := func(ref device.Ref, share device.Share) {
		before, known := left[ref]
		if !known {
			before = share.Of
		}
		left[ref] = before - min(before, share.Bytes)
	}
	for _, holds := range o.holds {
		for _, h := range holds {
			use(h.Device, h.Share)
		}
	}
	for p := range promised {
		use(p.device, p.share)
	}
	return left
}

func (r room) has(i item) bool {
	left, known := r[i.Ref()]
	return i.share.Whole() || !known || left >= i.share.Bytes
}

func (r room) take(i item) {
	left, known := r[i.Ref()]
	if !known {
		left = i.share.Of
	}
	r[i.Ref()] = left - min(left, i.share.Bytes)
}

// limited reports whether a limit has what is listed.
func (o owners) limited(at listed) bool {
	_, limited := o.limits[at]
	return limited
}

// hold reports whether a new pod cannot get the hardware of a device, and whether a pod holds it under this ID. Such a device
// stays offered: kubelet accounts for it itself, and otherwise fails the restart of the holder's containers. kubelet has dropped
// a draining pod already, and for an unreadable record that is unknown.
func (o owners) hold(resource string, i item) (taken, mine bool) {
	ref := i.Ref()
	used := i.share.Bytes
	for _, h := range o.holds[ref.GPU] {
		switch {
		case !h.Device.Overlaps(ref):
		case h.Holder == ledger.Holder{Kind: ledger.KindPod, ID: i.id} && h.Resource == resource && h.Device == ref &&
			h.State != ledger.StateDraining && !h.Unreadable:
			mine = true
		case h.Device == ref && !i.share.Whole() && h.Share.Of == i.share.Of && h.Holder.ID != i.id:
			used += h.Share.Bytes
		default:
			taken = true
		}
	}
	return taken || !mine && used > i.share.Of, mine
}

// promises reports whether a claim is about to ask for the hardware, or some of it that leaves no room for the item.
func (o owners) promises(i item) bool {
	ref := i.Ref()
	for p := range o.promised {
		beside := p.device == ref && !i.share.Whole() && p.share.Of == i.share.Of
		if p.device.Overlaps(ref) && !beside {
			return true
		}
	}
	return false
}
