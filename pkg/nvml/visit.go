// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"fmt"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// visit is what one GPU said.
type visit struct {
	// ret is an error where not even the identity could be read; skip is a GPU that is not for work.
	ret  gonvml.Return
	skip bool

	known  knownGPU
	device gonvml.Device
	// odd says what of the GPU's MIG cannot be read.
	odd []string
	// deinitialises marks a GPU that the driver shuts down when no process has it open.
	deinitialises bool
}

// visit reads the GPU at an index. A GPU that is in before needs to be asked only what may have changed.
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

// readMIG reads mode, profiles and partitions. Profiles stay what they are as long as the mode does (nvml.h,
// nvmlDeviceGetGpuInstanceProfileInfo). Where the mode cannot be read, it is what it was.
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
