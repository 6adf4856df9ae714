// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// state of a listed device. kubelet is sent only healthy or not.
type state string

const (
	stateHealthy   state = "healthy"
	stateUnhealthy state = "unhealthy"
	stateWithdrawn state = "withdrawn"
)

// item is a device, or a replica of one, under the ID that kubelet gets.
type item struct {
	device.Device
	// id is the UUID of the device, with a number for a replica.
	id string
	// share of the device that a replica is.
	share device.Share
	// offered is set while new pods may get it.
	offered bool
	// unnamed is a device without a usable CDI entry, which no container can be given.
	unnamed bool
	// unready is a device that is not shared yet as the node's policy requires.
	unready bool
	// idle is since when it is neither offered nor held by a pod; zero while either is so.
	idle time.Time
}

// compare orders items as claims are allocated, from the least memory and the lowest up.
func (i item) compare(other item) int {
	a, b := i.Ref(), other.Ref()
	return cmp.Or(cmp.Compare(i.MemoryBytes(), other.MemoryBytes()), cmp.Compare(i.GPU.Minor, other.GPU.Minor), cmp.Compare(a.GPU, b.GPU),
		cmp.Compare(a.Placement.Start, b.Placement.Start), cmp.Compare(a.Compute.Start, b.Compute.Start),
		cmp.Compare(len(i.id), len(other.id)), cmp.Compare(i.id, other.id)) // "::9" before "::10"
}

func (i item) hardware() string { return device.HardwareUUID(i.id) }

func (i item) use() use {
	return use{Holder: availability.Holder{Kind: availability.Pod, ID: i.id}, Device: i.Ref(), Share: i.share}
}

// removed reports whether the item is a partition that its administrator removed, which is no fault.
func (i item) removed() bool {
	return !i.offered && !i.Whole() && i.GPU.Health.Healthy() && i.Partition.Health == missing
}

// needed reports whether the item has to be listed. A missing GPU may come back; one with partitions of claims will.
func (i item) needed(held bool) bool {
	return i.offered || held || i.id == i.GPU.UUID && (i.GPU.Health.Reason == device.ReasonMissing || partitionedByClaims(i.GPU))
}

// partitionedByClaims reports whether a GPU has no partitions but those that claims asked for.
func partitionedByClaims(g device.GPU) bool {
	return g.Dynamic && g.MIGEnabled && !slices.ContainsFunc(g.Partitions, func(p device.Partition) bool { return !p.Made })
}

// listedID is a device ID in the list of a resource: kubelet keeps an account for each resource.
type listedID struct{ resource, id string }

// resourceDevices are the devices of one resource, in their order. kubelet looks up devices of running pods in the last list without
// checking that they are there, so an ID that was listed stays listed as long as a pod may hold it.
type resourceDevices struct {
	resource string
	items    []item
	index    map[string]int
	// wholeGPUs is set unless partitions or replicas are offered. They are chosen by the links of the inventory.
	wholeGPUs bool
	inventory device.Inventory
	config    *Config
}

func (c *resourceDevices) arrange() {
	slices.SortFunc(c.items, item.compare)
	c.index = make(map[string]int, len(c.items))
	c.wholeGPUs = true
	for at, i := range c.items {
		c.index[i.id] = at
		c.wholeGPUs = c.wholeGPUs && (i.Whole() && i.share.Whole() || !i.offered)
	}
}

// deviceTable is the devices of every resource, for one state of the inventory.
type deviceTable struct {
	items map[listedID]item
	// of has the items by resource.
	of map[string]*resourceDevices
	// ours are the UUIDs of all GPUs that are listed and of their partitions.
	ours map[string]bool
	// excluded devices have no resource.
	excluded []device.LeftOut
	// expires is when the next device leaves the list; zero for never.
	expires time.Time
}

