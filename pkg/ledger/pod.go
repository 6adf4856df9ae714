// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// ReservePod reserves all devices or none, and never waits for another holder. Allocate calls it. Allocate does not name the pod; Identify records it later.
// An ID that a pod holds already counts as reuse only while kubelet admits that pod and a later container takes over the device of an
// init container (PodStates.Reuses). By another resource it is no reuse: kubelet has another account for it. A *ConflictError names the
// conflicting holds.
func (l *Ledger) ReservePod(requests []PodRequest) error {
	if err := checkApart(requests); err != nil {
		return err
	}
	for {
		conflicts, err := l.tryReservePod(requests)
		if errors.Is(err, errChanged) {
			continue
		}
		if err != nil || len(conflicts) == 0 {
			return err
		}
		remaining, err := l.settle(conflicts)
		if err != nil {
			return err
		}
		if len(remaining) == len(conflicts) {
			return &ConflictError{Holds: remaining}
		}
	}
}

// errChanged means that a hold has changed since its reuse was judged.
var errChanged = errors.New("a hold has changed meanwhile")

// tryReservePod reserves, or returns conflicting holds, also those of the same ID that must not be reused.
func (l *Ledger) tryReservePod(requests []PodRequest) ([]Hold, error) {
	confirmed, refused, err := l.confirmReuse(requests)
	if err != nil || len(refused) > 0 {
		return refused, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	// The call of a kubelet that has died meanwhile may have waited, and the next kubelet may have given the device to another pod.
	for _, r := range requests {
		if h, held := l.holds[key{Holder{KindPod, r.ID}, r.Device}]; held && !slices.Contains(confirmed, h.Generation) {
			return nil, errChanged
		}
	}
	if conflicts := l.podConflicts(requests); len(conflicts) > 0 {
		return conflicts, nil
	}
	// New holds come first: writing them fails more often, and is easy to undo.
	var taken, reused []Hold
	for _, r := range requests {
		l.serial++
		h := Hold{
			Holder: Holder{KindPod, r.ID}, Device: r.Device, Share: r.Share, State: StateHeld, Resource: r.Resource, Generation: l.serial,
		}
		l.begin(&h)
		switch _, reuse := l.holds[keyOf(h)]; {
		case reuse:
			reused = append(reused, h)
		case r.OutOfService != "":
			return nil, fmt.Errorf("reserve device %s for a pod: %w: %s", r.ID, ErrWithdrawn, r.OutOfService)
		default:
			taken = append(taken, h)
		}
	}
	if err := l.take(taken); err != nil {
		return nil, fmt.Errorf("reserve devices for a pod: %w", err)
	}
	for _, h := range reused {
		if err := l.rewrite(l.holds[keyOf(h)], h); err != nil {
			return nil, errors.Join(fmt.Errorf("reserve devices for a pod: %w", err), l.undo(taken))
		}
	}
	return nil, nil
}

// podConflicts returns the holds that conflict with requests, of which each counts for the next. Under l.mu.
func (l *Ledger) podConflicts(requests []PodRequest) []Hold {
	var conflicts, before []Hold
	for _, r := range requests {
		h := Hold{Holder: Holder{KindPod, r.ID}, Device: r.Device, Share: r.Share}
		found := l.blockers(h.Holder, h.Device, h.Share, before...)
		for _, other := range found {
			if !slices.ContainsFunc(conflicts, func(c Hold) bool { return keyOf(c) == keyOf(other) }) {
				conflicts = append(conflicts, other)
			}
		}
		if _, held := l.holds[keyOf(h)]; !held {
			before = append(before, h)
		}
	}
	return slices.DeleteFunc(conflicts, func(h Hold) bool { _, held := l.holds[keyOf(h)]; return !held })
}

// checkApart refuses requests of one call that would use the same hardware twice.
func checkApart(requests []PodRequest) error {
	for i, a := range requests {
		for _, b := range requests[:i] {
			if a.use().Excludes(b.use()) || a.ID == b.ID && a.Device.Overlaps(b.Device) {
				return fmt.Errorf("reserve devices for a pod: IDs %s and %s use the same hardware (%s, %s)", b.ID, a.ID, b.Device, a.Device)
			}
		}
	}
	return nil
}

func (r PodRequest) use() availability.Use[device.Ref] {
	return availability.Use[device.Ref]{Holder: availability.Holder{Kind: KindPod, ID: r.ID}, Device: r.Device, Share: r.Share}
}

// take records new holds, all or none, unless devices are withheld. Under l.mu.
func (l *Ledger) take(holds []Hold) error {
	if len(holds) > 0 && len(l.withheld) > 0 {
		return &WithheldError{}
	}
	for i, h := range holds {
		if err := l.write(h); err != nil {
			return errors.Join(err, l.undo(holds[:i]))
		}
		l.put(h)
	}
	if len(holds) > 0 {
		l.announce()
	}
	return nil
}

// confirmReuse returns the holds of the same IDs that a new pod must not reuse: their pod is unknown, ended, started or has one container
// only, so the request comes from another pod. kubelet forgets the devices of an Allocate in flight when pod resources are listed just
// then, and offers them again (docs/design/0002-ledger.md). A draining hold stays so until its pod state changes back. After one refusal the
// holds that have not ended are refused too. confirmed has the generations of the other holds, which the pod may reuse.
func (l *Ledger) confirmReuse(requests []PodRequest) (confirmed []uint64, refused []Hold, err error) {
	l.mu.Lock()
	var same []Hold
	other := map[string]bool{}
	for _, r := range requests {
		for _, h := range l.holdsOf(Holder{KindPod, r.ID}) {
			same = append(same, h)
			other[r.ID] = other[r.ID] || h.Resource != r.Resource && !h.Unreadable
		}
	}
	l.mu.Unlock()
	for _, h := range same {
		podState := l.podState(h)
		// Each answer may take a second, and one refusal decides the call.
		if podState != Gone && !other[h.Holder.ID] && len(refused) == 0 && l.reuses(h, podState) {
			confirmed = append(confirmed, h.Generation)
			continue
		}
		if l.changedSince(h) {
			return nil, nil, errChanged // for example, it now names its pod
		}
		// The end of the pod may have been reported meanwhile.
		if podState == Gone || l.podState(h) == Gone {
			if err := l.Release(h); err != nil {
				return nil, nil, err
			}
			continue
		}
		refused = append(refused, h)
	}
	return confirmed, refused, nil
}

// changedSince reports whether a hold has ended, was taken again, or has other pods.
func (l *Ledger) changedSince(h Hold) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	current, held := l.holds[keyOf(h)]
	return !held || current.Generation != h.Generation
}

