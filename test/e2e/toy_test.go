// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"path/filepath"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/faults"
)

const (
	devicePluginDir = faults.DevicePluginDir
	registryDir     = "/var/lib/kubelet/plugins_registry"
	pluginsDir      = "/var/lib/kubelet/plugins"
)

// serve serves at a path of the node, until the server is stopped or the story's end.
func (s *story) serve(path string, register func(*grpc.Server)) *faults.Server {
	s.Helper()
	server, err := faults.Serve(node(), path, register)
	if err != nil {
		s.Fatal(err)
	}
	s.Undo(server.Stop)
	return server
}

// devicePlugin serves the node's GPUs at a socket of that name and registers them with kubelet.
func (s *story) devicePlugin(name string, minors map[string]int) (*faults.Server, *faults.DevicePlugin) {
	s.Helper()
	plugin := faults.NewDevicePlugin(minors)
	server := s.serve(filepath.Join(faults.DevicePluginDir, name), func(server *grpc.Server) {
		pluginapi.RegisterDevicePluginServer(server, plugin)
	})
	s.register(server, install.ResourceName)
	return server, plugin
}

// register tells kubelet's device manager of a plugin.
func (s *story) register(server *faults.Server, resource string) {
	s.Helper()
	if err := server.Register(s.Ctx, resource); err != nil {
		s.Fatal(err)
	}
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
