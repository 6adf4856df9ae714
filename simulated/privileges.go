// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// Privileges are what the process that uses a library may do. A call that needs more answers ERROR_NO_PERMISSION.
type Privileges int

// Privileges, each with those before it.
const (
	// NoPrivileges is a process that may only look at GPUs and at MIG devices.
	NoPrivileges Privileges = iota
	// MonitorPrivileges is a process that may look at GPU instances and compute instances: it can open the device of the
	// capability mig/monitor.
	MonitorPrivileges
	// ConfigPrivileges is a process that may create and destroy instances: it can open the device of the capability mig/config.
	ConfigPrivileges
	// AllPrivileges is a process that may change settings and MIG mode too: one with CAP_SYS_ADMIN.
	AllPrivileges
)

// WithPrivileges limits what the library lets its process do. Without, it is everything.
func WithPrivileges(privileges Privileges) Option {
	return func(s *settings) { s.privileges = privileges }
}

// ProcessPrivileges are those of a process whose status file (proc(5)) is status and which sees the device nodes in dev.
func ProcessPrivileges(status, dev string) (Privileges, error) {
	data, err := os.ReadFile(status)
	if err != nil {
		return NoPrivileges, fmt.Errorf("read the capabilities of a process: %w", err)
	}
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		text, found := bytes.CutPrefix(lines.Bytes(), []byte("CapEff:"))
		if !found {
			continue
		}
		effective, err := strconv.ParseUint(string(bytes.TrimSpace(text)), 16, 64)
		if err != nil {
			return NoPrivileges, fmt.Errorf("read the capabilities of a process: %w", err)
		}
		if effective&(1<<unix.CAP_SYS_ADMIN) != 0 {
			return AllPrivileges, nil
		}
	}
	for _, c := range []struct {
		minor int
		gives Privileges
	}{{capConfig, ConfigPrivileges}, {capMonitor, MonitorPrivileges}} {
		if file, err := os.Open(filepath.Join(dev, fmt.Sprintf("nvidia-caps/nvidia-cap%d", c.minor))); err == nil {
			return c.gives, file.Close()
		}
	}
	return NoPrivileges, nil
}

// neededPrivileges are those of calls that "require privileged user" or "root/admin permissions" (nvml.h), by name as in a fault. That
// the monitor capability is enough to read instances is the MIG User Guide's ("Device Nodes and Capabilities").
var neededPrivileges = map[string]Privileges{
	"GetGpuInstanceById":                 MonitorPrivileges,
	"GetGpuInstancePossiblePlacements":   MonitorPrivileges,
	"GetGpuInstanceRemainingCapacity":    MonitorPrivileges,
	"GetGpuInstances":                    MonitorPrivileges,
	"GpuInstance.GetComputeInstanceById": MonitorPrivileges,
	"GpuInstance.GetComputeInstances":    MonitorPrivileges,

	"CreateGpuInstance":                 ConfigPrivileges,
	"CreateGpuInstanceWithPlacement":    ConfigPrivileges,
	"GpuInstance.CreateComputeInstance": ConfigPrivileges,
	"GpuInstance.Destroy":               ConfigPrivileges,
	"ComputeInstance.Destroy":           ConfigPrivileges,
	"SetMigMode":                        AllPrivileges,
	"SetComputeMode":                    AllPrivileges,
	"SetApplicationsClocks":             AllPrivileges,
}
