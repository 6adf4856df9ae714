// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

const (
	testDriver   = "gpu.nvidia.com"
	testResource = "nvidia.com/gpu"
	gib          = int64(1) << 30
)

// newPod returns a pod with one container.
func newPod(name string, changes ...func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}}}}
	for _, change := range changes {
		change(pod)
	}
	return pod
}

func TestWhyNone(t *testing.T) {
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
		"one node":            {[]v1alpha1.GPUNode{node("node-1", 5, 3, 0, 0)}, 1, "all 8 GPUs of node-1 are held: 5 by pods, 3 by claims"},
		"by one kind":         {[]v1alpha1.GPUNode{node("node-1", 0, 8, 0, 0)}, 1, "all 8 GPUs of node-1 are held: 8 by claims"},
		"one is unhealthy":    {[]v1alpha1.GPUNode{node("node-1", 5, 2, 1, 0)}, 1, "all 8 GPUs of node-1 are held or unhealthy: 5 by pods, 2 by claims, 1 unhealthy"},
		"too few":             {[]v1alpha1.GPUNode{node("node-1", 5, 1, 0, 2)}, 4, "no node has 4 GPUs free: node-1 has 2 of 8 (5 by pods, 1 by claims)"},
		"two nodes":           {[]v1alpha1.GPUNode{node("b", 4, 0, 0, 0), node("a", 3, 1, 0, 0)}, 1, "all 8 GPUs of 2 nodes are held: a (3 by pods, 1 by claims), b (4 by pods)"},
		"most first":          {[]v1alpha1.GPUNode{node("a", 4, 0, 0, 0), node("b", 3, 0, 0, 1)}, 2, "no node has 2 GPUs free: b has 1 of 4 (3 by pods), a has 0 of 4 (4 by pods)"},
		"many":                {many, 1, "all 12 GPUs of 12 nodes are held: n00 (1 by pods), n01 (1 by pods), n02 (1 by pods), n03 (1 by pods), n04 (1 by pods), and 7 more"},
		"something else":      {[]v1alpha1.GPUNode{node("a", 4, 0, 0, 0), node("b", 0, 0, 0, 4)}, 4, ""},
		"no GPUs":             {[]v1alpha1.GPUNode{node("a", 0, 0, 0, 0)}, 1, ""},
		"no nodes":            {nil, 1, ""},
		"one GPU on one node": {[]v1alpha1.GPUNode{node("a", 1, 0, 0, 0)}, 1, "all GPUs of a are held: 1 by pods"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := whyNone(c.nodes, request{Devices: c.asked}); got != c.want {
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

func TestOfWholeGPUs(t *testing.T) {
	const typed = `device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == `
	for expression, want := range map[string]bool{
		typed + `"gpu"`: true,
		typed + `'gpu' && device.attributes["gpu.nvidia.com"].productName == "H100"`: true,
		typed + `'mig'`:                       false,
		typed + `"gpu" || ` + typed + `"mig"`: false,
		`device.driver == 'gpu.nvidia.com' && device.attributes["gpu.nvidia.com"].profile == "1g.10gb"`: false,
		`device.driver == 'gpu.nvidia.com'`:                    false, // partitions as well
		`device.driver == "xgpu.nvidia.com" && "gpu" == "gpu"`: false,
	} {
		if got := ofWholeGPUs(class("x", expression), testDriver); got != want {
			t.Errorf("%s: %v", expression, got)
		}
	}
}

func TestWhyNonePartitions(t *testing.T) {
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
		small:                    "no node has 2 nvidia.com/mig-1g.10gb free: node-1 has 1 of 3 (1 by pods, 1 by claims)",
		"nvidia.com/mig-7g.80gb": "",
	} {
		if got := whyNone([]v1alpha1.GPUNode{node}, request{Devices: 2, Resource: resource}); got != want {
			t.Errorf("%s: %s, want %s", resource, got, want)
		}
	}
	if got := whyNone([]v1alpha1.GPUNode{node}, request{Devices: 1, Resource: small}); got != "" {
		t.Errorf("one is free: %s", got)
	}
	node.Status.Devices[4].UnhealthyReason = "Lost"
	want := "all 3 nvidia.com/mig-1g.10gb of node-1 are held or unhealthy: 1 by pods, 1 by claims, 1 unhealthy"
	if got := whyNone([]v1alpha1.GPUNode{node}, request{Devices: 1, Resource: small}); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// On a partitioned node the MIG strategy decides which devices the resource of GPUs names.
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
		inventory := device.Inventory{GPUs: gpus}
		holds := slices.DeleteFunc([]ledger.Hold{held, taken}, func(h ledger.Hold) bool { _, has := inventory.ByUUID(h.Device.GPU); return !has })
		n := v1alpha1.GPUNode{Status: gpunode.Status(gpunode.Facts{
			Limits: device.Resources{GPU: testResource, Strategy: strategy}, Inventory: inventory, Holds: holds,
		})}
		n.Name = "node-1"
		return n
	}
	for name, c := range map[string]struct {
		node  v1alpha1.GPUNode
		asked request
		want  string
	}{
		"single, limits": {node(device.MIGStrategySingle, gpu), request{Devices: 2, Limits: testResource}, ""},
		"single, more limits": {
			node(device.MIGStrategySingle, gpu), request{Devices: 3, Limits: testResource},
			"no node has 3 nvidia.com/gpu free: node-1 has 2 of 3 (1 by pods)",
		},
		"single, a claim":   {node(device.MIGStrategySingle, gpu), request{Devices: 1}, "all GPUs of node-1 are held: 1 by pods"},
		"mixed, none whole": {node(device.MIGStrategyMixed, gpu), request{Devices: 1, Limits: testResource}, ""},
		"mixed, one whole": {
			node(device.MIGStrategyMixed, gpu, whole), request{Devices: 1, Limits: testResource},
			"all nvidia.com/gpu of node-1 are held: 1 by claims",
		},
		"not partitioned": {
			node(device.MIGStrategyMixed, whole), request{Devices: 1, Limits: testResource}, "all GPUs of node-1 are held: 1 by claims",
		},
	} {
		if got := whyNone([]v1alpha1.GPUNode{c.node}, c.asked); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestMayRun(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", Labels: map[string]string{"pool": "a"}}}
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
		if got := MayRun(newPod("a", c.change...))(node); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// sharedNode returns a node with two GPUs of 24 GiB; the holders are those of gpu-0.
func sharedNode(holders ...v1alpha1.DeviceHolder) v1alpha1.GPUNode {
	node := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}
	for _, name := range []string{"gpu-0", "gpu-1"} {
		node.Status.Devices = append(node.Status.Devices, v1alpha1.DeviceStatus{
			Name: name, Sharing: &v1alpha1.DeviceSharing{Claims: "memory", Memory: 24 * gib},
		})
	}
	node.Status.Devices[0].Holders = holders
	return node
}

func claimShare(uid types.UID, memory int64) v1alpha1.DeviceHolder {
	return v1alpha1.DeviceHolder{Kind: v1alpha1.HolderClaim, UID: uid, State: v1alpha1.HoldHeld, Memory: memory}
}

func TestExplainShares(t *testing.T) {
	full := sharedNode(claimShare("a", 10*gib), claimShare("b", 10*gib))
	full.Status.Devices[1].Holders = []v1alpha1.DeviceHolder{{Kind: v1alpha1.HolderPod, State: v1alpha1.HoldHeld, Memory: 6 * gib}, claimShare("c", 10*gib)}
	whole := sharedNode(claimShare("a", 0))
	whole.Name, whole.Status.Devices = "node-2", whole.Status.Devices[:1]
	counted := func(uid types.UID, shares int64) v1alpha1.DeviceHolder {
		return v1alpha1.DeviceHolder{Kind: v1alpha1.HolderClaim, UID: uid, State: v1alpha1.HoldHeld, Shared: true, Shares: shares}
	}
	divided := sharedNode(counted("a", 1), counted("b", 3))
	divided.Name, divided.Status.Devices = "node-3", divided.Status.Devices[:1]
	divided.Status.Counts = v1alpha1.DeviceCounts{Total: 1, Claims: 1}
	divided.Status.Devices[0].Sharing = &v1alpha1.DeviceSharing{Claims: "shares", Memory: 24 * gib, Shares: 4}
	unlimited := sharedNode(counted("a", 0), claimShare("b", 10*gib))
	unlimited.Name, unlimited.Status.Devices = "node-4", unlimited.Status.Devices[:1]
	unlimited.Status.Counts = v1alpha1.DeviceCounts{Total: 1, Claims: 1}
	unlimited.Status.Devices[0].Sharing = &v1alpha1.DeviceSharing{Claims: "unlimited", Memory: 24 * gib}
	plain := v1alpha1.GPUNode{Status: v1alpha1.GPUNodeStatus{Counts: v1alpha1.DeviceCounts{Total: 1, Free: 1}, Devices: []v1alpha1.DeviceStatus{{Name: "gpu-0"}}}}
	for _, c := range []struct {
		nodes []v1alpha1.GPUNode
		asked request
		want  string
	}{
		{[]v1alpha1.GPUNode{full, whole}, request{Devices: 1, Memory: 10 * gib}, "no node has 10240 MiB left on 1 GPU: node-1 has 8192 MiB at most, node-2 has 0 MiB at most"},
		{[]v1alpha1.GPUNode{full, whole}, request{Devices: 1, Memory: 8 * gib}, ""},
		{[]v1alpha1.GPUNode{full}, request{Devices: 2, Memory: 8 * gib}, "no node has 8192 MiB left on 2 GPUs: node-1 has 8192 MiB at most"},
		{[]v1alpha1.GPUNode{full, plain}, request{Devices: 1, Memory: 10 * gib}, ""},
		{[]v1alpha1.GPUNode{divided}, request{Devices: 1}, "all GPUs of node-3 are held: 1 by claims"},
		{[]v1alpha1.GPUNode{divided, plain}, request{Devices: 1}, ""},
		{[]v1alpha1.GPUNode{divided}, request{Devices: 1, Shares: 2}, "no node has 2 shares left on 1 GPU: node-3 has 0 at most"},
		{[]v1alpha1.GPUNode{divided, unlimited}, request{Devices: 1}, ""},
		{[]v1alpha1.GPUNode{unlimited}, request{Devices: 1, Memory: 20 * gib}, "no node has 20480 MiB left on 1 GPU: node-4 has 14336 MiB at most"},
		{[]v1alpha1.GPUNode{unlimited}, request{Devices: 1, Shares: 1}, "no node has 1 share left on 1 GPU: node-4 has 0 at most"},
		{[]v1alpha1.GPUNode{plain}, request{Devices: 1, Shares: 1}, "no node divides its GPUs into shares; the pod requests 1 share of one"},
		{nil, request{Devices: 1, Memory: gib}, "no node shares the memory of its GPUs; the pod requests 1024 MiB of one"},
	} {
		if got := whyNone(c.nodes, c.asked); got != c.want {
			t.Errorf("%+v: %q, want %q", c.asked, got, c.want)
		}
	}
}
