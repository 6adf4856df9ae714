// SPDX-License-Identifier: Apache-2.0

// Package nvml is the one door to the NVIDIA driver: it finds the driver on the node, tells which GPUs there are and how
// they are, and what a container needs to use one. Nothing above it imports an NVIDIA module. Options.OpenLibrary replaces the
// library, as tests and simulated machines do.
//
// It places no work, holds no devices and writes no files.
//
// # Sessions
//
// An open NVML session keeps /dev/nvidia* open, and while they are open the kernel module cannot be unloaded: an agent
// that never lets go would block every driver upgrade on its node. So a session lasts as long as one scan. The exception
// is a node where a GPU has persistence mode off: there, closing the last session makes the driver de-initialise the GPU,
// and opening one takes seconds, so the session is held until the driver changes.
//
// # Driver upgrades
//
// A process binds the functions of libnvidia-ml.so once: go-nvml calls them as ordinary C symbols, and the dynamic linker
// neither unloads the library nor binds them again (seen with go-nvml v0.13.4-0 and glibc: a second library, opened by
// another path, still runs the first one's code). A replaced library therefore needs a new process. Node.Run then returns
// ErrDriverReplaced, and main executes itself again. Until then the old inventory is served.
//
// A library may lack functions that this package would like to call. Calling one that is missing ends the process
// ("symbol lookup error"), so every call goes through a guard that looks the symbol up first.
package nvml
