// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	specs "tags.cncf.io/container-device-interface/specs-go"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/keylock"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

// Hardware is the NVIDIA driver. All methods concern one GPU, are idempotent, and end with ctx. *nvml.Node implements it.
type Hardware interface {
	ComputeMode(ctx context.Context, gpu string) (device.ComputeMode, error)
	SetComputeMode(ctx context.Context, gpu string, mode device.ComputeMode) (before device.ComputeMode, err error)
	// SetTimeSlice takes 0 (the driver's default) to 3 (long).
	SetTimeSlice(ctx context.Context, gpu string, slice int) error
}

// Specs writes the client devices. *cdi.Specs implements it.
type Specs interface {
	// WriteClientDevice writes a client device and returns its qualified name. Idempotent and cheap.
	WriteClientDevice(name string, edits specs.ContainerEdits) (qualified string, err error)
	// RemoveClientDevices removes the client device name, and all named name.<suffix>. Idempotent.
	RemoveClientDevices(name string) error
	// ClientDevices lists the client devices named name.<suffix>.
	ClientDevices(name string) ([]string, error)
	// RetainClientDevices removes client devices that an earlier process wrote, except the named ones and their name.<suffix>.
	RetainClientDevices(names []string) error
}

// Options of a Manager. All but Turn are required.
type Options struct {
	// Records are loaded.
	Records *Records
	// RunDir is the agent's run directory, at the same path on the host. The daemons' directories are in it.
	RunDir string
	// DriverRoot is the directory on the host in which the driver is installed.
	DriverRoot string
	Hardware   Hardware
	Specs      Specs
	// Turn, where set, is called before each attempt to do what is named, without a mutex. A simulation orders concurrent attempts by it.
	Turn func(ctx context.Context, what string)
}

// Manager applies and reverts sharing settings. All methods are safe for concurrent use. Slow work for one claim delays no
// other claim.
type Manager struct {
	Options
	changed broadcast.Signal
	locks   keylock.Locks[Owner]

	mu sync.Mutex
	// daemons are those that are requested, by name.
	daemons map[string]*daemon
	// unused are devices that Revert was called for while other devices of their daemon are in use.
	unused map[Key]bool
	// slices are the time slices that this process has set. nvidia-smi is too slow to set them at each Prepare.
	slices map[Key]parametersv1beta1.Interval
}

// NewManager has no visible effect. Recorded settings count as applied; Run applies them again.
func NewManager(o Options) *Manager {
	m := &Manager{Options: o, daemons: map[string]*daemon{}, unused: map[Key]bool{}, slices: map[Key]parametersv1beta1.Interval{}}
	for _, key := range o.Records.Keys() {
		if s, ok := o.Records.Get(key); ok && s.Settings != nil && !s.Reverting {
			m.request(s.Daemon, *s.Settings)
		}
	}
	return m
}

// Changed returns a channel that is closed when Daemons or All change; take it before you call them.
func (m *Manager) Changed() <-chan struct{} { return m.changed.Changed() }

// Applied reports whether settings of that claim are applied to the device, or are about to be.
func (m *Manager) Applied(claim string, ref device.Ref) bool { return m.Records.Applied(claim, ref) }

// All returns the devices of claims for which Applied is true, sorted.
func (m *Manager) All() []Key {
	return m.Records.where(func(key Key, _ setting) bool { return !key.Owner.isPolicy() })
}

// Apply applies the settings of a group and returns the client devices of its containers; none if the group needs no daemon. It waits until
// earlier settings of the devices are reverted, and until the daemon is ready. reserved returns an error if the claim has no longer reserved
// the devices. It is called when the settings are recorded: from then on the ledger's hold ends only after Revert
// (TestUnpreparedBeforeApply). Idempotent. The next attempt completes what a failed one left behind, or Revert reverts it. A *NotReadyError
// says that ctx ended before the daemon was ready.
func (m *Manager) Apply(ctx context.Context, g Group, reserved func() error) (clientDevices []string, err error) {
	defer func() { err = wrapGroup(err, g) }()
	if err := m.await(ctx, g); err != nil {
		return nil, err
	}
	daemon, err := m.recordAndSet(ctx, g, reserved)
	if err != nil || daemon == "" {
		return nil, err
	}
	// No lock is held while a daemon starts.
	client, err := m.connect(ctx, g.Claim, daemon, limit{})
	if err != nil {
		return nil, err
	}
	return []string{client}, nil
}

func (m *Manager) recordAndSet(ctx context.Context, g Group, reserved func() error) (daemon string, err error) {
	unlock, err := m.lock(ctx, g.owner())
	if err != nil {
		return "", err
	}
	defer unlock()
	next, err := m.recordGroup(ctx, g)
	if err != nil {
		return "", err
	}
	if err := reserved(); err != nil {
		return "", err
	}
	return m.setGroup(ctx, g, next)
}

