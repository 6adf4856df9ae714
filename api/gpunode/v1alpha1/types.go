// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// GPUNode is what a node and the cluster tell each other about the node's GPUs, and the answer to "which pod has which
// GPU?". It is cluster-scoped, has the name of its Node and is owned by it. The node's agent creates it and writes the status,
// the controller writes the spec; an admission policy keeps each to its half.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=gn,categories=tandem
// +kubebuilder:printcolumn:name="Mode",type=string,JSONPath=`.status.mode`
// +kubebuilder:printcolumn:name="GPUs",type=integer,JSONPath=`.status.counts.total`
// +kubebuilder:printcolumn:name="Claims",type=integer,JSONPath=`.status.counts.claims`
// +kubebuilder:printcolumn:name="Pods",type=integer,JSONPath=`.status.counts.pods`
// +kubebuilder:printcolumn:name="Free",type=integer,JSONPath=`.status.counts.free`
// +kubebuilder:printcolumn:name="Unhealthy",type=integer,JSONPath=`.status.counts.unhealthy`
// +kubebuilder:printcolumn:name="Partitions",type=integer,priority=1,JSONPath=`.status.partitions.total`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Holders",type=string,priority=1,JSONPath=`.status.holders`
type GPUNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   GPUNodeSpec   `json:"spec,omitempty"`
	Status GPUNodeStatus `json:"status,omitempty"`
}

// GPUNodeList is a list of GPUNodes.
//
// +kubebuilder:object:root=true
type GPUNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []GPUNode `json:"items"`
}

// GPUNodeSpec is what the controller tells the node: ResourceClaims cannot be watched by node, and thousands of agents must not
// watch them all.
type GPUNodeSpec struct {
	// Claims that the scheduler has allocated GPUs of this node to, by UID. Their GPUs are withdrawn from limits before kubelet
	// asks to prepare them. They steer and never decide: that is the ledger's business, when kubelet asks.
	//
	// +optional
	// +listType=map
	// +listMapKey=uid
	Claims []AllocatedClaim `json:"claims,omitempty"`
	// Daemons of status.daemons whose pods do not run, and why.
	//
	// +optional
	// +listType=map
	// +listMapKey=name
	Daemons []WaitingDaemon `json:"daemons,omitempty"`
}

// WaitingDaemon is a daemon whose pod does not run.
type WaitingDaemon struct {
	Name string `json:"name"`
	// Message says in one line what its pod waits for.
	Message string `json:"message"`
}

