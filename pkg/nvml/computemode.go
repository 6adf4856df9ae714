// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

var computeModes = map[gpu.ComputeMode]gonvml.ComputeMode{
	gpu.ComputeModeDefault:          gonvml.COMPUTEMODE_DEFAULT,
	gpu.ComputeModeExclusiveProcess: gonvml.COMPUTEMODE_EXCLUSIVE_PROCESS,
	gpu.ComputeModeProhibited:       gonvml.COMPUTEMODE_PROHIBITED,
}

// SetComputeMode sets how many processes may use a GPU, and returns the mode before, for the revert. The setting is lost when the
// driver is unloaded. The error is device.ErrUnsupported if the GPU has no such mode, as with MIG mode on. pkg/sharing calls it.
// Idempotent and safe for concurrent use; it waits for other operations on the GPU.
func (n *Node) SetComputeMode(ctx context.Context, uuid string, mode gpu.ComputeMode) (before gpu.ComputeMode, err error) {
	before, err = operate(ctx, n, uuid, func(op *operation) (gpu.ComputeMode, error) {
		return op.setComputeMode(mode)
	}, func(*operation, gpu.ComputeMode) {}) // the caller sets it again
	if err != nil {
		return "", fmt.Errorf("set compute mode of GPU %s to %s: %w", uuid, mode, err)
	}
	return before, nil
}

// ComputeMode reads the compute mode. Safe for concurrent use.
func (n *Node) ComputeMode(ctx context.Context, uuid string) (gpu.ComputeMode, error) {
	mode, err := operate(ctx, n, uuid, (*operation).computeMode, func(*operation, gpu.ComputeMode) {})
	if err != nil {
		return "", fmt.Errorf("read compute mode of GPU %s: %w", uuid, err)
	}
	return mode, nil
}

func (op *operation) computeMode() (gpu.ComputeMode, error) {
	now, ret := op.device.GetComputeMode()
	if ret != gonvml.SUCCESS {
		return "", settingError(ret)
	}
	for name, mode := range computeModes {
		if mode == now {
			return name, nil
		}
	}
	return "", fmt.Errorf("NVML answers %d, which is no mode of today's drivers", now)
}

func (op *operation) setComputeMode(mode gpu.ComputeMode) (before gpu.ComputeMode, err error) {
	wanted, known := computeModes[mode]
	if !known {
		return "", errors.New("there is no such mode")
	}
	before, err = op.computeMode()
	if err != nil || before == mode {
		return before, err
	}
	if ret := op.device.SetComputeMode(wanted); ret != gonvml.SUCCESS {
		return "", settingError(ret)
	}
	return before, nil
}

// settingError returns NVML's answer to a setting as an error.
func settingError(ret gonvml.Return) error {
	switch ret {
	case gonvml.ERROR_NOT_SUPPORTED, gonvml.ERROR_FUNCTION_NOT_FOUND:
		return fmt.Errorf("%w (%w)", gpu.ErrUnsupported, returnError{ret})
	}
	return returnError{ret}
}
