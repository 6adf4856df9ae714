// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/tandem-gpu/tandem/internal/version"
)

func newMetrics() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	build := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "tandem_build_info", Help: "Version and commit of the running agent; always 1.",
	}, []string{"version", "commit"})
	build.WithLabelValues(version.Version, version.Commit).Set(1)
	registry.MustRegister(build)
	return registry
}
