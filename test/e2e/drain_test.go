// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/test/manifests"
	"github.com/tandem-gpu/tandem/test/stories"
)

// TestDrainGPUs: of a full node one GPU of a pod with limits and one of a claim are drained. Both pods run on, pods of both APIs that wait
// never get these GPUs, also while their holders end and while the agent is replaced or killed, and get them after undrain.
func TestDrainGPUs(t *testing.T) {
	s := begin(t)
	plugin := s.BuildPlugin()
	undrain := s.undrains(plugin)
	s.Manifest(manifests.SingleTemplate)
	for i := range gpusANode / 2 {
		s.Manifest(manifests.Pod("claim", fmt.Sprintf("claim-%d", i)) + manifests.Pod("limit", fmt.Sprintf("limit-%d", i)))
	}
	s.Running(soon, gpusANode, 0)
	drained := map[string]string{} // the argument by holder
	for _, holder := range []string{"claim-0", "limit-0"} {
		drained[holder] = fmt.Sprintf("%s/%d", gpuNode, s.GPUs(holder, "")[0])
		_, err := s.KubectlGPU(plugin, "drain", drained[holder], "--reason", "replace the fan", "--timeout", "3s")
		if want := s.Namespace + "/" + holder + " ("; err == nil || !strings.Contains(err.Error(), "not free after 3s") || !strings.Contains(err.Error(), want) {
			t.Errorf("drain of a GPU that %s holds: %v", holder, err)
		}
	}
	maintained := func(n gpunode.GPUNode) (names []string) {
		for _, d := range n.Status.Devices {
			if d.Maintenance != nil {
				names = append(names, gpuNode+"/"+strings.TrimPrefix(d.Name, "gpu-"))
			}
		}
		slices.Sort(names)
		return names
	}
	want := slices.Sorted(slices.Values([]string{drained["claim-0"], drained["limit-0"]}))
	s.Shows("both GPUs under maintenance", func(n gpunode.GPUNode) bool {
		return slices.Equal(maintained(n), want) && n.Status.Counts.Maintenance == 2
	})
	s.Event("Node", gpuNode, "GPUMaintenance", "replace the fan", "kubectl gpu undrain "+gpuNode)

	// Both may get the GPU that is free first. The claim's pod then has an owner that creates another one.
	s.Manifest(manifests.ClaimDeployment("claim-late", "single", 1) + manifests.Pod("limit", "limit-late"))
	s.Running(soon, gpusANode, 2)
	before := s.gpuOf("claim-0", "limit-0")
	s.remove("claim-0", "limit-0")
	for holder, gpu := range drained {
		if out, err := s.KubectlGPU(plugin, "drain", gpu, "--timeout", "1m"); err != nil || !strings.HasSuffix(out, " is free\n") {
			t.Errorf("drain once %s has ended: %v\n%s", holder, err, out)
		}
	}
	s.waitOn("after the holders have ended")
	why, err := s.KubectlGPU(plugin, "why", "limit-late", "-n", s.Namespace)
	if err != nil || !strings.Contains(why, "2 under maintenance") || !strings.Contains(why, "kubectl gpu undrain "+gpuNode) {
		t.Errorf("why: %v\n%s", err, why)
	}
	t.Log("\n" + why)
	s.ReplaceAgent()
	s.waitOn("after the agent was replaced")
	s.KillAgent()
	s.Ready()
	s.waitOn("after the agent was killed")
	s.NoDoubleOwners()

	// Others are served while the two are out of service.
	s.remove("claim-1", "limit-1")
	s.Running(soon, gpusANode-2, 0)
	for pod, gpus := range s.gpuOf(s.someRunning("claim-late", 1)[0].Name, "limit-late") {
		if slices.Contains(want, fmt.Sprintf("%s/%d", gpuNode, gpus)) {
			t.Errorf("%s got GPU %d, which is under maintenance", pod, gpus)
		}
	}
	undrain()
	s.Event("Node", gpuNode, "GPUInService", "in service again")
	s.Manifest(manifests.Pod("claim", "claim-next") + manifests.Pod("limit", "limit-next"))
	s.Running(soon, gpusANode, 0)
	after := s.gpuOf("claim-next", "limit-next")
	got := []int{after["claim-next"], after["limit-next"]}
	wanted := []int{before["claim-0"], before["limit-0"]}
	slices.Sort(got)
	slices.Sort(wanted)
	if !slices.Equal(got, wanted) {
		t.Errorf("after undrain the next pods have GPUs %v, want %v", got, wanted)
	}
	s.NoDoubleOwners()
}

