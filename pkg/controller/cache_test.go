// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/capacity"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// What is decided from a trimmed object is what would be decided from the whole one.
func TestTrimmingChangesNoDecision(t *testing.T) {
	claim := newClaim("a", "gpu-0", "gpu-1")
	claim.Status.Allocation.Devices.Results[1].AdminAccess = ptr.To(true)
	// A part of gpu-0's memory, by a request that has alternatives.
	memory := map[resourceapi.QualifiedName]resource.Quantity{capacity.Memory: resource.MustParse("4Gi")}
	claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, resourceapi.DeviceRequest{Name: "either", FirstAvailable: []resourceapi.DeviceSubRequest{
		{Name: "whole"}, {Name: "part", Capacity: &resourceapi.CapacityRequirements{Requests: memory}},
	}})
	part := &claim.Status.Allocation.Devices.Results[0]
	part.Request, part.ShareID, part.ConsumedCapacity = "either/part", ptr.To(types.UID("share")), memory
	saying(testDriver, misspelt)(claim)
	whole := claim.DeepCopy()
	trimClaim(claim, testDriver)
	if !Refused(whole, testDriver) || !Refused(claim, testDriver) {
		t.Error("the parameters are gone")
	}
	if relayed := Relay([]resourceapi.ResourceClaim{*whole}, testDriver, "node-1"); len(relayed[0].Shares) != 1 {
		t.Errorf("no share: %+v", relayed)
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
	b := newBreaker(cluster{limits: device.Resources{GPU: testResource}})
	if !b.of(pod) || !Retryable(pod, "node-1") || len(nodeOfPod(t.Context(), pod)) != 1 {
		t.Errorf("the trimmed pod is not handled: %+v", pod)
	}
	if metav1.GetControllerOf(pod) == nil {
		t.Error("the owner is gone")
	}
}

// TestTrimmedGPUNodeChangesNoDecision also covers all that a reconciler decides from a GPUNode of its cache.
func TestTrimmedGPUNodeChangesNoDecision(t *testing.T) {
	whole := gpuNode(func(s *v1alpha1.GPUNodeStatus) {
		for i := range s.Devices {
			d := filled[v1alpha1.DeviceStatus](i)
			d.Name, d.Parent, d.Sharing, d.Maintenance, d.Taints = s.Devices[i].Name, "", nil, nil, nil
			d.ExtendedResource, d.ExtendedResourceState = testResource, v1alpha1.ExtendedResourceAllocatable
			d.Holders[0].Kind, d.Holders[0].State = v1alpha1.HolderPod, v1alpha1.HoldHeld
			s.Devices[i] = d
		}
		s.Devices[0].Holders[0].Kind, s.Devices[0].Holders[0].State, s.Devices[0].Holders[0].UID = v1alpha1.HolderClaim, v1alpha1.HoldRestored, "uid-a"
		s.Devices[0].UnhealthyReason, s.Devices[2].UnhealthyReason = "", ""
		s.Devices[1].Taints = []v1alpha1.DeviceTaint{broken}
		s.Daemons, s.UnknownDaemons = filled[[]v1alpha1.MPSDaemon](1), []string{"unknown"}
		s.Conflicts, s.BootID, s.Holders = filled[[]v1alpha1.ConflictingClaim](1), "boot", "holders"
	})
	whole.Generation, whole.Labels, whole.OwnerReferences = 3, map[string]string{"a": "b"}, []metav1.OwnerReference{{Kind: "Node"}}
	whole.Spec.Claims = Relay([]resourceapi.ResourceClaim{*newClaim("a", "gpu-0")}, testDriver, "node-1")
	trimmed := whole.DeepCopy()
	trimGPUNode(trimmed)
	ruled := &tainter{cluster: cluster{driver: testDriver}, rules: rules(t, newRule("a", ofDevice("gpu-3")), newRule("b"))}
	decide := func(n *v1alpha1.GPUNode) []any {
		number, known := Allocatable(n.Status, n.Spec.Claims, testResource)
		condition, served := GPUsHealthy(n.Status)
		plan := PlanDaemons(n, nil, DaemonPods{DriverRoots: []string{"text-of-usual-length-1"}}, time.Unix(0, 0))
		waiting := map[types.UID][]types.UID{"uid-a": {"p"}}
		return []any{number, known, condition, served, GPURepairNeeded(n.Status), plan, Retries(n.Status, n.Spec.Claims, waiting), n.Spec, n.Generation, n.UID, n.ResourceVersion, n.OwnerReferences, concerned(n), ruled.taints(n)}
	}
	if diff := cmp.Diff(decide(whole), decide(trimmed)); diff != "" {
		t.Errorf("of the whole (-) and the trimmed (+) GPUNode: %s", diff)
	}
	away := whole.DeepCopy()
	away.Status.Devices = []v1alpha1.DeviceStatus{whole.Status.Devices[0]}
	away.Status.Devices[0].Name, away.Status.Devices[0].UUID = "GPU-5", "GPU-5"
	away.Spec.Taints = ruled.taints(whole)
	trimmedAway := away.DeepCopy()
	trimGPUNode(trimmedAway)
	if diff := cmp.Diff(decide(away), decide(trimmedAway)); diff != "" || len(ruled.taints(away)) != 2 {
		t.Errorf("without a driver, of the whole (-) and the trimmed (+) GPUNode: %s", diff)
	}
	if number, _ := Allocatable(trimmed.Status, trimmed.Spec.Claims, testResource); number == 0 {
		t.Error("this decides nothing")
	}
	if d := trimmed.Status.Devices[0]; d.UUID+d.Model+d.Holders[0].Name+trimmed.Status.BootID != "" || d.Holders[0].Pods != nil || trimmed.Labels != nil {
		t.Errorf("what only people read is kept: %+v", trimmed)
	}
}

