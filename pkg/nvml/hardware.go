// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"os"
	"path/filepath"
	"strings"
)

// PCI identifiers (PCI-SIG vendor list; PCI Code and ID Assignment, base class 03h).
const (
	vendorNVIDIA       = "0x10de"
	classDisplayPrefix = "0x03"
)

// hasHardware reports whether sysfs shows an NVIDIA GPU, with or without a driver. It returns true if sysfs cannot be read.
func (o Options) hasHardware() bool {
	devices := filepath.Join(o.SysfsRoot, "bus/pci/devices")
	entries, err := os.ReadDir(devices)
	if err != nil {
		return !os.IsNotExist(err)
	}
	for _, entry := range entries {
		read := func(file string) string {
			text, err := os.ReadFile(filepath.Join(devices, entry.Name(), file))
			if err != nil {
				return ""
			}
			return strings.TrimSpace(string(text))
		}
		if read("vendor") == vendorNVIDIA && strings.HasPrefix(read("class"), classDisplayPrefix) {
			return true
		}
	}
	return false
}
