// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// Pods of the story, sorted by name.
func (s *Story) Pods() []corev1.Pod {
	s.Helper()
	list, err := s.Client.CoreV1().Pods(s.Namespace).List(s.Ctx, metav1.ListOptions{})
	if err != nil {
		s.Fatal(err)
	}
	slices.SortFunc(list.Items, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return list.Items
}

// Pod is a pod of the story.
func (s *Story) Pod(name string) *corev1.Pod {
	s.Helper()
	pod, err := s.Client.CoreV1().Pods(s.Namespace).Get(s.Ctx, name, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return pod
}

// Running waits until n pods run and as many are Pending as pending says, or any number if that is negative. It fails at once if pods
// without a controller have failed and too few are left.
func (s *Story) Running(patience time.Duration, n, pending int) {
	s.Helper()
	s.Await(patience, fmt.Sprintf("%d pods to run, %d to be pending", n, pending), func() error {
		counts := map[corev1.PodPhase]int{}
		var states []string
		replaced, imageless := false, false
		for _, pod := range s.Pods() {
			if pod.DeletionTimestamp != nil {
				continue
			}
			counts[pod.Status.Phase]++
			states = append(states, pod.Name+"="+string(pod.Status.Phase)+pod.Status.Reason)
			replaced = replaced || metav1.GetControllerOf(&pod) != nil
			imageless = imageless || slices.ContainsFunc(pod.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
				return c.State.Waiting != nil && c.State.Waiting.Reason == "ErrImageNeverPull"
			})
		}
		if counts[corev1.PodRunning] == n && (pending < 0 || counts[corev1.PodPending] == pending) {
			return nil
		}
		err := errors.New(strings.Join(states, " "))
		if imageless || !replaced && counts[corev1.PodFailed] > 0 && counts[corev1.PodRunning]+counts[corev1.PodPending] < n {
			return never{err}
		}
		return err
	})
}

// Only waits until the story has n pods, all of them Ready and none of that name. An empty name is any.
func (s *Story) Only(patience time.Duration, n int, without string) {
	s.Helper()
	s.Await(patience, fmt.Sprintf("%d pods to be Ready, and none of them %q", n, without), func() error {
		pods := s.Pods()
		ready := 0
		for _, pod := range pods {
			if pod.Name == without {
				return fmt.Errorf("%s is there", pod.Name)
			}
			if podstatus.Ready(&pod) && pod.DeletionTimestamp == nil {
				ready++
			}
		}
		if len(pods) != n || ready != n {
			return fmt.Errorf("%d of %d pods are Ready", ready, len(pods))
		}
		return nil
	})
}

// NoPods waits until the story has none.
func (s *Story) NoPods() {
	s.Helper()
	s.Await(Soon, "all pods to be gone", func() error {
		if pods := s.Pods(); len(pods) > 0 {
			return fmt.Errorf("%d pods", len(pods))
		}
		return nil
	})
}

// DeleteAll deletes the story's deployments, pods and claims.
func (s *Story) DeleteAll() {
	s.Helper()
	s.Kubectl("delete", "deployment,pod,resourceclaim", "--all", "-n", s.Namespace, "--now")
}

// Unschedulable waits until so many pods, and no others, wait for the scheduler, and returns what they are told.
func (s *Story) Unschedulable(n int) (told []string) {
	s.Helper()
	s.Await(Soon, "the scheduler to say why", func() error {
		told = nil
		for _, pod := range s.Pods() {
			for _, c := range pod.Status.Conditions {
				if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
					told = append(told, c.Message)
				}
			}
		}
		if len(told) != n {
			return fmt.Errorf("%d pods are unschedulable", len(told))
		}
		return nil
	})
	return told
}

// Containers returns the ID and start time of the running container of each pod, by the pod's name. Pods have one container.
func (s *Story) Containers() map[string]string {
	s.Helper()
	found := map[string]string{}
	for _, pod := range s.Pods() {
		for _, status := range pod.Status.ContainerStatuses {
			if status.State.Running != nil {
				found[pod.Name] = status.ContainerID + " since " + status.State.Running.StartedAt.String()
			}
		}
	}
	return found
}

// GPUs are the minors of the GPUs that a container has. Without a name it is the pod's first.
func (s *Story) GPUs(pod, container string) []int {
	s.Helper()
	container = cmp.Or(container, s.Pod(pod).Spec.Containers[0].Name)
	return s.Devices.Of(s, map[string]string{pod: container})[pod]
}

