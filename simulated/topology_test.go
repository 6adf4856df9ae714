// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func TestCommonAncestor(t *testing.T) {
	behind := func(root string, numa int, pci string, bridges ...string) GPU {
		return GPU{PCI: pci, Root: root, NUMANode: numa, Bridges: bridges}
	}
	one := behind("pci0000:00", 0, "0000:07:00.0", "port1", "up1", "down1")
	for _, test := range []struct {
		name  string
		other GPU
		want  nvml.GpuTopologyLevel
	}{
		{"itself", one, nvml.TOPOLOGY_INTERNAL},
		{"one switch", behind("pci0000:00", 0, "0000:08:00.0", "port1", "up1", "down2"), nvml.TOPOLOGY_SINGLE},
		{"a switch behind the switch", behind("pci0000:00", 0, "0000:09:00.0", "port1", "up1", "down2", "up2", "down3"), nvml.TOPOLOGY_MULTIPLE},
		{"another port of the host bridge", behind("pci0000:00", 0, "0000:0a:00.0", "port2"), nvml.TOPOLOGY_HOSTBRIDGE},
		{"another host bridge of the node", behind("pci0000:40", 0, "0000:47:00.0", "port1"), nvml.TOPOLOGY_NODE},
		{"another node", behind("pci0000:80", 1, "0000:87:00.0", "port1"), nvml.TOPOLOGY_SYSTEM},
		{"a node that is not told", behind("pci0000:80", -1, "0000:88:00.0"), nvml.TOPOLOGY_SYSTEM},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got, back := level(one, test.other), level(test.other, one); got != test.want || back != test.want {
				t.Errorf("level = %v and back %v, want %v", got, back, test.want)
			}
		})
	}
}

// nvlinks counts links between two GPUs as NVML's documentation lets one: by the GPU at the far end, or for links to
// switches by the switch that both are linked to, where NVLink connects the two at all.
func nvlinks(t *testing.T, a, b nvml.Device) int {
	t.Helper()
	far := func(d nvml.Device) []string {
		var ends []string
		for link := range nvml.NVLINK_MAX_LINKS {
			if state, ret := d.GetNvLinkState(link); ret != nvml.SUCCESS || state != nvml.FEATURE_ENABLED {
				continue
			}
			info, ret := d.GetNvLinkRemotePciInfo(link)
			if ret != nvml.SUCCESS {
				t.Fatalf("link %d is up and has no far end: %v", link, ret)
			}
			ends = append(ends, busID(info))
		}
		return ends
	}
	info, _ := b.GetPciInfo()
	direct, switched := 0, map[string]int{}
	for _, end := range far(a) {
		if end == busID(info) {
			direct++
		}
		switched[end]++
	}
	total := 0
	for _, end := range far(b) {
		if switched[end] > 0 {
			switched[end]--
			total++
		}
	}
	return max(direct, total)
}

func busID(info nvml.PciInfo) string {
	var text []byte
	for _, c := range info.BusId {
		if c == 0 {
			break
		}
		text = append(text, byte(c))
	}
	return string(text)
}

func TestNVLinks(t *testing.T) {
	for _, test := range []struct {
		profile string
		a, b    int
		want    int
		far     nvml.IntNvLinkDeviceType
	}{
		{"h100x8", 0, 7, 18, nvml.NVLINK_DEVICE_TYPE_SWITCH},
		{"a100x8", 1, 2, 12, nvml.NVLINK_DEVICE_TYPE_SWITCH},
		{"h200x8", 0, 7, 18, nvml.NVLINK_DEVICE_TYPE_SWITCH},
		{"b200x8", 0, 7, 18, nvml.NVLINK_DEVICE_TYPE_SWITCH},
		{"gb200x4", 0, 3, 18, nvml.NVLINK_DEVICE_TYPE_SWITCH},
		{"rtxpro6000x4", 0, 1, 0, nvml.NVLINK_DEVICE_TYPE_UNKNOWN},
		{"mixed", 0, 1, 18, nvml.NVLINK_DEVICE_TYPE_GPU},
		{"mixed", 2, 3, 12, nvml.NVLINK_DEVICE_TYPE_GPU},
		{"mixed", 0, 2, 0, nvml.NVLINK_DEVICE_TYPE_GPU},
		{"l4x4", 0, 1, 0, nvml.NVLINK_DEVICE_TYPE_UNKNOWN},
		{"bench256", 8, 15, 18, nvml.NVLINK_DEVICE_TYPE_SWITCH},
		{"bench256", 7, 8, 0, nvml.NVLINK_DEVICE_TYPE_SWITCH},
	} {
		lib := start(t, test.profile)
		a, b := handle(t, lib, test.a), handle(t, lib, test.b)
		if got, back := nvlinks(t, a, b), nvlinks(t, b, a); got != test.want || back != test.want {
			t.Errorf("%s: %d links from %d to %d, %d back, want %d", test.profile, got, test.a, test.b, back, test.want)
		}
		if far, _ := a.GetNvLinkRemoteDeviceType(0); far != test.far {
			t.Errorf("%s: link 0 of %d ends at a %v, want %v", test.profile, test.a, far, test.far)
		}
	}
}

