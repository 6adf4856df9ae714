// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"maps"
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

// Ledger returns the holds. Take Changed before you read Holds. *ledger.Ledger implements it.
type Ledger interface {
	Holds() []ledger.Hold
	Changed() <-chan struct{}
}

// PodStates reports whether a pod of a hold has a process, or may have one. *podstate.Pods implements it.
type PodStates interface {
	Busy(h ledger.Hold) bool
}

// Policy applies the node configuration's sharing policy to GPUs: a time slice, or an MPS daemon. A claim that has a GPU as a
// whole overrides the policy until it ends. A daemon starts and ends only while no holder uses its GPU: a process that
// started without the daemon cannot become its client, and a client ends with its daemon.
//
// A holder first reserves a share in the ledger and then calls Join or Client. The Policy first marks the GPU as changing and
// then reads the ledger. So one of the two sees the other (TestPolicyEndsAlone).
type Policy struct {
	manager   *Manager
	inventory device.Source
	ledger    Ledger
	podStates PodStates

	mu sync.Mutex
	// recovering are GPUs that were unhealthy. A reset or a driver reload may have lost their settings.
	recovering map[string]bool
	// refused are the settings that a GPU does not support, by UUID. nvidia-smi is too slow to try them again.
	refused map[string]refusal
	// changing are the GPUs whose daemon is about to start or end.
	changing map[string]bool
	// joining counts the calls of Join that wait. Their claims do not keep a daemon from starting.
	joining map[Key]int
	// ready are the daemons that were ready at the last check.
	ready map[string]bool
}

// refusal says which settings a GPU does not support, and why.
type refusal struct {
	settings string
	err      error
}

// NewPolicy has no visible effect.
func NewPolicy(m *Manager, inventory device.Source, ledger Ledger, podStates PodStates) *Policy {
	return &Policy{
		manager: m, inventory: inventory, ledger: ledger, podStates: podStates, recovering: map[string]bool{},
		refused: map[string]refusal{}, changing: map[string]bool{}, joining: map[Key]int{}, ready: map[string]bool{},
	}
}

func policyKey(gpu string) Key { return Key{policyOwner(gpu), device.Ref{GPU: gpu}} }

// policyGroup is the policy of a whole GPU. It has no strategy where nothing is to be set.
func policyGroup(d device.Device) Group {
	g := Group{policy: true, Devices: []device.Device{d}}
	switch policy := d.Sharing(); {
	case d.GPU.MIGEnabled: // the driver has no time slice for a partition
	case policy.Strategy == device.TimeSlicing && policy.Interval != "":
		g.Sharing = parametersv1beta1.Sharing{Strategy: parametersv1beta1.TimeSlicing, Interval: parametersv1beta1.Interval(policy.Interval)}
	case policy.Strategy == device.MPS:
		// Pods of several users share the GPU.
		daemon := &parametersv1beta1.MPS{MultiUser: true}
		if n := policy.ReplicaCount(); policy.Claims != device.ByMemory {
			// All clients have equal shares, so that the daemon can limit them.
			daemon.ActiveThreadPercentage = ptr.To(100 / n)
			if share := device.Replica(d.MemoryBytes(), n); d.MemoryBytes() > 0 {
				daemon.PinnedMemoryLimit = resource.NewQuantity(int64(share.Bytes), resource.BinarySI)
			}
		}
		g.Sharing = parametersv1beta1.Sharing{Strategy: parametersv1beta1.MPSStrategy, MPS: daemon}
	}
	return g
}

const (
	// policyRetry is the pause before settings that could not be applied are tried again.
	policyRetry = 10 * time.Second
	// readyInterval is the pause between checks of ready daemons, because the kernel does not notify when one dies, and
	// startInterval between checks of others.
	readyInterval = time.Second
	startInterval = 100 * time.Millisecond
)

// Changed returns a channel that is closed when answers of Client or ByDaemon change; take it before you call them.
func (p *Policy) Changed() <-chan struct{} { return p.manager.Changed() }

