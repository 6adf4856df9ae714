// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/owner"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/internal/regarding"
)

// EvictionPlan is what to do about a claim in conflict.
type EvictionPlan struct {
	// Conflict is the entry of the claim in the node's status.
	Conflict v1alpha1.ConflictingClaim
	// Evict contains all pods of the claim or none: the claim becomes free only when no pod has it reserved.
	Evict []*corev1.Pod
	// Refused is why no pod may be evicted. It is empty if there is nothing to evict.
	Refused string
}

// PlanEviction returns which pods of a claim to evict. All arguments have to be read live; pods are those of status.reservedFor that
// exist. It is a pure function.
//
// It evicts only pods whose owner is known to replace them (package owner). Other pods wait instead. A pod with a container that has
// ever started may use the GPU, whatever the node reports. Nothing is evicted unless the claim is still pending eviction and still
// allocated a device of its conflict, or a partition of one: a claim that several pods share is allocated again under the same
// UID, while the node's status is up to a second old.
func PlanEviction(
	status v1alpha1.GPUNodeStatus, claim *resourceapi.ResourceClaim, pods []*corev1.Pod, driver, node string,
) EvictionPlan {
	pending := func(c v1alpha1.ConflictingClaim) bool { return c.UID == claim.UID && c.PendingEviction }
	i := slices.IndexFunc(status.Conflicts, pending)
	if i < 0 || !stillConflicting(status.Conflicts[i], claim, driver, node) {
		return EvictionPlan{}
	}
	plan := EvictionPlan{Conflict: status.Conflicts[i]}
	refuse := func(format string, args ...any) EvictionPlan {
		return EvictionPlan{Refused: fmt.Sprintf(format, args...)}
	}
	for _, consumer := range claim.Status.ReservedFor {
		if consumer.APIGroup != "" || consumer.Resource != "pods" {
			return refuse("the claim is reserved for %s %s, which is not a pod", consumer.Resource, consumer.Name)
		}
		at := slices.IndexFunc(pods, func(p *corev1.Pod) bool { return p.Name == consumer.Name && p.UID == consumer.UID })
		if at < 0 {
			continue // The claim controller drops it from the claim.
		}
		switch pod := pods[at]; {
		case pod.DeletionTimestamp != nil, podstatus.Ended(pod):
		case hasStarted(pod):
			return refuse("a container of pod %s has started", pod.Name)
		case !slices.Contains(plan.Conflict.Pods, pod.UID):
			// The claim may have been freed and allocated again since the node reported it, and Prepare may be running now.
			return refuse("pod %s reserved the claim after the node had reported the conflict", pod.Name)
		case !owner.Replaces(pod):
			return refuse("%s", owner.WhyNot(pod))
		default:
			plan.Evict = append(plan.Evict, pod)
		}
	}
	return plan
}

func stillConflicting(conflict v1alpha1.ConflictingClaim, claim *resourceapi.ResourceClaim, driver, node string) bool {
	for _, allocated := range Relay([]resourceapi.ResourceClaim{*claim}, driver, node) {
		for _, device := range conflict.Devices {
			if slices.ContainsFunc(allocated.Devices, func(name string) bool { return overlap(name, device) }) {
				return true
			}
		}
	}
	return false
}

// hasStarted reports whether a container of the pod has ever run. kubelet starts none before all claims of the pod are prepared.
func hasStarted(pod *corev1.Pod) bool {
	all := slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses, pod.Status.EphemeralContainerStatuses)
	return pod.Status.Phase == corev1.PodRunning || slices.ContainsFunc(all, func(s corev1.ContainerStatus) bool {
		return s.State.Running != nil || s.State.Terminated != nil || s.LastTerminationState.Terminated != nil ||
			s.ContainerID != "" || s.RestartCount > 0
	})
}

// healer evicts the pods of claims in conflict, so that their owners create pods that get other GPUs. TestClaimConflictsWithPod
// fails without it.
type healer struct {
	cluster
	evictions *evictions

	turns map[string]turn // by node
}

// turn is how far the pass over a node's conflicts has come. One node with many of them, true or forged, must not delay healing
// on others: the pass is done in parts, and the queue serves the other nodes in between.
type turn struct {
	next, refused int
}

// conflictsATurn is how many conflicts are read live before other nodes have their turn. Each costs some ten milliseconds.
const conflictsATurn = 16

func (h *healer) register(m manager.Manager) error {
	// One worker: each reading of a Job counts the pods that were evicted before.
	return forGPUNodes(m, "heal", 1, gpuNodeChanged).Complete(h)
}

