// SPDX-License-Identifier: Apache-2.0

// Calls that change a GPU: each has its own use of the session and locks the GPU.

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// attachment is the driver in use. Each operation has its own use of the session and takes no part in scans, so that neither
// waits for the other.
type attachment struct {
	session *session
	layout  layout
	caps    capabilities
	majors  majors
}

// operation reads or changes one GPU. No other operation on that GPU runs at the same time.
type operation struct {
	*reader
	// gpu is the known state with the operation's changes. exact says that nothing else has to be read to know the state after them.
	gpu    gpu.GPU
	exact  bool
	device gonvml.Device
}

// operate runs an operation once it has the GPU to itself. ctx ends the wait, not a running operation: abandon, if not nil, gets its result
// before the next operation starts. A do or abandon that changes the GPU must call publishPartitions at its end. about begins the error.
func operate[T any](
	ctx context.Context, n *Node, uuid, about string, do func(*operation) (T, error), abandon func(*operation, T),
) (T, error) {
	var none T
	leave, err := n.lockGPU(ctx, uuid)
	if err != nil {
		return none, fmt.Errorf("%s: %w", about, err)
	}
	value, err := await(ctx, func(answer func(T, error) bool) {
		defer leave()
		op, err := n.openOperation(uuid)
		if err != nil {
			answer(none, err)
			return
		}
		defer op.session.closeLater()
		value, err := do(op)
		if !answer(value, err) && err == nil && abandon != nil {
			abandon(op, value)
		}
	})
	if err != nil {
		return none, fmt.Errorf("%s: %w", about, err)
	}
	return value, nil
}

// change is operate for operations that return no value. Nothing is reverted: a caller whose ctx ended retries.
func change(ctx context.Context, n *Node, uuid, about string, do func(*operation) error) error {
	_, err := operate(ctx, n, uuid, about, func(op *operation) (struct{}, error) { return struct{}{}, do(op) }, nil)
	return err
}

// await runs work in a goroutine and returns its answer. ctx ends the wait, not the work: answer then returns false.
func await[T any](ctx context.Context, work func(answer func(T, error) bool)) (T, error) {
	type outcome struct {
		value T
		err   error
	}
	answers, left := make(chan outcome), make(chan struct{})
	go work(func(value T, err error) bool {
		select {
		case answers <- outcome{value, err}:
			return true
		case <-left:
			return false
		}
	})
	select {
	case o := <-answers:
		return o.value, o.err
	case <-ctx.Done():
		close(left)
		var none T
		return none, fmt.Errorf("wait for an answer of the driver: %w", context.Cause(ctx))
	}
}

