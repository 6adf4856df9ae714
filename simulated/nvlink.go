// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"encoding/hex"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// switchDeviceID is the PCI identity of an NVSwitch (third generation, 10de:22a3), the same for every simulated one.
const (
	switchDeviceID    = 0x22a310de
	switchSubsystemID = 0x168810de
)

// link is the far end of one NVLink that is up: peer is the index of a GPU in the profile, -1 for a switch.
type link struct {
	peer    int
	address pciAddress
}

// linksOf lists the far ends of a GPU's active links, by link number: all of them spread over the switches of its group,
// or PairLinks to each peer in turn.
func linksOf(p Profile, place int) []link {
	group, ok := groupOf(p, place)
	if !ok {
		return nil
	}
	var links []link
	if len(group.Switches) > 0 {
		for i := range p.Models[p.GPUs[place].Model].NVLinks {
			address, _ := parseAddress(group.Switches[i%len(group.Switches)]) //nolint:errcheck // validated with the profile
			links = append(links, link{peer: -1, address: address})
		}
		return links
	}
	for _, peer := range group.GPUs {
		if peer == place {
			continue
		}
		address, _ := parseAddress(p.GPUs[peer].PCI) //nolint:errcheck // validated with the profile
		links = append(links, slices.Repeat([]link{{peer: peer, address: address}}, group.PairLinks)...)
	}
	return links
}

func groupOf(p Profile, place int) (NVLinkGroup, bool) {
	for _, group := range p.NVLink {
		if slices.Contains(group.GPUs, place) {
			return group, true
		}
	}
	return NVLinkGroup{}, false
}

// checkLink is NVML's answer to a link number: INVALID_ARGUMENT beyond what any GPU has, NOT_SUPPORTED beyond this one's.
func (g *gpu) checkLink(number int) nvml.Return {
	switch {
	case number < 0 || number >= nvml.NVLINK_MAX_LINKS:
		return nvml.ERROR_INVALID_ARGUMENT
	case number >= g.model.NVLinks:
		return nvml.ERROR_NOT_SUPPORTED
	}
	return nvml.SUCCESS
}

func (g *gpu) activeLink(number int) (link, nvml.Return) {
	if ret := g.checkLink(number); ret != nvml.SUCCESS {
		return link{}, ret
	}
	if number >= len(g.links) {
		return link{}, nvml.ERROR_NOT_SUPPORTED
	}
	return g.links[number], nvml.SUCCESS
}

func (g *gpu) GetNvLinkState(number int) (nvml.EnableState, nvml.Return) {
	if ret := g.checkLink(number); ret != nvml.SUCCESS {
		return nvml.FEATURE_DISABLED, ret
	}
	return enabled(number < len(g.links)), nvml.SUCCESS
}

func (g *gpu) GetNvLinkRemoteDeviceType(number int) (nvml.IntNvLinkDeviceType, nvml.Return) {
	far, ret := g.activeLink(number)
	switch {
	case ret != nvml.SUCCESS:
		return nvml.NVLINK_DEVICE_TYPE_UNKNOWN, ret
	case far.peer < 0:
		return nvml.NVLINK_DEVICE_TYPE_SWITCH, nvml.SUCCESS
	}
	return nvml.NVLINK_DEVICE_TYPE_GPU, nvml.SUCCESS
}

func (g *gpu) GetNvLinkRemotePciInfo(number int) (nvml.PciInfo, nvml.Return) {
	far, ret := g.activeLink(number)
	if ret != nvml.SUCCESS {
		return nvml.PciInfo{}, ret
	}
	if far.peer < 0 {
		return far.address.info(switchDeviceID, switchSubsystemID), nvml.SUCCESS
	}
	model := g.sys.profile.Models[g.sys.profile.GPUs[far.peer].Model]
	return far.address.info(nvmlID(model.PCIDevice), nvmlID(model.PCISubsystem)), nvml.SUCCESS
}

// inFabric is false for a GPU that no fabric manager registers.
func (g *gpu) inFabric() bool {
	group, ok := groupOf(g.sys.profile, g.place)
	return g.model.FabricInfo && ok && len(group.Switches) > 0
}

// GetGpuFabricInfo is that of a GPU which a fabric manager has registered: the cluster UUID is zero where no fabric beyond the
// machine exists.
func (g *gpu) GetGpuFabricInfo() (nvml.GpuFabricInfo, nvml.Return) {
	info, ret := g.GetGpuFabricInfo_v4()
	return nvml.GpuFabricInfo{
		ClusterUuid: info.ClusterUuid, State: info.State, Status: info.Status, CliqueId: info.Cliques[0].Id,
	}, ret
}

// GetGpuFabricInfo_v4 is the only call with the fabric's health that can be simulated; GetGpuFabricInfoV needs the C library.
func (g *gpu) GetGpuFabricInfo_v4() (nvml.GpuFabricInfo_v4, nvml.Return) { //nolint:revive // the name is go-nvml's
	switch {
	case !g.model.FabricInfo:
		return nvml.GpuFabricInfo_v4{}, nvml.ERROR_NOT_SUPPORTED
	case !g.inFabric():
		// A recording of an H100 SXM without NVLink has this answer (pkg/nvml/testdata/recordings).
		return nvml.GpuFabricInfo_v4{State: nvml.GPU_FABRIC_STATE_NOT_SUPPORTED}, nvml.SUCCESS
	}
	group, _ := groupOf(g.sys.profile, g.place)
	fault := g.condition().fabric
	if fault == nil {
		fault = &fabricState{state: nvml.GPU_FABRIC_STATE_COMPLETED, status: nvml.SUCCESS}
	}
	info := nvml.GpuFabricInfo_v4{
		State: fault.state, Status: uint32(fault.status), NumCliques: 1, HealthMask: group.healthMask(), ClusterUuid: group.cluster(),
	}
	info.Cliques[0].Id = group.CliqueID
	if fault.healthMask != nil {
		info.HealthMask = *fault.healthMask
	}
	if fault.state != nvml.GPU_FABRIC_STATE_COMPLETED {
		// Nothing is known of the fabric before the registration (assumed).
		info.ClusterUuid, info.Cliques[0].Id = [16]uint8{}, 0
	}
	return info, nvml.SUCCESS
}

// healthMask is that of a GPU in good health. In a machine of its own it says that nothing of it is supported (nvidia-smi -q of an HGX
// H100 prints N/A for each).
func (n NVLinkGroup) healthMask() uint32 {
	if n.ClusterUUID == "" {
		return 0
	}
	return nvml.GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_FALSE<<nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW |
		nvml.GPU_FABRIC_HEALTH_MASK_ROUTE_RECOVERY_FALSE<<nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY |
		nvml.GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_FALSE<<nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY |
		nvml.GPU_FABRIC_HEALTH_MASK_ACCESS_TIMEOUT_RECOVERY_FALSE<<nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY |
		nvml.GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE<<nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION
}

// cluster is the UUID as NVML has it.
func (n NVLinkGroup) cluster() (uuid [16]uint8) {
	data, _ := hex.DecodeString(strings.ReplaceAll(n.ClusterUUID, "-", "")) //nolint:errcheck // validated with the profile
	copy(uuid[:], data)
	return uuid
}
