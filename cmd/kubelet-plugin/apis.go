// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"path/filepath"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/legacy"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/pkg/partition"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// frontEnds is what both APIs are served from.
type frontEnds struct {
	pods      *podstate.Pods
	book      *ledger.Ledger
	node      *nvml.Node
	devices   *partition.Maker
	shared    *sharing.Manager
	policy    *sharing.Policy
	specs     *cdi.Specs
	resources *podstate.PodResources
	self      *podstate.Node
}

var errNoPods = errors.New("the API server has not listed this node's pods yet")

// serveAPIs serves those that the mode says, once the node's pods are known: without them a device whose pod was removed while
// its containers live would pass for reused by that pod, and one that is free for taken.
func (a *agent) serveAPIs(ctx context.Context, f frontEnds) error {
	object, err := gpunode.New(a.objectConfig(f))
	if err != nil {
		return err
	}
	claims, err := driver.New(a.claimsConfig(f, object))
	if err != nil {
		return err
	}
	limits, err := legacy.New(a.limitsConfig(f, object))
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return object.Run(ctx) })
	if !f.pods.AwaitSync(ctx) {
		return group.Wait()
	}
	// Claims are served in every mode: those that have devices may still have to be prepared, and must be unprepared.
	group.Go(func() error { return claims.Run(ctx) })
	a.status.Waiting("claims", nil)
	if a.config.Mode.Claims() {
		a.status.Check("claims", claims.Ready)
	}
	if a.config.Mode.Limits() {
		group.Go(func() error { return limits.Run(ctx) })
		a.status.Check("limits", limits.Ready)
	} else {
		group.Go(func() error { return retire(ctx, f.book, limits.Run) })
		a.status.Waiting("limits", nil)
	}
	return group.Wait()
}

// retire runs the device plugin of a node that serves limits no more as long as a limit of before has a device.
func retire(ctx context.Context, book *ledger.Ledger, run func(context.Context) error) error {
	left := func() bool {
		return slices.ContainsFunc(book.Holds(), func(h ledger.Hold) bool { return h.Holder.Kind == ledger.KindPod })
	}
	if !left() {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return run(ctx) })
	group.Go(func() error {
		defer cancel()
		for {
			changed := book.Changed()
			if !left() {
				return nil
			}
			select {
			case <-ctx.Done():
				return nil
			case <-changed:
			}
		}
	})
	return group.Wait()
}

func (a *agent) objectConfig(f frontEnds) gpunode.Config {
	c := gpunode.Config{
		REST: a.api, DriverName: a.config.DriverName, NodeName: a.config.NodeName, Mode: string(a.config.Mode),
		Claims: func(namespace string) gpunode.Claims { return a.client.ResourceV1().ResourceClaims(namespace) },
		Node:   f.self, Ledger: f.book, Inventory: f.devices, Registerer: a.metrics, Sharing: f.shared, Excluded: a.config.Excluded,
	}
	if a.config.Mode.Limits() {
		c.Limits, c.OfferedToPods = a.config.Resources(), a.config.OfferedToPods
	}
	return c
}

func (a *agent) claimsConfig(f frontEnds, object *gpunode.Object) driver.Config {
	return driver.Config{
		DriverName: a.config.DriverName, NodeName: a.config.NodeName, KubeClient: a.client, KubeletDir: a.config.KubeletDir,
		Node: f.self, Ledger: f.book, Inventory: f.devices, Partitions: f.devices, Specs: f.specs, Pods: f.pods,
		Sharing: f.shared, Policy: f.policy, DaemonTrouble: object.DaemonTrouble,
		Recorder: a.recorder, Registerer: a.metrics,
		OfferedToClaims: a.config.OfferedToClaims, OfferedToPods: a.config.OfferedToPods, Limits: a.config.Resources(),
		PublishNothing: !a.config.Mode.Claims(),
		Allocations:    object, Strict: a.config.Strict && a.config.Mode == config.ModeDual,
	}
}

func (a *agent) limitsConfig(f frontEnds, object *gpunode.Object) legacy.Config {
	c := legacy.Config{
		Resources: a.config.Resources(), NodeName: a.config.NodeName,
		Directory:  filepath.Join(a.config.KubeletDir, "device-plugins"),
		IDStrategy: legacy.IDStrategy(a.config.DeviceIDStrategy), AnnotationPrefix: a.config.CDIAnnotationPrefix,
		PassDeviceSpecs: a.config.PassDeviceSpecs, AllocationPolicy: legacy.AllocationPolicy(a.config.AllocationPolicy),
		FailRequestsGreaterThanOne: a.config.FailRequestsGreaterThanOne,
		Inventory:                  f.devices, Offered: a.config.OfferedToPods, Retiring: !a.config.Mode.Limits(),
		Ledger: f.book, Specs: f.specs, Kubelet: f.resources, Sharing: f.policy,
		Allocations: object, Acknowledge: object.Acknowledge,
		Recorder: a.recorder, Registerer: a.metrics,
	}
	c.DevRoot, c.DevRootInAgent = f.node.DevRoot()
	for _, s := range a.config.DeviceListStrategies {
		c.Strategies = append(c.Strategies, legacy.Strategy(s))
	}
	return c
}