// build lists the devices of the inventory, those that pods hold and are not offered, and those that were listed before.
func (r *lists) build(u usage, before *deviceTable, now time.Time) *deviceTable {
	inv := r.Inventory.Inventory()
	gpus := slices.DeleteFunc(slices.Clone(inv.GPUs), func(g device.GPU) bool { return r.Offered != nil && !r.Offered(g) })
	offers, excluded := r.Resources.Offers(gpus)
	next := &deviceTable{items: map[listedID]item{}, of: map[string]*resourceDevices{}, ours: map[string]bool{}, excluded: excluded}
	for _, offer := range offers {
		next.items[listedID{offer.Resource, offer.ID()}] = item{Device: offer.Device, id: offer.ID(), share: offer.Share, offered: true}
	}
	for _, g := range gpus {
		// It is offered again once claims have no partition of it.
		if at := (listedID{r.Resources.GPU, g.UUID}); !next.items[at].offered && partitionedByClaims(g) {
			next.items[at] = item{Device: device.Device{GPU: g}, id: g.UUID}
		}
	}
	byUUID := map[string]device.Device{}
	for _, d := range inv.Devices() {
		byUUID[d.UUID()] = d
	}
	find := func(id string, ref device.Ref) (device.Device, bool) {
		d, known := byUUID[device.HardwareUUID(id)]
		if !known && !device.HasUUID(id) {
			return inv.ByRef(ref) // an adopted pod has an ID of another plugin
		}
		return d, known
	}
	for at, old := range before.items {
		if _, still := next.items[at]; !still {
			next.items[at] = withdraw(old, find)
		}
	}
	for at, h := range u.pods {
		if _, there := next.items[at]; there || !r.Resources.Has(at.resource) {
			continue
		}
		d, known := find(at.id, h.Device)
		if !known {
			d = missingDevice(inv, at.id, h.Device)
		}
		next.items[at] = item{Device: d, id: at.id, share: h.Share}
	}
	unready := r.unready(next.items)
	cdi := r.uses(Strategy.cdi)
	for at, i := range next.items {
		if _, held := u.pods[at]; i.needed(held) {
			i.idle = time.Time{}
		} else if i.idle.IsZero() {
			i.idle = now
		}
		if !i.idle.IsZero() && r.retireAfter > 0 {
			end := i.idle.Add(r.retireAfter)
			if !now.Before(end) {
				delete(next.items, at)
				continue
			}
			if next.expires.IsZero() || end.Before(next.expires) {
				next.expires = end
			}
		}
		i.unnamed = cdi && r.Specs.Problem(i.hardware()) != nil
		i.unready = unready[i.Ref()]
		next.items[at] = i
		c := next.of[at.resource]
		if c == nil {
			c = &resourceDevices{resource: at.resource, inventory: inv, config: r.Config}
			next.of[at.resource] = c
		}
		c.items = append(c.items, i)
		next.ours[i.GPU.UUID] = true
		for _, p := range i.GPU.Partitions {
			next.ours[p.UUID] = true
		}
	}
	if len(next.of) == 0 {
		next.of[r.Resources.GPU] = &resourceDevices{resource: r.Resources.GPU}
	}
	for _, c := range next.of {
		c.arrange()
	}
	return next
}

// outdated reports whether an item became idle since the table was built, or has to leave the list now, or a pod's device is not listed.
func (r *lists) outdated(c *deviceTable, u usage, now time.Time) bool {
	for at, i := range c.items {
		if _, held := u.pods[at]; i.idle.IsZero() && !i.needed(held) {
			return true
		}
	}
	for at := range u.pods {
		if _, there := c.items[at]; !there && r.Resources.Has(at.resource) {
			return true
		}
	}
	return !c.expires.IsZero() && !now.Before(c.expires)
}

// unready returns for each offered device whether it waits for the node's sharing policy. It asks once for each device, not for each
// replica (TestDaemonsAreAskedForOnce).
func (r *lists) unready(items map[listedID]item) map[device.Ref]bool {
	unready := map[device.Ref]bool{}
	for _, i := range items {
		if _, asked := unready[i.Ref()]; i.offered && !asked {
			_, err := r.Sharing.Client(i.Device, i.share)
			unready[i.Ref()] = err != nil
		}
	}
	return unready
}

var missing = device.Health{Reason: device.ReasonMissing, Message: "no longer in the inventory"}

