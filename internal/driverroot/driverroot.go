// SPDX-License-Identifier: Apache-2.0

// Package driverroot finds libraries and programs of a driver below its root directory, and translates paths between root
// directories.
package driverroot

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"
)

// Resolve follows symbolic links of path the way a process sees them whose root directory is root: an absolute link on
// the host must not be followed into the agent's own file system. Path is relative to root; so is the result, which exists.
func Resolve(root, path string) (string, error) {
	root = filepath.Clean(root)
	resolved, err := securejoin.SecureJoin(root, path)
	if err != nil {
		return "", fmt.Errorf("resolve %s below %s: %w", path, root, err)
	}
	if _, err := os.Lstat(resolved); err != nil {
		return "", err
	}
	return filepath.Join("/", strings.TrimPrefix(resolved, root)), nil
}

// Find finds a program of the driver, relative to the driver root.
func Find(root, program string) (string, error) {
	for _, dir := range ProgramDirs {
		if path, err := Resolve(root, filepath.Join(dir, program)); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("find %s: it is in none of %s below %s", program, strings.Join(ProgramDirs, ", "), root)
}

// Known are the host paths below which a driver may be installed, the more particular first. The agent searches them, and the
// chart lets MPS daemons run programs from them only.
//
//   - GPU Operator: the driver container's root directory.
//   - GKE: cos-gpu-installer's target on Container-Optimized OS, and where its Ubuntu images have it preloaded
//     (NVIDIA/k8s-device-plugin#1371).
//   - Bottlerocket: the directory that its /usr leads to (bottlerocket-core-kit#919).
//   - the host's own root: packages, .run files, and Talos, whose system extensions install below /usr/local.
var Known = []string{
	"/run/nvidia/driver",
	"/home/kubernetes/bin/nvidia",
	"/opt/nvidia",
	"/x86_64-bottlerocket-linux-gnu/sys-root",
	"/aarch64-bottlerocket-linux-gnu/sys-root",
	"/",
}

// LibraryDirs are where a driver root may have its libraries.
//
//   - usr/lib/nvidia/tesla: Bottlerocket before its kernel kit moved them to usr/lib (bottlerocket-kernel-kit#425, #473).
//   - usr/local/glibc/usr/lib: Talos up to 1.12 (siderolabs/extensions#940); usr/local/lib is where older ones have them.
var LibraryDirs = []string{
	"usr/lib64",
	"usr/lib/x86_64-linux-gnu",
	"usr/lib/aarch64-linux-gnu",
	"usr/lib/x86_64-linux-gnu/nvidia/current",
	"usr/lib/aarch64-linux-gnu/nvidia/current",
	"lib64",
	"lib/x86_64-linux-gnu",
	"lib/aarch64-linux-gnu",
	"usr/lib",
	"usr/lib64/nvidia",
	"usr/lib/nvidia",
	"usr/lib/nvidia/tesla",
	"usr/local/glibc/usr/lib",
	"usr/local/glibc/lib64",
	"usr/local/glibc/lib",
	"usr/local/lib",
	"lib",
}

// ProgramDirs are where a driver root may have the driver's programs.
//
//   - bin: GKE's cos-gpu-installer.
//   - usr/local/bin: Talos, whose system extensions install below /usr/local.
//   - usr/bin/nvidia/tesla, usr/libexec/nvidia/tesla/bin: Bottlerocket's kernel kits.
//   - opt/bin, usr/local/nvidia/bin: driver containers of Flatcar and older GKE.
var ProgramDirs = []string{
	"usr/bin",
	"bin",
	"usr/local/bin",
	"usr/libexec/nvidia/tesla/bin",
	"usr/bin/nvidia/tesla",
	"opt/bin",
	"usr/local/nvidia/bin",
}
