// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"slices"
	"strings"
	"time"
)

// profile is the workload of a world: the actions that happen most of the time, and the faults that fit them.
type profile struct {
	name       string
	actions    []string
	injections []inject
	// slow messages take ten or forty times as long as usual.
	slow bool
	// faultInterval is how long it stays away on average; pace is that of users. 0 for whatever is drawn.
	faultInterval, pace time.Duration
	// calm users come seldom.
	calm bool
	// gpus are as many as the node has, versions the kubelets that it may have: all that there are where nothing is said.
	gpus     int
	versions []int
	// peaceful worlds have the actions alone, no faults, and every component as fast as usual.
	peaceful bool
	// prompt worlds have no message that takes longer than 40 ms.
	prompt bool
	// sharing has the policies by which several pods share a GPU; nil for no sharing. In mps worlds they share it by MPS.
	sharing []policy
	mps     bool
	// mig worlds have dynamic GPUs.
	mig bool
	// foreign are the forms of device IDs in worlds that have foreign drivers before the agent, and at times again; nil for none.
	foreign []string
	// rows are rare ones that the profile is made for. next prefers it for them before any world has met them.
	rows []row
}

// inject is what happens just before some of the events of a life whose names begin so. It gets the rest of the name.
type inject struct {
	process, before string
	oneIn           int
	name            string
	do              func(s *simulation, rest string)
	// late is how much later the event itself happens then, at most.
	late time.Duration
	// harmless ones continue after the pressure has ended.
	harmless bool
}

// injectBefore is called with each event that is about to happen, and says how long it has to wait.
func (s *simulation) injectBefore(e *event) (late time.Duration) {
	for _, k := range s.profile.injections {
		rest, ok := strings.CutPrefix(e.name, k.before)
		if !ok || k.process != e.process.name || s.ended && !k.harmless || !s.chance(k.oneIn) {
			continue
		}
		s.note("    " + k.name)
		if k.do != nil {
			k.do(s, rest)
		}
		if k.late > 0 {
			late = max(late, s.between(0, k.late))
		}
	}
	return late
}

// The actions that profiles are about, by their names.
const (
	reboots         = "the node reboots"
	claimOwners     = "an owner of claim pods comes"
	claimPods       = "a finite claim pod comes"
	finitePods      = "a finite pod comes"
	endlessClaims   = "an owner of endless claim pods comes"
	endlessPods     = "an owner of endless pods comes"
	podOwners       = "an owner of pods comes"
	orphans         = "a running pod is force-deleted and another one comes"
	orphanClaims    = "a running claim pod is force-deleted and another one comes"
	forceDeletes    = "a pod is force-deleted"
	burst           = "all workloads come at once"
	sharedOwners    = "owners of pods that share a claim come"
	shares          = "pods share a claim"
	deletes         = "a pod is deleted"
	deletesWaiting  = "a pod that waits is deleted"
	annotates       = "a waiting pod is annotated"
	ownerGoes       = "an owner goes"
	agentDies       = "the agent dies"
	kubeletDies     = "kubelet dies"
	checkpointGoes  = "kubelet's device checkpoint is deleted"
	stateGoes       = "kubelet's claim state is deleted"
	apiGoes         = "the API server goes away"
	apiGoesWithPods = "the API server goes away while pods come"
	several         = "an owner of pods with several claims comes"
	ownAndShared    = "owners of pods with a claim and a shared one come"
	daemonDies      = "an MPS daemon dies"
	daemonPodGoes   = "the pod of an MPS daemon is deleted"
	policyChanges   = "the node's sharing policy changes"
	controllerDies  = "the controller dies"
	claimAndLimit   = "an owner of pods with a claim and a limit comes"
	clockSet        = "the clock is set"
	slowDisk        = "the disk is slow"
	gpuFails        = "a GPU has a fault"
	administers     = "an administrator changes partitions"
	driverFails     = "the driver fails to change partitions"
	driversChange   = "the drivers of the GPUs change"
)

