// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Inventory tells which GPUs the node has. Both methods answer from memory.
type Inventory interface {
	Inventory() device.Inventory
	// Changed returns a channel that is closed at the next change; take it before reading.
	Changed() <-chan struct{}
}

// Ledger decides who holds which device. Every method answers without waiting for anybody.
type Ledger interface {
	// ReservePod gives all devices or none; *ledger.ConflictError when they are in other hands.
	ReservePod(requests []ledger.PodRequest) error
	Holds() []ledger.Hold
	// Conflicts returns the claims whose device another holder has.
	Conflicts() []ledger.Conflict
	// Outstanding is how many devices of each resource limits pods still ask for that are bound to this node and that kubelet is
	// about to admit, and a channel that is closed when that may have changed by something else than a hold.
	Outstanding() (devices map[string]int, changed <-chan struct{})
	// Changed returns a channel that is closed at the next change of a hold or conflict. Take it before reading.
	Changed() <-chan struct{}
}

// Allocations tells which devices the scheduler has given to claims, prepared or not. Both methods answer from memory. It may
// be late or know nothing: it keeps limits away from a device that a claim is about to take, and decides nothing.
type Allocations interface {
	// Allocated are the holds that they are about to have: holder, device and share.
	Allocated() []ledger.Hold
	// Changed returns a channel that is closed at the next change; take it before reading.
	Changed() <-chan struct{}
}

// Specs makes CDI device names usable.
type Specs interface {
	// Ensure returns once the specs are on disk with entries for the GPUs and partitions; it costs little when they are there
	// already.
	Ensure(ctx context.Context, uuids ...string) error
	// QualifiedName is the CDI name of a GPU or of a partition.
	QualifiedName(uuid string) string
	// Has reports from memory whether Ensure would find an entry. A new partition is offered only then: otherwise a pod that gets
	// it fails permanently.
	Has(uuid string) bool
	// Changed returns a channel that is closed when Has may answer differently; take it before asking.
	Changed() <-chan struct{}
}

// Sharing tells how containers share a GPU by MPS. *sharing.Policy implements it. Both methods answer at once.
type Sharing interface {
	// Client returns what a container with that share of the device needs; nil if it needs nothing, as without MPS. An error says
	// why the device is not available now.
	Client(d device.Device, share device.Share) (*sharing.Client, error)
	// Changed returns a channel that is closed when Client may answer differently; take it before asking.
	Changed() <-chan struct{}
}

var _ Sharing = (*sharing.Policy)(nil)

// KubeletView asks kubelet what it believes. It is the podresources call GetAllocatableResources: the IDs of healthy
// devices by resource, resources without any may be absent.
type KubeletView interface {
	Allocatable(ctx context.Context) (map[string][]string, error)
}

// Strategy is a way to tell the runtime which GPUs a container gets. The names are those of NVIDIA's device plugin.
type Strategy string

const (
	// StrategyCDI answers with CDI device names in the CRI request.
	StrategyCDI Strategy = "cdi-cri"
	// StrategyCDIAnnotations answers with CDI device names in an annotation, for runtimes without CDI in the CRI.
	StrategyCDIAnnotations Strategy = "cdi-annotations"
	// StrategyEnvVar sets NVIDIA_VISIBLE_DEVICES, for the NVIDIA container runtime.
	StrategyEnvVar Strategy = "envvar"
	// StrategyVolumeMounts lists devices as mounts, which an unprivileged container cannot forge.
	StrategyVolumeMounts Strategy = "volume-mounts"
)

func (s Strategy) cdi() bool { return s == StrategyCDI || s == StrategyCDIAnnotations }

// IDStrategy is how StrategyEnvVar and StrategyVolumeMounts name GPUs. CDI names are always made from the UUID.
type IDStrategy string

const (
	IDStrategyUUID  IDStrategy = "uuid"
	IDStrategyIndex IDStrategy = "index"
)

// AllocationPolicy is from which GPUs partitions and replicas are taken first, where any will do. The names are those of NVIDIA's device
// plugin.
type AllocationPolicy string

const (
	// PolicyDistributed takes them from the GPU of which least is held.
	PolicyDistributed AllocationPolicy = "distributed"
	// PolicyPacked takes them from the GPU of which most is held.
	PolicyPacked AllocationPolicy = "packed"
)

