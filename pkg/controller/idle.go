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

// idleInterval is how often to look whether the API server serves claims by now, which takes a restart of it.
const idleInterval = time.Minute

// awaitClaims returns true as soon as there may be claims. Where the API server does not know them nothing here has anything to
// do and every watch would fail again and again. An API server that is away is awaited by whoever asks next.
func (c *Controller) awaitClaims(ctx context.Context) bool {
	for {
		err := c.manager.GetAPIReader().List(ctx, &resourceapi.ResourceClaimList{}, client.Limit(1))
		idle := apierrors.IsNotFound(err)
		if before := c.idle.Swap(idle); idle && !before {
			klog.FromContext(ctx).Info("Nothing to do: the API server does not serve resource.k8s.io/v1")
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
