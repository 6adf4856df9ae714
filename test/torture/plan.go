// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// Shape is what a workload is made of.
type Shape string

const (
	// Bare are Replicas pods without an owner.
	Bare Shape = "pod"
	// Deployment has Replicas pods, each with GPUs of its own.
	Deployment Shape = "deployment"
	// Job has Replicas pods one after the other or side by side, each of which ends by itself.
	Job Shape = "job"
	// Shared is one claim and Replicas bare pods on it.
	Shared Shape = "shared"
	// Workflow has Replicas pods of an owner that makes no other pod in the place of one that is gone.
	Workflow Shape = "workflow"
)

// Workload is what one operation creates. Its name says which operation it was.
type Workload struct {
	Name  string
	Shape Shape
	API   oracle.API
	// GPUs is how many each pod asks for; with a Profile, how many partitions of it.
	GPUs     int
	Replicas int
	// Profile is that of the partitions; empty for whole GPUs. Together they have to be of one GPU.
	Profile  string
	Together bool
	// Memory is how many GiB of each GPU a claim requests, and Shares how many of its equal shares; zero for no amount.
	Memory, Shares int
	// Of makes a claim select the GPUs that it would have in this way without an amount; empty for any GPU.
	Of way
	// Renamed asks for replicas that have a resource of their own.
	Renamed bool
	// Linger is how long its containers take to end.
	Linger time.Duration
	// Init gives its pods an init container that sees the same GPUs.
	Init bool
	// Crash makes each container end once, so that kubelet starts it again.
	Crash bool
	// Work is how long a Job's pod runs.
	Work time.Duration
	// Last makes a claim for one GPU prefer those that limits are given first.
	Last bool
	// Late keeps kubelet from preparing its claims until there is a ConfigMap.
	Late bool
	// Budget keeps evictions from ending its last pod that runs.
	Budget bool
}

// String names everything that is not usual.
func (w Workload) String() string {
	text := fmt.Sprintf("%s %s by %s gpus=%d", w.Name, w.Shape, w.API, w.GPUs)
	if w.Profile != "" {
		text += " profile=" + w.Profile
	}
	if w.Memory > 0 {
		text += fmt.Sprintf(" memory=%dGi", w.Memory)
	}
	if w.Shares > 0 {
		text += fmt.Sprintf(" shares=%d", w.Shares)
	}
	if w.Of != "" {
		text += fmt.Sprintf(" of=%s", w.Of)
	}
	if w.Shape != Bare || w.Replicas > 1 {
		text += fmt.Sprintf(" replicas=%d", w.Replicas)
	}
	for _, more := range []struct {
		name string
		is   bool
	}{{"together", w.Together}, {"renamed", w.Renamed}, {"init", w.Init}, {"crash", w.Crash}, {"last", w.Last}, {"budget", w.Budget}} {
		if more.is {
			text += " " + more.name
		}
	}
	if w.Linger > 0 {
		text += fmt.Sprintf(" linger=%s", w.Linger)
	}
	if w.Work > 0 {
		text += fmt.Sprintf(" work=%s", w.Work)
	}
	return text
}

// sharing reports whether only runs with sharing have such a claim.
func (w Workload) sharing() bool { return w.Memory > 0 || w.Shares > 0 || w.Of != "" }

// slices is how much of all GPUs the workload wants at once, in memory slices.
func (w Workload) slices() int {
	one := w.GPUs * slicesAGPU
	if w.Profile != "" {
		one = w.GPUs * profileNamed(w.Profile).size
	}
	switch {
	case w.Shares > 0 || w.Of == equal:
		one = w.GPUs * max(1, w.Shares) * slicesAGPU / 4
	case w.Of == unlimited:
		one = w.GPUs // any number of them fit on the GPU, but the pods take time
	case w.Memory > 0:
		one = w.GPUs * (w.Memory*slicesAGPU + gibAGPU - 1) / gibAGPU
	case w.Renamed:
		one = w.GPUs * slicesAGPU / 4
	}
	if w.Shape == Shared {
		return one
	}
	return one * w.Replicas
}

const (
	slicesAGPU = 8
	gibAGPU    = 80
)

// Kind is what an operation does.
type Kind string

