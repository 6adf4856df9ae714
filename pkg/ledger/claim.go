// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// ReserveClaim reserves all devices of the request for the claim, or none. Prepare calls it. It is idempotent: devices that the claim
// holds already, also restored or draining ones, become held; its other holds drain. Calls for one UID run one at a time.
//
// It waits until ctx is done while all conflicting holds are draining or their pods have ended, and while r.PodsFirst lets pods go
// first. Errors: *ConflictError names the conflicting holds; *PendingEvictionError means that the claim is pending eviction;
// ErrCancelled means that DrainClaim was called for the claim meanwhile; the caller may retry after any other error. A caller whose
// next step fails calls CancelReservation.
func (l *Ledger) ReserveClaim(ctx context.Context, r ClaimRequest) (reservation Reservation, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	finish, err := l.claims.begin(ctx, r.UID, cancel)
	if err == nil {
		defer finish()
		reservation, err = l.reserveClaim(ctx, r)
	}
	_, conflict := errors.AsType[*ConflictError](err)
	_, pendingEviction := errors.AsType[*PendingEvictionError](err)
	if err != nil && !conflict && !pendingEviction {
		err = fmt.Errorf("reserve devices of claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	return reservation, err
}

// Reservation is the result of one ReserveClaim. The zero value reserves nothing.
type Reservation struct {
	uid     string
	devices []device.Ref
	// first and last are the generations that the call gave to the holds it took; zero if the claim had all of them before.
	first, last uint64
	// revived are the holds that were draining before the call, with the pods that they had, by the generation that the call gave them.
	revived map[uint64][]Pod
}

// Valid reports whether the claim still holds all devices of the reservation. They drain when kubelet unprepares the claim. A caller
// that acts under a lock of its own calls Valid after it has recorded its intent and before it acts.
func (l *Ledger) Valid(r Reservation) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !slices.ContainsFunc(r.devices, func(ref device.Ref) bool {
		h := l.holds[key{Holder{KindClaim, r.uid}, ref}]
		return h == nil || h.State != StateHeld
	})
}

// CancelReservation releases the holds that the reservation took, like DrainClaim, and lets those drain that were draining before. Holds
// that another ReserveClaim of the claim has confirmed since stay: kubelet has an answer with them for another pod. It does not wait,
// and is idempotent.
func (l *Ledger) CancelReservation(r Reservation) error {
	l.mu.Lock()
	holds := l.holdsOf(Holder{KindClaim, r.uid})
	l.mu.Unlock()
	var errs []error
	for _, h := range holds {
		pods, revived := r.revived[h.taken]
		if !revived {
			if r.last == 0 || h.taken < r.first || h.taken > r.last {
				continue
			}
			// kubelet has no answer with them for any pod.
			drained := h
			drained.State, drained.Pods = StateDraining, nil
			if l.podState(drained) == Gone {
				errs = append(errs, l.Release(h))
				continue
			}
		}
		errs = append(errs, l.amend(h, func(updated *Hold) {
			l.drain(updated)
			updated.Pods, updated.taken = pods, 0
		}))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("cancel reservation of claim %s: %w", r.uid, err)
	}
	return nil
}

func (l *Ledger) drain(h *Hold) {
	h.State = StateDraining
	l.begin(h)
}

func (l *Ledger) reserveClaim(ctx context.Context, r ClaimRequest) (Reservation, error) {
	for {
		l.options.Turn(ctx)
		changed, queueChanged := l.Changed(), l.options.Queue.Changed()
		conflict, reservation, err := l.tryClaim(ctx, r)
		if errors.Is(err, errPodsFirst) {
			awaitPods(ctx, r.PodsFirst, changed, queueChanged)
			continue
		}
		if err != nil || conflict == nil {
			return reservation, err
		}
		remaining, err := l.settle(conflict.Holds)
		if err != nil {
			return Reservation{}, err
		}
		if len(remaining) < len(conflict.Holds) {
			continue
		}
		if !l.worthWaiting(r, remaining) {
			l.contest(remaining)
			return Reservation{}, conflict
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if cause := context.Cause(ctx); errors.Is(cause, ErrCancelled) {
				return Reservation{}, cause
			}
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				l.contest(remaining)
			}
			return Reservation{}, conflict
		}
	}
}

