// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// RetryAnnotation on a pod makes kubelet prepare its claims again at once. Otherwise kubelet tries only after 60 to 90 s. The value is a
// time without a meaning. An admission policy allows the controller to write only this annotation.
const RetryAnnotation = "tandem-gpu.dev/retry"

// Retry is a claim that could be prepared now.
type Retry struct {
	UID             types.UID
	Namespace, Name string
	// Pod is the only pod to annotate if the claim is prepared already, since other pods of it may run. Empty for all pods.
	Pod types.UID
	// Unsure is set if a device is a partition that does not exist yet: the controller does not know whether there is room for it.
	Unsure bool
	// WaitBudget is how long the controller waits for kubelet's own attempt.
	WaitBudget time.Duration
}

const (
	ordinaryWait = 5 * time.Second
	restoredWait = 3 * time.Second
)

// Retries returns the claims of a node that kubelet could prepare now:
//   - claims in conflict whose devices have become available;
//   - claims from before a reboot whose devices the ledger keeps;
//   - allocated claims that are not prepared, as when kubelet called while the agent was restarting;
//   - prepared claims, once for each Pending pod in waiting (by the claim's UID): Prepare refused that pod while its claim was
//     pending eviction, or the agent died before it answered.
//
// A claim that is pending eviction is never among them. It is a pure function.
func Retries(status v1alpha1.GPUNodeStatus, claims []v1alpha1.AllocatedClaim, waiting map[types.UID][]types.UID) []Retry {
	var retries []Retry
	node := availability.NewNode(status, claims)
	allocated := map[types.UID]v1alpha1.AllocatedClaim{}
	for _, claim := range claims {
		allocated[claim.UID] = claim
	}
	available := func(claim types.UID, devices []string) bool {
		return !slices.ContainsFunc(devices, func(name string) bool { return !isAvailable(node, allocated[claim], claim, name) })
	}
	inConflict := map[types.UID]bool{}
	for _, conflict := range status.Conflicts {
		inConflict[conflict.UID] = true
		if !conflict.PendingEviction && available(conflict.UID, conflict.Devices) {
			retries = append(retries, Retry{
				UID: conflict.UID, Namespace: conflict.Namespace, Name: conflict.Name, Unsure: unsure(node, conflict.Devices),
			})
		}
	}
	for _, claim := range claims {
		// Without a device the status does not show whether the claim is prepared.
		if len(claim.Devices) == 0 || inConflict[claim.UID] || !available(claim.UID, claim.Devices) {
			continue
		}
		retry := Retry{
			UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name,
			Unsure: unsure(node, claim.Devices), WaitBudget: ordinaryWait,
		}
		switch state, some := stateOf(node, claim); {
		case !some:
			retries = append(retries, retry)
		case state == v1alpha1.HoldRestored:
			retry.WaitBudget = restoredWait
			retries = append(retries, retry)
		default:
			for _, pod := range waiting[claim.UID] {
				retry.Pod = pod
				retries = append(retries, retry)
			}
		}
	}
	return retries
}

// isAvailable reports whether a claim could be prepared with a device.
func isAvailable(node availability.Node, claim v1alpha1.AllocatedClaim, uid types.UID, name string) bool {
	device, known := node.Status(name)
	request := availability.Use[availability.Name]{
		Holder: availability.Holder{Kind: availability.Claim, ID: string(uid)}, Device: availability.NameOf(name),
		Share: node.AllocatedShare(claim, name),
	}
	return known && node.Check(device.UnhealthyReason == "", request) == availability.Available
}

// unsure reports whether one of the devices is a partition that does not exist yet.
func unsure(node availability.Node, names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return node.Devices[name].Name == "" })
}

// stateOf returns the state of a claim's holds: Restored only if all are. complete is false if one is missing.
func stateOf(node availability.Node, claim v1alpha1.AllocatedClaim) (state v1alpha1.HoldState, complete bool) {
	state = v1alpha1.HoldRestored
	for _, name := range claim.Devices {
		device, _ := node.Status(name)
		at := slices.IndexFunc(device.Holders, func(h v1alpha1.DeviceHolder) bool { return h.UID == claim.UID })
		if at < 0 {
			return "", false
		}
		if own := device.Holders[at].State; own != v1alpha1.HoldRestored {
			state = own
		}
	}
	return state, true
}

