// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/hack/install"
)

const (
	devicePluginDir = "/var/lib/kubelet/device-plugins"
	registryDir     = "/var/lib/kubelet/plugins_registry"
	pluginsDir      = "/var/lib/kubelet/plugins"
)

// toy serves sockets on the node out of this process: a socket is a file, and the node's files are within reach.
type toy struct {
	server *grpc.Server
	ended  chan error
	socket string
}

// stop ends the server and removes its socket. It is idempotent.
func (t *toy) stop() error {
	t.server.Stop()
	<-t.ended
	if err := os.Remove(t.socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	return nil
}

// toy serves at a path of the node, until stop or the story's end.
func (s *story) toy(path string, register func(*grpc.Server)) *toy {
	s.Helper()
	root, err := node().Root()
	if err != nil {
		s.Fatal(err)
	}
	made := &toy{server: grpc.NewServer(), ended: make(chan error, 1), socket: filepath.Join(root, path)}
	if err := os.MkdirAll(filepath.Dir(made.socket), 0o755); err != nil {
		s.Fatal(err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: made.socket, Net: "unix"})
	if err != nil {
		s.Fatal(err)
	}
	register(made.server)
	go func() {
		made.ended <- made.server.Serve(listener)
		close(made.ended)
	}()
	s.Cleanup(func() {
		if err := made.stop(); err != nil {
			s.Error(err)
		}
	})
	return made
}

// devicePlugin is what NVIDIA's device plugin is to kubelet: GPUs under their UUIDs, answered with their device nodes.
type devicePlugin struct {
	pluginapi.UnimplementedDevicePluginServer
	// minors of the GPUs by UUID.
	minors map[string]int

	mu        sync.Mutex
	allocated []string
}

// devicePlugin serves the node's GPUs at a socket of that name and registers them with kubelet.
func (s *story) devicePlugin(name string, minors map[string]int) (*toy, *devicePlugin) {
	s.Helper()
	plugin := &devicePlugin{minors: minors}
	server := s.toy(filepath.Join(devicePluginDir, name), func(server *grpc.Server) { pluginapi.RegisterDevicePluginServer(server, plugin) })
	s.register(server, name, install.ResourceName)
	return server, plugin
}

// register tells kubelet's device manager of a plugin at a socket of that name.
func (s *story) register(server *toy, name, resource string) {
	s.Helper()
	conn, err := grpc.NewClient("unix://"+filepath.Join(filepath.Dir(server.socket), "kubelet.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		s.Fatal(err)
	}
	defer conn.Close()
	_, err = pluginapi.NewRegistrationClient(conn).Register(s.ctx, &pluginapi.RegisterRequest{
		Version: pluginapi.Version, Endpoint: name, ResourceName: resource, Options: &pluginapi.DevicePluginOptions{},
	})
	if err != nil {
		s.Fatalf("register %s with kubelet: %v", name, err)
	}
}

func (p *devicePlugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

func (p *devicePlugin) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	answer := &pluginapi.ListAndWatchResponse{}
	for uuid := range p.minors {
		answer.Devices = append(answer.Devices, &pluginapi.Device{ID: uuid, Health: pluginapi.Healthy})
	}
	if err := stream.Send(answer); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p *devicePlugin) Allocate(_ context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	answer := &pluginapi.AllocateResponse{}
	for _, container := range request.GetContainerRequests() {
		given := &pluginapi.ContainerAllocateResponse{Envs: map[string]string{"TOY": "true"}}
		for _, uuid := range container.GetDevicesIds() {
			path := fmt.Sprintf("/dev/nvidia%d", p.minors[uuid])
			given.Devices = append(given.Devices, &pluginapi.DeviceSpec{
				ContainerPath: path, HostPath: simulatedMachine + "/driver" + path, Permissions: "rw",
			})
			p.allocated = append(p.allocated, uuid)
		}
		answer.ContainerResponses = append(answer.ContainerResponses, given)
	}
	return answer, nil
}

// draRegistration answers kubelet's plugin watcher as another DRA driver of our name would.
type draRegistration struct {
	registerapi.UnimplementedRegistrationServer
	endpoint string
}

func (r draRegistration) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type: registerapi.DRAPlugin, Name: install.DriverName, Endpoint: r.endpoint, SupportedVersions: []string{"v1.DRAPlugin"},
	}, nil
}

func (draRegistration) NotifyRegistrationStatus(context.Context, *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	return &registerapi.RegistrationStatusResponse{}, nil
}
