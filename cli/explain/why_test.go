// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// Screens of cli/kubectl-gpu show the answers to most causes. These tests have what its nodes do not.

func gpuClass() resourceapi.DeviceClass {
	return class("gpu.nvidia.com", `device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == "gpu"`)
}

// reported returns a node with GPUs of two models, of which those with a holder are in no slice.
func reported(name string, holders ...bool) (corev1.Node, v1alpha1.GPUNode, resourceapi.ResourceSlice) {
	n := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}}
	slice := resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{
		Driver: testDriver, NodeName: &name, Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1},
	}}
	for i, held := range holders {
		d := v1alpha1.DeviceStatus{Name: fmt.Sprintf("gpu-%d", i), UUID: fmt.Sprintf("GPU-%d", i), Model: "H100", ExtendedResource: testResource}
		if held {
			d.Holders = []v1alpha1.DeviceHolder{{Kind: v1alpha1.HolderPod, Pods: []v1alpha1.PodReference{{UID: "x", Namespace: "web", Name: "x"}}}}
		} else {
			slice.Spec.Devices = append(slice.Spec.Devices, resourceapi.Device{Name: d.Name, Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"type": {StringValue: ptr.To("gpu")}, "productName": {StringValue: ptr.To("H100")}, "uuid": {StringValue: ptr.To(d.UUID)},
				"architecture": {StringValue: ptr.To("Hopper")},
			}})
		}
		n.Status.Devices = append(n.Status.Devices, d)
	}
	node := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	node.Status.Allocatable = corev1.ResourceList{testResource: *resource.NewQuantity(int64(len(holders)), resource.DecimalSI)}
	return node, n, slice
}

func answerTo(t *testing.T, f Facts) Answer {
	t.Helper()
	a, err := Why(t.Context(), f)
	if err != nil {
		t.Error(err)
	}
	return a
}

// facts returns a pod with one claim, and nodes.
func facts(requests []resourceapi.DeviceRequest, nodes ...string) Facts {
	f := Facts{Driver: testDriver, Classes: []resourceapi.DeviceClass{gpuClass()}, MayName: func(string) bool { return true }}
	f.Pod = newPod("a", func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimName: ptr.To("c")}}
	})
	f.Claims = map[string]*resourceapi.ResourceClaim{"c": {
		ObjectMeta: metav1.ObjectMeta{Name: "c"}, Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: requests}},
	}}
	for i, held := range nodes {
		var holders []bool
		for _, c := range held {
			holders = append(holders, c == 'x')
		}
		node, gpuNode, slice := reported(fmt.Sprintf("node-%d", i), holders...)
		f.Nodes, f.GPUNodes, f.Slices = append(f.Nodes, node), append(f.GPUNodes, gpuNode), append(f.Slices, slice)
	}
	return f
}

func exactly(count int64, selectors ...string) []resourceapi.DeviceRequest {
	r := &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com", Count: count}
	for _, s := range selectors {
		r.Selectors = append(r.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: s}})
	}
	return []resourceapi.DeviceRequest{{Name: "r", Exactly: r}}
}

