// SPDX-License-Identifier: Apache-2.0

// Follows XIDs: from the kernel's log, or from NVML's events.

package nvml

import (
	"context"
	"errors"
	"sync"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// WatchXIDs calls handle for each XID of the node's GPUs, one call at a time, until ctx is done: from the kernel's log, with the XIDs since
// boot first, or from NVML's events where the log cannot be read. It also reports each reset of a GPU, load of the driver and destruction
// of a partition. pkg/health calls it once, after the first Scan. It returns nil.
func (n *Node) WatchXIDs(ctx context.Context, handle func(gpu.XIDEvent)) error {
	events := make(chan gpu.XIDEvent)
	var reading sync.WaitGroup
	reading.Go(func() {
		n.readXIDs(ctx, func(e gpu.XIDEvent) {
			select {
			case events <- e:
				if e.XID != 0 && gpu.XIDByNumber(e.XID).Class != gpu.FaultApplication {
					n.reported.Notify()
				}
			case <-ctx.Done():
			}
		})
	})
	for ctx.Err() == nil {
		changed := n.endings.Changed()
		for _, e := range n.takeEndedXIDs() {
			handle(e)
		}
		select {
		case e := <-events:
			handle(e)
		case <-changed:
		case <-ctx.Done():
		}
	}
	reading.Wait()
	return nil
}

// sourceRetry is how long after a source of XIDs has failed the next attempt begins.
const sourceRetry = time.Second

// readXIDs reads XIDs from the one source that works. handle must be safe for concurrent use.
func (n *Node) readXIDs(ctx context.Context, handle func(gpu.XIDEvent)) {
	logger := klog.FromContext(ctx)
	logged := false
	for ctx.Err() == nil {
		log, err := n.options.OpenKernelLog()
		if err != nil {
			logger.Info("Reading XIDs from NVML's events, which keeps the driver loaded", "kernelLog", err.Error())
			n.followEvents(ctx, handle)
			return
		}
		if !logged {
			logger.Info("Reading XIDs from the kernel's log")
			logged = true
		}
		if err := followKernelLog(ctx, log, handle); err != nil {
			logger.V(2).Info("Cannot read XIDs now", "reason", err.Error())
		}
		broadcast.Sleep(ctx, sourceRetry)
	}
}

// eventWait is how long one call waits for an event. It bounds how long a reset waits for the session.
const eventWait = 500 * time.Millisecond

// wholeGPU is the instance of an event that concerns the GPU (nvml.h, nvmlEventData_t).
const wholeGPU = 0xFFFFFFFF

// watched is a GPU whose events are read in a goroutine of its own, with an event set of its own: a GPU that hangs costs no other one its
// XIDs.
type watched struct {
	// ended has the reason once the goroutine has ended. It may never end.
	ended chan error
	// retry is when the next attempt begins; zero while the goroutine runs. never: the GPU has no events.
	retry time.Time
	never bool
	// session is what never is about, problem what was logged last.
	session *session
	problem string
}

// due reports whether an attempt to watch the GPU begins now. It takes the result of one that has ended.
func (w *watched) due(ctx context.Context, g gpu.GPU, s *session) bool {
	if w.retry.IsZero() {
		select {
		case err := <-w.ended:
			w.recordEnd(ctx, g, err)
		default:
			return false
		}
	}
	switch {
	case s == nil, g.PCIBusID == "", !readable(g):
		return false
	case w.never && w.session == s:
		return false
	default:
		return !time.Now().Before(w.retry)
	}
}

// followEvents calls handle for each XID of the GPUs in the inventory, until ctx is done. It does not wait for calls that hang.
func (n *Node) followEvents(ctx context.Context, handle func(gpu.XIDEvent)) {
	all := map[string]*watched{}
	ticker := time.NewTicker(eventWait)
	defer ticker.Stop()
	ended := make(chan struct{}, 1)
	load := n.options.moduleLoad(0)
	for ctx.Err() == nil {
		changed := n.Changed()
		before := load
		load = n.options.moduleLoad(before)
		n.mu.Lock()
		if load != before {
			// No event of the new driver has been read yet. No scan during a pause sees that the driver is unloaded.
			n.endAllXIDs()
		}
		session, inventory := n.session, n.inventory
		n.mu.Unlock()
		for _, g := range inventory.GPUs {
			w := all[g.UUID]
			if w == nil {
				w = &watched{ended: make(chan error, 1), retry: time.Now()}
				all[g.UUID] = w
			}
			if !w.due(ctx, g, session) {
				continue
			}
			w.retry, w.never, w.session = time.Time{}, false, session
			go func() {
				w.ended <- n.watchGPU(ctx, session, g, handle)
				select {
				case ended <- struct{}{}:
				default:
				}
			}()
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-ended:
		case <-ticker.C:
		}
	}
	limit := time.After(2 * eventWait)
	for _, w := range all {
		if w.retry.IsZero() {
			select {
			case <-w.ended:
			case <-limit:
				return
			}
		}
	}
}

// readable reports whether a GPU answers.
func readable(g gpu.GPU) bool {
	return g.Health.Healthy() || g.Health.Reason == gpu.ReasonNoNode || g.Health.Reason == gpu.ReasonNotInjectable
}

// recordEnd takes the end of the goroutine. Without an error the next one may begin at once.
func (w *watched) recordEnd(ctx context.Context, g gpu.GPU, err error) {
	w.retry = time.Now()
	problem := ""
	if answer, ok := errors.AsType[returnError](err); ok && unsupported(answer.ret) {
		w.never = true
	}
	if err != nil {
		w.retry, problem = w.retry.Add(sourceRetry), err.Error()
	}
	if problem != "" && problem != w.problem && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Cannot read the XIDs of a GPU", "uuid", g.UUID, "reason", problem, "again", !w.never)
	}
	w.problem = problem
}

