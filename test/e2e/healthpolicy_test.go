// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
)

// withoutRecoveryAction is a driver older than the recovery action: only a record of an XID says whether the XID has ended.
var withoutRecoveryAction = simulated.Condition{Fields: map[string]string{"230": "ERROR_NOT_SUPPORTED"}}

// TestRestartForgetsNoXID: an agent that is killed knows an XID afterwards, and does not count it again once an administrator has ended it.
func TestRestartForgetsNoXID(t *testing.T) {
	const gpu = 3
	s := begin(t)
	machine := s.machine()
	t.Cleanup(func() { s.breaks() })
	s.breaks(simulated.GPUFaults{GPU: strconv.Itoa(gpu), Condition: withoutRecoveryAction})
	s.replaceAgent() // the next one knows this driver from its first scan on
	if err := simulated.RaiseXID(machine, simulated.Event{GPU: strconv.Itoa(gpu), XID: 48}); err != nil {
		t.Fatal(err)
	}
	unhealthy := func() error {
		return errors.Join(s.withdrawn(gpu), s.offeredToPods(gpusANode-1), s.unhealthyFor(map[string]string{fmt.Sprintf("gpu-%d", gpu): device.ReasonXID}))
	}
	s.await(soon, "the GPU to be withdrawn", unhealthy)
	record := s.recordOfFaults()
	s.event("Node", gpuNode, "GPUUnhealthy", fmt.Sprintf("gpu-%d ", gpu), "48", record)

	s.killAgent()
	s.ready()
	s.await(soon, "the new agent to withdraw the GPU", unhealthy)
	s.manifest(deployment("others", gpusANode))
	s.running(soon, gpusANode-1, 1)
	s.unschedulable(1)
	for _, pod := range s.pods() {
		if pod.Status.Phase == corev1.PodRunning && slices.Contains(s.gpus(pod.Name, ""), gpu) {
			t.Errorf("%s got GPU %d, which has an XID", pod.Name, gpu)
		}
	}

	s.on(node(), "rm", record)
	s.took("the last pod to run", func() { s.running(soon, gpusANode, 0) })
	s.deleteAll()
	s.allFree()
	s.replaceAgent()
	s.allFree()
	for until := time.Now().Add(seenWithin); time.Now().Before(until); {
		if err := errors.Join(s.offeredToPods(gpusANode), s.offeredToClaims(s.offered)); err != nil {
			t.Fatalf("the XID that was ended is back: %v", err)
		}
		time.Sleep(lookAgain)
	}
}

// replaceAgent has the DaemonSet make another agent. Unlike a killed one, it starts without delay.
func (s *story) replaceAgent() {
	s.Helper()
	s.replaceAgents([]types.UID{s.agentPod(gpuNode).UID})
	s.ready()
}

// recordOfFaults is the path of the only GPU's record of faults on the node.
func (s *story) recordOfFaults() string {
	s.Helper()
	const dir = "/run/tandem/health"
	var found []string
	for _, name := range strings.Fields(s.on(node(), "ls", dir)) {
		if name != "log" {
			found = append(found, name)
		}
	}
	if len(found) != 1 {
		s.Fatalf("%s has records of %v", dir, found)
	}
	return filepath.Join(dir, found[0])
}

// unhealthyFor wants exactly these devices of the node's GPUNode unhealthy, each for its reason.
func (s *story) unhealthyFor(reasons map[string]string) error {
	object, err := s.gpuNodeObject()
	if err != nil {
		return err
	}
	found := map[string]string{}
	for _, d := range object.Status.Devices {
		if d.UnhealthyReason != "" {
			found[d.Name], _, _ = strings.Cut(d.UnhealthyReason, ":")
		}
	}
	if !maps.Equal(found, reasons) {
		return fmt.Errorf("unhealthy are %v, not %v", found, reasons)
	}
	return nil
}

