// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// ByDaemon reports whether the policy's MPS daemon has the GPU, or is about to. The DRA driver calls it for a GPU that a claim
// has reserved as a whole; Apply with the strategy Exclusive ends the daemon. Safe for concurrent use.
func (p *Policy) ByDaemon(gpu device.GPU) bool {
	daemon, settled := p.daemon(gpu.UUID)
	return !settled || daemon != "" || policyGroup(device.Device{GPU: gpu}).Sharing.Strategy == parametersv1beta1.MPSStrategy
}

// daemon returns the policy's daemon of a GPU, also one that the policy no longer has. It is not settled while it changes.
func (p *Policy) daemon(gpu string) (daemon string, settled bool) {
	p.mu.Lock()
	changing := p.changing[gpu]
	p.mu.Unlock()
	daemon, settled = p.manager.policyDaemon(gpu)
	return daemon, settled && !changing
}

// wantedDaemon returns the daemon that a GPU has by the current policy, empty for none. An error says why it differs.
func (p *Policy) wantedDaemon(d device.Device) (daemon string, err error) {
	if !d.Whole() {
		return "", nil // the policy starts no daemons for partitions
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
	switch has, settled := p.daemon(d.GPU.UUID); {
	case !settled:
		return "", errors.New("its sharing policy is being changed")
	case has == want:
		return want, nil
	case has == "":
		return "", errors.New("its MPS daemon has not been requested yet")
	default:
		return "", errors.New("its sharing policy changes after its last holder has ended")
	}
}

// Client returns what a container needs that a pod's resource limits gave a share of a GPU, or nil if the GPU is not shared by
// MPS. It never waits: an error says why the GPU has no share to give now. The device plugin calls it for its device list, and
// again after the ledger has reserved the share. Safe for concurrent use.
func (p *Policy) Client(d device.Device, share device.Share) (*Client, error) {
	daemon, err := p.wantedDaemon(d)
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
	l := p.manager.policyLimit(d.GPU.UUID, share)
	if d.MemoryBytes() == 0 {
		l = limit{} // the share has no real amount of memory then (device.Replica)
	}
	if policy := d.Sharing(); policy.Claims == device.ByMemory {
		l.threads = 100 / policy.ReplicaCount()
	}
	c := p.manager.client(daemon, l)
	return &c, nil
}

// errNoMemory refuses a share that was allocated under a policy without MPS. Its client would have no limit.
var errNoMemory = errors.New("the GPU is shared by MPS now, and the claim has a share without memory: delete its pod, so that it is allocated again")

// Join makes a claim with a share of a GPU a client of the GPU's daemon, and returns its client device; none where the GPU is
// not shared by MPS. The DRA driver calls it after the ledger has reserved the share. It waits until the policy is applied,
// unless pods of the claim run already: others of it then share the GPU like these. A *NotReadyError says that ctx ended
// before the daemon was ready. Idempotent, and safe for concurrent use.
func (p *Policy) Join(ctx context.Context, claim Claim, d device.Device, share device.Share) (clientDevices []string, err error) {
	daemon, err := p.awaitPolicy(ctx, claim, d)
	if err == nil && daemon != "" {
		err = p.admit(claim, d.Ref())
	}
	if err == nil && daemon != "" && !share.Whole() && share.Bytes == 0 {
		err = errNoMemory
	}
	if err == nil && daemon != "" {
		var client string
		client, err = p.manager.connect(ctx, claim, daemon, p.manager.policyLimit(d.GPU.UUID, share))
		clientDevices = []string{client}
	}
	if errors.Is(err, errCancelled) {
		err = fmt.Errorf("MPS daemon %s ended meanwhile", daemon)
	}
	if err != nil {
		return nil, fmt.Errorf("let claim %s/%s share %s: %w", claim.Namespace, claim.Name, d.Name(), err)
	}
	return clientDevices, nil
}

// admit returns an error for a claim whose namespace may not be a client of the device's daemon. A claim whose pods run stays a client.
// The error reaches the claim's namespace, which must not learn the names of others.
func (p *Policy) admit(claim Claim, ref device.Ref) error {
	now, exists := p.inventory.Inventory().ByRef(ref)
	if !exists || now.Sharing().Admits(claim.Namespace) || p.runs(Key{OwnerOf(claim.UID), ref}) {
		return nil
	}
	return fmt.Errorf("the node's sharing policy does not admit clients of namespace %s: ask for another GPU, "+
		"or add the namespace to sharing.namespaces of the node configuration", claim.Namespace)
}

func (p *Policy) awaitPolicy(ctx context.Context, claim Claim, d device.Device) (daemon string, err error) {
	key := Key{OwnerOf(claim.UID), d.Ref()}
	waits := false
	leave := func() {
		if waits {
			waits = false
			p.addJoining(key, -1)
		}
	}
	defer leave()
	for {
		p.manager.turn(ctx, "asks for the daemon of", d.Name()+" for "+claim.Name)
		inventoryChanged, settingsChanged := p.inventory.Changed(), p.manager.Changed()
		if now, exists := p.inventory.Inventory().ByRef(d.Ref()); exists {
			d = now
		}
		if daemon, err = p.wantedDaemon(d); err == nil && waits {
			// A change may have begun while this claim did not count as a holder: ask again now that it does.
			leave()
			daemon, err = p.wantedDaemon(d)
		}
		if err == nil || errors.Is(err, device.ErrUnsupported) {
			return daemon, err
		}
		if has, settled := p.daemon(d.GPU.UUID); settled && p.runs(key) {
			return has, nil
		}
		if !waits {
			waits = true
			p.addJoining(key, 1)
			p.manager.changed.Notify() // the daemon may start now
		}
		select {
		case <-ctx.Done():
			return "", errors.Join(err, context.Cause(ctx))
		case <-inventoryChanged:
		case <-settingsChanged:
		}
	}
}

// runs reports whether pods of the claim have processes.
func (p *Policy) runs(key Key) bool {
	for _, h := range p.ledger.Holds() {
		if h.Device == key.Device && h.Holder == (ledger.Holder{Kind: ledger.KindClaim, ID: key.Owner.Claim()}) {
			return p.podStates.Busy(h)
		}
	}
	return false
}

func (p *Policy) addJoining(key Key, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.joining[key] += n; p.joining[key] == 0 {
		delete(p.joining, key)
	}
}

// policyLimit is the limit in a client's environment, where the daemon itself sets none.
func (m *Manager) policyLimit(gpu string, share device.Share) limit {
	s, _ := m.Records.Get(policyKey(gpu))
	if s.Settings == nil || len(s.Settings.PinnedMemoryMiB) > 0 || share.Whole() {
		return limit{}
	}
	return limit{mib: share.Bytes / mib}
}
