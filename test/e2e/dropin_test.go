// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/hack/gotool"
)

// label sets a label of the node until the story ends.
func (s *story) label(key, value string) {
	s.Helper()
	s.undo(func() error {
		_, err := theCluster.Kubectl(context.WithoutCancel(s.ctx), "label", "node", gpuNode, key+"-")
		return err
	})
	s.kubectl("label", "node", gpuNode, "--overwrite", key+"="+value)
}

// TestConfigurationByLabel: a node's label selects one of several configurations, while pods of both kinds run.
func TestConfigurationByLabel(t *testing.T) {
	const label = "nvidia.com/device-plugin.config"
	s := begin(t)
	s.installed("config-by-label.values.yaml")
	s.served("Dual", gpusANode, gpusANode)
	gpus := s.occupy()
	containers, agents := s.containers(), s.agentRestarts()

	s.label(label, "limits-only")
	s.served("DevicePluginOnly", 6, 0)
	s.unchanged(containers, gpus)
	// The next agent does the same.
	s.killAgent()
	s.served("DevicePluginOnly", 6, 0)
	agents++

	s.label(label, "absent")
	s.event("Node", gpuNode, "ConfigRejected", label+"=absent", "only default, index, limits-only")
	s.served("DevicePluginOnly", 6, 0)

	s.label(label, "index")
	s.served("Dual", 6, 6)
	s.event("Node", gpuNode, "ConfigWithoutEffect", "flags.failOnInitError: the agent waits for the driver")
	s.unchanged(containers, gpus)

	s.kubectl("label", "node", gpuNode, label+"-")
	s.served("Dual", 6, 6)
	s.unchanged(containers, gpus)
	s.wantHolds(2, 2)
	if now := s.agentRestarts(); now != agents {
		t.Errorf("the agents' containers restarted %d times, not %d", now, agents)
	}
}

// TestValuesOfNVIDIAsCharts: the values files of NVIDIA's charts, unchanged but for the image, install Tandem, and pods of both kinds run.
func TestValuesOfNVIDIAsCharts(t *testing.T) {
	s := begin(t)
	dir, err := gotool.ModuleDir(s.ctx, "github.com/NVIDIA/k8s-device-plugin/api/config/v1")
	if err != nil {
		t.Fatal(err)
	}
	s.label("nvidia.com/gpu.present", "true") // the files' affinity
	for _, file := range []string{
		filepath.Join(dir, "deployments/helm/nvidia-device-plugin/values.yaml"),
		filepath.Join("..", "dropin/testdata/dra-driver.values.yaml"),
	} {
		s.installedFrom(file)
		s.served("Dual", gpusANode, gpusANode)
	}
	s.example("limits.yaml")
	s.example("claim-template.yaml")
	s.running(soon, 2, 0)
	s.wantHolds(1, 2)
	s.noDoubleOwners()
}
