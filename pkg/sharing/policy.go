// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

// Inventory tells the node's GPUs and the policy for each. Changed is taken before Inventory is read.
type Inventory interface {
	Inventory() device.Inventory
	Changed() <-chan struct{}
}

// Ledger tells who has what. *ledger.Ledger implements it. Changed is taken before Holds is asked.
type Ledger interface {
	Holds() []ledger.Hold
	Changed() <-chan struct{}
}

// PodStates tells whether a pod of a hold has a process, or may have. *evidence.Pods implements it.
type PodStates interface {
	Busy(h ledger.Hold) bool
}

// Policy keeps the GPUs that the node shares by policy as that says: their time slice, or their MPS daemon. A claim that has such a
// GPU as a whole comes first; when it is gone, the policy holds again. A daemon begins and ends while nobody has any of its GPU:
// who has got a GPU without one cannot become its client, and a client ends with it.
//
// Who is given a part of a GPU asks, after the ledger has reserved it, by Join or Client how to use it. The other way round, what
// changes how a GPU is shared is announced before the ledger is asked who has any of it. So one of the two finds the other.
type Policy struct {
	keeper    *Keeper
	inventory Inventory
	ledger    Ledger
	podstate  PodStates

	mu sync.Mutex
	// doubted are the GPUs that were not well: whatever brings one back may make it forget.
	doubted map[string]bool
	// refused is what GPUs do not support, by UUID: the driver's tool takes long, and answers the same again.
	refused map[string]refused
	// changing are the GPUs whose daemon is about to begin or to end.
	changing map[string]bool
	// joining are the claims that wait to become clients of a GPU's daemon: they are not in the way of its beginning.
	joining map[Key]int
	// ready are the daemons that were so when they were last looked at.
	ready map[string]bool
}

// refused is what a GPU was to have, and why it has not.
type refused struct {
	sharing string
	err     error
}

// NewPolicy does nothing visible.
func NewPolicy(k *Keeper, inventory Inventory, book Ledger, podstate PodStates) *Policy {
	return &Policy{
		keeper: k, inventory: inventory, ledger: book, podstate: podstate, doubted: map[string]bool{},
		refused: map[string]refused{}, changing: map[string]bool{}, joining: map[Key]int{}, ready: map[string]bool{},
	}
}

// policyPrefix begins the names under which settings by policy are recorded, in the place of the UID of a claim, which is a UUID.
const policyPrefix = "gpu-"

func policyFor(gpu string) Claim {
	return Claim{UID: policyPrefix + strings.TrimPrefix(strings.ToLower(gpu), policyPrefix), Name: "the node's policy"}
}

func policyKey(gpu string) Key { return Key{policyFor(gpu).UID, device.Ref{GPU: gpu}} }

func (k Key) byPolicy() bool { return strings.HasPrefix(k.Claim, policyPrefix) }

// policySharing is what policy says of a whole GPU in the words of claims; no strategy where nothing is to be set.
func policySharing(d device.Device) parametersv1beta1.Sharing {
	switch policy := d.Sharing(); {
	case d.GPU.MIGEnabled: // the processes of a partition take turns as they do
	case policy.Strategy == device.TimeSlicing && policy.Interval != "":
		return parametersv1beta1.Sharing{Strategy: parametersv1beta1.TimeSlicing, Interval: parametersv1beta1.Interval(policy.Interval)}
	case policy.Strategy == device.MPS:
		// The pods of several users share it.
		daemon := &parametersv1beta1.MPS{MultiUser: true}
		if n := policy.ReplicaCount(); !policy.MemoryShares {
			// All who share it have the same, so that the daemon can see to that.
			daemon.ActiveThreadPercentage = ptr.To(100 / n)
			if share := device.Replica(d.MemoryBytes(), n); d.MemoryBytes() > 0 {
				daemon.PinnedMemoryLimit = resource.NewQuantity(int64(share.Bytes), resource.BinarySI)
			}
		}
		return parametersv1beta1.Sharing{Strategy: parametersv1beta1.MPSStrategy, MPS: daemon}
	}
	return parametersv1beta1.Sharing{}
}

func policyGroup(d device.Device) Group {
	return Group{Claim: policyFor(d.GPU.UUID), Devices: []device.Device{d}, Sharing: policySharing(d)}
}

const (
	// policyAgain is how soon what could not be set is tried again.
	policyAgain = 10 * time.Second
	// readyAgain is how often daemons are looked at that are ready: the kernel tells nobody that one has died. soonReady is it for
	// those that are not.
	readyAgain = time.Second
	soonReady  = 100 * time.Millisecond
)

