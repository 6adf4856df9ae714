// SPDX-License-Identifier: Apache-2.0

// Package v1beta1 decodes the opaque parameters of claims, templates and DeviceClasses, group resource.nvidia.com/v1beta1. Group,
// kinds, fields and defaults are those of NVIDIA's DRA driver (dra-driver-nvidia-gpu, api/nvidia.com/resource/v1beta1), so that
// existing parameters have the same effect. The types are the results of Decode: valid, with defaults set.
package v1beta1

import "k8s.io/apimachinery/pkg/api/resource"

// APIVersion of all kinds.
const APIVersion = "resource.nvidia.com/v1beta1"

// Kind selects the devices that parameters apply to.
type Kind string

// The kinds that claims may carry.
const (
	// GPU is for whole GPUs.
	GPU Kind = "GpuConfig"
	// MIGDevice is for partitions.
	MIGDevice Kind = "MigDeviceConfig"
	// VFIODevice is for GPUs that are passed through to virtual machines, which no node does (Admit).
	VFIODevice Kind = "VfioDeviceConfig"
)

// Parameters are those of one entry of a claim's configuration.
type Parameters struct {
	Kind Kind
	// Sharing is nil if the claim requests no sharing.
	Sharing *Sharing
}

// Sharing is how the containers of the claim share the device.
type Sharing struct {
	Strategy Strategy
	// Interval is set with TimeSlicing of a whole GPU, and empty otherwise.
	Interval Interval
	// MPS is set with the strategy of this name, and nil otherwise.
	MPS *MPS
}

// Strategy of sharing.
type Strategy string

// Strategies.
const (
	// TimeSlicing lets processes take turns. It has no effect on a partition.
	TimeSlicing Strategy = "TimeSlicing"
	// MPSStrategy lets processes run at the same time, as clients of CUDA's Multi-Process Service.
	MPSStrategy Strategy = "MPS"
)

// Interval is how long a process runs before the next one (nvidia-smi compute-policy --set-timeslice).
type Interval string

// Intervals, with the values of --set-timeslice.
const (
	IntervalDefault Interval = "Default" // 0
	IntervalShort   Interval = "Short"   // 1
	IntervalMedium  Interval = "Medium"  // 2
	IntervalLong    Interval = "Long"    // 3
)

// MPS are the settings of the claim's daemon. The daemon has a default for each that is nil.
type MPS struct {
	// ActiveThreadPercentage limits the multiprocessors of a client, 0 to 100 (set_default_active_thread_percentage).
	ActiveThreadPercentage *int
	// PinnedMemoryLimit limits a client's memory on each device, in whole MiB (set_default_device_pinned_mem_limit).
	PinnedMemoryLimit *resource.Quantity
	// PerDevicePinnedMemoryLimit is the same for single devices, by UUID, or by the index in the sorted UUIDs of the claim's
	// devices. It overrides PinnedMemoryLimit.
	PerDevicePinnedMemoryLimit map[string]resource.Quantity
	// MultiUser accepts clients of other users. It requires compute capability 7.0.
	MultiUser bool
}
