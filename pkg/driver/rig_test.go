// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

const testNode = "node1"

// rig is a driver with a ledger on disk, sockets in a directory, and an API server over HTTP.
type rig struct {
	t         testing.TB
	dir       string
	api       *fakeAPI
	ledger    *ledger.Ledger
	podstate  *fakePodStates
	inventory *fakeInventory
	specs     *fakeSpecs
	pods      *fakePods
	node      *podstate.Node
	events    *fakeRecorder
	registry  *prometheus.Registry
	driver    *Driver
	stop      func() error
	// adoptions counts the calls of Adopt, of which the first fails.
	adoptions atomic.Int32
}

func allGPUs(device.GPU) bool { return true }

func newRig(t testing.TB, inv device.Inventory, adapt ...func(*Config)) *rig {
	t.Helper()
	// t.TempDir is too long for a socket path.
	dir, err := os.MkdirTemp("", "kl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	r := &rig{
		t: t, dir: dir, api: newFakeAPI(t), podstate: &fakePodStates{podStates: map[string]ledger.PodState{}},
		inventory: newFakeInventory(inv), specs: &fakeSpecs{}, pods: &fakePods{}, events: &fakeRecorder{}, registry: prometheus.NewRegistry(),
	}
	r.ledger, err = ledger.Open(t.Context(), ledger.Options{Dir: t.TempDir(), BootID: "boot", PodStates: r.podstate})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.ledger.Close() })
	r.api.put("nodes", newNode("node-uid-1"))
	config := Config{
		DriverName: "gpu.nvidia.com", NodeName: testNode, KubeClient: r.api.client(t), KubeletDir: dir,
		Limits: device.Resources{GPU: "nvidia.com/gpu"},
		Ledger: r.ledger, Inventory: r.inventory, Specs: r.specs, Pods: r.pods, Recorder: r.events, Registerer: r.registry,
		Partitions: &fakePartitions{known: map[device.Ref]device.Partition{}}, Sharing: &fakeSharing{applied: map[sharing.Key]bool{}},
		Adopt: func(context.Context) error {
			if r.adoptions.Add(1) == 1 {
				return errors.New("kubelet's state cannot be read")
			}
			return nil
		},
		Policy: &fakePolicy{}, DaemonTrouble: func(string) string { return "" }, HandOver: handedOver, Allocations: &fakeAllocations{changed: make(chan struct{})},
		OfferedToClaims: allGPUs, OfferedToPods: allGPUs,
		CheckInterval: 100 * time.Millisecond,
	}
	for _, a := range adapt {
		a(&config)
	}
	r.node = podstate.NewNode(r.api.client(t), config.NodeName)
	config.Node = r.node
	r.driver, err = New(config)
	if err != nil {
		t.Fatal(err)
	}
	r.driver.takeOver = time.Millisecond // nothing is lost by being quicker
	r.driver.socketTimeout = time.Minute // a busy machine may take longer than kubelet allows
	return r
}

// handedOver is a HandOver of GPUs that are always clean.
func handedOver(context.Context, string) error { return nil }

// run starts the driver and stops it at the end of the test, which fails on an error.
func (r *rig) run() *rig {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	watched := make(chan error, 1)
	go func() { watched <- r.node.Run(ctx) }()
	go func() { done <- errors.Join(r.driver.Run(ctx), <-watched) }()
	r.stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(patience):
			return fmt.Errorf("Run did not return")
		}
	})
	r.t.Cleanup(func() {
		if err := r.stop(); err != nil {
			r.t.Errorf("Run: %v", err)
		}
	})
	return r
}

// ready waits until kubelet has registered the driver and its slices are published.
func (r *rig) ready() *fakeKubelet {
	r.t.Helper()
	k := startKubelet(r.t, r.dir, "gpu.nvidia.com")
	eventually(r.t, "Ready", r.driver.Ready)
	return k
}

func newNode(uid types.UID) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testNode, UID: uid}}
}

// claim stores an allocated claim whose request "gpus" got the named devices.
func (r *rig) claim(name string, devices ...string) *resourceapi.ResourceClaim {
	c := newClaim(name, devices...)
	r.api.put("resourceclaims", c)
	return c
}

func newClaim(name string, devices ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: name, UID: types.UID("uid-" + name)}}
	c.Status.Allocation = &resourceapi.AllocationResult{}
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod-" + name, UID: types.UID("pod-uid-" + name)}}
	for _, d := range devices {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: "gpus", Driver: "gpu.nvidia.com", Pool: testNode, Device: d,
		})
	}
	return c
}

