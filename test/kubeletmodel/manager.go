// SPDX-License-Identifier: Apache-2.0

// Package kubeletmodel is a model of kubelet's device manager (k8s.io/kubernetes pkg/kubelet/cm/devicemanager, 1.34 to 1.37) on a node
// without NUMA alignment. The simulation runs it. The package's test drives it and kubelet's own package with the same random sequences and
// fails at the first difference. The model starts no goroutine, reads no clock and does no I/O.
package kubeletmodel

import (
	"errors"
	"maps"
	"slices"
)

// ByResource are device IDs, by resource.
type ByResource map[string][]string

// PodDevices are the devices of containers, by pod UID and container.
type PodDevices map[string]map[string]ByResource

// Checkpoint is what kubelet writes to its disk.
type Checkpoint struct {
	Pods PodDevices
	// Registered are the healthy devices.
	Registered ByResource
}

// Config is what a manager knows of the world around it.
type Config struct {
	// Minor is the minor version of Kubernetes: 37 for 1.37.
	Minor int
	// Active reports whether a pod is active: known, and not ended.
	Active func(uid string) bool
	// SourcesReady reports whether kubelet knows the pods of the API server. Until then no pod counts as ended.
	SourcesReady func() bool
	// Ran reports whether a container ran when kubelet started.
	Ran func(uid, container string) bool
	// Write is called with each new checkpoint.
	Write func(Checkpoint)
	// Choose chooses n of the candidates, which are sorted. kubelet takes any.
	Choose func(candidates []string, n int) []string
}

// Endpoint is one registration of a plugin.
type Endpoint struct {
	Resource, Socket string
	// Preferred says that the plugin has GetPreferredAllocation.
	Preferred bool
	// Stopped is set when kubelet has lost the plugin, or knows it from its checkpoint only.
	Stopped bool
	expired bool
	// dropped is set when kubelet has closed the connection.
	dropped bool
}

// Manager is one life of kubelet's device manager. It is not safe for concurrent use.
type Manager struct {
	Config
	pods                          PodDevices
	healthy, unhealthy, allocated map[string]set
	// endpoints are those that kubelet calls, one for each resource.
	endpoints map[string]*Endpoint
	// clients are the connections of the registration server; kubelet up to 1.36 keeps the last one of a resource only.
	clients map[string][]*Endpoint
	// store has the endpoints of a resource by socket, since 1.37.
	store map[string]map[string]*Endpoint
	// reusable are devices of init containers of the pod that is being admitted.
	reusable    map[string]set
	reusablePod string
}

type set map[string]bool

func setOf(ids ...string) set {
	s := set{}
	for _, id := range ids {
		s[id] = true
	}
	return s
}

func (s set) sorted() []string { return append([]string{}, slices.Sorted(maps.Keys(s))...) }

func (s set) without(other set) set {
	rest := set{}
	for id := range s {
		if !other[id] {
			rest[id] = true
		}
	}
	return rest
}

// Errors of kubelet; its texts contain these.
var (
	ErrUnregistered = errors.New("cannot allocate unregistered device")
	ErrUnhealthy    = errors.New("no healthy devices present")
	ErrLostHealth   = errors.New("previously allocated devices are no longer healthy")
	ErrTooFew       = errors.New("requested number of devices unavailable")
	ErrChanged      = errors.New("changed request for resource")
	ErrStopped      = errors.New("has been stopped")
	ErrNoEndpoint   = errors.New("endpoint not found in cache")
	ErrNoPlugin     = errors.New("unknown Device Plugin")
	ErrKnownSocket  = errors.New("device plugin already connected")
)

// New starts a manager with the checkpoint of the one before; nil where there is none, or where it is damaged.
func New(config Config, before *Checkpoint) *Manager {
	m := &Manager{
		Config: config, pods: PodDevices{}, healthy: map[string]set{}, unhealthy: map[string]set{}, allocated: map[string]set{},
		endpoints: map[string]*Endpoint{}, clients: map[string][]*Endpoint{}, store: map[string]map[string]*Endpoint{},
	}
	if before == nil {
		return m
	}
	m.pods = before.Pods.clone()
	m.allocated = m.pods.devices()
	for resource := range before.Registered {
		m.healthy[resource], m.unhealthy[resource] = set{}, set{}
		m.endpoints[resource] = &Endpoint{Resource: resource, Stopped: true}
	}
	return m
}

// Register takes a plugin's Register. The stream of the endpoint that it returns lasts until StreamEnded.
func (m *Manager) Register(resource, socket string, preferred bool) (*Endpoint, error) {
	e := &Endpoint{Resource: resource, Socket: socket, Preferred: preferred}
	if m.Minor < 37 {
		m.clients[resource] = []*Endpoint{e}
		m.endpoints[resource] = e
		return e, nil
	}
	if m.store[resource] == nil {
		m.store[resource] = map[string]*Endpoint{}
	}
	if m.store[resource][socket] != nil {
		// kubelet forgets the connection that it has, too.
		m.clients[resource] = slices.DeleteFunc(m.clients[resource], func(c *Endpoint) bool { return c.Socket == socket })
		return nil, ErrKnownSocket
	}
	m.clients[resource] = append(m.clients[resource], e)
	m.store[resource][socket], m.endpoints[resource] = e, e
	return e, nil
}

