// SPDX-License-Identifier: Apache-2.0

// Package wiring makes the components of a node and gives each the others that it needs. It starts none of them. pkg/agent starts them in the
// order that keeps a node safe. test/simulation, test/scale and test/filedevice start them in an order of their own.
package wiring

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/pkg/handover"
	"github.com/tandem-gpu/tandem/pkg/health"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/legacy"
	"github.com/tandem-gpu/tandem/pkg/partition"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/pkg/reconcile"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Hardware is the node's devices and their driver. *nvml.Node implements it.
type Hardware interface {
	partition.Hardware
	sharing.Hardware
	handover.Hardware
	health.Hardware
	cdi.Source
	// DriverRoot returns the directory on the host in which the driver is installed. It is called by Connect.
	DriverRoot() string
	// DevRoot returns the parent of the driver's /dev, as a path of the host and of this process.
	DevRoot() (host, agent string)
}

// Ledger is all that components ask of the ledger. *ledger.Ledger implements it.
type Ledger interface {
	driver.Ledger
	legacy.Ledger
	reconcile.Ledger
	health.Ledger
}

// Specs is all that components ask of the CDI specs. *cdi.Specs implements it.
type Specs interface {
	driver.Specs
	legacy.Specs
	health.Specs
	sharing.Specs
	AddPlaceholders(names []string)
}

// Allocations are the scheduler's allocations. *gpunode.Object implements it.
type Allocations interface {
	driver.Allocations
	legacy.Allocations
}

// Kubelet is kubelet's pod resources endpoint. *podstate.PodResources implements it.
type Kubelet interface {
	reconcile.KubeletResources
	legacy.KubeletView
}

// Options of Parts. All are required but GPUs and Hooks.
type Options struct {
	Config   config.Config
	BootID   string
	Hardware Hardware
	// Client must not throttle. REST is what the client for GPUNodes is made from; it is not needed with Hooks.Allocations.
	Client kubernetes.Interface
	REST   *rest.Config
	// Recorder receives events on the node, on claims and on pods. Registerer receives the metrics.
	Recorder   record.EventRecorder
	Registerer prometheus.Registerer
	// GPUs says which GPUs are dynamic and shared. Default: Config.
	GPUs  *partition.Policy
	Hooks Hooks
}

// Hooks wrap or replace components in tests. The agent has no hooks. A nil hook changes nothing.
type Hooks struct {
	// Now and Step are ledger.Options.Now and Step. Turn is called by ledger, reconciler and sharing.Manager before each attempt.
	Now  func() time.Time
	Step func(string)
	Turn func(ctx context.Context, what string)

	// Each of these returns what the other components get instead of its argument.
	Ledger    func(*ledger.Ledger) Ledger
	PodStates func(*podstate.Pods) ledger.PodStates
	Pods      func(*podstate.Pods) driver.Pods
	Sharing   func(*sharing.Manager) driver.Sharing
	Policy    func(*sharing.Policy) driver.Policy
	// Holders returns the ledger that sharing.Policy gets.
	Holders func(*ledger.Ledger) sharing.Ledger
	// CleanupPending returns ledger.Options.CleanupPending.
	CleanupPending func(func(ledger.Hold) bool) func(ledger.Hold) bool

	// These replace cdi.Specs, gpunode.Object, podstate.PodResources and the reconciler's reads of claims.
	Specs       Specs
	Allocations Allocations
	Kubelet     Kubelet
	Claims      func(namespace string) reconcile.Claims
	// DaemonTrouble is driver.Config.DaemonTrouble. It is required where Allocations is set.
	DaemonTrouble func(daemon string) string
}

