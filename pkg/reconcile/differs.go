// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// reportDifferences reports in an event on the node each hold whose device has not been what its holder got for a while: another program
// changes MIG on a GPU that no process uses, although a pod has it. Such a hold blocks what it blocked before. It returns the holds with
// such a device, and when to look again if nothing changes.
func (r *Reconciler) reportDifferences(known map[holdKey]*waiting, now time.Time) (map[holdKey]*waiting, time.Duration) {
	current, next := map[holdKey]*waiting{}, never
	inventory := r.Inventory.Inventory()
	for _, h := range r.Ledger.Holds() {
		difference := r.difference(h, inventory)
		if difference == "" {
			continue
		}
		k := holdKey{holder: h.Holder, device: h.Device}
		w := cmp.Or(known[k], &waiting{since: now})
		current[k] = w
		// While the agent prepares a claim or ends one, a GPU changes for a moment.
		due := w.since.Add(r.times.waitReported)
		switch {
		case w.reported:
		case now.Before(due):
			next = min(next, due.Sub(now))
		default:
			w.reported = true
			r.Recorder.Eventf(regarding.Node(r.NodeName), corev1.EventTypeWarning, "HeldDeviceChanged",
				"%s, but it has been given to %s: the containers of this holder cannot use it as before. Another program has changed MIG on a GPU that is in use. "+
					"No other holder gets it before this holder ends. Delete the pods of this holder, or restore the GPU. "+
					"Drain a GPU before its MIG configuration is changed (kubectl gpu drain)", difference, h)
		}
	}
	return current, next
}

// difference says what another program has done to the device of a hold; empty if nothing. What happens to a GPU that does not answer is
// reported elsewhere, and its partitions are not known.
func (r *Reconciler) difference(h ledger.Hold, inventory device.Inventory) string {
	gpu, known := inventory.ByUUID(h.Device.GPU)
	if !known || !gpu.Health.Healthy() || h.Unreadable || h.State == ledger.StateDraining {
		return ""
	}
	if !h.Device.Whole() {
		// A claim has a partition of Tandem's before that exists.
		own := gpu.Dynamic || r.Partitions.Made(h.Device)
		if _, exists := inventory.ByRef(h.Device); exists || own && !r.Partitions.Complete(h.Device) {
			return ""
		}
		return fmt.Sprintf("partition %s of %s no longer exists", h.Device, gpu.Name())
	}
	foreign := slices.ContainsFunc(gpu.Partitions, func(p device.Partition) bool { return !r.Partitions.Made(p.Ref) })
	if !foreign && (gpu.Dynamic || !gpu.MIGEnabled) {
		return ""
	}
	return fmt.Sprintf("%s (%s) is in MIG mode", gpu.Name(), gpu.UUID)
}
