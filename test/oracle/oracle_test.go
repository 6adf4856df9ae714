// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
)

const node = "node-1"

// world makes pods with one container each, their claims, and the processes in them.
type world struct {
	pods   []corev1.Pod
	claims []resourceapi.ResourceClaim
	seen   []sighting
}

// id of a pod's container in processes and status.
func id(pod string) string { return strings.Repeat("0", 64-len(pod)) + pod }

func (w *world) pod(name string, change ...func(*corev1.Pod)) *world {
	pod := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", UID: types.UID(name)},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}},
		Status:     corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "main", ContainerID: "containerd://" + id(name)}}},
	}
	for _, apply := range change {
		apply(&pod)
	}
	w.pods = append(w.pods, pod)
	return w
}

func limits(n int64) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{resourceName: *resource.NewQuantity(n, resource.DecimalSI)}
	}
}

func claim(names ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		for _, name := range names {
			p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: "by-" + name, ResourceClaimName: &name})
			p.Spec.Containers[0].Resources.Claims = append(p.Spec.Containers[0].Resources.Claims, corev1.ResourceClaim{Name: "by-" + name})
		}
	}
}

func fromTemplate(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: "gpu"})
		p.Status.ResourceClaimStatuses = append(p.Status.ResourceClaimStatuses, corev1.PodResourceClaimStatus{Name: "gpu", ResourceClaimName: &name})
		p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	}
}

func (w *world) claim(name string, admin bool, devices ...string) *world {
	allocated := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", UID: types.UID("uid-" + name)}}
	if len(devices) > 0 {
		allocated.Status.Allocation = &resourceapi.AllocationResult{}
	}
	for _, device := range devices {
		result := resourceapi.DeviceRequestAllocationResult{Driver: driverName, Pool: node, Device: device}
		if admin {
			result.AdminAccess = &admin
		}
		allocated.Status.Allocation.Devices.Results = append(allocated.Status.Allocation.Devices.Results, result)
	}
	w.claims = append(w.claims, allocated)
	return w
}

// sees adds a process of a pod's container that sees GPUs of these minors.
func (w *world) sees(pod string, minors ...uint32) *world {
	seen := sighting{node: node, pid: 100 + len(w.seen), pod: pod, container: id(pod)}
	for _, minor := range minors {
		seen.devices = append(seen.devices, Device{Number: Number{nvidiaMajor, minor}, GPU: gpus(nil).find(Number{nvidiaMajor, minor})})
	}
	w.seen = append(w.seen, seen)
	return w
}

// uses adds a process of a pod's container that may use the i-th partition of a GPU, a 1g.10gb.
func (w *world) uses(pod string, gpu, i uint32) *world {
	seen := sighting{node: node, pid: 100 + len(w.seen), pod: pod, container: id(pod)}
	seen.devices = []Device{{Number: Number{235, 100*gpu + i}, Partition: Partition{
		Instance: fmt.Sprintf("gi%d/ci0", i), GPU: Number{nvidiaMajor, gpu}, Published: [2]string{fmt.Sprintf("-19-%d", i), fmt.Sprintf("-19-%d-0", i)},
	}}}
	w.seen = append(w.seen, seen)
	return w
}

func (w *world) picture(t *testing.T) Picture {
	t.Helper()
	client := fake.NewClientset()
	for _, pod := range w.pods {
		if err := client.Tracker().Add(&pod); err != nil {
			t.Fatal(err)
		}
	}
	for _, claim := range w.claims {
		if err := client.Tracker().Add(&claim); err != nil {
			t.Fatal(err)
		}
	}
	known, err := readObjects(t.Context(), client)
	if err != nil {
		t.Fatal(err)
	}
	return known.explain(w.seen)
}

