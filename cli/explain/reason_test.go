// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// TestFirstLine: the first line names what cannot be had, what the nodes have instead, and near misses.
func TestFirstLine(t *testing.T) {
	limits := func(name string) func(*Facts) {
		return func(f *Facts) {
			f.Pod = newPod("a", byLimits(name, 1))
		}
	}
	part := func(resource string) func(*Facts) {
		return func(f *Facts) {
			limits("nvidia.com/mig-1g.10gb")(f)
			d := v1alpha1.DeviceStatus{Name: "gpu-0-mig-1g10gb-19-0", Parent: "gpu-0", Profile: "1g.10gb", ExtendedResource: resource}
			f.GPUNodes[0].Status.Devices = append(f.GPUNodes[0].Status.Devices, d)
		}
	}
	labelled := func(strategy string) func(*Facts) {
		return func(f *Facts) {
			limits("nvidia.com/mig-1g.10gb")(f)
			f.Nodes[0].Labels = map[string]string{"nvidia.com/gpu.present": "true", "nvidia.com/mig.strategy": strategy}
		}
	}
	selectors := func(of ...string) func(*Facts) {
		return func(f *Facts) { f.Claims["c"].Spec.Devices.Requests = exactly(1, of...) }
	}
	const attributes = `device.attributes["gpu.nvidia.com"]`
	for name, c := range map[string]struct {
		change func(*Facts)
		want   string
	}{
		"a value": {selectors(attributes + `.architecture == "Blackwell"`),
			`cannot run: no device matches ` + attributes + `.architecture == "Blackwell" of claim c; the nodes offer architecture Hopper`},
		"nearly a value":        {selectors(attributes + `["architecture"] == 'hoper'`), "; the nodes offer architecture Hopper (did you mean Hopper?)"},
		"a key without a value": {selectors(attributes + `.?architectur.orValue("") == "Hopper"`), "; the nodes offer no architectur (did you mean architecture?)"},
		"the second of two":     {selectors(attributes+`.productName == "H100"`, attributes+`.uuid == "GPU-7"`), "of claim c together with the selectors before it; the nodes offer uuid GPU-0, GPU-1"},
		"a key that fails":      {selectors(attributes + `.architectur == "Hopper"`), "waits: a selector of claim c fails on gpu-0 of node-0, so the scheduler tries no other node: no such key: architectur (did you mean architecture?): "},
		"a wrong type":          {selectors(attributes + `.architecture < 3`), "fails on gpu-0 of node-0, so the scheduler tries no other node: no such overload: "},
		"a class that fails": {func(f *Facts) {
			f.Classes[0].Spec.Selectors = append(f.Classes[0].Spec.Selectors, exactly(1, attributes+`.brand == "x"`)[0].Exactly.Selectors...)
		}, "no such key: brand: " + attributes + `.brand == "x"`},
		"no device of the class": {func(f *Facts) {
			f.Classes[0] = class("gpu.nvidia.com", `device.driver == "gpu.nvidia.com" && `+attributes+`.type == "mig"`)
		}, "cannot run: no device is of class gpu.nvidia.com; the nodes offer type gpu"},
		"too many":           {func(f *Facts) { f.Claims["c"].Spec.Devices.Requests = exactly(3) }, "cannot run: no node has 3 of class gpu.nvidia.com: the most on one node is 2"},
		"more than a claim":  {func(f *Facts) { f.Claims["c"].Spec.Devices.Requests = exactly(33) }, "waits: an error on node-0 makes the scheduler give up on all nodes: claim ns/c"},
		"partitions, none":   {labelled(""), "cannot run: no node offers nvidia.com/mig-1g.10gb: migStrategy is none; the nodes offer nvidia.com/gpu"},
		"partitions, mixed":  {labelled("mixed"), ": no node has such partitions; the nodes offer nvidia.com/gpu"},
		"partitions, unset":  {part(""), ": migStrategy is none on node-0, which has such partitions; "},
		"partitions, single": {part("nvidia.com/gpu"), ": with migStrategy single, the partitions of node-0 are offered as nvidia.com/gpu; "},
		"nearly a partition": {func(f *Facts) { part("nvidia.com/mig-1g.10gb")(f); limits("nvidia.com/mig-1g.10g")(f) }, "no node offers nvidia.com/mig-1g.10g (did you mean nvidia.com/mig-1g.10gb?)"},
		"nearly a resource":  {limits("nvidia.com/gpus"), "requests no GPU: no node offers nvidia.com/gpus (did you mean nvidia.com/gpu?)"},
		"another domain":     {limits("nvdia.com/gpu"), "requests no GPU: no node offers nvdia.com/gpu (did you mean nvidia.com/gpu?)"},
		"of the domain":      {limits("nvidia.com/accelerator"), "requests no GPU: no node offers nvidia.com/accelerator; the nodes offer nvidia.com/gpu"},
		"another driver's": {func(f *Facts) {
			limits("nvidia.com/gpux")(f)
			f.Nodes[0].Status.Allocatable["nvidia.com/gpux"] = resource.MustParse("1")
		}, "requests no GPU"},
		"nearly a class": {func(f *Facts) { f.Claims["c"].Spec.Devices.Requests[0].Exactly.DeviceClassName = "gpu.nvidia.org" }, "does not exist (did you mean gpu.nvidia.com?)"},
		"memory of the node": {func(f *Facts) {
			limits("nvidia.com/gpu")(f)
			f.Pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"memory": resource.MustParse("9Gi")}
			f.Nodes[0].Status.Allocatable["memory"] = resource.MustParse("8Gi")
		}, "cannot run on node-0, which has 1 nvidia.com/gpu: it has only 8Gi of memory, and the pod requests 9Gi"},
		"memory that others have": {func(f *Facts) {
			says("0/9 nodes are available: 1 Insufficient memory, 2 cannot allocate all claims, 3 node(s) had untolerated taint(s), 4 Insufficient nvidia.com/gpu. preemption: none")(f.Pod)
		}, "waits, although node-0 has free GPUs for it: the scheduler says 0/9 nodes are available: 1 Insufficient memory, 2 cannot allocate all claims, 3 node(s) had"},
		"processors of all": {func(f *Facts) {
			says("0/9 nodes are available: 1 node(s) had untolerated taint(s), 4 Insufficient memory, 9 Insufficient cpu. preemption: none")(f.Pod)
		}, "waits: the scheduler says 4 Insufficient memory, 9 Insufficient cpu; node-0 has free GPUs for it"},
		"a volume of another node": {func(f *Facts) {
			says("0/1 nodes are available: 1 node(s) had volume node affinity conflict. preemption: none")(f.Pod)
		}, "waits: the scheduler says 1 node(s) had volume node affinity conflict; node-0 has free GPUs for it"},
	} {
		t.Run(name, func(t *testing.T) {
			f := facts(exactly(1), "--")
			c.change(&f)
			if got := answerTo(t, f); !strings.Contains(got.Summary, c.want) || name == "another driver's" && got.Summary != c.want {
				t.Errorf("%s: %s, want %s", got.Cause, got.Summary, c.want)
			}
		})
	}
}

