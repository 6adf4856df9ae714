// SPDX-License-Identifier: Apache-2.0

// Package simnode makes pkg/nvml use a simulated machine instead of the NVIDIA driver.
package simnode

import (
	"fmt"
	"io"
	"path/filepath"
	"strings"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/simulated"
)

// Library selects a simulated machine: it is followed by the name of a machine profile or the path of its file.
const Library = "simulated:"

// defaultDriverRoot is the host path where the Helm chart creates the machine.
const defaultDriverRoot = "/run/nvidia/simulated/driver"

// Options returns options for the machine that options.Library selects, and other options unchanged. The machine's files, which
// simulated.Materialize creates, are beside its driver root. The seed gives each node of a profile its own UUIDs. The profile is
// loaded when the library is opened; a profile that cannot be loaded is an error of Node.Scan.
func Options(options nvml.Options, seed string) nvml.Options {
	profile, isSimulated := strings.CutPrefix(options.Library, Library)
	if !isSimulated {
		return options
	}
	options.Library = nvml.Auto
	if options.DriverRoot == "" || options.DriverRoot == nvml.Auto {
		options.DriverRoot = defaultDriverRoot
	}
	if options.DevRoot == "" || options.DevRoot == nvml.Auto {
		options.DevRoot = options.DriverRoot
	}
	machine := filepath.Join("/", options.HostRoot, filepath.Dir(options.DriverRoot))
	options.ProcRoot = filepath.Join(machine, simulated.ProcDir)
	options.OpenKernelLog = func() (io.ReadCloser, error) {
		return openKernelLog(filepath.Join(machine, simulated.KernelLogFile))
	}
	options.OpenLibrary = func() (gonvml.Interface, error) {
		p, err := simulated.Load(profile)
		if err != nil {
			return nil, fmt.Errorf("load simulated machine: %w", err)
		}
		privileges := simulated.AllPrivileges
		if p.ChecksPrivileges {
			if privileges, err = simulated.ProcessPrivileges("/proc/self/status", "/dev"); err != nil {
				return nil, fmt.Errorf("open simulated NVML: %w", err)
			}
		}
		report := func(err error) { klog.Background().Error(err, "Using the files of the simulated machine") }
		return simulated.New(p, simulated.WithSeed(seed), simulated.WithDir(machine), simulated.WithReport(report),
			simulated.WithDev(filepath.Join("/", options.HostRoot, "dev")), simulated.WithPrivileges(privileges)), nil
	}
	return options
}
