// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 is the API group tandem-gpu.dev/v1alpha1 with its kind GPUNode. A field with omitempty is
// optional.
//
// +kubebuilder:object:generate=true
// +groupName=tandem-gpu.dev
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

//go:generate env GOWORK=off go tool -modfile=../../../hack/tools/go.mod controller-gen object crd paths=. output:crd:dir=../../../deployments/helm/tandem/files

var (
	// GroupVersion of everything in this package.
	GroupVersion = schema.GroupVersion{Group: "tandem-gpu.dev", Version: "v1alpha1"}
	// Resource is the plural name under which the API server serves GPUNodes.
	Resource = GroupVersion.WithResource("gpunodes")
)

// AddToScheme registers the types of this package with a scheme. It never fails.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &GPUNode{}, &GPUNodeList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}

// GPUNode reports which pod has which GPU of a node, and which GPUs the scheduler has allocated. It has the name of its Node and
// outlives it. The node's agent creates it and writes the status. The controller writes the spec, except its maintenance, which administrators
// write, and deletes it. Admission policies restrict the agent and the controller to their parts, and taints to those who may create
// DeviceTaintRules.
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
// +kubebuilder:printcolumn:name="Maintenance",type=integer,priority=1,JSONPath=`.status.counts.maintenance`
// +kubebuilder:printcolumn:name="Tainted",type=integer,priority=1,JSONPath=`.status.counts.tainted`
// +kubebuilder:printcolumn:name="Partitions",type=integer,priority=1,JSONPath=`.status.partitions.total`
// +kubebuilder:printcolumn:name="Seen",type=date,JSONPath=`.status.seen`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Waiting",type=string,JSONPath=`.status.waiting`
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

// GPUNodeSpec is what the controller reports to the node, and which GPUs an administrator has taken out of service. An agent cannot watch
// the ResourceClaims of one node, and thousands of agents must not watch all of them.
type GPUNodeSpec struct {
	// Claims that are allocated devices of this node. Their GPUs are withdrawn from the extended resource before kubelet prepares the
	// claims. The node's ledger decides who gets a GPU, whatever this list contains.
	//
	// +kubebuilder:validation:MaxItems=1024
	// +listType=map
	// +listMapKey=uid
	Claims []AllocatedClaim `json:"claims,omitempty"`
	// Daemons of status.daemons whose pods do not run, with the reason.
	//
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	Daemons []WaitingDaemon `json:"daemons,omitempty"`
	// Maintenance are GPUs that an administrator has taken out of service, with their partitions: no new claim or pod gets them. Their
	// holders keep them. An administrator writes this list (kubectl gpu drain). The agent and the controller may not write it.
	//
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=uuid
	Maintenance []GPUMaintenance `json:"maintenance,omitempty"`
	// Taints are those of the DeviceTaintRules that may select devices of this node: the controller copies them, since an agent must not
	// watch all rules. The agent gives the selected devices to no new pod with limits. The scheduler reads the rules themselves.
	//
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=rule
	Taints []RuleTaint `json:"taints,omitempty"`
}

// RuleTaint is the taint of a DeviceTaintRule of Tandem's driver, and what the rule selects.
type RuleTaint struct {
	// Rule is the name of the DeviceTaintRule.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Rule string `json:"rule"`
	// Pool that the rule selects: the name of the node, or that of a dynamic GPU's pool. Without it the rule selects all pools.
	//
	// +kubebuilder:validation:MaxLength=253
	Pool string `json:"pool,omitempty"`
	// Device that the rule selects, by its name in the pool. Without it the rule selects all devices.
	//
	// +kubebuilder:validation:MaxLength=128
	Device string `json:"device,omitempty"`

	Taint `json:",inline"`
}

// Selects reports whether the rule selects a device. It is that of the scheduler (k8s.io/dynamic-resource-allocation/resourceslice/tracker).
func (t RuleTaint) Selects(pool, device string) bool {
	return (t.Pool == "" || t.Pool == pool) && (t.Device == "" || t.Device == device)
}

