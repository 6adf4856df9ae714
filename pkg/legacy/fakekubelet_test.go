// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// kubeletRelease selects the behaviour (k8s.io/kubernetes pkg/kubelet/cm/devicemanager, plugin/v1beta1/handler.go).
type kubeletRelease int

const (
	// release137 keeps several plugins of a resource apart by socket, and never lets go of a path that registered twice.
	release137 kubeletRelease = iota
	// release136 knows one plugin a resource, and disconnects whichever is current when any stream ends.
	release136
)

// fakeKubelet behaves towards device plugins as the device manager of kubelet does, over real sockets. It admits no pods.
// It is down until Start.
type fakeKubelet struct {
	pluginapi.UnimplementedRegistrationServer
	directory string
	release   kubeletRelease
	gate      *gate

	mu      sync.Mutex
	changed chan struct{}
	server  *grpc.Server
	served  chan struct{}
	running sync.WaitGroup
	clients []*pluginClient          // connected or connecting, oldest first; what a stream's end is looked up in
	current map[string]*pluginClient // whom Allocate of a resource would go to
	devices map[string][]*pluginapi.Device
	reading []*pluginClient    // whose stream is read
	conns   []*grpc.ClientConn // every one ever made, for Kill
	faults  kubeletFaults
	state   kubeletState
}

// kubeletFaults change how kubelet answers from now on.
type kubeletFaults struct {
	// RefuseRegister answers every Register with an error.
	RefuseRegister bool
	// NoStream accepts registrations without ever listing devices.
	NoStream bool
	// Deaf reads device lists and ignores them, as a kubelet with a poisoned endpoint does.
	Deaf bool
}

// kubeletGPU is the resource that most tests use.
const kubeletGPU = "nvidia.com/gpu"

// kubeletState is what kubelet knows.
type kubeletState struct {
	// Endpoints are the socket names of all Register calls, in order.
	Endpoints []string
	// Connected are the socket paths whose stream kubelet reads.
	Connected []string
	// Devices is the last list of kubeletGPU; all are unhealthy after the plugin disconnected.
	Devices []*pluginapi.Device
	// Of are the last lists by resource.
	Of map[string][]*pluginapi.Device
	// Lists counts the lists received.
	Lists int
	// Options of the last plugin that connected.
	Options *pluginapi.DevicePluginOptions
}

// Healthy returns the IDs of kubeletGPU's healthy devices, sorted.
func (s kubeletState) Healthy() []string { return healthyIDs(s.Devices) }

// HealthyOf returns the IDs of a resource's healthy devices, sorted.
func (s kubeletState) HealthyOf(resource string) []string { return healthyIDs(s.Of[resource]) }

func healthyIDs(devices []*pluginapi.Device) []string {
	var ids []string
	for _, d := range devices {
		if d.GetHealth() == pluginapi.Healthy {
			ids = append(ids, d.GetID())
		}
	}
	slices.Sort(ids)
	return ids
}

type pluginClient struct {
	resource, path string
	conn           *grpc.ClientConn
	api            pluginapi.DevicePluginClient
	connected      bool
	stopped        bool
}

// newFakeKubelet makes a kubelet for a device-plugins directory.
func newFakeKubelet(directory string, release kubeletRelease) *fakeKubelet {
	return &fakeKubelet{
		directory: directory, release: release, gate: newGate(), changed: make(chan struct{}),
		current: map[string]*pluginClient{}, devices: map[string][]*pluginapi.Device{},
	}
}

// Start wipes the directory's sockets as kubelet does, forgets everything, and takes registrations.
func (k *fakeKubelet) Start() error {
	names, err := filepath.Glob(filepath.Join(k.directory, "*"))
	if err != nil {
		return fmt.Errorf("start kubelet: %w", err)
	}
	for _, name := range names {
		if info, err := os.Stat(name); err == nil && info.Mode()&os.ModeSocket != 0 {
			if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("start kubelet: %w", err)
			}
		}
	}
	listener, err := net.Listen("unix", filepath.Join(k.directory, "kubelet.sock"))
	if err != nil {
		return fmt.Errorf("start kubelet: %w", err)
	}
	// A killed kubelet leaves its socket behind; Stop removes it.
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	server := grpc.NewServer()
	pluginapi.RegisterRegistrationServer(server, k)
	served := make(chan struct{})
	k.update(func() {
		k.server, k.served = server, served
		k.state, k.devices = kubeletState{Endpoints: k.state.Endpoints}, map[string][]*pluginapi.Device{}
	})
	go func() {
		defer close(served)
		_ = server.Serve(&gatedListener{Listener: listener, gate: k.gate})
	}()
	return nil
}

