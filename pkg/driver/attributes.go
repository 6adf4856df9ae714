// SPDX-License-Identifier: Apache-2.0

// The attributes and capacities of a published device.

package driver

import (
	"fmt"
	"regexp"
	"unicode/utf8"

	"github.com/blang/semver/v4"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/capacity"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// publishedDevice describes a device in the API's terms. It omits unknown values and those that the API would refuse: the API
// refuses a whole slice for one value (TestUnusableGPUsAreExcluded). NVIDIA's DRA driver publishes the same names
// (cmd/gpu-kubelet-plugin/deviceinfo.go), except index, minor, eccEnabled, nvlinkDomain and fabricClique.
func publishedDevice(d device.Device) resourceapi.Device {
	g, p, a, c := d.GPU, d.Partition, attributes{}, capacities{}
	a.text("productName", g.ProductName)
	a.text("brand", g.Brand)
	a.text("architecture", g.Architecture)
	a.version("cudaComputeCapability", g.ComputeCapability)
	a.version("driverVersion", g.DriverVersion)
	a.version("cudaDriverVersion", g.CUDADriverVersion)
	a.text("addressingMode", g.AddressingMode)
	a.number("index", g.Index)
	a.number("minor", g.Minor)
	a.text(deviceattribute.StandardDeviceAttributePCIBusID, g.PCIBusID)
	a.text(deviceattribute.StandardDeviceAttributePCIeRoot, g.PCIeRoot)
	a.number(deviceattribute.StandardDeviceAttributeNUMANode, g.NUMANode)
	if d.Whole() {
		a.text("type", "gpu")
		a.text("uuid", g.UUID)
		// A selector fails on all nodes if one GPU in the cluster lacks the value that it reads: where NVML reports none, it is false or zero.
		a["eccEnabled"] = resourceapi.DeviceAttribute{BoolValue: ptr.To(g.ECCEnabled != nil && *g.ECCEnabled)}
		a.text("nvlinkDomain", g.NVLinkDomain)
		a.text("fabricClique", g.FabricClique)
		// The memory only, as in NVIDIA's driver: NVML does not report the engines of a GPU.
		c.amount(capacity.Memory, int64(g.MemoryBytes))
		return resourceapi.Device{Name: d.Name(), Attributes: a, Capacity: c}
	}
	// Partitions have no NVLink. One that is created for a claim has a UUID while it exists.
	a.text("type", "mig")
	a.text("parentUUID", g.UUID)
	a.text("profile", p.Profile)
	a.text("uuid", p.UUID)
	c.amount(capacity.Memory, int64(p.Capacity.MemoryBytes))
	c.amount("multiprocessors", int64(p.Capacity.Multiprocessors))
	c.amount("copyEngines", int64(p.Capacity.CopyEngines))
	c.amount("decoders", int64(p.Capacity.Decoders))
	c.amount("encoders", int64(p.Capacity.Encoders))
	c.amount("jpegEngines", int64(p.Capacity.JPEGEngines))
	c.amount("ofaEngines", int64(p.Capacity.OFAEngines))
	// A partition that shares its GPU instance has no memory slice of its own. Eight fit into the attributes and capacities that a
	// device may have, beside all others.
	if p.UUID != "" && !p.Made && p.Ref.Compute.Size == 0 && p.Ref.Placement.Size <= 8 {
		for i := range p.Ref.Placement.Size {
			c.amount(resourceapi.QualifiedName(fmt.Sprintf("memorySlice%d", p.Ref.Placement.Start+i)), 1)
		}
	}
	return resourceapi.Device{Name: d.Name(), Attributes: a, Capacity: c}
}

type capacities map[resourceapi.QualifiedName]resourceapi.DeviceCapacity

// amount omits negative values.
func (c capacities) amount(name resourceapi.QualifiedName, n int64) {
	if n >= 0 {
		c[name] = resourceapi.DeviceCapacity{Value: *resource.NewQuantity(n, resource.BinarySI)}
	}
}

type attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

// text omits values that are empty or too long for the API. A truncated value would match wrong selectors.
func (a attributes) text(name resourceapi.QualifiedName, value string) {
	if value != "" && len(value) <= resourceapi.DeviceAttributeMaxValueLength && utf8.ValidString(value) {
		a[name] = resourceapi.DeviceAttribute{StringValue: &value}
	}
}

func (a attributes) version(name resourceapi.QualifiedName, value string) {
	if semantic, ok := semanticVersion(value); ok && len(semantic) <= resourceapi.DeviceAttributeMaxValueLength {
		a[name] = resourceapi.DeviceAttribute{VersionValue: &semantic}
	}
}

// number omits negative values, which mean "unknown" in pkg/device.
func (a attributes) number(name resourceapi.QualifiedName, value int) {
	if value >= 0 {
		a[name] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(value))}
	}
}

var dottedNumbers = regexp.MustCompile(`^[0-9]+(\.[0-9]+){0,2}$`)

// semanticVersion converts NVIDIA's version numbers to semver 2.0.0, as NVIDIA's DRA driver does: "535.54.03" is "535.54.3", and
// "9.0" is "9.0.0".
func semanticVersion(text string) (string, bool) {
	version, err := semver.ParseTolerant(text)
	if err != nil || !dottedNumbers.MatchString(text) {
		return "", false
	}
	return version.String(), true
}
