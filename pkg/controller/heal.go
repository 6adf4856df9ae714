// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// Judgement is what to do about a condemned claim.
type Judgement struct {
	// Evict are the pods to evict, all of them or none: a claim is freed when nobody has it reserved any more.
	Evict []*corev1.Pod
	// Refused says why nothing may be evicted; empty also where nothing is left to do.
	Refused string
}

// JudgeEviction says which pods of a condemned claim to evict. The claim and its pods are as the API server has them now,
// the pods those of status.reservedFor that exist. It is a pure function.
//
// Only pods whose owner makes another one are moved: a bare pod would be gone for good, and waits instead. A pod of which a
// container has ever started may use the GPU, whatever the node believes.
func JudgeEviction(conflict v1alpha1.ConflictingClaim, claim *resourceapi.ResourceClaim, pods []*corev1.Pod) Judgement {
	if claim == nil || claim.UID != conflict.UID || claim.Status.Allocation == nil || !conflict.PendingEviction {
		return Judgement{}
	}
	var evict []*corev1.Pod
	for _, consumer := range claim.Status.ReservedFor {
		if consumer.APIGroup != "" || consumer.Resource != "pods" {
			return Judgement{Refused: fmt.Sprintf("it is reserved for %s %s, which is no pod", consumer.Resource, consumer.Name)}
		}
		pod := podOf(pods, consumer)
		switch {
		case pod == nil, pod.DeletionTimestamp != nil, terminal(pod):
			// Gone, going, or about to be dropped from the claim.
		case hasStarted(pod):
			return Judgement{Refused: fmt.Sprintf("a container of pod %s has started", pod.Name)}
		case !slices.Contains(conflict.Pods, pod.UID):
			// The claim may have been freed and allocated anew since the node wrote this, and be prepared at this moment.
			return Judgement{Refused: fmt.Sprintf("pod %s has come since the node wrote of it", pod.Name)}
		case metav1.GetControllerOf(pod) == nil:
			return Judgement{Refused: fmt.Sprintf("pod %s belongs to nobody who would make another", pod.Name)}
		default:
			evict = append(evict, pod)
		}
	}
	return Judgement{Evict: evict}
}

// StillPendingEviction is what a node's status says of a claim that it condemns. It is a pure function.
func StillPendingEviction(status v1alpha1.GPUNodeStatus, claim types.UID) (conflict v1alpha1.ConflictingClaim, pendingEviction bool) {
	i := slices.IndexFunc(status.Conflicts, func(l v1alpha1.ConflictingClaim) bool { return l.UID == claim && l.PendingEviction })
	if i < 0 {
		return v1alpha1.ConflictingClaim{}, false
	}
	return status.Conflicts[i], true
}

// StillLost reports whether a claim is still allocated one of the devices that it lost on a node, or a part of one. One that
// several pods share is allocated anew under the same UID, while the node's status is up to a second old. It is a pure function.
func StillLost(conflict v1alpha1.ConflictingClaim, claim *resourceapi.ResourceClaim, driver, node string) bool {
	for _, allocated := range Relay([]resourceapi.ResourceClaim{*claim}, driver, node) {
		for _, lost := range conflict.Devices {
			if slices.ContainsFunc(allocated.Devices, func(name string) bool { return overlap(name, lost) }) {
				return true
			}
		}
	}
	return false
}

func podOf(pods []*corev1.Pod, consumer resourceapi.ResourceClaimConsumerReference) *corev1.Pod {
	for _, pod := range pods {
		if pod.Name == consumer.Name && pod.UID == consumer.UID {
			return pod
		}
	}
	return nil
}

func terminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// hasStarted reports whether a container of the pod has ever run: kubelet starts none before all claims of the pod are prepared.
func hasStarted(pod *corev1.Pod) bool {
	for _, statuses := range [][]corev1.ContainerStatus{
		pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses, pod.Status.EphemeralContainerStatuses,
	} {
		for _, s := range statuses {
			if s.State.Running != nil || s.State.Terminated != nil || s.LastTerminationState.Terminated != nil ||
				s.ContainerID != "" || s.RestartCount > 0 {
				return true
			}
		}
	}
	return pod.Status.Phase == corev1.PodRunning
}

