// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// plugin is a registered device plugin.
type plugin struct {
	conn       *grpc.ClientConn
	api        pluginapi.DevicePluginClient
	prefers    bool
	registered time.Time
	// listed is whether a list has come. All devices are unhealthy once the plugin has ended its stream.
	listed, ended bool
	devices       []*pluginapi.Device
}

// DevicePlugin is a device plugin that kubelet calls.
type DevicePlugin struct {
	pluginapi.DevicePluginClient
	// Registered is when its Register arrived.
	Registered time.Time
	// Devices is its newest list.
	Devices []*pluginapi.Device
}

// DevicePlugin returns the plugin of a resource, once it has sent a list.
func (k *Kubelet) DevicePlugin(resource string) (DevicePlugin, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p, ok := k.plugins[resource]
	if !ok || !p.listed || p.ended {
		return DevicePlugin{}, false
	}
	return DevicePlugin{DevicePluginClient: p.api, Registered: p.registered, Devices: p.devices}, true
}

// registration is the server that device plugins call.
type registration struct {
	pluginapi.UnimplementedRegistrationServer
	kubelet *Kubelet
	ctx     context.Context
}

// Register implements pluginapi.RegistrationServer.
func (r *registration) Register(_ context.Context, request *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	k, resource := r.kubelet, request.GetResourceName()
	conn, err := dial(filepath.Join(k.Dir, "device-plugins", request.GetEndpoint()))
	if err != nil {
		return nil, err
	}
	p := &plugin{conn: conn, api: pluginapi.NewDevicePluginClient(conn), registered: time.Now()}
	k.change(func() {
		if before := k.plugins[resource]; before != nil {
			_ = before.conn.Close()
			p.devices = before.devices
		}
		k.plugins[resource] = p
	})
	k.done.Go(func() {
		err := k.follow(r.ctx, p, resource)
		k.change(func() {
			p.ended = true
			if err != nil && k.plugins[resource] == p && r.ctx.Err() == nil {
				k.failures = append(k.failures, err)
			}
		})
	})
	return &pluginapi.Empty{}, nil
}

// follow reads device lists until the plugin ends the stream. It fails if none comes.
func (k *Kubelet) follow(ctx context.Context, p *plugin, resource string) error {
	options, err := p.api.GetDevicePluginOptions(ctx, &pluginapi.Empty{}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("get options of the plugin of %s: %w", resource, err)
	}
	// Before the first list: choose reads it without the lock.
	k.change(func() { p.prefers = options.GetGetPreferredAllocationAvailable() })
	stream, err := p.api.ListAndWatch(ctx, &pluginapi.Empty{})
	if err != nil {
		return fmt.Errorf("list devices of %s: %w", resource, err)
	}
	for {
		list, err := stream.Recv()
		if err != nil {
			if p.listed {
				return nil
			}
			return fmt.Errorf("receive devices of %s: %w", resource, err)
		}
		k.change(func() {
			p.devices, p.listed = list.GetDevices(), true
			err = k.writeDevices()
		})
		if err != nil {
			return err
		}
	}
}

// healthy returns the IDs of a resource that kubelet may give to a container. k.mu is held.
func (p *plugin) healthy() (ids []string) {
	for _, d := range p.devices {
		if d.GetHealth() == pluginapi.Healthy && !p.ended {
			ids = append(ids, d.GetID())
		}
	}
	return ids
}

// counts are the node's capacity and allocatable devices by resource.
func (k *Kubelet) counts() (capacity, allocatable map[string]int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	capacity, allocatable = map[string]int{}, map[string]int{}
	for resource, p := range k.plugins {
		capacity[resource], allocatable[resource] = len(p.devices), len(p.healthy())
	}
	return capacity, allocatable
}

// Grant are devices of a resource that a container has by a limit.
type Grant struct {
	Pod                 types.UID
	Container, Resource string
	IDs                 []string
	// CDI are the names of the devices that the runtime gives to the container.
	CDI []string
	// Env are the environment variables.
	Env map[string]string
	// initial is whether the container leaves its devices to later ones.
	initial bool
}

// Granted are the devices of all containers.
func (k *Kubelet) Granted() []Grant {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.granted)
}

// Grant writes down that a container has devices, and forgets what others of that resource have, as if they had ended.
func (k *Kubelet) Grant(g Grant) (err error) {
	k.change(func() {
		k.granted = append(slices.DeleteFunc(k.granted, func(other Grant) bool { return other.Resource == g.Resource }), g)
		err = k.writeDevices()
	})
	return err
}

