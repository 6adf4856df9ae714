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
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/sharing"
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

// Settings were made of devices for claims. *sharing.Keeper implements it. A hold on such a device ends when they are undone.
type Settings interface {
	// Applied reports whether something was set on the device for that claim, or is about to be; All are those where it was.
	Applied(claim string, ref device.Ref) bool
	All() []sharing.Key
	// Changed returns a channel that is closed when they next change.
	Changed() <-chan struct{}
	// Undo undoes it, if unused still says so when its turn has come. Where other devices of the claim are set together with this
	// one it does so for the last of them, and Applied stays true until then: the error is a sharing.ErrStillShared. Idempotent.
	Undo(ctx context.Context, key sharing.Key, unused func() bool) error
	// Repair writes anew what somebody has removed.
	Repair() error
}

// Guard makes evidence say that a hold is not gone while it is bound to something that must go first, whatever has become of its
// pods: a partition that was made for it, or what was set on its GPU. The device could not be given to anybody else.
func Guard(e ledger.PodStates, bound func(ledger.Hold) bool) ledger.PodStates {
	return guarded{e, bound}
}

type guarded struct {
	ledger.PodStates
	bound func(ledger.Hold) bool
}

func (g guarded) PodState(h ledger.Hold) ledger.PodState {
	podState := g.PodStates.PodState(h)
	if podState == ledger.Gone && g.bound(h) {
		return ledger.Orphaned
	}
	return podState
}

// subject is what is to be cleared: a partition, with the Ref of a whole GPU its mode, and with a claim what was set for that.
type subject struct {
	ref   device.Ref
	claim string
}

// failure is what was tried in vain with a subject.
type failure struct {
	next time.Time
	wait time.Duration
	// said is the last that was said about it.
	said string
	// waits is set where nothing is wrong: others of the claim are still in use. What has changed is a reason to look at once.
	waits bool
}

// clearing destroys partitions that nobody uses any more, and undoes what was set for claims. A GPU that takes its time, or whose
// partition is busy, or a daemon that does not end, keeps nobody else waiting: each GPU has a goroutine of its own while there is
// something to do, and so has each claim for which something was set.
type clearing struct {
	*Reconciler
	failures map[subject]failure
	// resting is since when GPUs have been in MIG mode for nothing.
	resting map[string]time.Time
	busy    map[string]bool
	done    chan cleared
}

// cleared is what came of the work on one GPU, or for one claim.
type cleared struct {
	lane   string
	errors map[subject]error
}

// clearAll works until ctx is done, and waits for what has begun.
func (r *Reconciler) clearAll(ctx context.Context) error {
	if r.Partitions == nil && r.Settings == nil || !r.Pods.AwaitSync(ctx) {
		return nil
	}
	c := &clearing{Reconciler: r, failures: map[subject]failure{}, resting: map[string]time.Time{}, busy: map[string]bool{}, done: make(chan cleared)}
	group, ctx := errgroup.WithContext(ctx)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		inventoryChanged := r.Inventory.Changed()
		var settingsChanged <-chan struct{}
		if r.Settings != nil {
			settingsChanged = r.Settings.Changed()
		}
		timer.Reset(c.begin(ctx, group))
		select {
		case <-ctx.Done():
			return group.Wait()
		case result := <-c.done:
			delete(c.busy, result.lane)
			c.note(ctx, result)
		case <-r.unused:
			c.waitNoLonger()
		case <-inventoryChanged:
		case <-settingsChanged:
			c.waitNoLonger()
		case <-timer.C:
		}
	}
}

// task is something to do about a subject. Those of one lane are done one after the other.
type task struct {
	subject
	lane string
	// due is when to begin with it; zero is at once.
	due time.Time
	do  func(context.Context) error
}

