// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestStaticPartitions are made and removed by an administrator while the agent runs, given out by both APIs, and never touched
// by the agent, before or after it has restarted.
func TestStaticPartitions(t *testing.T) {
	const last = "7"
	s := begin(t)
	t.Cleanup(func() { s.Uncut(gpusANode - 1) })
	// A story that fails leaves no pod on what the administrator removes.
	t.Cleanup(func() { s.DeleteAll() })
	agents := s.AgentRestarts()

	s.Administer("-i", last, "-mig", "1")
	s.Administer("mig", "-i", last, "-cgi", "1g.10gb,1g.10gb,3g.40gb", "-C")
	s.Published("1g.10gb", "1g.10gb", "3g.40gb")
	s.Await(patient, "limits to see them", func() error {
		return errors.Join(s.Allocatable("nvidia.com/mig-1g.10gb", 2), s.Allocatable("nvidia.com/mig-3g.40gb", 1), s.OfferedToPods(gpusANode-1))
	})
	if now := s.AgentRestarts(); now != agents {
		t.Errorf("the agent restarted %d times", now-agents)
	}

	// Each API gets one of the small partitions, and a third request gets none.
	s.Example("mig-limits.yaml")
	s.Running(soon, 1, 0)
	s.Manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("by-claim", "ones"))
	s.Running(soon, 2, 0)
	s.WantHolds(1, 1)
	used := s.partitions()
	if len(used["mig-limits"]) != 1 || len(used["by-claim"]) != 1 || used["mig-limits"][0] == used["by-claim"][0] {
		t.Errorf("the pods can use %v", used)
	}
	lateLimit := strings.Replace(manifests.Pod("limit", "late-limit"), "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", 1)
	s.Manifest(manifests.ClaimPod("late-claim", "ones") + lateLimit)
	s.Unschedulable(2)
	s.explained()
	s.NoDoubleOwners()

	// The agent restarts; nothing is touched. What the administrator changes meanwhile is known afterwards.
	before := s.migInstances()
	s.KillAgent()
	s.Ready()
	if now := s.migInstances(); !slices.Equal(now, before) {
		t.Errorf("instances were %v, are %v", before, now)
	}
	if now := s.partitions(); !maps.EqualFunc(now, used, slices.Equal) {
		t.Errorf("the pods could use %v, now %v", used, now)
	}

	// The large partition has no holder and is removed; another one is created there. A pod holds one of the small ones.
	s.removeInstance(last, "3g.40gb")
	s.Published("1g.10gb")
	s.Administer("mig", "-i", last, "-cgi", "2g.20gb", "-C")
	s.Published("1g.10gb", "2g.20gb")
	s.Await(patient, "limits to see that", func() error {
		return errors.Join(s.Allocatable("nvidia.com/mig-3g.40gb", 0), s.Allocatable("nvidia.com/mig-2g.20gb", 1))
	})

	// Compute instances of one GPU instance are devices of their own: they share its memory, not their cores.
	s.removeInstance(last, "2g.20gb")
	s.Administer("mig", "-i", last, "-cgi", "3g.40gb")
	s.Published("1g.10gb") // without a compute instance it has no holder
	s.Administer("mig", "-i", last, "-cci", "1,0", "-gi", s.InstanceIDs(last, "3g.40gb")[0])
	s.Published("1c.3g.40gb", "1g.10gb", "2c.3g.40gb")
	s.Await(patient, "limits to see them", func() error {
		return errors.Join(s.Allocatable("nvidia.com/mig-1c.3g.40gb", 1), s.Allocatable("nvidia.com/mig-2c.3g.40gb", 1))
	})
	s.Manifest(manifests.PartitionTemplate("half", "1c.3g.40gb") + manifests.ClaimPod("half", "half") +
		strings.Replace(manifests.Pod("limit", "other-half"), "nvidia.com/gpu", "nvidia.com/mig-2c.3g.40gb", 1))
	s.Running(soon, 4, 2)
	s.WantHolds(2, 2)
	if used := s.partitions(); len(used["half"]) != 1 || len(used["other-half"]) != 1 || slices.Equal(used["half"], used["other-half"]) {
		t.Errorf("the pods can use %v", used)
	}
	s.NoDoubleOwners()
	s.remove("half", "other-half")

	// What pods give back stays where it is, for those who waited. One pod waits at a time: scheduler and kubelet may choose the
	// same partition for two pods that wait, and a pod with a claim and without an owner then waits for the other pod's end.
	s.remove("late-limit", "by-claim")
	s.Running(patient, 2, 0)
	s.Manifest(lateLimit)
	s.Unschedulable(1)
	s.remove("mig-limits")
	s.Running(patient, 2, 0)
	s.WantHolds(1, 1)
	s.NoDoubleOwners()
	s.DeleteAll()
	s.Await(soon, "the ledger to be empty", s.Empty)
	if found := s.migInstances(); len(found) != 3 {
		t.Errorf("instances: %v", found)
	}
}

