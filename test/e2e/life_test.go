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

// unrestartedAgent replaces an agent that earlier stories have killed: kubelet waits ten seconds before it restarts a container for
// the second time, twice as long before each further one, and the stories would wait too.
func (s *story) unrestartedAgent() {
	s.Helper()
	if s.AgentRestarts() == 0 {
		return
	}
	s.ReplaceAgent()
}

// fullNode starts four pods of each kind and one more of each, which wait.
func (s *story) fullNode() map[string][]int {
	s.Helper()
	s.Manifest(manifests.SingleTemplate)
	for i := range gpusANode / 2 {
		s.Manifest(manifests.Pod("claim", fmt.Sprintf("claim-%d", i)) + manifests.Pod("limit", fmt.Sprintf("limit-%d", i)))
	}
	s.Running(soon, gpusANode, 0)
	before := s.Seen()
	// Both may get the GPU that is free first. The claim's pod then has an owner that creates another one.
	s.Manifest(manifests.ClaimDeployment("late-claim", "single", 1) + manifests.Pod("limit", "late-limit"))
	return before
}

// stillFull checks that the pods of fullNode have never restarted and see the same GPUs, and that those who wait get the next.
func (s *story) stillFull(before map[string][]int) {
	s.Helper()
	s.Running(soon, gpusANode, 2)
	s.Same(before)
	for name := range before {
		if restarts := s.Pod(name).Status.ContainerStatuses[0].RestartCount; restarts > 0 {
			s.Errorf("%s restarted %d times", name, restarts)
		}
	}
	s.WantHolds(gpusANode/2, gpusANode/2)
	s.NoDoubleOwners()
	s.remove("claim-0", "limit-0")
	s.Running(patient, gpusANode, 0)
	s.NoDoubleOwners()
}

func TestKubeletRestartedOnAFullNode(t *testing.T) {
	s := begin(t)
	before := s.fullNode()
	if err := node().Component(cluster.Kubelet).Restart(s.Ctx); err != nil {
		t.Fatal(err)
	}
	s.Ready()
	s.stillFull(before)
}

