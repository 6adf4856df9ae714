// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"slices"

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

// Destroy destroys the GPU instance at exactly that placement with its compute instances, as far as the driver allows. Without an
// instance there it returns nil. While processes use it the error is an *InUseError. pkg/partition calls it. It is idempotent and
// safe for concurrent use; the inventory shows the change when it returns.
func (n *Node) Destroy(ctx context.Context, ref gpu.Ref) error {
	if ref.Whole() || ref.Compute != (gpu.Placement{}) {
		return fmt.Errorf("destroy partition %s: this is no place of a GPU instance", ref)
	}
	destroy := func(op *operation) (struct{}, error) { return struct{}{}, op.destroy(ref.Placement) }
	if _, err := change(ctx, n, ref.GPU, destroy, nil); err != nil {
		return fmt.Errorf("destroy partition %s: %w", ref, err)
	}
	return nil
}

func (op *operation) destroy(place gpu.Placement) error {
	i, err := op.at(place)
	if err != nil {
		return err
	}
	if i == nil {
		op.gpu.Partitions = op.without(place)
		return nil
	}
	computes, err := computeInstances(i.handle)
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range computes {
		errs = append(errs, op.ended(i, "compute instance", c.Destroy()))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := op.ended(i, "GPU instance", i.handle.Destroy()); err != nil {
		return err
	}
	op.gpu.Partitions = op.without(place)
	return nil
}

// without returns the known partitions except the one at that placement, for when the driver does not list them.
func (op *operation) without(place gpu.Placement) []gpu.Partition {
	return slices.DeleteFunc(slices.Clone(op.gpu.Partitions), func(p gpu.Partition) bool { return p.Ref.Placement == place })
}

// ended returns the result of destroying part of a partition as an error.
func (op *operation) ended(i *gpuInstance, what string, ret gonvml.Return) error {
	switch ret {
	case gonvml.SUCCESS:
		return nil
	case gonvml.ERROR_IN_USE:
		return &InUseError{Partition: op.named(i.partition), Processes: op.users(i.partition.GPUInstance)}
	}
	return fmt.Errorf("destroy the %s: %w", what, returnError{ret})
}

// named adds the UUID, if it can be read.
func (op *operation) named(p gpu.Partition) gpu.Partition {
	if found, err := op.find(p.GPUInstance); err == nil {
		return found
	}
	return p
}

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
