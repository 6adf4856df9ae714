// SPDX-License-Identifier: Apache-2.0

// Package device contains the values that describe GPUs: identity, attributes, capacity, health and links. It does no I/O.
package device

import (
	"fmt"
	"slices"
)

// UnknownNUMANode is GPU.NUMANode if the platform does not report one (sysfs has -1, or nothing).
const UnknownNUMANode = -1

// PCI classes of GPUs (PCI Code and ID Assignment Specification, base class 3).
const (
	PCIClassVGA = 0x030000
	PCIClass3D  = 0x030200
)

// GPU is one physical GPU. A GPU that fails keeps its identity and attributes; only Health changes.
type GPU struct {
	// UUID is NVML's ("GPU-" and a UUID). It identifies the GPU everywhere.
	UUID string
	// Index is NVML's enumeration index. It can change over a reboot.
	Index int
	// Minor is the number in /dev/nvidia<minor>, and in the name under which the GPU is published.
	Minor int

	// PCIBusID is the extended address with a 4-digit domain, lower case: "0000:1b:00.0"
	// (k8s.io/dynamic-resource-allocation/deviceattribute, pciBusID).
	PCIBusID string
	// PCIeRoot is the root complex, "pci0000:17"; empty if sysfs does not have it.
	PCIeRoot string
	// NUMANode is UnknownNUMANode if the platform does not report one.
	NUMANode int
	// PCIClass is the class code, such as PCIClass3D; zero if sysfs does not have it.
	PCIClass int

	ProductName  string
	Brand        string
	Architecture string
	// ComputeCapability is "major.minor".
	ComputeCapability string
	DriverVersion     string
	// CUDADriverVersion is "major.minor".
	CUDADriverVersion string
	// AddressingMode is "HMM", "ATS" or "None"; empty if the driver does not report it.
	AddressingMode string
	// ECCEnabled is nil if the GPU has no ECC or the driver does not report it.
	ECCEnabled *bool
	// MemoryBytes is the total framebuffer memory, or the node's for a GPU without memory of its own; zero where it is not known.
	MemoryBytes uint64
	// MIGCapable and MIGEnabled describe the current MIG mode, not whether partitions exist.
	MIGCapable bool
	MIGEnabled bool
	// Profiles are the possible partitions, by ID; nil without MIG, or if the driver does not report them.
	Profiles []Profile
	// Dynamic is set by the node configuration: partitions are created when claims ask for them, and destroyed afterwards.
	Dynamic bool
	// Sharing is set by the node configuration.
	Sharing Sharing
	// Partitions exist on the GPU now, sorted by placement. A GPU instance without a compute instance has no UUID: it cannot be
	// used, but occupies its placement.
	Partitions []Partition

	// NVLinkDomain names the GPUs of this node that are connected by NVLink; empty for a GPU without NVLink peers.
	NVLinkDomain string
	// FabricClique is "<cluster UUID>.<clique>" on GPUs that belong to a multi-node NVLink fabric; empty elsewhere.
	FabricClique string

	// Health is what keeps the GPU from working at all as pkg/nvml reports it, and everything as pkg/health does.
	Health Health
	// Faults are what the hardware reports of a GPU that answers, the worst first, and during a pause what its health was. pkg/health decides what
	// counts.
	Faults []Health
	// Recovery is what the driver says that the GPU needs; empty if the driver cannot say.
	Recovery RecoveryAction
	// Slowdown is why the GPU runs below its clocks, such as "thermal"; empty if it does not. It makes no GPU unhealthy.
	Slowdown string
}

// Name returns the name in ResourceSlices: "gpu-<minor>", as in NVIDIA's DRA driver.
func (g GPU) Name() string { return fmt.Sprintf("gpu-%d", g.Minor) }

// Ref returns the Ref of the whole GPU.
func (g GPU) Ref() Ref { return Ref{GPU: g.UUID} }

// Link is the connection of two GPUs of a node, from far to near.
type Link int

