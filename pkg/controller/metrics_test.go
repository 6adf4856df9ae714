// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// An alert on an increase sees the first eviction only where there was a zero before.
func TestMetricsBeginAtZero(t *testing.T) {
	registry := prometheus.NewRegistry()
	newMetrics(registry)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	series := map[string]int{}
	for _, f := range families {
		series[f.GetName()] = len(f.GetMetric())
	}
	if series["tandem_controller_evictions_total"] != 2 || series["tandem_controller_allocatable_patches_total"] != 3 {
		t.Errorf("series %v", series)
	}
}