// begin starts what is due in lanes where nothing is under way, and says when to look again.
func (c *clearing) begin(ctx context.Context, group *errgroup.Group) time.Duration {
	wait, now := c.times.doubt, time.Now()
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
	for about := range c.failures {
		if !known[about] {
			delete(c.failures, about)
		}
	}
	for lane, tasks := range due {
		if c.busy[lane] {
			continue
		}
		c.busy[lane] = true
		group.Go(func() error {
			result := cleared{lane, map[subject]error{}}
			for _, t := range tasks {
				result.errors[t.subject] = t.do(ctx)
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

// tasks are what was set or made for holders that have ended, or that nobody holds (a process died before it could), and the GPUs
// that are in MIG mode for nothing. What was set goes first: a daemon keeps its partition busy.
func (c *clearing) tasks() []task {
	var tasks []task
	holds := c.Ledger.Holds()
	if c.Settings != nil {
		tasks = c.settingTasks(holds)
	}
	if c.Partitions != nil {
		tasks = slices.Concat(tasks, c.partitionTasks(holds), c.restingTasks())
	}
	return tasks
}

func (c *clearing) partitionTasks(holds []ledger.Hold) []task {
	var tasks []task
	for _, h := range holds {
		if c.made(h.Device) && !c.applied(h) && c.ended(h) {
			tasks = append(tasks, task{subject: subject{ref: h.Device}, lane: h.Device.GPU, do: func(ctx context.Context) error { return c.end(ctx, h) }})
		}
	}
	for _, ref := range c.Partitions.All() {
		// Whoever holds a place that overlaps cannot have anything there yet.
		at := func(h ledger.Hold) bool { return h.Device == ref }
		if !slices.ContainsFunc(holds, at) && !c.set(ref) {
			tasks = append(tasks, task{subject: subject{ref: ref}, lane: ref.GPU, do: func(ctx context.Context) error {
				return c.Partitions.Destroy(ctx, ref, func() bool { return !slices.ContainsFunc(c.Ledger.Holds(), at) })
			}})
		}
	}
	return tasks
}

// set reports whether something is set on the device, for whomever.
func (c *clearing) set(ref device.Ref) bool {
	return c.Settings != nil && slices.ContainsFunc(c.Settings.All(), func(key sharing.Key) bool { return key.Device == ref })
}

func (c *clearing) settingTasks(holds []ledger.Hold) []task {
	var tasks []task
	add := func(key sharing.Key, do func(context.Context) error) {
		tasks = append(tasks, task{subject: subject{key.Device, key.Claim}, lane: "claim " + key.Claim, do: do})
	}
	for _, key := range c.Settings.All() {
		of := func(h ledger.Hold) bool {
			return h.Holder == ledger.Holder{Kind: ledger.KindClaim, ID: key.Claim} && h.Device == key.Device
		}
		switch i := slices.IndexFunc(holds, of); {
		case i < 0:
			add(key, func(ctx context.Context) error {
				return c.Settings.Undo(ctx, key, func() bool { return !slices.ContainsFunc(c.Ledger.Holds(), of) })
			})
		case c.ended(holds[i]):
			add(key, func(ctx context.Context) error { return c.end(ctx, holds[i]) })
		}
	}
	return tasks
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
		tasks = append(tasks, task{subject{ref: gpu.Ref()}, gpu.UUID, since.Add(c.times.rest), func(ctx context.Context) error {
			return c.Partitions.Rest(ctx, gpu, func() bool { return !c.held(gpu.Ref()) })
		}})
	}
	c.resting = resting
	return tasks
}

// ended reports whether a hold waits for nothing but what it is bound to.
func (r *Reconciler) ended(h ledger.Hold) bool {
	return h.State == ledger.StateDraining && !h.Unreadable && r.Pods.PodState(h) == ledger.Gone
}

func (r *Reconciler) held(ref device.Ref) bool {
	return slices.ContainsFunc(r.Ledger.Holds(), func(h ledger.Hold) bool { return h.Device.Overlaps(ref) })
}

// end ends a hold of which nobody is left: with what was set for it, and with the partition that was made for it. It must not be
// called where kubelet waits. A hold whose device was set together with others ends after all of them are left.
func (r *Reconciler) end(ctx context.Context, h ledger.Hold) error {
	if r.applied(h) {
		key := sharing.Key{Claim: h.Holder.ID, Device: h.Device}
		if err := r.Settings.Undo(ctx, key, func() bool { return r.isSame(h) }); err != nil {
			return fmt.Errorf("end the hold of %s: %w", h, err)
		}
		if r.applied(h) {
			return nil // it is in use again
		}
	}
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

// isSame reports whether a hold is what it was: given out again it has another generation.
func (r *Reconciler) isSame(h ledger.Hold) bool {
	return slices.ContainsFunc(r.Ledger.Holds(), func(now ledger.Hold) bool { return keyOf(now) == keyOf(h) })
}

func (r *Reconciler) made(ref device.Ref) bool { return r.Partitions != nil && r.Partitions.Made(ref) }

// applied reports whether something is set for the hold.
func (r *Reconciler) applied(h ledger.Hold) bool {
	return r.Settings != nil && h.Holder.Kind == ledger.KindClaim && r.Settings.Applied(h.Holder.ID, h.Device)
}

// waitNoLonger has what waits for others of its claim be looked at.
func (c *clearing) waitNoLonger() {
	maps.DeleteFunc(c.failures, func(_ subject, f failure) bool { return f.waits })
}

// note remembers what to try again and when, and says what is new about it.
func (c *clearing) note(ctx context.Context, result cleared) {
	for about, err := range result.errors {
		if err == nil || ctx.Err() != nil {
			delete(c.failures, about)
			continue
		}
		f := c.failures[about]
		f.wait = min(max(c.times.retry, 2*f.wait), c.times.retryMost)
		f.next = time.Now().Add(f.wait)
		f.waits = errors.Is(err, sharing.ErrStillShared)
		if !f.waits && f.said != err.Error() {
			f.said = err.Error()
			klog.FromContext(ctx).Error(err, "A device cannot be freed yet, trying again", "device", about.ref.String())
			c.tell(about, err)
		}
		c.failures[about] = f
	}
}

// tell whoever had the device that it cannot be freed.
func (c *clearing) tell(about subject, err error) {
	holds := c.Ledger.Holds()
	i := slices.IndexFunc(holds, func(h ledger.Hold) bool {
		return h.Device == about.ref && h.Name != "" && (about.claim == "" || h.Holder.ID == about.claim)
	})
	if i < 0 || c.Recorder == nil {
		return
	}
	h := holds[i]
	claim := &corev1.ObjectReference{
		APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim", Namespace: h.Namespace, Name: h.Name, UID: types.UID(h.Holder.ID),
	}
	name := c.nameOf(about.ref)
	if about.claim != "" {
		c.Recorder.Eventf(claim, corev1.EventTypeWarning, "SharingNotEnded", "%s cannot be given to anybody else yet, trying again: %v", name, err)
		return
	}
	if busy, ok := errors.AsType[inUse](err); ok && len(busy.PIDs()) > 0 {
		c.Recorder.Eventf(claim, corev1.EventTypeWarning, "PartitionInUse", "%s is still in use by %s%s: it is destroyed when that ends", name, processes(busy.PIDs()), lastUsed(h))
		return
	}
	c.Recorder.Eventf(claim, corev1.EventTypeWarning, "PartitionNotDestroyed", "%s cannot be destroyed, trying again: %v", name, err)
}

// nameOf is "partition 3g.40gb of gpu-2", or "gpu-2".
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

// lastUsed names the pod that had it, which is of the claim's namespace.
func lastUsed(h ledger.Hold) string {
	if len(h.Pods) == 0 || h.Pods[len(h.Pods)-1].Name == "" {
		return ""
	}
	pod := h.Pods[len(h.Pods)-1]
	return fmt.Sprintf(" (pod %s/%s had it)", cmp.Or(pod.Namespace, h.Namespace), pod.Name)
}
