// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/test/manifests"
)

const (
	taintRule = "story-fans"
	taintText = "example.com/repair=fan:NoSchedule of DeviceTaintRule " + taintRule
)

// taints applies the rule for a GPU of the node, with a pool.
func (s *story) taints(gpu int, effect string) {
	s.Helper()
	if err := s.ApplyAnywhere(fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: DeviceTaintRule
metadata: {name: %s}
spec:
  deviceSelector: {driver: gpu.nvidia.com, pool: %s, device: gpu-%d}
  taint: {key: example.com/repair, value: fan, effect: %s}
`, taintRule, gpuNode, gpu, effect)); err != nil {
		s.Fatal(err)
	}
}

func (s *story) endTaint() {
	s.Helper()
	err := theClient.ResourceV1().DeviceTaintRules().Delete(s.Ctx, taintRule, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		s.Fatal(err)
	}
}

// haveNot fails if a pod that runs has the GPU.
func (s *story) haveNot(gpu int) {
	s.Helper()
	for _, pod := range s.Pods() {
		if pod.Status.Phase == corev1.PodRunning && slices.Contains(s.GPUs(pod.Name, ""), gpu) {
			s.Errorf("%s has the tainted GPU", pod.Name)
		}
	}
}

// TestDeviceTaintRule: a GPU that an administrator taints leaves kubelet's list at once, goes to no new pod of either API unless its claim
// tolerates the taint, and stays with its holders; every view names the rule; and it is back when the rule goes.
func TestDeviceTaintRule(t *testing.T) {
	s := begin(t)
	if _, err := theClient.ResourceV1().DeviceTaintRules().List(s.Ctx, metav1.ListOptions{}); apierrors.IsNotFound(err) {
		t.Skip("the API server does not serve DeviceTaintRules")
	}
	t.Cleanup(s.endTaint)
	plugin := s.BuildPlugin()
	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim") + manifests.Pod("limit", "limit"))
	s.Running(soon, 2, 0)
	seen := s.Seen()
	s.Await(soon, "all GPUs but the claim's to be allocatable", func() error { return s.OfferedToPods(gpusANode - 1) })
	free := 0
	for gpu := range gpusANode {
		if gpu != seen["claim"][0] && gpu != seen["limit"][0] {
			free = gpu
		}
	}

	began := time.Now()
	s.taints(free, "NoSchedule")
	s.Await(soon, "the GPU to leave allocatable", func() error { return s.OfferedToPods(gpusANode - 2) })
	t.Logf("allocatable %.2f s after the rule", time.Since(began).Seconds())
	shown := s.Shows("the taint", func(n gpunode.GPUNode) bool { return n.Status.Counts.Tainted == 1 })
	for _, d := range shown.Status.Devices {
		if want := d.Name == fmt.Sprintf("gpu-%d", free); (len(d.Taints) == 1 && d.Taints[0].String() == taintText) != want {
			t.Errorf("%s has the taints %v", d.Name, d.Taints)
		}
	}
	s.Event("Node", gpuNode, "GPUTainted", fmt.Sprintf("gpu-%d", free), taintText)
	s.Await(soon, "the metric", func() error {
		if !s.hasMetric(fmt.Sprintf(`tandem_device_taint{device="gpu-%d",effect="NoSchedule",key="example.com/repair",rule=%q`, free, taintRule)) {
			return errors.New("there is none")
		}
		return nil
	})

	// All other GPUs go to pods, and the tainted one to none of them.
	s.Manifest(manifests.Deployment("limits", gpusANode-3))
	s.Running(soon, gpusANode-1, 0)
	s.Await(soon, "slices to offer the tainted GPU, without the taint", func() error { return s.OfferedToClaims(2) }) // and the GPU that the claim has
	s.Manifest(manifests.Pod("claim", "late"))
	s.Running(soon, gpusANode-1, 1)
	s.Unschedulable(1)
	s.haveNot(free)
	waits := slices.IndexFunc(s.Pods(), func(p corev1.Pod) bool { return p.Status.Phase == corev1.PodPending })
	for what, args := range map[string][]string{
		"ls": {"ls", gpuNode, "-o", "wide"}, "node": {"node", gpuNode}, "why": {"why", s.Pods()[waits].Name, "-n", s.Namespace},
		"doctor": {"doctor"},
	} {
		s.Await(soon, what+" to name the rule", func() error { // the agent reports all holders within a second
			out, err := s.KubectlGPU(plugin, args...)
			if err == nil && !strings.Contains(strings.Join(strings.Fields(out), " "), taintText) {
				err = fmt.Errorf("it says:\n%s", out)
			}
			return err
		})
	}
	s.Manifest(strings.Replace(strings.Replace(manifests.SingleTemplate, "name: single", "name: tolerant", 1),
		"{deviceClassName: gpu.nvidia.com}", "{deviceClassName: gpu.nvidia.com, tolerations: [{key: example.com/repair, operator: Exists}]}", 1) +
		manifests.ClaimPod("tolerates", "tolerant"))
	s.Running(soon, gpusANode, 1)
	if got := s.GPUs("tolerates", ""); !slices.Equal(got, []int{free}) {
		t.Errorf("the pod whose claim tolerates the taint has %v", got)
	}
	for _, pod := range []string{"claim", "limit"} {
		if now := s.GPUs(pod, ""); !slices.Equal(now, seen[pod]) {
			t.Errorf("%s saw %v, now %v", pod, seen[pod], now)
		}
	}
	s.DeleteAll()
	s.Await(soon, "the GPU to stay withdrawn without a holder", func() error { return s.OfferedToPods(gpusANode - 1) })

	began = time.Now()
	s.endTaint()
	s.Await(soon, "all GPUs to be back", func() error { return s.OfferedToPods(gpusANode) })
	t.Logf("back %.2f s after the end of the rule", time.Since(began).Seconds())
	s.Event("Node", gpuNode, "GPUTaintEnded", fmt.Sprintf("gpu-%d", free), taintText)
	s.AllFree()
}

// TestTaintOfAHeldGPU: the pods that hold a tainted GPU keep it, by either API, and the next one does not get it, also not after a restart of
// the agent. A rule without an effect changes nothing.
func TestTaintOfAHeldGPU(t *testing.T) {
	s := begin(t)
	if _, err := theClient.ResourceV1().DeviceTaintRules().List(s.Ctx, metav1.ListOptions{}); apierrors.IsNotFound(err) {
		t.Skip("the API server does not serve DeviceTaintRules")
	}
	t.Cleanup(s.endTaint)
	s.Manifest(manifests.Pod("limit", "holder"))
	s.Running(soon, 1, 0)
	gpu := s.GPUs("holder", "")[0]
	s.taints(gpu, "None")
	s.Await(soon, "no change", func() error { return s.OfferedToPods(gpusANode) })
	s.taints(gpu, "NoSchedule")
	s.Shows("the taint", func(n gpunode.GPUNode) bool { return n.Status.Counts.Tainted == 1 })
	s.KillAgent()
	s.Ready()
	if got := s.GPUs("holder", ""); !slices.Equal(got, []int{gpu}) || s.Pod("holder").Status.Phase != corev1.PodRunning {
		t.Errorf("the holder has %v", got)
	}
	s.DeleteAll()
	s.Manifest(manifests.Deployment("limits", gpusANode))
	s.Running(soon, gpusANode-1, 1)
	s.haveNot(gpu)
	s.endTaint()
	s.Running(soon, gpusANode, 0)
	s.DeleteAll()
	s.AllFree()
}
