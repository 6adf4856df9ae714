// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/capacity"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Relay returns the claims that are allocated devices of a node, for GPUNode.spec: each with the names of its devices and their
// pools, in a stable order. Devices with admin access do not count. A claim that has no other devices is included, because with
// Strict its pod waits for the node's answer. It is a pure function.
func Relay(claims []resourceapi.ResourceClaim, driver, node string) []v1alpha1.AllocatedClaim {
	var relayed []v1alpha1.AllocatedClaim
	for i := range claims {
		here, devices, pools := false, []string{}, []string(nil)
		consumed := map[string]device.Consumed{} // a claim may have several shares of one device
		for result := range allocated(&claims[i], driver) {
			if device.NodeOfPool(result.Pool) != node {
				continue
			}
			here = true
			if result.AdminAccess == nil || !*result.AdminAccess {
				devices, pools = append(devices, result.Device), append(pools, result.Pool)
				if c, shared := capacity.Consumed(&claims[i], result); shared {
					consumed[result.Device] = consumed[result.Device].Plus(c)
				}
			}
		}
		if !here {
			continue
		}
		slices.Sort(devices)
		slices.Sort(pools)
		var shares []v1alpha1.AllocatedShare
		for _, name := range slices.Sorted(maps.Keys(consumed)) {
			shares = append(shares, v1alpha1.AllocatedShare{Device: name, Memory: consumed[name].Memory, Shares: consumed[name].Shares})
		}
		relayed = append(relayed, v1alpha1.AllocatedClaim{
			UID: claims[i].UID, Namespace: claims[i].Namespace, Name: claims[i].Name,
			Allocated: claims[i].Status.Allocation.AllocationTimestamp,
			Devices:   slices.Compact(devices), Pools: slices.Compact(pools), Shares: shares,
		})
	}
	slices.SortFunc(relayed, func(a, b v1alpha1.AllocatedClaim) int { return cmp.Compare(a.UID, b.UID) })
	return relayed
}

// allocated iterates over the claim's devices of the driver.
func allocated(claim *resourceapi.ResourceClaim, driver string) func(yield func(resourceapi.DeviceRequestAllocationResult) bool) {
	return func(yield func(resourceapi.DeviceRequestAllocationResult) bool) {
		if claim.Status.Allocation == nil {
			return
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			if result.Driver == driver && !yield(result) {
				return
			}
		}
	}
}

func nodesOf(claim *resourceapi.ResourceClaim, driver string) []string {
	var nodes []string
	for result := range allocated(claim, driver) {
		nodes = append(nodes, device.NodeOfPool(result.Pool))
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// relay writes GPUNode.spec. It creates no GPUNode: each agent creates its own. TestPodRefusedForClaim fails without it.
type relay struct{ cluster }

func (r *relay) register(m manager.Manager) error {
	// The generation also changes when a user edits the spec.
	return forGPUNodes(m, "relay", 4, predicate.GenerationChangedPredicate{}).WatchesRawSource(r.changes).Complete(r)
}

// Reconcile implements reconcile.Reconciler for one node. It is idempotent. One run covers all claims that changed during the
// previous run.
func (r *relay) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	node := &v1alpha1.GPUNode{}
	if err := r.client.Get(ctx, request.NamespacedName, node); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	claims := r.claims.on(node.Name)
	if len(claims) > v1alpha1.MaxClaims {
		// The API server would refuse all of them. A node learns of the others when kubelet prepares them.
		klog.FromContext(ctx).Info("Relaying only a part of the node's claims", "node", node.Name, "claims", len(claims), "most", v1alpha1.MaxClaims)
		claims = claims[:v1alpha1.MaxClaims]
	}
	if apiequality.Semantic.DeepEqual(claims, node.Spec.Claims) {
		return reconcile.Result{}, nil
	}
	return reconcile.Result{}, patchSpec(ctx, r.client, node, "claims", claims)
}

// patchSpec replaces one list of the spec and leaves concurrent writes to the status and to the other lists alone. With the UID the API
// server rejects the patch for a recreated object of the same name.
func patchSpec[T any](ctx context.Context, c client.Client, node *v1alpha1.GPUNode, list string, value []T) error {
	patch := jsonPatch{types.MergePatchType, map[string]any{
		"metadata": map[string]any{"uid": node.UID},
		"spec":     map[string]any{list: append([]T{}, value...)},
	}}
	if err := c.Patch(ctx, node, patch); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("write %s of GPUNode %s: %w", list, node.Name, err))
	}
	return nil
}

// claimHandler enqueues the nodes of a claim's devices, before and after an update.
func claimHandler(driver string) handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
		var requests []reconcile.Request
		if claim, ok := o.(*resourceapi.ResourceClaim); ok {
			for _, node := range nodesOf(claim, driver) {
				requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{Name: node}})
			}
		}
		return requests
	})
}

var allocationChanged = changed(func(c *resourceapi.ResourceClaim) any { return c.Status.Allocation })
