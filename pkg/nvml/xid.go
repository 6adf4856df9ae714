// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// WatchXIDs calls handle for each XID of the node's GPUs, one call at a time, until ctx is done: from the kernel's log, with the XIDs since
// boot first, or from NVML's events where the log cannot be read. It also reports each reset of a GPU, load of the driver and destruction
// of a partition. pkg/health calls it once, after the first Scan. It returns nil.
func (n *Node) WatchXIDs(ctx context.Context, handle func(gpu.XIDEvent)) error {
	events := make(chan gpu.XIDEvent)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		n.readXIDs(ctx, func(e gpu.XIDEvent) {
			select {
			case events <- e:
				n.reported.Notify()
			case <-ctx.Done():
			}
		})
		return nil
	})
	group.Go(func() error {
		for ctx.Err() == nil {
			changed := n.endings.Changed()
			for _, e := range n.takeEnded() {
				handle(e)
			}
			select {
			case e := <-events:
				handle(e)
			case <-changed:
			case <-ctx.Done():
			}
		}
		return nil
	})
	return group.Wait()
}

// sourceRetry is how long after a source of XIDs has failed the next attempt begins.
const sourceRetry = time.Second

// readXIDs reads XIDs from the one source that works.
func (n *Node) readXIDs(ctx context.Context, handle func(gpu.XIDEvent)) {
	logger := klog.FromContext(ctx)
	reported := ""
	for ctx.Err() == nil {
		source := "kernel log"
		log, err := n.options.OpenKernelLog()
		if err == nil {
			if source != reported {
				logger.Info("Reading XIDs from the kernel's log")
			}
			reported = source
			err = followKernelLog(ctx, log, handle)
		} else {
			source = "NVML events"
			if source != reported {
				logger.Info("Reading XIDs from NVML's events, which keeps the driver loaded", "kernelLog", err.Error())
			}
			reported = source
			err = n.followEvents(ctx, handle)
		}
		if err != nil {
			logger.V(2).Info("Cannot read XIDs now", "source", source, "reason", err.Error())
		}
		select {
		case <-ctx.Done():
		case <-time.After(sourceRetry):
		}
	}
}

// eventWait is how long one call waits for an event. It bounds how long a reset waits for the session.
const eventWait = 500 * time.Millisecond

// wholeGPU is the instance of an event that concerns the GPU (nvml.h, nvmlEventData_t).
const wholeGPU = 0xFFFFFFFF

// followEvents calls handle for each XID of the GPUs in the inventory, until ctx is done, the GPUs change, or the session is needed.
func (n *Node) followEvents(ctx context.Context, handle func(gpu.XIDEvent)) error {
	n.mu.Lock()
	session, inventory := n.session, n.inventory
	n.mu.Unlock()
	if session == nil {
		return errors.New("no driver")
	}
	if err := session.open(); err != nil {
		return err
	}
	defer session.close()
	set, ret := session.library.EventSetCreate()
	if ret != gonvml.SUCCESS {
		return returnError{ret}
	}
	defer set.Free()
	addresses := map[gonvml.Device]string{}
	for _, g := range inventory.GPUs {
		d, ret := session.library.DeviceGetHandleByUUID(g.UUID)
		if ret != gonvml.SUCCESS {
			continue // it is lost
		}
		if guarded, ok := d.(*guardedDevice); ok {
			d = guarded.Device
		}
		addresses[d] = slot(g.PCIBusID)
		// A GPU without events is read without them.
		_ = d.RegisterEvents(gonvml.EventTypeXidCriticalError, set)
	}
	for ctx.Err() == nil && session.wanted.Load() == 0 && session.paused.Load() == nil && n.sameGPUs(session, inventory) {
		data, ret := set.Wait(uint32(eventWait.Milliseconds()))
		switch {
		case ret == gonvml.ERROR_TIMEOUT:
			continue
		case ret != gonvml.SUCCESS:
			return returnError{ret}
		case data.EventType != gonvml.EventTypeXidCriticalError:
			continue
		}
		if address := addresses[data.Device]; address != "" {
			handle(eventOf(data, address))
		}
	}
	return nil
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

// sameGPUs reports whether the GPUs of a set of events are those of the inventory.
func (n *Node) sameGPUs(s *session, registered gpu.Inventory) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.session != s || len(n.inventory.GPUs) != len(registered.GPUs) {
		return false
	}
	for i, g := range n.inventory.GPUs {
		before := registered.GPUs[i]
		// A GPU that was lost has to be registered when it comes back.
		if g.UUID != before.UUID || g.Health.Healthy() && !before.Health.Healthy() {
			return false
		}
	}
	return true
}

// endings are events about hardware that was reset. Under n.mu.
type endings struct {
	broadcast.Signal
	events []gpu.XIDEvent
}

// end reports that the XIDs of a GPU, or of one of its partitions, have ended.
func (n *Node) end(g gpu.GPU, gpuInstance int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.endings.add(slot(g.PCIBusID), gpuInstance)
}

// endAll reports that all XIDs have ended, because the driver was unloaded. Under n.mu.
func (n *Node) endAll() { n.endings.add("", gpu.NoInstance) }

func (e *endings) add(address string, gpuInstance int) {
	e.events = append(e.events, gpu.XIDEvent{
		PCI: address, GPUInstance: gpuInstance, ComputeInstance: gpu.NoInstance, Time: time.Now(),
	})
	e.Notify()
}

func (n *Node) takeEnded() []gpu.XIDEvent {
	n.mu.Lock()
	defer n.mu.Unlock()
	events := n.endings.events
	n.endings.events = nil
	return events
}
