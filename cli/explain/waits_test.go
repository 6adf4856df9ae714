// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
)

func byLimits(name string, n int64) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(name): *resource.NewQuantity(n, resource.DecimalSI)}
	}
}

// withLimits makes the pod request GPUs by a limit only, and the nodes offer their GPUs by it.
func withLimits(f *Facts) {
	f.Claims, f.Pod.Spec.ResourceClaims = nil, nil
	byLimits(testResource, 1)(f.Pod)
	for i := range f.GPUNodes {
		n := &f.GPUNodes[i]
		n.Status.ExtendedResource = testResource
		counted := availability.NewNode(n.Status, nil)
		for _, d := range n.Status.Devices {
			counted.Count(&n.Status.Counts, d)
		}
	}
}

// says sets what the scheduler says of a pod.
func says(message string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: message}}
	}
}

// TestExcludedNodes: a node that may not run the pod is said to have devices only if it has them now, and a fault of the node is no wish of its
// administrator.
func TestExcludedNodes(t *testing.T) {
	cordoned := func(f *Facts) { f.Nodes[0].Spec.Unschedulable = true }
	tainted := func(key string) func(*Facts) {
		return func(f *Facts) {
			f.Nodes[0].Spec.Taints = []corev1.Taint{{Key: key, Effect: corev1.TaintEffectNoSchedule}}
		}
	}
	for name, c := range map[string]struct {
		devices     string
		change      func(*Facts)
		want, frees string
	}{
		"cordoned": {"--", cordoned, "cannot run on node-0, which has 1 of class gpu.nvidia.com: it is cordoned", "node-0, once it is uncordoned"},
		"cordoned and full": {
			"xx", cordoned, "cannot run on node-0: it is cordoned, and 0 of 2 devices that match claim c are free; the pod requests 1",
			"node-0, once it is uncordoned, and once enough of its devices are free",
		},
		"dead": {"--", func(f *Facts) {
			tainted(corev1.TaintNodeUnreachable)(f)
			since := metav1.Unix(0, 0)
			f.GPUNodes[0].Status.Waiting, f.GPUNodes[0].Status.WaitingSince = availability.Silent, &since
		}, "cannot run on node-0: it is not ready, and its agent has been silent since 1970-01-01T00:00:00Z: its GPUNode is of that time, and new pods may get no GPU",
			"node-0, once it is ready, and once its agent serves GPUs"},
		"under pressure": {
			"--", tainted("node.kubernetes.io/disk-pressure"),
			"cannot run on node-0, which has 1 of class gpu.nvidia.com: it has the taint node.kubernetes.io/disk-pressure:NoSchedule",
			"node-0, once it no longer has the taint node.kubernetes.io/disk-pressure:NoSchedule",
		},
		"tainted by its administrator": {
			"--", tainted("team"), "cannot run on node-0, which has 1 of class gpu.nvidia.com: the pod does not tolerate its taint team:NoSchedule",
			"node-0, with a toleration of its taint team:NoSchedule",
		},
	} {
		f := facts(exactly(1), c.devices)
		c.change(&f)
		a := answerTo(t, f)
		if a.Cause != CauseExcluded || a.Summary != c.want || strings.Join(a.Frees, "\n") != c.frees {
			t.Errorf("%s: %s\n%q\nwant\n%s\n%q", name, a.Summary, a.Frees, c.want, c.frees)
		}
	}

	f := facts(exactly(1), "--", "xx")
	withLimits(&f)
	f.Pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"memory": resource.MustParse("900Gi")}
	f.Nodes[0].Status.Allocatable["memory"] = resource.MustParse("500Gi")
	f.Nodes[1].Status.Allocatable["memory"] = resource.MustParse("1000Gi")
	if a := answerTo(t, f); a.Summary != "waits: no node that may run it has 1 nvidia.com/gpu free" {
		t.Errorf("node-0 has GPUs and too little memory: %s", a.Summary)
	}
}

