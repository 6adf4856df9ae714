// SPDX-License-Identifier: Apache-2.0

package health

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// A rate or an increase sees the first reset only where there was a zero before.
func TestMetricsBeginAtZero(t *testing.T) {
	registry := prometheus.NewRegistry()
	newMetrics(registry)
	if n, err := testutil.GatherAndCount(registry, "tandem_gpu_fault_resets_total"); err != nil || n != 2 {
		t.Errorf("tandem_gpu_fault_resets_total has %d series, want 2 (%v)", n, err)
	}
}
