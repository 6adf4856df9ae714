// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Facts are everything that the status says, as it was at one moment.
type Facts struct {
	Mode string
	// Limits are the resources by which limits ask; zero where none are served.
	Limits device.Resources
	// OfferedToPods tells the GPUs that limits can ask for, or for partitions of; nil means all.
	OfferedToPods func(device.GPU) bool
	// Excluded tells the GPUs that are nobody's; nil means none.
	Excluded func(device.GPU) bool
	// Generation of the spec that the agent acts on.
	Generation int64
	Inventory  device.Inventory
	Holds      []ledger.Hold
	Conflicts  []ledger.Conflict
	// Allocatable are the device IDs that kubelet itself calls allocatable, by resource; of one that is absent kubelet has not
	// said.
	Allocatable map[string][]string
	// Daemons that are to run, by name, and those that may run besides.
	Daemons        []sharing.Daemon
	UnknownDaemons []string
}

// Status is what the node's GPUNode should say. It is a pure function, for the agent and for simulations: equal facts give
// equal statuses, whatever the order of holds.
func Status(f Facts) v1alpha1.GPUNodeStatus {
	names := deviceNames(f.Inventory)
	holders := holdersByDevice(f.Inventory, f.Holds)
	offers := f.offers()
	resources := f.resources(offers)
	status := v1alpha1.GPUNodeStatus{
		Mode: f.Mode, ObservedGeneration: f.Generation, ExtendedResource: f.Limits.GPU, Conflicts: conflicts(f.Conflicts, names),
	}
	var line []string
	add := func(d v1alpha1.DeviceStatus, of device.Device) {
		d.Excluded = f.excluded(of.GPU)
		d.ExtendedResource = resources[d.UUID]
		d.Sharing = f.sharing(d, of, offers)
		d.ExtendedResourceState = f.limits(d)
		for _, h := range d.Holders {
			line = append(line, d.Name+"="+describe(h))
		}
		status.Devices = append(status.Devices, d)
	}
	for _, gpu := range f.Inventory.GPUs {
		whole := v1alpha1.DeviceStatus{
			Name: names[gpu.Ref()], UUID: gpu.UUID, Model: gpu.ProductName, UnhealthyReason: fault(gpu.Health), Holders: holders[gpu.Ref()],
		}
		add(whole, device.Device{GPU: gpu})
		for _, p := range gpu.Partitions {
			part := v1alpha1.DeviceStatus{
				Name: names[p.Ref], UUID: p.UUID, Parent: whole.Name, Profile: p.Profile, Model: gpu.ProductName,
				UnhealthyReason: fault(device.Device{GPU: gpu, Partition: p}.Health()), Holders: holders[p.Ref],
			}
			if part.UUID == "" {
				part.UnhealthyReason = cmp.Or(part.UnhealthyReason, noComputeInstance)
			}
			add(part, device.Device{GPU: gpu, Partition: p})
		}
	}
	node := availability.NewNode(status, nil)
	for _, d := range status.Devices {
		counts := &status.Counts
		if d.Parent != "" && !d.Excluded {
			status.Partitions = cmp.Or(status.Partitions, &v1alpha1.DeviceCounts{})
			counts = status.Partitions
		}
		if !d.Excluded {
			node.Count(counts, d)
		}
	}
	status.Holders = strings.Join(line, " ")
	for _, d := range f.Daemons {
		status.Daemons = append(status.Daemons, v1alpha1.MPSDaemon{
			Name: d.Name, Devices: d.Settings.Devices, ActiveThreadPercentage: d.Settings.ActiveThreadPercentage,
			PinnedMemoryMiB: d.Settings.PinnedMemoryMiB, MultiUser: d.Settings.MultiUser, DriverRoot: d.Settings.DriverRoot,
			Generation: d.Settings.Generation,
		})
	}
	status.UnknownDaemons = f.UnknownDaemons
	return status
}

// noComputeInstance is the fault of a partition that is not complete.
const noComputeInstance = "its GPU instance has no compute instance"

func (f Facts) excluded(g device.GPU) bool { return f.Excluded != nil && f.Excluded(g) }

// podGPUs are those that limits may have something of.
func (f Facts) podGPUs() []device.GPU {
	return slices.DeleteFunc(slices.Clone(f.Inventory.GPUs), func(g device.GPU) bool {
		return f.Limits.GPU == "" || f.OfferedToPods != nil && !f.OfferedToPods(g)
	})
}

