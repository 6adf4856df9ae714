// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"testing"

	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestBothUntilFull fills the node from both sides, one pod at a time, then asks for one more by each: both wait, and run
// when a GPU frees.
func TestBothUntilFull(t *testing.T) {
	s := begin(t)
	s.Manifest(manifests.SingleTemplate)
	for i := range gpusANode / 2 {
		s.Manifest(manifests.Pod("claim", fmt.Sprintf("claim-%d", i)))
		s.Running(soon, 2*i+1, 0)
		s.Manifest(manifests.Pod("limit", fmt.Sprintf("limit-%d", i)))
		s.Running(soon, 2*i+2, 0)
	}
	seen := map[int]string{}
	for pod, gpus := range s.Seen() {
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
	s.NoDoubleOwners()
	s.Await(soon, "the scheduler to see a full node", func() error { return s.OfferedToPods(gpusANode / 2) })
	// Both may get the GPU that is free first. The claim's pod then has an owner that creates another one.
	s.Manifest(manifests.ClaimDeployment("claim-late", "single", 1) + manifests.Pod("limit", "limit-late"))
	s.Unschedulable(2)
	s.remove("claim-0", "limit-0")
	s.Running(patient, gpusANode, 0)
	s.NoDoubleOwners()
}