// anotherTurn is when a pass goes on: at once, after the nodes that wait.
const anotherTurn = time.Millisecond

// healInterval is when a claim that stays pending eviction is checked again: its pods are ending, or cannot be evicted now.
const healInterval = 2 * time.Second

// Reconcile implements reconcile.Reconciler for one node. It is idempotent.
func (h *healer) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	node := &v1alpha1.GPUNode{}
	if err := h.client.Get(ctx, request.NamespacedName, node); client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, err
	}
	claims, pending := h.pending(node)
	t := h.turns[request.Name]
	first := min(t.next, len(claims))
	t.next = min(first+conflictsATurn, len(claims))
	var errs []error
	for _, claim := range claims[first:t.next] {
		movable, err := h.heal(ctx, node.Name, claim)
		if !movable {
			t.refused++
		}
		errs = append(errs, err)
	}
	if t.next < len(claims) {
		h.turns[request.Name] = t
		return requeue(anotherTurn, errs)
	}
	delete(h.turns, request.Name)
	setNode(h.metrics.notMovable, request.Name, t.refused)
	if !pending {
		return reconcile.Result{}, nil
	}
	return requeue(healInterval, errs)
}

// pending returns the claims of a node that are pending eviction, and whether the node reports any. It reads the cache only, and leaves
// out the claims that are not in conflict by what the API server has of them: a forged entry costs no request.
func (h *healer) pending(node *v1alpha1.GPUNode) (claims []types.NamespacedName, some bool) {
	for _, conflict := range node.Status.Conflicts {
		if !conflict.PendingEviction {
			continue
		}
		some = true
		claim := h.claims.get(conflict.Namespace, conflict.Name)
		if claim.UID == conflict.UID && stillConflicting(conflict, claim, h.driver, node.Name) {
			claims = append(claims, client.ObjectKeyFromObject(claim))
		}
	}
	return claims, some
}

// heal evicts the pods of a claim. movable is false if one of them may not be evicted.
func (h *healer) heal(ctx context.Context, node string, key types.NamespacedName) (movable bool, err error) {
	claim := &resourceapi.ResourceClaim{}
	if err := h.live.Get(ctx, key, claim); err != nil {
		return true, client.IgnoreNotFound(fmt.Errorf("get claim %s, which is pending eviction: %w", key, err))
	}
	pods, err := podsOf(ctx, h.live, claim, "")
	if err != nil {
		return true, err
	}
	// The node is read last: the agent prepares the claim as soon as its status no longer lists the conflict.
	now := &v1alpha1.GPUNode{}
	if err := h.live.Get(ctx, types.NamespacedName{Name: node}, now); err != nil {
		return true, client.IgnoreNotFound(err)
	}
	plan := PlanEviction(now.Status, claim, pods, h.driver, node)
	plan, err = h.spareJobs(ctx, plan)
	if err != nil {
		return true, err
	}
	if plan.Refused != "" {
		klog.FromContext(ctx).V(2).Info("Not evicting", "claim", key, "reason", plan.Refused)
		return false, nil
	}
	return true, h.carryOut(ctx, node, plan, claim)
}

// carryOut evicts the pods of a plan, unless the same owners' pods were evicted for the same devices a short time ago.
func (h *healer) carryOut(ctx context.Context, node string, plan EvictionPlan, claim *resourceapi.ResourceClaim) error {
	losses := lossesOf(node, plan.Conflict.Devices, plan.Evict...)
	if wait := h.evictions.wait(losses); wait > 0 {
		klog.FromContext(ctx).V(2).Info("Not evicting again so soon", "claim", klog.KObj(claim), "devices", plan.Conflict.Devices, "wait", wait)
		return nil
	}
	evictedAny := false
	defer func() {
		if evictedAny {
			h.evictions.record(losses)
		}
	}()
	for _, pod := range plan.Evict {
		evicted, err := h.evict(ctx, plan.Conflict, claim, pod)
		if err != nil {
			return err // The pods that are left make the plan of the next attempt.
		}
		evictedAny = evictedAny || evicted
	}
	return nil
}

