// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// Bounds of the lists and sentences. The CustomResourceDefinition has the same ones, and the API server refuses more: a stolen token of an
// agent writes the status, and tenants cause many of its entries. The agent and the controller leave out what exceeds them. They
// are at least twice what a large node has: 16 GPUs with 7 partitions each are 128 devices. A holder has at least one pod and a node 110 to
// 250 of them, so that the shares of a GPU have no more holders. Only GPUs are under maintenance, no partitions; a rule may taint each
// partition. A claim has at most 32 devices and 256 pods (k8s.io/api/resource/v1, AllocationResultsMaxSize and
// ResourceClaimReservedForMaxSize). etcd refuses an object of 1.5 MB. TestSizeOfTaints has the sizes of the two lists of taints.
const (
	MaxClaims      = 1024
	MaxDevices     = 512
	MaxHolders     = 512 // of a device
	MaxConflicts   = 512
	MaxDaemons     = 256
	MaxMaintenance = 64
	MaxTaints      = 256 // of DeviceTaintRules
	MaxPods        = 256 // of a claim
	// MaxDeviceTaints are those of one device, and MaxAllTaints those of all devices. Each device may have one.
	MaxDeviceTaints = 8
	MaxAllTaints    = MaxDevices

	// In bytes, while the API server counts characters.
	MaxReason  = 1024
	MaxMessage = 4096
	MaxLine    = 32768 // the holders of all devices
	// MaxMaintenanceReason is what an administrator may write.
	MaxMaintenanceReason = 256
)