// healer evicts the pods of claims that lost their GPU to another holder, so that their owners make others.
type healer struct {
	client client.Client
	driver string
	// live reads from the API server: what is evicted is judged as it is now.
	live     client.Reader
	recorder events.EventRecorder
	metrics  *metrics
	follower *follower
	now      func() time.Time

	// jobs is held from a look at a Job until its pod is evicted: of each, the next look knows.
	jobs sync.Mutex

	mu         sync.Mutex
	notMovable map[string]int
}

func (h *healer) register(m manager.Manager) error {
	err := builder.ControllerManagedBy(m).Named("heal").
		For(&v1alpha1.GPUNode{}).
		WithOptions(options(4)).
		Complete(h)
	if err != nil {
		return fmt.Errorf("register heal: %w", err)
	}
	return nil
}

const (
	// lookAgain is how soon a claim is looked at again that stays condemned: its pods are ending, or cannot be moved now.
	lookAgain = 2 * time.Second
	// changedAgain is how soon a pod that changed under our hands is.
	changedAgain = 100 * time.Millisecond
)

// Reconcile implements reconcile.Reconciler for one node. It is idempotent.
func (h *healer) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	node := &v1alpha1.GPUNode{}
	err := h.client.Get(ctx, request.NamespacedName, node)
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, err
	}
	var again time.Duration
	var errs []error
	refused := 0
	for _, conflict := range node.Status.Conflicts {
		if !conflict.PendingEviction {
			continue
		}
		wait, movable, err := h.heal(ctx, node.Name, conflict)
		if again == 0 || wait < again {
			again = wait
		}
		if !movable {
			refused++
		}
		errs = append(errs, err)
	}
	h.count(request.Name, refused)
	return reconcile.Result{RequeueAfter: again}, errors.Join(errs...)
}

func (h *healer) count(node string, refused int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.notMovable == nil {
		h.notMovable = map[string]int{}
	}
	if h.notMovable[node] = refused; refused == 0 {
		delete(h.notMovable, node)
	}
	total := 0
	for _, n := range h.notMovable {
		total += n
	}
	h.metrics.notMovable.Set(float64(total))
}

func (h *healer) heal(ctx context.Context, node string, heard v1alpha1.ConflictingClaim) (again time.Duration, movable bool, err error) {
	claim := &resourceapi.ResourceClaim{}
	key := types.NamespacedName{Namespace: heard.Namespace, Name: heard.Name}
	if err := h.live.Get(ctx, key, claim); err != nil {
		if apierrors.IsNotFound(err) {
			return lookAgain, true, nil
		}
		return lookAgain, true, fmt.Errorf("get condemned claim %s: %w", key, err)
	}
	pods, err := h.podsOf(ctx, claim)
	if err != nil {
		return lookAgain, true, err
	}
	// Last: a claim is prepared as soon as the node says nothing of it any more, and what was heard of the node may be old.
	now := &v1alpha1.GPUNode{}
	if err := h.live.Get(ctx, types.NamespacedName{Name: node}, now); err != nil {
		return lookAgain, true, client.IgnoreNotFound(err)
	}
	conflict, pendingEviction := StillPendingEviction(now.Status, heard.UID)
	if !pendingEviction || !StillLost(conflict, claim, h.driver, node) {
		return lookAgain, true, nil
	}
	judgement := JudgeEviction(conflict, claim, pods)
	if slices.ContainsFunc(judgement.Evict, ofJob) {
		h.jobs.Lock()
		defer h.jobs.Unlock()
	}
	judgement, err = h.spareJobs(ctx, judgement)
	if err != nil {
		return lookAgain, true, err
	}
	if judgement.Refused != "" {
		klog.FromContext(ctx).V(2).Info("Not evicting", "claim", key, "reason", judgement.Refused)
		return lookAgain, false, nil
	}
	again = lookAgain
	for _, pod := range judgement.Evict {
		changed, err := h.evict(ctx, conflict, claim, pod)
		if err != nil {
			return lookAgain, true, err
		}
		if changed {
			again = changedAgain
		}
	}
	return again, true, nil
}

