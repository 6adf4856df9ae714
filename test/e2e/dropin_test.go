// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/hack/gotool"
)

// TestValuesOfNVIDIAsCharts: the values files of NVIDIA's charts, unchanged but for the image, install Tandem, and pods of both kinds run.
func TestValuesOfNVIDIAsCharts(t *testing.T) {
	s := begin(t)
	dir, err := gotool.ModuleDir(s.Ctx, "github.com/NVIDIA/k8s-device-plugin/api/config/v1")
	if err != nil {
		t.Fatal(err)
	}
	s.Label("nvidia.com/gpu.present", "true") // the files' affinity
	for _, file := range []string{
		filepath.Join(dir, "deployments/helm/nvidia-device-plugin/values.yaml"),
		filepath.Join("..", "dropin/testdata/dra-driver.values.yaml"),
	} {
		s.InstalledFrom(file)
		s.Served("Dual", gpusANode, gpusANode)
	}
	s.Example("limits.yaml")
	s.Example("claim-template.yaml")
	s.Running(soon, 2, 0)
	s.WantHolds(1, 2)
	s.NoDoubleOwners()
}
