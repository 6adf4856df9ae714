// SPDX-License-Identifier: Apache-2.0

// Package broadcast notifies any number of waiters of a change, without the new value.
package broadcast

import (
	"context"
	"sync"
	"time"
)

// Signal notifies all waiters of a change. The zero value is ready to use. All methods are safe for concurrent use.
//
// A waiter takes the channel of Changed first, reads the value next, and waits last, so that it misses no change:
//
//	for {
//		changed := signal.Changed()
//		use(value())
//		<-changed
//	}
type Signal struct {
	mu      sync.Mutex
	changed chan struct{}
}

// Changed returns a channel that the next Notify closes.
func (s *Signal) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.changed
}

// Notify wakes all waiters. It never blocks.
func (s *Signal) Notify() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// Happened reports whether a channel of Changed is closed. It does not wait. Safe for concurrent use.
func Happened(changed <-chan struct{}) bool {
	select {
	case <-changed:
		return true
	default:
		return false
	}
}

// Await calls done at once and after each change. It returns true once done does, and false if ctx ends first. changed is the method
// Changed of a Signal or of a component that has one. Concurrent calls are safe.
func Await(ctx context.Context, changed func() <-chan struct{}, done func() bool) bool {
	for {
		next := changed()
		if done() {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-next:
		}
	}
}

// Sleep waits that long, and returns false if ctx ends first.
func Sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
