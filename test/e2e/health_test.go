// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/test/gpufaults"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestOneOfEightIsLost: eight pods by each API have the GPUs of a node, and one GPU is lost. The others run on, and none fails admission:
// the replacement of the pod that had it waits until the GPU is back.
func TestOneOfEightIsLost(t *testing.T) {
	for _, api := range []string{"claim", "limit"} {
		t.Run(api, func(t *testing.T) {
			s := begin(t)
			machine := s.Machine()
			t.Cleanup(func() {
				if err := gpufaults.Clear(machine); err != nil {
					t.Error(err)
				}
			})
			if api == "claim" {
				s.Manifest(manifests.SingleTemplate + manifests.ClaimDeployment("eight", "single", gpusANode))
			} else {
				s.Manifest(manifests.Deployment("eight", gpusANode))
			}
			s.Running(soon, gpusANode, 0)
			before := s.Seen()
			lost := gpufaults.All[0]
			if err := lost.Raise(machine, 5); err != nil {
				t.Fatal(err)
			}
			s.Await(soon, "the node to say that a GPU is lost", func() error {
				object, err := s.GPUNodeObject()
				if err == nil && object.Status.Counts.Unhealthy != 1 {
					err = fmt.Errorf("counts: %+v", object.Status.Counts)
				}
				return err
			})
			for name, sees := range before {
				if slices.Equal(sees, []int{5}) {
					s.remove(name)
					delete(before, name)
				}
			}
			s.Await(soon, "the lost GPU to be withdrawn, and no other", func() error {
				if api == "claim" {
					return errors.Join(s.OfferedToPods(0), s.Withdrawn(5))
				}
				return errors.Join(s.OfferedToPods(gpusANode-1), s.OfferedToClaims(0))
			})
			s.Running(soon, gpusANode-1, 1)
			s.Same(before)
			for _, pod := range s.Pods() {
				if pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil && pod.Status.ContainerStatuses[0].RestartCount > 0 {
					t.Errorf("%s restarted", pod.Name)
				}
			}
			if failed := s.failed(); len(failed) > 0 {
				t.Errorf("pods failed: %v", failed)
			}
			if err := gpufaults.Clear(machine); err != nil {
				t.Fatal(err)
			}
			s.Took("the eighth pod to run again", func() { s.Running(soon, gpusANode, 0) })
			s.NoDoubleOwners()
			if failed := s.failed(); len(failed) > 0 {
				t.Errorf("pods failed: %v", failed)
			}
		})
	}
}
