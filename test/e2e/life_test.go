// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/test/manifests"
	"github.com/tandem-gpu/tandem/test/newer"
)

// occupy starts two pods of each kind and answers which GPUs each sees.
func (s *story) occupy() map[string][]int {
	s.Helper()
	s.manifest(manifests.SingleTemplate)
	for i := range 2 {
		s.manifest(manifests.Pod("claim", fmt.Sprintf("claim-%d", i)))
		s.manifest(manifests.Pod("limit", fmt.Sprintf("limit-%d", i)))
		s.running(soon, 2*i+2, 0)
	}
	return s.seen()
}

func (s *story) seen() map[string][]int {
	s.Helper()
	containers := map[string]string{}
	for _, pod := range s.pods() {
		containers[pod.Name] = pod.Spec.Containers[0].Name
	}
	return s.sees(containers)
}

// undisturbed checks that the pods of occupy never restarted, see the same GPUs, and that both APIs still give out others.
func (s *story) undisturbed(before map[string][]int) {
	s.Helper()
	if after := s.seen(); !maps.EqualFunc(before, after, slices.Equal) {
		s.Errorf("the pods saw GPUs %v, now %v", before, after)
	}
	for _, pod := range s.pods() {
		if pod.Status.Phase != corev1.PodRunning || pod.Status.ContainerStatuses[0].RestartCount > 0 {
			s.Errorf("pod %s is %s after %d restarts", pod.Name, pod.Status.Phase, pod.Status.ContainerStatuses[0].RestartCount)
		}
	}
	s.noDoubleOwners()
	s.manifest(manifests.Pod("claim", "claim-after"))
	s.took("the next claim's pod to run", func() { s.running(patient, 5, 0) })
	s.manifest(manifests.Pod("limit", "limit-after"))
	s.running(soon, 6, 0)
	s.noDoubleOwners()
	if holds := s.holds(node()); len(holds) != 6 {
		s.Errorf("%d holds for 6 pods: %v", len(holds), holds)
	}
}

// killAgent ends the agent of the node with SIGKILL, and returns when kubelet has noticed.
func (s *story) killAgent() {
	s.Helper()
	restarts := s.agentRestarts()
	s.on(node(), "pkill", "-KILL", "-x", "kubelet-plugin")
	s.restarted(restarts)
}

// unrestartedAgent replaces an agent that earlier stories have killed: kubelet waits ten seconds before it restarts a container for
// the second time, twice as long before each further one, and the stories would wait too.
func (s *story) unrestartedAgent() {
	s.Helper()
	if s.agentRestarts() == 0 {
		return
	}
	s.replaceAgent()
}

// restarted waits until kubelet has restarted the agent once more.
func (s *story) restarted(before int32) {
	s.Helper()
	s.await(patient, "kubelet to restart the agent", func() error {
		if got := s.agentRestarts(); got <= before {
			return fmt.Errorf("%d restarts", got)
		}
		return nil
	})
}

func (s *story) agentRestarts() (total int32) {
	s.Helper()
	pods, err := s.agentPods(gpuNode)
	if err != nil {
		s.Fatal(err)
	}
	for _, pod := range pods {
		for _, status := range pod.Status.ContainerStatuses {
			total += status.RestartCount
		}
	}
	return total
}

// fullNode starts four pods of each kind and one more of each, which wait.
func (s *story) fullNode() map[string][]int {
	s.Helper()
	s.manifest(manifests.SingleTemplate)
	for i := range gpusANode / 2 {
		s.manifest(manifests.Pod("claim", fmt.Sprintf("claim-%d", i)) + manifests.Pod("limit", fmt.Sprintf("limit-%d", i)))
	}
	s.running(soon, gpusANode, 0)
	before := s.seen()
	// Both may get the GPU that is free first. The claim's pod then has an owner that creates another one.
	s.manifest(manifests.ClaimDeployment("late-claim", "single", 1) + manifests.Pod("limit", "late-limit"))
	return before
}

