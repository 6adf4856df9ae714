// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// waiting is a hold whose holder has ended. Its generation may change while it waits, so its key has none.
type waiting struct {
	since, described time.Time
	reported         bool
}

// describeWaits keeps the ledger's description of what draining and deserted holds wait for, and reports each of them once in an event
// on the node, until ctx is done. It also reports holds whose device has changed. It has its own loop because it reads a file of each
// process of the host.
func (r *Reconciler) describeWaits(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	known, different := map[holdKey]*waiting{}, map[holdKey]*waiting{}
	for r.Pods.AwaitSync(ctx) && ctx.Err() == nil {
		changed, inventoryChanged := r.Ledger.Changed(), r.Inventory.Changed()
		now := time.Now()
		var next, nextDifference time.Duration
		known, next = r.describe(ctx, known, now)
		different, nextDifference = r.reportDifferences(different, now)
		timer.Reset(min(next, nextDifference))
		select {
		case <-ctx.Done():
		case <-changed:
		case <-inventoryChanged:
		case <-timer.C:
		}
		broadcast.Sleep(ctx, r.times.verifyGather)
	}
}

// describe makes one pass, and returns the waiting holds and when to make the next.
func (r *Reconciler) describe(ctx context.Context, known map[holdKey]*waiting, now time.Time) (map[holdKey]*waiting, time.Duration) {
	current, next := map[holdKey]*waiting{}, never
	for _, h := range r.Ledger.Holds() {
		// The holder of a hold that is only contested may run.
		if h.State != ledger.StateDraining && !h.Deserted || h.Unreadable {
			if h.WaitsFor != "" {
				r.Ledger.SetWait(h, "", time.Time{})
			}
			continue
		}
		k := holdKey{holder: h.Holder, device: h.Device}
		w := cmp.Or(known[k], &waiting{since: now})
		current[k] = w
		due := w.since.Add(r.times.waitShown)
		if !w.described.IsZero() {
			due = w.described.Add(r.times.waitReported)
			if reportedAt := w.since.Add(r.times.waitReported); !w.reported && reportedAt.Before(due) {
				due = reportedAt
			}
		}
		if now.Before(due) {
			next = min(next, due.Sub(now))
			continue
		}
		w.described = now
		waitsFor := r.waitsFor(h)
		r.Ledger.SetWait(h, waitsFor, w.since)
		if !w.reported && !now.Before(w.since.Add(r.times.waitReported)) {
			w.reported = true
			r.reportWait(ctx, h, waitsFor, w.since)
		}
		next = min(next, r.times.waitShown)
	}
	return current, next
}

// maxWaitsFor bounds the description in bytes (GPUNode, waitsFor). namedKeepers is how many pods, and processes of each, it names.
const maxWaitsFor, namedKeepers = 512, 3

// waitsFor describes what keeps a hold. Processes that come and go would change the status all the time, so of them only those that
// cannot be killed have their state.
func (r *Reconciler) waitsFor(h ledger.Hold) string {
	pods, prepared := r.Pods.Keepers(h)
	var parts []string
	for _, pod := range pods[:min(len(pods), namedKeepers)] {
		parts = append(parts, r.keeper(pod))
	}
	if more := len(pods) - namedKeepers; more > 0 {
		parts = append(parts, fmt.Sprintf("%d more pods", more))
	}
	switch {
	case len(parts) == 0 && prepared:
		parts = append(parts, "kubelet has not unprepared the claim")
	case len(parts) == 0 && (r.applied(h) || r.Partitions.Made(h.Device)):
		parts = append(parts, "its partition or sharing settings are being removed")
	case len(parts) == 0:
		parts = append(parts, "the agent is examining its pods")
	}
	return regarding.Shorten(strings.Join(parts, "; "), maxWaitsFor)
}

func (r *Reconciler) keeper(pod ledger.Pod) string {
	name := "pod " + pod.UID
	if pod.Name != "" {
		name = fmt.Sprintf("pod %s/%s (%s)", pod.Namespace, pod.Name, pod.UID)
	}
	switch cgroup, err := r.Cgroups.Pod(pod.UID); {
	case err != nil:
		return fmt.Sprintf("%s: its cgroup cannot be read", name)
	case cgroup == podstate.CgroupAbsent:
		return fmt.Sprintf("%s: kubelet may still start it", name)
	case cgroup == podstate.CgroupEmpty:
		return fmt.Sprintf("%s: no process, its cgroup is still there", name)
	}
	processes, err := podstate.Processes(r.ProcRoot, pod.UID)
	if err != nil || len(processes) == 0 {
		return fmt.Sprintf("%s: processes in its cgroup pod%s, which the agent cannot see", name, pod.UID)
	}
	texts := make([]string, len(processes))
	for i, p := range processes {
		if p.State != "D" {
			p.State = "not D"
		}
		texts[i] = p.String()
	}
	return name + ": " + regarding.First(texts, namedKeepers)
}

func (r *Reconciler) reportWait(ctx context.Context, h ledger.Hold, waitsFor string, since time.Time) {
	name := h.Device.String()
	if d, known := r.Inventory.Inventory().ByRef(h.Device); known {
		name = fmt.Sprintf("%s (%s)", d.Name(), cmp.Or(d.UUID(), h.Device.String()))
	}
	klog.FromContext(ctx).Info("A device is not free although its holder has ended", "device", name, "holder", h.String(), "since", since, "waitsFor", waitsFor)
	r.Recorder.Eventf(regarding.Node(r.NodeName), corev1.EventTypeWarning, "DeviceNotFreed",
		"%s is withdrawn: its holder, %s, has ended, and the device waits for: %s. It is offered again when that ends. "+
			"If a process stays in state D, look for its reason in the kernel's log; if the GPU does not recover, reset it or restart the node",
		name, h, waitsFor)
}
