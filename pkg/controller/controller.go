// SPDX-License-Identifier: Apache-2.0

// Package controller contains the duties that need the whole cluster. It copies allocations and device taints to each node's GPUNode,
// corrects nodes' allocatable devices so that the scheduler sends no pods to GPUs of claims, evicts the pods of claims in conflict, evicts
// pods with limits from devices with a taint of effect NoExecute, makes kubelet retry claims, writes node conditions, and runs MPS daemons.
// It never decides who owns a GPU: each node's ledger does, and stays correct without a controller. Each file has one reconciler around pure
// functions.
package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/webhook"
)

// syncTimeout never expires: the controller waits for an API server that does not answer, and is not ready meanwhile.
const syncTimeout = 365 * 24 * time.Hour

// Config of a controller.
type Config struct {
	REST *rest.Config
	// DriverName and ResourceName, the extended resource of whole GPUs, are those of the agents.
	DriverName   string
	ResourceName string
	// Namespace and LeaseName identify the Lease of the leader; Identity is its holder. A process with the same identity leads
	// again at once, so processes that may run at the same time need different identities.
	Namespace, LeaseName, Identity string
	// Daemons describes the pods of MPS daemons, which are created in Namespace.
	Daemons DaemonPods
	// WebhookName is the name of the Service, the Secret and the configuration of the webhook that validates claim parameters. It
	// listens on WebhookPort. Empty disables it.
	WebhookName string
	WebhookPort int
	Registerer  prometheus.Registerer
}

// limits returns the extended resources of Tandem's devices, for every MIG strategy.
func (c Config) limits() device.Resources { return device.Resources{GPU: c.ResourceName} }

// cluster is what the reconcilers share. Each uses a part of it.
type cluster struct {
	// client reads from a cache, which has Pending pods only and not all fields. live reads from the API server.
	client client.Client
	live   client.Reader
	// claims are those with devices of the driver, and changes are those of their allocations.
	claims   claimReader
	changes  source.Source
	driver   string
	limits   device.Resources
	recorder events.EventRecorder
	metrics  *metrics
	now      func() time.Time
}

// Controller runs the reconcilers while it leads. Its methods are safe for concurrent use.
type Controller struct {
	manager manager.Manager
	synced  atomic.Bool
	// idle is set while the API server serves no claims.
	idle atomic.Bool
}

