// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// A rate or an increase sees the first call only where there was a zero before.
func TestMetricsBeginAtZero(t *testing.T) {
	registry := prometheus.NewRegistry()
	newMetrics(registry)
	for _, name := range []string{"tandem_prepare_duration_seconds", "tandem_unprepare_duration_seconds"} {
		if n, err := testutil.GatherAndCount(registry, name); err != nil || n != 2 {
			t.Errorf("%s has %d series, want 2 (%v)", name, n, err)
		}
	}
}
