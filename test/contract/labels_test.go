// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/hack/install"
)

// TestNodeLabels: the node has the labels of GPU Feature Discovery while Tandem is installed. They follow configuration and partitions. Another
// field manager keeps its labels.
func TestNodeLabels(t *testing.T) {
	const last, product = "7", "NVIDIA-H100-80GB-HBM3"
	s := begin(t)
	s.HasLabels(map[string]string{
		"gpu.product": product, "gpu.count": "8", "gpu.replicas": "1", "gpu.family": "hopper", "gpu.memory": "81559", "mig.capable": "true",
		"cuda.driver-version.full": "580.95.05", "mig.strategy": "", "gfd.timestamp": "",
	})

	s.Installed("mig-limits.values.yaml", "gfd.sleepInterval=1s",
		"config.sharing.timeSlicing.resources[0].name=nvidia.com/gpu", "config.sharing.timeSlicing.resources[0].replicas=4")
	s.HasLabels(map[string]string{"mig.strategy": "mixed", "gpu.product": product + "-SHARED", "gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing"})
	t.Cleanup(func() { s.Uncut(gpusANode - 1) })
	s.Administer("-i", last, "-mig", "1")
	s.Administer("mig", "-i", last, "-cgi", "1g.10gb,1g.10gb", "-C")
	s.HasLabels(map[string]string{"mig-1g.10gb.count": "2", "mig-1g.10gb.product": product + "-MIG-1g.10gb"})

	// A label that was removed comes back.
	s.Kubectl("label", "node", gpuNode, "nvidia.com/gpu.product-")
	s.HasLabels(map[string]string{"gpu.product": product + "-SHARED"})

	// Another owner of one label has them all.
	s.Kubectl("label", "node", gpuNode, "--field-manager=gfd", "--overwrite", "nvidia.com/gpu.product=theirs")
	removeTheirs := s.Undo(func() error {
		_, err := theCluster.Kubectl(theContext, "label", "node", gpuNode, "nvidia.com/gpu.product-")
		return err
	})
	s.Event("Node", gpuNode, "NodeLabelsNotWritten", "field manager gfd owns the label nvidia.com/gpu.product")
	s.HasLabels(map[string]string{"gpu.product": "theirs", "gpu.count": "", "mig-1g.10gb.count": ""})
	removeTheirs()
	s.HasLabels(map[string]string{"gpu.product": product + "-SHARED", "mig-1g.10gb.count": "2"})

	s.Uncut(gpusANode - 1)
	s.HasLabels(map[string]string{"mig-1g.10gb.count": "", "mig.strategy": "mixed"})
	if err := install.Uninstall(s.Ctx, theCluster, s.Options(install.Options{})); err != nil {
		t.Fatal(err)
	}
	s.HasLabels(map[string]string{"gpu.product": "", "gpu.count": "", "mig.strategy": ""})
	if left := s.OwnedLabels(); len(left) > 0 {
		t.Errorf("labels are left:\n%s", strings.Join(left, "\n"))
	}
}

// TestNodeLabelsDisabled: agents without node labels remove those that earlier agents wrote.
func TestNodeLabelsDisabled(t *testing.T) {
	s := begin(t)
	s.HasLabels(map[string]string{"gpu.count": "8"})
	s.Installed("mig-limits.values.yaml", "gfd.enabled=false")
	s.HasLabels(map[string]string{"gpu.count": "", "gpu.product": "", "mig.strategy": ""})
}