// Taint is a device taint of resource.k8s.io/v1. The effect None is left out.
type Taint struct {
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	Key string `json:"key"`
	// +kubebuilder:validation:MaxLength=63
	Value  string      `json:"value,omitempty"`
	Effect TaintEffect `json:"effect"`
	// Since is when the taint was added, or its effect changed.
	Since *metav1.Time `json:"since,omitempty"`
}

// String returns the taint as kubectl writes it: key=value:effect.
func (t Taint) String() string {
	if t.Value == "" {
		return t.Key + ":" + string(t.Effect)
	}
	return t.Key + "=" + t.Value + ":" + string(t.Effect)
}

// TaintEffect is what a taint does to claims and pods with limits that do not tolerate it. A new pod with limits tolerates none.
//
// +kubebuilder:validation:Enum=NoSchedule;NoExecute
type TaintEffect string

const (
	// TaintNoSchedule keeps new holders away.
	TaintNoSchedule TaintEffect = "NoSchedule"
	// TaintNoExecute also evicts holders.
	TaintNoExecute TaintEffect = "NoExecute"
)

// GPUMaintenance takes a GPU out of service.
type GPUMaintenance struct {
	// UUID of the GPU. The node may no longer have that GPU, for example after a repair.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	UUID string `json:"uuid"`
	// Reason for the maintenance, which users see, in one line.
	//
	// +kubebuilder:validation:MaxLength=256
	Reason string `json:"reason,omitempty"`
	// Since is when the administrator took the GPU out of service.
	Since *metav1.Time `json:"since,omitempty"`
}

// MaintenanceOf returns the entry of a GPU, if it has one.
func (s GPUNodeSpec) MaintenanceOf(uuid string) (entry GPUMaintenance, found bool) {
	for _, entry := range s.Maintenance {
		if entry.UUID == uuid {
			return entry, true
		}
	}
	return GPUMaintenance{}, false
}

// WaitingDaemon is a daemon whose pod does not run.
type WaitingDaemon struct {
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`
	// Message is the reason, in one line.
	//
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message"`
}

// AllocatedClaim is a ResourceClaim with devices of this node.
type AllocatedClaim struct {
	// UID of the claim.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=128
	UID types.UID `json:"uid"`
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// Allocated is when the scheduler allocated the devices, in whole seconds. It tells two allocations of the same devices apart, unless
	// both are of one second. It is set if the API server keeps the time (AllocationResult.allocationTimestamp of KEP-5007).
	Allocated *metav1.Time `json:"allocated,omitempty"`
	// Devices by their names in the pool, sorted. Devices with admin access are not listed: their claim does not hold them.
	//
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=128
	// +listType=set
	Devices []string `json:"devices"`
	// Pools of the devices, sorted: the pool of the node, or those of its dynamic GPUs. A controller of an older version does not
	// write them.
	//
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=253
	// +listType=set
	Pools []string `json:"pools,omitempty"`
	// Shares of the devices that the claim has in part. It has the other devices whole.
	//
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=device
	Shares []AllocatedShare `json:"shares,omitempty"`
}

// ShareOf returns the share of a device that the claim was allocated. shared is false for the whole device.
func (c AllocatedClaim) ShareOf(device string) (share AllocatedShare, shared bool) {
	for _, share := range c.Shares {
		if share.Device == device {
			return share, true
		}
	}
	return AllocatedShare{}, false
}

// AllocatedShare is the part of a shared device that the scheduler allocated to a claim.
type AllocatedShare struct {
	// Device by its name in the pool.
	//
	// +kubebuilder:validation:MaxLength=128
	Device string `json:"device"`
	// Memory in bytes (consumed capacity "memory"). It may be 0.
	//
	// +kubebuilder:validation:Minimum=0
	Memory int64 `json:"memory"`
	// Shares is the number of equal shares (consumed capacity "shares"); absent if the device has none.
	//
	// +kubebuilder:validation:Minimum=0
	Shares int64 `json:"shares,omitempty"`
}

