// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	goruntime "runtime"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/legacy"
	"github.com/tandem-gpu/tandem/pkg/partition"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/pkg/reconcile"
	"github.com/tandem-gpu/tandem/pkg/sharing"
	"github.com/tandem-gpu/tandem/pkg/wiring"
)

// agent is one life of the product's node agent: its parts are real, its loops and its transport are the simulation's.
type agent struct {
	*simulation
	process    *process
	parts      *wiring.Parts
	book       *ledger.Ledger
	pods       *podstate.Pods
	reconciler *reconcile.Reconciler
	driver     *driver.Driver
	limits     *legacy.Plugin
	offer      driver.Offer
	shared     *sharing.Manager
	policy     *sharing.Policy
	// trouble is what the agent has heard of daemons whose pods do not run.
	trouble []v1alpha1.WaitingDaemon

	// adopting is set while a call adopts or restores, begun once adoption has begun, serving once claims are served.
	restored, synced, begun, adopting, serving, registering bool
	stream                                                  *stream
	list                                                    *pluginapi.ListAndWatchResponse
	// acknowledged is what kubelet called allocatable when it was last asked; nil for unknown.
	acknowledged []string
	confirming   bool
	reporting    bool
	spec         []v1alpha1.AllocatedClaim
	specChanged  chan struct{}
	reported     v1alpha1.GPUNodeStatus
	pace         gpunode.Pace
	published    *slice
	loops        []*loop
}

// startAgent follows pkg/agent: the lock, what is known from before, the pods, and only then the two APIs.
func (s *simulation) startAgent() {
	a := &agent{simulation: s, process: newProcess("agent"), specChanged: make(chan struct{}), pace: gpunode.Pace{Interval: time.Second}}
	s.agent = a
	if err := a.open(); err != nil {
		s.fail("the agent does not start: %v", err)
		return
	}
	if len(a.book.Holds()) > 0 {
		s.hit(agentRestarts)
	}
	s.host.sawIncomplete()
	for _, daemon := range s.host.daemonsOnGPUs() {
		if len(s.host.clients(daemon)) > 0 {
			s.hit(daemonOutlivesAgent)
		}
	}
	s.api.watch(a.process, "pod/", a.podChanged, func() {
		if !a.synced {
			a.synced = true
			a.pods.Listed(time.Now())
			a.begin()
		}
	})
	s.after(a.process, 0, "restores holds", func() { s.spawn(a.process, "restore", a.restore) })
}

func (a *agent) restore(c *call) {
	if !a.faults.noRestore {
		if err := a.reconciler.Restore(c.context(a.process.ctx)); err != nil {
			a.fail("restore: %v", err)
		}
	}
	c.park("has restored")
	a.restored = true
	if a.profile.mps {
		a.run("restores settings", a.shared.Run)
		a.run("policy", a.policy.Run)
	}
	a.begin()
}

func (a *agent) life() *process { return a.process }

// run runs one of the agent's loops as it is.
func (a *agent) run(name string, loop func(context.Context) error) {
	a.after(a.process, 0, "runs "+name, func() {
		a.spawn(a.process, name, func(c *call) {
			if err := loop(c.context(a.process.ctx)); err != nil {
				a.fail("%s: %v", name, err)
			}
		})
	})
}

