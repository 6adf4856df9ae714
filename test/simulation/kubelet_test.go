// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/test/kubeletmodel"
)

// kubelet is one life of kubelet: its pod workers here, its device manager and its DRA manager in files of their own.
type kubelet struct {
	*simulation
	process *process
	// known are the pods of the node by the API server: kubelet's pod manager.
	known        *watch
	sourcesReady bool
	workers      map[string]*worker
	admissions   []string
	admitting    bool

	// The device manager.
	devices *kubeletmodel.Manager
	streams map[*kubeletmodel.Endpoint]*stream
	sockets int
	// writes are those of its checkpoint that are not on disk yet; the first is under way.
	writes []*checkpointWrite
	// inFlight has the IDs of an Allocate that is not answered yet.
	inFlight []string

	// The DRA manager.
	claims map[string]*claimInfo
	plugin server

	// daemonPods are the pods of MPS daemons, starting those whose container is about to start.
	daemonPods *watch
	starting   map[string]bool
}

// worker is kubelet's pod worker.
type worker struct {
	uid   string
	pod   *pod // as seen last
	phase workerPhase
	// preparing is set while a call to the driver is under way.
	preparing bool
	tries     int
	// ended is how the containers did, if they ended by themselves.
	ended string
}

type workerPhase int

const (
	starting workerPhase = iota
	live
	terminating
	terminated
)

func (s *simulation) startKubelet() {
	k := &kubelet{
		simulation: s, process: newProcess("kubelet"), workers: map[string]*worker{},
		claims: s.host.readState(), starting: map[string]bool{},
	}
	k.startDevices()
	s.kubelet = k
	// Every kubelet that starts removes the slices of its node; drivers publish them again when it registers them.
	s.api.request(k.process, "wipes the slices", func() { s.api.put("slice/", nil) })
	k.known = s.api.watch(k.process, "pod/", k.podChanged, k.listed)
	k.daemonPods = s.api.watch(k.process, daemonPodKey(""), k.daemonPodChanged, func() {
		for _, name := range sorted(s.host.supervisors) {
			k.lookAtDaemon(name)
		}
	})
	k.after(k.process, k.between(0, 10*time.Second), "reports its status", k.report)
	k.after(k.process, k.between(0, time.Minute), "reconciles claims", k.reconcile)
	k.lookForPlugin()
	if a := s.agent; a != nil && !a.process.over && a.registering {
		a.register(0)
	}
	if s.installed() {
		s.foreign.register(0)
	}
}

func (k *kubelet) listed() {
	if k.sourcesReady {
		return
	}
	k.sourcesReady = true
	// kubelet removes containers of pods that no longer exist.
	for _, uid := range sorted(k.host.pods) {
		if p, ok := k.known.cache[podKey(uid)].(*pod); !ok || p.terminal() {
			k.workerOf(uid, p)
			k.terminate(uid)
		}
	}
}

func (k *kubelet) workerOf(uid string, p *pod) *worker {
	w := k.workers[uid]
	if w == nil {
		w = &worker{uid: uid, pod: p}
		k.workers[uid] = w
	}
	return w
}

// podChanged is what the watch brings. A pod that is gone from the API server is gone from the pod manager at once, whatever
// still runs of it.
func (k *kubelet) podChanged(key string, before, after any) {
	p, _ := after.(*pod)
	if p == nil {
		uid := before.(*pod).uid
		if w := k.workers[uid]; w != nil && w.phase < terminating {
			k.terminate(uid)
		}
		return
	}
	if !p.bound {
		return
	}
	w := k.workers[p.uid]
	if w == nil {
		if p.terminal() {
			if p.deleting {
				k.workerOf(p.uid, p)
				k.terminate(p.uid)
			}
			return
		}
		k.workerOf(p.uid, p)
		k.admissions = append(k.admissions, p.uid)
		k.admitSoon()
		return
	}
	was := w.pod
	w.pod = p
	switch {
	case p.deleting && w.phase < terminating || p.terminal() && w.phase < terminating:
		k.terminate(p.uid)
	case p.deleting && w.phase == terminated:
		k.finish(w)
	case was != nil && p.retry != was.retry && w.phase == starting:
		k.syncSoon(w, k.latency())
	}
}

