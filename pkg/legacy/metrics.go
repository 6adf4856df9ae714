// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

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
			Help: "Devices in the list sent to kubelet: healthy ones, unhealthy ones, and those withdrawn because a claim has " +
				"them, is allocated them or waits for them, or a pod that is ending holds them, or they are not shared yet as the node's " +
				"policy says.",
		}, []string{"resource", "state"}),
		excluded: factory.NewGauge(prometheus.GaugeOpts{
			Name: "tandem_device_plugin_devices_excluded",
			Help: "Devices that limits have no resource for, such as a partition of another profile where all must be alike, or a GPU " +
				"that only claims share by MPS.",
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
