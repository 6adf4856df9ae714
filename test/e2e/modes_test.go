// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/manifests"
)

const modeLabel = "tandem-gpu.dev/mode"

// installed upgrades to values of examples/ and others above them; the story's end takes that back.
func (s *story) installed(file string, values ...string) {
	s.Helper()
	s.installedFrom(filepath.Join("..", "..", "examples", file), values...)
}

// installedFrom is installed with a file from anywhere.
func (s *story) installedFrom(file string, values ...string) {
	s.Helper()
	s.undo(func() error {
		return install.Tandem(context.WithoutCancel(s.ctx), theCluster, install.Options{Values: installValues})
	})
	// Not every mode offers what the installation waits for.
	err := install.Tandem(s.ctx, theCluster, install.Options{
		Detached: true, ValuesFiles: []string{file}, Values: append(values, installValues...),
	})
	if err != nil {
		s.Fatal(err)
	}
	s.rolledOut()
}

// rolledOut waits until every agent is the DaemonSet's latest and is ready.
func (s *story) rolledOut() {
	s.Helper()
	s.await(patient, "the agents to be ready", func() error {
		set, err := theClient.AppsV1().DaemonSets(install.Namespace).Get(s.ctx, install.Release, metav1.GetOptions{})
		if err != nil {
			return err
		}
		status, all := set.Status, set.Status.DesiredNumberScheduled
		if status.ObservedGeneration < set.Generation || all == 0 || status.UpdatedNumberScheduled < all || status.NumberAvailable < all {
			return fmt.Errorf("%d of %d are, %d are new", status.NumberAvailable, all, status.UpdatedNumberScheduled)
		}
		return nil
	})
}

// labelled gives the node a mode by its label, until the story ends.
func (s *story) labelled(mode string) {
	s.Helper()
	s.kubectl("label", "node", gpuNode, "--overwrite", modeLabel+"="+mode)
}

// unlabelAtEnd comes after installed: what ends last waits for both APIs.
func (s *story) unlabelAtEnd() {
	s.undo(func() error {
		_, err := theCluster.Kubectl(context.WithoutCancel(s.ctx), "label", "node", gpuNode, modeLabel+"-")
		return err
	})
}

// served waits until the node is served in a mode: by its agent's own account, and by what each API offers. Devices that a
// claim has are still in the slices, those that a limit has still allocatable.
func (s *story) served(mode string, limits int64, claims int) {
	s.Helper()
	began := time.Now()
	s.await(patient, "mode "+mode, func() error {
		object, err := s.gpuNodeObject()
		if err == nil && object.Status.Mode != mode {
			err = fmt.Errorf("GPUNode says %q", object.Status.Mode)
		}
		return errors.Join(err, s.offeredToPods(limits), s.offeredToClaims(claims))
	})
	s.readyz(200)
	s.Logf("served in mode %s after %v", mode, time.Since(began).Round(time.Millisecond))
}

// containers are the IDs and start times of all containers of the story's pods.
func (s *story) containers() map[string]string {
	s.Helper()
	found := map[string]string{}
	for _, pod := range s.pods() {
		for _, status := range pod.Status.ContainerStatuses {
			if status.State.Running != nil {
				found[pod.Name] = status.ContainerID + " since " + status.State.Running.StartedAt.String()
			}
		}
	}
	return found
}

// unchanged checks that these containers run as they did, on the GPUs they had.
func (s *story) unchanged(containers map[string]string, gpus map[string][]int) {
	s.Helper()
	if now := s.containers(); !maps.Equal(containers, now) {
		s.Errorf("containers were %v, are %v", containers, now)
	}
	if now := s.seen(); !maps.EqualFunc(gpus, now, slices.Equal) {
		s.Errorf("the pods saw GPUs %v, now %v", gpus, now)
	}
	s.noDoubleOwners()
}

