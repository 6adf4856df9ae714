// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/filewatch"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

var (
	stepsFlag   = flag.Int("steps", 60_000, "how many steps to take")
	seedFlag    = flag.Uint64("seed", 1, "seed of the first world; 0 for one from the clock")
	leastFlag   = flag.Int("least", 0, "continue until every row of the table of races was met so many times; fail after four times the steps")
	profileFlag = flag.String("profile", "", "play worlds of this workload profile only")
	traceFlag   = flag.Bool("trace", false, "print every step")
)

// faults are what a self-test switches off.
type faults struct {
	noCrossCheck, noRestore, noPodStates, noRelease, noSum, noCount, noReuse, noCancel, noDaemonCheck, noCleanup, twoClocks, noAdoption bool
	// profile replaces the one of the seed, unless it is nil.
	profile *profile
}

// simulation is one world: a node with its kubelet and agent, and a cluster around it.
type simulation struct {
	*schedule
	faults  faults
	profile profile
	version int
	// noPause is set where the runtime keeps no process of its own in a pod, as CRI-O: between two starts of a container its
	// cgroup is empty.
	noPause   bool
	inventory device.Inventory

	host      *host
	api       *api
	scheduler *scheduler
	cluster   *cluster
	kubelet   *kubelet
	agent     *agent
	// foreign is nil before there are foreign drivers. withoutAgent is set while they are to be alone.
	foreign      *foreign
	withoutAgent bool
	// controller is nil in worlds without one.
	controller *controllerModel
	users      *process

	pending []pendingCall
	crashIn int
	// dieBeforeAnswer is set where the agent dies between the next record and its answer.
	dieBeforeAnswer bool
	crashed         bool
	// ended is set when the pressure has.
	ended    bool
	rejected int
	// bound counts the pods that the scheduler bound, refusals those that failed admission, by the reason.
	bound        int
	refusals     map[string]int
	rebootedPods map[string]bool
	// before is what each claim held when the node rebooted.
	before map[string][]string
	// wanted is the amount of each GPU that a claim requests, by UID. It has only claims that request a part.
	wanted map[string]amount
}

// outcome of a world.
type outcome struct {
	steps int
	hash  uint64
	fault string
	trace string
	rows  map[row]int

	bound    int
	refusals map[string]int
}

// play runs a world until about so many steps have been taken, and ends in quiet.
func play(t *testing.T, seed uint64, steps int, off faults) (o outcome) {
	dir, err := os.MkdirTemp(scratch(), "simulation-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	synctest.Test(t, func(t *testing.T) {
		s := &simulation{schedule: newSchedule(seed), faults: off, rebootedPods: map[string]bool{}, refusals: map[string]int{}, wanted: map[string]amount{}}
		s.profile = profileOf(seed)
		if off.profile != nil {
			s.profile = *off.profile
		}
		versions := s.profile.versions
		if versions == nil {
			versions = []int{34, 36, 37}
		}
		s.version = versions[s.rand.IntN(len(versions))]
		gpus := 2 + s.rand.IntN(3)
		if s.profile.gpus > 0 {
			gpus = s.profile.gpus
		}
		for i := range gpus {
			s.inventory.GPUs = append(s.inventory.GPUs, device.GPU{UUID: gpuUUID(i), Minor: i, Index: i, NUMANode: device.UnknownNUMANode})
		}
		if s.profile.sharing != nil {
			s.shareGPUs()
		}
		if s.host, err = newHost(s.schedule, dir, gpus); err != nil {
			t.Fatal(err)
		}
		if s.profile.mig {
			s.makeDynamic()
		}
		s.noPause = s.chance(4)
		s.slowness = []time.Duration{1, 1, 10, 40}[s.rand.IntN(4)]
		if s.profile.peaceful || s.profile.foreign != nil {
			s.slowness, s.prompt = 1, s.profile.prompt
		}
		s.note(fmt.Sprintf("seed %d: %s, kubelet 1.%d, %d GPUs, %d times as slow as usual", seed, s.profile.name, s.version, gpus, s.slowness))
		s.api = newAPI(s.schedule)
		s.users = newProcess("user")
		s.startScheduler()
		s.startCluster()
		s.startKubelet()
		if s.withoutAgent = s.profile.foreign != nil; s.withoutAgent {
			s.after(s.users, time.Second, "starts foreign drivers", s.startForeign)
		} else {
			s.after(s.users, time.Second, "starts the agent", s.startAgent)
		}
		if s.profile.peaceful || s.profile.mps || s.profile.mig || !s.chance(5) && !(s.profile.foreign != nil && (off.noAdoption || s.chance(2))) {
			s.startController()
		}
		s.pressure(steps)
		s.quiet()
		if s.controller != nil {
			s.kill(s.controller.process)
		}
		for _, name := range sorted(s.host.supervisors) {
			v := s.host.supervisors[name]
			s.kill(v.process)
			if v.holder != nil {
				s.host.check(v.holder.Release())
			}
		}
		if s.foreign != nil {
			s.kill(s.foreign.process)
		}
		for _, l := range []*process{s.users, s.agent.process, s.kubelet.process, s.host.alive, s.scheduler.process, s.cluster.process, s.api.process} {
			s.kill(l)
		}
		_ = s.agent.book.Close()
		if s.installed() {
			s.foreign.end(0)
		}
		time.Sleep(time.Second)
		o = outcome{steps: s.steps, hash: s.hash, fault: s.fault, trace: s.trace(), rows: s.rows, bound: s.bound, refusals: s.refusals}
	})
	return o
}

