// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
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

// Dynamic reports whether partitions of a GPU are made as claims ask for them. It is pure, and the same in every mode: claims
// that have partitions keep them when the mode changes. A GPU about which rules disagree is static.
func (c Config) Dynamic(gpu device.GPU) bool {
	wants := func(policy MIGPolicy) bool {
		return slices.ContainsFunc(c.Devices, func(r DeviceRule) bool { return r.MIG == policy && r.Match.matches(gpu) })
	}
	return gpu.MIGCapable && wants(MIGDynamic) && !wants(MIGStatic)
}

// CheckDynamic says which rules ask in vain for partitions to be made. That is no mistake where one configuration serves nodes of
// several models, and a misspelt model looks the same. What CheckDevices says of a rule is not said again.
func (c Config) CheckDynamic(inv device.Inventory) error {
	var errs []error
	for i, rule := range c.Devices {
		gpus := slices.DeleteFunc(slices.Clone(inv.GPUs), func(g device.GPU) bool { return !rule.Match.matches(g) })
		switch {
		case rule.MIG != MIGDynamic || slices.ContainsFunc(gpus, func(g device.GPU) bool { return g.MIGCapable }):
		case len(gpus) > 0:
			errs = append(errs, fmt.Errorf("tandem.devices[%d].mig: %s of this node has no MIG (%s)", i, rule.Match, gpus[0].ProductName))
		case !c.mustMatch(rule):
			errs = append(errs, unmatched(i, rule))
		}
	}
	return errors.Join(errs...)
}

// Resources are the extended resources by which limits ask for the node's devices.
func (c Config) Resources() device.Resources {
	return device.Resources{GPU: c.ResourceName, Strategy: c.MIGStrategy}
}
