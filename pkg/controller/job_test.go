// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"strconv"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
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

func madeByJob(pod *corev1.Pod) {
	pod.Labels, pod.Finalizers = map[string]string{batchv1.ControllerUidLabel: "uid-job"}, []string{batchv1.JobTrackingFinalizer}
	owner := &pod.OwnerReferences[0]
	owner.APIVersion, owner.Kind, owner.Name, owner.UID = "batch/v1", "Job", "job", "uid-job"
}

func TestSurvives(t *testing.T) {
	index := func(count string) *corev1.Pod {
		return newPod("a", madeByJob, func(p *corev1.Pod) { p.Annotations = map[string]string{batchv1.JobIndexFailureCountAnnotation: count} })
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
		"disruptions are ignored":        {newJob(limited(0), onDisruptionDo(batchv1.PodFailurePolicyActionIgnore)), nil, 1, true},
		"disruptions are counted":        {newJob(limited(0), onDisruptionDo(batchv1.PodFailurePolicyActionCount)), nil, 1, false},
		"disruptions are fatal":          {newJob(onDisruptionDo(batchv1.PodFailurePolicyActionFailJob)), nil, 1, false},
		"managed by others":              {newJob(func(j *batchv1.Job) { j.Spec.ManagedBy = ptr.To("kueue.x-k8s.io/multikueue") }), nil, 1, false},
		"managed as usual":               {newJob(func(j *batchv1.Job) { j.Spec.ManagedBy = ptr.To(batchv1.JobControllerName) }), nil, 1, true},
		"per index":                      {newJob(perIndex), index("1"), 1, true},
		"per index, one too many":        {newJob(perIndex), index("2"), 1, false},
		"per index, in all one too many": {newJob(perIndex, limited(0)), index("1"), 1, false},
		"per index, unknown":             {newJob(perIndex), index(""), 1, false},
	} {
		pod := c.pod
		if pod == nil {
			pod = newPod("a", madeByJob)
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
			w := newWorld(t, interceptor.Funcs{}, gpuNode(losing(pendingEviction("a", "gpu-0"))), newClaim("a", "gpu-0"), newPod("a", madeByJob), c.job)
			w.twice(w.healer(), "node-1")
			w.want(c.want)
		})
	}
}

// Claims of one Job that lose together are looked at one after the other, before the Job has counted the first pod.
func TestHealCountsWhatAJobDoesNotKnowYet(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(losing(pendingEviction("a", "gpu-0"), pendingEviction("b", "gpu-1"))),
		newClaim("a", "gpu-0"), newPod("a", madeByJob), newClaim("b", "gpu-1"), newPod("b", madeByJob), newJob(limited(1)))
	w.twice(w.healer(), "node-1")
	w.want(map[string]int{"eviction pod-a": 1})
}

func TestUncounted(t *testing.T) {
	phase := func(phase corev1.PodPhase) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Status.Phase = phase } }
	counted := func(p *corev1.Pod) { p.Finalizers = nil }
	ending := func(p *corev1.Pod) { p.DeletionTimestamp = ptr.To(metav1.Now()) }
	job := newJob(func(j *batchv1.Job) {
		j.Status.UncountedTerminatedPods = &batchv1.UncountedTerminatedPods{Failed: []types.UID{"uid-pod-known"}}
	})
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		want int32
	}{
		"waiting":           {newPod("a", madeByJob), 0},
		"ending":            {newPod("a", madeByJob, ending), 1},
		"failed":            {newPod("a", madeByJob, phase(corev1.PodFailed)), 1},
		"ending, succeeded": {newPod("a", madeByJob, ending, phase(corev1.PodSucceeded)), 0},
		"in the status":     {newPod("known", madeByJob, ending), 0},
		"counted":           {newPod("a", madeByJob, ending, counted), 0},
	} {
		var ended []types.UID
		if failedOrEnding(c.pod) {
			ended = []types.UID{c.pod.UID}
		}
		if got := uncounted(job, ended); got != c.want {
			t.Errorf("%s: %d", name, got)
		}
	}
}

// Pods of a tenant that have the label of its Job are read in parts, and not without end.
func TestPodsOfAJobAreReadInParts(t *testing.T) {
	for _, parts := range []int{3, 1 << 20} {
		read := 0
		funcs := interceptor.Funcs{List: func(_ context.Context, _ client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			o := (&client.ListOptions{}).ApplyOptions(opts)
			if o.Limit < 1 || o.Limit > podsAtOnce || read > 0 && o.Continue != strconv.Itoa(read) {
				t.Errorf("limit %d, continue %q after %d parts", o.Limit, o.Continue, read)
			}
			if o.FieldSelector == nil || o.FieldSelector.String() != "status.phase!=Succeeded" {
				t.Errorf("field selector %v", o.FieldSelector)
			}
			if read++; read < parts {
				list.SetContinue(strconv.Itoa(read))
			}
			list.(*corev1.PodList).Items = []corev1.Pod{*newPod("forged-" + strconv.Itoa(read))}
			return nil
		}}
		w := newWorld(t, funcs)
		if _, err := w.healer().endedPods(t.Context(), "apps", "uid-job"); errors.Is(err, errManyPods) != (parts > 3) || err != nil && parts == 3 {
			t.Errorf("%d parts: %v", parts, err)
		}
		if want := min(parts, mostPodsOfJob/podsAtOnce); read != want {
			t.Errorf("read %d parts, want %d", read, want)
		}
	}
}

// Two pods of one Job lose their claim: the Job's pods are read once.
func TestPodsOfAJobAreReadOnce(t *testing.T) {
	lists := 0
	funcs := interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
		if _, pods := list.(*corev1.PodList); pods {
			lists++
		}
		return c.List(ctx, list, opts...)
	}}
	w := newWorld(t, funcs, newJob())
	plan := EvictionPlan{Evict: []*corev1.Pod{newPod("a", madeByJob), newPod("b", madeByJob)}}
	if plan, err := w.healer().spareJobs(t.Context(), plan); err != nil || plan.Refused != "" || lists != 1 {
		t.Errorf("%+v, %v after %d lists", plan, err, lists)
	}
}
