// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"context"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Claims reads claims of one namespace.
type Claims interface {
	Get(ctx context.Context, name string, options metav1.GetOptions) (*resourceapi.ResourceClaim, error)
}

// verify asks the API server, once a period each, about claims of the spec that no hold confirms. While the controller is down the spec
// does not change, and a claim that is gone would keep its GPU from pods. TestVerify fails without it.
func (o *Object) verify(ctx context.Context) {
	unheld := map[types.UID]bool{}
	wait.JitterUntilWithContext(ctx, func(ctx context.Context) {
		held := map[types.UID]bool{}
		for _, h := range o.config.Ledger.Holds() {
			if h.Holder.Kind == ledger.KindClaim {
				held[types.UID(h.Holder.ID)] = true
			}
		}
		var claims []v1alpha1.AllocatedClaim
		if object, _ := o.view.current(); object != nil {
			claims = object.Spec.Claims
		}
		believed := o.view.claims()
		still, released := map[types.UID]bool{}, map[types.UID]bool{}
		for _, claim := range claims {
			if held[claim.UID] || len(claim.Devices) == 0 {
				continue
			}
			still[claim.UID] = true
			// Not at the first check: kubelet prepares a claim some time after the scheduler allocated it.
			if !unheld[claim.UID] {
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
