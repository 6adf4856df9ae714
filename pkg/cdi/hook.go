// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"fmt"
	"os"
)

// Hook keeps a copy of the hook binary, which comes with the image, at a path on the host where the container runtime can
// run it. A nil Hook does nothing and is always well.
type Hook struct {
	source string
	file   ownedFile
}

// NewHook prepares a Hook and touches nothing. Source is the binary in the image; target is where it belongs, as this
// process sees it. The same path on the host is what the spec names.
func NewHook(source, target string) *Hook {
	return &Hook{source: source, file: ownedFile{path: target}}
}

// Ensure installs the binary where it is missing or differs from Source, by rename, so that a container that starts at
// that moment runs the old or the new one, never half of it. It costs one stat when all is well. Not safe for concurrent
// use with itself.
func (h *Hook) Ensure() error {
	if h.intact() {
		return nil
	}
	if err := h.file.removeTemporaries(); err != nil {
		return err
	}
	want, err := os.ReadFile(h.source)
	if err != nil {
		return fmt.Errorf("read hook binary: %w", err)
	}
	if h.installed(want) {
		return h.file.accept()
	}
	accept := func(string) error { return nil }
	if err := h.file.replace(want, 0o755, accept); err != nil {
		return fmt.Errorf("install hook binary: %w", err)
	}
	return nil
}

// intact is safe for concurrent use.
func (h *Hook) intact() bool { return h == nil || h.file.intact() }

func (h *Hook) installed(want []byte) bool {
	info, err := os.Lstat(h.file.path)
	if err != nil || !info.Mode().IsRegular() || info.Mode().Perm()&0o111 != 0o111 || info.Size() != int64(len(want)) {
		return false
	}
	got, err := os.ReadFile(h.file.path)
	return err == nil && bytes.Equal(got, want)
}
