// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"context"
	"slices"
	"time"

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

// doubt asks the API server about claims that the spec has and no hold confirms, once a period each: with the controller away
// the spec stays as it was, and a claim that is gone would keep its GPU from limits for as long. A claim that is prepared, as
// most are all their life, costs nothing.
func (o *Object) doubt(ctx context.Context) {
	unheld := map[types.UID]bool{}
	for {
		timer := time.NewTimer(wait.Jitter(o.times.doubt, 0.2))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		held := map[types.UID]bool{}
		for _, h := range o.config.Ledger.Holds() {
			if h.Holder.Kind == ledger.KindClaim {
				held[types.UID(h.Holder.ID)] = true
			}
		}
		still, ended := map[types.UID]bool{}, map[types.UID]bool{}
		for _, claim := range o.view.acting().Spec.Claims {
			if held[claim.UID] || len(claim.Devices) == 0 {
				continue
			}
			still[claim.UID] = true
			// Not the first time: kubelet takes a while from the scheduler's decision to preparing the claim.
			if unheld[claim.UID] && o.ended(ctx, claim) {
				ended[claim.UID] = true
			}
		}
		unheld = still
		o.view.disbelieve(ended)
	}
}

// ended reports whether a claim of the spec has let go of this node's devices. An API server that does not answer says
// nothing new.
func (o *Object) ended(ctx context.Context, claim v1alpha1.AllocatedClaim) bool {
	limited, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	known, err := o.config.Claims(claim.Namespace).Get(limited, claim.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return true
	case err != nil:
		klog.FromContext(ctx).V(1).Info("Cannot look at a claim that the GPUNode has", "claim", klog.KRef(claim.Namespace, claim.Name), "reason", err.Error())
		return o.view.disbelieved(claim.UID)
	case known.UID != claim.UID || known.Status.Allocation == nil:
		return true
	}
	return !slices.ContainsFunc(known.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == o.config.DriverName && device.NodeOfPool(r.Pool) == o.config.NodeName &&
			slices.Contains(claim.Devices, r.Device) && (len(claim.Pools) == 0 || slices.Contains(claim.Pools, r.Pool))
	})
}
