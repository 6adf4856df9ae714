// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

func TestExplain(t *testing.T) {
	node := func(name string, limits, claims, unhealthy, free int32) v1alpha1.GPUNode {
		n := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}}
		n.Status.Counts = v1alpha1.DeviceCounts{Total: limits + claims + unhealthy + free, Pods: limits, Claims: claims, Unhealthy: unhealthy, Free: free}
		return n
	}
	var many []v1alpha1.GPUNode
	for i := range 12 {
		many = append(many, node(fmt.Sprintf("n%02d", i), 1, 0, 0, 0))
	}
	for name, c := range map[string]struct {
		nodes []v1alpha1.GPUNode
		asked int64
		want  string
	}{
		"one node":            {[]v1alpha1.GPUNode{node("node-1", 5, 3, 0, 0)}, 1, "all 8 GPUs of node-1 are held: 5 by limits, 3 by claims"},
		"by one kind":         {[]v1alpha1.GPUNode{node("node-1", 0, 8, 0, 0)}, 1, "all 8 GPUs of node-1 are held: 8 by claims"},
		"one is faulty":       {[]v1alpha1.GPUNode{node("node-1", 5, 2, 1, 0)}, 1, "all 8 GPUs of node-1 are held or faulty: 5 by limits, 2 by claims, 1 faulty"},
		"too few":             {[]v1alpha1.GPUNode{node("node-1", 5, 1, 0, 2)}, 4, "no node has 4 GPUs free: node-1 has 2 of 8 (5 by limits, 1 by claims)"},
		"two nodes":           {[]v1alpha1.GPUNode{node("b", 4, 0, 0, 0), node("a", 3, 1, 0, 0)}, 1, "all 8 GPUs of 2 nodes are held: a (3 by limits, 1 by claims), b (4 by limits)"},
		"most first":          {[]v1alpha1.GPUNode{node("a", 4, 0, 0, 0), node("b", 3, 0, 0, 1)}, 2, "no node has 2 GPUs free: b has 1 of 4 (3 by limits), a has 0 of 4 (4 by limits)"},
		"many":                {many, 1, "all 12 GPUs of 12 nodes are held: n00 (1 by limits), n01 (1 by limits), n02 (1 by limits), n03 (1 by limits), n04 (1 by limits), and 7 more"},
		"something else":      {[]v1alpha1.GPUNode{node("a", 4, 0, 0, 0), node("b", 0, 0, 0, 4)}, 4, ""},
		"no GPUs":             {[]v1alpha1.GPUNode{node("a", 0, 0, 0, 0)}, 1, ""},
		"no nodes":            {nil, 1, ""},
		"one GPU on one node": {[]v1alpha1.GPUNode{node("a", 1, 0, 0, 0)}, 1, "all GPUs of a are held: 1 by limits"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Explain(c.nodes, Ask{Devices: c.asked}); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

func class(name, expression string) resourceapi.DeviceClass {
	return resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.DeviceClassSpec{
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}},
	}}
}

func gpuLimits(n string) corev1.ResourceRequirements {
	return corev1.ResourceRequirements{Limits: corev1.ResourceList{testResource: resource.MustParse(n)}}
}

