// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/owner"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Removal is what to do about a pod with limits that has a tainted device.
type Removal struct {
	// Device that the pod has, and a taint of it that ends the pod; empty if none does.
	Device string
	Taint  v1alpha1.DeviceTaint
	// Due is when the pod is to be evicted: later than now if it tolerates the taint for a while.
	Due time.Time
	// Refused is why it is not evicted all the same.
	Refused string
}

// PlanRemoval returns whether to evict a pod that has devices by limits. Both objects have to be read live. It is a pure function.
//
// It evicts what Kubernetes evicts of pods with claims: each pod that has a device with a taint of effect NoExecute and does not tolerate it,
// whatever owner it has. The tolerations are those of the pod, as for taints of nodes. The GPUNode's word is not enough: its pod must
// be on that node and request a resource of Tandem, and a taint of a rule must be in the spec, which the agent cannot write. What a silent
// agent has reported may be over.
func PlanRemoval(node *v1alpha1.GPUNode, pod *corev1.Pod, limits device.Resources, now time.Time) (r Removal) {
	if availability.IsSilent(now, node.Status) || pod.DeletionTimestamp != nil || podstatus.Ended(pod) || !mayHave(pod, node.Name, limits) {
		return Removal{}
	}
	for _, d := range node.Status.Devices {
		if !slices.ContainsFunc(heldByPods(d), func(p v1alpha1.PodReference) bool { return owner.Is(pod, p.UID) }) {
			continue
		}
		for _, taint := range d.Taints {
			due, ends := endsAt(node, pod, d.Name, taint)
			if ends && (r.Device == "" || due.Before(r.Due)) {
				r.Device, r.Taint, r.Due = d.Name, taint, due
			}
		}
	}
	if r.Device != "" {
		r.Refused = comesBack(pod)
	}
	return r
}

// mayHave reports whether a pod may have a device of a node by a limit, whatever the GPUNode says.
func mayHave(pod *corev1.Pod, node string, limits device.Resources) bool {
	return pod.Spec.NodeName == node && len(requested(pod, limits)) > 0
}

// faultTaints are the keys of taints that are not of a rule.
var faultTaints = []string{device.TaintUnhealthy, device.TaintXID, device.TaintGPULost}

// endsAt returns when a taint of a device ends a pod. ends is false for a taint that does not. Value and time of a rule's taint are those of the
// spec.
func endsAt(node *v1alpha1.GPUNode, pod *corev1.Pod, name string, taint v1alpha1.DeviceTaint) (at time.Time, ends bool) {
	if taint.Rule == "" {
		ends = slices.Contains(faultTaints, taint.Key)
	} else if i := slices.IndexFunc(node.Spec.Taints, func(of v1alpha1.RuleTaint) bool { return of.Rule == taint.Rule }); i >= 0 {
		of := node.Spec.Taints[i]
		ends = of.Key == taint.Key && of.Effect == taint.Effect && (of.Device == "" || of.Device == name)
		taint.Taint = of.Taint
	}
	if !ends || taint.Effect != v1alpha1.TaintNoExecute {
		return at, false
	}
	at = ptr.Deref(taint.Since, metav1.Time{}).Time
	like := &corev1.Taint{Key: taint.Key, Value: taint.Value, Effect: corev1.TaintEffectNoExecute}
	for _, t := range pod.Spec.Tolerations {
		if t.ToleratesTaint(klog.Logger{}, like, false) {
			if t.TolerationSeconds == nil {
				return at, false
			}
			return at.Add(time.Duration(min(max(*t.TolerationSeconds, 0), maxTolerationSeconds)) * time.Second), true
		}
	}
	return at, true
}

// comesBack returns why an eviction would not move a pod; empty if it may.
func comesBack(pod *corev1.Pod) string {
	of := metav1.GetControllerOfNoCopy(pod)
	switch _, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; {
	case mirror:
		return "it is a static pod, which kubelet would start again"
	case of != nil && of.Kind == "DaemonSet":
		return "DaemonSet " + of.Name + " would start it on the same node again"
	}
	return ""
}

// endsPods reports whether a device has a taint that ends the pods that have it.
func endsPods(d v1alpha1.DeviceStatus) bool {
	return slices.ContainsFunc(d.Taints, func(t v1alpha1.DeviceTaint) bool { return t.Effect == v1alpha1.TaintNoExecute })
}

// heldByPods returns the pods that have a device by limits, if a taint of it ends pods.
func heldByPods(d v1alpha1.DeviceStatus) (pods []v1alpha1.PodReference) {
	if !endsPods(d) {
		return nil
	}
	for _, h := range d.Holders {
		if h.Kind == v1alpha1.HolderPod {
			pods = append(pods, h.Pods...)
		}
	}
	return pods
}