// Config of a Plugin. Fields without a stated default are required.
type Config struct {
	// Resources to serve: that of whole GPUs, and those of partitions by the strategy.
	Resources device.Resources
	// NodeName is the node that events are about.
	NodeName string
	// Directory is kubelet's device-plugins directory.
	Directory string

	// Strategies default to StrategyCDI.
	Strategies []Strategy
	// IDStrategy defaults to IDStrategyUUID.
	IDStrategy IDStrategy
	// AllocationPolicy defaults to PolicyDistributed.
	AllocationPolicy AllocationPolicy
	// FailRequestsGreaterThanOne refuses more than one replica for a container, because further replicas add nothing
	// (k8s-device-plugin, sharing.timeSlicing.failRequestsGreaterThanOne). Under MPS a container never gets more than one.
	FailRequestsGreaterThanOne bool
	// AnnotationPrefix of StrategyCDIAnnotations defaults to "cdi.k8s.io/".
	AnnotationPrefix string
	// PassDeviceSpecs also lists device nodes one by one, which CPU Manager's updates of a container need where there is no
	// CDI. As in NVIDIA's plugin it has no effect when every strategy is a CDI one.
	PassDeviceSpecs bool
	// DevRoot is where the host has the driver's /dev; it defaults to "/".
	DevRoot string
	// DevRootInAgent is where this process sees DevRoot; it defaults to DevRoot.
	DevRootInAgent string

	Inventory Inventory
	// Offered tells the GPUs that new limits may get; nil means all. The others are listed, as unhealthy, only where a limit had
	// them when Run began. It must always answer the same for a GPU.
	Offered func(device.GPU) bool
	// Retiring is for a node that serves limits no more: what Offered refuses is unhealthy, also while a limit of before has it.
	// Such a limit still needs the plugin: kubelet starts no container anew whose resource has lost its plugin for five minutes
	// (k8s.io/kubernetes pkg/kubelet/cm/devicemanager, callPreStartContainerIfNeeded).
	Retiring bool
	Ledger   Ledger
	Specs    Specs
	// Sharing may be nil: then no GPU is shared by MPS.
	Sharing Sharing
	// Allocations may be nil: devices are then withdrawn once their claims are prepared.
	Allocations Allocations
	// Kubelet confirms what was sent. Nil leaves lists unconfirmed.
	Kubelet KubeletView
	// Acknowledge, where set, is told what kubelet itself calls allocatable of a resource, sorted, whenever kubelet was asked;
	// known is false once that no longer counts. That a list was sent is no proof that kubelet has acted on it. It must not
	// block.
	Acknowledge func(resource string, ids []string, known bool)
	// Recorder must not block: it is called while kubelet waits for Allocate.
	Recorder record.EventRecorder
	// Registerer takes the metrics while Run runs.
	Registerer prometheus.Registerer
}

// longestSocketPath is sizeof(sockaddr_un.sun_path) less the closing NUL (unix(7)).
const longestSocketPath = 107

// complete returns the configuration with defaults filled in, or says everything that is wrong with it.
func (c Config) complete() (Config, error) {
	if len(c.Strategies) == 0 {
		c.Strategies = []Strategy{StrategyCDI}
	}
	c.IDStrategy = orDefault(c.IDStrategy, IDStrategyUUID)
	c.AllocationPolicy = orDefault(c.AllocationPolicy, PolicyDistributed)
	c.Resources.Strategy = orDefault(c.Resources.Strategy, device.MIGStrategyNone)
	c.AnnotationPrefix = orDefault(c.AnnotationPrefix, "cdi.k8s.io/")
	c.DevRoot = orDefault(c.DevRoot, "/")
	c.DevRootInAgent = orDefault(c.DevRootInAgent, c.DevRoot)
	if c.Acknowledge == nil {
		c.Acknowledge = func(string, []string, bool) {}
	}

	errs := c.missing()
	if name := c.Resources.GPU; name != "" {
		if problems := validation.IsQualifiedName(name); len(problems) > 0 || !strings.Contains(name, "/") {
			errs = append(errs, fmt.Errorf("resourceName: %q is no extended resource name: %s", name,
				orDefault(strings.Join(problems, "; "), "it has no domain")))
		}
	}
	for i, s := range c.Strategies {
		if !slices.Contains([]Strategy{StrategyCDI, StrategyCDIAnnotations, StrategyEnvVar, StrategyVolumeMounts}, s) {
			errs = append(errs, fmt.Errorf("deviceListStrategy[%d]: invalid strategy: %s", i, s))
		}
	}
	if c.IDStrategy != IDStrategyUUID && c.IDStrategy != IDStrategyIndex {
		errs = append(errs, fmt.Errorf("invalid --device-id-strategy option: %s", c.IDStrategy))
	}
	if c.AllocationPolicy != PolicyDistributed && c.AllocationPolicy != PolicyPacked {
		errs = append(errs, fmt.Errorf("invalid --shared-devices-allocation-policy option: %s", c.AllocationPolicy))
	}
	if !slices.Contains(device.MIGStrategies, c.Resources.Strategy) {
		errs = append(errs, fmt.Errorf("unknown MIG strategy: %s", c.Resources.Strategy))
	}
	for name, path := range map[string]string{"directory": c.Directory, "devRoot": c.DevRoot, "devRootInAgent": c.DevRootInAgent} {
		if path != "" && !filepath.IsAbs(path) {
			errs = append(errs, fmt.Errorf("%s: %q is not an absolute path", name, path))
		}
	}
	if path := filepath.Join(c.Directory, newSocketName(longestResource)); len(path) > longestSocketPath {
		errs = append(errs, fmt.Errorf("directory: sockets below %q would exceed the %d bytes that a socket's path can have",
			c.Directory, longestSocketPath))
	}
	return c, errors.Join(errs...)
}

func (c Config) missing() []error {
	var errs []error
	for _, field := range []struct {
		name string
		set  bool
	}{
		{"resourceName", c.Resources.GPU != ""},
		{"nodeName", c.NodeName != ""},
		{"directory", c.Directory != ""},
		{"inventory", c.Inventory != nil},
		{"ledger", c.Ledger != nil},
		{"specs", c.Specs != nil},
		{"recorder", c.Recorder != nil},
		{"registerer", c.Registerer != nil},
	} {
		if !field.set {
			errs = append(errs, fmt.Errorf("%s: must be set", field.name))
		}
	}
	return errs
}

func (c Config) uses(want func(Strategy) bool) bool { return slices.ContainsFunc(c.Strategies, want) }

func orDefault[T ~string](value, otherwise T) T {
	if value == "" {
		return otherwise
	}
	return value
}
