// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

// MPS daemons: the agent requests them in its GPUNode, the controller makes their pods, kubelet runs these. Agent and daemon meet in the
// real directory, by the real package; only the daemon itself is a model.

func daemonPodKey(name string) string { return "daemonpod/" + name }

// done is a context that has ended: with it, what waits in package mps looks once.
var done = func() context.Context {
	ctx, end := context.WithCancel(context.Background())
	end()
	return ctx
}()

// supervisor is the container of a daemon's pod. It follows mps.Daemon.Run.
type supervisor struct {
	*simulation
	process  *process
	pod      *corev1.Pod
	settings mps.Settings
	// holder is the right to run the daemon; nil while another one has it, or the agent requests none.
	holder *mps.Holder
	// ending is set once it has noticed that the daemon, or its pod, has to end; deleted in the latter case.
	ending, deleted bool
	published       bool
}

// daemonOf is the name of a pod's daemon.
func daemonOf(pod *corev1.Pod) string { return pod.Labels["tandem-gpu.dev/mps-daemon"] }

func (v *supervisor) name() string { return daemonOf(v.pod) }
func (v *supervisor) dir() string  { return mps.Dir(v.host.run(), v.name()) }

// hold waits until the agent requests the daemon and no other supervisor has it.
func (v *supervisor) hold() {
	holder, err := mps.Hold(done, v.dir())
	switch {
	case errors.Is(err, mps.ErrGone):
		v.exit()
	case errors.Is(err, context.Canceled):
		v.after(v.process, v.between(200*time.Millisecond, 2*time.Second), "asks to run daemon "+v.name(), v.hold)
	case err != nil:
		v.fail("a supervisor cannot have daemon %s: %v", v.name(), err)
	default:
		v.holder, v.ending = holder, false
		v.note("    daemon " + v.name() + " starts")
		v.host.checkDaemonStarts(v)
		v.after(v.process, v.between(50*time.Millisecond, 4*time.Second), "daemon "+v.name()+" answers", v.publish)
	}
}

func (v *supervisor) publish() {
	if v.holder == nil || v.ending || v.published {
		return
	}
	v.host.check(v.holder.Publish(mps.Ready{Pod: string(v.pod.UID), Hash: v.settings.Hash()}))
	v.published = true
	v.sayReady(true)
}

func (v *supervisor) sayReady(ready bool) {
	v.after(v.host.alive, v.between(0, 5*time.Second), "probes daemon "+v.name(), func() {
		p, ok := get[*corev1.Pod](v.api, daemonPodKey(v.pod.Name))
		if !ok || p.UID != v.pod.UID || v.api.down || v.kubelet.process.over {
			return
		}
		changed, status := p.DeepCopy(), corev1.ConditionFalse
		if ready {
			status = corev1.ConditionTrue
		}
		changed.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}
		v.api.put(daemonPodKey(p.Name), changed)
	})
}

// poll is called after each step: it notices when the agent no longer requests the daemon.
func (v *supervisor) poll() {
	if v.holder == nil || v.ending {
		return
	}
	if _, err := os.Stat(filepath.Join(v.dir(), "wanted")); err != nil {
		v.ending = true
		v.after(v.process, v.between(0, 100*time.Millisecond), "daemon "+v.name()+" has to end", v.end)
	}
}

// end ends the daemon, as its pod or the agent wants.
func (v *supervisor) end() {
	if err := v.holder.Await(done); errors.Is(err, mps.ErrStopped) || errors.Is(err, mps.ErrGone) {
		v.hit(daemonStopped)
		v.host.checkNoClients(v.name(), "the agent ends it")
	}
	v.host.check(v.holder.Retract())
	v.published = false
	v.after(v.process, v.between(0, 2*time.Second), "daemon "+v.name()+" has ended", func() {
		v.host.check(v.holder.Release())
		v.holder, v.ending = nil, false
		v.restartClients(v.name())
		if v.deleted {
			v.exit()
			return
		}
		v.sayReady(false)
		v.hold()
	})
}

// terminate is what kubelet does when the pod is deleted.
func (v *supervisor) terminate() {
	switch {
	case v.deleted:
	case v.holder == nil:
		v.deleted = true
		v.exit()
	case v.ending:
		v.deleted = true
	default:
		v.deleted, v.ending = true, true
		v.after(v.process, v.between(0, 100*time.Millisecond), "daemon "+v.name()+" has to end", v.end)
	}
}