// spareJobs refuses an eviction that would make a Job fail. Its pod waits, like a pod without an owner.
func (h *healer) spareJobs(ctx context.Context, plan EvictionPlan) (EvictionPlan, error) {
	failures, ended := map[types.UID]int32{}, map[types.UID][]types.UID{} // by Job
	for _, pod := range plan.Evict {
		of := metav1.GetControllerOf(pod)
		if schema.FromAPIVersionAndKind(of.APIVersion, of.Kind).GroupKind() != batchv1.SchemeGroupVersion.WithKind("Job").GroupKind() {
			continue
		}
		// Pods are read before the Job, so that a pod that the Job counts meanwhile counts twice and not zero times.
		if _, read := ended[of.UID]; !read {
			var err error
			ended[of.UID], err = h.endedPods(ctx, pod.Namespace, of.UID)
			switch {
			case errors.Is(err, errManyPods):
				return EvictionPlan{Refused: fmt.Sprintf("it is not known whether job %s would replace pod %s: %v", of.Name, pod.Name, err)}, nil
			case err != nil:
				return EvictionPlan{}, fmt.Errorf("list pods of job %s/%s: %w", pod.Namespace, of.Name, err)
			}
		}
		job := &batchv1.Job{}
		key := types.NamespacedName{Namespace: pod.Namespace, Name: of.Name}
		if err := h.live.Get(ctx, key, job); client.IgnoreNotFound(err) != nil {
			return EvictionPlan{}, fmt.Errorf("get job %s: %w", key, err)
		}
		failures[of.UID]++
		if job.UID != of.UID || !Survives(job, pod, failures[of.UID]+uncounted(job, ended[of.UID])) {
			return EvictionPlan{Refused: fmt.Sprintf("job %s would not replace pod %s", of.Name, pod.Name)}, nil
		}
	}
	return plan, nil
}

// Every user of a namespace can give pods the label of a Job's pods. So at most mostPodsOfJob are read, in parts of podsAtOnce, and each part is
// dropped before the next one is read. client-go's pager reads several parts ahead.
const podsAtOnce, mostPodsOfJob = 25, 2500

var (
	// A Job keeps the pods that have succeeded, of which there may be thousands.
	notSucceeded = client.MatchingFieldsSelector{Selector: fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded))}
	errManyPods  = fmt.Errorf("more than %d pods that have not succeeded have the job's label", mostPodsOfJob)
)

// endedPods returns the UIDs of the pods that a Job will count as failed. The error is errManyPods if not all could be read.
func (h *healer) endedPods(ctx context.Context, namespace string, job types.UID) (ended []types.UID, err error) {
	mine := client.MatchingLabels{batchv1.ControllerUidLabel: string(job)}
	next := ""
	for read := 0; read < mostPodsOfJob; read += podsAtOnce {
		var pods corev1.PodList
		if err := h.live.List(ctx, &pods, client.InNamespace(namespace), mine, notSucceeded, client.Limit(podsAtOnce), client.Continue(next)); err != nil {
			return nil, err
		}
		for i := range pods.Items {
			if failedOrEnding(&pods.Items[i]) {
				ended = append(ended, pods.Items[i].UID)
			}
		}
		if next = pods.Continue; next == "" {
			return ended, nil
		}
	}
	return nil, errManyPods
}

// evict evicts a pod of a claim in conflict. evicted is false if the pod is gone, or if the API server refuses.
func (h *healer) evict(
	ctx context.Context, conflict v1alpha1.ConflictingClaim, claim *resourceapi.ResourceClaim, pod *corev1.Pod,
) (evicted bool, err error) {
	evicted, refused, err := evict(ctx, h.client, pod)
	h.metrics.evicted(causeConflict, evicted, refused)
	if refused != nil {
		klog.FromContext(ctx).V(2).Info("The API server refused to evict a pod", "pod", klog.KObj(pod), "claim", klog.KObj(claim), "reason", refused.Error())
	}
	if !evicted || err != nil {
		return false, err
	}
	klog.FromContext(ctx).Info("Evicted pod of claim in conflict", "pod", klog.KObj(pod), "claim", klog.KObj(claim), "devices", conflict.Devices)
	text := regarding.Shorten(fmt.Sprintf("Pod %s was evicted because its claim %s cannot have the GPU that it was allocated; its owner creates a pod that gets another GPU: %s",
		pod.Name, claim.Name, conflict.Message), noteLimit)
	for about, related := range map[client.Object]client.Object{pod: claim, claim: pod} {
		h.recorder.Eventf(about, related, corev1.EventTypeNormal, "EvictedAfterConflict", "Evict", "%s", text)
	}
	return true, nil
}

// noteLimit is the longest note in bytes that the API server accepts in an event (k8s.io/kubernetes pkg/apis/core/validation). A claim may
// conflict on eight GPUs with holders that have long names.
const noteLimit = 1024