// worthWaiting reports whether the devices are free once draining holds and holds of ended pods are released.
func (l *Ledger) worthWaiting(r ClaimRequest, holds []Hold) bool {
	staying := slices.DeleteFunc(slices.Clone(holds), func(h Hold) bool {
		return h.State == StateDraining || l.podState(h) != Running
	})
	return !slices.ContainsFunc(r.Devices, func(ref device.Ref) bool {
		request := availability.Use[device.Ref]{Holder: availability.Holder{Kind: KindClaim, ID: r.UID}, Device: ref, Share: r.Shares[ref]}
		return len(availability.Conflicts(request, slices.Values(staying))) > 0
	})
}

// errPodsFirst means that pods which are bound to the node come first.
var errPodsFirst = errors.New("pods come first")

func (l *Ledger) tryClaim(ctx context.Context, r ClaimRequest) (conflict *ConflictError, reservation Reservation, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.admit(ctx, r); err != nil {
		return nil, Reservation{}, err
	}
	holder := Holder{KindClaim, r.UID}
	r.Shares = l.sharesOf(holder, r)
	// Drain first: two claims may each wait for a device that the other had under an earlier allocation.
	if err := l.drainExcept(holder, r.Devices); err != nil {
		return nil, Reservation{}, err
	}
	var blockers []Hold
	for _, ref := range r.Devices {
		blockers = append(blockers, l.blockers(holder, ref, r.Shares[ref])...)
	}
	if len(blockers) > 0 {
		return &ConflictError{Holds: blockers, Generation: l.serial}, Reservation{}, nil
	}
	// New holds come first: writing them fails more often, and is easy to undo.
	var taken []Hold
	var known []*Hold
	before := l.serial
	for _, ref := range r.Devices {
		if h, ok := l.holds[key{holder, ref}]; ok {
			known = append(known, h)
			continue
		}
		l.serial++
		h := Hold{
			Holder: holder, Device: ref, Share: r.Shares[ref], State: StateHeld,
			Namespace: r.Namespace, Name: r.Name, Pods: slices.Clone(r.Pods), Generation: l.serial, taken: l.serial,
		}
		l.begin(&h)
		taken = append(taken, h)
	}
	if l.yields(r.PodsFirst, taken) {
		return nil, Reservation{}, errPodsFirst
	}
	reservation = Reservation{uid: r.UID, devices: slices.Clone(r.Devices)}
	if len(taken) > 0 {
		reservation.first, reservation.last = before+1, l.serial
	}
	if err := l.take(taken); err != nil {
		return nil, Reservation{}, err
	}
	reservation.revived = map[uint64][]Pod{}
	for _, h := range known {
		state, pods := h.State, h.Pods
		if err := l.confirm(h, r); err != nil {
			return nil, Reservation{}, errors.Join(err, l.undo(taken))
		}
		if state == StateDraining {
			reservation.revived[l.serial] = pods
		}
	}
	l.clearConflict(r.UID)
	return nil, reservation, nil
}

// sharesOf returns the shares of the request. A claim that has a device already keeps its share of it, also if the sharing policy divides the
// device differently now, or now gives the whole device for all of its memory.
func (l *Ledger) sharesOf(holder Holder, r ClaimRequest) map[device.Ref]device.Share {
	shares := maps.Clone(r.Shares)
	for ref, share := range shares {
		h, known := l.holds[key{holder, ref}]
		if !known || h.State == StateDraining {
			continue
		}
		all := share.Whole() && h.Share.AllMemory()
		if all || h.Share.Whole() == share.Whole() && h.Share.Bytes == share.Bytes && h.Share.Count == share.Count {
			shares[ref] = h.Share
		}
	}
	return shares
}