// scratch is a directory in memory where there is one.
func scratch() string {
	if info, err := os.Stat("/dev/shm"); err == nil && info.IsDir() {
		return "/dev/shm"
	}
	return ""
}

// advance takes one step and what follows from it.
func (s *simulation) advance(limit time.Time) bool {
	if !s.step(limit) {
		return false
	}
	if s.crashed {
		s.crashed = false
		s.killAgent()
	}
	for _, l := range s.agent.loopsOf() {
		l.poll()
	}
	for _, name := range sorted(s.host.supervisors) {
		s.host.supervisors[name].poll()
	}
	if s.steps%64 == 0 {
		s.breakOff()
	}
	return s.fault == ""
}

func (a *agent) loopsOf() []*loop {
	if a == nil {
		return nil
	}
	return a.loops
}

// pressure starts users' actions and faults.
func (s *simulation) pressure(steps int) {
	far := time.Now().Add(1000 * time.Hour)
	s.startActions()
	s.faultsArmed = s.injectBefore
	for s.steps < steps && s.advance(far) {
	}
}

// quiet ends the pressure, and checks what must be true some time later: first that whatever can run does, then that nothing
// is left of pods that are gone.
func (s *simulation) quiet() {
	if s.fault != "" {
		return
	}
	s.kill(s.users)
	s.users = newProcess("user")
	s.slowness, s.dieBeforeAnswer, s.ended = 1, false, true
	for _, model := range s.cluster.owners {
		if model != nil {
			model.finite = false
		}
	}
	s.note("quiet")
	s.host.setUnhealthy(map[string]bool{})
	s.host.mig.failing = 0
	s.removeForeign() // as long as they are there, pods of two owners that share a claim take turns at being evicted
	s.settle()        // what that wakes parks before the next step, in every run
	for _, l := range []*process{s.agentProcess(), s.kubelet.process, s.scheduler.process} {
		l.frozen = time.Time{}
	}
	// An agent that has died is on its way: right after a reboot, one that was started now would be there before kubelet.
	if s.kubelet.process.over {
		s.startKubelet()
	}
	s.onlyAgent()
	if s.agent == nil {
		s.startAgent()
	}
	if s.controller != nil && s.controller.process.over {
		s.startController()
	}
	s.crashIn = 0
	s.idle(slowest) // what is under way arrives
	if s.controller == nil {
		// No component makes kubelet retry: it does so after up to 90 s.
		s.idle(150 * time.Second)
	}
	s.idle(110 * time.Second)
	for end := time.Now().Add(2 * time.Minute); s.fault == "" && s.awaitsPod() && time.Now().Before(end); {
		s.idle(time.Second)
	}
	// A device that has just become free is no failure, nor one that pods take in turn: a pod that needs a GPU by each API takes the only
	// free one by its limit, is evicted because of its claim, and is replaced. The agent keeps the GPU of each for the minute in which a
	// kubelet that was frozen could still start it (docs/design/0002-ledger.md).
	stuck := s.stuck()
	for range 70 {
		s.idle(time.Second)
		if len(stuck) == 0 {
			continue
		}
		now := s.stuck()
		maps.DeleteFunc(stuck, func(uid, _ string) bool { return now[uid] == "" })
	}
	s.describe()
	for _, uid := range sorted(stuck) {
		s.fail("stuck: %s", stuck[uid])
	}
	for name := range s.cluster.owners {
		s.cluster.owners[name] = nil
	}
	for _, p := range all[*pod](s.api.objects) {
		s.cluster.remove(p.uid)
	}
	for _, k := range all[*claim](s.api.objects) {
		s.api.updateClaim(k.name, k.uid, func(c *claim) { c.deleting = true })
	}
	s.cluster.lookSoon()
	s.idle(200 * time.Second)
	s.removeForeign()
	s.idle(200 * time.Second)
	s.checkLeaks()
}

