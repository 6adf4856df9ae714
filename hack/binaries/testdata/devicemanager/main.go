// SPDX-License-Identifier: Apache-2.0

// devicemanager drives kubelet's own device manager: it reads commands from its standard input and answers each, in JSON.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"local/devicemanager/devicemanager"
)

type container struct {
	Name, Resource string
	Count          int
	// Sidecar is an init container that restarts.
	Init, Sidecar bool
}

type command struct {
	Op, Resource, Socket string
	Preferred            bool
	Healthy, Unhealthy   []string
	Active               []string
	Ready                bool
	Running              [][2]string
	Pod                  string
	Containers           []container
	Container            string
	IDs                  []string
	Fail, Damage         bool
	// Left is how many streams are left after a stop.
	Left int
}

// ask is a call from kubelet to a plugin.
type ask struct {
	Socket                      string
	Preferred                   bool
	Available, MustInclude, IDs []string
	Size                        int
}

type answer struct {
	Error string
	// Ask is the call that an allocation waits for; Done where it has ended.
	Ask      *ask
	Done     bool
	Capacity map[string][2]int
	State    devicemanager.State
}

type shim struct {
	dir, top string
	lives    int
	bridge   *devicemanager.Bridge

	mu      sync.Mutex
	active  []string
	ready   bool
	plugins map[string]*plugin
	asks    chan *ask
	replies chan command
	done    chan error
}

func main() {
	flags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(flags)
	_ = flags.Set("logtostderr", "false")
	_ = flags.Set("stderrthreshold", "FATAL")
	klog.SetOutput(discard{})
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "devicemanager:", err)
		os.Exit(1)
	}
}

type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }

func run() error {
	top, err := os.MkdirTemp("", "tdk")
	if err != nil {
		return err
	}
	defer os.RemoveAll(top)
	s := &shim{top: top, asks: make(chan *ask), replies: make(chan command), done: make(chan error)}
	in, out := json.NewDecoder(bufio.NewReader(os.Stdin)), bufio.NewWriter(os.Stdout)
	for in.More() {
		var c command
		if err := in.Decode(&c); err != nil {
			return err
		}
		var a answer
		if err := s.serve(c, &a); err != nil {
			a.Error = err.Error()
		}
		a.State = s.bridge.State()
		if err := json.NewEncoder(out).Encode(a); err != nil {
			return err
		}
		if err := out.Flush(); err != nil {
			return err
		}
	}
	return nil
}

func (s *shim) serve(c command, a *answer) error {
	switch c.Op {
	case "new", "restart":
		return s.restart(c)
	case "active":
		s.mu.Lock()
		s.active, s.ready = c.Active, c.Ready
		s.mu.Unlock()
	case "register":
		return s.register(c)
	case "list":
		return s.list(c)
	case "stop":
		return s.stop(c.Socket, c.Left)
	case "update":
		s.bridge.Update()
	case "age":
		s.bridge.Age()
	case "capacity":
		a.Capacity = s.bridge.Capacity()
	case "allocate", "start":
		pod, which := podOf(c)
		serve := s.bridge.Allocate
		if c.Op == "start" {
			serve = s.bridge.StartContainer
		}
		go func() { s.done <- serve(pod, which) }()
		return s.next(a)
	case "answer":
		s.replies <- c
		return s.next(a)
	case "next":
		return s.next(a)
	default:
		return fmt.Errorf("unknown command %q", c.Op)
	}
	return nil
}

// next waits for what an allocation does next.
func (s *shim) next(a *answer) error {
	select {
	case a.Ask = <-s.asks:
		return nil
	case err := <-s.done:
		a.Done = true
		return err
	}
}

