// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"
	"testing"
)

func TestClaimInAPodSpec(t *testing.T) {
	s := begin(t)
	s.example("claim-template.yaml")
	s.running(soon, 1, 0)
	pod := s.pods()[0]
	if gpus := s.gpus(pod.Name, ""); !slices.Equal(gpus, []int{0}) {
		t.Errorf("the container sees GPUs %v; the first claim gets the first GPU", gpus)
	}
	s.await(soon, "the GPU to leave the limits", func() error { return s.offeredToPods(gpusANode - 1) })
	s.noDoubleOwners()
}

func TestLimits(t *testing.T) {
	s := begin(t)
	s.example("limits.yaml")
	s.running(soon, 1, 0)
	pod := s.pods()[0]
	if gpus := s.gpus(pod.Name, ""); len(gpus) != 2 {
		t.Errorf("the container sees GPUs %v, not two", gpus)
	}
	s.await(soon, "the GPUs to leave the slices", func() error { return s.offeredToClaims(gpusANode - 2) })
	s.noDoubleOwners()
}

// one is a pod that asks for one GPU by a claim or by limits.
func one(api, name string) string {
	resources, claims := "limits: {nvidia.com/gpu: 1}", ""
	if api == "claim" {
		resources = "claims: [{name: gpu}]"
		claims = "\n  resourceClaims: [{name: gpu, resourceClaimTemplateName: single}]"
	}
	return fmt.Sprintf(`
---
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: work
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    resources: {%s}%s
`, name, resources, claims)
}

const singleTemplate = `
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: single}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly: {deviceClassName: gpu.nvidia.com}
`

// TestBothUntilFull fills the node from both sides, one pod at a time, then asks for one more by each: both wait, and run
// when a GPU frees.
func TestBothUntilFull(t *testing.T) {
	s := begin(t)
	s.manifest(singleTemplate)
	for i := range gpusANode / 2 {
		s.manifest(one("claim", fmt.Sprintf("claim-%d", i)))
		s.running(soon, 2*i+1, 0)
		s.manifest(one("limit", fmt.Sprintf("limit-%d", i)))
		s.running(soon, 2*i+2, 0)
	}
	seen := map[int]string{}
	for _, pod := range s.pods() {
		for _, gpu := range s.gpus(pod.Name, "") {
			if other, taken := seen[gpu]; taken {
				t.Errorf("GPU %d is seen by %s and %s", gpu, other, pod.Name)
			}
			seen[gpu] = pod.Name
		}
	}
	if len(seen) != gpusANode {
		t.Errorf("%d GPUs are used, not %d", len(seen), gpusANode)
	}
	s.noDoubleOwners()
	s.await(soon, "the scheduler to see a full node", func() error { return s.offeredToPods(gpusANode / 2) })
	// Both may get the GPU that is free first. The claim's pod then has an owner that creates another one.
	s.manifest(claimDeployment("claim-late", "single", 1) + one("limit", "limit-late"))
	s.unschedulable(2)
	s.kubectl("delete", "pod", "-n", s.namespace, "claim-0", "limit-0")
	s.running(patient, gpusANode, 0)
	s.noDoubleOwners()
}