// lockGPU waits for exclusive use of the GPU. Scans skip the GPU until leave is called or the operation times out.
func (n *Node) lockGPU(ctx context.Context, uuid string) (leave func(), err error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("wait for GPU %s: %w", uuid, context.Cause(ctx))
	}
	unlock, err := n.turns.Lock(ctx, uuid)
	if err != nil {
		return nil, fmt.Errorf("wait for an earlier change of GPU %s: %w", uuid, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.since[uuid] = time.Now()
	return func() {
		n.mu.Lock()
		delete(n.since, uuid)
		n.mu.Unlock()
		unlock()
	}, nil
}

// openOperation finds a GPU and starts a use of the session. The error is gpu.ErrNoGPU only if the driver says so: a scan may have failed.
func (n *Node) openOperation(uuid string) (op *operation, err error) {
	n.mu.Lock()
	attached := n.attachment
	g, known := n.inventory.ByUUID(uuid)
	n.mu.Unlock()
	if attached.session == nil {
		return nil, fmt.Errorf("look up GPU %s: no driver is in use", uuid)
	}
	r := &reader{options: n.options, attachment: attached}
	if err := r.session.open(); err != nil {
		return nil, err
	}
	r.lib = device.New(r.session.library)
	lookUp := r.session.handle
	if !known || g.Health.Reason == gpu.ReasonMissing {
		lookUp = r.session.find // an earlier handle outlives its GPU
	}
	d, ret := lookUp(uuid, g.PCIBusID)
	switch {
	case ret == gonvml.ERROR_NOT_FOUND:
		err = fmt.Errorf("look up GPU %s: %w (%w)", uuid, gpu.ErrNoGPU, returnError{ret})
	case ret != gonvml.SUCCESS:
		err = fmt.Errorf("look up GPU %s: %w", uuid, returnError{ret})
	case !known:
		err = fmt.Errorf("look up GPU %s: it is not in the inventory", uuid)
	}
	if err != nil {
		r.session.close()
		return nil, err
	}
	return &operation{reader: r, gpu: g, device: d}, nil
}

// publishPartitions publishes the GPU's partitions after a change. Scans that began before have an older state. It reads them only if the operation does
// not know them: to read all takes the driver seconds while other GPUs are partitioned.
func (n *Node) publishPartitions(op *operation) {
	if !op.exact || !n.operating(op.gpu.UUID) {
		known := knownGPU{gpu: op.gpu, profiled: op.gpu.Profiles != nil}
		// What cannot be read is unhealthy or missing until a scan reads it, which reports why.
		_ = op.readMIG(&known, op.device)
		op.gpu = known.gpu
	}

	n.mu.Lock()
	defer n.mu.Unlock()
	n.changes[op.gpu.UUID]++
	at := slices.IndexFunc(n.inventory.GPUs, func(g gpu.GPU) bool { return g.UUID == op.gpu.UUID })
	if at < 0 {
		return
	}
	next := n.inventory
	next.GPUs = slices.Clone(next.GPUs)
	copyMIG(&next.GPUs[at], op.gpu)
	if !reflect.DeepEqual(n.inventory, next) {
		n.inventory = next
		n.changed.Notify()
	}
}

// copyMIG copies what operations change.
func copyMIG(to *gpu.GPU, from gpu.GPU) {
	to.MIGCapable, to.MIGEnabled, to.Profiles, to.Partitions = from.MIGCapable, from.MIGEnabled, from.Profiles, from.Partitions
}

// tooLong is the timeout of an operation, as a multiple of patience. After it, scans read the GPU again. Creating a partition takes one or
// two seconds; a reset takes longer.
const tooLong = 6

// operating reports whether a GPU has an operation within its timeout.
func (n *Node) operating(uuid string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	since, operated := n.since[uuid]
	return operated && time.Since(since) < tooLong*n.options.patience
}

// lastKnown returns a GPU as it was known before, with the changes of operations since.
func (s *sweep) lastKnown(uuid string) (known knownGPU, met bool) {
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	known, met = s.before[uuid]
	s.node.applyOperations(&known)
	return known, met
}

// applyOperations copies the MIG state from the inventory if an operation on the GPU is running or has changed the GPU since the scan read it.
// Under n.mu.
func (n *Node) applyOperations(known *knownGPU) {
	uuid := known.gpu.UUID
	_, operated := n.since[uuid]
	if latest, ok := n.inventory.ByUUID(uuid); ok && (operated || n.changes[uuid] != known.changes) {
		// If the operation read other profiles, it may have missed some: the next scan reads them again.
		known.profiled = known.profiled && reflect.DeepEqual(known.gpu.Profiles, latest.Profiles)
		copyMIG(&known.gpu, latest)
		known.changes = n.changes[uuid]
	}
}

// Create creates a partition: a GPU instance with one compute instance that covers it. MIG mode must be on. On an error, Create removes
// the instances that it created. If that fails, the error names the instances that remain, and Destroy removes them. When ctx ends it
// returns at once; the started operation ends by itself and is reverted, and the next change of that GPU waits for it. pkg/partition calls
// it. It is not idempotent: an existing instance at the placement is an error. It is safe for concurrent use; changes of one GPU run one
// after the other, and the inventory contains the partition when it returns.
func (n *Node) Create(ctx context.Context, ref gpu.Ref, profile gpu.Profile) (gpu.Partition, error) {
	create := func(op *operation) (gpu.Partition, error) {
		defer n.publishPartitions(op)
		return op.create(ref.Placement, profile)
	}
	takeBack := func(op *operation, _ gpu.Partition) {
		// The caller no longer waits. The inventory shows what is left, as after a crash.
		_ = op.destroy(ref.Placement)
		n.publishPartitions(op)
	}
	return operate(ctx, n, ref.GPU, fmt.Sprintf("create partition %s at %s", profile.Name, ref), create, takeBack)
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
	p, err := op.createComputeInstance(instance, profile)
	if err == nil {
		op.gpu.Partitions = append(op.partitionsExcept(place), p)
		slices.SortFunc(op.gpu.Partitions, byPlace)
		op.exact = true
		return p, nil
	}
	if undo := instance.Destroy(); undo != gonvml.SUCCESS {
		err = errors.Join(err, fmt.Errorf("the new GPU instance remains, because destroying it failed: %w", returnError{undo}))
	}
	return gpu.Partition{}, err
}

// createComputeInstance creates the compute instance and finds its MIG device. After an error there is no compute instance.
func (op *operation) createComputeInstance(instance gonvml.GpuInstance, profile gpu.Profile) (gpu.Partition, error) {
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
	p, err := op.identify(made, compute)
	if err == nil {
		return p, nil
	}
	if undo := compute.Destroy(); undo != gonvml.SUCCESS {
		err = errors.Join(err, fmt.Errorf("its compute instance could not be destroyed again: %w", returnError{undo}))
	}
	return gpu.Partition{}, err
}

// identify returns the partition that is a GPU instance with one compute instance.
func (op *operation) identify(instance gonvml.GpuInstanceInfo, compute gonvml.ComputeInstance) (gpu.Partition, error) {
	info, ret := compute.GetInfo()
	if ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("read the compute instance: %w", returnError{ret})
	}
	p := partitionOf(op.gpu, instance)
	p.ComputeInstance = int(info.Id)
	d, err := op.migDevice(p, info.Device)
	if err != nil {
		return gpu.Partition{}, fmt.Errorf("find its MIG device: %w", err)
	}
	if p.UUID, ret = d.GetUUID(); ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("read the UUID of its MIG device: %w", returnError{ret})
	}
	if p.Index, ret = d.GetIndex(); ret != gonvml.SUCCESS {
		return gpu.Partition{}, fmt.Errorf("read the index of MIG device %s: %w", p.UUID, returnError{ret})
	}
	p.Caps, p.Health = op.access(p)
	if p.Health.Reason == gpu.ReasonUnreachable {
		return gpu.Partition{}, errors.New(p.Health.Message)
	}
	return p, nil
}

