// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// The interval between two evictions for one loss doubles. A loss that did not happen again for evictionForget starts anew.
	evictionInterval    = 10 * time.Second
	evictionIntervalMax = 5 * time.Minute
	evictionForget      = 5 * time.Minute
	// evictionsMax bounds the memory: an entry has less than 500 bytes.
	evictionsMax = 4096
)

// loss identifies what must not happen in a loop: each new pod of an owner gets the same device, and loses it.
type loss struct {
	owner        types.UID
	node, device string
}

// evictions limits how often one owner's pods are evicted for one device. Its memory ends with the process: a new leader starts
// anew. Only one worker uses it.
type evictions struct {
	now    func() time.Time
	losses map[loss]*evicted
}

// evicted is when pods of an owner were last evicted for a loss. Only a pod that was created after last repeats the loss: memory
// shares, for example, let several pods of one owner lose a device at once. last has seconds, like creation times.
type evicted struct {
	interval   time.Duration
	next, last time.Time
}

// repeatedBy reports whether a pod created at that time repeats the loss.
func (v *evicted) repeatedBy(created time.Time) bool {
	return v != nil && created.After(v.last)
}

func newEvictions(now func() time.Time) *evictions {
	return &evictions{now: now, losses: map[loss]*evicted{}}
}

// lossesOf returns the losses of devices that an eviction of pods is for, each with the creation time of its newest pod.
func lossesOf(node string, devices []string, pods ...*corev1.Pod) map[loss]time.Time {
	losses := map[loss]time.Time{}
	for _, pod := range pods {
		for _, device := range devices {
			l := loss{controllerOf(pod), node, device}
			if newest, known := losses[l]; !known || pod.CreationTimestamp.After(newest) {
				losses[l] = pod.CreationTimestamp.Time
			}
		}
	}
	return losses
}

// controllerOf returns the UID of a pod's controller, and that of the pod if it has none.
func controllerOf(pod *corev1.Pod) types.UID {
	if of := metav1.GetControllerOfNoCopy(pod); of != nil {
		return of.UID
	}
	return pod.UID
}

// wait returns how long no pod may be evicted for one of the losses; zero if it may be now.
func (e *evictions) wait(losses map[loss]time.Time) (longest time.Duration) {
	for l, created := range losses {
		if before := e.losses[l]; before.repeatedBy(created) {
			longest = max(longest, before.next.Sub(e.now()))
		}
	}
	return longest
}

func (e *evictions) record(losses map[loss]time.Time) {
	now := e.now()
	maps.DeleteFunc(e.losses, func(_ loss, v *evicted) bool { return now.Sub(v.next) >= evictionForget })
	for l, created := range losses {
		v := e.losses[l]
		if v == nil {
			e.makeRoom()
			v = &evicted{interval: evictionInterval}
			e.losses[l] = v
		} else if !v.repeatedBy(created) {
			continue // It lost together with those evicted before. last stays, so that their successors count.
		}
		v.next, v.interval, v.last = now.Add(v.interval), min(2*v.interval, evictionIntervalMax), now.Truncate(time.Second)
	}
}

// makeRoom drops the entry that ends first if there are too many.
func (e *evictions) makeRoom() {
	if len(e.losses) < evictionsMax {
		return
	}
	var first loss
	for l, v := range e.losses {
		if chosen := e.losses[first]; chosen == nil || v.next.Before(chosen.next) {
			first = l
		}
	}
	delete(e.losses, first)
}
