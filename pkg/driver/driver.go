// SPDX-License-Identifier: Apache-2.0

// Package driver is the DRA front-end: it publishes the node's GPUs as ResourceSlices (publisher.go) and answers kubelet's
// NodePrepareResources and NodeUnprepareResources (prepare.go). It only translates: the ledger decides who holds a device.
package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/partition"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Ledger decides who holds which device. *ledger.Ledger implements it.
type Ledger interface {
	ReserveClaim(ctx context.Context, r ledger.ClaimRequest) (ledger.Reservation, error)
	Valid(r ledger.Reservation) bool
	CancelReservation(r ledger.Reservation) error
	DrainClaim(ctx context.Context, uid string) error
	RecordConflict(conflict ledger.Conflict)
	Holds() []ledger.Hold
	Changed() <-chan struct{}
	Withheld() error
	Withhold(source string, reason error)
	Withholds(source string) bool
}

// Node is the node's object. UID is empty while there is none. Changed returns a channel that is closed at the next change; it is
// taken before UID is called.
type Node interface {
	UID() types.UID
	Changed() <-chan struct{}
}

// Specs are the CDI specs of the node's devices.
type Specs interface {
	// Ensure writes the specs if they are missing on disk or lack one of the devices. Cheap otherwise.
	Ensure(ctx context.Context, uuids ...string) error
	// Add writes an entry for a new partition. Idempotent.
	Add(ctx context.Context, p device.Partition) error
	// QualifiedName returns the CDI name of a device.
	QualifiedName(uuid string) string
}

// Pods are the pods of the node. *podstate.Pods implements it.
type Pods interface {
	// Movable reports whether the controller may evict the pods of a claim. It may take a second.
	Movable(ctx context.Context, claim ledger.ClaimRequest) bool
	// WaitForPods waits until the pod watch has reported the pods that were bound before the claim's own, or ctx is done.
	WaitForPods(ctx context.Context, claim ledger.ClaimRequest)
	// Uses reports whether a pod of a hold still uses its devices, although no driver will unprepare them.
	Uses(h ledger.Hold) bool
}

// Partitions creates the partitions of claims. *partition.Maker implements it. All methods are idempotent. The reconciler destroys
// partitions.
type Partitions interface {
	// Exists asks the driver whether it still has a partition.
	Exists(ctx context.Context, p device.Partition) (bool, error)
	Create(ctx context.Context, request partition.Request) (device.Partition, error)
	// EnsureWhole switches off MIG mode of a dynamic GPU that is still reserved.
	EnsureWhole(ctx context.Context, gpu string, reserved func() error) error
}

// Sharing applies the sharing settings of claims. *sharing.Manager implements it. The reconciler reverts them.
type Sharing interface {
	// Apply applies the settings of a group whose devices are still reserved, waits for its daemon if it has one, and returns the client
	// devices. Idempotent.
	Apply(ctx context.Context, g sharing.Group, reserved func() error) (clientDevices []string, err error)
	// Applied reports whether settings of the claim are applied to the device.
	Applied(claim string, ref device.Ref) bool
}

// Policy is how the node shares GPUs between holders. *sharing.Policy implements it. Call both methods after the ledger has
// reserved the device.
type Policy interface {
	// ByDaemon reports whether an MPS daemon has the GPU, or is about to.
	ByDaemon(gpu device.GPU) bool
	// Join returns the client devices of a claim with a share of a GPU. Idempotent. It waits for the daemon; a
	// *sharing.NotReadyError means that ctx ended before the daemon was ready.
	Join(ctx context.Context, claim sharing.Claim, d device.Device, share device.Share) (clientDevices []string, err error)
}

