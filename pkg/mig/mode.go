// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Switchable reports whether the GPU's MIG mode can be switched without a reset of the GPU: from Hopper on, compute capability
// 9.0 (MIG user guide, "Enable MIG Mode"). Ampere has to be reset, which ends all its users.
func Switchable(g device.GPU) bool {
	major, _, _ := strings.Cut(g.ComputeCapability, ".")
	n, err := strconv.Atoi(major)
	return err == nil && g.MIGCapable && n >= 9
}
