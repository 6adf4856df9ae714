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
