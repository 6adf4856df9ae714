// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Ledger decides who holds which device. No method waits for another holder.
type Ledger interface {
	// ReservePod reserves all devices or none. A *ledger.ConflictError names other holders.
	ReservePod(requests []ledger.PodRequest) error
	Holds() []ledger.Hold
	// Conflicts returns the claims whose device another holder has.
	Conflicts() []ledger.Conflict
	// Outstanding returns how many devices of each resource bound pods still request, and a channel that is closed when that may
	// have changed other than by a hold.
	Outstanding() (devices map[string]int, changed <-chan struct{})
	// Unwritable returns why a new hold cannot be recorded; nil if it can.
	Unwritable() error
	// Changed returns a channel that is closed at the next change of a hold or conflict, or of Unwritable. Take it before reading.
	Changed() <-chan struct{}
	// Withheld returns why no device is given to new holders; nil if devices are. Withhold gives such a reason, and Withholds reports
	// whether a source has given one.
	Withheld() error
	Withhold(source string, reason error)
	Withholds(source string) bool
}

// Allocations returns the devices that the scheduler allocated to claims, prepared or not, and those that an administrator has taken out of
// service. All methods answer from memory. The answer may be late or empty: allocations only keep pods away from a device that a claim is
// about to take.
type Allocations interface {
	// OutOfService returns a function that returns why a device gets no new pod; empty if it does. That function must be pure.
	OutOfService() func(device.Device) string
	// Allocated returns the holds that these claims will have: holder, device and share.
	Allocated() []ledger.Hold
	// Changed returns a channel that is closed at the next change; take it before reading.
	Changed() <-chan struct{}
}

// Specs are the CDI specs.
type Specs interface {
	// Verify has damaged specs restored soon. It does not wait.
	Verify()
	// QualifiedName returns the CDI name of a GPU or partition.
	QualifiedName(uuid string) string
	// Problem returns, without waiting, why no container can be given a GPU or partition. It is offered only if that is nil: otherwise a
	// pod that gets it fails permanently.
	Problem(uuid string) error
	// Has reports, without waiting, whether there is an entry, also while Problem reports that it cannot be restored.
	Has(uuid string) bool
	// Changed returns a channel that is closed when Problem may answer differently. Take it before calling Problem.
	Changed() <-chan struct{}
}

// Sharing returns how containers share a GPU by MPS. *sharing.Policy implements it. Both methods answer at once.
type Sharing interface {
	// Client returns the client settings of a container with that share of the device; nil if it needs none, as without MPS. It
	// returns an error if the device is not available now.
	Client(d device.Device, share device.Share) (*sharing.Client, error)
	// Changed returns a channel that is closed when Client may answer differently. Take it before calling Client.
	Changed() <-chan struct{}
}

// Requesters returns the namespaces of the pods for which kubelet may be calling Allocate. *podstate.Pods implements it.
type Requesters interface {
	// Requesters waits until the watch has reported such a pod, at most until ctx is done, and then returns none.
	Requesters(ctx context.Context, resource string) []string
}

// KubeletView calls kubelet's podresources GetAllocatableResources. It returns the IDs of healthy devices by resource; resources
// without any may be absent.
type KubeletView interface {
	Allocatable(ctx context.Context) (map[string][]string, error)
}

// Strategy is a way to pass a container's GPUs to the runtime. The names are those of NVIDIA's device plugin.
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

