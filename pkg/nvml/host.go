// SPDX-License-Identifier: Apache-2.0

// The host's file system: where the driver's files, its devices and the kernel's are.

package nvml

import (
	"cmp"
	"path/filepath"
)

// Host is where the agent finds the host's files. Its methods look at files only; they call no function of the driver.
type Host struct {
	// HostRoot is the mount of the host's root directory; "/" when empty.
	HostRoot string
	// DriverRoot is Auto (or empty), or the host path of the driver's root directory.
	DriverRoot string
	// DevRoot is Auto (or empty), or the host path of the directory whose dev/ has the device nodes.
	DevRoot string
	// Library is Auto (or empty) for the driver's own libnvidia-ml.so.1, or the path of another one.
	Library string
	// SysfsRoot is the mount of sysfs; "/sys" when empty.
	SysfsRoot string
	// ProcRoot is the mount of proc; "/proc" when empty.
	ProcRoot string
}

func (h Host) withDefaults() Host {
	h.HostRoot = cmp.Or(h.HostRoot, "/")
	h.DriverRoot = cmp.Or(h.DriverRoot, Auto)
	h.DevRoot = cmp.Or(h.DevRoot, Auto)
	h.Library = cmp.Or(h.Library, Auto)
	h.SysfsRoot = cmp.Or(h.SysfsRoot, "/sys")
	h.ProcRoot = cmp.Or(h.ProcRoot, "/proc")
	return h
}

// onHost returns the agent's path of a host path.
func (h Host) onHost(path string) string { return filepath.Join(h.HostRoot, path) }
