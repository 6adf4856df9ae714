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
	"github.com/tandem-gpu/tandem/internal/capacity"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// namedNodes is how many nodes a sentence names; an event is no inventory.
const namedNodes = 5

// MayRun is a question to be put to many nodes: whether a pod may run on one, as far as selectors, affinity and taints say. It is
// a pure function.
func MayRun(pod *corev1.Pod) func(*corev1.Node) bool {
	affinity := nodeaffinity.GetRequiredNodeAffinity(pod)
	keepsAway := func(taint *corev1.Taint) bool {
		return taint.Effect == corev1.TaintEffectNoSchedule || taint.Effect == corev1.TaintEffectNoExecute
	}
	return func(node *corev1.Node) bool {
		if match, err := affinity.Match(node); err != nil || !match {
			return false
		}
		_, untolerated := schedulinghelper.FindMatchingUntoleratedTaint(
			klog.Background(), node.Spec.Taints, pod.Spec.Tolerations, keepsAway, false)
		return !untolerated
	}
}

// Explain says why none of the nodes that a pod may run on has so many devices for it; empty where one has, so that something
// else is the reason, and where there is none at all. A pod asks for GPUs, which any API can give, or by a resource for what
// limits get by it. It is a pure function, and names nodes only: whose pods hold the devices is not everybody's business.
func Explain(nodes []v1alpha1.GPUNode, asked Ask) string {
	if asked.Memory > 0 {
		return explainShare(nodes, asked)
	}
	if !slices.ContainsFunc(nodes, func(n v1alpha1.GPUNode) bool { return asked.mixes(n.Status) }) {
		asked.Limits = ""
	}
	type counted struct {
		name string
		v1alpha1.DeviceCounts
	}
	var with []counted
	var total, free int64
	for _, node := range nodes {
		counts := asked.counts(node.Status)
		if counts.Total == 0 {
			continue
		}
		if int64(counts.Free) >= asked.Devices {
			return ""
		}
		with = append(with, counted{node.Name, counts})
		total, free = total+int64(counts.Total), free+int64(counts.Free)
	}
	if len(with) == 0 {
		return ""
	}
	slices.SortFunc(with, func(a, b counted) int {
		return cmp.Or(cmp.Compare(b.Free, a.Free), cmp.Compare(a.name, b.name))
	})
	unhealthy := slices.ContainsFunc(with, func(n counted) bool { return n.Unhealthy > 0 })
	held := "held"
	if unhealthy {
		held = "held or faulty"
	}
	switch {
	case free > 0:
		return fmt.Sprintf("no node has %s free: %s", asked.noun(asked.Devices), list(with, func(n counted) string {
			return fmt.Sprintf("%s has %d of %d (%s)", n.name, n.Free, n.Total, holders(n.DeviceCounts))
		}))
	case len(with) == 1:
		return fmt.Sprintf("%s of %s are %s: %s", asked.all(total), with[0].name, held, holders(with[0].DeviceCounts))
	}
	return fmt.Sprintf("%s of %d nodes are %s: %s", asked.all(total), len(with), held, list(with, func(n counted) string {
		return fmt.Sprintf("%s (%s)", n.name, holders(n.DeviceCounts))
	}))
}

// explainShare is Explain for parts of GPUs that are shared. One that is not shared, and free, is given out as a whole to whoever
// asks for less.
func explainShare(nodes []v1alpha1.GPUNode, asked Ask) string {
	type counted struct {
		name string
		// left is the most that is left of one device.
		left int64
	}
	var with []counted
	for _, node := range nodes {
		fitting, most, shared := int64(0), int64(0), false
		for _, d := range node.Status.Devices {
			if d.Sharing == nil || !d.Sharing.MemoryShares || d.UnhealthyReason != "" || d.Excluded {
				if !d.Excluded && d.Parent == "" && d.UnhealthyReason == "" && len(d.Holders) == 0 {
					fitting++
				}
				continue
			}
			shared = true
			left := leftOf(d)
			most = max(most, left)
			if left >= asked.Memory {
				fitting++
			}
		}
		if fitting >= asked.Devices {
			return ""
		}
		if shared {
			with = append(with, counted{node.Name, most})
		}
	}
	if len(with) == 0 {
		return fmt.Sprintf("no node shares out the memory of its GPUs, of which %s are asked for", asked.memory(asked.Memory))
	}
	slices.SortFunc(with, func(a, b counted) int { return cmp.Or(cmp.Compare(b.left, a.left), cmp.Compare(a.name, b.name)) })
	return fmt.Sprintf("no node has %s left on %s: %s", asked.memory(asked.Memory), asked.noun(asked.Devices), list(with, func(n counted) string {
		return fmt.Sprintf("%s has %s at most", n.name, asked.memory(n.left))
	}))
}