func (s *simulation) agentProcess() *process {
	if s.agent == nil {
		return newProcess("no process")
	}
	return s.agent.process
}

// awaitsPod says whether the agent still looks for the pod of an Allocate that kubelet has forgotten: where another process lists pod
// resources in between, kubelet drops what it is about to record. The agent gives such a hold back by its second check, 30 s after one
// that comes every minute.
func (s *simulation) awaitsPod() bool {
	return s.agent != nil && slices.ContainsFunc(s.agent.book.Holds(), func(h ledger.Hold) bool {
		return h.Holder.Kind == ledger.KindPod && len(h.Pods) == 0 && time.Since(h.Since) < 100*time.Second
	})
}

func (s *simulation) idle(length time.Duration) {
	end := time.Now().Add(length)
	for s.fault == "" && s.advance(end) {
	}
}

// stuck returns the pods that do not run although what they need is free.
func (s *simulation) stuck() map[string]string {
	found := map[string]string{}
	taken, promised := s.takenNow()
	for _, h := range s.agent.book.Holds() {
		k := s.claimOf(h.Holder.ID)
		if k == nil {
			continue
		}
		names := s.namesOf(h.Device)
		parts := s.partsOf(h.Holder.ID, names[:1])
		named := func(allocated string) bool { return slices.Contains(names, allocated) }
		switch {
		case !slices.ContainsFunc(k.devices(), named) && (h.State == ledger.StateDraining || s.waitsForOthers(k) || s.host.foreign[k.uid]):
			// A shared claim that was allocated again keeps what it had while a pod of it lives: it is unknown what that pod was
			// given (docs/design/0002-ledger.md). It also keeps it until it is prepared, which waits for the other claims of its
			// pod. It is counted, and no fault. No Unprepare comes for what a foreign driver has unprepared.
			s.hit(keptByNewAllocation)
			taken.give(h.Holder.ID, parts)
			promised.give(h.Holder.ID, parts)
		case s.controller == nil && h.State == ledger.StateDraining && !h.Share.Whole():
			// The scheduler counts the claim, and the slice subtracts its hold: the agent knows allocations from the controller
			// (docs/design/0013-sharing.md). That is counted, and no fault.
			s.hit(countedTwice)
			promised.give(h.Holder.ID+" once more", parts)
		}
	}
	// A pod that kubelet had admitted before it lost its checkpoint, and then anew, keeps what it had first while it lives.
	for _, h := range s.agent.book.Holds() {
		if h.Holder.Kind == ledger.KindPod && h.State == ledger.StateDraining && s.podLives(h) {
			s.hit(keptByReadmission)
			taken.give(h.Holder.ID, s.allocatedTo([]string{h.Holder.ID}))
			promised.give(h.Holder.ID, s.allocatedTo([]string{h.Holder.ID}))
		}
	}
	for _, p := range all[*pod](s.api.objects) {
		if p.phase == pending && !p.deleting && s.couldRun(p, taken, promised) {
			found[p.uid] = fmt.Sprintf("%s with a limit of %d and claims %v is still pending (bound: %v) beside %v, promised %v",
				p.uid, p.gpus, s.claimsOf(p), p.bound, taken, promised)
		}
	}
	return found
}