// concerned returns the pods that taints of a node's devices may end, each once, by UID.
func concerned(node *v1alpha1.GPUNode) (pods []v1alpha1.PodReference) {
	for _, d := range node.Status.Devices {
		pods = append(pods, heldByPods(d)...)
	}
	pods = slices.DeleteFunc(pods, func(p v1alpha1.PodReference) bool { return p.Name == "" })
	slices.SortStableFunc(pods, func(a, b v1alpha1.PodReference) int { return cmp.Compare(a.UID, b.UID) })
	return slices.CompactFunc(pods, func(a, b v1alpha1.PodReference) bool { return a.UID == b.UID })
}

// evictor evicts the pods with limits from tainted devices. Kubernetes does that for pods with claims.
type evictor struct {
	cluster
	evictions *evictions

	turns map[string]podTurn // by node
}

// podTurn is how far the pass over a node's pods has come, and when the first of those before has to be looked at again. The next part begins after
// UID last: the list may have shrunk by then.
type podTurn struct {
	last  types.UID
	again time.Duration
}

const (
	// podsATurn is how many pods are read live before other nodes have their turn.
	podsATurn = 16
	// blockedInterval is when an eviction that the API server refused is tried again. kubectl drain waits as long. deniedInterval is for one
	// that an admission policy denied.
	blockedInterval = 5 * time.Second
	deniedInterval  = 5 * time.Minute
	// lookInterval is how often the pods that have devices with such taints are looked at although nothing has changed: an agent may have
	// been silent, or an eviction may have failed, when it was their turn.
	lookInterval = time.Minute
	// answerTime limits one eviction. While a disruption budget is being updated, the API server answers that the client is to ask again, and
	// client-go does so ten times, up to ten seconds apart.
	answerTime = 3 * time.Second
	// maxTolerationSeconds bounds what a pod says, which may not fit into a Duration.
	maxTolerationSeconds = 1 << 31
)

var errNoAnswer = errors.New("the API server did not decide in time, as while a disruption budget is being updated")

func (r *evictor) register(m manager.Manager) error {
	concerns := changed(func(n *v1alpha1.GPUNode) any {
		var of []any
		for _, d := range n.Status.Devices {
			if held := heldByPods(d); len(held) > 0 {
				of = append(of, d.Taints, held)
			}
		}
		return []any{n.UID, n.Spec.Taints, of}
	})
	return forGPUNodes(m, "evict", 1, concerns).Complete(r) // evictions is not safe for concurrent use
}

// Reconcile implements reconcile.Reconciler for one node. It is idempotent.
func (r *evictor) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	node := &v1alpha1.GPUNode{}
	if err := r.client.Get(ctx, request.NamespacedName, node); client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, err
	}
	pods := concerned(node)
	t := r.turns[request.Name]
	pods = slices.DeleteFunc(pods, func(p v1alpha1.PodReference) bool { return p.UID <= t.last })
	var errs []error
	for _, pod := range pods[:min(podsATurn, len(pods))] {
		t.last = pod.UID
		again, err := r.remove(ctx, request.Name, pod)
		if again > 0 && (t.again == 0 || again < t.again) {
			t.again = again
		}
		errs = append(errs, err)
	}
	if len(pods) > podsATurn {
		r.turns[request.Name] = t
		return requeue(anotherTurn, errs)
	}
	delete(r.turns, request.Name)
	if t.again == 0 && t.last != "" {
		t.again = lookInterval
	}
	return requeue(t.again, errs)
}

// remove evicts a pod if that is due. again is when to look at it again; zero for when the GPUNode changes.
func (r *evictor) remove(ctx context.Context, node string, named v1alpha1.PodReference) (again time.Duration, err error) {
	pod, now := &corev1.Pod{}, &v1alpha1.GPUNode{}
	key := types.NamespacedName{Namespace: named.Namespace, Name: named.Name}
	if err := r.live.Get(ctx, key, pod); err != nil {
		return 0, client.IgnoreNotFound(fmt.Errorf("get pod %s, which has a tainted device: %w", key, err))
	}
	// What a forged status names costs no more than this.
	if !owner.Is(pod, named.UID) || !mayHave(pod, node, r.limits) {
		return 0, nil
	}
	// The node is read last: its taint may be over.
	if err := r.live.Get(ctx, types.NamespacedName{Name: node}, now); err != nil {
		return 0, client.IgnoreNotFound(err)
	}
	plan, err := r.plan(ctx, now, pod)
	if err != nil || plan.Device == "" {
		return 0, err
	}
	say := func(kind, reason, format string, args ...any) {
		has := fmt.Sprintf("Pod %s has %s of node %s, which has the taint %s", pod.Name, plan.Device, node, plan.Taint)
		r.recorder.Eventf(pod, nil, kind, reason, "Evict", "%s", regarding.Shorten(has+fmt.Sprintf(format, args...), noteLimit))
	}
	losses := lossesOf(node, []string{plan.Device}, pod)
	wait := max(plan.Due.Sub(r.now()), r.evictions.wait(losses))
	switch {
	case wait > 0:
		return wait, nil
	case plan.Refused != "":
		say(corev1.EventTypeWarning, "NotEvicted", ". It is not evicted: %s", plan.Refused)
		return 0, nil
	}
	evicted, refused, err := evict(ctx, r.client, pod)
	r.metrics.evicted(causeTaint, evicted, refused)
	switch {
	case err != nil:
		return 0, err
	case refused != nil:
		say(corev1.EventTypeWarning, "NotEvicted", ". The API server does not allow to evict it now, and is asked again: %s", refused)
		if apierrors.IsForbidden(refused) {
			return deniedInterval, nil
		}
		return blockedInterval, nil
	case evicted:
		r.evictions.record(losses)
		klog.FromContext(ctx).Info("Evicted pod with a tainted device", "pod", klog.KObj(pod), "node", node, "device", plan.Device, "taint", plan.Taint.String())
		say(corev1.EventTypeNormal, "EvictedByTaint", ", and was evicted")
	}
	return 0, nil
}