// TestSeenIsNoChange: an agent that writes again what it wrote before causes no work, and any other change of a GPUNode does.
func TestSeenIsNoChange(t *testing.T) {
	before := gpuNode(func(s *v1alpha1.GPUNodeStatus) { s.Seen = &metav1.Time{Time: time.Unix(1, 0)} })
	update := func(change func(*v1alpha1.GPUNode)) bool {
		was, is := before.DeepCopy(), before.DeepCopy()
		change(is)
		is.ResourceVersion = "2"
		trimGPUNode(was)
		trimGPUNode(is)
		return gpuNodeChanged.Update(event.UpdateEvent{ObjectOld: was, ObjectNew: is})
	}
	if update(func(n *v1alpha1.GPUNode) { n.Status.Seen = &metav1.Time{Time: time.Unix(61, 0)} }) {
		t.Error("that the agent is there is a change")
	}
	for what, change := range map[string]func(*v1alpha1.GPUNode){
		"another object": func(n *v1alpha1.GPUNode) { n.UID = "other" },
		"the spec":       func(n *v1alpha1.GPUNode) { n.Generation++ },
		"a device":       func(n *v1alpha1.GPUNode) { n.Status.Devices[0].UnhealthyReason = "Lost" },
		"the reason":     func(n *v1alpha1.GPUNode) { n.Status.Waiting = "no driver" },
	} {
		if !update(change) {
			t.Errorf("%s is no change", what)
		}
	}
}

// TestOnlyBoundPodsAreWatched: the pods that wait for a node are not cached. There may be many.
func TestOnlyBoundPodsAreWatched(t *testing.T) {
	for kind, by := range cacheOptions(device.Resources{GPU: testResource}).ByObject {
		if _, is := kind.(*corev1.Pod); is && by.Field.String() != "status.phase=Pending,spec.nodeName!=" {
			t.Errorf("pods are selected by %q", by.Field)
		}
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
	for object, want := range map[runtime.Object]bool{
		&corev1.PodList{}: true, &corev1.Pod{}: true, &resourceapi.ResourceClaim{}: true,
		&corev1.Node{}: false, &v1alpha1.GPUNode{}: false, &resourceapi.DeviceTaintRule{}: false,
	} {
		if is, err := apiutil.IsObjectNamespaced(object, types, mapper(types)); err != nil || is != want {
			t.Errorf("%T: %t, %v", object, is, err)
		}
	}
}
