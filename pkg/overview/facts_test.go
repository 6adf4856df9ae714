// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// TestWhyReadsFewClaims: a pod that names thousands of claims does not cost thousands of requests, and the answer says so.
func TestWhyReadsFewClaims(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: "late"}}
	for i := range 3000 {
		of := corev1.PodResourceClaim{Name: fmt.Sprint("c", i), ResourceClaimName: ptr.To(fmt.Sprint("claim-", i))}
		if i%2 == 1 {
			of.ResourceClaimName, of.ResourceClaimTemplateName = nil, ptr.To(fmt.Sprint("template-", i))
		}
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, of)
	}
	client := fake.NewClientset(pod)
	objects := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{v1alpha1.Resource: "GPUNodeList"})
	answer, err := Cluster{Client: client, Dynamic: objects, DriverName: "gpu.nvidia.com"}.Why(t.Context(), "ml", "late")
	if err != nil || !strings.HasPrefix(answer.Summary, "waits: not evaluated: the pod has 3000 claims") {
		t.Errorf("%s, %v", answer.Summary, err)
	}
	if n := len(client.Actions()); n < 64 || n > 100 {
		t.Errorf("%d requests", n)
	}
}
