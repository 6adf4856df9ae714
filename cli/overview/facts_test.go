// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
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

// TestQuotaUsers: the answer says which users of a quota it does not know.
func TestQuotaUsers(t *testing.T) {
	client := fake.NewClientset()
	f := explain.Facts{Pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: "late"}}}
	client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, &corev1.PodList{ListMeta: metav1.ListMeta{Continue: "more"}, Items: make([]corev1.Pod, 2)}, nil
	})
	client.PrependReactor("list", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("not allowed")
	})
	err := Cluster{Client: client}.readQuotaUsers(t.Context(), &f)
	if err == nil || !strings.Contains(err.Error(), "not allowed") || !f.QuotaPartly || len(f.QuotaPods) != 2 {
		t.Errorf("%v, %t, %d pods", err, f.QuotaPartly, len(f.QuotaPods))
	}
}
