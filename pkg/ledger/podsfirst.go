// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// PendingPods is what a pod asks for by its limits that the scheduler has bound to this node, and that kubelet has not admitted yet.
type PendingPods struct {
	PodUID string
	// Resource is one of the extended resources that it asks for, Devices how many of it.
	Resource string
	Devices  int
}

// Queue knows the limits pods that are bound to this node. It is asked with the ledger locked, and must not ask the ledger.
type Queue interface {
	// PendingPods has an entry for each pod and resource.
	PendingPods() []PendingPods
	// Changed returns a channel that is closed when Bound next changes. It is taken before Bound is asked.
	Changed() <-chan struct{}
}

// Slot is what a limit can ask for: a device, or one of its replicas.
type Slot struct {
	Device device.Ref
	Share  device.Share
}

// PodsFirst lets a claim wait for pods that kubelet is about to admit. Without a device such a pod fails permanently, and a claim
// does not. All claims of one call share a value.
type PodsFirst struct {
	// Slots that limits may use, by the resource that asks for them: offered to them, and healthy.
	Slots map[string][]Slot
	// WaitBudget is how long to wait at most. ReserveClaim takes off what it has waited.
	WaitBudget time.Duration
}

// queueChanged never closes without a queue.
func (l *Ledger) queueChanged() <-chan struct{} {
	if l.queue == nil {
		return nil
	}
	return l.queue.Changed()
}

// Outstanding is how many devices of each resource limits pods still ask for that are bound to this node, and a channel that is
// closed when that may have changed by something else than a hold. The front-end of limits asks: what it takes back from kubelet
// now, those pods would be refused. It is safe for concurrent use.
func (l *Ledger) Outstanding() (devices map[string]int, changed <-chan struct{}) {
	changed = l.queueChanged()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.queue == nil {
		return nil, changed
	}
	return l.missing(l.queue.PendingPods()), changed
}

// yields reports whether a claim that is about to take these devices leaves less of a resource than what bound limits pods ask
// for. Under l.mu.
func (l *Ledger) yields(y *PodsFirst, taken []Hold) bool {
	if y == nil || y.WaitBudget <= 0 || len(taken) == 0 || l.queue == nil {
		return false
	}
	takes := func(s Slot) bool {
		return slices.ContainsFunc(taken, func(h Hold) bool { return h.Device.Overlaps(s.Device) })
	}
	for resource, missing := range l.missing(l.queue.PendingPods()) {
		if slots := y.Slots[resource]; slices.ContainsFunc(slots, takes) && l.free(slots, taken) < missing {
			return true
		}
	}
	return false
}

// free counts the slots that limits can still have beside what a claim is about to take. Under l.mu.
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

// missing is how many devices of each resource bound pods ask for and do not have yet. A limit whose pod is not known yet is
// taken for one of theirs: kubelet writes down whose it is right after the Allocate. Under l.mu.
func (l *Ledger) missing(bound []PendingPods) map[string]int {
	if len(bound) == 0 {
		return nil
	}
	const nobody = ""
	type account struct{ pod, resource string }
	has := map[account]int{}
	for k, h := range l.holds {
		switch {
		case k.holder.Kind != KindPod:
		case len(h.Pods) > 0:
			has[account{h.Pods[0].UID, h.Resource}]++
		case h.State == StateHeld:
			has[account{nobody, h.Resource}]++
		}
	}
	missing := map[string]int{}
	for _, pod := range bound {
		missing[pod.Resource] += max(0, pod.Devices-has[account{pod.PodUID, pod.Resource}])
	}
	for resource := range missing {
		missing[resource] = max(0, missing[resource]-has[account{nobody, resource}])
	}
	return missing
}

// awaitPods waits until one of the channels is closed, ctx is done, or the patience is at its end, and takes off what it
// waited.
func awaitPods(ctx context.Context, y *PodsFirst, changed, queueChanged <-chan struct{}) {
	started := time.Now()
	timer := time.NewTimer(y.WaitBudget)
	defer timer.Stop()
	select {
	case <-changed:
	case <-queueChanged:
	case <-ctx.Done():
	case <-timer.C:
		y.WaitBudget = 0
	}
	y.WaitBudget = max(0, y.WaitBudget-time.Since(started))
}
