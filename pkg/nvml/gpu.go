// SPDX-License-Identifier: Apache-2.0

// Reads one GPU: identity, attributes, modes.

package nvml

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/uuid"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// skippedNames are GPUs that drive a display and run no CUDA work; NVIDIA's tools omit them too (go-nvlib).
var skippedNames = map[string]bool{"DGX Display": true, "NVIDIA DGX Display": true}

// reader reads GPUs within one session.
type reader struct {
	attachment
	options Options
	lib     device.Interface
	driver  string
	cuda    string
	// control is why no GPU can be used: a node that all of them need.
	control error
}

// readAll reads all data of a GPU into g. A value that cannot be read keeps its previous content. It returns false if the GPU has a value
// that could not be read; the next scan retries.
func (r *reader) readAll(g *gpu.GPU, d gonvml.Device) (complete bool) {
	dev, err := r.lib.NewDevice(d)
	if err != nil {
		return false
	}
	g.DriverVersion = r.driver
	// go-nvlib's errors lack the return code, which is asked for again.
	read := func(into *string, get func() (string, error), ask func() gonvml.Return) {
		if value, err := get(); err == nil {
			*into = cmp.Or(value, *into)
		} else if ret := ask(); ret != gonvml.SUCCESS && !unsupported(ret) {
			complete = false
		}
	}
	name, ret := d.GetName()
	if ret == gonvml.SUCCESS {
		g.ProductName = name
	}
	complete = ret == gonvml.SUCCESS || unsupported(ret)
	read(&g.Brand, dev.GetBrandAsString, func() gonvml.Return { _, ret := d.GetBrand(); return ret })
	read(&g.Architecture, dev.GetArchitectureAsString, func() gonvml.Return { _, ret := d.GetArchitecture(); return ret })
	read(&g.ComputeCapability, dev.GetCudaComputeCapabilityAsString,
		func() gonvml.Return { _, _, ret := d.GetCudaComputeCapability(); return ret })
	read(&g.AddressingMode, dev.GetAddressingModeAsString, func() gonvml.Return { _, ret := d.GetAddressingMode(); return ret })
	read(&g.PCIBusID, dev.GetPCIBusID, func() gonvml.Return { _, ret := d.GetPciInfo(); return ret })
	g.PCIBusID = kernelAddress(g.PCIBusID)
	if g.PCIBusID == "" {
		complete = false
	}
	r.readPlace(g)
	g.FabricClique = fabricClique(d, g.FabricClique)
	return complete
}

// nodeMemory returns the node's memory in bytes; zero if it cannot be read. The kernel writes it into the first line.
func (h Host) nodeMemory() uint64 {
	var kibibytes uint64
	_, _ = fmt.Sscanf(contents(h.ProcRoot, "meminfo"), "MemTotal: %d", &kibibytes)
	return kibibytes << 10
}

// readECC reads whether ECC is on.
func readECC(g *gpu.GPU, d gonvml.Device) {
	if current, _, ret := d.GetEccMode(); ret == gonvml.SUCCESS {
		on := current == gonvml.FEATURE_ENABLED
		// Earlier inventories share the pointer, so it points to a new value.
		g.ECCEnabled = &on
	}
}

// readState reads whether a GPU answers, its memory and its device node.
func (r *reader) readState(known *knownGPU, d gonvml.Device) {
	g := &known.gpu
	g.Health, g.Faults = gpu.Health{}, nil
	memory, ret := d.GetMemoryInfo()
	switch {
	case ret == gonvml.SUCCESS:
		g.MemoryBytes = memory.Total
	case ret == gonvml.ERROR_NOT_SUPPORTED:
		// It has no memory of its own, and uses all of the node's (GB10).
		if g.MemoryBytes == 0 {
			g.MemoryBytes = r.options.nodeMemory()
		}
	case unsupported(ret):
	default:
		g.Health = healthOf(ret, "reading its memory")
		return
	}
	if err := cmp.Or(r.ensureDevice(gpuDevice(g.Minor)), r.control); err != nil {
		g.Health = gpu.Health{Reason: gpu.ReasonNoNode, Message: err.Error()}
	}
}

// healthOf returns the health for an error of NVML in a call that every GPU must support.
func healthOf(ret gonvml.Return, doing string) gpu.Health {
	switch ret {
	case gonvml.ERROR_GPU_IS_LOST, gonvml.ERROR_GPU_NOT_FOUND:
		return gpu.Health{Reason: gpu.ReasonLost, Message: "the GPU has fallen off the bus or is otherwise lost"}
	case gonvml.ERROR_RESET_REQUIRED:
		return gpu.Health{Reason: gpu.ReasonUnreachable, Message: "the GPU requires a reset"}
	}
	return gpu.Health{
		Reason:  gpu.ReasonUnreachable,
		Message: fmt.Sprintf("%s: NVML answers %q (%d)", doing, ret.Error(), int(ret)),
	}
}

