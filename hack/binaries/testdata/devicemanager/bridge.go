// SPDX-License-Identifier: Apache-2.0

package devicemanager

import (
	"context"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// This file is copied beside kubelet's own sources of the package. It adds what a test needs to see and changes nothing.

// Bridge is a device manager of kubelet with its registration server.
type Bridge struct{ m *ManagerImpl }

// zero stands for the zero value of a parameter.
type zero struct{}

// call calls f. Its signature depends on the version: contexts, loggers and the operation are added where they are parameters.
func call(f any, args ...any) []reflect.Value {
	function := reflect.ValueOf(f)
	var in []reflect.Value
	for i := range function.Type().NumIn() {
		parameter := function.Type().In(i)
		switch {
		case parameter == reflect.TypeFor[context.Context]():
			in = append(in, reflect.ValueOf(context.Background()))
			continue
		case parameter == reflect.TypeFor[klog.Logger]():
			in = append(in, reflect.ValueOf(klog.Background()))
			continue
		case parameter.Name() == "Operation" && parameter.Kind() == reflect.String:
			in = append(in, reflect.ValueOf("add").Convert(parameter))
			continue
		}
		if _, ok := args[0].(zero); ok {
			in = append(in, reflect.Zero(parameter))
		} else {
			in = append(in, reflect.ValueOf(args[0]))
		}
		args = args[1:]
	}
	return function.Call(in)
}

func failure(values []reflect.Value) error {
	err, _ := values[len(values)-1].Interface().(error)
	return err
}

type ready func() bool

func (ready) AddSource(string) {}
func (r ready) AllReady() bool { return r() }

// Open starts a device manager in a directory. running are containers that run already, as pod and container.
func Open(dir string, active func() []*v1.Pod, allReady func() bool, running [][2]string) (*Bridge, error) {
	topology := call(topologymanager.NewFakeManager)[0].Interface()
	made := call(newManagerImpl, filepath.Join(dir, "kubelet.sock"), zero{}, topology)
	if err := failure(made); err != nil {
		return nil, err
	}
	b := &Bridge{made[0].Interface().(*ManagerImpl)}
	containers, ids := containermap.NewContainerMap(), sets.New[string]()
	for _, c := range running {
		containers.Add(c[0], c[1], c[0]+c[1])
		ids.Insert(c[0] + c[1])
	}
	return b, failure(call(b.m.Start, ActivePodsFunc(active), ready(allReady), containers, ids))
}

func (b *Bridge) Close() error { return failure(call(b.m.Stop)) }

// Register is what a plugin calls.
func (b *Bridge) Register(r *pluginapi.RegisterRequest) error {
	server := b.m.server.(interface {
		Register(context.Context, *pluginapi.RegisterRequest) (*pluginapi.Empty, error)
	})
	_, err := server.Register(context.Background(), r)
	return err
}

func (b *Bridge) Allocate(pod *v1.Pod, c *v1.Container) error {
	return failure(call(b.m.Allocate, pod, c))
}

func (b *Bridge) StartContainer(pod *v1.Pod, c *v1.Container) error {
	return failure(call(b.m.GetDeviceRunContainerOptions, pod, c))
}

func (b *Bridge) Update() { call(b.m.UpdateAllocatedDevices) }

// Age makes five minutes pass for what has stopped.
func (b *Bridge) Age() {
	b.m.mutex.Lock()
	defer b.m.mutex.Unlock()
	for _, e := range b.m.endpoints {
		if e.e.isStopped() {
			e.e.setStopTime(time.Now().Add(-endpointStopGracePeriod - time.Second))
		}
	}
}

// Capacity is what kubelet writes into the status of the node: capacity and allocatable of each resource.
func (b *Bridge) Capacity() map[string][2]int {
	values := call(b.m.GetCapacity)
	counts := map[string][2]int{}
	allocatable := values[1].Interface().(v1.ResourceList)
	for name, quantity := range values[0].Interface().(v1.ResourceList) {
		of := allocatable[name]
		counts[string(name)] = [2]int{int(quantity.Value()), int(of.Value())}
	}
	return counts
}

// Devices identifies the last list of a resource.
func (b *Bridge) Devices(resource string) DeviceInstances {
	b.m.mutex.Lock()
	defer b.m.mutex.Unlock()
	return b.m.allDevices[resource]
}

// State is what the manager knows, and what its checkpoint says.
type State struct {
	Healthy, Unhealthy, Allocated map[string][]string
	// Pods by UID, container and resource.
	Pods       map[string]map[string]map[string][]string
	Endpoints  map[string]Endpoint
	Checkpoint struct {
		Pods       map[string]map[string]map[string][]string
		Registered map[string][]string
	}
}

// Endpoint of a resource.
type Endpoint struct {
	Stopped bool
}

func (b *Bridge) State() (s State) {
	b.m.mutex.Lock()
	defer b.m.mutex.Unlock()
	s.Healthy, s.Unhealthy, s.Allocated = lists(b.m.healthyDevices), lists(b.m.unhealthyDevices), lists(b.m.allocatedDevices)
	s.Endpoints = map[string]Endpoint{}
	for name, e := range b.m.endpoints {
		s.Endpoints[name] = Endpoint{Stopped: e.e.isStopped()}
	}
	s.Pods = map[string]map[string]map[string][]string{}
	b.m.podDevices.RLock()
	defer b.m.podDevices.RUnlock()
	for uid, containers := range b.m.podDevices.devs {
		for name, resources := range containers {
			for resource, devices := range resources {
				add(s.Pods, uid, name, resource, devices.deviceIds.Devices().UnsortedList())
			}
		}
	}
	var file struct {
		Data struct {
			PodDeviceEntries []struct {
				PodUID, ContainerName, ResourceName string
				DeviceIDs                           map[string][]string
			}
			RegisteredDevices map[string][]string
		}
	}
	s.Checkpoint.Pods, s.Checkpoint.Registered = map[string]map[string]map[string][]string{}, map[string][]string{}
	data, err := os.ReadFile(b.m.checkpointFile())
	if err != nil || json.Unmarshal(data, &file) != nil {
		return s
	}
	for _, entry := range file.Data.PodDeviceEntries {
		add(s.Checkpoint.Pods, entry.PodUID, entry.ContainerName, entry.ResourceName, slices.Concat(slices.Collect(maps.Values(entry.DeviceIDs))...))
	}
	for name, ids := range file.Data.RegisteredDevices {
		slices.Sort(ids)
		s.Checkpoint.Registered[name] = append([]string{}, ids...)
	}
	return s
}

func add(pods map[string]map[string]map[string][]string, uid, container, resource string, ids []string) {
	if pods[uid] == nil {
		pods[uid] = map[string]map[string][]string{}
	}
	if pods[uid][container] == nil {
		pods[uid][container] = map[string][]string{}
	}
	slices.Sort(ids)
	pods[uid][container][resource] = ids
}

func lists(of map[string]sets.Set[string]) map[string][]string {
	all := map[string][]string{}
	for name, ids := range of {
		all[name] = append([]string{}, sets.List(ids)...)
	}
	return all
}
