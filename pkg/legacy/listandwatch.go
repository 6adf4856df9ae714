// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// listing is one device list as sent to kubelet. It is immutable.
type listing struct {
	response *pluginapi.ListAndWatchResponse
	// healthy are the IDs that kubelet reports as allocatable once it has the list, sorted.
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

// lists keeps the device lists up to date.
type lists struct {
	selection
	inventory   Inventory
	ledger      Ledger
	allocations Allocations
	specs       Specs
	metrics     *metrics
	returnDelay time.Duration

	table atomic.Pointer[deviceTable]

	// Only run uses these.
	hold hysteresis
	// pendingSince is since when a claim is pending.
	pendingSince map[pendingClaim]time.Time
	// assessed and states are what the published lists were made of.
	assessed *deviceTable
	states   map[string][]state

	changed broadcast.Signal
	mu      sync.Mutex
	// published lists, by resource.
	published map[string]*listing
	// excluded says which devices have no resource, by reason.
	excluded []string
}

func newLists(c Config, m *metrics) *lists {
	r := &lists{
		selection: newSelection(c), inventory: c.Inventory, ledger: c.Ledger, allocations: c.Allocations, specs: c.Specs,
		metrics: m, hold: newHysteresis(), pendingSince: map[pendingClaim]time.Time{},
	}
	r.table.Store(&deviceTable{})
	return r
}

// run publishes the lists whenever inventory, CDI specs, sharing, ledger, allocations or requesting pods change, until ctx is done.
func (r *lists) run(ctx context.Context) {
	inventory, specs, shared, held, allocated := r.inventory.Changed(), r.specs.Changed(), r.sharingChanged(), r.ledger.Changed(), r.allocatedChanged()
	_, requested := r.ledger.Outstanding()
	again := r.refresh(time.Now())
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		var due <-chan time.Time
		if again > 0 {
			timer.Reset(again)
			due = timer.C
		}
		select {
		case <-ctx.Done():
			return
		case <-inventory:
			inventory = r.inventory.Changed()
			again = r.refresh(time.Now())
		case <-specs:
			specs = r.specs.Changed()
			again = r.refresh(time.Now())
		case <-shared:
			shared = r.sharingChanged()
			again = r.refreshSharing(time.Now())
		case <-held:
			held = r.ledger.Changed()
			again = r.publish(time.Now())
		case <-allocated:
			allocated = r.allocatedChanged()
			again = r.publish(time.Now())
		case <-requested:
			_, requested = r.ledger.Outstanding()
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

func (r *lists) sharingChanged() <-chan struct{} {
	if r.sharing == nil {
		return nil
	}
	return r.sharing.Changed()
}

func (r *lists) allocatedChanged() <-chan struct{} {
	if r.allocations == nil {
		return nil
	}
	return r.allocations.Changed()
}

// refresh rebuilds the device table and publishes.
func (r *lists) refresh(now time.Time) (again time.Duration) {
	r.table.Store(r.selection.table(r.inventory.Inventory(), r.usage(), r.table.Load(), now))
	return r.publish(now)
}

// refreshSharing rebuilds the device table only if a device became ready or unready: most changes of sharing settings are those of
// claims (TestDaemonsAreAskedForOnce).
func (r *lists) refreshSharing(now time.Time) (again time.Duration) {
	if c := r.table.Load(); !maps.Equal(c.unready, r.unready(c.items())) {
		return r.refresh(now)
	}
	return r.publish(now)
}

// publish computes the state of each device and publishes the lists that changed. It returns after how long to call it again; zero
// means that no change is due.
func (r *lists) publish(now time.Time) (again time.Duration) {
	c, u := r.table.Load(), r.usage()
	if c.needsRefresh(u) || len(r.unlisted(u, c.items())) > 0 {
		c = r.selection.table(r.inventory.Inventory(), u, c, now)
		r.table.Store(c)
	}
	again = r.delayPending(now, &u)
	if retires := r.retires(); !retires.IsZero() {
		again = sooner(again, max(retires.Sub(now), time.Millisecond))
	}
	states := make(map[string][]state, len(c.of))
	for resource, devices := range c.of {
		var wait time.Duration
		states[resource], wait = r.hold.apply(now, r.returnDelay, devices, devices.states(u))
		again = sooner(again, wait)
	}
	// Each Allocate changes the ledger, and hardly any changes a list.
	if c == r.assessed && maps.EqualFunc(states, r.states, slices.Equal) {
		return again
	}
	r.metrics.withdrawals.Add(float64(r.newlyWithdrawn(c, states)))
	r.assessed, r.states = c, states
	r.metrics.setDevices(states, len(c.excluded))
	if r.replace(c, states) {
		r.changed.Notify()
	}
	return again
}

// replace replaces the published lists that changed, and reports whether any did.
func (r *lists) replace(c *deviceTable, states map[string][]state) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	next := make(map[string]*listing, len(c.of))
	for resource, devices := range c.of {
		next[resource] = newListing(devices.items, states[resource])
		if before := r.published[resource]; before != nil && proto.Equal(before.response, next[resource].response) {
			next[resource] = before
		}
	}
	excluded := excludedByReason(c.excluded)
	if maps.Equal(r.published, next) && slices.Equal(r.excluded, excluded) {
		return false
	}
	r.published, r.excluded = next, excluded
	return true
}

// ListAndWatch sends the list and then each change of it. A slow reader gets only the newest list. kubelet calls it once for each
// registration.
func (s *service) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	ended := s.endpoint.streamStarted()
	defer ended()
	var sent *listing
	for {
		changed := s.served.lists.changed.Changed()
		if list := s.served.lists.current(s.served.resource); list != sent && list != nil {
			if err := stream.Send(list.response); err != nil {
				return err
			}
			sent = list
			s.endpoint.noteSent(list)
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-s.endpoint.stopping:
			return nil
		}
	}
}

// devices returns the devices of a resource. A resource that is not served has none.
func (r *lists) devices(resource string) *resourceDevices {
	if c := r.table.Load().of[resource]; c != nil {
		return c
	}
	return newResourceDevices(resource)
}

func (r *lists) usage() usage { return usageOf(r.ledger, r.allocations) }

// current returns the published list of a resource; nil for none.
func (r *lists) current(resource string) *listing {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.published[resource]
}

// names returns the resources that have a list, sorted.
func (r *lists) names() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(maps.Keys(r.published))
}

