// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

func newJob(change ...func(*batchv1.Job)) *batchv1.Job {
	job := &batchv1.Job{}
	job.Namespace, job.Name, job.UID = "ns", "job", "uid-job"
	for _, c := range change {
		c(job)
	}
	return job
}

func limited(n int32) func(*batchv1.Job) {
	return func(j *batchv1.Job) { j.Spec.BackoffLimit = ptr.To(n) }
}

func failed(n int32) func(*batchv1.Job) { return func(j *batchv1.Job) { j.Status.Failed = n } }

func onDisruptionDo(action batchv1.PodFailurePolicyAction) func(*batchv1.Job) {
	return func(j *batchv1.Job) {
		j.Spec.PodFailurePolicy = &batchv1.PodFailurePolicy{Rules: []batchv1.PodFailurePolicyRule{
			{Action: batchv1.PodFailurePolicyActionFailJob, OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{Values: []int32{42}}},
			{Action: action, OnPodConditions: []batchv1.PodFailurePolicyOnPodConditionsPattern{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue}}},
		}}
	}
}

func ofJob(pod *corev1.Pod) {
	owner := &pod.OwnerReferences[0]
	owner.APIVersion, owner.Kind, owner.Name, owner.UID = "batch/v1", "Job", "job", "uid-job"
}

func TestSurvives(t *testing.T) {
	index := func(count string) *corev1.Pod {
		return newPod("a", ofJob, func(p *corev1.Pod) { p.Annotations = map[string]string{batchv1.JobIndexFailureCountAnnotation: count} })
	}
	perIndex := func(j *batchv1.Job) { j.Spec.BackoffLimitPerIndex = ptr.To[int32](2) }
	for name, c := range map[string]struct {
		job      *batchv1.Job
		pod      *corev1.Pod
		failures int32
		want     bool
	}{
		"as it comes":         {newJob(), nil, 1, true},
		"the last one":        {newJob(failed(5)), nil, 1, true},
		"one too many":        {newJob(failed(6)), nil, 1, false},
		"no retries":          {newJob(limited(0)), nil, 1, false},
		"one retry, two pods": {newJob(limited(1)), nil, 2, false},
		"not counted yet": {newJob(limited(1), func(j *batchv1.Job) {
			j.Status.UncountedTerminatedPods = &batchv1.UncountedTerminatedPods{Failed: []types.UID{"x"}}
		}), nil, 1, false},
		"disruptions are ignored": {newJob(limited(0), onDisruptionDo(batchv1.PodFailurePolicyActionIgnore)), nil, 1, true},
		"disruptions are counted": {newJob(limited(0), onDisruptionDo(batchv1.PodFailurePolicyActionCount)), nil, 1, false},
		"disruptions are fatal":   {newJob(onDisruptionDo(batchv1.PodFailurePolicyActionFailJob)), nil, 1, false},
		"per index":               {newJob(perIndex), index("1"), 1, true},
		"per index, one too many": {newJob(perIndex), index("2"), 1, false},
		"per index, unknown":      {newJob(perIndex), index(""), 1, false},
	} {
		pod := c.pod
		if pod == nil {
			pod = newPod("a", ofJob)
		}
		if got := Survives(c.job, pod, c.failures); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// A Job that would fail keeps its pod, which waits for the GPU that it lost.
func TestHealSparesJobs(t *testing.T) {
	for name, c := range map[string]struct {
		job  *batchv1.Job
		want map[string]int
	}{
		"it makes another":  {newJob(), map[string]int{"eviction pod-a": 1}},
		"it would fail":     {newJob(limited(0)), map[string]int{}},
		"it is gone":        {newJob(func(j *batchv1.Job) { j.Name = "other" }), map[string]int{}},
		"it is another one": {newJob(func(j *batchv1.Job) { j.UID = "new" }), map[string]int{}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, interceptor.Funcs{}, gpuNode(losing(condemned("a", "gpu-0"))), newClaim("a", "gpu-0"), newPod("a", ofJob), c.job)
			w.twice(w.healer(), "node-1")
			w.want(c.want)
		})
	}
}
