// SPDX-License-Identifier: Apache-2.0

// Package lives has a process make and destroy partitions on a simulated machine, through the same door as the node agent, while
// calls of the driver fail and the process is killed at any moment (-cycles 1000 for a long run). What it must show: each
// partition ends made or not made, nothing is left behind, and no unmanaged partition is touched. Beside it, the same
// door, the driver's programs and the supervisor of an MPS daemon serve what containers share.
package restarts
