// SPDX-License-Identifier: Apache-2.0

// Package fakekubelet behaves towards device plugins as kubelet's device manager does, over real sockets, with what tells
// kubelet 1.37 from its predecessors and with faults. It admits no pods and keeps no account of devices.
package fakekubelet

import (
	"context"
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

// Release selects the behaviour (k8s.io/kubernetes pkg/kubelet/cm/devicemanager, plugin/v1beta1/handler.go).
type Release int

const (
	// Release137 keeps several plugins of a resource apart by socket, and never lets go of a path that registered twice.
	Release137 Release = iota
	// Release136 knows one plugin a resource, and disconnects whichever is current when any stream ends.
	Release136
)

// Kubelet is a fake kubelet, down until Start.
type Kubelet struct {
	pluginapi.UnimplementedRegistrationServer
	directory string
	release   Release
	gate      *gate

	mu      sync.Mutex
	changed chan struct{}
	server  *grpc.Server
	served  chan struct{}
	running sync.WaitGroup
	clients []*client          // connected or connecting, oldest first; what a stream's end is looked up in
	current map[string]*client // whom Allocate of a resource would go to
	devices map[string][]*pluginapi.Device
	reading []*client          // whose stream is read
	conns   []*grpc.ClientConn // every one ever made, for Kill
	faults  Faults
	state   State
}

// Faults change how kubelet answers from now on.
type Faults struct {
	// RefuseRegister answers every Register with an error.
	RefuseRegister bool
	// NoStream accepts registrations without ever listing devices.
	NoStream bool
	// Deaf reads device lists and ignores them, as a kubelet with a poisoned endpoint does.
	Deaf bool
}

// GPU is the resource that most tests use.
const GPU = "nvidia.com/gpu"

// State is what kubelet knows.
type State struct {
	// Endpoints are the socket names of all Register calls, in order.
	Endpoints []string
	// Connected are the socket paths whose stream kubelet reads.
	Connected []string
	// Devices is the last list of GPU; all are unhealthy after the plugin disconnected.
	Devices []*pluginapi.Device
	// Of are the last lists by resource.
	Of map[string][]*pluginapi.Device
	// Lists counts the lists received.
	Lists int
	// Options of the last plugin that connected.
	Options *pluginapi.DevicePluginOptions
}

// Healthy returns the IDs of GPU's healthy devices, sorted.
func (s State) Healthy() []string { return healthy(s.Devices) }

// HealthyOf returns the IDs of a resource's healthy devices, sorted.
func (s State) HealthyOf(resource string) []string { return healthy(s.Of[resource]) }

func healthy(devices []*pluginapi.Device) []string {
	var ids []string
	for _, d := range devices {
		if d.GetHealth() == pluginapi.Healthy {
			ids = append(ids, d.GetID())
		}
	}
	slices.Sort(ids)
	return ids
}

type client struct {
	resource, path string
	conn           *grpc.ClientConn
	api            pluginapi.DevicePluginClient
	connected      bool
	stopped        bool
}

// New makes a kubelet for a device-plugins directory.
func New(directory string, release Release) *Kubelet {
	return &Kubelet{
		directory: directory, release: release, gate: newGate(), changed: make(chan struct{}),
		current: map[string]*client{}, devices: map[string][]*pluginapi.Device{},
	}
}

// Start wipes the directory's sockets as kubelet does, forgets everything, and takes registrations.
func (k *Kubelet) Start() error {
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
		k.state, k.devices = State{Endpoints: k.state.Endpoints}, map[string][]*pluginapi.Device{}
	})
	go func() {
		defer close(served)
		_ = server.Serve(&gatedListener{Listener: listener, gate: k.gate})
	}()
	return nil
}

