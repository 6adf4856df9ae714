// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/hack/cluster"
)

const (
	// DevicePluginDir is kubelet's directory for device plugins on a node.
	DevicePluginDir = "/var/lib/kubelet/device-plugins"
	// devices are where a node's simulated GPUs have their device nodes.
	devices = "/run/nvidia/simulated/driver/dev"
)

// Server serves a socket on a node out of this process: a socket is a file, and the node's files are within reach.
type Server struct {
	server *grpc.Server
	ended  chan error
	socket string
}

// Serve serves at a path of the node, until Stop.
func Serve(node *cluster.Node, path string, register func(*grpc.Server)) (*Server, error) {
	root, err := node.Root()
	if err != nil {
		return nil, err
	}
	s := &Server{server: grpc.NewServer(), ended: make(chan error, 1), socket: filepath.Join(root, path)}
	if err := os.MkdirAll(filepath.Dir(s.socket), 0o755); err != nil {
		return nil, fmt.Errorf("serve %s on %s: %w", path, node.Name(), err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: s.socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("serve %s on %s: %w", path, node.Name(), err)
	}
	register(s.server)
	go func() {
		s.ended <- s.server.Serve(listener)
		close(s.ended)
	}()
	return s, nil
}

// Stop ends the server and removes its socket. It is idempotent.
func (s *Server) Stop() error {
	s.server.Stop()
	<-s.ended
	if err := os.Remove(s.socket); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("remove socket: %w", err)
	}
	return nil
}

// Register tells kubelet's device manager that the server is the plugin of a resource. Its socket is in DevicePluginDir.
func (s *Server) Register(ctx context.Context, resource string) error {
	conn, err := grpc.NewClient("unix://"+filepath.Join(filepath.Dir(s.socket), "kubelet.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		return fmt.Errorf("register %s with kubelet: %w", s.socket, err)
	}
	defer conn.Close()
	_, err = pluginapi.NewRegistrationClient(conn).Register(ctx, &pluginapi.RegisterRequest{
		Version: pluginapi.Version, Endpoint: filepath.Base(s.socket), ResourceName: resource, Options: &pluginapi.DevicePluginOptions{},
	})
	if err != nil {
		return fmt.Errorf("register %s with kubelet: %w", s.socket, err)
	}
	return nil
}

// DevicePlugin is a device plugin that is not Tandem's: it answers with the device nodes of GPUs. It is safe for concurrent use.
type DevicePlugin struct {
	pluginapi.UnimplementedDevicePluginServer
	minors map[string]int

	mu sync.Mutex
	// healthy are listed as such, given are those that Allocate gives.
	healthy, given map[string]bool
	changed        chan struct{}
	allocated      []string
}

// NewDevicePlugin returns a plugin of GPUs, given by their minors under the IDs that it lists. All of them are healthy, and given to pods.
func NewDevicePlugin(minors map[string]int) *DevicePlugin {
	p := &DevicePlugin{minors: minors, changed: make(chan struct{})}
	all := slices.Collect(maps.Keys(minors))
	p.Offer(all...)
	p.Give(all...)
	return p
}

// Offer makes exactly these devices healthy.
func (p *DevicePlugin) Offer(ids ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.healthy = setOf(ids)
	close(p.changed)
	p.changed = make(chan struct{})
}

// Give refuses each Allocate for other devices than these.
func (p *DevicePlugin) Give(ids ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.given = setOf(ids)
}

func setOf(ids []string) map[string]bool {
	set := map[string]bool{}
	for _, id := range ids {
		set[id] = true
	}
	return set
}

// Allocated returns the IDs that kubelet has asked for, in that order.
func (p *DevicePlugin) Allocated() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.allocated)
}

// Minor is that of the GPU under an ID.
func (p *DevicePlugin) Minor(id string) int { return p.minors[id] }

// GetDevicePluginOptions implements pluginapi.DevicePluginServer.
func (p *DevicePlugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

// ListAndWatch implements pluginapi.DevicePluginServer.
func (p *DevicePlugin) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	for {
		list, changed := p.list()
		if err := stream.Send(list); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}

func (p *DevicePlugin) list() (list *pluginapi.ListAndWatchResponse, changed chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list = &pluginapi.ListAndWatchResponse{}
	for _, id := range slices.Sorted(maps.Keys(p.minors)) {
		health := pluginapi.Unhealthy
		if p.healthy[id] {
			health = pluginapi.Healthy
		}
		list.Devices = append(list.Devices, &pluginapi.Device{ID: id, Health: health})
	}
	return list, p.changed
}

// Allocate implements pluginapi.DevicePluginServer. The container has the environment variable FOREIGN=true.
func (p *DevicePlugin) Allocate(_ context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	answer := &pluginapi.AllocateResponse{}
	for _, container := range request.GetContainerRequests() {
		response := &pluginapi.ContainerAllocateResponse{Envs: map[string]string{"FOREIGN": "true"}}
		for _, id := range container.GetDevicesIds() {
			// kubelet may choose from the list of the plugin before, and call the one that has registered meanwhile.
			if !p.given[id] {
				return nil, status.Errorf(codes.FailedPrecondition, "the foreign plugin does not give %s", id)
			}
			name := fmt.Sprintf("nvidia%d", p.minors[id])
			response.Devices = append(response.Devices, &pluginapi.DeviceSpec{
				ContainerPath: "/dev/" + name, HostPath: filepath.Join(devices, name), Permissions: "rw",
			})
			p.allocated = append(p.allocated, id)
		}
		answer.ContainerResponses = append(answer.ContainerResponses, response)
	}
	return answer, nil
}
