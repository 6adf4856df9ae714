// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/partition"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/pkg/reconcile"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// caretaker serves Unprepare without an NVIDIA driver. kubelet cannot end a pod whose claims are not unprepared, and a driver
// upgrade waits until all GPU pods have ended. TestPodsEndWithoutADriver fails without it.
type caretaker struct {
	*agent
	cgroups   *podstate.Cgroups
	pods      *podstate.Pods
	book      *ledger.Ledger
	made      records
	resources *podstate.PodResources
	// watchPods makes pods known.
	watchPods func()
}

// prepare returns how to start it, which may be called often, and how to stop it, which must be called.
func (c caretaker) prepare(ctx context.Context) (start, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var group errgroup.Group
	start = sync.OnceFunc(func() { group.Go(func() error { return c.run(ctx) }) })
	stop = sync.OnceFunc(func() {
		cancel()
		if err := group.Wait(); err != nil {
			klog.FromContext(ctx).Error(err, "Serving claims without a driver")
		}
	})
	return start, stop
}

// run serves until ctx is done. On a node where nothing is held, it does nothing.
func (c caretaker) run(ctx context.Context) error {
	claims, err := podstate.ReadClaimState(c.config.KubeletDir, c.config.DriverName)
	if err == nil && len(claims) == 0 && len(c.book.Holds()) == 0 {
		return nil
	}
	klog.FromContext(ctx).Info("Without a driver, claims can only end")
	// What registers metrics here would be in the way of what serves later.
	apart := prometheus.NewRegistry()
	shared := sharing.NewManager(sharing.Options{
		Records: c.made.settings, RunDir: c.config.RunDir, DriverRoot: "/", Hardware: nothing{}, Specs: nothing{},
	})
	holds := c.reconcilerConfig(c.cgroups, c.pods, c.book, partition.NewMaker(c.made.partitions, nothing{}, partition.Policy{}), shared, c.resources)
	holds.Inventory, holds.Registerer = nothing{}, apart
	reconciler, err := reconcile.New(holds)
	if err != nil {
		return err
	}
	front, err := driver.New(driver.Config{
		DriverName: c.config.DriverName, NodeName: c.config.NodeName, KubeClient: c.client, KubeletDir: c.config.KubeletDir,
		Ledger: c.book, Inventory: nothing{}, Specs: nothing{}, Pods: c.pods, Recorder: c.recorder,
		Registerer: apart, PublishNothing: true,
	})
	if err != nil {
		return err
	}
	if err := reconciler.Restore(ctx); err != nil {
		return err
	}
	c.watchPods()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return reconciler.Run(ctx) })
	group.Go(func() error {
		if !c.pods.AwaitSync(ctx) {
			return nil
		}
		return front.Run(ctx)
	})
	return group.Wait()
}

// nothing is a node without a driver.
type nothing struct{}

func (nothing) Inventory() device.Inventory { return device.Inventory{} }

// Changed never: there is another inventory once there is a driver.
func (nothing) Changed() <-chan struct{} { return nil }

var errNoDriver = errors.New("the node has no driver")

func (nothing) Ensure(context.Context, ...string) error { return errNoDriver }

func (nothing) Add(context.Context, device.Partition) error { return errNoDriver }

// The methods for client devices change nothing. The agent removes stale client devices once it has a driver.
func (nothing) WriteClientDevice(string, specs.ContainerEdits) (string, error) { return "", nil }

func (nothing) RemoveClientDevices(string) error { return nil }

func (nothing) ClientDevices(string) ([]string, error) { return nil, nil }

func (nothing) RetainClientDevices([]string) error { return nil }

func (nothing) ComputeMode(context.Context, string) (device.ComputeMode, error) {
	return "", errNoDriver
}

func (nothing) SetComputeMode(context.Context, string, device.ComputeMode) (device.ComputeMode, error) {
	return "", errNoDriver
}

func (nothing) SetTimeSlice(context.Context, string, int) error { return errNoDriver }

func (nothing) QualifiedName(string) string { return "" }

func (nothing) EnableMIG(context.Context, string) error { return errNoDriver }

func (nothing) DisableMIG(context.Context, string) error { return errNoDriver }

func (nothing) Create(context.Context, device.Ref, device.Profile) (device.Partition, error) {
	return device.Partition{}, errNoDriver
}

func (nothing) Destroy(context.Context, device.Ref) error { return errNoDriver }

func (nothing) Partitions(context.Context, string) ([]device.Partition, error) {
	return nil, errNoDriver
}