// exit is the end of the container. kubelet starts it again, unless its pod is deleted.
func (v *supervisor) exit() {
	v.kill(v.process)
	if v.host.supervisors[v.pod.Name] == v {
		delete(v.host.supervisors, v.pod.Name)
	}
	if k := v.kubelet; !k.process.over {
		k.after(k.process, k.between(0, 500*time.Millisecond), "sees the end of "+v.pod.Name, func() { k.lookAtDaemon(v.pod.Name) })
	}
}

// die kills supervisor and daemon. What it has published stays, as a file without a lock.
func (v *supervisor) die() {
	if v.holder != nil {
		ready, left := filepath.Join(v.dir(), "ready"), filepath.Join(v.dir(), "left")
		linked := v.published && os.Link(ready, left) == nil
		v.host.check(v.holder.Release())
		if linked {
			v.host.check(os.Rename(left, ready))
		}
		v.holder, v.published = nil, false
	}
	v.exit()
	v.sayReady(false)
	v.restartClients(v.name())
}

// restartClients: a client ends with its daemon, and kubelet restarts its container.
func (s *simulation) restartClients(daemon string) {
	for _, uid := range s.host.clients(daemon) {
		s.hit(daemonLosesClients)
		s.restart(uid)
	}
}

// kubelet's part.

// daemonPodChanged is what the watch brings of the pods of daemons.
func (k *kubelet) daemonPodChanged(key string, _, _ any) {
	k.lookAtDaemon(strings.TrimPrefix(key, daemonPodKey("")))
}

// lookAtDaemon starts or ends the container of a daemon's pod, or lets go of the pod.
func (k *kubelet) lookAtDaemon(name string) {
	pod, _ := k.daemonPods.cache[daemonPodKey(name)].(*corev1.Pod)
	v := k.host.supervisors[name]
	switch {
	case v != nil && (pod == nil || pod.DeletionTimestamp != nil || pod.UID != v.pod.UID):
		v.terminate()
	case v != nil || pod == nil:
	case pod.DeletionTimestamp != nil:
		k.api.request(k.process, "lets go of "+name, func() {
			if now, ok := get[*corev1.Pod](k.api, daemonPodKey(name)); ok && now.UID == pod.UID {
				k.api.put(daemonPodKey(name), nil)
			}
		})
	case !k.starting[name]:
		k.starting[name] = true
		k.after(k.process, k.between(50*time.Millisecond, 3*time.Second), "starts "+name, func() {
			delete(k.starting, name)
			k.startDaemon(name)
		})
	}
}

func (k *kubelet) startDaemon(name string) {
	pod, _ := k.daemonPods.cache[daemonPodKey(name)].(*corev1.Pod)
	if pod == nil || pod.DeletionTimestamp != nil || k.host.supervisors[name] != nil {
		k.lookAtDaemon(name)
		return
	}
	v := &supervisor{simulation: k.simulation, process: newProcess("daemon"), pod: pod}
	for _, variable := range pod.Spec.Containers[0].Env {
		if variable.Name == mps.SettingsEnv {
			k.host.check(json.Unmarshal([]byte(variable.Value), &v.settings))
		}
	}
	if _, err := os.Stat(v.dir()); err != nil {
		if k.chance(3) {
			k.host.check(os.MkdirAll(v.dir(), 0o755)) // containerd makes it for the mount of a container that it restarts
		} else {
			k.after(k.process, k.between(time.Second, 5*time.Second), "finds no directory for "+name, func() { k.lookAtDaemon(name) })
			return
		}
	}
	k.host.supervisors[name] = v
	v.hold()
}

// The machine's part.

// clientDevices are the CDI devices of clients. Agents write them, one after the other.
type clientDevices struct {
	mu sync.Mutex
	// daemons by the names of their devices.
	daemons map[string]string
}

const clientDeviceClass = "k8s.gpu.nvidia.com/sharing="

func (c *clientDevices) WriteClientDevice(name string, edits specs.ContainerEdits) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, mount := range edits.Mounts {
		if mount.ContainerPath == mps.ClientPipeDir {
			c.daemons[name] = filepath.Base(filepath.Dir(mount.HostPath))
		}
	}
	return clientDeviceClass + name, nil
}

func (c *clientDevices) RemoveClientDevices(name string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.daemons, func(device, _ string) bool { return device == name || strings.HasPrefix(device, name+".") })
	return nil
}

func (c *clientDevices) ClientDevices(name string) ([]string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.DeleteFunc(sorted(c.daemons), func(device string) bool { return !strings.HasPrefix(device, name+".") }), nil
}

