// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// listing is one device list as sent to kubelet. It is immutable.
type listing struct {
	response *pluginapi.ListAndWatchResponse
	// healthy are the IDs that kubelet must come to call allocatable, sorted.
	healthy []string
}

func newListing(items []item, states []state) *listing {
	l := &listing{response: &pluginapi.ListAndWatchResponse{}}
	for at, i := range items {
		d := &pluginapi.Device{ID: i.id, Health: pluginapi.Unhealthy}
		if states[at] == stateHealthy {
			d.Health = pluginapi.Healthy
			l.healthy = append(l.healthy, i.id)
		}
		if i.GPU.NUMANode != device.UnknownNUMANode {
			d.Topology = &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: int64(i.GPU.NUMANode)}}}
		}
		l.response.Devices = append(l.response.Devices, d)
	}
	slices.Sort(l.healthy)
	return l
}

// lists keeps the device lists up to date with inventory and ledger.
type lists struct {
	offering
	inventory   Inventory
	ledger      Ledger
	allocations Allocations
	specs       Specs
	metrics     *metrics
	returnDelay time.Duration

	known atomic.Pointer[catalogs]

	// Only refresh and publish use these.
	hold hysteresis
	// promised is since when something is.
	promised map[promise]time.Time
	// assessed is what the published lists were made of.
	assessed *catalogs
	states   map[string][]state

	mu        sync.Mutex
	published map[string]*listing
	// excluded says what has no resource, by reason.
	excluded []string
	changed  chan struct{}
}

func newLists(c Config, m *metrics) *lists {
	r := &lists{
		offering: newOffering(c), inventory: c.Inventory, ledger: c.Ledger, allocations: c.Allocations, specs: c.Specs,
		metrics: m, hold: newHysteresis(), promised: map[promise]time.Time{}, changed: make(chan struct{}),
	}
	r.known.Store(&catalogs{})
	return r
}

// catalogs of the moment; callers must not change them.
func (r *lists) catalogs() *catalogs { return r.known.Load() }

// catalog of a resource at the moment; one that is not served has no devices.
func (r *lists) catalog(resource string) *catalog {
	if c := r.catalogs().of[resource]; c != nil {
		return c
	}
	return newCatalog(resource)
}

// owners of the moment.
func (r *lists) owners() owners { return ownersOf(r.ledger, r.allocations) }

// current returns the published list of a resource, nil for none, and a channel that is closed when any list changes.
func (r *lists) current(resource string) (*listing, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.published[resource], r.changed
}

// resources returns the names of those that have a list, and a channel that is closed when any list changes.
func (r *lists) resources() ([]string, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(maps.Keys(r.published)), r.changed
}

// left returns what is left out, and a channel that is closed when that changes, or any list.
func (r *lists) left() ([]string, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.excluded, r.changed
}

// refresh reads inventory and ledger anew. Only one goroutine may call it at a time.
func (r *lists) refresh(now time.Time) (again time.Duration) {
	r.known.Store(r.over(r.inventory.Inventory(), r.owners(), r.catalogs(), now))
	return r.publish(now)
}

// reshare is a refresh where something has become ready, or is so no more: most of what is set for claims changes neither.
func (r *lists) reshare(now time.Time) (again time.Duration) {
	if c := r.catalogs(); !maps.Equal(c.unready, r.unready(c.items())) {
		return r.refresh(now)
	}
	return r.publish(now)
}

func (r *lists) publish(now time.Time) (again time.Duration) {
	c, o := r.catalogs(), r.owners()
	if c.needsRefresh(o) || len(r.unlisted(o, c.items())) > 0 {
		c = r.over(r.inventory.Inventory(), o, c, now)
		r.known.Store(c)
	}
	again = r.debounce(now, &o)
	if retires := r.retires(); !retires.IsZero() {
		again = sooner(again, max(retires.Sub(now), time.Millisecond))
	}
	states := make(map[string][]state, len(c.of))
	for resource, of := range c.of {
		var wait time.Duration
		states[resource], wait = r.hold.apply(now, r.returnDelay, of, of.assess(o))
		again = sooner(again, wait)
	}
	// Every Allocate changes the ledger and hardly any changes the list: kubelet waits for the answer meanwhile.
	if c == r.assessed && maps.EqualFunc(states, r.states, slices.Equal) {
		return again
	}
	r.metrics.withdrawals.Add(float64(r.newlyWithdrawn(c, states)))
	r.assessed, r.states = c, states
	r.metrics.setDevices(states, len(c.excluded))
	r.announce(c, states)
	return again
}

// retires is when the next item is no longer listed; zero for never.
func (r *lists) retires() time.Time {
	if idle := r.catalogs().idle(); !idle.IsZero() && r.retireAfter > 0 {
		return idle.Add(r.retireAfter)
	}
	return time.Time{}
}