// open makes the agent's components with the wiring that the agent has.
func (a *agent) open() (err error) {
	if a.faults.noRestore {
		a.host.check(os.RemoveAll(a.host.run()))
	}
	c := config.Defaults()
	c.NodeName, c.DriverName, c.ResourceName = nodeName, driverName, resourceName
	c.KubeletDir, c.RunDir, c.CgroupRoot = a.host.kubeletDir(), a.host.run(), a.host.cgroups()
	if a.parts, err = wiring.New(wiring.Options{
		Config: c, BootID: a.host.bootID(), Hardware: hardware{host: a.host, world: a.simulation}, Client: noClient{},
		Recorder: &record.FakeRecorder{}, Registerer: prometheus.NewRegistry(), GPUs: &asGiven, Hooks: a.hooks(),
	}); err != nil {
		return err
	}
	a.pods = a.parts.Pods
	a.pods.Stamp = a.host.stamp
	problems, err := a.parts.Open(a.process.ctx)
	if err = errors.Join(append(problems, err)...); err != nil {
		return err
	}
	a.parts.Connect(c)
	apis, err := a.parts.NewAPIs(wiring.Serving{Config: c, Registerer: prometheus.NewRegistry()})
	a.book, a.shared, a.policy, a.reconciler = a.parts.Ledger, a.parts.Sharing, a.parts.Policy, a.parts.Reconciler
	a.driver, a.limits = apis.Claims, apis.Limits
	if err == nil {
		a.offer = a.driver.NewOffer()
	}
	return err
}

// asGiven leaves each GPU as the world has it.
var asGiven = partition.Policy{
	Dynamic: func(gpu device.GPU) bool { return gpu.Dynamic },
	Sharing: func(gpu device.GPU) device.Sharing { return gpu.Sharing },
}

// hooks let other events happen between components, and take one away where the world has that fault.
func (a *agent) hooks() wiring.Hooks {
	return wiring.Hooks{
		Now: a.host.stamp, Step: func(string) { a.diskStep() }, Turn: turn,
		PodStates: func(pods *podstate.Pods) ledger.PodStates { return parkedState{pods, pods, a.simulation} },
		Ledger:    func(book *ledger.Ledger) wiring.Ledger { return parkedLedger{book, a.simulation} },
		Pods:      func(pods *podstate.Pods) driver.Pods { return parkedPods{pods} },
		Sharing:   func(shared *sharing.Manager) driver.Sharing { return parkedSettings{shared} },
		Policy:    func(policy *sharing.Policy) driver.Policy { return parkedPolicy{policy, a.simulation} },
		Holders: func(book *ledger.Ledger) sharing.Ledger {
			if a.faults.noDaemonCheck {
				return noHolds{book}
			}
			return book
		},
		CleanupPending: func(pending func(ledger.Hold) bool) func(ledger.Hold) bool {
			if a.faults.noCleanup {
				return nil
			}
			return pending
		},
		Specs: cdiSpecs{a.host.devices, a}, Kubelet: a, Claims: func(string) reconcile.Claims { return a },
		Allocations: allocations{a}, DaemonTrouble: a.daemonTrouble,
	}
}

// parkedSettings and parkedPolicy let something else happen after a wait for a daemon.
type parkedSettings struct{ *sharing.Manager }

func (p parkedSettings) Apply(ctx context.Context, g sharing.Group, reserved func() error) ([]string, error) {
	devices, err := p.Manager.Apply(ctx, g, reserved)
	turn(ctx, "has applied settings for "+g.Claim.Name)
	return devices, err
}

type parkedPolicy struct {
	*sharing.Policy
	s *simulation
}

func (p parkedPolicy) Join(ctx context.Context, claim sharing.Claim, d device.Device, share device.Share) ([]string, error) {
	began := time.Now()
	devices, err := p.Policy.Join(ctx, claim, d, share)
	turn(ctx, "has waited for the daemon of "+d.Name()+" for "+claim.Name)
	switch {
	case err != nil:
		p.s.hit(daemonNotReady)
	case len(devices) > 0 && time.Since(began) > 0:
		p.s.hit(daemonAwaited)
	}
	return devices, err
}

// noHolds hides the holders of GPUs from the sharing policy.
type noHolds struct{ *ledger.Ledger }

func (noHolds) Holds() []ledger.Hold { return nil }

// daemonTrouble is why the pod of a daemon does not run.
func (a *agent) daemonTrouble(daemon string) string {
	for _, waiting := range a.trouble {
		if waiting.Name == daemon {
			return waiting.Message
		}
	}
	return ""
}

// diskStep is where a process may die in the middle of a record.
func (a *agent) diskStep() {
	if a.current.Load() == nil || a.crashIn == 0 {
		return
	}
	if a.crashIn--; a.crashIn == 0 {
		a.crashed = true
		a.hit(agentDiesOnDisk)
		goruntime.Goexit()
	}
}