// GPUNodeStatus is what the node's agent reports, at most once a second on average.
type GPUNodeStatus struct {
	// Mode is which APIs the node serves: Dual, ClaimsOnly, DevicePluginOnly or Split.
	//
	// +kubebuilder:validation:MaxLength=63
	Mode string `json:"mode,omitempty"`
	// Waiting is why new pods and claims get no GPU of the node, in one line, such as a missing driver or another device plugin; empty while
	// they get GPUs. Holders keep theirs.
	//
	// +kubebuilder:validation:MaxLength=1024
	Waiting string `json:"waiting,omitempty"`
	// WaitingSince is since when there is a reason to wait. The reason may have changed since.
	WaitingSince *metav1.Time `json:"waitingSince,omitempty"`
	// Seen is when the agent wrote the status last. It writes at least once a minute. If Seen is older than two and a half minutes, the agent
	// is gone or does not reach the API server, and the status is of that time.
	Seen *metav1.Time `json:"seen,omitempty"`
	// BootID is the kernel's ID of the boot that the status is about. What an earlier boot reported is no longer true.
	//
	// +kubebuilder:validation:MaxLength=63
	BootID string `json:"bootID,omitempty"`
	// ObservedGeneration of the spec that the agent acts on.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Counts of GPUs. Each GPU counts once, as the first that applies of unhealthy, maintenance, tainted, claims, pods and free. It is free if it
	// has no holder, and no partition of it has one.
	Counts DeviceCounts `json:"counts,omitempty"`
	// Partitions counts the existing MIG partitions in the same way. It is absent if there are none.
	Partitions *DeviceCounts `json:"partitions,omitempty"`
	// Holders of all devices in one line, for kubectl get -o wide: "gpu-0=default/train(claim) gpu-7=default/infer(pod)".
	//
	// +kubebuilder:validation:MaxLength=32768
	Holders string `json:"holders,omitempty"`
	// ExtendedResource is the extended resource of whole GPUs, and of partitions with migStrategy single. It is empty if the node does
	// not serve the device plugin API, for example while no agent runs. Each device has its own resource in devices.
	//
	// +kubebuilder:validation:MaxLength=317
	ExtendedResource string `json:"extendedResource,omitempty"`
	// Devices of the node, by name.
	//
	// +kubebuilder:validation:MaxItems=512
	// +listType=map
	// +listMapKey=name
	Devices []DeviceStatus `json:"devices,omitempty"`
	// Conflicts are claims that were allocated a device which another holder has.
	//
	// +kubebuilder:validation:MaxItems=512
	// +listType=map
	// +listMapKey=uid
	Conflicts []ConflictingClaim `json:"conflicts,omitempty"`
	// Daemons that the node requests. The controller runs a pod for each of them.
	//
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	Daemons []MPSDaemon `json:"daemons,omitempty"`
	// UnknownDaemons are daemons that may run and whose settings the agent cannot read. The controller does not change their pods.
	//
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=63
	// +listType=set
	UnknownDaemons []string `json:"unknownDaemons,omitempty"`
	// Omitted is how many entries the agent left out because a list was too long. That does not happen on real nodes.
	Omitted int32 `json:"omitted,omitempty"`
}

// MPSDaemon is an MPS control daemon. With other settings it is another daemon, in another pod.
type MPSDaemon struct {
	// Name of the daemon on this node. It is the name of the daemon's directory and a part of its pod's name.
	//
	// +kubebuilder:validation:MaxLength=52
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name"`

	MPSSettings `json:",inline"`
}

