// SPDX-License-Identifier: Apache-2.0

// Package cdi owns the one CDI spec file in which this agent describes all GPUs of its node, and the hook binary that the
// file names. It keeps both on disk, exactly as they should be, whoever wipes or damages them.
//
// It knows nothing of NVIDIA's libraries: what the file says comes from a Source. It resolves and injects nothing (the
// container runtime does), and never touches a file that is not its own.
package cdi