// profiles take turns by the seeds of the worlds. Each makes common what is rare by itself.
var profiles = []profile{
	{name: "anything"},
	{name: "reboots", actions: []string{reboots, claimOwners, podOwners}, faultInterval: 20 * time.Second, calm: true},
	{name: "reboots with claims", actions: []string{reboots, endlessClaims}, faultInterval: time.Minute, pace: 2 * time.Second, gpus: 8},
	{name: "reboots with limits", actions: []string{reboots, endlessPods}, faultInterval: 15 * time.Second, calm: true, gpus: 8},
	{name: "reboots in a rush", actions: []string{reboots, burst}, faultInterval: 20 * time.Second},
	{name: "partitions by several claims", mig: true, gpus: 4, versions: withPartitions, actions: []string{several, ownAndShared, claimAndLimit}},
	{name: "partitions, agent and driver fail", mig: true, gpus: 2, versions: withPartitions,
		actions: []string{agentDies, driverFails, claimOwners, finitePods}, faultInterval: 2 * time.Second},
	{name: "pods gone after a reboot", actions: []string{reboots, endlessClaims},
		faultInterval: 20 * time.Second, gpus: 8, injections: []inject{
			{process: "host", before: "starts kubelet", oneIn: 1, name: "its pods are gone", do: func(s *simulation, _ string) {
				for _, p := range all[*pod](s.api.objects) {
					if p.bound && len(p.claims) > 0 && !s.api.down && !s.chance(3) {
						s.forceDelete(p)
					}
				}
			}},
		}},
	{name: "orphans", actions: []string{orphans}, pace: 300 * time.Millisecond},
	{name: "orphans of owners", actions: []string{orphans, podOwners}, pace: 500 * time.Millisecond},
	{name: "slow orphans", actions: []string{orphans}, slow: true},
	{name: "force-deleted", actions: []string{forceDeletes, podOwners, claimOwners}, pace: 300 * time.Millisecond},
	{name: "rush", actions: []string{burst}, pace: 300 * time.Millisecond, injections: watchView},
	{name: "slow rush", actions: []string{burst}, slow: true},
	{name: "annotated rush", actions: []string{burst, claimOwners, annotates}, slow: true},
	{name: "pods while a claim is prepared", actions: []string{claimPods}, pace: time.Second, faultInterval: time.Minute, gpus: 2,
		injections: []inject{
			{process: "agent", before: "is asked to prepare ", oneIn: 1, name: "pods come, and kubelet is frozen",
				do: func(s *simulation, _ string) {
					for range s.host.gpus {
						s.room(func() { s.cluster.create(pod{gpus: 1, finite: true}) })
					}
					s.kubelet.process.frozen = time.Now().Add(s.between(time.Second, 3*time.Second))
				}, late: time.Second},
		}},
	{name: "late device lists", actions: []string{burst, claimOwners}, pace: 500 * time.Millisecond, injections: []inject{
		{process: "kubelet", before: "gets a device list", oneIn: 1, name: "later", late: 5 * time.Second},
		{process: "scheduler", before: "hears of node/", oneIn: 2, name: "later", late: 2 * time.Second},
	}},
	{name: "claims after claims", actions: []string{orphanClaims}, pace: 300 * time.Millisecond},
	{name: "claims after claims, regrets", actions: []string{orphanClaims}, pace: 500 * time.Millisecond, injections: []inject{
		{process: "agent", before: "is asked to prepare ", oneIn: 2, name: "its pod is deleted", do: deleteItsPod},
	}},
	{name: "rush with regrets", actions: []string{burst, deletesWaiting}, faultInterval: time.Minute, injections: append([]inject{
		{process: "agent", before: "is asked to prepare ", oneIn: 2, name: "its pod is deleted", do: deleteItsPod},
	}, watchView...)},
	{name: "shared claims", actions: []string{sharedOwners}},
	{name: "shared claims, pods deleted", actions: []string{sharedOwners, deletesWaiting}, slow: true, injections: overtaking,
		rows: []row{evictionOvertaken}},
	{name: "shared claims, owners go", actions: []string{sharedOwners, ownerGoes}, slow: true},
	{name: "shared claims, regrets", actions: []string{shares}, slow: true, versions: []int{34, 36}, injections: []inject{
		{process: "kubelet", before: "admits ", oneIn: 1, name: "it is deleted if it is one more", do: func(s *simulation, uid string) {
			p, _ := get[*pod](s.api, podKey(uid))
			for _, other := range all[*pod](s.api.objects) {
				if p != nil && other.uid != uid && other.sharesClaim(p) && s.host.busy(other.uid) {
					deleteItsPod(s, uid)
				}
			}
		}},
	}},
	{name: "shared claims, one more pod", actions: []string{shares, deletes}, injections: []inject{
		{process: "agent", before: "is asked to unprepare shared", oneIn: 1, name: "the agent is frozen, and more pods come",
			do: func(s *simulation, rest string) { s.morePods("shared"+rest, pod{finite: true}) }},
	}},
	{name: "shared claims, agent dies", actions: []string{sharedOwners, deletesWaiting, agentDies},
		faultInterval: 3 * time.Second, injections: overtaking},
	{name: "shared claims, no API", actions: []string{sharedOwners, deletesWaiting, apiGoes},
		faultInterval: 3 * time.Second, injections: overtaking},
	{name: "few share, slowly", actions: []string{shares, deletes}, slow: true},
	{name: "agent and limits", actions: []string{agentDies, podOwners},
		faultInterval: 3 * time.Second, versions: []int{34, 36}, injections: []inject{
			{process: "kubelet", before: "loses a device plugin", oneIn: 1, name: "later", late: 5 * time.Second},
		}},
	{name: "agent", actions: []string{agentDies}, slow: true, faultInterval: time.Second},
	{name: "kubelet", actions: []string{kubeletDies, checkpointGoes, podOwners}},
	{name: "kubelet forgets", actions: []string{checkpointGoes, podOwners, endlessPods}, faultInterval: 8 * time.Second},
	{name: "kubelet in calls", actions: []string{claimOwners, podOwners}, injections: []inject{
		{process: "kubelet", before: "hears the answer to ", oneIn: 6, name: "kubelet dies",
			do: func(s *simulation, _ string) { s.killKubelet() }},
	}},
	{name: "late checkpoints", actions: []string{burst, podOwners, clockSet, slowDisk}, faultInterval: 10 * time.Second, pace: 300 * time.Millisecond,
		gpus: 2, rows: []row{checkpointStale}, injections: relists},
	{name: "late checkpoints of few pods", actions: []string{claimPods, finitePods, clockSet, slowDisk}, faultInterval: 5 * time.Second,
		pace: 200 * time.Millisecond, gpus: 2, rows: []row{checkpointStale}, injections: relists},
	{name: "no API", actions: []string{apiGoesWithPods}, faultInterval: 5 * time.Second, injections: []inject{
		{process: "kubelet", before: "starts ", oneIn: 8, name: "the API server goes away",
			do: func(s *simulation, _ string) { s.apiGoes() }},
	}},
	{name: "several claims", actions: []string{several, podOwners, deletes}, gpus: 4},
	{name: "several claims, regrets", actions: []string{several, ownAndShared}, gpus: 4, injections: []inject{
		{process: "agent", before: "is asked to prepare ", oneIn: 3, name: "its pod is deleted", do: deleteItsPod},
		{process: "scheduler", before: "allocates ", oneIn: 6, name: "later", late: 3 * time.Second},
	}},
	{name: "several claims, agent and kubelet die", actions: []string{several, ownAndShared, claimAndLimit, agentDies, kubeletDies},
		faultInterval: 4 * time.Second, gpus: 4},
	{name: "several claims and reboots", actions: []string{several, claimAndLimit, reboots}, faultInterval: 20 * time.Second, gpus: 8},
	{name: "own and shared claims", actions: []string{ownAndShared, deletes}, slow: true, gpus: 4},
	{name: "own and shared claims, one more pod", actions: []string{shares, deletes}, gpus: 4, versions: []int{37},
		rows: []row{attachedInPart}, injections: []inject{
			{process: "agent", before: "is asked to unprepare shared", oneIn: 1, name: "the agent is frozen, and more pods come",
				do: func(s *simulation, rest string) { s.morePods("shared"+rest, pod{own: []int{1}, finite: true}) }},
		}},
	{name: "claims beside limits", actions: []string{claimAndLimit, podOwners, claimOwners}, gpus: 4, injections: watchView},
	{name: "parts of GPUs", sharing: byMemory, gpus: 3},
	{name: "parts of GPUs by several claims", sharing: byMemory, gpus: 3, actions: []string{several, ownAndShared, claimAndLimit}},
	{name: "parts of GPUs in a rush", sharing: byMemory, gpus: 4, actions: []string{burst},
		pace: 300 * time.Millisecond, injections: watchView},
	{name: "parts of GPUs and the agent", sharing: byMemory, gpus: 3, actions: []string{agentDies, claimOwners, podOwners},
		faultInterval: 3 * time.Second},
	{name: "parts of GPUs and reboots", sharing: byMemory, gpus: 3, actions: []string{reboots, endlessClaims, endlessPods},
		faultInterval: 20 * time.Second},
	{name: "parts of GPUs force-deleted", sharing: byMemory, gpus: 3, actions: []string{forceDeletes, orphans, orphanClaims},
		pace: 300 * time.Millisecond},
	{name: "equal shares", sharing: equalShares, gpus: 3},
	{name: "equal shares by several claims", sharing: equalShares, gpus: 4, actions: []string{several, ownAndShared, claimAndLimit}},
	{name: "equal shares in a rush", sharing: equalShares, gpus: 3, actions: []string{burst}, pace: 300 * time.Millisecond, injections: watchView},
	{name: "equal shares and the agent", sharing: equalShares, gpus: 2, actions: []string{agentDies, claimOwners, podOwners},
		faultInterval: 3 * time.Second},
	{name: "equal shares and reboots", sharing: equalShares, gpus: 4, actions: []string{reboots, endlessClaims, endlessPods},
		faultInterval: 20 * time.Second},
	{name: "equal shares force-deleted", sharing: equalShares, gpus: 2, actions: []string{forceDeletes, orphans, orphanClaims},
		pace: 300 * time.Millisecond},
	{name: "no limit", sharing: noLimit, gpus: 3},
	{name: "no limit in a rush", sharing: noLimit, gpus: 4, actions: []string{burst, agentDies}, pace: 300 * time.Millisecond, injections: watchView},
	{name: "no limit force-deleted", sharing: noLimit, gpus: 3, actions: []string{forceDeletes, orphans, orphanClaims, podOwners},
		pace: 300 * time.Millisecond},
	{name: "daemons", sharing: byMemory, mps: true, gpus: 3, actions: []string{claimOwners, podOwners, deletes}},
	{name: "daemons die", sharing: byMemory, mps: true, gpus: 3, actions: []string{daemonDies, daemonPodGoes, claimOwners, podOwners},
		faultInterval: 4 * time.Second, injections: daemonsLate, rows: []row{podWithoutDaemon}},
	{name: "daemons, agent and controller die", sharing: byMemory, mps: true, gpus: 3,
		actions: []string{agentDies, controllerDies, claimOwners, podOwners}, faultInterval: 4 * time.Second, injections: daemonsLate},
	{name: "daemons and reboots", sharing: byMemory, mps: true, gpus: 3, actions: []string{reboots, endlessClaims, podOwners},
		faultInterval: 30 * time.Second},
	{name: "daemons of a changing policy", sharing: byMemory, mps: true, gpus: 4, actions: []string{policyChanges, claimOwners, podOwners, ownerGoes},
		faultInterval: 10 * time.Second},
	{name: "daemons with clients under a changing policy", sharing: byMemory, mps: true, gpus: 4,
		actions: []string{policyChanges, endlessClaims, podOwners}, faultInterval: 20 * time.Second, rows: []row{policyChangesInUse, daemonNotReady}},
	{name: "daemons and several claims", sharing: byMemory, mps: true, gpus: 4, actions: []string{several, ownAndShared, sharedOwners},
		injections: daemonsLate},
	{name: "daemons and force-deleted pods", sharing: byMemory, mps: true, gpus: 3, actions: []string{forceDeletes, orphans, orphanClaims},
		pace: 500 * time.Millisecond},
	{name: "partitions in a rush", mig: true, gpus: 2, versions: withPartitions, actions: []string{burst, claimPods, finitePods},
		pace: 300 * time.Millisecond, injections: watchView},
	{name: "partitions of an administrator", mig: true, gpus: 2, versions: withPartitions, actions: []string{administers, agentDies, claimOwners, podOwners},
		faultInterval: 3 * time.Second, injections: []inject{
			{process: "agent", before: "prepare ", oneIn: 8, name: administers, do: func(s *simulation, _ string) { s.administer() }},
		}},
	{name: "partitions and reboots", mig: true, gpus: 3, versions: withPartitions, actions: []string{reboots, endlessClaims, claimPods},
		faultInterval: 20 * time.Second},
	{name: "partitions", mig: true, gpus: 3, versions: withPartitions, actions: []string{claimOwners, podOwners, deletes}},
	{name: "partitions force-deleted", mig: true, gpus: 2, versions: withPartitions, actions: []string{forceDeletes, orphans, orphanClaims},
		pace: 300 * time.Millisecond},
	{name: "foreign drivers", foreign: idForms, actions: []string{driversChange, claimPods, finitePods, annotates},
		faultInterval: 10 * time.Second, pace: 300 * time.Millisecond, injections: foreignLate},
	{name: "foreign drivers beside the agent", foreign: idForms[:3], gpus: 4, rows: []row{foreignAdopted},
		actions:       []string{driversChange, deletes, deletesWaiting},
		faultInterval: 8 * time.Second, pace: 300 * time.Millisecond, injections: append([]inject{
			{process: "user", before: "uninstalls the foreign drivers", oneIn: 1, name: "claim pods come before", late: 3 * time.Second,
				do: func(s *simulation, _ string) {
					for range s.host.gpus {
						s.room(func() { s.cluster.create(pod{own: []int{1}}) })
					}
				}},
			{process: "agent", before: "registers for limits", oneIn: 1, name: "pods come", do: func(s *simulation, _ string) {
				for range s.host.gpus {
					s.room(func() { s.cluster.create(pod{gpus: 1, finite: true}) })
				}
			}},
		}, foreignLate...)},
	{name: "foreign drivers, agent and kubelet die", foreign: idForms,
		actions:       []string{driversChange, agentDies, kubeletDies, claimPods, finitePods, annotates},
		faultInterval: 5 * time.Second, pace: 400 * time.Millisecond, injections: []inject{
			{process: "agent", before: "adopts", oneIn: 8, name: agentDies, do: func(s *simulation, _ string) { s.killAgent() }},
			{process: "agent", before: "takes over", oneIn: 8, name: agentDies, do: func(s *simulation, _ string) { s.killAgent() }},
		}},
	{name: "foreign drivers, pods force-deleted", foreign: idForms,
		actions:       []string{driversChange, forceDeletes, orphans, orphanClaims, claimPods, annotates},
		faultInterval: 8 * time.Second, pace: 300 * time.Millisecond, injections: foreignLate},
}