// TestFailsOnAnUnservedNode: the scheduler tries the ResourceSlices of a node without an agent that serves, and gives up the pod there as well.
func TestFailsOnAnUnservedNode(t *testing.T) {
	for name, change := range map[string]func(*Facts){
		"unserved":       func(f *Facts) { f.GPUNodes[0].Status.Waiting = "no driver" },
		"without agent":  func(f *Facts) { f.GPUNodes = f.GPUNodes[1:] },
		"not failing":    func(f *Facts) { f.GPUNodes[0].Status.Waiting, f.Slices = "no driver", f.Slices[1:] },
		"may not run it": func(f *Facts) { f.GPUNodes[0].Status.Waiting, f.Nodes[0].Spec.Unschedulable = "no driver", true },
	} {
		f := facts(exactly(1, `device.attributes["gpu.nvidia.com"].brand == "x"`), "-", "-")
		f.Slices[1].Spec.Devices[0].Attributes["brand"] = resourceapi.DeviceAttribute{StringValue: ptr.To("x")}
		change(&f)
		want := CauseRoom
		if name == "unserved" || name == "without agent" {
			want = CauseSelector
		}
		if got := answerTo(t, f); got.Cause != want || want == CauseSelector && !strings.Contains(got.Summary, "fails on gpu-0 of node-0") {
			t.Errorf("%s: %s: %s", name, got.Cause, got.Summary)
		}
	}
}

// TestConstraints: devices that match alone and not together.
func TestConstraints(t *testing.T) {
	attribute := resourceapi.FullyQualifiedName("gpu.nvidia.com/uuid")
	f := facts(exactly(2), "--")
	f.Claims["c"].Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &attribute}}
	if got := answerTo(t, f); got.Cause != CauseNever || !strings.HasSuffix(got.Summary, "node-0: it has no such devices with the same gpu.nvidia.com/uuid") {
		t.Errorf("%s: %s", got.Cause, got.Summary)
	}
	f.Slices[0].Spec.Pool.ResourceSliceCount = 3
	if got := answerTo(t, f); !strings.Contains(got.Summary, "its agent is still writing its ResourceSlices: pool node-0 lacks 2 of them") {
		t.Errorf("%s: %s", got.Cause, got.Summary)
	}
}
