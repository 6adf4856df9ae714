// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
)

// ReserveLimits gives all devices or none, and never waits. An ID that a limit holds already is accepted as reuse inside
// one pod (init containers, restarts), unless its pod is gone from the API server and may still run. Otherwise a
// *ConflictError says who is in the way. Called for Allocate, which carries no pod: the pod is learnt later (Identify).
func (l *Ledger) ReserveLimits(requests []LimitRequest) error {
	for {
		conflicts, err := l.tryLimits(requests)
		if err != nil || len(conflicts) == 0 {
			return err
		}
		remaining, err := l.settle(conflicts)
		if err != nil {
			return err
		}
		if len(remaining) > 0 {
			return &ConflictError{Holds: remaining}
		}
	}
}

// tryLimits reserves, or returns what is in the way. A reuse is in the way too until evidence has been heard about it.
func (l *Ledger) tryLimits(requests []LimitRequest) ([]Hold, error) {
	reuse, err := l.confirmReuse(requests)
	if err != nil || len(reuse) > 0 {
		return reuse, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var conflicts []Hold
	for _, r := range requests {
		conflicts = append(conflicts, l.conflicts(Holder{KindLimit, r.ID}, r.Device)...)
	}
	if len(conflicts) > 0 {
		return conflicts, nil
	}
	var fresh []Hold
	for _, r := range requests {
		h, isFresh, err := l.takeLimit(r)
		if err != nil {
			return nil, errors.Join(err, l.undo(fresh))
		}
		if isFresh {
			fresh = append(fresh, h)
		}
	}
	l.announce()
	return nil, nil
}

// confirmReuse returns those holds of the same IDs that must not be reused: the pod they belong to is no longer the
// business of the API server, so whoever asks now is another one.
func (l *Ledger) confirmReuse(requests []LimitRequest) ([]Hold, error) {
	l.mu.Lock()
	var same []Hold
	for _, r := range requests {
		same = append(same, l.holdsOf(Holder{KindLimit, r.ID})...)
	}
	l.mu.Unlock()
	var refused []Hold
	for _, h := range same {
		switch l.evidence.Verdict(h) {
		case Gone:
			if err := l.Release(h); err != nil {
				return nil, err
			}
		case Orphaned:
			refused = append(refused, h)
		case Running, Terminating:
		}
	}
	return refused, nil
}

// takeLimit records one limit, anew or as reuse. Under l.mu.
func (l *Ledger) takeLimit(r LimitRequest) (h Hold, fresh bool, err error) {
	l.serial++
	h = Hold{
		Holder: Holder{KindLimit, r.ID}, Device: r.Device, State: StateHeld, Since: now(),
		Resource: r.Resource, Generation: l.serial,
	}
	known, reuse := l.holds[keyOf(h)]
	if reuse {
		err = l.disk.update(h)
	} else {
		err = l.disk.create(h)
	}
	if err != nil {
		return Hold{}, false, fmt.Errorf("reserve %s for limit %s: %w", r.Device, r.ID, err)
	}
	if reuse {
		*known = h
		delete(l.newer, keyOf(h))
	} else {
		l.put(h)
	}
	return h, !reuse, nil
}

// undo gives back what one call took before it failed. Under l.mu.
func (l *Ledger) undo(fresh []Hold) error {
	var errs []error
	for _, h := range fresh {
		errs = append(errs, l.release(h))
	}
	return errors.Join(errs...)
}

// settle asks evidence about holds that are in the way, releases those that have ended, and returns the others.
func (l *Ledger) settle(holds []Hold) ([]Hold, error) {
	var remaining []Hold
	for _, h := range holds {
		if l.evidence.Verdict(h) != Gone {
			remaining = append(remaining, h)
			continue
		}
		if err := l.Release(h); err != nil {
			return nil, err
		}
	}
	return remaining, nil
}
