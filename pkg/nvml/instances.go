// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// InUseError means that a partition cannot be destroyed, because processes use it.
type InUseError struct {
	Partition gpu.Partition
	// Processes are process IDs of the host; none if NVML does not report them.
	Processes []int
}

// PIDs returns the processes, for callers that use it as an interface.
func (e *InUseError) PIDs() []int { return e.Processes }

// Error names the partition and the processes.
func (e *InUseError) Error() string {
	name := e.Partition.Name()
	if e.Partition.UUID != "" {
		name += fmt.Sprintf(" (%s)", e.Partition.UUID)
	}
	return fmt.Sprintf("partition %s is still in use%s", name, byProcesses(e.Processes))
}

func byProcesses(processes []int) string {
	if len(processes) == 0 {
		return ""
	}
	var list []string
	for _, id := range processes {
		list = append(list, fmt.Sprint(id))
	}
	return " by process " + strings.Join(list, ", ")
}

// Partitions returns the GPU instances of a GPU sorted by placement, each with its compute instance; without one the UUID is
// empty. It fails if anything cannot be read, because the caller is about to create or destroy. It is safe for concurrent use,
// and waits for a running change of the same GPU.
func (n *Node) Partitions(ctx context.Context, uuid string) ([]gpu.Partition, error) {
	partitions, err := operate(ctx, n, uuid, (*operation).partitions, func(*operation, []gpu.Partition) {})
	if err != nil {
		return nil, fmt.Errorf("list the partitions of GPU %s: %w", uuid, err)
	}
	return partitions, nil
}

func (op *operation) partitions() ([]gpu.Partition, error) {
	instances, err := op.instances()
	if err != nil || len(instances) == 0 {
		return nil, err
	}
	partitions, odd := op.reader.readDevices(op.gpu, op.device)
	if len(odd) > 0 {
		return nil, errors.New(odd[0])
	}
	return withEmpty(partitions, instances), nil
}

// gpuInstance is an existing GPU instance and its partition.
type gpuInstance struct {
	handle    gonvml.GpuInstance
	partition gpu.Partition
}

// instances returns all GPU instances; none if MIG mode is off.
func (op *operation) instances() ([]gpuInstance, error) {
	mode, _, ret := op.device.GetMigMode()
	switch {
	case unsupported(ret) || ret == gonvml.SUCCESS && mode != gonvml.DEVICE_MIG_ENABLE:
		return nil, nil
	case ret != gonvml.SUCCESS:
		return nil, fmt.Errorf("read its MIG mode: %w", returnError{ret})
	}
	var all []gpuInstance
	for number := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := op.device.GetGpuInstanceProfileInfo(number)
		if absent(ret) {
			continue
		}
		if ret != gonvml.SUCCESS {
			return nil, fmt.Errorf("read MIG profile %d: %w", number, returnError{ret})
		}
		found, err := instancesOf(op.gpu, op.device, info)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	slices.SortFunc(all, func(a, b gpuInstance) int { return byPlace(a.partition, b.partition) })
	return all, nil
}

// instancesOfProfiles returns the GPU instances of the GPU's known profiles, for a scan, with half the calls of instances.
func instancesOfProfiles(g gpu.GPU, d gonvml.Device) ([]gpuInstance, error) {
	var all []gpuInstance
	for _, p := range g.Profiles {
		found, err := instancesOf(g, d, gonvml.GpuInstanceProfileInfo{Id: uint32(p.ID), InstanceCount: uint32(p.Instances)})
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

// instancesOf returns the GPU instances of one profile. NVML needs its ID and maximum number.
func instancesOf(g gpu.GPU, d gonvml.Device, info gonvml.GpuInstanceProfileInfo) ([]gpuInstance, error) {
	if info.InstanceCount == 0 {
		return nil, nil // go-nvml v0.13.4-0 panics
	}
	handles, ret := d.GetGpuInstances(&info)
	if ret != gonvml.SUCCESS {
		return nil, fmt.Errorf("list GPU instances of MIG profile %d: %w", info.Id, returnError{ret})
	}
	var all []gpuInstance
	for _, handle := range handles {
		p, err := instanceOf(g, handle)
		if err != nil {
			return nil, err
		}
		all = append(all, gpuInstance{handle, p})
	}
	return all, nil
}

// at returns the GPU instance at exactly that placement; nil for none.
func (op *operation) at(place gpu.Placement) (*gpuInstance, error) {
	instances, err := op.instances()
	if err != nil {
		return nil, err
	}
	for _, i := range instances {
		if i.partition.Ref.Placement == place {
			return &i, nil
		}
	}
	return nil, nil
}

// computeInstances returns the compute instances of a GPU instance.
func computeInstances(instance gonvml.GpuInstance) ([]gonvml.ComputeInstance, error) {
	var all []gonvml.ComputeInstance
	for number := range gonvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		info, ret := instance.GetComputeInstanceProfileInfo(number, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		if absent(ret) || ret == gonvml.SUCCESS && info.InstanceCount == 0 {
			continue
		}
		if ret != gonvml.SUCCESS {
			return nil, fmt.Errorf("read compute instance profile %d: %w", number, returnError{ret})
		}
		found, ret := instance.GetComputeInstances(&info)
		if ret != gonvml.SUCCESS {
			return nil, fmt.Errorf("list compute instances of profile %d: %w", info.Id, returnError{ret})
		}
		all = append(all, found...)
	}
	return all, nil
}

// users returns the processes that use a GPU instance. They are for an error text, which has fewer if they cannot be read.
func (op *operation) users(gpuInstance int) []int {
	var users []int
	count, _ := op.device.GetMaxMigDeviceCount() //nolint:errcheck // see above
	for index := range count {
		handle, ret := op.device.GetMigDeviceHandleByIndex(index)
		if ret != gonvml.SUCCESS {
			continue
		}
		if id, ret := handle.GetGpuInstanceId(); ret != gonvml.SUCCESS || id != gpuInstance {
			continue
		}
		users = append(users, processesOf(handle)...)
	}
	slices.Sort(users)
	return slices.Compact(users)
}

// processesOf returns the processes that use a GPU or a MIG device, as far as NVML reports them.
func processesOf(d gonvml.Device) []int {
	processes, _ := d.GetComputeRunningProcesses() //nolint:errcheck // for the reader of an error
	var ids []int
	for _, p := range processes {
		ids = append(ids, int(p.Pid))
	}
	return ids
}
