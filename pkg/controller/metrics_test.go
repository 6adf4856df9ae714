// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// An alert on an increase sees the first eviction only where there was a zero before.
func TestMetricsBeginAtZero(t *testing.T) {
	registry := prometheus.NewRegistry()
	newMetrics(registry)
	for name, want := range map[string]int{"tandem_controller_evictions_total": 4, "tandem_controller_allocatable_patches_total": 3} {
		if n, err := testutil.GatherAndCount(registry, name); err != nil || n != want {
			t.Errorf("%s has %d series, want %d (%v)", name, n, want, err)
		}
	}
}

// Only nodes with GPUs need an agent. A GPUNode with GPUs under maintenance outlives its Node.
func TestGPUNodesMetric(t *testing.T) {
	gpu := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}, Status: v1alpha1.GPUNodeStatus{Devices: []v1alpha1.DeviceStatus{{Name: "gpu-0"}}}}
	bare := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "bare"}}
	gone := gpu.DeepCopy()
	gone.Name = "gone"
	node := func(name string) *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }
	w := newWorld(t, interceptor.Funcs{}, &gpu, &bare, gone, node("gpu"), node("bare"))
	synced := false
	registry := prometheus.NewRegistry()
	registry.MustRegister(gpuNodes{cache: w.client, synced: func() bool { return synced }})
	for _, want := range [][]string{nil, {"gpu"}} {
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		var nodes []string
		for _, f := range families {
			for _, m := range f.GetMetric() {
				nodes = append(nodes, m.GetLabel()[0].GetValue())
			}
		}
		if !slices.Equal(nodes, want) {
			t.Errorf("synced %t: got %v, want %v", synced, nodes, want)
		}
		synced = true
	}
}
