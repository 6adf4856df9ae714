// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/status"
	"github.com/tandem-gpu/tandem/internal/version"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/pkg/partition"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/pkg/reconcile"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// cdiVendor and cdiClass make up the kind of the CDI devices, beside the "claim" class of NVIDIA's DRA driver.
const (
	cdiVendor = "k8s.gpu.nvidia.com"
	cdiClass  = "gpu"
)

// agent is the wiring of one node.
type agent struct {
	config config.Config
	api    *rest.Config
	client kubernetes.Interface
	// reload reads the configuration anew, apart from the node's label.
	reload   func() (config.Config, error)
	metrics  metrics
	status   *status.Server
	events   record.EventBroadcaster
	recorder record.EventRecorder
	bootID   string
}

func newAgent(c config.Config) (*agent, error) {
	api, err := newAPI(c.Kubeconfig)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(api)
	if err != nil {
		return nil, fmt.Errorf("create API client: %w", err)
	}
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("read boot ID: %w", err)
	}
	metrics := newMetrics()
	events := record.NewBroadcaster()
	server := status.New(c.HTTPEndpoint, metrics)
	// Ready means that both APIs are served, also while they are not yet there to be asked.
	server.Waiting("claims", errNotStarted)
	server.Waiting("limits", errNotStarted)
	return &agent{
		config: c, api: api, client: client, metrics: metrics, events: events, status: server,
		reload:   func() (config.Config, error) { return c, nil },
		recorder: events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "tandem", Host: c.NodeName}),
		bootID:   strings.TrimSpace(string(bootID)),
	}, nil
}

// newAPI does not throttle: every Prepare costs one GET, and a default client makes it wait 200 ms for it.
func newAPI(kubeconfig string) (*rest.Config, error) {
	restConfig, err := rest.InClusterConfig()
	if kubeconfig != "" {
		restConfig, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("configure API client: %w (outside a cluster --kubeconfig is needed)", err)
	}
	restConfig.QPS = -1
	restConfig = rest.AddUserAgent(restConfig, "tandem/"+version.Version)
	restConfig.ContentType = "application/vnd.kubernetes.protobuf"
	restConfig.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	return restConfig, nil
}

// run blocks until ctx is done, and returns nil then, or until a component fails. It leaves only the ledger's records and the CDI
// specs behind, which running pods need.
func (a *agent) run(ctx context.Context) error {
	a.events.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: a.client.CoreV1().Events("")})
	defer a.events.Shutdown()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return a.status.Run(ctx) })
	group.Go(func() error { return a.returnMemory(ctx) })
	group.Go(func() error { return a.serve(ctx) })
	return group.Wait()
}

var errNotStarted = errors.New("not started")

// serve brings up the node in the order that keeps it safe: the ledger's lock, the GPUs, the holds that are known from
// before, the CDI specs, and only then the two APIs.
func (a *agent) serve(ctx context.Context) error {
	cgroups := podstate.NewCgroups(a.config.CgroupRoot)
	pods, err := podstate.NewPods(a.client, a.config.NodeName, cgroups, a.config.KubeletDir)
	if err != nil {
		return err
	}
	resources, err := podstate.NewPodResources(a.config.KubeletDir)
	if err != nil {
		return err
	}
	made := newRecords(a.config.RunDir, a.bootID)
	book, err := a.openLedger(ctx, reconcile.Guard(pods, made.bind), pods.Queue(a.config.Resources().Has))
	if err == nil {
		err = made.load(ctx)
		if err == nil {
			err = a.serveNode(ctx, cgroups, pods, book, made, resources)
		}
		err = errors.Join(err, book.Close())
	}
	return errors.Join(unlessStopped(ctx, err), resources.Close())
}

// records are what was made and set for claims, which goes before their holds end.
type records struct {
	partitions *partition.Records
	settings   *sharing.Records
}

func newRecords(runDir, bootID string) records {
	return records{
		partitions: partition.NewRecords(filepath.Join(runDir, "partitions"), bootID),
		settings:   sharing.NewRecords(filepath.Join(runDir, "sharing"), bootID),
	}
}

func (r records) bind(h ledger.Hold) bool {
	return r.partitions.Made(h.Device) || h.Holder.Kind == ledger.KindClaim && r.settings.Applied(h.Holder.ID, h.Device)
}

