// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"testing"
)

// TestKubectlGPUInspect: inspect runs in the agent's container, through kubelet.
func TestKubectlGPUInspect(t *testing.T) {
	s := begin(t)
	report, err := s.KubectlGPU(s.BuildPlugin(), "inspect", gpuNode)
	if err != nil || !strings.Contains(report, "what the agent finds on this node") || !strings.Contains(report, "Calls of NVML") {
		t.Errorf("inspect: %v\n%s", err, report)
	}
}
