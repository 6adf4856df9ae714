// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// view is the newest known version of the object, from the watch and from the responses to our own writes, and what kubelet reported.
// Take its Changed before Allocated, Claims, Maintenance, OutOfService or Synced.
type view struct {
	broadcast.Signal
	mu sync.Mutex
	// synced is set once the API server has listed the object, or that there is none.
	synced bool
	// unserved is set once the API server has answered that it does not serve GPUNodes to this agent.
	unserved bool
	// object is nil if there is none. Callers must not change it.
	object *v1alpha1.GPUNode
	// gone is the UID of the last object that was deleted.
	gone types.UID
	// allocatable are the devices that kubelet reports as allocatable, by resource.
	allocatable map[string][]string
	// pools are the pools of GPUs that are not in the node's, by UUID; nil until the driver has placed the GPUs.
	pools map[string]string
	// released are claims of the spec that no longer have devices of this node.
	released map[types.UID]bool
}

// update changes the view and notifies.
func (v *view) update(change func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	change()
	v.Notify()
}

// observe takes a version of the object. The watch and a response may arrive in any order.
func (v *view) observe(object *v1alpha1.GPUNode) {
	v.update(func() {
		if v.object != nil && older(object, v.object) || v.gone != "" && v.gone == object.UID {
			return
		}
		// A claim whose entry changed may be allocated again.
		maps.DeleteFunc(v.released, func(claim types.UID, _ bool) bool {
			return !apiequality.Semantic.DeepEqual(claimOf(v.object, claim), claimOf(object, claim))
		})
		if v.object != nil && v.object.UID != object.UID {
			v.gone = v.object.UID
		}
		v.object = object
	})
}

func older(a, b *v1alpha1.GPUNode) bool {
	order, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
	return err == nil && order < 0
}

func claimOf(object *v1alpha1.GPUNode, claim types.UID) []v1alpha1.AllocatedClaim {
	if object == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(object.Spec.Claims), func(c v1alpha1.AllocatedClaim) bool { return c.UID != claim })
}

// vanish records that an object was deleted. It may be an earlier one than ours.
func (v *view) vanish(uid types.UID) {
	v.update(func() {
		v.gone = uid
		if v.object != nil && v.object.UID == uid {
			v.object = nil
		}
	})
}

// current returns the object, and whether the API server has answered at all.
func (v *view) current() (object *v1alpha1.GPUNode, synced bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.object, v.synced
}

// Claims returns the claims that are allocated devices of this node by the object's spec, without those that have released them. Their
// pods may not be bound yet.
func (v *view) Claims() []v1alpha1.AllocatedClaim {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.object == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(v.object.Spec.Claims), func(c v1alpha1.AllocatedClaim) bool { return v.released[c.UID] })
}

// Maintenance returns the UUIDs of the GPUs that an administrator has taken out of service.
func (v *view) Maintenance() map[string]bool {
	object, _ := v.current()
	if object == nil {
		return nil
	}
	uuids := make(map[string]bool, len(object.Spec.Maintenance))
	for _, entry := range object.Spec.Maintenance {
		uuids[entry.UUID] = true
	}
	return uuids
}

// Place records the pools of the GPUs that are not in the pool of the node, by UUID. The driver calls it. It is idempotent.
func (v *view) Place(pools map[string]string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.pools == nil || !maps.Equal(v.pools, pools) {
		v.pools = maps.Clone(pools)
		v.Notify()
	}
}

// taints returns a function that returns the taints of a device by its GPU and its own name, the worst first. Before the driver has placed a
// GPU, a rule may select it by either of its pools.
func (v *view) taints() func(gpu device.GPU, name string) []v1alpha1.DeviceTaint {
	v.mu.Lock()
	defer v.mu.Unlock()
	object, pools := v.object, v.pools
	if object == nil || len(object.Spec.Taints) == 0 {
		return func(device.GPU, string) []v1alpha1.DeviceTaint { return nil }
	}
	return func(gpu device.GPU, name string) (found []v1alpha1.DeviceTaint) {
		for _, t := range object.Spec.Taints {
			if t.Selects(cmp.Or(pools[gpu.UUID], object.Name), name) || pools == nil && t.Selects(device.OwnPool(object.Name, gpu), name) {
				found = append(found, v1alpha1.DeviceTaint{Rule: t.Rule, Taint: t.Taint})
			}
		}
		// "NoExecute" comes before "NoSchedule".
		slices.SortStableFunc(found, func(a, b v1alpha1.DeviceTaint) int { return cmp.Compare(a.Effect, b.Effect) })
		return found
	}
}

