// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// clearConflict clears the conflicts whose claim no pod waits for, and returns when to check again.
func (r *Reconciler) clearConflict() time.Duration {
	wait := never
	for _, lost := range r.Ledger.Conflicts() {
		if r.Pods.Ended(lost) {
			r.Ledger.ClearConflict(lost.UID)
			continue
		}
		wait = min(wait, r.times.verify)
		if lost.PendingEviction {
			// Conflicts() expires pending evictions.
			wait = min(wait, max(r.times.retry, time.Until(lost.Until())))
		}
	}
	return wait
}

// checkConflicts asks the API server once a minute for each conflict whether the claim still exists unchanged: a pod may wait for
// a claim that was replaced.
func (r *Reconciler) checkConflicts(ctx context.Context) (time.Duration, error) {
	now, wait := time.Now(), never
	asked := map[string]time.Time{}
	var errs []error
	for _, lost := range r.Ledger.Conflicts() {
		last, ok := r.asked[lost.UID]
		if !ok {
			last = now
		}
		if due := last.Add(r.times.verify); !now.Before(due) {
			last = now
			errs = append(errs, r.checkConflict(ctx, lost))
		}
		asked[lost.UID] = last
		wait = min(wait, last.Add(r.times.verify).Sub(now))
	}
	r.asked = asked
	return wait, errors.Join(errs...)
}

func (r *Reconciler) checkConflict(ctx context.Context, lost ledger.Conflict) error {
	ctx, cancel := context.WithTimeout(ctx, r.times.call)
	defer cancel()
	claim, err := r.Claims(lost.Namespace).Get(ctx, lost.Name, metav1.GetOptions{})
	switch {
	case err != nil && !apierrors.IsNotFound(err):
		return fmt.Errorf("look into claim %s/%s, which has lost: %w", lost.Namespace, lost.Name, err)
	case err == nil && string(claim.UID) == lost.UID:
		held := r.refs(r.usesOf(claim).held)
		if slices.ContainsFunc(lost.Devices, func(ref device.Ref) bool { return slices.Contains(held, ref) }) {
			return nil
		}
	}
	r.Ledger.ClearConflict(lost.UID)
	return nil
}