const (
	Create    Kind = "create"
	Burst     Kind = "burst"
	Scale     Kind = "scale"
	Join      Kind = "join"
	DeletePod Kind = "delete-pod"
	Delete    Kind = "delete"
	Kill      Kind = "kill"
	Restart   Kind = "restart"
	Freeze    Kind = "freeze"
	Reboot    Kind = "reboot"
	WipeCDI   Kind = "wipe-cdi"
	Upgrade   Kind = "upgrade"
	Downgrade Kind = "downgrade"
	Away      Kind = "away"
	// HangPod keeps the processes of a pod with GPUs from ending, and deletes the pod.
	HangPod Kind = "hang-pod"
	// ListPods asks kubelet for pod resources all the time, so that it forgets Allocates in flight.
	ListPods Kind = "list-pods"
	// ForeignPlugin serves GPUs by another device plugin, with IDs that Answer is the format of.
	ForeignPlugin Kind = "foreign-plugin"
	// FillDisk fills the file system that Component names.
	FillDisk Kind = "fill-disk"
	// ReadOnly makes a directory of the agent read-only. Component says which.
	ReadOnly Kind = "read-only"
	// LoseGPU makes a GPU fall off the bus.
	LoseGPU Kind = "lose-gpu"
	// TaintGPU taints a GPU by a DeviceTaintRule with the effect that Answer names. MaintainGPU takes one out of service by an entry of maintenance.
	TaintGPU    Kind = "taint-gpu"
	MaintainGPU Kind = "maintain-gpu"
	// DeleteNode deletes the Node, and kubelet makes another one.
	DeleteNode     Kind = "delete-node"
	agentName           = "agent"
	controllerName      = "controller"
	kubeletName         = cluster.Kubelet
)

// Grace of a deletion.
const (
	// PodsOwn leaves it to the pod's specification.
	PodsOwn = -1
	// Forced removes the object at once; kubelet ends the containers afterwards.
	Forced = 0
	short  = 1
	long   = 30
)

// Op is one operation of a plan.
type Op struct {
	// Index counts from 0 over the whole run.
	Index int
	Kind  Kind
	// Workloads are those to create.
	Workloads []Workload
	// Target names the workload to scale, join or delete from.
	Target string
	// Joined is the Shared workload that gets one more pod, number Pick.
	Joined Workload
	// Replicas to scale to.
	Replicas int
	// Pick chooses among the target's pods as they are then.
	Pick int
	// Grace of a deletion in seconds, or PodsOwn.
	Grace int64
	// Component that a fault hits.
	Component string
	// GPU is the minor of that which something happens to. Profile is that of a partition to make, or of those in use; Call is a
	// method that answers Answer, or after Delay. Of a foreign plugin Answer is the format of its device IDs.
	GPU     int
	Profile string
	Call    string
	Answer  string
	Delay   time.Duration
	// Pause is how long a frozen component stays frozen, a killed one down, or another fault lasts.
	Pause time.Duration
	// Dwell is how long the operation stays in flight after its last action. It sets the pace of operations.
	Dwell time.Duration
}

// IsFault tells faults from what users do.
func (o Op) IsFault() bool {
	return slices.Contains([]Kind{
		Kill, Restart, Freeze, Reboot, WipeCDI, Upgrade, Downgrade, Away, HangPod, ListPods, ForeignPlugin, FillDisk, ReadOnly, LoseGPU,
		TaintGPU, MaintainGPU, DeleteNode,
	}, o.Kind) || o.onHardware()
}

// onHardware reports whether it happens to the GPUs.
func (o Op) onHardware() bool {
	return slices.Contains(hardwareKinds, o.Kind)
}

// recovery is how long the effects of a fault last once it is over.
func (o Op) recovery() time.Duration {
	switch {
	case o.Kind == Freeze || o.Kind == WipeCDI:
		return time.Second
	case o.Kind == Kill && o.Component == controllerName || o.Kind == Reboot || o.Kind == DeleteNode:
		// The lease of a controller that was killed, or was on the node that rebooted, has to run out. After DeleteNode all pods of the node
		// have to be known to the new Node's kubelet.
		return 20 * time.Second
	}
	return 5 * time.Second
}

