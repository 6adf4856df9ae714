// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

func TestRelay(t *testing.T) {
	admin := newClaim("admin", "gpu-0")
	admin.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	mixed := newClaim("mixed", "gpu-5", "gpu-4", "gpu-4")
	mixed.Status.Allocation.Devices.Results = append(mixed.Status.Allocation.Devices.Results,
		resourceapi.DeviceRequestAllocationResult{Driver: "net.example.com", Pool: "node-1", Device: "nic-0"},
		resourceapi.DeviceRequestAllocationResult{Driver: testDriver, Pool: "node-1", Device: "gpu-6", AdminAccess: ptr.To(true)},
		resourceapi.DeviceRequestAllocationResult{Driver: testDriver, Pool: "node-1", Device: "gpu-7", AdminAccess: ptr.To(false)})
	allocated := metav1.Unix(1, 0)
	mixed.Status.Allocation.AllocationTimestamp = &allocated
	elsewhere := newClaim("elsewhere", "gpu-0")
	elsewhere.Status.Allocation.Devices.Results[0].Pool = "node-10"
	ownPool := newClaim("own-pool", "gpu-3")
	ownPool.Status.Allocation.Devices.Results[0].Pool = "node-1/gpu-03"
	claims := []resourceapi.ResourceClaim{*ownPool, *elsewhere, *newClaim("unallocated"), *admin, *mixed}
	want := []v1alpha1.AllocatedClaim{
		{UID: "uid-admin", Namespace: "ns", Name: "admin", Devices: []string{}},
		{UID: "uid-mixed", Namespace: "ns", Name: "mixed", Allocated: &allocated, Devices: []string{"gpu-4", "gpu-5", "gpu-7"}, Pools: []string{"node-1"}},
		{UID: "uid-own-pool", Namespace: "ns", Name: "own-pool", Devices: []string{"gpu-3"}, Pools: []string{"node-1/gpu-03"}},
	}
	if diff := cmp.Diff(want, Relay(claims, testDriver, "node-1")); diff != "" {
		t.Error(diff)
	}
	if got := Relay(claims, testDriver, "node-2"); got != nil {
		t.Errorf("node-2 has %v", got)
	}
}

func (w *world) relay() *relay {
	return &relay{w.cluster()}
}

func TestRelayWritesOnceAndEndsWithTheClaim(t *testing.T) {
	a := newClaim("a", "gpu-0")
	a.Status.Allocation.AllocationTimestamp = ptr.To(metav1.Now())
	w := newWorld(t, interceptor.Funcs{}, gpuNode(), a)
	w.twice(w.relay(), "node-1")
	if got := w.gpuNode().Spec.Claims; len(got) != 1 || got[0].UID != "uid-a" {
		t.Errorf("claims %v", got)
	}
	w.want(map[string]int{"patch GPUNode": 1})
	if err := w.client.Delete(t.Context(), newClaim("a")); err != nil {
		t.Fatal(err)
	}
	w.twice(w.relay(), "node-1")
	if got := w.gpuNode().Spec.Claims; len(got) != 0 {
		t.Errorf("claims %v", got)
	}
	w.want(map[string]int{"patch GPUNode": 2})
}

// The agent writes the status all the time; none of it is lost, and nothing has to be tried again.
func TestRelayLeavesTheStatusAlone(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
			node := &v1alpha1.GPUNode{}
			if err := c.Get(ctx, client.ObjectKeyFromObject(obj), node); err != nil {
				return err
			}
			node.Status.Mode = "Split"
			if err := c.Status().Update(ctx, node); err != nil {
				return err
			}
			return c.Patch(ctx, obj, patch, opts...)
		},
	}, gpuNode(), newClaim("a", "gpu-0"))
	w.twice(w.relay(), "node-1")
	if node := w.gpuNode(); node.Status.Mode != "Split" || len(node.Spec.Claims) != 1 {
		t.Errorf("%+v", node)
	}
}

func TestRelayMakesNoGPUNode(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, newClaim("a", "gpu-0"))
	w.twice(w.relay(), "node-1")
	w.want(map[string]int{})
}

func TestRelayReportsErrors(t *testing.T) {
	conflict := apierrors.NewConflict(v1alpha1.Resource.GroupResource(), "node-1", nil)
	w := newWorld(t, interceptor.Funcs{
		Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
			return conflict
		},
	}, gpuNode(), newClaim("a", "gpu-0"))
	for range 2 {
		if _, err := w.relay().Reconcile(t.Context(), requestFor("node-1")); !apierrors.IsConflict(err) {
			t.Errorf("got %v, which the queue would not try again", err)
		}
	}
}

// With the UID in the patch, what was read of an object that is gone is not written to the one that came after it.
func TestRelayNamesTheObject(t *testing.T) {
	var patched []byte
	w := newWorld(t, interceptor.Funcs{Patch: func(_ context.Context, _ client.WithWatch, o client.Object, patch client.Patch, _ ...client.PatchOption) (err error) {
		patched, err = patch.Data(o)
		return err
	}})
	err := patchSpec[v1alpha1.AllocatedClaim](t.Context(), w.client, gpuNode(), "claims", nil)
	if err != nil || string(patched) != `{"metadata":{"uid":"uid-node"},"spec":{"claims":[]}}` {
		t.Errorf("%s, %v", patched, err)
	}
}

// More claims than the API server accepts do not keep the first ones from the node.
func TestRelayOfThousandsOfClaims(t *testing.T) {
	objects := []client.Object{gpuNode()}
	for i := range 2000 {
		objects = append(objects, newClaim(fmt.Sprintf("c-%04d", i), fmt.Sprintf("gpu-%d", i)))
	}
	w := newWorld(t, interceptor.Funcs{}, objects...)
	w.twice(w.relay(), "node-1")
	if got := w.gpuNode().Spec.Claims; len(got) != v1alpha1.MaxClaims || got[0].Name != "c-0000" {
		t.Errorf("%d claims", len(got))
	}
	w.want(map[string]int{"patch GPUNode": 1})
}

// Every node that a claim has or had devices of is asked for, and none when only its pods change.
func TestClaimHandler(t *testing.T) {
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	defer queue.ShutDown()
	moved := newClaim("a", "gpu-0")
	moved.Status.Allocation.Devices.Results[0].Pool = "node-2"
	reserved := newClaim("a", "gpu-0")
	reserved.Status.ReservedFor = append(reserved.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "x"})
	h := claimHandler(testDriver)
	for name, c := range map[string]struct {
		send func()
		want []string
	}{
		"created":     {func() { h.Create(t.Context(), event.CreateEvent{Object: newClaim("a", "gpu-0")}, queue) }, []string{"node-1"}},
		"deleted":     {func() { h.Delete(t.Context(), event.DeleteEvent{Object: newClaim("a", "gpu-0")}, queue) }, []string{"node-1"}},
		"allocated":   {func() { update(t, h, queue, newClaim("a"), newClaim("a", "gpu-0")) }, []string{"node-1"}},
		"deallocated": {func() { update(t, h, queue, newClaim("a", "gpu-0"), newClaim("a")) }, []string{"node-1"}},
		"moved":       {func() { update(t, h, queue, newClaim("a", "gpu-0"), moved) }, []string{"node-1", "node-2"}},
		"reserved":    {func() { update(t, h, queue, newClaim("a", "gpu-0"), reserved) }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			c.send()
			var got []string
			for queue.Len() > 0 {
				request, _ := queue.Get()
				got = append(got, request.Name)
				queue.Done(request)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func requestFor(name string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}
}
