// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"context"
	"fmt"

	"github.com/tandem-gpu/tandem/internal/broadcast"
)

// knowledge is what Has, Problem and Unwritable answer from. It is immutable.
type knowledge struct {
	// names are the entries of the files.
	names  map[string]bool
	failed map[string]error
	// The others are as in Specs.
	absent, broken, unwritable error
}

// Has reports whether the files have an entry for a device. It does not wait, also while a file is written to a slow disk. Ensure finds
// the entry unless the device has gone since. The device plugin calls Has before it answers with the name of a device.
func (s *Specs) Has(uuid string) bool { return s.known.Load().names[uuid] }

// Problem returns why no container can be given a device: it has no entry, or the files were damaged and cannot be restored. It returns
// nil if the files were complete when they were checked last. It answers from memory. Both front-ends offer a device only without a
// problem, because a failed Allocate fails its pod for good.
func (s *Specs) Problem(uuid string) error {
	k := s.known.Load()
	switch {
	case k.broken != nil:
		return k.broken
	case k.names[uuid]:
		return nil
	}
	return cmp.Or(k.failed[uuid], k.absent)
}

// Unwritable returns why new files cannot be written, as for partitions that claims ask for; nil if the last one was. It answers from
// memory.
func (s *Specs) Unwritable() error {
	k := s.known.Load()
	return cmp.Or(k.broken, k.unwritable)
}

// Verify makes Run restore the files at once if one that all devices need was removed or changed. It costs two stats and does not wait.
// Allocate calls it: the container starts later.
func (s *Specs) Verify() {
	if !s.main.intact() || !s.options.Hook.intact() {
		s.wake()
	}
}

// wake makes Run look at once.
func (s *Specs) wake() {
	select {
	case s.woken <- struct{}{}:
	default:
	}
}

// Await waits until Run has asked the Source for the first time and tried to write the answer. It returns false if ctx ends first.
func (s *Specs) Await(ctx context.Context) bool {
	select {
	case <-s.asked:
		return true
	case <-ctx.Done():
		return false
	}
}

// announce updates what Has, Problem and Unwritable answer. Under s.mu.
func (s *Specs) announce() {
	next := &knowledge{names: map[string]bool{}, failed: s.failed, absent: s.absent, broken: s.broken, unwritable: s.unwritable}
	for _, d := range s.devices {
		next.names[d.Name] = true
	}
	for uuid := range s.partitions {
		next.names[uuid] = true
	}
	if fmt.Sprint(*next) != fmt.Sprint(*s.known.Load()) {
		s.known.Store(next)
		s.changed.Notify()
	}
}

// Changed returns a channel that is closed when Has, Problem or Unwritable may answer differently. Take it before you call them.
func (s *Specs) Changed() <-chan struct{} { return s.changed.Changed() }

// setAsked records that the Source was asked. Under s.mu.
func (s *Specs) setAsked() {
	if !broadcast.Happened(s.asked) {
		close(s.asked)
	}
}