// spareJobs refuses an eviction that would be one failure too many for a Job: its pod waits, as a bare one does.
func (h *healer) spareJobs(ctx context.Context, judgement Judgement) (Judgement, error) {
	failures := map[types.UID]int32{}
	for _, pod := range judgement.Evict {
		if !ofJob(pod) {
			continue
		}
		owner := metav1.GetControllerOf(pod)
		// Before the Job: a pod that is counted in between counts twice, not never.
		var pods corev1.PodList
		mine := client.MatchingLabels{batchv1.ControllerUidLabel: string(owner.UID)}
		if err := h.live.List(ctx, &pods, client.InNamespace(pod.Namespace), mine); err != nil {
			return Judgement{}, fmt.Errorf("list pods of job %s/%s: %w", pod.Namespace, owner.Name, err)
		}
		job := &batchv1.Job{}
		key := types.NamespacedName{Namespace: pod.Namespace, Name: owner.Name}
		if err := h.live.Get(ctx, key, job); client.IgnoreNotFound(err) != nil {
			return Judgement{}, fmt.Errorf("get job %s: %w", key, err)
		}
		failures[owner.UID]++
		if job.UID != owner.UID || !Survives(job, pod, failures[owner.UID]+uncounted(job, pods.Items)) {
			return Judgement{Refused: fmt.Sprintf("job %s would not make another pod in place of %s", owner.Name, pod.Name)}, nil
		}
	}
	return judgement, nil
}

func ofJob(pod *corev1.Pod) bool {
	owner := metav1.GetControllerOf(pod)
	return owner != nil && owner.Kind == "Job" && owner.APIVersion == batchv1.SchemeGroupVersion.String()
}

// podsOf are the pods that have a claim reserved and exist.
func (h *healer) podsOf(ctx context.Context, claim *resourceapi.ResourceClaim) ([]*corev1.Pod, error) {
	var pods []*corev1.Pod
	for _, consumer := range claim.Status.ReservedFor {
		pod := &corev1.Pod{}
		key := types.NamespacedName{Namespace: claim.Namespace, Name: consumer.Name}
		switch err := h.live.Get(ctx, key, pod); {
		case apierrors.IsNotFound(err):
		case err != nil:
			return nil, fmt.Errorf("get pod %s: %w", key, err)
		default:
			pods = append(pods, pod)
		}
	}
	return pods, nil
}

// evict asks the API server to end a pod if it is still what was judged, and reports whether it has changed.
func (h *healer) evict(
	ctx context.Context, conflict v1alpha1.ConflictingClaim, claim *resourceapi.ResourceClaim, pod *corev1.Pod,
) (changed bool, err error) {
	eviction := &policyv1.Eviction{
		ObjectMeta: metav1.ObjectMeta{Name: pod.Name, Namespace: pod.Namespace},
		DeleteOptions: &metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: ptr.To(pod.UID), ResourceVersion: ptr.To(pod.ResourceVersion)},
		},
	}
	// Before, since the next pod may run before the answer is here.
	forget := h.follower.expect(metav1.GetControllerOf(pod).UID, pod.UID, conflict.Since.Time, h.now())
	err = h.client.SubResource("eviction").Create(ctx, pod, eviction)
	if err != nil {
		forget()
	}
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case apierrors.IsConflict(err):
		return true, nil
	case apierrors.IsTooManyRequests(err):
		h.metrics.evictions.WithLabelValues("refused").Inc()
		return false, nil
	case err != nil:
		return false, fmt.Errorf("evict pod %s/%s of condemned claim %s: %w", pod.Namespace, pod.Name, claim.Name, err)
	}
	h.metrics.evictions.WithLabelValues("evicted").Inc()
	klog.FromContext(ctx).Info("Evicted pod of condemned claim", "pod", klog.KObj(pod), "claim", klog.KObj(claim), "devices", conflict.Devices)
	story := note(fmt.Sprintf("Pod %s was evicted so that its owner makes another one, which gets another GPU: %s", pod.Name, conflict.Message))
	for regarding, related := range map[client.Object]client.Object{pod: claim, claim: pod} {
		h.recorder.Eventf(regarding, related, corev1.EventTypeNormal, "EvictedAfterConflict", "Evict", "%s", story)
	}
	return false, nil
}