// serve starts all that serves but the sessions with kubelet.
func (a *agent) serve() {
	a.run("watches health", a.parts.Health.Run)
	a.loop("lists devices for limits", 0, func() []<-chan struct{} {
		_, lacking := a.book.Outstanding()
		return []<-chan struct{}{a.book.Changed(), a.specChanged, lacking, a.policy.Changed(), a.parts.Views.Offered.Changed()}
	}, func(c *call) time.Duration {
		return a.look()
	})
	a.loop("reports", 50*time.Millisecond, func() []<-chan struct{} {
		return []<-chan struct{}{a.book.Changed(), a.specChanged, a.shared.Changed(), a.parts.Views.Offered.Changed()}
	}, func(c *call) time.Duration {
		return a.report()
	})
	a.api.watch(a.process, "gpunode/", func(_ string, _, after any) {
		object, ok := after.(*gpuNode)
		if ok && !reflect.DeepEqual(object.spec, a.spec) {
			a.spec = object.spec
			a.specHasChanged()
		}
		if ok {
			a.trouble = object.trouble
		}
	}, func() {
		if _, ok := get[*gpuNode](a.api, "gpunode/"); !ok {
			a.api.request(a.process, "makes its GPUNode", func() {
				if _, ok := get[*gpuNode](a.api, "gpunode/"); !ok {
					a.api.put("gpunode/", &gpuNode{})
				}
			})
		}
	})
	a.look()
}

const never = time.Duration(1<<63 - 1)

// sawCheckpoint counts looks at a checkpoint that names the pod before.
func (a *agent) sawCheckpoint() {
	for _, h := range a.book.Holds() {
		if h.Holder.Kind != ledger.KindPod || h.State != ledger.StateHeld || !a.host.stamped.Before(h.Since) {
			continue
		}
		if slices.Contains(a.host.named, h.Holder.ID) {
			a.hit(checkpointIsOld)
		}
	}
}

// look sends the device list where it has changed.
func (a *agent) look() time.Duration {
	lists, again := a.limits.Refresh(time.Now())
	list := lists[resourceName]
	a.checkList(list)
	if list != a.list {
		for _, h := range a.book.Holds() {
			if a.list == nil && h.Holder.Kind == ledger.KindClaim && h.State == ledger.StateRestored {
				a.hit(restoredBlocksPod)
			}
		}
		a.list = list
		if a.stream != nil {
			a.stream.lists = append(a.stream.lists, list)
			a.kubelet.deliver(a.stream)
			a.confirm(20 * time.Millisecond)
		}
	}
	if again == 0 {
		return never
	}
	return again
}

// kept are the fields of slices that an API server of that version keeps by default, without those that concern strict.
func kept(version int) driver.Capabilities {
	return driver.Capabilities{Taints: version >= 36, Counters: version >= 36, Shares: version >= firstShares}
}

// publish writes the slice where it has changed.
func (a *agent) publish() time.Duration {
	now := time.Now()
	pools, next := a.offer.Pools(a.driver.Facts(kept(a.version), now))
	if len(pools) != 1+len(a.host.mig.dynamic) || len(pools[nodeName].Slices) != 1 {
		a.fail("the pools are not those of the dynamic GPUs and one slice for all others: %v", pools)
		return never
	}
	wanted := resourceSlices(pools)
	a.checkOffer(wanted.devices())
	if !a.published.same(wanted) {
		a.published = wanted
		a.writeSlice()
	}
	if next.IsZero() {
		return never
	}
	return next.Sub(now)
}

func (a *agent) writeSlice() {
	a.api.request(a.process, "writes its slice", func() {
		if old, _ := get[*slice](a.api, "slice/"); !old.same(a.published) {
			a.api.put("slice/", a.published)
		}
	})
}

// refresh publishes again: kubelet has registered the driver, and had wiped the slices, or they have just been listed.
func (a *agent) refresh() {
	if a.published != nil {
		a.writeSlice()
	}
}

