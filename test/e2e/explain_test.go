// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"regexp"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/cli/overview"
)

// explains waits until the list of waiting pods has a reason for a pending pod that matches the pattern.
func (s *story) explains(pod corev1.Pod, pattern string) {
	s.Helper()
	s.Await(soon, "a reason why pod "+pod.Name+" waits", func() error { return s.checkReason(&pod, pattern) })
}

// checkReason returns an error if the list of waiting pods has no reason for the pod that matches the pattern.
func (s *story) checkReason(pod *corev1.Pod, pattern string) error {
	reason, err := s.explanation(pod)
	if err == nil && !regexp.MustCompile(pattern).MatchString(reason) {
		err = fmt.Errorf("pod %s: the reason is %q, want %s", pod.Name, reason, pattern)
	}
	return err
}

// explanation is that of the list of waiting pods, on a cluster of the nodes that may run the pod.
func (s *story) explanation(pod *corev1.Pod) (string, error) {
	list, err := theClient.CoreV1().Nodes().List(s.Ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	mayRun := explain.MayRun(pod)
	var nodes []v1alpha1.GPUNode
	for i := range list.Items {
		if !mayRun(&list.Items[i]) {
			continue
		}
		node, err := s.GPUNodeOf(list.Items[i].Name)
		if err != nil {
			return "", err
		}
		nodes = append(nodes, node)
	}
	queue := explain.NewQueue(nodes)
	queue.Know(overview.NewObjects(overview.Cluster{Client: theClient, DriverName: "gpu.nvidia.com"}).Of(s.Ctx, []*corev1.Pod{pod}))
	return queue.Reason(pod), nil
}
