// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/client-go/util/workqueue"
)

// repairDelay is how long after the last event on a slice the controller compares it with what it should be: long enough
// for a wipe of several slices to be seen whole, short enough that a restart of kubelet is not noticed.
const repairDelay = 100 * time.Millisecond

// Somebody who keeps changing our slices (another agent with our node's name) must not make us answer blow by blow.
const (
	repairBurst      = 10
	repairEvery      = 2 * time.Second
	repairDelayUnder = 3 * time.Second
)

// A failed write is tried again soon, and never so late that a GPU which a limit took while the API server was away stays on
// offer for minutes after its return: the library's default goes up to a quarter of an hour.
const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = 20 * time.Second
)

func newRetries() workqueue.TypedRateLimiter[string] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry)
}

// syncQueue is the slice controller's work queue of pools, from which its progress can be seen.
type syncQueue struct {
	workqueue.TypedRateLimitingInterface[string]
	synced func()

	mu sync.Mutex
	// failed are the pools that wait for another try.
	failed map[string]bool
	// repairs limits how often a pool is looked at because somebody changed it.
	repairs map[string]*rate.Limiter
}

func newSyncQueue(synced func()) *syncQueue {
	return &syncQueue{
		TypedRateLimitingInterface: workqueue.NewTypedRateLimitingQueueWithConfig(
			newRetries(),
			workqueue.TypedRateLimitingQueueConfig[string]{Name: "node_resource_slices"},
		),
		synced:  synced,
		failed:  map[string]bool{},
		repairs: map[string]*rate.Limiter{},
	}
}

// Forget is what the controller calls after a pool was synchronized without error. All pools are when no other waits.
func (q *syncQueue) Forget(pool string) {
	q.TypedRateLimitingInterface.Forget(pool)
	q.mu.Lock()
	delete(q.failed, pool)
	done := len(q.failed) == 0 && q.Len() == 0
	q.mu.Unlock()
	if done {
		q.synced()
	}
}

// AddRateLimited is what it calls after a failure.
func (q *syncQueue) AddRateLimited(pool string) {
	q.mu.Lock()
	q.failed[pool] = true
	q.mu.Unlock()
	q.TypedRateLimitingInterface.AddRateLimited(pool)
}

// AddAfter is what it calls with repairDelay after each event on a slice, its own writes included.
func (q *syncQueue) AddAfter(pool string, delay time.Duration) {
	if delay == repairDelay && !q.repair(pool) {
		delay = repairDelayUnder
	}
	q.TypedRateLimitingInterface.AddAfter(pool, delay)
}

func (q *syncQueue) repair(pool string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.repairs[pool] == nil {
		q.repairs[pool] = rate.NewLimiter(rate.Every(repairEvery), repairBurst)
	}
	return q.repairs[pool].Allow()
}