func (a *agent) specHasChanged() {
	close(a.specChanged)
	a.specChanged = make(chan struct{})
}

// Claims and Synced: a loop of the simulation publishes.
func (a *agent) Claims() []v1alpha1.AllocatedClaim { return a.spec }
func (a *agent) Synced() bool                      { return true }

// Maintenance is empty: no administrator takes a GPU out of service.
func (a *agent) Maintenance() map[string]bool { return nil }

// OutOfService is empty for the same reason.
func (a *agent) OutOfService() func(device.Device) string {
	return func(device.Device) string { return "" }
}

// Allocated are the devices that the scheduler has given to claims, as far as the agent has heard.
func (a *agent) Allocated() []ledger.Hold {
	var holds []ledger.Hold
	for _, claim := range a.spec {
		for _, name := range claim.Devices {
			if found, ok := a.inventory.ByName(name); ok {
				h := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: string(claim.UID)}, Device: found.Ref()}
				if share, shared := claim.ShareOf(name); shared {
					h.Share = found.Share(device.Consumed{Memory: share.Memory, Shares: share.Shares})
				}
				holds = append(holds, h)
			}
		}
	}
	return holds
}

// report writes the status of the GPUNode, at the product's pace and only what is new.
func (a *agent) report() time.Duration {
	facts := gpunode.Facts{Mode: "Dual", Limits: limits, Inventory: a.parts.Views.Offered.Inventory(), Holds: a.book.Holds(), Conflicts: a.book.Conflicts()}
	facts.Daemons, facts.UnknownDaemons = a.shared.Daemons(), a.shared.UnknownDaemons()
	if a.acknowledged != nil {
		facts.Allocatable = map[string][]string{resourceName: a.acknowledged}
	}
	status := gpunode.Status(facts)
	expire := never
	for _, l := range a.book.Conflicts() {
		if until := l.Until(); !until.IsZero() {
			expire = min(expire, max(time.Until(until), time.Millisecond))
		}
	}
	if a.reporting || reflect.DeepEqual(status, a.reported) {
		return expire
	}
	if wait := time.Until(a.pace.Due(gpunode.Urgent(a.reported, status))); wait > 0 {
		return wait
	}
	a.pace.Took(time.Now())
	a.reported, a.reporting = status, true
	a.api.request(a.process, "reports in its GPUNode", func() {
		a.reporting = false
		a.specHasChanged()
		if now, ok := get[*gpuNode](a.api, "gpunode/"); ok {
			a.api.put("gpunode/", &gpuNode{spec: now.spec, trouble: now.trouble, status: status})
		} else {
			a.reported = v1alpha1.GPUNodeStatus{}
		}
	})
	return expire
}

// confirm asks kubelet what it calls allocatable until that is what was sent.
func (a *agent) confirm(delay time.Duration) {
	if a.confirming {
		return
	}
	a.confirming = true
	a.after(a.process, delay, "asks what is allocatable", func() {
		a.confirming = false
		if a.stream == nil {
			return
		}
		if a.kubelet.process.over {
			a.confirm(time.Second)
			return
		}
		now := append([]string{}, a.kubelet.devices.Healthy(resourceName)...)
		if a.acknowledged == nil || !slices.Equal(now, a.acknowledged) {
			a.acknowledged = now
			a.specHasChanged()
		}
		var healthy []string
		for _, d := range a.list.Devices {
			if d.Health == pluginapi.Healthy {
				healthy = append(healthy, d.ID)
			}
		}
		slices.Sort(healthy)
		if !slices.Equal(now, healthy) {
			a.confirm(min(max(2*delay, 20*time.Millisecond), time.Second))
		}
	})
}

