// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// snapshot is what there is at a moment after pressure has ended.
type snapshot struct {
	pods        []corev1.Pod
	claims      []resourceapi.ResourceClaim
	deployments []appsv1.Deployment
	// seen are the devices in the containers of each pod, by its UID.
	seen map[string][]oracle.Device
	// room is what the node has.
	room room
	// foreign are the device IDs of foreign plugins that kubelet has recorded for pods, by the pod's UID.
	foreign map[string][]string
}

// unsettled returns for each pod that is neither at rest nor rightly waiting, by its name, what is wrong with it.
func (s snapshot) unsettled() map[string]string {
	problems := map[string]string{}
	taken := s.taken()
	for _, pod := range s.pods {
		asked, ours := askOf(&pod)
		if !ours {
			continue
		}
		if problem := s.problemOf(pod, asked, taken); problem != "" {
			problems[pod.Name] = problem
		}
	}
	for _, d := range s.deployments {
		if live := s.live(d.Name); live != int(*d.Spec.Replicas) {
			problems["deployment "+d.Name] = fmt.Sprintf("has %d live pods of %d", live, *d.Spec.Replicas)
		}
	}
	return problems
}

// disagree compares running pods with what kubelet believes to have given them, by "namespace/name".
func (s snapshot) disagree(granted map[string][]string) map[string]string {
	problems := map[string]string{}
	for _, pod := range s.pods {
		sees, given := s.seen[string(pod.UID)], granted[pod.Namespace+"/"+pod.Name]
		if pod.Status.Phase != corev1.PodRunning || pod.DeletionTimestamp != nil {
			continue
		}
		asked, _ := askOf(&pod)
		if !sameDevices(sees, withoutReplicas(given)) || asked.api == oracle.Limits && len(given) != asked.gpus {
			problems[pod.Name] = fmt.Sprintf("sees %v and kubelet has given it %v", placesOf(sees), given)
		}
	}
	return problems
}

// sameDevices reports whether the names, or UUIDs, are those of the devices.
func sameDevices(sees []oracle.Device, names []string) bool {
	return len(sees) == len(names) && !slices.ContainsFunc(sees, func(d oracle.Device) bool {
		return !slices.ContainsFunc(names, d.Is)
	})
}

func (s snapshot) problemOf(pod corev1.Pod, asked ask, taken []place) string {
	sees := s.seen[string(pod.UID)]
	switch {
	case pod.DeletionTimestamp != nil:
		return "is still being deleted"
	case pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed:
		return ""
	case pod.Status.Phase == corev1.PodRunning && !containersRun(pod):
		return "is Running without its containers"
	case pod.Status.Phase == corev1.PodRunning && !s.room.served(asked, placesOf(sees)):
		return fmt.Sprintf("sees %v and asked for %s", placesOf(sees), asked)
	case pod.Status.Phase == corev1.PodRunning && asked.api == oracle.Claim:
		if allocated := s.allocatedTo(pod); !slices.Equal(placesOf(sees), allocated) {
			return fmt.Sprintf("sees %v and its claim has %v", placesOf(sees), allocated)
		}
		return ""
	case pod.Status.Phase == corev1.PodRunning:
		return ""
	}
	return s.wronglyWaits(pod, asked, taken)
}

// wronglyWaits answers why a waiting pod ought not to wait; empty where it rightly does.
func (s snapshot) wronglyWaits(pod corev1.Pod, asked ask, taken []place) string {
	allocated := s.allocatedTo(pod)
	switch {
	case len(allocated) > 0 && !s.inOtherHands(pod, allocated):
		return fmt.Sprintf("waits although its claim has %v, which no other holder uses: %s", allocated, describe(pod))
	case len(allocated) > 0 && replaces(&pod):
		return fmt.Sprintf("waits for %v, which others use, and its owner would replace it: %s", allocated, describe(pod))
	case len(allocated) > 0:
		return ""
	case s.countedTwice() > 0 && asked.api == oracle.Limits && asked.gpus > s.room.free(taken)-s.countedTwice():
	case s.room.memory != nil && s.room.fitsBeside(asked, s.parts()):
		return fmt.Sprintf("waits for %s, for which there is room beside %s: %s", asked, s.parts(), describe(pod))
	case s.room.memory != nil:
	case asked.profile == "" && s.room.fits(asked, taken):
		return fmt.Sprintf("waits for %d GPUs and %d are free: %s", asked.gpus, s.room.free(taken), describe(pod))
	case s.room.fits(asked, taken):
		return fmt.Sprintf("waits for %d of %s, for which there is room beside %v: %s", asked.gpus, asked.profile, taken, describe(pod))
	}
	if pod.Spec.NodeName != "" {
		return "is bound to a node without GPUs for it: " + describe(pod)
	}
	return ""
}

