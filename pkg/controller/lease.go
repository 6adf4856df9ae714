// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// The Lease outlasts a restart of the API server. Long times do not delay a takeover: a restarted container still holds the Lease,
// and a pod that ends releases it.
const (
	leaseDuration = 30 * time.Second
	renewDeadline = 25 * time.Second
	retryPeriod   = 2 * time.Second
	// writeTimeout bounds a write of the Lease. One that begins before renewDeadline ends before another replica may lead.
	writeTimeout = leaseDuration - renewDeadline
)

// newLease returns the lock of the Lease that the leader holds.
func newLease(c Config) (resourcelock.Interface, error) {
	lock, err := resourcelock.NewFromKubeconfig(resourcelock.LeasesResourceLock, c.Namespace, c.LeaseName,
		resourcelock.ResourceLockConfig{Identity: c.Identity}, rest.CopyConfig(c.REST), renewDeadline)
	if err != nil {
		return nil, fmt.Errorf("make lease %s/%s: %w", c.Namespace, c.LeaseName, err)
	}
	return wholeWrites{lock}, nil
}

// wholeWrites finishes the write that is in flight when the election is stopped. A cancelled write may succeed in the API server. The
// elector would not know that it got the Lease and would not release it, and no replica would lead for leaseDuration.
type wholeWrites struct{ resourcelock.Interface }

func (l wholeWrites) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTimeout)
	defer cancel()
	return l.Interface.Create(ctx, record)
}

func (l wholeWrites) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTimeout)
	defer cancel()
	return l.Interface.Update(ctx, record)
}
