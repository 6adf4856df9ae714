// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/capacity"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// TestQueue: the list says what a pod requests and why it waits, from the pod and the GPUNodes alone.
func TestQueue(t *testing.T) {
	full := v1alpha1.GPUNode{}
	full.Name = "n1"
	full.Status.ExtendedResource = "example.com/gpu"
	full.Status.Counts = v1alpha1.DeviceCounts{Total: 2, Pods: 2}
	full.Status.Devices = []v1alpha1.DeviceStatus{{Name: "gpu-0-mig", Parent: "gpu-0", ExtendedResource: "example.com/part"}}
	away := v1alpha1.GPUNode{}
	away.Name, away.Status.Waiting = "n2", "no driver"
	away.Status.Counts = v1alpha1.DeviceCounts{Total: 8, Free: 8}
	claim := func(p *corev1.Pod) { p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu"}} }
	on := func(p *corev1.Pod) {
		p.Spec.NodeName = "n1"
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff"}}}}
	}
	const none = "the scheduler has not reported a reason"
	gate := func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "queue"}} }
	for name, c := range map[string]struct {
		pod              *corev1.Pod
		requests, reason string
	}{
		"no GPU":        {newPod("p", byLimits("cpu", 1)), "", none},
		"another's":     {newPod("p", byLimits("other.com/nic", 1)), "", none},
		"none of it":    {newPod("p", byLimits("example.com/gpu", 0)), "", none},
		"whole GPUs":    {newPod("p", byLimits("example.com/gpu", 1), says("scheduler")), "1 example.com/gpu", "all 2 GPUs of n1 are held: 2 by pods; no GPU for new pods on n2"},
		"the usual":     {newPod("p", byLimits("nvidia.com/gpu", 1)), "1 nvidia.com/gpu", "no node that gives GPUs to new pods has 1 nvidia.com/gpu; n2: no GPU for new pods and claims: no driver"},
		"a partition":   {newPod("p", byLimits("example.com/part", 1), says("scheduler")), "1 example.com/part", "scheduler"},
		"a usual part":  {newPod("p", byLimits("nvidia.com/mig-1g.10gb", 1)), "1 nvidia.com/mig-1g.10gb", "no node that gives GPUs to new pods has 1 nvidia.com/mig-1g.10gb; n2: no GPU for new pods and claims: no driver"},
		"a class":       {newPod("p", byLimits("deviceclass.resource.kubernetes.io/gpu.nvidia.com", 3)), "3 deviceclass.resource.kubernetes.io/gpu.nvidia.com", none},
		"another class": {newPod("p", byLimits("deviceclass.resource.kubernetes.io/nic", 3)), "", none},
		"no such class": {newPod("p", byLimits("deviceclass.resource.kubernetes.io/gpu", 3)), "3 deviceclass.resource.kubernetes.io/gpu", none},
		"a claim":       {newPod("p", claim, says("two\nlines")), "claim gpu", "two lines"},
		"both":          {newPod("p", claim, byLimits("example.com/gpu", 1), says("scheduler")), "1 example.com/gpu, claim gpu", "scheduler"},
		"a long reason": {newPod("p", claim, says(strings.Repeat("x", 300))), "claim gpu", strings.Repeat("x", 240) + "..."},
		"gated":         {newPod("p", byLimits("example.com/gpu", 1), gate), "1 example.com/gpu", "waits until its scheduling gates are removed: queue"},
		"placed":        {newPod("p", byLimits("example.com/gpu", 1), on), "1 example.com/gpu", "starts on n1: container c is waiting: ImagePullBackOff"},
	} {
		q := NewQueue([]v1alpha1.GPUNode{full, away})
		q.Know(Requested{Driver: testDriver, Classes: []resourceapi.DeviceClass{gpuClass(), class("nic", `device.driver == "net.example.com"`)}})
		for range 2 { // the second time from memory
			requests, reason := strings.Join(q.Requests(c.pod), ", "), q.Reason(c.pod)
			if requests != c.requests || reason != c.reason {
				t.Errorf("%s: requests %q, want %q; %q, want %q", name, requests, c.requests, reason, c.reason)
			}
		}
	}
}