// MPSSettings has the fields of mps.Settings, in the same order, so that one can be converted to the other.
type MPSSettings struct {
	// Devices are the UUIDs of GPUs or partitions, in the daemon's order.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=80
	// +listType=atomic
	Devices []string `json:"devices"`
	// ActiveThreadPercentage is the share of the multiprocessors that a client gets. The default is the daemon's.
	//
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	ActiveThreadPercentage *int32 `json:"activeThreadPercentage,omitempty"`
	// PinnedMemoryMiB limits a client's memory on each device, in MiB and in the order of devices. 0 is no limit. It is absent if no
	// device has a limit.
	//
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	PinnedMemoryMiB []int64 `json:"pinnedMemoryMiB,omitempty"`
	// MultiUser allows clients of several users at the same time.
	MultiUser bool `json:"multiUser,omitempty"`
	// DriverRoot is the host's directory with the driver's files. The controller accepts only those that the chart knows.
	//
	// +kubebuilder:validation:MaxLength=256
	DriverRoot string `json:"driverRoot"`
	// Generation distinguishes this daemon from earlier daemons of the same name, which have ended.
	//
	// +kubebuilder:validation:Minimum=0
	Generation int64 `json:"generation,omitempty"`
}

// DeviceCounts are numbers of GPUs or of partitions.
type DeviceCounts struct {
	Total     int32 `json:"total"`
	Claims    int32 `json:"claims"`
	Pods      int32 `json:"pods"`
	Free      int32 `json:"free"`
	Unhealthy int32 `json:"unhealthy"`
	// Maintenance counts devices that an administrator has taken out of service, held or not.
	Maintenance int32 `json:"maintenance,omitempty"`
	// Tainted counts devices that have a taint, held or not.
	Tainted int32 `json:"tainted,omitempty"`
}

// DeviceStatus is a GPU or an existing partition.
type DeviceStatus struct {
	// Name in the pool, such as gpu-0 or gpu-0-mig-1g10gb-19-0.
	//
	// +kubebuilder:validation:MaxLength=128
	Name string `json:"name"`
	// +kubebuilder:validation:MaxLength=128
	UUID string `json:"uuid"`
	// Parent is the name of a partition's GPU; empty for a GPU.
	//
	// +kubebuilder:validation:MaxLength=128
	Parent string `json:"parent,omitempty"`
	// Profile of a partition, such as 1g.10gb; empty for a GPU.
	//
	// +kubebuilder:validation:MaxLength=128
	Profile string `json:"profile,omitempty"`
	// Model is the product name.
	//
	// +kubebuilder:validation:MaxLength=256
	Model string `json:"model,omitempty"`
	// UnhealthyReason is why the device is unhealthy, in one line; empty if it is healthy.
	//
	// +kubebuilder:validation:MaxLength=1024
	UnhealthyReason string `json:"unhealthyReason,omitempty"`
	// Repair is what ends the fault of an unhealthy device; empty if nothing is wrong with the hardware. Tools that repair nodes read it.
	Repair Repair `json:"repair,omitempty"`
	// UnhealthySince is since when the device is unhealthy. The reason may have changed since.
	UnhealthySince *metav1.Time `json:"unhealthySince,omitempty"`
	// Maintenance is set while an administrator has taken the device, or the GPU of a partition, out of service: the agent gives it to no
	// new claim or pod. Holders keep it.
	Maintenance *DeviceMaintenance `json:"maintenance,omitempty"`
	// Taints that the agent acts on, the worst first: no new pod with limits gets the device, and a new claim only if it tolerates them. If
	// many devices have several, a part of them: spec.taints has all.
	//
	// +kubebuilder:validation:MaxItems=8
	// +listType=atomic
	Taints []DeviceTaint `json:"taints,omitempty"`
	// Slowdown is why a GPU runs below its clocks, such as "thermal"; empty if it does not. It is healthy.
	//
	// +kubebuilder:validation:MaxLength=128
	Slowdown string `json:"slowdown,omitempty"`
	// Holders of the device. The holders of a partition are listed with the partition.
	//
	// +kubebuilder:validation:MaxItems=512
	// +listType=atomic
	Holders []DeviceHolder `json:"holders,omitempty"`
	// ExtendedResource is the extended resource of the device; empty if it has none.
	//
	// +kubebuilder:validation:MaxLength=317
	ExtendedResource string `json:"extendedResource,omitempty"`
	// ExtendedResourceState is what kubelet's device manager reports of the device. The agent sets Withdrawn before kubelet reports
	// it. It is empty if the device has no extended resource, and until kubelet reports it.
	ExtendedResourceState ExtendedResourceState `json:"extendedResourceState,omitempty"`
	// Excluded is set if the node's configuration excludes the device from both APIs. It is in no count.
	Excluded bool `json:"excluded,omitempty"`
	// Sharing is how several holders share the device; absent if they cannot.
	Sharing *DeviceSharing `json:"sharing,omitempty"`
}

