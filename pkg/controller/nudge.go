// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// RetryAnnotation on a pod makes kubelet look at it at once, and prepare its claims again; left alone it tries only after 60
// to 90 s. Its value is a time and means nothing. An admission policy keeps the controller from writing anything else.
const RetryAnnotation = "tandem-gpu.dev/retry"

// Retry is a claim that could be prepared now.
type Retry struct {
	UID             types.UID
	Namespace, Name string
	// Pod is the only one that is meant, of a claim that is prepared already: others of it may run. Empty for all of them.
	Pod types.UID
	// Unsure is set where a device is a partition still to be made: whether there is room for it is not known here.
	Unsure bool
	// WaitBudget is how long kubelet may take by itself before it is told.
	WaitBudget time.Duration
}

// Where kubelet is likely to be at it, it is left alone for a while.
const (
	expectedPatience   = 3 * time.Second
	unpreparedPatience = 5 * time.Second
	preparedPatience   = 5 * time.Second
)

// Retries are the claims of a node that kubelet could prepare now and is not known to be about to: losers that wait and whose
// devices have become free; claims of before a reboot whose GPUs are kept for them; claims that are allocated here and that
// nobody has prepared, as when kubelet asked while the agent was away; and claims that are prepared, one by one for their pods
// in waiting, those that are Pending on the node by the UID of the claim. Such a pod was refused while its claim was condemned,
// or the agent died before it had answered. A condemned claim is never among them. It is a pure function.
func Retries(status v1alpha1.GPUNodeStatus, claims []v1alpha1.AllocatedClaim, waiting map[types.UID][]types.UID) []Retry {
	var retries []Retry
	devices := map[string]v1alpha1.DeviceStatus{}
	for _, device := range status.Devices {
		devices[device.Name] = device
	}
	allocated := map[types.UID]v1alpha1.AllocatedClaim{}
	for _, claim := range claims {
		allocated[claim.UID] = claim
	}
	lost := map[types.UID]bool{}
	for _, conflict := range status.Conflicts {
		lost[conflict.UID] = true
		if !conflict.PendingEviction && !slices.ContainsFunc(conflict.Devices, func(name string) bool { return taken(devices, allocated, name, conflict.UID) }) {
			retries = append(retries, Retry{
				UID: conflict.UID, Namespace: conflict.Namespace, Name: conflict.Name, Unsure: unsure(devices, conflict.Devices),
			})
		}
	}
	for _, claim := range claims {
		if len(claim.Devices) == 0 {
			continue // Prepared or not, it holds nothing by which to tell.
		}
		if lost[claim.UID] || slices.ContainsFunc(claim.Devices, func(name string) bool { return taken(devices, allocated, name, claim.UID) }) {
			continue
		}
		retry := Retry{
			UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name,
			Unsure: unsure(devices, claim.Devices), WaitBudget: unpreparedPatience,
		}
		switch state, some := stateOf(devices, claim); {
		case !some:
			retries = append(retries, retry)
		case state == v1alpha1.HoldRestored:
			retry.WaitBudget = expectedPatience
			retries = append(retries, retry)
		default:
			for _, pod := range waiting[claim.UID] {
				retry.Pod, retry.WaitBudget = pod, preparedPatience
				retries = append(retries, retry)
			}
		}
	}
	return retries
}

// taken reports whether a device cannot be prepared for the claim: unknown, faulty, or somebody else's, be it in part. A GPU is
// said to be held by each claim for a partition of it that is still to be made; what claims are allocated tells those apart. Of a
// device that is shared, the claim's share has to fit beside those of others.
func taken(devices map[string]v1alpha1.DeviceStatus, allocated map[types.UID]v1alpha1.AllocatedClaim, name string, claim types.UID) bool {
	device, known := known(devices, name)
	if !known || device.UnhealthyReason != "" {
		return true
	}
	share, used := shareOf(allocated[claim], name), int64(0)
	for _, d := range devices {
		for _, h := range d.Holders {
			own := h.Kind == v1alpha1.HolderClaim && h.UID == claim
			switch {
			case own || !overlap(d.Name, name) || beside(d.Name, allocated[h.UID].Devices, name):
			case share > 0 && h.Memory > 0 && d.Name == name:
				used += h.Memory
			default:
				return true
			}
		}
	}
	return share > 0 && device.Sharing != nil && share+used > device.Sharing.Memory
}

// shareOf is how much of a device's memory a claim is allocated; zero where it has all of it, or nothing.
func shareOf(claim v1alpha1.AllocatedClaim, name string) int64 {
	at := slices.IndexFunc(claim.Shares, func(s v1alpha1.AllocatedShare) bool { return s.Device == name })
	if at < 0 {
		return 0
	}
	return claim.Shares[at].Memory
}

// beside reports whether a holder of a GPU has parts of it only, as far as it is known what it is allocated, and not the one by
// name.
func beside(gpu string, allocated []string, name string) bool {
	parts := slices.DeleteFunc(slices.Clone(allocated), func(other string) bool { return device.GPUName(other) != gpu })
	return len(parts) > 0 && !slices.ContainsFunc(parts, func(other string) bool { return overlap(other, name) })
}

