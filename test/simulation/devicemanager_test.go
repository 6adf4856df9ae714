// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/mps"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/test/kubeletmodel"
)

// stream is one registration of a device plugin, under a socket name of its own.
type stream struct {
	server server
	// ended is set on the plugin's side, dropped on kubelet's.
	ended, dropped bool
	endpoint       *kubeletmodel.Endpoint
	lists          []*pluginapi.ListAndWatchResponse
	delivering     bool
}

// startDevices starts the device manager with kubelet's checkpoint.
func (k *kubelet) startDevices() {
	ran := map[string]bool{}
	for uid := range k.host.pods {
		ran[uid] = k.host.busy(uid)
	}
	k.streams = map[*kubeletmodel.Endpoint]*stream{}
	k.devices = kubeletmodel.New(kubeletmodel.Config{
		Minor: k.version, Active: k.active, SourcesReady: func() bool { return k.sourcesReady },
		Ran: func(uid, _ string) bool { return ran[uid] }, Write: k.write,
		Choose: func(candidates []string, n int) []string {
			k.rand.Shuffle(len(candidates), func(i, j int) { candidates[i], candidates[j] = candidates[j], candidates[i] })
			return candidates[:n]
		},
	}, k.host.readCheckpoint())
	k.expire()
}

// checkpointWrite is a write of kubelet's checkpoint that waits for the disk.
type checkpointWrite struct {
	pods  kubeletmodel.PodDevices
	data  []byte
	named []string
	then  []func()
}

// write queues a write of what the checkpoint is now: kubelet writes one file at a time, and what it collects for a device list it writes
// without the lock of its device manager (k8s.io/kubernetes pkg/kubelet/cm/devicemanager, genericDeviceUpdateCallback). So a write may
// land after a later Allocate, and that Allocate's own write after it.
func (k *kubelet) write(c kubeletmodel.Checkpoint) {
	data, named := k.host.encode(c)
	k.writes = append(k.writes, &checkpointWrite{pods: c.Pods, data: data, named: named})
	if len(k.writes) == 1 {
		k.writeNext()
	}
}

func (k *kubelet) writeNext() {
	if time.Now().After(k.host.slowUntil) {
		k.land()
		return
	}
	k.after(k.process, k.between(0, 4*time.Second), "writes its checkpoint", k.land)
}

func (k *kubelet) land() {
	w := k.writes[0]
	k.sawStale(w)
	k.host.writeCheckpoint(w.data, w.named)
	if k.writes = k.writes[1:]; len(k.writes) > 0 {
		k.hit(checkpointLate)
		k.writeNext()
	}
	for _, then := range w.then {
		then()
	}
}

// sawStale counts a checkpoint that names another pod than the one that has a device by now.
func (k *kubelet) sawStale(w *checkpointWrite) {
	owners := map[string]string{}
	for uid, containers := range k.devices.State().Pods {
		for _, container := range containers {
			for _, id := range container[resourceName] {
				owners[id] = uid
			}
		}
	}
	for uid, containers := range w.pods {
		for _, container := range containers {
			for _, id := range container[resourceName] {
				if now := owners[id]; now != "" && now != uid {
					k.hit(checkpointStale)
				}
			}
		}
	}
}

// written continues once what was collected so far is on disk.
func (k *kubelet) written(then func()) {
	if len(k.writes) == 0 {
		then()
		return
	}
	last := k.writes[len(k.writes)-1]
	last.then = append(last.then, then)
}

// expire ends the grace period of an endpoint that has just stopped.
func (k *kubelet) expire() {
	if e := k.devices.Endpoint(resourceName); e != nil && e.Stopped {
		k.after(k.process, 5*time.Minute, "gives up a device plugin", e.Expire)
	}
}

// register takes a plugin's Register.
func (k *kubelet) register(e *stream) {
	k.sockets++
	endpoint, err := k.devices.Register(resourceName, fmt.Sprintf("tandem-%d.sock", k.sockets), !k.faults.noReuse)
	if err != nil {
		k.simulation.fail("kubelet refuses a device plugin: %v", err)
		return
	}
	e.endpoint, k.streams[endpoint] = endpoint, e
	k.deliver(e)
}