func TestAsked(t *testing.T) {
	mapped := class("mapped", `device.driver == "gpu.nvidia.com" && true`)
	mapped.Spec.ExtendedResourceName = ptr.To("example.com/fast")
	ours := NewOurs(testDriver, device.Resources{GPU: testResource}, []resourceapi.DeviceClass{
		class("gpu.nvidia.com", `device.driver == 'gpu.nvidia.com'`), mapped, class("nic", `device.driver == "net.example.com"`), class("near", `device.driver == "xgpu.nvidia.com"`),
		class("mig", `device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == 'mig'`),
	})
	request := func(class string, count int64) *resourceapi.ResourceClaim {
		c := newClaim("c")
		c.Spec.Devices.Requests[0].Exactly = &resourceapi.ExactDeviceRequest{DeviceClassName: class, Count: count}
		return c
	}
	first := newClaim("c")
	first.Spec.Devices.Requests[0] = resourceapi.DeviceRequest{FirstAvailable: []resourceapi.DeviceSubRequest{
		{DeviceClassName: "nic"}, {DeviceClassName: "gpu.nvidia.com", Count: 3}, {DeviceClassName: "gpu.nvidia.com", Count: 1}}}
	byClaim := func(pod *corev1.Pod) {
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimTemplateName: ptr.To("t")}}
		pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "x", ResourceClaimName: ptr.To("c")}}
	}
	resourceOf := func(name, n string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(name): resource.MustParse(n)}
		}
	}
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		claim  *resourceapi.ResourceClaim
		want   int64
		limits bool // It is by limits alone.
	}{
		"nothing":                 {func(*corev1.Pod) {}, nil, 0, false},
		"limits":                  {resourceOf(testResource, "2"), nil, 2, true},
		"other limits":            {resourceOf("cpu", "2"), nil, 0, false},
		"the class's resource":    {resourceOf("example.com/fast", "1"), nil, 1, false},
		"a class's implicit name": {resourceOf("deviceclass.resource.kubernetes.io/gpu.nvidia.com", "1"), nil, 1, false},
		"another's implicit name": {resourceOf("deviceclass.resource.kubernetes.io/nic", "1"), nil, 0, false},
		"init containers take turns": {func(p *corev1.Pod) {
			resourceOf(testResource, "1")(p)
			p.Spec.InitContainers = []corev1.Container{{Resources: gpuLimits("3")}, {Resources: gpuLimits("2")}}
		}, nil, 3, true},
		"sidecars do not": {func(p *corev1.Pod) {
			resourceOf(testResource, "1")(p)
			p.Spec.InitContainers = []corev1.Container{{Resources: gpuLimits("3"), RestartPolicy: ptr.To(corev1.ContainerRestartPolicyAlways)}}
		}, nil, 4, true},
		"a claim":                   {byClaim, request("gpu.nvidia.com", 2), 2, false},
		"a claim without a count":   {byClaim, request("gpu.nvidia.com", 0), 1, false},
		"a claim of another driver": {byClaim, request("nic", 2), 0, false},
		"a class that is near":      {byClaim, request("near", 2), 0, false},
		"a class of partitions":     {byClaim, request("mig", 2), 0, false},
		"first available":           {byClaim, first, 3, false},
		"a claim that has its GPU":  {byClaim, newClaim("c", "gpu-0"), 0, false},
		"a claim that is not there": {byClaim, nil, 0, false},
		"by name": {func(p *corev1.Pod) {
			p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimName: ptr.To("c")}}
		}, request("mapped", 1), 1, false},
		"both": {func(p *corev1.Pod) { byClaim(p); resourceOf(testResource, "1")(p) }, request("gpu.nvidia.com", 1), 2, false},
	} {
		t.Run(name, func(t *testing.T) {
			got := ours.Asked(newPod("a", c.change), func(name string) *resourceapi.ResourceClaim {
				if name != "c" {
					t.Errorf("asked for claim %s", name)
				}
				return c.claim
			})
			want := Ask{Devices: c.want}
			if c.limits {
				want.Limits = testResource
			}
			if got != want {
				t.Errorf("%+v", got)
			}
		})
	}
	parts := newPod("a", func(p *corev1.Pod) {
		resourceOf("nvidia.com/mig-1g.10gb", "2")(p)
		p.Spec.InitContainers = []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/mig-1g.10gb": resource.MustParse("3")}}}}
	})
	if got := ours.Asked(parts, nil); got != (Ask{Devices: 3, Resource: "nvidia.com/mig-1g.10gb"}) {
		t.Errorf("partitions: %+v", got)
	}
}

