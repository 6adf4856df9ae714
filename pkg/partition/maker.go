// SPDX-License-Identifier: Apache-2.0

// Package partition makes MIG partitions for claims and destroys them again, as transactions: what is about to be made is
// recorded before the driver is asked, and the record goes when the partition is gone. Between the two, a process that died
// leaves nothing that the next cannot finish or undo. Partitions without a record are somebody else's and are never touched.
// Who may have a partition is the ledger's decision, and has been made before.
package partition

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mig"
)

// Hardware is the NVIDIA driver. Calls about one GPU come one at a time. *nvml.Node implements it.
type Hardware interface {
	Inventory() device.Inventory
	// Changed returns a channel that is closed at the next change of the inventory. It is taken before Inventory is read.
	Changed() <-chan struct{}
	// EnableMIG and DisableMIG switch the mode of a GPU that can without a reset. Idempotent.
	EnableMIG(ctx context.Context, gpu string) error
	DisableMIG(ctx context.Context, gpu string) error
	// Create makes a partition, or nothing. The inventory has it when Create returns.
	Create(ctx context.Context, ref device.Ref, profile device.Profile) (device.Partition, error)
	// Destroy removes what is in that place, complete or not, or all that it can of it. Idempotent.
	Destroy(ctx context.Context, ref device.Ref) error
	// Partitions are those of the GPU as they are now. One without a compute instance has no UUID.
	Partitions(ctx context.Context, gpu string) ([]device.Partition, error)
}

// ForeignError says that a partition which nobody here has made is in the way.
type ForeignError struct {
	// Wanted is the name of a partition, or of a GPU as a whole.
	Wanted  string
	Foreign device.Partition
}

// Error names both.
func (e *ForeignError) Error() string {
	return fmt.Sprintf("%s cannot be had: partition %s (%s), which Tandem has not made, is in the way", e.Wanted, e.Foreign.Name(),
		cmp.Or(e.Foreign.UUID, "without a compute instance"))
}

// Maker makes and destroys partitions. All methods are safe for concurrent use; a slow GPU keeps nobody from another.
type Maker struct {
	records  *Records
	hardware Hardware
	policy   Policy

	mu    sync.Mutex
	turns map[string]chan struct{}
}

// Policy is what the node's configuration says of a GPU. A nil func says nothing of any.
type Policy struct {
	// Dynamic GPUs may be partitioned on demand.
	Dynamic func(device.GPU) bool
	// Sharing is how the others may have several holders.
	Sharing func(device.GPU) device.Sharing
}

// NewMaker does nothing visible.
func NewMaker(records *Records, hardware Hardware, policy Policy) *Maker {
	if policy.Dynamic == nil {
		policy.Dynamic = func(device.GPU) bool { return false }
	}
	if policy.Sharing == nil {
		policy.Sharing = func(device.GPU) device.Sharing { return device.Sharing{} }
	}
	return &Maker{records: records, hardware: hardware, policy: policy, turns: map[string]chan struct{}{}}
}

// Changed returns a channel that is closed at the next change of the inventory. It is taken before Inventory is read.
func (m *Maker) Changed() <-chan struct{} { return m.hardware.Changed() }

// Inventory is the node's, with what policy and records say of it.
func (m *Maker) Inventory() device.Inventory {
	inv := m.hardware.Inventory()
	gpus := slices.Clone(inv.GPUs)
	for i := range gpus {
		gpus[i].Dynamic = gpus[i].MIGCapable && m.policy.Dynamic(gpus[i])
		gpus[i].Sharing = m.policy.Sharing(gpus[i])
		gpus[i].Partitions = m.mark(gpus[i].Partitions)
	}
	inv.GPUs = gpus
	return inv
}

// mark says which of the partitions were made here.
func (m *Maker) mark(partitions []device.Partition) []device.Partition {
	marked := slices.Clone(partitions)
	for i, p := range marked {
		record, ok := m.records.get(p.Ref)
		marked[i].Made = ok && record.names(p)
	}
	return marked
}

// Make returns the partition in the place of want, and makes it before if it is not there. The caller has reserved the place,
// which reserved is asked about once nobody can let go of it any more without destroying what is there. Idempotent. A
// *ForeignError says that waiting helps only if an administrator acts; most other errors are worth another try. What an attempt
// that fails has left behind is for Destroy. Ctx ends the waiting for a driver that does not answer.
func (m *Maker) Make(ctx context.Context, want device.Partition, reserved func() bool) (device.Partition, error) {
	made, err := m.make(ctx, want, reserved)
	if _, foreign := errors.AsType[*ForeignError](err); err != nil && !foreign {
		err = fmt.Errorf("make partition %s: %w", want.Name(), err)
	}
	return made, err
}