// TestGroups: pods of one owner are one group; a Deployment's ReplicaSets are not shown.
func TestGroups(t *testing.T) {
	nodes := []v1alpha1.GPUNode{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}}
	second := 0
	pod := func(namespace, name, kind, of, hash string, gpus int64, changes ...func(*corev1.Pod)) *corev1.Pod {
		second++
		p := newPod(name, changes...)
		p.Namespace, p.CreationTimestamp = namespace, metav1.Unix(int64(second), 0)
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(gpus, resource.DecimalSI)}
		if kind != "" {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "Other", Name: "not its controller"}, {Kind: kind, Name: of, Controller: ptr.To(true)}}
		}
		if hash != "" {
			p.Labels = map[string]string{"pod-template-hash": hash}
		}
		return p
	}
	pods := []*corev1.Pod{
		pod("ml", "bare", "", "", "", 1),
		pod("ml", "train-a", "ReplicaSet", "train-5d4", "5d4", 2, func(p *corev1.Pod) { p.Spec.NodeName = "n1" }),
		pod("ml", "train-b", "ReplicaSet", "train-77f", "77f", 2),
		pod("ml", "train-c", "ReplicaSet", "train-77f", "77f", 2),
		pod("web", "train-d", "ReplicaSet", "train-77f", "77f", 2),
		pod("ml", "train-e", "ReplicaSet", "train-77f", "77f", 1),
		pod("ml", "own-rs-1", "ReplicaSet", "own-rs", "other", 1),
		pod("ml", "job-1", "Job", "sweep\n-1", "", 1),
		pod("ml", "cpu", "Job", "sweep", "", 0),
	}
	slices.Reverse(pods)
	var got []string
	for _, g := range NewQueue(nodes).Groups(pods) {
		got = append(got, fmt.Sprintf("%s: %d since %d: %s: %s, %d others", g.Owner(), len(g.Pods), g.Since().Unix(), strings.Join(g.Requests, ", "), g.Reason, g.Others))
	}
	const waits = "the scheduler has not reported a reason"
	want := []string{
		"Pod ml/bare: 1 since 1: 1 nvidia.com/gpu: " + waits + ", 0 others",
		"Deployment ml/train: 3 since 2: 2 nvidia.com/gpu: " + waits + ", 1 others",
		"Deployment web/train: 1 since 5: 2 nvidia.com/gpu: " + waits + ", 0 others",
		"Deployment ml/train: 1 since 6: 1 nvidia.com/gpu: " + waits + ", 0 others",
		"ReplicaSet ml/own-rs: 1 since 7: 1 nvidia.com/gpu: " + waits + ", 0 others",
		"Job ml/sweep -1: 1 since 8: 1 nvidia.com/gpu: " + waits + ", 0 others",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestQueueOfClaims: with what the claims request, the list has the reasons of Why that need no other objects.
func TestQueueOfClaims(t *testing.T) {
	_, full, _ := reported("n1", true, true)
	full.Status.ExtendedResource, full.Status.Counts = testResource, v1alpha1.DeviceCounts{Total: 2, Claims: 2}
	template := func(requests []resourceapi.DeviceRequest) *resourceapi.ResourceClaimTemplate {
		of := &resourceapi.ResourceClaimTemplate{}
		of.Spec.Spec.Devices.Requests = requests
		return of
	}
	other := exactly(1)
	other[0].Exactly.DeviceClassName = "nic"
	wrong := exactly(1)
	wrong[0].Exactly.DeviceClassName = "gpu.nvidia.co"
	name := func(name string) types.NamespacedName { return types.NamespacedName{Namespace: "ns", Name: name} }
	const selector = `device.attributes["gpu.nvidia.com"].productName == "H100"`
	objects := Requested{
		Driver: testDriver, Classes: []resourceapi.DeviceClass{gpuClass(), class("nic", `device.driver == "net.example.com"`)},
		Templates: map[types.NamespacedName]*resourceapi.ResourceClaimTemplate{
			name("one"): template(exactly(1)), name("some"): template(exactly(1, selector)), name("nic"): template(other), name("wrong"): template(wrong), name("gone"): nil,
		},
		Claims: map[types.NamespacedName]*resourceapi.ResourceClaim{name("own"): {Spec: template(exactly(2)).Spec.Spec}, name("deleted"): nil},
	}
	const none, all = "the scheduler has not reported a reason", "0/1 nodes are available: 1 cannot allocate all claims. still not schedulable"
	// A pod with a claim and a template has the claim of the template.
	for _, c := range []struct{ template, claim, says, requests, reason string }{
		{"one", "", all, "1 of class gpu.nvidia.com", "all 2 GPUs of n1 are held: 2 by claims"},
		{"", "own", "", "2 of class gpu.nvidia.com", "all 2 GPUs of n1 are held: 2 by claims"},
		{"some", "", all, "1 of class gpu.nvidia.com where " + selector, "no node that may run it has such devices free"},
		{"some", "", "", "1 of class gpu.nvidia.com where " + selector, none},
		{"one", "", "0/50 nodes are available: 45 Insufficient cpu, 5 cannot allocate all claims. preemption: none", "1 of class gpu.nvidia.com", "all 2 GPUs of n1 are held: 2 by claims"},
		{"some", "", "0/50 nodes are available: 45 Insufficient cpu, 5 cannot allocate all claims.", "1 of class gpu.nvidia.com where " + selector, "no node that may run it has such devices free"},
		{"some", "", "0/1 nodes are available: 1 Insufficient memory.", "1 of class gpu.nvidia.com where " + selector, "the scheduler says 1 Insufficient memory"},
		{"one", "", `running "DynamicResources" filter plugin: claim ns/x: selector #0 on device a/b/gpu-0: CEL runtime error: no such key: x`, "1 of class gpu.nvidia.com",
			"claim ns/x: selector #0 on device a/b/gpu-0: CEL runtime error: no such key: x"},
		{"gone", "", "", "claim gpu", "ResourceClaimTemplate gone does not exist"},
		{"gone", "own", "", "2 of class gpu.nvidia.com", "all 2 GPUs of n1 are held: 2 by claims"},
		{"gone", "unread", "", "claim gpu", none},
		{"gone", "deleted", "", "claim gpu", "ResourceClaimTemplate gone does not exist"},
		{"wrong", "unread", "", "1 of class gpu.nvidia.co", "DeviceClass gpu.nvidia.co of a claim of template wrong does not exist (did you mean gpu.nvidia.com?)"},
		{"", "deleted", "", "claim gpu", "ResourceClaim deleted does not exist"},
		{"wrong", "", "", "1 of class gpu.nvidia.co", "DeviceClass gpu.nvidia.co of a claim of template wrong does not exist (did you mean gpu.nvidia.com?)"},
		{"unread", "", all, "claim gpu", all},
		{"nic", "", "", "", none},
	} {
		q := NewQueue([]v1alpha1.GPUNode{full})
		q.Know(objects)
		pod := newPod("p", func(p *corev1.Pod) {
			ref := corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: &c.template}
			switch {
			case c.claim != "" && c.template != "":
				p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: &c.claim}}
			case c.claim != "":
				ref.ResourceClaimTemplateName, ref.ResourceClaimName = nil, &c.claim
			}
			p.Spec.ResourceClaims = []corev1.PodResourceClaim{ref}
			if c.says != "" {
				says(c.says)(p)
			}
		})
		for range 2 { // the second time from memory
			if requests, reason := strings.Join(q.Requests(pod), ", "), q.Reason(pod); requests != c.requests || reason != c.reason {
				t.Errorf("%s%s: requests %q, want %q; %q, want %q", c.template, c.claim, requests, c.requests, reason, c.reason)
			}
		}
	}

	// Claims in two namespaces may have the same name.
	objects.Claims = map[types.NamespacedName]*resourceapi.ResourceClaim{name("own"): {Spec: template(exactly(2)).Spec.Spec}, {Namespace: "b", Name: "own"}: nil}
	q := NewQueue([]v1alpha1.GPUNode{full})
	q.Know(objects)
	pod := newPod("p", func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new("own")}}
	})
	if reason := q.Reason(pod); reason != "all 2 GPUs of n1 are held: 2 by claims" {
		t.Errorf("got %q", reason)
	}
	pod.Namespace = "b"
	if reason := q.Reason(pod); reason != "ResourceClaim own does not exist" {
		t.Errorf("in another namespace: %q", reason)
	}
}

