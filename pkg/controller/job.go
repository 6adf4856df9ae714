// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"slices"
	"strconv"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// backoffLimit is the API server's default.
const backoffLimit = 6

// Survives reports whether a Job replaces a pod that is evicted. A Job counts the eviction as a failure (k8s.io/kubernetes
// pkg/controller/job, isPodFailed). failures counts the failures that are not in its status yet, including this one. It is a pure
// function.
func Survives(job *batchv1.Job, pod *corev1.Pod, failures int32) bool {
	switch onDisruption(job.Spec.PodFailurePolicy) {
	case batchv1.PodFailurePolicyActionIgnore:
		return true
	case batchv1.PodFailurePolicyActionFailJob, batchv1.PodFailurePolicyActionFailIndex:
		return false
	}
	if limit := job.Spec.BackoffLimitPerIndex; limit != nil {
		before, err := strconv.ParseInt(pod.Annotations[batchv1.JobIndexFailureCountAnnotation], 10, 32)
		if err != nil || int32(before) >= *limit {
			return false
		}
	}
	before := job.Status.Failed
	if uncounted := job.Status.UncountedTerminatedPods; uncounted != nil {
		before += int32(len(uncounted.Failed))
	}
	return before+failures <= ptr.Deref(job.Spec.BackoffLimit, backoffLimit)
}

// uncounted returns how many pods of a Job have failed or are ending and are not in its status yet. It is a pure function.
func uncounted(job *batchv1.Job, pods []corev1.Pod) (n int32) {
	for i := range pods {
		pod := &pods[i]
		ended := pod.Status.Phase == corev1.PodFailed || pod.DeletionTimestamp != nil && pod.Status.Phase != corev1.PodSucceeded
		known := job.Status.UncountedTerminatedPods != nil && slices.Contains(job.Status.UncountedTerminatedPods.Failed, pod.UID)
		// The Job controller removes its finalizer once it has counted the pod.
		if ended && !known && slices.Contains(pod.Finalizers, batchv1.JobTrackingFinalizer) {
			n++
		}
	}
	return n
}

// onDisruption returns the action of the first rule that matches a pod that was evicted before it started.
func onDisruption(policy *batchv1.PodFailurePolicy) batchv1.PodFailurePolicyAction {
	if policy != nil {
		for _, rule := range policy.Rules {
			for _, pattern := range rule.OnPodConditions {
				if pattern.Type == corev1.DisruptionTarget && pattern.Status == corev1.ConditionTrue {
					return rule.Action
				}
			}
		}
	}
	return batchv1.PodFailurePolicyActionCount
}