func (c *clientDevices) RetainClientDevices(names []string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.daemons, func(device, _ string) bool {
		return !slices.ContainsFunc(names, func(name string) bool { return device == name || strings.HasPrefix(device, name+".") })
	})
	return nil
}

// daemonFor is the daemon of a container with these CDI devices: false where one of them is not there.
func (c *clientDevices) daemonFor(devices []string) (daemon string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, qualified := range devices {
		name, client := strings.CutPrefix(qualified, clientDeviceClass)
		if !client {
			continue
		}
		if daemon, ok = c.daemons[name]; !ok {
			return "", false
		}
	}
	return daemon, true
}

func (h hardware) ComputeMode(ctx context.Context, gpu string) (device.ComputeMode, error) {
	turn(ctx, "reads the compute mode of "+gpu)
	return h.mode(gpu), nil
}

func (h hardware) SetComputeMode(ctx context.Context, gpu string, mode device.ComputeMode) (device.ComputeMode, error) {
	turn(ctx, "sets the compute mode of "+gpu)
	before := h.mode(gpu)
	h.driver.Lock()
	defer h.driver.Unlock()
	h.modes[gpu] = mode
	return before, nil
}

func (h hardware) SetTimeSlice(ctx context.Context, gpu string, _ int) error {
	turn(ctx, "sets the time slice of "+gpu)
	return nil
}

func (h *host) mode(gpu string) device.ComputeMode {
	h.driver.Lock()
	defer h.driver.Unlock()
	if mode := h.modes[gpu]; mode != "" {
		return mode
	}
	return device.ComputeModeDefault
}

// clients are the pods that run as clients of a daemon.
func (h *host) clients(daemon string) (uids []string) {
	for _, uid := range sorted(h.pods) {
		if h.pods[uid].busy && slices.ContainsFunc(h.pods[uid].grants, func(g grant) bool { return g.daemon == daemon }) {
			uids = append(uids, uid)
		}
	}
	return uids
}

func (h *host) checkNoClients(daemon, why string) {
	if clients := h.clients(daemon); len(clients) > 0 {
		h.fail("daemon %s has the clients %v, and %s", daemon, clients, why)
	}
}

// checkDaemonStarts: what uses a GPU when its daemon starts must be its client.
func (h *host) checkDaemonStarts(v *supervisor) {
	for _, uid := range sorted(h.pods) {
		for _, g := range h.pods[uid].grants {
			uses := slices.ContainsFunc(g.parts, func(p string) bool { return slices.Contains(v.settings.Devices, uuidOf(gpuOf(p))) })
			if h.pods[uid].busy && uses && g.daemon != v.name() {
				h.fail("daemon %s starts while pod %s uses %v of %s without it", v.name(), uid, g.parts, g.owner)
			}
		}
	}
}

// checkDaemon: a client's daemon must be one that the agent requests, and what is no client must not use a GPU with a daemon.
func (h *host) checkDaemon(uid string, g grant) {
	if g.daemon != "" {
		h.hit(clientStarts)
		if _, err := os.Stat(filepath.Join(mps.Dir(h.run(), g.daemon), "wanted")); err != nil {
			h.fail("pod %s starts as a client of daemon %s, which the agent does not request", uid, g.daemon)
		}
	}
	for _, gpu := range gpusOf(g.parts) {
		for _, name := range sorted(h.supervisors) {
			if v := h.supervisors[name]; v.holder != nil && slices.Contains(v.settings.Devices, uuidOf(gpu)) && v.name() != g.daemon {
				h.fail("pod %s uses %s of %s, which daemon %s has", uid, gpu, g.owner, v.name())
			}
		}
		if h.mixed[g.owner] {
			continue // kubelet gave it the daemon of one allocation and a GPU of another
		}
		if mode := h.mode(uuidOf(gpu)); (mode == device.ComputeModeExclusiveProcess) != (g.daemon != "") {
			h.fail("pod %s uses %s of %s in compute mode %s by daemon %q", uid, gpu, g.owner, mode, g.daemon)
		}
	}
}

func uuidOf(gpu string) string { return "GPU-" + strings.TrimPrefix(gpu, "gpu-") }

// daemonsOnGPUs are the daemons that are ready, by the UUIDs of their GPUs.
func (h *host) daemonsOnGPUs() map[string]string {
	ready := map[string]string{}
	for _, v := range h.supervisors {
		for _, uuid := range v.settings.Devices {
			if v.published {
				ready[uuid] = v.name()
			}
		}
	}
	return ready
}

