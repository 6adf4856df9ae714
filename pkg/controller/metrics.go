// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// setNode records the number of a node. It removes the series of a node whose number is zero.
func setNode(gauge *prometheus.GaugeVec, node string, n int) {
	if n == 0 {
		gauge.DeleteLabelValues(node)
		return
	}
	gauge.WithLabelValues(node).Set(float64(n))
}

const (
	causeConflict, causeTaint    = "conflict", "taint"
	resultEvicted, resultRefused = "evicted", "refused"
)

// evicted counts an eviction, if there was one or the API server refused it.
func (m *metrics) evicted(cause string, evicted bool, refused error) {
	switch {
	case evicted:
		m.evictions.WithLabelValues(cause, resultEvicted).Inc()
	case refused != nil:
		m.evictions.WithLabelValues(cause, resultRefused).Inc()
	}
}

type metrics struct {
	evictions      *prometheus.CounterVec
	notMovable     *prometheus.GaugeVec
	retries        prometheus.Counter
	patches        *prometheus.CounterVec
	openings       prometheus.Counter
	daemonPods     *prometheus.CounterVec
	daemonsWaiting *prometheus.GaugeVec
}

// newMetrics panics if the metrics are registered already.
func newMetrics(registerer prometheus.Registerer) *metrics {
	factory := promauto.With(registerer)
	counter := func(name, help, label string, values ...string) *prometheus.CounterVec {
		c := factory.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
		for _, value := range values {
			c.WithLabelValues(value) // starts at zero, so that the first event is an increase
		}
		return c
	}
	evictions := factory.NewCounterVec(prometheus.CounterOpts{
		Name: "tandem_controller_evictions_total",
		Help: "Evictions of pods because their claim is in conflict (cause conflict), or because they have a GPU by a limit that has a taint with effect " +
			"NoExecute (cause taint): evicted, or refused by a disruption budget or an admission policy.",
	}, []string{"cause", "result"})
	for _, cause := range []string{causeConflict, causeTaint} {
		for _, result := range []string{resultEvicted, resultRefused} {
			evictions.WithLabelValues(cause, result)
		}
	}
	perNode := func(name, help string) *prometheus.GaugeVec {
		return factory.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, []string{"node"})
	}
	return &metrics{
		evictions: evictions,
		notMovable: perNode("tandem_controller_pending_evictions_not_movable",
			"Claims pending eviction whose pods cannot be evicted because one of them has started or has no owner that is known to replace it."),
		retries: factory.NewCounter(prometheus.CounterOpts{
			Name: "tandem_controller_retries_total",
			Help: "Pods annotated so that kubelet prepares their claims again at once.",
		}),
		patches: counter("tandem_controller_allocatable_patches_total",
			"Patches of a node's allocatable devices: down, up, or refused because kubelet changed the number meanwhile.",
			"result", "down", "up", "refused"),
		openings: factory.NewCounter(prometheus.CounterOpts{
			Name: "tandem_controller_breaker_openings_total",
			Help: "Times that a node's allocatable devices were set to zero because kubelet rejected one pod after the other.",
		}),
		daemonPods: counter("tandem_controller_daemon_pods_total",
			"Pods of MPS daemons: created, or deleted because the node no longer requests them or requests other settings.",
			"action", "created", "deleted"),
		daemonsWaiting: perNode("tandem_controller_daemons_not_running",
			"MPS daemons that a node requests and whose pod does not run; GPUNode.spec.daemons contains the reason."),
	}
}