// watchGPU calls handle for each XID of a GPU, until ctx is done, the GPU has come back or is gone, or the session is needed or replaced.
func (n *Node) watchGPU(ctx context.Context, s *session, g gpu.GPU, handle func(gpu.XIDEvent)) error {
	// A call that hangs keeps a session outdated for ever. If the driver is found again meanwhile, the events come from the new session.
	free := func() bool { return s.wanted.Load() == 0 && !s.suspended.Load() && !s.outdated.Load() || !n.uses(s) }
	if !broadcast.Await(ctx, s.idle.Changed, free) || !n.uses(s) {
		return nil
	}
	switch err := s.tryOpen(); {
	case errors.Is(err, errSuspended):
		return nil
	case err != nil:
		return err
	}
	defer s.close()
	set, ret := s.library.EventSetCreate()
	if ret != gonvml.SUCCESS {
		return returnError{ret}
	}
	defer set.Free()
	d, ret := s.handle(g.UUID, g.PCIBusID)
	if ret != gonvml.SUCCESS {
		return returnError{ret}
	}
	if ret := d.RegisterEvents(gonvml.EventTypeXidCriticalError, set); ret != gonvml.SUCCESS {
		return returnError{ret}
	}
	for failed := false; ctx.Err() == nil && s.wanted.Load() == 0 && !s.outdated.Load() && s.paused.Load() == nil; {
		data, ret := set.Wait(uint32(eventWait.Milliseconds()))
		switch {
		case ret == gonvml.SUCCESS && data.EventType == gonvml.EventTypeXidCriticalError:
			handle(eventOf(data, slot(g.PCIBusID)))
		case ret != gonvml.SUCCESS && ret != gonvml.ERROR_TIMEOUT:
			return returnError{ret}
		}
		now, known := n.Inventory().ByUUID(g.UUID)
		if !known || now.PCIBusID != g.PCIBusID || failed && readable(now) || !n.uses(s) {
			return nil
		}
		failed = !readable(now)
	}
	return nil
}

// uses reports whether a session is the one that the driver in use has.
func (n *Node) uses(s *session) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.session == s
}

// eventOf converts NVML's event.
func eventOf(data gonvml.EventData, address string) gpu.XIDEvent {
	event := gpu.XIDEvent{
		PCI: address, XID: int(data.EventData), Time: time.Now(), GPUInstance: gpu.NoInstance, ComputeInstance: gpu.NoInstance,
	}
	if data.GpuInstanceId != wholeGPU {
		event.GPUInstance = int(data.GpuInstanceId)
	}
	if data.ComputeInstanceId != wholeGPU {
		event.ComputeInstance = int(data.ComputeInstanceId)
	}
	return event
}

// endings are events about hardware that was reset. Under n.mu.
type endings struct {
	broadcast.Signal
	events []gpu.XIDEvent
}

// endXIDs reports that the XIDs of a GPU, or of one of its partitions, have ended.
func (n *Node) endXIDs(g gpu.GPU, gpuInstance int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.endings.add(slot(g.PCIBusID), gpuInstance)
}

// endAllXIDs reports that all XIDs have ended, because the driver was unloaded. Under n.mu.
func (n *Node) endAllXIDs() { n.endings.add("", gpu.NoInstance) }

func (e *endings) add(address string, gpuInstance int) {
	e.events = append(e.events, gpu.XIDEvent{
		PCI: address, GPUInstance: gpuInstance, ComputeInstance: gpu.NoInstance, Time: time.Now(),
	})
	e.Notify()
}

func (n *Node) takeEndedXIDs() []gpu.XIDEvent {
	n.mu.Lock()
	defer n.mu.Unlock()
	events := n.endings.events
	n.endings.events = nil
	return events
}
