// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"slices"
	"strings"
	"time"
)

// theme is what a world is about: deeds that are done most of the time, and misfortune that strikes where it hurts.
type theme struct {
	name    string
	deeds   []string
	strikes []strike
	// slow messages take ten or forty times as long as usual.
	slow bool
	// misfortune is how long it stays away on average; pace is that of users. 0 for whatever is drawn.
	misfortune, pace time.Duration
	// calm users come seldom.
	calm bool
	// gpus are as many as the node has, versions the kubelets that it may have: all that there are where nothing is said.
	gpus     int
	versions []int
	// sharing worlds let several pods have a GPU.
	sharing bool
}

// strike is what happens just before some of the events of a life whose names begin so. It gets the rest of the name.
type strike struct {
	life, before string
	oneIn        int
	name         string
	do           func(s *simulation, rest string)
	// late is how much later the event itself happens then, at most.
	late time.Duration
	// harmless ones go on when the pressure has ended.
	harmless bool
}

// strikeBefore is called with each event that is about to happen, and says how long it has to wait.
func (s *simulation) strikeBefore(e *event) (late time.Duration) {
	for _, k := range s.theme.strikes {
		rest, ok := strings.CutPrefix(e.name, k.before)
		if !ok || k.life != e.life.name || s.ended && !k.harmless || !s.chance(k.oneIn) {
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

// The deeds that themes are about, by their names.
const (
	reboots         = "the node reboots"
	claimOwners     = "an owner of claim pods comes"
	claimPods       = "a finite claim pod comes"
	endlessClaims   = "an owner of endless claim pods comes"
	endlessLimits   = "an owner of endless limits pods comes"
	podOwners       = "an owner of limits pods comes"
	orphans         = "a running limits pod is force-deleted and another one comes"
	orphanClaims    = "a running claim pod is force-deleted and another one comes"
	forceDeletes    = "a pod is force-deleted"
	everybody       = "everybody comes at once"
	sharedOwners    = "owners of pods that share a claim come"
	shares          = "pods share a claim"
	deletes         = "a pod is deleted"
	deletesWaiting  = "a pod that waits is deleted"
	annotates       = "somebody annotates a pod that waits"
	ownerGoes       = "an owner goes"
	agentDies       = "the agent dies"
	kubeletDies     = "kubelet dies"
	checkpointGoes  = "kubelet's device checkpoint is deleted"
	apiGoes         = "the API server goes away"
	apiGoesWithPods = "the API server goes away while pods come"
)

// themes take turns by the seeds of the worlds. Each makes common what is rare by itself.
var themes = []theme{
	{name: "anything"},
	{name: "reboots", deeds: []string{reboots, claimOwners, podOwners}, misfortune: 20 * time.Second, calm: true},
	{name: "reboots with claims", deeds: []string{reboots, endlessClaims}, misfortune: time.Minute, pace: 2 * time.Second, gpus: 8},
	{name: "reboots with limits", deeds: []string{reboots, endlessLimits}, misfortune: 15 * time.Second, calm: true, gpus: 8},
	{name: "reboots in a rush", deeds: []string{reboots, everybody}, misfortune: 20 * time.Second},
	{name: "pods gone after a reboot", deeds: []string{reboots, endlessClaims},
		misfortune: 20 * time.Second, gpus: 8, strikes: []strike{
			{life: "host", before: "starts kubelet", oneIn: 1, name: "its pods are gone", do: func(s *simulation, _ string) {
				for _, p := range all[*pod](s.api.objects) {
					if p.bound && !p.limits() && !s.api.down && !s.chance(3) {
						s.forceDelete(p)
					}
				}
			}},
		}},
	{name: "orphans", deeds: []string{orphans}, pace: 300 * time.Millisecond},
	{name: "orphans of owners", deeds: []string{orphans, podOwners}, pace: 500 * time.Millisecond},
	{name: "slow orphans", deeds: []string{orphans}, slow: true},
	{name: "force-deleted", deeds: []string{forceDeletes, podOwners, claimOwners}, pace: 300 * time.Millisecond},
	{name: "rush", deeds: []string{everybody}, pace: 300 * time.Millisecond, strikes: hearsay},
	{name: "slow rush", deeds: []string{everybody}, slow: true},
	{name: "annotated rush", deeds: []string{everybody, claimOwners, annotates}, slow: true},
	{name: "limits pods while a claim is prepared", deeds: []string{claimPods}, pace: time.Second, misfortune: time.Minute, gpus: 2,
		strikes: []strike{
			{life: "agent", before: "is asked to prepare ", oneIn: 1, name: "limits pods come, and kubelet is frozen",
				do: func(s *simulation, _ string) {
					for range s.host.gpus {
						s.room(func() { s.cluster.create(pod{gpus: 1, finite: true}) })
					}
					s.kubelet.life.frozen = time.Now().Add(s.between(time.Second, 3*time.Second))
				}, late: time.Second},
		}},
	{name: "late device lists", deeds: []string{everybody, claimOwners}, pace: 500 * time.Millisecond, strikes: []strike{
		{life: "kubelet", before: "gets a device list", oneIn: 1, name: "later", late: 5 * time.Second},
		{life: "scheduler", before: "hears of node/", oneIn: 2, name: "later", late: 2 * time.Second},
	}},
	{name: "claims after claims", deeds: []string{orphanClaims}, pace: 300 * time.Millisecond},
	{name: "claims after claims, regrets", deeds: []string{orphanClaims}, pace: 500 * time.Millisecond, strikes: []strike{
		{life: "agent", before: "is asked to prepare ", oneIn: 2, name: "its pod is deleted", do: deleteItsPod},
	}},
	{name: "rush with regrets", deeds: []string{everybody, deletesWaiting}, misfortune: time.Minute, strikes: append([]strike{
		{life: "agent", before: "is asked to prepare ", oneIn: 2, name: "its pod is deleted", do: deleteItsPod},
	}, hearsay...)},
	{name: "shared claims", deeds: []string{sharedOwners}},
	{name: "shared claims, pods deleted", deeds: []string{sharedOwners, deletesWaiting}, slow: true, strikes: overtaking},
	{name: "shared claims, owners go", deeds: []string{sharedOwners, ownerGoes}, slow: true},
	{name: "shared claims, regrets", deeds: []string{shares}, slow: true, versions: []int{34, 36}, strikes: []strike{
		{life: "kubelet", before: "admits ", oneIn: 1, name: "it is deleted if it is one more", do: func(s *simulation, uid string) {
			p, _ := get[*pod](s.api, podKey(uid))
			for _, other := range all[*pod](s.api.objects) {
				if p != nil && other.uid != uid && other.claim == p.claim && s.host.busy(other.uid) {
					deleteItsPod(s, uid)
				}
			}
		}},
	}},
	{name: "shared claims, one more pod", deeds: []string{shares, deletes}, strikes: []strike{
		{life: "agent", before: "is asked to unprepare shared", oneIn: 1, name: "the agent is frozen, and more pods come",
			do: func(s *simulation, rest string) {
				name, _, _ := strings.Cut("shared"+rest, " ")
				s.freeze(s.agentLife())
				for range 3 {
					s.room(func() { s.cluster.create(pod{claim: name, shared: true, finite: true}) })
				}
			}},
	}},
	{name: "shared claims, agent dies", deeds: []string{sharedOwners, deletesWaiting, agentDies},
		misfortune: 3 * time.Second, strikes: overtaking},
	{name: "shared claims, no API", deeds: []string{sharedOwners, deletesWaiting, apiGoes},
		misfortune: 3 * time.Second, strikes: overtaking},
	{name: "few share, slowly", deeds: []string{shares, deletes}, slow: true},
	{name: "agent and limits", deeds: []string{agentDies, podOwners},
		misfortune: 3 * time.Second, versions: []int{34, 36}, strikes: []strike{
			{life: "kubelet", before: "loses a device plugin", oneIn: 1, name: "later", late: 5 * time.Second},
		}},
	{name: "agent", deeds: []string{agentDies}, slow: true, misfortune: time.Second},
	{name: "kubelet", deeds: []string{kubeletDies, checkpointGoes, podOwners}},
	{name: "kubelet forgets", deeds: []string{checkpointGoes, podOwners, endlessLimits}, misfortune: 8 * time.Second},
	{name: "kubelet in calls", deeds: []string{claimOwners, podOwners}, strikes: []strike{
		{life: "kubelet", before: "hears the answer to ", oneIn: 6, name: "kubelet dies",
			do: func(s *simulation, _ string) { s.killKubelet() }},
	}},
	{name: "no API", deeds: []string{apiGoesWithPods}, misfortune: 5 * time.Second, strikes: []strike{
		{life: "kubelet", before: "starts ", oneIn: 8, name: "the API server goes away",
			do: func(s *simulation, _ string) { s.apiGoes() }},
	}},
	{name: "parts of GPUs", sharing: true, gpus: 3},
	{name: "parts of GPUs in a rush", sharing: true, gpus: 4, deeds: []string{everybody},
		pace: 300 * time.Millisecond, strikes: hearsay},
	{name: "parts of GPUs and the agent", sharing: true, gpus: 3, deeds: []string{agentDies, claimOwners, podOwners},
		misfortune: 3 * time.Second},
	{name: "parts of GPUs and reboots", sharing: true, gpus: 3, deeds: []string{reboots, endlessClaims, endlessLimits},
		misfortune: 20 * time.Second},
	{name: "parts of GPUs force-deleted", sharing: true, gpus: 3, deeds: []string{forceDeletes, orphans, orphanClaims},
		pace: 300 * time.Millisecond},
}

// hearsay makes the scheduler decide by what was.
var hearsay = []strike{
	{life: "scheduler", before: "hears of slice/", oneIn: 2, name: "later", late: 5 * time.Second},
	{life: "scheduler", before: "hears of node/", oneIn: 2, name: "later", late: 5 * time.Second},
}

// overtaking changes pods that are about to be evicted.
var overtaking = []strike{{
	life: "controller", before: "evicts ", oneIn: 2, name: "somebody annotates it", harmless: true,
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

// themeOf is what the world of a seed is about.
func themeOf(seed uint64) theme {
	if named := slices.IndexFunc(themes, func(th theme) bool { return th.name == *themeFlag }); named >= 0 {
		return themes[named]
	}
	return themes[seed%uint64(len(themes))]
}

// tally is what worlds have shown so far, by their themes.
type tally []struct {
	steps int
	rows  map[row]int
}

func newTally() tally {
	t := make(tally, len(themes))
	for i := range t {
		t[i].rows = map[row]int{}
	}
	return t
}

func (t tally) add(seed uint64, o outcome) {
	of := &t[seed%uint64(len(themes))]
	of.steps += o.steps
	for r, n := range o.rows {
		of.rows[r] += n
	}
}

func (t tally) total(r row) (n int) {
	for _, of := range t {
		n += of.rows[r]
	}
	return n
}

// met says whether every row was met so many times.
func (t tally) met(least int) bool {
	return !slices.ContainsFunc(allRows, func(r row) bool { return t.total(r) < least })
}

// next is the seed of the world after one. Once each theme has had its turn, four worlds of five are of the theme that has shown
// most of the row that is rarest.
func (t tally) next(seed uint64, worlds int) uint64 {
	seed++
	if worlds < len(themes) || worlds%5 == 0 {
		return seed
	}
	rarest := slices.MinFunc(allRows, func(a, b row) int { return t.total(a) - t.total(b) })
	best, most := 0, 0.0
	for i, of := range t {
		// One more than it was, so that none is given up after a world or two.
		if often := float64(of.rows[rarest]+1) / float64(of.steps); often > most {
			best, most = i, often
		}
	}
	for seed%uint64(len(themes)) != uint64(best) {
		seed++
	}
	return seed
}
