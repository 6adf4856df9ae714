// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// supportedEvents are the event types a GPU can be registered for; only XIDs are ever delivered.
const supportedEvents = nvml.EventTypeXidCriticalError | nvml.EventTypeSingleBitEccError | nvml.EventTypeDoubleBitEccError

// eventSet collects the events of the GPUs registered with it, from the faults file.
type eventSet struct {
	sys   *system
	freed chan struct{}

	mu         sync.Mutex
	registered map[int]*registration // by place
}

// registration is the interest in a GPU; events up to seen are past.
type registration struct {
	handle *gpuHandle
	types  uint64
	seen   uint64
}

func newEventSet(sys *system) *eventSet {
	return &eventSet{sys: sys, freed: make(chan struct{}), registered: map[int]*registration{}}
}

// RegisterEvents adds to what the set is registered for; only events written from now on are delivered.
func (g *gpu) RegisterEvents(types uint64, set nvml.EventSet) nvml.Return {
	handle, ok := set.(*eventSetHandle)
	if !ok || handle.set.sys != g.sys {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	own := handle.set
	if types&^supportedEvents != 0 {
		return nvml.ERROR_NOT_SUPPORTED
	}
	seen := g.sys.faults.current().newest
	own.mu.Lock()
	defer own.mu.Unlock()
	if r, exists := own.registered[g.place]; exists {
		r.types |= types
		return nvml.SUCCESS
	}
	own.registered[g.place] = &registration{handle: g.sys.all[g.place], types: types, seen: seen}
	return nvml.SUCCESS
}

// eventSetHandle is what callers hold.
type eventSetHandle struct {
	nvml.EventSet
	set *eventSet
}

func (h *eventSetHandle) gate(method string) nvml.Return {
	if !h.set.sys.initialized() {
		return nvml.ERROR_UNINITIALIZED
	}
	_, ret := h.set.sys.faults.answer(libraryFault("EventSet."+method), h.set.sys.stop())
	return ret
}

// Free releases the set; a Wait that is under way returns.
func (s *eventSet) Free() nvml.Return {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.freed:
		return nvml.ERROR_INVALID_ARGUMENT
	default:
	}
	close(s.freed)
	return nvml.SUCCESS
}

// Wait returns the next event, ERROR_TIMEOUT after that many milliseconds without one, or ERROR_UNINITIALIZED when the
// library is shut down meanwhile.
func (s *eventSet) Wait(milliseconds uint32) (nvml.EventData, nvml.Return) {
	stopped := s.sys.stop()
	over := time.NewTimer(time.Duration(milliseconds) * time.Millisecond)
	defer over.Stop()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		if data, ok := s.next(); ok {
			return data, nvml.SUCCESS
		}
		select {
		case <-s.freed:
			return nvml.EventData{}, nvml.ERROR_INVALID_ARGUMENT
		case <-stopped:
			return nvml.EventData{}, nvml.ERROR_UNINITIALIZED
		case <-over.C:
			return nvml.EventData{}, nvml.ERROR_TIMEOUT
		case <-look.C:
		}
	}
}

// next takes the oldest event not yet delivered.
func (s *eventSet) next() (nvml.EventData, bool) {
	state := s.sys.faults.current()
	s.mu.Lock()
	defer s.mu.Unlock()
	var found *event
	for i := range state.events {
		e := &state.events[i]
		r, ok := s.registered[e.place]
		if ok && r.types&nvml.EventTypeXidCriticalError != 0 && e.sequence > r.seen && (found == nil || e.sequence < found.sequence) {
			found = e
		}
	}
	if found == nil {
		return nvml.EventData{}, false
	}
	r := s.registered[found.place]
	r.seen = found.sequence
	data := nvml.EventData{
		Device: r.handle, EventType: nvml.EventTypeXidCriticalError, EventData: found.xid,
		GpuInstanceId: noInstance, ComputeInstanceId: noInstance,
	}
	if _, ret := r.handle.gpu.migEnabled(); ret == nvml.SUCCESS {
		data.GpuInstanceId, data.ComputeInstanceId = found.gi, found.ci
	}
	return data, true
}

// noInstance is what NVML puts for an event that concerns the whole GPU.
const noInstance = 0xFFFFFFFF