// Kill drops every connection and leaves the socket file.
func (k *fakeKubelet) Kill() {
	k.gate.thaw()
	k.mu.Lock()
	server, served, conns := k.server, k.served, k.conns
	k.server, k.clients, k.conns, k.current = nil, nil, nil, map[string]*pluginClient{}
	k.mu.Unlock()
	if server == nil {
		return
	}
	server.Stop()
	<-served
	for _, conn := range conns {
		_ = conn.Close()
	}
	k.running.Wait()
}

// Stop is Kill and the removal of the socket, as when kubelet ends in order.
func (k *fakeKubelet) Stop() {
	k.Kill()
	_ = os.Remove(filepath.Join(k.directory, "kubelet.sock"))
}

// Freeze makes kubelet deaf and mute, as SIGSTOP does, until Thaw.
func (k *fakeKubelet) Freeze() { k.gate.freeze() }

// Thaw undoes Freeze.
func (k *fakeKubelet) Thaw() { k.gate.thaw() }

// Set changes the faults.
func (k *fakeKubelet) Set(f kubeletFaults) { k.update(func() { k.faults = f }) }

// DropStreams closes the connections to every plugin, as a kubelet that gave up on them.
func (k *fakeKubelet) DropStreams() {
	k.mu.Lock()
	conns := slices.Clone(k.conns)
	k.mu.Unlock()
	for _, conn := range conns {
		_ = conn.Close()
	}
}

// Await waits until the state meets a condition and returns that state.
func (k *fakeKubelet) Await(ctx context.Context, condition func(kubeletState) bool) (kubeletState, error) {
	for {
		k.mu.Lock()
		state, changed := k.snapshot(), k.changed
		k.mu.Unlock()
		if condition(state) {
			return state, nil
		}
		select {
		case <-ctx.Done():
			return state, ctx.Err()
		case <-changed:
		}
	}
}

// kubeletState returns what kubelet knows now.
func (k *fakeKubelet) State() kubeletState {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.snapshot()
}

func (k *fakeKubelet) snapshot() kubeletState {
	s := k.state
	s.Endpoints = slices.Clone(s.Endpoints)
	s.Connected = nil
	s.Devices, s.Of = k.devices[kubeletGPU], maps.Clone(k.devices)
	for _, c := range k.reading {
		s.Connected = append(s.Connected, c.path)
	}
	return s
}

// Plugin returns the current plugin of kubeletGPU to make calls to, as kubelet's endpoint would.
func (k *fakeKubelet) Plugin() (pluginapi.DevicePluginClient, error) { return k.PluginOf(kubeletGPU) }

// PluginOf returns that of a resource.
func (k *fakeKubelet) PluginOf(resource string) (pluginapi.DevicePluginClient, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.current[resource]; c != nil && !c.stopped {
		return c.api, nil
	}
	return nil, fmt.Errorf("no plugin is connected for %s", resource)
}

// Allocatable answers as podresources' GetAllocatableResources does.
func (k *fakeKubelet) Allocatable(ctx context.Context) (map[string][]string, error) {
	if err := k.gate.pass(ctx); err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.server == nil {
		return nil, errors.New("kubelet is down")
	}
	allocatable := map[string][]string{}
	for resource, devices := range k.devices {
		if ids := healthyIDs(devices); len(ids) > 0 {
			allocatable[resource] = ids
		}
	}
	return allocatable, nil
}

// Register is the call that plugins make.
func (k *fakeKubelet) Register(ctx context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	c := &pluginClient{resource: r.GetResourceName(), path: filepath.Join(k.directory, r.GetEndpoint())}
	var refuse bool
	k.update(func() {
		k.state.Endpoints = append(k.state.Endpoints, r.GetEndpoint())
		refuse = k.faults.RefuseRegister
		if !refuse {
			if k.release == release136 {
				// The map entry is overwritten, the connection lives on.
				k.clients = slices.DeleteFunc(k.clients, func(other *pluginClient) bool { return other.resource == c.resource })
			}
			k.clients = append(k.clients, c)
		}
	})
	if refuse {
		return nil, errors.New("registration is refused")
	}
	if err := k.connect(ctx, c); err != nil {
		k.forget(c)
		return nil, err
	}
	k.running.Go(func() { k.read(c) })
	return &pluginapi.Empty{}, nil
}