// OutOfService reports whether the agent gives the device to no new pod with limits, by maintenance or by a taint.
func (d DeviceStatus) OutOfService() bool { return d.Maintenance != nil || len(d.Taints) > 0 }

// RuleTaints returns the taints of DeviceTaintRules. The others are of a fault, which UnhealthyReason has.
func (d DeviceStatus) RuleTaints() (taints []DeviceTaint) {
	for _, t := range d.Taints {
		if t.Rule != "" {
			taints = append(taints, t)
		}
	}
	return taints
}

// DeviceTaint is a taint of a device.
type DeviceTaint struct {
	// Rule is the name of the DeviceTaintRule that the taint is from; empty for a taint of the agent's own.
	//
	// +kubebuilder:validation:MaxLength=253
	Rule string `json:"rule,omitempty"`

	Taint `json:",inline"`
}

// String returns the taint for users, with the rule that it is from.
func (t DeviceTaint) String() string {
	if t.Rule == "" {
		return t.Taint.String()
	}
	return t.Taint.String() + " of DeviceTaintRule " + t.Rule
}

// DeviceMaintenance is the entry of spec.maintenance that the agent acts on.
type DeviceMaintenance struct {
	// +kubebuilder:validation:MaxLength=256
	Reason string       `json:"reason,omitempty"`
	Since  *metav1.Time `json:"since,omitempty"`
}

// Repair is what ends a fault.
//
// +kubebuilder:validation:Enum=Reset;Reboot;Replace
type Repair string

const (
	// RepairReset is a reset of the GPU (nvidia-smi --gpu-reset) without processes on it, or what includes one.
	RepairReset Repair = "Reset"
	// RepairReboot is a reboot of the node, or its replacement.
	RepairReboot Repair = "Reboot"
	// RepairReplace is another GPU, or another machine.
	RepairReplace Repair = "Replace"
)

// DeviceSharing is the sharing policy of a device and its result.
type DeviceSharing struct {
	// Strategy is TimeSlicing or MPS. It is empty if the device is no longer shared and pods still have shares of it.
	//
	// +kubebuilder:validation:MaxLength=63
	Strategy string `json:"strategy"`
	// Claims is how claims share the device: by the memory that they request, by equal shares, or without a limit. It is absent if they
	// get the whole device.
	Claims ClaimSharing `json:"claims,omitempty"`
	// Memory of the device in bytes, which all shares together cannot exceed.
	//
	// +kubebuilder:validation:Minimum=0
	Memory int64 `json:"memory"`
	// Shares is the number of equal shares, if claims share the device by them.
	//
	// +kubebuilder:validation:Minimum=0
	Shares int64 `json:"shares,omitempty"`
	// Replicas that the extended resource offers of the device; absent if it offers the whole device.
	Replicas int32 `json:"replicas,omitempty"`
	// ReplicaMemory is the memory of each replica in bytes; absent if a replica is one or more equal shares.
	//
	// +kubebuilder:validation:Minimum=0
	ReplicaMemory int64 `json:"replicaMemory,omitempty"`
	// ReplicaShares is the number of equal shares of each replica.
	//
	// +kubebuilder:validation:Minimum=0
	ReplicaShares int64 `json:"replicaShares,omitempty"`
	// Allocatable is how many replicas kubelet's device manager reports as allocatable.
	Allocatable int32 `json:"allocatable,omitempty"`
}

// ClaimSharing is how claims share a device.
//
// +kubebuilder:validation:Enum=memory;shares;unlimited
type ClaimSharing string

// ExtendedResourceState is whether kubelet's device manager allocates a device to pods, as kubelet itself reports it
// (GetAllocatableResources). A list that the agent has sent may not be in use yet.
//
// +kubebuilder:validation:Enum=Allocatable;Withdrawn
type ExtendedResourceState string

