// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"errors"
	"fmt"
	slashpath "path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/simulated/models"
)

// Minors the driver keeps for its control devices, beside those of GPUs on the same major number.
const (
	majorNVIDIA  = 195
	minorModeset = 254
	minorCtl     = 255
)

var (
	addressForm  = regexp.MustCompile(`^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$`)
	rootForm     = regexp.MustCompile(`^pci[0-9a-f]{4}:[0-9a-f]{2}$`)
	uuidForm     = regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	pciIDForm    = regexp.MustCompile(`^[0-9a-f]{4}:[0-9a-f]{4}$`)
	versionForm  = regexp.MustCompile(`^[0-9]+(\.[0-9]+){1,2}$`)
	capacityForm = regexp.MustCompile(`^[0-9]+\.[0-9]+$`)
	nameForm     = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]*$`)
)

var brands = map[string]nvml.BrandType{
	"NVIDIA": nvml.BRAND_NVIDIA, "Tesla": nvml.BRAND_TESLA, "NVIDIARTX": nvml.BRAND_NVIDIA_RTX, "GeForce": nvml.BRAND_GEFORCE,
}

var architectures = map[string]nvml.DeviceArchitecture{
	"Turing": nvml.DEVICE_ARCH_TURING, "Ampere": nvml.DEVICE_ARCH_AMPERE, "Ada": nvml.DEVICE_ARCH_ADA,
	"Hopper": nvml.DEVICE_ARCH_HOPPER, "Blackwell": nvml.DEVICE_ARCH_BLACKWELL,
}

var addressingModes = map[string]nvml.DeviceAddressingModeType{
	"None": nvml.DEVICE_ADDRESSING_MODE_NONE, "HMM": nvml.DEVICE_ADDRESSING_MODE_HMM, "ATS": nvml.DEVICE_ADDRESSING_MODE_ATS,
}

// Validate reports every impossible value of the profile, by field path.
func (p Profile) Validate() error {
	c := &checker{seen: map[string]string{}}
	c.require(nameForm.MatchString(p.Name), "name", "%q is not a lower-case name", p.Name)
	c.require(versionForm.MatchString(p.Driver.Version), "driver.version", "%q is not a version", p.Driver.Version)
	c.require(capacityForm.MatchString(p.Driver.CUDA), "driver.cuda", "%q is not major.minor", p.Driver.CUDA)
	c.require(p.NUMANodes >= 1 && p.NUMANodes <= 64, "numaNodes", "%d is not between 1 and 64", p.NUMANodes)
	for name, m := range p.Models {
		c.model("models."+name, m)
	}
	for i, g := range p.GPUs {
		c.gpu(fmt.Sprintf("gpus[%d]", i), i, g, p)
	}
	for i, group := range p.NVLink {
		c.group(fmt.Sprintf("nvlink[%d]", i), group, p)
	}
	c.nodes("nodes", p.Nodes)
	return errors.Join(c.problems...)
}

// checker collects problems; seen maps an identity that must be unique to the path that has it.
type checker struct {
	problems []error
	seen     map[string]string
}

func (c *checker) require(ok bool, path, format string, args ...any) {
	if !ok {
		c.problems = append(c.problems, fmt.Errorf("%s: %s", path, fmt.Sprintf(format, args...)))
	}
}

func (c *checker) unique(kind, value, path string) {
	first, taken := c.seen[kind+value]
	c.require(!taken, path, "%s %s is that of %s already", kind, value, first)
	if !taken {
		c.seen[kind+value] = path
	}
}

func (c *checker) model(path string, m Model) {
	_, brand := brands[m.Brand]
	_, architecture := architectures[m.Architecture]
	_, addressing := addressingModes[m.AddressingMode]
	c.require(m.ProductName != "", path+".productName", "is empty")
	c.require(brand, path+".brand", "%q is not known", m.Brand)
	c.require(architecture, path+".architecture", "%q is not known", m.Architecture)
	c.require(addressing || m.AddressingMode == "", path+".addressingMode", "%q is not HMM, ATS or None", m.AddressingMode)
	c.require(capacityForm.MatchString(m.ComputeCapability), path+".computeCapability", "%q is not major.minor", m.ComputeCapability)
	c.require(m.MemoryMiB > m.ReservedMiB, path+".memoryMiB", "%d is not more than reservedMiB", m.MemoryMiB)
	c.require(pciIDForm.MatchString(m.PCIDevice), path+".pciDevice", "%q is not vendor:device", m.PCIDevice)
	c.require(pciIDForm.MatchString(m.PCISubsystem), path+".pciSubsystem", "%q is not vendor:device", m.PCISubsystem)
	c.require(m.NVLinks >= 0 && m.NVLinks <= nvml.NVLINK_MAX_LINKS, path+".nvLinks", "%d is not between 0 and %d", m.NVLinks, nvml.NVLINK_MAX_LINKS)
	if m.MIG != "" {
		_, known := models.Named(m.MIG)
		c.require(known, path+".mig", "%q is no model with MIG", m.MIG)
	}
}

func (c *checker) gpu(path string, index int, g GPU, p Profile) {
	m, known := p.Models[g.Model]
	c.require(known, path+".model", "%q is not among models", g.Model)
	c.require(g.UUID == "" || uuidForm.MatchString(g.UUID), path+".uuid", "%q is not GPU-<uuid>", g.UUID)
	c.require(addressForm.MatchString(g.PCI), path+".pci", "%q is not domain:bus:device.function", g.PCI)
	c.require(rootForm.MatchString(g.Root), path+".root", "%q is not pci<domain>:<bus>", g.Root)
	for i, b := range g.Bridges {
		at := fmt.Sprintf("%s.bridges[%d]", path, i)
		c.require(addressForm.MatchString(b), at, "%q is not domain:bus:device.function", b)
		c.beneath(at, b, strings.Join(append([]string{g.Root}, g.Bridges[:i]...), "/"))
	}
	c.require(g.NUMANode >= -1 && g.NUMANode < p.NUMANodes, path+".numaNode", "%d is not among %d nodes", g.NUMANode, p.NUMANodes)
	c.require(!g.MIGEnabled || m.MIG != "", path+".migEnabled", "model %s has no MIG", g.Model)
	c.require(g.MIGEnabled || len(g.Partitions) == 0, path+".partitions", "MIG is not enabled")
	if problem := geometryOf(m).cut(&MIGGPU{Enabled: true}, g.Partitions); problem != nil {
		c.require(false, path+".partitions", "%v", problem)
	}
	minor := index
	if g.Minor != nil {
		minor = *g.Minor
	}
	c.require(minor >= 0 && minor != minorModeset && minor != minorCtl, path+".minor", "%d is no GPU's minor", minor)
	c.unique("minor", strconv.Itoa(minor), path)
	c.unique("address", g.PCI, path)
	if g.UUID != "" {
		c.unique("uuid", g.UUID, path)
	}
}

// beneath requires that a bridge has one place in the tree, however many GPUs name it.
func (c *checker) beneath(path, bridge, parent string) {
	known, ok := c.seen["bridge"+bridge]
	c.require(!ok || known == parent, path, "bridge %s is beneath %s already", bridge, known)
	c.seen["bridge"+bridge] = parent
}

func (c *checker) group(path string, group NVLinkGroup, p Profile) {
	c.require(len(group.GPUs) > 1, path+".gpus", "are fewer than two")
	c.require((len(group.Switches) > 0) != (group.PairLinks > 0), path, "has not exactly one of switches and pairLinks")
	c.require(group.ClusterUUID == "" || uuidForm.MatchString("GPU-"+group.ClusterUUID), path+".clusterUUID", "%q is no UUID", group.ClusterUUID)
	c.require(!group.Outside || len(group.Switches) > 0, path+".outside", "there are no switches")
	for i, s := range group.Switches {
		at := fmt.Sprintf("%s.switches[%d]", path, i)
		c.require(addressForm.MatchString(s), at, "%q is not domain:bus:device.function", s)
		c.unique("address", s, at)
	}
	for i, index := range group.GPUs {
		at := fmt.Sprintf("%s.gpus[%d]", path, i)
		if index < 0 || index >= len(p.GPUs) {
			c.require(false, at, "there is no GPU %d", index)
			continue
		}
		c.unique("link of GPU ", strconv.Itoa(index), at)
		links := p.Models[p.GPUs[index].Model].NVLinks
		c.require(links > 0, at, "GPU %d has no NVLink", index)
		c.require(group.PairLinks*(len(group.GPUs)-1) <= links, path+".pairLinks", "GPU %d has only %d links", index, links)
	}
}

func (c *checker) nodes(path string, n Nodes) {
	for i, pattern := range n.Missing {
		_, err := slashpath.Match(pattern, "")
		c.require(err == nil, fmt.Sprintf("%s.missing[%d]", path, i), "%q is no pattern", pattern)
	}
	c.require(n.IMEXChannels >= 0 && n.IMEXChannels <= 2048, path+".imexChannels", "%d is not between 0 and 2048", n.IMEXChannels)
	for i, name := range n.Other {
		at := fmt.Sprintf("%s.other[%d]", path, i)
		c.require(filepath.IsLocal(name) && name == slashpath.Clean(name), at, "%q is not a path below /dev", name)
		c.unique("node", name, at)
	}
}
