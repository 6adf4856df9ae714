// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/manifests"
	"github.com/tandem-gpu/tandem/test/stories"
)

// Each story here forces one row of the table of races (docs/design/0007-coexistence.md): it delays one component while others
// decide.

// preferring is a template for a claim of one GPU that will do with any other.
func preferring(name, uuid string) string {
	return fmt.Sprintf(`
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: %s}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        firstAvailable:
        - name: this
          deviceClassName: gpu.nvidia.com
          selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].uuid == %q'}}]
        - name: any
          deviceClassName: gpu.nvidia.com
`, name, uuid)
}

// loseToPod lets a limit take a GPU, keeps that from the scheduler until it has allocated the GPU to the claim of a pod, and
// lets the slices tell before kubelet asks to prepare. The claim's template is "preferring"; start makes its pod.
func (s *story) loseToPod(start func()) {
	s.Helper()
	before := len(s.Pods())
	allow := s.holdSlices()
	s.Manifest(manifests.Pod("limit", "winner"))
	s.Running(soon, before+1, 0)
	gpu := s.devices("winner")[0]
	s.Manifest(preferring("preferring", gpu.GPU.UUID))

	thaw := s.freeze(node().Component(cluster.Kubelet))
	start()
	s.bound(before + 2)
	s.Await(soon, "the claim to be allocated on the GPU of the limit", func() error {
		for _, claim := range s.claims() {
			if claim.Status.Allocation != nil && claim.Status.Allocation.Devices.Results[0].Device == stories.GPUName(gpu.Number.Minor) {
				return nil
			}
		}
		return errors.New("it is not")
	})
	allow()
	s.Await(soon, "the slices to tell", func() error { return s.OfferedToClaims(gpusANode - 1) })
	thaw()
}

// TestClaimConflictsWithPod: a replica whose claim was allocated a GPU of a pod is moved to another GPU, without an
// administrator.
func TestClaimConflictsWithPod(t *testing.T) {
	repetitions := repetitions(t, 1)
	s := begin(t)
	var healed []time.Duration
	for range repetitions {
		s.loseToPod(func() { s.Manifest(manifests.ClaimDeployment("conflicting", "preferring", 1)) })
		lost := s.conflict(soon, true)
		s.Await(soon, "the owner's next pod to run", func() error {
			for _, pod := range s.Pods() {
				if strings.HasPrefix(pod.Name, "conflicting") && pod.Status.Phase == corev1.PodRunning {
					return nil
				}
			}
			return errors.New("it does not")
		})
		took := time.Since(lost.Since.Time)
		t.Logf("healed in %.2f s", took.Seconds())
		healed = append(healed, took)
		s.Running(soon, 2, 0)
		s.NoDoubleOwners()
		if failed := s.failed(); len(failed) > 0 {
			t.Errorf("pods failed: %v", failed)
		}
		s.Kubectl("delete", "deployment", "-n", s.Namespace, "conflicting")
		s.remove()
		s.NoPods()
		s.AllFree()
	}
	t.Logf("claim loses to limit: healed=%d heal_p50=%s heal_p99=%s", len(healed), quantile(healed, 50), quantile(healed, 99))
}

// repetitions of a story that measures something.
func repetitions(t *testing.T, otherwise int) int {
	t.Helper()
	text := os.Getenv(repetitionsVariable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", repetitionsVariable, err)
	}
	return n
}

// TestBareClaimWaitsForPod: the same for a pod without an owner that would replace it. It waits, and runs soon after the GPU is
// free.
func TestBareClaimWaitsForPod(t *testing.T) {
	s := begin(t)
	s.loseToPod(func() { s.Manifest(withTemplate(manifests.Pod("claim", "bare"), "preferring")) })
	if lost := s.conflict(soon, false); !slices.Equal(lost.Devices, []string{stories.GPUName(s.GPUs("winner", "")[0])}) {
		t.Errorf("it lost %v", lost.Devices)
	}
	uid := s.Pod("bare").UID
	s.remove("winner")
	took := s.Took("the pod that waited to run", func() { s.Running(soon, 1, 0) })
	if took > freedWithin {
		t.Errorf("the pod ran %s after the GPU was free", took)
	}
	if now := s.Pod("bare").UID; now != uid {
		t.Errorf("pod %s became %s", uid, now)
	}
	s.NoDoubleOwners()
}