// withPartitions are the kubelets of clusters whose slices have counters.
var withPartitions = []int{36, 37}

// foreignLate are pods that were admitted and not started, and claims that are being prepared, when drivers change.
var foreignLate = []inject{
	{process: "kubelet", before: "starts pod", oneIn: 3, name: "later", late: 8 * time.Second},
	{process: "foreign", before: "prepare ", oneIn: 3, name: "later", late: 8 * time.Second},
}

var daemonsLate = []inject{
	{process: "kubelet", before: "starts tandem-mps", oneIn: 3, name: "later", late: 40 * time.Second},
}

// relists make kubelet write its checkpoint just before it admits a pod.
var relists = []inject{{process: "kubelet", before: "admits ", oneIn: 2, name: "a device list comes", do: (*simulation).relist}}

// watchView makes the scheduler decide by what was.
var watchView = []inject{
	{process: "scheduler", before: "hears of slice/", oneIn: 2, name: "later", late: 5 * time.Second},
	{process: "scheduler", before: "hears of node/", oneIn: 2, name: "later", late: 5 * time.Second},
}

// overtaking changes pods that are about to be evicted.
var overtaking = []inject{{
	process: "controller", before: "evicts ", oneIn: 2, name: "it is annotated", harmless: true,
	do: func(s *simulation, rest string) {
		if p, ok := get[*pod](s.api, podKey(rest)); ok {
			s.annotate(p)
		}
	}}}

