// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

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

// catalog is every GPU that limits may get or have, seen since the process started, by minor. kubelet looks devices of
// running pods up in the last list without checking that they are there, so an ID that was listed once is listed for ever.
type catalog struct {
	gpus    []device.GPU
	index   map[string]int
	planner *planner
	// offered tells the GPUs that new limits may get; nil means all.
	offered func(device.GPU) bool
	// retiring calls none of the others healthy.
	retiring bool
}

func (c *catalog) offers(gpu device.GPU) bool { return c.offered == nil || c.offered(gpu) }

// extend returns a catalog with the GPUs of inv, and after them in health those that inv no longer has. A GPU that is not
// offered is in it only since a limit of before had it.
func (c *catalog) extend(inv device.Inventory, o owners) *catalog {
	gpus := slices.DeleteFunc(slices.Clone(inv.GPUs), func(gpu device.GPU) bool {
		_, known := c.index[gpu.UUID]
		return !known && !c.offers(gpu) && !o.limits[gpu.UUID]
	})
	for _, gpu := range c.gpus {
		if _, still := inv.ByUUID(gpu.UUID); still {
			continue
		}
		if gpu.Health.Healthy() {
			gpu.Health = device.Health{Reason: device.ReasonMissing, Message: "no longer in the inventory"}
		}
		gpus = append(gpus, gpu)
	}
	slices.SortFunc(gpus, func(a, b device.GPU) int {
		return cmp.Or(cmp.Compare(a.Minor, b.Minor), cmp.Compare(a.UUID, b.UUID))
	})
	next := &catalog{gpus: gpus, index: make(map[string]int, len(gpus)), offered: c.offered, retiring: c.retiring}
	for i, gpu := range gpus {
		next.index[gpu.UUID] = i
	}
	next.planner = newPlanner(gpus, inv)
	return next
}

// assess says for every GPU of the catalog what kubelet should think of it.
func (c *catalog) assess(o owners) []state {
	states := make([]state, len(c.gpus))
	free := 0
	var promised []int
	for i, gpu := range c.gpus {
		switch {
		case !gpu.Health.Healthy():
			states[i] = stateUnhealthy
		case o.taken[gpu.UUID] || !c.offers(gpu) && (c.retiring || !o.limits[gpu.UUID]):
			states[i] = stateWithdrawn
		case o.promised[gpu.UUID]:
			states[i] = stateWithdrawn
			promised = append(promised, i)
		default:
			states[i] = stateHealthy
			if !o.limits[gpu.UUID] {
				free++
			}
		}
	}
	// Bound limits first: a pod that kubelet is about to admit fails for good if it finds no device, and the claim does not.
	for _, i := range descending(promised) {
		if free >= o.lacking {
			break
		}
		states[i] = stateHealthy
		free++
	}
	return states
}

// owners are the GPUs, by UUID, that limits should keep away from.
type owners struct {
	// taken GPUs can be had by no new limit.
	taken map[string]bool
	// promised GPUs are held by nobody, and a claim is about to ask for them: the scheduler has allocated them to it, or it has
	// lost them before and waits.
	promised map[string]bool
	// lost are those of the promised that a claim waits for.
	lost map[string]bool
	// limits have these, rightly or not.
	limits map[string]bool
	// lacking is how many devices limits pods still ask for that kubelet is about to admit.
	lacking int
}

func ownersOf(led Ledger, allocations Allocations) owners {
	holds := led.Holds()
	o := owners{taken: withdrawn(holds), promised: make(map[string]bool), lost: make(map[string]bool), limits: make(map[string]bool)}
	if allocations != nil {
		for _, ref := range allocations.Allocated() {
			o.promised[ref.GPU] = true
		}
	}
	o.lacking, _ = led.Lacking()
	for _, lost := range led.Losers() {
		for _, ref := range lost.Devices {
			o.promised[ref.GPU], o.lost[ref.GPU] = true, true
		}
	}
	// A GPU that a limit holds stays the limit's for as long as it does.
	for _, h := range holds {
		delete(o.promised, h.Device.GPU)
		if h.Holder.Kind == ledger.KindLimit {
			o.limits[h.Device.GPU] = true
		}
	}
	return o
}

// withdrawn returns the GPUs that no new limit can get. What a limit holds stays offered: kubelet keeps that account
// itself, and would fail the holder's own restart otherwise. A draining limit is off kubelet's account already, and of one
// whose record cannot be read nobody knows.
func withdrawn(holds []ledger.Hold) map[string]bool {
	taken := make(map[string]bool)
	for _, h := range holds {
		if h.Holder.Kind != ledger.KindLimit || h.State == ledger.StateDraining || h.Unreadable || !h.Device.Whole() {
			taken[h.Device.GPU] = true
		}
	}
	return taken
}

// listing is one device list as sent to kubelet. Nobody changes one that was published.
type listing struct {
	response *pluginapi.ListAndWatchResponse
	// healthy are the IDs that kubelet must come to call allocatable, sorted.
	healthy []string
}

func newListing(gpus []device.GPU, states []state) *listing {
	l := &listing{response: &pluginapi.ListAndWatchResponse{}}
	for i, gpu := range gpus {
		d := &pluginapi.Device{ID: gpu.UUID, Health: pluginapi.Unhealthy}
		if states[i] == stateHealthy {
			d.Health = pluginapi.Healthy
			l.healthy = append(l.healthy, gpu.UUID)
		}
		if gpu.NUMANode != device.UnknownNUMANode {
			d.Topology = &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: int64(gpu.NUMANode)}}}
		}
		l.response.Devices = append(l.response.Devices, d)
	}
	slices.Sort(l.healthy)
	return l
}

