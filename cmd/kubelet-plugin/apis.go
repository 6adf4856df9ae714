// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/legacy"
)

var errNoPods = errors.New("the API server has not listed this node's pods yet")

// serveAPIs serves the APIs of the node's mode, once the node's pods are known. Before that, the GPU of a removed pod whose
// containers still run would look as if the pod reused it, and a free GPU would look taken.
func (a *agent) serveAPIs(ctx context.Context, c components) error {
	object, err := gpunode.New(a.objectConfig(c))
	if err != nil {
		return err
	}
	claims, err := driver.New(a.claimsConfig(c, object))
	if err != nil {
		return err
	}
	plugin, err := legacy.New(a.pluginConfig(c, object))
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return object.Run(ctx) })
	if !c.pods.AwaitSync(ctx) {
		return group.Wait()
	}
	var waits sync.WaitGroup
	waits.Go(func() { _ = a.awaitSpecs(ctx, c.specs) && a.awaitMaintenance(ctx, object) })
	if err := a.adopt(ctx, c); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Giving no device to new pods and claims until the pods from before the start are known")
		a.event(corev1.EventTypeWarning, "HoldersUnknown", fmt.Sprintf("Serving no GPU to new pods, because kubelet may have given some to other pods before the agent started: %v", err))
		group.Go(func() error {
			a.adoptLater(ctx, c, err)
			return nil
		})
	}
	// While another process gives the same devices away, the agent gives none.
	claims.FindConflicting(ctx)
	waits.Wait()
	if ctx.Err() != nil {
		return group.Wait()
	}
	plugin.FindConflicting(ctx) // it lists the devices, which have specs now
	group.Go(func() error { return a.newLabels(ctx, c, c.devices, a.metrics).Run(ctx) })
	group.Go(func() error { return c.usable.Run(ctx) })
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
		group.Go(func() error { return retire(ctx, c.book, plugin.Run) })
	}
	return group.Wait()
}

const (
	// sourceStart is the agent's source of ledger.Withhold.
	sourceStart = "pods of before the start"
	// adoptInterval is how often adopt is tried again. kubelet writes its checkpoint anew when we register.
	adoptInterval = time.Second
)

// errHoldersUnknown names no pod, because every pod may read /readyz.
var errHoldersUnknown = errors.New("it is not known which pods from before the agent's start have GPUs: see event HoldersUnknown of the node")

// adopt adds holds of pods that kubelet had admitted before the start, by another plugin, and not started: Restore takes them for ended
// ones, because it does not know the node's pods. While that fails, no device is given to a new holder.
func (a *agent) adopt(ctx context.Context, c components) error {
	err := c.adopt(ctx)
	if ctx.Err() == nil {
		c.adopted.Store(err == nil)
		var reason error
		if err != nil {
			reason = errHoldersUnknown
		}
		c.book.Withhold(sourceStart, reason)
	}
	return err
}