// TestModeChangesOnALiveNode goes through all modes while pods of both kinds run, restarts kubelet when it may request devices
// that no API serves any more, and ends pods whose API was turned off.
func TestModeChangesOnALiveNode(t *testing.T) {
	s := begin(t)
	s.unlabelAtEnd()
	s.served("Dual", gpusANode, gpusANode)
	gpus := s.occupy() // claims have 0 and 1, limits two of the last
	containers := s.containers()
	agents := s.agentRestarts()

	// By minor, as example and simulated machine have it, 0 and 1 are for limits in Split.
	for _, step := range []struct {
		mode   string
		limits int64
		claims int
	}{
		{"DevicePluginOnly", 6, 0}, {"ClaimsOnly", 0, 6}, {"Split", 2, 4}, {"Dual", 6, 6}, {"ClaimsOnly", 0, 6},
	} {
		s.labelled(step.mode)
		s.served(step.mode, step.limits, step.claims)
		s.unchanged(containers, gpus)
		s.wantHolds(2, 2)
	}
	if now := s.agentRestarts(); now != agents {
		t.Errorf("the agents' containers restarted %d times", now-agents)
	}

	// ClaimsOnly: kubelet restarts with limits pods whose resource has no plugin.
	if err := node().Component(cluster.Kubelet).Restart(s.ctx); err != nil {
		t.Fatal(err)
	}
	s.served("ClaimsOnly", 0, 6)
	s.unchanged(containers, gpus)
	s.wantHolds(2, 2)

	// Pods of an API that is not served end as usual, and their GPUs are for the other.
	s.remove("limit-0")
	s.served("ClaimsOnly", 0, 7)
	s.labelled("DevicePluginOnly")
	s.served("DevicePluginOnly", 6, 0)
	s.remove("claim-0")
	s.served("DevicePluginOnly", 7, 0)
	s.wantHolds(1, 1)
	s.manifest(manifests.Pod("limit", "limit-after"))
	s.running(soon, 3, 0)
	s.noDoubleOwners()

	s.labelled("Split")
	// Limits: 0 is free, 1 has a claim; of the last ones two have limits.
	s.served("Split", 3, 4)
	s.manifest(manifests.Pod("limit", "limit-split"))
	s.manifest(manifests.Pod("claim", "claim-split"))
	s.running(soon, 5, 0)
	if got := s.gpus("limit-split", ""); !slices.Equal(got, []int{0}) {
		t.Errorf("a limit in Split has GPUs %v, not 0", got)
	}
	if got := s.gpus("claim-split", ""); !slices.Equal(got, []int{2}) {
		t.Errorf("a claim in Split has GPUs %v, not 2", got)
	}
	s.noDoubleOwners()
}

// TestLimitsByClaims: in ClaimsOnly the manifests with limits work unchanged, and in Dual with a class that is mapped to the same
// resource nothing goes wrong, whichever way the scheduler takes.
func TestLimitsByClaims(t *testing.T) {
	s := begin(t)
	s.unlabelAtEnd()
	s.served("ClaimsOnly", 0, gpusANode)
	s.example("limits.yaml")
	s.undo(func() error {
		_, err := theCluster.Kubectl(context.WithoutCancel(s.ctx), "delete", "deviceclass", "whole-gpu", "--ignore-not-found")
		return err
	})
	s.example("implicit-resource.yaml")
	s.running(soon, 2, 0)
	s.wantHolds(3, 0)
	s.example("deployment-limits.yaml")
	s.running(soon, 5, 0)
	s.wantHolds(6, 0)
	s.noDoubleOwners()
	gpus, containers := s.seen(), s.containers()

	// Dual, the class still mapped: six GPUs have claims, two are free for both.
	s.labelled("Dual")
	s.served("Dual", 2, gpusANode)
	s.unchanged(containers, gpus)
	s.manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim-0") + manifests.Pod("claim", "claim-1"))
	s.running(soon, 7, 0)
	s.await(soon, "nothing to be allocatable", func() error { return s.offeredToPods(0) })

	// Two limits pods wait, on one side or the other, also over a restart of the agent; then one GPU after the other is free.
	s.manifest(manifests.Pod("limit", "limit-0") + manifests.Pod("limit", "limit-1"))
	s.running(soon, 7, 2)
	s.killAgent()
	s.running(soon, 7, 2)
	s.noDoubleOwners()
	s.remove("claim-0")
	s.running(patient, 7, 1)
	s.remove("implicit-resource")
	s.running(patient, 7, 0)
	s.noDoubleOwners()
	s.await(soon, "eight holds", func() error {
		if claims, limits := s.holdsByKind(); claims+limits != gpusANode {
			return fmt.Errorf("%d claims, %d limits", claims, limits)
		}
		return nil
	})
	claims, limits := s.holdsByKind()
	t.Logf("in the end %d GPUs have claims, %d have limits", claims, limits)
}

// extendedResources asks the API server whether it keeps a class's extended resource.
func (s *story) extendedResources() bool {
	s.Helper()
	version, err := theClient.Discovery().ServerVersion()
	if err != nil {
		s.Fatal(err)
	}
	return version.Minor >= "36"
}
