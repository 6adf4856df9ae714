// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	schedulinghelper "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// namedNodes is how many nodes a sentence names; an event is no inventory.
const namedNodes = 5

// MayRun is a question to be put to many nodes: whether a pod may run on one, as far as selectors, affinity and taints say. It is a
// pure function.
func MayRun(pod *corev1.Pod) func(*corev1.Node) bool {
	affinity := nodeaffinity.GetRequiredNodeAffinity(pod)
	keepsAway := func(taint *corev1.Taint) bool {
		return taint.Effect == corev1.TaintEffectNoSchedule || taint.Effect == corev1.TaintEffectNoExecute
	}
	return func(node *corev1.Node) bool {
		if match, err := affinity.Match(node); err != nil || !match {
			return false
		}
		_, untolerated := schedulinghelper.FindMatchingUntoleratedTaint(klog.Background(), node.Spec.Taints, pod.Spec.Tolerations, keepsAway, false)
		return !untolerated
	}
}

// Explain says why none of the nodes that a pod may run on has so many GPUs for it; empty where one has, so that something else is
// the reason, and where there is no GPU at all. It is a pure function, and names nodes only: whose pods hold the GPUs is not everybody's business.
func Explain(nodes []v1alpha1.GPUNode, asked int64) string {
	var with []v1alpha1.GPUNode
	var total, free int64
	for _, node := range nodes {
		counts := node.Status.Counts
		if counts.Total == 0 {
			continue
		}
		if int64(counts.Free) >= asked {
			return ""
		}
		with = append(with, node)
		total, free = total+int64(counts.Total), free+int64(counts.Free)
	}
	if len(with) == 0 {
		return ""
	}
	slices.SortFunc(with, func(a, b v1alpha1.GPUNode) int {
		return cmp.Or(cmp.Compare(b.Status.Counts.Free, a.Status.Counts.Free), cmp.Compare(a.Name, b.Name))
	})
	faulty := slices.ContainsFunc(with, func(n v1alpha1.GPUNode) bool { return n.Status.Counts.Faulty > 0 })
	held := "held"
	if faulty {
		held = "held or faulty"
	}
	switch {
	case free > 0:
		return fmt.Sprintf("no node has %s free: %s", gpus(asked), list(with, func(n v1alpha1.GPUNode) string {
			return fmt.Sprintf("%s has %d of %d (%s)", n.Name, n.Status.Counts.Free, n.Status.Counts.Total, holders(n.Status.Counts))
		}))
	case len(with) == 1:
		return fmt.Sprintf("%s of %s are %s: %s", all(total), with[0].Name, held, holders(with[0].Status.Counts))
	}
	return fmt.Sprintf("%s of %d nodes are %s: %s", all(total), len(with), held, list(with, func(n v1alpha1.GPUNode) string {
		return fmt.Sprintf("%s (%s)", n.Name, holders(n.Status.Counts))
	}))
}

func gpus(n int64) string {
	if n == 1 {
		return "1 GPU"
	}
	return fmt.Sprintf("%d GPUs", n)
}

func all(n int64) string {
	if n == 1 {
		return "all GPUs"
	}
	return fmt.Sprintf("all %d GPUs", n)
}

// holders is "5 by limits, 3 by claims", without those that are none.
func holders(counts v1alpha1.DeviceCounts) string {
	var parts []string
	for _, part := range []struct {
		n    int32
		what string
	}{{counts.Limits, "by limits"}, {counts.Claims, "by claims"}, {counts.Faulty, "faulty"}} {
		if part.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", part.n, part.what))
		}
	}
	return strings.Join(parts, ", ")
}

func list(nodes []v1alpha1.GPUNode, describe func(v1alpha1.GPUNode) string) string {
	var parts []string
	for _, node := range nodes[:min(namedNodes, len(nodes))] {
		parts = append(parts, describe(node))
	}
	if more := len(nodes) - namedNodes; more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(parts, ", ")
}

// Ours are the names by which pods ask for our GPUs.
type Ours struct {
	Resources map[corev1.ResourceName]bool
	Classes   map[string]bool
}

