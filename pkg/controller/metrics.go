// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// nodeSum is a gauge of the sum of one number for each node. It is safe for concurrent use.
type nodeSum struct {
	prometheus.Gauge
	mu    sync.Mutex
	nodes map[string]int
}

func newNodeSum(options prometheus.GaugeOpts) *nodeSum {
	return &nodeSum{Gauge: prometheus.NewGauge(options), nodes: map[string]int{}}
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
	evictions  *prometheus.CounterVec
	notMovable *nodeSum
	retries    prometheus.Counter
	patches    *prometheus.CounterVec
	openings   prometheus.Counter

	daemonPods     *prometheus.CounterVec
	daemonsWaiting *nodeSum
}

func newMetrics(registerer prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		evictions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_controller_evictions_total",
			Help: "Evictions of pods whose claim is in conflict: evicted, or refused by a disruption budget.",
		}, []string{"result"}),
		notMovable: newNodeSum(prometheus.GaugeOpts{
			Name: "tandem_controller_pending_evictions_not_movable",
			Help: "Claims pending eviction whose pods cannot be evicted because one of them has started or has no owner.",
		}),
		retries: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tandem_controller_retries_total",
			Help: "Pods annotated so that kubelet prepares their claims again at once.",
		}),
		patches: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_controller_allocatable_patches_total",
			Help: "Patches of a node's allocatable devices: down, up, or refused because kubelet changed the number meanwhile.",
		}, []string{"result"}),
		openings: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tandem_controller_breaker_openings_total",
			Help: "Times that a node's allocatable devices were set to zero because kubelet rejected one pod after the other.",
		}),
		daemonPods: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_controller_daemon_pods_total",
			Help: "Pods of MPS daemons: created, or deleted because the node no longer requests them or requests other settings.",
		}, []string{"action"}),
		daemonsWaiting: newNodeSum(prometheus.GaugeOpts{
			Name: "tandem_controller_daemons_not_running",
			Help: "MPS daemons that a node requests and whose pod does not run; GPUNode.spec.daemons contains the reason.",
		}),
	}
	// Start at zero, so that the first event is an increase.
	for counter, results := range map[*prometheus.CounterVec][]string{
		m.evictions: {"evicted", "refused"}, m.patches: {"down", "up", "refused"}, m.daemonPods: {"created", "deleted"},
	} {
		for _, result := range results {
			counter.WithLabelValues(result)
		}
	}
	for _, c := range []prometheus.Collector{m.evictions, m.notMovable, m.retries, m.patches, m.openings, m.daemonPods, m.daemonsWaiting} {
		if err := registerer.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return m, nil
}