// readPlace reads the GPU's PCIe root, NUMA node and class from sysfs. What sysfs lacks stays unknown.
func (r *reader) readPlace(g *gpu.GPU) {
	if g.PCIBusID == "" {
		return
	}
	sysfs := deviceattribute.WithFSFromRoot(r.options.SysfsRoot)
	if a, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(g.PCIBusID, sysfs); err == nil && a.Value.StringValue != nil {
		g.PCIeRoot = *a.Value.StringValue
	}
	a, err := deviceattribute.GetNUMANodeAttributeByPCIBusID(g.PCIBusID, deviceattribute.ScalarAttribute, sysfs)
	if err == nil && a.Value.IntValue != nil {
		g.NUMANode = int(*a.Value.IntValue)
	}
	if class, err := strconv.ParseInt(contents(filepath.Join(r.options.SysfsRoot, "bus/pci/devices", g.PCIBusID), "class"), 0, 32); err == nil {
		g.PCIClass = int(class)
	}
}

// fabricClique reads "<cluster UUID>.<clique>" of a GPU that has joined a multi-node NVLink fabric. Without an answer of NVML it
// returns the known value.
func fabricClique(d gonvml.Device, known string) string {
	info, ret := d.GetGpuFabricInfo()
	if ret != gonvml.SUCCESS {
		return known
	}
	joined := info.State == gonvml.GPU_FABRIC_STATE_COMPLETED && gonvml.Return(info.Status) == gonvml.SUCCESS
	if !joined || info.ClusterUuid == [16]uint8{} {
		return ""
	}
	return fmt.Sprintf("%s.%d", uuid.UUID(info.ClusterUuid), info.CliqueId)
}

// visit is the result of reading one GPU.
type visit struct {
	// ret is an error if the identity could not be read; skip is a GPU that runs no work.
	ret  gonvml.Return
	skip bool

	// began is when it began; zero if the recovery action could not be read.
	began  time.Time
	known  knownGPU
	device gonvml.Device
}

// visit reads the GPU at an index. Of a known GPU it reads only what may have changed: with deep everything, otherwise the health.
func (r *reader) visit(index int, deep bool, recall func(uuid string) (knownGPU, bool)) visit {
	began := time.Now()
	d, ret := r.session.library.DeviceGetHandleByIndex(index)
	if ret != gonvml.SUCCESS {
		return visit{ret: ret}
	}
	uuid, ret := d.GetUUID()
	if ret != gonvml.SUCCESS {
		return visit{ret: ret}
	}
	v := visit{began: began, device: d}
	known, met := recall(uuid)
	if !met {
		if name, ret := d.GetName(); ret == gonvml.SUCCESS && skippedNames[name] {
			return visit{skip: true}
		}
		known.gpu = gpu.GPU{UUID: uuid, NUMANode: gpu.UnknownNUMANode}
	}
	// Every time: the number changes when the driver is loaded, or the GPU bound to it, again. It says which node is this GPU's.
	minor, ret := d.GetMinorNumber()
	switch {
	case ret == gonvml.SUCCESS:
		known.gpu.Minor = minor
	case !met:
		return visit{ret: ret}
	}
	if !known.complete {
		known.complete = r.readAll(&known.gpu, d)
	}
	r.readState(&known, d)
	answers := readable(known.gpu)
	if deep || !met {
		known.unreadable = nil
		if answers {
			known.unreadable = r.readMIG(&known, d)
			readSlowdown(&known.gpu, d)
			readECC(&known.gpu, d)
		}
		mode, ret := d.GetPersistenceMode()
		known.deinitialises = ret == gonvml.SUCCESS && mode == gonvml.FEATURE_DISABLED
	}
	if answers {
		readFaults(&known, d) // after readMIG: some do not count in MIG mode
	}
	if known.condition.unread {
		v.began = time.Time{}
	}
	known.gpu.CUDADriverVersion = cmp.Or(r.cuda, known.gpu.CUDADriverVersion)
	v.known = known
	return v
}

// readMIG reads mode, profiles and partitions. Profiles change only with the mode (nvml.h, nvmlDeviceGetGpuInstanceProfileInfo).
// A mode that cannot be read stays as it was.
func (r *reader) readMIG(known *knownGPU, d gonvml.Device) (unreadable []string) {
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
		unreadable = append(unreadable, fmt.Sprintf("its MIG mode cannot be read: %v", returnError{ret}))
		if !g.MIGCapable {
			return unreadable
		}
	}
	switch {
	case known.profiled:
	case g.MemoryBytes == 0:
		unreadable = append(unreadable, "its MIG profiles cannot be named, because NVML does not report its memory")
	default:
		profiles, unread := r.readProfiles(g.MemoryBytes, d)
		unreadable = append(unreadable, unread...)
		known.profiled = len(unread) == 0
		g.Profiles = profiles
	}
	if !g.MIGEnabled {
		g.Partitions = nil
		return unreadable
	}
	partitions, unread := r.readPartitions(*g, d)
	g.Partitions = partitions
	return append(unreadable, unread...)
}