// TestFaultOfAPartition stays in the partition: the other one of its GPU is given to new pods. A fault of the GPU reaches both.
func TestFaultOfAPartition(t *testing.T) {
	const last, resource = "7", "nvidia.com/mig-1g.10gb"
	s := begin(t)
	s.installed("mig-limits.values.yaml")
	t.Cleanup(func() { s.uncut(gpusANode - 1) })
	t.Cleanup(func() { s.deleteAll() })
	t.Cleanup(func() { s.breaks() })
	s.retryAgent()
	s.breaks(simulated.GPUFaults{GPU: last, Condition: withoutRecoveryAction})
	s.administer("-i", last, "-mig", "1")
	s.administer("mig", "-i", last, "-cgi", "1g.10gb,1g.10gb", "-C")
	s.published("1g.10gb", "1g.10gb")
	s.await(patient, "limits to see them", func() error { return s.allocatable(resource, 2) })

	instances := s.instanceIDs(last, "1g.10gb")
	instance, err := strconv.Atoi(instances[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := simulated.RaiseXID(s.machine(), simulated.Event{GPU: last, XID: 94, GPUInstance: &instance}); err != nil {
		t.Fatal(err)
	}
	s.await(soon, "one partition to be withdrawn", func() error { return s.allocatable(resource, 1) })
	s.published("1g.10gb")
	s.shows("one partition as unhealthy", func(n gpunode.GPUNode) bool {
		unhealthy := slices.DeleteFunc(n.Status.Devices, func(d gpunode.DeviceStatus) bool { return d.UnhealthyReason == "" })
		return len(unhealthy) == 1 && strings.HasPrefix(unhealthy[0].UnhealthyReason, device.ReasonXID+":")
	})
	s.manifest(profileTemplate("ones", "1g.10gb") + partitioned("healthy", "ones") + partitioned("waits", "ones"))
	s.running(soon, 1, 1)
	s.deleteAll()
	s.await(soon, "the ledger to be empty", s.empty)

	// The fault ends with the partition.
	s.administer("mig", "-i", last, "-dci", "-gi", instances[0])
	s.administer("mig", "-i", last, "-dgi", "-gi", instances[0])
	s.await(soon, "the partition to be gone", func() error { return s.unhealthyFor(map[string]string{}) })
	s.administer("mig", "-i", last, "-cgi", "1g.10gb", "-C")
	s.published("1g.10gb", "1g.10gb")

	if err := simulated.RaiseXID(s.machine(), simulated.Event{GPU: last, XID: 95}); err != nil {
		t.Fatal(err)
	}
	s.await(soon, "both partitions to be withdrawn", func() error {
		return errors.Join(s.allocatable(resource, 0), s.offeredToPods(gpusANode-1), s.offeredToClaims(gpusANode-1))
	})
	s.on(node(), "rm", s.recordOfFaults())
	s.published("1g.10gb", "1g.10gb")
}

// TestFaultEndsByAReset: where the administrator wants it, a GPU with a fault is reset, but not while a pod has it.
func TestFaultEndsByAReset(t *testing.T) {
	for _, api := range []string{"claim", "limit"} {
		t.Run(api, func(t *testing.T) {
			s := begin(t)
			s.installed("health.values.yaml")
			s.retryAgent()
			t.Cleanup(func() { s.breaks() })
			s.await(patient, "the GPUs to be offered", func() error {
				return errors.Join(s.offeredToPods(gpusANode), s.offeredToClaims(gpusANode))
			})
			s.manifest(singleTemplate + one(api, "holder"))
			s.running(patient, 1, 0)
			gpu := s.gpus("holder", "")[0]
			uuid := s.uuidOf(gpu)
			before := s.resets(uuid)
			s.breaks(simulated.GPUFaults{GPU: strconv.Itoa(gpu), Condition: simulated.Condition{RecoveryAction: "reset", EndsWithReset: true}})
			s.await(soon, "the GPU to be withdrawn", func() error {
				return errors.Join(s.withdrawn(gpu), s.offeredToPods(gpusANode-1))
			})
			s.manifest(one(api, "other"))
			s.running(soon, 2, 0)
			if now := s.resets(uuid); now != before {
				t.Errorf("the GPU was reset although a pod has it")
			}
			s.kubectl("delete", "pod", "-n", s.namespace, "holder", "--timeout=60s")
			s.event("Node", gpuNode, "GPUReset", fmt.Sprintf("gpu-%d", gpu))
			s.kubectl("delete", "pod", "-n", s.namespace, "other", "--timeout=60s")
			s.allFree()
			if now := s.resets(uuid); now != before+1 {
				t.Errorf("%d resets, not one", now-before)
			}
		})
	}
}

// TestDriverPaused: while GPU Operator's labels ask for it, the agent lets go of the driver. Pods run on and end, new ones wait.
func TestDriverPaused(t *testing.T) {
	const label = "nvidia.com/gpu.deploy.device-plugin"
	s := begin(t)
	s.undo(func() error {
		_, err := theCluster.Kubectl(context.WithoutCancel(s.ctx), "label", "node", gpuNode, label+"-")
		return err
	})
	s.manifest(singleTemplate + one("claim", "claim-stays") + one("limit", "limit-stays") + one("claim", "claim-ends") + one("limit", "limit-ends"))
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
	s.manifest(one("claim", "claim-late") + one("limit", "limit-late"))
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