// TestUpgradedAndBack on a full node: half of the holds are written by a newer agent, whose records have a field that
// today's does not know. Going back to today's loses none of them.
func TestUpgradedAndBack(t *testing.T) {
	s := begin(t)
	tarball, err := newer.Image(s.Ctx, s.TempDir(), "", io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim-0") + manifests.Pod("claim", "claim-1") + manifests.Pod("limit", "limit-0") + manifests.Pod("limit", "limit-1"))
	s.Running(soon, 4, 0)
	tandem := func(o install.Options) error { return s.Install(context.WithoutCancel(s.Ctx), o) }
	today := s.Undo(func() error { return tandem(install.Options{}) })
	if err := tandem(install.Options{Image: tarball, Values: []string{"podAnnotations.image=newer"}}); err != nil {
		t.Fatal(err)
	}
	before := s.fullNode()
	if records := s.Records(node()); !strings.Contains(records, `"newer":`) {
		t.Fatalf("the newer agent wrote no newer record: %s", records)
	}
	today()
	s.Ready()
	s.stillFull(before)
}

func TestContainerdRestarted(t *testing.T) {
	s := begin(t)
	before := s.Occupy()
	if err := node().Component(cluster.Containerd).Restart(s.Ctx); err != nil {
		t.Fatal(err)
	}
	s.Ready()
	s.Undisturbed(before)
}

// TestReboot of a full node: claims survive a reboot and get their own GPUs back, although pods by limits ask at the same time,
// and none of their pods is evicted. Kubelet itself fails the limits pods of the old boot: their owners replace them, and one
// that has no owner stays as it is.
func TestReboot(t *testing.T) {
	s := begin(t)
	s.Manifest(manifests.SingleTemplate)
	for i := range 2 {
		s.Manifest(manifests.Pod("claim", fmt.Sprintf("claim-%d", i)))
	}
	s.Manifest(manifests.ClaimDeployment("claims", "single", 1))
	s.Running(soon, 3, 0)
	before, uids := s.Seen(), map[string]types.UID{}
	for _, pod := range s.Pods() {
		uids[pod.Name] = pod.UID
	}
	s.Manifest(manifests.Deployment("limits", 4) + manifests.Pod("limit", "bare"))
	s.Running(soon, gpusANode, 0)
	boot, err := node().BootID()
	if err != nil {
		t.Fatal(err)
	}
	if err := node().Reboot(s.Ctx); err != nil {
		t.Fatal(err)
	}
	if now, err := node().BootID(); err != nil || now == boot {
		t.Fatalf("boot ID %s after %s: %v", now, boot, err)
	}
	booted := time.Now()
	s.Await(patient, "all pods to run again", func() error {
		running := 0
		var states []string
		for _, pod := range s.Pods() {
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
	s.Ready()
	for _, pod := range s.Pods() {
		if uid, survivor := uids[pod.Name]; survivor && uid != pod.UID {
			t.Errorf("%s was made again", pod.Name)
		}
	}
	s.Same(before)
	if bare := s.Pod("bare"); bare.Status.Phase != corev1.PodFailed {
		t.Errorf("the limits pod without an owner is %s", bare.Status.Phase)
	}
	t.Logf("failed limits pods of the old boot: %v", s.failed())
	s.NoDoubleOwners()
}

// TestDeleteAndRecreate by each API leaves nothing: no record, no CDI file, no socket.
func TestDeleteAndRecreate(t *testing.T) {
	s := begin(t)
	s.Manifest(manifests.SingleTemplate)
	before := s.files()
	for round := range 4 {
		var names []string
		for _, api := range []string{"claim", "limit"} {
			for i := range gpusANode / 2 {
				name := fmt.Sprintf("%s-%d-%d", api, round, i)
				names = append(names, name)
				s.Manifest(manifests.Pod(api, name))
			}
			s.Running(patient, len(names), 0)
			s.Await(soon, "what claims have left to be allocatable", func() error { return s.OfferedToPods(gpusANode / 2) })
		}
		s.remove(names...)
	}
	s.Await(soon, "the ledger to be empty", s.Empty)
	if after := s.files(); after != before {
		t.Errorf("files before:\n%s\nafter:\n%s", before, after)
	}
}

// files that many rounds could have left behind.
func (s *story) files() string {
	s.Helper()
	return s.On(node(), "sh", "-c",
		"ls -A /var/run/cdi /etc/cdi /var/lib/kubelet/plugins/gpu.nvidia.com /var/lib/kubelet/plugins_registry /var/lib/kubelet/device-plugins; ls -A /run/tandem")
}

// TestUninstallWithPodsRunning: pods keep their GPUs while the chart is uninstalled, and while NVIDIA's device plugin serves the other ones
// meanwhile. When Tandem is back, no other pod gets the GPUs of either, and both APIs offer those that are left.
func TestUninstallWithPodsRunning(t *testing.T) {
	s := begin(t)
	free := s.uuids()
	before := s.Occupy()
	for uuid, minor := range free {
		if slices.Contains(slices.Concat(slices.Collect(maps.Values(before))...), minor) {
			delete(free, uuid)
		}
	}
	back := s.Undo(func() error {
		return s.Install(context.WithoutCancel(s.Ctx), install.Options{})
	})
	if err := install.Uninstall(s.Ctx, theCluster, install.Options{}); err != nil {
		t.Fatal(err)
	}
	if now := s.Seen(); !maps.EqualFunc(before, now, slices.Equal) {
		t.Errorf("the pods saw GPUs %v, without the chart %v", before, now)
	}
	nvidia, _ := s.devicePlugin("nvidia-gpu.sock", free)
	s.Await(soon, "kubelet to offer the other plugin's GPUs", func() error { return s.OfferedToPods(int64(len(free))) })
	s.Manifest(manifests.Pod("limit", "nvidia-0") + manifests.Pod("limit", "nvidia-1"))
	s.Running(soon, 6, 0)
	for _, pod := range []string{"nvidia-0", "nvidia-1"} {
		before[pod] = s.GPUs(pod, "")
		if text := s.inside(pod, "env"); !strings.Contains(text, "FOREIGN=true") {
			t.Fatalf("%s was not served by the other plugin: %s", pod, text)
		}
	}
	if err := nvidia.Stop(); err != nil {
		t.Fatal(err)
	}
	back()

	s.WantHolds(2, 4)
	s.Await(soon, "claims to be offered what limits do not have", func() error { return s.OfferedToClaims(gpusANode - 4) })
	s.Same(before)
	s.Manifest(manifests.Pod("claim", "claim-after"))
	s.Running(patient, 7, 0)
	s.Manifest(manifests.Pod("limit", "limit-after"))
	s.Running(soon, gpusANode, 0)
	s.Manifest(manifests.Pod("claim", "late"))
	s.Unschedulable(1)
	s.NoDoubleOwners()
	s.Same(before)
	for name := range before {
		if restarts := s.Pod(name).Status.ContainerStatuses[0].RestartCount; restarts > 0 {
			t.Errorf("%s restarted %d times", name, restarts)
		}
	}
	s.remove("nvidia-0")
	s.Running(patient, gpusANode, 0)
	s.NoDoubleOwners()
}
