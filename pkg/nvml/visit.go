// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"fmt"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// visit is the result of reading one GPU.
type visit struct {
	// ret is an error if the identity could not be read; skip is a GPU that runs no work.
	ret  gonvml.Return
	skip bool

	known  knownGPU
	device gonvml.Device
	// odd says which MIG data cannot be read.
	odd []string
	// deinitialises marks a GPU that the driver shuts down while no process has it open.
	deinitialises bool
}

// visit reads the GPU at an index. Of a GPU in before it reads only what may have changed.
func (r *reader) visit(library gonvml.Interface, index int, before map[string]knownGPU) visit {
	d, ret := library.DeviceGetHandleByIndex(index)
	if ret != gonvml.SUCCESS {
		return visit{ret: ret}
	}
	uuid, ret := d.GetUUID()
	if ret != gonvml.SUCCESS {
		return visit{ret: ret}
	}
	v := visit{device: d}
	known, met := before[uuid]
	if !met {
		if name, ret := d.GetName(); ret == gonvml.SUCCESS && skippedNames[name] {
			return visit{skip: true}
		}
		minor, ret := d.GetMinorNumber()
		if ret != gonvml.SUCCESS {
			return visit{ret: ret}
		}
		known.gpu = gpu.GPU{UUID: uuid, Minor: minor, NUMANode: gpu.UnknownNUMANode}
	}
	if !known.complete {
		known.complete = r.readAll(&known.gpu, d)
	}
	r.readState(&known.gpu, d)
	if known.gpu.Health.Healthy() || known.gpu.Health.Reason == gpu.ReasonNoNode {
		v.odd = r.readMIG(&known, d)
	}
	mode, ret := d.GetPersistenceMode()
	v.known, v.deinitialises = known, ret == gonvml.SUCCESS && mode == gonvml.FEATURE_DISABLED
	return v
}

// readMIG reads mode, profiles and partitions. Profiles change only with the mode (nvml.h, nvmlDeviceGetGpuInstanceProfileInfo).
// A mode that cannot be read stays as it was.
func (r *reader) readMIG(known *knownGPU, d gonvml.Device) (odd []string) {
	g := &known.gpu
	current, _, ret := d.GetMigMode()
	switch {
	case ret == gonvml.SUCCESS:
		on := current == gonvml.DEVICE_MIG_ENABLE
		known.profiled = known.profiled && g.MIGEnabled == on
		g.MIGCapable, g.MIGEnabled = true, on
	case unsupported(ret):
		g.MIGCapable, g.MIGEnabled, g.Profiles, g.Partitions = false, false, nil, nil
		return nil
	default:
		odd = append(odd, fmt.Sprintf("its MIG mode cannot be read: %v", returnError{ret}))
		if !g.MIGCapable {
			return odd
		}
	}
	if !known.profiled {
		profiles, unread := r.readProfiles(g.MemoryBytes, d)
		odd = append(odd, unread...)
		known.profiled = len(unread) == 0
		g.Profiles = profiles
	}
	if !g.MIGEnabled {
		g.Partitions = nil
		return odd
	}
	partitions, unread := r.readPartitions(*g, d)
	g.Partitions = partitions
	return append(odd, unread...)
}