// announce publishes those lists that differ from before.
func (r *lists) announce(c *catalogs, states map[string][]state) {
	r.mu.Lock()
	defer r.mu.Unlock()
	next := make(map[string]*listing, len(c.of))
	for resource, of := range c.of {
		next[resource] = newListing(of.items, states[resource])
		if before := r.published[resource]; before != nil && proto.Equal(before.response, next[resource].response) {
			next[resource] = before
		}
	}
	excluded := leftOutByReason(c.excluded)
	if !maps.Equal(r.published, next) || !slices.Equal(r.excluded, excluded) {
		r.published, r.excluded = next, excluded
		close(r.changed)
		r.changed = make(chan struct{})
	}
}

// sooner of two waits, of which zero is none.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// promiseDelay is how long a device that is promised to a claim stays offered while no claim waits for it. Pods that were bound
// before that allocation come by another watch and may come later. Without a device they fail permanently, and the claim does
// not.
const promiseDelay = 300 * time.Millisecond

// debounce drops promises younger than promiseDelay, except from the first list, and returns how long until the next one counts.
func (r *lists) debounce(now time.Time, o *owners) (again time.Duration) {
	maps.DeleteFunc(r.promised, func(p promise, _ time.Time) bool { _, still := o.promised[p]; return !still })
	for p, lost := range o.promised {
		since, known := r.promised[p]
		switch {
		case lost || r.assessed == nil:
			since = time.Time{} // for ever
		case !known:
			since = now
		}
		r.promised[p] = since
		left := promiseDelay - now.Sub(since)
		if left <= 0 {
			continue
		}
		delete(o.promised, p)
		again = sooner(again, left)
	}
	return again
}

// newlyWithdrawn counts the devices that were healthy in the lists before.
func (r *lists) newlyWithdrawn(c *catalogs, states map[string][]state) int {
	count := 0
	if r.assessed == nil {
		return 0
	}
	for resource, of := range c.of {
		before := r.assessed.of[resource]
		if before == nil {
			continue
		}
		for at, i := range of.items {
			if was, known := before.index[i.id]; known && states[resource][at] == stateWithdrawn && r.states[resource][was] == stateHealthy {
				count++
			}
		}
	}
	return count
}

// run follows inventory, specs, sharing, ledger and allocations until ctx is done.
func (r *lists) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	allocated := func() <-chan struct{} {
		if r.allocations == nil {
			return nil
		}
		return r.allocations.Changed()
	}
	inventoryChanged := r.inventory.Changed()
	specsChanged := r.specs.Changed()
	shared := func() <-chan struct{} {
		if r.sharing == nil {
			return nil
		}
		return r.sharing.Changed()
	}
	sharingChanged := shared()
	ledgerChanged := r.ledger.Changed()
	allocatedChanged := allocated()
	_, lackingChanged := r.ledger.Outstanding()
	again := r.refresh(time.Now())
	for {
		var due <-chan time.Time
		if again > 0 {
			timer.Reset(again)
			due = timer.C
		}
		select {
		case <-ctx.Done():
			return
		case <-inventoryChanged:
			inventoryChanged = r.inventory.Changed()
			again = r.refresh(time.Now())
		case <-specsChanged:
			specsChanged = r.specs.Changed()
			again = r.refresh(time.Now())
		case <-sharingChanged:
			sharingChanged = shared()
			again = r.reshare(time.Now())
		case <-ledgerChanged:
			ledgerChanged = r.ledger.Changed()
			again = r.publish(time.Now())
		case <-allocatedChanged:
			allocatedChanged = allocated()
			again = r.publish(time.Now())
		case <-lackingChanged:
			_, lackingChanged = r.ledger.Outstanding()
			again = r.publish(time.Now())
		case now := <-due:
			if retires := r.retires(); !retires.IsZero() && !now.Before(retires) {
				again = r.refresh(now)
			} else {
				again = r.publish(now)
			}
		}
	}
}

// hysteresis lets bad news through at once and holds good news back, so that a device that goes to and fro costs kubelet
// (which writes its checkpoint for every list) and the scheduler one change, not many.
type hysteresis struct {
	shown map[listed]state
	since map[listed]time.Time // when a device that is not shown healthy became so
}

func newHysteresis() hysteresis {
	return hysteresis{shown: make(map[listed]state), since: make(map[listed]time.Time)}
}

// apply returns the states to show and, when it held something back, how long until it would show it.
func (h hysteresis) apply(now time.Time, delay time.Duration, c *catalog, states []state) (show []state, again time.Duration) {
	show = slices.Clone(states)
	for at, i := range c.items {
		key := listed{c.resource, i.id}
		before, seen := h.shown[key]
		if states[at] == stateHealthy && seen && before != stateHealthy {
			if h.since[key].IsZero() {
				h.since[key] = now
			}
			if wait := delay - now.Sub(h.since[key]); wait > 0 {
				show[at] = before
				again = sooner(again, wait)
				continue
			}
		}
		delete(h.since, key)
		h.shown[key] = show[at]
	}
	return show, again
}
