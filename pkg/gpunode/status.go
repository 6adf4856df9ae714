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

// Facts are everything that the status contains, at one moment.
type Facts struct {
	Mode string
	// Limits are the extended resources that the node serves; zero for none.
	Limits device.Resources
	// OfferedToPods selects the GPUs that extended resources offer, whole or in partitions; nil selects all. It must be pure.
	OfferedToPods func(device.GPU) bool
	// FaultAction returns what the node configuration says of a fault; nil for nothing. It must be pure.
	FaultAction func(gpu device.GPU, fault device.Health) device.FaultAction
	// Excluded selects the GPUs that are excluded from both APIs; nil selects none. It must be pure.
	Excluded func(device.GPU) bool
	// Waiting is why new pods and claims get no GPU; empty while they get GPUs. BootID is the kernel's.
	Waiting, BootID string
	// Generation of the spec that the agent acts on.
	Generation int64
	Inventory  device.Inventory
	// Unread is set while no GPU can be read. A GPU that is held and not in the inventory is not lost then.
	Unread    bool
	Holds     []ledger.Hold
	Conflicts []ledger.Conflict
	// Allocatable are the device IDs that kubelet reports as allocatable, by resource. A resource is missing until kubelet reports it.
	Allocatable map[string][]string
	// Maintenance are the GPUs that an administrator has taken out of service.
	Maintenance []v1alpha1.GPUMaintenance
	// Taints returns the taints of a device by its GPU and its own name; nil for none. It must be pure.
	Taints func(gpu device.GPU, name string) []v1alpha1.DeviceTaint
	// Daemons are those to run, by name. UnknownDaemons may run too.
	Daemons        []sharing.Daemon
	UnknownDaemons []string
}

// Status returns the status of the node's GPUNode. It is a pure function, for the agent and for simulations. The order of holds does not
// matter.
func Status(f Facts) v1alpha1.GPUNodeStatus {
	devices, unknown := f.Inventory.Devices(), f.heldUnknown()
	names := deviceNames(devices)
	for _, d := range unknown {
		names[d.Ref()] = d.UUID()
	}
	devices = append(devices, unknown...)
	holders := holdersByDevice(devices, f.Holds)
	offers, _ := f.Limits.Offers(f.podGPUs())
	resources, replicas, listed := f.resources(offers), replicasOf(offers), f.listed()
	status := v1alpha1.GPUNodeStatus{
		Mode: f.Mode, ObservedGeneration: f.Generation, ExtendedResource: f.Limits.GPU, Conflicts: conflicts(f.Conflicts, names),
		UnknownDaemons: f.UnknownDaemons, Waiting: f.Waiting, BootID: f.BootID,
	}
	var line []string
	for _, of := range devices {
		d := v1alpha1.DeviceStatus{
			Name: names[of.Ref()], UUID: of.UUID(), Profile: of.Partition.Profile, Model: of.GPU.ProductName,
			UnhealthyReason: of.Health().String(), Holders: holders[of.Ref()], Excluded: f.Excluded != nil && f.Excluded(of.GPU),
		}
		if of.Whole() {
			d.Slowdown = of.GPU.Slowdown
		} else {
			d.Parent = names[of.GPU.Ref()]
		}
		if d.UUID == "" {
			d.UnhealthyReason = cmp.Or(d.UnhealthyReason, "its GPU instance has no compute instance")
		}
		d.Repair = v1alpha1.Repair(of.Health().Repair())
		d.Maintenance, d.Taints = f.maintenance(of.GPU.UUID), evicting(of.Health())
		d.ExtendedResource = resources[d.UUID]
		// A GPU in static partitions is no device for claims, nor for pods without a resource.
		if f.Taints != nil && !(of.Whole() && isStatic(of.GPU) && d.ExtendedResource == "") {
			d.Taints = append(d.Taints, f.Taints(of.GPU, d.Name)...)
		}
		lists := listed[d.ExtendedResource][d.UUID]
		d.Sharing = f.sharing(of, replicas[of.Ref()], lists.replicas)
		d.ExtendedResourceState = f.state(of, d, lists.whole)
		for _, h := range d.Holders {
			line = append(line, d.Name+"="+describe(h))
		}
		status.Devices = append(status.Devices, d)
	}
	status.Holders = strings.Join(line, " ")
	node := availability.NewNode(status, nil)
	for _, d := range status.Devices {
		switch {
		case d.Excluded:
		case d.Parent == "":
			node.Count(&status.Counts, d)
		default:
			status.Partitions = cmp.Or(status.Partitions, &v1alpha1.DeviceCounts{})
			node.Count(status.Partitions, d)
		}
	}
	for _, d := range f.Daemons {
		status.Daemons = append(status.Daemons, v1alpha1.MPSDaemon{Name: d.Name, MPSSettings: v1alpha1.MPSSettings(d.Settings)})
	}
	return status
}

