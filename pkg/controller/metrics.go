// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// nodeSum is a gauge of the sum of one number for each node. It is safe for concurrent use.
type nodeSum struct {
	prometheus.Gauge
	mu    sync.Mutex
	nodes map[string]int
}

func newNodeSum(factory promauto.Factory, name, help string) *nodeSum {
	return &nodeSum{Gauge: factory.NewGauge(prometheus.GaugeOpts{Name: name, Help: help}), nodes: map[string]int{}}
}

// set records the number of a node.
func (s *nodeSum) set(node string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Add(float64(n - s.nodes[node]))
	if s.nodes[node] = n; n == 0 {
		delete(s.nodes, node)
	}
}

type metrics struct {
	evictions      *prometheus.CounterVec
	notMovable     *nodeSum
	retries        prometheus.Counter
	patches        *prometheus.CounterVec
	openings       prometheus.Counter
	daemonPods     *prometheus.CounterVec
	daemonsWaiting *nodeSum
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
	return &metrics{
		evictions: counter("tandem_controller_evictions_total",
			"Evictions of pods whose claim is in conflict: evicted, or refused by a disruption budget.", "result", "evicted", "refused"),
		notMovable: newNodeSum(factory, "tandem_controller_pending_evictions_not_movable",
			"Claims pending eviction whose pods cannot be evicted because one of them has started or has no owner."),
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
		daemonsWaiting: newNodeSum(factory, "tandem_controller_daemons_not_running",
			"MPS daemons that a node requests and whose pod does not run; GPUNode.spec.daemons contains the reason."),
	}
}