// TestQueueOfShares: what is left of shared GPUs is counted for a claim that requests a share by the usual selector.
func TestQueueOfShares(t *testing.T) {
	_, n, _ := reported("n1", false)
	n.Status.Devices[0].Sharing = &v1alpha1.DeviceSharing{Claims: v1alpha1.ClaimSharing(device.ByMemory), Memory: 8 << 30}
	share := exactly(1, ofShared)
	share[0].Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{capacity.Memory: resource.MustParse("16Gi")}}
	name := types.NamespacedName{Namespace: "ns", Name: "c"}
	q := NewQueue([]v1alpha1.GPUNode{n})
	q.Know(Requested{
		Driver: testDriver, Classes: []resourceapi.DeviceClass{gpuClass()},
		Claims: map[types.NamespacedName]*resourceapi.ResourceClaim{name: {Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: share}}}},
	})
	pod := newPod("p", says("0/1 nodes are available: 1 cannot allocate all claims."), func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new("c")}}
	})
	if got, want := q.Reason(pod), "no node has 16384 MiB left on 1 GPU: n1 has 8192 MiB at most"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestQueueOfMappedResources: claims serve the extended resource of a class, or a limit, on nodes whose kubelet does not. What they serve is listed
// and not counted.
func TestQueueOfMappedResources(t *testing.T) {
	_, free, _ := reported("n1", false, false)
	for i := range free.Status.Devices {
		free.Status.Devices[i].ExtendedResource = ""
	}
	free.Status.Counts = v1alpha1.DeviceCounts{Total: 2, Free: 2}
	away := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n2"}, Status: v1alpha1.GPUNodeStatus{Waiting: "no driver"}}
	mapped := gpuClass()
	mapped.Spec.ExtendedResourceName = new("example.com/whole")
	usual := class("usual", mapped.Spec.Selectors[0].CEL.Expression)
	usual.Spec.ExtendedResourceName = new(testResource)
	q := NewQueue([]v1alpha1.GPUNode{free, away})
	for _, classes := range [][]resourceapi.DeviceClass{{mapped, usual}, nil} {
		q.Know(Requested{Driver: testDriver, Classes: classes})
		for _, name := range []string{testResource, "example.com/whole", "deviceclass.resource.kubernetes.io/gpu.nvidia.com"} {
			pod := newPod("p", byLimits(name, 1), says("Insufficient memory"))
			listed := classes != nil || name != "example.com/whole"
			if got := q.Reason(pod); got != "Insufficient memory" || len(q.Requests(pod)) > 0 != listed {
				t.Errorf("%s with %d classes: %q, requests %q", name, len(classes), got, q.Requests(pod))
			}
		}
	}
}
