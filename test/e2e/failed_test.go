// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/test/manifests"
)

// Stories that count the pods that kubelet fails for good although nothing is wrong with them: the scheduler sent them after a
// GPU that it believed free. Owners make others at once, ten to thirty in a second, so the time until it is told shows in the
// count. docs/design/0007-coexistence.md has the counts on a machine of one's own. The bounds are higher: other clusters run beside this one.

// failedForceDeleted is how many of an owner's pods may fail for one that was force-deleted and runs on. The first cannot be
// prevented: the scheduler binds it as soon as it receives the deletion of its predecessor, when all components receive it.
const failedForceDeleted = 15

// TestForceDeletedOnAFullNode: on a node that is full of pods, with more pods waiting, two pods are force-deleted one after the
// other while their containers cannot be ended. Their GPUs go to no other pod until the containers are gone. The scheduler sends
// no pod for them, although the agent has just reported the first one.
func TestForceDeletedOnAFullNode(t *testing.T) {
	s := begin(t)
	const waiting = 2
	s.Manifest(manifests.Deployment("limits", gpusANode+waiting))
	s.Running(patient, gpusANode, waiting)
	var counts []int
	for range repetitions(t, 1) {
		var thaws []func()
		victims := s.someRunning("limits", 2)
		for _, victim := range victims {
			thaws = append(thaws, s.freezeProcess(node(), s.shimOf(node(), victim.UID)))
		}
		for i, victim := range victims {
			before := len(s.failed())
			now := int64(0)
			if err := theClient.CoreV1().Pods(s.Namespace).Delete(s.Ctx, victim.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			s.Await(soon, "one GPU less to be offered", func() error { return s.OfferedToPods(int64(gpusANode - 1 - i)) })
			t.Logf("the scheduler is told after %d ms", time.Since(began).Milliseconds())
			s.Running(soon, gpusANode-1-i, waiting+1+i)
			counts = append(counts, len(s.failed())-before)
		}
		// No pod is sent after that, whatever kubelet reports; one may have been on its way.
		before := len(s.failed())
		time.Sleep(kubeletReports)
		if later := len(s.failed()) - before; later > 1 {
			t.Errorf("%d pods failed after the scheduler was told", later)
		}
		for _, thaw := range thaws {
			thaw()
		}
		s.Took("the GPUs to be in use again", func() { s.Running(patient, gpusANode, waiting) })
	}
	s.NoDoubleOwners()
	s.tooMany("force-deleted on a full node", counts, failedForceDeleted)
}

// kubeletReports is how often kubelet writes what it calls allocatable, and a little more.
const kubeletReports = 11 * time.Second

// someRunning are so many pods of a Deployment that run.
func (s *story) someRunning(of string, n int) (some []corev1.Pod) {
	s.Helper()
	for _, pod := range s.Pods() {
		if strings.HasPrefix(pod.Name, of+"-") && pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil && len(some) < n {
			some = append(some, pod)
		}
	}
	if len(some) < n {
		s.Fatalf("%d pods of %s run, not %d", len(some), of, n)
	}
	return some
}

// tooMany says how many pods failed in each repetition, and complains of more than a bound in one.
func (s *story) tooMany(what string, counts []int, bound int) {
	s.Helper()
	sum, most := 0, 0
	for _, n := range counts {
		sum, most = sum+n, max(most, n)
	}
	s.Logf("%s: repetitions=%d failed=%d most=%d each=%v", what, len(counts), sum, most, counts)
	if most > bound {
		s.Errorf("%s: %d pods failed, more than %d", what, most, bound)
	}
}

// failedAway is how many pods may fail when the agent goes: those that were bound before it said so.
const failedAway = 10

// failedKilled is how many pods may fail if no component reports the loss: the controller stops the scheduler after the third
// pod, which takes a moment.
const failedKilled = 20

// TestAgentAwayOnAFullNode: the agent is away for a while, as in an upgrade, and then for no longer than it takes to start another one. A pod
// ends meanwhile for whose GPU others wait. No device plugin serves the node, and kubelet would fail each pod that comes.
func TestAgentAwayOnAFullNode(t *testing.T) {
	s := begin(t)
	s.onAFullNode("agent away", failedAway, func(victim string) {
		s.withoutAgent(func() {
			s.remove(victim)
			time.Sleep(3 * time.Second)
		})
	}, func(victim string) {
		s.endPod(victim)
		s.ReplaceAgents([]types.UID{s.AgentPod(gpuNode).UID})
	})
}

// TestAgentKilledOnAFullNode: the agent is killed while a pod ends, and kubelet does not restart it at once. Only kubelet
// notices, and reports it with its next status, in up to ten seconds. The controller sees the pods that fail until then.
func TestAgentKilledOnAFullNode(t *testing.T) {
	s := begin(t)
	s.KillAgent() // after which it is started at once: from then on kubelet takes its time
	s.Ready()
	s.onAFullNode("agent killed", failedKilled, func(victim string) {
		s.endPod(victim)
		s.KillAgent()
	})
}

// onAFullNode ends one of the pods that have all GPUs by limits, with others waiting, in several ways one after the other, and counts the pods
// that fail until their number is reached again. The other pods run on.
func (s *story) onAFullNode(what string, bound int, ends ...func(victim string)) {
	s.Helper()
	const waiting = 2
	s.Manifest(manifests.Deployment("limits", gpusANode+waiting))
	s.Running(patient, gpusANode, waiting)
	var counts []int
	for range repetitions(s.T, 1) {
		for _, end := range ends {
			failed := len(s.failed())
			victim := s.someRunning("limits", 1)[0].Name
			containers := s.Containers()
			others := map[string][]int{}
			for name, gpus := range s.Devices.Of(&s.Story, only(containers, "work")) {
				if name != victim {
					others[name] = gpus
				}
			}
			end(victim)
			s.RolledOut()
			s.Took("the GPU to be in use again", func() { s.Running(patient, gpusANode, waiting) })
			s.Same(others)
			now := s.Containers()
			for name := range others {
				if now[name] != containers[name] {
					s.Errorf("the container of %s was %s, is %s", name, containers[name], now[name])
				}
			}
			counts = append(counts, len(s.failed())-failed)
		}
	}
	s.NoDoubleOwners()
	s.tooMany(what+" on a full node", counts, bound)
}

// only gives each pod this container.
func only[V any](pods map[string]V, container string) map[string]string {
	containers := map[string]string{}
	for pod := range pods {
		containers[pod] = container
	}
	return containers
}

// endPod asks for the end of a pod, and does not wait for it.
func (s *story) endPod(name string) {
	s.Helper()
	if err := theClient.CoreV1().Pods(s.Namespace).Delete(s.Ctx, name, metav1.DeleteOptions{}); err != nil {
		s.Fatal(err)
	}
}
