// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/legacy"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// machine is one node with the front-ends of an agent: its ledger, DRA driver, device plugin, GPUNode and watches are the agent's
// own. GPUs, reconciler and kubelet are simulated (kubelet.go).
type machine struct {
	name   string
	client kubernetes.Interface
	pods   *podstate.Pods
	self   *podstate.Node
	book   *ledger.Ledger
	claims *driver.Driver
	limits *legacy.Plugin
	object *gpunode.Object

	mu sync.Mutex
	// owner is the pod of each device ID that kubelet's device manager has given away. list is the newest list of the device plugin.
	owner map[string]types.UID
	list  []*pluginapi.Device
}

// limits are the extended resources of every machine.
var limits = device.Resources{GPU: install.ResourceName}

// agentAccount is the account of the chart's agents.
const agentAccount = "system:serviceaccount:" + install.Namespace + ":" + install.Release

// accountGroups are those of every account of the chart.
var accountGroups = []string{"system:serviceaccounts", "system:serviceaccounts:" + install.Namespace, "system:authenticated"}

// newMachine makes the components as cmd/kubelet-plugin does. Nothing runs yet. dir is the machine's own.
func newMachine(ctx context.Context, name, dir string, gpus device.Inventory, api *rest.Config) (_ *machine, err error) {
	kubeletDir, runDir, cgroups := filepath.Join(dir, "k"), filepath.Join(dir, "run"), filepath.Join(dir, "cgroup")
	for _, d := range []string{filepath.Join(kubeletDir, "device-plugins"), runDir, filepath.Join(cgroups, "kubepods")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, fmt.Errorf("make directory of %s: %w", name, err)
		}
	}
	m := &machine{name: name, owner: map[string]types.UID{}}
	defer func() {
		if err != nil && m.book != nil {
			err = errors.Join(err, m.book.Close())
		}
	}()
	own, err := agentAPI(api, name)
	if err != nil {
		return nil, err
	}
	if m.client, err = kubernetes.NewForConfig(own); err != nil {
		return nil, fmt.Errorf("make client of %s: %w", name, err)
	}
	m.self = podstate.NewNode(m.client, name)
	if m.pods, err = podstate.NewPods(m.client, name, podstate.NewCgroups(cgroups, ""), kubeletDir); err != nil {
		return nil, err
	}
	m.book, err = ledger.Open(ctx, ledger.Options{Dir: runDir, BootID: bootID, PodStates: m.pods, Queue: m.pods.Queue(limits.Has)})
	if err != nil {
		return nil, err
	}
	all := func(device.GPU) bool { return true }
	inventory := fixed{gpus}
	if m.object, err = gpunode.New(gpunode.Config{
		REST: own, DriverName: install.DriverName, NodeName: name,
		Claims: func(namespace string) gpunode.Claims { return m.client.ResourceV1().ResourceClaims(namespace) },
		Facts:  gpunode.Facts{Mode: "Dual", Limits: limits, OfferedToPods: all, BootID: bootID},
		Node:   m.self, Ledger: m.book, Inventory: inventory, Sharing: noSharing{}, Waiting: func() string { return "" },
		Recorder: &record.FakeRecorder{}, Registerer: prometheus.NewRegistry(),
	}); err != nil {
		return nil, err
	}
	if m.claims, err = driver.New(driver.Config{
		DriverName: install.DriverName, NodeName: name, KubeClient: m.client, KubeletDir: kubeletDir,
		Node: m.self, Ledger: m.book, Inventory: inventory, Specs: specs{}, Pods: m.pods, Sharing: noSharing{}, Policy: noPolicy{},
		HandOver: func(context.Context, string) error { return nil }, Adopt: func(context.Context) error { return nil },
		OfferedToClaims: all, OfferedToPods: all, Limits: limits, Allocations: m.object,
		Recorder: &record.FakeRecorder{}, Registerer: prometheus.NewRegistry(),
	}); err != nil {
		return nil, err
	}
	m.limits, err = legacy.New(legacy.Config{
		Resources: limits, NodeName: name, Directory: filepath.Join(kubeletDir, "device-plugins"), Strategies: []legacy.Strategy{legacy.StrategyCDI},
		Inventory: inventory, Offered: all, Ledger: m.book, Specs: specs{}, Sharing: noPolicy{}, Allocations: m.object,
		Acknowledge: m.object.Acknowledge, Recorder: &record.FakeRecorder{}, Registerer: prometheus.NewRegistry(),
	})
	return m, err
}

// bootID is that of all machines.
const bootID = "4b2f3a1c-0a5d-4c55-9f3e-6f3f0a4c9b11"