// StreamEnded is the end of a plugin's stream. It returns the endpoint whose connection kubelet closes, which up to 1.36 is that of the
// resource's last registration; nil for none.
func (m *Manager) StreamEnded(e *Endpoint) (dropped *Endpoint) {
	at := slices.IndexFunc(m.clients[e.Resource], func(c *Endpoint) bool { return m.Minor < 37 || c.Socket == e.Socket })
	if e.dropped || at < 0 {
		return nil
	}
	dropped = m.clients[e.Resource][at]
	dropped.dropped = true
	m.clients[e.Resource] = slices.Delete(m.clients[e.Resource], at, at+1)
	if m.Minor < 37 {
		if current := m.endpoints[e.Resource]; current != nil {
			m.lose(e.Resource)
			current.Stopped = true
		}
		return dropped
	}
	stored := m.store[e.Resource]
	if stored[dropped.Socket] == nil {
		return dropped
	}
	stored[dropped.Socket].Stopped = true
	if len(stored) == 1 {
		delete(m.store, e.Resource)
		m.lose(e.Resource)
		return dropped
	}
	delete(stored, dropped.Socket)
	m.endpoints[e.Resource] = stored[slices.Min(slices.Collect(maps.Keys(stored)))] // kubelet takes any
	return dropped
}

// lose marks all devices of a resource as unhealthy.
func (m *Manager) lose(resource string) {
	lost := maps.Clone(m.unhealthy[resource])
	if lost == nil {
		lost = set{}
	}
	if m.healthy[resource] != nil {
		maps.Copy(lost, m.healthy[resource])
		m.healthy[resource] = set{}
	}
	m.unhealthy[resource] = lost
}

// List takes a message of ListAndWatch.
func (m *Manager) List(resource string, healthy, unhealthy []string) {
	m.healthy[resource], m.unhealthy[resource] = setOf(healthy...), setOf(unhealthy...)
	m.write()
}

// Expire says that an endpoint which has stopped did so five minutes ago: its grace period is over.
func (e *Endpoint) Expire() { e.expired = e.Stopped }

// Endpoint returns the endpoint that kubelet calls for a resource; nil for none.
func (m *Manager) Endpoint(resource string) *Endpoint { return m.endpoints[resource] }

// Capacity is what kubelet writes into the status of its node: capacity and allocatable of each resource. It forgets resources whose
// endpoint stopped too long ago.
func (m *Manager) Capacity() map[string][2]int {
	counts := map[string][2]int{}
	forgotten := set{}
	for _, devices := range []map[string]set{m.healthy, m.unhealthy} {
		for resource := range devices {
			if e := m.endpoints[resource]; e == nil || e.expired {
				forgotten[resource] = true
			} else {
				counts[resource] = [2]int{len(m.healthy[resource]) + len(m.unhealthy[resource]), len(m.healthy[resource])}
			}
		}
	}
	for resource := range forgotten {
		delete(m.endpoints, resource)
		delete(m.healthy, resource)
		delete(m.unhealthy, resource)
	}
	if len(forgotten) > 0 {
		m.write()
	}
	return counts
}

// Update is UpdateAllocatedDevices, which admissions and listers of pod resources cause. If no pod has ended, it changes nothing.
// Otherwise it forgets the devices of an Allocate in flight.
func (m *Manager) Update() {
	ended := slices.DeleteFunc(slices.Collect(maps.Keys(m.pods)), m.Active)
	if !m.SourcesReady() || len(ended) == 0 {
		return
	}
	for _, uid := range ended {
		delete(m.pods, uid)
	}
	m.allocated = m.pods.devices()
}

func (m *Manager) write() { m.Write(Checkpoint{Pods: m.pods.clone(), Registered: sorted(m.healthy)}) }

// State of a manager, for comparison and for those who read it.
type State struct {
	Healthy, Unhealthy, Allocated ByResource
	Pods                          PodDevices
	// Stopped says of each resource with an endpoint whether that has stopped.
	Stopped map[string]bool
}

// State returns a copy of all that decides what the manager does.
func (m *Manager) State() State {
	s := State{
		Healthy: sorted(m.healthy), Unhealthy: sorted(m.unhealthy), Allocated: sorted(m.allocated), Pods: m.pods.clone(), Stopped: map[string]bool{},
	}
	for resource, e := range m.endpoints {
		s.Stopped[resource] = e.Stopped
	}
	return s
}

// Healthy returns the healthy devices of a resource, sorted.
func (m *Manager) Healthy(resource string) []string { return m.healthy[resource].sorted() }

// Containers returns the devices of a pod's containers. The caller does not change them.
func (m *Manager) Containers(uid string) map[string]ByResource { return m.pods[uid] }

// Devices returns the devices that a pod has of a resource, sorted.
func (m *Manager) Devices(uid, resource string) []string {
	ids := set{}
	for _, resources := range m.pods[uid] {
		maps.Copy(ids, setOf(resources[resource]...))
	}
	return ids.sorted()
}

func sorted(of map[string]set) ByResource {
	all := ByResource{}
	for resource, ids := range of {
		all[resource] = ids.sorted()
	}
	return all
}

func (p PodDevices) clone() PodDevices {
	copied := PodDevices{}
	for uid, containers := range p {
		copied[uid] = map[string]ByResource{}
		for name, resources := range containers {
			copied[uid][name] = maps.Clone(resources)
		}
	}
	return copied
}

func (p PodDevices) devices() map[string]set {
	all := map[string]set{}
	for _, containers := range p {
		for _, resources := range containers {
			for resource, ids := range resources {
				if all[resource] == nil {
					all[resource] = set{}
				}
				maps.Copy(all[resource], setOf(ids...))
			}
		}
	}
	return all
}
