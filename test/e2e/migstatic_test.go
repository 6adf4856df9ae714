// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestStaticPartitions are made and removed by an administrator while the agent runs, given out by both APIs, and never touched
// by the agent, before or after it has restarted.
func TestStaticPartitions(t *testing.T) {
	const last = "7"
	s := begin(t)
	t.Cleanup(func() { s.uncut(gpusANode - 1) })
	// A story that fails leaves no pod on what the administrator removes.
	t.Cleanup(func() { s.deleteAll() })
	agents := s.agentRestarts()

	s.administer("-i", last, "-mig", "1")
	s.administer("mig", "-i", last, "-cgi", "1g.10gb,1g.10gb,3g.40gb", "-C")
	s.published("1g.10gb", "1g.10gb", "3g.40gb")
	s.await(patient, "limits to see them", func() error {
		return errors.Join(s.allocatable("nvidia.com/mig-1g.10gb", 2), s.allocatable("nvidia.com/mig-3g.40gb", 1), s.offeredToPods(gpusANode-1))
	})
	if now := s.agentRestarts(); now != agents {
		t.Errorf("the agent restarted %d times", now-agents)
	}

	// Each API gets one of the small partitions, and a third request gets none.
	s.example("mig-limits.yaml")
	s.running(soon, 1, 0)
	s.manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("by-claim", "ones"))
	s.running(soon, 2, 0)
	s.wantHolds(1, 1)
	used := s.partitions()
	if len(used["mig-limits"]) != 1 || len(used["by-claim"]) != 1 || used["mig-limits"][0] == used["by-claim"][0] {
		t.Errorf("the pods can use %v", used)
	}
	lateLimit := strings.Replace(manifests.Pod("limit", "late-limit"), "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", 1)
	s.manifest(manifests.ClaimPod("late-claim", "ones") + lateLimit)
	s.unschedulable(2)
	s.explained()
	s.noDoubleOwners()

	// The agent restarts; nothing is touched. What the administrator changes meanwhile is known afterwards.
	before := s.migInstances()
	s.killAgent()
	s.ready()
	if now := s.migInstances(); !slices.Equal(now, before) {
		t.Errorf("instances were %v, are %v", before, now)
	}
	if now := s.partitions(); !maps.EqualFunc(now, used, slices.Equal) {
		t.Errorf("the pods could use %v, now %v", used, now)
	}

	// The large partition has no holder and is removed; another one is created there. A pod holds one of the small ones.
	s.removeInstance(last, "3g.40gb")
	s.published("1g.10gb")
	s.administer("mig", "-i", last, "-cgi", "2g.20gb", "-C")
	s.published("1g.10gb", "2g.20gb")
	s.await(patient, "limits to see that", func() error {
		return errors.Join(s.allocatable("nvidia.com/mig-3g.40gb", 0), s.allocatable("nvidia.com/mig-2g.20gb", 1))
	})

	// Compute instances of one GPU instance are devices of their own: they share its memory, not their cores.
	s.removeInstance(last, "2g.20gb")
	s.administer("mig", "-i", last, "-cgi", "3g.40gb")
	s.published("1g.10gb") // without a compute instance it has no holder
	s.administer("mig", "-i", last, "-cci", "1,0", "-gi", s.instanceIDs(last, "3g.40gb")[0])
	s.published("1c.3g.40gb", "1g.10gb", "2c.3g.40gb")
	s.await(patient, "limits to see them", func() error {
		return errors.Join(s.allocatable("nvidia.com/mig-1c.3g.40gb", 1), s.allocatable("nvidia.com/mig-2c.3g.40gb", 1))
	})
	s.manifest(manifests.PartitionTemplate("half", "1c.3g.40gb") + manifests.ClaimPod("half", "half") +
		strings.Replace(manifests.Pod("limit", "other-half"), "nvidia.com/gpu", "nvidia.com/mig-2c.3g.40gb", 1))
	s.running(soon, 4, 2)
	s.wantHolds(2, 2)
	if used := s.partitions(); len(used["half"]) != 1 || len(used["other-half"]) != 1 || slices.Equal(used["half"], used["other-half"]) {
		t.Errorf("the pods can use %v", used)
	}
	s.noDoubleOwners()
	s.remove("half", "other-half")

	// What pods give back stays where it is, for those who waited. One pod waits at a time: scheduler and kubelet may choose the
	// same partition for two pods that wait, and a pod with a claim and without an owner then waits for the other pod's end.
	s.remove("late-limit", "by-claim")
	s.running(patient, 2, 0)
	s.manifest(lateLimit)
	s.unschedulable(1)
	s.remove("mig-limits")
	s.running(patient, 2, 0)
	s.wantHolds(1, 1)
	s.noDoubleOwners()
	s.deleteAll()
	s.await(soon, "the ledger to be empty", s.empty)
	if found := s.migInstances(); len(found) != 3 {
		t.Errorf("instances: %v", found)
	}
}