// offers are what limits can ask for.
func (f Facts) offers() []device.Offer {
	offers, _ := f.Limits.Offers(f.podGPUs())
	return offers
}

// resources by which limits ask for devices, by UUID. What kubelet lists, it lists under that name.
func (f Facts) resources(offers []device.Offer) map[string]string {
	if f.Limits.GPU == "" {
		return nil
	}
	of := map[string]string{}
	for _, offer := range offers {
		of[offer.Device.UUID()] = offer.Resource
	}
	for _, gpu := range f.podGPUs() {
		if gpu.Dynamic && of[gpu.UUID] == "" {
			of[gpu.UUID] = f.Limits.GPU // once it is not partitioned any more
		}
	}
	// In order, since kubelet may list a device by two resources while one of them goes.
	for _, resource := range slices.Sorted(maps.Keys(f.Allocatable)) {
		for _, id := range f.Allocatable[resource] {
			// Replicas of before, under another name, are not what the device is asked for by now.
			if uuid := device.HardwareUUID(id); uuid == id || of[uuid] == "" {
				of[uuid] = resource
			}
		}
	}
	return of
}

// deviceNames gives every device a name that no other has: the list in the API is keyed by it. Two GPUs can have one minor number
// between them after a board was replaced, of which the one that is there keeps the name.
func deviceNames(inv device.Inventory) map[device.Ref]string {
	byName := map[string]device.Device{}
	for _, d := range inv.Devices() {
		if other, taken := byName[d.Name()]; !taken || !other.Health().Healthy() && d.Health().Healthy() {
			byName[d.Name()] = d
		}
	}
	names := map[device.Ref]string{}
	for _, d := range inv.Devices() {
		names[d.Ref()] = d.Name()
		if byName[d.Name()].Ref() != d.Ref() {
			names[d.Ref()] = d.UUID()
		}
	}
	return names
}

// limits is what kubelet says, unless less is known already to be true: a GPU with a fault, or whose last holder is gone and runs
// on, is taken back in the same moment, and the scheduler should hear that without waiting for kubelet to have heard it.
func (f Facts) limits(d v1alpha1.DeviceStatus) v1alpha1.ExtendedResourceState {
	draining := func(h v1alpha1.DeviceHolder) bool { return h.State == v1alpha1.HoldDraining }
	allocatable, acknowledged := f.Allocatable[d.ExtendedResource]
	switch {
	case d.ExtendedResource == "" || !acknowledged:
		return ""
	case d.Sharing != nil && d.Sharing.Allocatable > 0 && d.UnhealthyReason == "":
		// The scheduler is told how many; one that drains is among the holders.
		return v1alpha1.ExtendedResourceAllocatable
	case slices.Contains(allocatable, d.UUID) && d.UnhealthyReason == "" && !slices.ContainsFunc(d.Holders, draining):
		return v1alpha1.ExtendedResourceAllocatable
	default:
		return v1alpha1.ExtendedResourceWithdrawn
	}
}

// sharing returns nil for a device that is not shared and has no holder of a replica.
func (f Facts) sharing(d v1alpha1.DeviceStatus, of device.Device, offers []device.Offer) *v1alpha1.DeviceSharing {
	policy := of.Sharing()
	s := &v1alpha1.DeviceSharing{Strategy: string(policy.Strategy), MemoryShares: policy.MemoryShares, Memory: int64(of.MemoryBytes())}
	replica := func(share device.Share) { s.Memory, s.ReplicaMemory = int64(share.Of), int64(share.Bytes) }
	for _, offer := range offers {
		if offer.Device.Ref() == of.Ref() && !offer.Share.Whole() {
			s.Replicas++
			replica(offer.Share)
		}
	}
	listed := slices.DeleteFunc(slices.Clone(f.Allocatable[d.ExtendedResource]), func(id string) bool {
		return id == d.UUID || device.HardwareUUID(id) != d.UUID
	})
	s.Allocatable = int32(len(listed))
	if s.Replicas == 0 && len(listed) > 0 {
		s.Replicas = s.Allocatable
		for _, h := range f.Holds {
			if h.Device == of.Ref() && h.Holder.Kind == ledger.KindPod && !h.Share.Whole() {
				replica(h.Share)
			}
		}
	}
	if !policy.Shared() && s.Replicas == 0 {
		return nil
	}
	return s
}