// waitsForOthers reports whether a pod that needs other claims as well has yet to start with the claim.
func (s *simulation) waitsForOthers(k *claim) bool {
	return slices.ContainsFunc(all[*pod](s.api.objects), func(p *pod) bool {
		return p.phase == pending && len(p.claims) > 1 && slices.Contains(k.reservedFor, p.uid)
	})
}

// couldRun reports whether a pod has what it needs, or could be given it.
func (s *simulation) couldRun(p *pod, taken, promised having) bool {
	beside, prepared := promised.clone(), taken.clone()
	for _, k := range s.claimsOf(p) {
		switch {
		case k == nil, s.host.mixed[k.uid]:
			return false
		case k.allocation == nil:
			if !s.takeClaim(beside, k) {
				return false
			}
		default:
			parts := s.partsOf(k.uid, k.devices())
			if !prepared.hasRoom(k.uid, parts) {
				return false
			}
			prepared.give(k.uid, parts)
		}
	}
	return !p.limits() || p.bound || s.fitsPods(beside, p.gpus)
}

// claimsOf are the claims of a pod, nil for one that is not there.
func (s *simulation) claimsOf(p *pod) []*claim {
	var claims []*claim
	for _, name := range p.claims {
		k, _ := get[*claim](s.api, claimKey(name))
		claims = append(claims, k)
	}
	return claims
}

// podLives reports whether the pod of a limit runs, or waits for a claim that it cannot get. Without a controller it waits for good: no
// component evicts it.
func (s *simulation) podLives(h ledger.Hold) bool {
	if len(h.Pods) != 1 {
		return false
	}
	p, known := get[*pod](s.api, podKey(h.Pods[0].UID))
	if !known {
		return false
	}
	return p.phase == running && s.host.busy(p.uid) || s.controller == nil && p.phase == pending && p.admitted
}

func (s *simulation) claimOf(uid string) *claim {
	for _, k := range all[*claim](s.api.objects) {
		if k.uid == uid {
			return k
		}
	}
	return nil
}

// describe puts the state of everything into the trace.
func (s *simulation) describe() {
	for _, h := range s.agent.book.Holds() {
		s.note(fmt.Sprintf("    hold: %s %s since %.3fs, pods %v", h.Device, h, h.Since.Sub(epoch).Seconds(), h.Pods))
	}
	for _, lost := range s.agent.book.Conflicts() {
		s.note(fmt.Sprintf("    conflict: %s %s pending eviction %v", lost.UID, lost.Name, lost.PendingEviction))
	}
	for _, uid := range sorted(s.host.pods) {
		s.note(fmt.Sprintf("    runs: %s with %v busy %v", uid, s.host.pods[uid].grants, s.host.pods[uid].busy))
	}
	for _, key := range sorted(s.api.objects) {
		object := s.api.objects[key]
		if p, ok := object.(*corev1.Pod); ok {
			object = fmt.Sprintf("%s, deleted %v", p.UID, p.DeletionTimestamp != nil)
		}
		s.note(fmt.Sprintf("    %s: %+v", key, object))
	}
	for _, uid := range sorted(s.kubelet.workers) {
		if w := s.kubelet.workers[uid]; w.phase != terminated {
			s.note(fmt.Sprintf("    worker: %s phase %d preparing %v", uid, w.phase, w.preparing))
		}
	}
	s.note(fmt.Sprintf("    kubelet: devices %+v, claims %v", s.kubelet.devices.State(), sorted(s.kubelet.claims)))
}

