// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Conflict is a claim whose Prepare was refused because another holder has one of its devices. Conflicts are kept in memory only:
// after a restart a claim may be prepared while its pod is being evicted. The pod then restarts elsewhere, and no device gets two
// owners.
type Conflict struct {
	UID, Namespace, Name string
	// Devices that other holders have.
	Devices []device.Ref
	// Names of Devices, from the claim's allocation: the inventory lacks a partition that was not created yet.
	Names []string
	// Pods of the claim for which kubelet has called Prepare.
	Pods []Pod
	// Since is when the conflict was recorded first. RecordConflict sets it.
	Since time.Time
	// PendingEviction claims are not prepared, whatever becomes free, because the controller evicts their pods. Other claims wait. A
	// pending eviction expires (EvictionTimeout), and its claim waits from then on.
	PendingEviction bool
	// Message explains the conflict to the claim's owner. It has no names of other namespaces.
	Message string
	// Generation is that of the ConflictError; zero without one.
	Generation uint64

	// pendingEviction is when the eviction became pending.
	pendingEviction time.Time
}

// EvictionTimeout is how long an eviction stays pending. kubelet retries a failed Prepare after 60 to 90 seconds; by then a claim
// whose pods were not evicted must wait normally.
const EvictionTimeout = 30 * time.Second

// PendingEvictionError means that a claim is not prepared because its pods are being evicted.
type PendingEvictionError struct{ Conflict Conflict }

// Error names the claim and its conflict, for the agent's log.
func (e *PendingEvictionError) Error() string {
	return fmt.Sprintf("claim %s/%s (%s) is not prepared, because its pods are being evicted: %s", e.Conflict.Namespace, e.Conflict.Name, e.Conflict.UID, e.Conflict.Message)
}

// RecordConflict records a conflict. The DRA front-end calls it after a *ConflictError. A known conflict keeps its Since. It does nothing
// if another call for the claim was faster: the claim holds all Devices, and has reserved them after Generation, if that is set. The
// conflict ends when ReserveClaim succeeds, with DrainClaim and with ClearConflict.
func (l *Ledger) RecordConflict(conflict Conflict) {
	l.mu.Lock()
	defer l.mu.Unlock()
	holder := Holder{KindClaim, conflict.UID}
	missing := func(ref device.Ref) bool {
		h, ok := l.holds[key{holder, ref}]
		return !ok || h.State != StateHeld || conflict.Generation > 0 && h.taken <= conflict.Generation
	}
	if !slices.ContainsFunc(conflict.Devices, missing) {
		return
	}
	conflict.Since = l.options.Now()
	if conflict.PendingEviction {
		conflict.pendingEviction = conflict.Since
	}
	known, again := l.conflicts[conflict.UID]
	if again {
		conflict.Since = known.Since
	}
	conflict.Devices, conflict.Names = slices.Clone(conflict.Devices), slices.Clone(conflict.Names)
	conflict.Pods = mergeReservers(known.Pods, conflict.Pods)
	l.conflicts[conflict.UID] = conflict
	l.announce()
}

// contest marks the holds of claims that keep a claim from a device which the scheduler gave it: the scheduler may not count them.
func (l *Ledger) contest(holds []Hold) {
	for _, h := range holds {
		if h.Holder.Kind == KindClaim {
			l.mark(h, func(current *Hold) { current.Contested = true })
		}
	}
}

// SetDeserted records whether all pods of a claim's hold are gone from the API server. The reconciler calls it. It is idempotent, and
// does nothing if the hold has another generation. It is not recorded on disk: the next process finds it out.
func (l *Ledger) SetDeserted(h Hold, deserted bool) {
	l.mark(h, func(current *Hold) { current.Deserted = deserted })
}

// SetCounted records that the API server has the hold's device allocated to its claim: the scheduler counts it, so the hold is not
// contested. Otherwise it is like SetDeserted.
func (l *Ledger) SetCounted(h Hold) {
	l.mark(h, func(current *Hold) { current.Contested = false })
}

// SetWait records what a hold waits for, and since when; empty if it does not wait. Otherwise it is like SetDeserted.
func (l *Ledger) SetWait(h Hold, waitsFor string, since time.Time) {
	l.mark(h, func(current *Hold) { current.WaitsFor, current.WaitsSince = waitsFor, since })
}

// mark changes a mark of a hold that is kept in memory only.
func (l *Ledger) mark(h Hold, set func(*Hold)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	current, ok := l.holds[keyOf(h)]
	if !ok || current.Generation != h.Generation {
		return
	}
	before := *current
	if set(current); current.Overdue() != before.Overdue() || current.Deserted != before.Deserted || current.WaitsFor != before.WaitsFor {
		l.announce()
	}
}

// maxReservers is how many pods may have a claim reserved (resource.k8s.io/v1, ResourceClaimReservedForMaxSize).
const maxReservers = 256

// mergeReservers adds the pods that have the claim reserved now. Among too many pods some are gone: it returns the current ones then.
func mergeReservers(known, now []Pod) []Pod {
	if merged := mergePods(known, now); len(merged) <= maxReservers {
		return merged
	}
	return slices.Clone(now)
}

// Conflicts returns a copy of all conflicts, oldest first.
func (l *Ledger) Conflicts() []Conflict {
	l.mu.Lock()
	for uid := range l.conflicts {
		l.expire(uid)
	}
	conflicts := slices.Collect(maps.Values(l.conflicts))
	l.mu.Unlock()
	slices.SortFunc(conflicts, func(a, b Conflict) int { return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.UID, b.UID)) })
	return conflicts
}

// ClearConflict ends a conflict. The reconciler calls it when the claim's pods are gone or the claim is no longer allocated on this
// node. It is idempotent.
func (l *Ledger) ClearConflict(uid string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.clearConflict(uid)
}

func (l *Ledger) clearConflict(uid string) {
	if _, ok := l.conflicts[uid]; ok {
		delete(l.conflicts, uid)
		l.announce()
	}
}

// Until returns when the pending eviction expires; zero for a claim that waits.
func (c Conflict) Until() time.Time {
	if !c.PendingEviction {
		return time.Time{}
	}
	return c.pendingEviction.Add(EvictionTimeout)
}

// expire ends a pending eviction after EvictionTimeout. A clock that was set back does not prolong it.
func (l *Ledger) expire(uid string) {
	conflict := l.conflicts[uid]
	if age := l.options.Now().Sub(conflict.pendingEviction); !conflict.PendingEviction || age >= 0 && age < EvictionTimeout {
		return
	}
	conflict.PendingEviction = false
	l.conflicts[uid] = conflict
	l.announce()
}

// admit refuses a cancelled call and a call for a claim that is pending eviction. It adds the call's pods to those to evict.
// Under l.mu.
func (l *Ledger) admit(ctx context.Context, r ClaimRequest) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if _, ok := l.conflicts[r.UID]; !ok {
		return nil
	}
	l.expire(r.UID)
	conflict := l.conflicts[r.UID]
	if !conflict.PendingEviction {
		return nil
	}
	if pods := mergeReservers(conflict.Pods, r.Pods); !slices.Equal(pods, conflict.Pods) {
		conflict.Pods = pods
		l.conflicts[r.UID] = conflict
		l.announce()
	}
	return &PendingEvictionError{conflict}
}
