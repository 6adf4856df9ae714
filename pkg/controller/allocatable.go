// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Allocatable is how many devices of a resource on a node the scheduler may count on for limits: those that kubelet's device
// manager lists itself, less those of them that a claim is allocated to, or has allocated a part of. Unknown is what the agent
// has not yet heard from kubelet, what the node has no devices of, and a node that serves no limits. It is a pure function.
//
// Kubelet reports the number every ten seconds only. In between, the scheduler would send limits pods after GPUs that are
// gone, and kubelet fails each of them for good.
//
// A GPU that a claim has lost to a limit counts only if the claim waits for it: the limit's pod is counted by the scheduler as
// well, maybe for hours. Otherwise the claim is about to be moved, or about to ask; and that a limit holds its GPU is what the
// status said up to a second ago. Once that limit ends, the GPU is the claim's.
func Allocatable(
	status v1alpha1.GPUNodeStatus, claims []v1alpha1.AllocatedClaim, resource corev1.ResourceName,
) (value int64, known bool) {
	if status.ExtendedResource == "" {
		return 0, false
	}
	waits := map[types.UID]bool{}
	for _, conflict := range status.Conflicts {
		waits[conflict.UID] = !conflict.PendingEviction
	}
	for _, device := range status.Devices {
		if resourceOf(status, device) != resource {
			continue
		}
		known = known || device.ExtendedResourceState != ""
		if device.ExtendedResourceState != v1alpha1.ExtendedResourceAllocatable {
			continue
		}
		if device.Sharing != nil && device.Sharing.Replicas > 0 {
			value += replicas(device, claims)
			continue
		}
		allocated, asking := false, false
		for _, claim := range claims {
			if slices.ContainsFunc(claim.Devices, func(name string) bool { return overlap(name, device.Name) }) {
				allocated = true
				asking = asking || !waits[claim.UID]
			}
		}
		if !allocated || !asking && heldByPod(device) {
			value++
		}
	}
	return value, known
}

// replicas is how many of a device's replicas the scheduler may count on: those that limits have, and of the others as many as
// find room beside what claims have, or wait for.
func replicas(device v1alpha1.DeviceStatus, claims []v1alpha1.AllocatedClaim) int64 {
	sharing := device.Sharing
	used, limited := int64(0), int64(0)
	for _, h := range device.Holders {
		if h.Kind != v1alpha1.HolderPod {
			continue
		}
		used += h.Memory
		if h.State != v1alpha1.HoldDraining {
			limited++
		}
	}
	for _, claim := range claims {
		used += takes(claim, device)
	}
	room := max(0, sharing.Memory-used) / max(1, sharing.ReplicaMemory)
	return min(int64(sharing.Allocatable), limited+room)
}

// takes is how much of a device's memory a claim has.
func takes(claim v1alpha1.AllocatedClaim, device v1alpha1.DeviceStatus) int64 {
	for _, name := range claim.Devices {
		share := shareOf(claim, name)
		switch {
		case !overlap(name, device.Name):
		case share > 0 && name == device.Name:
			return share
		default:
			return device.Sharing.Memory
		}
	}
	return 0
}

// resourceOf is the resource by which limits ask for a device. Agents that serve whole GPUs only have not always said it; and an
// API server that knows their status drops what later agents say of partitions but for the UUID.
func resourceOf(status v1alpha1.GPUNodeStatus, device v1alpha1.DeviceStatus) corev1.ResourceName {
	said := func(d v1alpha1.DeviceStatus) bool { return d.ExtendedResource != "" }
	partition := device.Parent != "" || strings.HasPrefix(device.UUID, "MIG-")
	if said(device) || partition || slices.ContainsFunc(status.Devices, said) {
		return corev1.ResourceName(device.ExtendedResource)
	}
	return corev1.ResourceName(status.ExtendedResource)
}