func (k *kubelet) active(uid string) bool {
	p, ok := k.known.cache[podKey(uid)].(*pod)
	if !ok || p.terminal() {
		return false
	}
	w := k.workers[uid]
	return w == nil || w.phase != terminated
}

func (k *kubelet) admitSoon() {
	if k.admitting || len(k.admissions) == 0 {
		return
	}
	k.admitting = true
	k.after(k.process, k.between(0, 2*time.Millisecond), "admits "+k.admissions[0], func() {
		uid := k.admissions[0]
		k.admissions = k.admissions[1:]
		w := k.workers[uid]
		if w == nil || w.phase >= terminating || w.pod.deleting {
			k.admitted(w, nil)
			return
		}
		if !w.pod.limits() {
			k.admitted(w, nil)
			return
		}
		k.allocate(w)
	})
}

// admitted ends the admission of a pod. With an error the pod fails permanently.
func (k *kubelet) admitted(w *worker, err error) {
	k.admitting = false
	switch {
	case w == nil || w.phase >= terminating:
	case w.pod.deleting:
		k.terminate(w.uid)
	case err != nil:
		k.fails(w, err)
	default:
		switch group := k.host.pods[w.uid]; {
		case k.host.busy(w.uid):
			w.phase = live
			k.hit(kubeletRestarts)
			k.sayRuns(w)
		case group.ran() && w.pod.finite:
			w.ended = succeeded
			k.terminate(w.uid)
		case group.ran():
			// The sandbox is still there: nothing is prepared again.
			k.run(w, group.grants)
		default:
			k.syncSoon(w, k.latency())
		}
		k.api.request(k.process, "says that "+w.uid+" is admitted", func() {
			k.api.updatePod(w.uid, func(p *pod) { p.admitted = true })
		})
	}
	k.admitSoon()
}

// fails ends a pod that cannot start.
func (k *kubelet) fails(w *worker, err error) {
	k.note("    " + w.uid + " is rejected: " + err.Error())
	k.refusals[err.Error()]++
	w.ended = failed
	w.phase = terminated
	if k.host.pods[w.uid] != nil {
		k.after(k.process, k.between(0, 2*time.Second), "cleans up after "+w.uid, func() {
			k.host.removeGroup(w.uid)
			k.finish(w)
		})
	}
	k.api.request(k.process, "says that "+w.uid+" failed", func() {
		k.api.updatePod(w.uid, func(p *pod) {
			if !p.terminal() {
				p.phase, p.admitted = failed, true
				k.rejected++
			}
		})
	})
}

func (k *kubelet) syncSoon(w *worker, delay time.Duration) {
	w.tries++
	try := w.tries
	k.after(k.process, delay, "starts "+w.uid, func() {
		if w.phase != starting || w.tries != try || w.preparing {
			return
		}
		switch {
		case len(k.devicesOfUUID(w.uid)) != w.pod.gpus:
			k.fails(w, errors.New("its devices are no longer known"))
		case len(w.pod.claims) == 0:
			k.run(w, k.grants(w))
		default:
			// The cgroup is made before anything is prepared.
			k.host.makeGroup(w.uid)
			k.prepare(w)
		}
	})
}

// grants are what the containers of a pod get: by its limit, and of its prepared claims.
func (k *kubelet) grants(w *worker) []grant {
	var grants []grant
	if w.pod.limits() {
		grants = append(grants, grant{owner: w.uid, parts: k.devicesOf(w.uid), daemon: k.host.answers[w.uid]})
	}
	for _, name := range w.pod.claims {
		info := k.claims[name]
		grants = append(grants, grant{owner: info.uid, parts: k.partsOf(info.uid, info.devices), cdi: k.host.cdi[info.uid]})
	}
	return grants
}