// adoptLater tries again until it succeeds or ctx is done, and logs each new reason. why is the first.
func (a *agent) adoptLater(ctx context.Context, c components, why error) {
	logger := klog.FromContext(ctx)
	// The error is that of ctx.
	_ = wait.PollUntilContextCancel(ctx, adoptInterval, false, func(ctx context.Context) (bool, error) {
		err := a.adopt(ctx, c)
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
func (a *agent) awaitSpecs(ctx context.Context, specs *cdi.Specs) bool {
	limited, cancel := context.WithTimeout(ctx, a.times.specsWait)
	defer cancel()
	return specs.Await(limited) || ctx.Err() == nil
}

// awaitMaintenance waits until it is known which GPUs are under maintenance, so that none is offered for a moment. It does not wait long:
// an API server that serves everything but GPUNodes must not stop the node. It returns false if ctx ends.
func (a *agent) awaitMaintenance(ctx context.Context, object *gpunode.Object) bool {
	limited, cancel := context.WithTimeout(ctx, a.times.maintenanceWait)
	defer cancel()
	known := object.AwaitSpec(limited)
	if !known && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Offering GPUs before the node's GPUNode is known: a GPU under maintenance is withdrawn when the GPUNode is known",
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

func (a *agent) objectConfig(c components) gpunode.Config {
	config := gpunode.Config{
		REST: a.api, DriverName: a.config.DriverName, NodeName: a.config.NodeName,
		Facts:  gpunode.Facts{Mode: string(a.config.Mode), Excluded: a.config.Excluded, BootID: a.bootID},
		Claims: func(namespace string) gpunode.Claims { return a.client.ResourceV1().ResourceClaims(namespace) },
		Node:   c.self, Ledger: c.book, Inventory: c.usable, Registerer: a.metrics, Sharing: c.shared, Recorder: a.recorder,
	}
	config.Waiting = func() string {
		reason := errors.Join(c.book.Withheld(), a.status.Ready("mode", "pause"))
		if missing := c.node.Missing(); missing != nil && a.isDriverless {
			reason = errors.Join(missing, reason)
		}
		if reason == nil {
			return ""
		}
		return strings.ReplaceAll(reason.Error(), "\n", "; ")
	}
	if a.config.Mode.Limits() {
		if !a.limitsByCDI() {
			config.Inventory = c.usable.WithoutCDI()
		}
		config.Facts.Limits, config.Facts.OfferedToPods = a.config.Resources(), a.config.OfferedToPods
	}
	return config
}

// limitsByCDI reports whether pods with limits get their GPUs by CDI.
func (a *agent) limitsByCDI() bool {
	return slices.ContainsFunc(a.config.DeviceListStrategies, func(s string) bool { return !withoutCDI(s) })
}

func (a *agent) claimsConfig(c components, object *gpunode.Object) driver.Config {
	metadataDir := ""
	if a.config.DeviceMetadata {
		metadataDir = a.config.CDIDir
	}
	return driver.Config{
		MetadataDir: metadataDir,
		DriverName:  a.config.DriverName, NodeName: a.config.NodeName, KubeClient: a.client, KubeletDir: a.config.KubeletDir,
		Node: c.self, Ledger: c.book, Inventory: c.usable, Partitions: c.devices, HandOver: c.cleaner.Ensure, Specs: c.specs, Pods: c.pods,
		Sharing: c.shared, Policy: c.policy, DaemonTrouble: object.DaemonTrouble, Adopt: c.adoptClaims,
		Recorder: a.recorder, Registerer: a.metrics,
		OfferedToClaims: a.config.OfferedToClaims, OfferedToPods: a.config.OfferedToPods, Limits: a.config.Resources(),
		PublishNothing: !a.config.Mode.Claims(),
		Allocations:    object, Strict: a.reservesAtOnce(),
		PartitionUUIDs: a.config.PartitionUUIDs,
	}
}

func (a *agent) pluginConfig(c components, object *gpunode.Object) legacy.Config {
	config := legacy.Config{
		Resources: a.config.Resources(), NodeName: a.config.NodeName,
		Directory: filepath.Join(a.config.KubeletDir, "device-plugins"),
		IndexIDs:  a.config.DeviceIDStrategy == "index", AnnotationPrefix: a.config.CDIAnnotationPrefix,
		PassDeviceSpecs: a.config.PassDeviceSpecs, Packed: a.config.AllocationPolicy == "packed",
		FailRequestsGreaterThanOne: a.config.FailRequestsGreaterThanOne,
		Inventory:                  c.usable, Offered: a.config.OfferedToPods, Retiring: !a.config.Mode.Limits(),
		Ledger: c.book, Specs: c.specs, Kubelet: c.resources, Sharing: c.policy, Requesters: c.pods,
		Allocations: object, Acknowledge: object.Acknowledge, Adopt: c.adopt, Excluded: a.config.Excluded,
		Recorder: a.recorder, Registerer: a.metrics,
	}
	if !a.limitsByCDI() {
		config.Inventory = c.usable.WithoutCDI()
	}
	if a.config.ResetGPUs {
		config.HandOver = c.cleaner.Ensure
	}
	if a.config.ChecksNamespaces() {
		config.NamespaceOf = c.pods.NamespaceOf
	}
	config.DevRoot, config.IMEXChannels, config.Env = c.node.DevRoot, a.config.IMEXChannels, map[string]string{}
	// NVIDIA's container runtime reads them, and its device plugin sets them with CDI as well.
	for name, on := range map[string]bool{
		"NVIDIA_GDS": a.config.GDS, "NVIDIA_GDRCOPY": a.config.GDRCopy, "NVIDIA_MOFED": a.config.MOFED,
	} {
		if on {
			config.Env[name] = "enabled"
		}
	}
	for _, s := range a.config.DeviceListStrategies {
		config.Strategies = append(config.Strategies, legacy.Strategy(s))
	}
	return config
}
