// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/kubectlgpu"
)

// buildPlugin returns the path of the plugin.
func (s *story) buildPlugin() string {
	s.Helper()
	program, err := kubectlgpu.Build(s.ctx, s.TempDir())
	if err != nil {
		s.Fatal(err)
	}
	return program
}

func (s *story) kubectlGPU(program string, args ...string) (string, error) {
	return kubectlgpu.Run(s.ctx, theCluster, program, args...)
}

// TestKubectlGPUInspect: inspect runs in the agent's container, through kubelet.
func TestKubectlGPUInspect(t *testing.T) {
	s := begin(t)
	report, err := s.kubectlGPU(s.buildPlugin(), "inspect", gpuNode)
	if err != nil || !strings.Contains(report, "what the agent finds on this node") || !strings.Contains(report, "Calls of NVML") {
		t.Errorf("inspect: %v\n%s", err, report)
	}
}
