// SPDX-License-Identifier: Apache-2.0

package filelock

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
)

func TestWait(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	unlock, err := Wait(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Wait(over, path); !errors.Is(err, context.Canceled) {
		t.Errorf("a held lock: %v", err)
	}
	got := make(chan error)
	go func() {
		next, err := Wait(t.Context(), path)
		if err == nil {
			next()
		}
		got <- err
	}()
	unlock()
	if err := <-got; err != nil {
		t.Error(err)
	}
	if _, err := Wait(t.Context(), filepath.Join(path, "below")); err == nil {
		t.Error("a lock below a file")
	}
}