// Values follow NVML's nvmlGpuTopologyLevel_t, nearest last, with NVLink on top.
const (
	LinkUnknown    Link = iota
	LinkSystem          // across CPU sockets
	LinkNode            // same NUMA node
	LinkHostBridge      // same PCIe host bridge
	LinkMultiple        // several PCIe switches
	LinkSingle          // one PCIe switch
	LinkInternal        // the same board
)

// Pair is the connection of two GPUs.
type Pair struct {
	PCIe Link
	// NVLinks counts active NVLinks between the two, directly or through NVSwitch.
	NVLinks int
}

// Inventory contains every GPU of the node at one moment, sorted by minor number. It is immutable.
type Inventory struct {
	DriverVersion string
	GPUs          []GPU
	// Links has the connection of the GPUs i and j at [i][j]; it is symmetric, and its diagonal has no meaning. Nil if the
	// topology is unknown.
	Links [][]Pair
}

// Source is a view of the node's devices. Both methods answer from memory and are safe for concurrent use.
type Source interface {
	Inventory() Inventory
	// Changed returns a channel that is closed when Inventory may answer differently. It is taken before the call.
	Changed() <-chan struct{}
}

// ByUUID finds a GPU by UUID.
func (inv Inventory) ByUUID(uuid string) (GPU, bool) {
	if i := slices.IndexFunc(inv.GPUs, func(g GPU) bool { return g.UUID == uuid }); i >= 0 {
		return inv.GPUs[i], true
	}
	return GPU{}, false
}

// ByName finds a device by its published name: a GPU, an existing partition, or one that could be created on a dynamic GPU. If two GPUs
// have the same name, the last one has it.
func (inv Inventory) ByName(name string) (Device, bool) {
	for _, g := range slices.Backward(inv.GPUs) {
		switch g.Name() {
		case name:
			return Device{GPU: g}, true
		case GPUName(name):
		default:
			continue // A dynamic GPU has hundreds of names.
		}
		named := func(p Partition) bool { return p.Name() == name }
		partitions := g.Partitions
		if g.Dynamic && !slices.ContainsFunc(partitions, named) {
			partitions = g.Possible()
		}
		if i := slices.IndexFunc(partitions, named); i >= 0 {
			return Device{g, partitions[i]}, true
		}
	}
	return Device{}, false
}

// ByRef finds an existing device.
func (inv Inventory) ByRef(ref Ref) (Device, bool) {
	devices := inv.Devices()
	if i := slices.IndexFunc(devices, func(d Device) bool { return d.Ref() == ref }); i >= 0 {
		return devices[i], true
	}
	return Device{}, false
}

// Devices returns all existing devices, each GPU before its partitions.
func (inv Inventory) Devices() []Device {
	devices := make([]Device, 0, len(inv.GPUs))
	for _, g := range inv.GPUs {
		devices = append(devices, Device{GPU: g})
		for _, p := range g.Partitions {
			devices = append(devices, Device{g, p})
		}
	}
	return devices
}

// Device is a whole GPU or a partition.
type Device struct {
	GPU GPU
	// Partition is zero for the whole GPU.
	Partition Partition
}

// Whole reports whether it is a whole GPU.
func (d Device) Whole() bool { return d.Partition.Ref == Ref{} }

// Ref returns the device's Ref.
func (d Device) Ref() Ref {
	if d.Whole() {
		return d.GPU.Ref()
	}
	return d.Partition.Ref
}

// Name returns the published name.
func (d Device) Name() string {
	if d.Whole() {
		return d.GPU.Name()
	}
	return d.Partition.Name()
}

// UUID returns NVML's UUID; empty for a partition that does not exist.
func (d Device) UUID() string {
	if d.Whole() {
		return d.GPU.UUID
	}
	return d.Partition.UUID
}

// Health returns the health of the device. That of a partition is the worst of its own and its GPU's; between equals the GPU's counts.
func (d Device) Health() Health {
	if d.Whole() {
		return d.GPU.Health
	}
	return Worst(d.GPU.Health, d.Partition.Health)
}

// HealthForHolder is Health for the holder that has the device. A reason for which only a new holder cannot get it does not count.
func (d Device) HealthForHolder() Health {
	d.GPU.Health, d.Partition.Health = d.GPU.Health.forHolder(), d.Partition.Health.forHolder()
	return d.Health()
}
