// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/runtimes"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// deviceNames is implemented by cdi.Specs.
type deviceNames interface{ UseSecretNames(secret bool) }

// chooseNames selects secret names of CDI devices where the configuration, or a flaw of the container runtime, requires them. version is empty
// while it is not known.
func (a *agent) chooseNames(names deviceNames, version string) {
	if a.config.CDIDeviceNames != config.CDINamesAuto {
		names.UseSecretNames(a.config.CDIDeviceNames == config.CDINamesSecret)
	} else if version != "" {
		names.UseSecretNames(runtimes.TakesDevices(version))
	}
}

// devicesInUse is cdi.Options.InUse. It returns nil while not all holders are known.
func (a *agent) devicesInUse(c components) map[string]bool {
	if !c.adopted.Load() || c.book.Withheld() != nil {
		return nil
	}
	claims, err := podstate.ReadClaimState(a.config.KubeletDir, a.config.DriverName)
	if err != nil {
		return nil
	}
	return inUse(claims, c.book.Holds(), c.devices.Inventory())
}

// inUse returns the UUIDs of the devices that are held, and the CDI names that kubelet keeps: a claim with admin access holds nothing. It returns
// nil while kubelet waits for the names of a claim.
func inUse(claims []podstate.KubeletClaim, holds []ledger.Hold, inventory device.Inventory) map[string]bool {
	used := map[string]bool{}
	for _, claim := range claims {
		if len(claim.CDIDevices) == 0 {
			return nil
		}
		for _, name := range claim.CDIDevices {
			used[name] = true
		}
	}
	for _, h := range holds {
		held, known := inventory.ByRef(h.Device)
		switch {
		case h.Device.Whole():
			used[h.Device.GPU] = true
		case known && held.UUID() != "":
			used[held.UUID()] = true
		default:
			used[cdi.AnyPartition] = true
		}
	}
	return used
}
