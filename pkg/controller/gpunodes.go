// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

var gpuNodeDescription = prometheus.NewDesc("tandem_controller_gpunode",
	"1 for each node whose GPUNode lists a GPU. If such a node has no metric tandem_config_rejected, its agent does not answer.", []string{"node"}, nil)

// gpuNodes reports the nodes with GPUs when metrics are collected: an alert compares them with the agents that answer. GPUNodes stay when
// an agent ends. It reports none until the caches are filled.
type gpuNodes struct {
	cache  client.Reader
	synced func() bool
}

func (g gpuNodes) Describe(descriptions chan<- *prometheus.Desc) { descriptions <- gpuNodeDescription }

func (g gpuNodes) Collect(metrics chan<- prometheus.Metric) {
	if !g.synced() {
		return
	}
	var list v1alpha1.GPUNodeList
	if err := g.cache.List(context.Background(), &list, client.UnsafeDisableDeepCopy); err != nil {
		metrics <- prometheus.NewInvalidMetric(gpuNodeDescription, err)
		return
	}
	for _, node := range list.Items {
		if len(node.Status.Devices) > 0 {
			metrics <- prometheus.MustNewConstMetric(gpuNodeDescription, prometheus.GaugeValue, 1, node.Name)
		}
	}
}