// register serves limits under a fresh name, as soon as there is a kubelet.
func (a *agent) register(delay time.Duration) {
	a.registering = true
	a.after(a.process, delay+a.latency(), "registers for limits", func() {
		if a.kubelet.process.over || !a.registering {
			return // the next kubelet makes its socket anew, or it is registered already
		}
		a.registering = false
		e := &stream{server: a, lists: []*pluginapi.ListAndWatchResponse{a.list}}
		a.stream = e
		a.kubelet.register(e)
		a.confirm(20 * time.Millisecond)
	})
}

// streamEnded is what the agent notices of a stream that kubelet dropped.
func (a *agent) streamEnded(e *stream) {
	if !e.ended && a.stream == e {
		e.ended = true
		a.stream, a.acknowledged = nil, nil
		a.specHasChanged()
		a.register(100 * time.Millisecond)
	}
}

func (a *agent) podChanged(_ string, before, after any) {
	old, _ := before.(*pod)
	now, _ := after.(*pod)
	a.pods.Observe(podObject(old), podObject(now))
}

// loop is one of the agent's loops: it runs when one of its channels is closed, or when the time that it named has come.
type loop struct {
	*agent
	name            string
	gather          time.Duration
	channels        func() []<-chan struct{}
	body            func(*call) time.Duration
	waiting         []<-chan struct{}
	busy, scheduled bool
	turns           int
}

func (a *agent) loop(name string, gather time.Duration, channels func() []<-chan struct{}, body func(*call) time.Duration) {
	l := &loop{agent: a, name: name, gather: gather, channels: channels, body: body}
	a.loops = append(a.loops, l)
	l.soon(0)
}

func (l *loop) soon(delay time.Duration) {
	l.scheduled = true
	l.turns++
	l.after(l.process, delay, l.name, func() {
		l.scheduled, l.busy = false, true
		l.waiting = l.channels()
		l.spawn(l.process, l.name, func(c *call) {
			wait := l.body(c)
			l.busy = false
			if wait == never {
				return
			}
			turns := l.turns
			l.after(l.process, max(wait, 0), l.name+" (timer)", func() {
				if l.turns == turns && !l.busy && !l.scheduled {
					l.soon(0)
				}
			})
		})
	})
}

// poll is called after each step.
func (l *loop) poll() {
	if l.busy || l.scheduled || l.process.over {
		return
	}
	for _, c := range l.waiting {
		select {
		case <-c:
			delay := l.gather
			if l.chance(3) {
				delay += l.quickly()
			}
			l.soon(delay)
			return
		default:
		}
	}
}

// What the product asks the agent for.

// cdiSpecs are the CDI specs. GPUs do not wait for their entries. Client devices are files of the host.
type cdiSpecs struct {
	*clientDevices
	a *agent
}

func (cdiSpecs) Add(context.Context, device.Partition) error { return nil }
func (cdiSpecs) Has(string) bool                             { return true }
func (cdiSpecs) Problem(string) error                        { return nil }
func (cdiSpecs) Unwritable() error                           { return nil }
func (cdiSpecs) Changed() <-chan struct{}                    { return nil }
func (cdiSpecs) Verify()                                     {}
func (cdiSpecs) AddPlaceholders([]string)                    {}
func (cdiSpecs) QualifiedName(uuid string) string            { return "k8s.gpu.nvidia.com/gpu=" + uuid }
func (cdiSpecs) Ensure(ctx context.Context, _ ...string) error {
	turn(ctx, "looks for CDI specs")
	return nil
}

// Allocatable is kubelet's. A loop of the simulation asks for it, too (confirm).
func (a *agent) Allocatable(context.Context) (map[string][]string, error) {
	if a.kubelet.process.over {
		return nil, errAway
	}
	return map[string][]string{resourceName: a.kubelet.devices.Healthy(resourceName)}, nil
}

// List is kubelet's.
func (a *agent) List(ctx context.Context, _ func(string) bool, _ string) ([]podstate.UsedDevice, []podstate.KubeletClaim, error) {
	turn(ctx, "asks for pod resources")
	return a.kubelet.list()
}