// leftOf is how much of a device's memory nobody has.
func leftOf(d v1alpha1.DeviceStatus) int64 {
	left := d.Sharing.Memory
	for _, h := range d.Holders {
		if h.Memory == 0 {
			return 0
		}
		left -= h.Memory
	}
	return max(0, left)
}

func (Ask) memory(bytes int64) string { return fmt.Sprintf("%d MiB", bytes>>20) }

// Ask is what a pod waits for.
type Ask struct {
	Devices int64
	// Memory is how much of each is asked for, in bytes; zero for all.
	Memory int64
	// Resource of partitions; empty for GPUs.
	Resource string
	// Limits is the resource of GPUs where nothing else asks for them: on a node that is partitioned it may stand for partitions.
	Limits string
}

// mixes reports whether not all GPUs of a node, or not only GPUs, are to be had by the limits that ask for GPUs.
func (a Ask) mixes(status v1alpha1.GPUNodeStatus) bool {
	return a.Limits != "" && a.Limits == status.ExtendedResource && status.Partitions != nil
}

// counts of what is asked for on a node.
func (a Ask) counts(status v1alpha1.GPUNodeStatus) v1alpha1.DeviceCounts {
	resource := a.Resource
	if a.mixes(status) {
		resource = a.Limits
	}
	if resource == "" {
		return status.Counts
	}
	var counts v1alpha1.DeviceCounts
	for _, d := range status.Devices {
		if resourceOf(status, d) != corev1.ResourceName(resource) || d.Excluded {
			continue
		}
		var holders []v1alpha1.DeviceHolder
		for _, other := range status.Devices {
			if overlap(other.Name, d.Name) {
				holders = append(holders, other.Holders...)
			}
		}
		by := func(kind v1alpha1.HolderKind) bool {
			return slices.ContainsFunc(holders, func(h v1alpha1.DeviceHolder) bool { return h.Kind == kind })
		}
		counts.Total++
		switch {
		case d.UnhealthyReason != "":
			counts.Unhealthy++
		case by(v1alpha1.HolderClaim):
			counts.Claims++
		case by(v1alpha1.HolderPod):
			counts.Pods++
		default:
			counts.Free++
		}
	}
	return counts
}

// resource is what the devices are called by; empty for GPUs.
func (a Ask) resource() string { return cmp.Or(a.Resource, a.Limits) }

func (a Ask) noun(n int64) string {
	switch {
	case a.resource() != "":
		return fmt.Sprintf("%d %s", n, a.resource())
	case n == 1:
		return "1 GPU"
	}
	return fmt.Sprintf("%d GPUs", n)
}

func (a Ask) all(n int64) string {
	switch {
	case n == 1 && a.resource() != "":
		return "all " + a.resource()
	case n == 1:
		return "all GPUs"
	}
	return "all " + a.noun(n)
}

// holders is "5 by limits, 3 by claims", without those that are none.
func holders(counts v1alpha1.DeviceCounts) string {
	var parts []string
	for _, part := range []struct {
		n    int32
		what string
	}{{counts.Pods, "by limits"}, {counts.Claims, "by claims"}, {counts.Unhealthy, "faulty"}} {
		if part.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", part.n, part.what))
		}
	}
	return strings.Join(parts, ", ")
}

func list[T any](nodes []T, describe func(T) string) string {
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
	// Resources of whole GPUs.
	Resources map[corev1.ResourceName]bool
	Classes   map[string]bool
	// Limits are the resources by which limits ask, those of partitions among them.
	Limits device.Resources
}