func TestExplainPartitions(t *testing.T) {
	const small = "nvidia.com/mig-1g.10gb"
	part := func(gpu, n int, holders ...v1alpha1.HolderKind) v1alpha1.DeviceStatus {
		d := v1alpha1.DeviceStatus{Name: fmt.Sprintf("gpu-%d-mig-1g10gb-19-%d", gpu, n), Parent: fmt.Sprintf("gpu-%d", gpu), ExtendedResource: small}
		for _, kind := range holders {
			d.Holders = append(d.Holders, v1alpha1.DeviceHolder{Kind: kind})
		}
		return d
	}
	node := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}, Status: v1alpha1.GPUNodeStatus{
		Counts: v1alpha1.DeviceCounts{Total: 3, Free: 1},
		Devices: []v1alpha1.DeviceStatus{
			{Name: "gpu-0"}, {Name: "gpu-1"}, {Name: "gpu-2", Holders: []v1alpha1.DeviceHolder{{Kind: v1alpha1.HolderClaim}}},
			part(1, 0, v1alpha1.HolderPod), part(1, 1), part(2, 0),
		},
	}}
	for resource, want := range map[string]string{
		small:                    "no node has 2 nvidia.com/mig-1g.10gb free: node-1 has 1 of 3 (1 by limits, 1 by claims)",
		"nvidia.com/mig-7g.80gb": "",
	} {
		if got := Explain([]v1alpha1.GPUNode{node}, Ask{Devices: 2, Resource: resource}); got != want {
			t.Errorf("%s: %s, want %s", resource, got, want)
		}
	}
	if got := Explain([]v1alpha1.GPUNode{node}, Ask{Devices: 1, Resource: small}); got != "" {
		t.Errorf("one is free: %s", got)
	}
	node.Status.Devices[4].UnhealthyReason = "Lost"
	want := "all 3 nvidia.com/mig-1g.10gb of node-1 are held or faulty: 1 by limits, 1 by claims, 1 faulty"
	if got := Explain([]v1alpha1.GPUNode{node}, Ask{Devices: 1, Resource: small}); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestExplainByStrategy: what the resource of GPUs stands for on a partitioned node is up to the strategy of limits.