// TestSingleStrategy: an administrator cuts every GPU of the node alike, and nvidia.com/gpu is one of the parts; claims get
// others of them. One GPU that is cut otherwise is left out and reported, and stops nothing.
func TestSingleStrategy(t *testing.T) {
	s := begin(t)
	all := []int{0, 1, 2, 3, 4, 5, 6, 7}
	t.Cleanup(func() { s.Uncut(all...) })
	t.Cleanup(func() { s.DeleteAll() })
	for _, gpu := range all {
		s.Administer("-i", fmt.Sprint(gpu), "-mig", "1")
		s.Administer("mig", "-i", fmt.Sprint(gpu), "-cgi", "3g.40gb,3g.40gb", "-C")
	}
	const halves = 2 * gpusANode
	s.Await(patient, "halves to be offered in place of GPUs", func() error {
		return errors.Join(s.OfferedToPods(halves), s.OfferedToClaims(halves))
	})
	s.Manifest(manifests.PartitionTemplate("half", "3g.40gb") + manifests.ClaimPod("by-claim", "half") + manifests.Pod("limit", "by-limit"))
	s.Running(soon, 2, 0)
	s.WantHolds(1, 1)
	if used := s.partitions(); len(used["by-claim"]) != 1 || len(used["by-limit"]) != 1 || slices.Equal(used["by-claim"], used["by-limit"]) {
		t.Errorf("the pods can use %v", used)
	}
	s.Manifest(manifests.Deployment("rest", halves-1))
	s.Running(patient, halves, 1)
	s.NoDoubleOwners()

	// Other partitions on one GPU, once its halves have no holder.
	s.DeleteAll()
	s.Await(soon, "the ledger to be empty", s.Empty)
	last := fmt.Sprint(gpusANode - 1)
	s.Administer("mig", "-i", last, "-dci")
	s.Administer("mig", "-i", last, "-dgi")
	s.Administer("mig", "-i", last, "-cgi", "1g.10gb", "-C")
	s.Await(patient, "the odd one to be left out of limits", func() error {
		return errors.Join(s.OfferedToPods(halves-2), s.OfferedToClaims(halves-1))
	})
	s.Manifest(manifests.Pod("limit", "still-served"))
	s.Running(soon, 1, 0)
	s.explained()
}

// TestStaticAfterDynamic: Tandem is uninstalled while a claim has a partition that was made for it. The administrator partitions that GPU, and
// Tandem comes back with GPUs that are not dynamic, more than once. The claim ends meanwhile, and the GPUNode still names it, because no
// controller runs. What is offered is what exists, and a claim that comes at once gets it.
func TestStaticAfterDynamic(t *testing.T) {
	s := begin(t)
	if !s.CountersKept() {
		t.Skip(droppedCounters)
	}
	s.dynamic()
	s.Manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("early", "ones"))
	s.Running(soon, 1, 0)
	var gpu int
	if _, err := fmt.Sscanf(strings.Join(s.partitions()["early"], " "), "gpu%d/", &gpu); err != nil {
		t.Fatal(s.partitions(), err)
	}
	named := func() error {
		if spec := s.Kubectl("get", "gpunode", gpuNode, "-o", "jsonpath={.spec.claims}"); !strings.Contains(spec, s.Namespace) {
			return fmt.Errorf("claims are %s", spec)
		}
		return nil
	}
	s.Await(patient, "the GPUNode to name the claim", named)
	away := func() {
		t.Helper()
		if err := install.Uninstall(s.Ctx, theCluster, install.Options{}); err != nil {
			t.Fatal(err)
		}
	}
	back := func() {
		t.Helper()
		if err := s.Install(s.Ctx, install.Options{Detached: true, Values: []string{"controller.replicas=0"}}); err != nil {
			t.Fatal(err)
		}
		s.RolledOut()
	}
	away()
	t.Cleanup(func() { s.Uncut(gpu) })
	t.Cleanup(func() { s.DeleteAll() })
	s.Administer("mig", "-i", fmt.Sprint(gpu), "-dci")
	s.Administer("mig", "-i", fmt.Sprint(gpu), "-dgi")
	s.Administer("mig", "-i", fmt.Sprint(gpu), "-cgi", "1g.10gb", "-C")
	back()
	s.remove("early")
	if err := named(); err != nil {
		t.Fatal(err)
	}
	away()
	back()
	s.Manifest(manifests.ClaimPod("late", "ones") + manifests.ClaimPod("none", "ones"))
	s.Running(soon, 1, 1)
	s.Published("1g.10gb")
	s.Await(patient, "no pool of a GPU to be left", func() error {
		if pools := s.poolsOfGPUs(); len(pools) > 0 {
			return fmt.Errorf("pools of GPUs: %v", pools)
		}
		return nil
	})
	s.explained()
}

// removeInstance destroys the GPU instances of a profile.
func (s *story) removeInstance(gpu, profile string) {
	s.Helper()
	for _, id := range s.InstanceIDs(gpu, profile) {
		s.Administer("mig", "-i", gpu, "-dci", "-gi", id)
		s.Administer("mig", "-i", gpu, "-dgi", "-gi", id)
	}
}
