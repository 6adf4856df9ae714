// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestDriverPaused: while GPU Operator's labels ask for it, the agent lets go of the driver. Pods run on and end, new ones wait.
func TestDriverPaused(t *testing.T) {
	const label = "nvidia.com/gpu.deploy.device-plugin"
	s := begin(t)
	s.Undo(func() error {
		_, err := theCluster.Kubectl(context.WithoutCancel(s.Ctx), "label", "node", gpuNode, label+"-")
		return err
	})
	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim-stays") + manifests.Pod("limit", "limit-stays") + manifests.Pod("claim", "claim-ends") + manifests.Pod("limit", "limit-ends"))
	s.Running(soon, 4, 0)
	before := s.Containers()
	s.Kubectl("label", "node", gpuNode, "--overwrite", label+"=paused-for-driver-upgrade")
	s.Readyz(503, "pause", label)
	s.Event("Node", gpuNode, "DriverPaused", label)
	s.Await(soon, "nothing to be offered", func() error {
		return errors.Join(s.OfferedToClaims(0), s.OfferedToPods(0))
	})
	s.Shows("every GPU as paused", func(n gpunode.GPUNode) bool {
		return !slices.ContainsFunc(n.Status.Devices, func(d gpunode.DeviceStatus) bool {
			return !strings.HasPrefix(d.UnhealthyReason, device.ReasonPaused+":")
		})
	})
	s.remove("claim-ends", "limit-ends")
	s.Manifest(manifests.Pod("claim", "claim-late") + manifests.Pod("limit", "limit-late"))
	s.Unschedulable(2)

	s.Kubectl("label", "node", gpuNode, "--overwrite", label+"=true")
	s.Readyz(200)
	s.Running(soon, 4, 0)
	s.Event("Node", gpuNode, "DriverResumed")
	for name, container := range s.Containers() {
		if was, known := before[name]; known && container != was {
			t.Errorf("%s: container %s, was %s", name, container, was)
		}
	}
	s.NoDoubleOwners()
}
