// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/install"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestSpecThatCannotBeWritten: the CDI spec is lost while the disk is full. No device is offered until there is room, so new pods wait and
// none fails. Running pods keep running.
func TestSpecThatCannotBeWritten(t *testing.T) {
	s := begin(t)
	before := s.Occupy()
	filler, stop := s.fill()
	s.Await(patient, "no device to be offered", func() error {
		// The agent looks every two seconds: it may write the spec into what the removal frees.
		return errors.Join(filler.Take(s.Ctx, "/var/run/cdi/tandem-*"), s.nothingForPods(2), s.OfferedToClaims(0))
	})
	s.Shows("the reason", func(g gpunode.GPUNode) bool {
		for _, d := range g.Status.Devices {
			if !strings.Contains(d.UnhealthyReason, "NotInjectable") {
				return false
			}
		}
		return len(g.Status.Devices) == gpusANode
	})
	s.Event("Node", gpuNode, "DeviceNotInjectable", "/var/run/cdi", "no space left on device")
	s.Manifest(manifests.Pod("limit", "limit-late") + manifests.Pod("claim", "claim-late"))
	s.Running(soon, 4, 2)
	stop()
	s.Took("the waiting pods to run", func() { s.Running(patient, 6, 0) })
	if failed := s.failed(); len(failed) > 0 {
		t.Errorf("failed: %v", failed)
	}
	s.Same(before)
	s.WantHolds(3, 3)
	s.NoDoubleOwners()
}

// nothingForPods wants that kubelet offers at most the devices that pods hold.
func (s *story) nothingForPods(held int64) error {
	n, err := theClient.CoreV1().Nodes().Get(s.Ctx, gpuNode, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if got := n.Status.Allocatable[install.ResourceName]; got.Value() > held {
		return fmt.Errorf("allocatable %s is %s, more than the %d that are held", install.ResourceName, got.String(), held)
	}
	return nil
}
