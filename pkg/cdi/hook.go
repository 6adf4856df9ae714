// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"
	"os"
)

// Hook keeps a copy of the image's hook binary on the host, where the container runtime runs it. A nil Hook does nothing.
type Hook struct {
	source string
	file   ownedFile
}

// NewHook returns a Hook and writes nothing yet. source is the binary in the image. target is where this process sees the
// copy; the spec names the same path on the host.
func NewHook(source, target string) *Hook {
	return &Hook{source: source, file: ownedFile{path: target}}
}

// Ensure installs the binary if it is missing or differs. It renames a complete file into place, so that a container that
// starts at that moment runs the old or the new binary. Idempotent; one stat if nothing changed. Calls must not overlap.
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
	if err := h.file.put(want, 0o755, nil); err != nil {
		return fmt.Errorf("install hook binary: %w", err)
	}
	return nil
}

// intact is safe for concurrent use.
func (h *Hook) intact() bool { return h == nil || h.file.intact() }