// migDevice returns the MIG device of a partition. candidate is the device that NVML reports for its compute instance: the MIG device with
// some drivers, its GPU with others (nvml.h, nvmlComputeInstanceInfo_t.device, is "Parent device"; NVIDIA's DRA driver took it for the MIG
// device until v0.5.0).
func (op *operation) migDevice(p gpu.Partition, candidate gonvml.Device) (gonvml.Device, error) {
	if candidate != nil && isDeviceOf(candidate, p) {
		return candidate, nil
	}
	count, ret := op.device.GetMaxMigDeviceCount()
	if ret != gonvml.SUCCESS {
		return nil, fmt.Errorf("its GPU's MIG devices cannot be counted: %w", returnError{ret})
	}
	var unreadable error
	for index := range count {
		d, ret := op.device.GetMigDeviceHandleByIndex(index)
		switch {
		case ret == gonvml.SUCCESS && isDeviceOf(d, p):
			return d, nil
		case ret != gonvml.SUCCESS && ret != gonvml.ERROR_NOT_FOUND && ret != gonvml.ERROR_INVALID_ARGUMENT:
			unreadable = fmt.Errorf("MIG device %d cannot be looked up: %w", index, returnError{ret})
		}
	}
	return nil, cmp.Or(unreadable, errors.New("the driver lists none"))
}

// isDeviceOf reports whether a device is the MIG device of a partition. A GPU has no instance IDs.
func isDeviceOf(d gonvml.Device, p gpu.Partition) bool {
	instance, ret := d.GetGpuInstanceId()
	if ret != gonvml.SUCCESS || instance != p.GPUInstance {
		return false
	}
	compute, ret := d.GetComputeInstanceId()
	return ret == gonvml.SUCCESS && compute == p.ComputeInstance
}

// Destroy destroys the GPU instance at exactly that placement with its compute instances, as far as the driver allows. Without an
// instance there it returns nil. While processes use it the error is an *InUseError. pkg/partition calls it. It is idempotent and
// safe for concurrent use; the inventory shows the change when it returns.
func (n *Node) Destroy(ctx context.Context, ref gpu.Ref) error {
	if ref.Whole() || ref.Compute != (gpu.Placement{}) {
		return fmt.Errorf("destroy partition %s: not the placement of a GPU instance", ref)
	}
	return change(ctx, n, ref.GPU, "destroy partition "+ref.String(), func(op *operation) error {
		defer n.publishPartitions(op)
		before := op.gpu.Partitions
		err := op.destroy(ref.Placement)
		for _, p := range before {
			if err == nil && p.Ref.Placement == ref.Placement {
				n.endXIDs(op.gpu, p.GPUInstance)
			}
		}
		return err
	})
}

