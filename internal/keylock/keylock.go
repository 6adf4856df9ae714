// SPDX-License-Identifier: Apache-2.0

// Package keylock has one lock for each key, so that slow work for one GPU or claim does not delay another.
package keylock

import (
	"context"
	"sync"
)

// Locks is a set of locks, one for each key in use. The zero value is ready to use. All methods are safe for concurrent use.
type Locks[K comparable] struct {
	mu    sync.Mutex
	locks map[K]*lock
}

// lock exists while a caller holds it or waits for it.
type lock struct {
	held  chan struct{}
	users int
}

// Lock waits until no other caller holds the key's lock, or until ctx is done: it returns the cause of ctx then. The caller
// calls unlock exactly once. Locks of different keys are independent; a caller that takes two must take them in one order.
func (l *Locks[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	k := l.use(key)
	select {
	case k.held <- struct{}{}:
		return func() { <-k.held; l.leave(key, k) }, nil
	case <-ctx.Done():
		l.leave(key, k)
		return nil, context.Cause(ctx)
	}
}

func (l *Locks[K]) use(key K) *lock {
	l.mu.Lock()
	defer l.mu.Unlock()
	k, ok := l.locks[key]
	if !ok {
		k = &lock{held: make(chan struct{}, 1)}
		if l.locks == nil {
			l.locks = map[K]*lock{}
		}
		l.locks[key] = k
	}
	k.users++
	return k
}

func (l *Locks[K]) leave(key K, k *lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.users--; k.users == 0 {
		delete(l.locks, key)
	}
}
