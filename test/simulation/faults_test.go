// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"os"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// action is an action of users or a fault. Its weight is how often it happens.
type action struct {
	weight int
	name   string
	do     func()
}

// startActions draws the weights of this world and starts users and faults.
func (s *simulation) startActions() {
	actions := s.actions()
	for i := range actions {
		// Some worlds have hardly any faults but reboots, others have no faults at all.
		actions[i].weight *= []int{0, 1, 1, 2, 6}[s.rand.IntN(5)]
		if i < userActions {
			actions[i].weight = max(actions[i].weight, 2)
		}
	}
	mix := s.profile
	for i := range actions {
		if mix.peaceful {
			actions[i].weight = 0
		}
	}
	for _, name := range mix.actions {
		actions[slices.IndexFunc(actions, func(d action) bool { return d.name == name })].weight = 300
	}
	for i := range actions {
		// A pod that kubelet does not know of and that has no process at the moment cannot be told from none
		// (docs/design/0002-ledger.md).
		if s.noPause && strings.Contains(actions[i].name, "force-deleted") || s.noPause && strings.Contains(actions[i].name, "checkpoint") {
			actions[i].weight = 0
		}
		// Nothing but kubelet's files says what foreign drivers gave away.
		if s.profile.foreign != nil && (actions[i].name == checkpointGoes || actions[i].name == stateGoes) {
			actions[i].weight = 0
		}
	}
	pace, faultInterval := s.between(50*time.Millisecond, 2*time.Second), s.between(500*time.Millisecond, 15*time.Second)
	if mix.faultInterval > 0 {
		faultInterval = mix.faultInterval
	}
	if mix.pace > 0 {
		pace = mix.pace
	}
	if mix.calm {
		pace = s.between(3*time.Second, 15*time.Second)
	}
	if mix.slow {
		s.slowness = []time.Duration{10, 40}[s.rand.IntN(2)]
	}
	s.act("acts", actions[:userActions], pace)
	s.act("has a fault", actions[userActions:], faultInterval)
}

// act runs an action or fault at intervals.
func (s *simulation) act(name string, actions []action, pace time.Duration) {
	total := 0
	for _, d := range actions {
		total += d.weight
	}
	if total == 0 {
		return
	}
	var again func()
	again = func() {
		n := s.rand.IntN(total)
		for _, d := range actions {
			if n -= d.weight; n < 0 {
				s.note("    " + d.name)
				d.do()
				break
			}
		}
		s.after(s.users, s.between(0, 2*pace), name, again)
	}
	s.after(s.users, 3*time.Second, name, again)
}

// userActions is how many actions are users' own, which every world has.
const userActions = 22

