// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// idleInterval is how often to check whether the API server serves claims, which requires its restart.
const idleInterval = time.Minute

// awaitClaims blocks while the API server does not serve claims, since every watch of claims would fail. It returns true once claims
// may exist, also if the API server does not answer, and false once ctx is done.
func (c *Controller) awaitClaims(ctx context.Context) bool {
	for {
		err := c.manager.GetAPIReader().List(ctx, &resourceapi.ResourceClaimList{}, client.Limit(1))
		idle := apierrors.IsNotFound(err)
		if before := c.idle.Swap(idle); idle && !before {
			klog.FromContext(ctx).Info("Waiting until the API server serves resource.k8s.io/v1")
		}
		if !idle {
			return ctx.Err() == nil
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(idleInterval):
		}
	}
}
