// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/recording"
	"github.com/tandem-gpu/tandem/simulated/simnode"
)

// StandIn makes a driver without a GPU in a directory: the files and nodes of a simulated machine with libraries in C for NVML and CUDA.
// rec is what NVML answers; without one it is the profile's. It returns the environment variables with which agent and tests find it.
func StandIn(ctx context.Context, dir, profile, simulatedDriver string, rec *recording.Recording) (env []string, err error) {
	p, err := simulated.Load(profile)
	if rec != nil {
		p, _, err = rec.Profile("recorded")
	}
	if err != nil {
		return nil, err
	}
	p = p.WithIdentity("")
	if err := simulated.Materialize(dir, p, simulated.MaterializeOptions{Programs: simulatedDriver}); err != nil {
		return nil, err
	}
	root := filepath.Join(dir, simulated.DriverDir)
	if rec == nil {
		if rec, err = RecordMachine(ctx, dir); err != nil {
			return nil, err
		}
	}
	found, err := filepath.Glob(filepath.Join(root, "usr/lib/*/libcuda.so."+p.Driver.Version))
	if err != nil || len(found) != 1 {
		return nil, fmt.Errorf("find libcuda.so of the stand-in: %v: %w", found, err)
	}
	libraries := filepath.Dir(found[0])
	if _, err := (recording.Library{Version: p.Driver.Version}).Build(ctx, libraries, *rec); err != nil {
		return nil, err
	}
	if err := compile(ctx, "libcuda.c", found[0], "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-DDEVICES="+devicesOf(p)); err != nil {
		return nil, err
	}
	return []string{
		"DRIVER_ROOT=" + root, "DEV_ROOT=" + root, "SYSFS_ROOT=" + filepath.Join(dir, simulated.SysfsDir), "TANDEM_HARDWARE_STAND_IN=1",
		"TANDEM_HARDWARE_STAND_IN_DEV=" + filepath.Join(root, "dev"),
	}, nil
}

// MachineOptions are those with which package nvml finds the simulated machine in a directory.
func MachineOptions(dir string) nvml.Options {
	return simnode.Options(nvml.Options{Host: nvml.Host{
		Library:    simnode.Library + filepath.Join(dir, simulated.ProfileFile),
		DriverRoot: filepath.Join(dir, simulated.DriverDir), SysfsRoot: filepath.Join(dir, simulated.SysfsDir),
	}}, "")
}

// RecordMachine records what the driver of the simulated machine in a directory answers.
func RecordMachine(ctx context.Context, dir string) (*recording.Recording, error) {
	report := nvml.Inspect(ctx, MachineOptions(dir))
	data, err := json.Marshal(report)
	if err = errors.Join(err, report.Err()); err != nil {
		return nil, err
	}
	rec, err := recording.Read(bytes.NewReader(data))
	return &rec, err
}

// devicesOf writes the GPUs as an initialiser in C.
func devicesOf(p simulated.Profile) string {
	var all []string
	for _, g := range p.GPUs {
		digits := strings.ReplaceAll(strings.TrimPrefix(g.UUID, "GPU-"), "-", "")
		var octets []string
		for i := 0; i+1 < len(digits); i += 2 {
			octets = append(octets, "0x"+digits[i:i+2])
		}
		all = append(all, fmt.Sprintf("{%d,{%s}}", *g.Minor, strings.Join(octets, ",")))
	}
	return strings.Join(all, ",")
}

// ReadRecording reads the output of kubelet-plugin inspect -o json.
func ReadRecording(path string) (*recording.Recording, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	rec, err := recording.Read(file)
	return &rec, err
}