func withTemplate(pod, template string) string {
	return strings.ReplaceAll(pod, "resourceClaimTemplateName: single", "resourceClaimTemplateName: "+template)
}

// TestConflictWithoutController: while the controller does not run, the claim in conflict is not prepared and no pod is evicted.
// After half a minute the claim waits, and gets the GPU when it is free.
func TestConflictWithoutController(t *testing.T) {
	s := begin(t)
	thaw := s.freezeController()
	s.loseToPod(func() { s.Manifest(manifests.ClaimDeployment("conflicting", "preferring", 1)) })
	s.conflict(soon, true)
	s.remove("winner")
	s.WantHolds(0, 0)
	s.retry("--all")
	s.Took("the pending eviction to expire", func() { s.conflict(soon, false) })
	s.WantHolds(0, 0)
	s.retry("--all")
	s.Running(soon, 1, 0)
	s.WantHolds(1, 0)
	thaw()
	s.Running(soon, 1, 0)
	s.NoDoubleOwners()
}

// TestPodRefusedForClaim: kubelet's node status still offers a GPU that a claim has. The controller's own word keeps pods from
// being sent there.
func TestPodRefusedForClaim(t *testing.T) {
	s := begin(t)
	allow := s.holdNodeStatus()
	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim"))
	s.Await(soon, "the claim to be allocated", s.allocated(1))
	s.Await(soon, "allocatable to tell", func() error { return s.OfferedToPods(gpusANode - 1) })
	s.Manifest(manifests.Deployment("limits", gpusANode))
	s.Running(soon, gpusANode, 1)
	s.NoDoubleOwners()
	if failed := s.failed(); len(failed) > 0 {
		t.Errorf("pods failed: %v", failed)
	}
	allow()
}

// allocated is a condition: so many claims of the story are allocated.
func (s *story) allocated(n int) func() error {
	return func() error {
		allocated := 0
		for _, claim := range s.claims() {
			if claim.Status.Allocation != nil {
				allocated++
			}
		}
		if allocated != n {
			return fmt.Errorf("%d claims are", allocated)
		}
		return nil
	}
}

// TestPodRefusedForClaimWithoutController: the same while no controller corrects kubelet's allocatable. Pods fail, are counted,
// and are replaced until kubelet's own report has arrived. No GPU has two owners meanwhile.
func TestPodRefusedForClaimWithoutController(t *testing.T) {
	s := begin(t)
	thaw := s.freezeController()
	allow := s.holdNodeStatus()
	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim"))
	s.Running(soon, 1, 0)
	s.Manifest(manifests.Deployment("limits", gpusANode))
	s.Await(soon, "a pod to be refused", func() error {
		if len(s.failed()) == 0 {
			return errors.New("none is")
		}
		return nil
	})
	s.NoDoubleOwners()
	allow()
	thaw()
	s.Running(soon, gpusANode, 1)
	failed := s.failed()
	t.Logf("%d pods failed, the first: %s", len(failed), failed[0])
	s.NoDoubleOwners()
}