func fault(h device.Health) string {
	switch {
	case h.Healthy():
		return ""
	case h.Message == "":
		return h.Reason
	default:
		return h.Reason + ": " + h.Message
	}
}

// holdersByDevice has each holder of a device once. Who has a partition that is not there, or not yet, is told with its GPU.
func holdersByDevice(inv device.Inventory, holds []ledger.Hold) map[device.Ref][]v1alpha1.DeviceHolder {
	holds = slices.Clone(holds)
	slices.SortFunc(holds, func(a, b ledger.Hold) int {
		return cmp.Or(
			cmp.Compare(a.Holder.Kind, b.Holder.Kind), cmp.Compare(a.Holder.ID, b.Holder.ID),
			cmp.Compare(a.Device.String(), b.Device.String()))
	})
	there := map[device.Ref]bool{}
	for _, d := range inv.Devices() {
		there[d.Ref()] = true
	}
	type place struct {
		device device.Ref
		holder ledger.Holder
	}
	seen := map[place]bool{}
	holders := map[device.Ref][]v1alpha1.DeviceHolder{}
	for _, h := range holds {
		at := place{h.Device, h.Holder}
		if !there[h.Device] {
			at.device = device.Ref{GPU: h.Device.GPU}
		}
		if !seen[at] {
			seen[at] = true
			holders[at.device] = append(holders[at.device], holder(h))
		}
	}
	return holders
}

func holder(h ledger.Hold) v1alpha1.DeviceHolder {
	shown := v1alpha1.DeviceHolder{Kind: v1alpha1.HolderPod, State: state(h.State), Memory: int64(h.Share.Bytes), Namespace: h.Namespace, Name: h.Name}
	if h.Holder.Kind == ledger.KindClaim {
		shown.Kind, shown.UID = v1alpha1.HolderClaim, types.UID(h.Holder.ID)
	}
	for _, p := range h.Pods {
		shown.Pods = append(shown.Pods, v1alpha1.PodReference{UID: types.UID(p.UID), Namespace: p.Namespace, Name: p.Name})
	}
	slices.SortFunc(shown.Pods, func(a, b v1alpha1.PodReference) int { return cmp.Compare(a.UID, b.UID) })
	return shown
}

func state(s ledger.State) v1alpha1.HoldState {
	switch s {
	case ledger.StateRestored:
		return v1alpha1.HoldRestored
	case ledger.StateDraining:
		return v1alpha1.HoldDraining
	default:
		return v1alpha1.HoldHeld
	}
}

// describe names a holder in a word: the claim, or the pod of a limit.
func describe(h v1alpha1.DeviceHolder) string {
	name, kind := "?", "claim"
	switch {
	case h.Kind == v1alpha1.HolderClaim && h.Name != "":
		name = h.Namespace + "/" + h.Name
	case h.Kind == v1alpha1.HolderClaim:
		name = string(h.UID)
	default:
		kind = "pod"
		if len(h.Pods) > 0 && h.Pods[0].Name != "" {
			name = h.Pods[0].Namespace + "/" + h.Pods[0].Name
		} else if len(h.Pods) > 0 {
			name = string(h.Pods[0].UID)
		}
	}
	return fmt.Sprintf("%s(%s)", name, kind)
}

func conflicts(lost []ledger.Conflict, names map[device.Ref]string) []v1alpha1.ConflictingClaim {
	var claims []v1alpha1.ConflictingClaim
	for _, l := range lost {
		devices := map[string]bool{}
		for i, ref := range l.Devices {
			var name string
			if i < len(l.Names) {
				name = l.Names[i]
			}
			devices[cmp.Or(name, names[ref], names[device.Ref{GPU: ref.GPU}], ref.GPU)] = true
		}
		pods := map[types.UID]bool{}
		for _, pod := range l.Pods {
			pods[types.UID(pod.UID)] = true
		}
		claims = append(claims, v1alpha1.ConflictingClaim{
			UID: types.UID(l.UID), Namespace: l.Namespace, Name: l.Name,
			Devices: slices.Sorted(maps.Keys(devices)), Pods: slices.Sorted(maps.Keys(pods)),
			// No finer than the API keeps it, or what is stored would never be what it should be.
			Since: metav1.NewMicroTime(l.Since.Truncate(time.Microsecond)), PendingEviction: l.PendingEviction, Message: l.Message,
		})
	}
	slices.SortFunc(claims, func(a, b v1alpha1.ConflictingClaim) int { return cmp.Compare(a.UID, b.UID) })
	return claims
}