// Config of a Plugin. internal/config has checked its values. Fields are required unless their comment allows nil.
type Config struct {
	// Resources are the extended resources of whole GPUs and, by the strategy, of partitions.
	Resources device.Resources
	// NodeName is the node that events are about.
	NodeName string
	// Directory is kubelet's device-plugins directory.
	Directory string

	Strategies []Strategy
	// IndexIDs makes StrategyEnvVar and StrategyVolumeMounts name GPUs by their index instead of the UUID. CDI names always contain the
	// UUID.
	IndexIDs bool
	// Packed takes partitions and replicas from the GPU with the most holds first, instead of the one with the fewest.
	Packed bool
	// FailRequestsGreaterThanOne refuses more than one replica for a container, because further replicas add nothing
	// (k8s-device-plugin, sharing.timeSlicing.failRequestsGreaterThanOne). Under MPS a container never gets more than one.
	FailRequestsGreaterThanOne bool
	// AnnotationPrefix of StrategyCDIAnnotations: "cdi.k8s.io/".
	AnnotationPrefix string
	// PassDeviceSpecs also lists device nodes one by one, which CPU Manager's updates of a container need where there is no
	// CDI. As in NVIDIA's plugin it has no effect when every strategy is a CDI one.
	PassDeviceSpecs bool
	// DevRoot returns the parent of the driver's /dev, as a path of the host and of this process.
	DevRoot func() (host, agent string)
	// Env is in the environment of every container with a device. IMEXChannels are the channels that it gets without CDI, where they exist.
	Env          map[string]string
	IMEXChannels []int

	Inventory device.Source
	// Offered reports whether new pods may get a GPU; nil means all. Other GPUs are listed, as unhealthy, only if a pod held them
	// when Run began. It must always answer the same for a GPU.
	Offered func(device.GPU) bool
	// Excluded reports whether a GPU is served by neither API; nil means none. Another plugin may serve it.
	Excluded func(device.GPU) bool
	// Retiring is set on a node that no longer serves extended resources: GPUs that Offered excludes are unhealthy, also while a
	// pod holds them. Such a pod still needs the plugin: kubelet restarts no container whose resource has had no plugin for five
	// minutes (k8s.io/kubernetes pkg/kubelet/cm/devicemanager, callPreStartContainerIfNeeded).
	Retiring bool
	// HeldOnly is why no device is given to another pod, for as long as the Plugin runs: devices that no pod holds are unhealthy, and
	// an Allocate call is refused with it. kubelet restarts containers without Allocate. Nil serves all devices.
	HeldOnly error
	Ledger   Ledger
	Specs    Specs
	Sharing  Sharing
	// HandOver, where set, must return nil for each GPU of a container before kubelet starts it. Idempotent for one pod.
	HandOver func(ctx context.Context, uuid string) error
	// Requesters are asked about devices that are shared among some namespaces only.
	Requesters Requesters
	// NamespaceOf, where set, returns the namespace of the pod that has a hold. It is asked before a container starts: Requesters does not
	// know a pod that the watch has not reported. Nil where all namespaces may share.
	NamespaceOf func(h ledger.Hold) (namespace string, known bool, err error)
	// Allocations are the scheduler's: the plugin withdraws their devices before kubelet prepares the claims.
	Allocations Allocations
	// Adopt adds holds for what another plugin gave away while it was there (reconcile.Reconciler.Adopt).
	Adopt func(ctx context.Context) error
	// Kubelet confirms the lists that were sent.
	Kubelet KubeletView
	// Acknowledge is called with the devices of a resource that kubelet reports as allocatable, sorted, after each
	// query; known is false once that answer is outdated. A list that was sent does not prove that kubelet uses it. Acknowledge
	// must not block.
	Acknowledge func(resource string, ids []string, known bool)
	// Recorder must not block: kubelet waits for Allocate meanwhile.
	Recorder record.EventRecorder
	// Registerer receives the metrics.
	Registerer prometheus.Registerer
}

// asksBeforeStart reports whether kubelet has to ask before it starts a container.
func (c *Config) asksBeforeStart() bool { return c.HandOver != nil || c.NamespaceOf != nil }

func (c *Config) uses(want func(Strategy) bool) bool { return slices.ContainsFunc(c.Strategies, want) }

// warn records an event on the node.
func (c *Config) warn(reason, format string, args ...any) {
	c.Recorder.Eventf(regarding.Node(c.NodeName), corev1.EventTypeWarning, reason, format, args...)
}