// Parts are the components of one node. New makes those that need no lock, Open the ledger, and Connect the others.
type Parts struct {
	Options

	cgroups *podstate.Cgroups
	Pods    *podstate.Pods
	Node    *podstate.Node
	// Resources is nil if Hooks.Kubelet is set. The caller closes it.
	Resources *podstate.PodResources
	records   records

	// Ledger is nil until Open succeeds. The fields below are nil until Connect.
	Ledger     *ledger.Ledger
	Partitions *partition.Maker
	// CDI is nil if Hooks.Specs is set.
	CDI        *cdi.Specs
	Sharing    *sharing.Manager
	Policy     *sharing.Policy
	Handover   *handover.Cleaner
	Health     *health.Inventory
	Reconciler *reconcile.Reconciler
	Views      Views

	// adopted is set while the ledger knows all holders.
	adopted atomic.Bool
}

// Views are the node's devices as its components see them. Each view completes the one before, when it is read. The first one is Hardware.
type Views struct {
	// Configured adds what the configuration says of each GPU, and which partitions Tandem has made.
	Configured device.Source
	// Offered adds the health that keeps new holders away: a fault, a GPU that is not clean, a device that no container can be given, holders
	// that cannot be recorded.
	Offered device.Source
	// OfferedWithoutCDI is Offered for pods that get their GPUs without CDI. The CDI specs do not count.
	OfferedWithoutCDI device.Source
}

// records are what components keep on disk besides the ledger. They are loaded under the ledger's lock.
type records struct {
	Partitions *partition.Records
	Sharing    *sharing.Records
	Handover   *handover.Records
	Health     *health.Records
}

// New makes the components that need no lock. It has no visible effect.
func New(o Options) (*Parts, error) {
	c := o.Config
	p := &Parts{
		Options: o,
		cgroups: podstate.NewCgroups(c.CgroupRoot, c.PodUID),
		Node:    podstate.NewNode(o.Client, c.NodeName),
		records: records{
			Partitions: partition.NewRecords(filepath.Join(c.RunDir, "partitions"), o.BootID),
			Sharing:    sharing.NewRecords(filepath.Join(c.RunDir, "sharing"), o.BootID),
			Handover:   handover.NewRecords(filepath.Join(c.RunDir, "handover"), o.BootID),
			Health:     health.NewRecords(filepath.Join(c.RunDir, "health"), o.BootID),
		},
	}
	var err error
	if p.Pods, err = podstate.NewPods(o.Client, c.NodeName, p.cgroups, c.KubeletDir); err != nil {
		return nil, err
	}
	if o.Hooks.Kubelet == nil {
		p.Resources, err = podstate.NewPodResources(c.KubeletDir)
	}
	return p, err
}

// Open opens the ledger, and loads the other records under its lock. It returns ledger.ErrLocked while another agent has the lock, and may be
// called again then. Problems are records that cannot be read: they are kept. The caller closes the ledger.
func (p *Parts) Open(ctx context.Context) (problems []error, err error) {
	options := ledger.Options{
		Dir: p.Config.RunDir, BootID: p.BootID, PodStates: p.Pods, CleanupPending: p.cleanupPending,
		Queue: p.Pods.Queue(p.Config.Resources().Has), Now: p.Hooks.Now, Step: p.Hooks.Step,
	}
	if wrap := p.Hooks.PodStates; wrap != nil {
		options.PodStates = wrap(p.Pods)
	}
	if wrap := p.Hooks.CleanupPending; wrap != nil {
		options.CleanupPending = wrap(p.cleanupPending)
	}
	if turn := p.Hooks.Turn; turn != nil {
		options.Turn = func(ctx context.Context) { turn(ctx, "tries to reserve") }
	}
	book, err := ledger.Open(ctx, options)
	if err != nil {
		return nil, err
	}
	if problems, err = p.records.load(); err != nil {
		return problems, errors.Join(err, book.Close())
	}
	p.Ledger = book
	return problems, nil
}

// cleanupPending reports whether a partition or sharing settings of a hold are recorded. They must be gone before the hold ends.
func (p *Parts) cleanupPending(h ledger.Hold) bool {
	return p.records.Partitions.Made(h.Device) || h.Holder.Kind == ledger.KindClaim && p.records.Sharing.Applied(h.Holder.ID, h.Device)
}