// withdraw returns an item that is not offered any more, with its device as the inventory has it now.
func withdraw(old item, find func(id string, ref device.Ref) (device.Device, bool)) item {
	now, there := find(old.id, old.Ref())
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

// missingDevice returns a device that a pod holds and the inventory lacks, such as a GPU that was lost before the agent started.
func missingDevice(inv device.Inventory, id string, ref device.Ref) device.Device {
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

func (c *resourceDevices) states(u usage) []state {
	states := make([]state, len(c.items))
	free := 0
	var pending []int
	// Each replica may fit alone although all of them together do not. The first ones that fit are offered.
	held, all := u.held(), u.heldOrPending()
	for at, i := range c.items {
		mine, conflict := u.availability(c.resource, i, held)
		health := i.Health()
		if mine {
			// Otherwise kubelet, when it restarts, fails a pod whose container starts again.
			health = i.HealthForHolder()
		}
		switch {
		case !health.Healthy() && !i.removed():
			states[at] = stateUnhealthy
		case conflict || i.removed() || !i.offered && (c.config.Retiring || !mine),
			// An unready device is healthy.
			!mine && (u.withheld || c.config.HeldOnly != nil || i.unready || u.outOfService(i.Device) != ""):
			states[at] = stateWithdrawn
		case !mine && (i.unnamed || u.unwritable):
			states[at] = stateUnhealthy
		case !mine && all.exclude(i.use()):
			states[at] = stateWithdrawn
			pending = append(pending, at)
			held.addShare(i.use())
		default:
			states[at] = stateHealthy
			if !mine {
				free++
				held.addShare(i.use())
				all.addShare(i.use())
			}
		}
	}
	// Pods come first: a pod that kubelet is about to admit fails permanently without a device, and a claim does not.
	for _, at := range descending(pending) {
		if free >= u.outstanding[c.resource] {
			break
		}
		states[at] = stateHealthy
		free++
	}
	return states
}

// usage is what holders have, and what claims and pods are about to request.
type usage struct {
	// holds by the UUID of the GPU.
	holds map[string][]ledger.Hold
	// pods are the holds of pods.
	pods map[listedID]ledger.Hold
	// pending claims are true if they wait.
	pending map[pendingClaim]bool
	// outstanding is how many devices of each resource pods still request that kubelet is about to admit.
	outstanding map[string]int
	// unwritable is set while the ledger cannot record new holds.
	unwritable bool
	// withheld means that no new holder gets a device. outOfService returns why none gets this one; empty if one does.
	withheld     bool
	outOfService func(device.Device) string
}

// pendingClaim is a claim that does not hold a device, or its share of one, yet: the scheduler has allocated it to the claim, or the
// claim had a conflict and waits.
type pendingClaim struct {
	claim  ledger.Holder
	device device.Ref
	share  device.Share
}

// obsolete reports whether the hold makes the pending claim obsolete: the claim has the hold, or both are for the full device. A hold of a
// replica does not: the other replicas would be offered again, and the claim would never get the device.
func (p pendingClaim) obsolete(h ledger.Hold) bool {
	return h.Device == p.device && (h.Holder == p.claim || p.share.Whole() && h.Share.Whole())
}

func usageOf(led Ledger, allocations Allocations) usage {
	u := usage{holds: map[string][]ledger.Hold{}, pods: map[listedID]ledger.Hold{}, pending: map[pendingClaim]bool{}}
	for _, h := range allocations.Allocated() {
		u.pending[pendingClaim{h.Holder, h.Device, h.Share}] = false
	}
	u.outstanding, _ = led.Outstanding()
	u.unwritable = led.Unwritable() != nil
	u.withheld, u.outOfService = led.Withheld() != nil, allocations.OutOfService()
	for _, conflict := range led.Conflicts() {
		for _, ref := range conflict.Devices {
			u.wait(pendingClaim{claim: ledger.Holder{Kind: ledger.KindClaim, ID: conflict.UID}, device: ref})
		}
	}
	for _, h := range led.Holds() {
		u.holds[h.Device.GPU] = append(u.holds[h.Device.GPU], h)
		for p := range u.pending {
			if p.obsolete(h) {
				delete(u.pending, p)
			}
		}
		if h.Holder.Kind == ledger.KindPod {
			u.pods[listedID{h.Resource, h.Holder.ID}] = h
		}
	}
	return u
}

// wait notes that a claim waits for a device, of which it may have been allocated a share.
func (u usage) wait(waiting pendingClaim) {
	known := false
	for p := range u.pending {
		if p.claim == waiting.claim && p.device == waiting.device {
			u.pending[p], known = true, true
		}
	}
	if !known {
		u.pending[waiting] = true
	}
}

// availability returns whether a pod holds the item under this ID, and whether a conflict keeps it from pods. An item that a pod holds
// stays offered: kubelet accounts for it itself, and otherwise fails the restart of the pod's containers. An item does not stay offered
// while its pod drains, because kubelet has dropped that pod, nor while the record of its pod is unreadable.
func (u usage) availability(resource string, i item, others uses) (mine, conflict bool) {
	own, mine, conflict := u.ownHold(resource, i)
	request := i.use()
	if mine {
		// The policy may have changed what the item is a share of. The pod's share is counted in its hold.
		request.Share = own.Share
		request.Share.Bytes, request.Share.Count = 0, 0
	}
	return mine, conflict || others.exclude(request)
}

// ownHold returns the hold of the pod that has the item under this ID, if there is one (mine), and whether a hold under this ID is in conflict
// with the item.
func (u usage) ownHold(resource string, i item) (own ledger.Hold, mine, conflict bool) {
	for _, h := range u.holds[i.GPU.UUID] {
		if h.Holder != (ledger.Holder{Kind: ledger.KindPod, ID: i.id}) || !h.Device.Overlaps(i.Ref()) {
			continue
		}
		if h.Resource != resource || h.Device != i.Ref() || h.State == ledger.StateDraining || h.Unreadable {
			return ledger.Hold{}, false, true
		}
		own, mine = h, true
	}
	return own, mine, false
}

type use = availability.Use[device.Ref]

// uses of devices, by the UUID of the GPU.
type uses map[string][]use

func (u usage) held() uses {
	held := uses{}
	for gpu, holds := range u.holds {
		for _, h := range holds {
			held[gpu] = append(held[gpu], h.Use())
		}
	}
	return held
}

func (u usage) heldOrPending() uses {
	all := u.held()
	for p := range u.pending {
		all.add(use{Holder: availability.Holder(p.claim), Device: p.device, Share: p.share})
	}
	return all
}

func (s uses) add(u use) { s[u.Device.GPU] = append(s[u.Device.GPU], u) }

// addShare adds a use of a replica, which counts for the other replicas of the device. The uses of whole devices do not add up.
func (s uses) addShare(u use) {
	if !u.Share.Whole() {
		s.add(u)
	}
}

// exclude reports whether the uses of other holders leave no room for the request.
func (s uses) exclude(request use) bool {
	return len(availability.Conflicts(request, slices.Values(s[request.Device.GPU]))) > 0
}

// reportExcluded reports devices that no extended resource offers, if they are not those that it reported before.
func (r *lists) reportExcluded(ctx context.Context, before []string) []string {
	excluded := excludedByReason(r.table.Load().excluded)
	if slices.Equal(before, excluded) {
		return before
	}
	for _, sentence := range excluded {
		klog.FromContext(ctx).Info("No extended resource offers some devices", "migStrategy", r.Resources.Strategy, "devices", sentence)
		r.warn("DevicesExcluded", "No extended resource offers %s", sentence)
	}
	return excluded
}

// excludedByReason returns a sentence for each reason: "gpu-1 and 2 more: <reason>".
func excludedByReason(excluded []device.LeftOut) []string {
	names := map[string][]string{}
	for _, l := range excluded {
		names[l.Reason] = append(names[l.Reason], fmt.Sprintf("%s (%s)", l.Device.Name(), l.Device.UUID()))
	}
	var sentences []string
	for reason, all := range names {
		sentences = append(sentences, regarding.Some(all)+": "+reason)
	}
	slices.Sort(sentences)
	return sentences
}
