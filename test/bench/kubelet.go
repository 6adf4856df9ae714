// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// kubelet plays kubelet to one agent at a time: over the real sockets, with no pods of its own.
type kubelet struct {
	dir     string
	server  *grpc.Server
	watcher *fsnotify.Watcher
	cancel  context.CancelFunc
	done    sync.WaitGroup

	mu sync.Mutex
	// current is what the agent of the moment has set up so far; a new one is expected by expect.
	current *session
}

// session is what one agent has registered.
type session struct {
	// claims and limits are closed when the API is ready for calls; what follows them is set before.
	claims, limits chan struct{}
	failed         chan error

	dra drapb.DRAPluginClient
	// service is the connection to the DRA plugin.
	service *grpc.ClientConn
	plugin  pluginapi.DevicePluginClient
	devices []*pluginapi.Device
	// registered is when the device plugin's Register arrived, identified when the DRA plugin answered GetInfo.
	registered, identified time.Time
	conns                  []*grpc.ClientConn
}

// startKubelet makes kubelet's directory and listens in it until stop.
func startKubelet(ctx context.Context, dir string) (*kubelet, error) {
	for _, sub := range []string{"plugins", "plugins_registry", "device-plugins", "pod-resources"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o750); err != nil {
			return nil, fmt.Errorf("make kubelet directory: %w", err)
		}
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch plugin registrations: %w", err)
	}
	if err := watcher.Add(filepath.Join(dir, "plugins_registry")); err != nil {
		return nil, errors.Join(fmt.Errorf("watch plugin registrations: %w", err), watcher.Close())
	}
	ctx, cancel := context.WithCancel(ctx)
	k := &kubelet{dir: dir, server: grpc.NewServer(), watcher: watcher, cancel: cancel}
	pluginapi.RegisterRegistrationServer(k.server, &registration{kubelet: k, ctx: ctx})
	podresources.RegisterPodResourcesListerServer(k.server, &podLister{kubelet: k})
	k.expect()
	for _, socket := range []string{"device-plugins", "pod-resources"} {
		listener, err := net.Listen("unix", filepath.Join(dir, socket, "kubelet.sock"))
		if err != nil {
			k.stop()
			return nil, fmt.Errorf("listen as kubelet: %w", err)
		}
		k.done.Go(func() { _ = k.server.Serve(listener) }) // ends with stop
	}
	k.done.Go(func() { k.watchPlugins(ctx) })
	return k, nil
}

func (k *kubelet) stop() {
	k.cancel()
	k.server.Stop()
	_ = k.watcher.Close() // nothing was written
	k.done.Wait()
	k.expect()
}

// expect forgets the agent before and returns what the next one will fill.
func (k *kubelet) expect() *session {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current != nil {
		for _, conn := range k.current.conns {
			_ = conn.Close() // its agent is gone
		}
	}
	k.current = &session{claims: make(chan struct{}), limits: make(chan struct{}), failed: make(chan error, 2)}
	return k.current
}

func (k *kubelet) fail(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	select {
	case k.current.failed <- err:
	default: // the first two say enough
	}
}

// dial connects to a socket of the agent for as long as the session lasts.
func (k *kubelet) dial(socket string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", socket, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.current.conns = append(k.current.conns, conn)
	return conn, nil
}

// watchPlugins is kubelet's plugin watcher.
func (k *kubelet) watchPlugins(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case event, ok := <-k.watcher.Events:
			if !ok {
				return
			}
			if !event.Has(fsnotify.Create) || strings.HasPrefix(filepath.Base(event.Name), ".") || !strings.HasSuffix(event.Name, ".sock") {
				continue
			}
			if err := k.registerPlugin(ctx, event.Name); err != nil && ctx.Err() == nil {
				k.fail(err)
			}
		}
	}
}

