// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Partitions were made for claims. *partition.Maker implements it. A hold on one ends when the partition is destroyed.
type Partitions interface {
	// Made reports whether a partition was made for a claim, or is about to be; All are those that were.
	Made(ref device.Ref) bool
	All() []device.Ref
	// Destroy removes one, if unused still says so when its turn has come. Idempotent.
	Destroy(ctx context.Context, ref device.Ref, unused func() bool) error
	// Resting are GPUs that could be given out as a whole if they were not in MIG mode, which Rest ends.
	Resting() []device.GPU
	Rest(ctx context.Context, gpu device.GPU, free func() bool) error
	// Repair writes records anew that somebody has removed.
	Repair() error
}

// inUse is an error of Destroy that knows which processes keep a partition busy.
type inUse interface {
	error
	PIDs() []int
}

// Guard makes evidence say that a hold on a partition which was made for it is not gone while the partition exists, whatever
// has become of its pods: the place could not be given to anybody else.
func Guard(e ledger.Evidence, made interface{ Made(device.Ref) bool }) ledger.Evidence {
	return guarded{e, made}
}

type guarded struct {
	ledger.Evidence
	made interface{ Made(device.Ref) bool }
}

func (g guarded) Verdict(h ledger.Hold) ledger.Verdict {
	verdict := g.Evidence.Verdict(h)
	if verdict == ledger.Gone && g.made.Made(h.Device) {
		return ledger.Orphaned
	}
	return verdict
}

// failure is what was tried in vain with a partition, or with the mode of a GPU.
type failure struct {
	next time.Time
	wait time.Duration
	// said is the last that was said about it.
	said string
}

// clearing destroys partitions that nobody uses any more. A GPU that takes its time, or whose partition is busy, keeps nobody
// else waiting: each has a goroutine of its own while there is something to do.
type clearing struct {
	*Reconciler
	failures map[device.Ref]failure
	// resting is since when GPUs have been in MIG mode for nothing.
	resting map[string]time.Time
	busy    map[string]bool
	done    chan cleared
}

// cleared is what came of the work on one GPU.
type cleared struct {
	gpu    string
	errors map[device.Ref]error
}

// clearAll works until ctx is done, and waits for what has begun.
func (r *Reconciler) clearAll(ctx context.Context) error {
	if r.Partitions == nil || !r.Pods.AwaitSync(ctx) {
		return nil
	}
	c := &clearing{Reconciler: r, failures: map[device.Ref]failure{}, resting: map[string]time.Time{}, busy: map[string]bool{}, done: make(chan cleared)}
	group, ctx := errgroup.WithContext(ctx)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		inventoryChanged := r.Inventory.Changed()
		timer.Reset(c.begin(ctx, group))
		select {
		case <-ctx.Done():
			return group.Wait()
		case result := <-c.done:
			delete(c.busy, result.gpu)
			c.note(ctx, result)
		case <-r.unused:
		case <-inventoryChanged:
		case <-timer.C:
		}
	}
}

// task is a partition to destroy, or with the Ref of a whole GPU a mode to switch off.
type task struct {
	ref device.Ref
	// due is when to begin with it; zero is at once.
	due time.Time
	do  func(context.Context) error
}

// begin starts what is due on GPUs where nothing is under way, and says when to look again.
func (c *clearing) begin(ctx context.Context, group *errgroup.Group) time.Duration {
	wait, now := c.times.doubt, time.Now()
	due := map[string][]task{}
	known := map[device.Ref]bool{}
	for _, t := range c.tasks() {
		known[t.ref] = true
		if f, ok := c.failures[t.ref]; ok && t.due.Before(f.next) {
			t.due = f.next
		}
		if now.Before(t.due) {
			wait = min(wait, t.due.Sub(now))
			continue
		}
		due[t.ref.GPU] = append(due[t.ref.GPU], t)
	}
	for ref := range c.failures {
		if !known[ref] {
			delete(c.failures, ref)
		}
	}
	for gpu, tasks := range due {
		if c.busy[gpu] {
			continue
		}
		c.busy[gpu] = true
		group.Go(func() error {
			result := cleared{gpu, map[device.Ref]error{}}
			for _, t := range tasks {
				result.errors[t.ref] = t.do(ctx)
			}
			select {
			case c.done <- result:
			case <-ctx.Done():
			}
			return nil
		})
	}
	return wait
}

// tasks are the partitions whose holders have ended, those that nobody holds (a process died before it could), and the GPUs that
// are in MIG mode for nothing.
func (c *clearing) tasks() []task {
	holds := c.Ledger.Holds()
	var tasks []task
	for _, h := range holds {
		if c.made(h.Device) && c.ended(h) {
			tasks = append(tasks, task{ref: h.Device, do: func(ctx context.Context) error { return c.end(ctx, h) }})
		}
	}
	for _, ref := range c.Partitions.All() {
		// Whoever holds a place that overlaps cannot have anything there yet.
		at := func(h ledger.Hold) bool { return h.Device == ref }
		if !slices.ContainsFunc(holds, at) {
			tasks = append(tasks, task{ref: ref, do: func(ctx context.Context) error {
				return c.Partitions.Destroy(ctx, ref, func() bool { return !slices.ContainsFunc(c.Ledger.Holds(), at) })
			}})
		}
	}
	return append(tasks, c.restingTasks()...)
}