// await waits until all settings of earlier claims on these devices are reverted, and reverts those of the sharing policy. An
// earlier process may have left settings without a hold.
func (m *Manager) await(ctx context.Context, g Group) error {
	for {
		m.turn(ctx, "waits for earlier settings on", g.Devices[0].Name())
		changed := m.Changed()
		if err := m.revertPolicy(ctx, g); err != nil {
			return err
		}
		others := m.others(g)
		if len(others) == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			// The error reaches the claim's namespace, which must not learn the names of another one.
			name := "another claim"
			if of, _ := m.Records.Get(others[0]); of.Namespace == g.Claim.Namespace {
				name = "claim " + of.Namespace + "/" + of.Name
			}
			return fmt.Errorf("wait until the settings of %s on %s are reverted: %w", name, others[0].Device, context.Cause(ctx))
		}
	}
}

// lock waits until no other caller changes settings of the owner, or until ctx is done. The caller calls unlock exactly once.
func (m *Manager) lock(ctx context.Context, owner Owner) (unlock func(), err error) {
	unlock, err = m.locks.Lock(ctx, owner)
	if err != nil {
		return nil, fmt.Errorf("wait for an earlier change of the settings of %s: %w", owner, err)
	}
	m.turn(ctx, "changes the settings of", string(owner))
	return unlock, nil
}

func (m *Manager) turn(ctx context.Context, what, of string) {
	if m.Turn != nil {
		m.Turn(ctx, what+" "+of)
	}
}

// recordGroup records what is about to be set, and returns it; nil if nothing is to be set. It reverts other settings that the claim had on
// the devices. Needs the claim's lock.
func (m *Manager) recordGroup(ctx context.Context, g Group) (*setting, error) {
	next, err := m.settingsOf(g)
	if err != nil {
		return nil, err
	}
	own := m.Records.where(func(key Key, _ setting) bool { return key.Owner == g.owner() && g.overlaps(key.Device) })
	for _, key := range own {
		before, ok := m.Records.Get(key)
		// Gone if it was reverted with another device of its daemon.
		if ok && !(slices.Contains(g.keys(), key) && before.sameAs(next)) {
			if err := m.revert(ctx, m.sameDaemon(key)); err != nil {
				return nil, err
			}
		}
	}
	if next == nil {
		return nil, nil
	}
	for _, key := range g.keys() {
		if err := m.record(ctx, key, *next); err != nil {
			return nil, err
		}
	}
	return next, nil
}

// settingsOf returns the one setting for all devices of the group, without Before; nil if nothing is to be set. Needs the lock.
func (m *Manager) settingsOf(g Group) (*setting, error) {
	s := setting{Namespace: g.Claim.Namespace, Name: g.Claim.Name, Strategy: g.Sharing.Strategy}
	switch {
	case len(g.Devices) == 0, g.Sharing.Strategy == "":
		return nil, nil
	case g.Sharing.Strategy == Exclusive:
		s.SliceUnset = true
	case g.Sharing.Strategy == parametersv1beta1.TimeSlicing && !g.Devices[0].Whole():
		return nil, nil // the driver has no time slice for a partition
	case g.Sharing.Strategy == parametersv1beta1.TimeSlicing:
		s.Interval, s.SliceUnset = g.Sharing.Interval, true
	case g.Sharing.MPS == nil:
		return nil, fmt.Errorf("unknown strategy %q", g.Sharing.Strategy)
	default:
		name, err := daemonName(g)
		if err != nil {
			return nil, err
		}
		settings := Settings(g.Devices, *g.Sharing.MPS, m.DriverRoot)
		if err := settings.Validate(); err != nil {
			return nil, fmt.Errorf("settings of its MPS daemon: %w", err)
		}
		settings.Generation = m.generation(g, name)
		s.Daemon, s.Settings = name, &settings
	}
	return &s, nil
}

// generation of the group's daemon: the recorded one, or a new one.
func (m *Manager) generation(g Group, daemon string) int64 {
	for _, key := range g.keys() {
		known, ok := m.Records.Get(key)
		if ok && known.Settings != nil && known.Daemon == daemon && !known.Reverting {
			return known.Settings.Generation
		}
	}
	return time.Now().UnixMicro()
}

// record records s with what has to be restored later.
func (m *Manager) record(ctx context.Context, key Key, s setting) error {
	if known, ok := m.Records.Get(key); ok {
		s.Before, s.SliceUnset = known.Before, known.SliceUnset
		if known.Settings == nil || s.Settings == nil || known.Settings.Hash() == s.Settings.Hash() {
			return nil
		}
	} else if key.Device.Whole() {
		before, err := m.Hardware.ComputeMode(ctx, key.Device.GPU)
		if supported(err) != nil {
			return err
		}
		// The policy, which is reverted before this is set, may have changed the mode: its record has the mode before that.
		policy, _ := m.Records.Get(policyKey(key.Device.GPU))
		s.Before = cmp.Or(policy.Before, before, device.ComputeModeDefault)
	}
	defer m.changed.Notify()
	return m.Records.Put(key, s)
}

