// SPDX-License-Identifier: Apache-2.0

package nvml

import (
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
	// deinitialises is a GPU that the driver shuts down when nobody has it open.
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
	mode, ret := d.GetPersistenceMode()
	v.known, v.deinitialises = known, ret == gonvml.SUCCESS && mode == gonvml.FEATURE_DISABLED
	return v
}
