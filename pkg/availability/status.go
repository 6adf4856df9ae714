// SPDX-License-Identifier: Apache-2.0

package availability

import (
	"cmp"
	"math"
	"slices"
	"strconv"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Name identifies a device by its published name. It replaces device.Ref where only API objects are known. Those do not
// contain placements, so two partitions of a GPU do not overlap by name.
type Name struct {
	GPU string
	// Partition is empty for the whole GPU.
	Partition string
}

// NameOf returns the Name of a device in a slice or in an allocation, such as gpu-0 or gpu-0-mig-1g10gb-19-0.
func NameOf(published string) Name {
	name := Name{GPU: device.GPUName(published)}
	if published != name.GPU {
		name.Partition = published
	}
	return name
}

// Overlaps reports whether both are the same device, or one is a partition of the other.
func (n Name) Overlaps(other Name) bool {
	return n.GPU == other.GPU && (n.Partition == "" || other.Partition == "" || n.Partition == other.Partition)
}

// StatusName returns the Name of a device in a GPUNode status.
func StatusName(d v1alpha1.DeviceStatus) Name {
	if d.Parent != "" {
		return Name{GPU: d.Parent, Partition: d.Name}
	}
	return NameOf(d.Name)
}

// Node is a node as the API objects describe it.
type Node struct {
	// Devices by published name. A partition that does not exist yet is missing.
	Devices map[string]v1alpha1.DeviceStatus
	// Held are the uses that the agent reports in GPUNode.status. heldOn has them by GPU.
	Held   []Use[Name]
	heldOn map[string][]Use[Name]
	// Allocated are the uses that the scheduler allocated to claims.
	Allocated []Use[Name]
}

// NewNode builds a Node from a GPUNode's status and from the claims that are allocated to the node. The agent reports the holder of
// a partition that does not exist yet with the GPU; the claim's allocation names the partition.
func NewNode(status v1alpha1.GPUNodeStatus, claims []v1alpha1.AllocatedClaim) Node {
	n := Node{Devices: make(map[string]v1alpha1.DeviceStatus, len(status.Devices)), heldOn: map[string][]Use[Name]{}}
	for _, d := range status.Devices {
		n.Devices[d.Name] = d
	}
	allocated := map[Holder][]Name{}
	for _, claim := range claims {
		holder := Holder{Claim, string(claim.UID)}
		for _, published := range claim.Devices {
			name := NameOf(published)
			n.Allocated = append(n.Allocated, Use[Name]{Holder: holder, Device: name, Share: n.AllocatedShare(claim, published), Reason: Allocated})
			allocated[holder] = append(allocated[holder], name)
		}
	}
	for _, d := range status.Devices {
		for i, h := range d.Holders {
			share := n.share(d.Name, h.Shared || h.Memory > 0, h.Memory, h.Shares)
			use := Use[Name]{Holder: Holder{Claim, string(h.UID)}, Device: StatusName(d), Share: share, Reason: HeldByClaim}
			switch {
			case h.Kind == v1alpha1.HolderPod:
				// The status does not contain the device ID that identifies a pod in the ledger.
				use.Holder, use.Reason = Holder{Pod, d.Name + "/" + strconv.Itoa(i)}, HeldByPod
			case h.State == v1alpha1.HoldDraining:
				use.Reason = Draining
			}
			uses := onPartitions(use, allocated[use.Holder])
			n.Held, n.heldOn[use.Device.GPU] = append(n.Held, uses...), append(n.heldOn[use.Device.GPU], uses...)
		}
	}
	return n
}

// onPartitions replaces the use of a whole GPU by the partitions of it that the same holder was allocated.
func onPartitions(use Use[Name], allocated []Name) []Use[Name] {
	var uses []Use[Name]
	for _, name := range allocated {
		if use.Device.Partition == "" && name.GPU == use.Device.GPU {
			uses = append(uses, Use[Name]{Holder: use.Holder, Device: name, Reason: use.Reason})
		}
	}
	if len(uses) == 0 || slices.Contains(allocated, use.Device) {
		return []Use[Name]{use}
	}
	return uses
}

// Check is the function Check for a request, with what the agent reports held.
func (n Node) Check(healthy bool, request Use[Name]) Reason {
	return Check(healthy, request, slices.Values(n.heldOn[request.Device.GPU]))
}

// Reason returns why no new holder gets the whole of a device of the status. It is that of Check, with Maintenance and Tainted after
// Unhealthy. The counts and the states that users see come from it.
func (n Node) Reason(d v1alpha1.DeviceStatus) Reason {
	reason := n.Check(d.UnhealthyReason == "", Use[Name]{Device: StatusName(d)})
	switch {
	case reason == Unhealthy:
		return Unhealthy
	case d.Maintenance != nil:
		return Maintenance
	case len(d.Taints) > 0:
		return Tainted
	default:
		return reason
	}
}

// Count adds a device to the counts: once, as unhealthy, under maintenance, tainted, held by claims, held by pods or free, the first that applies.
func (n Node) Count(counts *v1alpha1.DeviceCounts, d v1alpha1.DeviceStatus) {
	counts.Total++
	switch n.Reason(d) {
	case Unhealthy:
		counts.Unhealthy++
	case Maintenance:
		counts.Maintenance++
	case Tainted:
		counts.Tainted++
	case HeldByClaim, Draining:
		counts.Claims++
	case HeldByPod:
		counts.Pods++
	default:
		counts.Free++
	}
}

// Status returns the status of a device, or of its GPU where the device is a partition that does not exist yet.
func (n Node) Status(published string) (status v1alpha1.DeviceStatus, known bool) {
	if status, known = n.Devices[published]; known {
		return status, true
	}
	status, known = n.Devices[device.GPUName(published)]
	return status, known
}

// AllocatedShare returns the share of a device that a claim was allocated.
func (n Node) AllocatedShare(claim v1alpha1.AllocatedClaim, published string) device.Share {
	share, shared := claim.ShareOf(published)
	return n.share(published, shared, share.Memory, share.Shares)
}

// Left is the function Left for a shared device of a GPUNode status.
func (n Node) Left(d v1alpha1.DeviceStatus, uses []Use[Name]) device.Share {
	whole := device.Share{Of: uint64(max(0, d.Sharing.Memory)), OfCount: uint64(max(0, d.Sharing.Shares))}
	return Left(StatusName(d), whole, slices.Values(uses))
}

// share returns a share of a device. A device that does not report its memory has room for every share.
func (n Node) share(published string, shared bool, memory, count int64) device.Share {
	if !shared {
		return device.Share{}
	}
	var of v1alpha1.DeviceSharing
	if d := n.Devices[published]; d.Sharing != nil {
		of = *d.Sharing
	}
	share := device.Share{Bytes: uint64(max(memory, 0)), Of: cmp.Or(uint64(max(of.Memory, 0)), math.MaxUint64), Count: uint64(max(count, 0))}
	if share.Count > 0 {
		share.OfCount = cmp.Or(uint64(max(of.Shares, 0)), math.MaxUint64)
	}
	return share
}