// Seen are the minors of the GPUs that the first container of each pod of the story has.
func (s *Story) Seen() map[string][]int {
	s.Helper()
	containers := map[string]string{}
	for _, pod := range s.Pods() {
		containers[pod.Name] = pod.Spec.Containers[0].Name
	}
	return s.Devices.Of(s, containers)
}

// Same checks that these pods see the GPUs they saw.
func (s *Story) Same(before map[string][]int) {
	s.Helper()
	containers := map[string]string{}
	for pod := range before {
		containers[pod] = s.Pod(pod).Spec.Containers[0].Name
	}
	for pod, now := range s.Devices.Of(s, containers) {
		if !slices.Equal(now, before[pod]) {
			s.Errorf("%s saw GPUs %v, now %v", pod, before[pod], now)
		}
	}
}

// NoDoubleOwners fails where a GPU has two owners.
func (s *Story) NoDoubleOwners() {
	s.Helper()
	doubly, err := s.Devices.DoublyOwned(s.Ctx)
	if err != nil {
		s.Fatalf("look for GPUs with two owners: %v", err)
	}
	if len(doubly) > 0 {
		s.Fatalf("doubly owned: %v", doubly)
	}
}

// Occupy starts two pods of each kind and returns which GPUs each sees.
func (s *Story) Occupy() map[string][]int {
	s.Helper()
	s.Manifest(manifests.SingleTemplate)
	for i := range 2 {
		s.Manifest(manifests.Pod("claim", fmt.Sprintf("claim-%d", i)))
		s.Manifest(manifests.Pod("limit", fmt.Sprintf("limit-%d", i)))
		s.Running(Soon, 2*i+2, 0)
	}
	return s.Seen()
}

// Unchanged checks that these containers run as they did, on the GPUs they had.
func (s *Story) Unchanged(containers map[string]string, gpus map[string][]int) {
	s.Helper()
	if now := s.Containers(); !maps.Equal(containers, now) {
		s.Errorf("containers were %v, are %v", containers, now)
	}
	if now := s.Seen(); !maps.EqualFunc(gpus, now, slices.Equal) {
		s.Errorf("the pods saw GPUs %v, now %v", gpus, now)
	}
	s.NoDoubleOwners()
}

// Undisturbed checks that the pods of Occupy never restarted, see the same GPUs, and that both APIs still give out others.
func (s *Story) Undisturbed(before map[string][]int) {
	s.Helper()
	if after := s.Seen(); !maps.EqualFunc(before, after, slices.Equal) {
		s.Errorf("the pods saw GPUs %v, now %v", before, after)
	}
	for _, pod := range s.Pods() {
		if pod.Status.Phase != corev1.PodRunning || pod.Status.ContainerStatuses[0].RestartCount > 0 {
			s.Errorf("pod %s is %s after %d restarts", pod.Name, pod.Status.Phase, pod.Status.ContainerStatuses[0].RestartCount)
		}
	}
	s.NoDoubleOwners()
	s.Manifest(manifests.Pod("claim", "claim-after"))
	s.Took("the next claim's pod to run", func() { s.Running(Patient, 5, 0) })
	s.Manifest(manifests.Pod("limit", "limit-after"))
	s.Running(Soon, 6, 0)
	s.NoDoubleOwners()
	if holds := s.Holds(s.Node()); len(holds) != 6 {
		s.Errorf("%d holds for 6 pods: %v", len(holds), holds)
	}
}

// Claim is a claim of the story.
func (s *Story) Claim(name string) *resourceapi.ResourceClaim {
	s.Helper()
	claim, err := s.Client.ResourceV1().ResourceClaims(s.Namespace).Get(s.Ctx, name, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return claim
}

// Says waits until the claim's status tells how each of its devices is shared, by request: "MPS, limit Daemon".
func (s *Story) Says(claim string, want map[string]string) {
	s.Helper()
	s.Await(Soon, fmt.Sprintf("claim %s to say %v", claim, want), func() error {
		c := s.Claim(claim)
		got := map[string]string{}
		for _, result := range c.Status.Allocation.Devices.Results {
			for _, d := range c.Status.Devices {
				if d.Device != result.Device || d.Pool != result.Pool {
					continue
				}
				reasons := map[string]string{}
				for _, condition := range d.Conditions {
					reasons[condition.Type] = condition.Reason
				}
				got[result.Request] = reasons[driver.ConditionSharing] + ", limit " + reasons[driver.ConditionMemoryLimit]
			}
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("it says %v", got)
		}
		return nil
	})
}
