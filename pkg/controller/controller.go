// SPDX-License-Identifier: Apache-2.0

// Package controller is the cluster's side of Tandem, what no node can do alone: it tells each node which of its GPUs are
// allocated to claims, keeps the scheduler from sending limits pods after GPUs that have just gone to claims, moves the pods
// of claims that lost a race, and says why a pod waits. Nothing here decides who owns a GPU: that is each node's ledger, and
// without a controller everything stays safe. One reconciler a file, each over pure functions that say what is to be done.
package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/webhook"
)

// Leading survives an API server that restarts. It costs nothing that these times are long: a restarted container holds
// the Lease still, and a pod that ends gives it up.
const (
	leaseDuration = 30 * time.Second
	renewDeadline = 25 * time.Second
	retryPeriod   = 2 * time.Second
)

// syncTimeout is for ever: an API server that is away is awaited, and readiness says so.
const syncTimeout = 365 * 24 * time.Hour

// Config of a controller.
type Config struct {
	REST *rest.Config
	// DriverName and ResourceName, that of whole GPUs, are the node agents'.
	DriverName   string
	ResourceName string
	// Namespace and LeaseName name the Lease by which one of several controllers leads, Identity who holds it. The same
	// identity leads again at once, so no two processes that may live at the same time have the same.
	Namespace, LeaseName, Identity string
	// Daemons say how the pods of MPS daemons are made, in Namespace.
	Daemons DaemonPods
	// WebhookName is that of the Service, the Secret and the configuration of the webhook that judges claim parameters, which
	// listens on WebhookPort; empty for none.
	WebhookName string
	WebhookPort int
	Registerer  prometheus.Registerer
}

func (c Config) webhook() webhook.Config {
	return webhook.Config{
		Namespace: c.Namespace, Name: c.WebhookName, DriverName: c.DriverName, Registerer: c.Registerer, Now: time.Now,
	}
}

// limits are the resources by which limits ask for our devices, on nodes of any strategy.
func (c Config) limits() device.Resources { return device.Resources{GPU: c.ResourceName} }

// Controller runs the reconcilers while it leads. Its methods are safe for concurrent use.
type Controller struct {
	manager manager.Manager
	synced  chan struct{}
	// idle is set while the API server serves no claims.
	idle atomic.Bool
}