// Get is the API server's.
func (a *agent) Get(ctx context.Context, name string, _ metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	turn(ctx, "gets a claim")
	if a.api.down {
		return nil, errAway
	}
	c, ok := get[*claim](a.api, claimKey(name))
	if !ok {
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "resourceclaims"}, name)
	}
	return resourceClaim(c), nil
}

// allocations are what the agent has heard of the GPUNode's spec.
type allocations struct{ *agent }

func (a allocations) Changed() <-chan struct{} { return a.specChanged }

// noClient is the API server of what has no model.
type noClient struct{ kubernetes.Interface }

// parkedState lets other events happen before a pod state is returned.
type parkedState struct {
	ledger.PodStates
	pods *podstate.Pods
	s    *simulation
}

func (e parkedState) PodState(h ledger.Hold) ledger.PodState {
	e.s.pause("asks for the pod state of " + h.Holder.ID)
	if e.s.faults.noPodStates {
		return ledger.Gone
	}
	return e.PodStates.PodState(h)
}

func (e parkedState) Started(h ledger.Hold, all []ledger.Hold) bool {
	return !e.s.faults.noPodStates && e.PodStates.Started(h, all)
}

// Reuses waits as the product does, in the simulation's time.
func (e parkedState) Reuses(h ledger.Hold) bool {
	for began := time.Now(); !e.s.faults.noPodStates && !e.s.faults.noReuse; {
		reuses, decided := e.pods.ReusesNow(h)
		c := e.s.current.Load()
		if waited := time.Since(began) >= time.Second; c == nil || decided && podstate.Unsettled(h) == 0 || !decided && waited {
			return reuses
		}
		c.sleep(50*time.Millisecond, "waits to hear of a pod")
	}
	return true
}

// parkedPods waits for pods that no component has received yet.
type parkedPods struct{ *podstate.Pods }

func (p parkedPods) WaitForPods(ctx context.Context, claim ledger.ClaimRequest) {
	c, _ := ctx.Value(callKey{}).(*call)
	known := func(pod ledger.Pod) bool { return p.Known(pod.UID) }
	for began := time.Now(); time.Since(began) < 2*time.Second && len(claim.Pods) > 0 && !slices.ContainsFunc(claim.Pods, known); {
		c.sleep(50*time.Millisecond, "waits to hear of its pods")
	}
}

func (p parkedPods) Movable(ctx context.Context, claim ledger.ClaimRequest) bool {
	c, _ := ctx.Value(callKey{}).(*call)
	unknown := func(pod ledger.Pod) bool { return !p.Known(pod.UID) }
	for began := time.Now(); time.Since(began) < time.Second && slices.ContainsFunc(claim.Pods, unknown); {
		c.sleep(50*time.Millisecond, "waits to hear of its pods")
	}
	ended, end := context.WithCancel(ctx)
	end()
	return p.Pods.Movable(ended, claim)
}

// parkedLedger lets something else happen around each call that changes it.
type parkedLedger struct {
	*ledger.Ledger
	s *simulation
}

func (l parkedLedger) ReserveClaim(ctx context.Context, r ledger.ClaimRequest) (ledger.Reservation, error) {
	if err := ctx.Err(); err != nil {
		return ledger.Reservation{}, err // the ledger might try once more, as it comes
	}
	if l.s.faults.noCrossCheck {
		r = unknownPods(r)
	}
	r.Shares = maps.Clone(r.Shares)
	for ref, share := range r.Shares {
		r.Shares[ref] = l.s.faults.counted(share)
	}
	var patience time.Duration
	if r.PodsFirst != nil {
		patience = r.PodsFirst.WaitBudget
	}
	if l.has(r.UID, ledger.StateDraining) {
		l.s.hit(prepareAgain)
	}
	began := time.Now()
	taken, err := l.Ledger.ReserveClaim(ctx, r)
	turn(ctx, "has reserved")
	switch {
	case r.PodsFirst != nil && r.PodsFirst.WaitBudget < patience:
		l.s.hit(claimWaitsForPods)
	case errors.Is(err, ledger.ErrCancelled):
		l.s.hit(prepareCancelled)
	case time.Since(began) > 0 && err == nil:
		l.s.hit(prepareWaits)
	}
	l.s.mayDie(err)
	return taken, err
}

