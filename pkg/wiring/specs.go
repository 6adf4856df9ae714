// SPDX-License-Identifier: Apache-2.0

package wiring

import (
	"path/filepath"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// HookPath returns where the agent installs NVIDIA's CDI hook. It is the same for the agent and the host: the chart mounts kubelet's directory where
// it is.
func HookPath(c config.Config) string { return filepath.Join(pluginDir(c), "nvidia-cdi-hook") }

// pluginDir is the driver's own directory below kubelet's.
func pluginDir(c config.Config) string { return filepath.Join(c.KubeletDir, "plugins", c.DriverName) }

func (p *Parts) newSpecs() *cdi.Specs {
	options := cdi.Options{
		Dir: p.Config.CDIDir, Source: p.Hardware, NamesFile: filepath.Join(pluginDir(p.Config), "cdi-names.json"), InUse: p.devicesInUse,
	}
	if p.Config.CDIHook == "install" {
		options.Hook = cdi.NewHook(p.Config.CDIHookSource, HookPath(p.Config))
	}
	return cdi.New(options)
}

// devicesInUse is cdi.Options.InUse. It returns nil while not all holders are known.
func (p *Parts) devicesInUse() map[string]bool {
	if !p.adopted.Load() || p.Ledger.Withheld() != nil {
		return nil
	}
	claims, err := podstate.ReadClaimState(p.Config.KubeletDir, p.Config.DriverName)
	if err != nil {
		return nil
	}
	return inUse(claims, p.Ledger.Holds(), p.Views.Configured.Inventory())
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
