// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
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
	"github.com/tandem-gpu/tandem/pkg/handover"
	"github.com/tandem-gpu/tandem/pkg/health"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/pkg/partition"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/pkg/reconcile"
	"github.com/tandem-gpu/tandem/pkg/sharing"
	"github.com/tandem-gpu/tandem/simulated/simnode"
)

// agent is the wiring of one node.
type agent struct {
	config config.Config
	// isDriverless is set in driverless mode.
	isDriverless bool
	api          *rest.Config
	client       kubernetes.Interface
	dynamic      dynamic.Interface
	// reload reads the configuration anew, with a file of its directory (config.LoadChosen), apart from the node's mode label.
	reload func(name string) (config.Chosen, error)
	// stuck returns the threads of the agent that keep it from starting again (stuckThreads).
	stuck    func(context.Context) []int
	metrics  metrics
	status   *status.Server
	events   record.EventBroadcaster
	recorder record.EventRecorder
	bootID   string
	token    *token
	times    times
}

// times are the durations that tests shorten.
type times struct {
	// answerWait is how long a start waits for the API server before it registers without it. Five minutes after the last agent kubelet
	// would start no container of running pods (k8s.io/kubernetes pkg/kubelet/cm/devicemanager, endpointStopGracePeriod).
	answerWait time.Duration
	// goneFor is how long the agent outlives its pod: kubelet ends it earlier, unless the container runtime hangs. A list that lacks the
	// pod may also come from an API server that is behind.
	goneFor time.Duration
	// ownPod is how often the agent looks for its pod. It makes no request for that.
	ownPod time.Duration
	// specsWait is how long a start waits for the first CDI specs. A hung GPU delays them by seconds.
	specsWait time.Duration
	// maintenanceWait is how long a start waits for the node's GPUNode, which says which GPUs are under maintenance.
	maintenanceWait time.Duration
	// cgroups is how often the agent looks for the cgroups of pods.
	cgroups time.Duration
}

var defaultTimes = times{
	answerWait: 3 * time.Second, goneFor: 30 * time.Second, ownPod: 5 * time.Second, specsWait: 5 * time.Second, maintenanceWait: 5 * time.Second,
	cgroups: 10 * time.Second,
}

// nodeEvents is how many events about one object the agent reports at once.
const nodeEvents = 100

func newAgent(c config.Config) (*agent, error) {
	api, err := newAPI(c.Kubeconfig)
	if err != nil {
		return nil, err
	}
	token := &token{}
	api.Wrap(token.watch)
	client, err := kubernetes.NewForConfig(api)
	if err != nil {
		return nil, fmt.Errorf("create API client: %w", err)
	}
	dynamicClient, err := dynamic.NewForConfig(api)
	if err != nil {
		return nil, fmt.Errorf("create API client: %w", err)
	}
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("read boot ID: %w", err)
	}
	metrics := newMetrics()
	// A node may report two events for each fault of each of its GPUs. By default it may report 25, and one more every five minutes.
	events := record.NewBroadcaster(record.WithCorrelatorOptions(record.CorrelatorOptions{BurstSize: nodeEvents, QPS: 1. / 20}))
	server := status.New(c.HTTPEndpoint, metrics)
	// The agent is ready only when both APIs are served. Until they exist and have checks of their own, these errors say that it is not.
	server.Waiting("claims", errNotStarted)
	server.Waiting("limits", errNotStarted)
	return &agent{
		config: c, api: api, client: client, dynamic: dynamicClient, metrics: metrics, events: events, status: server,
		reload:   func(string) (config.Chosen, error) { return config.Chosen{Config: c}, nil },
		stuck:    stuckThreads,
		recorder: events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "tandem", Host: c.NodeName}),
		bootID:   strings.TrimSpace(string(bootID)), token: token, times: defaultTimes,
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

// serve starts the node's components in the order that keeps it safe: the ledger's lock, the records, the driver, the holds from
// before, and only then the two APIs. The CDI specs are updated meanwhile: Prepare and Allocate wait for them.
func (a *agent) serve(ctx context.Context) error {
	c, err := a.newComponents()
	if err != nil {
		return err
	}
	c.book, err = a.openLedger(ctx, c)
	if err == nil {
		err = errors.Join(a.serveNode(ctx, c), c.book.Close())
	}
	return errors.Join(unlessStopped(ctx, err), c.resources.Close())
}