func (r records) load() (problems []error, err error) {
	for _, records := range []interface{ Load() ([]error, error) }{r.Partitions, r.Sharing, r.Handover, r.Health} {
		found, err := records.Load()
		problems = append(problems, found...)
		if err != nil {
			return problems, err
		}
	}
	return problems, nil
}

// Connect makes the components that need the ledger, its records and the hardware. c is the configuration of the node, without its mode
// label.
//
// Both APIs and GPUNode see the view Offered, and so offer the same GPUs. Components that work on a device whatever its health see Configured.
func (p *Parts) Connect(c config.Config) {
	p.Config = c
	policy := GPUPolicy(c)
	if p.GPUs != nil {
		policy = *p.GPUs
	}
	p.Partitions = partition.NewMaker(p.records.Partitions, p.Hardware, policy)
	p.Views.Configured = p.Partitions
	if p.Hooks.Specs == nil {
		p.CDI = p.newSpecs()
	}
	p.Sharing = sharing.NewManager(sharing.Options{
		Records: p.records.Sharing, RunDir: c.RunDir, DriverRoot: p.Hardware.DriverRoot(), Hardware: p.Hardware, Specs: p.specs(), Turn: p.Hooks.Turn,
	})
	var holders sharing.Ledger = p.Ledger
	if wrap := p.Hooks.Holders; wrap != nil {
		holders = wrap(p.Ledger)
	}
	p.Policy = sharing.NewPolicy(p.Sharing, p.Views.Configured, holders, p.Pods)
	p.Handover = p.newCleaner()
	p.Health = health.New(health.Config{
		Source: p.Views.Configured, Hardware: p.Hardware, Handover: p.Handover, Records: p.records.Health,
		CountsXID: c.CountsXID, Action: c.FaultAction,
		ResetIdle: func(ctx context.Context, uuid string) (bool, error) {
			if err := p.resettable(uuid); err != nil {
				return false, err
			}
			return p.Handover.ResetIdle(ctx, uuid)
		},
		Specs: p.specs(), Ledger: p.ledger(), NodeName: c.NodeName, Recorder: p.Recorder, Registerer: p.Registerer,
	})
	p.Views.Offered, p.Views.OfferedWithoutCDI = p.Health, p.Health.WithoutCDI()
	p.Reconciler = reconcile.New(p.reconcilerConfig())
}

func (p *Parts) reconcilerConfig() reconcile.Config {
	config := reconcile.Config{
		Ledger: p.ledger(), Pods: p.Pods, Cgroups: p.cgroups, Resources: p.kubelet(), Inventory: p.Views.Configured,
		Partitions: p.Partitions, Settings: p.Sharing, AddPlaceholders: p.specs().AddPlaceholders,
		Claims:     func(namespace string) reconcile.Claims { return p.Client.ResourceV1().ResourceClaims(namespace) },
		KubeletDir: p.Config.KubeletDir, ProcRoot: p.Config.ProcRoot, NodeName: p.Config.NodeName, DriverName: p.Config.DriverName,
		Limits: p.Config.Resources(), Recorder: p.Recorder, Registerer: p.Registerer, Turn: p.Hooks.Turn,
	}
	if p.Hooks.Claims != nil {
		config.Claims = p.Hooks.Claims
	}
	return config
}

// ledger is the ledger of those that change it: front-ends, health and reconciler. The others read it without a hook.
func (p *Parts) ledger() Ledger {
	if wrap := p.Hooks.Ledger; wrap != nil {
		return wrap(p.Ledger)
	}
	return p.Ledger
}

func (p *Parts) kubelet() Kubelet {
	if p.Hooks.Kubelet != nil {
		return p.Hooks.Kubelet
	}
	return p.Resources
}

func (p *Parts) specs() Specs {
	if p.Hooks.Specs != nil {
		return p.Hooks.Specs
	}
	return p.CDI
}