// TestOwners wants, for each situation, the doubly owned devices and the containers that nothing explains.
func TestOwners(t *testing.T) {
	shared := func(p *corev1.Pod) { claim("c")(p) }
	for name, test := range map[string]struct {
		world       *world
		doubles     []string
		unexplained []string
	}{
		"nothing runs": {world: new(world)},
		"one pod by each API": {world: new(world).pod("a", limits(1)).pod("b", claim("c")).claim("c", false, "gpu-1").
			sees("a", 0).sees("b", 1)},
		"two pods on one GPU":                {world: new(world).pod("a", limits(1)).pod("b", limits(1)).sees("a", 0).sees("b", 0), doubles: []string{"195:0 a b"}},
		"a claim and a pod on one GPU":       {world: new(world).pod("a", limits(1)).pod("b", fromTemplate("c")).claim("c", false, "gpu-0").sees("a", 0).sees("b", 0), doubles: []string{"195:0 a b"}},
		"two claims on one":                  {world: new(world).pod("a", claim("c")).pod("b", claim("d")).claim("c", false, "gpu-3").claim("d", false, "gpu-3").sees("a", 3).sees("b", 3), doubles: []string{"195:3 a b"}},
		"one claim in two pods":              {world: new(world).pod("a", shared).pod("b", shared).claim("c", false, "gpu-2").sees("a", 2).sees("b", 2)},
		"one claim in two pods, other GPU":   {world: new(world).pod("a", shared).pod("b", shared).claim("c", false, "gpu-2").sees("a", 4).sees("b", 4), doubles: []string{"195:4 a b"}, unexplained: []string{"a", "b"}},
		"two containers of a pod":            {world: new(world).pod("a", limits(1)).sees("a", 0).sees("a", 0)},
		"admin access beside a holder":       {world: new(world).pod("a", limits(1)).pod("m", claim("all")).claim("all", true, "gpu-0", "gpu-1").sees("a", 0).sees("m", 0, 1)},
		"two with admin access":              {world: new(world).pod("m", claim("all")).pod("n", claim("all2")).claim("all", true, "gpu-0").claim("all2", true, "gpu-0").sees("m", 0).sees("n", 0)},
		"admin access does not hide a claim": {world: new(world).pod("a", limits(1)).pod("m", claim("all", "c")).claim("all", true, "gpu-0").claim("c", false, "gpu-0").sees("a", 0).sees("m", 0), doubles: []string{"195:0 a m"}},
		"admin access does not hide limits":  {world: new(world).pod("a", limits(1)).pod("m", claim("all"), limits(1)).claim("all", true, "gpu-0").sees("a", 0).sees("m", 0), doubles: []string{"195:0 a m"}},
		"a pod unknown to the API server":    {world: new(world).pod("a", limits(1)).sees("a", 0).sees("ghost", 0), doubles: []string{"195:0 ghost a"}, unexplained: []string{"ghost"}},
		"a pod that asked for nothing":       {world: new(world).pod("a").sees("a", 0), unexplained: []string{"a"}},
		"a claim that is not allocated":      {world: new(world).pod("a", claim("c")).claim("c", false).sees("a", 0), unexplained: []string{"a"}},
		"partitions of one GPU": {world: new(world).pod("a", claim("c")).pod("b", claim("d")).pod("l", limits(1)).
			claim("c", false, "gpu-0-mig-1g10gb-19-1").claim("d", false, "gpu-0-mig-1g10gb-19-2").uses("a", 0, 1).uses("b", 0, 2).uses("l", 0, 3)},
		"two claims on one partition": {world: new(world).pod("a", claim("c")).pod("b", claim("d")).
			claim("c", false, "gpu-0-mig-1g10gb-19-1").claim("d", false, "gpu-0-mig-1g10gb-19-1").uses("a", 0, 1).uses("b", 0, 1), doubles: []string{"235:1 a b"}},
		"a partition of a limit's GPU": {world: new(world).pod("a", claim("c")).pod("l", limits(1)).
			claim("c", false, "gpu-2-mig-1g10gb-19-1").uses("a", 2, 1).sees("l", 2), doubles: []string{"195:2 l a"}},
		"another partition than the claim's": {world: new(world).pod("a", claim("c")).claim("c", false, "gpu-0-mig-1g10gb-19-2").uses("a", 0, 1), unexplained: []string{"a"}},
		"a partition of another GPU":         {world: new(world).pod("a", claim("c")).claim("c", false, "gpu-1-mig-1g10gb-19-1").uses("a", 0, 1), unexplained: []string{"a"}},
		"part of an instance":                {world: new(world).pod("a", claim("c")).claim("c", false, "gpu-0-mig-1c1g10gb-19-1-0").uses("a", 0, 1)},
		"the agent sees everything": {world: new(world).pod("a", limits(1)).pod("tandem", func(p *corev1.Pod) {
			p.Labels = map[string]string{"app.kubernetes.io/name": "tandem", "app.kubernetes.io/component": "kubelet-plugin"}
		}).sees("a", 0).sees("tandem", 0, 1)},
		"an MPS daemon sees everything": {world: new(world).pod("a", claim("c")).pod("tandem-mps-c", func(p *corev1.Pod) {
			p.Labels = map[string]string{"app.kubernetes.io/name": "tandem", "app.kubernetes.io/component": "mps-daemon"}
		}).claim("c", false, "gpu-0").sees("a", 0).sees("tandem-mps-c", 0, 1)},
		"an extended resource by a claim": {world: new(world).pod("a", limits(1), func(p *corev1.Pod) {
			p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "c"}
		}).pod("b", shared).claim("c", false, "gpu-0").sees("a", 0).sees("b", 0)},
	} {
		t.Run(name, func(t *testing.T) {
			picture := test.world.picture(t)
			var doubles, unexplained []string
			for _, double := range picture.DoublyOwned() {
				text := double.Number.String()
				for _, container := range double.Containers {
					text += " " + container.PodUID
				}
				doubles = append(doubles, text)
			}
			for _, container := range picture.Unexplained() {
				unexplained = append(unexplained, container.PodUID)
			}
			if !slices.Equal(doubles, test.doubles) {
				t.Errorf("doubly owned %q, want %q", doubles, test.doubles)
			}
			if !slices.Equal(unexplained, test.unexplained) {
				t.Errorf("unexplained %q, want %q", unexplained, test.unexplained)
			}
		})
	}
}

