// SPDX-License-Identifier: Apache-2.0

package filelock

import (
	"context"
	"errors"
	"io/fs"
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
	if _, ok, err := Try(path); ok || err != nil {
		t.Errorf("try a held lock: %t, %v", ok, err)
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
	if free, ok, err := Try(path); !ok || err != nil {
		t.Errorf("try a free lock: %t, %v", ok, err)
	} else {
		free()
	}
	if _, ok, err := Try(path + ".other"); ok || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("try a file that is not there: %t, %v", ok, err)
	}
	if _, err := Wait(t.Context(), filepath.Join(path, "below")); err == nil {
		t.Error("a lock below a file")
	}
}
