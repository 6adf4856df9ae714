// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Partitions are those that were created for claims. *partition.Maker implements it. A hold on one ends when the partition is
// destroyed.
type Partitions interface {
	// Made reports whether the partition was created for a claim, or is about to be; All returns all of them. Complete reports whether
	// its creation has ended.
	Made(ref device.Ref) bool
	Complete(ref device.Ref) bool
	All() []device.Ref
	// Destroy and EndIdleMIGMode wait until no other caller changes the GPU, and do nothing if the device is not unused then. Both are
	// idempotent.
	Destroy(ctx context.Context, ref device.Ref, unused func() bool) error
	// IdleMIGMode returns the GPUs in idle MIG mode, which EndIdleMIGMode switches off.
	IdleMIGMode() []device.GPU
	EndIdleMIGMode(ctx context.Context, gpu device.GPU, unused func() bool) error
	// Repair writes records again that another process removed.
	Repair() error
}

// inUse is an error of Destroy that names the processes which use the partition.
type inUse interface {
	error
	PIDs() []int
}

// Settings are the sharing settings of claims. *sharing.Manager implements it. A hold on such a device ends when they are reverted.
type Settings interface {
	// Applied reports whether settings of the claim are applied to the device, or are about to be; All returns all of them.
	Applied(claim string, ref device.Ref) bool
	All() []sharing.Key
	// Changed returns a channel that is closed when they next change.
	Changed() <-chan struct{}
	// Revert waits until no other caller changes settings of the claim, and does nothing if the device is not unused then. It is idempotent.
	// Devices with one daemon are reverted with the last of them: until then the error is a sharing.ErrStillShared, and Applied stays true.
	Revert(ctx context.Context, key sharing.Key, unused func() bool) error
	// Repair writes records, directories and client devices again that another process removed.
	Repair() error
}

// subject is what a task clears: a partition, the MIG mode of a whole GPU, or with a claim that claim's settings.
type subject struct {
	ref   device.Ref
	claim string
}

// failure is the last failure of a subject.
type failure struct {
	next     time.Time
	wait     time.Duration
	reported string
	// waits means that other devices of the claim are in use: a change, not time, is the reason to retry.
	waits bool
}

// clearing destroys partitions that no holder uses any more, and reverts sharing settings of claims. Each GPU, and each claim
// with settings, is a lane with its own goroutine while it has work, so that a slow GPU, a busy partition or a daemon that does
// not end delays no other (TestNextClaimWaitsForThePlacement).
type clearing struct {
	*Reconciler
	failures map[subject]failure
	// idleSince is when GPUs were first seen in idle MIG mode.
	idleSince map[string]time.Time
	busy      map[string]bool

	mu   sync.Mutex
	done []cleared
	// finished is signalled when done gets another result.
	finished broadcast.Signal
}

// cleared is the result of a lane's tasks.
type cleared struct {
	lane   string
	errors map[subject]error
}

// Clear destroys partitions and reverts settings until ctx is done, and waits for running tasks. Run calls it, and so do simulations,
// which call Settle and Verify themselves. Call it once.
func (r *Reconciler) Clear(ctx context.Context) error {
	if !r.Pods.AwaitSync(ctx) {
		return nil
	}
	c := &clearing{Reconciler: r, failures: map[subject]failure{}, idleSince: map[string]time.Time{}, busy: map[string]bool{}}
	group, ctx := errgroup.WithContext(ctx)
	timer := time.NewTimer(0)
	defer timer.Stop()
	unused := r.unused.Changed()
	for {
		inventoryChanged, settingsChanged, finished := r.Inventory.Changed(), r.Settings.Changed(), c.finished.Changed()
		c.recordAll(ctx)
		timer.Reset(c.begin(ctx, group))
		select {
		case <-ctx.Done():
			return group.Wait()
		case <-finished:
		case <-unused:
		case <-inventoryChanged:
		case <-settingsChanged:
		case <-timer.C:
		}
		r.Turn(ctx, "clears devices")
		// More than one may be ready, in any order.
		c.recordAll(ctx)
		if broadcast.Happened(unused) || broadcast.Happened(settingsChanged) {
			unused = r.unused.Changed()
			// Retry the subjects that wait for other devices of their claim.
			maps.DeleteFunc(c.failures, func(_ subject, f failure) bool { return f.waits })
		}
	}
}

// task clears a subject. Tasks of one lane run one after the other.
type task struct {
	subject
	lane string
	// due is when to start; zero is at once.
	due time.Time
	do  func(context.Context) error
}