// checkDaemonsLeft finds what is left of daemons when every pod is gone: those of the policy, and nothing else.
func (s *simulation) checkDaemonsLeft() {
	ready := s.host.daemonsOnGPUs()
	for _, gpu := range s.inventory.GPUs {
		wanted := gpu.Sharing.Strategy == device.MPS
		if exclusive := s.host.mode(gpu.UUID) == device.ComputeModeExclusiveProcess; (ready[gpu.UUID] != "") != wanted || exclusive != wanted {
			s.fail("leaked: %s with the policy %q has daemon %q and compute mode %s", gpu.UUID, gpu.Sharing.Strategy, ready[gpu.UUID], s.host.mode(gpu.UUID))
		}
	}
	daemons := slices.Sorted(maps.Values(ready))
	for _, left := range []struct {
		what  string
		names []string
	}{
		{"supervisors", slices.Sorted(func(yield func(string) bool) {
			for _, v := range s.host.supervisors {
				yield(v.name())
			}
		})},
		{"client devices", sorted(s.host.devices.daemons)},
		{"directories", entries(mps.Dir(s.host.run(), ""))},
	} {
		if !slices.Equal(left.names, daemons) {
			s.fail("leaked: the %s are %v, the daemons %v", left.what, left.names, daemons)
		}
	}
}

func entries(dir string) (names []string) {
	found, _ := os.ReadDir(dir) //nolint:errcheck // there is none where no daemon was requested
	for _, entry := range found {
		names = append(names, entry.Name())
	}
	return names
}

// daemonStarts reports whether a daemon is requested that is not ready.
func (s *simulation) daemonStarts() bool {
	object, ok := get[*gpuNode](s.api, "gpunode/")
	return ok && len(object.status.Daemons) > len(s.host.daemonsOnGPUs())
}

// policyWaits are the GPUs with holders that share them by another policy than the node has now.
func (s *simulation) policyWaits() (gpus []string) {
	for _, uid := range sorted(s.host.pods) {
		for _, g := range s.host.pods[uid].grants {
			for _, p := range g.parts {
				byDaemon := s.inventory.GPUs[minorOf(gpuOf(p))].Sharing.Strategy == device.MPS
				if s.host.pods[uid].busy && !amountOf(p).all && byDaemon != (g.daemon != "") {
					gpus = append(gpus, gpuOf(p))
				}
			}
		}
	}
	return gpus
}

// Faults.

// someDaemon picks a supervisor.
func (s *simulation) someDaemon(do func(*supervisor)) {
	if names := sorted(s.host.supervisors); len(names) > 0 {
		do(s.host.supervisors[names[s.rand.IntN(len(names))]])
	}
}

// deleteDaemonPod is what an administrator does to a pod that looks broken.
func (s *simulation) deleteDaemonPod(v *supervisor) {
	if s.api.down {
		return
	}
	s.hit(daemonPodDeleted)
	s.deletePod(v.pod)
}

// deletePod begins to delete the pod of a daemon, if it is still the same.
func (s *simulation) deletePod(pod *corev1.Pod) {
	if now, ok := get[*corev1.Pod](s.api, daemonPodKey(pod.Name)); ok && now.UID == pod.UID && now.DeletionTimestamp == nil {
		changed := now.DeepCopy()
		changed.DeletionTimestamp = &metav1.Time{Time: time.Now()}
		s.api.put(daemonPodKey(pod.Name), changed)
	}
}

// changePolicy changes how a GPU is shared; the agent reads that when it starts again.
func (s *simulation) changePolicy() {
	i := s.rand.IntN(len(s.inventory.GPUs))
	if !s.profile.mps || s.replicas(fmt.Sprintf("gpu-%d", i)) == 0 || s.agent == nil || s.agent.process.over {
		return
	}
	s.killAgent()
	s.inventory.GPUs = slices.Clone(s.inventory.GPUs)
	gpu := &s.inventory.GPUs[i]
	if gpu.Sharing.Strategy == device.MPS {
		gpu.Sharing.Strategy = device.TimeSlicing
	} else {
		gpu.Sharing.Strategy = device.MPS
	}
	if daemon := s.host.daemonsOnGPUs()[gpu.UUID]; len(s.host.clients(daemon)) > 0 && daemon != "" {
		s.hit(policyChangesInUse)
	}
}
