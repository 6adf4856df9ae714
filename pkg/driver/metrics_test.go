// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// A rate or an increase sees the first call only where there was a zero before.
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
	for _, name := range []string{"tandem_prepare_duration_seconds", "tandem_unprepare_duration_seconds"} {
		if series[name] != 2 {
			t.Errorf("%s has %d series, want 2: %v", name, series[name], series)
		}
	}
}