// NewOurs finds the classes of a driver. A class is ours if its selectors name the driver: what else they select is the
// scheduler's business. It is a pure function.
func NewOurs(driver, resource string, classes []resourceapi.DeviceClass) Ours {
	o := Ours{Resources: map[corev1.ResourceName]bool{corev1.ResourceName(resource): true}, Classes: map[string]bool{}}
	for _, class := range classes {
		if !slices.ContainsFunc(class.Spec.Selectors, func(s resourceapi.DeviceSelector) bool {
			return s.CEL != nil && (strings.Contains(s.CEL.Expression, `"`+driver+`"`) || strings.Contains(s.CEL.Expression, `'`+driver+`'`))
		}) {
			continue
		}
		o.Classes[class.Name] = true
		o.Resources[corev1.ResourceName(resourceapi.ResourceDeviceClassPrefix+class.Name)] = true
		if class.Spec.ExtendedResourceName != nil {
			o.Resources[corev1.ResourceName(*class.Spec.ExtendedResourceName)] = true
		}
	}
	return o
}

// Asked is how many of our GPUs a pod waits for, by limits and by claims that have none yet; claim finds a claim of its
// namespace by name, or nil. It is a pure function.
func (o Ours) Asked(pod *corev1.Pod, claim func(name string) *resourceapi.ResourceClaim) int64 {
	var asked, atFirst int64
	for _, c := range pod.Spec.Containers {
		asked += o.limits(c)
	}
	for _, c := range pod.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			asked += o.limits(c)
		} else {
			atFirst = max(atFirst, o.limits(c))
		}
	}
	asked = max(asked, atFirst)
	for _, reference := range pod.Spec.ResourceClaims {
		name := claimName(pod, reference)
		if name == "" {
			continue
		}
		if c := claim(name); c != nil && c.Status.Allocation == nil {
			asked += o.requests(c)
		}
	}
	return asked
}

func (o Ours) limits(c corev1.Container) (n int64) {
	for name, quantity := range c.Resources.Limits {
		if o.Resources[name] {
			n += quantity.Value()
		}
	}
	return n
}

func (o Ours) requests(claim *resourceapi.ResourceClaim) (n int64) {
	for _, r := range claim.Spec.Devices.Requests {
		if r.Exactly != nil && o.Classes[r.Exactly.DeviceClassName] {
			n += max(1, r.Exactly.Count)
		}
		for _, s := range r.FirstAvailable {
			if o.Classes[s.DeviceClassName] {
				n += max(1, s.Count)
				break
			}
		}
	}
	return n
}

// claimName is the name of the claim that a pod means; empty while the one made for it is not there yet.
func claimName(pod *corev1.Pod, reference corev1.PodResourceClaim) string {
	if reference.ResourceClaimName != nil {
		return *reference.ResourceClaimName
	}
	for _, status := range pod.Status.ResourceClaimStatuses {
		if status.Name == reference.Name && status.ResourceClaimName != nil {
			return *status.ResourceClaimName
		}
	}
	return ""
}

// explainer tells pods that wait for a GPU who has them.
type explainer struct {
	client           client.Client
	driver, resource string
	recorder         events.EventRecorder
	now              func() time.Time

	mu   sync.Mutex
	told map[types.NamespacedName]told
}

// told is what a pod was told last, and when.
type told struct {
	pod      types.UID
	sentence string
	at       time.Time
}

const (
	// tellEvery bounds the events of a pod.
	tellEvery = time.Minute
	// countAgain is how soon the counts of the nodes are read again that have not heard yet what the scheduler knows. It grows as
	// the pod waits, since something else may be what it waits for.
	countAgain = 10 * time.Second
)