// checkLeaks finds what is left when every pod is gone.
func (s *simulation) checkLeaks() {
	if s.fault != "" {
		return
	}
	s.describe()
	for _, key := range sorted(s.api.objects) {
		if strings.HasPrefix(key, "pod/") || strings.HasPrefix(key, "claim/") {
			s.fail("leaked: %s is still in the API server", key)
		}
	}
	for _, uid := range sorted(s.host.pods) {
		s.fail("leaked: pod %s still has a cgroup", uid)
	}
	for _, h := range s.agent.book.Holds() {
		s.fail("leaked: %s is still held by %s", h.Device, h)
	}
	s.checkPartitionsLeft()
	s.checkOfferLeft()
	s.checkDaemonsLeft()
	if n, ok := get[*nodeObject](s.api, "node/"); !ok || n.allocatable != s.slots() {
		s.fail("leaked: the node has %v of %d GPUs allocatable", n, s.slots())
	}
}

// checkOfferLeft finds what the slices do not offer when every pod is gone.
func (s *simulation) checkOfferLeft() {
	if s.profile.mig {
		s.checkPartitionsOffered()
		return
	}
	var all []string
	for i := range s.host.gpus {
		gpu := fmt.Sprintf("gpu-%d", i)
		all = append(all, part(gpu, s.published(gpu)))
	}
	if sl, ok := get[*slice](s.api, "slice/"); !ok || sl.String() != strings.Join(all, " ") {
		s.fail("leaked: the slice offers %v of %d GPUs", sl, s.host.gpus)
	}
}

func (s *simulation) killAgent() {
	if s.agent == nil || s.agent.process.over {
		return
	}
	a := s.agent
	// Closed first: a dead process writes nothing.
	s.host.check(a.book.Close())
	s.die(a.process, a.stream)
	s.after(s.host.alive, s.between(50*time.Millisecond, 3*time.Second), "starts the agent", func() {
		if s.agent.process.over && !s.withoutAgent {
			s.startAgent()
		}
	})
}

// die ends what kubelet calls.
func (s *simulation) die(l *process, e *stream) {
	s.kill(l)
	s.breakOff()
	if !s.kubelet.process.over {
		s.kubelet.loseDevicePlugin()
		if e != nil {
			s.kubelet.hangUp(e)
		}
	}
}

func (s *simulation) killKubelet() {
	k := s.kubelet
	if k.process.over {
		return
	}
	for _, p := range s.pending {
		if p.kubelet == k.process && !*p.answered && !p.server.over {
			s.hit(kubeletDiesInCall)
			s.after(p.server, s.latency(), "loses the caller of "+p.name, p.hangUp)
		}
	}
	s.kill(k.process)
	if a := s.agent; a != nil && a.stream != nil && !a.process.over {
		e := a.stream
		s.after(a.process, s.latency(), "loses its stream to kubelet", func() { a.streamEnded(e) })
	}
	if s.installed() {
		s.foreign.stream = nil
	}
	s.after(s.host.alive, s.between(100*time.Millisecond, 5*time.Second), "starts kubelet", func() {
		if s.kubelet.process.over {
			s.startKubelet()
		}
	})
}

func (s *simulation) reboot() {
	s.before = map[string][]string{}
	for _, group := range s.host.pods {
		// A pod that was force-deleted may still run with what its claim had before it was allocated anew.
		for _, g := range group.grants {
			if k := s.claimOf(g.owner); group.busy && k != nil && slices.Equal(k.devices(), gpusOf(g.parts)) {
				s.before[g.owner] = gpusOf(g.parts)
			}
		}
	}
	s.killAgent()
	if s.installed() {
		s.foreign.end(0)
	}
	s.killKubelet()
	s.host.reboot()
	s.after(s.host.alive, s.between(time.Second, 5*time.Second), "starts kubelet", func() {
		if s.kubelet.process.over {
			s.startKubelet()
		}
	})
	s.bootAgent(s.between(6*time.Second, 20*time.Second))
}

// bootAgent starts the agent after a reboot. It is a pod: kubelet has heard of all pods with it, and has admitted or failed those
// of before in the time that its container takes to start.
func (s *simulation) bootAgent(delay time.Duration) {
	s.after(s.host.alive, delay, "starts the agent", func() {
		switch {
		case s.installed() || s.agent != nil && !s.agent.process.over:
		case s.kubelet.process.over || !s.kubelet.sourcesReady || s.kubelet.admitting:
			s.bootAgent(time.Second)
		case s.withoutAgent:
			s.startForeign()
		default:
			s.startAgent()
		}
	})
}