// deliver brings device lists to kubelet, in order.
func (k *kubelet) deliver(e *stream) {
	if e.delivering || e.dropped || len(e.lists) == 0 {
		return
	}
	e.delivering = true
	delay := k.latency()
	if !k.prompt && k.chance(4) {
		delay = k.between(0, 3*time.Second)
	}
	k.after(k.process, delay, "gets a device list", func() {
		e.delivering = false
		if e.dropped || len(e.lists) == 0 {
			return
		}
		list := e.lists[0]
		e.lists = e.lists[1:]
		var healthy, unhealthy []string
		for _, d := range list.Devices {
			if d.Health == pluginapi.Healthy {
				healthy = append(healthy, d.ID)
			} else {
				unhealthy = append(unhealthy, d.ID)
			}
		}
		k.devices.List(resourceName, healthy, unhealthy)
		k.deliver(e)
	})
}

// relist: the device plugin sends the same devices again, so kubelet writes its checkpoint.
func (s *simulation) relist(string) {
	devices := s.kubelet.devices
	if now := devices.State(); devices.Endpoint(resourceName) != nil {
		devices.List(resourceName, now.Healthy[resourceName], now.Unhealthy[resourceName])
	}
}

// hangUp: the plugin's side of a stream is gone. Kubelets up to 1.36 then disconnect whichever plugin is registered.
func (k *kubelet) hangUp(e *stream) {
	k.after(k.process, k.latency(), "loses a device plugin", func() {
		e.dropped = true
		if e.endpoint == nil {
			return
		}
		if newer := k.streams[k.devices.StreamEnded(e.endpoint)]; newer != nil && newer != e {
			k.hit(oldStreamEndsNew)
			newer.dropped = true
			k.after(newer.server.life(), k.latency(), "loses its stream to kubelet", func() { newer.server.streamEnded(newer) })
		}
		k.expire()
	})
}

func (k *kubelet) devicesOfUUID(uid string) []string { return k.devices.Devices(uid, resourceName) }

// devicesOf are the names of the GPUs, or parts of GPUs, that a pod was given.
func (k *kubelet) devicesOf(uid string) []string { return k.allocatedTo(k.devicesOfUUID(uid)) }

var errNotRegistered = errors.New("its devices are not registered")

// containersOf are the containers of a pod, in the order in which kubelet admits them.
func containersOf(p *pod) []kubeletmodel.Container {
	main := kubeletmodel.Container{Name: "main", Resource: resourceName, Count: p.gpus}
	if p.init {
		return []kubeletmodel.Container{{Name: "init", Resource: resourceName, Count: p.gpus, Init: true}, main}
	}
	return []kubeletmodel.Container{main}
}

// allocate admits a pod: it requests its devices container by container, while kubelet admits no other pod.
func (k *kubelet) allocate(w *worker) {
	switch {
	case k.host.busy(w.uid): // it was admitted by an earlier life of kubelet, whatever became of its account
		k.devices.Update()
		k.admitted(w, nil)
	case len(k.devicesOfUUID(w.uid)) == 0 && k.host.pods[w.uid].ran():
		k.admitted(w, errors.New("its devices are no longer known"))
	default:
		k.admitContainers(w, containersOf(w.pod), false)
	}
}

func (k *kubelet) reject(w *worker, err error) {
	if k.host.boot > 1 && !k.rebootedPods[w.uid] && w.pod.admitted {
		k.rebootedPods[w.uid] = true
		k.hit(rebootPodsFail)
	}
	k.admitted(w, err)
}

// admitContainers allocates to one container after the other. asked is set once a plugin was asked.
func (k *kubelet) admitContainers(w *worker, left []kubeletmodel.Container, asked bool) {
	if len(left) > 0 {
		k.advance(w, k.devices.Allocate(w.uid, left[0]), left[1:], asked)
		return
	}
	switch {
	case len(k.devicesOfUUID(w.uid)) == 0:
		k.reject(w, errNotRegistered) // kubelet does not know the resource yet
	case asked && !k.profile.peaceful && k.chance(8):
		k.hit(allocateUnknownPod)
		k.admitted(w, errors.New("another admission plugin refuses"))
	default:
		k.admitted(w, nil)
	}
}

// advance continues an allocation up to its next call, or with the next container.
func (k *kubelet) advance(w *worker, a *kubeletmodel.Allocation, left []kubeletmodel.Container, asked bool) {
	switch {
	case a.Done && a.Err == nil:
		k.admitContainers(w, left, asked)
	case errors.Is(a.Err, kubeletmodel.ErrTooFew):
		k.hit(staleAllocatable)
		k.admitted(w, a.Err)
	case a.Done:
		k.reject(w, a.Err)
	case k.streams[a.Ask.Endpoint] == nil || k.streams[a.Ask.Endpoint].server.life().over:
		a.Answer(nil, errNotRegistered)
		k.advance(w, a, left, asked)
	case a.Ask.Preferred:
		k.askPreferred(w, a, left, asked)
	default:
		k.askAllocate(w, a, left)
	}
}