// components are what the node's APIs are served from.
type components struct {
	cgroups    *podstate.Cgroups
	pods       *podstate.Pods
	self       *podstate.Node
	resources  *podstate.PodResources
	node       *nvml.Node
	partitions *partition.Records
	settings   *sharing.Records
	before     *handover.Records
	faults     *health.Records
	book       *ledger.Ledger
	// The others need the ledger's lock, under which the records are loaded.
	devices *partition.Maker
	specs   *cdi.Specs
	shared  *sharing.Manager
	policy  *sharing.Policy
	cleaner *handover.Cleaner
	// usable is the inventory of devices with the health that the front-ends offer them by.
	usable *health.Inventory
	// adopt and adoptClaims are the reconciler's Adopt and AdoptClaims.
	adopt, adoptClaims func(ctx context.Context) error
	// adopted is set once Adopt has succeeded: the ledger knows all holders.
	adopted *atomic.Bool
	// endChoice ends choose before serveConfigured begins.
	endChoice func()
}

// newComponents makes the components that need no lock. It has no visible effect.
func (a *agent) newComponents() (components, error) {
	c := components{
		cgroups:    podstate.NewCgroups(a.config.CgroupRoot, a.config.PodUID),
		self:       podstate.NewNode(a.client, a.config.NodeName),
		partitions: partition.NewRecords(filepath.Join(a.config.RunDir, "partitions"), a.bootID),
		settings:   sharing.NewRecords(filepath.Join(a.config.RunDir, "sharing"), a.bootID),
		before:     handover.NewRecords(filepath.Join(a.config.RunDir, "handover"), a.bootID),
		faults:     health.NewRecords(filepath.Join(a.config.RunDir, "health"), a.bootID),
		node:       nvml.New(a.nodeOptions()),
		adopted:    &atomic.Bool{},
	}
	var err error
	if c.pods, err = podstate.NewPods(a.client, a.config.NodeName, c.cgroups, a.config.KubeletDir); err != nil {
		return components{}, err
	}
	c.resources, err = podstate.NewPodResources(a.config.KubeletDir)
	return c, err
}

// cleanupPending reports whether a partition or sharing settings of a hold are recorded. They must be gone before the hold ends.
func (c components) cleanupPending(h ledger.Hold) bool {
	return c.partitions.Made(h.Device) || h.Holder.Kind == ledger.KindClaim && c.settings.Applied(h.Holder.ID, h.Device)
}

