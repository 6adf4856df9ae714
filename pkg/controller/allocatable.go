// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"encoding/json"
	"fmt"
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
)

// Allocatable is how many GPUs of a node the scheduler may count on for limits: those that kubelet's device manager lists
// itself, less those of them that a claim is allocated to. Unknown is what the agent has not yet heard from kubelet, and a node
// that serves no limits. It is a pure function.
//
// Kubelet reports the number every ten seconds only. In between, the scheduler would send limits pods after GPUs that are
// gone, and kubelet fails each of them for good.
//
// A GPU that a claim has lost to a limit counts only if the claim waits for it: the limit's pod is counted by the scheduler as
// well, maybe for hours. Otherwise the claim is about to be moved, or about to ask; and that a limit holds its GPU is what the
// status said up to a second ago. Once that limit ends, the GPU is the claim's.
func Allocatable(status v1alpha1.GPUNodeStatus, claims []v1alpha1.AllocatedClaim) (value int64, known bool) {
	if status.LimitsResource == "" {
		return 0, false
	}
	waits := map[types.UID]bool{}
	for _, loser := range status.Losers {
		waits[loser.UID] = !loser.Condemned
	}
	asking := map[string]bool{}
	allocated := map[string]bool{}
	for _, claim := range claims {
		for _, device := range claim.Devices {
			allocated[device] = true
			asking[device] = asking[device] || !waits[claim.UID]
		}
	}
	for _, device := range status.Devices {
		known = known || device.Limits != ""
		if device.Limits == v1alpha1.LimitsAllocatable && (!allocated[device.Name] || !asking[device.Name] && heldByLimit(device)) {
			value++
		}
	}
	return value, known
}

func heldByLimit(device v1alpha1.DeviceStatus) bool {
	return slices.ContainsFunc(device.Holders, func(h v1alpha1.DeviceHolder) bool { return h.Kind == v1alpha1.HolderLimit })
}