// Retryable reports whether kubelet could start the pod on the node once its claims are prepared: it is bound to the node, has not
// ended and has no running container. After a reboot its phase may still be Running. It is a pure function.
func Retryable(pod *corev1.Pod, node string) bool {
	if pod.Spec.NodeName != node || pod.DeletionTimestamp != nil || podstatus.Ended(pod) {
		return false
	}
	all := slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses)
	return !slices.ContainsFunc(all, func(s corev1.ContainerStatus) bool { return s.State.Running != nil })
}

// Unstarted reports whether kubelet has created no sandbox for a pod. Containers and image pulls come after the sandbox. kubelet
// before 1.36 reports the sandbox only after the pull. It is a pure function.
func Unstarted(pod *corev1.Pod) bool {
	return !hasStarted(pod) && !slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReadyToStartContainers && c.Status == corev1.ConditionTrue
	})
}

// Refused reports whether the node refuses the claim's parameters on every attempt. Only a new claim can correct them. It cannot
// detect mistakes that only the allocated devices show. It is a pure function.
func Refused(claim *resourceapi.ResourceClaim, driver string) bool {
	for result := range allocated(claim, driver) {
		whole := device.GPUName(result.Device) == result.Device
		if _, err := parametersv1beta1.Allocated(claim, driver, result, whole); err != nil {
			return true
		}
	}
	return false
}

// retrier annotates pods that kubelet could start now. The e2e stories TestBareClaimWaitsForPod and TestReboot exceed their time
// limits without it.
type retrier struct {
	cluster
	nodes map[string]schedule
}

// schedule has the backoffs of one node's retries, by the UID of Retry.Pod if that is set, otherwise of the claim.
type schedule map[types.UID]*backoff

type backoff struct {
	next     time.Time
	interval time.Duration
	retries  int
}

const (
	// The interval between two retries of one claim doubles up to kubelet's own interval.
	retryInterval    = 5 * time.Second
	retryIntervalMax = 80 * time.Second
	// retriesMax bounds the retries of a pod whose claim is prepared, and of a claim that is Unsure. By the last one, after 80 s,
	// kubelet has tried by itself.
	retriesMax = 5
)

func (n *retrier) register(m manager.Manager) error {
	return forGPUNodes(m, "retry", 1, gpuNodeChanged).
		WatchesRawSource(n.changes).
		// Another pod of an allocated claim changes neither GPUNode nor claim.
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(nodeOfPod), builder.WithPredicates(bindingChanged)).
		Complete(n)
}

var bindingChanged = changed(func(p *corev1.Pod) any { return p.Spec.NodeName })

// nodeOfPod returns the node of a pod with claims; none before the pod is bound.
func nodeOfPod(_ context.Context, o client.Object) []reconcile.Request {
	pod, ok := o.(*corev1.Pod)
	if !ok || pod.Spec.NodeName == "" || len(pod.Spec.ResourceClaims) == 0 && pod.Status.ExtendedResourceClaimStatus == nil {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: pod.Spec.NodeName}}}
}

// Reconcile implements reconcile.Reconciler for one node.
func (n *retrier) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	node := &v1alpha1.GPUNode{}
	// Without a GPUNode the status is empty: Retries returns nothing, and due drops the node's backoffs.
	if err := n.client.Get(ctx, request.NamespacedName, node); client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, err
	}
	claims := n.claims.on(request.Name)
	waiting, err := n.waiting(ctx, request.Name, claims)
	if err != nil {
		return reconcile.Result{}, err
	}
	due, wait := n.due(request.Name, Retries(node.Status, claims, waiting))
	var errs []error
	for _, retry := range due {
		errs = append(errs, n.retry(ctx, request.Name, retry))
	}
	return requeue(wait, errs)
}

// waiting returns the Pending pods of a node that have one of the claims reserved, by the claim's UID. It reads the cache only.
func (n *retrier) waiting(ctx context.Context, node string, claims []v1alpha1.AllocatedClaim) (map[types.UID][]types.UID, error) {
	waiting := map[types.UID][]types.UID{}
	for _, c := range claims {
		claim := n.claims.get(c.Namespace, c.Name)
		pods, err := podsOf(ctx, n.client, claim, "")
		if err != nil {
			return nil, err
		}
		for _, pod := range pods {
			if pod.Status.Phase == corev1.PodPending && Retryable(pod, node) {
				waiting[claim.UID] = append(waiting[claim.UID], pod.UID)
			}
		}
	}
	return waiting, nil
}