// setGroup sets what was recorded and requests the daemon. It does not wait for the daemon. Needs the claim's lock.
func (m *Manager) setGroup(ctx context.Context, g Group, next *setting) (daemon string, err error) {
	// Settings of the policy may have come back since await. Both sides record before they check, so that one finds the other.
	if err := m.revertPolicy(ctx, g); err != nil {
		return "", err
	}
	m.mu.Lock()
	for _, key := range g.keys() {
		delete(m.unused, key)
	}
	m.mu.Unlock()
	for _, key := range g.keys() {
		if s, planned := m.Records.Get(key); planned {
			if err := m.set(ctx, key, s); err != nil {
				return "", err
			}
		}
	}
	if next == nil || next.Daemon == "" {
		return "", nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := mps.Make(m.dir(next.Daemon)); err != nil {
		return "", err
	}
	m.request(next.Daemon, *next.Settings)
	return next.Daemon, nil
}

// set sets what is recorded. Needs the claim's lock.
func (m *Manager) set(ctx context.Context, key Key, s setting) error {
	if !key.Device.Whole() {
		return nil
	}
	if s.Settings != nil {
		_, err := m.Hardware.SetComputeMode(ctx, key.Device.GPU, device.ComputeModeExclusiveProcess)
		return err
	}
	// A GPU that does not support compute modes is always in the default mode.
	_, err := m.Hardware.SetComputeMode(ctx, key.Device.GPU, device.ComputeModeDefault)
	if err = supported(err); err != nil || s.Strategy != parametersv1beta1.TimeSlicing || m.hasSlice(key, s.Interval) {
		return err
	}
	if err := m.setSlice(ctx, key, s); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.slices[key] = s.Interval
	return nil
}

// setSlice sets the time slice. It records that before, so that a slice is restored only where one may have been set. If the GPU
// supports no slice, or the agent has no right to set one, a restore would always fail (TestUnsupported).
func (m *Manager) setSlice(ctx context.Context, key Key, s setting) error {
	record := func(unset bool) error {
		if s.SliceUnset == unset {
			return nil
		}
		s.SliceUnset = unset
		return m.Records.Put(key, s)
	}
	unset := s.SliceUnset // false if an earlier process may have set the slice
	if err := record(false); err != nil {
		return err
	}
	err := m.Hardware.SetTimeSlice(ctx, key.Device.GPU, timeSlice(s.Interval))
	if !errors.Is(err, device.ErrUnsupported) {
		return err
	}
	if recordErr := record(unset); recordErr != nil || timeSlice(s.Interval) == 0 {
		return recordErr // such a GPU always has the driver's default
	}
	return err
}

func (m *Manager) hasSlice(key Key, interval parametersv1beta1.Interval) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.slices[key] == interval
}

// forgetSlices makes the next Apply set the GPU's time slice again.
func (m *Manager) forgetSlices(gpu string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.DeleteFunc(m.slices, func(key Key, _ parametersv1beta1.Interval) bool { return key.Device.GPU == gpu })
}

// supported returns nil where the GPU does not support what was to be set.
func supported(err error) error {
	if errors.Is(err, device.ErrUnsupported) {
		return nil
	}
	return err
}

// ErrStillShared reports that the device is reverted later: other devices of its claim, which have the same daemon, are in use.
var ErrStillShared = errors.New("its claim uses other devices with the same MPS daemon")

// restored returns nil where there is nothing to restore: the GPU does not support the setting, or is gone, and its settings with it.
func restored(err error) error {
	if errors.Is(err, device.ErrNoGPU) {
		return nil
	}
	return supported(err)
}

// Revert restores what the device had before the claim, and removes the record, unless the claim's hold has not ended. It asks once no other
// caller changes settings of the claim. A daemon of several devices ends with the last of them: until then Applied stays true for all, and the
// error is an ErrStillShared (TestMPS). Idempotent; after an error Applied stays true.
func (m *Manager) Revert(ctx context.Context, key Key, unused func() bool) error {
	unlock, err := m.lock(ctx, key.Owner)
	if err != nil {
		return err
	}
	defer unlock()
	if !unused() || !m.Records.has(key) {
		return nil
	}
	group := m.sameDaemon(key)
	m.mu.Lock()
	m.unused[key] = true
	used := slices.ContainsFunc(group, func(member Key) bool { return !m.unused[member] })
	m.mu.Unlock()
	err = ErrStillShared
	if !used {
		err = m.revert(ctx, group)
	}
	if err != nil {
		return fmt.Errorf("revert sharing settings of %s: %w", key.Device, err)
	}
	return nil
}

