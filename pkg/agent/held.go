// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
)

// awaitAPIServer returns once the API server has reported the node and its pods, or ctx is done. If that takes longer than answerWait,
// it serves what is held meanwhile.
func (a *Agent) awaitAPIServer(ctx context.Context, c components) error {
	ctx, answered := context.WithCancel(ctx)
	defer answered()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		if c.Pods.AwaitSync(ctx) && (a.isDriverless || broadcast.Await(ctx, c.Node.Changed, func() bool { return a.nodeKnown(c.Node) })) {
			answered()
		}
		return nil
	})
	group.Go(func() error {
		if !broadcast.Sleep(ctx, a.times.answerWait) {
			return nil
		}
		return a.serveHeld(ctx, c)
	})
	return group.Wait()
}

// serveHeld serves the holds from before in both APIs until ctx is done: kubelet can unprepare claims and restart containers. Nothing is
// given to another holder, because the node's label may set another mode, and the pods of the holds are not known. /readyz still says
// what is missing.
func (a *Agent) serveHeld(ctx context.Context, c components) error {
	klog.FromContext(ctx).Info("Serving only what is held", "reason", errNoPods.Error())
	// These components are made again once the API server answers. Only then do they register their metrics.
	serving := a.serving(c)
	serving.Registerer, serving.HeldOnly = prometheus.NewRegistry(), errNoPods
	apis, err := c.NewAPIs(serving)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.Health.Run(ctx) })
	group.Go(func() error { return apis.Claims.Run(ctx) })
	if !a.isDriverless {
		group.Go(func() error { return retire(ctx, c.Ledger, apis.Limits.Run) })
	}
	return group.Wait()
}
