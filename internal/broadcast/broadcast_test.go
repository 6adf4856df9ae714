// SPDX-License-Identifier: Apache-2.0

package broadcast

import (
	"sync"
	"testing"
)

func TestNotifyWakesAllWaiters(t *testing.T) {
	var s Signal
	s.Notify() // without waiters
	first, second := s.Changed(), s.Changed()
	select {
	case <-first:
		t.Fatal("closed before Notify")
	default:
	}
	s.Notify()
	<-first
	<-second
	select {
	case <-s.Changed():
		t.Fatal("the next channel is closed before the next Notify")
	default:
	}
}

// A waiter that takes the channel before it reads the value misses no change.
func TestNoChangeIsMissed(t *testing.T) {
	const last = 10_000
	var (
		s     Signal
		mu    sync.Mutex
		value int
		wait  sync.WaitGroup
	)
	for range 4 {
		wait.Go(func() {
			for {
				changed := s.Changed()
				mu.Lock()
				seen := value
				mu.Unlock()
				if seen == last {
					return
				}
				<-changed
			}
		})
	}
	for range last {
		mu.Lock()
		value++
		mu.Unlock()
		s.Notify()
	}
	wait.Wait()
}