// known is what the status says of a device. Of a partition that is still to be made it says all with the GPU.
func known(devices map[string]v1alpha1.DeviceStatus, name string) (status v1alpha1.DeviceStatus, known bool) {
	if status, known = devices[name]; !known {
		status, known = devices[device.GPUName(name)]
	}
	return status, known
}

// unsure reports whether one of some devices is known by its GPU only.
func unsure(devices map[string]v1alpha1.DeviceStatus, names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return devices[name].Name == "" })
}

// stateOf is the state of a claim's holds: expected only if all are; none where one is missing.
func stateOf(devices map[string]v1alpha1.DeviceStatus, claim v1alpha1.AllocatedClaim) (state v1alpha1.HoldState, some bool) {
	state = v1alpha1.HoldRestored
	for _, name := range claim.Devices {
		device, _ := known(devices, name)
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

// Retryable reports whether a pod is one that kubelet could start on the node if its claims were prepared: bound to it, living,
// and with no container running. After a reboot its phase may still be Running. It is a pure function.
func Retryable(pod *corev1.Pod, node string) bool {
	if pod.Spec.NodeName != node || pod.DeletionTimestamp != nil || terminal(pod) {
		return false
	}
	for _, statuses := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		if slices.ContainsFunc(statuses, func(s corev1.ContainerStatus) bool { return s.State.Running != nil }) {
			return false
		}
	}
	return true
}

// Unstarted reports whether kubelet has made no sandbox for a pod: a container of it, or the image for one, comes after that.
// Kubelets before 1.36 say so late, when the image is there. It is a pure function.
func Unstarted(pod *corev1.Pod) bool {
	return !hasStarted(pod) && !slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReadyToStartContainers && c.Status == corev1.ConditionTrue
	})
}

// Hopeless reports whether the node refuses a claim's parameters whenever kubelet asks: they are the author's to correct, in another
// claim. Of those that only the devices tell to be wrong nothing is known here. It is a pure function.
func Hopeless(claim *resourceapi.ResourceClaim, driver string) bool {
	for result := range allocated(claim, driver) {
		whole := device.GPUName(result.Device) == result.Device
		if _, err := parametersv1beta1.Allocated(claim, driver, result, whole); err != nil {
			return true
		}
	}
	return false
}

// retrier annotates pods that kubelet could start now.
type retrier struct {
	client client.Client
	// live reads pods from the API server: those that are not Pending are not watched, and of the others not everything is kept.
	live    client.Reader
	claims  claimReader
	metrics *metrics
	now     func() time.Time

	mu    sync.Mutex
	nodes map[string]map[types.UID]*patience
}

// patience is when it is time for the next nudge of a claim, how long after it for the one that follows, and how many there were.
type patience struct {
	next     time.Time
	interval time.Duration
	retries  int
}

const (
	// Between two nudges of one claim. What fails again and again is soon left to kubelet's own rhythm.
	retryInterval    = 5 * time.Second
	retryIntervalMax = 80 * time.Second
	// retriesMax is how often a pod is nudged whose claim is prepared, or may not be prepared yet for all that is known here. By
	// the last one, after 80 s, kubelet has tried by itself: whatever keeps the pod then is not ours.
	retriesMax = 5
)

// key is what a patience is for.
func (n Retry) key() types.UID {
	if n.Pod != "" {
		return n.Pod
	}
	return n.UID
}

func (n *retrier) register(m manager.Manager) error {
	err := builder.ControllerManagedBy(m).Named("nudge").
		For(&v1alpha1.GPUNode{}).
		Watches(&resourceapi.ResourceClaim{}, claimHandler(n.claims.driver)).
		// One more pod for a claim that is allocated changes neither.
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(nodeOfPod), builder.WithPredicates(bound)).
		WatchesRawSource(n.claims.source()).
		WithOptions(options(1)).
		Complete(n)
	if err != nil {
		return fmt.Errorf("register nudge: %w", err)
	}
	return nil
}

// bound are events of pods that are, or have just been, bound to a node. Only Pending pods are watched.
var bound = predicate.Funcs{
	CreateFunc:  func(e event.CreateEvent) bool { return onNode(e.Object) },
	UpdateFunc:  func(e event.UpdateEvent) bool { return onNode(e.ObjectNew) && !onNode(e.ObjectOld) },
	DeleteFunc:  func(event.DeleteEvent) bool { return false },
	GenericFunc: func(event.GenericEvent) bool { return false },
}

func onNode(o client.Object) bool {
	pod, ok := o.(*corev1.Pod)
	return ok && pod.Spec.NodeName != ""
}

func nodeOfPod(_ context.Context, o client.Object) []reconcile.Request {
	pod, ok := o.(*corev1.Pod)
	if !ok || len(pod.Spec.ResourceClaims) == 0 && pod.Status.ExtendedResourceClaimStatus == nil {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: pod.Spec.NodeName}}}
}