// With twoClocks, the moment of a hold that is compared with the ends of pods comes from the clock of files.
func (l parkedLedger) Holds() []ledger.Hold {
	holds := l.Ledger.Holds()
	for i := range holds {
		if l.s.faults.twoClocks {
			holds[i].Began = holds[i].Since
		}
	}
	return holds
}

// Expect is how holds are restored, at the start and later.
func (l parkedLedger) Expect(h ledger.Hold) error {
	// Adopt has help: within a second or so, Settle and Verify take the holds that it would miss.
	if l.s.faults.noRestore || l.s.faults.noAdoption && l.s.agent.begun {
		return nil
	}
	if l.s.agent.begun && l.s.agent.adopting {
		l.s.hit(foreignAdopted)
	}
	l.s.pause("expects a holder")
	return l.Ledger.Expect(h)
}

func (l parkedLedger) has(uid string, state ledger.State) bool {
	return slices.ContainsFunc(l.Holds(), func(h ledger.Hold) bool { return h.Holder.ID == uid && h.State == state })
}

// mayDie ends the process between the record and the answer.
func (s *simulation) mayDie(err error) {
	if s.dieBeforeAnswer && err == nil {
		s.dieBeforeAnswer, s.crashed = false, true
		s.hit(agentDiesBeforeAnswer)
		goruntime.Goexit()
	}
}

// unknownPods makes the claim ask for other hardware than limits do, so that the two never meet.
func unknownPods(r ledger.ClaimRequest) ledger.ClaimRequest {
	r.Devices = slices.Clone(r.Devices)
	for i := range r.Devices {
		r.Devices[i].GPU += "-claims"
	}
	return r
}

// counted returns the share that a ledger with these faults counts: with noSum almost nothing, with noCount only the memory. So the sum of
// all shares is never too large.
func (f faults) counted(share device.Share) device.Share {
	switch {
	case share.Whole():
		return share
	case f.noSum:
		share.Bytes, share.Count = 1, 0
	case f.noCount:
		share.Count = 0
	}
	return share
}

func (l parkedLedger) CancelReservation(r ledger.Reservation) error {
	l.s.pause("cancels its reservation")
	if l.s.faults.noCancel {
		return nil
	}
	return l.Ledger.CancelReservation(r)
}

func (l parkedLedger) DrainClaim(ctx context.Context, uid string) error {
	turn(ctx, "drains")
	if err := ctx.Err(); err != nil {
		return err // the ledger might do so or not, as it comes
	}
	err := l.Ledger.DrainClaim(ctx, uid)
	turn(ctx, "has drained")
	return err
}

func (l parkedLedger) ReservePod(requests []ledger.PodRequest) error {
	l.s.pause("reserves")
	requests = slices.Clone(requests)
	for i := range requests {
		requests[i].Share = l.s.faults.counted(requests[i].Share)
	}
	err := l.Ledger.ReservePod(requests)
	l.s.pause("has reserved")
	l.s.mayDie(err)
	return err
}

func (l parkedLedger) Release(h ledger.Hold) error {
	l.s.pause("releases")
	if len(h.Pods) == 1 && h.Holder.Kind == ledger.KindPod && l.s.host.pods[h.Pods[0].UID] != nil {
		l.s.hit(emptyCgroupEnds)
	}
	return l.Ledger.Release(h)
}

func (l parkedLedger) Identify(h ledger.Hold, pod ledger.Pod) error {
	l.s.pause("identifies")
	return l.Ledger.Identify(h, pod)
}

func (l parkedLedger) SetState(h ledger.Hold, state ledger.State) error {
	l.s.pause("sets the state of a hold")
	return l.Ledger.SetState(h, state)
}

// Objects as the product knows them.

const namespace = "apps"