// served reports whether limits ask for any device of a node by a resource, whatever kubelet has said.
func served(status v1alpha1.GPUNodeStatus, resource corev1.ResourceName) bool {
	return status.ExtendedResource != "" && resourcesOf(status)[resource]
}

// resourcesOf are those of all devices of a node.
func resourcesOf(status v1alpha1.GPUNodeStatus) map[corev1.ResourceName]bool {
	resources := map[corev1.ResourceName]bool{}
	for _, device := range status.Devices {
		if resource := resourceOf(status, device); resource != "" {
			resources[resource] = true
		}
	}
	return resources
}

// overlap reports whether two devices of a node are the same, or one is a partition of the other, by their published names.
func overlap(a, b string) bool {
	return a == b || device.GPUName(a) == b || device.GPUName(b) == a
}

func heldByPod(device v1alpha1.DeviceStatus) bool {
	return slices.ContainsFunc(device.Holders, func(h v1alpha1.DeviceHolder) bool { return h.Kind == v1alpha1.HolderPod })
}

// listed is how many devices of a resource kubelet's device manager lists.
func listed(status v1alpha1.GPUNodeStatus, resource corev1.ResourceName) (n int64) {
	for _, device := range status.Devices {
		if device.ExtendedResourceState == v1alpha1.ExtendedResourceAllocatable && resourceOf(status, device) == resource {
			n++
			if device.Sharing != nil && device.Sharing.Replicas > 0 {
				n += int64(device.Sharing.Allocatable) - 1
			}
		}
	}
	return n
}

// settle is how long a greater number has to hold good unless kubelet itself lists more devices than before: an agent's
// status is up to a second old, and may not yet know what kubelet has just taken back.
const settle = 2 * time.Second

// observed is what a node's allocatable number was last, how many devices kubelet listed then, and since when it is so.
type observed struct {
	value, listed int64
	since         time.Time
	// ours is a number that was written here.
	ours bool
}

// judge says whether to write want in place of current, or how long to wait first. Less is always written at once. Kubelet's own
// zero is what it says of a device plugin that is gone, whose last status may still say otherwise: more than that needs a list
// that is longer than it was.
func (o *observed) judge(now time.Time, current, want, listed int64) (write bool, wait time.Duration) {
	if o.since.IsZero() || o.value != current {
		*o = observed{value: current, listed: listed, since: now}
	}
	gone := current == 0 && !o.ours
	switch {
	case want == current:
		o.listed = listed
		return false, 0
	case want < current, listed > o.listed, !gone && now.Sub(o.since) >= settle:
		*o = observed{value: want, listed: listed, since: now, ours: true}
		return true, 0
	}
	o.listed = listed
	if gone {
		return false, 0
	}
	return false, settle - now.Sub(o.since)
}

// allocatable writes the allocatable numbers of our resources in nodes' status.
type allocatable struct {
	client  client.Client
	claims  claimReader
	limits  device.Resources
	breaker *breaker
	metrics *metrics
	now     func() time.Time

	mu    sync.Mutex
	nodes map[string]*nodeRecord
}

// nodeRecord remembers of a node what its objects do not say.
type nodeRecord struct {
	// patched is the version that the last patch replaced: a cache that has it still has not seen the outcome.
	patched   string
	resources map[corev1.ResourceName]*resourceRecord
}

// resourceRecord is what is remembered of a resource of a node.
type resourceRecord struct {
	observed
	// overruled counts how often kubelet has put back another number than was written for one version of the GPUNode.
	overruled int
	version   string
	// serves is set while our agent serves it.
	serves bool
}

// of is the record of a resource.
func (n *nodeRecord) of(resource corev1.ResourceName) *resourceRecord {
	if n.resources[resource] == nil {
		n.resources[resource] = &resourceRecord{}
	}
	return n.resources[resource]
}

