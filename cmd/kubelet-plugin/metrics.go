// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/tandem-gpu/tandem/internal/version"
)

// metrics are those of the wiring itself.
type metrics struct {
	*prometheus.Registry
	modes    *prometheus.GaugeVec
	rejected prometheus.Gauge
}

func newMetrics() metrics {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	build := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "tandem_build_info", Help: "Version and commit of the running agent; always 1.",
	}, []string{"version", "commit"})
	build.WithLabelValues(version.Version, version.Commit).Set(1)
	modes := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "tandem_mode", Help: "Mode in which the node is served (Dual, ClaimsOnly, DevicePluginOnly, Split); 1 for the one it is.",
	}, []string{"mode"})
	rejected := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "tandem_config_rejected", Help: "1 while the newest configuration of the node (file and label) is wrong and the one before is in use.",
	})
	registry.MustRegister(build, modes, rejected)
	return metrics{Registry: registry, modes: modes, rejected: rejected}
}