// sawPrepare counts what an answer of the driver means.
func (a *agent) sawPrepare(c *claim, err error) {
	switch {
	case err != nil && strings.Contains(err.Error(), "not prepared because claim"):
		a.hit(refusedTogether)
	case err != nil && strings.Contains(err.Error(), "evicting the pod"):
		a.hit(pendingRefused)
	case err != nil && strings.Contains(err.Error(), "limit"):
		a.hit(claimLosesToPod)
	case err == nil && a.before[c.uid] != nil:
		a.hit(rebootReclaims)
		if !slices.Equal(a.before[c.uid], c.devices()) {
			a.fail("claim %s had %v before the reboot and gets %v", c.uid, a.before[c.uid], c.devices())
		}
		delete(a.before, c.uid)
	}
}

// sawAllocate counts what an answer of the device plugin means.
func (k *kubelet) sawAllocate(err error) {
	if err == nil {
		return
	}
	switch text := err.Error(); {
	case strings.Contains(text, "MPS daemon"):
		k.hit(podWithoutDaemon)
	case strings.Contains(text, "a pod (held)"):
		k.hit(forceDeletedUnseen)
	case strings.Contains(text, "held by claim"):
		k.hit(podLosesToClaim)
	case strings.Contains(text, "containers may still run"):
		k.hit(podFindsOrphan)
	}
}

func (c *scheduler) podHolds(devices []string) bool {
	if c.agent == nil || c.agent.process.over {
		return false
	}
	for _, h := range c.agent.book.Holds() {
		if h.Holder.Kind == ledger.KindPod && slices.ContainsFunc(devices, func(d string) bool { return uuidOf(device.GPUName(d)) == h.Device.GPU }) {
			return true
		}
	}
	return false
}

func quietLogs() { klog.SetLogger(klog.Logger{}) }

func TestMain(m *testing.M) {
	quietLogs()
	// A goroutine that waits for inotify would keep the clock of a world from moving.
	filewatch.NewWatcher = func() (*fsnotify.Watcher, error) { return nil, errors.New("there is no inotify in a simulation") }
	debug.SetGCPercent(400) // worlds are small and make much garbage: a quarter faster
	os.Exit(m.Run())
}

// TestSameSeedSameTrace plays some worlds twice.
func TestSameSeedSameTrace(t *testing.T) {
	seeds := []uint64{1, 2, 3, 4, 5, 6}
	for seed := range uint64(len(profiles)) {
		if profiles[seed].mps || profiles[seed].mig || profiles[seed].foreign != nil {
			seeds = append(seeds, seed)
		}
	}
	for _, seed := range seeds {
		first, second := play(t, seed, 2000, faults{}), play(t, seed, 2000, faults{})
		if first.hash != second.hash || first.steps != second.steps {
			t.Errorf("seed %d: %d steps with hash %016x, then %d with %016x", seed, first.steps, first.hash, second.steps, second.hash)
		}
	}
}

const stepsOfAWorld = 4000

// TestSimulation plays worlds until the steps are taken and every row was met. Which rows a world meets is chance: one seed in six
// took a million steps without the rarest.
func TestSimulation(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())%1_000_000*1000 + 1
	}
	if *profileFlag != "" && named(*profileFlag) == nil {
		t.Fatalf("there is no workload profile %q", *profileFlag)
	}
	t.Logf("seed %d", seed)
	seen := newCounts()
	steps, hash, worlds, began := 0, uint64(0), 0, time.Now()
	for world := seed; steps < *stepsFlag || steps < 4**stepsFlag && !seen.met(*leastFlag); world = seen.next(world, worlds) {
		planned := stepsOfAWorld
		if left := *stepsFlag - steps; left > 0 {
			planned = min(planned, left)
		}
		o := play(t, world, planned, faults{})
		steps += o.steps
		worlds++
		hash = (hash ^ o.hash) * 1099511628211
		seen.add(world, o)
		if o.fault != "" {
			t.Fatalf("%s\nworld %d failed at step %d: %s\nreplay: %s", o.trace, world, o.steps, o.fault, replay(world, planned))
		}
	}
	took := time.Since(began)
	for _, r := range allRows {
		fmt.Printf("%-45s %8d\n", r, seen.total(r))
		if n := seen.total(r); n < *leastFlag {
			t.Errorf("row %s was met %d times only", r, n)
		}
	}
	fmt.Printf("simulation: seed=%d steps=%d worlds=%d hash=%016x doubly_owned=0 stuck=0 leaked=0 took=%s (%d steps/s)\n",
		seed, steps, worlds, hash, took.Round(time.Millisecond), int(float64(steps)/took.Seconds()))
}