// Changed returns a channel that is closed when Client or ByDaemon next answer otherwise; take it before asking.
func (p *Policy) Changed() <-chan struct{} { return p.keeper.Changed() }

// Run follows policy, claims and daemons until ctx is done, each GPU for itself: one that is stuck keeps no other waiting. What it has
// set stays set: the agent that comes next undoes it if its policy is another.
func (p *Policy) Run(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() { p.watchDaemons(ctx) })
	followed := map[string]bool{}
	for {
		changed := p.inventory.Changed()
		for _, gpu := range p.inventory.Inventory().GPUs {
			if !followed[gpu.UUID] {
				followed[gpu.UUID] = true
				all.Go(func() { p.follow(ctx, gpu.UUID) })
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// follow keeps one GPU as policy says.
func (p *Policy) follow(ctx context.Context, uuid string) {
	said := ""
	for {
		inventoryChanged, keeperChanged, holdsChanged := p.inventory.Changed(), p.keeper.Changed(), p.ledger.Changed()
		err := p.settle(ctx, uuid)
		if ctx.Err() != nil {
			return
		}
		inUse := errors.Is(err, errInUse)
		if daemon, _ := p.keeper.policyDaemon(uuid); daemon == "" && !inUse {
			holdsChanged = nil // nobody's client comes or goes
		}
		var again <-chan time.Time
		if err == nil {
			said = ""
		} else {
			again = time.After(policyAgain)
			if !inUse {
				// An attempt that fails is a change, too, and who comes or goes does not help.
				keeperChanged, holdsChanged = nil, nil
			}
		}
		if err != nil && said != err.Error() {
			said = err.Error()
			logger := klog.FromContext(ctx).WithValues("gpu", uuid)
			if inUse {
				logger.Info("A GPU is not shared yet as the node's configuration says", "why", said)
			} else {
				logger.Error(err, "A GPU is not shared as the node's configuration says, trying again")
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-inventoryChanged:
		case <-keeperChanged:
		case <-holdsChanged:
		case <-again:
		}
	}
}

// watchDaemons notes which daemons are ready until ctx is done.
func (p *Policy) watchDaemons(ctx context.Context) {
	for {
		changed := p.keeper.Changed()
		next := p.look()
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-next:
		}
	}
}

// look notes which daemons are ready, and says when to look again; nil for never.
func (p *Policy) look() <-chan time.Time {
	wait := readyAgain
	p.mu.Lock()
	ready := map[string]bool{}
	for _, key := range p.keeper.Records.All() {
		s, ok := p.keeper.Records.store.Get(key)
		if !ok || !key.byPolicy() || s.Settings == nil || s.Undoing || p.changing[key.Device.GPU] {
			continue
		}
		r, alive, err := mps.Alive(p.keeper.dir(s.Daemon))
		if ready[s.Daemon] = err == nil && alive && r.Hash == s.Settings.Hash(); !ready[s.Daemon] {
			wait = soonReady
		}
	}
	same, none := maps.Equal(ready, p.ready), len(ready) == 0
	p.ready = ready
	p.mu.Unlock()
	if !same {
		p.keeper.announce()
	}
	if none {
		return nil
	}
	return time.After(wait)
}

// settle looks at one GPU once.
func (p *Policy) settle(ctx context.Context, uuid string) error {
	gpu, there := p.inventory.Inventory().ByUUID(uuid)
	switch {
	case !there:
		return nil
	case gpu.Health.Healthy():
		return errors.Join(p.bring(ctx, device.Device{GPU: gpu}), p.describeClients(device.Ref{GPU: uuid}))
	}
	p.keeper.doubtSlice(uuid)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.doubted[uuid] = true
	delete(p.refused, uuid)
	return nil
}

func (p *Policy) bring(ctx context.Context, d device.Device) error {
	key := policyKey(d.GPU.UUID)
	g := policyGroup(d)
	if g.Sharing.Strategy == "" {
		if !p.keeper.Records.Applied(key.Claim, key.Device) {
			return nil
		}
		undo := func() error { return p.keeper.Undo(ctx, key, func() bool { return true }) }
		if daemon, _ := p.keeper.policyDaemon(d.GPU.UUID); daemon == "" {
			return undo()
		}
		return p.alone(d.Ref(), undo)
	}
	name, err := whatIs(g)
	if err != nil {
		return err
	}
	if p.refusal(d.GPU.UUID, name) != nil {
		return nil
	}
	p.mu.Lock()
	doubted := p.doubted[d.GPU.UUID]
	p.mu.Unlock()
	if wrong := Check(g.Devices, g.Sharing, nil); len(wrong) > 0 {
		err = fmt.Errorf("%w: %w", device.ErrUnsupported, wrong.ToAggregate())
	} else {
		err = p.keeper.applyPolicy(ctx, g, doubted, func(do func() error) error { return p.alone(d.Ref(), do) })
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case err == nil:
		delete(p.doubted, d.GPU.UUID)
	case errors.Is(err, device.ErrUnsupported):
		p.refused[d.GPU.UUID] = refused{name, err}
		p.keeper.announce()
		klog.FromContext(ctx).Error(err, "A GPU cannot be shared as the node's configuration says", "gpu", d.GPU.UUID, "strategy", g.Sharing.Strategy)
		return nil
	}
	return err
}

// whatIs names what a group is to have: its daemon, or its time slice.
func whatIs(g Group) (string, error) {
	if g.Sharing.MPS == nil {
		return string(g.Sharing.Interval), nil
	}
	return daemonName(g)
}

func (p *Policy) refusal(gpu, name string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.refused[gpu]; r.sharing == name {
		return r.err
	}
	return nil
}

// describeClients puts back what the containers need that have a part of a GPU, which an earlier process may have given to them, and
// removes what nobody needs any more.
func (p *Policy) describeClients(ref device.Ref) error {
	daemon, settled := p.keeper.policyDaemon(ref.GPU)
	if daemon == "" || !settled {
		return nil
	}
	return p.keeper.describeClients(daemon, func() (clients map[string]limit, all bool) {
		clients, all = map[string]limit{daemon: {}}, true
		for _, h := range p.ledger.Holds() {
			switch {
			case h.Device != ref || h.Holder.Kind != ledger.KindClaim:
			case h.Unreadable || h.State == ledger.StateRestored:
				all = false
			default:
				l := p.keeper.policyLimit(ref.GPU, h.Share)
				clients[deviceOf(daemon, l)] = l
			}
		}
		return clients, all
	})
}

// errInUse means that what ends with a GPU's daemon, or was begun without one, has the GPU.
var errInUse = errors.New("in use")

// alone does what begins or ends a GPU's daemon, while nobody has any of the GPU, and nobody new gets to know how to use it.
func (p *Policy) alone(gpu device.Ref, do func() error) error {
	if err := p.inUse(gpu); err != nil {
		return err
	}
	change := func(is bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		// A daemon of the same name may come, which is ready when it has been looked at.
		daemon, _ := p.keeper.policyDaemon(gpu.GPU)
		delete(p.ready, daemon)
		if p.changing[gpu.GPU] = is; !is {
			delete(p.changing, gpu.GPU)
		}
	}
	change(true)
	defer p.keeper.announce()
	defer change(false)
	if err := p.inUse(gpu); err != nil {
		return err
	}
	return do()
}

// inUse says who has any of a GPU. Two kinds of holders are not in the way as long as they have no process: claims that wait to become
// clients, and those of which only their records, or kubelet's, tell since the node was started.
func (p *Policy) inUse(gpu device.Ref) error {
	for _, h := range p.ledger.Holds() {
		if h.Device != gpu {
			continue
		}
		p.mu.Lock()
		joining := p.joining[Key{h.Holder.ID, h.Device}] > 0
		p.mu.Unlock()
		if h.Unreadable || !joining && h.State != ledger.StateRestored || p.podstate.Busy(h) {
			return fmt.Errorf("device %s goes on as it is while somebody has it: %w by %s", gpu, errInUse, h)
		}
	}
	return nil
}

// ByDaemon reports whether an MPS daemon has the GPU by policy, or is about to. Called after the GPU was reserved as a whole, by
// who would not be its client; Apply with the strategy Exclusive ends that daemon.
func (p *Policy) ByDaemon(gpu device.GPU) bool {
	daemon, settled := p.has(gpu.UUID)
	return !settled || daemon != "" || policySharing(device.Device{GPU: gpu}).Strategy == parametersv1beta1.MPSStrategy
}

// now is the daemon that a GPU has by policy, empty for none; an error says why the GPU is not shared as policy says.
func (p *Policy) now(d device.Device) (daemon string, err error) {
	if !d.Whole() {
		return "", nil // no daemon has partitions by policy
	}
	want := ""
	if g := policyGroup(d); g.Sharing.MPS != nil {
		if want, err = daemonName(g); err != nil {
			return "", err
		}
		if err := p.refusal(d.GPU.UUID, want); err != nil {
			return "", err
		}
	}
	switch has, settled := p.has(d.GPU.UUID); {
	case !settled:
		return "", errors.New("how it is shared is being changed")
	case has == want:
		return want, nil
	case has == "":
		return "", errors.New("its MPS daemon has not been asked for yet")
	default:
		return "", errors.New("how it is shared changes when nobody has any of it")
	}
}

// has is the daemon that a GPU has by policy, whether or not policy says so now. It is not settled while that changes.
func (p *Policy) has(gpu string) (daemon string, settled bool) {
	p.mu.Lock()
	changing := p.changing[gpu]
	p.mu.Unlock()
	daemon, settled = p.keeper.policyDaemon(gpu)
	return daemon, settled && !changing
}

// Client is what a container needs that a limit has given a share of a GPU, or nil where that is nothing: the GPU is not shared by
// MPS. It never waits: an error says why nobody can have any of the GPU at the moment, such as a daemon that is not ready. Called
// for the list of devices, and after the ledger has reserved. Safe for concurrent use.
func (p *Policy) Client(d device.Device, share device.Share) (*Client, error) {
	daemon, err := p.now(d)
	if err != nil {
		return nil, fmt.Errorf("device %s: %w", d.Name(), err)
	}
	if daemon == "" {
		return nil, nil
	}
	p.mu.Lock()
	ready := p.ready[daemon]
	p.mu.Unlock()
	if !ready {
		return nil, fmt.Errorf("device %s: MPS daemon %s is not ready", d.Name(), daemon)
	}
	l := p.keeper.policyLimit(d.GPU.UUID, share)
	if policy := d.Sharing(); policy.MemoryShares {
		l.threads = 100 / policy.ReplicaCount()
	}
	c := p.keeper.client(daemon, l)
	return &c, nil
}

// Join makes a claim the client of the daemon of a GPU of which it has a share, and returns the CDI device that its containers
// need; none where the GPU is not shared by MPS. The ledger has reserved it. It waits until the GPU is shared as policy says, unless
// the claim has pods that run: others of it share the GPU as these do. A *NotReadyError says that ctx ended before the daemon was
// ready. Idempotent, and safe for concurrent use.
func (p *Policy) Join(ctx context.Context, claim Claim, d device.Device, share device.Share) (cdiDevices []string, err error) {
	daemon, err := p.awaitShared(ctx, claim, d)
	if err == nil && daemon != "" {
		var qualified string
		qualified, err = p.keeper.connect(ctx, daemon, p.keeper.policyLimit(d.GPU.UUID, share))
		cdiDevices = []string{qualified}
	}
	if errors.Is(err, errUnheld) {
		err = fmt.Errorf("MPS daemon %s has ended meanwhile", daemon)
	}
	if err != nil {
		return nil, fmt.Errorf("let claim %s/%s share %s: %w", claim.Namespace, claim.Name, d.Name(), err)
	}
	return cdiDevices, nil
}

func (p *Policy) awaitShared(ctx context.Context, claim Claim, d device.Device) (daemon string, err error) {
	key := Key{claim.UID, d.Ref()}
	waits := false
	leave := func() {
		if waits {
			waits = false
			p.join(key, -1)
		}
	}
	defer leave()
	for {
		inventoryChanged, changed := p.inventory.Changed(), p.keeper.Changed()
		if now, there := p.inventory.Inventory().ByRef(d.Ref()); there {
			d = now
		}
		if daemon, err = p.now(d); err == nil && waits {
			// From here on the claim is in the way of changes, which it was not when it asked.
			leave()
			daemon, err = p.now(d)
		}
		if err == nil || errors.Is(err, device.ErrUnsupported) {
			return daemon, err
		}
		if has, settled := p.has(d.GPU.UUID); settled && p.runs(key) {
			return has, nil
		}
		if !waits {
			waits = true
			p.join(key, 1)
			p.keeper.announce() // whoever follows the GPU is to look at it
		}
		select {
		case <-ctx.Done():
			return "", errors.Join(err, context.Cause(ctx))
		case <-inventoryChanged:
		case <-changed:
		}
	}
}

// runs reports whether a claim has a device by pods that have processes.
func (p *Policy) runs(key Key) bool {
	for _, h := range p.ledger.Holds() {
		if h.Device == key.Device && h.Holder == (ledger.Holder{Kind: ledger.KindClaim, ID: key.Claim}) {
			return p.podstate.Busy(h)
		}
	}
	return false
}

// join notes that a claim waits, or waits no more.
func (p *Policy) join(key Key, more int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.joining[key] += more; p.joining[key] == 0 {
		delete(p.joining, key)
	}
}

// policyLimit is what a client with a share of a GPU may have where the daemon itself does not see to that.
func (k *Keeper) policyLimit(gpu string, share device.Share) limit {
	s, _ := k.Records.store.Get(policyKey(gpu))
	if s.Settings == nil || len(s.Settings.PinnedMemoryMiB) > 0 || share.Whole() {
		return limit{}
	}
	return limit{mib: share.Bytes / mib}
}

// applyPolicy does nothing while something is set on the GPU for a claim. again sets also what was set before. What begins or ends a
// daemon is done by alone.
func (k *Keeper) applyPolicy(ctx context.Context, g Group, again bool, alone func(do func() error) error) error {
	wanted, err := k.wanted(g)
	if err != nil {
		return err
	}
	return k.turn(ctx, g.Claim.UID, func() error {
		k.number(g, wanted)
		key := policyKey(g.Devices[0].GPU.UUID)
		before, _ := k.Records.store.Get(key)
		next := wanted[key.Device]
		daemon, _ := k.policyDaemon(key.Device.GPU)
		switch {
		case len(k.others(g)) > 0:
			return nil
		case k.isSet(key, next) && again:
			return k.bring(ctx, key, before)
		case k.isSet(key, next):
			return nil
		case next.Daemon != "", daemon != "":
			return alone(func() error { return k.bringPolicy(ctx, g, wanted) })
		default:
			return k.bringPolicy(ctx, g, wanted)
		}
	})
}

// bringPolicy is called under the policy's turn.
func (k *Keeper) bringPolicy(ctx context.Context, g Group, wanted map[device.Ref]*setting) error {
	key := policyKey(g.Devices[0].GPU.UUID)
	_, err := k.bringGroup(ctx, g, wanted, func() error {
		if len(k.others(g)) > 0 {
			return errSuperseded
		}
		return nil
	})
	switch {
	case errors.Is(err, errSuperseded):
		return k.Records.store.Drop(key)
	case errors.Is(err, device.ErrUnsupported):
		if err := k.takeDown(ctx, k.group(key)); err != nil {
			return err
		}
	}
	return err
}

// isSet reports whether the GPU has by policy what it is to have.
func (k *Keeper) isSet(key Key, next *setting) bool {
	if next.Daemon == "" {
		return k.isSliced(key, next.Interval)
	}
	s, recorded := k.Records.store.Get(key)
	if !recorded || s.Daemon != next.Daemon || s.Undoing {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	d, ok := k.daemons[next.Daemon]
	return ok && d.settings.Hash() == next.Settings.Hash()
}

// policyDaemon is the daemon that a GPU has by policy, empty for none. It is not settled while it ends, or nobody knows what it is.
func (k *Keeper) policyDaemon(gpu string) (name string, settled bool) {
	key := policyKey(gpu)
	s, _ := k.Records.store.Get(key)
	if !s.Unknown {
		return s.Daemon, !s.Undoing
	}
	for _, name := range k.unnamed() {
		if claimOf(name) == key.Claim {
			return name, false
		}
	}
	return "", true
}

// errSuperseded means that a claim has come in the meantime. Both have recorded what they are about to set before they look for the
// other, so that one of them finds it.
var errSuperseded = errors.New("a claim says how it is shared")

// supersede undoes what is set on the devices by policy. Called by whoever has them as a whole.
func (k *Keeper) supersede(ctx context.Context, g Group) error {
	for _, key := range k.others(g) {
		if !key.byPolicy() {
			continue
		}
		if err := k.turn(ctx, key.Claim, func() error { return k.takeDown(ctx, k.group(key)) }); err != nil {
			return err
		}
	}
	return nil
}

// doubtSlice has time slices of a GPU set again by whoever wants them next.
func (k *Keeper) doubtSlice(gpu string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.sliced, func(key Key, _ parametersv1beta1.Interval) bool { return key.Device.GPU == gpu })
}

func (k *Keeper) isSliced(key Key, interval parametersv1beta1.Interval) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.sliced[key] == interval
}

// others are the settings on the devices of a group that are for somebody else.
func (k *Keeper) others(g Group) []Key {
	return k.Records.where(func(key Key, _ setting) bool { return key.Claim != g.Claim.UID && g.overlaps(key.Device) })
}
