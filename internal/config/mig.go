// SPDX-License-Identifier: Apache-2.0

package config

import (
	"slices"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// MIGPolicy says who makes the partitions of a GPU.
type MIGPolicy string

const (
	// MIGStatic leaves them to the administrator. It is what holds for a GPU that no rule speaks of.
	MIGStatic MIGPolicy = "static"
	// MIGDynamic has them made when a claim asks for one, and destroyed when the claim is gone.
	MIGDynamic MIGPolicy = "dynamic"
)

// Dynamic reports whether partitions of a GPU are made as claims ask for them. It is pure, and the same in every mode: claims that
// have partitions keep them when the mode changes. A GPU about which rules disagree is static.
func (c Config) Dynamic(gpu device.GPU) bool {
	wants := func(policy MIGPolicy) bool {
		return slices.ContainsFunc(c.Devices, func(r DeviceRule) bool { return r.MIG == policy && r.Match.matches(gpu) })
	}
	return gpu.MIGCapable && wants(MIGDynamic) && !wants(MIGStatic)
}

// Resources are the extended resources by which limits ask for the node's devices.
func (c Config) Resources() device.Resources {
	return device.Resources{GPU: c.ResourceName, Strategy: c.MIGStrategy}
}
