// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/oracle"
)

func gpu(minor uint32) oracle.Device {
	return oracle.Device{Number: oracle.Number{Major: 195, Minor: minor}}
}

// scene makes snapshots for the judge.
type scene struct{ snapshot }

func (s *scene) pod(name string, api oracle.API, gpus int, phase corev1.PodPhase, sees ...uint32) *corev1.Pod {
	pod := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), Labels: labels(Workload{Name: name, API: api, GPUs: gpus})},
		Status:     corev1.PodStatus{Phase: phase},
	}
	if phase == corev1.PodRunning {
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
	}
	if api == oracle.Claim {
		claim := "claim-of-" + name
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}}
	}
	for _, minor := range sees {
		s.seen[name] = append(s.seen[name], gpu(minor))
	}
	s.pods = append(s.pods, pod)
	return &s.pods[len(s.pods)-1]
}

func (s *scene) allocated(pod string, minors ...uint32) {
	claim := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "claim-of-" + pod}}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Name: pod}}
	claim.Status.Allocation = &resourceapi.AllocationResult{}
	for _, minor := range minors {
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{Driver: install.DriverName, Device: fmt.Sprintf("gpu-%d", minor)})
	}
	s.claims = append(s.claims, claim)
}

func TestTheJudge(t *testing.T) {
	owned := func(p *corev1.Pod) {
		yes := true
		p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Controller: &yes}}
	}
	for name, test := range map[string]struct {
		set  func(*scene)
		want string
	}{
		"running with what it asked for": {set: func(s *scene) { s.pod("a", oracle.Limits, 2, corev1.PodRunning, 0, 1) }},
		"running with less":              {set: func(s *scene) { s.pod("a", oracle.Limits, 2, corev1.PodRunning, 0) }, want: "asked for 2"},
		"running with the wrong GPU": {set: func(s *scene) {
			s.pod("a", oracle.Claim, 1, corev1.PodRunning, 0)
			s.allocated("a", 1)
		}, want: "its claim has [1]"},
		"running without containers": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 1, corev1.PodRunning, 0).Status.ContainerStatuses[0].State = corev1.ContainerState{}
		}, want: "without its containers"},
		"being deleted": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 1, corev1.PodRunning, 0).DeletionTimestamp = &metav1.Time{}
		}, want: "still being deleted"},
		"failed and finished ones are at rest": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 1, corev1.PodFailed)
			s.pod("b", oracle.Claim, 1, corev1.PodSucceeded)
		}},
		"waits while enough is free":   {set: func(s *scene) { s.pod("a", oracle.Limits, 3, corev1.PodPending) }, want: "3 are free"},
		"waits for more than is free":  {set: func(s *scene) { s.pod("a", oracle.Limits, 4, corev1.PodPending) }},
		"waits bound to the full node": {set: func(s *scene) { s.pod("a", oracle.Limits, 4, corev1.PodPending).Spec.NodeName = "node-1" }, want: "bound"},
		"claim waits while enough is free": {set: func(s *scene) {
			s.pod("a", oracle.Claim, 1, corev1.PodPending)
		}, want: "3 are free"},
		"a claim in conflict without an owner waits for its GPU": {set: func(s *scene) {
			s.pod("a", oracle.Claim, 1, corev1.PodPending)
			s.allocated("a", 7)
		}},
		"a claim in conflict with an owner may not wait": {set: func(s *scene) {
			owned(s.pod("a", oracle.Claim, 1, corev1.PodPending))
			s.allocated("a", 7)
		}, want: "its owner would replace it"},
		"a claim in conflict of a workflow waits for its GPU": {set: func(s *scene) {
			w := Workload{Name: "w"}
			ownedBy(workflow(w), s.pod("a", oracle.Claim, 1, corev1.PodPending))
			s.allocated("a", 7)
		}},
		"a workflow's pod waits while enough is free": {set: func(s *scene) {
			ownedBy(workflow(Workload{Name: "w"}), s.pod("a", oracle.Limits, 1, corev1.PodPending))
		}, want: "3 are free"},
		"the scheduler counts the GPU of a pod of a foreign plugin twice": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 2, corev1.PodRunning, 0, 1)
			s.pod("b", oracle.Limits, 1, corev1.PodPending)
			s.foreign = map[string][]string{"a": {"nvidia0", "nvidia1"}}
		}},
		"but not that of one that has ended, nor for claims": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 2, corev1.PodSucceeded)
			s.pod("b", oracle.Limits, 1, corev1.PodPending)
			s.pod("c", oracle.Claim, 1, corev1.PodPending)
			s.foreign = map[string][]string{"a": {"nvidia0", "nvidia1"}}
		}, want: "b:waits"},
		"a claim's GPU is free and its pod waits": {set: func(s *scene) {
			s.pod("a", oracle.Claim, 1, corev1.PodPending)
			s.allocated("a", 0)
		}, want: "no other holder uses"},
		"what a waiting claim has is not free for others": {set: func(s *scene) {
			s.pod("a", oracle.Claim, 1, corev1.PodPending)
			s.allocated("a", 7, 0)
			s.pod("b", oracle.Limits, 3, corev1.PodPending)
		}},
		"too few replicas": {set: func(s *scene) {
			two := int32(2)
			s.pod("a", oracle.Limits, 1, corev1.PodRunning, 0)
			s.deployments = []appsv1.Deployment{{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: appsv1.DeploymentSpec{Replicas: &two}}}
		}, want: "1 live pods of 2"},
	} {
		t.Run(name, func(t *testing.T) {
			// Five of eight GPUs are in other hands.
			s := &scene{snapshot{seen: map[string][]oracle.Device{}}}
			s.pod("others", oracle.Limits, 5, corev1.PodRunning, 3, 4, 5, 6, 7)
			test.set(s)
			problems := fmt.Sprint(s.unsettled())
			if test.want == "" && problems != "map[]" || !strings.Contains(problems, test.want) {
				t.Errorf("problems: %s, want %q", problems, test.want)
			}
		})
	}
}

// TestPodsOfOneClaimAreFriends: a pod that shares the claim of a running one does not wait for others.
func TestPodsOfOneClaimAreFriends(t *testing.T) {
	s := &scene{snapshot{seen: map[string][]oracle.Device{}}}
	s.pod("a", oracle.Claim, 1, corev1.PodRunning, 2)
	s.allocated("a", 2)
	b := s.pod("b", oracle.Claim, 1, corev1.PodPending)
	name := "claim-of-a"
	b.Spec.ResourceClaims[0].ResourceClaimName = &name
	if problems := s.unsettled(); !strings.Contains(problems["b"], "no other holder uses") || len(problems) != 1 {
		t.Errorf("problems: %v", problems)
	}
}

func TestKubeletAndContainersDisagree(t *testing.T) {
	s := &scene{snapshot{seen: map[string][]oracle.Device{}}}
	s.pod("a", oracle.Limits, 1, corev1.PodRunning, 2)
	s.pod("b", oracle.Limits, 1, corev1.PodRunning, 3)
	s.pod("c", oracle.Limits, 1, corev1.PodPending)
	s.pod("d", oracle.Limits, 1, corev1.PodRunning, 5)
	given := map[string][]string{"/a": {"gpu-2"}, "/b": {"gpu-4"}, "/d": {"nvidia5"}}
	if problems := s.disagree(given); len(problems) != 1 || problems["b"] == "" {
		t.Errorf("problems: %v", problems)
	}
}
