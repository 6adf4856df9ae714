// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"testing"
)

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
	for pod, gpus := range s.seen() {
		for _, gpu := range gpus {
			if other, taken := seen[gpu]; taken {
				t.Errorf("GPU %d is seen by %s and %s", gpu, other, pod)
			}
			seen[gpu] = pod
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
	s.remove("claim-0", "limit-0")
	s.running(patient, gpusANode, 0)
	s.noDoubleOwners()
}
