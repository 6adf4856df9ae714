// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	allocate  prometheus.Histogram
	preferred prometheus.Histogram
	conflicts prometheus.Counter
	devices   *prometheus.GaugeVec
	excluded  prometheus.Gauge
	// resources are those that devices has; only setDevices uses it, one call at a time.
	resources     []string
	withdrawals   prometheus.Counter
	registrations *prometheus.CounterVec
}

func newMetrics() *metrics {
	buckets := prometheus.ExponentialBucketsRange(0.0001, 10, 16)
	return &metrics{
		allocate: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "tandem_allocate_duration_seconds", Buckets: buckets,
			Help: "Time to answer an Allocate of kubelet's device manager, refusals included.",
		}),
		preferred: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "tandem_preferred_allocation_duration_seconds", Buckets: buckets,
			Help: "Time to answer a GetPreferredAllocation of kubelet's device manager.",
		}),
		conflicts: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tandem_allocate_conflicts_total",
			Help: "Allocate calls refused because another holder has the device.",
		}),
		devices: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tandem_device_plugin_devices",
			Help: "Devices in the list sent to kubelet: healthy ones, unhealthy ones, and those withdrawn because a claim has " +
				"them, is allocated them or waits for them, or a pod that is ending holds them, or they are not shared yet as the node's " +
				"policy says.",
		}, []string{"resource", "state"}),
		excluded: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "tandem_device_plugin_devices_excluded",
			Help: "Devices that limits have no resource for, such as a partition of another profile where all must be alike, or a GPU " +
				"that only claims share by MPS.",
		}),
		withdrawals: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tandem_device_plugin_withdrawals_total",
			Help: "Healthy devices that were withdrawn from kubelet's device manager.",
		}),
		registrations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_device_plugin_registrations_total",
			Help: "Successful registrations with kubelet's device manager, by what made them necessary.",
		}, []string{"reason"}),
	}
}

func (m *metrics) register(registerer prometheus.Registerer) (unregister func(), err error) {
	var done []prometheus.Collector
	unregister = func() {
		for _, c := range done {
			registerer.Unregister(c)
		}
	}
	for _, c := range []prometheus.Collector{
		m.allocate, m.preferred, m.conflicts, m.devices, m.excluded, m.withdrawals, m.registrations,
	} {
		if err := registerer.Register(c); err != nil {
			unregister()
			return nil, err
		}
		done = append(done, c)
	}
	return unregister, nil
}

func (m *metrics) setDevices(states map[string][]state, excluded int) {
	for _, resource := range m.resources {
		if _, still := states[resource]; !still {
			m.devices.DeletePartialMatch(prometheus.Labels{"resource": resource})
		}
	}
	m.resources = slices.Collect(maps.Keys(states))
	for resource, of := range states {
		count := map[state]int{stateHealthy: 0, stateUnhealthy: 0, stateWithdrawn: 0}
		for _, s := range of {
			count[s]++
		}
		for s, n := range count {
			m.devices.WithLabelValues(resource, string(s)).Set(float64(n))
		}
	}
	m.excluded.Set(float64(excluded))
}