func TestWhyOfClaims(t *testing.T) {
	attribute := func(name, value string) string {
		return fmt.Sprintf(`device.attributes["gpu.nvidia.com"].%s == %q`, name, value)
	}
	all := exactly(0)
	all[0].Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
	admin := exactly(1)
	admin[0].Exactly.AdminAccess = ptr.To(true)
	first := []resourceapi.DeviceRequest{{Name: "r", FirstAvailable: []resourceapi.DeviceSubRequest{
		{Name: "many", DeviceClassName: "gpu.nvidia.com", Count: 8}, {Name: "one", DeviceClassName: "gpu.nvidia.com", Count: 1}}}}
	other := exactly(1)
	other[0].Exactly.DeviceClassName = "nic"
	for name, c := range map[string]struct {
		requests []resourceapi.DeviceRequest
		nodes    []string // a device of a node each: x has a holder
		want     Cause
	}{
		"free":                             {exactly(1), []string{"x-"}, CauseRoom},
		"full":                             {exactly(1), []string{"xx"}, CauseFull},
		"one of two":                       {exactly(2), []string{"x-", "x-"}, CauseFull},
		"too many":                         {exactly(3), []string{"--", "--"}, CauseNever},
		"another is free":                  {exactly(1), []string{"xx", "-"}, CauseRoom},
		"held, selected by a known sign":   {exactly(1, attribute("productName", "H100")), []string{"x"}, CauseFull},
		"held, selected like another":      {exactly(1, attribute("architecture", "Hopper")), []string{"x", "x"}, CauseFull},
		"held, excluded like another":      {exactly(2, attribute("architecture", "Ampere")), []string{"xx", "--"}, CauseNever},
		"held, selected by an unknown one": {exactly(1, attribute("brand", "Tesla")), []string{"x"}, CauseFull},
		"free, but not selected":           {exactly(1, attribute("productName", "B200")), []string{"-"}, CauseNever},
		"all, and all are free":            {all, []string{"--"}, CauseRoom},
		"all, and one is not published":    {all, []string{"-x"}, CauseRoom},
		"admin access":                     {admin, []string{"-"}, CauseRoom},
		"admin access, not published":      {admin, []string{"x"}, CauseFull},
		"the second alternative":           {first, []string{"-"}, CauseRoom},
		"no alternative":                   {first, []string{"x"}, CauseFull},
		"no nodes":                         {exactly(1), nil, CauseNever},
	} {
		t.Run(name, func(t *testing.T) {
			if got := answerTo(t, facts(c.requests, c.nodes...)); got.Cause != c.want {
				t.Errorf("%+v", got)
			}
		})
	}
	unread := facts(all, "-x")
	unread.Slices, unread.NotRead = nil, []NotRead{{KindSlices, "forbidden"}}
	if got := answerTo(t, unread); got.Cause != CauseFull {
		t.Errorf("all, without ResourceSlices: %+v", got)
	}
	nic := facts(other, "-")
	nic.Classes = append(nic.Classes, class("nic", `device.driver == "net.example.com"`))
	if got := answerTo(t, nic); got.Cause != CauseNoGPU {
		t.Errorf("a claim of another driver: %+v", got)
	}
}

// TestAlternativeOfAnotherDriver: whether its devices are free is not known. A node that has Tandem's has room all the same.
func TestAlternativeOfAnotherDriver(t *testing.T) {
	for count, want := range map[int64]Cause{1: CauseRoom, 2: CauseNotEvaluated, 8: CauseNotEvaluated} {
		f := facts([]resourceapi.DeviceRequest{{Name: "r", FirstAvailable: []resourceapi.DeviceSubRequest{
			{Name: "ours", DeviceClassName: "gpu.nvidia.com", Count: count}, {Name: "other", DeviceClassName: "other", Count: 1}}}}, "x-")
		f.Classes = append(f.Classes, class("other", `device.driver == "gpu.example.com"`))
		f.Nodes = append(f.Nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "cpu"}})
		got := answerTo(t, f)
		if got.Cause != want {
			t.Errorf("%d: %s: %s", count, got.Cause, got.Summary)
		}
		if want == CauseNotEvaluated && (got.Nodes[0].Fit != FitUnknown || got.Nodes[0].Count != 2 ||
			got.Summary != "waits: not evaluated: an alternative of claim c is of class other, whose devices are of another driver") {
			t.Errorf("%d: %s: %+v", count, got.Summary, got.Nodes)
		}
		f.Pod.Spec.NodeSelector = map[string]string{"zone": "none"}
		if got := answerTo(t, f); got.Cause == CauseNotEvaluated {
			t.Errorf("%d, excluded from all nodes: %s", count, got.Summary)
		}
	}
}

// TestLimitsBesideClaims: what the scheduler's allocator says of the claims is not all that the pod requests.
func TestLimitsBesideClaims(t *testing.T) {
	for limits, want := range map[string]Cause{"1": CauseFull, "2": CauseNever, "16": CauseNever} {
		f := facts(exactly(1), "xx")
		f.GPUNodes[0].Status.ExtendedResource = testResource
		f.Pod.Spec.Containers[0].Resources = gpuLimits(limits)
		if got := answerTo(t, f); got.Cause != want {
			t.Errorf("%s: %s: %s", limits, got.Cause, got.Summary)
		}
	}
}

// TestMisspelledUnread: what the nodes offer is not known to a viewer who may not read them.
func TestMisspelledUnread(t *testing.T) {
	for _, kind := range []Kind{KindNodes, KindGPUNodes} {
		f := facts(nil, "-")
		f.Pod = newPod("a", func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/hostdev": resource.MustParse("1")}
		})
		f.NotRead = []NotRead{{Kind: kind}}
		if got := answerTo(t, f); got.Summary != "requests no GPU" {
			t.Errorf("%s not read: %s", kind, got.Summary)
		}
	}
}

