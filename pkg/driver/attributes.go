// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Names that NVIDIA's DRA driver publishes (deviceinfo.go there), in the driver's own domain.
const (
	attributeType                  = "type"
	attributeUUID                  = "uuid"
	attributeProductName           = "productName"
	attributeBrand                 = "brand"
	attributeArchitecture          = "architecture"
	attributeCUDAComputeCapability = "cudaComputeCapability"
	attributeDriverVersion         = "driverVersion"
	attributeCUDADriverVersion     = "cudaDriverVersion"
	attributeAddressingMode        = "addressingMode"
	capacityMemory                 = "memory"
)

// Names that it lacks.
const (
	attributeIndex        = "index"
	attributeMinor        = "minor"
	attributeECCEnabled   = "eccEnabled"
	attributeNVLinkDomain = "nvlinkDomain"
	attributeFabricClique = "fabricClique"
)

const typeGPU = "gpu"

// publishedDevice describes a whole GPU as the API takes it. What is unknown, or what the API would refuse, is left out:
// one odd value must not keep the whole slice from being published.
func publishedDevice(g device.GPU) resourceapi.Device {
	a := attributes{}
	a.text(attributeType, typeGPU)
	a.text(attributeUUID, g.UUID)
	a.text(attributeProductName, g.ProductName)
	a.text(attributeBrand, g.Brand)
	a.text(attributeArchitecture, g.Architecture)
	a.version(attributeCUDAComputeCapability, g.ComputeCapability)
	a.version(attributeDriverVersion, g.DriverVersion)
	a.version(attributeCUDADriverVersion, g.CUDADriverVersion)
	a.text(attributeAddressingMode, g.AddressingMode)
	a.number(attributeIndex, g.Index)
	a.number(attributeMinor, g.Minor)
	a.flag(attributeECCEnabled, g.ECCEnabled)
	a.text(attributeNVLinkDomain, g.NVLinkDomain)
	a.text(attributeFabricClique, g.FabricClique)
	a.text(deviceattribute.StandardDeviceAttributePCIBusID, g.PCIBusID)
	a.text(deviceattribute.StandardDeviceAttributePCIeRoot, g.PCIeRoot)
	a.number(deviceattribute.StandardDeviceAttributeNUMANode, g.NUMANode)

	published := resourceapi.Device{Name: g.Name(), Attributes: a}
	if memory := int64(g.MemoryBytes); memory > 0 {
		published.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			capacityMemory: {Value: *resource.NewQuantity(memory, resource.BinarySI)},
		}
	}
	return published
}

type attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

// text leaves out what is empty or longer than the API takes: a value cut short would select something else.
func (a attributes) text(name resourceapi.QualifiedName, value string) {
	if value == "" || len(value) > resourceapi.DeviceAttributeMaxValueLength || !utf8.ValidString(value) {
		return
	}
	a[name] = resourceapi.DeviceAttribute{StringValue: &value}
}

func (a attributes) version(name resourceapi.QualifiedName, value string) {
	semantic, ok := semanticVersion(value)
	if !ok || len(semantic) > resourceapi.DeviceAttributeMaxValueLength {
		return
	}
	a[name] = resourceapi.DeviceAttribute{VersionValue: &semantic}
}

// number leaves out negative values, which mean "unknown" everywhere here.
func (a attributes) number(name resourceapi.QualifiedName, value int) {
	if value < 0 {
		return
	}
	a[name] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(value))}
}

func (a attributes) flag(name resourceapi.QualifiedName, value *bool) {
	if value == nil {
		return
	}
	a[name] = resourceapi.DeviceAttribute{BoolValue: ptr.To(*value)}
}

var dottedNumbers = regexp.MustCompile(`^[0-9]+(\.[0-9]+){0,2}$`)

// semanticVersion turns NVIDIA's version numbers into what the API calls a version (semver 2.0.0): three numbers without
// leading zeros, so "535.54.03" is "535.54.3" and "9.0" is "9.0.0", as in NVIDIA's DRA driver.
func semanticVersion(text string) (string, bool) {
	if !dottedNumbers.MatchString(text) {
		return "", false
	}
	numbers := [3]uint64{}
	for i, part := range strings.Split(text, ".") {
		n, err := strconv.ParseUint(part, 10, 63)
		if err != nil {
			return "", false
		}
		numbers[i] = n
	}
	return fmt.Sprintf("%d.%d.%d", numbers[0], numbers[1], numbers[2]), true
}
