// SPDX-License-Identifier: Apache-2.0

// Package podstatus reads the status that kubelet writes of a pod. Its functions are pure. They do not look at the pod's deletion timestamp: a
// pod that is being deleted can be ready, and its containers can still run.
package podstatus

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Ended reports whether all containers of the pod have ended for good, or kubelet did not admit it.
func Ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// Ready reports whether the pod has the condition Ready.
func Ready(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}