// sameDaemon returns the devices of the claim with the same daemon. An unreadable record may belong to any daemon.
func (m *Manager) sameDaemon(key Key) []Key {
	of, _ := m.Records.Get(key)
	return m.Records.where(func(other Key, s setting) bool {
		return other == key || other.Owner == key.Owner && (of.Unknown || s.Unknown || of.Daemon != "" && s.Daemon == of.Daemon)
	})
}

// revert ends the daemons of the devices, then restores the GPUs. Needs the claim's lock.
func (m *Manager) revert(ctx context.Context, group []Key) error {
	defer m.changed.Notify()
	if err := m.endDaemons(ctx, group); err != nil {
		return err
	}
	var errs []error
	for _, key := range group {
		errs = append(errs, m.restore(ctx, key))
	}
	return errors.Join(errs...)
}

// endDaemons ends the daemons of the devices. From then on their settings are reverted before any are applied. Needs the claim's lock.
func (m *Manager) endDaemons(ctx context.Context, group []Key) error {
	daemons, unknown := map[string]bool{}, false
	for _, key := range group {
		s, ok := m.Records.Get(key)
		unknown = unknown || s.Unknown
		if !ok || s.Daemon == "" {
			continue
		}
		daemons[s.Daemon] = true
		if !s.Reverting {
			s.Reverting = true
			if err := m.Records.Put(key, s); err != nil {
				return err
			}
		}
	}
	if unknown {
		for _, name := range m.unrecordedDaemons() {
			if ownerOfDaemon(name) == group[0].Owner {
				daemons[name] = true
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(daemons)) {
		if err := m.end(ctx, name); err != nil {
			return err
		}
		// What clients wrote there must not keep the GPUs: endStaleDaemons retries, and reports the error.
		_ = removeDir(m.dir(name))
	}
	return nil
}

// policyInForce reports whether the policy's settings are in force on the GPU of a claim's record. Then the claim has set nothing: it reverts
// the policy's settings before it sets its own.
func (m *Manager) policyInForce(key Key) bool {
	policy, recorded := m.Records.Get(policyKey(key.Device.GPU))
	return recorded && !policy.Unknown && !key.Owner.isPolicy()
}

// restore restores a GPU and removes the record.
func (m *Manager) restore(ctx context.Context, key Key) error {
	s, ok := m.Records.Get(key)
	if !ok {
		return nil
	}
	whole := key.Device.Whole()
	if whole && !key.Owner.isPolicy() {
		unlock, err := m.lock(ctx, policyOwner(key.Device.GPU))
		if err != nil {
			return err
		}
		defer unlock()
		whole = !m.policyInForce(key) // the GPU stays as the policy set it
	}
	if whole {
		before := s.Before
		if s.Unknown {
			before = device.ComputeModeDefault
		}
		if s.Unknown || !s.SliceUnset && timeSlice(s.Interval) != 0 {
			err := m.Hardware.SetTimeSlice(ctx, key.Device.GPU, timeSlice(parametersv1beta1.IntervalDefault))
			if restored(err) != nil {
				return err
			}
		}
		if _, err := m.Hardware.SetComputeMode(ctx, key.Device.GPU, before); restored(err) != nil {
			return err
		}
		m.forgetSlices(key.Device.GPU)
	}
	m.mu.Lock()
	delete(m.unused, key)
	m.mu.Unlock()
	return m.Records.Drop(key)
}

// revertPolicy reverts what the sharing policy set on the devices of a claim that has them as a whole.
func (m *Manager) revertPolicy(ctx context.Context, g Group) error {
	for _, key := range m.others(g) {
		if !key.Owner.isPolicy() {
			continue
		}
		unlock, err := m.lock(ctx, key.Owner)
		if err == nil {
			err = m.revert(ctx, m.sameDaemon(key))
			unlock()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// others returns the settings of other claims on the devices of a group.
func (m *Manager) others(g Group) []Key {
	return m.Records.where(func(key Key, _ setting) bool { return key.Owner != g.owner() && g.overlaps(key.Device) })
}

func wrapGroup(err error, g Group) error {
	if err == nil {
		return nil
	}
	var names []string
	for _, d := range g.Devices {
		names = append(names, d.Name())
	}
	if g.policy {
		return fmt.Errorf("share %s by the node's policy: %w", strings.Join(names, ", "), err)
	}
	return fmt.Errorf("share %s among the containers of claim %s/%s: %w", strings.Join(names, ", "), g.Claim.Namespace, g.Claim.Name, err)
}
