// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestStrict: with the option a pod is bound only when its node has reserved the GPU. A claim that was allocated on a GPU of a
// pod is allocated again before its pod is bound: nothing is evicted, and the pod stays the same.
func TestStrict(t *testing.T) {
	s := begin(t)
	s.Example("claim-template.yaml")
	s.Took("a pod with a claim to run", func() { s.Running(patient, 1, 0) })
	if claim := s.claims()[0]; len(claim.Status.Devices) != 1 ||
		!meta.IsStatusConditionTrue(claim.Status.Devices[0].Conditions, "tandem-gpu.dev/reserved") {
		t.Errorf("the claim's devices are %+v", claim.Status.Devices)
	}

	allow := s.holdSlices()
	s.Manifest(manifests.Pod("limit", "winner"))
	s.Running(soon, 2, 0)
	gpu := s.devices("winner")[0]
	s.Manifest(preferring("preferring", gpu.GPU.UUID))
	s.Manifest(withTemplate(manifests.Pod("claim", "bare"), "preferring"))
	s.Await(patient, "the node to refuse the GPU of the limit", func() error {
		for _, claim := range s.claims() {
			for _, device := range claim.Status.Devices {
				if meta.IsStatusConditionTrue(device.Conditions, "tandem-gpu.dev/refused") {
					return nil
				}
			}
		}
		return errors.New("no claim has the condition")
	})
	uid := s.Pod("bare").UID
	if node := s.Pod("bare").Spec.NodeName; node != "" {
		t.Errorf("the pod is bound to %s already", node)
	}
	allow()
	s.Took("the pod to run with another GPU", func() { s.Running(patient, 3, 0) })
	if now := s.Pod("bare").UID; now != uid {
		t.Errorf("pod %s became %s", uid, now)
	}
	if got := fmt.Sprint(s.GPUs("bare", "")); got == fmt.Sprint(s.GPUs("winner", "")) {
		t.Errorf("both have GPU %s", got)
	}
	s.NoDoubleOwners()
}
