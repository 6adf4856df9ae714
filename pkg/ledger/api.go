package ledger

import "context"

// TEMPORARY signatures so that front-ends compile; the lead replaces this file.

type Ledger struct{}

// ReserveClaim gives the claim all its devices or none. Idempotent: a claim that holds them already (also expected or
// draining) is confirmed as held. While every hold in the way is draining or has a Terminating/Orphaned/Gone verdict it
// waits until ctx is done; otherwise it returns a *ConflictError at once (also when ctx ends while waiting). fresh is true
// when the call took at least one device that the claim did not hold before, so that a caller whose next step fails knows to
// undo with DrainClaim. Calls for one UID run one at a time.
func (l *Ledger) ReserveClaim(ctx context.Context, r ClaimRequest) (fresh bool, err error) { panic("") }

// DrainClaim takes an Unprepare: it cancels a waiting ReserveClaim of that claim and lets its holds go, at once where
// evidence says that no pod of it runs, otherwise as soon as it does. Idempotent; an unknown UID is no error.
func (l *Ledger) DrainClaim(ctx context.Context, uid string) error { panic("") }

// ReserveLimits gives all devices or none, and never waits. An ID that is held already by a limit is accepted as reuse
// within one pod unless its hold is draining (its pod is gone but may still run). *ConflictError otherwise.
func (l *Ledger) ReserveLimits(requests []LimitRequest) error { panic("") }

// Holds returns a copy of every hold, sorted by device, then holder.
func (l *Ledger) Holds() []Hold { panic("") }

// Changed returns a channel that is closed at the next change of any hold. Take it before calling Holds.
func (l *Ledger) Changed() <-chan struct{} { panic("") }
