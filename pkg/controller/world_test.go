// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

const (
	testDriver   = "gpu.nvidia.com"
	testResource = "nvidia.com/gpu"
)

// world is a cluster in memory with a clock of its own, which counts what is written to it.
type world struct {
	t        *testing.T
	client   client.WithWatch
	writes   map[string]int
	clock    time.Time
	recorder *events.FakeRecorder
	metrics  *metrics
}

// newWorld makes one; funcs come between the reconcilers and the objects, after the counting.
func newWorld(t *testing.T, funcs interceptor.Funcs, objects ...client.Object) *world {
	t.Helper()
	types, err := scheme()
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, writes: map[string]int{}, clock: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), recorder: events.NewFakeRecorder(100), metrics: newMetrics(prometheus.NewRegistry())}
	under := fake.NewClientBuilder().WithScheme(types).WithObjects(objects...).
		WithStatusSubresource(&v1alpha1.GPUNode{}, &corev1.Node{}, &corev1.Pod{}, &resourceapi.ResourceClaim{}).
		WithIndex(&resourceapi.ResourceClaim{}, nodeIndex, func(o client.Object) []string {
			return nodesOf(o.(*resourceapi.ResourceClaim), testDriver)
		}).WithIndex(&corev1.Pod{}, ownerIndex, ownerOf).Build()
	w.client = interceptor.NewClient(interceptor.NewClient(interceptor.NewClient(under, withoutNotEqual), funcs), w.counting())
	return w
}

// withoutNotEqual drops selectors for what is not equal, which the fake client does not know.
var withoutNotEqual = interceptor.Funcs{
	List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
		o := (&client.ListOptions{}).ApplyOptions(opts)
		if o.FieldSelector != nil && o.FieldSelector.String() == notSucceeded.String() {
			o.FieldSelector = nil
		}
		return c.List(ctx, list, o)
	},
}

func (w *world) counting() interceptor.Funcs {
	count := func(verb string, obj runtime.Object) { w.writes[fmt.Sprintf("%s %s", verb, kind(obj))]++ }
	return interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
			count("create", obj)
			return c.Create(ctx, obj, opts...)
		},
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
			count("patch", obj)
			return c.Patch(ctx, obj, patch, opts...)
		},
		Update: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.UpdateOption) error {
			count("update", obj)
			return c.Update(ctx, obj, opts...)
		},
		SubResourcePatch: func(ctx context.Context, c client.Client, sub string, obj client.Object, patch client.Patch, opts ...client.SubResourcePatchOption) error {
			count("patch", obj)
			return c.SubResource(sub).Patch(ctx, obj, patch, opts...)
		},
		SubResourceCreate: func(ctx context.Context, c client.Client, sub string, obj, subObj client.Object, opts ...client.SubResourceCreateOption) error {
			w.writes[sub+" "+obj.GetName()]++
			return c.SubResource(sub).Create(ctx, obj, subObj, opts...)
		},
	}
}

// cluster is what a reconciler has of the world.
func (w *world) cluster() cluster {
	return cluster{
		client: w.client, live: w.client, claims: w.claims(), driver: testDriver, limits: device.Resources{GPU: testResource},
		recorder: w.recorder, metrics: w.metrics, now: w.now,
	}
}

// claims reads claims from the world.
func (w *world) claims() claimReader { return worldClaims{w} }

type worldClaims struct{ of *world }

func (c worldClaims) on(node string) []v1alpha1.AllocatedClaim {
	c.of.t.Helper()
	var list resourceapi.ResourceClaimList
	if err := c.of.client.List(c.of.t.Context(), &list, client.MatchingFields{nodeIndex: node}); err != nil {
		c.of.t.Fatal(err)
	}
	return Relay(list.Items, testDriver, node)
}

func (c worldClaims) get(namespace, name string) *resourceapi.ResourceClaim {
	c.of.t.Helper()
	claim := &resourceapi.ResourceClaim{}
	if err := c.of.client.Get(c.of.t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, claim); client.IgnoreNotFound(err) != nil {
		c.of.t.Fatal(err)
	}
	return claim
}

// hasHeard is a client whose cache has an object of this kind as it was, whatever has become of it.
func hasHeard[O interface {
	client.Object
	DeepCopyInto(O)
}](w *world, was O) client.Client {
	return interceptor.NewClient(w.client, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, into client.Object, opts ...client.GetOption) error {
			if o, ok := into.(O); ok {
				was.DeepCopyInto(o)
				return nil
			}
			return c.Get(ctx, key, into, opts...)
		},
	})
}