// TestBoundPodsFirst: eight limits pods are bound to the node, then a claim is allocated there, and kubelet hears of all at
// once, of the claim's pod first. No limits pod fails: the claim has waited for them, and lost.
func TestBoundPodsFirst(t *testing.T) {
	s := begin(t)
	s.Manifest(manifests.SingleTemplate)
	// Kubelet admits pods in the order in which they were made.
	s.Manifest(manifests.Pod("claim", "claim") + "  schedulingGates: [{name: example.com/later}]\n")
	thaw := s.freeze(node().Component(cluster.Kubelet))
	for i := range gpusANode {
		s.Manifest(manifests.Pod("limit", fmt.Sprintf("limit-%d", i)))
	}
	s.bound(gpusANode)
	s.Kubectl("patch", "pod", "-n", s.Namespace, "claim", "--type=json", "-p", `[{"op": "remove", "path": "/spec/schedulingGates"}]`)
	s.bound(gpusANode + 1)
	thaw()
	s.Running(soon, gpusANode, 1)
	if failed := s.failed(); len(failed) > 0 {
		t.Errorf("pods failed: %v", failed)
	}
	s.WantHolds(0, gpusANode)
	s.NoDoubleOwners()
	s.conflict(soon, false)
	s.remove("limit-0")
	s.Running(soon, gpusANode-1, -1)
}

// TestForceDeletedAndRunning: pods are gone from the API server while their containers cannot be ended. kubelet counts their GPUs
// as free. A pod or claim that requests them does not get them before the containers are gone.
func TestForceDeletedAndRunning(t *testing.T) {
	s := begin(t)
	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim") + manifests.Pod("limit", "limit"))
	s.Running(soon, 2, 0)
	before := s.Seen()
	var thaws []func()
	for _, name := range []string{"claim", "limit"} {
		pod := s.Pod(name)
		thaws = append(thaws, s.freezeProcess(node(), s.shimOf(node(), pod.UID)))
		s.Kubectl("delete", "pod", "-n", s.Namespace, name, "--force", "--grace-period=0")
	}
	s.Manifest(manifests.Deployment("limits", gpusANode) + manifests.ClaimDeployment("claims", "single", gpusANode))
	s.Running(soon, gpusANode-2, -1)
	s.wantHoldsInAll(gpusANode)
	s.NoDoubleOwners()
	for _, pod := range s.Pods() {
		if pod.Status.Phase != corev1.PodRunning {
			continue
		}
		if gpus := s.GPUs(pod.Name, ""); slices.Equal(gpus, before["claim"]) || slices.Equal(gpus, before["limit"]) {
			t.Errorf("%s sees GPUs %v, and %v run on", pod.Name, gpus, before)
		}
	}
	t.Logf("%d pods failed", len(s.failed()))
	for _, thaw := range thaws {
		thaw()
	}
	s.Took("the GPUs to be in use again", func() { s.Running(patient, gpusANode, -1) })
	s.NoDoubleOwners()
}

// wantHoldsInAll waits for so many holds of either kind.
func (s *story) wantHoldsInAll(n int) {
	s.Helper()
	s.Await(soon, fmt.Sprintf("%d holds", n), func() error {
		if holds := s.Holds(node()); len(holds) != n {
			return fmt.Errorf("%v", holds)
		}
		return nil
	})
}

// killAtRecord kills the agent after it recorded a hold of that kind and before it answered kubelet. In between it writes the CDI
// spec and its hook, which takes a while because the story removed them.
func (s *story) killAtRecord(kind string, ask func()) {
	s.Helper()
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		s.Fatal(err)
	}
	defer watcher.Close()
	if err := watcher.Add(s.NodePath("/run/tandem/holds")); err != nil {
		s.Fatal(err)
	}
	restarts := s.AgentRestarts()
	pid := s.AgentProcess(node())
	kill, err := node().Command(s.Ctx, "sh", "-c", "read go; kill -KILL "+pid)
	if err != nil {
		s.Fatal(err)
	}
	trigger, err := kill.StdinPipe()
	if err == nil {
		err = kill.Start()
	}
	if err != nil {
		s.Fatal(err)
	}
	s.On(node(), "sh", "-c", "rm -f /var/run/cdi/tandem-* /var/lib/kubelet/plugins/gpu.nvidia.com/nvidia-cdi-hook")
	ask()
	deadline := time.After(soon)
	for recorded := false; !recorded; {
		select {
		case event := <-watcher.Events:
			recorded = event.Has(fsnotify.Create) && strings.HasPrefix(filepath.Base(event.Name), kind+"~")
		case err := <-watcher.Errors:
			s.Fatal(err)
		case <-deadline:
			s.Fatal("nothing was recorded")
		}
	}
	if _, err := trigger.Write([]byte("go\n")); err != nil {
		s.Fatal(err)
	}
	if err := kill.Wait(); err != nil {
		s.Fatal(err)
	}
	if _, err := os.Stat(s.NodePath("/var/run/cdi/tandem-k8s.gpu.nvidia.com-gpu.json")); err == nil {
		s.Log("the agent had got further than the record")
	}
	s.Restarted(restarts)
}

