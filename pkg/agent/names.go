// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/runtimes"
)

// deviceNames is implemented by cdi.Specs.
type deviceNames interface{ UseSecretNames(secret bool) }

// chooseNames selects secret names of CDI devices where the configuration, or a flaw of the container runtime, requires them. version is empty
// while it is not known.
func (a *Agent) chooseNames(names deviceNames, version string) {
	if a.config.CDIDeviceNames != config.CDINamesAuto {
		names.UseSecretNames(a.config.CDIDeviceNames == config.CDINamesSecret)
	} else if version != "" {
		names.UseSecretNames(runtimes.TakesDevices(version))
	}
}
