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

// Conflict is a claim whose Prepare was refused because another holder keeps one of its devices. Conflicts are kept in memory
// only: after a restart a claim may be prepared while its pod is being evicted, which restarts the pod elsewhere and never gives
// a device two owners.
type Conflict struct {
	UID, Namespace, Name string
	// Devices that are in other hands.
	Devices []device.Ref
	// Names of Devices, as the claim was allocated them: the inventory does not know a partition that is still to be made.
	Names []string
	// Pods that the claim is for, as far as kubelet has asked for them.
	Pods []Pod
	// Since is when the claim lost for the first time. Lose sets it.
	Since time.Time
	// PendingEviction claims are not prepared, whatever becomes free: their pods are being moved. Others wait. A condemnation lapses
	// by itself (EvictionTimeout), and its claim then waits.
	PendingEviction bool
	// Message says what happened, to the claim's owner: without names of other namespaces.
	Message string

	// pendingEviction is when the eviction became pending.
	pendingEviction time.Time
}

// EvictionTimeout is how long an eviction stays pending. kubelet retries a failed Prepare after 60 to 90 seconds; by then a claim
// whose pods were not evicted must wait normally.
const EvictionTimeout = 30 * time.Second

// PendingEvictionError says that a claim is not prepared because its pod is being moved.
type PendingEvictionError struct{ Conflict Conflict }

// Error says so to the operator.
func (e *PendingEvictionError) Error() string {
	return fmt.Sprintf("claim %s/%s (%s) is condemned, its pods are being moved: %s", e.Conflict.Namespace, e.Conflict.Name, e.Conflict.UID, e.Conflict.Message)
}

// RecordConflict records that a claim has lost. Called by the DRA front-end after a *ConflictError that waiting does not cure; a claim
// that loses again keeps its Since. It does nothing for a claim that holds what it is said to have lost: another call for it
// was faster. What has been recorded ends with a ReserveClaim that succeeds, with DrainClaim, and with Forgive.
func (l *Ledger) RecordConflict(lost Conflict) {
	l.mu.Lock()
	defer l.mu.Unlock()
	holder := Holder{KindClaim, lost.UID}
	missing := func(ref device.Ref) bool {
		h, ok := l.holds[key{holder, ref}]
		return !ok || h.State != StateHeld
	}
	if !slices.ContainsFunc(lost.Devices, missing) {
		return
	}
	lost.Since = l.now()
	if lost.PendingEviction {
		lost.pendingEviction = lost.Since
	}
	known, again := l.conflicts[lost.UID]
	if again {
		lost.Since = known.Since
	}
	lost.Devices, lost.Names = slices.Clone(lost.Devices), slices.Clone(lost.Names)
	lost.Pods = mergePods(known.Pods, lost.Pods)
	l.conflicts[lost.UID] = lost
	l.announce()
}

// Conflicts returns a copy of every claim that has lost and neither got its devices nor gone since, oldest first.
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

// ClearConflict ends what Lose began. Called when the claim's pods are gone, or the claim is no longer allocated here. Idempotent.
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

// Until is when the condemnation lapses; zero for a claim that waits.
func (l Conflict) Until() time.Time {
	if !l.PendingEviction {
		return time.Time{}
	}
	return l.pendingEviction.Add(EvictionTimeout)
}

// expire ends a condemnation whose time is over. A clock that was set back must not make it long.
func (l *Ledger) expire(uid string) {
	lost := l.conflicts[uid]
	if age := l.now().Sub(lost.pendingEviction); !lost.PendingEviction || age >= 0 && age < EvictionTimeout {
		return
	}
	lost.PendingEviction = false
	l.conflicts[uid] = lost
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
	lost := l.conflicts[r.UID]
	if !lost.PendingEviction {
		return nil
	}
	if pods := mergePods(lost.Pods, r.Pods); !slices.Equal(pods, lost.Pods) {
		lost.Pods = pods
		l.conflicts[r.UID] = lost
		l.announce()
	}
	return &PendingEvictionError{lost}
}
