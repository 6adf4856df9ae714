// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// simulatedMachine is where the chart makes the simulated machine of a node.
const simulatedMachine = "/run/nvidia/simulated"

// TestMissingDeviceNode: the device node of a GPU is removed, first of a free one, then of one in use. The other GPUs do not change, and it is
// back when the node is.
func TestMissingDeviceNode(t *testing.T) {
	s := begin(t)
	missing := map[int]bool{}
	remove := func(gpus ...int) {
		for gpu := range gpusANode {
			path := fmt.Sprintf("%s/driver/dev/nvidia%d", simulatedMachine, gpu)
			switch wanted := slices.Contains(gpus, gpu); {
			case wanted && !missing[gpu]:
				s.on(node(), "rm", path)
			case !wanted && missing[gpu]:
				s.on(node(), "mknod", "-m", "666", path, "c", "195", strconv.Itoa(gpu))
			}
			missing[gpu] = slices.Contains(gpus, gpu)
		}
	}
	t.Cleanup(func() { remove() })
	s.broken(remove)
}

// broken plays the story of GPUs that are broken by a function that breaks exactly those it is given.
func (s *story) broken(breaks func(gpus ...int)) {
	s.Helper()
	before := s.occupy()
	used := map[int]bool{}
	for _, gpus := range before {
		for _, gpu := range gpus {
			used[gpu] = true
		}
	}
	free := 0
	for used[free] {
		free++
	}
	inUse := before["claim-0"][0]
	s.await(soon, "the node to offer what is free", func() error {
		return errors.Join(s.offeredToPods(gpusANode-2), s.offeredToClaims(gpusANode-2))
	})

	breaks(free, inUse)
	s.await(soon, "the broken GPUs to be withdrawn, and no other", func() error {
		// Limits did not have the one that a claim holds.
		return errors.Join(s.offeredToPods(gpusANode-3), s.withdrawn(append(before["limit-0"], before["limit-1"][0], free, inUse)...))
	})
	if now := s.seen(); !maps.EqualFunc(before, now, slices.Equal) {
		s.Errorf("the pods saw GPUs %v, now %v", before, now)
	}
	s.manifest(one("claim", "claim-late"))
	s.running(soon, 5, 0)
	s.manifest(one("limit", "limit-late"))
	s.running(soon, 6, 0)
	for _, name := range []string{"claim-late", "limit-late"} {
		if got := s.gpus(name, ""); len(got) != 1 || got[0] == free || used[got[0]] {
			s.Errorf("%s sees GPUs %v; %d is broken, %v are in use", name, got, free, slices.Sorted(maps.Keys(used)))
		}
	}

	breaks()
	s.await(soon, "the GPU to be offered again", func() error {
		return errors.Join(s.offeredToPods(gpusANode-3), s.offeredToClaims(gpusANode-3))
	})
	s.manifest(one("claim", "claim-last"))
	s.running(soon, 7, 0)
	if got := s.gpus("claim-last", ""); !slices.Equal(got, []int{free}) {
		s.Errorf("the GPU %d is whole again and the first that is free, but the claim got %v", free, got)
	}
	s.noDoubleOwners()
	for _, pod := range s.pods() {
		if restarts := pod.Status.ContainerStatuses[0].RestartCount; restarts > 0 {
			s.Errorf("%s restarted %d times", pod.Name, restarts)
		}
	}
}

// withdrawn reports whether exactly these GPUs of the node are not offered to claims.
func (s *story) withdrawn(gpus ...int) error {
	want := map[string]bool{}
	for gpu := range gpusANode {
		if !slices.Contains(gpus, gpu) {
			want[fmt.Sprintf("gpu-%d", gpu)] = true
		}
	}
	list, err := theClient.ResourceV1().ResourceSlices().List(s.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + gpuNode})
	if err != nil {
		return err
	}
	offered := map[string]bool{}
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			if len(d.Taints) == 0 {
				offered[d.Name] = true
			}
		}
	}
	if !maps.Equal(offered, want) {
		return fmt.Errorf("claims are offered %v, not %v", slices.Sorted(maps.Keys(offered)), slices.Sorted(maps.Keys(want)))
	}
	return nil
}
