// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	specs "tags.cncf.io/container-device-interface/specs-go"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

// Hardware is the NVIDIA driver. All methods are about one whole GPU, idempotent, and end with ctx. *nvml.Node implements it.
type Hardware interface {
	ComputeMode(ctx context.Context, gpu string) (device.ComputeMode, error)
	SetComputeMode(ctx context.Context, gpu string, mode device.ComputeMode) (before device.ComputeMode, err error)
	// SetTimeSlice takes 0 (the driver's default) to 3 (long).
	SetTimeSlice(ctx context.Context, gpu string, slice int) error
}

// Specs has the CDI devices that are not GPUs but what their clients need. *cdi.Specs implements it.
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

// Options of a Keeper. All are required.
type Options struct {
	// Records were loaded.
	Records *Records
	// RunDir is the agent's run directory, which has the same path on the host. The daemons' directories are below it.
	RunDir string
	// DriverRoot is where the driver is on the host.
	DriverRoot string
	Hardware   Hardware
	Specs      Specs
}

// Keeper applies settings and undoes them. All methods are safe for concurrent use; what takes its time for one claim keeps no
// other waiting.
type Keeper struct {
	Options

	mu    sync.Mutex
	turns map[string]*turn
	// daemons are those that are to run, by name.
	daemons map[string]*daemon
	// left are the devices of claims whose containers are gone, where the rest of the group is still in use.
	left map[Key]bool
	// sliced are the time slices that this process has set: the driver's tool takes long.
	sliced  map[Key]parametersv1beta1.Interval
	changed chan struct{}
}

// NewKeeper does nothing visible. What is recorded counts as applied; Run makes sure that it is.
func NewKeeper(o Options) *Keeper {
	k := &Keeper{
		Options: o, turns: map[string]*turn{}, daemons: map[string]*daemon{}, left: map[Key]bool{},
		sliced: map[Key]parametersv1beta1.Interval{}, changed: make(chan struct{}),
	}
	for _, key := range o.Records.All() {
		if s, ok := o.Records.store.Get(key); ok && s.Settings != nil && !s.Undoing {
			k.want(s.Daemon, *s.Settings)
		}
	}
	return k
}

// Changed returns a channel that is closed when Daemons or All next answer otherwise; take it before asking.
func (k *Keeper) Changed() <-chan struct{} {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.changed
}

func (k *Keeper) announce() {
	k.mu.Lock()
	defer k.mu.Unlock()
	close(k.changed)
	k.changed = make(chan struct{})
}

// Applied reports whether something was set on the device for that claim, or is about to be.
func (k *Keeper) Applied(claim string, ref device.Ref) bool { return k.Records.Applied(claim, ref) }

// All are the devices and claims of which Applied is true, in no order.
func (k *Keeper) All() []Key { return slices.DeleteFunc(k.Records.All(), Key.byPolicy) }

// errUnheld means that kubelet has given up the claim meanwhile.
var errUnheld = errors.New("its claim was unprepared meanwhile")

// Apply brings the devices to what their claim asks for, and returns the CDI devices that its containers need beside them. The
// caller has reserved the devices, which held is asked about once nobody can let go of them any more without Undo. Nothing is
// locked while it waits for a daemon; a *NotReadyError says that ctx ended before that was ready. Idempotent. What an attempt
// that fails has left behind is for the next, or for Undo.
func (k *Keeper) Apply(ctx context.Context, g Group, held func() bool) (cdiDevices []string, err error) {
	name, err := k.set(ctx, g, held)
	if err == nil && name != "" {
		var device string
		device, err = k.connect(ctx, name, limit{})
		cdiDevices = []string{device}
	}
	if err != nil {
		return nil, fmt.Errorf("share %s among the containers of claim %s/%s: %w", describe(g.Devices), g.Claim.Namespace, g.Claim.Name, err)
	}
	return cdiDevices, nil
}

func describe(devices []device.Device) string {
	var names []string
	for _, d := range devices {
		names = append(names, d.Name())
	}
	return strings.Join(names, ", ")
}

// set does all but wait for the daemon, whose name it returns if there is to be one.
func (k *Keeper) set(ctx context.Context, g Group, held func() bool) (daemon string, err error) {
	wanted, err := k.wanted(g)
	if err != nil {
		return "", err
	}
	if err := k.awaitOthers(ctx, g); err != nil {
		return "", err
	}
	leave, err := k.enter(ctx, g.Claim.UID)
	if err != nil {
		return "", err
	}
	defer leave()
	return k.bringGroup(ctx, g, wanted, func() error {
		if !held() {
			return errUnheld
		}
		return k.supersede(ctx, g)
	})
}