// begin starts due tasks of idle lanes, and returns when to check again.
func (c *clearing) begin(ctx context.Context, group *errgroup.Group) time.Duration {
	wait, now := c.times.ending, time.Now()
	due := map[string][]task{}
	known := map[subject]bool{}
	for _, t := range c.tasks() {
		known[t.subject] = true
		if f, ok := c.failures[t.subject]; ok && t.due.Before(f.next) {
			t.due = f.next
		}
		if now.Before(t.due) {
			wait = min(wait, t.due.Sub(now))
			continue
		}
		due[t.lane] = append(due[t.lane], t)
	}
	maps.DeleteFunc(c.failures, func(s subject, _ failure) bool { return !known[s] })
	for lane, tasks := range due {
		if c.busy[lane] {
			continue
		}
		c.busy[lane] = true
		group.Go(func() error {
			c.Turn(ctx, "clears "+lane)
			result := cleared{lane, map[subject]error{}}
			for _, t := range tasks {
				result.errors[t.subject] = t.do(ctx)
			}
			c.mu.Lock()
			c.done = append(c.done, result)
			c.mu.Unlock()
			c.finished.Notify()
			return nil
		})
	}
	return wait
}

// tasks returns what remains of ended holders, what has a record but no hold because a process died, and the GPUs in idle MIG
// mode. Settings come first: a daemon keeps its partition busy.
func (c *clearing) tasks() []task {
	holds := c.Ledger.Holds()
	return slices.Concat(c.settingTasks(holds), c.partitionTasks(holds), c.idleTasks())
}

func (c *clearing) partitionTasks(holds []ledger.Hold) []task {
	var tasks []task
	for _, h := range holds {
		if c.Partitions.Made(h.Device) && !c.applied(h) && c.ended(h) {
			tasks = append(tasks, task{subject: subject{ref: h.Device}, lane: h.Device.GPU, do: func(ctx context.Context) error { return c.end(ctx, h) }})
		}
	}
	for _, ref := range c.Partitions.All() {
		// A holder of an overlapping placement cannot have created its partition yet.
		at := func(h ledger.Hold) bool { return h.Device == ref }
		settings := slices.ContainsFunc(c.Settings.All(), func(key sharing.Key) bool { return key.Device == ref })
		if !slices.ContainsFunc(holds, at) && !settings {
			tasks = append(tasks, task{subject: subject{ref: ref}, lane: ref.GPU, do: func(ctx context.Context) error {
				return c.Partitions.Destroy(ctx, ref, func() bool { return !slices.ContainsFunc(c.Ledger.Holds(), at) })
			}})
		}
	}
	return tasks
}

func (c *clearing) settingTasks(holds []ledger.Hold) []task {
	var tasks []task
	for _, key := range c.Settings.All() {
		of := func(h ledger.Hold) bool {
			return h.Holder == ledger.Holder{Kind: ledger.KindClaim, ID: key.Owner.Claim()} && h.Device == key.Device
		}
		t := task{subject: subject{key.Device, key.Owner.Claim()}, lane: "claim " + key.Owner.Claim()}
		switch i := slices.IndexFunc(holds, of); {
		case i < 0:
			t.do = func(ctx context.Context) error {
				return c.Settings.Revert(ctx, key, func() bool { return !slices.ContainsFunc(c.Ledger.Holds(), of) })
			}
		case c.ended(holds[i]):
			t.do = func(ctx context.Context) error { return c.end(ctx, holds[i]) }
		default:
			continue
		}
		tasks = append(tasks, t)
	}
	return tasks
}

// idleTasks are due after a delay: the next claim would switch MIG mode on again, which takes a GPU seconds.
func (c *clearing) idleTasks() []task {
	var tasks []task
	idleSince := map[string]time.Time{}
	for _, gpu := range c.Partitions.IdleMIGMode() {
		if c.held(gpu.Ref()) {
			continue
		}
		since := cmp.Or(c.idleSince[gpu.UUID], time.Now())
		idleSince[gpu.UUID] = since
		tasks = append(tasks, task{subject{ref: gpu.Ref()}, gpu.UUID, since.Add(c.times.rest), func(ctx context.Context) error {
			return c.Partitions.EndIdleMIGMode(ctx, gpu, func() bool { return !c.held(gpu.Ref()) })
		}})
	}
	c.idleSince = idleSince
	return tasks
}

// ended reports whether only a partition or settings keep the hold.
func (r *Reconciler) ended(h ledger.Hold) bool {
	return h.State == ledger.StateDraining && !h.Unreadable && r.Pods.PodState(h) == ledger.Gone
}

func (r *Reconciler) held(ref device.Ref) bool {
	return slices.ContainsFunc(r.Ledger.Holds(), func(h ledger.Hold) bool { return h.Device.Overlaps(ref) })
}