func (x *explainer) register(m manager.Manager) error {
	// The scheduler writes the condition anew at every try; from the first on the pod is looked at by the clock.
	waits := predicate.Funcs{
		UpdateFunc: func(e event.UpdateEvent) bool { return !unschedulable(e.ObjectOld) && unschedulable(e.ObjectNew) },
		CreateFunc: func(e event.CreateEvent) bool { return unschedulable(e.Object) },
	}
	err := builder.ControllerManagedBy(m).Named("explain").
		Watches(&corev1.Pod{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(waits)).
		WithOptions(options(1)).
		Complete(x)
	if err != nil {
		return fmt.Errorf("register explain: %w", err)
	}
	return nil
}

func unschedulable(o client.Object) bool {
	pod, ok := o.(*corev1.Pod)
	return ok && pod.Spec.NodeName == "" && slices.ContainsFunc(pod.Status.Conditions, refused)
}

// refused is the scheduler's word that a pod fits nowhere.
func refused(c corev1.PodCondition) bool {
	return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
}

// waitsSince is when the scheduler refused the pod first; zero where it has not.
func waitsSince(pod *corev1.Pod) time.Time {
	if i := slices.IndexFunc(pod.Status.Conditions, refused); i >= 0 {
		return pod.Status.Conditions[i].LastTransitionTime.Time
	}
	return time.Time{}
}

// Reconcile implements reconcile.Reconciler for one pod. It is idempotent.
func (x *explainer) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	pod := &corev1.Pod{}
	err := x.client.Get(ctx, request.NamespacedName, pod)
	if apierrors.IsNotFound(err) || err == nil && (!unschedulable(pod) || pod.DeletionTimestamp != nil) {
		x.forget(request.NamespacedName)
		return reconcile.Result{}, nil
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	asked, err := x.asked(ctx, pod)
	if err != nil || asked == 0 {
		return reconcile.Result{}, err
	}
	nodes, err := x.nodes(ctx, pod)
	if err != nil {
		return reconcile.Result{}, err
	}
	sentence := Explain(nodes, asked)
	if sentence == "" {
		return reconcile.Result{RequeueAfter: min(max(countAgain, x.now().Sub(waitsSince(pod))), tellEvery)}, nil
	}
	tell, again := x.tell(request.NamespacedName, pod.UID, sentence)
	if tell {
		x.recorder.Eventf(pod, nil, corev1.EventTypeNormal, "GPUsHeld", "Wait", "%s", note(sentence))
	}
	return reconcile.Result{RequeueAfter: again}, nil
}

func (x *explainer) asked(ctx context.Context, pod *corev1.Pod) (int64, error) {
	var classes resourceapi.DeviceClassList
	if err := x.client.List(ctx, &classes, client.UnsafeDisableDeepCopy); err != nil {
		return 0, fmt.Errorf("list DeviceClasses: %w", err)
	}
	var failed error
	asked := NewOurs(x.driver, x.resource, classes.Items).Asked(pod, func(name string) *resourceapi.ResourceClaim {
		claim := &resourceapi.ResourceClaim{}
		if err := x.client.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: name}, claim); err != nil {
			failed = client.IgnoreNotFound(err)
			return nil
		}
		return claim
	})
	return asked, failed
}

// nodes are those with GPUs that the pod may run on.
func (x *explainer) nodes(ctx context.Context, pod *corev1.Pod) ([]v1alpha1.GPUNode, error) {
	var gpus v1alpha1.GPUNodeList
	var nodes corev1.NodeList
	// Nothing is changed, and there may be many.
	for _, list := range []client.ObjectList{&gpus, &nodes} {
		if err := x.client.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return nil, fmt.Errorf("list nodes: %w", err)
		}
	}
	byName := make(map[string]*corev1.Node, len(nodes.Items))
	for i := range nodes.Items {
		byName[nodes.Items[i].Name] = &nodes.Items[i]
	}
	mayRun := MayRun(pod)
	return slices.DeleteFunc(gpus.Items, func(n v1alpha1.GPUNode) bool {
		node := byName[n.Name]
		return node == nil || n.Status.Counts.Total == 0 || !mayRun(node)
	}), nil
}

// tell decides whether a pod is told a sentence now, and when to look at it again.
func (x *explainer) tell(key types.NamespacedName, pod types.UID, sentence string) (now bool, again time.Duration) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.told == nil {
		x.told = map[types.NamespacedName]told{}
	}
	last := x.told[key]
	if last.pod != pod {
		last = told{}
	}
	if left := tellEvery - x.now().Sub(last.at); left > 0 {
		return false, left
	}
	if last.sentence == sentence {
		return false, tellEvery
	}
	x.told[key] = told{pod, sentence, x.now()}
	return true, tellEvery
}

func (x *explainer) forget(key types.NamespacedName) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.told, key)
}
