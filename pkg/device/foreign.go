// SPDX-License-Identifier: Apache-2.0

package device

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
)

var (
	// uuidForm is what NVML calls a GPU or a partition.
	uuidForm = regexp.MustCompile(`^(GPU|MIG)-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)
	// minorForm is what GKE's plugin calls a GPU, a GPU instance, and a share of either
	// (GoogleCloudPlatform/container-engine-accelerators, pkg/gpu/nvidia: manager.go, mig/mig.go, gpusharing/gpusharing.go).
	minorForm = regexp.MustCompile(`^nvidia([0-9]{1,3})(?:/gi([0-9]{1,3}))?(?:/vgpu[0-9]+)?$`)
)

// HasUUID reports whether a device ID contains nothing but the UUID of a GPU or partition, and perhaps the number of a replica, as
// those of NVIDIA's plugin and of Tandem do. The hardware need not exist.
func HasUUID(id string) bool { return uuidForm.MatchString(HardwareUUID(id)) }

// ByDeviceID returns what a container has that kubelet's device manager gave a device ID: of Tandem, of NVIDIA's plugin, or of GKE's. A
// GPU instance that cannot be found is the whole GPU, a share as well. missing means that the ID names one device by its UUID, and
// the inventory lacks it; ref has its GPU if the ID names that. unknown means that the ID does not tell which device it is. That
// includes an ID of HAMi or gpushare, which begins with the UUID of a GPU: their plugins choose the GPU by an annotation of the
// pod, whatever ID kubelet chose (HAMi, nvinternal/plugin/server.go, Allocate; gpushare-device-plugin, pkg/gpu/nvidia/allocate.go).
func (inv Inventory) ByDeviceID(id string) (ref Ref, missing, unknown bool) {
	uuid := HardwareUUID(id)
	devices := inv.Devices()
	if i := slices.IndexFunc(devices, func(d Device) bool { return uuid != "" && d.UUID() == uuid }); i >= 0 {
		return devices[i].Ref(), false, false
	}
	if uuidForm.MatchString(uuid) {
		if strings.HasPrefix(uuid, "GPU-") {
			ref.GPU = uuid
		}
		return ref, true, false
	}
	parts := minorForm.FindStringSubmatch(id)
	if parts == nil {
		return Ref{}, false, true
	}
	gpus := slices.DeleteFunc(slices.Clone(inv.GPUs), func(g GPU) bool { return strconv.Itoa(g.Minor) != parts[1] })
	if len(gpus) != 1 {
		return Ref{}, false, true
	}
	instance := slices.DeleteFunc(slices.Clone(gpus[0].Partitions), func(p Partition) bool {
		return strconv.Itoa(p.GPUInstance) != parts[2]
	})
	if len(instance) == 1 && instance[0].Ref.Compute.Size == 0 {
		return instance[0].Ref, false, false
	}
	return gpus[0].Ref(), false, false
}

// Claimed reports whether a device ID of another plugin stands for hardware of the inventory, as far as its form tells: ByDeviceID knows
// it, or it begins with the UUID of a GPU or partition.
func (inv Inventory) Claimed(id string) bool {
	if _, missing, unknown := inv.ByDeviceID(id); !missing && !unknown {
		return true
	}
	return slices.ContainsFunc(inv.Devices(), func(d Device) bool { return d.UUID() != "" && strings.HasPrefix(id, d.UUID()) })
}
