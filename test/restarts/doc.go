// SPDX-License-Identifier: Apache-2.0

// Package restarts creates and destroys partitions on a simulated machine in a process of its own, by the agent's packages, while
// calls of the driver fail and the process is killed at any moment (-cycles 1000 for a long run). It checks that each
// partition is complete or gone in the end, and that no unmanaged partition changes. Beside it, the same
// packages, the driver's programs and the supervisor of an MPS daemon serve shared devices.
package restarts