// Reconcile implements reconcile.Reconciler for one node.
func (n *retrier) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	node := &v1alpha1.GPUNode{}
	if err := n.client.Get(ctx, request.NamespacedName, node); err != nil {
		if apierrors.IsNotFound(err) {
			n.due(request.Name, nil)
			return reconcile.Result{}, nil
		}
		return reconcile.Result{}, err
	}
	claims, err := n.claims.on(ctx, request.Name)
	if err != nil {
		return reconcile.Result{}, err
	}
	waiting, err := n.waiting(ctx, request.Name, claims)
	if err != nil {
		return reconcile.Result{}, err
	}
	due, wait := n.due(request.Name, Retries(node.Status, claims, waiting))
	var errs []error
	for _, retry := range due {
		errs = append(errs, n.retry(ctx, request.Name, retry))
	}
	return reconcile.Result{RequeueAfter: wait}, errors.Join(errs...)
}

// waiting are the Pending pods of a node that have one of the claims reserved, by the claim's UID. Nothing is read that is not
// in the cache.
func (n *retrier) waiting(ctx context.Context, node string, claims []v1alpha1.AllocatedClaim) (map[types.UID][]types.UID, error) {
	waiting := map[types.UID][]types.UID{}
	for _, c := range claims {
		claim := &resourceapi.ResourceClaim{}
		key := types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
		if err := n.client.Get(ctx, key, claim); client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("get claim %s: %w", key, err)
		}
		for _, consumer := range claim.Status.ReservedFor {
			pod := &corev1.Pod{}
			key.Name = consumer.Name
			if err := n.client.Get(ctx, key, pod); client.IgnoreNotFound(err) != nil {
				return nil, fmt.Errorf("get pod %s: %w", key, err)
			}
			if pod.UID == consumer.UID && pod.Status.Phase == corev1.PodPending && Retryable(pod, node) {
				waiting[claim.UID] = append(waiting[claim.UID], pod.UID)
			}
		}
	}
	return waiting, nil
}

// due picks those whose time has come, and says when the next one's will.
func (n *retrier) due(node string, retries []Retry) (due []Retry, wait time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.nodes == nil {
		n.nodes = map[string]map[types.UID]*patience{}
	}
	now, before, after := n.now(), n.nodes[node], map[types.UID]*patience{}
	for _, retry := range retries {
		p := before[retry.key()]
		if p == nil {
			p = &patience{next: now.Add(retry.WaitBudget), interval: retryInterval}
		}
		after[retry.key()] = p
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

// retry annotates the claim's pods on the node, but those that would be refused for a claim's parameters.
func (n *retrier) retry(ctx context.Context, node string, retry Retry) error {
	claim := &resourceapi.ResourceClaim{}
	if err := n.client.Get(ctx, types.NamespacedName{Namespace: retry.Namespace, Name: retry.Name}, claim); err != nil {
		return client.IgnoreNotFound(err)
	}
	if claim.UID != retry.UID {
		return nil
	}
	for _, consumer := range claim.Status.ReservedFor {
		if retry.Pod != "" && retry.Pod != consumer.UID {
			continue
		}
		pod := &corev1.Pod{}
		key := types.NamespacedName{Namespace: retry.Namespace, Name: consumer.Name}
		switch err := n.live.Get(ctx, key, pod); {
		case apierrors.IsNotFound(err):
			continue
		case err != nil:
			return fmt.Errorf("get pod %s: %w", key, err)
		case pod.UID != consumer.UID, !Retryable(pod, node), retry.Pod != "" && !Unstarted(pod):
			continue
		}
		hopeless, err := n.hopeless(ctx, pod)
		if err != nil {
			return err
		}
		if hopeless {
			continue
		}
		if err := n.annotate(ctx, pod); err != nil {
			return err
		}
	}
	return nil
}

// hopeless reports whether one of a pod's claims is: kubelet has all of them prepared at once, or none.
func (n *retrier) hopeless(ctx context.Context, pod *corev1.Pod) (bool, error) {
	for name := range resourceclaim.PodClaims(pod) {
		claim := &resourceapi.ResourceClaim{}
		key := types.NamespacedName{Namespace: pod.Namespace, Name: name}
		if err := n.client.Get(ctx, key, claim); client.IgnoreNotFound(err) != nil {
			return false, fmt.Errorf("get claim %s: %w", key, err)
		}
		if Hopeless(claim, n.claims.driver) {
			return true, nil
		}
	}
	return false, nil
}

func (n *retrier) annotate(ctx context.Context, pod *corev1.Pod) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid":         pod.UID,
		"annotations": map[string]string{RetryAnnotation: n.now().UTC().Format(time.RFC3339Nano)},
	}})
	if err != nil {
		return fmt.Errorf("encode annotation: %w", err)
	}
	err = n.client.Patch(ctx, pod, client.RawPatch(types.MergePatchType, patch))
	if err == nil {
		n.metrics.retries.Inc()
		return nil
	}
	// A pod of the same name that came after it is none of this claim's.
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return fmt.Errorf("annotate pod %s/%s: %w", pod.Namespace, pod.Name, err)
}