func podObject(p *pod) *corev1.Pod {
	if p == nil || !p.bound {
		return nil
	}
	object := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: p.name, UID: types.UID(p.uid)},
		Spec:       corev1.PodSpec{NodeName: nodeName, Containers: []corev1.Container{{Name: "main"}}},
		Status:     corev1.PodStatus{Phase: corev1.PodPhase(p.phase)},
	}
	if p.owner != "" {
		yes := true
		object.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: p.owner, UID: types.UID(p.owner), Controller: &yes}}
	}
	if p.limits() {
		amount := corev1.ResourceList{resourceName: *resource.NewQuantity(int64(p.gpus), resource.DecimalSI)}
		object.Spec.Containers[0].Resources = corev1.ResourceRequirements{Limits: amount, Requests: amount}
		if p.init {
			object.Spec.InitContainers = []corev1.Container{{Name: "init", Resources: object.Spec.Containers[0].Resources}}
		}
	}
	for i, name := range p.claims {
		object.Spec.ResourceClaims = append(object.Spec.ResourceClaims, corev1.PodResourceClaim{Name: fmt.Sprintf("gpu-%d", i), ResourceClaimName: &name})
	}
	if p.deleting {
		object.DeletionTimestamp = &metav1.Time{Time: epoch}
	}
	if p.admitted {
		object.Status.StartTime = &metav1.Time{Time: epoch}
	}
	if p.started {
		state := corev1.ContainerState{}
		if p.phase == running {
			state.Running = &corev1.ContainerStateRunning{}
		}
		object.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", ContainerID: "containerd://x", State: state}}
	}
	return object
}

// resourceSlices are what the library's slice controller makes of pools.
func resourceSlices(pools map[string]resourceslice.Pool) *slice {
	made := &slice{}
	for _, name := range sorted(pools) {
		for i, of := range pools[name].Slices {
			made.slices = append(made.slices, &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%s-%d", name, driverName, i)},
				Spec: resourceapi.ResourceSliceSpec{
					Driver: driverName, NodeName: ptr.To(nodeName), SharedCounters: of.SharedCounters, Devices: of.Devices,
					Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(pools[name].Slices))},
				},
			})
		}
	}
	return made
}

func (s *slice) same(other *slice) bool {
	return s != nil && other != nil && apiequality.Semantic.DeepEqual(s.slices, other.slices)
}

// resourceClaim is a claim as an API object, made once for each version of it.
func resourceClaim(c *claim) *resourceapi.ResourceClaim {
	if c.object == nil {
		c.object = newResourceClaim(c)
	}
	return c.object
}

func newResourceClaim(c *claim) *resourceapi.ResourceClaim {
	object := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: c.name, UID: types.UID(c.uid)}}
	wanted := &resourceapi.ExactDeviceRequest{
		DeviceClassName: gpuClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: int64(c.count),
	}
	if c.profile != "" {
		wanted.DeviceClassName, wanted.Selectors = migClass, celSelector(fmt.Sprintf("device.attributes['gpu.nvidia.com'].profile == '%s'", c.profile))
	}
	if c.asks != (amount{}) {
		wanted.Capacity = &resourceapi.CapacityRequirements{Requests: capacities(c.asks)}
	}
	object.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: wanted}}
	if c.ownDaemon {
		parameters := `{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": {"strategy": "MPS", "mpsConfig": {}}}`
		object.Spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
			Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driverName, Parameters: runtime.RawExtension{Raw: []byte(parameters)}},
		}}}
	}
	object.Status.Allocation = c.allocation
	for _, uid := range c.reservedFor {
		object.Status.ReservedFor = append(object.Status.ReservedFor,
			resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: uid, UID: types.UID(uid)})
	}
	return object
}

func capacities(asked amount) map[resourceapi.QualifiedName]resource.Quantity {
	all := map[resourceapi.QualifiedName]resource.Quantity{}
	if asked.mib > 0 {
		all["memory"] = *resource.NewQuantity(int64(asked.mib)<<20, resource.BinarySI)
	}
	if asked.shares > 0 {
		all["shares"] = *resource.NewQuantity(int64(asked.shares), resource.DecimalSI)
	}
	return all
}
