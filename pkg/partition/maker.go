// SPDX-License-Identifier: Apache-2.0

// Package partition creates MIG partitions for claims and destroys them. It records each partition on disk before it asks
// the driver to create it, and removes the record once the partition is gone. So after a crash the next process completes
// or destroys what the last one began. It never changes a partition without a record. The ledger decides who may have a
// partition, before this package is called.
package partition

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/tandem-gpu/tandem/internal/keylock"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mig"
)

// Hardware is the NVIDIA driver. Maker makes one call at a time for each GPU. *nvml.Node implements it.
type Hardware interface {
	device.Source
	// EnableMIG and DisableMIG switch MIG mode without a GPU reset. Idempotent.
	EnableMIG(ctx context.Context, gpu string) error
	DisableMIG(ctx context.Context, gpu string) error
	// Create creates a complete partition, or nothing. The inventory lists it when Create returns.
	Create(ctx context.Context, ref device.Ref, profile device.Profile) (device.Partition, error)
	// Destroy removes the partition at ref, complete or not, or as much of it as it can. Idempotent.
	Destroy(ctx context.Context, ref device.Ref) error
	// Partitions reads the GPU's partitions from the driver. One without a compute instance has no UUID.
	Partitions(ctx context.Context, gpu string) ([]device.Partition, error)
}

// UnmanagedError reports that an unmanaged partition overlaps the requested device.
type UnmanagedError struct {
	// Device is the name of the requested partition or GPU.
	Device    string
	Unmanaged device.Partition
}

// Error names both devices.
func (e *UnmanagedError) Error() string {
	return fmt.Sprintf("%s is not available: partition %s (%s), which Tandem did not create, overlaps it", e.Device, e.Unmanaged.Name(),
		cmp.Or(e.Unmanaged.UUID, "without a compute instance"))
}

// Maker creates and destroys partitions, and records them. All methods are safe for concurrent use. Those that change a GPU wait until no other
// caller changes it. Only then do they ask whether they still may: the caller's answer holds until they return.
type Maker struct {
	*Records
	hardware Hardware
	policy   Policy
	locks    keylock.Locks[string]
	// left has the GPUs that are no longer dynamic and whose MIG mode could not be switched off with their last partition.
	left sync.Map
}

// Policy is the node configuration for a GPU. Both functions are required.
type Policy struct {
	// Dynamic selects dynamic GPUs.
	Dynamic func(device.GPU) bool
	// Sharing returns how the holders of a GPU share it.
	Sharing func(device.GPU) device.Sharing
}

// Apply returns a copy of the inventory with what the policy says. Pure.
func (p Policy) Apply(inv device.Inventory) device.Inventory {
	inv.GPUs = slices.Clone(inv.GPUs)
	for i := range inv.GPUs {
		gpu := &inv.GPUs[i]
		gpu.Dynamic = gpu.MIGCapable && p.Dynamic(*gpu)
		gpu.Sharing = p.Sharing(*gpu)
	}
	return inv
}

// NewMaker has no visible effect.
func NewMaker(records *Records, hardware Hardware, policy Policy) *Maker {
	return &Maker{Records: records, hardware: hardware, policy: policy}
}

// Changed returns a channel that is closed at the next change of the inventory. Take it before you read Inventory.
func (m *Maker) Changed() <-chan struct{} { return m.hardware.Changed() }

// Inventory is the driver's inventory, completed from the policy and the records.
func (m *Maker) Inventory() device.Inventory {
	inv := m.policy.Apply(m.hardware.Inventory())
	for i := range inv.GPUs {
		gpu := &inv.GPUs[i]
		gpu.Partitions = slices.Clone(gpu.Partitions)
		for j, p := range gpu.Partitions {
			gpu.Partitions[j].Made = m.created(p)
		}
	}
	return inv
}

// lock waits until no other caller changes the GPU, or until ctx is done.
func (m *Maker) lock(ctx context.Context, gpu string) (unlock func(), err error) {
	unlock, err = m.locks.Lock(ctx, gpu)
	if err != nil {
		return nil, fmt.Errorf("wait for an earlier change of the partitions of GPU %s: %w", gpu, err)
	}
	return unlock, nil
}

// Request is a partition that a claim has reserved.
type Request struct {
	device.Partition
	// Reserved returns an error if the claim has no longer reserved the partition. It is called when the partition is recorded: from then on
	// the ledger's hold ends only after Destroy. TestUnpreparedBeforeCreate fails if it is called before the record.
	Reserved func() error
	// Publish writes what container runtimes need to know of the created partition, before another caller can destroy it.
	Publish func(context.Context, device.Partition) error
}