// stillFull checks that the pods of fullNode have never restarted and see the same GPUs, and that those who wait get the next.
func (s *story) stillFull(before map[string][]int) {
	s.Helper()
	s.running(soon, gpusANode, 2)
	s.same(before)
	for name := range before {
		if restarts := s.pod(name).Status.ContainerStatuses[0].RestartCount; restarts > 0 {
			s.Errorf("%s restarted %d times", name, restarts)
		}
	}
	s.wantHolds(gpusANode/2, gpusANode/2)
	s.noDoubleOwners()
	s.remove("claim-0", "limit-0")
	s.running(patient, gpusANode, 0)
	s.noDoubleOwners()
}

func TestKubeletRestartedOnAFullNode(t *testing.T) {
	s := begin(t)
	before := s.fullNode()
	if err := node().Component(cluster.Kubelet).Restart(s.ctx); err != nil {
		t.Fatal(err)
	}
	s.ready()
	s.stillFull(before)
}

// TestUpgradedAndBack on a full node: half of the holds are written by a newer agent, whose records have a field that
// today's does not know. Going back to today's loses none of them.
func TestUpgradedAndBack(t *testing.T) {
	s := begin(t)
	tarball, err := newer.Image(s.ctx, s.TempDir(), "", io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	s.manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim-0") + manifests.Pod("claim", "claim-1") + manifests.Pod("limit", "limit-0") + manifests.Pod("limit", "limit-1"))
	s.running(soon, 4, 0)
	tandem := func(o install.Options) error { return install.Tandem(context.WithoutCancel(s.ctx), theCluster, o) }
	today := s.undo(func() error { return tandem(install.Options{Values: installValues}) })
	if err := tandem(install.Options{Image: tarball, Values: append([]string{"podAnnotations.image=newer"}, installValues...)}); err != nil {
		t.Fatal(err)
	}
	before := s.fullNode()
	if records := s.records(node()); !strings.Contains(records, `"newer":`) {
		t.Fatalf("the newer agent wrote no newer record: %s", records)
	}
	today()
	s.ready()
	s.stillFull(before)
}

func TestContainerdRestarted(t *testing.T) {
	s := begin(t)
	before := s.occupy()
	if err := node().Component(cluster.Containerd).Restart(s.ctx); err != nil {
		t.Fatal(err)
	}
	s.ready()
	s.undisturbed(before)
}

// TestReboot of a full node: claims survive a reboot and get their own GPUs back, although pods by limits ask at the same time,
// and none of their pods is evicted. Kubelet itself fails the limits pods of the old boot: their owners replace them, and one
// that has no owner stays as it is.
func TestReboot(t *testing.T) {
	s := begin(t)
	s.manifest(manifests.SingleTemplate)
	for i := range 2 {
		s.manifest(manifests.Pod("claim", fmt.Sprintf("claim-%d", i)))
	}
	s.manifest(manifests.ClaimDeployment("claims", "single", 1))
	s.running(soon, 3, 0)
	before, uids := s.seen(), map[string]types.UID{}
	for _, pod := range s.pods() {
		uids[pod.Name] = pod.UID
	}
	s.manifest(manifests.Deployment("limits", 4) + manifests.Pod("limit", "bare"))
	s.running(soon, gpusANode, 0)
	boot, err := node().BootID()
	if err != nil {
		t.Fatal(err)
	}
	if err := node().Reboot(s.ctx); err != nil {
		t.Fatal(err)
	}
	if now, err := node().BootID(); err != nil || now == boot {
		t.Fatalf("boot ID %s after %s: %v", now, boot, err)
	}
	booted := time.Now()
	s.await(patient, "all pods to run again", func() error {
		running := 0
		var states []string
		for _, pod := range s.pods() {
			states = append(states, fmt.Sprintf("%s=%s%s", pod.Name, pod.Status.Phase, pod.Status.Reason))
			if pod.Status.Phase == corev1.PodRunning && podstatus.Ready(&pod) && pod.DeletionTimestamp == nil {
				running++
			}
		}
		if running != gpusANode-1 {
			return errors.New(strings.Join(states, " "))
		}
		return nil
	})
	t.Logf("all pods ran %.1f s after the node was ready", time.Since(booted).Seconds())
	s.ready()
	for _, pod := range s.pods() {
		if uid, survivor := uids[pod.Name]; survivor && uid != pod.UID {
			t.Errorf("%s was made again", pod.Name)
		}
	}
	s.same(before)
	if bare := s.pod("bare"); bare.Status.Phase != corev1.PodFailed {
		t.Errorf("the limits pod without an owner is %s", bare.Status.Phase)
	}
	t.Logf("failed limits pods of the old boot: %v", s.failed())
	s.noDoubleOwners()
}

// TestDeleteAndRecreate by each API leaves nothing: no record, no CDI file, no socket.
func TestDeleteAndRecreate(t *testing.T) {
	s := begin(t)
	s.manifest(manifests.SingleTemplate)
	before := s.files()
	for round := range 4 {
		var names []string
		for _, api := range []string{"claim", "limit"} {
			for i := range gpusANode / 2 {
				name := fmt.Sprintf("%s-%d-%d", api, round, i)
				names = append(names, name)
				s.manifest(manifests.Pod(api, name))
			}
			s.running(patient, len(names), 0)
			s.await(soon, "what claims have left to be allocatable", func() error { return s.offeredToPods(gpusANode / 2) })
		}
		s.remove(names...)
	}
	s.await(soon, "the ledger to be empty", s.empty)
	if after := s.files(); after != before {
		t.Errorf("files before:\n%s\nafter:\n%s", before, after)
	}
}

// files that many rounds could have left behind.
func (s *story) files() string {
	s.Helper()
	return s.on(node(), "sh", "-c",
		"ls -A /var/run/cdi /etc/cdi /var/lib/kubelet/plugins/gpu.nvidia.com /var/lib/kubelet/plugins_registry /var/lib/kubelet/device-plugins; ls -A /run/tandem")
}

// TestUninstallWithPodsRunning: pods keep their GPUs while the chart is uninstalled, and while NVIDIA's device plugin serves the other ones
// meanwhile. When Tandem is back, no other pod gets the GPUs of either, and both APIs offer those that are left.
func TestUninstallWithPodsRunning(t *testing.T) {
	s := begin(t)
	free := s.uuids()
	before := s.occupy()
	for uuid, minor := range free {
		if slices.Contains(slices.Concat(slices.Collect(maps.Values(before))...), minor) {
			delete(free, uuid)
		}
	}
	back := s.undo(func() error {
		return install.Tandem(context.WithoutCancel(s.ctx), theCluster, install.Options{Values: installValues})
	})
	if err := install.Uninstall(s.ctx, theCluster, install.Options{}); err != nil {
		t.Fatal(err)
	}
	if now := s.seen(); !maps.EqualFunc(before, now, slices.Equal) {
		t.Errorf("the pods saw GPUs %v, without the chart %v", before, now)
	}
	nvidia, _ := s.devicePlugin("nvidia-gpu.sock", free)
	s.await(soon, "kubelet to offer the other plugin's GPUs", func() error { return s.offeredToPods(int64(len(free))) })
	s.manifest(manifests.Pod("limit", "nvidia-0") + manifests.Pod("limit", "nvidia-1"))
	s.running(soon, 6, 0)
	for _, pod := range []string{"nvidia-0", "nvidia-1"} {
		before[pod] = s.gpus(pod, "")
		if text := s.inside(pod, "env"); !strings.Contains(text, "FOREIGN=true") {
			t.Fatalf("%s was not served by the other plugin: %s", pod, text)
		}
	}
	if err := nvidia.Stop(); err != nil {
		t.Fatal(err)
	}
	back()

	s.wantHolds(2, 4)
	s.await(soon, "claims to be offered what limits do not have", func() error { return s.offeredToClaims(gpusANode - 4) })
	s.same(before)
	s.manifest(manifests.Pod("claim", "claim-after"))
	s.running(patient, 7, 0)
	s.manifest(manifests.Pod("limit", "limit-after"))
	s.running(soon, gpusANode, 0)
	s.manifest(manifests.Pod("claim", "late"))
	s.unschedulable(1)
	s.noDoubleOwners()
	s.same(before)
	for name := range before {
		if restarts := s.pod(name).Status.ContainerStatuses[0].RestartCount; restarts > 0 {
			t.Errorf("%s restarted %d times", name, restarts)
		}
	}
	s.remove("nvidia-0")
	s.running(patient, gpusANode, 0)
	s.noDoubleOwners()
}