// GPUPolicy is what the configuration says of each GPU.
func GPUPolicy(c config.Config) partition.Policy {
	return partition.Policy{Dynamic: c.Dynamic, Sharing: c.SharingOf}
}

// managed reports whether sharing settings of a GPU are applied.
func (p *Parts) managed(uuid string) bool {
	return slices.ContainsFunc(p.records.Sharing.Keys(), func(k sharing.Key) bool { return k.Device.GPU == uuid })
}

// resettable returns why a GPU may not be reset; nil if it may. A reset would end static partitions, time slices of the node's policy, and
// MPS daemons.
func (p *Parts) resettable(uuid string) error {
	switch gpu, known := p.Views.Configured.Inventory().ByUUID(uuid); {
	case !known:
		return fmt.Errorf("GPU %s is not in the inventory", uuid)
	case gpu.MIGEnabled && !gpu.Dynamic || slices.ContainsFunc(gpu.Partitions, func(p device.Partition) bool { return !p.Made }):
		return fmt.Errorf("a reset of GPU %s would end its static partitions", uuid)
	case gpu.Sharing.Shared() || p.managed(uuid):
		return fmt.Errorf("a reset of GPU %s would end its sharing settings", uuid)
	default:
		return nil
	}
}

func (p *Parts) newCleaner() *handover.Cleaner {
	return handover.New(handover.Options{
		Pods: p.Pods, Hardware: p.Hardware, Inventory: p.Views.Configured, Ledger: p.Ledger, Records: p.records.Handover, Managed: p.managed,
		Reset: func(uuid string) bool { return p.Config.ResetGPUs && p.resettable(uuid) == nil },
		Outsiders: func(uuid string, compute, graphics []int) (outsiders []handover.Outsider) {
			pids := slices.Concat(compute, podstate.InPods(p.Config.ProcRoot, graphics))
			users := podstate.Users{Holds: p.Ledger.Holds(), Driver: p.Config.DriverName, Namespaces: monitorNamespaces(p.Config)}
			for _, o := range p.Pods.Outsiders(p.Config.ProcRoot, uuid, pids, users) {
				outsiders = append(outsiders, handover.Outsider(o))
			}
			return outsiders
		},
		Report: func(uuid string, err error) {
			p.Recorder.Event(regarding.Node(p.Config.NodeName), corev1.EventTypeWarning, "GPUNotClean", fmt.Sprintf(
				"GPU %s is withdrawn from claims and limits until it is clean: %s. "+
					"The agent tries again each second. If the GPU does not become clean, drain the node and reboot it", uuid, handover.Detail(err)))
		},
	})
}

// monitorNamespaces returns the namespaces whose pods may have processes on GPUs that they do not hold. MPS daemons run in the agent's.
func monitorNamespaces(c config.Config) []string {
	trusted := slices.Concat([]string{metav1.NamespaceSystem}, c.ExemptNamespaces, c.MonitorNamespaces)
	if c.PodUID != "" {
		trusted = append(trusted, c.Namespace)
	}
	return trusted
}

// sourceStart is the agent's source of ledger.Withhold.
const sourceStart = "pods of before the start"

// errHoldersUnknown names no pod, because every pod may read /readyz.
var errHoldersUnknown = errors.New("it is not known which pods from before the agent's start have GPUs: see event HoldersUnknown of the node")

// Adopt adds holds of pods that kubelet had admitted before the start, by another plugin, and not started: Restore takes them for ended
// ones, because it does not know the node's pods. While that fails, no device is given to a new holder.
func (p *Parts) Adopt(ctx context.Context) error {
	err := p.Reconciler.Adopt(ctx)
	if ctx.Err() == nil {
		p.adopted.Store(err == nil)
		var reason error
		if err != nil {
			reason = errHoldersUnknown
		}
		p.Ledger.Withhold(sourceStart, reason)
	}
	return err
}