func (s *simulation) actions() []action {
	c := s.cluster
	size := func() int {
		n := max(1, s.rand.IntN(6)-3)
		if s.profile.mps {
			return 1 // a client sees one GPU
		}
		return n
	}
	actions := []action{
		{8, "an owner of claim pods comes", func() { s.own(pod{own: []int{size()}, finite: !s.chance(3)}) }},
		{8, "an owner of pods comes", func() { s.own(pod{gpus: size(), init: s.chance(3), finite: !s.chance(3)}) }},
		{1, "an owner of endless claim pods comes", func() { s.own(pod{own: []int{1}}) }},
		{1, "an owner of endless pods comes", func() { s.own(pod{gpus: 1}) }},
		{6, finitePods, func() { s.room(func() { c.create(pod{gpus: size(), finite: true, init: s.chance(3)}) }) }},
		{6, "a finite claim pod comes", func() { s.room(func() { c.create(pod{own: []int{size()}, finite: true}) }) }},
		{4, "bare pods come", func() {
			s.room(func() {
				c.create(pod{own: []int{size()}, finite: s.chance(2)})
				c.create(pod{gpus: size(), finite: s.chance(2)})
			})
		}},
		{4, "all workloads come at once", s.createMany},
		{12, "an owner goes", s.deleteOwner},
		{10, "a pod is deleted", func() { s.some(func(p *pod) { c.remove(p.uid) }) }},
		{6, "pods share a claim", s.share},
		{2, "owners of pods that share a claim come", func() {
			k := s.newClaim(claim{uid: s.api.uid("claim"), name: s.api.uid("shared"), count: 1})
			s.own(pod{claims: []string{k.name}, finite: true})
			s.own(pod{claims: []string{k.name}, finite: true})
			s.room(func() { s.api.put(claimKey(k.name), k) })
		}},
		{3, "a pod that waits is deleted", func() {
			for _, p := range all[*pod](s.api.objects) {
				if p.bound && p.phase == pending && !s.api.down && s.chance(2) {
					c.remove(p.uid)
					return
				}
			}
		}},
		{8, "a pod is force-deleted", func() { s.some(s.forceDelete) }},
		{6, "a container restarts", func() { s.someRunning(s.restart) }},
		{4, "a pod is annotated", func() { s.some(s.annotate) }},
		{2, "a waiting pod is annotated", func() {
			for _, p := range all[*pod](s.api.objects) {
				if p.bound && p.phase == pending && len(p.claims) > 0 && !s.api.down && s.chance(2) {
					s.annotate(p)
				}
			}
		}},
		{4, "a running pod is force-deleted and another one comes", func() {
			for _, p := range all[*pod](s.api.objects) {
				if p.phase == running && p.limits() && !s.api.down && s.chance(2) {
					s.forceDelete(p)
					c.create(pod{gpus: p.gpus, finite: s.chance(2), init: s.chance(3)})
					return
				}
			}
			s.room(func() { c.create(pod{gpus: 1}) })
		}},
		{3, "a running claim pod is force-deleted and another one comes", func() {
			for _, p := range all[*pod](s.api.objects) {
				if p.phase == running && len(p.own) > 0 && !s.api.down && s.chance(2) {
					s.forceDelete(p)
					c.create(pod{own: p.own, finite: s.chance(2)})
					return
				}
			}
			s.room(func() { c.create(pod{own: []int{1}}) })
		}},
		{3, "an owner of pods with several claims comes", func() { s.own(pod{own: s.several(), finite: !s.chance(3)}) }},
		{2, "owners of pods with a claim and a shared one come", func() {
			k := s.newClaim(claim{uid: s.api.uid("claim"), name: s.api.uid("shared"), count: 1})
			s.own(pod{own: []int{1}, claims: []string{k.name}, finite: true})
			s.own(pod{own: s.several()[1:], claims: []string{k.name}, finite: true})
			s.room(func() { s.api.put(claimKey(k.name), k) })
		}},
		{1, "an owner of pods with a claim and a limit comes", func() { s.own(pod{gpus: 1, own: []int{1}, init: s.chance(3), finite: true}) }},
		{4, "an exporter lists pod resources", func() { _, _, _ = s.kubelet.list() }},
		{4, "the agent dies", s.killAgent},
		{4, "the agent will die before it answers", func() { s.dieBeforeAnswer = true }},
		{4, "the agent will die while it writes", func() { s.crashIn = 1 + s.rand.IntN(6) }},
		{3, "kubelet dies", s.killKubelet},
		{2, "the node reboots", s.reboot},
		{3, "the API server goes away", s.apiGoes},
		{3, "the API server goes away while pods come", func() {
			s.createMany()
			s.after(s.users, s.between(0, time.Second), "cuts the API server off", s.apiGoes)
		}},
		{3, "the agent is frozen", func() { s.freeze(s.agentProcess()) }},
		{3, "the controller dies", s.killController},
		{1, "an MPS daemon dies", func() { s.someDaemon((*supervisor).die) }},
		{1, "the pod of an MPS daemon is deleted", func() { s.someDaemon(s.deleteDaemonPod) }},
		{1, "the node's sharing policy changes", s.changePolicy},
		{2, "the scheduler is frozen", func() { s.freeze(s.scheduler.process) }},
		{2, "kubelet is frozen", func() { s.freeze(s.kubelet.process) }},
		{2, clockSet, s.setClock},
		{3, gpuFails, s.gpuFails},
		{3, slowDisk, func() { s.host.slowUntil = time.Now().Add(s.between(0, time.Minute)) }},
		{1, stateGoes, func() {
			s.killKubelet()
			s.hit(stateDeleted)
			_ = os.Remove(s.host.statePath())
		}},
		{1, checkpointGoes, func() {
			s.killKubelet()
			s.hit(checkpointDeleted)
			_ = os.Remove(podstate.DeviceCheckpointPath(s.host.kubeletDir()))
		}},
	}
	if s.profile.mig {
		actions = append(actions,
			action{4, driverFails, func() { s.host.mig.failing = 1 + s.rand.IntN(3) }},
			action{2, administers, s.administer})
	}
	if s.profile.foreign != nil {
		actions = append(actions, action{4, driversChange, s.changeDrivers})
	}
	return actions
}

