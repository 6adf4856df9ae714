// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"encoding/binary"
	"fmt"
	"path"
	"strconv"
	"strings"
)

// PCI classes as sysfs shows them: display controller (3D), bridge (PCI to PCI), bridge (other, an NVSwitch's).
const (
	class3D       = "0x030200"
	classBridge   = "0x060400"
	classNVSwitch = "0x068000"
)

// pciDevice is a device of the sysfs tree; at is its directory below devices.
type pciDevice struct {
	at, class         string
	vendor, device    string
	subVendor, subDev string
	numaNode          int
	gpu               *Model
}

// pciFiles are the machine's PCI devices: a directory each, nested as they are behind each other, and a link from the list
// of the bus.
func pciFiles(p Profile, cpus [][]cpu) []file {
	var all []file
	seen := map[string]bool{}
	add := func(d pciDevice) {
		if !seen[d.at] {
			seen[d.at] = true
			all = append(all, d.files(cpus)...)
		}
	}
	for _, g := range p.GPUs {
		at := g.Root
		for _, bridge := range g.Bridges {
			at = path.Join(at, bridge)
			// 1000:c030 is a Broadcom PEX890xx switch; root ports have the same ID, because no reader distinguishes them.
			add(pciDevice{at: at, class: classBridge, vendor: "1000", device: "c030", subVendor: "1000", subDev: "100b", numaNode: g.NUMANode})
		}
		m := p.Models[g.Model]
		vendor, dev, _ := strings.Cut(m.PCIDevice, ":")
		subVendor, subDev, _ := strings.Cut(m.PCISubsystem, ":")
		add(pciDevice{
			at: path.Join(at, g.PCI), class: class3D, vendor: vendor, device: dev, subVendor: subVendor, subDev: subDev,
			numaNode: g.NUMANode, gpu: &m,
		})
	}
	for _, group := range p.NVLink {
		if group.Outside {
			continue
		}
		for _, address := range group.Switches {
			add(pciDevice{
				at: path.Join("pci"+address[:len("0000:")]+"00", address), class: classNVSwitch,
				vendor: "10de", device: "22a3", subVendor: "10de", subDev: "1688", numaNode: 0,
			})
		}
	}
	return all
}

func (d pciDevice) files(cpus [][]cpu) []file {
	local := cpus
	if d.numaNode >= 0 {
		local = cpus[d.numaNode : d.numaNode+1]
	}
	address := path.Base(d.at)
	attributes := map[string]string{
		"class": d.class, "vendor": "0x" + d.vendor, "device": "0x" + d.device, "revision": "0xa1",
		"subsystem_vendor": "0x" + d.subVendor, "subsystem_device": "0x" + d.subDev,
		"numa_node": strconv.Itoa(d.numaNode), "local_cpulist": list(local...), "local_cpus": mask(local...),
		"uevent": d.uevent(address), "enable": "1",
		"resource": strings.TrimSuffix(strings.Repeat("0x0000000000000000 0x0000000000000000 0x0000000000000000\n", 13), "\n"),
	}
	if d.gpu != nil {
		speed := map[int]string{3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0"}[d.gpu.PCIeGeneration] + " GT/s PCIe"
		attributes["current_link_speed"], attributes["max_link_speed"] = speed, speed
		attributes["current_link_width"], attributes["max_link_width"] = "16", "16"
	}
	base := path.Join(SysfsDir, "devices", d.at)
	all := []file{{path: path.Join(SysfsDir, "bus/pci/devices", address), target: path.Join("../../../devices", d.at)}}
	for name, value := range attributes {
		all = append(all, file{path: path.Join(base, name), content: []byte(value + "\n"), mode: 0o444})
	}
	// The first bytes of the configuration space are vendor and device. Without a list of capabilities it is no virtual GPU.
	config := make([]byte, 256)
	for i, id := range []string{d.vendor, d.device} {
		number, _ := strconv.ParseUint(id, 16, 16)
		binary.LittleEndian.PutUint16(config[2*i:], uint16(number))
	}
	all = append(all, file{path: path.Join(base, "config"), content: config, mode: 0o444})
	if d.gpu != nil {
		up := strings.Repeat("../", strings.Count(path.Join("devices", d.at), "/")+1)
		all = append(all,
			file{path: path.Join(base, "driver"), target: up + "bus/pci/drivers/nvidia"},
			file{path: path.Join(SysfsDir, "bus/pci/drivers/nvidia", address), target: path.Join("../../../../devices", d.at)},
		)
	}
	return all
}

func (d pciDevice) uevent(address string) string {
	lines := []string{
		"PCI_CLASS=" + strings.TrimLeft(strings.ToUpper(strings.TrimPrefix(d.class, "0x")), "0"),
		fmt.Sprintf("PCI_ID=%s:%s", strings.ToUpper(d.vendor), strings.ToUpper(d.device)),
		fmt.Sprintf("PCI_SUBSYS_ID=%s:%s", strings.ToUpper(d.subVendor), strings.ToUpper(d.subDev)),
		"PCI_SLOT_NAME=" + address,
	}
	if d.gpu != nil {
		lines = append([]string{"DRIVER=nvidia"}, lines...)
	}
	return strings.Join(lines, "\n")
}
