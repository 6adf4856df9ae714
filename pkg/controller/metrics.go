// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	evictions  *prometheus.CounterVec
	notMovable prometheus.Gauge
	retries    prometheus.Counter
	patches    *prometheus.CounterVec
	openings   prometheus.Counter

	daemonPods     *prometheus.CounterVec
	daemonsWaiting prometheus.Gauge
}

func newMetrics(registerer prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		evictions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_controller_evictions_total",
			Help: "Evictions of pods whose claim is in conflict: evicted, or refused by a disruption budget.",
		}, []string{"result"}),
		notMovable: prometheus.NewGauge(prometheus.GaugeOpts{
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
		daemonsWaiting: prometheus.NewGauge(prometheus.GaugeOpts{
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