// agentAPI is the access of the agent's account, as with the token of its pod on this node. Each agent has a connection of its own.
func agentAPI(api *rest.Config, node string) (*rest.Config, error) {
	tls, err := rest.TLSConfigFor(api)
	if err != nil {
		return nil, fmt.Errorf("configure TLS of %s: %w", node, err)
	}
	own := &rest.Config{
		Host: api.Host, QPS: -1,
		Transport: &http.Transport{TLSClientConfig: tls, DialContext: api.Dial, ForceAttemptHTTP2: true},
		Impersonate: rest.ImpersonationConfig{
			UserName: agentAccount, Groups: accountGroups,
			Extra: map[string][]string{"authentication.kubernetes.io/node-name": {node}},
		},
	}
	own.ContentType = "application/vnd.kubernetes.protobuf"
	own.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	return own, nil
}

// run serves until ctx is done. Like the agent, it starts the two APIs once the pods are known.
func (m *machine) run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, m.book.Close()) }()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return m.pods.Run(ctx) })
	group.Go(func() error { return m.self.Run(ctx) })
	group.Go(func() error {
		if !m.pods.AwaitSync(ctx) {
			return nil
		}
		group.Go(func() error { return m.object.Run(ctx) })
		group.Go(func() error { return m.claims.Run(ctx) })
		m.settle(ctx)
		return nil
	})
	return group.Wait()
}

// settle plays the reconciler and the streams between kubelet and the device plugin: it ends the holds of pods that are gone, passes
// device lists on and reports them as allocatable.
func (m *machine) settle(ctx context.Context) {
	for ctx.Err() == nil {
		changed := []<-chan struct{}{m.book.Changed(), m.pods.Changed(), m.object.Changed()}
		wait := time.Minute
		for _, h := range m.book.Holds() {
			switch state := m.pods.PodState(h); {
			case state == ledger.Gone && (h.Holder.Kind == ledger.KindPod || h.State == ledger.StateDraining):
				_ = m.book.Release(h) // it is tried again
			case state == ledger.Orphaned && h.Holder.Kind == ledger.KindPod:
				_ = m.book.SetState(h, ledger.StateDraining)
				wait = unsettled
			case h.State == ledger.StateDraining, podstate.Unsettled(h) > 0:
				wait = unsettled
			}
		}
		if again := m.look(); again > 0 {
			wait = min(wait, again)
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-changed[0]:
		case <-changed[1]:
		case <-changed[2]:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// unsettled is how soon holds are looked at again that time alone may end.
const unsettled = 500 * time.Millisecond

// look takes the device list to kubelet, and what kubelet calls allocatable back.
func (m *machine) look() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	lists, again := m.limits.Refresh(time.Now())
	m.list = lists[install.ResourceName].GetDevices()
	var healthy []string
	for _, d := range m.list {
		if d.GetHealth() == pluginapi.Healthy {
			healthy = append(healthy, d.GetID())
		}
	}
	m.object.Acknowledge(install.ResourceName, healthy, true)
	return again
}

// fixed is an inventory that does not change.
type fixed struct{ gpus device.Inventory }

func (f fixed) Inventory() device.Inventory { return f.gpus }
func (fixed) Changed() <-chan struct{}      { return nil }

// specs has a CDI entry for every device.
type specs struct{}

func (specs) Ensure(context.Context, ...string) error     { return nil }
func (specs) Add(context.Context, device.Partition) error { return nil }
func (specs) QualifiedName(uuid string) string            { return "k8s.gpu.nvidia.com/gpu=" + uuid }
func (specs) Verify()                                     {}
func (specs) Problem(string) error                        { return nil }
func (specs) Has(string) bool                             { return true }
func (specs) Changed() <-chan struct{}                    { return nil }

// noSharing is sharing.Manager where no claim has settings. A call of any other method panics.
type noSharing struct{ driver.Sharing }

func (noSharing) Daemons() []sharing.Daemon       { return nil }
func (noSharing) UnknownDaemons() []string        { return nil }
func (noSharing) Changed() <-chan struct{}        { return nil }
func (noSharing) Applied(string, device.Ref) bool { return false }

// noPolicy is sharing.Policy where no GPU is shared.
type noPolicy struct{}

func (noPolicy) ByDaemon(device.GPU) bool { return false }
func (noPolicy) Join(context.Context, sharing.Claim, device.Device, device.Share) ([]string, error) {
	return nil, nil
}
func (noPolicy) Client(device.Device, device.Share) (*sharing.Client, error) { return nil, nil }
func (noPolicy) Changed() <-chan struct{}                                    { return nil }
