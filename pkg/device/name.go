// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"strings"
)

// partitionInfix separates the GPU's name from the rest of a partition's name.
const partitionInfix = "-mig-"

// GPUName returns the published name of a device's GPU.
func GPUName(name string) string {
	gpu, _, _ := strings.Cut(name, partitionInfix)
	return gpu
}

// OwnPool returns the GPU pool of a dynamic GPU: "<node>/gpu-<minor>". The scheduler tries pools in the order of their names. All
// other devices of a node are in the node pool, which is named like the node.
func OwnPool(node string, g GPU) string { return fmt.Sprintf("%s/gpu-%02d", node, g.Minor) }

// NodeOfPool returns the node of a node pool or GPU pool.
func NodeOfPool(pool string) string {
	node, _, _ := strings.Cut(pool, "/")
	return node
}

// HardwareUUID returns the UUID in a device ID of NVIDIA's device plugin: "<uuid>::<n>" is a replica, and "MIG-<uuid of the
// GPU>/<gi>/<ci>" is a partition's name in older drivers, for which it returns the GPU. It returns any other ID unchanged
// (k8s-device-plugin, internal/rm/devices.go, AnnotatedID).
func HardwareUUID(id string) string {
	uuid, _, _ := strings.Cut(id, "::")
	if old, found := strings.CutPrefix(uuid, "MIG-GPU-"); found {
		uuid, _, _ = strings.Cut("GPU-"+old, "/")
	}
	return uuid
}
