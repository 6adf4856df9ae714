// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"strconv"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// backoffLimit is what the API server sets where a Job says nothing.
const backoffLimit = 6

// Survives reports whether a Job makes another pod when one of its pods is evicted. To a Job that is a failure, of which it
// takes only so many (k8s.io/kubernetes pkg/controller/job, isPodFailed); failures counts those that are about to be caused
// with this one. It is a pure function.
func Survives(job *batchv1.Job, pod *corev1.Pod, failures int32) bool {
	switch onDisruption(job.Spec.PodFailurePolicy) {
	case batchv1.PodFailurePolicyActionIgnore:
		return true
	case batchv1.PodFailurePolicyActionFailJob, batchv1.PodFailurePolicyActionFailIndex:
		return false
	}
	if limit := job.Spec.BackoffLimitPerIndex; limit != nil {
		before, err := strconv.ParseInt(pod.Annotations[batchv1.JobIndexFailureCountAnnotation], 10, 32)
		return err == nil && int32(before) < *limit
	}
	before := job.Status.Failed
	if uncounted := job.Status.UncountedTerminatedPods; uncounted != nil {
		before += int32(len(uncounted.Failed))
	}
	return before+failures <= ptr.Deref(job.Spec.BackoffLimit, backoffLimit)
}

// onDisruption is what a policy does with a pod that was evicted before it started: the first rule that matches counts, and
// there are no exit codes to match.
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