// restingTasks wait for a while: the next claim would switch the mode on again, which takes a GPU seconds.
func (c *clearing) restingTasks() []task {
	var tasks []task
	resting := map[string]time.Time{}
	for _, gpu := range c.Partitions.Resting() {
		if c.held(gpu.Ref()) {
			continue
		}
		since, known := c.resting[gpu.UUID]
		if !known {
			since = time.Now()
		}
		resting[gpu.UUID] = since
		tasks = append(tasks, task{gpu.Ref(), since.Add(c.times.rest), func(ctx context.Context) error {
			return c.Partitions.Rest(ctx, gpu, func() bool { return !c.held(gpu.Ref()) })
		}})
	}
	c.resting = resting
	return tasks
}

// ended reports whether a hold waits for nothing but its partition.
func (r *Reconciler) ended(h ledger.Hold) bool {
	return h.State == ledger.StateDraining && !h.Unreadable && r.Pods.Verdict(h) == ledger.Gone
}

func (r *Reconciler) held(ref device.Ref) bool {
	return slices.ContainsFunc(r.Ledger.Holds(), func(h ledger.Hold) bool { return h.Device.Overlaps(ref) })
}

// end ends a hold of which nobody is left: with the partition that was made for it. It must not be called where kubelet waits.
func (r *Reconciler) end(ctx context.Context, h ledger.Hold) error {
	if r.made(h.Device) {
		if err := r.Partitions.Destroy(ctx, h.Device, func() bool { return r.isLast(h) }); err != nil {
			return fmt.Errorf("end the hold of %s: %w", h, err)
		}
	}
	return r.release(h)
}

// isLast reports whether a hold is what it was, and nobody else has its device: given out again it has another generation, and
// evidence of before a restart may have found a device in two hands.
func (r *Reconciler) isLast(h ledger.Hold) bool {
	var same, other bool
	for _, now := range r.Ledger.Holds() {
		same = same || keyOf(now) == keyOf(h)
		other = other || now.Holder != h.Holder && now.Device.Overlaps(h.Device)
	}
	return same && !other
}

func (r *Reconciler) made(ref device.Ref) bool { return r.Partitions != nil && r.Partitions.Made(ref) }

// note remembers what to try again and when, and says what is new about it.
func (c *clearing) note(ctx context.Context, result cleared) {
	for ref, err := range result.errors {
		if err == nil || ctx.Err() != nil {
			delete(c.failures, ref)
			continue
		}
		f := c.failures[ref]
		f.wait = min(max(c.times.retry, 2*f.wait), c.times.retryMost)
		f.next = time.Now().Add(f.wait)
		if f.said != err.Error() {
			f.said = err.Error()
			klog.FromContext(ctx).Error(err, "A device cannot be freed yet, trying again", "device", ref.String())
			c.tell(ref, err)
		}
		c.failures[ref] = f
	}
}

// tell whoever had the partition that it does not go.
func (c *clearing) tell(ref device.Ref, err error) {
	holds := c.Ledger.Holds()
	i := slices.IndexFunc(holds, func(h ledger.Hold) bool { return h.Device == ref && h.Name != "" })
	if i < 0 || c.Recorder == nil {
		return
	}
	h := holds[i]
	claim := &corev1.ObjectReference{
		APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim", Namespace: h.Namespace, Name: h.Name, UID: types.UID(h.Holder.ID),
	}
	name := c.nameOf(ref)
	if busy, ok := errors.AsType[inUse](err); ok && len(busy.PIDs()) > 0 {
		c.Recorder.Eventf(claim, corev1.EventTypeWarning, "PartitionInUse", "%s is still in use by %s%s: it is destroyed when that ends", name, processes(busy.PIDs()), lastUsed(h))
		return
	}
	c.Recorder.Eventf(claim, corev1.EventTypeWarning, "PartitionNotDestroyed", "%s cannot be destroyed, trying again: %v", name, err)
}

// nameOf is "partition 3g.40gb of gpu-2".
func (c *clearing) nameOf(ref device.Ref) string {
	for _, d := range c.Inventory.Inventory().Devices() {
		if d.Ref() == ref {
			return fmt.Sprintf("partition %s of %s", d.Partition.Profile, d.GPU.Name())
		}
	}
	return fmt.Sprintf("partition %s", ref)
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

// lastUsed names the pod that had it, which is of the claim's namespace.
func lastUsed(h ledger.Hold) string {
	if len(h.Pods) == 0 || h.Pods[len(h.Pods)-1].Name == "" {
		return ""
	}
	pod := h.Pods[len(h.Pods)-1]
	return fmt.Sprintf(" (pod %s/%s had it)", cmp.Or(pod.Namespace, h.Namespace), pod.Name)
}