func (op *operation) destroy(place gpu.Placement) error {
	i, found, err := op.instanceAt(place)
	if err != nil {
		return err
	}
	if !found {
		op.gpu.Partitions = op.partitionsExcept(place)
		return nil
	}
	computes, err := computeInstances(i.handle)
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range computes {
		errs = append(errs, op.destroyError(i, "compute instance", c.Destroy()))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := op.destroyError(i, "GPU instance", i.handle.Destroy()); err != nil {
		return err
	}
	op.gpu.Partitions = op.partitionsExcept(place)
	op.exact = true
	return nil
}

// instanceAt returns the GPU instance at a placement: by the known ID if it is still there, otherwise from all instances.
func (op *operation) instanceAt(place gpu.Placement) (gpuInstance, bool, error) {
	if at := slices.IndexFunc(op.gpu.Partitions, func(p gpu.Partition) bool { return p.Ref.Placement == place }); at >= 0 {
		handle, ret := op.device.GetGpuInstanceById(op.gpu.Partitions[at].GPUInstance)
		if ret == gonvml.SUCCESS {
			if p, err := instanceOf(op.gpu, handle); err == nil && p.Ref.Placement == place {
				return gpuInstance{handle, p}, true, nil
			}
		}
	}
	instances, err := instancesOf(op.gpu, op.device)
	if err != nil {
		return gpuInstance{}, false, err
	}
	at := slices.IndexFunc(instances, func(i gpuInstance) bool { return i.partition.Ref.Placement == place })
	if at < 0 {
		return gpuInstance{}, false, nil
	}
	return instances[at], true, nil
}

// partitionsExcept returns the known partitions except the one at that placement, for when the driver does not list them.
func (op *operation) partitionsExcept(place gpu.Placement) []gpu.Partition {
	rest := slices.DeleteFunc(slices.Clone(op.gpu.Partitions), func(p gpu.Partition) bool { return p.Ref.Placement == place })
	if len(rest) == 0 {
		return nil // as a scan reads it
	}
	return rest
}

// destroyError returns the result of destroying part of a partition as an error.
func (op *operation) destroyError(i gpuInstance, what string, ret gonvml.Return) error {
	switch ret {
	case gonvml.SUCCESS:
		return nil
	case gonvml.ERROR_IN_USE:
		p := i.partition
		known := func(k gpu.Partition) bool { return k.Ref == p.Ref && k.GPUInstance == p.GPUInstance }
		if at := slices.IndexFunc(op.gpu.Partitions, known); at >= 0 {
			p = op.gpu.Partitions[at]
		}
		return &InUseError{Partition: p, Processes: op.users(p.GPUInstance)}
	}
	return fmt.Errorf("destroy the %s: %w", what, returnError{ret})
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
	return change(ctx, n, uuid, fmt.Sprintf("switch MIG mode of GPU %s %s", uuid, word), func(op *operation) error {
		defer n.publishPartitions(op)
		return op.setMode(mode)
	})
}

func (op *operation) setMode(mode int) error {
	current, _, ret := op.device.GetMigMode()
	switch {
	case unsupported(ret):
		return errors.New("the GPU, or its driver, has no MIG")
	case ret != gonvml.SUCCESS:
		return fmt.Errorf("read the current mode: %w", returnError{ret})
	case current == mode:
		op.exact = op.gpu.MIGEnabled == (mode == gonvml.DEVICE_MIG_ENABLE)
		return nil
	}
	instances, err := instancesOf(op.gpu, op.device)
	if err != nil {
		return err
	}
	if len(instances) > 0 {
		return fmt.Errorf("partition %s exists on the GPU", instances[0].partition.Name())
	}
	activation, ret := op.device.SetMigMode(mode)
	if ret != gonvml.SUCCESS {
		return returnError{ret}
	}
	if activation == gonvml.SUCCESS {
		now, _, ret := op.device.GetMigMode()
		if ret == gonvml.SUCCESS && now == mode {
			op.gpu.MIGEnabled, op.gpu.Partitions, op.gpu.Profiles = mode == gonvml.DEVICE_MIG_ENABLE, nil, nil
			return nil
		}
		activation = gonvml.ERROR_RESET_REQUIRED
	}
	err = notActive(activation, op.device)
	if _, ret := op.device.SetMigMode(current); ret != gonvml.SUCCESS {
		err = errors.Join(err, fmt.Errorf("the new mode is still pending and takes effect at the next reset, because clearing it failed: %w", returnError{ret}))
	}
	return err
}

// notActive returns why a requested mode is not in force (nvml.h, nvmlDeviceSetMigMode).
func notActive(activation gonvml.Return, d gonvml.Device) error {
	switch activation {
	case gonvml.ERROR_IN_USE:
		return fmt.Errorf("the GPU is in use%s", byProcesses(processesOf(d)))
	case gonvml.ERROR_RESET_REQUIRED:
		return errors.New("the GPU must be reset before the new mode takes effect")
	}
	return returnError{activation}
}
