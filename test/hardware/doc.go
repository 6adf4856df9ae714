// SPDX-License-Identifier: Apache-2.0

// Package hardware tests Tandem on the GPUs of this machine, without Kubernetes and in a cluster (docs/dev/hardware.md). It changes no
// setting of a GPU unless TANDEM_HARDWARE_CHANGES=1. Without a driver it says where it looked for one and skips.
package hardware