// New is called once by main. It makes no request and starts nothing.
func New(c Config) (*Controller, error) {
	types, err := scheme()
	if err != nil {
		return nil, err
	}
	lock, err := resourcelock.NewFromKubeconfig(resourcelock.LeasesResourceLock, c.Namespace, c.LeaseName,
		resourcelock.ResourceLockConfig{Identity: c.Identity}, rest.CopyConfig(c.REST), renewDeadline)
	if err != nil {
		return nil, fmt.Errorf("make lease %s/%s: %w", c.Namespace, c.LeaseName, err)
	}
	cached := cacheOptions(c.DriverName, c.limits())
	server, served := webhook.NewServer(c.WebhookPort)
	if c.WebhookName != "" {
		maps.Copy(cached.ByObject, c.webhook().Watched())
	}
	m, err := manager.New(c.REST, manager.Options{
		Scheme:         types,
		MapperProvider: func(*rest.Config, *http.Client) (meta.RESTMapper, error) { return mapper(), nil },
		Cache:          cached,
		WebhookServer:  server,
		Logger:         klog.Background(),
		// main serves metrics and health, as the agent's does.
		Metrics:                             metricsserver.Options{BindAddress: "0"},
		LeaderElection:                      true,
		LeaderElectionID:                    c.LeaseName, // the name in leader_election_master_status
		LeaderElectionResourceLockInterface: lock,
		LeaderElectionReleaseOnCancel:       true,
		LeaseDuration:                       ptr.To(leaseDuration),
		RenewDeadline:                       ptr.To(renewDeadline),
		RetryPeriod:                         ptr.To(retryPeriod),
		Controller: ctrlconfig.Controller{
			SkipNameValidation: ptr.To(true), // tests run several in one process
			CacheSyncTimeout:   syncTimeout,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("make controller manager: %w", err)
	}
	o := &Controller{manager: m, synced: make(chan struct{})}
	if err := o.register(c); err != nil {
		return nil, err
	}
	if c.WebhookName != "" {
		if err := webhook.Register(m, c.webhook(), served); err != nil {
			return nil, err
		}
	}
	return o, nil
}

// register adds the reconcilers.
func (c *Controller) register(config Config) error {
	measured, err := newMetrics(config.Registerer)
	if err != nil {
		return err
	}
	if err := c.manager.Add(filler{c}); err != nil {
		return fmt.Errorf("add runnable: %w", err)
	}
	config.Daemons.Namespace = config.Namespace
	writer, live := c.manager.GetClient(), c.manager.GetAPIReader()
	recorder := c.manager.GetEventRecorder("tandem-controller")
	claims := newClaimReader(writer, c.manager.GetFieldIndexer(), config.DriverName)
	breaker := newBreaker(writer, live, config.limits(), measured, time.Now)
	followed := &follower{live: live, metrics: measured, now: time.Now}
	for _, r := range []interface{ register(manager.Manager) error }{
		&relay{client: writer, claims: claims},
		breaker,
		&allocatable{client: writer, claims: claims, limits: config.limits(), breaker: breaker, metrics: measured, now: time.Now},
		&healer{client: writer, driver: config.DriverName, live: live, recorder: recorder, metrics: measured, follower: followed, now: time.Now},
		followed,
		&retrier{client: writer, live: live, claims: claims, metrics: measured, now: time.Now},
		&daemons{client: writer, config: config.Daemons, metrics: measured, now: time.Now},
		&explainer{client: writer, driver: config.DriverName, limits: config.limits(), recorder: recorder, now: time.Now},
	} {
		if err := r.register(c.manager); err != nil {
			return err
		}
	}
	return nil
}

// What fails is tried again soon: by default a request that has failed for a while, as while the API server was away, would
// wait for a quarter of an hour.
const (
	firstRetry = 5 * time.Millisecond
	lastRetry  = 5 * time.Second
)

// options of a reconciler with so many workers.
func options(workers int) ctrlcontroller.Options {
	return ctrlcontroller.Options{
		MaxConcurrentReconciles: workers,
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, lastRetry),
	}
}

// filler fills the caches, whether or not this process leads, so that it has them when it does. It tells when they are filled.
// Those of the webhook are not among them: this has more important things to do.
// Nothing may wait for that before the manager runs: it would not end while the API server is away.
type filler struct{ *Controller }

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (filler) NeedLeaderElection() bool { return false }

// Start implements manager.Runnable.
func (f filler) Start(ctx context.Context) error {
	for kind := range cacheOptions("", device.Resources{}).ByObject {
		if _, err := f.manager.GetCache().GetInformer(ctx, kind); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("watch %T: %w", kind, err)
		}
	}
	close(f.synced)
	<-ctx.Done()
	return nil
}

var errNotSynced = errors.New("the API server has not listed claims, device classes, GPUNodes, nodes and pods yet")

// Ready is nil once the caches are filled, and where there can be no claims; a controller that waits for the lead is ready to
// take it.
func (c *Controller) Ready() error {
	if c.idle.Load() {
		return nil
	}
	select {
	case <-c.synced:
		return nil
	default:
		return errNotSynced
	}
}

// Run works until ctx is done, which is no error and gives the lead up, or until the lead is lost.
func (c *Controller) Run(ctx context.Context) error {
	if !c.awaitClaims(ctx) {
		return nil
	}
	if err := c.manager.Start(ctx); err != nil {
		return fmt.Errorf("run reconcilers: %w", err)
	}
	return nil
}