// deleteItsPod deletes the pod whose UID ends the name of an event.
func deleteItsPod(s *simulation, rest string) {
	if !s.api.down {
		s.cluster.remove(rest[strings.LastIndex(rest, " ")+1:])
	}
}

// morePods freezes the agent and makes pods like a model that share the first claim of a list.
func (s *simulation) morePods(list string, model pod) {
	name, _, _ := strings.Cut(list, " ")
	model.claims = []string{strings.TrimSuffix(name, ",")}
	s.freeze(s.agentProcess())
	for range 3 {
		s.room(func() { s.cluster.create(model) })
	}
}

// named is the profile of a name, nil for none.
func named(name string) *profile {
	for i := range profiles {
		if profiles[i].name == name {
			return &profiles[i]
		}
	}
	return nil
}

// profileOf is what the world of a seed is about.
func profileOf(seed uint64) profile {
	if mix := named(*profileFlag); mix != nil {
		return *mix
	}
	return profiles[seed%uint64(len(profiles))]
}

// counts is what worlds have shown so far, by their profiles.
type counts []struct {
	steps int
	rows  map[row]int
}

func newCounts() counts {
	t := make(counts, len(profiles))
	for i := range t {
		t[i].rows = map[row]int{}
	}
	return t
}

func (t counts) add(seed uint64, o outcome) {
	of := &t[seed%uint64(len(profiles))]
	of.steps += o.steps
	for r, n := range o.rows {
		of.rows[r] += n
	}
}

