// SPDX-License-Identifier: Apache-2.0

// Creates, destroys and lists MIG partitions.

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// readPartitions returns a GPU's partitions by placement: its MIG devices, and the GPU instances without one, which have no UUID.
// unreadable lists what cannot be read: a known partition is then unhealthy, and gone only if its GPU instance is gone.
func (r *reader) readPartitions(g gpu.GPU, d gonvml.Device) (partitions []gpu.Partition, unreadable []string) {
	partitions, unreadable = r.readDevices(g, d)
	instances, err := knownInstances(g, d)
	if err != nil {
		unreadable = append(unreadable, err.Error())
	}
	if len(unreadable) > 0 {
		for _, before := range g.Partitions {
			same := func(p gpu.Partition) bool {
				return p.UUID == before.UUID && p.UUID != "" || p.Ref.Overlaps(before.Ref)
			}
			at := func(i gpuInstance) bool { return i.partition.Ref.Placement == before.Ref.Placement }
			gone := err == nil && before.Known() && !slices.ContainsFunc(instances, at)
			if gone || slices.ContainsFunc(partitions, same) {
				continue
			}
			if before.UUID != "" {
				before.Health = gpu.Health{Reason: gpu.ReasonUnreachable, Message: unreadable[0]}
			}
			partitions = append(partitions, before)
		}
	}
	return withEmpty(partitions, instances), unreadable
}

// withEmpty adds the GPU instances that have no partition.
func withEmpty(partitions []gpu.Partition, instances []gpuInstance) []gpu.Partition {
	for _, i := range instances {
		inside := func(p gpu.Partition) bool { return p.Ref.Placement == i.partition.Ref.Placement }
		if !slices.ContainsFunc(partitions, inside) {
			partitions = append(partitions, i.partition)
		}
	}
	slices.SortFunc(partitions, byPlace)
	return partitions
}

// readDevices reads all MIG devices of a GPU: up to seven, with some calls each, so that it needs no cache.
func (r *reader) readDevices(g gpu.GPU, d gonvml.Device) (partitions []gpu.Partition, unreadable []string) {
	count, ret := d.GetMaxMigDeviceCount()
	if ret != gonvml.SUCCESS {
		unreadable = append(unreadable, fmt.Sprintf("its MIG devices cannot be counted: %v", returnError{ret}))
	}
	for index := range count {
		handle, ret := d.GetMigDeviceHandleByIndex(index)
		switch {
		case ret == gonvml.ERROR_NOT_FOUND || ret == gonvml.ERROR_INVALID_ARGUMENT:
			continue
		case ret != gonvml.SUCCESS:
			unreadable = append(unreadable, fmt.Sprintf("MIG device %d cannot be looked up: %v", index, returnError{ret}))
			continue
		}
		p, err := r.readPartition(g, d, handle)
		if err != nil {
			unreadable = append(unreadable, fmt.Sprintf("MIG device %d: %v", index, err))
			continue
		}
		p.Index = index
		p.Caps, p.Health = r.access(p)
		partitions = append(partitions, p)
	}
	return partitions, unreadable
}

func byPlace(a, b gpu.Partition) int {
	return cmp.Or(cmp.Compare(a.Ref.Placement.Start, b.Ref.Placement.Start), cmp.Compare(a.Ref.Compute.Start, b.Ref.Compute.Start))
}

// readPartition reads one MIG device.
func (r *reader) readPartition(g gpu.GPU, d, handle gonvml.Device) (gpu.Partition, error) {
	uuid, ret := handle.GetUUID()
	if ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("read its UUID: %w", returnError{ret})
	}
	gi, ret := handle.GetGpuInstanceId()
	if ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("read the GPU instance of %s: %w", uuid, returnError{ret})
	}
	ci, ret := handle.GetComputeInstanceId()
	if ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("read the compute instance of %s: %w", uuid, returnError{ret})
	}
	instance, ret := d.GetGpuInstanceById(gi)
	if ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("look up GPU instance %d of %s: %w", gi, uuid, returnError{ret})
	}
	p, err := instanceOf(g, instance)
	if err != nil {
		return gpu.Partition{}, err
	}
	p.UUID, p.ComputeInstance = uuid, ci
	compute, ret := instance.GetComputeInstanceById(ci)
	if ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("look up compute instance %d of %s: %w", ci, uuid, returnError{ret})
	}
	info, ret := compute.GetInfo()
	if ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("read compute instance %d of %s: %w", ci, uuid, returnError{ret})
	}
	if whole, known := profileByID(g, p.ProfileID); known && int(info.Placement.Size) < whole.Compute {
		attributes, ret := handle.GetAttributes()
		if ret != gonvml.SUCCESS {
			return gpu.Partition{}, fmt.Errorf("read the attributes of %s: %w", uuid, returnError{ret})
		}
		p.Capacity.Multiprocessors = int(attributes.MultiprocessorCount)
		p.Ref.Compute = gpu.Placement{Start: int(info.Placement.Start), Size: int(info.Placement.Size)}
		// As in go-nvlib's MigProfile.String.
		p.Profile = fmt.Sprintf("%dc.%s", info.Placement.Size, p.Profile)
	}
	return p, nil
}