// Config is what New needs. Fields are required unless they have a default.
type Config struct {
	// DriverName is the name of the DRA driver, and the domain of its attributes.
	DriverName string
	// NodeName is the name of this node's Node object, and of the node pool.
	NodeName string
	// KubeClient must not throttle: every prepare costs one GET. It speaks protobuf, which alone keeps parameters of claims unchanged.
	KubeClient kubernetes.Interface
	// KubeletDir is kubelet's data directory.
	KubeletDir string

	// Node's UID owns the slices. Run needs it.
	Node       Node
	Ledger     Ledger
	Inventory  device.Source
	Specs      Specs
	Pods       Pods
	Partitions Partitions
	Sharing    Sharing
	Policy     Policy
	// HandOver must return nil for each GPU of a claim before it is prepared (handover.Cleaner.Ensure). Idempotent.
	HandOver func(ctx context.Context, uuid string) error
	// Adopt adds holds for what another process of our driver name gave away (reconcile.Reconciler.AdoptClaims).
	Adopt func(ctx context.Context) error
	// DaemonTrouble returns why the pod of an MPS daemon does not run; empty if it is not known.
	DaemonTrouble func(daemon string) string

	// OfferedToClaims selects the GPUs that are published. A claim that already has another GPU is prepared.
	OfferedToClaims func(device.GPU) bool
	// OfferedToPods selects the GPUs that serve pods.
	OfferedToPods func(device.GPU) bool
	// Limits are the extended resources that pods request.
	Limits device.Resources
	// PublishNothing removes the existing slices and serves claims that are already allocated.
	PublishNothing bool
	// HeldOnly is why claims are only unprepared, for as long as the Driver runs: a Prepare call is answered with it, and the slices
	// stay as they are. Nil serves claims.
	HeldOnly error
	// Allocations are the scheduler's allocations, as the controller relays them.
	Allocations Allocations
	// Placed is called with the names of the GPU pools by GPU UUID, each time that they may have changed. It must not block. Default: nothing.
	Placed func(pools map[string]string)
	// Strict makes the scheduler bind a pod only after the ledger reserved the devices of its claim. It requires a controller and
	// Kubernetes 1.36 (binding conditions), and delays each pod by up to 5 s, the scheduler's poll interval.
	Strict bool
	// PartitionUUIDs publishes the UUID of a partition while it exists for a claim: by it dcgm-exporter finds the pod of the partition's
	// metrics (NVIDIA/dcgm-exporter, internal/pkg/transformation/dra.go). It costs two writes of a slice for each such partition.
	PartitionUUIDs bool

	// MetadataDir is the directory of CDI specs, in which containers are given a file with the attributes of their claim's devices
	// (KEP-5304). Empty: they get none.
	MetadataDir string

	// Recorder receives events on claims and on the node.
	Recorder record.EventRecorder
	// Registerer receives the metrics.
	Registerer prometheus.Registerer

	// ReturnDelay is how long a device must be available before it is offered again. Withdrawals are not delayed. Default 200 ms.
	ReturnDelay time.Duration
	// CheckInterval is how often the sockets are checked, for another process that serves the driver name. Default 10 s.
	CheckInterval time.Duration
}

// Driver serves claims for the GPUs of one node. Only one may run at a time on a node: the caller owns the ledger's lock.
type Driver struct {
	Config

	metrics *metrics
	// statuses are the conditions that have to be written to claims.
	statuses chan claimStatus
	// probeAgain is the delay of the next probe after the API server dropped a field.
	probeAgain time.Duration
	// withholds is set from the appearance of a conflicting driver until Tandem has taken over from it. Only Run and FindConflicting use it.
	withholds bool
	// foreign are the devices of DRA drivers of other names because of which devices are withheld. foreignSaid is what was reported of them
	// last. foreignListed is set once the API server has listed such devices. Only watchForeign and FindConflicting use them.
	foreign       map[string]map[podstate.PoolDevice]bool
	foreignSaid   string
	foreignListed bool
	// takeOver is how long a conflicting driver must be gone before Tandem takes over from it.
	takeOver time.Duration
	// socketTimeout bounds one request to a socket. kubelet allows a second for GetInfo.
	socketTimeout time.Duration
	// publishAgain wakes the publisher, which acts on the two flags.
	publishAgain                   broadcast.Signal
	kubeletRegistered, dropsFields atomic.Bool

	mu sync.Mutex
	// unusable are the claims whose devices were unhealthy or unknown.
	unusable map[types.UID]unusable
	// These say why claims are not served; nil without a problem. Ready returns the first. waiting is ErrNoAPI or a
	// *ConflictingDriverError. slices stays nil after the API server had all pools once.
	waiting, node, slices, kubelet error
}

// New checks the length of the sockets' paths; internal/config validates the rest. Nothing is visible outside before Run, apart
// from metrics in the Registerer.
func New(c Config) (*Driver, error) {
	c.ReturnDelay = cmp.Or(c.ReturnDelay, 200*time.Millisecond)
	c.CheckInterval = cmp.Or(c.CheckInterval, 10*time.Second)
	if c.Placed == nil {
		c.Placed = func(map[string]string) {}
	}
	if longest := c.registrationSocket(); len(longest) > maxSocketPath {
		return nil, fmt.Errorf("kubelet directory %q: socket path %q is longer than the %d bytes the kernel takes", c.KubeletDir, longest, maxSocketPath)
	}
	return &Driver{
		Config: c, metrics: newMetrics(c.Registerer), statuses: make(chan claimStatus, 1000), probeAgain: 10 * time.Minute,
		unusable: map[types.UID]unusable{}, foreign: map[string]map[podstate.PoolDevice]bool{}, takeOver: time.Second, socketTimeout: time.Second,
		// An earlier Driver of this process may have withheld devices: this one continues.
		withholds: c.Ledger.Withholds(sourceConflicting),
		slices:    fmt.Errorf("ResourceSlices of node %s are not published yet", c.NodeName),
		kubelet:   notRegistered(c),
	}, nil
}

