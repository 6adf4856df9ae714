// SPDX-License-Identifier: Apache-2.0

package driverroot

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