func (t counts) total(r row) (n int) {
	for _, of := range t {
		n += of.rows[r]
	}
	return n
}

// met reports whether every row was met so many times.
func (t counts) met(least int) bool {
	return !slices.ContainsFunc(allRows, func(r row) bool { return t.total(r) < least })
}

// madeFor is added to the count of a row in the profiles that are made for that row, so that next prefers them before any world showed it.
const madeFor = 10

// next is the seed of the world after one. Once each profile has had its turn, four worlds of five have the profile that shows
// the rarest row most often per step. A profile that is made for that row counts madeFor more.
func (t counts) next(seed uint64, worlds int) uint64 {
	seed++
	if worlds < len(profiles) || worlds%5 == 0 {
		return seed
	}
	rarest := slices.MinFunc(allRows, func(a, b row) int { return t.total(a) - t.total(b) })
	best, most := 0, 0.0
	for i, of := range t {
		// One more than it was, so that none is given up after a world or two.
		shown := of.rows[rarest] + 1
		if slices.Contains(profiles[i].rows, rarest) {
			shown += madeFor
		}
		if often := float64(shown) / float64(of.steps); often > most {
			best, most = i, often
		}
	}
	for seed%uint64(len(profiles)) != uint64(best) {
		seed++
	}
	return seed
}
