// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// A standby tries to get the Lease every 1 to 2.2 s, so it leads about two seconds after a leader has released it. A process that is
// killed releases nothing, but its container starts again under the same identity, which still holds the Lease. So only a lost node
// leaves the work undone for leaseDuration. It is long because a leader that fails to renew for renewDeadline exits and lists all objects
// again. The restart of an API server, or a slow one, must not cause that: it would slow the API server further.
const (
	leaseDuration = 30 * time.Second
	renewDeadline = 25 * time.Second
	retryPeriod   = time.Second
	// writeTimeout bounds a write of the Lease. One that begins before renewDeadline ends before another replica may lead.
	// renewDeadline counts from the first attempt, which is retryPeriod after the last write.
	writeTimeout = leaseDuration - renewDeadline - retryPeriod
)

func newLease(c Config) (resourcelock.Interface, error) {
	config := rest.AddUserAgent(rest.CopyConfig(c.REST), "leader-election")
	config.Timeout = renewDeadline / 2
	client, err := kubernetes.NewForConfig(config) // resourcelock.NewFromKubeconfig would panic
	if err != nil {
		return nil, fmt.Errorf("make client of lease %s/%s: %w", c.Namespace, c.LeaseName, err)
	}
	lock, err := resourcelock.New(resourcelock.LeasesResourceLock, c.Namespace, c.LeaseName, client.CoreV1(), client.CoordinationV1(),
		resourcelock.ResourceLockConfig{Identity: c.Identity})
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
