// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"fmt"
	"os"
	"path"
	"slices"

	"github.com/tandem-gpu/tandem/simulated/programs"
)

// library is a library of the driver: <name>.<version>, found under the names soname and, with bare, <name>.
type library struct {
	name, soname string
	bare         bool
	exports      []export
}

// libraries are those that a compute installation of a 580 driver has and that nvcdi looks for. libnvidia-sandboxutils is
// not among them: nvcdi calls into it.
var libraries = []library{
	{name: "libcuda.so", soname: "libcuda.so.1", bare: true, exports: []export{{name: "cuInit", code: 100}}}, // CUDA_ERROR_NO_DEVICE
	{name: "libnvidia-ml.so", soname: "libnvidia-ml.so.1", bare: true, exports: []export{
		{name: "nvmlInit_v2", code: 9}, {name: "nvmlInit", code: 9}, {name: "nvmlInitWithFlags", code: 9}, // NVML_ERROR_DRIVER_NOT_LOADED
		{name: "nvmlShutdown", code: 1}, {name: "nvmlSystemGetDriverVersion", code: 1}, {name: "nvmlDeviceGetCount_v2", code: 1}, // NVML_ERROR_UNINITIALIZED
		{name: "nvmlDeviceGetHandleByIndex_v2", code: 1}, {name: "nvmlDeviceGetUUID", code: 1},
		{name: "nvmlErrorString", text: "Driver Not Loaded"},
	}},
	{name: "libcudadebugger.so", soname: "libcudadebugger.so.1"},
	{name: "libnvcuvid.so", soname: "libnvcuvid.so.1", bare: true},
	{name: "libnvidia-allocator.so", soname: "libnvidia-allocator.so.1", bare: true},
	{name: "libnvidia-cfg.so", soname: "libnvidia-cfg.so.1", bare: true},
	{name: "libnvidia-encode.so", soname: "libnvidia-encode.so.1", bare: true},
	{name: "libnvidia-gpucomp.so"},
	{name: "libnvidia-nvvm.so", soname: "libnvidia-nvvm.so.4", bare: true},
	{name: "libnvidia-nvvm70.so", soname: "libnvidia-nvvm70.so.4"},
	{name: "libnvidia-opencl.so", soname: "libnvidia-opencl.so.1"},
	{name: "libnvidia-opticalflow.so", soname: "libnvidia-opticalflow.so.1", bare: true},
	{name: "libnvidia-pkcs11-openssl3.so"},
	{name: "libnvidia-ptxjitcompiler.so", soname: "libnvidia-ptxjitcompiler.so.1", bare: true},
	{name: "vdpau/libvdpau_nvidia.so", soname: "libvdpau_nvidia.so.1"},
}

var binaries = []string{programs.SMI, programs.MPSControl, programs.MPSServer, "nvidia-debugdump", "nvidia-persistenced"}

// played are the binaries that do something where MaterializeOptions.Programs says what.
var played = []string{programs.SMI, programs.MPSControl, programs.MPSServer}

var firmware = []string{"gsp_ga10x.bin", "gsp_tu10x.bin"}

// binaryFiles are the driver's programs: the one that plays them, knowing the machine, or scripts that say what they are.
func binaryFiles(p Profile, program string) ([]file, error) {
	var player []byte
	if program != "" {
		var err error
		if player, err = os.ReadFile(program); err != nil {
			return nil, fmt.Errorf("read the programs of the driver: %w", err)
		}
		machine := programs.Machine{DriverVersion: p.Driver.Version, CUDA: p.Driver.CUDA}
		for _, gpu := range p.GPUs {
			machine.GPUs = append(machine.GPUs, programs.GPU{
				Minor: *gpu.Minor, UUID: gpu.UUID, Name: p.Models[gpu.Model].ProductName,
			})
		}
		if player, err = programs.For(player, machine); err != nil {
			return nil, err
		}
	}
	var all []file
	for _, name := range binaries {
		content := []byte(fmt.Sprintf("#!/bin/sh\necho '%s: this driver is simulated' >&2\nexit 1\n", name))
		if player != nil && slices.Contains(played, name) {
			content = player
		}
		all = append(all, file{path: path.Join(DriverDir, programs.Dir, name), content: content, mode: 0o755})
	}
	return all, nil
}

// driverFiles is the driver root without its device nodes.
func driverFiles(p Profile, architecture, program string) ([]file, error) {
	libDir, ok := map[string]string{"amd64": "usr/lib/x86_64-linux-gnu", "arm64": "usr/lib/aarch64-linux-gnu"}[architecture]
	if !ok {
		return nil, fmt.Errorf("there is no driver for architecture %q", architecture)
	}
	all, err := binaryFiles(p, program)
	if err != nil {
		return nil, err
	}
	for _, l := range libraries {
		all = append(all, libraryFiles(l, path.Join(DriverDir, libDir), p.Driver.Version, architecture)...)
	}
	for _, name := range firmware {
		image := fmt.Sprintf("simulated %s %s\n", name, p.Driver.Version)
		all = append(all, file{path: path.Join(DriverDir, "lib/firmware/nvidia", p.Driver.Version, name), content: []byte(image), mode: 0o644})
	}
	icd := []byte("libnvidia-opencl.so.1\n")
	return append(all, file{path: path.Join(DriverDir, "etc/OpenCL/vendors/nvidia.icd"), content: icd, mode: 0o644}), nil
}

func libraryFiles(l library, dir, version, architecture string) []file {
	versioned := l.name + "." + version
	soname := orElse(l.soname, path.Base(versioned))
	all := []file{{path: path.Join(dir, versioned), content: sharedObject(architecture, soname, l.exports), mode: 0o644}}
	if l.soname != "" {
		all = append(all, file{path: path.Join(dir, path.Dir(l.name), l.soname), target: path.Base(versioned)})
	}
	if l.bare {
		all = append(all, file{path: path.Join(dir, l.name), target: l.soname})
	}
	return all
}