// TestKilledBetweenRecordAndAnswer: kubelet gets no answer for a recorded hold. A claim gets the same GPU when kubelet retries. A
// pod fails, its owner creates another one, and the agent finds the stale hold.
func TestKilledBetweenRecordAndAnswer(t *testing.T) {
	s := begin(t)
	s.Manifest(manifests.SingleTemplate)
	s.killAtRecord("claim", func() { s.Manifest(manifests.Pod("claim", "claim")) })
	s.Ready()
	// The record says that the claim has its GPU. kubelet itself would retry after 60 to 90 s. The controller makes it retry
	// after 5 s, and once more if kubelet's connection was still that of the previous agent.
	if took := s.Took("the claim's pod to run", func() { s.Running(soon, 1, 0) }); took > time.Minute {
		t.Errorf("the claim's pod ran after %s: the controller has not made kubelet retry", took)
	}
	s.WantHolds(1, 0)

	s.killAtRecord("pod", func() { s.Manifest(manifests.Deployment("limits", 1)) })
	s.Ready()
	s.Running(patient, 2, 0)
	t.Logf("%d pods failed", len(s.failed()))
	s.NoDoubleOwners()
	s.Took("the stale hold to be found", func() {
		s.Await(patient, "two holds", func() error {
			if claims, limits := s.HoldsByKind(); claims != 1 || limits != 1 {
				return fmt.Errorf("%v", s.Holds(node()))
			}
			return nil
		})
	})
}

// TestKubeletFrozenWhileRegistering: the device plugin registers again and again with a kubelet that does not answer, under a
// new name each time. When kubelet is back it has one plugin, and believes it.
func TestKubeletFrozenWhileRegistering(t *testing.T) {
	s := begin(t)
	before := s.Occupy()
	sockets := func() string {
		return strings.TrimSpace(s.On(node(), "sh", "-c", "ls "+devicePluginDir+" | grep tandem || true"))
	}
	thaw := s.freeze(node().Component(cluster.Kubelet))
	for range 3 {
		old := sockets()
		s.On(node(), "sh", "-c", "rm -f "+devicePluginDir+"/tandem-*.sock")
		s.Await(soon, "another socket", func() error {
			if now := sockets(); now == "" || now == old {
				return fmt.Errorf("sockets: %q", now)
			}
			return nil
		})
	}
	thaw()
	s.Ready()
	s.Await(soon, "the node to offer what is free", func() error { return s.OfferedToPods(gpusANode - 2) })
	s.Undisturbed(before)
	s.Await(soon, "kubelet to believe what it is told", func() error { return s.OfferedToPods(gpusANode - 3) })
}

// TestKubeletFrozenWhileAgentStarts: the agent dies, and kubelet is frozen as soon as it has started the next.
func TestKubeletFrozenWhileAgentStarts(t *testing.T) {
	s := begin(t)
	before := s.Occupy()
	old := s.AgentProcess(node())
	s.On(node(), "kill", "-KILL", old)
	s.Await(soon, "the next agent", func() error {
		if now := strings.TrimSpace(s.On(node(), "sh", "-c", "pgrep -x kubelet-plugin || true")); now == "" || now == old {
			return fmt.Errorf("process %q", now)
		}
		return nil
	})
	thaw := s.freeze(node().Component(cluster.Kubelet))
	// As long as an agent waits for kubelet before it registers anew.
	select {
	case <-time.After(10 * time.Second):
	case <-s.Ctx.Done():
	}
	thaw()
	s.Ready()
	s.Undisturbed(before)
}