// OutOfService returns a function that returns why a device gets no new pod with limits, although it may be healthy and free: maintenance of
// its GPU, or a taint. It returns an empty string for a device in service.
func (v *view) OutOfService() func(device.Device) string {
	maintenance, taints := v.Maintenance(), v.taints()
	return func(d device.Device) string {
		if maintenance[d.GPU.UUID] {
			return "its GPU is under maintenance (kubectl gpu drain)"
		}
		if found := taints(d.GPU, d.Name()); len(found) > 0 {
			return "it has the taint " + found[0].String()
		}
		return ""
	}
}

func (v *view) release(claims map[types.UID]bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !maps.Equal(v.released, claims) {
		v.released = claims
		v.Notify()
	}
}

// Acknowledge records the device IDs of a resource that kubelet's device manager reports as allocatable. known is false while kubelet
// has not reported them, or once its report no longer counts. The device plugin calls it. It is idempotent.
func (v *view) Acknowledge(resource string, ids []string, known bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if before, was := v.allocatable[resource]; was == known && slices.Equal(before, ids) {
		return
	}
	// Readers may still use the former map.
	next := map[string][]string{}
	maps.Copy(next, v.allocatable)
	delete(next, resource)
	if known {
		next[resource] = ids
	}
	v.allocatable = next
	v.Notify()
}

// kubelet returns the devices that kubelet reports as allocatable, by resource. Callers must not change them.
func (v *view) kubelet() map[string][]string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.allocatable
}

// Claims reads claims of one namespace.
type Claims interface {
	Get(ctx context.Context, name string, options metav1.GetOptions) (*resourceapi.ResourceClaim, error)
}

// verify asks the API server about claims of the spec that no hold confirms, once it knows the spec and then once a period each. While no
// controller runs the spec does not change: a claim that is gone would keep its GPU withdrawn from pods, and would keep it in the pool from
// which it was allocated. TestVerify fails without it.
func (o *Object) verify(ctx context.Context) {
	if !o.AwaitSpec(ctx) {
		return
	}
	// first is set until the spec was checked once. It may be older than this agent, for example from a backup.
	unheld, first := map[types.UID]bool{}, true
	wait.JitterUntilWithContext(ctx, func(ctx context.Context) {
		held := map[types.UID]bool{}
		for _, h := range o.config.Ledger.Holds() {
			// A claim whose hold drains may have ended.
			if h.Holder.Kind == ledger.KindClaim && h.State != ledger.StateDraining {
				held[types.UID(h.Holder.ID)] = true
			}
		}
		var claims []v1alpha1.AllocatedClaim
		all := first
		if object, _ := o.view.current(); object != nil {
			claims, first = object.Spec.Claims, false
		}
		believed := o.Claims()
		still, released := map[types.UID]bool{}, map[types.UID]bool{}
		for _, claim := range claims {
			if held[claim.UID] || len(claim.Devices) == 0 {
				continue
			}
			still[claim.UID] = true
			// Not at the claim's first check: kubelet prepares a claim some time after the scheduler allocated it.
			if !all && !unheld[claim.UID] {
				continue
			}
			gone, err := o.released(ctx, claim)
			if err != nil {
				klog.FromContext(ctx).V(1).Info("Cannot read a claim of the GPUNode",
					"claim", klog.KRef(claim.Namespace, claim.Name), "reason", err.Error())
				gone = !slices.ContainsFunc(believed, func(c v1alpha1.AllocatedClaim) bool { return c.UID == claim.UID })
			}
			if gone {
				released[claim.UID] = true
			}
		}
		unheld = still
		o.view.release(released)
	}, o.times.verify, 0.2, true)
}

// released reports whether a claim of the spec no longer has this node's devices.
func (o *Object) released(ctx context.Context, claim v1alpha1.AllocatedClaim) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	known, err := o.config.Claims(claim.Namespace).Get(ctx, claim.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, err
	case known.UID != claim.UID || known.Status.Allocation == nil:
		return true, nil
	}
	return !slices.ContainsFunc(known.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == o.config.DriverName && device.NodeOfPool(r.Pool) == o.config.NodeName &&
			slices.Contains(claim.Devices, r.Device) && (len(claim.Pools) == 0 || slices.Contains(claim.Pools, r.Pool))
	}), nil
}
