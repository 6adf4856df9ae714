// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
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
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/pkg/evidence"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/legacy"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/pkg/reconcile"
)

// cdiVendor and cdiClass make up the kind of the CDI devices, beside the "claim" class of NVIDIA's DRA driver.
const (
	cdiVendor = "k8s.gpu.nvidia.com"
	cdiClass  = "gpu"
)

// agent is the wiring of one node.
type agent struct {
	config   config.Config
	api      *rest.Config
	client   kubernetes.Interface
	metrics  *prometheus.Registry
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

// run serves until ctx is done or something fails for good, and leaves nothing behind but the ledger's records and the
// CDI specs, which running pods depend on. Being stopped is no error, whatever it interrupts.
func (a *agent) run(ctx context.Context) error {
	a.events.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: a.client.CoreV1().Events("")})
	defer a.events.Shutdown()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return a.status.Run(ctx) })
	group.Go(func() error { return a.serve(ctx) })
	return group.Wait()
}

var errNotStarted = errors.New("not started")

// serve brings up the node in the order that keeps it safe: the ledger's lock, the GPUs, the holds that are known from
// before, the CDI specs, and only then the two APIs.
func (a *agent) serve(ctx context.Context) error {
	cgroups := evidence.NewCgroups(a.config.CgroupRoot)
	pods, err := evidence.NewPods(a.client, a.config.NodeName, cgroups)
	if err != nil {
		return err
	}
	resources, err := evidence.NewPodResources(a.config.KubeletDir)
	if err != nil {
		return err
	}
	book, err := a.openLedger(ctx, pods, pods.Queue(a.config.ResourceName))
	if err == nil {
		err = errors.Join(a.serveNode(ctx, cgroups, pods, book, resources), book.Close())
	}
	return errors.Join(unlessStopped(ctx, err), resources.Close())
}

// unlessStopped drops the errors of what was interrupted, and of what would be started anew.
func unlessStopped(ctx context.Context, err error) error {
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, nvml.ErrDriverReplaced)) {
		return nil
	}
	return err
}

func (a *agent) serveNode(ctx context.Context, cgroups *evidence.Cgroups, pods *evidence.Pods, book *ledger.Ledger,
	resources *evidence.PodResources,
) error {
	node, err := a.openNode(ctx)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return node.Run(ctx) })
	group.Go(func() error {
		if !a.awaitGPU(ctx, node) {
			return nil
		}
		group.Go(func() error { return pods.Run(ctx) })
		return a.serveGPUs(ctx, cgroups, pods, book, node, resources)
	})
	return group.Wait()
}

func (a *agent) serveGPUs(ctx context.Context, cgroups *evidence.Cgroups, pods *evidence.Pods, book *ledger.Ledger, node *nvml.Node,
	resources *evidence.PodResources,
) error {
	reconciler, err := reconcile.New(reconcile.Config{
		Ledger: book, Pods: pods, Cgroups: cgroups, Resources: resources,
		Claims:    func(namespace string) reconcile.Claims { return a.client.ResourceV1().ResourceClaims(namespace) },
		Inventory: node, KubeletDir: a.config.KubeletDir, NodeName: a.config.NodeName,
		DriverName: a.config.DriverName, Resource: a.config.ResourceName, Registerer: a.metrics,
	})
	if err != nil {
		return err
	}
	specs, err := a.newSpecs(node)
	if err != nil {
		return err
	}
	claims, err := driver.New(driver.Config{
		DriverName: a.config.DriverName, NodeName: a.config.NodeName, KubeClient: a.client, KubeletDir: a.config.KubeletDir,
		Ledger: book, Inventory: node, Specs: specs, Pods: pods, Recorder: a.recorder, Registerer: a.metrics,
	})
	if err != nil {
		return err
	}
	self := evidence.NewNode(a.client, a.config.NodeName)
	objectConfig := gpunode.Config{
		REST: a.api, NodeName: a.config.NodeName, Mode: string(a.config.Mode),
		Node: self, Ledger: book, Inventory: node, Registerer: a.metrics,
	}
	if a.config.Mode.Limits() {
		objectConfig.LimitsResource = a.config.ResourceName
	}
	object, err := gpunode.New(objectConfig)
	if err != nil {
		return err
	}
	limits, err := legacy.New(a.limitsConfig(book, node, specs, resources, object))
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
	group, ctx := errgroup.WithContext(ctx)
	for _, run := range []func(context.Context) error{
		reconciler.Run, specs.Run, a.checkRuntime, self.Run, object.Run,
		func(ctx context.Context) error { return provision(ctx, book, node) },
		a.afterPods(pods, "claims", claims.Run, claims.Ready),
		a.afterPods(pods, "limits", limits.Run, limits.Ready),
		a.returnMemory,
	} {
		group.Go(func() error { return run(ctx) })
	}
	return group.Wait()
}

var errNoPods = errors.New("the API server has not listed this node's pods yet")

// afterPods serves an API once the node's pods are known: without them a device whose pod was removed while its containers
// live would pass for reused by that pod, and one that is free for taken.
func (a *agent) afterPods(pods *evidence.Pods, name string, run func(context.Context) error, ready func() error) func(context.Context) error {
	a.status.Waiting(name, errNoPods)
	return func(ctx context.Context) error {
		if !pods.AwaitSync(ctx) {
			return nil
		}
		a.status.Check(name, ready)
		return run(ctx)
	}
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

func (a *agent) limitsConfig(book *ledger.Ledger, node *nvml.Node, specs *cdi.Specs, resources *evidence.PodResources,
	object *gpunode.Object,
) legacy.Config {
	c := legacy.Config{
		ResourceName: a.config.ResourceName, NodeName: a.config.NodeName,
		Directory:  filepath.Join(a.config.KubeletDir, "device-plugins"),
		IDStrategy: legacy.IDStrategy(a.config.DeviceIDStrategy), AnnotationPrefix: a.config.CDIAnnotationPrefix,
		PassDeviceSpecs: a.config.PassDeviceSpecs,
		Inventory:       node, Ledger: book, Specs: specs, Kubelet: resources, Recorder: a.recorder, Registerer: a.metrics,
		Allocations: object, Acknowledge: object.Acknowledge,
	}
	c.DevRoot, c.DevRootInAgent = node.DevRoot()
	for _, s := range a.config.DeviceListStrategies {
		c.Strategies = append(c.Strategies, legacy.Strategy(s))
	}
	return c
}

// provisionRetry is how soon space that was not to be had is asked for again.
const provisionRetry = 10 * time.Second

// provision keeps space on disk for the record of every GPU that a limit may get.
func provision(ctx context.Context, book *ledger.Ledger, node *nvml.Node) error {
	for {
		changed := node.Changed()
		var retry <-chan time.Time
		if err := book.Provision(len(node.Inventory().GPUs)); err != nil {
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
