// SPDX-License-Identifier: Apache-2.0

package simulated

import "github.com/NVIDIA/go-nvml/pkg/nvml"

// BrandName returns the name by which a profile has NVML's value, and whether it has one. So do the next two.
func BrandName(brand int) (string, bool) { return nameOf(brands, nvml.BrandType(brand)) }

// ArchitectureName is for Model.Architecture.
func ArchitectureName(architecture int) (string, bool) {
	return nameOf(architectures, nvml.DeviceArchitecture(architecture))
}

// AddressingModeName is for Model.AddressingMode.
func AddressingModeName(mode int) (string, bool) {
	return nameOf(addressingModes, nvml.DeviceAddressingModeType(mode))
}

func nameOf[T comparable](names map[string]T, value T) (string, bool) {
	for name, known := range names {
		if known == value {
			return name, true
		}
	}
	return "", false
}
