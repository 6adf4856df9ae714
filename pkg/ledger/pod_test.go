// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Kubelet keeps an account for each resource: what a pod has by one is no reuse by another.
func TestTheSameIDByAnotherResource(t *testing.T) {
	l := openWithQueue(t, nil)
	ask := func(id, resource string, ref device.Ref) error {
		return l.ReservePod([]PodRequest{{ID: id, Resource: resource, Device: ref}})
	}
	for range 2 {
		must(t, ask("MIG-1", "nvidia.com/mig-1g.10gb", part("a", 0, 1)))
		must(t, ask("MIG-2", "nvidia.com/gpu", part("a", 1, 1)))
	}
	var conflict *ConflictError
	for range 2 {
		if err := ask("MIG-1", "nvidia.com/gpu", part("a", 0, 1)); !errors.As(err, &conflict) {
			t.Errorf("got %v", err)
		}
		if err := ask("a", "nvidia.com/gpu", whole("a")); !errors.As(err, &conflict) || len(conflict.Holds) != 2 {
			t.Errorf("the whole GPU: %v", err)
		}
	}
	must(t, ask("b", "nvidia.com/gpu", whole("b")))
	if err := ask("MIG-3", "nvidia.com/mig-1g.10gb", part("b", 3, 1)); !errors.As(err, &conflict) {
		t.Errorf("a partition of a whole GPU that is held: %v", err)
	}
}