// countedTwice is how many GPUs the scheduler counts twice: those of pods that a foreign plugin has served are not allocatable, and are
// subtracted as requested (docs/design/0007-coexistence.md, known limits).
func (s snapshot) countedTwice() int {
	n := 0
	for _, pod := range s.pods {
		if pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed {
			n += len(s.foreign[string(pod.UID)])
		}
	}
	return n
}

// taken is what a container sees or a claim in use has.
func (s snapshot) taken() []place {
	var taken []place
	for _, devices := range s.seen {
		taken = append(taken, placesOf(devices)...)
	}
	for _, claim := range s.claims {
		if len(claim.Status.ReservedFor) > 0 {
			taken = append(taken, allocation(claim)...)
		}
	}
	slices.SortFunc(taken, place.compare)
	return slices.Compact(taken)
}

// allocated is what claims have, in use or not.
func (s snapshot) allocated() []place {
	var all []place
	for _, claim := range s.claims {
		all = append(all, allocation(claim)...)
	}
	return all
}

// allocatedTo is what the pod's claim has; nothing for limits.
func (s snapshot) allocatedTo(pod corev1.Pod) []place {
	name := claimOf(&pod)
	for _, claim := range s.claims {
		if claim.Name == name {
			return allocation(claim)
		}
	}
	return nil
}

// inOtherHands reports whether a container of a pod that does not share the claim sees any of it, or whether an administrator's
// partition is in its place.
func (s snapshot) inOtherHands(pod corev1.Pod, allocated []place) bool {
	mine := claimOf(&pod)
	if s.room.memory != nil {
		return slices.ContainsFunc(s.claims, func(c resourceapi.ResourceClaim) bool { return c.Name == mine && s.crowded(c) })
	}
	friends := map[string]bool{string(pod.UID): true}
	for _, other := range s.pods {
		if mine != "" && claimOf(&other) == mine {
			friends[string(other.UID)] = true
		}
	}
	for uid, devices := range s.seen {
		for _, at := range placesOf(devices) {
			if !friends[uid] && overlapsAny(at, allocated) {
				return true
			}
		}
	}
	return slices.ContainsFunc(s.room.standing, func(i oracle.Instance) bool {
		at := place{i.GPU, i.Start, i.Size}
		return overlapsAny(at, allocated) && !slices.Contains(allocated, at)
	})
}

// live counts a workload's pods that are neither finished nor being deleted.
func (s snapshot) live(workload string) int {
	count := 0
	for _, pod := range s.pods {
		if pod.Labels[workloadLabel] == workload && pod.DeletionTimestamp == nil &&
			pod.Status.Phase != corev1.PodFailed && pod.Status.Phase != corev1.PodSucceeded {
			count++
		}
	}
	return count
}

// claimOf is the name of a pod's claim; empty for limits, and while it is not known.
func claimOf(pod *corev1.Pod) string {
	for _, reference := range pod.Spec.ResourceClaims {
		if reference.ResourceClaimName != nil {
			return *reference.ResourceClaimName
		}
	}
	for _, status := range pod.Status.ResourceClaimStatuses {
		if status.ResourceClaimName != nil {
			return *status.ResourceClaimName
		}
	}
	return ""
}

// allocation is what is allocated to a claim, sorted.
func allocation(claim resourceapi.ResourceClaim) []place {
	if claim.Status.Allocation == nil {
		return nil
	}
	var found []place
	for _, result := range claim.Status.Allocation.Devices.Results {
		if at, ok := placeNamed(result.Device); ok && result.Driver == install.DriverName {
			found = append(found, at)
		}
	}
	slices.SortFunc(found, place.compare)
	// A claim may have several shares of one GPU.
	return slices.Compact(found)
}

func containersRun(pod corev1.Pod) bool {
	return len(pod.Status.ContainerStatuses) > 0 && !slices.ContainsFunc(pod.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool {
		return s.State.Running == nil
	})
}

// describe is the reason in a pod's status why it waits.
func describe(pod corev1.Pod) string {
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if status.State.Waiting != nil {
			return status.State.Waiting.Reason + " " + status.State.Waiting.Message
		}
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Status != corev1.ConditionTrue && condition.Message != "" {
			return condition.Reason + ": " + condition.Message
		}
	}
	return string(pod.Status.Phase) + " " + pod.Status.Reason
}

func controllerOf(pod *corev1.Pod) *metav1.OwnerReference { return metav1.GetControllerOf(pod) }

// replaces reports whether the pod's owner makes another one in its place.
func replaces(pod *corev1.Pod) bool {
	owner := controllerOf(pod)
	return owner != nil && (owner.Kind == "ReplicaSet" || owner.Kind == "Job")
}