// roster keeps the catalog and the published list in step with inventory and ledger.
type roster struct {
	inventory   Inventory
	ledger      Ledger
	allocations Allocations
	metrics     *metrics
	returnDelay time.Duration

	known atomic.Pointer[catalog]

	// Only refresh and publish use these.
	hold hysteresis
	// promised is since when GPUs are.
	promised map[string]time.Time
	listed   *catalog
	states   []state

	mu        sync.Mutex
	published *listing
	changed   chan struct{}
}

func newRoster(c Config, m *metrics) *roster {
	r := &roster{
		inventory: c.Inventory, ledger: c.Ledger, allocations: c.Allocations, metrics: m,
		hold: newHysteresis(), promised: make(map[string]time.Time), changed: make(chan struct{}),
	}
	r.known.Store(&catalog{planner: newPlanner(nil, device.Inventory{}), offered: c.Offered, retiring: c.Retiring})
	return r
}

// catalog of the moment; callers must not change it.
func (r *roster) catalog() *catalog { return r.known.Load() }

// owners of the moment.
func (r *roster) owners() owners { return ownersOf(r.ledger, r.allocations) }

// current returns the published list and a channel that is closed when another is published.
func (r *roster) current() (*listing, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.published, r.changed
}

// refresh reads inventory and ledger anew. Only one goroutine may call it at a time.
func (r *roster) refresh(now time.Time) (again time.Duration) {
	r.known.Store(r.catalog().extend(r.inventory.Inventory(), r.owners()))
	return r.publish(now)
}

func (r *roster) publish(now time.Time) (again time.Duration) {
	c, o := r.catalog(), r.owners()
	ripe := r.ripen(now, &o)
	states, again := r.hold.apply(now, r.returnDelay, c.gpus, c.assess(o))
	if ripe > 0 && (again == 0 || ripe < again) {
		again = ripe
	}
	// Every Allocate changes the ledger and hardly any changes the list: kubelet waits for the answer meanwhile.
	if c == r.listed && slices.Equal(states, r.states) {
		return again
	}
	r.metrics.withdrawals.Add(float64(r.newlyWithdrawn(c, states)))
	r.listed, r.states = c, states
	r.metrics.setDevices(states)
	next := newListing(c.gpus, states)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.published == nil || !proto.Equal(r.published.response, next.response) {
		r.published = next
		close(r.changed)
		r.changed = make(chan struct{})
	}
	return again
}

// promiseDelay is how long a device stays on offer that is promised to a claim and that no claim waits for. Limits pods that were
// bound before the scheduler made the promise come by another watch, and may come later: without a device they fail for good,
// and the claim does not.
const promiseDelay = 300 * time.Millisecond

// ripen drops the promises that are younger, except from the first list, and answers how long until the next one is ripe.
func (r *roster) ripen(now time.Time, o *owners) (again time.Duration) {
	maps.DeleteFunc(r.promised, func(gpu string, _ time.Time) bool { return !o.promised[gpu] })
	for gpu := range o.promised {
		since, known := r.promised[gpu]
		switch {
		case o.lost[gpu] || r.listed == nil:
			since = time.Time{} // for ever
		case !known:
			since = now
		}
		r.promised[gpu] = since
		left := promiseDelay - now.Sub(since)
		if left <= 0 {
			continue
		}
		delete(o.promised, gpu)
		if again == 0 || left < again {
			again = left
		}
	}
	return again
}

// newlyWithdrawn counts the GPUs that were healthy in the list before.
func (r *roster) newlyWithdrawn(c *catalog, states []state) int {
	count := 0
	for i, gpu := range c.gpus {
		if r.listed == nil || states[i] != stateWithdrawn {
			continue
		}
		if at, known := r.listed.index[gpu.UUID]; known && r.states[at] == stateHealthy {
			count++
		}
	}
	return count
}

// run follows inventory, ledger and allocations until ctx is done.
func (r *roster) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	allocated := func() <-chan struct{} {
		if r.allocations == nil {
			return nil
		}
		return r.allocations.Changed()
	}
	inventoryChanged := r.inventory.Changed()
	ledgerChanged := r.ledger.Changed()
	allocatedChanged := allocated()
	_, lackingChanged := r.ledger.Lacking()
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
		case <-ledgerChanged:
			ledgerChanged = r.ledger.Changed()
			again = r.publish(time.Now())
		case <-allocatedChanged:
			allocatedChanged = allocated()
			again = r.publish(time.Now())
		case <-lackingChanged:
			_, lackingChanged = r.ledger.Lacking()
			again = r.publish(time.Now())
		case <-due:
			again = r.publish(time.Now())
		}
	}
}

// hysteresis lets bad news through at once and holds good news back, so that a device that goes to and fro costs kubelet
// (which writes its checkpoint for every list) and the scheduler one change, not many.
type hysteresis struct {
	shown map[string]state
	since map[string]time.Time // when a device that is not shown healthy became so
}

func newHysteresis() hysteresis {
	return hysteresis{shown: make(map[string]state), since: make(map[string]time.Time)}
}

// apply returns the states to show and, when it held something back, how long until it would show it.
func (h hysteresis) apply(now time.Time, delay time.Duration, gpus []device.GPU, states []state) (show []state, again time.Duration) {
	show = slices.Clone(states)
	for i, gpu := range gpus {
		before, seen := h.shown[gpu.UUID]
		if states[i] == stateHealthy && seen && before != stateHealthy {
			if h.since[gpu.UUID].IsZero() {
				h.since[gpu.UUID] = now
			}
			if wait := delay - now.Sub(h.since[gpu.UUID]); wait > 0 {
				show[i] = before
				if again == 0 || wait < again {
					again = wait
				}
				continue
			}
		}
		delete(h.since, gpu.UUID)
		h.shown[gpu.UUID] = show[i]
	}
	return show, again
}
