// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// ErrStillShared says that everything about the device is to be undone, and that others of its claim, which have the same daemon,
// are in use: it is undone with the last of them.
var ErrStillShared = errors.New("its claim uses other devices with the same MPS daemon")

// Undo brings a device back to what it was before the claim had it, and forgets it. It asks unused once no Apply of that claim is
// under way, and does nothing where the answer is no. A daemon that other devices of the claim have as well ends with the last of
// them: until then Applied stays true of all, and the error is an ErrStillShared. Idempotent; after an error it is still applied.
func (k *Keeper) Undo(ctx context.Context, key Key, unused func() bool) error {
	if err := k.undo(ctx, key, unused); err != nil {
		return fmt.Errorf("end the sharing of %s: %w", key.Device, err)
	}
	return nil
}

func (k *Keeper) undo(ctx context.Context, key Key, unused func() bool) error {
	leave, err := k.enter(ctx, key.Claim)
	if err != nil {
		return err
	}
	defer leave()
	if !k.Records.Applied(key.Claim, key.Device) {
		return nil
	}
	group := k.group(key)
	k.mu.Lock()
	left := unused()
	if k.left[key] = left; !left {
		delete(k.left, key)
	}
	others := slices.ContainsFunc(group, func(member Key) bool { return !k.left[member] })
	k.mu.Unlock()
	switch {
	case !left:
		return nil
	case others:
		return ErrStillShared
	}
	return k.takeDown(ctx, group)
}

// group are the devices of the claim that have one daemon. One of which nothing is known may have any.
func (k *Keeper) group(key Key) []Key {
	of, _ := k.Records.store.Get(key)
	return k.Records.where(func(other Key, s setting) bool {
		return other == key || other.Claim == key.Claim && (of.Unknown || s.Unknown || of.Daemon != "" && s.Daemon == of.Daemon)
	})
}

// takeDown undoes what is recorded of the devices: first the daemons, which have the GPUs, then the GPUs. Under the claim's turn.
func (k *Keeper) takeDown(ctx context.Context, group []Key) error {
	defer k.announce()
	daemons, unknown := map[string]bool{}, false
	for _, key := range group {
		s, ok := k.Records.store.Get(key)
		unknown = unknown || s.Unknown
		if !ok || s.Daemon == "" {
			continue
		}
		daemons[s.Daemon] = true
		if s.Undoing {
			continue
		}
		s.Undoing = true
		if err := k.Records.store.Put(key, s); err != nil {
			return err
		}
	}
	if unknown {
		for _, name := range k.unnamed() {
			if claimOf(name) == group[0].Claim {
				daemons[name] = true
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(daemons)) {
		if err := k.end(ctx, name); err != nil {
			return err
		}
		// Nobody lives there, and what clients have put there must not keep the GPUs: a directory that stays is a stray as soon as the
		// records are gone, and whoever looks for those tries again and says what is wrong.
		_ = removeDir(k.dir(name))
	}
	var errs []error
	for _, key := range group {
		errs = append(errs, k.restore(ctx, key))
	}
	return errors.Join(errs...)
}

// restore puts a GPU back to what it was, and forgets its record.
func (k *Keeper) restore(ctx context.Context, key Key) error {
	s, ok := k.Records.store.Get(key)
	if !ok {
		return nil
	}
	if key.Device.Whole() {
		before := s.Before
		if s.Unknown {
			before = device.ComputeModeDefault
		}
		// Where it cannot be set, nothing is set.
		if s.Unknown || !s.Untouched && timeSlice(s.Interval) != 0 {
			err := k.Hardware.SetTimeSlice(ctx, key.Device.GPU, timeSlice(parametersv1beta1.IntervalDefault))
			if supported(err) != nil {
				return err
			}
		}
		if _, err := k.Hardware.SetComputeMode(ctx, key.Device.GPU, before); supported(err) != nil {
			return err
		}
	}
	k.mu.Lock()
	delete(k.left, key)
	maps.DeleteFunc(k.sliced, func(other Key, _ parametersv1beta1.Interval) bool { return other.Device == key.Device })
	k.mu.Unlock()
	return k.Records.store.Drop(key)
}
