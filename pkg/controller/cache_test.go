// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// What is decided from a trimmed object is what would be decided from the whole one.
func TestTrimmingChangesNoDecision(t *testing.T) {
	claim := newClaim("a", "gpu-0", "gpu-1")
	claim.Status.Allocation.Devices.Results[1].AdminAccess = ptr.To(true)
	saying(testDriver, misspelt)(claim)
	whole := claim.DeepCopy()
	trimClaim(claim, testDriver)
	if !Refused(whole, testDriver) || !Refused(claim, testDriver) {
		t.Error("the parameters are gone")
	}
	if diff := cmp.Diff(Relay([]resourceapi.ResourceClaim{*whole}, testDriver, "node-1"), Relay([]resourceapi.ResourceClaim{*claim}, testDriver, "node-1")); diff != "" {
		t.Error(diff)
	}
	pod := newPod("a", func(p *corev1.Pod) {
		p.Spec.NodeName, p.Status.Phase = "node-1", corev1.PodPending
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{testResource: resource.MustParse("1")}
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimTemplateName: ptr.To("t")}}
	})
	byScheduler(pod)
	trimPod(pod)
	b := newBreaker(nil, nil, device.Resources{GPU: testResource}, nil, nil)
	if !b.of(pod) || !Retryable(pod, "node-1") || len(nodeOfPod(t.Context(), pod)) != 1 {
		t.Errorf("the trimmed pod is not handled: %+v", pod)
	}
	if metav1.GetControllerOf(pod) == nil {
		t.Error("the owner is gone")
	}
}

// A cluster has far more of these than GPUs: what is kept of each is small.
func TestTrimmedIsSmall(t *testing.T) {
	long := map[string]string{"a": string(make([]byte, 4096))}
	meta := func(m *metav1.ObjectMeta) {
		m.Annotations, m.Labels, m.ManagedFields = long, long, []metav1.ManagedFieldsEntry{{Manager: string(make([]byte, 4096))}}
	}
	pod := newPod("a", running)
	meta(&pod.ObjectMeta)
	pod.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "SECRET", Value: "secret"}}
	pod.Spec.Containers[0].Command = []string{string(make([]byte, 4096))}
	node := coreNode("8", "8")
	meta(&node.ObjectMeta)
	node.Status.Images = []corev1.ContainerImage{{Names: []string{string(make([]byte, 4096))}}}
	claim := newClaim("a", "gpu-0")
	meta(&claim.ObjectMeta)
	claim.Spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{{Requests: []string{string(make([]byte, 4096))}}}
	selectors := []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: string(make([]byte, 4096))}}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{
		{Name: "one", Exactly: &resourceapi.ExactDeviceRequest{Selectors: selectors}},
		{Name: "first", FirstAvailable: []resourceapi.DeviceSubRequest{{Name: "sub", Selectors: selectors}}},
	}
	saying("net.example.com", string(make([]byte, 4096)))(claim)
	saying(testDriver, rightGPU)(claim)
	foreign := claim.DeepCopy()
	foreign.Status.Allocation.Devices.Results[0].Driver = "net.example.com"
	unbound := pod.DeepCopy()
	unbound.Spec.NodeName, unbound.Status.Phase = "", corev1.PodPending
	trimPod(unbound)
	trimPod(pod)
	trimNode(node, device.Resources{GPU: testResource})
	trimClaim(claim, testDriver)
	trimClaim(foreign, testDriver)
	for _, o := range []any{pod, node, claim, foreign} {
		data, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		if len(data) > 1100 {
			t.Errorf("%d bytes: %s", len(data), data)
		}
	}
	if diff := cmp.Diff(&resourceapi.ResourceClaim{ObjectMeta: identity(foreign.ObjectMeta)}, foreign); diff != "" {
		t.Errorf("of a claim with another driver's device is kept: %s", diff)
	}
	if diff := cmp.Diff(&corev1.Pod{ObjectMeta: identity(unbound.ObjectMeta), Status: corev1.PodStatus{Phase: corev1.PodPending}}, unbound); diff != "" {
		t.Errorf("of a pod without a node is kept: %s", diff)
	}
	if _, ok := node.Status.Allocatable[corev1.ResourceCPU]; ok {
		t.Error("CPUs are kept")
	}
	if quantity := node.Status.Capacity[testResource]; quantity.Cmp(resource.MustParse("8")) != 0 {
		t.Errorf("capacity %s", quantity.String())
	}
}

func TestTrimPassesTombstones(t *testing.T) {
	tombstone := toolscache.DeletedFinalStateUnknown{Key: "ns/a", Obj: newPod("a")}
	got, err := trim(trimPod)(tombstone)
	if err != nil || got.(toolscache.DeletedFinalStateUnknown).Key != "ns/a" {
		t.Errorf("%v, %v", got, err)
	}
	got, err = trim(trimPod)(newPod("a"))
	if err != nil || got.(*corev1.Pod).UID != types.UID("uid-pod-a") || got.(*corev1.Pod).Spec.Containers[0].Image != "" {
		t.Errorf("%v, %v", got, err)
	}
}

// A cache of one namespace asks the mapper whether what it lists is in namespaces, and fails at every list where the answer is missing.
func TestTheMapperKnowsLists(t *testing.T) {
	types, err := scheme()
	if err != nil {
		t.Fatal(err)
	}
	if is, err := apiutil.IsObjectNamespaced(&corev1.PodList{}, types, mapper(types)); err != nil || !is {
		t.Errorf("%t, %v", is, err)
	}
}