func (k *kubelet) askPreferred(w *worker, a *kubeletmodel.Allocation, left []kubeletmodel.Container, asked bool) {
	var chosen []string
	e := k.streams[a.Ask.Endpoint]
	k.call(e.server, "prefer devices for "+w.uid, 0, func(context.Context) error {
		answer := e.server.prefer(&pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{
			AvailableDeviceIDs: a.Ask.Available, MustIncludeDeviceIDs: a.Ask.MustInclude, AllocationSize: int32(a.Ask.Size),
		}}})
		chosen = answer.ContainerResponses[0].DeviceIDs
		return nil
	}, func(err error) {
		a.Answer(chosen, err)
		k.advance(w, a, left, asked)
	})
}

func (k *kubelet) askAllocate(w *worker, a *kubeletmodel.Allocation, left []kubeletmodel.Container) {
	e := k.streams[a.Ask.Endpoint]
	ids := a.Ask.IDs
	k.inFlight = ids
	var slow time.Duration
	if k.faults.noReuse || !k.profile.peaceful && k.chance(6) {
		if slow = k.between(0, time.Millisecond); k.chance(2) {
			slow = k.between(0, 3*time.Second) // nothing limits how long an Allocate takes
		}
		k.after(k.process, slow, "is asked for its pod resources", func() { _, _, _ = k.list() })
	}
	k.after(k.process, slow, "asks to allocate for "+w.uid, func() { k.callAllocate(w, a, e, ids, left) })
}

func (k *kubelet) callAllocate(w *worker, a *kubeletmodel.Allocation, e *stream, ids []string, left []kubeletmodel.Container) {
	if e.server.life().over {
		k.inFlight = nil
		a.Answer(nil, errNotRegistered)
		k.advance(w, a, left, true)
		return
	}
	k.call(e.server, "allocate for "+w.uid, 0, func(ctx context.Context) error { return e.server.allocate(ctx, w.uid, ids) }, func(err error) {
		k.inFlight = nil
		a.Answer(nil, err)
		k.written(func() { k.advance(w, a, left, true) })
	})
}

// allocate answers for a pod, and keeps what kubelet would store of the answer.
func (a *agent) allocate(ctx context.Context, uid string, ids []string) error {
	response, err := a.limits.Allocate(ctx, resourceName, &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if a.kubelet.sawAllocate(err); err != nil {
		a.specHasChanged() // the list may depend on what was refused
		return err
	}
	delete(a.host.answers, uid)
	for _, mount := range response.ContainerResponses[0].Mounts {
		if mount.ContainerPath == mps.ClientPipeDir {
			a.host.answers[uid] = filepath.Base(filepath.Dir(mount.HostPath))
		}
	}
	return nil
}

func (a *agent) prefer(request *pluginapi.PreferredAllocationRequest) *pluginapi.PreferredAllocationResponse {
	return a.limits.Preferred(resourceName, request)
}

// list is podresources List: it also recounts what is allocated.
func (k *kubelet) list() ([]podstate.UsedDevice, []podstate.KubeletClaim, error) {
	if k.process.over {
		return nil, nil, errors.New("kubelet is down")
	}
	var devices []podstate.UsedDevice
	var claims []podstate.KubeletClaim
	k.devices.Update()
	if len(k.inFlight) > 0 && !slices.Contains(k.devices.State().Allocated[resourceName], k.inFlight[0]) {
		k.hit(listForgetsInFlight)
	}
	for _, p := range all[*pod](k.known.cache) {
		if !k.active(p.uid) {
			continue
		}
		containers := k.devices.Containers(p.uid)
		for _, container := range sorted(containers) {
			if container == "init" {
				continue // it lists none that ends before other containers start
			}
			for _, id := range containers[container][resourceName] {
				devices = append(devices, podstate.UsedDevice{Namespace: namespace, Pod: p.name, Container: container, Resource: resourceName, ID: id})
			}
		}
		for _, name := range p.claims {
			info := k.claims[name]
			if info == nil || !info.pods[p.uid] || len(info.devices) == 0 {
				continue
			}
			used := podstate.KubeletClaim{Namespace: namespace, Name: info.name}
			for _, d := range info.devices {
				used.Devices = append(used.Devices, podstate.PoolDevice{Pool: k.host.poolOf(d), Device: d})
			}
			claims = append(claims, used)
		}
	}
	return devices, claims, nil
}