func TestExplainByStrategy(t *testing.T) {
	gpu := device.GPU{UUID: "GPU-0", MIGCapable: true, MIGEnabled: true}
	for i := range 3 {
		gpu.Partitions = append(gpu.Partitions, device.Partition{
			UUID: fmt.Sprintf("MIG-%d", i), Profile: "1g.10gb", ProfileID: 19,
			Ref: device.Ref{GPU: "GPU-0", Placement: device.Placement{Start: i, Size: 1}},
		})
	}
	held := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: "a"}, Device: gpu.Partitions[0].Ref, State: ledger.StateHeld}
	whole := device.GPU{UUID: "GPU-1", Minor: 1}
	taken := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "b"}, Device: whole.Ref(), State: ledger.StateHeld}
	node := func(strategy device.MIGStrategy, gpus ...device.GPU) v1alpha1.GPUNode {
		n := v1alpha1.GPUNode{Status: gpunode.Status(gpunode.Facts{
			Limits: device.Resources{GPU: testResource, Strategy: strategy}, Inventory: device.Inventory{GPUs: gpus},
			Holds: []ledger.Hold{held, taken},
		})}
		n.Name = "node-1"
		return n
	}
	for name, c := range map[string]struct {
		node  v1alpha1.GPUNode
		asked Ask
		want  string
	}{
		"single, limits": {node(device.MIGStrategySingle, gpu), Ask{Devices: 2, Limits: testResource}, ""},
		"single, more limits": {
			node(device.MIGStrategySingle, gpu), Ask{Devices: 3, Limits: testResource},
			"no node has 3 nvidia.com/gpu free: node-1 has 2 of 3 (1 by limits)",
		},
		"single, a claim":   {node(device.MIGStrategySingle, gpu), Ask{Devices: 1}, "all GPUs of node-1 are held: 1 by limits"},
		"mixed, none whole": {node(device.MIGStrategyMixed, gpu), Ask{Devices: 1, Limits: testResource}, ""},
		"mixed, one whole": {
			node(device.MIGStrategyMixed, gpu, whole), Ask{Devices: 1, Limits: testResource},
			"all nvidia.com/gpu of node-1 are held: 1 by claims",
		},
		"not partitioned": {
			node(device.MIGStrategyMixed, whole), Ask{Devices: 1, Limits: testResource}, "all GPUs of node-1 are held: 1 by claims",
		},
	} {
		if got := Explain([]v1alpha1.GPUNode{c.node}, c.asked); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func unscheduled(pod *corev1.Pod) {
	pod.Spec.NodeName = ""
	pod.Spec.Containers[0].Resources = gpuLimits("1")
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
}

func full(s *v1alpha1.GPUNodeStatus) {
	s.Counts = v1alpha1.DeviceCounts{Total: 8, Pods: 5, Claims: 3}
}

func TestExplainTellsOnce(t *testing.T) {
	pod := newPod("a", unscheduled)
	w := newWorld(t, interceptor.Funcs{}, gpuNode(), coreNode("8", "8"), pod)
	pod.Status.Conditions[0].LastTransitionTime = metav1.NewTime(w.clock)
	if err := w.client.Status().Update(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	x := &explainer{client: w.client, driver: testDriver, limits: device.Resources{GPU: testResource}, recorder: w.recorder, now: w.now}
	key := client.ObjectKeyFromObject(pod)
	look := func(want string, again time.Duration) {
		t.Helper()
		result := w.once(x, key)
		if got := w.event(); !strings.Contains(got, want) || (want == "") != (got == "") || result.RequeueAfter != again {
			t.Errorf("event %q, again after %v", got, result.RequeueAfter)
		}
	}
	look("", countAgain) // GPUs are free as far as is known
	w.clock = w.clock.Add(30 * time.Second)
	look("", 30*time.Second) // something else is the reason, most probably
	w.clock = w.clock.Add(time.Hour)
	look("", tellEvery)
	w.set(full)
	look("Normal GPUsHeld all 8 GPUs of node-1 are held: 5 by limits, 3 by claims", tellEvery)
	look("", tellEvery)
	w.clock = w.clock.Add(10 * time.Second)
	w.set(func(s *v1alpha1.GPUNodeStatus) { s.Counts = v1alpha1.DeviceCounts{Total: 8, Pods: 6, Claims: 2} })
	look("", 50*time.Second)
	w.clock = w.clock.Add(time.Minute)
	look("6 by limits, 2 by claims", tellEvery)
	w.clock = w.clock.Add(time.Minute)
	look("", tellEvery) // nothing new
	if err := w.client.Delete(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	look("", 0)
	if len(x.told) > 0 {
		t.Error("remembers a pod that is gone")
	}
	// Another pod of the same name has been told nothing.
	pod = newPod("a", unscheduled, func(p *corev1.Pod) { p.UID = "new" })
	if err := w.client.Create(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	look("6 by limits, 2 by claims", tellEvery)
}

// The scheduler may have seen a pod's claim before the controller has.
func TestExplainWaitsForTheClaim(t *testing.T) {
	claim := newClaim("c")
	claim.Spec.Devices.Requests[0].Exactly = &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com", Count: 1}
	ours := class("gpu.nvidia.com", `device.driver == "gpu.nvidia.com"`)
	pod := newPod("a", unscheduled, func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimTemplateName: ptr.To("t")}}
	})
	w := newWorld(t, interceptor.Funcs{}, gpuNode(full), coreNode("8", "8"), &ours, pod)
	x := &explainer{client: w.client, driver: testDriver, limits: device.Resources{GPU: testResource}, recorder: w.recorder, now: w.now}
	look := func(want string) {
		t.Helper()
		if result := w.once(x, client.ObjectKeyFromObject(pod)); !strings.Contains(w.event(), want) || result.RequeueAfter == 0 {
			t.Errorf("not told %q, again after %v", want, result.RequeueAfter)
		}
	}
	look("")
	pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "x", ResourceClaimName: ptr.To("c")}}
	if err := w.client.Status().Update(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	look("")
	if err := w.client.Create(t.Context(), claim); err != nil {
		t.Fatal(err)
	}
	look("all 8 GPUs of node-1 are held")
}

