// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"context"
	"errors"
	"testing"
)

// Has reports an entry once it is on disk, and Changed signals that.
func TestHas(t *testing.T) {
	from := newSource(entry("GPU-0", "/dev/nvidia0", 0))
	s := newSpecs(t, t.TempDir(), from, nil)
	changed := s.Changed()
	if s.Has("GPU-0") {
		t.Error("has an entry before the first refresh")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	<-changed
	if changed = s.Changed(); !s.Has("GPU-0") {
		t.Error("lacks the entry of a GPU after the signal")
	}
	edits := editsOf(entry("GPU-0", "/dev/nvidia0", 0), entry("MIG-1", "/dev/nvidia0", 0))
	edits.Failed = map[string]error{"MIG-2": errors.New("no device node")}
	from.set(edits, nil)
	<-changed
	if !s.Has("GPU-0") || !s.Has("MIG-1") || s.Has("MIG-2") {
		t.Errorf("GPU-0 %v, MIG-1 %v, MIG-2 %v", s.Has("GPU-0"), s.Has("MIG-1"), s.Has("MIG-2"))
	}
	if err := s.Ensure(t.Context(), "GPU-0", "MIG-1"); err != nil {
		t.Error(err)
	}
}
