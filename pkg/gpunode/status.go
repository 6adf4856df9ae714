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
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Facts are everything that the status says, as it was at one moment.
type Facts struct {
	Mode string
	// LimitsResource is empty where no limits are served.
	LimitsResource string
	// Generation of the spec that the agent acts on.
	Generation int64
	Inventory  device.Inventory
	Holds      []ledger.Hold
	Losers     []ledger.Loser
	// Allocatable are the device IDs that kubelet itself calls allocatable, which means something while Acknowledged is set.
	Allocatable  []string
	Acknowledged bool
}

// Status is what the node's GPUNode should say. It is a pure function, for the agent and for simulations: equal facts give
// equal statuses, whatever the order of holds.
func Status(f Facts) v1alpha1.GPUNodeStatus {
	names := deviceNames(f.Inventory)
	holders := holdersByGPU(f.Holds)
	status := v1alpha1.GPUNodeStatus{
		Mode: f.Mode, ObservedGeneration: f.Generation, LimitsResource: f.LimitsResource,
		Losers: losers(f.Losers, names),
	}
	var line []string
	for _, gpu := range f.Inventory.GPUs {
		d := v1alpha1.DeviceStatus{
			Name: names[gpu.UUID], UUID: gpu.UUID, Model: gpu.ProductName, Fault: fault(gpu.Health),
			Holders: holders[gpu.UUID],
		}
		d.Limits = f.limits(d)
		count(&status.Counts, d)
		for _, h := range d.Holders {
			line = append(line, d.Name+"="+describe(h))
		}
		status.Devices = append(status.Devices, d)
	}
	status.Holders = strings.Join(line, " ")
	return status
}

// deviceNames gives every GPU a name that no other has: the list in the API is keyed by it. Two can have one minor number
// between them after a board was replaced, of which the one that is there keeps the name.
func deviceNames(inv device.Inventory) map[string]string {
	byName := map[string]device.GPU{}
	for _, gpu := range inv.GPUs {
		if other, taken := byName[gpu.Name()]; !taken || !other.Health.Healthy() && gpu.Health.Healthy() {
			byName[gpu.Name()] = gpu
		}
	}
	names := make(map[string]string, len(inv.GPUs))
	for _, gpu := range inv.GPUs {
		names[gpu.UUID] = gpu.Name()
		if byName[gpu.Name()].UUID != gpu.UUID {
			names[gpu.UUID] = gpu.UUID
		}
	}
	return names
}

// limits is what kubelet says, unless less is known already to be true: a GPU with a fault, or whose last holder is gone and runs
// on, is taken back in the same moment, and the scheduler should hear that without waiting for kubelet to have heard it.
func (f Facts) limits(d v1alpha1.DeviceStatus) v1alpha1.LimitsState {
	draining := func(h v1alpha1.DeviceHolder) bool { return h.State == v1alpha1.HoldDraining }
	switch {
	case f.LimitsResource == "" || !f.Acknowledged:
		return ""
	case slices.Contains(f.Allocatable, d.UUID) && d.Fault == "" && !slices.ContainsFunc(d.Holders, draining):
		return v1alpha1.LimitsAllocatable
	default:
		return v1alpha1.LimitsWithdrawn
	}
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

func count(counts *v1alpha1.DeviceCounts, d v1alpha1.DeviceStatus) {
	counts.Total++
	switch {
	case d.Fault != "":
		counts.Faulty++
	case heldBy(d, v1alpha1.HolderClaim):
		counts.Claims++
	case heldBy(d, v1alpha1.HolderLimit):
		counts.Limits++
	default:
		counts.Free++
	}
}

func heldBy(d v1alpha1.DeviceStatus, kind v1alpha1.HolderKind) bool {
	return slices.ContainsFunc(d.Holders, func(h v1alpha1.DeviceHolder) bool { return h.Kind == kind })
}

// holdersByGPU has each holder of a GPU once, though it may hold several partitions of it.
func holdersByGPU(holds []ledger.Hold) map[string][]v1alpha1.DeviceHolder {
	holds = slices.Clone(holds)
	slices.SortFunc(holds, func(a, b ledger.Hold) int {
		return cmp.Or(cmp.Compare(a.Holder.Kind, b.Holder.Kind), cmp.Compare(a.Holder.ID, b.Holder.ID), cmp.Compare(a.Device.String(), b.Device.String()))
	})
	type place struct {
		gpu    string
		holder ledger.Holder
	}
	seen := map[place]bool{}
	byGPU := map[string][]v1alpha1.DeviceHolder{}
	for _, h := range holds {
		if at := (place{h.Device.GPU, h.Holder}); !seen[at] {
			seen[at] = true
			byGPU[h.Device.GPU] = append(byGPU[h.Device.GPU], holder(h))
		}
	}
	return byGPU
}

func holder(h ledger.Hold) v1alpha1.DeviceHolder {
	shown := v1alpha1.DeviceHolder{Kind: v1alpha1.HolderLimit, State: state(h.State), Namespace: h.Namespace, Name: h.Name}
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
	case ledger.StateExpected:
		return v1alpha1.HoldExpected
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
		kind = "limit"
		if len(h.Pods) > 0 && h.Pods[0].Name != "" {
			name = h.Pods[0].Namespace + "/" + h.Pods[0].Name
		} else if len(h.Pods) > 0 {
			name = string(h.Pods[0].UID)
		}
	}
	return fmt.Sprintf("%s(%s)", name, kind)
}

func losers(lost []ledger.Loser, names map[string]string) []v1alpha1.LosingClaim {
	var claims []v1alpha1.LosingClaim
	for _, l := range lost {
		devices := map[string]bool{}
		for _, ref := range l.Devices {
			devices[cmp.Or(names[ref.GPU], ref.GPU)] = true
		}
		pods := map[types.UID]bool{}
		for _, pod := range l.Pods {
			pods[types.UID(pod.UID)] = true
		}
		claims = append(claims, v1alpha1.LosingClaim{
			UID: types.UID(l.UID), Namespace: l.Namespace, Name: l.Name, Devices: slices.Sorted(maps.Keys(devices)), Pods: slices.Sorted(maps.Keys(pods)),
			// No finer than the API keeps it, or what is stored would never be what it should be.
			Since: metav1.NewMicroTime(l.Since.Truncate(time.Microsecond)), Condemned: l.Condemned, Message: l.Message,
		})
	}
	slices.SortFunc(claims, func(a, b v1alpha1.LosingClaim) int { return cmp.Compare(a.UID, b.UID) })
	return claims
}