// plan returns PlanRemoval's answer by the taints that stand. A rule that has ended or cannot be read hides no other taint. The error of such a rule
// is returned only if no other taint ends the pod now. It removes the entries of such rules from the node.
func (r *evictor) plan(ctx context.Context, node *v1alpha1.GPUNode, pod *corev1.Pod) (Removal, error) {
	var unread error
	for { // each round but the last one removes an entry
		plan := PlanRemoval(node, pod, r.limits, r.now())
		if plan.Device == "" || plan.Due.After(r.now()) {
			return plan, unread
		}
		if plan.Taint.Rule == "" {
			return plan, nil
		}
		stands, err := r.stands(ctx, plan.Taint.Rule, node)
		if stands {
			return plan, nil
		}
		if err != nil {
			unread = errors.Join(unread, fmt.Errorf("get DeviceTaintRule %s, whose taint ends pod %s/%s: %w", plan.Taint.Rule, pod.Namespace, pod.Name, err))
		}
		node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, func(t v1alpha1.RuleTaint) bool { return t.Rule == plan.Taint.Rule })
	}
}

// stands reports whether a rule still says what the GPUNode has of it. It may have ended or changed while no controller ran, or a moment ago, before
// the tainter has written the change.
func (r *evictor) stands(ctx context.Context, name string, node *v1alpha1.GPUNode) (bool, error) {
	rule := &resourceapi.DeviceTaintRule{}
	if err := r.live.Get(ctx, types.NamespacedName{Name: name}, rule); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	current := RuleTaints([]*resourceapi.DeviceTaintRule{rule}, r.driver, node.Name, node.Status.Devices)
	return len(current) > 0 && slices.ContainsFunc(node.Spec.Taints, func(t v1alpha1.RuleTaint) bool {
		return apiequality.Semantic.DeepEqual(t, current[0])
	}), nil
}

// evict evicts a pod with its own grace period. evicted is false if the pod is gone. refused is the answer of a disruption budget or an admission
// policy. An error, with which the reconciler retries, may say that the pod has changed.
//
// A pod that does not run is evicted only in the version that was read: it may have started. For other pods the API server counts an eviction against the
// budget before it looks at the version (k8s.io/kubernetes pkg/registry/core/pod/storage/eviction.go), and kubelet writes the health of the device
// into the pod's status at that moment.
func evict(ctx context.Context, c client.Client, pod *corev1.Pod) (evicted bool, refused, err error) {
	preconditions := &metav1.Preconditions{UID: ptr.To(pod.UID)}
	if pod.Status.Phase != corev1.PodRunning {
		preconditions.ResourceVersion = ptr.To(pod.ResourceVersion)
	}
	eviction := &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Name: pod.Name, Namespace: pod.Namespace},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: preconditions},
	}
	limited, cancel := context.WithTimeoutCause(ctx, answerTime, errNoAnswer)
	defer cancel()
	switch err := c.SubResource("eviction").Create(limited, pod, eviction); {
	case apierrors.IsNotFound(err):
		return false, nil, nil
	case apierrors.IsTooManyRequests(err), apierrors.IsForbidden(err):
		return false, err, nil
	case apierrors.IsInternalError(err) && strings.Contains(err.Error(), "PodDisruptionBudget"):
		return false, err, nil // the pod has two
	case err != nil && ctx.Err() == nil && limited.Err() != nil:
		return false, errNoAnswer, nil
	case err != nil:
		return false, nil, fmt.Errorf("evict pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return true, nil, nil
}