// instanceOf returns a GPU instance as a partition without a compute instance.
func instanceOf(g gpu.GPU, instance gonvml.GpuInstance) (gpu.Partition, error) {
	info, ret := instance.GetInfo()
	if ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("read a GPU instance: %w", returnError{ret})
	}
	return partitionOf(g, info), nil
}

// partitionOf is instanceOf. One of an unknown profile is unhealthy, but excludes other partitions all the same.
func partitionOf(g gpu.GPU, info gonvml.GpuInstanceInfo) gpu.Partition {
	p := gpu.Partition{
		Parent: g.Minor, Profile: gpu.UnknownProfile, ProfileID: int(info.ProfileId), GPUInstance: int(info.Id),
		Ref: gpu.Ref{GPU: g.UUID, Placement: gpu.Placement{Start: int(info.Placement.Start), Size: int(info.Placement.Size)}},
	}
	profile, known := profileByID(g, p.ProfileID)
	if known {
		p.Profile, p.Capacity = profile.Name, profile.Capacity
	}
	return p
}

func profileByID(g gpu.GPU, id int) (gpu.Profile, bool) {
	if i := slices.IndexFunc(g.Profiles, func(p gpu.Profile) bool { return p.ID == id }); i >= 0 {
		return g.Profiles[i], true
	}
	return gpu.Profile{}, false
}

// access returns the capabilities of the partition, which is unhealthy if a container cannot be given them.
func (r *reader) access(p gpu.Partition) (caps [2]int, health gpu.Health) {
	if !p.Known() {
		return caps, gpu.Health{Reason: gpu.ReasonUnreachable, Message: fmt.Sprintf("MIG profile %d is not known", p.ProfileID)}
	}
	caps, err := r.caps.of(p)
	if err != nil {
		return caps, gpu.Health{Reason: gpu.ReasonNoNode, Message: err.Error()}
	}
	_, listed := r.majors[driverCaps]
	for _, minor := range caps {
		// The host's nodes are for the strategies without CDI. CDI needs only the number.
		if err := r.ensureDevice(capabilityDevice(minor)); err != nil && !listed {
			return caps, gpu.Health{Reason: gpu.ReasonNoNode, Message: err.Error()}
		}
	}
	return caps, gpu.Health{}
}

// computeProfiles are the compute instance profiles, NVML_COMPUTE_INSTANCE_PROFILE_*, that cover a GPU instance with so many
// slices. NVML reports the profiles of a GPU instance only once it exists.
var computeProfiles = map[uint32]int{
	1: gonvml.COMPUTE_INSTANCE_PROFILE_1_SLICE,
	2: gonvml.COMPUTE_INSTANCE_PROFILE_2_SLICE,
	3: gonvml.COMPUTE_INSTANCE_PROFILE_3_SLICE,
	4: gonvml.COMPUTE_INSTANCE_PROFILE_4_SLICE,
	6: gonvml.COMPUTE_INSTANCE_PROFILE_6_SLICE,
	7: gonvml.COMPUTE_INSTANCE_PROFILE_7_SLICE,
	8: gonvml.COMPUTE_INSTANCE_PROFILE_8_SLICE,
}

const mebibyte = 1 << 20

// readProfiles returns the possible partitions of a GPU, by ID. unreadable lists what cannot be read.
func (r *reader) readProfiles(memory uint64, d gonvml.Device) (profiles []gpu.Profile, unreadable []string) {
	for number := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := d.GetGpuInstanceProfileInfo(number)
		switch {
		case absent(ret):
			continue
		case ret != gonvml.SUCCESS:
			unreadable = append(unreadable, fmt.Sprintf("MIG profile %d cannot be read: %v", number, returnError{ret}))
			continue
		}
		p, err := r.profile(number, info, memory, d)
		if err != nil {
			unreadable = append(unreadable, fmt.Sprintf("MIG profile %d (ID %d) is not offered: %v", number, info.Id, err))
			continue
		}
		profiles = append(profiles, p)
	}
	slices.SortFunc(profiles, func(a, b gpu.Profile) int { return cmp.Compare(a.ID, b.ID) })
	return profiles, unreadable
}

// absent reports whether NVML or the GPU lacks a profile (nvml.h, nvmlDeviceGetGpuInstanceProfileInfo).
func absent(ret gonvml.Return) bool {
	return ret == gonvml.ERROR_INVALID_ARGUMENT || ret == gonvml.ERROR_NOT_SUPPORTED
}

