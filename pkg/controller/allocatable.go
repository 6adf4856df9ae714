// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
)

// Allocatable returns how many devices of a resource the scheduler may give to pods: the devices that kubelet's device manager
// lists, without those that are allocated to claims in whole or in part. known is false if kubelet has not answered the agent yet, if
// the node has no such devices and if it does not serve the device plugin API. It is a pure function.
//
// kubelet itself reports the number only every ten seconds. Until then the scheduler would send pods to GPUs that claims have, and
// kubelet fails such pods permanently.
//
// A GPU that a pod holds while a claim is allocated to it counts only if the claim waits for it and another GPU is free. The
// scheduler counts the pod too, perhaps for hours, and would leave that other GPU unused. Otherwise it would send the next pod to
// the GPU as soon as the holder ends, while the claim gets it: kubelet fails such pods until the number is lowered. The same applies to a
// GPU or a replica that a pod holds and that no new pod can get, for example because it is out of service or the driver is paused.
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
	node := availability.NewNode(status, claims)
	free, awaited := int64(0), int64(0)
	for _, device := range status.Devices {
		if device.ExtendedResource != string(resource) {
			continue
		}
		known = known || device.ExtendedResourceState != ""
		if device.ExtendedResourceState != v1alpha1.ExtendedResourceAllocatable {
			continue
		}
		if device.Sharing != nil && device.Sharing.Replicas > 0 {
			if held, more := replicas(device, node); takesNone(device) {
				awaited += held
			} else {
				value, free = value+held, free+more
			}
			continue
		}
		allocated, asking := false, false
		for _, claim := range claims {
			if slices.ContainsFunc(claim.Devices, func(name string) bool { return overlap(name, device.Name) }) {
				allocated = true
				asking = asking || !waits[claim.UID]
			}
		}
		switch {
		case !allocated && !takesNone(device):
			if len(device.Holders) == 0 {
				free++
			} else {
				value++
			}
		case !asking && heldByPod(device):
			awaited++
		}
	}
	return value + free + min(max(free, 0), awaited), known
}

// takesNone reports whether no new pod can get a device. If a pod holds it, kubelet counts it all the same.
func takesNone(device v1alpha1.DeviceStatus) bool {
	return device.OutOfService() || device.UnhealthyReason != ""
}

// replicas returns how many of a device's replicas the scheduler may count: those that pods have, and as many more as fit beside what is
// allocated to claims. more is negative if those of pods do not fit.
func replicas(d v1alpha1.DeviceStatus, node availability.Node) (held, more int64) {
	sharing := d.Sharing
	for _, h := range d.Holders {
		if h.Kind == v1alpha1.HolderPod && h.State != v1alpha1.HoldDraining {
			held++
		}
	}
	uses := slices.Clone(node.Allocated)
	for _, use := range node.Held {
		if use.Holder.Kind == availability.Pod {
			uses = append(uses, use)
		}
	}
	left := node.Left(d, uses)
	room := int64(left.Bytes) / max(1, sharing.ReplicaMemory)
	if sharing.ReplicaShares > 0 {
		room = int64(left.Count) / sharing.ReplicaShares
	}
	return held, min(int64(sharing.Allocatable)-held, room)
}

// served reports whether the agent serves a resource through the device plugin API, whatever kubelet reports.
func served(status v1alpha1.GPUNodeStatus, resource corev1.ResourceName) bool {
	return status.ExtendedResource != "" && resourcesOf(status)[resource]
}

func resourcesOf(status v1alpha1.GPUNodeStatus) map[corev1.ResourceName]bool {
	resources := map[corev1.ResourceName]bool{}
	for _, device := range status.Devices {
		if device.ExtendedResource != "" {
			resources[corev1.ResourceName(device.ExtendedResource)] = true
		}
	}
	return resources
}

// overlap reports whether two published names mean the same device, or one a partition of the other.
func overlap(a, b string) bool { return availability.NameOf(a).Overlaps(availability.NameOf(b)) }

func heldByPod(device v1alpha1.DeviceStatus) bool {
	return slices.ContainsFunc(device.Holders, func(h v1alpha1.DeviceHolder) bool { return h.Kind == v1alpha1.HolderPod })
}

// listed returns how many devices of a resource kubelet's device manager lists.
func listed(status v1alpha1.GPUNodeStatus, resource corev1.ResourceName) (n int64) {
	for _, device := range status.Devices {
		if device.ExtendedResourceState == v1alpha1.ExtendedResourceAllocatable && device.ExtendedResource == string(resource) {
			n++
			if device.Sharing != nil && device.Sharing.Replicas > 0 {
				n += int64(device.Sharing.Allocatable) - 1
			}
		}
	}
	return n
}

// settle is how long an increase has to be stable before it is written, unless kubelet lists more devices than before. An agent's
// status is up to a second old and may lack what kubelet has just allocated. TestJudgeAllocatable fails without it.
const settle = 2 * time.Second

// observed records a node's allocatable number, how many devices kubelet listed at that time, and when the number appeared.
type observed struct {
	value, listed int64
	since         time.Time
	// ours is set if this controller wrote the number.
	ours bool
}