func (r *allocatable) register(m manager.Manager) error {
	reported := predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, ok1 := e.ObjectOld.(*corev1.Node)
		after, ok2 := e.ObjectNew.(*corev1.Node)
		return ok1 && ok2 && !sameGPUs(before.Status, after.Status, r.limits)
	}}
	err := builder.ControllerManagedBy(m).Named("allocatable").
		For(&v1alpha1.GPUNode{}).
		Watches(&resourceapi.ResourceClaim{}, claimHandler(r.claims.driver)).
		WatchesRawSource(r.claims.source()).
		WatchesRawSource(r.breaker.source()).
		Watches(&corev1.Node{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(reported)).
		WithOptions(options(4)).
		Complete(r)
	if err != nil {
		return fmt.Errorf("register allocatable: %w", err)
	}
	return nil
}

func sameGPUs(a, b corev1.NodeStatus, limits device.Resources) bool {
	same := func(x, y resource.Quantity) bool { return x.Cmp(y) == 0 }
	return maps.EqualFunc(only(a.Allocatable, limits), only(b.Allocatable, limits), same) &&
		maps.EqualFunc(only(a.Capacity, limits), only(b.Capacity, limits), same)
}

// only keeps our resources of a list; nil where there are none.
func only(list corev1.ResourceList, limits device.Resources) corev1.ResourceList {
	var kept corev1.ResourceList
	for name, quantity := range list {
		if limits.Has(string(name)) {
			if kept == nil {
				kept = corev1.ResourceList{}
			}
			kept[name] = quantity
		}
	}
	return kept
}

// change is a number to be written.
type change struct {
	resource corev1.ResourceName
	old      resource.Quantity
	want     int64
	// last is what is written when the resource is served no more.
	last bool
}