func TestNVLinkNumbersThatAreNone(t *testing.T) {
	lib := start(t, "a100x8")
	d := handle(t, lib, 0)
	for link, want := range map[int]nvml.Return{
		-1: nvml.ERROR_INVALID_ARGUMENT, 11: nvml.SUCCESS, 12: nvml.ERROR_NOT_SUPPORTED, nvml.NVLINK_MAX_LINKS: nvml.ERROR_INVALID_ARGUMENT,
	} {
		if _, ret := d.GetNvLinkState(link); ret != want {
			t.Errorf("GetNvLinkState(%d): %v, want %v", link, ret, want)
		}
	}
	if state, ret := handle(t, start(t, "l4x4"), 0).GetNvLinkState(0); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("link 0 of an L4: %v, %v", state, ret)
	}
}

// wrapped is a handle as go-nvlib and others wrap it.
type wrapped struct{ nvml.Device }

func TestWrappedHandlesAreUnderstood(t *testing.T) {
	lib := start(t, "a100x8")
	a, b := handle(t, lib, 0), wrapped{handle(t, lib, 1)}
	if level, ret := a.GetTopologyCommonAncestor(b); level != nvml.TOPOLOGY_SINGLE || ret != nvml.SUCCESS {
		t.Errorf("common ancestor with a wrapped handle: %v, %v", level, ret)
	}
	unknown := handle(t, start(t, "a100x8", WithSeed("another node")), 1)
	if _, ret := a.GetTopologyCommonAncestor(unknown); ret != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("common ancestor with another machine's GPU: %v", ret)
	}
}

func TestFindByAddress(t *testing.T) {
	lib := start(t, "h100x8")
	want := handle(t, lib, 1)
	for address, ret := range map[string]nvml.Return{
		"0000:43:00.0": nvml.SUCCESS, "00000000:43:00.0": nvml.SUCCESS, "43:00.0": nvml.SUCCESS, "0000:43:00": nvml.SUCCESS,
		"0000:C3:00.0": nvml.SUCCESS, "0001:43:00.0": nvml.ERROR_NOT_FOUND, "43": nvml.ERROR_INVALID_ARGUMENT, "": nvml.ERROR_INVALID_ARGUMENT,
		"0000:zz:00.0": nvml.ERROR_INVALID_ARGUMENT,
	} {
		got, found := lib.DeviceGetHandleByPciBusId(address)
		if found != ret {
			t.Errorf("handle of %q: %v, want %v", address, found, ret)
		}
		if address == "43:00.0" && got != want {
			t.Errorf("handle of %q is another", address)
		}
	}
	info, _ := want.GetPciInfo()
	if busID(info) != "00000000:43:00.0" || info.PciDeviceId != 0x233010de || info.Bus != 0x43 {
		t.Errorf("PCI info %+v", info)
	}
}

// A tray of GB200 is a part of a fabric, and its switches are elsewhere.
func TestFabricBeyondTheMachine(t *testing.T) {
	dir := t.TempDir()
	materialize(t, dir, "gb200x4", MaterializeOptions{PlainDeviceFiles: true})
	lib := start(t, "gb200x4", WithDir(dir))
	d := handle(t, lib, 2)
	if mode, ret := d.GetAddressingMode(); mode.Value != uint32(nvml.DEVICE_ADDRESSING_MODE_ATS) || ret != nvml.SUCCESS {
		t.Errorf("addressing mode %+v, %v", mode, ret)
	}
	info, ret := d.GetGpuFabricInfo()
	if info.ClusterUuid[0] != 0x5f || info.ClusterUuid[15] != 0x10 || info.CliqueId != 32766 || ret != nvml.SUCCESS {
		t.Errorf("fabric %+v, %v", info, ret)
	}
	if health, ret := d.GetGpuFabricInfo_v4(); health.HealthMask != 0x1aa || health.Cliques[0].Id != 32766 || ret != nvml.SUCCESS {
		t.Errorf("fabric health %#x, %v", health.HealthMask, ret)
	}
	inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: "2", Condition: Condition{Fabric: &FabricState{State: "inProgress"}}}}})
	info, ret = d.GetGpuFabricInfo()
	if want := (nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_IN_PROGRESS}); info != want || ret != nvml.SUCCESS {
		t.Errorf("fabric before the registration %+v, %v", info, ret)
	}
	devices, err := os.ReadDir(filepath.Join(dir, SysfsDir, "bus/pci/devices"))
	if err != nil || len(devices) != 2*4 {
		t.Errorf("PCI devices %v, %v", devices, err)
	}
	if _, err := os.Stat(filepath.Join(dir, DriverDir, "dev/nvidia-caps-imex-channels/channel0")); err != nil {
		t.Error(err)
	}
	alone := handle(t, start(t, "h200x8"), 0)
	if info, ret := alone.GetGpuFabricInfo_v4(); info.ClusterUuid != [16]uint8{} || info.HealthMask != 0 || ret != nvml.SUCCESS {
		t.Errorf("fabric of a machine of its own %+v, %v", info, ret)
	}
}