// AllocatedClaim is a ResourceClaim with devices of this node.
type AllocatedClaim struct {
	UID       types.UID `json:"uid"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	// Devices by their names in the pool, sorted, without those for admin access, which hold nothing.
	//
	// +listType=set
	Devices []string `json:"devices"`
	// Pools from which the devices are, sorted: the node's, or those of its GPUs that are partitioned on demand. A pool of a GPU
	// has all devices of it that the claim has. Absent where the controller is of a version that does not say.
	//
	// +optional
	// +listType=set
	Pools []string `json:"pools,omitempty"`
	// Shares of those devices of which the claim has a part. It has the others whole.
	//
	// +optional
	// +listType=map
	// +listMapKey=device
	Shares []AllocatedShare `json:"shares,omitempty"`
}

// AllocatedShare is what the scheduler has given of a device that is shared.
type AllocatedShare struct {
	// Device by its name in the pool.
	Device string `json:"device"`
	// Memory in bytes (consumed capacity "memory").
	Memory int64 `json:"memory"`
}

// GPUNodeStatus is what the node's agent knows. It is written no more than once a second in the mean.
type GPUNodeStatus struct {
	// Mode in which the node serves its GPUs: Dual, ClaimsOnly, DevicePluginOnly or Split.
	//
	// +optional
	Mode string `json:"mode,omitempty"`
	// ObservedGeneration of the spec that the agent acts on.
	//
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Counts for those who want numbers. A GPU counts as the first that applies: faulty, claims, limits, free. It is free where
	// nobody has any of it.
	//
	// +optional
	Counts DeviceCounts `json:"counts,omitempty"`
	// Partitions counts the MIG partitions that exist in the same way; absent where there are none.
	//
	// +optional
	Partitions *DeviceCounts `json:"partitions,omitempty"`
	// Holders in one line, for kubectl get -o wide: "gpu-0=default/train(claim) gpu-7=default/infer(pod)".
	//
	// +optional
	Holders string `json:"holders,omitempty"`
	// ExtendedResource is the extended resource by which limits ask for GPUs, and for partitions in place of GPUs where the node is
	// partitioned alike (migStrategy single); empty where no limits are served, as while no agent runs. What a device is asked for
	// by is said there.
	//
	// +optional
	ExtendedResource string `json:"extendedResource,omitempty"`
	// Devices of the node, by name.
	//
	// +optional
	// +listType=map
	// +listMapKey=name
	Devices []DeviceStatus `json:"devices,omitempty"`
	// Conflicts are claims whose Prepare was refused because somebody else holds their device.
	//
	// +optional
	// +listType=map
	// +listMapKey=uid
	Conflicts []ConflictingClaim `json:"conflicts,omitempty"`
	// Daemons that are to run on the node. The controller runs a pod for each of them, and for no other it makes one.
	//
	// +optional
	// +listType=map
	// +listMapKey=name
	Daemons []MPSDaemon `json:"daemons,omitempty"`
	// UnknownDaemons may run, and the agent cannot read what their settings are. The pods that they have are left as they are.
	//
	// +optional
	// +listType=set
	UnknownDaemons []string `json:"unknownDaemons,omitempty"`
}

// MPSDaemon is an MPS control daemon. One with other settings is another daemon, in another pod.
type MPSDaemon struct {
	// Name on this node: that of the daemon's directory, and part of its pod's name.
	//
	// +kubebuilder:validation:MaxLength=52
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name"`
	// Devices by UUID, GPUs or partitions, in the order in which the daemon counts them.
	//
	// +kubebuilder:validation:MinItems=1
	// +listType=atomic
	Devices []string `json:"devices"`
	// ActiveThreadPercentage of the multiprocessors is what a client gets; absent where that is left to the daemon.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	ActiveThreadPercentage *int32 `json:"activeThreadPercentage,omitempty"`
	// PinnedMemoryMiB is what a client gets of the memory of each device, in MiB, in the order of devices; 0 is no limit. Absent
	// where there is no limit at all.
	//
	// +optional
	// +listType=atomic
	PinnedMemoryMiB []int64 `json:"pinnedMemoryMiB,omitempty"`
	// MultiUser lets clients of several users in at a time.
	//
	// +optional
	MultiUser bool `json:"multiUser,omitempty"`
	// DriverRoot is the directory on the host in which the driver is installed.
	DriverRoot string `json:"driverRoot"`
	// Generation tells this daemon from those of the same name before it, which have ended.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	Generation int64 `json:"generation,omitempty"`
}

// DeviceCounts are numbers of GPUs, or of partitions.
type DeviceCounts struct {
	Total     int32 `json:"total"`
	Claims    int32 `json:"claims"`
	Pods      int32 `json:"pods"`
	Free      int32 `json:"free"`
	Unhealthy int32 `json:"unhealthy"`
}

// DeviceStatus is one GPU, or a partition of one that exists.
type DeviceStatus struct {
	// Name in the pool, such as gpu-0 or gpu-0-mig-1g10gb-19-0.
	Name string `json:"name"`
	UUID string `json:"uuid"`
	// Parent is the name of the GPU that a partition is of; empty for a GPU.
	//
	// +optional
	Parent string `json:"parent,omitempty"`
	// Profile of a partition, such as 1g.10gb; empty for a GPU.
	//
	// +optional
	Profile string `json:"profile,omitempty"`
	// Model is the product name.
	//
	// +optional
	Model string `json:"model,omitempty"`
	// Fault says in one line why the device is not healthy; empty when it is.
	//
	// +optional
	UnhealthyReason string `json:"unhealthyReason,omitempty"`
	// Holders of the device: none where it is free. Who has partitions of a GPU is told there.
	//
	// +optional
	// +listType=atomic
	Holders []DeviceHolder `json:"holders,omitempty"`
	// ExtendedResource is the extended resource by which limits ask for the device; empty where none does.
	//
	// +optional
	ExtendedResource string `json:"extendedResource,omitempty"`
	// Limits says what kubelet's device manager thinks of the device, but is withdrawn as soon as that is about to change. It is
	// empty where limits do not ask for the device, and while kubelet has not said.
	//
	// +optional
	ExtendedResourceState ExtendedResourceState `json:"extendedResourceState,omitempty"`
	// Excluded tells that the node's configuration gives the device to nobody. It is in no count.
	//
	// +optional
	Excluded bool `json:"excluded,omitempty"`
	// Sharing says how several holders can have the device at once; absent where they cannot.
	//
	// +optional
	Sharing *DeviceSharing `json:"sharing,omitempty"`
}

