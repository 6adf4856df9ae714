// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/install"
)

const (
	gpuNodesPath    = "/apis/tandem-gpu.dev/v1alpha1/gpunodes"
	controllerLabel = "app.kubernetes.io/component=controller"
)

// controllerPod is the one that leads, or waits to.
func (s *story) controllerPod() corev1.Pod {
	s.Helper()
	list, err := theClient.CoreV1().Pods(install.Namespace).List(s.ctx, metav1.ListOptions{LabelSelector: controllerLabel})
	if err != nil {
		s.Fatal(err)
	}
	if len(list.Items) == 0 {
		s.Fatal("no pod of the controller")
	}
	return list.Items[0]
}
