// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"errors"
	"slices"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// stream is one registration of the agent's device plugin, under a socket name of its own.
type stream struct {
	agent *agent
	// ended is set on the agent's side, dropped on kubelet's.
	ended, dropped bool
	lists          []*pluginapi.ListAndWatchResponse
	delivering     bool
}

// register takes a plugin's Register. The endpoint before it is stopped.
func (k *kubelet) register(e *stream) {
	k.endpoint, k.registered = e, true
	k.deliver(e)
}

// deliver brings device lists to kubelet, in order.
func (k *kubelet) deliver(e *stream) {
	if e.delivering || e.dropped || len(e.lists) == 0 {
		return
	}
	e.delivering = true
	delay := k.latency()
	if k.chance(4) {
		delay = k.between(0, 3*time.Second)
	}
	k.after(k.process, delay, "gets a device list", func() {
		e.delivering = false
		if e.dropped || k.endpoint != e || len(e.lists) == 0 {
			return
		}
		list := e.lists[0]
		e.lists = e.lists[1:]
		k.healthy = map[string]bool{}
		k.capacity = len(list.Devices)
		var known []string
		for _, d := range list.Devices {
			known = append(known, d.ID)
			if d.Health == pluginapi.Healthy {
				k.healthy[d.ID] = true
			}
		}
		k.host.writeCheckpoint(k.devices, known)
		k.deliver(e)
	})
}

// hangUp: the agent's side of a stream is gone. Kubelets up to 1.36 then disconnect whichever plugin is registered.
func (k *kubelet) hangUp(e *stream) {
	k.after(k.process, k.latency(), "loses a device plugin", func() {
		e.dropped = true
		switch {
		case k.endpoint == e:
		case k.version < 37 && k.endpoint != nil && !k.endpoint.dropped:
			k.hit(oldStreamEndsNew)
			newer := k.endpoint
			newer.dropped = true
			k.after(newer.agent.process, k.latency(), "loses its stream to kubelet", func() { newer.agent.streamEnded(newer) })
		default:
			return
		}
		k.endpoint = nil
		k.healthy = map[string]bool{}
	})
}

// updateAllocated is UpdateAllocatedDevices: only what active pods have is allocated, whatever is in flight.
func (k *kubelet) updateAllocated() {
	k.allocated = map[string]bool{}
	for _, uid := range sorted(k.devices) {
		if !k.active(uid) {
			delete(k.devices, uid)
			continue
		}
		for _, id := range k.devicesOfUUID(uid) {
			k.allocated[id] = true
		}
	}
}

func (k *kubelet) devicesOfUUID(uid string) []string {
	var ids []string
	for _, container := range sorted(k.devices[uid]) {
		ids = append(ids, k.devices[uid][container]...)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// devicesOf are the names of the GPUs, or parts of GPUs, that a pod was given.
func (k *kubelet) devicesOf(uid string) []string { return k.allocatedTo(k.devicesOfUUID(uid)) }

var (
	errNotRegistered = errors.New("cannot allocate unregistered device")
	errUnhealthy     = errors.New("no healthy devices present")
	errTooFew        = errors.New("requested number of devices unavailable")
)

// allocate admits a pod: it requests its devices container by container, while kubelet admits no other pod.
func (k *kubelet) allocate(w *worker) {
	k.updateAllocated()
	had := k.devicesOfUUID(w.uid)
	switch {
	case k.host.busy(w.uid): // it was admitted by an earlier life of kubelet, whatever became of its account
		k.admitted(w, nil)
	case !k.registered:
		k.reject(w, errNotRegistered)
	case len(k.healthy) == 0, slices.ContainsFunc(had, func(id string) bool { return !k.healthy[id] }):
		k.reject(w, errUnhealthy)
	case len(had) > 0:
		k.admitted(w, nil)
	case k.host.pods[w.uid] != nil && k.host.pods[w.uid].owner != "":
		k.admitted(w, errors.New("its devices are no longer known"))
	default:
		k.choose(w)
	}
}

func (k *kubelet) reject(w *worker, err error) {
	if k.host.boot > 1 && !k.rebootedPods[w.uid] && w.pod.admitted {
		k.rebootedPods[w.uid] = true
		k.hit(rebootPodsFail)
	}
	k.admitted(w, err)
}

func (k *kubelet) choose(w *worker) {
	var available []string
	for _, id := range sorted(k.healthy) {
		if !k.allocated[id] {
			available = append(available, id)
		}
	}
	e := k.endpoint
	switch {
	case len(available) < w.pod.gpus:
		k.hit(staleAllocatable)
		k.admitted(w, errTooFew)
		return
	case e == nil || e.agent.process.over:
		k.admitted(w, errNotRegistered)
		return
	case len(available) == w.pod.gpus:
		k.take(w, e, available, "main")
		return
	}
	var chosen []string
	k.call(e.agent, "prefer devices for "+w.uid, 0, func(context.Context) error {
		answer := e.agent.limits.Preferred(resourceName, &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{
			AvailableDeviceIDs: available, AllocationSize: int32(w.pod.gpus),
		}}})
		chosen = answer.ContainerResponses[0].DeviceIDs
		return nil
	}, func(err error) {
		if err != nil {
			k.admitted(w, err)
			return
		}
		for _, id := range available {
			if len(chosen) < w.pod.gpus && !slices.Contains(chosen, id) {
				chosen = append(chosen, id)
			}
		}
		k.take(w, e, chosen, "main")
	})
}

