// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"maps"
	"sync"
)

// entries are the names in the files, for readers who must not wait while a file is written.
type entries struct {
	mu      sync.Mutex
	names   map[string]bool
	changed chan struct{}
}

// Has reports whether the files had an entry for a device when they were last brought in step with the Source: Ensure finds one,
// unless the device has gone since. It answers from memory. Called by the device plugin before it offers a new partition.
func (s *Specs) Has(uuid string) bool {
	s.entries.mu.Lock()
	defer s.entries.mu.Unlock()
	return s.entries.names[uuid]
}

// Changed returns a channel that is closed when Has may answer differently; take it before asking. Safe for concurrent use.
func (s *Specs) Changed() <-chan struct{} {
	s.entries.mu.Lock()
	defer s.entries.mu.Unlock()
	return s.entries.changed
}

// announce tells of what is in the files. Under s.mu.
func (s *Specs) announce() {
	names := maps.Clone(s.known)
	for uuid := range s.added {
		names[uuid] = true
	}
	e := &s.entries
	e.mu.Lock()
	defer e.mu.Unlock()
	if maps.Equal(names, e.names) {
		return
	}
	e.names = names
	close(e.changed)
	e.changed = make(chan struct{})
}
