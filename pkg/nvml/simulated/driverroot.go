// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	_ "embed"
	"fmt"
	"path"
	"strings"
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

var binaries = []string{"nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-debugdump", "nvidia-persistenced"}

var firmware = []string{"gsp_ga10x.bin", "gsp_tu10x.bin"}

// smiText is nvidia-smi with names for what depends on the machine. It is no text/template: a program with that package
// calls methods by name, so the linker has to keep every method of every type, which doubles the agent's size in memory.
//
//go:embed nvidia-smi.sh.tmpl
var smiText string

func smi(p Profile) string {
	var gpus strings.Builder
	for _, gpu := range p.GPUs {
		fmt.Fprintf(&gpus, "gpu %d %s '%s'\n", *gpu.Minor, gpu.UUID, p.Models[gpu.Model].ProductName)
	}
	return strings.NewReplacer("@VERSION@", p.Driver.Version, "@CUDA@", p.Driver.CUDA, "@GPUS@\n", gpus.String()).Replace(smiText)
}

// driverFiles is the driver root without its device nodes.
func driverFiles(p Profile, architecture string) ([]file, error) {
	libDir, ok := map[string]string{"amd64": "usr/lib/x86_64-linux-gnu", "arm64": "usr/lib/aarch64-linux-gnu"}[architecture]
	if !ok {
		return nil, fmt.Errorf("there is no driver for architecture %q", architecture)
	}
	var all []file
	for _, l := range libraries {
		all = append(all, libraryFiles(l, path.Join(DriverDir, libDir), p.Driver.Version, architecture)...)
	}
	for _, name := range binaries {
		script := fmt.Sprintf("#!/bin/sh\necho '%s: this driver is simulated' >&2\nexit 1\n", name)
		all = append(all, file{path: path.Join(DriverDir, "usr/bin", name), content: []byte(script), mode: 0o755})
	}
	for _, name := range firmware {
		image := fmt.Sprintf("simulated %s %s\n", name, p.Driver.Version)
		all = append(all, file{path: path.Join(DriverDir, "lib/firmware/nvidia", p.Driver.Version, name), content: []byte(image), mode: 0o644})
	}
	all = append(all, file{path: path.Join(DriverDir, "etc/OpenCL/vendors/nvidia.icd"), content: []byte("libnvidia-opencl.so.1\n"), mode: 0o644})
	return append(all, file{path: path.Join(DriverDir, "usr/bin/nvidia-smi"), content: []byte(smi(p)), mode: 0o755}), nil
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