// load is called under the ledger's lock.
func (r records) load(ctx context.Context) error {
	for _, of := range []interface{ Load() ([]error, error) }{r.partitions, r.settings} {
		problems, err := of.Load()
		for _, problem := range problems {
			klog.FromContext(ctx).Error(problem, "A record is not as it should be")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// unlessStopped drops the errors of what was interrupted, and of what would be started anew.
func unlessStopped(ctx context.Context, err error) error {
	anew := errors.Is(err, nvml.ErrDriverReplaced) || errors.Is(err, errReconfigured)
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || anew) {
		return nil
	}
	return err
}

func (a *agent) serveNode(ctx context.Context, cgroups *podstate.Cgroups, pods *podstate.Pods, book *ledger.Ledger,
	made records, resources *podstate.PodResources,
) error {
	group, ctx := errgroup.WithContext(ctx)
	watchPods := sync.OnceFunc(func() { group.Go(func() error { return pods.Run(ctx) }) })
	group.Go(func() error {
		care := caretaker{agent: a, cgroups: cgroups, pods: pods, book: book, made: made, resources: resources, watchPods: watchPods}
		takeCare, stop := care.prepare(ctx)
		defer stop()
		node, err := a.openNode(ctx, takeCare)
		if err != nil {
			return err
		}
		group.Go(func() error { return node.Run(ctx) })
		if !a.awaitGPU(ctx, node, takeCare) {
			return nil
		}
		stop()
		watchPods()
		self := podstate.NewNode(a.client, a.config.NodeName)
		group.Go(func() error { return self.Run(ctx) })
		devices := partition.NewMaker(made.partitions, node, partition.Policy{Dynamic: a.config.Dynamic, Sharing: a.config.SharingOf})
		return a.serveGPUs(ctx, cgroups, pods, book, node, devices, made.settings, self, resources)
	})
	return group.Wait()
}

func (a *agent) serveGPUs(ctx context.Context, cgroups *podstate.Cgroups, pods *podstate.Pods, book *ledger.Ledger, node *nvml.Node,
	devices *partition.Maker, settings *sharing.Records, self *podstate.Node, resources *podstate.PodResources,
) error {
	specs, err := a.newSpecs(node)
	if err != nil {
		return err
	}
	shared := sharing.NewManager(sharing.Options{
		Records: settings, RunDir: a.config.RunDir, DriverRoot: node.DriverRoot(), Hardware: node, Specs: specs,
	})
	holds := a.reconcilerConfig(cgroups, pods, book, devices, shared, resources)
	holds.Inventory, holds.Registerer, holds.AddPlaceholders = devices, a.metrics, specs.AddPlaceholders
	reconciler, err := reconcile.New(holds)
	if err != nil {
		return err
	}
	if err := reconciler.Restore(ctx); err != nil {
		return err
	}
	if err := specs.Ensure(ctx); err != nil {
		// The specs' own loop tries again, and every Prepare and Allocate does.
		klog.FromContext(ctx).Error(err, "Writing CDI specs")
	}
	policy := sharing.NewPolicy(shared, devices, book, pods)
	front := frontEnds{
		pods: pods, book: book, node: node, devices: devices, shared: shared, policy: policy, specs: specs, resources: resources, self: self,
	}
	a.status.Waiting("claims", errNoPods)
	a.status.Waiting("limits", errNoPods)
	group, ctx := errgroup.WithContext(ctx)
	for _, run := range []func(context.Context) error{
		reconciler.Run, specs.Run, shared.Run, policy.Run, a.checkRuntime,
		func(ctx context.Context) error { return a.provision(ctx, book, devices) },
		func(ctx context.Context) error {
			return a.newSettings(self, devices.Inventory).run(ctx, func(ctx context.Context, c config.Config) error {
				return a.with(c).serveAPIs(ctx, front)
			})
		},
	} {
		group.Go(func() error { return run(ctx) })
	}
	return group.Wait()
}

// reconcilerConfig lacks the inventory, and where metrics go.
func (a *agent) reconcilerConfig(cgroups *podstate.Cgroups, pods *podstate.Pods, book *ledger.Ledger, devices *partition.Maker, shared *sharing.Manager,
	resources *podstate.PodResources,
) reconcile.Config {
	return reconcile.Config{
		Ledger: book, Pods: pods, Cgroups: cgroups, Resources: resources, Partitions: devices, Settings: shared, Recorder: a.recorder,
		Claims:     func(namespace string) reconcile.Claims { return a.client.ResourceV1().ResourceClaims(namespace) },
		KubeletDir: a.config.KubeletDir, NodeName: a.config.NodeName, DriverName: a.config.DriverName, Limits: a.config.Resources(),
	}
}

// with is the agent with another configuration.
func (a *agent) with(c config.Config) *agent {
	next := *a
	next.config = c
	return &next
}

func (a *agent) nodeOptions() nvml.Options {
	options := nvml.Options{
		HostRoot: a.config.HostRoot, DriverRoot: a.config.DriverRoot, DevRoot: a.config.DevRoot, Library: a.config.NVML,
		Seed: a.config.NodeName, SysfsRoot: a.config.SysfsRoot,
	}
	switch a.config.CDIHook {
	case "none":
		options.DisabledHooks = []string{"all"}
	case "install":
		options.HookPath = a.hookPath()
	default:
		options.HookPath = a.config.CDIHook
	}
	return options
}

// hookPath is the same for the agent and the host: the chart mounts kubelet's directory where it is.
func (a *agent) hookPath() string {
	return filepath.Join(a.config.KubeletDir, "plugins", a.config.DriverName, "nvidia-cdi-hook")
}

func (a *agent) newSpecs(node *nvml.Node) (*cdi.Specs, error) {
	options := cdi.Options{Dir: a.config.CDIDir, Vendor: cdiVendor, Class: cdiClass, Source: node}
	if a.config.CDIHook == "install" {
		options.Hook = cdi.NewHook(a.config.CDIHookSource, a.hookPath())
	}
	return cdi.New(options)
}

// provisionRetry is how soon space that was not to be had is asked for again.
const provisionRetry = 10 * time.Second

// provision keeps space on disk for the record of every device, and every replica, that a limit may get.
func (a *agent) provision(ctx context.Context, book *ledger.Ledger, devices *partition.Maker) error {
	for {
		changed := devices.Changed()
		var retry <-chan time.Time
		inv := devices.Inventory()
		offers, _ := a.config.Resources().Offers(inv.GPUs)
		if err := book.Provision(max(len(inv.Devices()), len(offers))); err != nil {
			klog.FromContext(ctx).Error(err, "Reserving space for the ledger")
			retry = time.After(provisionRetry)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-retry:
		}
	}
}
