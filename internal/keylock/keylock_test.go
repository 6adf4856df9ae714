// SPDX-License-Identifier: Apache-2.0

package keylock

import (
	"context"
	"errors"
	"sync"
	"testing"
)

func TestOneHolderForEachKey(t *testing.T) {
	var (
		locks Locks[string]
		wait  sync.WaitGroup
		count = map[string]*int{"a": new(int), "b": new(int)}
	)
	for range 50 {
		for key, n := range count {
			wait.Go(func() {
				unlock, err := locks.Lock(t.Context(), key)
				if err != nil {
					t.Error(err)
					return
				}
				defer unlock()
				*n++ // the race detector objects unless the lock excludes others
			})
		}
	}
	wait.Wait()
	if *count["a"] != 50 || *count["b"] != 50 {
		t.Errorf("counted %d and %d, want 50 each", *count["a"], *count["b"])
	}
	if len(locks.locks) != 0 {
		t.Errorf("%d locks are left", len(locks.locks))
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	var locks Locks[int]
	unlock, err := locks.Lock(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if other, err := locks.Lock(t.Context(), 2); err != nil {
		t.Fatal("another key waits: ", err)
	} else {
		other()
	}
	cause := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	if _, err := locks.Lock(ctx, 1); !errors.Is(err, cause) {
		t.Errorf("got %v, want %v", err, cause)
	}
	unlock()
	if len(locks.locks) != 0 {
		t.Errorf("%d locks are left", len(locks.locks))
	}
}