// TestWhyWithoutNodes: GPUNodes alone tell who has the GPUs.
func TestWhyWithoutNodes(t *testing.T) {
	f := facts(exactly(1), "xx")
	f.Nodes, f.NotRead = nil, []NotRead{{KindNodes, "forbidden"}}
	if got := answerTo(t, f); got.Cause != CauseFull || len(got.Nodes) != 1 || len(got.Nodes[0].Holders) != 2 {
		t.Errorf("%+v", got)
	}
	f.NotRead = append(f.NotRead, NotRead{KindClasses, "forbidden"})
	if got := answerTo(t, f); got.Cause != CauseUnreadable {
		t.Errorf("without classes: %+v", got)
	}
}

// TestWhyOfReplicas: a pod that requests replicas finds as many as kubelet lists and no pod has.
func TestWhyOfReplicas(t *testing.T) {
	f := facts(nil, "-")
	f.Pod = newPod("a", func(p *corev1.Pod) { p.Spec.Containers[0].Resources = gpuLimits("2") })
	d := &f.GPUNodes[0].Status.Devices[0]
	d.Sharing = &v1alpha1.DeviceSharing{Replicas: 4, Allocatable: 4, Memory: 4 * gib}
	for held, want := range []Cause{CauseRoom, CauseRoom, CauseRoom, CauseFull, CauseFull} {
		d.Holders = nil
		for range held {
			d.Holders = append(d.Holders, v1alpha1.DeviceHolder{Kind: v1alpha1.HolderPod, State: v1alpha1.HoldHeld, Memory: gib})
		}
		if got := answerTo(t, f); got.Cause != want {
			t.Errorf("%d replicas are held: %+v", held, got)
		}
	}
	f.Pod.Spec.Containers[0].Resources.Limits[testResource] = resource.MustParse("5")
	if got := answerTo(t, f); got.Cause != CauseNever {
		t.Errorf("more than all: %+v", got)
	}
}

func TestWhyOfShares(t *testing.T) {
	ask := func(memory string) Facts {
		r := exactly(1)
		r[0].Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)}}
		f := facts(r, "--")
		f.GPUNodes = []v1alpha1.GPUNode{sharedNode(claimShare("a", 20*gib))}
		f.GPUNodes[0].Name = "node-0"
		f.GPUNodes[0].Status.Devices[1].Holders = []v1alpha1.DeviceHolder{claimShare("b", 10*gib)}
		for uid, of := range map[types.UID]v1alpha1.AllocatedShare{"a": {Device: "gpu-0", Memory: 20 * gib}, "b": {Device: "gpu-1", Memory: 10 * gib}} {
			f.GPUNodes[0].Spec.Claims = append(f.GPUNodes[0].Spec.Claims, v1alpha1.AllocatedClaim{UID: uid, Devices: []string{of.Device}, Shares: []v1alpha1.AllocatedShare{of}})
		}
		for i := range f.Slices[0].Spec.Devices {
			d := &f.Slices[0].Spec.Devices[i]
			d.AllowMultipleAllocations = ptr.To(true)
			d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("24Gi")}}
		}
		return f
	}
	for memory, want := range map[string]Cause{"10Gi": CauseRoom, "20Gi": CauseFull, "25Gi": CauseNever} {
		if got := answerTo(t, ask(memory)); got.Cause != want {
			t.Errorf("%s: %+v", memory, got)
		}
	}
}

func TestMapsTo(t *testing.T) {
	at := func(name, resource string, age time.Duration) resourceapi.DeviceClass {
		c := class(name, "true")
		c.Spec.ExtendedResourceName, c.CreationTimestamp = &resource, metav1.NewTime(time.Unix(1e9, 0).Add(-age))
		return c
	}
	classes := []resourceapi.DeviceClass{at("b", "r/new", 0), at("a", "r/new", time.Hour), at("d", "r/same", 0), at("c", "r/same", 0)}
	for resource, want := range map[corev1.ResourceName]string{
		"r/new": "b", "r/same": "c", "r/none": "", corev1.ResourceName(resourceapi.ResourceDeviceClassPrefix + "x"): "x",
	} {
		if got := mapsTo(resource, classes); got != want {
			t.Errorf("%s: %q, want %q", resource, got, want)
		}
	}
}