// listed is how many devices kubelet's device manager lists.
func listed(status v1alpha1.GPUNodeStatus) (n int64) {
	for _, device := range status.Devices {
		if device.Limits == v1alpha1.LimitsAllocatable {
			n++
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

// allocatable writes the allocatable number of our resource in nodes' status.
type allocatable struct {
	client   client.Client
	claims   claimReader
	resource corev1.ResourceName
	metrics  *metrics
	now      func() time.Time

	mu    sync.Mutex
	nodes map[string]*nodeRecord
}

// nodeRecord remembers of a node what its objects do not say.
type nodeRecord struct {
	observed
	// patched is the version that the last patch replaced: a cache that has it still has not seen the outcome.
	patched string
	// overruled counts how often kubelet has put back another number than was written for one version of the GPUNode.
	overruled int
	version   string
	// serves is set while limits are served on the node by our agent.
	serves bool
}

func (r *allocatable) register(m manager.Manager) error {
	reported := predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, ok1 := e.ObjectOld.(*corev1.Node)
		after, ok2 := e.ObjectNew.(*corev1.Node)
		return ok1 && ok2 && !sameGPUs(before.Status, after.Status, r.resource)
	}}
	err := builder.ControllerManagedBy(m).Named("allocatable").
		For(&v1alpha1.GPUNode{}).
		Watches(&resourceapi.ResourceClaim{}, claimHandler(r.claims.driver)).
		WatchesRawSource(r.claims.source()).
		Watches(&corev1.Node{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(reported)).
		WithOptions(options(4)).
		Complete(r)
	if err != nil {
		return fmt.Errorf("register allocatable: %w", err)
	}
	return nil
}

func sameGPUs(a, b corev1.NodeStatus, resource corev1.ResourceName) bool {
	equal := func(a, b corev1.ResourceList) bool {
		x, ok1 := a[resource]
		y, ok2 := b[resource]
		return ok1 == ok2 && x.Cmp(y) == 0
	}
	return equal(a.Allocatable, b.Allocatable) && equal(a.Capacity, b.Capacity)
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
	want, known := Allocatable(gpus.Status, claims)
	current, offered := node.Status.Allocatable[r.resource]
	if r.retired(request.Name, gpus.Status) && current.Value() > 0 {
		return r.retire(ctx, node, current)
	}
	if !known || !offered || gpus.Status.LimitsResource != string(r.resource) {
		// An agent that has just started: what kubelet lists next is news, however much it listed before.
		r.record(request.Name).observed = observed{value: current.Value(), since: r.now()}
		return reconcile.Result{}, nil
	}
	capacity := node.Status.Capacity[r.resource]
	want = min(want, capacity.Value())

	record := r.record(request.Name)
	if record.patched == node.ResourceVersion {
		return reconcile.Result{}, nil
	}
	if record.givesUp(gpus.ResourceVersion, current.Value(), want) {
		return reconcile.Result{}, nil
	}
	write, wait := record.judge(r.now(), current.Value(), want, listed(gpus.Status))
	if !write {
		return reconcile.Result{RequeueAfter: wait}, nil
	}
	return r.patch(ctx, node, record, current.String(), want, current.Value())
}

// overrules is how often kubelet may put another number back, every ten seconds, before it is believed.
const overrules = 6

// givesUp reports that kubelet means what it says and the GPUNode does not: an agent that is gone leaves its status behind, and
// somebody else may serve the resource by now. It is heard again when it writes.
func (r *nodeRecord) givesUp(version string, current, want int64) bool {
	if r.version != version {
		r.version, r.overruled = version, 0
	}
	if r.ours && r.value == want && current != want {
		r.overruled++
	}
	return r.overruled >= overrules
}

// retired reports whether an agent that served limits before does so no more: it has ended, or has another mode.
func (r *allocatable) retired(node string, status v1alpha1.GPUNodeStatus) bool {
	record := r.record(node)
	if status.LimitsResource == string(r.resource) {
		record.serves = true
	}
	return record.serves && status.Mode != "" && status.LimitsResource == ""
}

// retire writes the zero that kubelet comes to within ten seconds: every limits pod that is sent to the node until then fails. It
// does so once, since who serves the resource after that is somebody else.
func (r *allocatable) retire(ctx context.Context, node *corev1.Node, current resource.Quantity) (reconcile.Result, error) {
	record, from := r.record(node.Name), node.ResourceVersion
	result, err := r.patch(ctx, node, record, current.String(), 0, current.Value())
	record.serves = record.patched != from
	return result, err
}

func (r *allocatable) patch(ctx context.Context, node *corev1.Node, record *nodeRecord, old string, want, current int64) (reconcile.Result, error) {
	patch, err := allocatablePatch(r.resource, old, want)
	if err != nil {
		return reconcile.Result{}, err
	}
	from := node.ResourceVersion
	switch err := r.client.Status().Patch(ctx, node, client.RawPatch(types.JSONPatchType, patch)); {
	case apierrors.IsInvalid(err), apierrors.IsConflict(err):
		// Kubelet has written another number meanwhile: it is in the cache in a moment.
		r.metrics.patches.WithLabelValues("refused").Inc()
		record.observed = observed{}
		return reconcile.Result{RequeueAfter: time.Second}, nil
	case err != nil:
		record.observed = observed{}
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("patch allocatable %s of node %s: %w", r.resource, node.Name, err))
	}
	record.patched = from
	direction := "down"
	if want > current {
		direction = "up"
	}
	r.metrics.patches.WithLabelValues(direction).Inc()
	klog.FromContext(ctx).V(2).Info("Changed allocatable", "resource", r.resource, "from", current, "to", want)
	return reconcile.Result{}, nil
}

// allocatablePatch replaces a node's number if it is still the old one, and nothing else.
func allocatablePatch(resource corev1.ResourceName, old string, want int64) ([]byte, error) {
	path := "/status/allocatable/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(string(resource))
	patch, err := json.Marshal([]map[string]string{
		{"op": "test", "path": path, "value": old},
		{"op": "replace", "path": path, "value": fmt.Sprint(want)},
	})
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
		r.nodes[node] = &nodeRecord{}
	}
	return r.nodes[node]
}

func (r *allocatable) forget(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.nodes, node)
}