// Kill drops every connection and leaves the socket file.
func (k *Kubelet) Kill() {
	k.gate.thaw()
	k.mu.Lock()
	server, served, conns := k.server, k.served, k.conns
	k.server, k.clients, k.conns, k.current = nil, nil, nil, map[string]*client{}
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
func (k *Kubelet) Stop() {
	k.Kill()
	_ = os.Remove(filepath.Join(k.directory, "kubelet.sock"))
}

// Freeze makes kubelet deaf and mute, as SIGSTOP does, until Thaw.
func (k *Kubelet) Freeze() { k.gate.freeze() }

// Thaw undoes Freeze.
func (k *Kubelet) Thaw() { k.gate.thaw() }

// Set changes the faults.
func (k *Kubelet) Set(f Faults) { k.update(func() { k.faults = f }) }

// DropStreams closes the connections to every plugin, as a kubelet that gave up on them.
func (k *Kubelet) DropStreams() {
	k.mu.Lock()
	conns := slices.Clone(k.conns)
	k.mu.Unlock()
	for _, conn := range conns {
		_ = conn.Close()
	}
}

// Await waits until the state meets a condition and returns that state.
func (k *Kubelet) Await(ctx context.Context, condition func(State) bool) (State, error) {
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

// State returns what kubelet knows now.
func (k *Kubelet) State() State {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.snapshot()
}

func (k *Kubelet) snapshot() State {
	s := k.state
	s.Endpoints = slices.Clone(s.Endpoints)
	s.Connected = nil
	s.Devices, s.Of = k.devices[GPU], maps.Clone(k.devices)
	for _, c := range k.reading {
		s.Connected = append(s.Connected, c.path)
	}
	return s
}

// Plugin returns the current plugin of GPU to make calls to, as kubelet's endpoint would.
func (k *Kubelet) Plugin() (pluginapi.DevicePluginClient, error) { return k.PluginOf(GPU) }

// PluginOf returns that of a resource.
func (k *Kubelet) PluginOf(resource string) (pluginapi.DevicePluginClient, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.current[resource]; c != nil && !c.stopped {
		return c.api, nil
	}
	return nil, fmt.Errorf("no plugin is connected for %s", resource)
}

// Allocatable answers as podresources' GetAllocatableResources does.
func (k *Kubelet) Allocatable(ctx context.Context) (map[string][]string, error) {
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
		if ids := healthy(devices); len(ids) > 0 {
			allocatable[resource] = ids
		}
	}
	return allocatable, nil
}

// Register is the call that plugins make.
func (k *Kubelet) Register(ctx context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	c := &client{resource: r.GetResourceName(), path: filepath.Join(k.directory, r.GetEndpoint())}
	var refuse bool
	k.update(func() {
		k.state.Endpoints = append(k.state.Endpoints, r.GetEndpoint())
		refuse = k.faults.RefuseRegister
		if !refuse {
			if k.release == Release136 {
				// The map entry is overwritten, the connection lives on.
				k.clients = slices.DeleteFunc(k.clients, func(other *client) bool { return other.resource == c.resource })
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

func (k *Kubelet) connect(ctx context.Context, c *client) error {
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
		if k.release == Release137 && slices.ContainsFunc(k.clients, func(other *client) bool { return other != c && other.path == c.path && other.connected }) {
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
func (k *Kubelet) forget(c *client) {
	k.update(func() {
		k.clients = slices.DeleteFunc(k.clients, func(other *client) bool {
			return k.finds(c, other)
		})
	})
}

// finds reports whether kubelet means other where it looks for c: by its path, before 1.37 by its resource.
func (k *Kubelet) finds(c, other *client) bool {
	if k.release == Release136 {
		return other.resource == c.resource
	}
	return other.path == c.path
}

// read follows the device list. When it ends, kubelet looks for a client to disconnect, which need not be this one.
func (k *Kubelet) read(c *client) {
	k.follow(c)
	var victim *client
	k.update(func() {
		for _, other := range k.clients {
			if k.finds(c, other) {
				victim = other
			}
		}
		k.clients = slices.DeleteFunc(k.clients, func(other *client) bool { return other == victim })
	})
	if victim == nil {
		return
	}
	if victim.conn != nil {
		_ = victim.conn.Close()
	}
	k.update(func() {
		victim.stopped = true
		if current := k.current[c.resource]; k.release == Release136 && current != nil {
			current.stopped = true
		}
		others := slices.ContainsFunc(k.clients, func(other *client) bool { return other.resource == c.resource })
		if k.release == Release136 || !others {
			k.devices[c.resource] = unhealthy(k.devices[c.resource])
		}
	})
}

func (k *Kubelet) follow(c *client) {
	if k.withFaults().NoStream {
		return
	}
	stream, err := c.api.ListAndWatch(context.Background(), &pluginapi.Empty{})
	if err != nil {
		return
	}
	k.update(func() { k.reading = append(k.reading, c) })
	defer k.update(func() {
		k.reading = slices.DeleteFunc(k.reading, func(other *client) bool { return other == c })
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
			}
		})
	}
}

func (k *Kubelet) withFaults() Faults {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.faults
}

func (k *Kubelet) update(change func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change()
	close(k.changed)
	k.changed = make(chan struct{})
}

func unhealthy(devices []*pluginapi.Device) []*pluginapi.Device {
	var all []*pluginapi.Device
	for _, d := range devices {
		all = append(all, &pluginapi.Device{ID: d.GetID(), Health: pluginapi.Unhealthy, Topology: d.GetTopology()})
	}
	return all
}
