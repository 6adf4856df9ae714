// SPDX-License-Identifier: Apache-2.0

package filedevice

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// kubelet plays kubelet's part of both APIs over real sockets, for one agent.
type kubelet struct {
	pluginapi.UnimplementedRegistrationServer
	t   *testing.T
	dir string
	// claims is set once the driver is registered.
	claims drapb.DRAPluginClient

	mu sync.Mutex
	// limits and devices are set once the device plugin is registered.
	limits  pluginapi.DevicePluginClient
	devices []*pluginapi.Device
	streams sync.WaitGroup
	conns   []*grpc.ClientConn
}

// startKubelet listens in kubelet's directory until the test ends.
func startKubelet(t *testing.T, dir string) *kubelet {
	t.Helper()
	k := &kubelet{t: t, dir: dir}
	listener, err := net.Listen("unix", filepath.Join(k.pluginDir(), "kubelet.sock"))
	check(t, err)
	server := grpc.NewServer()
	pluginapi.RegisterRegistrationServer(server, k)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
		k.streams.Wait()
		for _, conn := range k.conns {
			check(t, conn.Close())
		}
	})
	return k
}

// pluginDir has the sockets of device plugins.
func (k *kubelet) pluginDir() string { return filepath.Join(k.dir, "device-plugins") }

// dial connects to a socket of the agent until the test ends.
func (k *kubelet) dial(socket string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", socket, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.conns = append(k.conns, conn)
	return conn, nil
}

// Register implements pluginapi.RegistrationServer.
func (k *kubelet) Register(_ context.Context, request *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	if request.GetResourceName() != resourceName {
		return nil, fmt.Errorf("resource %s, want %s", request.GetResourceName(), resourceName)
	}
	conn, err := k.dial(filepath.Join(k.pluginDir(), request.GetEndpoint()))
	if err != nil {
		return nil, err
	}
	plugin := pluginapi.NewDevicePluginClient(conn)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.limits = plugin
	k.streams.Go(func() { k.follow(plugin) })
	return &pluginapi.Empty{}, nil
}

// follow reads device lists until the plugin ends the stream.
func (k *kubelet) follow(plugin pluginapi.DevicePluginClient) {
	stream, err := plugin.ListAndWatch(context.Background(), &pluginapi.Empty{})
	for err == nil {
		var list *pluginapi.ListAndWatchResponse
		if list, err = stream.Recv(); err == nil {
			k.mu.Lock()
			k.devices = list.GetDevices()
			k.mu.Unlock()
		}
	}
}

// list returns the last device list.
func (k *kubelet) list() []*pluginapi.Device {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.devices
}

// listed describes the last device list: the ID of each healthy device, and "!ID" of each other one.
func (k *kubelet) listed() string {
	var ids []string
	for _, d := range k.list() {
		if d.GetHealth() == pluginapi.Healthy {
			ids = append(ids, d.GetID())
		} else {
			ids = append(ids, "!"+d.GetID())
		}
	}
	return strings.Join(ids, " ")
}

// Allocatable implements legacy.KubeletView.
func (k *kubelet) Allocatable(context.Context) (map[string][]string, error) {
	ids := slices.DeleteFunc(strings.Fields(k.listed()), func(id string) bool { return strings.HasPrefix(id, "!") })
	return map[string][]string{resourceName: ids}, nil
}

// registerDriver finds the driver's registration socket and registers the driver.
func (k *kubelet) registerDriver(ctx context.Context) error {
	found, err := filepath.Glob(filepath.Join(k.dir, "plugins_registry", "*.sock"))
	if err != nil || len(found) != 1 {
		return errors.Join(fmt.Errorf("registration sockets are %v, want one", found), err)
	}
	registration, err := k.dial(found[0])
	if err != nil {
		return err
	}
	client := registerapi.NewRegistrationClient(registration)
	info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return err
	}
	if info.GetType() != registerapi.DRAPlugin || info.GetName() != driverName || !slices.Contains(info.GetSupportedVersions(), drapb.DRAPluginService) {
		return fmt.Errorf("the plugin is %v", info)
	}
	service, err := k.dial(info.GetEndpoint())
	if err != nil {
		return err
	}
	k.claims = drapb.NewDRAPluginClient(service)
	_, err = client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true})
	return err
}

// callTimeout is kubelet's for both calls of a DRA driver.
const callTimeout = 45 * time.Second

// prepare prepares a claim for a starting pod, and returns the CDI names of its devices.
func (k *kubelet) prepare(claim *resourceapi.ResourceClaim) ([]string, error) {
	ctx, cancel := context.WithTimeout(k.t.Context(), callTimeout)
	defer cancel()
	answer, err := k.claims.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: claimsOf(claim)})
	if err != nil {
		return nil, err
	}
	prepared, answered := answer.GetClaims()[string(claim.UID)]
	if !answered || prepared.GetError() != "" {
		return nil, fmt.Errorf("claim %s is answered: %t: %s", claim.Name, answered, prepared.GetError())
	}
	var names []string
	for _, d := range prepared.GetDevices() {
		names = append(names, d.GetCdiDeviceIds()...)
	}
	return names, nil
}

// unprepare unprepares a claim whose pods have ended.
func (k *kubelet) unprepare(claim *resourceapi.ResourceClaim) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(k.t.Context(), callTimeout)
	defer cancel()
	answer, err := k.claims.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: claimsOf(claim)})
	check(k.t, err)
	if unprepared, answered := answer.GetClaims()[string(claim.UID)]; !answered || unprepared.GetError() != "" {
		k.t.Fatalf("unprepare claim %s: answered %t: %s", claim.Name, answered, unprepared.GetError())
	}
}

func claimsOf(claim *resourceapi.ResourceClaim) []*drapb.Claim {
	return []*drapb.Claim{{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)}}
}

// allocate allocates a device to a container with a limit, and returns its CDI names.
func (k *kubelet) allocate(id string) ([]string, error) {
	k.mu.Lock()
	plugin := k.limits
	k.mu.Unlock()
	answer, err := plugin.Allocate(k.t.Context(), &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{id}}},
	})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, container := range answer.GetContainerResponses() {
		for _, d := range container.GetCdiDevices() {
			names = append(names, d.GetName())
		}
	}
	return names, nil
}
