// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// callBuckets are seconds, from 0.5 ms to kubelet's patience and beyond; kubelet's own start at 100 ms.
var callBuckets = []float64{.0005, .001, .002, .004, .008, .016, .032, .064, .125, .25, .5, 1, 2, 4, 8, 15, 30, 45, 60}

// podsFirstBuckets go up to podsFirstBudget.
var podsFirstBuckets = []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2}

type metrics struct {
	prepare, unprepare *prometheus.HistogramVec
	conflicts          *prometheus.CounterVec
	yield              prometheus.Histogram
	withdrawals        prometheus.Counter
	devices            *prometheus.GaugeVec
	publishErrors      prometheus.Counter
	registrations      prometheus.Counter
	strictRefusals     prometheus.Counter
}

func newMetrics(registerer prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		prepare: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "tandem_prepare_duration_seconds",
			Help:    "Time to answer kubelet's NodePrepareResources, claim lookup and waiting for devices included.",
			Buckets: callBuckets,
		}, []string{"result"}),
		unprepare: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "tandem_unprepare_duration_seconds",
			Help:    "Time to answer kubelet's NodeUnprepareResources.",
			Buckets: callBuckets,
		}, []string{"result"}),
		conflicts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_prepare_conflicts_total",
			Help: "Claims refused because somebody else holds one of their devices, by the kind of holder (claim, limit) and by what becomes of the claim: condemned (its pods are moved), waiting, deadline (waiting for a holder that has not gone in time).",
		}, []string{"kind", "outcome"}),
		yield: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "tandem_prepare_pods_first_wait_seconds",
			Help:    "Time that calls of NodePrepareResources waited for limits pods to be admitted first; calls that did not wait are not counted.",
			Buckets: podsFirstBuckets,
		}),
		withdrawals: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tandem_claim_withdrawals_total",
			Help: "Times that a device was withdrawn from the scheduler because of who holds it.",
		}),
		devices: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tandem_published_devices",
			Help: "Devices of the node as last published to the scheduler, of a GPU that is partitioned on demand one: offered, withdrawn (held through a limit, or draining), unhealthy, excluded (cannot be published).",
		}, []string{"state"}),
		publishErrors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tandem_publish_errors_total",
			Help: "Errors while writing ResourceSlices. They are retried.",
		}),
		registrations: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tandem_dra_registrations_total",
			Help: "Times that kubelet registered the DRA driver.",
		}),
		strictRefusals: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tandem_strict_refusals_total",
			Help: "Allocations refused before their pods were bound, because somebody else holds a device.",
		}),
	}
	for _, c := range []prometheus.Collector{m.prepare, m.unprepare, m.conflicts, m.yield, m.withdrawals, m.devices, m.publishErrors, m.registrations, m.strictRefusals} {
		if err := registerer.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return m, nil
}

func (m *metrics) countDevices(c deviceCounts) {
	m.devices.WithLabelValues("offered").Set(float64(c.offered))
	m.devices.WithLabelValues("withdrawn").Set(float64(c.withdrawn))
	m.devices.WithLabelValues("unhealthy").Set(float64(c.unhealthy))
	m.devices.WithLabelValues("excluded").Set(float64(c.excluded))
	m.withdrawals.Add(float64(c.withdrawals))
}

// countPodsFirst counts a call that has waited for limits pods.
func (m *metrics) countPodsFirst(waited time.Duration) {
	if waited > 0 {
		m.yield.Observe(waited.Seconds())
	}
}

// observe records a call that began at start.
func observe(h *prometheus.HistogramVec, start time.Time, ok bool) {
	result := "ok"
	if !ok {
		result = "error"
	}
	h.WithLabelValues(result).Observe(time.Since(start).Seconds())
}