// TestModesOfNodes: claims get no GPU of a node in mode DevicePluginOnly, and in mode Split none of those for limits.
func TestModesOfNodes(t *testing.T) {
	f := facts(exactly(1), "--", "xx")
	f.GPUNodes[0].Status.Mode = "DevicePluginOnly"
	f.Slices = f.Slices[1:]
	a := answerTo(t, f)
	if last := a.Nodes[len(a.Nodes)-1]; a.Cause != CauseFull || last.Fit != FitNever || last.Reason != "its mode DevicePluginOnly serves no claims" {
		t.Errorf("%s; %+v", a.Summary, a.Nodes)
	}
	for _, c := range []struct {
		count int64
		held  bool
		fit   Fit
		want  string
	}{
		{3, false, FitNever, "it has 2 devices that match claim c in all; the pod requests 3"},
		{1, true, FitFull, "0 of 2 devices that match claim c are free; the pod requests 1"},
	} {
		f := facts(exactly(c.count), "----") // the last two are for limits
		n := &f.GPUNodes[0]
		n.Status.Mode, n.Status.ExtendedResource = "Split", testResource
		f.Slices[0].Spec.Devices = f.Slices[0].Spec.Devices[:2]
		for i := range 2 {
			n.Status.Devices[i].ExtendedResource = ""
			if c.held {
				n.Status.Devices[i].Holders = []v1alpha1.DeviceHolder{{Kind: v1alpha1.HolderClaim, UID: "u", Namespace: "web", Name: "x"}}
				n.Spec.Claims = []v1alpha1.AllocatedClaim{{UID: "u", Namespace: "web", Name: "x", Devices: []string{"gpu-0", "gpu-1"}, Pools: []string{"node-0"}}}
			}
		}
		if a := answerTo(t, f); a.Nodes[0].Fit != c.fit || a.Nodes[0].Reason != c.want {
			t.Errorf("%d of 2 for claims: %s: %s, want %s", c.count, a.Nodes[0].Fit, a.Nodes[0].Reason, c.want)
		}
	}
}

// TestNoRoom: where the scheduler says no, no node has room.
func TestNoRoom(t *testing.T) {
	for name, c := range map[string]struct {
		devices []string
		change  func(*Facts)
		cause   Cause
		want    string
	}{
		"a claim that was deleted": {[]string{"x"}, func(f *Facts) {
			of := &resourceapi.ResourceClaimTemplate{}
			of.Spec.Spec = f.Claims["c"].Spec
			f.Claims, f.Templates = nil, map[string]*resourceapi.ResourceClaimTemplate{"t": of}
			f.Pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimTemplateName: ptr.To("t")}}
			f.Pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "x", ResourceClaimName: ptr.To("a-x-1")}}
			f.Nodes = append(f.Nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "cpu-1"}})
		}, CauseNoClaim, "waits: claim a-x-1 was deleted: kube-controller-manager creates another of template t"},
		"kubelet does not offer it yet": {[]string{"-"}, func(f *Facts) {
			withLimits(f)
			f.Nodes[0].Status.Allocatable = nil
			says("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")(f.Pod)
		}, CauseFull, "waits: no node has 1 nvidia.com/gpu free"},
		"a claim that is elsewhere, without the right to read nodes": {[]string{"x", "-", "-"}, func(f *Facts) {
			f.NotRead, f.Nodes = []NotRead{{Kind: KindNodes}}, nil
			withLimits(f)
			f.Pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimName: ptr.To("c")}}
			claim := &resourceapi.ResourceClaim{}
			claim.Status.Allocation = &resourceapi.AllocationResult{
				Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{Driver: testDriver, Pool: "node-0", Device: "gpu-0"}}},
				NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{
					{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{"node-0"}}}}}},
			}
			f.Claims = map[string]*resourceapi.ResourceClaim{"c": claim}
		}, CauseFull, "waits: no node that may run it has 1 nvidia.com/gpu free"},
		"partitions of another domain": {[]string{"-"}, func(f *Facts) {
			withLimits(f)
			byLimits("example.com/mig-1g.10gb", 1)(f.Pod)
			n := &f.GPUNodes[0]
			n.Status.ExtendedResource = "example.com/gpu"
			n.Status.Devices[0].ExtendedResource, n.Status.Devices[0].UnhealthyReason = "example.com/gpu", "XID: 79"
			n.Status.Devices = append(n.Status.Devices, v1alpha1.DeviceStatus{
				Name: "gpu-1-mig-1g10gb-19-0", Parent: "gpu-1", Profile: "1g.10gb", ExtendedResource: "example.com/mig-1g.10gb",
				Holders: []v1alpha1.DeviceHolder{{Kind: v1alpha1.HolderPod, Pods: []v1alpha1.PodReference{{UID: "x", Namespace: "web", Name: "x"}}}},
			})
			n.Status.Counts = v1alpha1.DeviceCounts{Total: 2, Unhealthy: 1, Pods: 1}
		}, CauseFull, "waits: all example.com/mig-1g.10gb of node-0 are held: 1 by pods"},
	} {
		f := facts(exactly(1), c.devices...)
		c.change(&f)
		if a := answerTo(t, f); a.Cause != c.cause || a.Summary != c.want {
			t.Errorf("%s: %s: %s, want %s: %s; %+v", name, a.Cause, a.Summary, c.cause, c.want, a.Nodes)
		}
	}
}