// run starts the containers, after a while: there are images to pull and a sandbox to make, and a volume may come late.
func (k *kubelet) run(w *worker, grants []grant) {
	if w.phase != starting {
		return
	}
	k.host.makeGroup(w.uid)
	delay := k.between(0, 500*time.Millisecond) / 10 * (1 + 10*time.Duration(k.rand.IntN(2)))
	if k.chance(10) {
		delay = k.between(0, 20*time.Second)
	}
	k.after(k.process, delay, "runs "+w.uid, func() { k.runNow(w, grants) })
}

func (k *kubelet) runNow(w *worker, grants []grant) {
	if w.phase != starting {
		return
	}
	if p, ok := k.known.cache[podKey(w.uid)].(*pod); !ok || p.deleting {
		return
	}
	grants, ok := k.withClients(grants)
	if !ok {
		k.after(k.process, k.between(time.Second, 10*time.Second), "makes the containers of "+w.uid+" again", func() { k.runNow(w, grants) })
		return
	}
	w.phase = live
	k.host.start(w.uid, grants)
	if w.pod.init {
		k.hit(reuseInPod)
	}
	if w.pod.limits() && len(w.pod.claims) > 0 {
		k.hit(claimBesideLimit)
	}
	k.sayRuns(w)
	if w.pod.finite {
		k.after(k.host.alive, k.between(50*time.Millisecond, 4*time.Second), w.uid+" ends by itself", func() { k.simulation.exit(w.uid) })
	}
}

// withClients are grants with their daemons; false where the runtime does not find a CDI device.
func (s *simulation) withClients(grants []grant) ([]grant, bool) {
	grants = slices.Clone(grants)
	for i := range grants {
		if len(grants[i].cdi) == 0 {
			continue
		}
		daemon, ok := s.host.devices.daemonFor(grants[i].cdi)
		if !ok {
			s.hit(clientDeviceMissing)
			return grants, false
		}
		grants[i].daemon = daemon
	}
	return grants, true
}

func (k *kubelet) sayRuns(w *worker) {
	k.api.request(k.process, "says that "+w.uid+" runs", func() {
		k.api.updatePod(w.uid, func(p *pod) {
			if !p.terminal() {
				p.phase, p.started = running, true
			}
		})
	})
}

// exit: the processes of a pod end by themselves; the kubelet of that moment hears of it.
func (s *simulation) exit(uid string) {
	if !s.host.busy(uid) {
		return
	}
	s.host.end(uid)
	if s.kubelet.process.over {
		return
	}
	k := s.kubelet
	k.after(k.process, k.latency(), "sees that "+uid+" has ended", func() {
		if w := k.workers[uid]; w != nil && w.phase == live && !k.host.busy(uid) {
			w.ended = succeeded
			k.terminate(uid)
		}
	})
}

// restart: a container ends and starts again in the same pod, with the same GPUs.
func (s *simulation) restart(uid string) {
	group := s.host.pods[uid]
	k := s.kubelet
	w := k.workers[uid]
	if group == nil || !group.busy || k.process.over || w == nil || w.phase != live {
		return
	}
	if !s.noPause {
		s.hit(containerRestarts) // the sandbox's own process stays
		return
	}
	s.host.end(uid)
	k.makeAgain(w)
}

// makeAgain makes the container of a pod again that runs.
func (k *kubelet) makeAgain(w *worker) {
	k.after(k.process, k.between(0, 3*time.Second), "restarts the container of "+w.uid, func() {
		group := k.host.pods[w.uid]
		if w.phase != live || group == nil || group.busy {
			return
		}
		grants, ok := k.withClients(group.grants)
		if !ok {
			k.makeAgain(w)
			return
		}
		k.hit(containerRestarts)
		k.host.start(w.uid, grants)
	})
}

// terminate ends a pod: containers, claims, cgroup, in this order.
func (k *kubelet) terminate(uid string) {
	w := k.workers[uid]
	if w.phase >= terminating {
		return
	}
	w.phase = terminating
	grace := k.between(0, 200*time.Millisecond)
	if _, ok := k.known.cache[podKey(uid)]; k.chance(4) || !ok {
		grace = k.between(0, 10*time.Second)
	}
	k.after(k.process, grace, "kills "+uid, func() {
		if p, ok := k.known.cache[podKey(uid)].(*pod); k.host.busy(uid) && (!ok || p == nil) {
			k.hit(forceDeletedRuns)
		}
		k.host.end(uid)
		k.stopped(w)
	})
}

