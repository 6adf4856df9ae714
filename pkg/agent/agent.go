// SPDX-License-Identifier: Apache-2.0

// Package agent is Tandem's node agent: it serves the GPUs of its node to ResourceClaims and to nvidia.com/gpu limits. It starts the components
// that pkg/wiring makes, in the order that keeps the node safe, and follows the node's configuration, mode and driver.
package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/status"
	"github.com/tandem-gpu/tandem/internal/version"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/pkg/wiring"
)

// Agent serves one node. Make it with New and run it once.
type Agent struct {
	config config.Config
	// isDriverless is set in driverless mode.
	isDriverless bool
	api          *rest.Config
	client       kubernetes.Interface
	dynamic      dynamic.Interface
	// reload and openDriver are as in Options.
	reload     func(name string) (config.Chosen, error)
	openDriver func(o nvml.Options, nodeName string) nvml.Options
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

// Options of an Agent.
type Options struct {
	Config config.Config
	// Reload reads the configuration anew, with a file of its directory (config.LoadChosen), apart from the node's mode label. Required if
	// the configuration comes from a file.
	Reload func(name string) (config.Chosen, error)
	// OpenDriver, where set, changes how the driver of a node is opened.
	OpenDriver func(o nvml.Options, nodeName string) nvml.Options
}

// New makes no request, and nothing is visible outside before Run.
func New(o Options) (*Agent, error) {
	c := o.Config
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
	return &Agent{
		config: c, api: api, client: client, dynamic: dynamicClient, metrics: metrics, events: events, status: server,
		reload: o.Reload, openDriver: o.OpenDriver,
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

// Run blocks until ctx is done, and returns nil then, or until a component fails. It leaves only the ledger's records and the CDI
// specs behind, which running pods need. Restarts says whether the program has to start again after an error.
func (a *Agent) Run(ctx context.Context) error {
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
func (a *Agent) serve(ctx context.Context) error {
	c, err := a.newComponents()
	if err != nil {
		return err
	}
	if err = a.openLedger(ctx, c); err == nil {
		err = errors.Join(a.serveNode(ctx, c), c.Ledger.Close())
	}
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || Restarts(err)) {
		err = nil // of interrupted calls, or that asks for a new start
	}
	return errors.Join(err, c.Resources.Close())
}

// components are what the node's APIs are served from.
type components struct {
	*wiring.Parts
	driver *nvml.Node
	// endChoice ends choose before serveConfigured begins.
	endChoice func()
}

// newComponents has no visible effect.
func (a *Agent) newComponents() (components, error) {
	driver := nvml.New(nodeOptions(a.config, a.openDriver))
	parts, err := wiring.New(wiring.Options{
		Config: a.config, BootID: a.bootID, Hardware: driver, Client: a.client, REST: a.api, Recorder: a.recorder, Registerer: a.metrics,
	})
	return components{Parts: parts, driver: driver}, err
}

// Restarts reports whether the agent ended to be started again. Everything is closed then. Only a new process can load a new
// library (package nvml), and a new start with a changed configuration or driver has no state to convert.
func Restarts(err error) bool {
	return errors.Is(err, nvml.ErrDriverReplaced) || errors.Is(err, errReconfigured) || errors.Is(err, errDriverArrived)
}

// serveNode serves the node until ctx is done. The watch of pods ends last: an Allocate in flight may wait for it, and an error would fail
// its pod.
func (a *Agent) serveNode(ctx context.Context, c components) error {
	group, serving := errgroup.WithContext(ctx)
	watching, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	group.Go(func() error { return c.Pods.Run(watching) })
	group.Go(func() error {
		defer stopWatching()
		return a.serveWithDriver(serving, c)
	})
	return group.Wait()
}

// serveWithDriver serves the node once the driver reports a GPU, and in driverless mode until then.
func (a *Agent) serveWithDriver(ctx context.Context, c components) error {
	group, ctx := errgroup.WithContext(ctx)
	// It asks the API server while the scan below asks the driver.
	group.Go(func() error { return c.Node.Run(ctx) })
	group.Go(func() error { return a.endWithPod(ctx, c.Pods) })
	choosing, stop := context.WithCancel(ctx)
	defer stop()
	chosen := make(chan struct{})
	group.Go(func() error { defer close(chosen); return a.choose(choosing, c.Node) })
	c.endChoice = func() { stop(); <-chosen }
	group.Go(func() error {
		// Without a chosen configuration, which says where the driver is, the agent restarts with one as soon as the node's label is known.
		if a.config.Unchosen && !broadcast.Sleep(ctx, a.times.answerWait) {
			return nil
		}
		paused := &pause{Agent: a, c: c}
		if err := paused.begin(ctx); err != nil {
			return err
		}
		group.Go(func() error { return a.whenCallsReturn(ctx, c.Ledger, paused.follow(ctx)) })
		if err := a.firstScan(ctx, c); err != nil {
			return err
		}
		group.Go(func() error { return a.whenCallsReturn(ctx, c.Ledger, c.driver.Run(ctx)) })
		if c.driver.Missing() != nil && a.holdsAny(c.Ledger) {
			group.Go(func() error {
				if !a.awaitGPU(ctx, c.driver) {
					return nil
				}
				return a.whenCallsReturn(ctx, c.Ledger, errDriverArrived)
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

// firstScan reads the node's GPUs. A node without a driver is no error: c.driver.Missing says so.
func (a *Agent) firstScan(ctx context.Context, c components) error {
	defer a.reportWaiting(ctx, c, true)()
	if err := c.driver.Scan(ctx); !errors.Is(err, nvml.ErrNoDriver) {
		return err
	}
	return nil
}

// awaitFirstGPU waits on a node without holds. It returns false if ctx ends.
func (a *Agent) awaitFirstGPU(ctx context.Context, c components) bool {
	if c.driver.Missing() != nil {
		defer a.reportWaiting(ctx, c, false)()
		defer a.labelWithoutGPU(ctx, c)()
	}
	return a.awaitGPU(ctx, c.driver)
}

// serveDevices serves the devices that the first scan has found.
func (a *Agent) serveDevices(ctx context.Context, c components) error {
	c.Connect(a.config)
	if err := c.Reconciler.Restore(ctx); err != nil {
		return err
	}
	if err := c.CDI.Load(); err != nil {
		return err
	}
	a.chooseNames(c.CDI, c.Node.RuntimeVersion())
	a.status.Waiting("claims", errNoPods)
	a.status.Waiting("limits", errNoPods)
	group, ctx := errgroup.WithContext(ctx)
	for _, run := range []func(context.Context) error{
		c.Reconciler.Run, c.CDI.Run, c.Sharing.Run, c.Policy.Run, c.Handover.Run,
		func(ctx context.Context) error { return a.checkRuntime(ctx, c.Node, c.CDI) },
		func(ctx context.Context) error { return a.checkCgroups(ctx, c.Pods) },
		func(ctx context.Context) error {
			if err := a.awaitAPIServer(ctx, c); err != nil || ctx.Err() != nil {
				return err
			}
			if a.isDriverless {
				return a.serveAPIs(ctx, c)
			}
			c.endChoice()
			return a.serveConfigured(ctx, c.Node, c.Views.Configured, func(ctx context.Context, config config.Config) error {
				return a.with(config).serveAPIs(ctx, c)
			})
		},
	} {
		group.Go(func() error { return run(ctx) })
	}
	return group.Wait()
}

// with returns the agent with another configuration.
func (a *Agent) with(c config.Config) *Agent {
	next := *a
	next.config = c
	return &next
}

// nodeOptions are how the driver is opened. open may change them.
func nodeOptions(c config.Config, open func(nvml.Options, string) nvml.Options) nvml.Options {
	options := nvml.Options{
		Host:          nvml.Host{HostRoot: c.HostRoot, DriverRoot: c.DriverRoot, DevRoot: c.DevRoot, Library: c.NVML, SysfsRoot: c.SysfsRoot},
		CreateNodes:   c.CreateDeviceNodes,
		DisabledHooks: c.CDIDisabledHooks, Features: c.CDIFeatures,
		Extras: nvml.Extras{
			GDS: c.GDS, GDRCopy: c.GDRCopy, MOFED: c.MOFED,
			IMEXChannels: c.IMEXChannels, IMEXRequired: c.IMEXRequired,
		},
	}
	switch c.CDIHook {
	case "none":
	case "install":
		options.HookPath = wiring.HookPath(c)
	default:
		options.HookPath = c.CDIHook
	}
	if open != nil {
		options = open(options, c.NodeName)
	}
	return options
}