// Run applies the policy until ctx is done. Each GPU has its own goroutine, so that one that hangs delays no other
// (TestPolicyBesideAStuckGPU). That includes a GPU that is gone and that an earlier process has set. Settings stay at the end: the next agent
// reverts those that its policy does not have.
func (p *Policy) Run(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() { p.watchDaemons(ctx) })
	followed := map[string]bool{}
	follow := func(uuid string) {
		if !followed[uuid] {
			followed[uuid] = true
			all.Go(func() { p.follow(ctx, uuid) })
		}
	}
	for _, key := range p.manager.Records.Keys() {
		if key.Owner.isPolicy() {
			follow(key.Device.GPU)
		}
	}
	for {
		changed := p.inventory.Changed()
		for _, gpu := range p.inventory.Inventory().GPUs {
			follow(gpu.UUID)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// follow applies the policy of one GPU after each change.
func (p *Policy) follow(ctx context.Context, uuid string) {
	reported := ""
	for {
		p.manager.turn(ctx, "applies the sharing policy of", uuid)
		inventoryChanged, settingsChanged, holdsChanged := p.inventory.Changed(), p.manager.Changed(), p.ledger.Changed()
		err := p.apply(ctx, uuid)
		if ctx.Err() != nil {
			return
		}
		inUse := errors.Is(err, errInUse)
		if daemon, _ := p.manager.policyDaemon(uuid); daemon == "" && !inUse {
			holdsChanged = nil // it has no clients
		}
		var retry <-chan time.Time
		if err == nil {
			reported = ""
		} else {
			retry = time.After(policyRetry)
			if !inUse {
				// A failed attempt notifies as well: waking on it would retry at once, forever.
				settingsChanged, holdsChanged = nil, nil
			}
		}
		if err != nil && reported != err.Error() {
			reported = err.Error()
			logger := klog.FromContext(ctx).WithValues("gpu", uuid)
			if inUse {
				logger.Info("Waiting for holders of the GPU before its sharing policy changes", "reason", reported)
			} else {
				logger.Error(err, "Cannot apply the sharing policy to a GPU, retrying")
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-inventoryChanged:
		case <-settingsChanged:
		case <-holdsChanged:
		case <-retry:
		}
	}
}

// watchDaemons checks which daemons are ready, until ctx is done.
func (p *Policy) watchDaemons(ctx context.Context) {
	for {
		p.manager.turn(ctx, "checks which daemons are", "ready")
		changed := p.manager.Changed()
		next := p.checkDaemons()
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-next:
		}
	}
}

// checkDaemons records which daemons are ready, and returns when to check again; nil is never.
func (p *Policy) checkDaemons() <-chan time.Time {
	wait := readyInterval
	p.mu.Lock()
	ready := map[string]bool{}
	for _, key := range p.manager.Records.Keys() {
		s, ok := p.manager.Records.Get(key)
		if !ok || !key.Owner.isPolicy() || s.Settings == nil || s.Reverting || p.changing[key.Device.GPU] {
			continue
		}
		r, alive, err := mps.Alive(p.manager.dir(s.Daemon))
		if ready[s.Daemon] = err == nil && alive && r.Hash == s.Settings.Hash(); !ready[s.Daemon] {
			wait = startInterval
		}
	}
	same, none := maps.Equal(ready, p.ready), len(ready) == 0
	p.ready = ready
	p.mu.Unlock()
	if !same {
		p.manager.changed.Notify()
	}
	if none {
		return nil
	}
	return time.After(wait)
}

// apply applies the policy of one GPU once.
func (p *Policy) apply(ctx context.Context, uuid string) error {
	inventory := p.inventory.Inventory()
	gpu, exists := inventory.ByUUID(uuid)
	switch {
	case len(inventory.GPUs) == 0:
		return nil // the driver is away
	case exists && gpu.Health.Healthy():
		return errors.Join(p.applyGroup(ctx, policyGroup(device.Device{GPU: gpu})), p.updateClientDevices(gpu.Ref()))
	}
	p.manager.forgetSlices(uuid)
	p.mu.Lock()
	p.recovering[uuid] = true
	delete(p.refused, uuid)
	p.mu.Unlock()
	switch {
	case !exists, gpu.Health.Reason == device.ReasonMissing:
		return p.end(ctx, device.Ref{GPU: uuid})
	case gpu.Health.Reason == device.ReasonPaused:
		return p.rest(ctx, gpu.Ref())
	}
	return nil
}

// end reverts the policy on a GPU that is gone, once no holder uses it: its daemon has no GPU any more (TestGPUThatIsGone).
func (p *Policy) end(ctx context.Context, gpu device.Ref) error {
	m, key := p.manager, policyKey(gpu.GPU)
	unlock, err := m.lock(ctx, key.Owner)
	if err != nil {
		return err
	}
	defer unlock()
	if !m.Records.has(key) {
		return nil
	}
	end, err := p.beginChange(gpu)
	if err != nil {
		return err
	}
	defer end()
	return m.revert(ctx, m.sameDaemon(key))
}

// rest ends the daemon of a GPU of a paused node once no holder uses it, because its servers keep the GPU open. apply starts it again, and
// restores the settings of before, when the pause has ended.
func (p *Policy) rest(ctx context.Context, gpu device.Ref) error {
	m, key := p.manager, policyKey(gpu.GPU)
	unlock, err := m.lock(ctx, key.Owner)
	if err != nil {
		return err
	}
	defer unlock()
	daemon, settled := m.policyDaemon(gpu.GPU)
	if daemon == "" {
		return nil
	}
	held, err := mps.Held(m.dir(daemon))
	if err == nil && !held && !settled {
		return nil
	}
	end, err := p.beginChange(gpu)
	if err != nil {
		return err
	}
	defer end()
	return m.endDaemons(ctx, m.sameDaemon(key))
}

func (p *Policy) applyGroup(ctx context.Context, g Group) error {
	gpu := g.Devices[0].GPU.UUID
	name, err := settingsName(g)
	if err != nil || p.refusal(gpu, name) != nil {
		return err
	}
	if wrong := Check(g.Devices, g.Sharing, nil); len(wrong) > 0 {
		err = fmt.Errorf("%w: %w", device.ErrUnsupported, wrong.ToAggregate())
	} else {
		err = p.change(ctx, g)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case err == nil:
		delete(p.recovering, gpu)
	case errors.Is(err, device.ErrUnsupported):
		p.refused[gpu] = refusal{name, err}
		p.manager.changed.Notify()
		klog.FromContext(ctx).Error(err, "The GPU does not support the node's sharing policy", "gpu", gpu, "strategy", g.Sharing.Strategy)
		return nil
	}
	return err
}

// change applies the policy of a GPU, unless settings of a claim are applied to it.
func (p *Policy) change(ctx context.Context, g Group) error {
	m, key := p.manager, policyKey(g.Devices[0].GPU.UUID)
	unlock, err := m.lock(ctx, key.Owner)
	if err != nil {
		return err
	}
	defer unlock()
	next, err := m.settingsOf(g)
	if err != nil {
		return err
	}
	before, recorded := m.Records.Get(key)
	switch {
	case next == nil && !recorded, next != nil && len(m.others(g)) > 0:
		return nil
	case next != nil && m.isApplied(key, next):
		if p.isRecovering(key.Device.GPU) {
			return m.set(ctx, key, before)
		}
		return nil
	}
	if daemon, _ := m.policyDaemon(key.Device.GPU); daemon != "" || next != nil && next.Daemon != "" {
		end, err := p.beginChange(key.Device)
		if err != nil {
			return err
		}
		defer end()
	}
	if next, err = m.recordGroup(ctx, g); err != nil || next == nil {
		return wrapGroup(err, g)
	}
	// A claim may have come since. Both record before they check, so that one finds the other (TestPolicyBesideAClaim).
	if len(m.others(g)) > 0 {
		return m.Records.Drop(key)
	}
	_, err = m.setGroup(ctx, g, next)
	if errors.Is(err, device.ErrUnsupported) {
		if err := m.revert(ctx, m.sameDaemon(key)); err != nil {
			return err
		}
	}
	return wrapGroup(err, g)
}

// settingsName identifies the settings of a group: its daemon, or its time slice.
func settingsName(g Group) (string, error) {
	if g.Sharing.MPS == nil {
		return string(g.Sharing.Interval), nil
	}
	return daemonName(g)
}

func (p *Policy) refusal(gpu, name string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.refused[gpu]; r.settings == name {
		return r.err
	}
	return nil
}

func (p *Policy) isRecovering(gpu string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.recovering[gpu]
}

// isApplied reports whether the policy has set this on the GPU.
func (m *Manager) isApplied(key Key, next *setting) bool {
	if next.Daemon == "" {
		return m.hasSlice(key, next.Interval)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	d, ok := m.daemons[next.Daemon]
	return ok && d.settings.Hash() == next.Settings.Hash()
}

// policyDaemon returns the policy's daemon of a GPU, empty for none. It is not settled while it ends or is unknown.
func (m *Manager) policyDaemon(gpu string) (name string, settled bool) {
	key := policyKey(gpu)
	s, _ := m.Records.Get(key)
	if !s.Unknown {
		return s.Daemon, !s.Reverting
	}
	for _, name := range m.unrecordedDaemons() {
		if ownerOfDaemon(name) == key.Owner {
			return name, false
		}
	}
	return "", true
}

// updateClientDevices writes the client devices of the GPU's holders, and removes those that no holder needs any more.
func (p *Policy) updateClientDevices(gpu device.Ref) error {
	daemon, settled := p.manager.policyDaemon(gpu.GPU)
	if daemon == "" || !settled {
		return nil
	}
	before, err := p.manager.clientDevices(daemon)
	if err != nil {
		return err
	}
	needed := map[string]*limit{daemon: {}}
	for _, h := range p.ledger.Holds() {
		switch {
		case h.Device != gpu || h.Holder.Kind != ledger.KindClaim:
		case h.Unreadable || h.State == ledger.StateRestored:
			before = nil // its share is not known yet: remove nothing
		default:
			l := p.manager.policyLimit(gpu.GPU, h.Share)
			needed[clientDeviceName(daemon, l)] = &l
		}
	}
	return p.manager.setClientDevices(daemon, before, needed)
}

// errInUse means that a holder of the GPU keeps its daemon from starting or ending.
var errInUse = errors.New("in use")

// beginChange marks the GPU as changing, so that Join and Client admit no new client until end. It fails with errInUse while
// a holder uses the GPU.
func (p *Policy) beginChange(gpu device.Ref) (end func(), err error) {
	if err := p.inUse(gpu); err != nil {
		return nil, err
	}
	mark := func(changing bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		// The next daemon may have the same name.
		daemon, _ := p.manager.policyDaemon(gpu.GPU)
		delete(p.ready, daemon)
		if p.changing[gpu.GPU] = changing; !changing {
			delete(p.changing, gpu.GPU)
		}
	}
	end = func() { mark(false); p.manager.changed.Notify() }
	mark(true)
	if err := p.inUse(gpu); err != nil {
		end()
		return nil, err
	}
	return end, nil
}

// inUse returns an errInUse that names a holder of the GPU. Two kinds of holders without a process do not count: claims that
// wait in Join, and restored holds.
func (p *Policy) inUse(gpu device.Ref) error {
	for _, h := range p.ledger.Holds() {
		if h.Device != gpu {
			continue
		}
		p.mu.Lock()
		joining := p.joining[Key{OwnerOf(h.Holder.ID), h.Device}] > 0
		p.mu.Unlock()
		if h.Unreadable || !joining && h.State != ledger.StateRestored || p.podStates.Busy(h) {
			return fmt.Errorf("the sharing policy of device %s changes after its last holder has ended: it is %w by %s", gpu, errInUse, h)
		}
	}
	return nil
}