func (s *shim) restart(c command) error {
	for socket := range s.plugins {
		s.plugins[socket].server.Stop()
	}
	if s.bridge != nil {
		if err := s.bridge.Close(); err != nil {
			return err
		}
		s.await(func() bool { return frames("(*server).runClient(") == 0 })
	}
	if c.Op == "new" {
		if s.dir != "" {
			if err := os.RemoveAll(s.dir); err != nil {
				return err
			}
		}
		s.lives++
		s.dir = filepath.Join(s.top, fmt.Sprint(s.lives))
		if err := os.Mkdir(s.dir, 0o700); err != nil {
			return err
		}
	}
	if c.Damage {
		if err := os.WriteFile(filepath.Join(s.dir, "kubelet_internal_checkpoint"), []byte(`{"Data":{},"Checksum":1}`), 0o600); err != nil {
			return err
		}
	}
	s.plugins = map[string]*plugin{}
	s.active, s.ready = c.Active, c.Ready
	var err error
	s.bridge, err = devicemanager.Open(s.dir, s.activePods, s.allReady, c.Running)
	return err
}

func (s *shim) activePods() (pods []*v1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, uid := range s.active {
		pods = append(pods, &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)}})
	}
	return pods
}

func (s *shim) allReady() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ready
}

func podOf(c command) (*v1.Pod, *v1.Container) {
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: types.UID(c.Pod), Name: c.Pod, Namespace: "apps"}}
	var which *v1.Container
	for _, from := range c.Containers {
		made := v1.Container{Name: from.Name}
		if from.Count > 0 {
			made.Resources.Limits = v1.ResourceList{v1.ResourceName(from.Resource): *resource.NewQuantity(int64(from.Count), resource.DecimalSI)}
		}
		if from.Sidecar {
			always := v1.ContainerRestartPolicyAlways
			made.RestartPolicy = &always
		}
		if from.Name == c.Container {
			which = &made
		}
		if from.Init {
			pod.Spec.InitContainers = append(pod.Spec.InitContainers, made)
		} else {
			pod.Spec.Containers = append(pod.Spec.Containers, made)
		}
	}
	return pod, which
}

// plugin is a device plugin on a socket.
type plugin struct {
	pluginapi.UnimplementedDevicePluginServer
	shim      *shim
	socket    string
	preferred bool
	server    *grpc.Server
	started   chan struct{}

	mu      sync.Mutex
	streams []*stream
}

type stream struct {
	lists chan *pluginapi.ListAndWatchResponse
	ended <-chan struct{}
}

func (s *shim) register(c command) error {
	p := s.plugins[c.Socket]
	if p == nil {
		p = &plugin{shim: s, socket: c.Socket, preferred: c.Preferred, server: grpc.NewServer(), started: make(chan struct{})}
		listener, err := net.Listen("unix", filepath.Join(s.dir, c.Socket))
		if err != nil {
			return err
		}
		pluginapi.RegisterDevicePluginServer(p.server, p)
		go p.server.Serve(listener)
		s.plugins[c.Socket] = p
	}
	request := &pluginapi.RegisterRequest{Version: pluginapi.Version, Endpoint: c.Socket, ResourceName: c.Resource}
	if err := s.bridge.Register(request); err != nil {
		return err
	}
	<-p.started
	return nil
}

func (p *plugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: p.preferred}, nil
}

func (p *plugin) ListAndWatch(_ *pluginapi.Empty, to grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	e := &stream{lists: make(chan *pluginapi.ListAndWatchResponse), ended: to.Context().Done()}
	p.mu.Lock()
	p.streams = append(p.streams, e)
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.streams = slices.DeleteFunc(p.streams, func(other *stream) bool { return other == e })
	}()
	p.started <- struct{}{}
	for {
		select {
		case list := <-e.lists:
			if err := to.Send(list); err != nil {
				return err
			}
		case <-e.ended:
			return nil
		}
	}
}

func (p *plugin) live() []*stream {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.streams)
}

