// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// ReserveClaim gives the claim all its devices or none. Idempotent: what the claim holds already (also expected or
// draining) is confirmed as held; what it holds beyond r.Devices drains. While every holder in the way is draining or on
// its way out by the evidence, it waits until ctx is done; otherwise, and when ctx ends, a *ConflictError says who is in
// the way. A claim that is condemned (Lose) gets a *PendingEvictionError at once. It waits with what it would take anew while
// r.Yield says so. ErrCancelled means that DrainClaim for the same UID came meanwhile. Any other error is worth another
// try. A caller whose next step fails gives back what this call took by GiveBack; that is nothing with an error. Calls for
// one UID run one at a time.
func (l *Ledger) ReserveClaim(ctx context.Context, r ClaimRequest) (taken Taken, err error) {
	ctx, finish, err := l.claims.reserve(ctx, r.UID)
	if err == nil {
		defer finish()
		taken, err = l.reserveClaim(ctx, r)
	}
	_, conflict := errors.AsType[*ConflictError](err)
	_, pendingEviction := errors.AsType[*PendingEvictionError](err)
	if err != nil && !conflict && !pendingEviction {
		err = fmt.Errorf("reserve devices of claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	return taken, err
}

// Taken is what one ReserveClaim took that its claim did not hold before. The zero value is nothing.
type Taken struct {
	// first and last are generations.
	first, last uint64
}

func (t Taken) has(h Hold) bool {
	return t.last > 0 && t.first <= h.Generation && h.Generation <= t.last
}

// GiveBack lets go of what a ReserveClaim for that UID took, as DrainClaim does. What another ReserveClaim for the UID has
// confirmed since stays: another pod with the same claim was told that it has it. It waits for nobody and is idempotent.
func (l *Ledger) GiveBack(uid string, taken Taken) error {
	l.mu.Lock()
	holds := l.holdsOf(Holder{KindClaim, uid})
	l.mu.Unlock()
	var errs []error
	for _, h := range holds {
		if !taken.has(h) {
			continue
		}
		// No pod was told that it has them.
		drained := h
		drained.State, drained.Pods = StateDraining, nil
		if l.podState(drained) == Gone {
			errs = append(errs, l.Release(h))
			continue
		}
		errs = append(errs, l.amend(h, func(updated *Hold) {
			updated.drain(l.now())
			updated.Pods = nil
		}))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("give back devices of claim %s: %w", uid, err)
	}
	return nil
}

func (h *Hold) drain(at time.Time) { h.State, h.Since = StateDraining, at }

func (l *Ledger) reserveClaim(ctx context.Context, r ClaimRequest) (Taken, error) {
	for {
		l.turn(ctx)
		changed, queueChanged := l.Changed(), l.queueChanged()
		conflicts, taken, err := l.tryClaim(ctx, r)
		if errors.Is(err, errYields) {
			awaitPods(ctx, r.PodsFirst, changed, queueChanged)
			continue
		}
		if err != nil || len(conflicts) == 0 {
			return taken, err
		}
		remaining, err := l.settle(conflicts)
		if err != nil {
			return Taken{}, err
		}
		if len(remaining) < len(conflicts) {
			continue
		}
		if !l.worthWaiting(r, remaining) {
			return Taken{}, &ConflictError{Holds: remaining}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if cause := context.Cause(ctx); errors.Is(cause, ErrCancelled) {
				return Taken{}, cause
			}
			return Taken{}, &ConflictError{Holds: remaining}
		}
	}
}

// worthWaiting reports whether the claim gets its devices once those holders are gone that are on their way out.
func (l *Ledger) worthWaiting(r ClaimRequest, holds []Hold) bool {
	staying := slices.DeleteFunc(slices.Clone(holds), func(h Hold) bool {
		return h.State == StateDraining || l.podState(h) != Running
	})
	return !slices.ContainsFunc(r.Devices, func(ref device.Ref) bool {
		request := availability.Use[device.Ref]{Holder: availability.Holder{Kind: KindClaim, ID: r.UID}, Device: ref, Share: r.Shares[ref]}
		return len(availability.Conflicts(request, slices.Values(staying))) > 0
	})
}

// errYields means that bound limits pods come first.
var errYields = errors.New("limits pods come first")

func (l *Ledger) tryClaim(ctx context.Context, r ClaimRequest) (conflicts []Hold, got Taken, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.admit(ctx, r); err != nil {
		return nil, Taken{}, err
	}
	holder := Holder{KindClaim, r.UID}
	// First, since two claims may wait for what the other had under an earlier allocation.
	if err := l.drainExcept(holder, r.Devices); err != nil {
		return nil, Taken{}, err
	}
	for _, ref := range r.Devices {
		conflicts = append(conflicts, l.blockers(holder, ref, r.Shares[ref])...)
	}
	if len(conflicts) > 0 {
		return conflicts, Taken{}, nil
	}
	// What is new comes first: it is more likely to fail, and easy to undo.
	var taken []Hold
	var known []*Hold
	before := l.serial
	for _, ref := range r.Devices {
		if h, ok := l.holds[key{holder, ref}]; ok {
			known = append(known, h)
			continue
		}
		l.serial++
		taken = append(taken, Hold{
			Holder: holder, Device: ref, Share: r.Shares[ref], State: StateHeld, Since: l.now(),
			Namespace: r.Namespace, Name: r.Name, Pods: slices.Clone(r.Pods), Generation: l.serial,
		})
	}
	if l.yields(r.PodsFirst, taken) {
		return nil, Taken{}, errYields
	}
	if len(taken) > 0 {
		got = Taken{before + 1, l.serial}
	}
	if err := l.take(taken); err != nil {
		return nil, Taken{}, err
	}
	for _, h := range known {
		if err := l.confirm(h, r); err != nil {
			return nil, Taken{}, errors.Join(err, l.undo(taken))
		}
	}
	l.clearConflict(r.UID)
	return nil, got, nil
}

// confirm makes a known hold of the claim held, whatever it was. It is given out anew, even if nothing has to be written.
func (l *Ledger) confirm(known *Hold, r ClaimRequest) error {
	updated := *known
	updated.Namespace, updated.Name = r.Namespace, r.Name
	updated.Pods = mergePods(known.Pods, r.Pods)
	updated.Share = r.Shares[known.Device]
	updated.Unreadable = false
	l.serial++
	updated.Generation = l.serial
	if known.State != StateHeld {
		updated.State, updated.Since = StateHeld, l.now()
	}
	if updated.equal(*known) {
		l.replace(known, updated)
		return nil
	}
	return l.rewrite(known, updated)
}

// drainExcept lets go of devices that the holder does not keep. Under l.mu.
func (l *Ledger) drainExcept(holder Holder, keep []device.Ref) error {
	var errs []error
	now := l.now()
	for _, h := range l.holdsOf(holder) {
		if h.State == StateDraining || slices.Contains(keep, h.Device) {
			continue
		}
		updated := h
		updated.drain(now)
		errs = append(errs, l.change(l.holds[keyOf(h)], updated))
	}
	return errors.Join(errs...)
}

// DrainClaim takes an Unprepare: it cancels every ReserveClaim of that claim that still waits, and lets its holds go: at once
// where evidence says that no pod of it runs, otherwise as soon as it does. A claim that had lost is forgiven. Idempotent; an
// unknown UID is no error.
func (l *Ledger) DrainClaim(ctx context.Context, uid string) error {
	finish, err := l.claims.drain(ctx, uid)
	if err != nil {
		return fmt.Errorf("release devices of claim %s: %w", uid, err)
	}
	defer finish()
	l.turn(ctx)
	holder := Holder{KindClaim, uid}
	l.mu.Lock()
	holds := l.holdsOf(holder)
	l.mu.Unlock()
	var errs []error
	for _, h := range holds {
		h.State = StateDraining
		if l.podState(h) == Gone {
			errs = append(errs, l.Release(h))
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.clearConflict(uid)
	if err := errors.Join(append(errs, l.drainExcept(holder, nil))...); err != nil {
		return fmt.Errorf("release devices of claim %s: %w", uid, err)
	}
	return nil
}

// claimCalls lets one call at a time work on a claim, in the order in which they came.
type claimCalls struct {
	mu sync.Mutex
	// byUID holds the calls for each claim. The first has its turn.
	byUID map[string][]*claimCall
}

type claimCall struct {
	turn chan struct{}
	// cancel is nil for a call that nobody interrupts.
	cancel context.CancelCauseFunc
}

// reserve waits for its turn. The returned context ends with ctx, and by drain.
func (c *claimCalls) reserve(ctx context.Context, uid string) (context.Context, func(), error) {
	ctx, cancel := context.WithCancelCause(ctx)
	finish, err := c.begin(ctx, uid, &claimCall{turn: make(chan struct{}), cancel: cancel})
	if err != nil {
		cancel(nil)
		return nil, nil, err
	}
	return ctx, func() { finish(); cancel(nil) }, nil
}

// drain interrupts the reservations before it and waits for its turn.
func (c *claimCalls) drain(ctx context.Context, uid string) (func(), error) {
	return c.begin(ctx, uid, &claimCall{turn: make(chan struct{})})
}

func (c *claimCalls) begin(ctx context.Context, uid string, call *claimCall) (func(), error) {
	c.mu.Lock()
	for _, earlier := range c.byUID[uid] {
		if call.cancel == nil && earlier.cancel != nil {
			earlier.cancel(ErrCancelled)
		}
	}
	c.byUID[uid] = append(c.byUID[uid], call)
	if len(c.byUID[uid]) == 1 {
		close(call.turn)
	}
	c.mu.Unlock()
	select {
	case <-call.turn:
		return func() { c.leave(uid, call) }, nil
	case <-ctx.Done():
		c.leave(uid, call)
		return nil, fmt.Errorf("wait for an earlier call: %w", context.Cause(ctx))
	}
}

func (c *claimCalls) leave(uid string, call *claimCall) {
	c.mu.Lock()
	defer c.mu.Unlock()
	calls := c.byUID[uid]
	first := calls[0] == call
	calls = slices.DeleteFunc(calls, func(other *claimCall) bool { return other == call })
	switch {
	case len(calls) == 0:
		delete(c.byUID, uid)
		return
	case first:
		close(calls[0].turn)
	}
	c.byUID[uid] = calls
}