// take calls Allocate: for the init container first, whose devices the other one gets again.
func (k *kubelet) take(w *worker, e *stream, ids []string, container string) {
	if w.pod.init && container == "main" && k.devices[w.uid]["init"] == nil {
		container = "init"
	}
	for _, id := range ids {
		k.allocated[id] = true
	}
	k.inFlight = true
	if k.chance(6) {
		k.after(k.process, k.between(0, time.Millisecond), "is asked for its pod resources", func() { _, _, _ = k.list() })
	}
	k.call(e.agent, "allocate "+container+" of "+w.uid, 0, func(ctx context.Context) error {
		_, err := e.agent.limits.Allocate(ctx, resourceName, &pluginapi.AllocateRequest{
			ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}},
		})
		if k.sawAllocate(err); err != nil {
			e.agent.specHasChanged() // the list may depend on what was refused
		}
		return err
	}, func(err error) {
		k.inFlight = false
		if err != nil {
			k.admitted(w, err)
			return
		}
		if k.devices[w.uid] == nil {
			k.devices[w.uid] = map[string][]string{}
		}
		k.devices[w.uid][container] = ids
		k.host.writeCheckpoint(k.devices, sorted(k.healthy))
		switch {
		case container == "init":
			k.take(w, e, ids, "main")
		case k.chance(8):
			k.hit(allocateUnknownPod)
			k.admitted(w, errors.New("another admission plugin refuses"))
		default:
			k.admitted(w, nil)
		}
	})
}

// list is podresources List: it also recounts what is allocated.
func (k *kubelet) list() ([]podstate.UsedDevice, []podstate.KubeletClaim, error) {
	if k.process.over {
		return nil, nil, errors.New("kubelet is down")
	}
	if k.inFlight {
		k.hit(listForgetsInFlight)
	}
	var devices []podstate.UsedDevice
	var claims []podstate.KubeletClaim
	k.updateAllocated()
	for _, p := range all[*pod](k.known.cache) {
		if !k.active(p.uid) {
			continue
		}
		for _, container := range sorted(k.devices[p.uid]) {
			if container == "init" {
				continue // it lists none that ends before other containers start
			}
			for _, id := range k.devices[p.uid][container] {
				devices = append(devices, podstate.UsedDevice{Namespace: namespace, Pod: p.name, Container: container, Resource: resourceName, ID: id})
			}
		}
		if info := k.claims[p.claim]; info != nil && info.pods[p.uid] && len(info.devices) > 0 {
			used := podstate.KubeletClaim{Namespace: namespace, Name: info.name}
			for _, d := range info.devices {
				used.Devices = append(used.Devices, podstate.PoolDevice{Pool: nodeName, Device: d})
			}
			claims = append(claims, used)
		}
	}
	return devices, claims, nil
}