// TestSingleStrategy: an administrator cuts every GPU of the node alike, and nvidia.com/gpu is one of the parts; claims get
// others of them. One GPU that is cut otherwise is left out and reported, and stops nothing.
func TestSingleStrategy(t *testing.T) {
	s := begin(t)
	all := []int{0, 1, 2, 3, 4, 5, 6, 7}
	t.Cleanup(func() { s.uncut(all...) })
	t.Cleanup(func() { s.deleteAll() })
	for _, gpu := range all {
		s.administer("-i", fmt.Sprint(gpu), "-mig", "1")
		s.administer("mig", "-i", fmt.Sprint(gpu), "-cgi", "3g.40gb,3g.40gb", "-C")
	}
	const halves = 2 * gpusANode
	s.await(patient, "halves to be offered in place of GPUs", func() error {
		return errors.Join(s.offeredToPods(halves), s.offeredToClaims(halves))
	})
	s.manifest(manifests.PartitionTemplate("half", "3g.40gb") + manifests.ClaimPod("by-claim", "half") + manifests.Pod("limit", "by-limit"))
	s.running(soon, 2, 0)
	s.wantHolds(1, 1)
	if used := s.partitions(); len(used["by-claim"]) != 1 || len(used["by-limit"]) != 1 || slices.Equal(used["by-claim"], used["by-limit"]) {
		t.Errorf("the pods can use %v", used)
	}
	s.manifest(manifests.Deployment("rest", halves-1))
	s.running(patient, halves, 1)
	s.noDoubleOwners()

	// Other partitions on one GPU, once its halves have no holder.
	s.deleteAll()
	s.await(soon, "the ledger to be empty", s.empty)
	last := fmt.Sprint(gpusANode - 1)
	s.administer("mig", "-i", last, "-dci")
	s.administer("mig", "-i", last, "-dgi")
	s.administer("mig", "-i", last, "-cgi", "1g.10gb", "-C")
	s.await(patient, "the odd one to be left out of limits", func() error {
		return errors.Join(s.offeredToPods(halves-2), s.offeredToClaims(halves-1))
	})
	s.manifest(manifests.Pod("limit", "still-served"))
	s.running(soon, 1, 0)
	s.explained()
}

// uncut takes the partitions of some GPUs away, in the order in which that can be done, and MIG mode off.
func (s *story) uncut(gpus ...int) {
	for _, gpu := range gpus {
		for _, args := range [][]string{{"mig", "-dci"}, {"mig", "-dgi"}, {"-mig", "0"}} {
			if _, err := s.smi(append(args, "-i", fmt.Sprint(gpu))...); err != nil {
				s.Log(err)
			}
		}
	}
}

func (s *story) administer(args ...string) {
	s.Helper()
	if _, err := s.smi(args...); err != nil {
		s.Fatal(err)
	}
}

func (s *story) deleteAll() {
	s.Helper()
	s.kubectl("delete", "deployment,pod,resourceclaim", "--all", "-n", s.namespace, "--now")
}

// published waits until the slices offer seven GPUs and partitions of these profiles.
func (s *story) published(profiles ...string) {
	s.Helper()
	began := time.Now()
	s.await(soon, fmt.Sprintf("partitions %v to be published", profiles), func() error {
		list, err := theClient.ResourceV1().ResourceSlices().List(s.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + gpuNode})
		if err != nil {
			return err
		}
		var found []string
		for _, slice := range list.Items {
			for _, d := range slice.Spec.Devices {
				if profile := d.Attributes["profile"].StringValue; profile != nil && len(d.Taints) == 0 {
					found = append(found, *profile)
				}
			}
		}
		slices.Sort(found)
		if !slices.Equal(found, profiles) {
			return fmt.Errorf("%v are", found)
		}
		return s.offeredToClaims(gpusANode - 1 + len(profiles))
	})
	s.Logf("%v published %.1f s after the administrator was done", profiles, time.Since(began).Seconds())
}

// allocatable wants so much of a resource on the node.
func (s *story) allocatable(resource string, want int64) error {
	n, err := theClient.CoreV1().Nodes().Get(s.ctx, gpuNode, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if got := n.Status.Allocatable[corev1.ResourceName(resource)]; got.Value() != want {
		return fmt.Errorf("allocatable %s is %s, not %d", resource, got.String(), want)
	}
	return nil
}

// removeInstance destroys the GPU instances of a profile.
func (s *story) removeInstance(gpu, profile string) {
	s.Helper()
	for _, id := range s.instanceIDs(gpu, profile) {
		s.administer("mig", "-i", gpu, "-dci", "-gi", id)
		s.administer("mig", "-i", gpu, "-dgi", "-gi", id)
	}
}

// instanceIDs are the GPU instances of a profile. A line of the list is "7 MIG 3g.40gb 9 2 4:4", with the ID last but one.
func (s *story) instanceIDs(gpu, profile string) (ids []string) {
	s.Helper()
	listed, err := s.smi("mig", "-i", gpu, "-lgi")
	if err != nil {
		s.Fatal(err)
	}
	for line := range strings.Lines(listed) {
		if slices.Contains(strings.Fields(line), profile) {
			ids = append(ids, strings.Fields(line)[4])
		}
	}
	return ids
}
