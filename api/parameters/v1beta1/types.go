// SPDX-License-Identifier: Apache-2.0

// Package v1beta1 is what the author of a claim, of a template or of a DeviceClass says about how devices are to be used: the
// opaque parameters of group resource.nvidia.com/v1beta1. Group, kinds, fields and defaults are those of NVIDIA's DRA driver
// (dra-driver-nvidia-gpu, api/nvidia.com/resource/v1beta1), so that what was written for it means the same here.
//
// The types are the outcome of Decode, defaulted and valid; the bytes they come from are read nowhere else.
package v1beta1

import "k8s.io/apimachinery/pkg/api/resource"

// APIVersion of all kinds.
const APIVersion = "resource.nvidia.com/v1beta1"

// Kind says which devices parameters are for.
type Kind string

// The kinds that claims may carry.
const (
	// GPU is for whole GPUs.
	GPU Kind = "GpuConfig"
	// MIGDevice is for partitions.
	MIGDevice Kind = "MigDeviceConfig"
	// VFIODevice is for GPUs that are passed through to virtual machines.
	VFIODevice Kind = "VfioDeviceConfig"
)

// Parameters are those of one entry of a claim's configuration.
type Parameters struct {
	Kind Kind
	// Sharing is nil where nothing is asked for: the device is its claim's alone.
	Sharing *Sharing
}

// Sharing says how the containers that have the device share it.
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
	// TimeSlicing lets the GPU switch between processes by time. Of a partition it changes nothing.
	TimeSlicing Strategy = "TimeSlicing"
	// MPSStrategy lets processes compute at the same time, as clients of CUDA's Multi-Process Service.
	MPSStrategy Strategy = "MPS"
)

// Interval is how long a process has the GPU before the next one, in the driver's words (nvidia-smi compute-policy
// --set-timeslice).
type Interval string

// Intervals, by what the driver's tool takes for them.
const (
	IntervalDefault Interval = "Default" // 0
	IntervalShort   Interval = "Short"   // 1
	IntervalMedium  Interval = "Medium"  // 2
	IntervalLong    Interval = "Long"    // 3
)

// MPS are the settings of the daemon whose clients the containers are. What is nil is left to the daemon.
type MPS struct {
	// ActiveThreadPercentage is how much of the multiprocessors a client gets, 0 to 100 (set_default_active_thread_percentage).
	ActiveThreadPercentage *int
	// PinnedMemoryLimit is how much of each device's memory a client gets, 1 MiB or more; parts of a MiB do not count
	// (set_default_device_pinned_mem_limit).
	PinnedMemoryLimit *resource.Quantity
	// PerDevicePinnedMemoryLimit is the same for single devices, by UUID, or by the index in the sorted UUIDs of the claim's
	// devices. It overrides PinnedMemoryLimit.
	PerDevicePinnedMemoryLimit map[string]resource.Quantity
	// MultiUser lets clients of other users in. It needs compute capability 7.0.
	MultiUser bool
}
