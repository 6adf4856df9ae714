// SPDX-License-Identifier: Apache-2.0

// What the handover asks of the driver: processes, clocks and limits, reset.

package nvml

import (
	"context"
	"errors"
	"fmt"
	"slices"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// Processes returns the process IDs, as the host counts them, of the processes with a CUDA context on the GPU or on a partition of it, and of
// those with a graphics context only. pkg/handover calls it. Safe for concurrent use; it waits for other operations on the GPU.
func (n *Node) Processes(ctx context.Context, uuid string) (compute, graphics []int, err error) {
	all, err := operate(ctx, n, uuid, "list processes on GPU "+uuid, func(op *operation) (all [2][]int, err error) {
		if all[0], err = pidsOf(op.device.GetComputeRunningProcesses, op.device.GetMPSComputeRunningProcesses); err != nil {
			return all, err
		}
		all[1], err = pidsOf(op.device.GetGraphicsRunningProcesses)
		return all, err
	}, nil)
	compute = all[0]
	return compute, slices.DeleteFunc(all[1], func(pid int) bool { return slices.Contains(compute, pid) }), err
}

// pidsOf returns the processes of some of NVML's lists. A list that the driver or the GPU lacks is empty.
func pidsOf(lists ...func() ([]gonvml.ProcessInfo, gonvml.Return)) (pids []int, err error) {
	for _, list := range lists {
		processes, ret := list()
		if ret != gonvml.SUCCESS && !unsupported(ret) {
			return nil, returnError{ret}
		}
		for _, p := range processes {
			pids = append(pids, int(p.Pid))
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// Settings reads the settings of a GPU. pkg/handover calls it. Safe for concurrent use; it waits for other operations on the GPU.
func (n *Node) Settings(ctx context.Context, uuid string) (gpu.Settings, error) {
	return operate(ctx, n, uuid, "read settings of GPU "+uuid, (*operation).settings, nil)
}

// RestoreSettings sets the settings that differ from wanted. It leaves those that wanted does not have. pkg/handover calls it. Idempotent
// and safe for concurrent use; it waits for other operations on the GPU.
func (n *Node) RestoreSettings(ctx context.Context, uuid string, wanted gpu.Settings) error {
	return change(ctx, n, uuid, "restore settings of GPU "+uuid, func(op *operation) error { return op.restoreSettings(wanted) })
}

func (op *operation) settings() (s gpu.Settings, err error) {
	if s.ComputeMode, err = op.computeMode(); err != nil && !errors.Is(err, gpu.ErrUnsupported) {
		return s, fmt.Errorf("read compute mode: %w", err)
	}
	for clock, value := range map[gonvml.ClockType]*uint32{gonvml.CLOCK_MEM: &s.MemoryClock, gonvml.CLOCK_GRAPHICS: &s.GraphicsClock} {
		mhz, ret := op.device.GetApplicationsClock(clock)
		if ret != gonvml.SUCCESS && !unsupported(ret) {
			return s, fmt.Errorf("read application clocks: %w", returnError{ret})
		}
		*value = mhz
	}
	return s, nil
}

func (op *operation) restoreSettings(wanted gpu.Settings) error {
	now, err := op.settings()
	if err != nil {
		return err
	}
	var errs []error
	if wanted.ComputeMode != "" && now.ComputeMode != "" && wanted.ComputeMode != now.ComputeMode {
		if _, err := op.setComputeMode(wanted.ComputeMode); err != nil {
			errs = append(errs, fmt.Errorf("set compute mode to %s: %w", wanted.ComputeMode, err))
		}
	}
	same := wanted.MemoryClock == now.MemoryClock && wanted.GraphicsClock == now.GraphicsClock
	if wanted.MemoryClock != 0 && wanted.GraphicsClock != 0 && !same {
		ret := op.device.SetApplicationsClocks(wanted.MemoryClock, wanted.GraphicsClock)
		// A driver may only allow reading the clocks. Then no holder has changed them.
		if ret != gonvml.SUCCESS && !unsupported(ret) {
			errs = append(errs, fmt.Errorf("set application clocks to %d,%d MHz: %w", wanted.MemoryClock, wanted.GraphicsClock, returnError{ret}))
		}
	}
	return errors.Join(errs...)
}

// Reset resets a GPU by the driver's nvidia-smi, because NVML has no such call: memory, settings and errors are as after a boot. It fails
// while any process uses the GPU. The error is gpu.ErrUnsupported if the driver has no nvidia-smi or the GPU no reset. pkg/handover
// calls it. It is safe for concurrent use and waits for other operations on the GPU. It ends this process's NVML session meanwhile,
// because the driver refuses to reset a GPU that a session has open (nvidia-smi(1), "--gpu-reset"). It fails while the nvidia-smi of an earlier
// reset still runs.
func (n *Node) Reset(ctx context.Context, uuid string) error {
	leave, err := n.lockGPU(ctx, uuid)
	if err == nil {
		_, err = await(ctx, func(answer func(struct{}, error) bool) {
			defer leave()
			answer(struct{}{}, n.reset(ctx, uuid))
		})
	}
	if err != nil {
		return fmt.Errorf("reset GPU %s: %w", uuid, err)
	}
	return nil
}

// aReset is the one key for the resets of all GPUs: each of them suspends the session.
const aReset = "reset"

func (n *Node) reset(ctx context.Context, uuid string) error {
	unlock, err := n.turns.Lock(ctx, aReset)
	if err != nil {
		return err
	}
	defer unlock()
	n.mu.Lock()
	attached := n.attachment
	g, known := n.inventory.ByUUID(uuid)
	n.mu.Unlock()
	if !known {
		return errors.New("it is not in the inventory")
	}
	if paused := n.paused.Load(); paused != nil {
		return paused
	}
	if !n.callEnded(aReset) {
		return errToolStays // before the session is suspended
	}
	err = attached.session.suspend(n.options.patience, func() error {
		return n.runSMI(aReset, attached.layout, "--gpu-reset", "-i", uuid)
	})
	if err == nil {
		n.endXIDs(g, gpu.NoInstance)
	}
	return err
}