// metric sums the samples of a metric whose labels include all the given values: values, or counts of a histogram.
func (r *rig) metric(name string, labels ...string) float64 {
	r.t.Helper()
	families, err := r.registry.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	sum := 0.0
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			values := []string{}
			for _, pair := range m.GetLabel() {
				values = append(values, pair.GetValue())
			}
			if slices.ContainsFunc(labels, func(l string) bool { return !slices.Contains(values, l) }) {
				continue
			}
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return sum
}

// holders returns the holder of each GPU by minor: "gpu-0: claim uid-a held".
func (r *rig) holders() string {
	var parts []string
	for _, h := range r.ledger.Holds() {
		gpu, _ := r.inventory.Inventory().ByUUID(h.Device.GPU)
		parts = append(parts, fmt.Sprintf("%s: %s %s %s", gpu.Name(), h.Holder.Kind, h.Holder.ID, h.State))
	}
	return strings.Join(parts, ", ")
}

// takeByPod reserves a GPU for a pod, as the device plugin does.
func (r *rig) takeByPod(minor int, pod *ledger.Pod) {
	r.t.Helper()
	uuid := uuidOf(minor)
	if err := r.ledger.ReservePod([]ledger.PodRequest{{ID: uuid, Resource: "nvidia.com/gpu", Device: device.Ref{GPU: uuid}}}); err != nil {
		r.t.Fatal(err)
	}
	if pod == nil {
		return
	}
	for _, h := range r.ledger.Holds() {
		if h.Device.GPU == uuid {
			if err := r.ledger.Identify(h, *pod); err != nil {
				r.t.Fatal(err)
			}
		}
	}
}

func (r *rig) releasePodHold(minor int) {
	r.t.Helper()
	for _, h := range r.ledger.Holds() {
		if h.Device.GPU == uuidOf(minor) {
			if err := r.ledger.Release(h); err != nil {
				r.t.Fatal(err)
			}
		}
	}
}

// published describes every published device: "gpu-0", or "gpu-0!key" with a taint.
func (r *rig) published() string {
	var names []string
	for _, slice := range r.api.slices() {
		for _, d := range slice.Spec.Devices {
			name := d.Name
			for _, taint := range d.Taints {
				name += "!" + strings.TrimPrefix(taint.Key, "tandem-gpu.dev/")
			}
			names = append(names, name)
		}
	}
	return strings.Join(names, " ")
}

func (r *rig) awaitPublished(want string) {
	r.t.Helper()
	eventually(r.t, "slices", func() error {
		if got := r.published(); got != want {
			return fmt.Errorf("published %q, want %q", got, want)
		}
		return nil
	})
}

// fakePodStates answers by holder; without an answer a draining hold is gone, and any other is running.
type fakePodStates struct {
	mu        sync.Mutex
	podStates map[string]ledger.PodState
	asked     int
}

func (e *fakePodStates) Started(ledger.Hold, []ledger.Hold) bool { return false }
func (*fakePodStates) Reuses(ledger.Hold) bool                   { return true }

func (e *fakePodStates) PodState(h ledger.Hold) ledger.PodState {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.asked++
	if v, ok := e.podStates[h.Holder.ID]; ok {
		return v
	}
	if h.State == ledger.StateDraining {
		return ledger.Gone
	}
	return ledger.Running
}

// questions returns the number of calls.
func (e *fakePodStates) questions() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.asked
}

func (e *fakePodStates) set(id string, v ledger.PodState) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.podStates[id] = v
}

type fakeInventory struct {
	mu      sync.Mutex
	inv     device.Inventory
	changed chan struct{}
}

func newFakeInventory(inv device.Inventory) *fakeInventory {
	return &fakeInventory{inv: inv, changed: make(chan struct{})}
}

func (f *fakeInventory) Inventory() device.Inventory {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.inv
}

func (f *fakeInventory) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

func (f *fakeInventory) set(inv device.Inventory) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inv = inv
	close(f.changed)
	f.changed = make(chan struct{})
}

type fakeSpecs struct {
	mu  sync.Mutex
	err error
}

