// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// listing is one device list as sent to kubelet. It is immutable.
type listing struct {
	response *pluginapi.ListAndWatchResponse
	// healthy are the IDs that kubelet reports as allocatable once it has the list, sorted.
	healthy []string
	// withdrawn IDs are unhealthy for kubelet only.
	withdrawn []string
}

func newListing(items []item, states []state) *listing {
	l := &listing{response: &pluginapi.ListAndWatchResponse{}}
	for at, i := range items {
		d := &pluginapi.Device{ID: i.id, Health: pluginapi.Unhealthy}
		switch states[at] {
		case stateHealthy:
			d.Health = pluginapi.Healthy
			l.healthy = append(l.healthy, i.id)
		case stateWithdrawn:
			l.withdrawn = append(l.withdrawn, i.id)
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
	*Config
	metrics *metrics
	// retireAfter is how long an idle device stays listed; zero means permanently. kubelet may be about to allocate a device that was
	// healthy a moment ago, and looks it up in its list.
	retireAfter time.Duration

	table atomic.Pointer[deviceTable]

	// pendingSince is since when a claim is pending. Only publish uses it.
	pendingSince map[pendingClaim]time.Time

	changed broadcast.Signal
	mu      sync.Mutex
	// published lists, by resource.
	published map[string]*listing
}

// run publishes the lists whenever inventory, CDI specs, sharing, ledger, allocations or requesting pods change, until ctx is done.
func (r *lists) run(ctx context.Context) {
	var excluded []string
	for ctx.Err() == nil {
		inventory, specs, shared := r.Inventory.Changed(), r.Specs.Changed(), r.Sharing.Changed()
		r.rebuild(time.Now())
		for current := true; current; {
			held, allocated := r.Ledger.Changed(), r.Allocations.Changed()
			_, requested := r.Ledger.Outstanding()
			var again <-chan time.Time
			if wait := r.publish(time.Now()); wait > 0 {
				again = time.After(wait)
			}
			excluded = r.reportExcluded(ctx, excluded)
			select {
			case <-ctx.Done():
				return
			case <-again:
			case <-held:
			case <-allocated:
			case <-requested:
			case <-inventory:
				current = false
			case <-specs:
				current = false
			case <-shared:
				current = false
			}
		}
	}
}

func (r *lists) rebuild(now time.Time) {
	r.table.Store(r.build(usageOf(r.Ledger, r.Allocations), r.table.Load(), now))
}

// publish computes the state of each device and publishes the lists that changed. It returns after how long to call it again; zero
// means that no change is due.
func (r *lists) publish(now time.Time) (again time.Duration) {
	u := usageOf(r.Ledger, r.Allocations)
	if r.outdated(r.table.Load(), u, now) {
		r.rebuild(now)
	}
	c := r.table.Load()
	if again = r.delayPending(now, &u); !c.expires.IsZero() {
		again = sooner(again, c.expires.Sub(now))
	}
	lists := make(map[string]*listing, len(c.of))
	for resource, devices := range c.of {
		lists[resource] = newListing(devices.items, devices.states(u))
	}
	r.metrics.excluded.Set(float64(len(c.excluded)))
	if r.replace(lists) {
		r.changed.Notify()
	}
	return again
}

// replace replaces the published lists that changed, and reports whether any did.
func (r *lists) replace(next map[string]*listing) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.metrics.setDevices(r.published, next)
	for resource, list := range next {
		before := r.published[resource]
		if before == nil {
			continue
		}
		for _, id := range list.withdrawn {
			if slices.Contains(before.healthy, id) {
				r.metrics.withdrawals.Inc()
			}
		}
		if proto.Equal(before.response, list.response) {
			next[resource] = before
		}
	}
	changed := !maps.Equal(r.published, next)
	r.published = next
	return changed
}

// ListAndWatch sends the list and then each change of it. A slow reader gets only the newest list. kubelet calls it once for each
// registration.
func (s *service) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	s.endpoint.streams.Add(1)
	s.endpoint.closeUp()
	defer func() {
		if s.endpoint.streams.Add(-1) == 0 {
			s.endpoint.closeDown()
		}
	}()
	var sent *listing
	for {
		changed := s.registrar.lists.changed.Changed()
		list := s.registrar.lists.current()[s.registrar.resource]
		// Beside a conflicting plugin this stream is about to end. kubelet would replace that plugin's list by one without a healthy device,
		// and fail its pods.
		if list != sent && list != nil && !s.registrar.withholds.Load() {
			if err := stream.Send(list.response); err != nil {
				return err
			}
			sent = list
			s.endpoint.sent.Store(list)
			s.endpoint.sentMore.Notify()
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
	return &resourceDevices{resource: resource, config: r.Config}
}

// current returns the published lists by resource, which do not change.
func (r *lists) current() map[string]*listing {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.published
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
	maps.DeleteFunc(r.pendingSince, func(p pendingClaim, _ time.Time) bool {
		// A claim that was prepared and unprepared does not wait again.
		held := slices.ContainsFunc(u.holds[p.device.GPU], func(h ledger.Hold) bool { return p.obsolete(h) })
		_, still := u.pending[p]
		return !still && !held
	})
	for p, waits := range u.pending {
		since, known := r.pendingSince[p]
		switch {
		case waits || r.published == nil:
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

type metrics struct {
	allocate      prometheus.Histogram
	preferred     prometheus.Histogram
	conflicts     prometheus.Counter
	devices       *prometheus.GaugeVec
	excluded      prometheus.Gauge
	withdrawals   prometheus.Counter
	registrations *prometheus.CounterVec
}

func newMetrics(registerer prometheus.Registerer) *metrics {
	factory := promauto.With(registerer)
	buckets := prometheus.ExponentialBucketsRange(0.0001, 10, 16)
	return &metrics{
		allocate: factory.NewHistogram(prometheus.HistogramOpts{
			Name: "tandem_allocate_duration_seconds", Buckets: buckets,
			Help: "Time to answer an Allocate of kubelet's device manager, refusals included.",
		}),
		preferred: factory.NewHistogram(prometheus.HistogramOpts{
			Name: "tandem_preferred_allocation_duration_seconds", Buckets: buckets,
			Help: "Time to answer a GetPreferredAllocation of kubelet's device manager.",
		}),
		conflicts: factory.NewCounter(prometheus.CounterOpts{
			Name: "tandem_allocate_conflicts_total",
			Help: "Allocate calls refused because another holder has the device.",
		}),
		devices: factory.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tandem_device_plugin_devices",
			Help: "Devices in the list sent to kubelet, by state: healthy, unhealthy, or withdrawn (a claim has it, was allocated it or " +
				"waits for it; a pod that is ending holds it; or its sharing settings are not applied yet).",
		}, []string{"resource", "state"}),
		excluded: factory.NewGauge(prometheus.GaugeOpts{
			Name: "tandem_device_plugin_devices_excluded",
			Help: "Devices that no extended resource offers, such as a partition of another profile with the MIG strategy single, or a " +
				"GPU that only claims share by MPS.",
		}),
		withdrawals: factory.NewCounter(prometheus.CounterOpts{
			Name: "tandem_device_plugin_withdrawals_total",
			Help: "Healthy devices that were withdrawn from kubelet's device manager.",
		}),
		registrations: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_device_plugin_registrations_total",
			Help: "Successful registrations with kubelet's device manager, by what made them necessary.",
		}, []string{"reason"}),
	}
}

// setDevices counts the devices of the lists that replace those before.
func (m *metrics) setDevices(before, lists map[string]*listing) {
	for resource := range before {
		if lists[resource] == nil {
			m.devices.DeletePartialMatch(prometheus.Labels{"resource": resource})
		}
	}
	for resource, l := range lists {
		set := func(s state, count int) { m.devices.WithLabelValues(resource, string(s)).Set(float64(count)) }
		set(stateHealthy, len(l.healthy))
		set(stateWithdrawn, len(l.withdrawn))
		set(stateUnhealthy, len(l.response.GetDevices())-len(l.healthy)-len(l.withdrawn))
	}
}