// isStatic reports whether a GPU has static partitions.
func isStatic(g device.GPU) bool { return !g.Dynamic && len(g.Partitions) > 0 }

// maintenance returns the entry of a GPU; nil if it is in service.
func (f Facts) maintenance(uuid string) *v1alpha1.DeviceMaintenance {
	entry, found := v1alpha1.GPUNodeSpec{Maintenance: f.Maintenance}.MaintenanceOf(uuid)
	if !found {
		return nil
	}
	return &v1alpha1.DeviceMaintenance{Reason: entry.Reason, Since: entry.Since}
}

// evicting returns the taints, without a time, of a device whose holders are evicted. Claims see the same ones in the slices.
func evicting(health device.Health) (taints []v1alpha1.DeviceTaint) {
	if !health.Evict {
		return nil
	}
	for _, t := range health.Taints() {
		taints = append(taints, v1alpha1.DeviceTaint{Taint: v1alpha1.Taint{Key: t.Key, Value: t.Value, Effect: v1alpha1.TaintNoExecute}})
	}
	return taints
}

// heldUnknown returns the GPUs that have holders and are not in the inventory, as without a driver.
func (f Facts) heldUnknown() []device.Device {
	var unknown []device.Device
	for _, h := range f.Holds {
		_, known := f.Inventory.ByUUID(h.Device.GPU)
		if !known && !slices.ContainsFunc(unknown, func(d device.Device) bool { return d.GPU.UUID == h.Device.GPU }) {
			gpu := device.GPU{UUID: h.Device.GPU, Health: device.Health{Reason: device.ReasonMissing, Message: "not in the inventory"}}
			if f.Unread {
				gpu.Health = device.Health{Reason: device.ReasonNotRead, Message: "it cannot be read without the driver"}
			} else {
				gpu.Health.Evict = f.FaultAction != nil && f.FaultAction(gpu, gpu.Health) == device.FaultNoExecute
			}
			unknown = append(unknown, device.Device{GPU: gpu})
		}
	}
	slices.SortFunc(unknown, func(a, b device.Device) int { return cmp.Compare(a.GPU.UUID, b.GPU.UUID) })
	return unknown
}

// podGPUs returns the GPUs that extended resources offer, whole or in partitions.
func (f Facts) podGPUs() []device.GPU {
	return slices.DeleteFunc(slices.Clone(f.Inventory.GPUs), func(g device.GPU) bool {
		return f.Limits.GPU == "" || f.OfferedToPods != nil && !f.OfferedToPods(g)
	})
}

// resources returns the extended resource of each device, by UUID.
func (f Facts) resources(offers []device.Offer) map[string]string {
	if f.Limits.GPU == "" {
		return nil
	}
	of := map[string]string{}
	for _, gpu := range f.podGPUs() {
		if gpu.Dynamic {
			of[gpu.UUID] = f.Limits.GPU // once it has no partitions
		}
	}
	for _, offer := range offers {
		of[offer.Device.UUID()] = offer.Resource
	}
	// A device has the resource under which kubelet lists it. In order, since kubelet may list it under two while one of them ends.
	for _, resource := range slices.Sorted(maps.Keys(f.Allocatable)) {
		for _, id := range f.Allocatable[resource] {
			// Former replicas under another resource do not count.
			if uuid := device.HardwareUUID(id); uuid == id || of[uuid] == "" {
				of[uuid] = resource
			}
		}
	}
	return of
}

