// SPDX-License-Identifier: Apache-2.0

// Package owner knows which owners replace a pod that is evicted. Agent and controller have to agree on it: the agent refuses to
// prepare a claim while the controller evicts its pods.
package owner

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// SafeToEvict is an annotation of pods. With the value "true" the pod's author states that its owner creates another pod in its place.
// It has no effect on a pod without an owner, which no controller would create again, nor on a static pod.
const SafeToEvict = "tandem-gpu.dev/safe-to-evict"

// replacing are the kinds whose controllers are part of Kubernetes and replace an evicted pod (k8s.io/kubernetes pkg/controller).
// Workflows, TaskRuns, RayClusters, PyTorchJobs and Spark drivers own pods as well: for many of them a lost pod is a failure.
var replacing = map[schema.GroupKind]bool{
	{Group: "apps", Kind: "ReplicaSet"}:        true,
	{Group: "apps", Kind: "StatefulSet"}:       true,
	{Group: "apps", Kind: "DaemonSet"}:         true,
	{Group: "", Kind: "ReplicationController"}: true,
	{Group: "batch", Kind: "Job"}:              true, // the controller also checks its limits
}

// Is reports whether a UID is the pod's, or the one by which kubelet runs it if it is static. A static pod has the UID of its manifest on the node,
// and the API server has a mirror with another one (k8s.io/kubernetes pkg/kubelet/pod/mirror_client.go, pkg/kubelet/config/common.go). It is a pure function.
func Is(pod *corev1.Pod, uid types.UID) bool {
	return pod.UID == uid || uid != "" && pod.Annotations[corev1.MirrorPodAnnotationKey] == string(uid)
}

// Replaces reports whether a pod's owner is known to replace it, so that it may be evicted. It is a pure function.
func Replaces(pod *corev1.Pod) bool { return WhyNot(pod) == "" }

// WhyNot returns why no owner is known to replace a pod that is evicted; empty if one does. The sentence is for events and logs.
// It is a pure function.
func WhyNot(pod *corev1.Pod) string {
	owner := metav1.GetControllerOfNoCopy(pod)
	_, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	switch {
	case mirror: // kubelet would start the same pod again
		return fmt.Sprintf("pod %s is static", pod.Name)
	case owner == nil:
		return fmt.Sprintf("pod %s has no owner that would replace it", pod.Name)
	case replacing[schema.FromAPIVersionAndKind(owner.APIVersion, owner.Kind).GroupKind()], pod.Annotations[SafeToEvict] == "true":
		return ""
	}
	return fmt.Sprintf("pod %s belongs to %s %s, which may not replace it, and has no annotation %s=true", pod.Name, owner.Kind, owner.Name, SafeToEvict)
}
