// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/controller"
)

// TestClaimsAsTheProductReadsThem: what the model calls a part of a GPU is one to the product, and nothing else is.
func TestClaimsAsTheProductReadsThem(t *testing.T) {
	part := v1alpha1.AllocatedShare{Device: "gpu-0", Memory: 10 << 30}
	for name, c := range map[string]struct {
		claim claim
		want  []v1alpha1.AllocatedShare
	}{
		"a part":                                 {claim{memory: 10 << 10, consumed: []int{10 << 10}}, []v1alpha1.AllocatedShare{part}},
		"all of a GPU that is shared out":        {claim{consumed: []int{memory}}, nil},
		"a part, where GPUs are not shared out":  {claim{memory: 10 << 10, consumed: []int{0}}, nil},
		"a whole GPU, where they are not either": {claim{consumed: []int{0}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			c.claim.devices, c.claim.count = []string{"gpu-0"}, 1
			relayed := controller.Relay([]resourceapi.ResourceClaim{*resourceClaim(&c.claim)}, driverName, nodeName)
			if len(relayed) != 1 {
				t.Fatalf("relayed are %v", relayed)
			}
			if diff := cmp.Diff(c.want, relayed[0].Shares); diff != "" {
				t.Error(diff)
			}
		})
	}
}
