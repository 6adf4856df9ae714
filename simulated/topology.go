// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// pciAddress is a place on the PCI bus.
type pciAddress struct{ domain, bus, device, function uint32 }

// parseAddress reads "domain:bus:device.function" in hexadecimal of either case, the domain of any length or missing and
// the function possibly missing, all of which NVML accepts.
func parseAddress(text string) (pciAddress, error) {
	rest, function, _ := strings.Cut(text, ".")
	parts := strings.Split(rest, ":")
	if len(parts) == 2 {
		parts = slices.Insert(parts, 0, "0")
	}
	if len(parts) != 3 {
		return pciAddress{}, fmt.Errorf("parse PCI address %q: not domain:bus:device.function", text)
	}
	if function == "" {
		function = "0"
	}
	var values [4]uint32
	for i, part := range append(parts, function) {
		value, err := strconv.ParseUint(part, 16, 32)
		if err != nil {
			return pciAddress{}, fmt.Errorf("parse PCI address %q: %w", text, err)
		}
		values[i] = uint32(value)
	}
	return pciAddress{values[0], values[1], values[2], values[3]}, nil
}

// nvmlID is the pair of IDs as NVML packs them, device above vendor.
func nvmlID(pair string) uint32 {
	vendor, dev, _ := strings.Cut(pair, ":")
	high, _ := strconv.ParseUint(dev, 16, 16)   //nolint:errcheck // validated with the profile
	low, _ := strconv.ParseUint(vendor, 16, 16) //nolint:errcheck // validated with the profile
	return uint32(high)<<16 | uint32(low)
}

func (a pciAddress) info(deviceID, subsystem uint32) nvml.PciInfo {
	info := nvml.PciInfo{Domain: a.domain, Bus: a.bus, Device: a.device, PciDeviceId: deviceID, PciSubSystemId: subsystem}
	putString(info.BusId[:], fmt.Sprintf("%08X:%02X:%02X.0", a.domain, a.bus, a.device))
	putString(info.BusIdLegacy[:], fmt.Sprintf("%04X:%02X:%02X.0", a.domain, a.bus, a.device))
	return info
}

func putString(into []int8, text string) {
	for i := range len(text) {
		into[i] = int8(text[i])
	}
}

func (g *gpu) GetPciInfo() (nvml.PciInfo, nvml.Return) {
	return g.address.info(nvmlID(g.model.PCIDevice), nvmlID(g.model.PCISubsystem)), nvml.SUCCESS
}

// resolve finds the GPU behind another library user's handle, which may be wrapped: by its UUID then.
func (s *system) resolve(other nvml.Device) (*gpu, nvml.Return) {
	if other == nil {
		return nil, nvml.ERROR_INVALID_ARGUMENT
	}
	if h, ok := other.(*gpuHandle); ok && h.gpu.sys == s {
		return h.gpu, h.gate("")
	}
	uuid, ret := other.GetUUID()
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	for _, h := range s.handles() {
		if h.gpu.uuid == uuid {
			return h.gpu, nvml.SUCCESS
		}
	}
	return nil, nvml.ERROR_INVALID_ARGUMENT
}

// level is how near two GPUs are on PCIe. A switch is an upstream port and a downstream port on the way to the GPU, so two
// GPUs behind one switch share all bridges but the last.
func level(a, b GPU) nvml.GpuTopologyLevel {
	switch {
	case a.PCI == b.PCI:
		return nvml.TOPOLOGY_INTERNAL
	case a.Root != b.Root && a.NUMANode == b.NUMANode && a.NUMANode >= 0:
		return nvml.TOPOLOGY_NODE
	case a.Root != b.Root:
		return nvml.TOPOLOGY_SYSTEM
	}
	shared := 0
	for shared < min(len(a.Bridges), len(b.Bridges)) && a.Bridges[shared] == b.Bridges[shared] {
		shared++
	}
	switch {
	case shared < 2:
		return nvml.TOPOLOGY_HOSTBRIDGE
	case max(len(a.Bridges), len(b.Bridges))-shared <= 1:
		return nvml.TOPOLOGY_SINGLE
	}
	return nvml.TOPOLOGY_MULTIPLE
}

func (g *gpu) GetTopologyCommonAncestor(other nvml.Device) (nvml.GpuTopologyLevel, nvml.Return) {
	peer, ret := g.sys.resolve(other)
	if ret != nvml.SUCCESS {
		return 0, ret
	}
	return level(g.spec, peer.spec), nvml.SUCCESS
}