func (k *kubelet) registerPlugin(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := k.dial(socket)
	if err != nil {
		return err
	}
	client := registerapi.NewRegistrationClient(conn)
	info, err := client.GetInfo(ctx, &registerapi.InfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("get info of plugin %s: %w", socket, err)
	}
	k.mu.Lock()
	k.current.identified = time.Now()
	k.mu.Unlock()
	service, err := k.dial(info.GetEndpoint())
	if err != nil {
		return err
	}
	if _, err := client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		return fmt.Errorf("notify plugin %s: %w", socket, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.current.dra, k.current.service = drapb.NewDRAPluginClient(service), service
	close(k.current.claims)
	return nil
}

// registration is the device manager's side of kubelet.
type registration struct {
	pluginapi.UnimplementedRegistrationServer
	kubelet *kubelet
	ctx     context.Context
}

func (r *registration) Register(_ context.Context, request *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	k := r.kubelet
	k.mu.Lock()
	k.current.registered = time.Now()
	k.mu.Unlock()
	conn, err := k.dial(filepath.Join(k.dir, "device-plugins", request.GetEndpoint()))
	if err != nil {
		return nil, err
	}
	k.done.Go(func() {
		if err := k.listen(r.ctx, pluginapi.NewDevicePluginClient(conn)); err != nil && r.ctx.Err() == nil {
			k.fail(err)
		}
	})
	return &pluginapi.Empty{}, nil
}

// listen reads device lists until the agent ends the stream.
func (k *kubelet) listen(ctx context.Context, client pluginapi.DevicePluginClient) error {
	k.mu.Lock()
	s := k.current
	k.mu.Unlock()
	stream, err := client.ListAndWatch(ctx, &pluginapi.Empty{})
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for first := true; ; first = false {
		list, err := stream.Recv()
		switch {
		case err != nil && first:
			return fmt.Errorf("receive devices: %w", err)
		case err != nil:
			return nil
		}
		k.mu.Lock()
		s.devices = list.GetDevices()
		if first {
			s.plugin = client
			close(s.limits)
		}
		k.mu.Unlock()
	}
}

// podLister is kubelet's pod resources endpoint.
type podLister struct {
	podresources.UnimplementedPodResourcesListerServer
	kubelet *kubelet
}

func (p *podLister) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	return &podresources.ListPodResourcesResponse{}, nil
}

func (p *podLister) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	p.kubelet.mu.Lock()
	defer p.kubelet.mu.Unlock()
	response := &podresources.AllocatableResourcesResponse{}
	for _, d := range p.kubelet.current.devices {
		if d.GetHealth() == pluginapi.Healthy {
			response.Devices = append(response.Devices, &podresources.ContainerDevices{ResourceName: resourceName, DeviceIds: []string{d.GetID()}})
		}
	}
	return response, nil
}

// ids are all devices that the agent has listed.
func (k *kubelet) ids() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	ids := make([]string, len(k.current.devices))
	for i, d := range k.current.devices {
		ids[i] = d.GetID()
	}
	return ids
}

// writeCheckpoint is the device manager's record that one pod has these devices.
func (k *kubelet) writeCheckpoint(podUID string, ids []string) error {
	type entry struct {
		PodUID, ContainerName, ResourceName string
		DeviceIDs                           map[string][]string
	}
	var file struct {
		Data struct {
			PodDeviceEntries  []entry
			RegisteredDevices map[string][]string
		}
	}
	file.Data.PodDeviceEntries = []entry{{podUID, "main", resourceName, map[string][]string{"-1": ids}}}
	data, err := json.Marshal(file)
	if err != nil {
		return fmt.Errorf("encode device checkpoint: %w", err)
	}
	path := filepath.Join(k.dir, "device-plugins", "kubelet_internal_checkpoint")
	temporary := filepath.Join(k.dir, "device-plugins", ".checkpoint")
	if err := os.WriteFile(temporary, data, 0o600); err != nil {
		return fmt.Errorf("write device checkpoint: %w", err)
	}
	if err := os.Rename(temporary, path); err != nil {
		return fmt.Errorf("write device checkpoint: %w", err)
	}
	return nil
}