// New is called once by main. It makes no request and starts nothing.
func New(c Config) (*Controller, error) {
	known, err := scheme()
	if err != nil {
		return nil, err
	}
	lock, err := newLease(c)
	if err != nil {
		return nil, err
	}
	cached := cacheOptions(c.limits())
	var hook *webhook.Webhook
	if c.WebhookName != "" {
		hook = webhook.New(webhook.Config{
			Namespace: c.Namespace, Name: c.WebhookName, Port: c.WebhookPort, DriverName: c.DriverName, Registerer: c.Registerer,
		})
		maps.Copy(cached.ByObject, hook.Watched())
	}
	m, err := manager.New(c.REST, manager.Options{
		Scheme:         known,
		MapperProvider: func(*rest.Config, *http.Client) (meta.RESTMapper, error) { return mapper(known), nil },
		Cache:          cached,
		Logger:         klog.Background(),
		// main serves metrics and health.
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
	o := &Controller{manager: m}
	if err := o.register(c); err != nil {
		return nil, err
	}
	if hook != nil {
		if err := hook.Register(m, options(1)); err != nil {
			return nil, err
		}
	}
	return o, nil
}

func (c *Controller) register(config Config) error {
	api, err := claimClient(c.manager)
	if err != nil {
		return err
	}
	claims, err := newClaimCache(api, config.DriverName)
	if err != nil {
		return err
	}
	rules := newRuleCache(api)
	for _, r := range []manager.Runnable{claims, rules, filler{c, claims}} {
		if err := c.manager.Add(r); err != nil {
			return fmt.Errorf("add runnable %T: %w", r, err)
		}
	}
	config.Registerer.MustRegister(gpuNodes{cache: c.manager.GetCache(), synced: c.synced.Load})
	config.Daemons.Namespace = config.Namespace
	all := cluster{
		client: c.manager.GetClient(), live: c.manager.GetAPIReader(), claims: claims, changes: claims.changes(),
		driver: config.DriverName, limits: config.limits(), recorder: c.manager.GetEventRecorder("tandem-controller"),
		metrics: newMetrics(config.Registerer), now: time.Now,
	}
	breaker := newBreaker(all)
	for _, r := range []interface{ register(manager.Manager) error }{
		&relay{all},
		&tainter{cluster: all, rules: rules},
		breaker,
		&allocatable{cluster: all, breaker: breaker},
		&conditions{all},
		&lifecycle{cluster: all, gone: map[string]time.Time{}},
		&healer{cluster: all, evictions: newEvictions(time.Now), turns: map[string]turn{}},
		&evictor{cluster: all, evictions: newEvictions(time.Now), turns: map[string]podTurn{}},
		&retrier{cluster: all, nodes: map[string]schedule{}},
		&daemons{cluster: all, config: config.Daemons},
	} {
		if err := r.register(c.manager); err != nil {
			return fmt.Errorf("register %T: %w", r, err)
		}
	}
	return nil
}

// The default backoff grows to a quarter of an hour, too long after the API server was unavailable.
const (
	firstRetry = 5 * time.Millisecond
	lastRetry  = 5 * time.Second
)

func options(workers int) ctrlcontroller.Options { return optionsFor[reconcile.Request](workers) }

// forGPUNodes begins a reconciler that runs for each GPUNode, and again after each change that the predicate selects.
func forGPUNodes(m manager.Manager, name string, workers int, changes predicate.Predicate) *builder.Builder {
	return builder.ControllerManagedBy(m).Named(name).For(&v1alpha1.GPUNode{}, builder.WithPredicates(changes)).WithOptions(options(workers))
}

// optionsFor returns the options of a reconciler with its own type of request.
func optionsFor[T comparable](workers int) ctrlcontroller.TypedOptions[T] {
	return ctrlcontroller.TypedOptions[T]{
		MaxConcurrentReconciles: workers,
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[T](firstRetry, lastRetry),
	}
}

// jsonPatch is a patch of this kind with a value that is encoded when it is sent.
type jsonPatch struct {
	kind  types.PatchType
	value any
}

// Type implements client.Patch.
func (p jsonPatch) Type() types.PatchType { return p.kind }

// Data implements client.Patch.
func (p jsonPatch) Data(client.Object) ([]byte, error) { return json.Marshal(p.value) }

// requeue is the end of a Reconcile. After an error the queue tries again with its own backoff; controller-runtime ignores, and complains
// of, a time beside an error.
func requeue(after time.Duration, errs []error) (reconcile.Result, error) {
	if err := errors.Join(errs...); err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: after}, nil
}

// filler starts the informers in every replica, so that a new leader has filled caches. It sets synced once they are filled.
// Readiness does not depend on the webhook's informers. TestRunAwaitsTheAPIServer fails if the informers start before the manager
// runs: the manager would wait for them and would not end on SIGTERM.
type filler struct {
	*Controller
	claims *claimCache
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (filler) NeedLeaderElection() bool { return false }

// Start implements manager.Runnable.
func (f filler) Start(ctx context.Context) error {
	for kind := range cacheOptions(device.Resources{}).ByObject {
		if _, err := f.manager.GetCache().GetInformer(ctx, kind); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("watch %T: %w", kind, err)
		}
	}
	f.synced.Store(f.claims.synced(ctx))
	<-ctx.Done()
	return nil
}

// Ready returns nil once the caches are filled, and while the API server serves no claims. A standby replica is ready too.
func (c *Controller) Ready() error {
	if !c.idle.Load() && !c.synced.Load() {
		return errors.New("the API server has not listed claims, GPUNodes, nodes and pods yet")
	}
	return nil
}

// Run blocks until ctx is done, and then returns nil and releases the Lease. It returns an error if it loses the Lease.
func (c *Controller) Run(ctx context.Context) error {
	if !c.awaitClaims(ctx) {
		return nil
	}
	if err := c.manager.Start(ctx); err != nil {
		return fmt.Errorf("run reconcilers: %w", err)
	}
	return nil
}

// idleInterval is how often to check whether the API server serves claims, which requires its restart.
const idleInterval = time.Minute

// awaitClaims blocks while the API server does not serve claims, since every watch of claims would fail. It returns true once claims
// may exist, also if the API server does not answer, and false once ctx is done.
func (c *Controller) awaitClaims(ctx context.Context) bool {
	_ = wait.PollUntilContextCancel(ctx, idleInterval, true, func(ctx context.Context) (bool, error) {
		err := c.manager.GetAPIReader().List(ctx, &resourceapi.ResourceClaimList{}, client.Limit(1))
		idle := apierrors.IsNotFound(err)
		if before := c.idle.Swap(idle); idle && !before {
			klog.FromContext(ctx).Info("Waiting until the API server serves resource.k8s.io/v1")
		}
		return !idle, nil
	})
	return ctx.Err() == nil
}