// excludedDevices returns a sentence for each reason for which devices have no resource.
func (r *lists) excludedDevices() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.excluded
}

// retires returns when the next item leaves the list; zero for never.
func (r *lists) retires() time.Time {
	if idle := r.table.Load().firstIdle(); !idle.IsZero() && r.retireAfter > 0 {
		return idle.Add(r.retireAfter)
	}
	return time.Time{}
}

// sooner returns the shorter of two waits, of which zero is none.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// pendingDelay is how long a device of a pending claim stays offered while the claim does not wait. Pods that the scheduler bound before
// it allocated the claim are reported by another watch and may be reported later. Without a device they fail permanently, and the claim
// does not.
const pendingDelay = 300 * time.Millisecond

// delayPending removes pending claims younger than pendingDelay from the usage, except for the first list. It returns how long until the
// next one counts.
func (r *lists) delayPending(now time.Time, u *usage) (again time.Duration) {
	maps.DeleteFunc(r.pendingSince, func(p pendingClaim, _ time.Time) bool { _, still := u.pending[p]; return !still })
	for p, waits := range u.pending {
		since, known := r.pendingSince[p]
		switch {
		case waits || r.assessed == nil:
			since = time.Time{} // it counts at once
		case !known:
			since = now
		}
		r.pendingSince[p] = since
		left := pendingDelay - now.Sub(since)
		if left <= 0 {
			continue
		}
		delete(u.pending, p)
		again = sooner(again, left)
	}
	return again
}

// newlyWithdrawn counts the devices that were healthy in the published lists and are withdrawn now.
func (r *lists) newlyWithdrawn(c *deviceTable, states map[string][]state) int {
	count := 0
	if r.assessed == nil {
		return 0
	}
	for resource, devices := range c.of {
		before := r.assessed.of[resource]
		if before == nil {
			continue
		}
		for at, i := range devices.items {
			if was, known := before.index[i.id]; known && states[resource][at] == stateWithdrawn && r.states[resource][was] == stateHealthy {
				count++
			}
		}
	}
	return count
}

// hysteresis shows a device that stops being healthy at once, and one that becomes healthy after a delay. A device that changes to and fro
// then costs kubelet, which writes its checkpoint for each list, and the scheduler one change.
type hysteresis struct {
	shown map[listedID]state
	since map[listedID]time.Time // when a device that is not shown as healthy became healthy
}

func newHysteresis() hysteresis {
	return hysteresis{shown: make(map[listedID]state), since: make(map[listedID]time.Time)}
}

// apply returns the states to show and, if it delays one, how long until it would show it.
func (h hysteresis) apply(now time.Time, delay time.Duration, c *resourceDevices, states []state) (show []state, again time.Duration) {
	show = slices.Clone(states)
	for at, i := range c.items {
		key := listedID{c.resource, i.id}
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
