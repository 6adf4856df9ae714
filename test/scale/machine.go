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
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/pkg/wiring"
	"github.com/tandem-gpu/tandem/test/nodriver"
)

// machine is one node with the components of an agent, of which the front-ends, the ledger, the GPUNode and the watches run. Health and hand-over do not: GPUs and
// kubelet are simulated (kubelet.go), and settle stands in for the reconciler's loops.
type machine struct {
	*wiring.Parts
	wiring.APIs
	name string

	mu sync.Mutex
	// owner is the pod of each device ID that kubelet's device manager has given away. list is the newest list of the device plugin.
	owner map[string]types.UID
	list  []*pluginapi.Device
}

// agentAccount is the account of the chart's agents.
const agentAccount = "system:serviceaccount:" + install.Namespace + ":" + install.Release

// accountGroups are those of every account of the chart.
var accountGroups = []string{"system:serviceaccounts", "system:serviceaccounts:" + install.Namespace, "system:authenticated"}

// newMachine makes the components. Nothing runs yet. dir is the machine's own.
func newMachine(ctx context.Context, name, dir string, gpus device.Inventory, api *rest.Config) (_ *machine, err error) {
	c := config.Defaults()
	c.NodeName, c.DriverName, c.ResourceName = name, install.DriverName, install.ResourceName
	c.KubeletDir, c.RunDir, c.CgroupRoot = filepath.Join(dir, "k"), filepath.Join(dir, "run"), filepath.Join(dir, "cgroup")
	for _, d := range []string{filepath.Join(c.KubeletDir, "device-plugins"), c.RunDir, filepath.Join(c.CgroupRoot, "kubepods")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, fmt.Errorf("make directory of %s: %w", name, err)
		}
	}
	m := &machine{name: name, owner: map[string]types.UID{}}
	defer func() {
		if err != nil && m.Parts != nil {
			err = errors.Join(err, m.close())
		}
	}()
	own, err := agentAPI(api, name)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(own)
	if err != nil {
		return nil, fmt.Errorf("make client of %s: %w", name, err)
	}
	m.Parts, err = wiring.New(wiring.Options{
		Config: c, BootID: bootID, Hardware: hardware{gpus: gpus}, Client: client, REST: own,
		Recorder: &record.FakeRecorder{}, Registerer: prometheus.NewRegistry(), Hooks: wiring.Hooks{Specs: specs{}},
	})
	if err != nil {
		return nil, err
	}
	if _, err := m.Open(ctx); err != nil {
		return nil, err
	}
	m.Connect(c)
	m.APIs, err = m.NewAPIs(wiring.Serving{Config: c, Waiting: func() error { return nil }, Registerer: prometheus.NewRegistry()})
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

// close closes what newMachine has opened.
func (m *machine) close() (err error) {
	if m.Ledger != nil {
		err = m.Ledger.Close()
	}
	return errors.Join(err, m.Resources.Close())
}

// run serves until ctx is done. Like the agent, it starts the two APIs once the pods are known.
func (m *machine) run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, m.close()) }()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return m.Pods.Run(ctx) })
	group.Go(func() error { return m.Node.Run(ctx) })
	group.Go(func() error {
		if !m.Pods.AwaitSync(ctx) {
			return nil
		}
		group.Go(func() error { return m.GPUNode.Run(ctx) })
		group.Go(func() error { return m.Claims.Run(ctx) })
		m.settle(ctx)
		return nil
	})
	return group.Wait()
}

// settle plays the reconciler and the streams between kubelet and the device plugin: it ends the holds of pods that are gone, passes
// device lists on and reports them as allocatable.
func (m *machine) settle(ctx context.Context) {
	for ctx.Err() == nil {
		changed := []<-chan struct{}{m.Ledger.Changed(), m.Pods.Changed(), m.GPUNode.Changed()}
		wait := time.Minute
		for _, h := range m.Ledger.Holds() {
			switch state := m.Pods.PodState(h); {
			case state == ledger.Gone && (h.Holder.Kind == ledger.KindPod || h.State == ledger.StateDraining):
				_ = m.Ledger.Release(h) // it is tried again
			case state == ledger.Orphaned && h.Holder.Kind == ledger.KindPod:
				_ = m.Ledger.SetState(h, ledger.StateDraining)
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
	lists, again := m.Limits.Refresh(time.Now())
	m.list = lists[install.ResourceName].GetDevices()
	var healthy []string
	for _, d := range m.list {
		if d.GetHealth() == pluginapi.Healthy {
			healthy = append(healthy, d.GetID())
		}
	}
	m.GPUNode.Acknowledge(install.ResourceName, healthy, true)
	return again
}

// hardware is GPUs that do not change, and that are not partitioned, shared or reset.
type hardware struct {
	nodriver.Hardware
	gpus device.Inventory
}

func (h hardware) Inventory() device.Inventory { return h.gpus }
func (hardware) Changed() <-chan struct{}      { return nil }

// specs has a CDI entry for every device.
type specs struct{ wiring.Specs }

func (specs) Ensure(context.Context, ...string) error { return nil }
func (specs) QualifiedName(uuid string) string        { return "k8s.gpu.nvidia.com/gpu=" + uuid }
func (specs) Verify()                                 {}
func (specs) Problem(string) error                    { return nil }
func (specs) Unwritable() error                       { return nil }
func (specs) Has(string) bool                         { return true }
func (specs) Changed() <-chan struct{}                { return nil }
func (specs) AddPlaceholders([]string)                {}