// touches are the workloads that the operation creates or changes: for each, operations come one after the other.
func (o Op) touches() []string {
	var names []string
	for _, w := range o.Workloads {
		names = append(names, w.Name)
	}
	if o.Target != "" {
		names = append(names, o.Target)
	}
	return names
}

// String is the operation's line in a trace.
func (o Op) String() string {
	parts := []string{fmt.Sprintf("%05d %s", o.Index, o.Kind)}
	for _, w := range o.Workloads {
		parts = append(parts, w.String())
	}
	if o.Target != "" {
		parts = append(parts, o.Target)
	}
	switch o.Kind {
	case Scale:
		parts = append(parts, fmt.Sprintf("to %d", o.Replicas))
	case Join, DeletePod, HangPod:
		parts = append(parts, fmt.Sprintf("pod %d", o.Pick))
	}
	if o.Kind == Delete || o.Kind == DeletePod || o.Kind == HangPod {
		parts = append(parts, map[int64]string{PodsOwn: "with its own grace", Forced: "by force"}[o.Grace])
		if o.Grace > 0 {
			parts = append(parts, fmt.Sprintf("within %d s", o.Grace))
		}
	}
	parts = append(parts, o.Component, o.Profile, o.Call, o.Answer)
	if o.Delay > 0 {
		parts = append(parts, "takes "+o.Delay.String())
	}
	if o.Pause > 0 {
		parts = append(parts, "for "+o.Pause.String())
	}
	return strings.Join(slices.DeleteFunc(parts, func(p string) bool { return p == "" }), " ")
}

// Round is what happens between two quiet points. It depends on the seed, its number and the mix only, and begins with an empty
// cluster: so a run can continue from any quiet point.
type Round struct {
	Number int
	// Newer is whether the agent is the one from the future to begin with.
	Newer bool
	Ops   []Op
	// Clean is the grace with which everything is deleted at its end.
	Clean int64
}

// Mix says how often which operation comes.
type Mix struct {
	// FaultEvery and FreezeEvery bound the number of operations between two faults, and between two frozen processes.
	FaultEvery, FreezeEvery [2]int
	// Faults and Frozen say what is struck and what is frozen, by weight.
	Faults, Frozen []Fault
	// Force is the share of deletions by force, Linger that of workloads whose containers take their time to end, in per cent.
	Force, Linger int
	// BurstEvery bounds the number of operations between two bursts, Ambush is the share of them that meets a frozen process, in
	// per cent.
	BurstEvery [2]int
	Ambush     int
	// Demand on eight GPUs that the plan keeps up: more than there is, and some room for what is deleted and made again.
	Demand [2]int
	// MIG is for a machine with partitions. HardwareEvery bounds the number of operations between two that happen to its GPUs.
	MIG           bool
	HardwareEvery [2]int
	// Sharing is for GPUs that several may have at once.
	Sharing bool
	// Workflows makes most bursts by owners that do not replace their pods.
	Workflows bool
	// Dwell is the longest time that an operation stays in flight after its last action.
	Dwell time.Duration
}

// burstWeights are those of burstShapes.
func (m Mix) burstWeights() []int {
	if m.Workflows {
		return []int{1, 0, 4}
	}
	return []int{45, 40, 15}
}

// without is the mix without a kind of fault.
func (m Mix) without(kind Kind) Mix {
	m.Faults = slices.DeleteFunc(slices.Clone(m.Faults), func(f Fault) bool { return f.Kind == kind })
	return m
}

// Fault is one kind of fault with its weight. Upgrade stands for Downgrade too: they take turns.
type Fault struct {
	Kind      Kind
	Component string
	Weight    int
}