// reuses reports whether a request for the ID of a hold can come from the hold's own pod.
func (l *Ledger) reuses(h Hold, podState PodState) bool {
	return podState != Orphaned && h.State != StateDraining && !h.Unreadable &&
		!l.options.PodStates.Started(h, l.Holds()) && l.options.PodStates.Reuses(h)
}

// undo releases the holds that a failed call took. Under l.mu.
func (l *Ledger) undo(taken []Hold) error {
	var errs []error
	for _, h := range taken {
		errs = append(errs, l.release(h))
	}
	return errors.Join(errs...)
}

// podState returns the state of a hold's pods. A hold with an unreadable record counts as running, because its pods are not
// known. A hold whose partition or sharing settings still exist counts as orphaned.
func (l *Ledger) podState(h Hold) PodState {
	if h.Unreadable {
		return Running
	}
	podState := l.options.PodStates.PodState(h)
	if podState == Gone && l.options.CleanupPending(h) {
		return Orphaned
	}
	return podState
}

// settle releases those conflicting holds whose pods are gone, and returns the others.
func (l *Ledger) settle(holds []Hold) ([]Hold, error) {
	var remaining []Hold
	for _, h := range holds {
		if l.podState(h) != Gone {
			remaining = append(remaining, h)
			continue
		}
		if err := l.Release(h); err != nil {
			return nil, err
		}
	}
	return remaining, nil
}