// Reconcile implements reconcile.Reconciler for one node. It is idempotent.
func (r *allocatable) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	gpus := &v1alpha1.GPUNode{}
	if err := r.client.Get(ctx, request.NamespacedName, gpus); err != nil {
		if apierrors.IsNotFound(err) {
			r.forget(request.Name)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	node := &corev1.Node{}
	if err := r.client.Get(ctx, request.NamespacedName, node); err != nil {
		r.forget(request.Name)
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	claims, err := r.claims.on(ctx, request.Name)
	if err != nil {
		return reconcile.Result{}, err
	}
	r.breaker.closes(node, gpus.Status)
	record := r.record(request.Name)
	resources := resourcesOf(gpus.Status)
	for resource := range record.resources {
		resources[resource] = true
	}
	var changes []change
	var wait time.Duration
	for _, resource := range slices.Sorted(maps.Keys(resources)) {
		if !r.limits.Has(string(resource)) {
			continue
		}
		want, write, again := r.decide(record, resource, gpus, node, claims)
		if write {
			changes = append(changes, change{resource, node.Status.Allocatable[resource], want, !served(gpus.Status, resource)})
		} else if again > 0 && (wait == 0 || again < wait) {
			wait = again
		}
	}
	if len(changes) == 0 {
		return reconcile.Result{RequeueAfter: wait}, nil
	}
	result, err := r.patch(ctx, node, record, changes)
	if err == nil && result.IsZero() {
		result.RequeueAfter = wait
	}
	return result, err
}

// decide says what to write of a resource, or how long to wait first.
func (r *allocatable) decide(node *nodeRecord, resource corev1.ResourceName, gpus *v1alpha1.GPUNode, object *corev1.Node,
	claims []v1alpha1.AllocatedClaim,
) (want int64, write bool, wait time.Duration) {
	record := node.of(resource)
	want, known := Allocatable(gpus.Status, claims, resource)
	current, offered := object.Status.Allocatable[resource]
	if record.retired(gpus.Status, resource) && current.Value() > 0 {
		return 0, true, 0
	}
	if !known || !offered || !r.limits.Has(gpus.Status.ExtendedResource) {
		// An agent that has just started: what kubelet lists next is news, however much it listed before.
		record.observed = observed{value: current.Value(), since: r.now()}
		return 0, false, 0
	}
	capacity := object.Status.Capacity[resource]
	want = min(want, capacity.Value())
	of := offer{object.Name, resource}
	if r.breaker.open(of) {
		want = 0
	}
	if node.patched == object.ResourceVersion {
		return 0, false, 0
	}
	if record.givesUp(gpus.ResourceVersion, current.Value(), want) {
		r.breaker.close(of)
		return 0, false, 0
	}
	write, wait = record.judge(r.now(), current.Value(), want, listed(gpus.Status, resource))
	return want, write, wait
}

// overrules is how often kubelet may put another number back, every ten seconds, before it is believed.
const overrules = 6

// givesUp reports that kubelet means what it says and the GPUNode does not: an agent that is gone leaves its status behind, and
// somebody else may serve the resource by now. It is heard again when it writes.
func (r *resourceRecord) givesUp(version string, current, want int64) bool {
	if r.version != version {
		r.version, r.overruled = version, 0
	}
	if r.ours && r.value == want && current != want {
		r.overruled++
	}
	return r.overruled >= overrules
}

// retired reports whether an agent that served the resource before does so no more: because of another mode, or because the last
// partition of a profile is gone. The zero is written that kubelet comes to within ten seconds: every limits pod that is sent to
// the node until then fails. That is done once, since who serves the resource after that is somebody else.
func (r *resourceRecord) retired(status v1alpha1.GPUNodeStatus, resource corev1.ResourceName) bool {
	if served(status, resource) {
		r.serves = true
		return false
	}
	return r.serves && status.Mode != "" && (status.ExtendedResource == "" || len(status.Devices) > 0)
}

func (r *allocatable) patch(ctx context.Context, node *corev1.Node, record *nodeRecord, changes []change) (reconcile.Result, error) {
	patch, err := allocatablePatch(changes)
	if err != nil {
		return reconcile.Result{}, err
	}
	from := node.ResourceVersion
	err = r.client.Status().Patch(ctx, node, client.RawPatch(types.JSONPatchType, patch))
	if err != nil {
		for _, c := range changes {
			record.of(c.resource).observed = observed{}
		}
	}
	switch {
	case apierrors.IsInvalid(err), apierrors.IsConflict(err):
		// Kubelet has written another number meanwhile: it is in the cache in a moment.
		r.metrics.patches.WithLabelValues("refused").Inc()
		return reconcile.Result{RequeueAfter: time.Second}, nil
	case err != nil:
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("patch allocatable GPUs of node %s: %w", node.Name, err))
	}
	record.patched = from
	for _, c := range changes {
		if c.last {
			record.of(c.resource).serves = false
		}
		current := c.old.Value()
		direction := "down"
		if c.want > current {
			direction = "up"
		}
		r.metrics.patches.WithLabelValues(direction).Inc()
		klog.FromContext(ctx).V(2).Info("Changed allocatable", "resource", c.resource, "from", current, "to", c.want)
	}
	return reconcile.Result{}, nil
}

// allocatablePatch replaces a node's numbers if they all are still the old ones, and nothing else.
func allocatablePatch(changes []change) ([]byte, error) {
	var operations []map[string]string
	for _, c := range changes {
		path := "/status/allocatable/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(string(c.resource))
		operations = append(operations,
			map[string]string{"op": "test", "path": path, "value": c.old.String()},
			map[string]string{"op": "replace", "path": path, "value": fmt.Sprint(c.want)})
	}
	patch, err := json.Marshal(operations)
	if err != nil {
		return nil, fmt.Errorf("encode allocatable: %w", err)
	}
	return patch, nil
}

// record is only used by the worker that has the node, so that its contents need no lock.
func (r *allocatable) record(node string) *nodeRecord {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.nodes == nil {
		r.nodes = map[string]*nodeRecord{}
	}
	if r.nodes[node] == nil {
		r.nodes[node] = &nodeRecord{resources: map[corev1.ResourceName]*resourceRecord{}}
	}
	return r.nodes[node]
}

func (r *allocatable) forget(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.nodes, node)
	r.breaker.forget(node)
}