// Usual is the mix of a normal run.
func Usual() Mix {
	return Mix{
		FaultEvery: [2]int{15, 35}, FreezeEvery: [2]int{12, 30}, BurstEvery: [2]int{12, 40}, Ambush: 50, Force: 25, Linger: 35,
		Demand: [2]int{4, 11}, Dwell: maxDwell,
		Faults: []Fault{
			{Kill, agentName, 8}, {Kill, controllerName, 6}, {Kill, cluster.Kubelet, 4}, {Kill, cluster.Containerd, 3},
			{Kill, cluster.APIServer, 4}, {Restart, cluster.Kubelet, 3}, {WipeCDI, "", 3}, {Upgrade, agentName, 5}, {Reboot, "", 1},
			{Away, cluster.APIServer, 2}, {HangPod, "process", 6}, {ListPods, "pod-resources", 4}, {ForeignPlugin, "device-plugin", 3},
			{FillDisk, runDir, 2}, {ReadOnly, cdiDir, 2}, {ReadOnly, recordsOfAgent, 2}, {LoseGPU, "", 4},
			{TaintGPU, noExecute, 12}, {TaintGPU, noSchedule, 3}, {MaintainGPU, "", 3}, {DeleteNode, cluster.Kubelet, 2},
		},
		Frozen: []Fault{
			{Freeze, agentName, 5}, {Freeze, controllerName, 4}, {Freeze, cluster.Kubelet, 3}, {Freeze, cluster.Scheduler, 2},
			{Freeze, cluster.APIServer, 3},
		},
	}
}

// Effects of a DeviceTaintRule.
const (
	noSchedule = "NoSchedule"
	noExecute  = "NoExecute"
)

// Pause bounds.
const (
	minFreeze, maxFreeze = 50 * time.Millisecond, 8 * time.Second
	maxDown              = 4 * time.Second
	maxDwell             = 4800 * time.Millisecond
	// minAway is longer than a starting agent waits for the API server (pkg/agent).
	minAway, maxAway = 5 * time.Second, 12 * time.Second
	// minFault and maxFault are for what a node suffers: long enough that pods meet it, short enough that few of them do.
	minFault, maxFault = 2 * time.Second, 10 * time.Second
	// maxLost is longer than a claim is retried before its pod is evicted (pkg/driver, unusableGrace), and kubelet's next call.
	maxLost = 25 * time.Second
)

// PlanRound draws a round: size operations from index number*size on.
func PlanRound(seed uint64, number, size int, mix Mix) Round {
	p := planner{rng: rand.New(rand.NewPCG(seed, uint64(number))), mix: mix}
	p.newer = p.chance(50)
	p.fault, p.freeze, p.burst = p.first(5, mix.FaultEvery), p.first(3, mix.FreezeEvery), p.first(1, mix.BurstEvery)
	if mix.MIG {
		p.hardware = p.among(mix.HardwareEvery)
	}
	round := Round{Number: number, Newer: p.newer, Clean: []int64{PodsOwn, short, Forced}[p.rng.IntN(3)]}
	for i := range size {
		op := p.next(fmt.Sprintf("w%05d", number*size+i))
		op.Index = number*size + i
		op.Dwell = p.upTo(mix.Dwell)
		round.Ops = append(round.Ops, op)
	}
	return round
}

// early is how many operations a slow machine plays within the shortest budget.
const early = 50

// DrawSeed draws seeds until one's plan has early what the result of a run requires, in runs and rounds of at least as many
// operations. Of 300 plans 25 have no burst by then, and 26 kill only processes that may not run at that moment.
func DrawSeed(draw func() uint64, mix Mix) uint64 {
	for {
		if seed := draw(); PlanRound(seed, 0, early, mix).proves() {
			return seed
		}
	}
}

// proves reports whether a round tests enough. Claims and limits race for all GPUs. A component is killed that always runs; a pod may not.
func (r Round) proves() bool {
	return slices.ContainsFunc(r.Ops, func(o Op) bool { return o.Kind == Burst }) &&
		slices.ContainsFunc(r.Ops, func(o Op) bool {
			return o.Kind == Kill && o.Component != agentName && o.Component != controllerName
		})
}

// planner knows what would exist if each operation were done at once; what exists by then is for the run to see.
type planner struct {
	rng *rand.Rand
	mix Mix
	// there are the workloads in the order of their creation.
	there []Workload
	// fault, freeze, burst and hardware count down to the next.
	fault, freeze, burst, hardware int
	// newer is which agent there is.
	newer bool
}