// Create records the partition, creates it if it does not exist, and publishes it. Idempotent. Destroy removes what a failed attempt left
// behind. An *UnmanagedError needs an administrator; most other errors are worth a retry.
func (m *Maker) Create(ctx context.Context, request Request) (_ device.Partition, err error) {
	want := request.Partition
	defer func() { err = wrap(err, "create partition %s", want.Name()) }()
	unlock, err := m.lock(ctx, want.Ref.GPU)
	if err != nil {
		return device.Partition{}, err
	}
	defer unlock()
	found, complete, err := m.record(ctx, want)
	if err != nil {
		return device.Partition{}, err
	}
	if err := request.Reserved(); err != nil {
		return device.Partition{}, err
	}
	created, err := m.create(ctx, want, found, complete)
	if err != nil {
		return device.Partition{}, err
	}
	if err := request.Publish(ctx, created); err != nil {
		return device.Partition{}, fmt.Errorf("write its CDI device: %w", err)
	}
	return created, nil
}

// record records that want is about to be created, and returns what find has found. Under the GPU's lock.
func (m *Maker) record(ctx context.Context, want device.Partition) (found *device.Partition, complete bool, err error) {
	found, complete, err = m.find(ctx, want)
	if err != nil || complete {
		return found, complete, err
	}
	want.UUID = "" // that of an earlier partition would not match the next one
	return found, complete, m.put(want)
}

// create returns the recorded partition want, and creates it if record has not found it complete. Under the GPU's lock.
func (m *Maker) create(ctx context.Context, want device.Partition, found *device.Partition, complete bool) (device.Partition, error) {
	switch {
	case complete:
		found.Made = true
		return *found, m.put(*found)
	case found != nil:
		if err := m.hardware.Destroy(ctx, want.Ref); err != nil {
			return device.Partition{}, fmt.Errorf("destroy the incomplete partition at its placement: %w", err)
		}
	}
	gpu, profile, err := m.profileOf(want)
	if err != nil {
		return device.Partition{}, err
	}
	// The inventory may be older than a reset, which ends MIG mode. So it does not tell whether MIG mode is on.
	if err := m.hardware.EnableMIG(ctx, gpu.UUID); err != nil {
		return device.Partition{}, err
	}
	p, err := m.hardware.Create(ctx, want.Ref, profile)
	if err != nil {
		return device.Partition{}, err
	}
	p.Made = true
	return p, m.put(p)
}

// find returns Tandem's own partition at want's placement, or nil, and whether it is complete. Any other partition that overlaps is an
// error, also one of Tandem's own with another profile: its record must stay until it is destroyed (TestAnotherProfileAtThePlacement).
func (m *Maker) find(ctx context.Context, want device.Partition) (found *device.Partition, complete bool, err error) {
	if _, _, err := m.profileOf(want); err != nil {
		return nil, false, err
	}
	existing, err := m.hardware.Partitions(ctx, want.Ref.GPU)
	if err != nil {
		return nil, false, err
	}
	for i, p := range existing {
		switch {
		case !p.Ref.Overlaps(want.Ref):
		case p.Ref != want.Ref || p.ProfileID != want.ProfileID || !m.created(p):
			return nil, false, m.overlap(want.Name(), p)
		default:
			found = &existing[i]
		}
	}
	return found, found != nil && found.UUID != "", nil
}

// Exists reports whether the driver still has a partition. The inventory may be a scan behind an administrator who removes one. Prepare calls it.
func (m *Maker) Exists(ctx context.Context, p device.Partition) (bool, error) {
	existing, err := m.hardware.Partitions(ctx, p.Ref.GPU)
	return slices.ContainsFunc(existing, func(e device.Partition) bool { return e.UUID == p.UUID }), err
}

// profileOf returns the GPU and the profile of a partition.
func (m *Maker) profileOf(want device.Partition) (device.GPU, device.Profile, error) {
	gpu, ok := m.hardware.Inventory().ByUUID(want.Ref.GPU)
	if !ok {
		return device.GPU{}, device.Profile{}, errors.New("its GPU does not exist")
	}
	i := slices.IndexFunc(gpu.Profiles, func(p device.Profile) bool { return p.ID == want.ProfileID })
	if i < 0 || !slices.Contains(gpu.Profiles[i].Placements, want.Ref.Placement) {
		return device.GPU{}, device.Profile{}, fmt.Errorf("its GPU %s has no such profile and placement", gpu.Name())
	}
	return gpu, gpu.Profiles[i], nil
}

// overlap is the error that partition p causes for the requested device: Tandem destroys its own partitions, so that a retry
// helps (TestOwnPartitionOverlaps).
func (m *Maker) overlap(requested string, p device.Partition) error {
	if m.created(p) {
		return fmt.Errorf("partition %s overlaps it and is not destroyed yet", p.Name())
	}
	return &UnmanagedError{Device: requested, Unmanaged: p}
}