func TestHolder(t *testing.T) {
	pods := func(n int) (refs []v1alpha1.PodReference) {
		for i := range n {
			refs = append(refs, v1alpha1.PodReference{UID: types.UID(fmt.Sprint(i)), Namespace: "ml", Name: fmt.Sprintf("p%d", i)})
		}
		return refs
	}
	for want, h := range map[string]v1alpha1.DeviceHolder{
		"ml/p0 (limits)":                        {Kind: v1alpha1.HolderPod, Pods: pods(1)},
		"? (limits)":                            {Kind: v1alpha1.HolderPod},
		"ml/p0 (claim c)":                       {Kind: v1alpha1.HolderClaim, Namespace: "ml", Name: "c", Pods: pods(1)},
		"ml/p0, ml/p1, ml/p2, 2 more (claim c)": {Kind: v1alpha1.HolderClaim, Namespace: "ml", Name: "c", Pods: pods(5)},
		"claim ml/c":                            {Kind: v1alpha1.HolderClaim, Namespace: "ml", Name: "c"},
		"claim u":                               {Kind: v1alpha1.HolderClaim, UID: "u"},
		"0 (limits)":                            {Kind: v1alpha1.HolderPod, Pods: []v1alpha1.PodReference{{UID: "0"}}},
	} {
		if got := Holder(h); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestEventsAreBounded: the newest events that matter, each text once.
func TestEventsAreBounded(t *testing.T) {
	f := facts(exactly(1), "-")
	for i := range 20 {
		f.Events = append(f.Events, corev1.Event{
			Reason: "DeviceHeld", Message: fmt.Sprintf("message\n%d", i/2), LastTimestamp: metav1.NewTime(time.Unix(int64(i), 0)),
			InvolvedObject: corev1.ObjectReference{Kind: "Pod", Name: "a"},
		}, corev1.Event{Reason: "Scheduled", LastTimestamp: metav1.NewTime(time.Unix(100, 0))})
	}
	got := answerTo(t, f).Events
	if len(got) != 6 || got[0] != "DeviceHeld on pod a: message 9" || strings.Contains(strings.Join(got, ""), "Scheduled") {
		t.Errorf("%q", got)
	}
}

// A pool of a later generation replaces its slices: what only an older one has cannot be had.
func TestSlicesOfAnOlderGeneration(t *testing.T) {
	f := facts(exactly(2), "-")
	old := *f.Slices[0].DeepCopy()
	old.Spec.Devices[0].Name = "gpu-9"
	f.Slices[0].Spec.Pool.Generation++
	f.Slices = append(f.Slices, old)
	if got := answerTo(t, f); got.Cause != CauseNever {
		t.Errorf("%s: %s", got.Cause, got.Summary)
	}
}

// Neither limits nor claims get a device that the node's configuration excludes.
func TestExcludedDevices(t *testing.T) {
	f := facts(exactly(1), "-")
	f.GPUNodes[0].Status.Devices[0].Excluded = true
	f.Slices[0].Spec.Devices = nil
	if got := answerTo(t, f); got.Cause != CauseNever {
		t.Errorf("claim: %s: %s", got.Cause, got.Summary)
	}
	f.Pod = newPod("a", func(p *corev1.Pod) { p.Spec.Containers = []corev1.Container{{Resources: gpuLimits("1")}} })
	if got := answerTo(t, f); got.Cause != CauseNever {
		t.Errorf("limits: %s: %s", got.Cause, got.Summary)
	}
}

// TestWhyOfUnreadClaims: what could not be read may exist, and what it requests is not known.
func TestWhyOfUnreadClaims(t *testing.T) {
	for kind, claim := range map[Kind]corev1.PodResourceClaim{
		KindClaims:    {Name: "x", ResourceClaimName: ptr.To("c")},
		KindTemplates: {Name: "x", ResourceClaimTemplateName: ptr.To("t")},
	} {
		f := facts(exactly(1), "xx")
		f.Claims, f.NotRead = nil, []NotRead{{kind, "forbidden"}}
		f.Pod.Spec.ResourceClaims = []corev1.PodResourceClaim{claim}
		got := answerTo(t, f)
		if text := fmt.Sprint(got.Summary, got.Requests); got.Cause != CauseUnreadable || strings.Contains(text, "does not exist") {
			t.Errorf("%s: %s: %s", kind, got.Cause, text)
		}
	}
}

// TestReasonOfReplicas: a GPU with a holder has replicas left.
func TestReasonOfReplicas(t *testing.T) {
	f := facts(nil, "-")
	d := &f.GPUNodes[0].Status.Devices[0]
	d.Sharing = &v1alpha1.DeviceSharing{Strategy: "TimeSlicing", Replicas: 4, Allocatable: 4, Memory: 4 * gib}
	d.Holders = []v1alpha1.DeviceHolder{{Kind: v1alpha1.HolderPod, State: v1alpha1.HoldHeld, Memory: gib}}
	f.GPUNodes[0].Status.Counts, f.GPUNodes[0].Status.ExtendedResource = v1alpha1.DeviceCounts{Total: 1, Pods: 1}, testResource
	for limit, want := range map[string]string{
		"1": "1 Insufficient cpu", "4": "no node has 4 nvidia.com/gpu free: node-0 has 3 of 4 (1 by pods)",
	} {
		f.Pod = newPod("a", func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources = gpuLimits(limit)
			p.Status.Conditions = []corev1.PodCondition{unschedulable("0/1 nodes are available: 1 Insufficient cpu.")}
		})
		if got := NewQueue(f.GPUNodes).Reason(f.Pod); !strings.Contains(got, want) {
			t.Errorf("%s: the queue says %q, want %q", limit, got, want)
		}
		if got := answerTo(t, f).Summary; !strings.Contains(got, want) {
			t.Errorf("%s: the answer is %q, want %q", limit, got, want)
		}
	}
}

// TestReasonOfReplicasAndShares: pods have replicas of what claims leave of a GPU.
func TestReasonOfReplicasAndShares(t *testing.T) {
	f := facts(nil, "-")
	d := &f.GPUNodes[0].Status.Devices[0]
	d.Sharing = &v1alpha1.DeviceSharing{Strategy: "MPS", Replicas: 4, Allocatable: 1, Memory: 4 * gib}
	d.Holders = []v1alpha1.DeviceHolder{
		{Kind: v1alpha1.HolderPod, State: v1alpha1.HoldHeld, Memory: gib}, {Kind: v1alpha1.HolderClaim, State: v1alpha1.HoldHeld, Memory: 3 * gib},
	}
	f.GPUNodes[0].Status.Counts, f.GPUNodes[0].Status.ExtendedResource = v1alpha1.DeviceCounts{Total: 1, Claims: 1}, testResource
	f.Pod = newPod("a", func(p *corev1.Pod) { p.Spec.Containers[0].Resources = gpuLimits("1") })
	const want = "all 4 nvidia.com/gpu of node-0 are held: 1 by pods, 3 by claims"
	if got := NewQueue(f.GPUNodes).Reason(f.Pod); got != want {
		t.Errorf("the queue says %q, want %q", got, want)
	}
	// The node offers fewer replicas now, and three pods keep theirs.
	pods := slices.Repeat(d.Holders[:1], 3)
	f.GPUNodes[0].Status.Devices = append(f.GPUNodes[0].Status.Devices, *d)
	fewer := &f.GPUNodes[0].Status.Devices[1]
	fewer.Name, fewer.Sharing, fewer.Holders = "gpu-1", &v1alpha1.DeviceSharing{Strategy: "MPS", Replicas: 2, Memory: 4 * gib}, append(pods, d.Holders[1])
	if got, want := NewQueue(f.GPUNodes).Reason(f.Pod), "all 6 nvidia.com/gpu of node-0 are held: 4 by pods, 3 by claims"; got != want {
		t.Errorf("the queue says %q, want %q", got, want)
	}
	f.GPUNodes[0].Status.Devices = f.GPUNodes[0].Status.Devices[:1]
	d = &f.GPUNodes[0].Status.Devices[0]
	d.Holders = d.Holders[1:]
	if got := NewQueue(f.GPUNodes).Reason(f.Pod); strings.Contains(got, "held") {
		t.Errorf("with a replica left the queue says %q", got)
	}
}

// TestWhyOfAnotherScheduler: a reason that has not kube-scheduler's form comes first, too.
func TestWhyOfAnotherScheduler(t *testing.T) {
	f := facts(exactly(1), "-")
	f.Pod.Status.Conditions = []corev1.PodCondition{unschedulable("pod group is not ready, 1 of 4 members")}
	if got := answerTo(t, f); got.Cause != CauseRoom || !strings.HasPrefix(got.Summary, "waits: the scheduler says pod group is not ready, 1 of 4 members; node-0 has free GPUs") {
		t.Errorf("%s: %s", got.Cause, got.Summary)
	}
}

// unschedulable is the condition of a pod that its scheduler has not placed.
func unschedulable(message string) corev1.PodCondition {
	return corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: message}
}
