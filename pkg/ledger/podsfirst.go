// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// PendingPods is a request of a pod that the scheduler has bound to this node and kubelet has not admitted yet.
type PendingPods struct {
	PodUID string
	// Resource is a requested extended resource, Devices the requested number.
	Resource string
	Devices  int
}

// Queue returns the pods that are bound to this node. The ledger calls it with its lock held, so it must not call the ledger.
type Queue interface {
	// PendingPods has an entry for each pod and resource.
	PendingPods() []PendingPods
	// Changed returns a channel that is closed when PendingPods changes next. The caller takes it before it calls PendingPods.
	Changed() <-chan struct{}
}

// Slot is a device, or one of its replicas, that a pod can request.
type Slot struct {
	Device device.Ref
	Share  device.Share
}

// PodsFirst lets a claim wait for pods that kubelet is about to admit. Without a device such a pod fails permanently, and a claim
// does not. All claims of one call share a value.
type PodsFirst struct {
	// Slots by resource: healthy devices that are offered to pods.
	Slots map[string][]Slot
	// WaitBudget is how long to wait at most. ReserveClaim subtracts the time that it waited.
	WaitBudget time.Duration
}

// queueChanged never closes without a queue.
func (l *Ledger) queueChanged() <-chan struct{} {
	if l.queue == nil {
		return nil
	}
	return l.queue.Changed()
}

// Outstanding returns how many devices of each resource bound pods still request, and a channel that is closed when that may have changed
// other than by a hold. The device plugin calls it: a device that it withdraws now would be refused to these pods.
func (l *Ledger) Outstanding() (devices map[string]int, changed <-chan struct{}) {
	changed = l.queueChanged()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.queue == nil {
		return nil, changed
	}
	return l.missing(l.queue.PendingPods()), changed
}

// yields reports whether a claim that takes these devices leaves fewer devices of a resource than bound pods request. Under l.mu.
func (l *Ledger) yields(first *PodsFirst, taken []Hold) bool {
	if first == nil || first.WaitBudget <= 0 || len(taken) == 0 || l.queue == nil {
		return false
	}
	takes := func(s Slot) bool {
		return slices.ContainsFunc(taken, func(h Hold) bool { return h.Device.Overlaps(s.Device) })
	}
	for resource, missing := range l.missing(l.queue.PendingPods()) {
		if slots := first.Slots[resource]; slices.ContainsFunc(slots, takes) && l.free(slots, taken) < missing {
			return true
		}
	}
	return false
}

// free counts the slots that pods can still get beside the holds that a claim is about to take. Under l.mu.
func (l *Ledger) free(slots []Slot, taken []Hold) int {
	free, also := 0, slices.Clone(taken)
	for _, s := range slots {
		if len(l.blockers(Holder{}, s.Device, s.Share, also...)) == 0 {
			free++
			also = append(also, Hold{Holder: Holder{KindPod, fmt.Sprint(free)}, Device: s.Device, Share: s.Share})
		}
	}
	return free
}

// missing returns how many devices of each resource bound pods request and do not hold yet. A hold without a pod counts as one of
// theirs: kubelet writes the pod to its checkpoint right after Allocate. Under l.mu.
func (l *Ledger) missing(bound []PendingPods) map[string]int {
	if len(bound) == 0 {
		return nil
	}
	const unknown = ""
	type account struct{ pod, resource string }
	has := map[account]int{}
	for k, h := range l.holds {
		switch {
		case k.holder.Kind != KindPod:
		case len(h.Pods) > 0:
			has[account{h.Pods[0].UID, h.Resource}]++
		case h.State == StateHeld:
			has[account{unknown, h.Resource}]++
		}
	}
	missing := map[string]int{}
	for _, pod := range bound {
		missing[pod.Resource] += max(0, pod.Devices-has[account{pod.PodUID, pod.Resource}])
	}
	for resource := range missing {
		missing[resource] = max(0, missing[resource]-has[account{unknown, resource}])
	}
	return missing
}

// awaitPods waits until one of the channels is closed, ctx is done or the wait budget is spent, and subtracts the time that it waited.
func awaitPods(ctx context.Context, first *PodsFirst, changed, queueChanged <-chan struct{}) {
	started := time.Now()
	timer := time.NewTimer(first.WaitBudget)
	defer timer.Stop()
	select {
	case <-changed:
	case <-queueChanged:
	case <-ctx.Done():
	case <-timer.C:
		first.WaitBudget = 0
	}
	first.WaitBudget = max(0, first.WaitBudget-time.Since(started))
}