// confirm makes an existing hold of the claim held, with a new generation.
func (l *Ledger) confirm(known *Hold, r ClaimRequest) error {
	updated := *known
	updated.Namespace, updated.Name = r.Namespace, r.Name
	updated.Pods = mergePods(known.Pods, r.Pods)
	updated.Share = r.Shares[known.Device]
	updated.Unreadable, updated.Deserted, updated.Contested = false, false, false
	updated.WaitsFor, updated.WaitsSince = "", time.Time{}
	l.serial++
	updated.Generation, updated.taken = l.serial, l.serial
	if known.State != StateHeld {
		updated.State = StateHeld
		l.begin(&updated)
	}
	if updated.equal(*known) {
		l.replace(known, updated)
		return nil
	}
	return l.rewrite(known, updated)
}

// drainExcept drains the holder's other devices. Under l.mu.
func (l *Ledger) drainExcept(holder Holder, keep []device.Ref) error {
	var errs []error
	for _, h := range l.holdsOf(holder) {
		if h.State == StateDraining || slices.Contains(keep, h.Device) {
			continue
		}
		updated := h
		l.drain(&updated)
		errs = append(errs, l.change(l.holds[keyOf(h)], updated))
	}
	return errors.Join(errs...)
}

// DrainClaim ends the holds of a claim; Unprepare calls it. It cancels waiting ReserveClaim calls of the claim and clears its conflict.
// Holds whose pods are gone end at once, the other holds drain. It is idempotent; an unknown UID is no error.
func (l *Ledger) DrainClaim(ctx context.Context, uid string) error {
	finish, err := l.claims.begin(ctx, uid, nil)
	if err != nil {
		return fmt.Errorf("release devices of claim %s: %w", uid, err)
	}
	defer finish()
	l.options.Turn(ctx)
	holder := Holder{KindClaim, uid}
	l.mu.Lock()
	holds := l.holdsOf(holder)
	l.mu.Unlock()
	var errs []error
	for _, h := range holds {
		if h.State != StateDraining {
			l.drain(&h)
		}
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

// claimCalls serializes the calls for each claim in the order of their arrival.
type claimCalls struct {
	mu    sync.Mutex
	byUID map[string][]*claimCall
}

type claimCall struct {
	ended chan struct{}
	// cancel is nil for DrainClaim, which cannot be interrupted.
	cancel context.CancelCauseFunc
}

// begin waits until all earlier calls have ended. A DrainClaim, whose cancel is nil, cancels earlier reservations first.
func (c *claimCalls) begin(ctx context.Context, uid string, cancel context.CancelCauseFunc) (finish func(), err error) {
	call := &claimCall{ended: make(chan struct{}), cancel: cancel}
	c.mu.Lock()
	earlier := slices.Clone(c.byUID[uid])
	c.byUID[uid] = append(c.byUID[uid], call)
	c.mu.Unlock()
	for _, other := range earlier {
		if cancel == nil && other.cancel != nil {
			other.cancel(ErrCancelled)
		}
	}
	for _, other := range earlier {
		select {
		case <-other.ended:
		case <-ctx.Done():
			c.leave(uid, call)
			return nil, fmt.Errorf("wait for an earlier call: %w", context.Cause(ctx))
		}
	}
	return func() { c.leave(uid, call) }, nil
}

func (c *claimCalls) leave(uid string, call *claimCall) {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(call.ended)
	c.byUID[uid] = slices.DeleteFunc(c.byUID[uid], func(other *claimCall) bool { return other == call })
	if len(c.byUID[uid]) == 0 {
		delete(c.byUID, uid)
	}
}

// PendingPods is a request of a pod that the scheduler has bound to this node and kubelet has not admitted yet.
type PendingPods struct {
	PodUID string
	// Resource is a requested extended resource, Devices the requested number.
	Resource string
	Devices  int
}

// Queue returns the pods that are bound to this node. The ledger calls it with its lock held, so it must not call the ledger.
type Queue interface {
	// PendingPods has an entry for each pod and resource.
	PendingPods() []PendingPods
	// Changed returns a channel that is closed when PendingPods changes next. The caller takes it before it calls PendingPods.
	Changed() <-chan struct{}
}

// Slot is a device, or one of its replicas, that a pod can request.
type Slot struct {
	Device device.Ref
	Share  device.Share
}

// PodsFirst lets a claim wait for pods that kubelet is about to admit. Without a device such a pod fails permanently, and a claim
// does not. All claims of one call share a value.
type PodsFirst struct {
	// Slots by resource: healthy devices that are offered to pods.
	Slots map[string][]Slot
	// WaitBudget is how long to wait at most. ReserveClaim subtracts the time that it waited.
	WaitBudget time.Duration
}

// noPods is the queue of a ledger without one.
type noPods struct{}

func (noPods) PendingPods() []PendingPods { return nil }

func (noPods) Changed() <-chan struct{} { return nil }

// Outstanding returns how many devices of each resource bound pods still request, and a channel that is closed when that may have changed
// other than by a hold. The device plugin calls it: a device that it withdraws now would be refused to these pods.
func (l *Ledger) Outstanding() (devices map[string]int, changed <-chan struct{}) {
	changed = l.options.Queue.Changed()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.missing(l.options.Queue.PendingPods()), changed
}

// yields reports whether a claim that takes these devices leaves fewer devices of a resource than bound pods request. Under l.mu.
func (l *Ledger) yields(first *PodsFirst, taken []Hold) bool {
	if first == nil || first.WaitBudget <= 0 || len(taken) == 0 {
		return false
	}
	takes := func(s Slot) bool {
		return slices.ContainsFunc(taken, func(h Hold) bool { return h.Device.Overlaps(s.Device) })
	}
	for resource, missing := range l.missing(l.options.Queue.PendingPods()) {
		if slots := first.Slots[resource]; slices.ContainsFunc(slots, takes) && l.free(slots, taken) < missing {
			return true
		}
	}
	return false
}

// free counts the slots that pods can still get beside the holds that a claim is about to take. Under l.mu.
func (l *Ledger) free(slots []Slot, taken []Hold) int {
	free, also := 0, slices.Clone(taken)
	for _, s := range slots {
		if len(l.blockers(Holder{}, s.Device, s.Share, also...)) == 0 {
			free++
			also = append(also, Hold{Holder: Holder{KindPod, fmt.Sprint(free)}, Device: s.Device, Share: s.Share})
		}
	}
	return free
}

// missing returns how many devices of each resource bound pods request and do not hold yet. A hold without a pod counts as one of
// theirs: kubelet writes the pod to its checkpoint right after Allocate. Under l.mu.
func (l *Ledger) missing(bound []PendingPods) map[string]int {
	if len(bound) == 0 {
		return nil
	}
	const unknown = ""
	type account struct{ pod, resource string }
	has := map[account]int{}
	for k, h := range l.holds {
		switch {
		case k.holder.Kind != KindPod:
		case len(h.Pods) > 0:
			has[account{h.Pods[0].UID, h.Resource}]++
		case h.State == StateHeld:
			has[account{unknown, h.Resource}]++
		}
	}
	missing := map[string]int{}
	for _, pod := range bound {
		missing[pod.Resource] += max(0, pod.Devices-has[account{pod.PodUID, pod.Resource}])
	}
	for resource := range missing {
		missing[resource] = max(0, missing[resource]-has[account{unknown, resource}])
	}
	return missing
}

// awaitPods waits until one of the channels is closed, ctx is done or the wait budget is spent, and subtracts the time that it waited.
func awaitPods(ctx context.Context, first *PodsFirst, changed, queueChanged <-chan struct{}) {
	started := time.Now()
	select {
	case <-changed:
	case <-queueChanged:
	case <-ctx.Done():
	case <-time.After(first.WaitBudget):
	}
	first.WaitBudget = max(0, first.WaitBudget-time.Since(started))
}
