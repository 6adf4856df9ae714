// SPDX-License-Identifier: Apache-2.0

package e2e

const (
	gpuNodesPath    = "/apis/tandem-gpu.dev/v1alpha1/gpunodes"
	controllerLabel = "app.kubernetes.io/component=controller"
)