func (f *fakeSpecs) Ensure(context.Context, ...string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

func (f *fakeSpecs) Add(ctx context.Context, p device.Partition) error { return f.Ensure(ctx, p.UUID) }

func (f *fakeSpecs) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

func (f *fakeSpecs) QualifiedName(uuid string) string { return "k8s.gpu.nvidia.com/gpu=" + uuid }

// fakePods are movable, or not, and known when met is closed; at once where it is nil.
type fakePods struct {
	movable atomic.Bool
	ended   atomic.Bool
	met     chan struct{}
	waited  atomic.Int32
}

func (f *fakePods) WaitForPods(ctx context.Context, _ ledger.ClaimRequest) {
	f.waited.Add(1)
	if f.met == nil {
		return
	}
	select {
	case <-f.met:
	case <-ctx.Done():
	}
}

func (f *fakePods) Uses(h ledger.Hold) bool { return len(h.Pods) > 0 && !f.ended.Load() }

func (f *fakePods) Movable(context.Context, ledger.ClaimRequest) bool { return f.movable.Load() }

// fakeRecorder keeps events as "object reason: message".
type fakeRecorder struct {
	mu     sync.Mutex
	events []string
}

func (f *fakeRecorder) Event(object runtime.Object, _, reason, message string) {
	name := "?"
	switch o := object.(type) {
	case metav1.Object:
		name = o.GetNamespace() + "/" + o.GetName()
	case *corev1.ObjectReference:
		name = o.Kind + "/" + o.Name
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events = append(f.events, fmt.Sprintf("%s %s: %s", name, reason, message))
}

func (f *fakeRecorder) Eventf(object runtime.Object, kind, reason, format string, args ...any) {
	f.Event(object, kind, reason, fmt.Sprintf(format, args...))
}

func (f *fakeRecorder) AnnotatedEventf(object runtime.Object, _ map[string]string, kind, reason, format string, args ...any) {
	f.Eventf(object, kind, reason, format, args...)
}

func (f *fakeRecorder) all() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Join(f.events, "\n")
}

func uuidOf(minor int) string { return fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", minor) }

func refOf(minor int) device.Ref { return device.Ref{GPU: uuidOf(minor)} }

// machine returns an inventory of n equal GPUs, half on each NUMA node, four in each NVLink domain.
func machine(n int, adapt ...func(*device.GPU)) device.Inventory {
	inv := device.Inventory{DriverVersion: "580.95.05"}
	for i := range n {
		g := device.GPU{
			UUID: uuidOf(i), Index: i, Minor: i,
			PCIBusID: fmt.Sprintf("0000:%02x:00.0", 0x10+i%200), PCIeRoot: fmt.Sprintf("pci0000:%02x", 0x10+i/2%100),
			NUMANode: i * 2 / n, ProductName: "NVIDIA H100 80GB HBM3", Brand: "Nvidia", Architecture: "Hopper",
			ComputeCapability: "9.0", DriverVersion: "580.95.05", CUDADriverVersion: "13.0", AddressingMode: "None",
			ECCEnabled: ptr.To(true), MemoryBytes: 80 << 30, MIGCapable: true, NVLinkDomain: fmt.Sprintf("nvl-%d", i/4),
		}
		for _, a := range adapt {
			a(&g)
		}
		inv.GPUs = append(inv.GPUs, g)
	}
	return inv
}

func l4x4() device.Inventory {
	return machine(4, func(g *device.GPU) {
		g.ProductName, g.Architecture, g.ComputeCapability, g.MemoryBytes = "NVIDIA L4", "Ada Lovelace", "8.9", 24<<30
		g.NVLinkDomain, g.MIGCapable, g.NUMANode = "", false, device.UnknownNUMANode
	})
}

// mixedMachine has two GPUs of much memory before two of little.
func mixedMachine() device.Inventory {
	return machine(4, func(g *device.GPU) {
		if g.Minor >= 2 {
			g.MemoryBytes = 24 << 30
		}
	})
}

// unusableMachine has one GPU of each kind that cannot be published, between usable ones.
func unusableMachine() device.Inventory {
	return machine(8, func(g *device.GPU) {
		switch g.Minor {
		case 1:
			g.Health = device.Health{Reason: device.ReasonLost, Message: "GPU is lost"}
		case 2:
			g.UUID = ""
		case 3:
			g.Minor = -1
		case 4:
			g.MIGEnabled = true
		case 5:
			g.Minor = 0 // duplicate
		case 6:
			g.ProductName, g.Brand = strings.Repeat("x", 65), "bro\xffken"
			g.DriverVersion, g.CUDADriverVersion, g.ComputeCapability = "unknown", "", "9.0.1.2"
			g.MemoryBytes, g.PCIBusID, g.PCIeRoot, g.ECCEnabled, g.Index, g.NVLinkDomain = 0, "", "", nil, -1, ""
			g.AddressingMode = ""
		}
	})
}

func kubeletSocket(dir string) string {
	return filepath.Join(dir, "plugins_registry", "gpu.nvidia.com-reg.sock")
}