// deviceNames returns a unique name for each device: the list in the API has it as its key. After a board was replaced two GPUs can
// have the same minor number. The healthy one keeps the name.
func deviceNames(devices []device.Device) map[device.Ref]string {
	owners := make(map[string]int, len(devices))
	for i, d := range devices {
		if other, taken := owners[d.Name()]; !taken || !devices[other].Health().Healthy() && d.Health().Healthy() {
			owners[d.Name()] = i
		}
	}
	names := make(map[device.Ref]string, len(devices))
	for i, d := range devices {
		names[d.Ref()] = d.Name()
		if owners[d.Name()] != i {
			names[d.Ref()] = d.UUID()
		}
	}
	return names
}

// listing is what kubelet lists as allocatable of a device.
type listing struct {
	whole    bool
	replicas int32
}

// listed returns what kubelet lists, by resource and UUID.
func (f Facts) listed() map[string]map[string]listing {
	all := map[string]map[string]listing{}
	for resource, ids := range f.Allocatable {
		all[resource] = make(map[string]listing, len(ids))
		for _, id := range ids {
			uuid := device.HardwareUUID(id)
			of := all[resource][uuid]
			if uuid == id {
				of.whole = true
			} else {
				of.replicas++
			}
			all[resource][uuid] = of
		}
	}
	return all
}

// replicasOf returns the shares of the replicas that extended resources offer of each device.
func replicasOf(offers []device.Offer) map[device.Ref][]device.Share {
	shares := map[device.Ref][]device.Share{}
	for _, offer := range offers {
		if !offer.Share.Whole() {
			shares[offer.Device.Ref()] = append(shares[offer.Device.Ref()], offer.Share)
		}
	}
	return shares
}

// state returns what kubelet reports of a device. An unhealthy or draining device is withdrawn at once, before kubelet reports it. So is a device
// out of service that no pod has. If a pod has the device, only HealthForHolder counts: kubelet keeps counting a device that is paused, for
// example. listed is whether kubelet lists the whole device.
func (f Facts) state(of device.Device, d v1alpha1.DeviceStatus, listed bool) v1alpha1.ExtendedResourceState {
	draining := func(h v1alpha1.DeviceHolder) bool { return h.State == v1alpha1.HoldDraining }
	byPod := func(h v1alpha1.DeviceHolder) bool { return h.Kind == v1alpha1.HolderPod }
	held, health := slices.ContainsFunc(d.Holders, byPod), of.Health()
	if held {
		health = of.HealthForHolder()
	}
	_, reported := f.Allocatable[d.ExtendedResource]
	switch {
	case d.ExtendedResource == "" || !reported:
		return ""
	case !health.Healthy() || d.UUID == "", d.OutOfService() && !held:
		return v1alpha1.ExtendedResourceWithdrawn
	case d.Sharing != nil && d.Sharing.Allocatable > 0: // a replica that is draining is one of the holders
		return v1alpha1.ExtendedResourceAllocatable
	case listed && !slices.ContainsFunc(d.Holders, draining):
		return v1alpha1.ExtendedResourceAllocatable
	default:
		return v1alpha1.ExtendedResourceWithdrawn
	}
}

// sharing returns nil for a device that is not shared and has no holder of a replica. listed is how many replicas kubelet lists.
func (f Facts) sharing(of device.Device, offered []device.Share, listed int32) *v1alpha1.DeviceSharing {
	policy := of.Sharing()
	s := &v1alpha1.DeviceSharing{
		Strategy: string(policy.Strategy), Claims: v1alpha1.ClaimSharing(policy.Claims), Memory: int64(of.MemoryBytes()), Shares: int64(policy.Shares),
		Replicas: int32(len(offered)), Allocatable: listed,
	}
	if s.Replicas == 0 && listed > 0 {
		s.Replicas = listed
		for _, h := range f.Holds {
			if h.Device == of.Ref() && h.Holder.Kind == ledger.KindPod && !h.Share.Whole() {
				offered = append(offered, h.Share)
			}
		}
	}
	for _, share := range offered {
		s.Memory, s.ReplicaMemory, s.ReplicaShares = int64(share.Of), int64(share.Bytes), int64(share.Count)
	}
	if !policy.Shared() && s.Replicas == 0 {
		return nil
	}
	return s
}