func notRegistered(c Config) error {
	return fmt.Errorf("kubelet has not registered driver %s yet (does it watch %s?)", c.DriverName, c.registryDir())
}

// Run serves until ctx is done, then answers the calls in flight and returns nil. Called once. It leaves no goroutine and no socket behind.
// The ResourceSlices stay, so that a restart is not noticed; kubelet removes them if the driver stays away. Run waits while another process
// serves the driver name, and withholds devices while a DRA driver of another name publishes our GPUs. It does not wait for the API server:
// kubelet unprepares claims while that does not answer, too (TestServesWithoutAPIServer). An error means that the driver cannot serve.
func (d *Driver) Run(ctx context.Context) error {
	if err := d.prepareDirectories(); err != nil {
		return fmt.Errorf("run DRA driver %s: %w", d.DriverName, err)
	}
	if d.HeldOnly != nil {
		return d.serveAlone(ctx) // it gives nothing away
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return d.serveAlone(ctx) })
	group.Go(func() error { return d.watchForeign(ctx) })
	return group.Wait()
}

// serveAlone serves while no other process serves our driver name, until ctx is done.
func (d *Driver) serveAlone(ctx context.Context) error {
	for {
		d.waitUntilAlone(ctx)
		if ctx.Err() != nil {
			return nil
		}
		started := time.Now()
		err := d.serve(ctx)
		_, conflicting := errors.AsType[*ConflictingDriverError](err)
		switch {
		case ctx.Err() != nil:
			return nil
		case conflicting, errors.Is(err, errSocketLost):
			klog.FromContext(ctx).Info("Restarting the servers for kubelet", "reason", err.Error())
		default:
			return fmt.Errorf("run DRA driver %s: %w", d.DriverName, err)
		}
		// Sockets that are removed repeatedly must not cause a busy loop.
		broadcast.Sleep(ctx, sessionInterval-time.Since(started))
	}
}

// sessionInterval is the least time between two starts of the servers.
const sessionInterval = time.Second

// Ready returns nil while claims are served, and otherwise why not: ErrNoAPI, a *ConflictingDriverError, why devices
// are withheld, or what is missing. Safe for concurrent use.
func (d *Driver) Ready() error {
	withheld := d.Ledger.Withheld()
	d.mu.Lock()
	defer d.mu.Unlock()
	return cmp.Or(d.waiting, d.node, d.slices, d.kubelet, withheld)
}

// set sets one of the errors of Ready.
func (d *Driver) set(problem *error, now error) { _ = d.swap(problem, now) }

// swap sets a problem and returns the one before.
func (d *Driver) swap(problem *error, now error) (before error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	before, *problem = *problem, now
	return before
}

// setWaiting records an error of Ready and reports it once: in the log, and in an event on the node if there is a reason for one.
func (d *Driver) setWaiting(ctx context.Context, reason string, err error) {
	switch before := d.swap(&d.waiting, err); {
	case err == nil && before != nil:
		klog.FromContext(ctx).Info("Claims can be served", "before", before.Error())
	case err != nil && (before == nil || before.Error() != err.Error()):
		klog.FromContext(ctx).Info("Not serving claims", "reason", err.Error())
		if reason != "" {
			d.Recorder.Event(regarding.Node(d.NodeName), corev1.EventTypeWarning, reason, err.Error())
		}
	}
}

// retry calls try with growing delays until it succeeds or ctx is done. It logs errors with the message, if there is one.
func retry(ctx context.Context, logger klog.Logger, message string, try func() error) {
	delays := wait.Backoff{Duration: time.Second, Factor: 2, Cap: 30 * time.Second, Steps: math.MaxInt32}
	_ = delays.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (done bool, _ error) {
		err := try()
		if err != nil && ctx.Err() == nil && message != "" {
			logger.Error(err, message)
		}
		return err == nil, nil
	}) // the error is that of ctx
}
