// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// EnableMIG switches MIG mode on. It fails if the GPU has another client or needs a reset (Ampere), and then clears the pending
// mode, which would otherwise take effect at the next reset. pkg/partition calls it. It is idempotent and safe for concurrent
// use; the inventory is updated when it returns.
func (n *Node) EnableMIG(ctx context.Context, uuid string) error {
	return n.switchMIG(ctx, uuid, gonvml.DEVICE_MIG_ENABLE, "on")
}

// DisableMIG switches MIG mode off. It fails while any GPU instance exists, unmanaged ones included.
func (n *Node) DisableMIG(ctx context.Context, uuid string) error {
	return n.switchMIG(ctx, uuid, gonvml.DEVICE_MIG_DISABLE, "off")
}

func (n *Node) switchMIG(ctx context.Context, uuid string, mode int, word string) error {
	set := func(op *operation) (struct{}, error) { return struct{}{}, op.setMode(mode) }
	if _, err := change(ctx, n, uuid, set, nil); err != nil {
		return fmt.Errorf("switch MIG mode of GPU %s %s: %w", uuid, word, err)
	}
	return nil
}

func (op *operation) setMode(mode int) error {
	current, _, ret := op.device.GetMigMode()
	switch {
	case unsupported(ret):
		return errors.New("the GPU, or its driver, has no MIG")
	case ret != gonvml.SUCCESS:
		return fmt.Errorf("read it: %w", returnError{ret})
	case current == mode:
		return nil
	}
	instances, err := op.instances()
	if err != nil {
		return err
	}
	if len(instances) > 0 {
		return fmt.Errorf("partition %s is on it", instances[0].partition.Name())
	}
	activation, ret := op.device.SetMigMode(mode)
	if ret != gonvml.SUCCESS {
		return returnError{ret}
	}
	if activation == gonvml.SUCCESS {
		now, _, ret := op.device.GetMigMode()
		if ret == gonvml.SUCCESS && now == mode {
			op.gpu.MIGEnabled, op.gpu.Partitions, op.profiled = mode == gonvml.DEVICE_MIG_ENABLE, nil, false
			return nil
		}
		activation = gonvml.ERROR_RESET_REQUIRED
	}
	err = notActive(activation, op.device)
	if _, ret := op.device.SetMigMode(current); ret != gonvml.SUCCESS {
		err = errors.Join(err, fmt.Errorf("it is pending now, and that could not be taken back: %w", returnError{ret}))
	}
	return err
}

// notActive returns why a requested mode is not in force (nvml.h, nvmlDeviceSetMigMode).
func notActive(activation gonvml.Return, d gonvml.Device) error {
	switch activation {
	case gonvml.ERROR_IN_USE:
		return fmt.Errorf("the GPU is in use%s", byProcesses(processesOf(d)))
	case gonvml.ERROR_RESET_REQUIRED:
		return errors.New("the GPU has to be reset for it")
	}
	return returnError{activation}
}