func (r *reader) profile(number int, info gonvml.GpuInstanceProfileInfo, memory uint64, d gonvml.Device) (gpu.Profile, error) {
	compute, ok := computeProfiles[info.SliceCount]
	if !ok {
		return gpu.Profile{}, fmt.Errorf("no compute instance is known that takes %d slices", info.SliceCount)
	}
	name, err := r.lib.NewMigProfile(number, compute, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, info.MemorySizeMB, memory)
	if err != nil {
		return gpu.Profile{}, err
	}
	places, ret := d.GetGpuInstancePossiblePlacements(&info)
	if ret != gonvml.SUCCESS {
		return gpu.Profile{}, fmt.Errorf("read its placements: %w", returnError{ret})
	}
	p := gpu.Profile{
		ID: int(info.Id), Name: name.String(), ComputeID: compute, Compute: int(info.SliceCount), Instances: int(info.InstanceCount),
		Capacity: gpu.Capacity{
			MemoryBytes: info.MemorySizeMB * mebibyte, Multiprocessors: int(info.MultiprocessorCount),
			CopyEngines: int(info.CopyEngineCount), Decoders: int(info.DecoderCount), Encoders: int(info.EncoderCount),
			JPEGEngines: int(info.JpegCount), OFAEngines: int(info.OfaCount),
		},
	}
	for _, place := range places {
		p.Placements = append(p.Placements, gpu.Placement{Start: int(place.Start), Size: int(place.Size)})
	}
	slices.SortFunc(p.Placements, func(a, b gpu.Placement) int { return cmp.Compare(a.Start, b.Start) })
	return p, nil
}

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
	return operate(ctx, n, uuid, "list the partitions of GPU "+uuid, (*operation).partitions, nil)
}

func (op *operation) partitions() ([]gpu.Partition, error) {
	instances, err := instancesOf(op.gpu, op.device)
	if err != nil || len(instances) == 0 {
		return nil, err
	}
	partitions, unreadable := op.readDevices(op.gpu, op.device)
	if len(unreadable) > 0 {
		return nil, errors.New(unreadable[0])
	}
	return withEmpty(partitions, instances), nil
}

// gpuInstance is an existing GPU instance and its partition.
type gpuInstance struct {
	handle    gonvml.GpuInstance
	partition gpu.Partition
}

// instancesOf returns all GPU instances of a GPU; none if MIG mode is off.
func instancesOf(g gpu.GPU, d gonvml.Device) ([]gpuInstance, error) {
	mode, _, ret := d.GetMigMode()
	switch {
	case unsupported(ret) || ret == gonvml.SUCCESS && mode != gonvml.DEVICE_MIG_ENABLE:
		return nil, nil
	case ret != gonvml.SUCCESS:
		return nil, fmt.Errorf("read its MIG mode: %w", returnError{ret})
	}
	var all []gpuInstance
	for number := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := d.GetGpuInstanceProfileInfo(number)
		if absent(ret) {
			continue
		}
		if ret != gonvml.SUCCESS {
			return nil, fmt.Errorf("read MIG profile %d: %w", number, returnError{ret})
		}
		found, err := instancesOfProfile(g, d, info)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	slices.SortFunc(all, func(a, b gpuInstance) int { return byPlace(a.partition, b.partition) })
	return all, nil
}

// knownInstances returns the GPU instances of the GPU's known profiles, for a scan. It needs half the calls of instancesOf, and does not
// depend on a profile that cannot be read now (TestUnreadableProfileHidesNoRemoval).
func knownInstances(g gpu.GPU, d gonvml.Device) (all []gpuInstance, err error) {
	for _, p := range g.Profiles {
		found, err := instancesOfProfile(g, d, gonvml.GpuInstanceProfileInfo{Id: uint32(p.ID), InstanceCount: uint32(p.Instances)})
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

// instancesOfProfile returns the GPU instances of one profile. NVML needs its ID and maximum number.
func instancesOfProfile(g gpu.GPU, d gonvml.Device, info gonvml.GpuInstanceProfileInfo) (all []gpuInstance, err error) {
	if info.InstanceCount == 0 {
		return nil, nil // go-nvml v0.13.4-0 panics
	}
	handles, ret := d.GetGpuInstances(&info)
	if ret != gonvml.SUCCESS {
		return nil, fmt.Errorf("list GPU instances of MIG profile %d: %w", info.Id, returnError{ret})
	}
	for _, handle := range handles {
		p, err := instanceOf(g, handle)
		if err != nil {
			return nil, err
		}
		all = append(all, gpuInstance{handle, p})
	}
	return all, nil
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
	ids, _ := pidsOf(d.GetComputeRunningProcesses) //nolint:errcheck // for the reader of an error
	return ids
}