// list sends a list on a plugin's last stream and waits until kubelet has taken it.
func (s *shim) list(c command) error {
	p := s.plugins[c.Socket]
	if p == nil {
		return errors.New("no such plugin")
	}
	streams := p.live()
	if len(streams) == 0 {
		return errors.New("no stream")
	}
	before := s.bridge.Devices(c.Resource)
	list := &pluginapi.ListAndWatchResponse{}
	for _, id := range c.Healthy {
		list.Devices = append(list.Devices, &pluginapi.Device{ID: id, Health: pluginapi.Healthy})
	}
	for _, id := range c.Unhealthy {
		list.Devices = append(list.Devices, &pluginapi.Device{ID: id, Health: pluginapi.Unhealthy})
	}
	e := streams[len(streams)-1]
	select {
	case e.lists <- list:
	case <-e.ended:
		return errors.New("no stream")
	}
	taken := func() bool { return !same(before, s.bridge.Devices(c.Resource)) }
	if !s.await(func() bool { return taken() && frames(".genericDeviceUpdateCallback(") == 0 }) {
		return errors.New("kubelet does not take the list")
	}
	return nil
}

// stop ends a plugin's process, and waits until kubelet has noticed: until left streams remain. kubelet before 1.37 also disconnects the
// present client of the resource (pkg/kubelet/cm/devicemanager/plugin/v1beta1, runClient), so the caller says how many.
func (s *shim) stop(socket string, left int) error {
	p := s.plugins[socket]
	if p == nil {
		return errors.New("no such plugin")
	}
	delete(s.plugins, socket)
	p.server.Stop()
	if err := os.Remove(filepath.Join(s.dir, socket)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	// Disconnect closes the connection first and marks the resource as stopped later. It is counted last, because each count takes a stack
	// trace of its own.
	if !s.await(func() bool {
		return s.streams() == left && frames("(*server).runClient(") == left && frames("(*client).Disconnect(") == 0
	}) {
		return errors.New("kubelet does not notice")
	}
	return nil
}

// streams counts the streams of all plugins.
func (s *shim) streams() (n int) {
	for _, p := range s.plugins {
		n += len(p.live())
	}
	return n
}

func (p *plugin) call(ctx context.Context, a *ask) (command, error) {
	a.Socket = p.socket
	select {
	case p.shim.asks <- a:
	case <-ctx.Done():
		return command{}, ctx.Err()
	}
	select {
	case reply := <-p.shim.replies:
		if reply.Fail {
			return reply, errors.New("refused by the plugin")
		}
		return reply, nil
	case <-ctx.Done():
		return command{}, ctx.Err()
	}
}

func (p *plugin) GetPreferredAllocation(ctx context.Context, r *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	c := r.ContainerRequests[0]
	reply, err := p.call(ctx, &ask{
		Preferred: true, Available: ordered(c.AvailableDeviceIDs), MustInclude: ordered(c.MustIncludeDeviceIDs), Size: int(c.AllocationSize),
	})
	if err != nil {
		return nil, err
	}
	return &pluginapi.PreferredAllocationResponse{ContainerResponses: []*pluginapi.ContainerPreferredAllocationResponse{{DeviceIDs: reply.IDs}}}, nil
}

func (p *plugin) Allocate(ctx context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	if _, err := p.call(ctx, &ask{IDs: ordered(r.ContainerRequests[0].DevicesIds)}); err != nil {
		return nil, err
	}
	return &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{{}}}, nil
}

func ordered(ids []string) []string {
	ids = slices.Clone(ids)
	slices.Sort(ids)
	return ids
}

// same compares the identity of two lists.
func same(a, b devicemanager.DeviceInstances) bool {
	if len(a) == 0 && len(b) == 0 {
		return a == nil && b == nil
	}
	if len(a) != len(b) {
		return false
	}
	for id := range a {
		return a[id] == b[id]
	}
	return true
}

// stacks is where frames reads the stacks of all goroutines.
var stacks = make([]byte, 1<<20)

// frames counts calls of a function that are under way.
func frames(function string) int {
	return bytes.Count(stacks[:runtime.Stack(stacks, true)], []byte(function))
}

func (s *shim) await(done func() bool) bool {
	for wait, end := 20*time.Microsecond, time.Now().Add(20*time.Second); time.Now().Before(end); wait = min(2*wait, 10*time.Millisecond) {
		if done() {
			return true
		}
		time.Sleep(wait)
	}
	return false
}
