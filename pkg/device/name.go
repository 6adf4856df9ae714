// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"strings"
)

// partitionInfix stands between the name of a GPU and the rest of the name of its partition.
const partitionInfix = "-mig-"

// GPUName is the published name of the GPU in that of one of its devices: of a partition its parent's, of a GPU its own.
func GPUName(name string) string {
	gpu, _, _ := strings.Cut(name, partitionInfix)
	return gpu
}

// OwnPool is the name of the pool of a GPU that is partitioned on demand: "<node>/gpu-<minor>". The scheduler tries pools in the
// order of their names. All other devices of a node are in the pool that is named as the node.
func OwnPool(node string, g GPU) string { return fmt.Sprintf("%s/gpu-%02d", node, g.Minor) }

// NodeOfPool is the node that a pool is of: its own, or that of one of its GPUs (OwnPool).
func NodeOfPool(pool string) string {
	node, _, _ := strings.Cut(pool, "/")
	return node
}

// HardwareUUID undoes what NVIDIA's device plugin does to UUIDs: "<uuid>::<n>" is a replica, and "MIG-<uuid of the
// GPU>/<gi>/<ci>" the name that older drivers gave a partition, which stands for its GPU. Another ID is its own
// (k8s-device-plugin, internal/rm/devices.go, AnnotatedID).
func HardwareUUID(id string) string {
	uuid, _, _ := strings.Cut(id, "::")
	if old, found := strings.CutPrefix(uuid, "MIG-GPU-"); found {
		uuid, _, _ = strings.Cut("GPU-"+old, "/")
	}
	return uuid
}
