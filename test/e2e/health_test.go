// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/test/gpufaults"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestPodsLeaveABrokenGPU: where the administrator wants that, the pods of a GPU that has fallen off the bus leave it, by either API. Their
// owners' next pods run on other GPUs, and the other pods run on.
func TestPodsLeaveABrokenGPU(t *testing.T) {
	s := begin(t)
	machine := s.Machine()
	end := s.Undo(func() error { return gpufaults.Clear(machine) })
	s.Installed("health.values.yaml")
	s.Manifest(manifests.SingleTemplate + manifests.ClaimDeployment("claims", "single", 2) + manifests.Deployment("limits", 2))
	s.Running(patient, 4, 0)
	before, gpus := s.Containers(), s.Seen()
	var broken []int
	for _, of := range []string{"claims", "limits"} {
		victim := s.someRunning(of, 1)[0].Name
		broken = append(broken, gpus[victim][0])
		delete(before, victim)
	}
	if err := gpufaults.XID79.Raise(machine, broken...); err != nil {
		t.Fatal(err)
	}
	s.Took("the fault to the replacements", func() {
		s.Await(soon, "four pods on other GPUs", func() error {
			running := 0
			for _, pod := range s.Pods() {
				if _, had := gpus[pod.Name]; had && before[pod.Name] == "" {
					return fmt.Errorf("%s is there", pod.Name)
				}
				if podstatus.Ready(&pod) {
					running++
				}
			}
			if running != 4 {
				return fmt.Errorf("%d run", running)
			}
			return nil
		})
	})
	now := s.Containers()
	for name, container := range before {
		if now[name] != container {
			t.Errorf("%s: container %s, was %s", name, now[name], container)
		}
	}
	for name, has := range s.Seen() {
		if len(has) != 1 || slices.Contains(broken, has[0]) {
			t.Errorf("%s has GPUs %v, and %v are broken", name, has, broken)
		}
	}
	if failed := s.failed(); len(failed) > 0 {
		t.Errorf("pods failed: %v", failed)
	}
	s.NoDoubleOwners()
	end()
	s.Await(soon, "the GPUs to be healthy", func() error {
		object, err := s.GPUNodeObject()
		if err == nil && object.Status.Counts.Unhealthy > 0 {
			err = fmt.Errorf("counts: %+v", object.Status.Counts)
		}
		return err
	})
}

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
			if err := gpufaults.Lost.Raise(machine, 5); err != nil {
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