func (k *fakeKubelet) connect(ctx context.Context, c *pluginClient) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := grpc.NewClient("passthrough:///plugin", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, "unix", c.path)
			if err != nil {
				return nil, err
			}
			return &gatedConn{Conn: conn, gate: k.gate}, nil
		}))
	if err != nil {
		return fmt.Errorf("dial device plugin: %w", err)
	}
	k.update(func() { k.conns = append(k.conns, conn) })
	api := pluginapi.NewDevicePluginClient(conn)
	options, err := api.GetDevicePluginOptions(ctx, &pluginapi.Empty{}, grpc.WaitForReady(true))
	if err != nil {
		return errors.Join(fmt.Errorf("get device plugin options: %w", err), conn.Close())
	}
	k.update(func() {
		if k.release == release137 && slices.ContainsFunc(k.clients, func(other *pluginClient) bool { return other != c && other.path == c.path && other.connected }) {
			err = fmt.Errorf("device plugin already connected: %s", c.path)
			return
		}
		c.conn, c.api, c.connected = conn, api, true
		k.current[c.resource] = c
		k.state.Options = options
	})
	if err != nil {
		return errors.Join(err, conn.Close())
	}
	return nil
}

// forget drops a plugin that could not be connected: 1.37 drops every one with that path, its predecessors the current.
func (k *fakeKubelet) forget(c *pluginClient) {
	k.update(func() {
		k.clients = slices.DeleteFunc(k.clients, func(other *pluginClient) bool {
			return k.finds(c, other)
		})
	})
}

// finds reports whether kubelet means other where it looks for c: by its path, before 1.37 by its resource.
func (k *fakeKubelet) finds(c, other *pluginClient) bool {
	if k.release == release136 {
		return other.resource == c.resource
	}
	return other.path == c.path
}

// read follows the device list. When it ends, kubelet looks for a pluginClient to disconnect, which need not be this one.
func (k *fakeKubelet) read(c *pluginClient) {
	k.follow(c)
	var victim *pluginClient
	k.update(func() {
		for _, other := range k.clients {
			if k.finds(c, other) {
				victim = other
			}
		}
		k.clients = slices.DeleteFunc(k.clients, func(other *pluginClient) bool { return other == victim })
	})
	if victim == nil {
		return
	}
	if victim.conn != nil {
		_ = victim.conn.Close()
	}
	k.update(func() {
		victim.stopped = true
		if current := k.current[c.resource]; k.release == release136 && current != nil {
			current.stopped = true
		}
		others := slices.ContainsFunc(k.clients, func(other *pluginClient) bool { return other.resource == c.resource })
		if k.release == release136 || !others {
			k.devices[c.resource] = markedUnhealthy(k.devices[c.resource])
		}
	})
}

func (k *fakeKubelet) follow(c *pluginClient) {
	if k.withFaults().NoStream {
		return
	}
	stream, err := c.api.ListAndWatch(context.Background(), &pluginapi.Empty{})
	if err != nil {
		return
	}
	k.update(func() { k.reading = append(k.reading, c) })
	defer k.update(func() {
		k.reading = slices.DeleteFunc(k.reading, func(other *pluginClient) bool { return other == c })
	})
	for {
		list, err := stream.Recv()
		if err != nil {
			return
		}
		k.update(func() {
			k.state.Lists++
			if !k.faults.Deaf {
				k.devices[c.resource] = list.GetDevices()
				k.writeCheckpoint()
			}
		})
	}
}

// writeCheckpoint writes what is registered, as kubelet does after each list, and not when a plugin ends. Under k.mu.
func (k *fakeKubelet) writeCheckpoint() {
	registered := map[string][]string{}
	for resource, devices := range k.devices {
		registered[resource] = healthyIDs(devices)
	}
	data, err := json.Marshal(map[string]any{"Data": map[string]any{"RegisteredDevices": registered}})
	if err != nil {
		return
	}
	path := filepath.Join(k.directory, "kubelet_internal_checkpoint")
	if os.WriteFile(path+".tmp", data, 0o600) == nil {
		_ = os.Rename(path+".tmp", path)
	}
}

func (k *fakeKubelet) withFaults() kubeletFaults {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.faults
}

func (k *fakeKubelet) update(change func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change()
	close(k.changed)
	k.changed = make(chan struct{})
}

func markedUnhealthy(devices []*pluginapi.Device) []*pluginapi.Device {
	var all []*pluginapi.Device
	for _, d := range devices {
		all = append(all, &pluginapi.Device{ID: d.GetID(), Health: pluginapi.Unhealthy, Topology: d.GetTopology()})
	}
	return all
}
