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
