// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestModeChangesOnALiveNode goes through all modes while pods of both kinds run, restarts kubelet when it may request devices
// that no API serves any more, and ends pods whose API was turned off.
func TestModeChangesOnALiveNode(t *testing.T) {
	s := begin(t)
	s.UnlabelAtEnd()
	s.Served("Dual", gpusANode, gpusANode)
	gpus := s.Occupy() // claims have 0 and 1, limits two of the last
	containers := s.Containers()
	agents := s.AgentRestarts()

	// By minor, as example and simulated machine have it, 0 and 1 are for limits in Split.
	for _, step := range []struct {
		mode   string
		limits int64
		claims int
	}{
		{"DevicePluginOnly", 6, 0}, {"ClaimsOnly", 0, 6}, {"Split", 2, 4}, {"Dual", 6, 6}, {"ClaimsOnly", 0, 6},
	} {
		s.Labelled(step.mode)
		s.Served(step.mode, step.limits, step.claims)
		s.Unchanged(containers, gpus)
		s.WantHolds(2, 2)
	}
	if now := s.AgentRestarts(); now != agents {
		t.Errorf("the agents' containers restarted %d times", now-agents)
	}

	// ClaimsOnly: kubelet restarts with limits pods whose resource has no plugin.
	if err := node().Component(cluster.Kubelet).Restart(s.Ctx); err != nil {
		t.Fatal(err)
	}
	s.Served("ClaimsOnly", 0, 6)
	s.Unchanged(containers, gpus)
	s.WantHolds(2, 2)

	// Pods of an API that is not served end as usual, and their GPUs are for the other.
	s.remove("limit-0")
	s.Served("ClaimsOnly", 0, 7)
	s.Labelled("DevicePluginOnly")
	s.Served("DevicePluginOnly", 6, 0)
	s.remove("claim-0")
	s.Served("DevicePluginOnly", 7, 0)
	s.WantHolds(1, 1)
	s.Manifest(manifests.Pod("limit", "limit-after"))
	s.Running(soon, 3, 0)
	s.NoDoubleOwners()

	s.Labelled("Split")
	// Limits: 0 is free, 1 has a claim; of the last ones two have limits.
	s.Served("Split", 3, 4)
	s.Manifest(manifests.Pod("limit", "limit-split"))
	s.Manifest(manifests.Pod("claim", "claim-split"))
	s.Running(soon, 5, 0)
	if got := s.GPUs("limit-split", ""); !slices.Equal(got, []int{0}) {
		t.Errorf("a limit in Split has GPUs %v, not 0", got)
	}
	if got := s.GPUs("claim-split", ""); !slices.Equal(got, []int{2}) {
		t.Errorf("a claim in Split has GPUs %v, not 2", got)
	}
	s.NoDoubleOwners()
}

// TestLimitsByClaims: in ClaimsOnly the manifests with limits work unchanged, and in Dual with a class that is mapped to the same
// resource nothing goes wrong, whichever way the scheduler takes.
func TestLimitsByClaims(t *testing.T) {
	s := begin(t)
	s.UnlabelAtEnd()
	s.Served("ClaimsOnly", 0, gpusANode)
	s.Example("limits.yaml")
	s.Undo(func() error {
		_, err := theCluster.Kubectl(context.WithoutCancel(s.Ctx), "delete", "deviceclass", "whole-gpu", "--ignore-not-found")
		return err
	})
	s.Example("implicit-resource.yaml")
	s.Running(soon, 2, 0)
	s.WantHolds(3, 0)
	s.Example("deployment-limits.yaml")
	s.Running(soon, 5, 0)
	s.WantHolds(6, 0)
	s.NoDoubleOwners()
	gpus, containers := s.Seen(), s.Containers()

	// Dual, the class still mapped: six GPUs have claims, two are free for both.
	s.Labelled("Dual")
	s.Served("Dual", 2, gpusANode)
	s.Unchanged(containers, gpus)
	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim-0") + manifests.Pod("claim", "claim-1"))
	s.Running(soon, 7, 0)
	s.Await(soon, "nothing to be allocatable", func() error { return s.OfferedToPods(0) })

	// Two limits pods wait, on one side or the other, also over a restart of the agent; then one GPU after the other is free.
	s.Manifest(manifests.Pod("limit", "limit-0") + manifests.Pod("limit", "limit-1"))
	s.Running(soon, 7, 2)
	s.KillAgent()
	s.Running(soon, 7, 2)
	s.NoDoubleOwners()
	s.remove("claim-0")
	s.Running(patient, 7, 1)
	s.remove("implicit-resource")
	s.Running(patient, 7, 0)
	s.NoDoubleOwners()
	s.Await(soon, "eight holds", func() error {
		if claims, limits := s.HoldsByKind(); claims+limits != gpusANode {
			return fmt.Errorf("%d claims, %d limits", claims, limits)
		}
		return nil
	})
	claims, limits := s.HoldsByKind()
	t.Logf("in the end %d GPUs have claims, %d have limits", claims, limits)
}
