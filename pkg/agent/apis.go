// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/nodelabels"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/pkg/wiring"
)

var errNoPods = errors.New("the API server has not listed this node's pods yet")

// serveAPIs serves the APIs of the node's mode, once the node's pods are known. Before that, the GPU of a removed pod whose
// containers still run would look as if the pod reused it, and a free GPU would look taken.
func (a *Agent) serveAPIs(ctx context.Context, c components) error {
	apis, err := c.NewAPIs(a.serving(c))
	if err != nil {
		return err
	}
	object, claims, plugin := apis.GPUNode, apis.Claims, apis.Limits
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return object.Run(ctx) })
	if !c.Pods.AwaitSync(ctx) {
		return group.Wait()
	}
	var waits sync.WaitGroup
	waits.Go(func() { _ = a.awaitSpecs(ctx, c.CDI) && a.awaitSpec(ctx, object) })
	// While another process gives the same devices away, the agent gives none.
	claims.FindConflicting(ctx)
	waits.Wait()
	plugin.FindConflicting(ctx) // it lists the devices, which have specs now
	if ctx.Err() != nil {
		return group.Wait()
	}
	// Adopt comes after the search: a process that the search does not find may have given devices away until it ended.
	if err := c.Adopt(ctx); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Giving no device to new pods and claims until the pods from before the start are known")
		a.event(corev1.EventTypeWarning, "HoldersUnknown", fmt.Sprintf("Serving no GPU to new pods, because kubelet may have given some to other pods before the agent started: %v", err))
		group.Go(func() error {
			a.adoptLater(ctx, c, err)
			return nil
		})
	}
	group.Go(func() error {
		return nodelabels.NewWriter(a.labelConfig(ctx, c, c.Views.Configured, a.metrics)).Run(ctx)
	})
	group.Go(func() error { return c.Health.Run(ctx) })
	// Claims are served in every mode: those that have devices may still have to be prepared, and must be unprepared.
	group.Go(func() error { return claims.Run(ctx) })
	a.status.Waiting("claims", nil)
	if a.config.Mode.Claims() {
		a.status.Check("claims", claims.Ready)
	}
	a.status.Waiting("limits", nil)
	switch {
	case a.config.Mode.Limits():
		group.Go(func() error { return plugin.Run(ctx) })
		a.status.Check("limits", plugin.Ready)
	case !a.isDriverless: // without a driver the plugin would list no device
		group.Go(func() error { return plugin.WatchConflicting(ctx) })
		group.Go(func() error { return retire(ctx, c.Ledger, plugin.Run) })
	}
	return group.Wait()
}

// adoptInterval is how often Adopt is tried again. kubelet writes its checkpoint anew when we register.
const adoptInterval = time.Second

// adoptLater tries again until it succeeds or ctx is done, and logs each new reason. why is the first.
func (a *Agent) adoptLater(ctx context.Context, c components, why error) {
	logger := klog.FromContext(ctx)
	// The error is that of ctx.
	_ = wait.PollUntilContextCancel(ctx, adoptInterval, false, func(ctx context.Context) (bool, error) {
		err := c.Adopt(ctx)
		switch {
		case err == nil:
			logger.Info("The pods from before the start are known: giving devices to new pods and claims")
		case err.Error() != why.Error() && ctx.Err() == nil:
			why = err
			logger.Error(err, "Still giving no device to new pods and claims, because the pods from before the start are not known; retrying")
		}
		return err == nil, nil
	})
}

// awaitSpecs waits for the first CDI specs, so that healthy devices are not listed as unhealthy first. Without an entry they are
// unhealthy, so it does not wait long for a GPU that hangs. It returns false if ctx ends.
func (a *Agent) awaitSpecs(ctx context.Context, specs *cdi.Specs) bool {
	limited, cancel := context.WithTimeout(ctx, a.times.specsWait)
	defer cancel()
	return specs.Await(limited) || ctx.Err() == nil
}

// awaitSpec waits until it is known which devices the GPUNode takes out of service, so that none is offered for a moment. A node without a
// GPUNode has no maintenance, and offers devices that a DeviceTaintRule selects until the controller has copied the rule. It does not wait
// long: an API server that serves everything but GPUNodes must not stop the node. It returns false if ctx ends.
func (a *Agent) awaitSpec(ctx context.Context, object *gpunode.Object) bool {
	limited, cancel := context.WithTimeout(ctx, a.times.maintenanceWait)
	defer cancel()
	known := object.AwaitSpec(limited)
	if !known && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Offering GPUs before the node's GPUNode is known: a device out of service is withdrawn when the GPUNode is known",
			"waited", a.times.maintenanceWait)
	}
	return ctx.Err() == nil
}

// retire runs the device plugin of a node that does not serve limits whenever a pod has a device by a limit: one of before, or one of
// another plugin that was adopted. It runs until ctx is done or the plugin fails.
func retire(ctx context.Context, book *ledger.Ledger, run func(context.Context) error) error {
	held := func() bool {
		return slices.ContainsFunc(book.Holds(), func(h ledger.Hold) bool { return h.Holder.Kind == ledger.KindPod })
	}
	for broadcast.Await(ctx, book.Changed, held) && ctx.Err() == nil {
		group, running := errgroup.WithContext(ctx)
		running, cancel := context.WithCancel(running)
		group.Go(func() error { return run(running) })
		broadcast.Await(running, book.Changed, func() bool { return !held() })
		cancel()
		if err := group.Wait(); err != nil {
			return err
		}
	}
	return nil
}

// serving is how the APIs serve the agent's configuration.
func (a *Agent) serving(c components) wiring.Serving {
	serving := wiring.Serving{Config: a.config, Registerer: a.metrics, Waiting: func() error { return a.status.Ready("mode", "pause") }}
	if a.isDriverless {
		serving.NoDriver = c.driver.Missing
		serving.Unread = func() bool { return errors.Is(c.driver.Missing(), nvml.ErrNoDriver) }
	}
	return serving
}
