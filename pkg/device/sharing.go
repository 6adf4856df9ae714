// SPDX-License-Identifier: Apache-2.0

package device

import (
	"errors"
	"fmt"
	"maps"
	"slices"
)

// SharingStrategy is how the holders of one device take turns.
type SharingStrategy string

const (
	// TimeSlicing lets the GPU switch between processes by time.
	TimeSlicing SharingStrategy = "TimeSlicing"
	// MPS lets the processes of all who have a part of a GPU run at once, as clients of one daemon (CUDA's Multi-Process Service).
	// Partitions are not shared in this way.
	MPS SharingStrategy = "MPS"
)

// MPSClients is how many processes may share a GPU by MPS at a time (CUDA's MPS documentation: Volta and later).
const MPSClients = 48

// Intervals of time-slicing from the driver's 0 up (nvidia-smi compute-policy --set-timeslice).
var Intervals = []string{"Default", "Short", "Medium", "Long"}

// Sharing is how a GPU, and the partitions on it that last, may have several holders at once: the policy of the node. The zero
// Sharing is not at all.
type Sharing struct {
	Strategy SharingStrategy
	// Interval is one of Intervals, or empty for what the GPU has. It belongs to TimeSlicing.
	Interval string
	// Replicas are what limits get in place of whole devices, by the resource that these would have; the key "" is any other.
	Replicas map[string]Replicas
	// Claims is how claims share the device, or empty where they do not.
	Claims ClaimShares
	// Shares is the number of equal shares with Claims ByCount. A replica is one or more of them.
	Shares int
	// Namespaces are those that may be clients of the daemon; empty for all. They belong to MPS.
	Namespaces []string
}

// ClaimShares is how claims share a device. The modes are those of NVIDIA's DRA driver
// (dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin/consumable_shares.go).
type ClaimShares string

const (
	// ByMemory gives a claim the memory that it requests, or all of it if it requests none.
	ByMemory ClaimShares = "memory"
	// ByCount gives a claim one of the equal shares, or as many as it requests, and the memory that it requests.
	ByCount ClaimShares = "shares"
	// Unlimited gives a claim the memory that it requests. Any number of claims fit that request none.
	Unlimited ClaimShares = "unlimited"
)

// Admits reports whether containers of a namespace may share the device.
func (s Sharing) Admits(namespace string) bool {
	return len(s.Namespaces) == 0 || slices.Contains(s.Namespaces, namespace)
}

// Replicas are the equal shares of each device of a resource.
type Replicas struct {
	// Count is 2 or more; fewer are none.
	Count int
	// Renamed gives them a resource of their own: ".shared" behind the name (k8s-device-plugin, renameByDefault).
	Renamed bool
	// Of are the counts of single partitions, by UUID, where they are more.
	Of map[string]int
}

// SharedSuffix is what NVIDIA's device plugin puts behind the name of a resource whose devices are shared.
const SharedSuffix = ".shared"

// Shared reports whether any holder may have a part of a device.
func (s Sharing) Shared() bool { return s.Claims != "" || len(s.Replicas) > 0 }

// ReplicaCount is as how many devices limits see a whole GPU that is shared by MPS: 1 where they do not see it. Its replicas have one
// resource.
func (s Sharing) ReplicaCount() int { return max(1, s.Replicas[""].Count) }

// ReplicasOf returns the replicas of the devices of a resource.
func (s Sharing) ReplicasOf(resource string) Replicas {
	if r, named := s.Replicas[resource]; named {
		return r
	}
	return s.Replicas[""]
}

// forDevice is the sharing of one device: with its own counts of replicas, and without replicas that only others have.
func (s Sharing) forDevice(uuid string) Sharing {
	differs := func(r Replicas) bool { return r.Of != nil }
	if !slices.ContainsFunc(slices.Collect(maps.Values(s.Replicas)), differs) {
		return s
	}
	replicas := map[string]Replicas{}
	for resource, r := range s.Replicas {
		r.Count, r.Of = max(r.Count, r.Of[uuid]), nil
		if r.Count > 0 {
			replicas[resource] = r
		}
	}
	s.Replicas = replicas
	return s
}

// ReplicaID is by what kubelet knows a replica: "<uuid>::<n>", as with NVIDIA's device plugin (k8s-device-plugin,
// internal/rm/devices.go, AnnotatedID). HardwareUUID undoes it.
func ReplicaID(uuid string, n int) string { return fmt.Sprintf("%s::%d", uuid, n) }

// MemoryBytes is the memory of the device; zero where it is not known.
func (d Device) MemoryBytes() uint64 {
	if d.Whole() {
		return d.GPU.MemoryBytes
	}
	return d.Partition.Capacity.MemoryBytes
}