// Destroy destroys a recorded partition, complete or not, and removes its record, unless a holder uses it. A partition without a record
// stays. Idempotent; after an error the record remains. If MIG mode cannot be switched off, that is no error: IdleMIGMode returns the GPU.
func (m *Maker) Destroy(ctx context.Context, ref device.Ref, unused func() bool) (err error) {
	defer func() { err = wrap(err, "destroy partition %s", ref) }()
	unlock, err := m.lock(ctx, ref.GPU)
	if err != nil {
		return err
	}
	defer unlock()
	if !unused() || !m.Made(ref) {
		return nil
	}
	existing, err := m.hardware.Partitions(ctx, ref.GPU)
	switch {
	case errors.Is(err, device.ErrNoGPU):
		return m.store.Drop(ref) // its partitions went with it
	case err != nil:
		return err
	}
	others := false
	for _, p := range existing {
		others = others || p.Ref.Placement != ref.Placement
		// With another UUID it is an administrator's, who destroyed Tandem's before. With the same UUID, which the driver may give to it,
		// nothing tells it from Tandem's (TestReplacedWithTheSameUUID).
		if p.Ref.Placement == ref.Placement && m.created(p) {
			if err := m.hardware.Destroy(ctx, ref); err != nil {
				return err
			}
		}
	}
	if err := m.disableStatic(ctx, ref, others); err != nil {
		// Another process may have the GPU open. EndIdleMIGMode tries again and returns the error. The record must end now: a later Destroy could find
		// an administrator's partition, to which the driver gave the same UUID.
		m.left.Store(ref.GPU, true)
	}
	return m.store.Drop(ref)
}

// disableStatic switches off MIG mode with the last partition of a GPU that is no longer dynamic: Tandem switched it on, and
// no administrator would expect it (TestLastPartitionOfAStaticGPU).
func (m *Maker) disableStatic(ctx context.Context, ref device.Ref, others bool) error {
	gpu, ok := m.hardware.Inventory().ByUUID(ref.GPU)
	if !ok || others || m.policy.Dynamic(gpu) || !gpu.MIGEnabled || !mig.Switchable(gpu) {
		return nil
	}
	if slices.ContainsFunc(m.All(), func(r device.Ref) bool { return r.GPU == ref.GPU && r != ref }) {
		return nil
	}
	return m.hardware.DisableMIG(ctx, ref.GPU)
}

// EnsureWhole switches off MIG mode of a dynamic GPU. reserved returns an error if the caller has no longer reserved it as a whole.
// Idempotent, and cheap if the mode is off. Errors are those of Create.
func (m *Maker) EnsureWhole(ctx context.Context, uuid string, reserved func() error) error {
	unlock, err := m.lock(ctx, uuid)
	if err != nil {
		return wrap(err, "make GPU %s whole", uuid)
	}
	defer unlock()
	if err := reserved(); err != nil {
		return wrap(err, "make GPU %s whole", uuid)
	}
	gpu, ok := m.Inventory().ByUUID(uuid)
	if !ok || !gpu.Dynamic || !gpu.MIGEnabled {
		return nil
	}
	return wrap(m.disableMIG(ctx, gpu), "switch off MIG mode of %s", gpu.Name())
}

func (m *Maker) disableMIG(ctx context.Context, gpu device.GPU) error {
	existing, err := m.hardware.Partitions(ctx, gpu.UUID)
	if err != nil {
		return err
	}
	if len(existing) > 0 {
		return m.overlap(gpu.Name(), existing[0])
	}
	return m.hardware.DisableMIG(ctx, gpu.UUID)
}

// IdleMIGMode returns the GPUs in idle MIG mode: without a partition and without a record of one. They are dynamic,
// or Destroy could not switch their MIG mode off.
func (m *Maker) IdleMIGMode() []device.GPU {
	return slices.DeleteFunc(m.Inventory().GPUs, func(gpu device.GPU) bool {
		if !gpu.MIGEnabled || slices.ContainsFunc(gpu.Partitions, func(p device.Partition) bool { return !p.Made }) {
			m.left.Delete(gpu.UUID) // an administrator has taken over
		}
		_, left := m.left.Load(gpu.UUID)
		return !gpu.Dynamic && !left || !gpu.MIGEnabled || len(gpu.Partitions) > 0 || !mig.Switchable(gpu) || !gpu.Health.Healthy() || m.recorded(gpu.UUID)
	})
}

func (m *Maker) recorded(gpu string) bool {
	return slices.ContainsFunc(m.All(), func(ref device.Ref) bool { return ref.GPU == gpu })
}

// EndIdleMIGMode switches off MIG mode of a GPU, so that pods can have it, unless a holder uses the GPU. Idempotent.
func (m *Maker) EndIdleMIGMode(ctx context.Context, gpu device.GPU, unused func() bool) error {
	unlock, err := m.lock(ctx, gpu.UUID)
	if err != nil {
		return err
	}
	defer unlock()
	if !unused() || m.recorded(gpu.UUID) {
		return nil
	}
	err = m.disableMIG(ctx, gpu)
	if err == nil {
		m.left.Delete(gpu.UUID)
	}
	return wrap(err, "switch off idle MIG mode of %s", gpu.Name())
}

// wrap names the operation that failed. An *UnmanagedError names its devices already.
func wrap(err error, format string, args ...any) error {
	if _, unmanaged := errors.AsType[*UnmanagedError](err); err == nil || unmanaged {
		return err
	}
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), err)
}