// bringGroup records what is wanted, and sets it where nothing speaks against that then. Under the claim's turn.
func (k *Keeper) bringGroup(ctx context.Context, g Group, wanted map[device.Ref]*setting, settled func() error) (daemon string, err error) {
	// One that brings nothing new, as with every pod of a claim after the first, wakes nobody.
	news := false
	defer func() {
		if news {
			k.announce()
		}
	}()
	if err := k.clear(ctx, g, wanted); err != nil {
		return "", err
	}
	k.number(g, wanted)
	for _, d := range g.Devices {
		recorded, err := k.record(ctx, Key{g.Claim.UID, d.Ref()}, wanted[d.Ref()])
		news = news || recorded
		if err != nil {
			return "", err
		}
	}
	if err := settled(); err != nil {
		return "", err
	}
	k.stay(g)
	for _, d := range g.Devices {
		if s := wanted[d.Ref()]; s != nil {
			if err := k.bring(ctx, Key{g.Claim.UID, d.Ref()}, *s); err != nil {
				return "", err
			}
			daemon = s.Daemon
		}
	}
	if daemon == "" {
		return "", nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := mps.Make(k.dir(daemon)); err != nil {
		return "", err
	}
	news = k.want(daemon, *wanted[g.Devices[0].Ref()].Settings) || news
	return daemon, nil
}

// wanted are the settings by device, without Before; nil where nothing is to be set.
func (k *Keeper) wanted(g Group) (map[device.Ref]*setting, error) {
	all := map[device.Ref]*setting{}
	s := setting{BootID: k.Records.bootID, Namespace: g.Claim.Namespace, Name: g.Claim.Name, Strategy: g.Sharing.Strategy}
	switch {
	case len(g.Devices) == 0, g.Sharing.Strategy == "":
		return all, nil
	case g.Sharing.Strategy == Exclusive:
		s.Untouched = true
	case g.Sharing.Strategy == parametersv1beta1.TimeSlicing && !g.Devices[0].Whole():
		return all, nil // its processes take turns anyway, and nothing can be set
	case g.Sharing.Strategy == parametersv1beta1.TimeSlicing:
		s.Interval, s.Untouched = g.Sharing.Interval, true
	case g.Sharing.MPS == nil:
		return nil, fmt.Errorf("unknown strategy %q", g.Sharing.Strategy)
	default:
		name, err := daemonName(g)
		if err != nil {
			return nil, err
		}
		settings := Settings(g.Devices, *g.Sharing.MPS, k.DriverRoot)
		if err := settings.Validate(); err != nil {
			return nil, fmt.Errorf("settings of its MPS daemon: %w", err)
		}
		s.Daemon, s.Settings = name, &settings
	}
	for _, d := range g.Devices {
		own := s
		all[d.Ref()] = &own
	}
	return all, nil
}

// number gives a daemon the generation that it is recorded with, or that of one which is yet to begin. Under the claim's turn.
func (k *Keeper) number(g Group, wanted map[device.Ref]*setting) {
	fresh := time.Now().UnixMicro()
	for _, d := range g.Devices {
		next := wanted[d.Ref()]
		if next == nil || next.Settings == nil {
			continue
		}
		// The devices of a group have the same Settings.
		next.Settings.Generation = fresh
		known, ok := k.Records.store.Get(Key{g.Claim.UID, d.Ref()})
		if ok && known.Settings != nil && known.Daemon == next.Daemon && !known.Undoing {
			next.Settings.Generation = known.Settings.Generation
			return
		}
	}
}

// awaitOthers waits until nothing is set on the devices for another claim. That had them before: what a process which died has
// left without a hold is undone while the next claim has the device already.
func (k *Keeper) awaitOthers(ctx context.Context, g Group) error {
	for {
		changed := k.Changed()
		others := k.others(g)
		if len(others) == 0 {
			return nil
		}
		if slices.ContainsFunc(others, Key.byPolicy) {
			if err := k.supersede(ctx, g); err != nil {
				return err
			}
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			of, _ := k.Records.store.Get(others[0])
			return fmt.Errorf("wait until what was set on %s for claim %s/%s is undone: %w",
				others[0].Device, of.Namespace, of.Name, context.Cause(ctx))
		}
	}
}

// clear undoes what the claim had set otherwise before, and what was being undone when a process ended. Under the claim's turn.
func (k *Keeper) clear(ctx context.Context, g Group, wanted map[device.Ref]*setting) error {
	own := k.Records.where(func(key Key, _ setting) bool { return key.Claim == g.Claim.UID && g.overlaps(key.Device) })
	for _, key := range own {
		before, ok := k.Records.store.Get(key)
		next := wanted[key.Device]
		switch {
		case !ok: // gone with another of its group
		case before.Unknown, before.Undoing, next == nil,
			next.Strategy != before.Strategy, next.Interval != before.Interval, next.Daemon != before.Daemon:
			if err := k.takeDown(ctx, k.group(key)); err != nil {
				return err
			}
		}
	}
	return nil
}

// record makes sure that what is about to be set can be undone, and reports whether that was not recorded yet. Under the
// claim's turn.
func (k *Keeper) record(ctx context.Context, key Key, s *setting) (news bool, err error) {
	if s == nil {
		return false, nil
	}
	if known, ok := k.Records.store.Get(key); ok {
		s.Before, s.Untouched = known.Before, known.Untouched
		if known.Settings == nil || s.Settings == nil || known.Settings.Hash() == s.Settings.Hash() {
			return false, nil
		}
	} else if key.Device.Whole() {
		before, err := k.Hardware.ComputeMode(ctx, key.Device.GPU)
		if supported(err) != nil {
			return false, err
		}
		// Policy, which goes before this is set, may have set its mode just now: it has recorded the one of before.
		policy, _ := k.Records.store.Get(policyKey(key.Device.GPU))
		s.Before = cmp.Or(policy.Before, before, device.ComputeModeDefault)
	}
	return true, k.Records.store.Put(key, *s)
}

// bring sets what is recorded. Under the claim's turn.
func (k *Keeper) bring(ctx context.Context, key Key, s setting) error {
	if !key.Device.Whole() {
		return nil
	}
	if s.Settings != nil {
		_, err := k.Hardware.SetComputeMode(ctx, key.Device.GPU, device.ComputeModeExclusiveProcess)
		return err
	}
	// A GPU without modes is as if in the default one.
	_, err := k.Hardware.SetComputeMode(ctx, key.Device.GPU, device.ComputeModeDefault)
	if err = supported(err); err != nil || s.Strategy != parametersv1beta1.TimeSlicing || k.isSliced(key, s.Interval) {
		return err
	}
	if err := k.slice(ctx, key, s); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.sliced[key] = s.Interval
	return nil
}

// supported is the error, unless that says that there is nothing to set.
func supported(err error) error {
	if errors.Is(err, device.ErrUnsupported) {
		return nil
	}
	return err
}

// slice sets the recorded time slice. That it may be set is on disk before, so that it is put back only where it may be: a GPU
// that has none could otherwise never be put back.
func (k *Keeper) slice(ctx context.Context, key Key, s setting) error {
	note := func(untouched bool) error {
		if s.Untouched == untouched {
			return nil
		}
		s.Untouched = untouched
		return k.Records.store.Put(key, s)
	}
	if err := note(false); err != nil {
		return err
	}
	err := k.Hardware.SetTimeSlice(ctx, key.Device.GPU, timeSlice(s.Interval))
	if !errors.Is(err, device.ErrUnsupported) {
		return err
	}
	if noteErr := note(true); noteErr != nil || timeSlice(s.Interval) == 0 {
		return noteErr // such a GPU has the driver's default
	}
	return err
}

// stay forgets that the devices were left.
func (k *Keeper) stay(g Group) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, d := range g.Devices {
		delete(k.left, Key{g.Claim.UID, d.Ref()})
	}
}

func (k *Keeper) turn(ctx context.Context, claim string, do func() error) error {
	leave, err := k.enter(ctx, claim)
	if err != nil {
		return err
	}
	defer leave()
	return do()
}

// turn is that of one claim, for as long as somebody has it or waits for it.
type turn struct {
	taken chan struct{}
	users int
}

// enter waits for its turn with a claim.
func (k *Keeper) enter(ctx context.Context, claim string) (leave func(), err error) {
	k.mu.Lock()
	t, ok := k.turns[claim]
	if !ok {
		t = &turn{taken: make(chan struct{}, 1)}
		k.turns[claim] = t
	}
	t.users++
	k.mu.Unlock()
	forget := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if t.users--; t.users == 0 {
			delete(k.turns, claim)
		}
	}
	select {
	case t.taken <- struct{}{}:
		return func() { <-t.taken; forget() }, nil
	case <-ctx.Done():
		forget()
		return nil, fmt.Errorf("wait for an earlier change for the same claim: %w", context.Cause(ctx))
	}
}
