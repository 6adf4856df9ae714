// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/pkg/nodelabels"
)

// hasLabels waits until the node has these labels, and does not have those whose value is empty.
func (s *story) hasLabels(want map[string]string) {
	s.Helper()
	s.await(patient, "labels of the node", func() error {
		node, err := theClient.CoreV1().Nodes().Get(s.ctx, gpuNode, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var errs []error
		for key, value := range want {
			if got := node.Labels[nodelabels.Prefix+key]; got != value {
				errs = append(errs, fmt.Errorf("%s is %q, want %q", key, got, value))
			}
		}
		return errors.Join(errs...)
	})
}

// ownedLabels are the labels of all nodes that Tandem owns.
func (s *story) ownedLabels() (owned []string) {
	s.Helper()
	nodes, err := theClient.CoreV1().Nodes().List(s.ctx, metav1.ListOptions{})
	if err != nil {
		s.Fatal(err)
	}
	for _, node := range nodes.Items {
		for _, entry := range node.ManagedFields {
			if entry.Manager == nodelabels.Manager {
				owned = append(owned, node.Name+": "+entry.FieldsV1.GetRawString())
			}
		}
	}
	return owned
}

// TestNodeLabels: the node has the labels of GPU Feature Discovery while Tandem is installed. They follow configuration and partitions. Another
// field manager keeps its labels.
func TestNodeLabels(t *testing.T) {
	const last, product = "7", "NVIDIA-H100-80GB-HBM3"
	s := begin(t)
	s.hasLabels(map[string]string{
		"gpu.product": product, "gpu.count": "8", "gpu.replicas": "1", "gpu.family": "hopper", "gpu.memory": "81559", "mig.capable": "true",
		"cuda.driver-version.full": "580.95.05", "mig.strategy": "", "gfd.timestamp": "",
	})

	s.installed("mig-limits.values.yaml", "gfd.sleepInterval=1s",
		"config.sharing.timeSlicing.resources[0].name=nvidia.com/gpu", "config.sharing.timeSlicing.resources[0].replicas=4")
	s.hasLabels(map[string]string{"mig.strategy": "mixed", "gpu.product": product + "-SHARED", "gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing"})
	t.Cleanup(func() { s.uncut(gpusANode - 1) })
	s.administer("-i", last, "-mig", "1")
	s.administer("mig", "-i", last, "-cgi", "1g.10gb,1g.10gb", "-C")
	s.hasLabels(map[string]string{"mig-1g.10gb.count": "2", "mig-1g.10gb.product": product + "-MIG-1g.10gb"})

	// A label that was removed comes back.
	s.kubectl("label", "node", gpuNode, "nvidia.com/gpu.product-")
	s.hasLabels(map[string]string{"gpu.product": product + "-SHARED"})

	// Another owner of one label has them all.
	s.kubectl("label", "node", gpuNode, "--field-manager=gfd", "--overwrite", "nvidia.com/gpu.product=theirs")
	removeTheirs := s.undo(func() error {
		_, err := theCluster.Kubectl(theContext, "label", "node", gpuNode, "nvidia.com/gpu.product-")
		return err
	})
	s.event("Node", gpuNode, "NodeLabelsNotWritten", "field manager gfd owns the label nvidia.com/gpu.product")
	s.hasLabels(map[string]string{"gpu.product": "theirs", "gpu.count": "", "mig-1g.10gb.count": ""})
	removeTheirs()
	s.hasLabels(map[string]string{"gpu.product": product + "-SHARED", "mig-1g.10gb.count": "2"})

	s.uncut(gpusANode - 1)
	s.hasLabels(map[string]string{"mig-1g.10gb.count": "", "mig.strategy": "mixed"})
	if err := install.Uninstall(s.ctx, theCluster, install.Options{Image: noImage}); err != nil {
		t.Fatal(err)
	}
	s.hasLabels(map[string]string{"gpu.product": "", "gpu.count": "", "mig.strategy": ""})
	if left := s.ownedLabels(); len(left) > 0 {
		t.Errorf("labels are left:\n%s", strings.Join(left, "\n"))
	}
}

// TestNodeLabelsDisabled: agents without node labels remove those that earlier agents wrote.
func TestNodeLabelsDisabled(t *testing.T) {
	s := begin(t)
	s.hasLabels(map[string]string{"gpu.count": "8"})
	s.installed("mig-limits.values.yaml", "gfd.enabled=false")
	s.hasLabels(map[string]string{"gpu.count": "", "gpu.product": "", "mig.strategy": ""})
}