// holdersByDevice returns each holder of a device once. The holder of a partition that does not exist is listed with its GPU.
func holdersByDevice(devices []device.Device, holds []ledger.Hold) map[device.Ref][]v1alpha1.DeviceHolder {
	holds = slices.Clone(holds)
	slices.SortFunc(holds, func(a, b ledger.Hold) int {
		return cmp.Or(
			cmp.Compare(a.Holder.Kind, b.Holder.Kind), cmp.Compare(a.Holder.ID, b.Holder.ID),
			cmp.Compare(a.Device.String(), b.Device.String()))
	})
	exists := map[device.Ref]bool{}
	for _, d := range devices {
		exists[d.Ref()] = true
	}
	type entry struct {
		device device.Ref
		holder ledger.Holder
	}
	seen := map[entry]bool{}
	holders := map[device.Ref][]v1alpha1.DeviceHolder{}
	for _, h := range holds {
		at := entry{h.Device, h.Holder}
		if !exists[h.Device] {
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
	entry := v1alpha1.DeviceHolder{
		Kind: v1alpha1.HolderPod, State: v1alpha1.HoldHeld, Namespace: h.Namespace, Name: h.Name,
		Shared: !h.Share.Whole(), Memory: int64(h.Share.Bytes), Shares: int64(h.Share.Count),
	}
	if h.Holder.Kind == ledger.KindClaim {
		entry.Kind, entry.UID = v1alpha1.HolderClaim, types.UID(h.Holder.ID)
	}
	switch {
	case h.State == ledger.StateDraining, h.Deserted:
		entry.State = v1alpha1.HoldDraining
	case h.State == ledger.StateRestored:
		entry.State = v1alpha1.HoldRestored
	}
	if h.WaitsFor != "" {
		since := metav1.NewMicroTime(h.WaitsSince.Truncate(time.Microsecond))
		entry.WaitsFor, entry.WaitsSince = h.WaitsFor, &since
	}
	for _, p := range h.Pods {
		entry.Pods = append(entry.Pods, v1alpha1.PodReference{UID: types.UID(p.UID), Namespace: p.Namespace, Name: p.Name})
	}
	slices.SortFunc(entry.Pods, func(a, b v1alpha1.PodReference) int { return cmp.Compare(a.UID, b.UID) })
	return entry
}

// describe returns the claim or pod of a holder, such as "default/train(claim)".
func describe(h v1alpha1.DeviceHolder) string {
	kind, named := "claim", v1alpha1.PodReference{UID: h.UID, Namespace: h.Namespace, Name: h.Name}
	if h.Kind == v1alpha1.HolderPod {
		kind, named = "pod", v1alpha1.PodReference{}
		if len(h.Pods) > 0 {
			named = h.Pods[0]
		}
	}
	if named.Name != "" {
		return fmt.Sprintf("%s/%s(%s)", named.Namespace, named.Name, kind)
	}
	return fmt.Sprintf("%s(%s)", cmp.Or(string(named.UID), "?"), kind)
}

func conflicts(found []ledger.Conflict, names map[device.Ref]string) []v1alpha1.ConflictingClaim {
	var claims []v1alpha1.ConflictingClaim
	for _, c := range found {
		devices := map[string]bool{}
		for i, ref := range c.Devices {
			var name string
			if i < len(c.Names) {
				name = c.Names[i]
			}
			devices[cmp.Or(name, names[ref], names[device.Ref{GPU: ref.GPU}], ref.GPU)] = true
		}
		pods := map[types.UID]bool{}
		for _, pod := range c.Pods {
			pods[types.UID(pod.UID)] = true
		}
		claims = append(claims, v1alpha1.ConflictingClaim{
			UID: types.UID(c.UID), Namespace: c.Namespace, Name: c.Name,
			Devices: slices.Sorted(maps.Keys(devices)), Pods: slices.Sorted(maps.Keys(pods)),
			// The API keeps microseconds. A finer time would differ from the stored one forever.
			Since: metav1.NewMicroTime(c.Since.Truncate(time.Microsecond)), PendingEviction: c.PendingEviction, Message: c.Message,
		})
	}
	slices.SortFunc(claims, func(a, b v1alpha1.ConflictingClaim) int { return cmp.Compare(a.UID, b.UID) })
	return claims
}