func TestExplainLeavesOthersAlone(t *testing.T) {
	for name, change := range map[string]func(*corev1.Pod){
		"bound":           func(p *corev1.Pod) { unscheduled(p); p.Spec.NodeName = "node-1" },
		"not yet tried":   func(p *corev1.Pod) { unscheduled(p); p.Status.Conditions = nil },
		"gated":           func(p *corev1.Pod) { unscheduled(p); p.Status.Conditions[0].Reason = corev1.PodReasonSchedulingGated },
		"asks for no GPU": func(p *corev1.Pod) { unscheduled(p); p.Spec.Containers[0].Resources = corev1.ResourceRequirements{} },
		"going":           func(p *corev1.Pod) { unscheduled(p); deleting(p) },
	} {
		t.Run(name, func(t *testing.T) {
			pod := newPod("a", change)
			w := newWorld(t, interceptor.Funcs{}, gpuNode(full), coreNode("8", "8"), pod)
			x := &explainer{client: w.client, driver: testDriver, limits: device.Resources{GPU: testResource}, recorder: w.recorder, now: w.now}
			if result := w.once(x, client.ObjectKeyFromObject(pod)); w.event() != "" || result.RequeueAfter != 0 {
				t.Errorf("told, or again after %v", result.RequeueAfter)
			}
		})
	}
}

// A node that the pod may not run on is no part of the reason, whatever is free there.
func TestMayRun(t *testing.T) {
	node := coreNode("8", "8")
	node.Labels = map[string]string{"pool": "a"}
	node.Spec.Taints = []corev1.Taint{{Key: "team", Value: "x", Effect: corev1.TaintEffectNoSchedule}, {Key: "soft", Effect: corev1.TaintEffectPreferNoSchedule}}
	tolerates := func(p *corev1.Pod) {
		p.Spec.Tolerations = []corev1.Toleration{{Key: "team", Operator: corev1.TolerationOpExists}}
	}
	affinity := func(value string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{
				PodAffinity: &corev1.PodAffinity{},
				NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
					{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "pool", Operator: corev1.NodeSelectorOpIn, Values: []string{value}}}}}}},
			}
		}
	}
	for name, c := range map[string]struct {
		change []func(*corev1.Pod)
		want   bool
	}{
		"tolerates":        {[]func(*corev1.Pod){tolerates}, true},
		"does not":         {nil, false},
		"selects it":       {[]func(*corev1.Pod){tolerates, func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"pool": "a"} }}, true},
		"selects another":  {[]func(*corev1.Pod){tolerates, func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"pool": "b"} }}, false},
		"drawn to it":      {[]func(*corev1.Pod){tolerates, affinity("a")}, true},
		"drawn to another": {[]func(*corev1.Pod){tolerates, affinity("b")}, false},
	} {
		pod, trimmed := newPod("a", c.change...), node.DeepCopy()
		trimPod(pod)
		trimNode(trimmed, device.Resources{GPU: testResource})
		if got := MayRun(pod)(trimmed); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
	w := newWorld(t, interceptor.Funcs{}, gpuNode(full), node)
	x := &explainer{client: w.client, driver: testDriver, limits: device.Resources{GPU: testResource}, recorder: w.recorder, now: w.now}
	for _, c := range []struct {
		pod  *corev1.Pod
		want int
	}{{newPod("a", tolerates), 1}, {newPod("a"), 0}} {
		if nodes, err := x.nodes(t.Context(), c.pod); err != nil || len(nodes) != c.want {
			t.Errorf("%d nodes, %v", len(nodes), err)
		}
	}
	w.set(func(s *v1alpha1.GPUNodeStatus) { s.Counts = v1alpha1.DeviceCounts{} })
	if nodes, err := x.nodes(t.Context(), newPod("a", tolerates)); err != nil || len(nodes) != 0 {
		t.Errorf("%d nodes without a GPU, %v", len(nodes), err)
	}
}