// replay is the command that plays a world again.
func replay(world uint64, steps int) string {
	if *profileFlag != "" {
		return fmt.Sprintf("go test ./test/simulation -run 'TestSimulation$' -seed %d -steps %d -profile %q", world, steps, *profileFlag)
	}
	return fmt.Sprintf("make simulation SEED=%d STEPS=%d", world, steps)
}

// TestSelfTest switches parts of the product off, one at a time: the oracle must find what comes of each.
func TestSelfTest(t *testing.T) {
	for name, c := range map[string]struct {
		off faults
		// finds are words of which some must be in the fault.
		finds []string
		// passes are words of faults that come of it as well. Another world must have the one that is meant.
		passes []string
	}{
		// The holds of claims name another GPU then (unknownPods), which is handed over and divided in place of the real one.
		"the check of one API against the other":   {faults{noCrossCheck: true}, []string{"has two owners"}, []string{"not handed over", "but there are []"}},
		"the restoring of holds at start":          {faults{noRestore: true}, []string{"has two owners", "uses the whole GPU"}, []string{"not handed over"}},
		"the state of a pod that has ended":        {faults{noPodStates: true}, []string{"has two owners"}, nil},
		"the release of what has ended":            {faults{noRelease: true}, []string{"stuck: ", "leaked: "}, nil},
		"the cancelling of a refused call":         {faults{noCancel: true, profile: named("several claims")}, []string{"after a refused call"}, nil},
		"what uses a GPU as its daemon changes":    {faults{noDaemonCheck: true, profile: named("daemons of a changing policy")}, []string{"daemon"}, []string{"stuck: "}},
		"the end of settings before the hold":      {faults{noCleanup: true, profile: named("daemons and several claims")}, []string{"daemon"}, []string{"stuck: "}},
		"the partition before the hold":            {faults{noCleanup: true, profile: named("partitions by several claims")}, []string{"is not destroyed since"}, []string{"stuck: "}},
		"what is reuse inside a pod":               {faults{noReuse: true, profile: named("several claims")}, []string{"has two owners"}, []string{"is too much for"}},
		"one clock for a pod's end and a hold":     {faults{twoClocks: true, profile: named("late checkpoints")}, []string{"has two owners"}, []string{"leaked: "}},
		"the sum of what is given out of a GPU":    {faults{noSum: true, profile: named("parts of GPUs by several claims")}, []string{"is too much for"}, nil},
		"the adoption of foreign drivers' holders": {faults{noAdoption: true, profile: named("foreign drivers beside the agent")}, []string{"has two owners"}, nil},
		"the number of equal shares given out":     {faults{noCount: true, profile: named("equal shares and the agent")}, []string{"is too much for"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := uint64(1); seed <= 200; seed++ {
				o := play(t, seed, stepsOfAWorld, c.off)
				if o.fault == "" {
					continue
				}
				t.Logf("world %d, step %d: %s", seed, o.steps, o.fault)
				says := func(text string) bool { return strings.Contains(o.fault, text) }
				if slices.ContainsFunc(c.passes, says) {
					continue
				}
				if !slices.ContainsFunc(c.finds, says) {
					t.Errorf("that is none of %q", c.finds)
				}
				return
			}
			t.Error("nothing was found in 200 worlds")
		})
	}
}