func (m *Maker) make(ctx context.Context, want device.Partition, reserved func() bool) (device.Partition, error) {
	gpu, profile, err := m.place(want)
	if err != nil {
		return device.Partition{}, err
	}
	leave, err := m.enter(ctx, gpu.UUID)
	if err != nil {
		return device.Partition{}, err
	}
	defer leave()
	found, err := m.hardware.Partitions(ctx, gpu.UUID)
	if err != nil {
		return device.Partition{}, err
	}
	record, ours := m.records.get(want.Ref)
	for _, p := range found {
		switch {
		case !p.Ref.Overlaps(want.Ref), ours && p.Ref == want.Ref && record.names(p):
		default:
			return device.Partition{}, m.inTheWay(want.Name(), p)
		}
	}
	i := slices.IndexFunc(found, func(p device.Partition) bool { return p.Ref == want.Ref })
	complete := i >= 0 && found[i].UUID != "" && found[i].ProfileID == want.ProfileID
	if !complete {
		// What is recorded of one that was there before would not name the next.
		intent := want
		intent.UUID = ""
		if err := m.records.put(intent); err != nil {
			return device.Partition{}, err
		}
	}
	switch {
	case !reserved():
		return device.Partition{}, errUnreserved
	case complete:
		found[i].Made = true
		return found[i], m.records.put(found[i])
	case i >= 0:
		if err := m.hardware.Destroy(ctx, want.Ref); err != nil {
			return device.Partition{}, fmt.Errorf("clear its place of what is half made: %w", err)
		}
	}
	// Read again: the mode may have been switched before its turn came.
	if now, _ := m.hardware.Inventory().ByUUID(gpu.UUID); !now.MIGEnabled {
		if err := m.hardware.EnableMIG(ctx, gpu.UUID); err != nil {
			return device.Partition{}, err
		}
	}
	p, err := m.hardware.Create(ctx, want.Ref, profile)
	if err != nil {
		return device.Partition{}, err
	}
	p.Made = true
	return p, m.records.put(p)
}

// errUnreserved means that kubelet has given up the claim meanwhile.
var errUnreserved = errors.New("its claim was unprepared meanwhile")

// inTheWay is why something cannot be had: somebody else's partition, or one of ours that goes.
func (m *Maker) inTheWay(wanted string, p device.Partition) error {
	if record, ours := m.records.get(p.Ref); ours && record.names(p) {
		return fmt.Errorf("partition %s, which is in the way, is not destroyed yet", p.Name())
	}
	return &ForeignError{Wanted: wanted, Foreign: p}
}

// place finds the GPU and the profile of a partition.
func (m *Maker) place(want device.Partition) (device.GPU, device.Profile, error) {
	gpu, ok := m.hardware.Inventory().ByUUID(want.Ref.GPU)
	if !ok {
		return device.GPU{}, device.Profile{}, errors.New("its GPU is not there")
	}
	i := slices.IndexFunc(gpu.Profiles, func(p device.Profile) bool { return p.ID == want.ProfileID })
	if i < 0 || !slices.Contains(gpu.Profiles[i].Placements, want.Ref.Placement) {
		return device.GPU{}, device.Profile{}, fmt.Errorf("its GPU %s has no such profile and place", gpu.Name())
	}
	return gpu, gpu.Profiles[i], nil
}

// Destroy removes a partition that was made here, complete or not, and forgets it. It asks unused once no Make of that GPU is
// under way, and does nothing where the answer is no. A partition without a record is left alone. Idempotent; after an error it
// is still recorded.
func (m *Maker) Destroy(ctx context.Context, ref device.Ref, unused func() bool) error {
	if err := m.destroy(ctx, ref, unused); err != nil {
		return fmt.Errorf("destroy partition %s: %w", ref, err)
	}
	return nil
}

