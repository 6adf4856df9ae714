// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	evictions  *prometheus.CounterVec
	heal       prometheus.Histogram
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
			Help: "Evictions of pods whose claim lost its GPU to another holder: done, or refused by a disruption budget.",
		}, []string{"result"}),
		heal: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "tandem_controller_heal_seconds",
			Help: "Time from a claim's conflict being final until a pod that its evicted pod's owner made afterwards runs.",
			// From 1 ms: how late is of interest, and how early shows what was measured wrongly.
			Buckets: []float64{.001, .01, .05, .1, .25, .5, .75, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 15, 30, 60, 120, 300},
		}),
		notMovable: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "tandem_controller_pending_evictions_not_movable",
			Help: "Condemned claims whose pods may not be evicted: one of them runs, or belongs to nobody who would make another.",
		}),
		retries: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tandem_controller_retries_total",
			Help: "Pods annotated so that kubelet tries at once to prepare their claims again.",
		}),
		patches: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_controller_allocatable_patches_total",
			Help: "Patches of a node's allocatable GPUs: down, up, or refused because kubelet has changed them meanwhile.",
		}, []string{"result"}),
		openings: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tandem_controller_breaker_openings_total",
			Help: "Times that a node was offered nothing by limits for a while because it turned away one pod after the other.",
		}),
		daemonPods: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_controller_daemon_pods_total",
			Help: "Pods of MPS daemons: created, or deleted because nobody wants them any more, or not as they are.",
		}, []string{"action"}),
		daemonsWaiting: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "tandem_controller_daemons_not_running",
			Help: "MPS daemons that a node wants and whose pod does not run; GPUNode.spec.daemons says why.",
		}),
	}
	// What has not happened yet is zero, and the first time is an increase.
	for counter, results := range map[*prometheus.CounterVec][]string{
		m.evictions: {"evicted", "refused"}, m.patches: {"down", "up", "refused"}, m.daemonPods: {"created", "deleted"},
	} {
		for _, result := range results {
			counter.WithLabelValues(result)
		}
	}
	for _, c := range []prometheus.Collector{m.evictions, m.heal, m.notMovable, m.retries, m.patches, m.openings, m.daemonPods, m.daemonsWaiting} {
		if err := registerer.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return m, nil
}
