// SPDX-License-Identifier: Apache-2.0

// A node that lets go of the driver, so that it can be replaced.

package nvml

import (
	"context"
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// PausedError means that the node makes no call to the driver until Resume. It is an ErrNoDriver.
type PausedError struct{ Reason string }

func (e *PausedError) Error() string { return "the NVIDIA driver is paused: " + e.Reason }

func (e *PausedError) health() gpu.Health {
	return gpu.Health{Reason: gpu.ReasonPaused, Message: e.Reason}
}

// Is makes a PausedError an ErrNoDriver.
func (e *PausedError) Is(target error) bool { return target == ErrNoDriver }

// Pause closes the driver, so that it can be unloaded or its GPUs be reset: no call begins any more, and the session ends. All GPUs are
// unhealthy with device.ReasonPaused at once. Pause then waits for the calls that are running, and for the end of a reset; its error says
// that some have not ended when ctx does. main calls it. It is idempotent and safe for concurrent use. Resume ends the pause, also of a
// Pause with an error.
func (n *Node) Pause(ctx context.Context, reason string) error {
	n.paused.Store(&PausedError{reason})
	n.mu.Lock()
	s := n.session
	next := n.inventory
	next.GPUs = slices.Clone(next.GPUs)
	for i := range next.GPUs {
		n.withdraw(&next.GPUs[i])
	}
	n.inventory = next
	n.changed.Notify()
	n.mu.Unlock()
	if s == nil {
		return nil
	}
	_, err := await(ctx, func(answer func(struct{}, error) bool) {
		s.setHold(false) // may hang, like any call
		broadcast.Await(ctx, s.idle.Changed, func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return !s.isOpen() && !s.suspended.Load()
		})
		answer(struct{}{}, nil)
	})
	if err != nil && s.suspended.Load() {
		err = fmt.Errorf("%w: %w", errSuspended, err)
	}
	if err != nil {
		return fmt.Errorf("close the NVIDIA driver: %w", err)
	}
	return nil
}

// Resume ends a pause and scans. Its error is that of Scan. main calls it. Idempotent.
func (n *Node) Resume(ctx context.Context) error {
	n.paused.Store(nil)
	return n.Scan(ctx)
}

// withdraw marks a GPU as unhealthy if the node is paused or lacks a required IMEX channel. An error in the container edits would not be enough:
// pods that get their GPUs without CDI must not get one without the channel either. A pause ends no fault: one that was the GPU's health is among
// its faults meanwhile. The caller holds n.mu.
func (n *Node) withdraw(g *gpu.GPU) {
	if paused := n.paused.Load(); paused != nil {
		if g.Health.Class() != gpu.FaultNone {
			g.Faults = append([]gpu.Health{g.Health}, g.Faults...) // a copy: earlier inventories share the slice
		}
		g.Health = paused.health()
	} else if n.lacking != nil && g.Health.Healthy() {
		g.Health = gpu.Health{Reason: gpu.ReasonNotInjectable, Message: n.lacking.Error()}
	}
}