// loadRecords needs the ledger's lock.
func (c components) loadRecords(ctx context.Context) error {
	for _, records := range []interface{ Load() ([]error, error) }{c.partitions, c.settings, c.before, c.faults} {
		problems, err := records.Load()
		for _, problem := range problems {
			klog.FromContext(ctx).Error(problem, "Cannot read a record")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// unlessStopped drops the errors of interrupted calls, and those that ask for a new start.
func unlessStopped(ctx context.Context, err error) error {
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || restarts(err)) {
		return nil
	}
	return err
}

// serveNode serves the node until ctx is done. The watch of pods ends last: an Allocate in flight may wait for it, and an error would fail
// its pod.
func (a *agent) serveNode(ctx context.Context, c components) error {
	if err := c.loadRecords(ctx); err != nil {
		return err
	}
	group, serving := errgroup.WithContext(ctx)
	watching, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	group.Go(func() error { return c.pods.Run(watching) })
	group.Go(func() error {
		defer stopWatching()
		return a.serveWithDriver(serving, c)
	})
	return group.Wait()
}

// serveWithDriver serves the node once the driver reports a GPU, and in driverless mode until then.
func (a *agent) serveWithDriver(ctx context.Context, c components) error {
	group, ctx := errgroup.WithContext(ctx)
	// It asks the API server while the scan below asks the driver.
	group.Go(func() error { return c.self.Run(ctx) })
	group.Go(func() error { return a.endWithPod(ctx, c.pods) })
	choosing, stop := context.WithCancel(ctx)
	defer stop()
	chosen := make(chan struct{})
	group.Go(func() error { defer close(chosen); return a.choose(choosing, c.self) })
	c.endChoice = func() { stop(); <-chosen }
	group.Go(func() error {
		if a.config.Unchosen {
			// The agent restarts with a configuration, which says where the driver is, as soon as the node's label is known.
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(a.times.answerWait):
			}
		}
		paused := &pause{agent: a, c: c}
		if err := paused.begin(ctx); err != nil {
			return err
		}
		group.Go(func() error { return paused.follow(ctx) })
		if err := a.firstScan(ctx, c); err != nil {
			return err
		}
		group.Go(func() error { return c.node.Run(ctx) })
		if c.node.Missing() != nil && a.holdsAny(c.book) {
			group.Go(func() error {
				if !a.awaitGPU(ctx, c.node) {
					return nil
				}
				return errDriverArrived
			})
			return a.driverless().serveDevices(ctx, c)
		}
		if !a.awaitFirstGPU(ctx, c) {
			return nil
		}
		return a.serveDevices(ctx, c)
	})
	return group.Wait()
}

// firstScan reads the node's GPUs. A node without a driver is no error: c.node.Missing says so.
func (a *agent) firstScan(ctx context.Context, c components) error {
	defer a.reportWaiting(ctx, c, true)()
	if err := c.node.Scan(ctx); !errors.Is(err, nvml.ErrNoDriver) {
		return err
	}
	return nil
}

// awaitFirstGPU waits on a node without holds. It returns false if ctx ends.
func (a *agent) awaitFirstGPU(ctx context.Context, c components) bool {
	if c.node.Missing() != nil {
		defer a.reportWaiting(ctx, c, false)()
		defer a.labelWithoutGPU(ctx, c)()
	}
	return a.awaitGPU(ctx, c.node)
}

func (a *agent) partitionPolicy() partition.Policy {
	return partition.Policy{Dynamic: a.config.Dynamic, Sharing: a.config.SharingOf}
}

// reservesAtOnce reports whether claims reserve their devices before their pods are bound. Only in Dual could the other API take the devices
// before the claim does.
func (a *agent) reservesAtOnce() bool { return a.config.Strict && a.config.Mode == config.ModeDual }

func (a *agent) serveDevices(ctx context.Context, c components) error {
	c.devices = partition.NewMaker(c.partitions, c.node, a.partitionPolicy())
	c.specs = a.newSpecs(c)
	c.shared = sharing.NewManager(sharing.Options{
		Records: c.settings, RunDir: a.config.RunDir, DriverRoot: c.node.DriverRoot(), Hardware: c.node, Specs: c.specs,
	})
	c.policy = sharing.NewPolicy(c.shared, c.devices, c.book, c.pods)
	c.cleaner = a.newCleaner(c)
	c.usable = health.New(health.Config{
		Source: c.cleaner, Hardware: c.node, Records: c.faults, CountsXID: a.config.CountsXID, Action: a.config.FaultAction,
		ResetIdle: func(ctx context.Context, uuid string) (bool, error) {
			if err := a.resettable(c, uuid); err != nil {
				return false, err
			}
			return c.cleaner.ResetIdle(ctx, uuid)
		},
		Specs: c.specs, Ledger: c.book, NodeName: a.config.NodeName, Recorder: a.recorder, Registerer: a.metrics,
	})
	reconciler := reconcile.New(reconcile.Config{
		Ledger: c.book, Pods: c.pods, Cgroups: c.cgroups, Resources: c.resources, Inventory: c.devices,
		Partitions: c.devices, Settings: c.shared, AddPlaceholders: c.specs.AddPlaceholders,
		Claims:     func(namespace string) reconcile.Claims { return a.client.ResourceV1().ResourceClaims(namespace) },
		KubeletDir: a.config.KubeletDir, ProcRoot: a.config.ProcRoot, NodeName: a.config.NodeName, DriverName: a.config.DriverName, Limits: a.config.Resources(),
		Recorder: a.recorder, Registerer: a.metrics,
	})
	c.adopt, c.adoptClaims = reconciler.Adopt, reconciler.AdoptClaims
	if err := reconciler.Restore(ctx); err != nil {
		return err
	}
	if err := c.specs.Load(); err != nil {
		return err
	}
	a.chooseNames(c.specs, c.self.RuntimeVersion())
	a.status.Waiting("claims", errNoPods)
	a.status.Waiting("limits", errNoPods)
	group, ctx := errgroup.WithContext(ctx)
	for _, run := range []func(context.Context) error{
		reconciler.Run, c.specs.Run, c.shared.Run, c.policy.Run, c.cleaner.Run,
		func(ctx context.Context) error { return a.checkRuntime(ctx, c.self, c.specs) },
		func(ctx context.Context) error { return a.checkCgroups(ctx, c.pods) },
		func(ctx context.Context) error {
			if err := a.awaitAPIServer(ctx, c); err != nil || ctx.Err() != nil {
				return err
			}
			if a.isDriverless {
				return a.serveAPIs(ctx, c)
			}
			c.endChoice()
			return a.serveConfigured(ctx, c.self, c.devices, func(ctx context.Context, config config.Config) error {
				return a.with(config).serveAPIs(ctx, c)
			})
		},
	} {
		group.Go(func() error { return run(ctx) })
	}
	return group.Wait()
}

// managed reports whether sharing settings of a GPU are applied.
func (c components) managed(uuid string) bool {
	return slices.ContainsFunc(c.settings.Keys(), func(k sharing.Key) bool { return k.Device.GPU == uuid })
}

// resettable returns why a GPU may not be reset; nil if it may. A reset would end static partitions, time slices of the node's policy, and
// MPS daemons.
func (a *agent) resettable(c components, uuid string) error {
	switch gpu, known := c.devices.Inventory().ByUUID(uuid); {
	case !known:
		return fmt.Errorf("GPU %s is not in the inventory", uuid)
	case gpu.MIGEnabled && !gpu.Dynamic:
		return fmt.Errorf("a reset of GPU %s would end its static partitions", uuid)
	case a.config.SharingOf(gpu).Shared() || c.managed(uuid):
		return fmt.Errorf("a reset of GPU %s would end its sharing settings", uuid)
	default:
		return nil
	}
}

func (a *agent) newCleaner(c components) *handover.Cleaner {
	return handover.New(handover.Options{
		Pods: c.pods, Hardware: c.node, Inventory: c.devices, Ledger: c.book, Records: c.before, Managed: c.managed,
		Reset: func(uuid string) bool { return a.config.ResetGPUs && a.resettable(c, uuid) == nil },
		Outsiders: func(uuid string, pids []int) (outsiders []handover.Outsider) {
			users := podstate.Users{Holds: c.book.Holds(), Driver: a.config.DriverName, Namespaces: a.monitorNamespaces()}
			for _, o := range c.pods.Outsiders(a.config.ProcRoot, uuid, pids, users) {
				outsiders = append(outsiders, handover.Outsider(o))
			}
			return outsiders
		},
		Report: func(uuid string, err error) {
			a.event(corev1.EventTypeWarning, "GPUNotClean", fmt.Sprintf("GPU %s is withdrawn from claims and limits until it is clean: %s. "+
				"The agent tries again each second. If the GPU does not become clean, drain the node and reboot it", uuid, handover.Detail(err)))
		},
	})
}

// monitorNamespaces returns the namespaces whose pods may have processes on GPUs that they do not hold. MPS daemons run in the agent's.
func (a *agent) monitorNamespaces() []string {
	trusted := slices.Concat([]string{metav1.NamespaceSystem}, a.config.ExemptNamespaces, a.config.MonitorNamespaces)
	if a.config.PodUID != "" {
		trusted = append(trusted, a.config.Namespace)
	}
	return trusted
}

// with returns the agent with another configuration.
func (a *agent) with(c config.Config) *agent {
	next := *a
	next.config = c
	return &next
}

func (a *agent) nodeOptions() nvml.Options {
	options := nvml.Options{
		HostRoot: a.config.HostRoot, DriverRoot: a.config.DriverRoot, DevRoot: a.config.DevRoot, Library: a.config.NVML,
		SysfsRoot: a.config.SysfsRoot, CreateNodes: a.config.CreateDeviceNodes,
		DisabledHooks: a.config.CDIDisabledHooks, Features: a.config.CDIFeatures,
		Extras: nvml.Extras{
			GDS: a.config.GDS, GDRCopy: a.config.GDRCopy, MOFED: a.config.MOFED,
			IMEXChannels: a.config.IMEXChannels, IMEXRequired: a.config.IMEXRequired,
		},
	}
	switch a.config.CDIHook {
	case "none":
	case "install":
		options.HookPath = a.hookPath()
	default:
		options.HookPath = a.config.CDIHook
	}
	return simnode.Options(options, a.config.NodeName)
}

// hookPath is the same for the agent and the host: the chart mounts kubelet's directory where it is.
func (a *agent) hookPath() string {
	return filepath.Join(a.config.KubeletDir, "plugins", a.config.DriverName, "nvidia-cdi-hook")
}

func (a *agent) newSpecs(c components) *cdi.Specs {
	options := cdi.Options{
		Dir: a.config.CDIDir, Source: c.node,
		NamesFile: filepath.Join(a.config.KubeletDir, "plugins", a.config.DriverName, "cdi-names.json"),
		InUse:     func() map[string]bool { return a.devicesInUse(c) },
	}
	if a.config.CDIHook == "install" {
		options.Hook = cdi.NewHook(a.config.CDIHookSource, a.hookPath())
	}
	return cdi.New(options)
}