// NewOurs finds the classes of a driver for GPUs. A class is ours if its selectors name the driver: what else they select is the
// scheduler's business, but for classes of partitions: how many of those a GPU has room for cannot be counted here. It is a pure
// function.
func NewOurs(driver string, limits device.Resources, classes []resourceapi.DeviceClass) Ours {
	o := Ours{
		Resources: map[corev1.ResourceName]bool{corev1.ResourceName(limits.GPU): true}, Classes: map[string]bool{}, Limits: limits,
	}
	for _, class := range classes {
		if !names(class, driver) || names(class, "mig") {
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

// names reports whether a selector of a class has a string.
func names(class resourceapi.DeviceClass, text string) bool {
	return slices.ContainsFunc(class.Spec.Selectors, func(s resourceapi.DeviceSelector) bool {
		return s.CEL != nil && (strings.Contains(s.CEL.Expression, `"`+text+`"`) || strings.Contains(s.CEL.Expression, `'`+text+`'`))
	})
}

// Asked is how many of our GPUs a pod waits for, by limits and by claims that have none yet, and where it waits for none, the
// partitions that it asks for by limits; claim finds a claim of its namespace by name, or nil. It is a pure function.
func (o Ours) Asked(pod *corev1.Pod, claim func(name string) *resourceapi.ResourceClaim) Ask {
	asked, memory := total(pod, o.whole), int64(0)
	for _, reference := range pod.Spec.ResourceClaims {
		name := claimName(pod, reference)
		if name == "" {
			continue
		}
		if c := claim(name); c != nil && c.Status.Allocation == nil {
			n, each := o.requests(c)
			asked, memory = asked+n, max(memory, each)
		}
	}
	byLimits := total(pod, func(name corev1.ResourceName) bool { return string(name) == o.Limits.GPU })
	switch {
	case asked > 0 && asked == byLimits:
		return Ask{Devices: asked, Limits: o.Limits.GPU}
	case asked > 0:
		return Ask{Devices: asked, Memory: memory}
	}
	for _, resource := range o.partitions(pod) {
		if n := total(pod, func(name corev1.ResourceName) bool { return name == resource }); n > 0 {
			return Ask{Devices: n, Resource: string(resource)}
		}
	}
	return Ask{}
}

// whole reports whether a resource stands for GPUs.
func (o Ours) whole(name corev1.ResourceName) bool { return o.Resources[name] }

// partitions are the resources of partitions that a pod asks for, sorted.
func (o Ours) partitions(pod *corev1.Pod) []corev1.ResourceName {
	return asks(pod, func(name corev1.ResourceName) bool { return o.Limits.Has(string(name)) && !o.whole(name) })
}

// asks are those of some resources that a pod asks devices of, sorted.
func asks(pod *corev1.Pod, counts func(corev1.ResourceName) bool) []corev1.ResourceName {
	var names []corev1.ResourceName
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for name, quantity := range c.Resources.Limits {
			if !quantity.IsZero() && counts(name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// total is how many devices of some resources the pod has to have at once.
func total(pod *corev1.Pod, counts func(corev1.ResourceName) bool) int64 {
	limits := func(c corev1.Container) (n int64) {
		for name, quantity := range c.Resources.Limits {
			if counts(name) {
				n += quantity.Value()
			}
		}
		return n
	}
	var asked, atFirst int64
	for _, c := range pod.Spec.Containers {
		asked += limits(c)
	}
	for _, c := range pod.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			asked += limits(c)
		} else {
			atFirst = max(atFirst, limits(c))
		}
	}
	return max(asked, atFirst)
}

// requests are how many GPUs a claim asks for, and the most memory that it asks for of one by capacity.
func (o Ours) requests(claim *resourceapi.ResourceClaim) (n, each int64) {
	most := func(of *resourceapi.CapacityRequirements) int64 {
		if of == nil {
			return 0
		}
		amount := of.Requests[capacity.Memory]
		return amount.Value()
	}
	for _, r := range claim.Spec.Devices.Requests {
		if r.Exactly != nil && o.Classes[r.Exactly.DeviceClassName] {
			n, each = n+max(1, r.Exactly.Count), max(each, most(r.Exactly.Capacity))
		}
		for _, s := range r.FirstAvailable {
			if o.Classes[s.DeviceClassName] {
				n, each = n+max(1, s.Count), max(each, most(s.Capacity))
				break
			}
		}
	}
	return n, each
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
	client   client.Client
	driver   string
	limits   device.Resources
	recorder events.EventRecorder
	now      func() time.Time

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
	asked, all, err := x.asked(ctx, pod)
	switch {
	case err != nil:
		return reconcile.Result{}, err
	case asked.Devices == 0 && all:
		return reconcile.Result{}, nil
	}
	later := reconcile.Result{RequeueAfter: min(max(countAgain, x.now().Sub(waitsSince(pod))), tellEvery)}
	if !all {
		return later, nil
	}
	nodes, err := x.nodes(ctx, pod)
	if err != nil {
		return reconcile.Result{}, err
	}
	sentence := Explain(nodes, asked)
	if sentence == "" {
		return later, nil
	}
	tell, again := x.tell(request.NamespacedName, pod.UID, sentence)
	if tell {
		x.recorder.Eventf(pod, nil, corev1.EventTypeNormal, "GPUsHeld", "Wait", "%s", note(sentence))
	}
	return reconcile.Result{RequeueAfter: again}, nil
}

// asked is what a pod asks for, and whether that is all: not while one of its claims is not known here, which the scheduler knows.
func (x *explainer) asked(ctx context.Context, pod *corev1.Pod) (asked Ask, all bool, err error) {
	var classes resourceapi.DeviceClassList
	if err := x.client.List(ctx, &classes, client.UnsafeDisableDeepCopy); err != nil {
		return Ask{}, false, fmt.Errorf("list DeviceClasses: %w", err)
	}
	all = !slices.ContainsFunc(pod.Spec.ResourceClaims, func(r corev1.PodResourceClaim) bool { return claimName(pod, r) == "" })
	asked = NewOurs(x.driver, x.limits, classes.Items).Asked(pod, func(name string) *resourceapi.ResourceClaim {
		claim := &resourceapi.ResourceClaim{}
		if getErr := x.client.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: name}, claim); getErr != nil {
			all, err = false, cmp.Or(err, client.IgnoreNotFound(getErr))
			return nil
		}
		return claim
	})
	return asked, all, err
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