// Sharing returns how the device is shared. A partition that was created for a claim, and one without a UUID, are not shared.
func (d Device) Sharing() Sharing {
	if d.GPU.Dynamic || !d.Whole() && (d.Partition.Made || d.Partition.UUID == "") {
		return Sharing{}
	}
	if d.GPU.Sharing.Strategy == MPS && (d.GPU.MIGEnabled || !d.Whole()) {
		return Sharing{}
	}
	return d.GPU.Sharing.forDevice(d.UUID())
}

// otherShares stands for the number of equal shares of a device that the policy no longer divides so. Claims that were allocated such
// shares before fit beside each other, and beside no other share.
const otherShares = 1 << 20

// Consumed is what the scheduler allocated of a shared device to a claim, in bytes and in equal shares.
type Consumed struct{ Memory, Shares int64 }

// Plus adds another allocation of the same claim.
func (c Consumed) Plus(other Consumed) Consumed {
	return Consumed{Memory: c.Memory + other.Memory, Shares: c.Shares + other.Shares}
}

// Share returns the share of the device that a claim with such an allocation has. It is the whole device where claims share by memory and
// the claim consumed all of it. The policy may have changed since the scheduler allocated the share.
func (d Device) Share(c Consumed) Share {
	memory, policy := d.MemoryBytes(), d.Sharing()
	share := Share{Bytes: min(uint64(max(c.Memory, 0)), memory), Of: memory, Count: uint64(max(c.Shares, 0))}
	switch {
	case share.Count > uint64(policy.Shares):
		share.OfCount = otherShares
	case share.Count > 0:
		share.OfCount = uint64(policy.Shares)
	case share.Bytes > 0 && policy.Claims != Unlimited:
		return ShareOf(share.Bytes, memory)
	}
	return share
}

// shared are the offers of a device to limits: itself, or its replicas. There are none, for that reason, of a device that only
// claims share.
func (r Resources) shared(resource string, d Device) (offers []Offer, leftOut string) {
	sharing := d.Sharing()
	replicas := sharing.ReplicasOf(resource)
	switch {
	case replicas.Count >= 2:
	case sharing.Strategy == MPS:
		return nil, leftOutForClaims
	default:
		return []Offer{{Resource: resource, Device: d}}, ""
	}
	share := Replica(d.MemoryBytes(), replicas.Count)
	if sharing.Claims == ByCount {
		share = Share{Of: d.MemoryBytes(), Count: uint64(max(1, sharing.Shares/replicas.Count)), OfCount: uint64(sharing.Shares)}
	}
	if replicas.Renamed {
		resource += SharedSuffix
	}
	offers = make([]Offer, replicas.Count)
	for i := range offers {
		offers[i] = Offer{Resource: resource, Device: d, Share: share, replica: i}
	}
	return offers, ""
}

// ID is by what kubelet knows the offer.
func (o Offer) ID() string {
	if o.Share.Whole() {
		return o.Device.UUID()
	}
	return ReplicaID(o.Device.UUID(), o.replica)
}

// ShareOf is what a limit has of a device by an ID, ours or that of NVIDIA's plugin: the whole of it, where policy knows no such
// replica.
func (r Resources) ShareOf(inv Inventory, id string) Share {
	offers, _ := r.Offers(inv.GPUs)
	if i := slices.IndexFunc(offers, func(o Offer) bool { return o.ID() == id }); i >= 0 {
		return offers[i].Share
	}
	return Share{}
}

// ErrNoGPU means that the driver has no GPU of that UUID: it was removed or replaced, and its settings are lost.
var ErrNoGPU = errors.New("the driver has no such GPU")

// ErrUnsupported means that the GPU or its driver does not support a setting, or that the agent may not set it. A retry does not help, and
// nothing was set.
var ErrUnsupported = errors.New("the GPU, its driver or the agent's rights do not allow it")

// ComputeMode is how many processes may use a GPU (nvml.h, nvmlComputeMode_t).
type ComputeMode string

// The modes of current drivers.
const (
	ComputeModeDefault          ComputeMode = "Default"          // any number
	ComputeModeExclusiveProcess ComputeMode = "ExclusiveProcess" // one; under MPS, its server
	ComputeModeProhibited       ComputeMode = "Prohibited"       // none
)

// Settings of a GPU that stay when the process that changed them has ended, until the driver is unloaded (nvidia-smi(1), "-c" and "-ac").
// They are comparable.
type Settings struct {
	// ComputeMode is empty for a GPU that has none, such as one in MIG mode.
	ComputeMode ComputeMode `json:"computeMode,omitempty"`
	// MemoryClock and GraphicsClock are the application clocks in MHz; zero for a GPU that has none.
	MemoryClock   uint32 `json:"memoryClock,omitempty"`
	GraphicsClock uint32 `json:"graphicsClock,omitempty"`
}