// due returns the retries whose time has come, and the time until the next one. The only worker calls it.
func (n *retrier) due(node string, retries []Retry) (due []Retry, wait time.Duration) {
	now, before, after := n.now(), n.nodes[node], schedule{}
	for _, retry := range retries {
		key := cmp.Or(retry.Pod, retry.UID)
		p := before[key]
		if p == nil {
			p = &backoff{next: now.Add(retry.WaitBudget), interval: retryInterval}
		}
		after[key] = p
		if (retry.Pod != "" || retry.Unsure) && p.retries >= retriesMax {
			continue
		}
		if !now.Before(p.next) {
			due = append(due, retry)
			p.next, p.interval, p.retries = now.Add(p.interval), min(2*p.interval, retryIntervalMax), p.retries+1
		}
		if left := p.next.Sub(now); wait == 0 || left < wait {
			wait = left
		}
	}
	if n.nodes[node] = after; len(after) == 0 {
		delete(n.nodes, node)
	}
	return due, wait
}

// retry annotates the claim's pods on the node, except pods with a claim whose parameters the node refuses.
func (n *retrier) retry(ctx context.Context, node string, retry Retry) error {
	claim := n.claims.get(retry.Namespace, retry.Name)
	// The node's status may name any claim.
	if claim.UID != retry.UID || !slices.Contains(nodesOf(claim, n.driver), node) {
		return nil
	}
	pods, err := podsOf(ctx, n.live, claim, retry.Pod)
	if err != nil {
		return err
	}
	for _, pod := range pods {
		if !Retryable(pod, node) || retry.Pod != "" && !Unstarted(pod) || n.refused(pod) {
			continue
		}
		if err := n.annotate(ctx, pod); err != nil {
			return err
		}
	}
	return nil
}

// refused reports whether the node refuses one of the pod's claims: kubelet prepares all claims of a pod or none.
func (n *retrier) refused(pod *corev1.Pod) bool {
	for name := range resourceclaim.PodClaims(pod) {
		if Refused(n.claims.get(pod.Namespace, name), n.driver) {
			return true
		}
	}
	return false
}

func (n *retrier) annotate(ctx context.Context, pod *corev1.Pod) error {
	patch := jsonPatch{types.MergePatchType, map[string]any{"metadata": map[string]any{
		"uid":         pod.UID,
		"annotations": map[string]string{RetryAnnotation: n.now().UTC().Format(time.RFC3339Nano)},
	}}}
	switch err := n.client.Patch(ctx, pod, patch); {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err): // It is gone, or is a later pod of the same name.
		return nil
	case err != nil:
		return fmt.Errorf("annotate pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	n.metrics.retries.Inc()
	return nil
}

// backoffLimit is the API server's default.
const backoffLimit = 6

// Survives reports whether a Job replaces a pod that is evicted. A Job counts the eviction as a failure (k8s.io/kubernetes
// pkg/controller/job, isPodFailed), unless its podFailurePolicy ignores pods with the condition DisruptionTarget, which an eviction
// sets. Another controller manages a Job with another spec.managedBy, and may do anything. failures counts the failures that are not in its status yet, including this one. It is a pure
// function.
func Survives(job *batchv1.Job, pod *corev1.Pod, failures int32) bool {
	if ptr.Deref(job.Spec.ManagedBy, batchv1.JobControllerName) != batchv1.JobControllerName {
		return false
	}
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

// failedOrEnding reports whether a Job will count a pod as failed. The Job controller removes its finalizer once it has counted the pod.
func failedOrEnding(pod *corev1.Pod) bool {
	return (pod.Status.Phase == corev1.PodFailed || pod.DeletionTimestamp != nil && pod.Status.Phase != corev1.PodSucceeded) &&
		slices.Contains(pod.Finalizers, batchv1.JobTrackingFinalizer)
}

// uncounted returns how many pods of a Job that have failed or are ending are not in its status yet. It is a pure function.
func uncounted(job *batchv1.Job, ended []types.UID) (n int32) {
	for _, uid := range ended {
		if job.Status.UncountedTerminatedPods == nil || !slices.Contains(job.Status.UncountedTerminatedPods.Failed, uid) {
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
