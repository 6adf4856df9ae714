// SPDX-License-Identifier: Apache-2.0

// Metrics of Prepare and of slices.

package driver

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

type metrics struct {
	prepare, unprepare *prometheus.HistogramVec
	conflicts          *prometheus.CounterVec
	podsFirst          prometheus.Histogram
	withdrawals        prometheus.Counter
	devices            *prometheus.GaugeVec
	publishErrors      prometheus.Counter
	registrations      prometheus.Counter
	strictRefusals     prometheus.Counter
}

func newMetrics(registerer prometheus.Registerer) *metrics {
	factory := promauto.With(registerer)
	counter := func(name, help string) prometheus.Counter {
		return factory.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	calls := func(name, help string) *prometheus.HistogramVec {
		// Seconds, from 0.5 ms to kubelet's timeout of 45 s and beyond; kubelet's own start at 100 ms.
		buckets := []float64{.0005, .001, .002, .004, .008, .016, .032, .064, .125, .25, .5, 1, 2, 4, 8, 15, 30, 45, 60}
		h := factory.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, []string{"result"})
		for _, result := range []string{"ok", "error"} {
			h.WithLabelValues(result) // starts at zero, so that the first call is an increase
		}
		return h
	}
	return &metrics{
		prepare: calls("tandem_prepare_duration_seconds",
			"Time to answer kubelet's NodePrepareResources, claim lookup and waiting for devices included."),
		unprepare: calls("tandem_unprepare_duration_seconds", "Time to answer kubelet's NodeUnprepareResources."),
		conflicts: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_prepare_conflicts_total",
			Help: "Claims refused because of one of their devices, by what keeps it from them and by outcome. What keeps it is the kind of another holder (claim, pod), a partition that Tandem did not create (partition), or the device itself, which is unhealthy or unknown (device). The outcome is pending_eviction (the claim's pods are evicted), waiting (for the device), or deadline (the holder was ending, but not in time).",
		}, []string{"kind", "outcome"}),
		podsFirst: factory.NewHistogram(prometheus.HistogramOpts{
			Name:    "tandem_prepare_pods_first_wait_seconds",
			Help:    "Time that calls of NodePrepareResources waited for pods with an extended resource to be admitted first; calls that did not wait are not counted.",
			Buckets: []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2}, // up to podsFirstBudget
		}),
		withdrawals: counter("tandem_claim_withdrawals_total", "Times that a device was withdrawn from the scheduler because of its holder."),
		devices: factory.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tandem_published_devices",
			Help: "Devices of the node as last published to the scheduler, by state: offered, withdrawn (held by a pod, or draining), unhealthy, excluded (cannot be published). A dynamic GPU counts as one device.",
		}, []string{"state"}),
		publishErrors:  counter("tandem_publish_errors_total", "Errors while writing ResourceSlices. They are retried."),
		registrations:  counter("tandem_dra_registrations_total", "Times that kubelet registered the DRA driver."),
		strictRefusals: counter("tandem_strict_refusals_total", "Allocations refused before their pods were bound, because another holder has a device."),
	}
}

func (m *metrics) countDevices(c deviceCounts) {
	for state, n := range map[string]int{"offered": c.offered, "withdrawn": c.withdrawn, "unhealthy": c.unhealthy, "excluded": c.excluded} {
		m.devices.WithLabelValues(state).Set(float64(n))
	}
	m.withdrawals.Add(float64(c.withdrawals))
}

func observe(h *prometheus.HistogramVec, start time.Time, ok bool) {
	result := "ok"
	if !ok {
		result = "error"
	}
	h.WithLabelValues(result).Observe(time.Since(start).Seconds())
}