// TestAgentsOverlap: the agent's pod is force-deleted and cannot be ended, and the DaemonSet makes another. That one waits, and
// the old one serves, until it is gone.
func TestAgentsOverlap(t *testing.T) {
	s := begin(t)
	before := s.Occupy()
	pod := s.AgentPod(gpuNode)
	thaw := s.freezeProcess(node(), s.shimOf(node(), pod.UID))
	s.Kubectl("delete", "pod", "-n", pod.Namespace, pod.Name, "--force", "--grace-period=0")
	s.Event("Node", gpuNode, "LedgerLocked", "another")
	s.Manifest(manifests.Pod("claim", "claim-overlap") + manifests.Pod("limit", "limit-overlap"))
	s.Await(soon, "limits to be served by the first", func() error {
		if pod := s.Pod("limit-overlap"); pod.Status.Phase != corev1.PodRunning {
			return errors.New(string(pod.Status.Phase))
		}
		return nil
	})
	// Within ten seconds the API server knows the first no more, whose pod is deleted: claims are then the second's to prepare.
	s.NoDoubleOwners()
	s.Same(before)
	thaw()
	s.Ready()
	s.Running(patient, 6, 0)
	s.remove("claim-overlap", "limit-overlap")
	s.WantHolds(2, 2)
	s.Undisturbed(before)
}

// TestNodeCreatedAnew: an administrator deletes the node object, and kubelet creates another one. The published slices belong to
// the new one, and the GPUNode stays.
func TestNodeCreatedAnew(t *testing.T) {
	s := begin(t)
	before := s.Occupy()
	old := s.nodeUID()
	kept, err := s.GPUNodeObject()
	if err != nil {
		t.Fatal(err)
	}
	s.withoutKubelet(func() { s.Kubectl("delete", "node", gpuNode) })
	s.Await(soon, "kubelet to make another", func() error {
		n, err := theClient.CoreV1().Nodes().Get(s.Ctx, gpuNode, metav1.GetOptions{})
		if err == nil && string(n.UID) == old {
			err = errors.New("it is the old one")
		}
		return err
	})
	s.Await(patient, "the slices to belong to it", func() error {
		all, err := s.Slices(gpuNode)
		if err == nil && len(all) == 0 {
			err = errors.New("no slices")
		}
		for _, slice := range all {
			if of := slice.OwnerReferences; len(of) != 1 || string(of[0].UID) != s.nodeUID() {
				err = fmt.Errorf("owned by %v", of)
			}
		}
		return err
	})
	s.Ready()
	if now, err := s.GPUNodeObject(); err != nil || now.UID != kept.UID || len(now.OwnerReferences) > 0 {
		t.Errorf("the GPUNode was %s and is %+v, %v", kept.UID, now.ObjectMeta, err)
	}
	s.Undisturbed(before)
}

func (s *story) nodeUID() string {
	s.Helper()
	n, err := theClient.CoreV1().Nodes().Get(s.Ctx, gpuNode, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return string(n.UID)
}

// TestAgentFrozen between any two of its steps: requests wait meanwhile, and no holder gets a device of another one.
func TestAgentFrozen(t *testing.T) {
	s := begin(t)
	s.Manifest(manifests.SingleTemplate)
	thaw := s.freezeProcess(node(), s.AgentProcess(node()))
	s.Manifest(manifests.Deployment("limits", gpusANode) + manifests.ClaimDeployment("claims", "single", gpusANode))
	s.Await(soon, "the claims to be allocated", s.allocated(gpusANode))
	thaw()
	s.Running(patient, gpusANode, gpusANode)
	s.NoDoubleOwners()
	t.Logf("%d pods failed", len(s.failed()))
}

// claims of the story.
func (s *story) claims() []resourceapi.ResourceClaim {
	s.Helper()
	list, err := theClient.ResourceV1().ResourceClaims(s.Namespace).List(s.Ctx, metav1.ListOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return list.Items
}
