// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// Create creates a partition: a GPU instance with one compute instance that covers it. MIG mode must be on. On an error it has
// removed what it created, or the error names what is left, which Destroy removes. When ctx ends it returns at once; the started
// operation ends by itself and is reverted, and the next change of that GPU waits for it. pkg/partition calls it. It is not
// idempotent: an existing instance at the placement is an error. It is safe for concurrent use; changes of one GPU run one after
// the other, and the inventory contains the partition when it returns.
func (n *Node) Create(ctx context.Context, ref gpu.Ref, profile gpu.Profile) (gpu.Partition, error) {
	create := func(op *operation) (gpu.Partition, error) { return op.create(ref.Placement, profile) }
	takeBack := func(op *operation, _ gpu.Partition) {
		// The caller no longer waits. The inventory shows what is left, as after a crash.
		_ = op.destroy(ref.Placement)
	}
	p, err := change(ctx, n, ref.GPU, create, takeBack)
	if err != nil {
		return gpu.Partition{}, fmt.Errorf("create a %s at %s: %w", profile.Name, ref, err)
	}
	return p, nil
}

func (op *operation) create(place gpu.Placement, profile gpu.Profile) (gpu.Partition, error) {
	mode, _, ret := op.device.GetMigMode()
	switch {
	case ret != gonvml.SUCCESS:
		return gpu.Partition{}, fmt.Errorf("read its MIG mode: %w", returnError{ret})
	case mode != gonvml.DEVICE_MIG_ENABLE:
		return gpu.Partition{}, errors.New("its MIG mode is off")
	}
	info := gonvml.GpuInstanceProfileInfo{Id: uint32(profile.ID)}
	at := gonvml.GpuInstancePlacement{Start: uint32(place.Start), Size: uint32(place.Size)}
	instance, ret := op.device.CreateGpuInstanceWithPlacement(&info, &at)
	if ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("create the GPU instance: %w", returnError{ret})
	}
	p, err := op.furnish(instance, profile)
	if err == nil {
		op.gpu.Partitions = append(op.without(place), p)
		return p, nil
	}
	if undo := instance.Destroy(); undo != gonvml.SUCCESS {
		err = errors.Join(err, fmt.Errorf("its GPU instance is left, which could not be destroyed again: %w", returnError{undo}))
	}
	return gpu.Partition{}, err
}

// furnish creates the compute instance and finds its MIG device. After an error there is no compute instance.
func (op *operation) furnish(instance gonvml.GpuInstance, profile gpu.Profile) (gpu.Partition, error) {
	made, ret := instance.GetInfo()
	if ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("read the GPU instance: %w", returnError{ret})
	}
	info, ret := instance.GetComputeInstanceProfileInfo(profile.ComputeID, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
	if ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("read compute instance profile %d: %w", profile.ComputeID, returnError{ret})
	}
	compute, ret := instance.CreateComputeInstance(&info)
	if ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("create the compute instance: %w", returnError{ret})
	}
	p, err := op.find(int(made.Id))
	if err == nil {
		return p, nil
	}
	if undo := compute.Destroy(); undo != gonvml.SUCCESS {
		err = errors.Join(err, fmt.Errorf("its compute instance could not be destroyed again: %w", returnError{undo}))
	}
	return gpu.Partition{}, err
}

// find returns the partition of a GPU instance with one compute instance.
func (op *operation) find(gpuInstance int) (gpu.Partition, error) {
	partitions, odd := op.reader.readDevices(op.gpu, op.device)
	for _, p := range partitions {
		if p.GPUInstance == gpuInstance && p.Health.Reason != gpu.ReasonUnreachable {
			return p, nil
		}
	}
	if len(odd) > 0 {
		return gpu.Partition{}, fmt.Errorf("find its MIG device: %s", odd[0])
	}
	return gpu.Partition{}, errors.New("find its MIG device: the driver lists none")
}