// DeviceSharing is the policy by which a device is shared, and what that comes to.
type DeviceSharing struct {
	// Strategy is TimeSlicing or MPS; empty where limits still have shares of a device that is not shared any more.
	Strategy string `json:"strategy"`
	// MemoryShares tells that claims can ask for a part of the memory.
	//
	// +optional
	MemoryShares bool `json:"memoryShares,omitempty"`
	// Memory of the device in bytes: what all shares add up to at most.
	Memory int64 `json:"memory"`
	// Replicas by which limits see the device; absent where they see one.
	//
	// +optional
	Replicas int32 `json:"replicas,omitempty"`
	// ReplicaMemory is what each of them takes of the memory, in bytes.
	//
	// +optional
	ReplicaMemory int64 `json:"replicaMemory,omitempty"`
	// Allocatable is how many of them kubelet's device manager gives to limits, by its own account.
	//
	// +optional
	Allocatable int32 `json:"allocatable,omitempty"`
}

// ExtendedResourceState is whether kubelet's device manager gives a device to limits, by its own account (GetAllocatableResources): having
// sent it is no proof that kubelet has acted on it. Only less is believed before kubelet says so.
//
// +kubebuilder:validation:Enum=Allocatable;Withdrawn
type ExtendedResourceState string

const (
	// ExtendedResourceAllocatable devices are in kubelet's allocatable: free for limits, or held by one.
	ExtendedResourceAllocatable ExtendedResourceState = "Allocatable"
	// ExtendedResourceWithdrawn devices are not: held by a claim, allocated to one, faulty, or of a limit that is gone and runs on.
	ExtendedResourceWithdrawn ExtendedResourceState = "Withdrawn"
)

// HolderKind is the API through which a holder came.
//
// +kubebuilder:validation:Enum=Claim;Pod
type HolderKind string

const (
	HolderClaim HolderKind = "Claim"
	HolderPod   HolderKind = "Pod"
)

// HoldState is how firm a hold is.
//
// +kubebuilder:validation:Enum=Restored;Held;Draining
type HoldState string

const (
	// HoldRestored is known from before a restart and not yet confirmed.
	HoldRestored HoldState = "Restored"
	// HoldHeld was answered to kubelet.
	HoldHeld HoldState = "Held"
	// HoldDraining was asked to go; containers may still live.
	HoldDraining HoldState = "Draining"
)

// DeviceHolder has a device.
type DeviceHolder struct {
	Kind  HolderKind `json:"kind"`
	State HoldState  `json:"state"`
	// Memory is the share that it has, in bytes; absent for the whole device.
	//
	// +optional
	Memory int64 `json:"memory,omitempty"`
	// UID of the claim; empty for a limit.
	//
	// +optional
	UID types.UID `json:"uid,omitempty"`
	// Namespace and Name of the claim; empty for a limit.
	//
	// +optional
	Namespace string `json:"namespace,omitempty"`
	// +optional
	Name string `json:"name,omitempty"`
	// Pods that use the device, as far as they are known.
	//
	// +optional
	// +listType=atomic
	Pods []PodReference `json:"pods,omitempty"`
}

// PodReference names a pod.
type PodReference struct {
	UID types.UID `json:"uid"`
	// Namespace and Name are empty while only the UID is known.
	//
	// +optional
	Namespace string `json:"namespace,omitempty"`
	// +optional
	Name string `json:"name,omitempty"`
}

// ConflictingClaim is a claim whose Prepare was refused for good: the holder in its way stays.
type ConflictingClaim struct {
	UID       types.UID `json:"uid"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	// Devices that somebody else holds, by the names by which the claim was allocated them.
	//
	// +listType=set
	Devices []string `json:"devices"`
	// Pods that had the claim reserved when kubelet was refused it, by UID. Those that have it since may be getting it now.
	//
	// +optional
	// +listType=set
	Pods []types.UID `json:"pods,omitempty"`
	// Since is when the conflict became final.
	Since metav1.MicroTime `json:"since"`
	// PendingEviction claims are not prepared, whatever becomes free, until this entry is gone: the controller evicts their pods. Others
	// wait: their pod belongs to nobody who would make another, and is prepared when the GPU is free.
	PendingEviction bool `json:"pendingEviction"`
	// Message says what happened and who holds the device, without names of other namespaces.
	Message string `json:"message"`
}
