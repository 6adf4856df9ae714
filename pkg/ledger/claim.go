// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// ReserveClaim gives the claim all its devices or none. Idempotent: what the claim holds already (also expected or
// draining) is confirmed as held. While every holder in the way is draining or on its way out by the evidence, it waits
// until ctx is done; otherwise, and when ctx ends, a *ConflictError says who is in the way. ErrCancelled means that
// DrainClaim for the same UID came meanwhile. fresh tells a caller whose next step fails that this call took something, to
// be undone by DrainClaim. Calls for one UID run one at a time.
func (l *Ledger) ReserveClaim(ctx context.Context, r ClaimRequest) (fresh bool, err error) {
	ctx, finish, err := l.claims.begin(ctx, r.UID)
	if err != nil {
		return false, err
	}
	defer finish()
	for {
		changed := l.Changed()
		conflicts, fresh, err := l.tryClaim(ctx, r)
		if err != nil || len(conflicts) == 0 {
			return fresh, err
		}
		remaining, err := l.settle(conflicts)
		if err != nil {
			return false, err
		}
		if len(remaining) == 0 {
			continue
		}
		if !l.worthWaiting(remaining) {
			return false, &ConflictError{Holds: remaining}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if errors.Is(context.Cause(ctx), ErrCancelled) {
				return false, fmt.Errorf("reserve devices of claim %s/%s: %w", r.Namespace, r.Name, ErrCancelled)
			}
			return false, &ConflictError{Holds: remaining}
		}
	}
}

// worthWaiting reports whether all holders are on their way out.
func (l *Ledger) worthWaiting(holds []Hold) bool {
	return !slices.ContainsFunc(holds, func(h Hold) bool {
		return h.State != StateDraining && l.evidence.Verdict(h) == Running
	})
}

func (l *Ledger) tryClaim(ctx context.Context, r ClaimRequest) (conflicts []Hold, fresh bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := context.Cause(ctx); err != nil {
		return nil, false, fmt.Errorf("reserve devices of claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	holder := Holder{KindClaim, r.UID}
	for _, ref := range r.Devices {
		conflicts = append(conflicts, l.conflicts(holder, ref)...)
	}
	if len(conflicts) > 0 {
		return conflicts, false, nil
	}
	var taken []Hold
	for _, ref := range r.Devices {
		known, ok := l.holds[key{holder, ref}]
		if ok {
			err = l.confirm(known, r)
		} else {
			l.serial++
			h := Hold{
				Holder: holder, Device: ref, State: StateHeld, Since: now(),
				Namespace: r.Namespace, Name: r.Name, Pods: r.Pods, Generation: l.serial,
			}
			if err = l.disk.create(h); err == nil {
				l.put(h)
				taken = append(taken, h)
			}
		}
		if err != nil {
			err = fmt.Errorf("reserve %s for claim %s/%s: %w", ref, r.Namespace, r.Name, err)
			return nil, false, errors.Join(err, l.undo(taken))
		}
	}
	if len(taken) > 0 {
		l.announce()
	}
	return nil, len(taken) > 0, l.drainOthers(holder, r)
}

// confirm makes a known hold of the claim held, whatever it was. Nothing is written when nothing is new.
func (l *Ledger) confirm(known *Hold, r ClaimRequest) error {
	updated := *known
	updated.Namespace, updated.Name = r.Namespace, r.Name
	updated.Pods = mergePods(known.Pods, r.Pods)
	updated.Unreadable = false
	if known.State != StateHeld {
		l.serial++
		updated.State, updated.Since, updated.Generation = StateHeld, now(), l.serial
	}
	if updated.equal(*known) {
		return nil
	}
	if err := l.disk.update(updated); err != nil {
		return err
	}
	*known = updated
	delete(l.newer, keyOf(updated))
	l.announce()
	return nil
}

// drainOthers lets go of devices that the claim held under an earlier allocation.
func (l *Ledger) drainOthers(holder Holder, r ClaimRequest) error {
	var errs []error
	for _, h := range l.holdsOf(holder) {
		if h.State == StateDraining || slices.Contains(r.Devices, h.Device) {
			continue
		}
		updated := h
		updated.State = StateDraining
		errs = append(errs, l.change(l.holds[keyOf(h)], updated))
	}
	return errors.Join(errs...)
}

// DrainClaim takes an Unprepare: it cancels a ReserveClaim of that claim that still waits, and lets its holds go: at once
// where evidence says that no pod of it runs, otherwise as soon as it does. Idempotent; an unknown UID is no error.
func (l *Ledger) DrainClaim(ctx context.Context, uid string) error {
	l.claims.interrupt(uid)
	_, finish, err := l.claims.begin(ctx, uid)
	if err != nil {
		return err
	}
	defer finish()
	l.mu.Lock()
	holds := l.holdsOf(Holder{KindClaim, uid})
	l.mu.Unlock()
	var errs []error
	for _, h := range holds {
		asked := h
		asked.State = StateDraining
		if l.evidence.Verdict(asked) == Gone {
			errs = append(errs, l.Release(h))
		} else {
			errs = append(errs, l.SetState(h, StateDraining))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("release devices of claim %s: %w", uid, err)
	}
	return nil
}

// claimCalls lets one call at a time work on a claim.
type claimCalls struct {
	mu      sync.Mutex
	running map[string]*claimCall
}

type claimCall struct {
	cancel context.CancelCauseFunc
	done   chan struct{}
}

// begin waits for its turn. The returned context ends with ctx or by interrupt.
func (c *claimCalls) begin(ctx context.Context, uid string) (context.Context, func(), error) {
	for {
		c.mu.Lock()
		running, busy := c.running[uid]
		if !busy {
			ctx, cancel := context.WithCancelCause(ctx)
			call := &claimCall{cancel: cancel, done: make(chan struct{})}
			c.running[uid] = call
			c.mu.Unlock()
			return ctx, func() { c.finish(uid, call) }, nil
		}
		c.mu.Unlock()
		select {
		case <-running.done:
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("wait for an earlier call for claim %s: %w", uid, context.Cause(ctx))
		}
	}
}

func (c *claimCalls) finish(uid string, call *claimCall) {
	c.mu.Lock()
	delete(c.running, uid)
	c.mu.Unlock()
	call.cancel(nil)
	close(call.done)
}

func (c *claimCalls) interrupt(uid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if call, busy := c.running[uid]; busy {
		call.cancel(ErrCancelled)
	}
}