func (p *planner) next(name string) Op {
	p.fault--
	p.freeze--
	p.burst--
	p.hardware--
	switch {
	case p.fault <= 0:
		p.fault = p.among(p.mix.FaultEvery)
		return p.inject(p.mix.Faults)
	case p.freeze <= 0 || p.burst == 0 && p.chance(p.mix.Ambush):
		p.freeze = p.among(p.mix.FreezeEvery)
		return p.inject(p.mix.Frozen)
	case p.mix.MIG && p.hardware <= 0:
		p.hardware = p.among(p.mix.HardwareEvery)
		return p.onHardware()
	case p.burst < 0 && p.demand() <= burstDemand:
		p.burst = p.among(p.mix.BurstEvery)
		if p.mix.MIG && p.chance(60) {
			return p.burstOfPartitions(name)
		}
		if p.mix.Sharing && p.chance(60) {
			return p.burstOfShares(name)
		}
		return p.burstOf(name)
	}
	more := 50
	switch demand := p.demand(); {
	case p.burst <= 0:
		// Room for it.
		more = 10
	case demand < p.mix.Demand[0]:
		more = 85
	case demand > p.mix.Demand[1]:
		more = 15
	}
	if len(p.there) == 0 || p.chance(more) {
		return p.create(name)
	}
	return p.change()
}

// burstDemand leaves GPUs for a burst to race for.
const burstDemand = 5

// demand is in GPUs.
func (p *planner) demand() int {
	total := 0
	for _, w := range p.there {
		total += w.slices()
	}
	return total / slicesAGPU
}

func (p *planner) create(name string) Op {
	if p.mix.MIG && p.chance(65) {
		return p.createPartitions(name)
	}
	if p.mix.Sharing && p.chance(65) {
		return p.createShares(name)
	}
	w := Workload{Name: name, API: p.api(), GPUs: p.weighted(60, 25, 8, 7) + 1, Replicas: 1}
	switch p.weighted(40, 30, 12, 13, 8) {
	case 0:
		w.Shape = Bare
	case 4:
		w.Shape, w.Replicas = Workflow, p.between(1, 3)
	case 1:
		w.Shape, w.GPUs, w.Replicas = Deployment, min(w.GPUs, 2), p.between(1, 4)
	case 2:
		w.Shape, w.GPUs, w.Replicas, w.Work = Job, min(w.GPUs, 2), p.between(1, 3), time.Duration(p.between(1, 8))*time.Second
	case 3:
		w.Shape, w.API, w.GPUs, w.Replicas = Shared, oracle.Claim, min(w.GPUs, 2), p.between(2, 4)
	}
	w.Last = w.Shape != Shared && w.API == oracle.Claim && w.GPUs == 1 && p.chance(25)
	return p.add(Create, p.decorate(w))
}

// decorate adds what makes a pod's life longer.
func (p *planner) decorate(w Workload) Workload {
	if p.chance(p.mix.Linger) {
		w.Linger = time.Duration(p.between(2, 9)) * time.Second
	}
	w.Init, w.Crash, w.Budget = p.chance(20), w.Shape != Job && p.chance(10), p.chance(15)
	return w
}

// burstShapes are those of bursts.
var burstShapes = []Shape{Deployment, Bare, Workflow}

// burstOf asks for all GPUs by both APIs at once: by eight bare pods each, by eight of a workflow, or by eight replicas each.
func (p *planner) burstOf(name string) Op {
	shape := burstShapes[p.weighted(p.mix.burstWeights()...)]
	var both []Workload
	for _, api := range []oracle.API{oracle.Claim, oracle.Limits} {
		w := p.decorate(Workload{Name: fmt.Sprintf("%s-%s", name, api), Shape: shape, API: api, GPUs: 1, Replicas: 8})
		w.Crash = false
		both = append(both, w)
	}
	if p.chance(50) {
		slices.Reverse(both)
	}
	return p.add(Burst, both...)
}

func (p *planner) add(kind Kind, workloads ...Workload) Op {
	for i := range workloads {
		if w := &workloads[i]; p.mix.Sharing && w.API == oracle.Claim && !w.sharing() && !w.Last {
			// Otherwise the scheduler would give all such claims the one GPU that any number of claims may have.
			w.Of = alone
		}
	}
	p.there = append(p.there, workloads...)
	return Op{Kind: kind, Workloads: workloads}
}