// end ends a hold without pods: it reverts the claim's settings, destroys its partition, and releases the hold. It may be slow:
// call it only where kubelet does not wait.
func (r *Reconciler) end(ctx context.Context, h ledger.Hold) error {
	if r.applied(h) {
		key := sharing.Key{Owner: sharing.OwnerOf(h.Holder.ID), Device: h.Device}
		if err := r.Settings.Revert(ctx, key, func() bool { return r.isSame(h) }); err != nil {
			return fmt.Errorf("end the hold of %s: %w", h, err)
		}
		if r.applied(h) {
			return nil // the claim was prepared again
		}
	}
	if r.Partitions.Made(h.Device) {
		if err := r.Partitions.Destroy(ctx, h.Device, func() bool { return r.isLast(h) }); err != nil {
			return fmt.Errorf("end the hold of %s: %w", h, err)
		}
	}
	return r.release(h)
}

// isLast reports whether the hold is unchanged and its device has no other holder: what was restored after a restart may have
// two holders for a device (TestPartitionOfTwoHolders).
func (r *Reconciler) isLast(h ledger.Hold) bool {
	other := slices.ContainsFunc(r.Ledger.Holds(), func(now ledger.Hold) bool {
		return now.Holder != h.Holder && now.Device.Overlaps(h.Device)
	})
	return !other && r.isSame(h)
}

// isSame reports whether the hold is unchanged: one that was taken again has another generation.
func (r *Reconciler) isSame(h ledger.Hold) bool {
	return slices.ContainsFunc(r.Ledger.Holds(), func(now ledger.Hold) bool { return keyOf(now) == keyOf(h) })
}

func (r *Reconciler) applied(h ledger.Hold) bool {
	return h.Holder.Kind == ledger.KindClaim && r.Settings.Applied(h.Holder.ID, h.Device)
}

func (c *clearing) recordAll(ctx context.Context) {
	c.mu.Lock()
	done := c.done
	c.done = nil
	c.mu.Unlock()
	for _, result := range done {
		delete(c.busy, result.lane)
		c.record(ctx, result)
	}
}

// record records failures for a retry, and reports new ones.
func (c *clearing) record(ctx context.Context, result cleared) {
	for about, err := range result.errors {
		if err == nil || ctx.Err() != nil {
			delete(c.failures, about)
			continue
		}
		f := c.failures[about]
		f.wait = min(max(c.times.retry, 2*f.wait), c.times.retryMost)
		f.next = time.Now().Add(f.wait)
		f.waits = errors.Is(err, sharing.ErrStillShared)
		if !f.waits && f.reported != err.Error() {
			f.reported = err.Error()
			klog.FromContext(ctx).Error(err, "Cannot free a device yet, retrying", "device", about.ref.String())
			c.report(about, err)
		}
		c.failures[about] = f
	}
}

// report writes an event on the claim that had the device.
func (c *clearing) report(about subject, err error) {
	holds := c.Ledger.Holds()
	i := slices.IndexFunc(holds, func(h ledger.Hold) bool {
		return h.Device == about.ref && h.Name != "" && (about.claim == "" || h.Holder.ID == about.claim)
	})
	if i < 0 {
		return
	}
	h := holds[i]
	claim := &corev1.ObjectReference{
		APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim", Namespace: h.Namespace, Name: h.Name, UID: types.UID(h.Holder.ID),
	}
	name := c.nameOf(about.ref)
	if about.claim != "" {
		c.Recorder.Eventf(claim, corev1.EventTypeWarning, "SharingNotEnded", "%s cannot be given to another holder yet, retrying: %v", name, err)
		return
	}
	if busy, ok := errors.AsType[inUse](err); ok && len(busy.PIDs()) > 0 {
		c.Recorder.Eventf(claim, corev1.EventTypeWarning, "PartitionInUse", "%s is still in use by %s%s: it is destroyed when that ends", name, processes(busy.PIDs()), lastUsed(h))
		return
	}
	c.Recorder.Eventf(claim, corev1.EventTypeWarning, "PartitionNotDestroyed", "%s cannot be destroyed, retrying: %v", name, err)
}

// nameOf returns "partition 3g.40gb of gpu-2", or "gpu-2".
func (c *clearing) nameOf(ref device.Ref) string {
	switch d, known := c.Inventory.Inventory().ByRef(ref); {
	case !known:
		return fmt.Sprintf("partition %s", ref)
	case d.Whole():
		return d.Name()
	default:
		return fmt.Sprintf("partition %s of %s", d.Partition.Profile, d.GPU.Name())
	}
}

func processes(pids []int) string {
	texts := make([]string, len(pids))
	for i, pid := range slices.Sorted(slices.Values(pids)) {
		texts[i] = fmt.Sprint(pid)
	}
	if len(texts) == 1 {
		return "process " + texts[0]
	}
	return "processes " + strings.Join(texts, ", ")
}

// lastUsed names the last pod of the hold. It is in the claim's namespace.
func lastUsed(h ledger.Hold) string {
	if len(h.Pods) == 0 || h.Pods[len(h.Pods)-1].Name == "" {
		return ""
	}
	pod := h.Pods[len(h.Pods)-1]
	return fmt.Sprintf(" (pod %s/%s had it)", cmp.Or(pod.Namespace, h.Namespace), pod.Name)
}
