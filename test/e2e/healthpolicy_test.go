// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// replaceAgent has the DaemonSet make another agent. Unlike a killed one, it starts without delay.
func (s *story) replaceAgent() {
	s.Helper()
	s.replaceAgents([]types.UID{s.agentPod(gpuNode).UID})
	s.ready()
}

// TestDriverPaused: while GPU Operator's labels ask for it, the agent lets go of the driver. Pods run on and end, new ones wait.
func TestDriverPaused(t *testing.T) {
	const label = "nvidia.com/gpu.deploy.device-plugin"
	s := begin(t)
	s.undo(func() error {
		_, err := theCluster.Kubectl(context.WithoutCancel(s.ctx), "label", "node", gpuNode, label+"-")
		return err
	})
	s.manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim-stays") + manifests.Pod("limit", "limit-stays") + manifests.Pod("claim", "claim-ends") + manifests.Pod("limit", "limit-ends"))
	s.running(soon, 4, 0)
	before := s.containers()
	s.kubectl("label", "node", gpuNode, "--overwrite", label+"=paused-for-driver-upgrade")
	s.readyz(503, "pause", label)
	s.event("Node", gpuNode, "DriverPaused", label)
	s.await(soon, "nothing to be offered", func() error {
		return errors.Join(s.offeredToClaims(0), s.offeredToPods(2))
	})
	s.shows("every GPU as paused", func(n gpunode.GPUNode) bool {
		return !slices.ContainsFunc(n.Status.Devices, func(d gpunode.DeviceStatus) bool {
			return !strings.HasPrefix(d.UnhealthyReason, device.ReasonPaused+":")
		})
	})
	s.remove("claim-ends", "limit-ends")
	s.manifest(manifests.Pod("claim", "claim-late") + manifests.Pod("limit", "limit-late"))
	s.unschedulable(2)

	s.kubectl("label", "node", gpuNode, "--overwrite", label+"=true")
	s.readyz(200)
	s.running(soon, 4, 0)
	s.event("Node", gpuNode, "DriverResumed")
	for name, container := range s.containers() {
		if was, known := before[name]; known && container != was {
			t.Errorf("%s: container %s, was %s", name, container, was)
		}
	}
	s.noDoubleOwners()
}