// cached is a client that reads GPUNodes as the controller's cache keeps them.
func (w *world) cached() client.Client {
	return interceptor.NewClient(w.client, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, into client.Object, opts ...client.GetOption) error {
			err := c.Get(ctx, key, into, opts...)
			if node, ok := into.(*v1alpha1.GPUNode); ok && err == nil {
				trimGPUNode(node)
			}
			return err
		},
	})
}

func kind(obj runtime.Object) string {
	switch obj.(type) {
	case *v1alpha1.GPUNode:
		return "GPUNode"
	case *corev1.Pod:
		return "Pod"
	case *corev1.Node:
		return "Node"
	}
	return fmt.Sprintf("%T", obj)
}

// want compares what was written since the beginning.
func (w *world) want(writes map[string]int) {
	w.t.Helper()
	if diff := cmp.Diff(writes, w.writes); diff != "" {
		w.t.Errorf("writes (-want +got):\n%s", diff)
	}
}

// twice reconciles two times, as every request may be, and returns what the second answered.
func (w *world) twice(r reconcile.Reconciler, name string) reconcile.Result {
	w.t.Helper()
	var result reconcile.Result
	for range 2 {
		result = w.once(r, types.NamespacedName{Name: name})
	}
	return result
}

func (w *world) once(r reconcile.Reconciler, key types.NamespacedName) reconcile.Result {
	w.t.Helper()
	result, err := r.Reconcile(w.t.Context(), reconcile.Request{NamespacedName: key})
	if err != nil {
		w.t.Fatal(err)
	}
	return result
}

func (w *world) now() time.Time { return w.clock }

func (w *world) gpuNode() *v1alpha1.GPUNode {
	w.t.Helper()
	node := &v1alpha1.GPUNode{}
	w.get("", "node-1", node)
	return node
}

func (w *world) get(namespace, name string, into client.Object) {
	w.t.Helper()
	if err := w.client.Get(w.t.Context(), types.NamespacedName{Namespace: namespace, Name: name}, into); err != nil {
		w.t.Fatal(err)
	}
}

// set changes the status of the GPUNode as its agent does.
func (w *world) set(change func(*v1alpha1.GPUNodeStatus)) {
	w.t.Helper()
	node := w.gpuNode()
	change(&node.Status)
	if err := w.client.Status().Update(w.t.Context(), node); err != nil {
		w.t.Fatal(err)
	}
}

// event is the next one, or "".
func (w *world) event() string {
	select {
	case e := <-w.recorder.Events:
		return e
	default:
		return ""
	}
}

// newClaim is a claim of namespace ns with devices of node-1, reserved for pod-<name>.
func newClaim(name string, devices ...string) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name)}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "r", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"}}}
	if len(devices) == 0 {
		return claim
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{}
	for _, device := range devices {
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{Driver: testDriver, Pool: "node-1", Device: device})
	}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod-" + name, UID: types.UID("uid-pod-" + name)}}
	return claim
}

// newPod is pod-<name>, bound to node-1, Pending, and made by the ReplicaSet rs.
func newPod(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "pod-" + name, UID: types.UID("uid-pod-" + name),
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "rs", UID: "uid-rs", Controller: ptr.To(true)}},
		},
		Spec:   corev1.PodSpec{NodeName: "node-1", Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
	for _, c := range change {
		c(pod)
	}
	return pod
}

// gpuNode is node-1 with eight free GPUs that kubelet lists.
func gpuNode(change ...func(*v1alpha1.GPUNodeStatus)) *v1alpha1.GPUNode {
	node := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "uid-node"}}
	node.Status = v1alpha1.GPUNodeStatus{Mode: "Dual", ExtendedResource: testResource, Counts: v1alpha1.DeviceCounts{Total: 8, Free: 8}}
	for i := range 8 {
		node.Status.Devices = append(node.Status.Devices, v1alpha1.DeviceStatus{
			Name: fmt.Sprintf("gpu-%d", i), UUID: fmt.Sprintf("GPU-%d", i), ExtendedResource: testResource,
			ExtendedResourceState: v1alpha1.ExtendedResourceAllocatable,
		})
	}
	for _, c := range change {
		c(&node.Status)
	}
	return node
}

func coreNode(allocatable, capacity string) *corev1.Node {
	list := func(value string) corev1.ResourceList {
		return corev1.ResourceList{testResource: resource.MustParse(value), corev1.ResourceCPU: resource.MustParse("4")}
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node-1"},
		Status:     corev1.NodeStatus{Allocatable: list(allocatable), Capacity: list(capacity)},
	}
}

func update(t *testing.T, h handler.EventHandler, queue workqueue.TypedRateLimitingInterface[reconcile.Request], before, after client.Object) {
	t.Helper()
	if e := (event.UpdateEvent{ObjectOld: before, ObjectNew: after}); allocationChanged.Update(e) {
		h.Update(t.Context(), e, queue)
	}
}