// admit gives the pod's containers the devices of their limits, as kubelet's device manager does. k.admission is held.
func (k *Kubelet) admit(ctx context.Context, pod *corev1.Pod) error {
	for _, c := range pod.Spec.InitContainers {
		if err := k.allocate(ctx, pod.UID, c, c.RestartPolicy == nil); err != nil {
			return err
		}
	}
	for _, c := range pod.Spec.Containers {
		if err := k.allocate(ctx, pod.UID, c, false); err != nil {
			return err
		}
	}
	return nil
}

func (k *Kubelet) allocate(ctx context.Context, pod types.UID, c corev1.Container, initial bool) error {
	for name, quantity := range c.Resources.Limits {
		resource, n := string(name), int(quantity.Value())
		k.mu.Lock()
		p := k.plugins[resource]
		var reusable, free []string
		if p != nil {
			reusable, free = k.free(pod, resource)
		}
		k.mu.Unlock()
		if p == nil || n == 0 {
			continue
		}
		g := Grant{Pod: pod, Container: c.Name, Resource: resource, initial: initial, IDs: reusable[:min(n, len(reusable))], Env: map[string]string{}}
		if missing := n - len(g.IDs); missing > len(free) {
			return fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d", resource, missing, len(free))
		} else if missing > 0 {
			chosen, err := p.choose(ctx, free, g.IDs, missing)
			if err != nil {
				return err
			}
			g.IDs = append(slices.Clone(g.IDs), chosen...)
		}
		answer, err := p.api.Allocate(ctx, &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: g.IDs}}})
		if err != nil {
			return err
		}
		for _, r := range answer.GetContainerResponses() {
			for _, d := range r.GetCdiDevices() {
				g.CDI = append(g.CDI, d.GetName())
			}
			maps.Copy(g.Env, r.GetEnvs())
		}
		k.change(func() {
			k.granted = append(k.granted, g)
			err = k.writeDevices()
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// free returns the devices that the pod's init containers leave to it, and those that no container has. k.mu is held.
func (k *Kubelet) free(pod types.UID, resource string) (reusable, free []string) {
	taken, left := map[string]bool{}, map[string]bool{}
	for _, g := range k.granted {
		if g.Resource != resource {
			continue
		}
		for _, id := range g.IDs {
			taken[id] = true
			left[id] = g.Pod == pod && g.initial
		}
	}
	for _, id := range slices.Sorted(maps.Keys(left)) {
		if left[id] {
			reusable = append(reusable, id)
		}
	}
	for _, id := range k.plugins[resource].healthy() {
		if !taken[id] {
			free = append(free, id)
		}
	}
	return reusable, free
}

// choose asks the plugin which of the free devices it prefers.
func (p *plugin) choose(ctx context.Context, free, with []string, n int) ([]string, error) {
	if !p.prefers {
		return free[:n], nil
	}
	answer, err := p.api.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: append(slices.Clone(with), free...), MustIncludeDeviceIDs: with, AllocationSize: int32(n + len(with))},
	}})
	if err != nil {
		return nil, err
	}
	var chosen []string
	for _, r := range answer.GetContainerResponses() {
		for _, id := range r.GetDeviceIDs() {
			if slices.Contains(free, id) && len(chosen) < n {
				chosen = append(chosen, id)
			}
		}
	}
	for _, id := range free {
		if len(chosen) < n && !slices.Contains(chosen, id) {
			chosen = append(chosen, id)
		}
	}
	return chosen, nil
}

// Release takes back the devices of a pod that has ended. As kubelet does, it leaves the checkpoint as it is.
func (k *Kubelet) Release(pod types.UID) {
	k.change(func() { k.granted = slices.DeleteFunc(k.granted, func(g Grant) bool { return g.Pod == pod }) })
}

// writeDevices writes the device manager's checkpoint. k.mu is held.
func (k *Kubelet) writeDevices() error {
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
	file.Data.RegisteredDevices = map[string][]string{}
	for resource, p := range k.plugins {
		file.Data.RegisteredDevices[resource] = p.healthy()
	}
	for _, g := range k.granted {
		file.Data.PodDeviceEntries = append(file.Data.PodDeviceEntries, entry{string(g.Pod), g.Container, g.Resource, map[string][]string{"-1": g.IDs}})
	}
	return replace(filepath.Join(k.Dir, "device-plugins", "kubelet_internal_checkpoint"), file)
}

// replace writes a state file in one step.
func replace(path string, contents any) error {
	data, err := json.Marshal(contents)
	if err != nil {
		return fmt.Errorf("encode %s: %w", path, err)
	}
	temporary := filepath.Join(filepath.Dir(path), "."+filepath.Base(path))
	if err := os.WriteFile(temporary, data, 0o600); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(temporary, path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
