// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

type metrics struct {
	writes *prometheus.CounterVec
	served prometheus.Gauge
}

func newMetrics(registerer prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_gpunode_writes_total",
			Help: "Requests to change this node's GPUNode (create, status, delete) by result: ok, conflict (another client wrote first), error.",
		}, []string{"operation", "result"}),
		served: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "tandem_gpunode_served",
			Help: "1 while the API server serves GPUNodes to this agent, 0 while it does not: " +
				"GPUs allocated to claims are then withdrawn from pods only once they are prepared.",
		}),
	}
	if err := registerer.Register(m.writes); err != nil {
		return nil, err
	}
	return m, registerer.Register(m.served)
}

func (m *metrics) wrote(operation string, err error) {
	result := "ok"
	switch {
	case apierrors.IsConflict(err):
		result = "conflict"
	case err != nil:
		result = "error"
	}
	m.writes.WithLabelValues(operation, result).Inc()
}