// TestLimitsComeBeforeClaims: the scheduler's NodeResourcesFit excludes a node before its DynamicResources evaluates selectors on its devices.
func TestLimitsComeBeforeClaims(t *testing.T) {
	f := facts(exactly(1, `device.attributes["gpu.nvidia.com"].architecture == "Hopper"`), "----", "xx")
	for _, d := range f.Slices[0].Spec.Devices[:2] {
		d = *d.DeepCopy()
		delete(d.Attributes, "architecture")
		d.Taints = []resourceapi.DeviceTaint{{Key: "tandem-gpu.dev/held", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
		f.Slices[1].Spec.Devices = append(f.Slices[1].Spec.Devices, d)
	}
	byLimits(testResource, 1)(f.Pod)
	if a := answerTo(t, f); a.Cause != CauseRoom {
		t.Errorf("kubelet of node-1 offers no GPU, and node-0 has room: %s: %s", a.Cause, a.Summary)
	}
}

// TestQuotaOfAll: a quota counts as many devices for allocationMode All as a claim can have.
func TestQuotaOfAll(t *testing.T) {
	const name = "gpu.nvidia.com.deviceclass.resource.k8s.io/devices"
	all := exactly(0)
	all[0].Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
	of := &resourceapi.ResourceClaimTemplate{}
	of.Spec.Spec.Devices.Requests = all
	f := facts(all, "-")
	f.Claims, f.Templates = nil, map[string]*resourceapi.ResourceClaimTemplate{"t": of}
	f.Pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimTemplateName: ptr.To("t")}}
	f.Quotas = []corev1.ResourceQuota{{ObjectMeta: metav1.ObjectMeta{Name: "q"}, Status: corev1.ResourceQuotaStatus{
		Hard: corev1.ResourceList{name: resource.MustParse("40")}, Used: corev1.ResourceList{name: resource.MustParse("32")},
	}}}
	f.QuotaClaims = []resourceapi.ResourceClaim{{ObjectMeta: metav1.ObjectMeta{Name: "other"}, Spec: of.Spec.Spec}}
	const want = "q: 32 of 40 " + name + " are used: it has no room: claim other has 32"
	if got := answerTo(t, f).Quotas; len(got) != 1 || got[0] != want {
		t.Errorf("%q, want %q", got, want)
	}
}