func (m *Maker) destroy(ctx context.Context, ref device.Ref, unused func() bool) error {
	leave, err := m.enter(ctx, ref.GPU)
	if err != nil {
		return err
	}
	defer leave()
	record, ours := m.records.get(ref)
	if !ours || !unused() {
		return nil
	}
	found, err := m.hardware.Partitions(ctx, ref.GPU)
	if err != nil {
		return err
	}
	for _, p := range found {
		// Another UUID means that somebody has destroyed ours and made one of their own.
		if p.Ref.Placement == ref.Placement && record.names(p) {
			if err := m.hardware.Destroy(ctx, ref); err != nil {
				return err
			}
			break
		}
	}
	others := slices.ContainsFunc(found, func(p device.Partition) bool { return p.Ref.Placement != ref.Placement })
	if err := m.leave(ctx, ref, others); err != nil {
		return err
	}
	return m.records.drop(ref)
}

// leave switches the MIG mode off with the last partition of a GPU that is not to be partitioned any more: it was switched on
// here, and nobody else would do it.
func (m *Maker) leave(ctx context.Context, ref device.Ref, others bool) error {
	gpu, ok := m.hardware.Inventory().ByUUID(ref.GPU)
	if !ok || others || m.policy.Dynamic(gpu) || !gpu.MIGEnabled || !mig.Switchable(gpu) {
		return nil
	}
	if slices.ContainsFunc(m.records.All(), func(r device.Ref) bool { return r.GPU == ref.GPU && r != ref }) {
		return nil
	}
	return m.hardware.DisableMIG(ctx, ref.GPU)
}

// Whole makes a dynamic GPU usable as a whole: its MIG mode is switched off. The caller has reserved the GPU. Idempotent, and
// cheap where the mode is off. A *ForeignError says that somebody's partition is on it.
func (m *Maker) Whole(ctx context.Context, uuid string) error {
	gpu, ok := m.Inventory().ByUUID(uuid)
	if !ok || !gpu.Dynamic || !gpu.MIGEnabled {
		return nil
	}
	leave, err := m.enter(ctx, uuid)
	if err == nil {
		defer leave()
		err = m.disable(ctx, gpu)
	}
	if _, foreign := errors.AsType[*ForeignError](err); err != nil && !foreign {
		err = fmt.Errorf("switch MIG mode of %s off: %w", gpu.Name(), err)
	}
	return err
}

func (m *Maker) disable(ctx context.Context, gpu device.GPU) error {
	found, err := m.hardware.Partitions(ctx, gpu.UUID)
	if err != nil {
		return err
	}
	if len(found) > 0 {
		return m.inTheWay(gpu.Name(), found[0])
	}
	return m.hardware.DisableMIG(ctx, gpu.UUID)
}

// Resting are the dynamic GPUs that are in MIG mode for nothing: there is no partition on them, and none is being made.
func (m *Maker) Resting() []device.GPU {
	return slices.DeleteFunc(m.Inventory().GPUs, func(gpu device.GPU) bool {
		return !gpu.Dynamic || !gpu.MIGEnabled || len(gpu.Partitions) > 0 || !mig.Switchable(gpu) || !gpu.Health.Healthy() || m.recorded(gpu.UUID)
	})
}

func (m *Maker) recorded(gpu string) bool {
	return slices.ContainsFunc(m.records.All(), func(ref device.Ref) bool { return ref.GPU == gpu })
}

// Rest switches the MIG mode of such a GPU off, so that limits can have it. It asks free once no Make of that GPU is under way,
// and does nothing where the answer is no. Idempotent.
func (m *Maker) Rest(ctx context.Context, gpu device.GPU, free func() bool) error {
	leave, err := m.enter(ctx, gpu.UUID)
	if err == nil {
		defer leave()
		if free() && !m.recorded(gpu.UUID) {
			err = m.disable(ctx, gpu)
		}
	}
	if err != nil {
		return fmt.Errorf("switch MIG mode of %s off, which has no partition: %w", gpu.Name(), err)
	}
	return nil
}

// Made reports whether a partition was made for a claim, or is about to be.
func (m *Maker) Made(ref device.Ref) bool { return m.records.Made(ref) }

// All are the places of which Made is true, in no order.
func (m *Maker) All() []device.Ref { return m.records.All() }

// Repair writes records anew that somebody has removed.
func (m *Maker) Repair() error { return m.records.Repair() }

// enter waits for its turn with a GPU.
func (m *Maker) enter(ctx context.Context, gpu string) (leave func(), err error) {
	m.mu.Lock()
	turn, ok := m.turns[gpu]
	if !ok {
		turn = make(chan struct{}, 1)
		m.turns[gpu] = turn
	}
	m.mu.Unlock()
	select {
	case turn <- struct{}{}:
		return func() { <-turn }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for an earlier change of the partitions of GPU %s: %w", gpu, context.Cause(ctx))
	}
}
