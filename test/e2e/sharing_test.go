// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// sharesKept reports whether the API server keeps what shares are published by.
func (s *story) sharesKept() bool {
	list, err := s.Slices(gpuNode)
	if err != nil {
		s.Fatal(err)
	}
	for _, slice := range list {
		for _, d := range slice.Spec.Devices {
			if d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations {
				return true
			}
		}
	}
	return false
}

// perGPU counts the pods of an app that run, by node and GPU.
func (s *story) perGPU(app string) map[string]int {
	s.Helper()
	nodes, containers := map[string]string{}, map[string]string{}
	for _, pod := range s.Pods() {
		if pod.Labels["app"] == app && pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil {
			nodes[pod.Name], containers[pod.Name] = pod.Spec.NodeName, pod.Spec.Containers[0].Name
		}
	}
	count := map[string]int{}
	for name, minors := range s.Devices.Of(&s.Story, containers) {
		for _, minor := range minors {
			count[fmt.Sprintf("%s/gpu-%d", nodes[name], minor)]++
		}
	}
	return count
}

func (s *story) wantPerGPU(app string, want map[string]int) {
	s.Helper()
	if got := s.perGPU(app); !maps.Equal(got, want) {
		s.Errorf("pods of %s are on %v, want %v", app, got, want)
	}
}

// TestMemoryShares: replicas of a Deployment fill one GPU by what they ask of its memory, then the next one, then wait and are told
// why; GPUs of another node are taken when there are some.
func TestMemoryShares(t *testing.T) {
	s := begin(t)
	if !s.sharesKept() {
		t.Skip(droppedCapacity)
	}
	s.Example("memory-shares.yaml")
	s.Running(soon, 4, 2)
	first := map[string]int{gpuNode + "/gpu-0": 2, gpuNode + "/gpu-1": 2}
	s.wantPerGPU("memory-shares", first)
	s.Manifest(manifests.SingleTemplate)
	s.Manifest(manifests.Pod("claim", "exclusive"))
	s.Running(soon, 5, 2)
	if got := s.GPUs("exclusive", ""); !slices.Equal(got, []int{2}) {
		t.Errorf("the exclusive claim has GPUs %v beside shares on %v", got, first)
	}
	for _, pod := range s.Pods() {
		if pod.Status.Phase == corev1.PodPending {
			s.explains(pod, "10240 MiB left on 1 GPU")
		}
	}
	// What claims leave of the GPU that has replicas, 23034 - 2 x 10240 MiB, is not enough for one.
	s.Await(soon, "nothing on offer for limits", func() error { return s.OfferedToPods(0) })

	s.Kubectl("taint", "nodes", numaNode, numaKey+":NoSchedule-")
	s.Undo(func() error {
		_, err := theCluster.Kubectl(context.WithoutCancel(s.Ctx), "taint", "nodes", numaNode, numaKey+"=true:NoSchedule", "--overwrite")
		return err
	})
	s.Running(soon, 7, 0)
	first[numaNode+"/gpu-0"] = 2
	s.wantPerGPU("memory-shares", first)

	// One that ends takes nothing from the one beside it.
	containers := s.Containers()
	s.Kubectl("scale", "-n", s.Namespace, "deployment/memory-shares", "--replicas=5")
	s.Running(soon, 6, 0)
	for name, container := range s.Containers() {
		if containers[name] != container {
			t.Errorf("the container of %s was %s and is %s", name, containers[name], container)
		}
	}
}

// TestSharesOfClaims: claims share a GPU by equal shares, of which pods with limits have some.
func TestSharesOfClaims(t *testing.T) {
	s := begin(t)
	if !s.sharesKept() {
		t.Skip(droppedCapacity)
	}
	s.Example("equal-shares.yaml")
	s.Running(soon, 4, 2)
	s.wantPerGPU("equal-shares", map[string]int{gpuNode + "/gpu-0": 4})
	s.withinBudget(4)
	for _, pod := range s.Pods() {
		if pod.Status.Phase == corev1.PodPending {
			s.explains(pod, "1 share left on 1 GPU")
		}
	}
	s.Await(soon, "no replica left for limits", func() error { return s.OfferedToPods(3) })

	// A pod with limits takes the share that is left, and gives it back.
	s.Kubectl("scale", "-n", s.Namespace, "deployment/equal-shares", "--replicas=3")
	s.Running(soon, 3, 0)
	s.Await(soon, "one replica for limits", func() error { return s.OfferedToPods(4) })
	for i := range 4 {
		s.Manifest(manifests.Pod("limits", fmt.Sprintf("limits-%d", i)))
	}
	s.Running(soon, 7, 0)
	s.Kubectl("scale", "-n", s.Namespace, "deployment/equal-shares", "--replicas=4")
	s.Running(soon, 7, 1)
	s.withinBudget(7)
	s.remove("limits-0", "limits-1", "limits-2", "limits-3")
	s.Running(soon, 4, 0)
}