// TestDrainEvicts: with --evict the pod of a Deployment moves to another GPU, and a pod without a controller stays.
func TestDrainEvicts(t *testing.T) {
	s := begin(t)
	plugin := s.BuildPlugin()
	undrain := s.undrains(plugin)
	s.Example("deployment-limits.yaml")
	s.Manifest(manifests.Pod("limit", "bare"))
	s.Running(soon, 4, 0)
	bare := fmt.Sprintf("%s/%d", gpuNode, s.GPUs("bare", "")[0])
	if _, err := s.KubectlGPU(plugin, "drain", bare, "--evict", "--timeout", "1m"); err == nil || !strings.Contains(err.Error(),
		"cannot evict Pods that declare no controller (use --force to override): "+s.Namespace+"/bare") {
		t.Errorf("eviction of a pod without a controller: %v", err)
	}
	at := slices.IndexFunc(s.Pods(), func(p corev1.Pod) bool { return p.Name != "bare" })
	victim := s.Pods()[at]
	gpu := s.GPUs(victim.Name, "")[0]
	out, err := s.KubectlGPU(plugin, "drain", fmt.Sprintf("%s/gpu-%d", gpuNode, gpu), "--evict", "--timeout", "1m")
	t.Log("\n" + out)
	if err != nil || !strings.Contains(out, "evicting pod "+s.Namespace+"/"+victim.Name+"\n") || !strings.HasSuffix(out, " is free\n") {
		t.Errorf("eviction: %v\n%s", err, out)
	}
	s.Running(soon, 4, 0)
	for _, pod := range s.Pods() {
		if pod.DeletionTimestamp == nil && pod.Name != "bare" && slices.Contains(s.GPUs(pod.Name, ""), gpu) {
			t.Errorf("%s has GPU %d, which is under maintenance", pod.Name, gpu)
		}
	}
	if s.Pod("bare").Status.Phase != corev1.PodRunning {
		t.Error("the pod without a controller does not run any more")
	}
	undrain()
}

// undrains returns a function that puts all GPUs of the node into service again. It runs at the latest when the story ends.
func (s *story) undrains(plugin string) func() {
	return s.Undo(func() error {
		_, err := s.KubectlGPU(plugin, "undrain", gpuNode)
		return err
	})
}

// gpuOf returns the only GPU that each pod sees.
func (s *story) gpuOf(pods ...string) map[string]int {
	s.Helper()
	seen := map[string]int{}
	for _, pod := range pods {
		gpus := s.GPUs(pod, "")
		if len(gpus) != 1 {
			s.Fatalf("%s sees GPUs %v", pod, gpus)
		}
		seen[pod] = gpus[0]
	}
	return seen
}

// waitOn checks for two seconds that the two pods that wait get no GPU, although the node has two under maintenance. Where the scheduler takes
// longer to place a pod, the end of the story shows which GPUs they got.
func (s *story) waitOn(when string) {
	s.Helper()
	// Nothing is to happen: the scheduler would place a pod within a second.
	for until := time.Now().Add(2 * time.Second); time.Now().Before(until); time.Sleep(stories.SampleEvery) {
		late := 0
		for _, pod := range s.Pods() {
			if !strings.Contains(pod.Name, "-late") {
				continue
			}
			if late++; pod.Status.Phase != corev1.PodPending || pod.Spec.NodeName != "" {
				s.Fatalf("%s: %s is %s on %q: %s", when, pod.Name, pod.Status.Phase, pod.Spec.NodeName, pod.Status.Message)
			}
		}
		if late != 2 {
			s.Fatalf("%s: %d pods wait, not 2", when, late)
		}
	}
}
