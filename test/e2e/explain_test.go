// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"regexp"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// explains waits until cli/explain gives a reason for a pending pod that matches the pattern.
func (s *story) explains(pod corev1.Pod, pattern string) {
	s.Helper()
	s.Await(soon, "a reason why pod "+pod.Name+" waits", func() error { return s.checkReason(&pod, pattern) })
}

// checkReason returns an error if cli/explain gives no reason for the pod that matches the pattern.
func (s *story) checkReason(pod *corev1.Pod, pattern string) error {
	reason, err := s.explanation(pod)
	if err == nil && !regexp.MustCompile(pattern).MatchString(reason) {
		err = fmt.Errorf("pod %s: the reason is %q, want %s", pod.Name, reason, pattern)
	}
	return err
}

// explanation reads what cli/explain needs from the API server.
func (s *story) explanation(pod *corev1.Pod) (string, error) {
	classes, err := theClient.ResourceV1().DeviceClasses().List(s.Ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	claims := map[string]*resourceapi.ResourceClaim{}
	for name := range resourceclaim.PodClaims(pod) {
		if claims[name], err = theClient.ResourceV1().ResourceClaims(pod.Namespace).Get(s.Ctx, name, metav1.GetOptions{}); err != nil {
			return "", err
		}
	}
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
		body, err := theClient.CoreV1().RESTClient().Get().AbsPath(gpuNodesPath, list.Items[i].Name).DoRaw(s.Ctx)
		if err != nil {
			return "", err
		}
		var node v1alpha1.GPUNode
		if err := json.Unmarshal(body, &node); err != nil {
			return "", err
		}
		nodes = append(nodes, node)
	}
	names := explain.NewNames("gpu.nvidia.com", device.Resources{GPU: "nvidia.com/gpu"}, classes.Items)
	return explain.Explain(nodes, names.Request(pod, func(name string) *resourceapi.ResourceClaim { return claims[name] })), nil
}