func (s *simulation) apiGoes() {
	s.hit(apiAway)
	s.api.stop(s.between(200*time.Millisecond, 10*time.Second))
}

func (s *simulation) freeze(l *process) {
	l.frozen = time.Now().Add(s.between(100*time.Millisecond, 8*time.Second))
}

// annotate changes a pod in a way that makes kubelet look at it.
func (s *simulation) annotate(p *pod) {
	s.api.updatePod(p.uid, func(p *pod) { p.retry = time.Now().Format(time.RFC3339Nano) })
}

// createMany makes as many pods of each kind as there are GPUs, at one moment.
func (s *simulation) createMany() {
	s.room(func() {
		for range s.host.gpus {
			s.cluster.create(pod{own: []int{1}, finite: true})
			s.cluster.create(pod{gpus: 1, finite: true})
		}
	})
}

// room keeps the number of pods at a few for each GPU.
func (s *simulation) room(do func()) {
	alive := 0
	for _, p := range all[*pod](s.api.objects) {
		if !p.terminal() {
			alive++
		}
	}
	if alive < 3*s.host.gpus && !s.api.down {
		do()
	}
}

// several are how many GPUs each of two or three claims asks for; together no more than there are.
func (s *simulation) several() []int {
	counts := []int{1, 1}
	if s.host.gpus > 2 {
		counts[s.rand.IntN(2)] += s.rand.IntN(2)
	}
	if s.host.gpus > 3 && s.chance(2) {
		counts = append(counts, 1)
	}
	return counts
}

func (s *simulation) own(model pod) {
	s.room(func() {
		model.owner = s.api.uid("owner")
		s.cluster.owners[model.owner] = &model
		s.cluster.lookSoon()
	})
}

func (s *simulation) deleteOwner() {
	var alive []string
	for _, name := range sorted(s.cluster.owners) {
		if s.cluster.owners[name] != nil {
			alive = append(alive, name)
		}
	}
	if len(alive) > 0 {
		s.cluster.owners[alive[s.rand.IntN(len(alive))]] = nil
		s.cluster.lookSoon()
	}
}

// some picks a pod.
func (s *simulation) some(do func(*pod)) {
	if pods := all[*pod](s.api.objects); len(pods) > 0 && !s.api.down {
		do(pods[s.rand.IntN(len(pods))])
	}
}

func (s *simulation) someRunning(do func(uid string)) {
	if uids := sorted(s.host.pods); len(uids) > 0 {
		do(uids[s.rand.IntN(len(uids))])
	}
}

// forceDelete removes a pod from the API server, whatever still runs of it.
func (s *simulation) forceDelete(p *pod) {
	s.api.put(podKey(p.uid), nil)
}

// share makes a claim and two pods that use it, or one more pod for a claim that is there.
func (s *simulation) share() {
	s.room(func() {
		for _, k := range all[*claim](s.api.objects) {
			if k.pod == "" && !k.deleting && !s.chance(4) {
				s.cluster.create(pod{claims: []string{k.name}, finite: s.chance(2)})
				return
			}
		}
		k := s.newClaim(claim{uid: s.api.uid("claim"), name: s.api.uid("shared"), count: 1})
		s.api.put(claimKey(k.name), k)
		s.cluster.create(pod{claims: []string{k.name}, finite: true})
		s.cluster.create(pod{claims: []string{k.name}, finite: s.chance(2)})
	})
}