const (
	// ExtendedResourceAllocatable devices are free for pods, or held by a pod.
	ExtendedResourceAllocatable ExtendedResourceState = "Allocatable"
	// ExtendedResourceWithdrawn devices are held by or allocated to a claim, unhealthy, out of service, or draining. A device
	// that a pod holds stays Allocatable if the reason concerns only new holders, as out of service or Paused.
	ExtendedResourceWithdrawn ExtendedResourceState = "Withdrawn"
)

// HolderKind is the API through which a holder got its device.
//
// +kubebuilder:validation:Enum=Claim;Pod
type HolderKind string

const (
	HolderClaim HolderKind = "Claim"
	HolderPod   HolderKind = "Pod"
)

// HoldState is the state of a hold.
//
// +kubebuilder:validation:Enum=Restored;Held;Draining
type HoldState string

const (
	// HoldRestored was read after a restart and is not confirmed yet.
	HoldRestored HoldState = "Restored"
	// HoldHeld means that the device was handed to kubelet.
	HoldHeld HoldState = "Held"
	// HoldDraining ends once no container can use the device.
	HoldDraining HoldState = "Draining"
)

// DeviceHolder is a claim or a pod that has a device.
type DeviceHolder struct {
	// Kind is the API through which the holder got the device: Claim, or Pod for limits.
	Kind HolderKind `json:"kind"`
	// State of the hold. Restored: read after a restart and not confirmed yet. Held: the device was handed to kubelet. Draining: ends once no
	// container can use the device.
	State HoldState `json:"state"`
	// Shared is set if the holder has a share of the device; absent for the whole device.
	Shared bool `json:"shared,omitempty"`
	// Memory of the holder's share in bytes; absent for the whole device, and for a share without memory of its own.
	//
	// +kubebuilder:validation:Minimum=0
	Memory int64 `json:"memory,omitempty"`
	// Shares is the number of equal shares that the holder has.
	//
	// +kubebuilder:validation:Minimum=0
	Shares int64 `json:"shares,omitempty"`
	// UID of the claim; absent for a pod.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=128
	UID types.UID `json:"uid,omitempty"`
	// Namespace and Name of the claim; empty for a pod.
	//
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
	// Pods that use the device, as far as the agent has found them.
	//
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	Pods []PodReference `json:"pods,omitempty"`
	// WaitsFor is what keeps a holder that has ended from giving up the device: a pod, and its processes where the agent can see
	// them. It is set after two seconds.
	//
	// +kubebuilder:validation:MaxLength=512
	WaitsFor string `json:"waitsFor,omitempty"`
	// WaitsSince is when the agent found that the holder had ended.
	WaitsSince *metav1.MicroTime `json:"waitsSince,omitempty"`
}

// PodReference names a pod.
type PodReference struct {
	// UID of the pod.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=128
	UID types.UID `json:"uid"`
	// Namespace and Name are empty while only the UID is known.
	//
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
}

// ConflictingClaim is a claim that was allocated a device which another holder has.
type ConflictingClaim struct {
	// UID of the claim.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=128
	UID types.UID `json:"uid"`
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// Devices that another holder has, by the names in the claim's allocation.
	//
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=128
	// +listType=set
	Devices []string `json:"devices"`
	// Pods that had the claim reserved when its Prepare was refused, by UID. The claim may be in preparation for a later pod.
	//
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:Type=string
	// +kubebuilder:validation:items:MaxLength=128
	// +listType=set
	Pods []types.UID `json:"pods,omitempty"`
	// Since is when the conflict was first recorded.
	Since metav1.MicroTime `json:"since"`
	// PendingEviction is set if the controller evicts the claim's pods. The claim is not prepared before this entry is gone. Without it
	// the claim waits until the device is free, because no owner would replace its pod.
	PendingEviction bool `json:"pendingEviction"`
	// Message is what happened and what holds the device, without names of other namespaces.
	//
	// +kubebuilder:validation:MaxLength=4096
	Message string `json:"message"`
}