// change does something to a workload that is there.
func (p *planner) change() Op {
	at := p.rng.IntN(len(p.there))
	w := &p.there[at]
	grace := p.grace()
	switch {
	case w.Shape == Deployment && p.chance(45):
		w.Replicas = p.between(0, 4)
		return Op{Kind: Scale, Target: w.Name, Replicas: w.Replicas}
	case w.Shape == Shared && w.Replicas < 6 && p.chance(40):
		w.Replicas++
		return Op{Kind: Join, Target: w.Name, Joined: *w, Pick: w.Replicas - 1}
	case (w.Shape != Bare || w.Replicas > 1) && p.chance(50):
		// A Deployment or Job replaces it; of a shared claim's pods there is one less.
		return Op{Kind: DeletePod, Target: w.Name, Pick: p.rng.IntN(8), Grace: grace}
	}
	op := Op{Kind: Delete, Target: w.Name, Grace: grace}
	p.there = slices.Delete(p.there, at, at+1)
	return op
}

func (p *planner) grace() int64 {
	if p.chance(p.mix.Force) {
		return Forced
	}
	return []int64{PodsOwn, PodsOwn, short, long}[p.rng.IntN(4)]
}

func (p *planner) inject(among []Fault) Op {
	weights := make([]int, len(among))
	for i, f := range among {
		weights[i] = f.Weight
	}
	f := among[p.weighted(weights...)]
	op := Op{Kind: f.Kind, Component: f.Component}
	switch f.Kind {
	case Freeze:
		op.Pause = minFreeze + p.upTo(maxFreeze-minFreeze)
	case Kill, Reboot, DeleteNode:
		op.Pause = p.upTo(maxDown)
	case Away:
		op.Pause = minAway + p.upTo(maxAway-minAway)
	case HangPod:
		op.Pause, op.Pick, op.Grace = minFault+p.upTo(maxFault-minFault), p.rng.IntN(8), []int64{Forced, Forced, short, PodsOwn}[p.rng.IntN(4)]
	case ListPods, FillDisk:
		op.Pause = minFault + p.upTo(maxFault-minFault)
	case ReadOnly:
		// Only pods that come after the grace count.
		op.Pause = unusableGrace + minFault + p.upTo(maxFault-minFault)
	case ForeignPlugin:
		op.Pause, op.Answer = minAway+p.upTo(maxAway-minAway), foreignIDs[p.weighted(3, 2)]
	case LoseGPU:
		op.GPU, op.Pause = p.rng.IntN(gpusANode), minFault+p.upTo(maxLost-minFault)
		op.Component = gpuComponent(op.GPU)
	case TaintGPU, MaintainGPU:
		op.GPU, op.Pause, op.Answer = p.rng.IntN(gpusANode), minFault+p.upTo(maxLost-minFault), f.Component
		op.Component = gpuComponent(op.GPU)
	case Upgrade:
		if p.newer {
			op.Kind = Downgrade
		}
		p.newer = !p.newer
	}
	return op
}

func (p *planner) api() oracle.API {
	// Shared workloads are by claims always.
	if p.chance(40) {
		return oracle.Claim
	}
	return oracle.Limits
}

// weighted answers an index with a chance by its weight.
func (p *planner) weighted(weights ...int) int {
	total := 0
	for _, w := range weights {
		total += w
	}
	at := p.rng.IntN(total)
	for i, w := range weights {
		if at -= w; at < 0 {
			return i
		}
	}
	return len(weights) - 1
}

func (p *planner) chance(percent int) bool   { return p.rng.IntN(100) < percent }
func (p *planner) between(low, high int) int { return low + p.rng.IntN(high-low+1) }

// first chooses when a recurring fault comes for the first time: not before low, or every[1] if that is less, and not after every[1].
func (p *planner) first(low int, every [2]int) int { return p.between(min(low, every[1]), every[1]) }
func (p *planner) among(bounds [2]int) int         { return p.between(bounds[0], bounds[1]) }
func (p *planner) upTo(d time.Duration) time.Duration {
	return time.Duration(p.rng.Int64N(int64(d/time.Millisecond))) * time.Millisecond
}