// judge returns whether to write want in place of current, or how long to wait first. It writes a decrease at once. kubelet writes
// zero when the device plugin is gone, while the agent's last status may still list devices. judge replaces that zero only when
// kubelet lists more devices than before.
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

// allocatable writes the allocatable numbers of Tandem's resources to the status of nodes.
type allocatable struct {
	cluster
	breaker *breaker

	nodes sync.Map // of *nodeRecord, by node
}

// nodeRecord is the state of a node that its API objects do not contain.
type nodeRecord struct {
	// patched is the resourceVersion that the last patch replaced. A cache with this version has not received the result yet.
	patched   string
	resources map[corev1.ResourceName]*resourceRecord
}

// resourceRecord is the state of one resource of a node.
type resourceRecord struct {
	observed
	// overruled counts how often kubelet replaced the written number while the GPUNode had this version.
	overruled int
	version   string
	// serves is set while Tandem's agent serves the resource.
	serves bool
}

func (n *nodeRecord) of(resource corev1.ResourceName) *resourceRecord {
	if n.resources[resource] == nil {
		n.resources[resource] = &resourceRecord{}
	}
	return n.resources[resource]
}

func (r *allocatable) register(m manager.Manager) error {
	// The cache keeps the numbers of Tandem's resources only.
	reported := changed(func(n *corev1.Node) any { return []corev1.ResourceList{n.Status.Allocatable, n.Status.Capacity} })
	return forGPUNodes(m, "allocatable", 4, gpuNodeChanged).
		WatchesRawSource(r.changes).
		WatchesRawSource(source.Channel(r.breaker.opened, &handler.EnqueueRequestForObject{})).
		Watches(&corev1.Node{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(reported)).
		Complete(r)
}

// change is a number to write.
type change struct {
	resource corev1.ResourceName
	old      resource.Quantity
	want     int64
	// last marks the zero of a resource that is no longer served.
	last bool
}

// Reconcile implements reconcile.Reconciler for one node. It is idempotent.
func (r *allocatable) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	gpus, node := &v1alpha1.GPUNode{}, &corev1.Node{}
	for _, object := range []client.Object{gpus, node} {
		if err := r.client.Get(ctx, request.NamespacedName, object); err != nil {
			if apierrors.IsNotFound(err) {
				r.forget(request.Name)
			}
			return reconcile.Result{}, client.IgnoreNotFound(err)
		}
	}
	claims := r.claims.on(request.Name)
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

// decide returns the number to write for a resource, or how long to wait first.
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
		// The agent has just started: the next list that kubelet reports counts as longer.
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

// overrules is how often kubelet may replace the number, every ten seconds, before its number is accepted.
const overrules = 6

// givesUp reports whether to accept kubelet's number until the GPUNode changes. A removed agent leaves its status behind, and
// another device plugin may serve the resource.
func (r *resourceRecord) givesUp(version string, current, want int64) bool {
	if r.version != version {
		r.version, r.overruled = version, 0
	}
	if r.ours && r.value == want && current != want {
		r.overruled++
	}
	return r.overruled >= overrules
}

// retired reports whether the agent stopped serving a resource, because of another mode or because the last partition of a profile
// is gone. The controller then writes zero, as kubelet will within ten seconds: pods that the scheduler sends until then fail. It
// writes zero only once, because another device plugin may serve the resource next.
func (r *resourceRecord) retired(status v1alpha1.GPUNodeStatus, resource corev1.ResourceName) bool {
	if served(status, resource) {
		r.serves = true
		return false
	}
	return r.serves && status.Mode != "" && (status.ExtendedResource == "" || len(status.Devices) > 0)
}

func (r *allocatable) patch(ctx context.Context, node *corev1.Node, record *nodeRecord, changes []change) (reconcile.Result, error) {
	from := node.ResourceVersion
	err := r.client.Status().Patch(ctx, node, allocatablePatch(changes))
	if err != nil {
		for _, c := range changes {
			record.of(c.resource).observed = observed{}
		}
	}
	switch {
	case apierrors.IsInvalid(err), apierrors.IsConflict(err):
		// kubelet changed the number meanwhile. The cache receives it soon.
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

// allocatablePatch replaces a node's numbers if all of them still have their old values.
func allocatablePatch(changes []change) client.Patch {
	var operations []map[string]string
	for _, c := range changes {
		path := "/status/allocatable/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(string(c.resource))
		operations = append(operations,
			map[string]string{"op": "test", "path": path, "value": c.old.String()},
			map[string]string{"op": "replace", "path": path, "value": fmt.Sprint(c.want)})
	}
	return jsonPatch{types.JSONPatchType, operations}
}

// record returns the state of a node. Only the worker that reconciles the node uses it.
func (r *allocatable) record(node string) *nodeRecord {
	record, _ := r.nodes.LoadOrStore(node, &nodeRecord{resources: map[corev1.ResourceName]*resourceRecord{}})
	return record.(*nodeRecord)
}

func (r *allocatable) forget(node string) {
	r.nodes.Delete(node)
	r.breaker.forget(node)
}
