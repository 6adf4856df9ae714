// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/legacy"
)

// awaitAPIServer returns once the API server has reported the node and its pods, or ctx is done. If that takes longer than answerWait,
// it serves what is held meanwhile.
func (a *agent) awaitAPIServer(ctx context.Context, c components) error {
	ctx, answered := context.WithCancel(ctx)
	defer answered()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		if c.pods.AwaitSync(ctx) && (a.isDriverless || broadcast.Await(ctx, c.self.Changed, func() bool { return a.nodeKnown(c.self) })) {
			answered()
		}
		return nil
	})
	group.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(a.times.answerWait):
			return a.serveHeld(ctx, c)
		}
	})
	return group.Wait()
}

// serveHeld serves the holds from before in both APIs until ctx is done: kubelet can unprepare claims and restart containers. Nothing is
// given to another holder, because the node's label may set another mode, and the pods of the holds are not known. /readyz still says
// what is missing.
func (a *agent) serveHeld(ctx context.Context, c components) error {
	klog.FromContext(ctx).Info("Serving only what is held", "reason", errNoPods.Error())
	// These components are made again once the API server answers. Only then do they register their metrics.
	next := *a
	next.metrics.Registry = prometheus.NewRegistry()
	object, err := gpunode.New(next.objectConfig(c))
	if err != nil {
		return err
	}
	claimsConfig, pluginConfig := next.claimsConfig(c, object), next.pluginConfig(c, object)
	claimsConfig.HeldOnly, pluginConfig.HeldOnly = errNoPods, errNoPods
	claims, err := driver.New(claimsConfig)
	if err != nil {
		return err
	}
	// A pod that has a device needs it listed as healthy: a kubelet that restarts refuses the pod's stopped containers otherwise.
	pluginConfig.Retiring = false
	plugin, err := legacy.New(pluginConfig)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.usable.Run(ctx) })
	group.Go(func() error { return claims.Run(ctx) })
	if !a.isDriverless {
		group.Go(func() error { return retire(ctx, c.book, plugin.Run) })
	}
	return group.Wait()
}