// TestUnlimitedShares: any number of claims share a GPU, which limits get no more, also after a restart of the agent.
func TestUnlimitedShares(t *testing.T) {
	s := begin(t)
	s.Example("unlimited-shares.yaml")
	s.Running(soon, 5, 0)
	s.wantPerGPU("unlimited-shares", map[string]int{gpuNode + "/gpu-0": 5})
	s.withinBudget(5)
	s.Await(soon, "the GPU to leave the limits", func() error { return s.OfferedToPods(3) })
	containers := s.Containers()
	s.KillAgent()
	s.Await(soon, "the GPU to stay away from the limits", func() error { return s.OfferedToPods(3) })
	for name, container := range s.Containers() {
		if containers[name] != container {
			t.Errorf("the container of %s was %s and is %s", name, containers[name], container)
		}
	}
}

// shareOfFirst is a pod with so much of the first GPU's memory.
func shareOfFirst(name, memory string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %[1]s}
spec:
  devices:
    requests:
      - name: gpu
        exactly:
          deviceClassName: gpu.nvidia.com
          selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].index == 0"}}]
          capacity: {requests: {memory: %[2]s}}
---
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: gpu, resourceClaimName: %[1]s}]
  containers:
    - {name: main, image: "docker.io/library/busybox:1.37", command: [sleep, infinity], resources: {claims: [{name: gpu}]}}
`, name, memory)
}

// TestOneBudget: replicas for limits, memory shares and exclusive claims on the same GPUs, never more than there is, also after the
// agent and kubelet have come back.
func TestOneBudget(t *testing.T) {
	s := begin(t)
	if !s.sharesKept() {
		t.Skip(droppedCapacity)
	}
	s.Manifest(shareOfFirst("share", "10Gi"))
	s.Running(soon, 1, 0)
	// 10 of 22.5 GiB leave room for two of four replicas.
	s.Await(soon, "what is left for limits", func() error { return s.OfferedToPods(2 + 1 + 1) })
	s.Example("limits-shared.yaml")
	s.Kubectl("scale", "-n", s.Namespace, "deployment/limits-shared", "--replicas=6")
	s.Running(soon, 1+4, 2)
	mixed := map[string]int{gpuNode + "/gpu-0": 2, gpuNode + "/gpu-1": 1, gpuNode + "/gpu-2": 1}
	s.wantPerGPU("limits-shared", mixed)
	s.Manifest(manifests.SingleTemplate)
	s.Manifest(manifests.Pod("claim", "exclusive"))
	s.Manifest(shareOfFirst("another", "10Gi"))
	s.Await(soon, "pods without room to wait", func() error {
		waiting := 0
		for _, pod := range s.Pods() {
			if pod.Status.Phase == corev1.PodPending && unschedulablePod(&pod) {
				waiting++
			}
		}
		if waiting != 4 {
			return fmt.Errorf("%d pods wait", waiting)
		}
		return nil
	})
	s.withinBudget(5)

	containers := s.Containers()
	s.KillAgent()
	s.Readyz(200)
	s.withinBudget(5)
	if err := node().Component(cluster.Kubelet).Restart(s.Ctx); err != nil {
		t.Fatal(err)
	}
	s.Readyz(200)
	s.withinBudget(5)
	if now := s.Containers(); !maps.Equal(containers, now) {
		t.Errorf("containers were %v, are %v", containers, now)
	}

	s.Kubectl("scale", "-n", s.Namespace, "deployment/limits-shared", "--replicas=0")
	s.Running(soon, 3, 0)
	if a, b := s.GPUs("share", ""), s.GPUs("another", ""); !slices.Equal(a, b) || !slices.Equal(a, []int{0}) {
		t.Errorf("two shares of the first GPU see %v and %v", a, b)
	}
	if got := s.GPUs("exclusive", ""); slices.Contains(got, 0) || len(got) != 1 {
		t.Errorf("the exclusive claim has GPUs %v", got)
	}
	s.withinBudget(3)
}

// withinBudget waits until the GPUNode tells of so many holders, and checks that those of each device fit into it.
func (s *story) withinBudget(holders int) {
	s.Helper()
	object := s.Shows(fmt.Sprint(holders, " holders"), func(o gpunode.GPUNode) bool {
		n := 0
		for _, d := range o.Status.Devices {
			n += len(d.Holders)
		}
		return n == holders
	})
	for _, d := range object.Status.Devices {
		memory, shares, whole := int64(0), int64(0), 0
		for _, h := range d.Holders {
			memory, shares = memory+h.Memory, shares+h.Shares
			if !h.Shared {
				whole++
			}
		}
		if whole > 0 && len(d.Holders) > 1 || d.Sharing != nil && (memory > d.Sharing.Memory || shares > d.Sharing.Shares) {
			s.Errorf("%s has holders %+v", d.Name, d.Holders)
		}
	}
}

func unschedulablePod(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse
	})
}