func TestNodesHaveGPUsOfTheirOwn(t *testing.T) {
	w := new(world).pod("a", limits(1)).pod("b", limits(1)).sees("a", 0).sees("b", 0)
	w.seen[1].node = "node-2"
	if doubles := w.picture(t).DoublyOwned(); len(doubles) > 0 {
		t.Errorf("equal numbers on two nodes count as one device: %v", doubles)
	}
}

func TestPicture(t *testing.T) {
	picture := new(world).pod("b", limits(2)).pod("a", limits(1)).pod("idle").
		sees("b", 7, 6).sees("a", 0).sees("idle").sees("b", 6, 7).picture(t)
	var got []string
	for _, container := range picture.Containers {
		got = append(got, container.Title()+"/"+container.Name)
	}
	if want := []string{"ns/a/main", "ns/b/main", "ns/idle/main"}; !slices.Equal(got, want) {
		t.Fatalf("containers %q, want %q", got, want)
	}
	if b := picture.Pod("ns", "b"); len(b) != 1 || !slices.Equal(b[0].PIDs, []int{100, 103}) || len(b[0].Devices) != 2 {
		t.Errorf("two processes of a container: %+v", b)
	}
	devices := picture.PodDevices("ns", "b")
	if len(devices) != 2 || devices[0].Number.Minor != 6 || devices[1].API != Limits {
		t.Errorf("devices of b: %+v", devices)
	}
	if found := picture.PodDevices("other", "b"); found != nil {
		t.Errorf("devices of a pod that is not there: %+v", found)
	}
}

func TestSandboxesAreLeftOut(t *testing.T) {
	w := new(world).pod("a", limits(1)).sees("a", 0)
	w.seen = append(w.seen, sighting{node: node, pid: 1, pod: "a", container: id("sandbox")})
	if picture := w.picture(t); len(picture.Containers) != 1 {
		t.Errorf("containers: %+v", picture.Containers)
	}
}