// stopped follows the end of the last container: the claims are unprepared, then the API server hears of the phase.
func (k *kubelet) stopped(w *worker) {
	k.unprepare(w.uid, k.claimNames(w), func(err error) {
		if err != nil {
			k.after(k.process, k.between(2*time.Second, 10*time.Second), "unprepares for "+w.uid+" again", func() { k.stopped(w) })
			return
		}
		w.phase = terminated
		k.api.request(k.process, "says that "+w.uid+" has ended", func() {
			k.api.updatePod(w.uid, func(p *pod) {
				if !p.terminal() {
					p.phase = failed
					if w.ended != "" {
						p.phase = w.ended
					}
				}
			})
		})
		k.after(k.process, k.between(0, time.Second), "removes the cgroup of "+w.uid, func() {
			k.host.removeGroup(w.uid)
			k.finish(w)
		})
	})
}

// finish lets the API server forget a pod that is being deleted, once nothing is left of it.
func (k *kubelet) finish(w *worker) {
	p, ok := k.known.cache[podKey(w.uid)].(*pod)
	if !ok || !p.deleting || k.host.pods[w.uid] != nil {
		return
	}
	k.api.request(k.process, "lets go of "+w.uid, func() { k.api.put(podKey(w.uid), nil) })
}

// claimNames are the claims to unprepare for a pod: since 1.37 those that kubelet knows of, if any.
func (k *kubelet) claimNames(w *worker) []string {
	var known []string
	for _, name := range sorted(k.claims) {
		if k.claims[name].pods[w.uid] {
			known = append(known, name)
		}
	}
	switch {
	case k.version >= 37 && len(known) > 0:
		return known
	case w.pod == nil:
		return nil
	default:
		return w.pod.claims
	}
}

// report says every ten seconds what kubelet thinks of the node, and so corrects what others wrote.
func (k *kubelet) report() {
	counts := k.devices.Capacity()[resourceName]
	if !k.api.down {
		k.api.put("node/", &nodeObject{allocatable: counts[1], capacity: counts[0]})
	}
	k.after(k.process, k.between(9*time.Second, 11*time.Second), "reports its status", k.report)
}

// call asks a server; done hears of the answer in kubelet's life. Where the server dies, or time runs out, done gets an error.
func (k *kubelet) call(a server, name string, timeout time.Duration, serve func(context.Context) error, done func(error)) {
	ctx, cancel := context.WithCancel(a.life().ctx)
	if timeout > 0 {
		ctx, cancel = context.WithTimeout(a.life().ctx, timeout)
	}
	answered := false
	answer := func(err error) {
		if !answered {
			answered = true
			cancel()
			done(err)
		}
	}
	k.after(a.life(), k.latency()/2, "is asked to "+name, func() {
		k.spawn(a.life(), name, func(c *call) {
			err := serve(c.context(ctx))
			c.park("answers")
			k.after(k.process, k.latency()/2, "hears the answer to "+name, func() { answer(err) })
		})
	})
	k.pending = append(k.pending, pendingCall{server: a.life(), kubelet: k.process, name: name, answered: &answered, hangUp: cancel, fail: func() {
		k.after(k.process, 0, name+" breaks off", func() { answer(fmt.Errorf("%s: connection lost", name)) })
	}})
	if timeout > 0 {
		k.after(k.process, timeout, name+" takes too long", func() { answer(context.DeadlineExceeded) })
	}
}

// pendingCall is a call that breaks off with its server.
type pendingCall struct {
	server, kubelet *process
	name            string
	answered        *bool
	// hangUp is what the server notices when kubelet dies, fail what kubelet notices when the server does.
	hangUp, fail func()
}

func (s *simulation) breakOff() {
	s.pending = slices.DeleteFunc(s.pending, func(p pendingCall) bool {
		if p.server.over && !p.kubelet.over {
			p.fail()
		}
		return *p.answered || p.server.over || p.kubelet.over
	})
}
