// SPDX-License-Identifier: Apache-2.0

// Package driver is the DRA front-end: it publishes the node's GPUs as ResourceSlices (publisher.go) and answers kubelet's
// NodePrepareResources and NodeUnprepareResources (prepare.go). It only translates: the ledger decides who holds a device.
package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Ledger decides who holds which device. *ledger.Ledger implements it.
type Ledger interface {
	ReserveClaim(ctx context.Context, r ledger.ClaimRequest) (ledger.Reservation, error)
	Valid(r ledger.Reservation) bool
	CancelReservation(r ledger.Reservation) error
	DrainClaim(ctx context.Context, uid string) error
	RecordConflict(lost ledger.Conflict)
	Holds() []ledger.Hold
	Changed() <-chan struct{}
}

// Node is the node's object. UID is empty while there is none. Changed returns a channel that is closed at the next change; it is
// taken before UID is called.
type Node interface {
	UID() types.UID
	Changed() <-chan struct{}
}

// Inventory is the source of the node's GPUs. Changed is as in Node.
type Inventory interface {
	Inventory() device.Inventory
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

// Partitions creates the partitions of claims. *partition.Maker implements it. A caller locks the GPU, records the partition,
// checks its reservation, and creates the partition. All methods are idempotent. The reconciler destroys partitions.
type Partitions interface {
	Lock(ctx context.Context, gpu string) (unlock func(), err error)
	Record(ctx context.Context, want device.Partition) error
	Create(ctx context.Context, want device.Partition) (device.Partition, error)
	// EnsureWhole switches off MIG mode of a dynamic GPU. The caller has reserved the GPU and holds no lock.
	EnsureWhole(ctx context.Context, gpu string) error
}

// Sharing applies the sharing settings of claims. *sharing.Manager implements it and documents the methods, which a caller
// calls in this order. It checks its reservation between Plan and Apply, and unlocks before Connect. The reconciler reverts.
type Sharing interface {
	Await(ctx context.Context, g sharing.Group) error
	Lock(ctx context.Context, claim string) (unlock func(), err error)
	Plan(ctx context.Context, g sharing.Group) (sharing.Plan, error)
	Apply(ctx context.Context, plan sharing.Plan) error
	Connect(ctx context.Context, plan sharing.Plan) (clientDevices []string, err error)
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

// Config is what New needs. Fields are required unless they have a default or are optional.
type Config struct {
	// DriverName is the name of the DRA driver, and the domain of its attributes. Default "gpu.nvidia.com".
	DriverName string
	// NodeName is the name of this node's Node object, and of the node pool.
	NodeName string
	// KubeClient must not throttle: every prepare costs one GET. It speaks protobuf, which alone keeps parameters of claims unchanged.
	KubeClient kubernetes.Interface
	// KubeletDir is kubelet's data directory. Default "/var/lib/kubelet".
	KubeletDir string

	// Node's UID owns the slices. Run needs it.
	Node      Node
	Ledger    Ledger
	Inventory Inventory
	Specs     Specs
	Pods      Pods
	// Partitions is required if the inventory has dynamic GPUs.
	Partitions Partitions
	// Sharing is required if claims have sharing settings.
	Sharing Sharing
	// Policy is required if the node shares GPUs by MPS.
	Policy Policy
	// DaemonTrouble returns why the pod of an MPS daemon does not run; empty if it is not known. Optional.
	DaemonTrouble func(daemon string) string

	// OfferedToClaims selects the GPUs that are published; nil means all. A claim that already has another GPU is prepared.
	OfferedToClaims func(device.GPU) bool
	// OfferedToPods selects the GPUs that serve pods; nil means all.
	OfferedToPods func(device.GPU) bool
	// Limits are the extended resources that pods request. Default "nvidia.com/gpu" for whole GPUs.
	Limits device.Resources
	// PublishNothing removes the existing slices and serves claims that are already allocated.
	PublishNothing bool
	// Allocations are the scheduler's allocations, as the controller relays them. Optional: the ledger records a claim once kubelet
	// prepares it.
	Allocations Allocations
	// Strict makes the scheduler bind a pod only after the ledger reserved the devices of its claim. It requires Allocations and
	// Kubernetes 1.36 (binding conditions), and delays each pod by up to 5 s, the scheduler's poll interval.
	Strict bool

	// Recorder receives events on claims and on the node.
	Recorder record.EventRecorder
	// Registerer receives the metrics.
	Registerer prometheus.Registerer

	// ReturnDelay is how long a device must be available before it is offered again. Withdrawals are not delayed. Default 200 ms.
	ReturnDelay time.Duration
	// CheckInterval is how often the sockets are checked, for another process that serves the driver name. Default 10 s.
	CheckInterval time.Duration
}

const (
	defaultDriverName     = "gpu.nvidia.com"
	defaultLimitsResource = "nvidia.com/gpu"
	defaultKubeletDir     = "/var/lib/kubelet"
	defaultReturnDelay    = 200 * time.Millisecond
	defaultCheckInterval  = 10 * time.Second
	defaultProbeAgain     = 10 * time.Minute
)

// Driver serves claims for the GPUs of one node. Only one may run at a time on a node: the caller owns the ledger's lock.
type Driver struct {
	Config

	metrics    *metrics
	conditions conditions
	// nodeRef is the object of events on the node.
	nodeRef *corev1.ObjectReference
	// kubeletRegistered makes the publisher compare with the API server again.
	kubeletRegistered broadcast.Signal
	// probeAgain is the delay of the next probe after the API server dropped a field.
	probeAgain time.Duration

	mu sync.Mutex
	// conflicting is set while another process serves our driver name.
	conflicting *ConflictingDriverError
	// noAPI is set while the API server does not serve the DRA API.
	noAPI bool
	// registered and registerError are kubelet's last answer.
	registered    bool
	registerError string
	// published is set once the API server has all pools; publishError is the last failure since then.
	published    bool
	publishError error
	// nodeKnown is set while the Node object exists.
	nodeKnown bool
}

// New validates the configuration. Nothing is visible outside before Run, apart from metrics in the Registerer.
func New(c Config) (*Driver, error) {
	c.setDefaults()
	if err := c.validate(); err != nil {
		return nil, fmt.Errorf("configure DRA driver: %w", err)
	}
	return &Driver{
		Config: c, metrics: newMetrics(c.Registerer), conditions: conditions{pending: map[types.UID]claimConditions{}}, probeAgain: defaultProbeAgain,
		// The UID of events on nodes is the node's name, by kubelet's convention: `kubectl describe` selects that.
		nodeRef: &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: c.NodeName, UID: types.UID(c.NodeName)},
	}, nil
}

func (c *Config) setDefaults() {
	c.DriverName = cmp.Or(c.DriverName, defaultDriverName)
	c.Limits.GPU = cmp.Or(c.Limits.GPU, defaultLimitsResource)
	c.KubeletDir = cmp.Or(c.KubeletDir, defaultKubeletDir)
	c.ReturnDelay = cmp.Or(c.ReturnDelay, defaultReturnDelay)
	c.CheckInterval = cmp.Or(c.CheckInterval, defaultCheckInterval)
}

func (c *Config) validate() error {
	var errs []error
	for _, problem := range utilvalidation.IsDNS1123Subdomain(c.DriverName) {
		errs = append(errs, fmt.Errorf("driver name %q: %s", c.DriverName, problem))
	}
	if len(c.DriverName) > utilvalidation.DNS1123LabelMaxLength {
		errs = append(errs, fmt.Errorf("driver name %q: must be no more than %d characters", c.DriverName, utilvalidation.DNS1123LabelMaxLength))
	}
	if c.NodeName == "" {
		errs = append(errs, errors.New("node name is not set"))
	} else {
		for _, problem := range utilvalidation.IsDNS1123Subdomain(c.NodeName) {
			errs = append(errs, fmt.Errorf("node name %q: %s", c.NodeName, problem))
		}
	}
	if !filepath.IsAbs(c.KubeletDir) {
		errs = append(errs, fmt.Errorf("kubelet directory %q: must be an absolute path", c.KubeletDir))
	}
	if longest := c.registrationSocket(); len(longest) > maxSocketPath {
		errs = append(errs, fmt.Errorf("kubelet directory %q: socket path %q is longer than the %d bytes the kernel takes", c.KubeletDir, longest, maxSocketPath))
	}
	if c.Strict && c.Allocations == nil {
		errs = append(errs, errors.New("strict needs the allocations"))
	}
	for name, missing := range map[string]bool{
		"Kubernetes client": c.KubeClient == nil, "ledger": c.Ledger == nil, "inventory": c.Inventory == nil,
		"CDI specs": c.Specs == nil, "pods": c.Pods == nil, "event recorder": c.Recorder == nil, "metrics registerer": c.Registerer == nil,
	} {
		if missing {
			errs = append(errs, fmt.Errorf("%s is not set", name))
		}
	}
	return errors.Join(errs...)
}

// Run serves until ctx is done, then answers the calls in flight and returns nil. Called once. It leaves no goroutine and no socket
// behind. The ResourceSlices stay, so that a restart is not noticed; kubelet removes them if the driver stays away. Run waits while
// the API server does not serve the DRA API, and while another process serves the driver name. An error means that the driver
// cannot serve.
func (d *Driver) Run(ctx context.Context) error {
	if err := d.prepareDirectories(); err != nil {
		return fmt.Errorf("run DRA driver %s: %w", d.DriverName, err)
	}
	if !d.waitForAPI(ctx) {
		return nil
	}
	for {
		if !d.waitUntilAlone(ctx) {
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
		if time.Since(started) < shortestSession && !pause(ctx, shortestSession) {
			return nil
		}
	}
}

// shortestSession is the least time between two starts of the servers.
const shortestSession = time.Second

// Ready returns nil while claims are served, and otherwise why not: ErrNoAPI, a *ConflictingDriverError, or what is missing. Safe for
// concurrent use.
func (d *Driver) Ready() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.noAPI:
		return ErrNoAPI
	case d.conflicting != nil:
		return d.conflicting
	case !d.nodeKnown:
		return fmt.Errorf("node %s is not known to the API server (is the node name right?)", d.NodeName)
	case !d.published && d.publishError != nil:
		return fmt.Errorf("publish ResourceSlices of node %s: %w", d.NodeName, d.publishError)
	case !d.published:
		return fmt.Errorf("ResourceSlices of node %s are not published yet", d.NodeName)
	case d.registerError != "":
		return fmt.Errorf("kubelet refuses driver %s: %s", d.DriverName, d.registerError)
	case !d.registered:
		return fmt.Errorf("kubelet has not registered driver %s yet (does it watch %s?)", d.DriverName, d.registryDir())
	}
	return nil
}

// pause waits and returns false if ctx ended first.
func pause(ctx context.Context, length time.Duration) bool {
	timer := time.NewTimer(length)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
