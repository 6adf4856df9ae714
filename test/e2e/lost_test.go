// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// simulatedMachine is where the chart makes the simulated machine of a node.
const simulatedMachine = "/run/nvidia/simulated"

// withdrawn reports whether exactly these GPUs of the node are not offered to claims.
func (s *story) withdrawn(gpus ...int) error {
	want := map[string]bool{}
	for gpu := range gpusANode {
		if !slices.Contains(gpus, gpu) {
			want[fmt.Sprintf("gpu-%d", gpu)] = true
		}
	}
	list, err := theClient.ResourceV1().ResourceSlices().List(s.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + gpuNode})
	if err != nil {
		return err
	}
	offered := map[string]bool{}
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			if len(d.Taints) == 0 {
				offered[d.Name] = true
			}
		}
	}
	if !maps.Equal(offered, want) {
		return fmt.Errorf("claims are offered %v, not %v", slices.Sorted(maps.Keys(offered)), slices.Sorted(maps.Keys(want)))
	}
	return nil
}
