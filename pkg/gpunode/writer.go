// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"context"
	"slices"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// writer makes the object and its status what they should be, one step at a time.
type writer struct {
	*Object
	pace Pace
	// dirty is since when something is to be written; zero for nothing.
	dirty time.Time
	// failures in a row, the last of which allows no write before retry.
	failures int
	retry    time.Time
	// said is set once the log has the failure, until a write succeeds.
	said bool
	// sent is the status that was written last, and answered the version of the object that came of it.
	sent     v1alpha1.GPUNodeStatus
	answered string
	// saidPruned is set once the log has that the API server does not keep all of it.
	saidPruned bool
}

// write follows everything that the object depends on until ctx is done.
func (o *Object) write(ctx context.Context) {
	w := writer{Object: o, pace: Pace{Interval: o.times.interval}}
	for ctx.Err() == nil {
		node, book, inventory, view := o.config.Node.Changed(), o.config.Ledger.Changed(), o.config.Inventory.Changed(), o.view.Changed()
		var daemons <-chan struct{}
		if o.config.Sharing != nil {
			daemons = o.config.Sharing.Changed()
		}
		var due <-chan time.Time
		if again := w.look(ctx, time.Now()); !again.IsZero() {
			due = time.After(time.Until(again))
		}
		select {
		case <-ctx.Done():
		case <-node:
		case <-book:
		case <-inventory:
		case <-view:
		case <-daemons:
		case <-due:
		}
		// One thing that happens is several changes, and each look costs as much as the node has GPUs.
		pause(ctx, o.times.gather)
	}
}

// step is one request to the API server.
type step func(ctx context.Context) error

// look does at most one step that is due, and returns when to check again if nothing changes; zero for never.
func (w *writer) look(ctx context.Context, now time.Time) time.Time {
	next, urgent := w.next()
	if next == nil {
		w.dirty, w.failures = time.Time{}, 0
		return w.expire()
	}
	if w.dirty.IsZero() {
		w.dirty = now
	}
	if due := w.due(urgent); due.After(now) {
		return due
	}
	if err := next(ctx); err != nil {
		return w.failed(ctx, err)
	}
	w.failures, w.said = 0, false
	return time.Now()
}

// due is when what is dirty may be written.
func (w *writer) due(urgent bool) time.Time {
	if urgent {
		return latest(w.pace.Due(urgent), w.retry)
	}
	return latest(w.dirty.Add(w.times.settle), w.pace.Due(urgent), w.retry)
}

// next compares what there is with what should be; nil means that nothing is to be done, or nothing can be. What is urgent is
// better written now than together with what comes next.
func (w *writer) next() (next step, urgent bool) {
	object, synced := w.view.current()
	node := w.config.Node.UID()
	switch {
	case !synced || node == "":
		return nil, false
	case object == nil:
		return func(ctx context.Context) error {
			created, err := w.create(ctx, node)
			if err == nil {
				w.view.adopt(created)
			}
			return err
		}, false
	case object.DeletionTimestamp != nil:
		return nil, false
	case !ownedBy(object, node):
		return func(ctx context.Context) error {
			klog.FromContext(ctx).Info("The node object was replaced, its GPUNode gets a new owner", "node", w.config.NodeName, "nodeUID", node)
			if err := w.remove(ctx, object); err != nil {
				return err
			}
			return w.refresh(ctx)
		}, false
	}
	status := w.status()
	switch {
	case apiequality.Semantic.DeepEqual(object.Status, status):
		return nil, false
	case object.ResourceVersion == w.answered && apiequality.Semantic.DeepEqual(w.sent, status):
		// All was said, and not all of it kept: once more would change nothing.
		return nil, false
	}
	return func(ctx context.Context) error {
		updated, err := w.updateStatus(ctx, object, status)
		if err != nil {
			return err
		}
		w.pace.Took(time.Now())
		w.dirty = time.Time{}
		w.sent, w.answered = status, updated.ResourceVersion
		w.view.adopt(updated)
		if !w.saidPruned && !apiequality.Semantic.DeepEqual(updated.Status, status) {
			w.saidPruned = true
			klog.FromContext(ctx).Info("The API server does not keep all of the GPUNode's status: its CustomResourceDefinition is of another version")
		}
		return nil
	}, Urgent(object.Status, status)
}

// expire is when time alone will change what the ledger says; zero for never.
func (w *writer) expire() time.Time {
	var first time.Time
	for _, l := range w.config.Ledger.Conflicts() {
		if until := l.Until(); !until.IsZero() && (first.IsZero() || until.Before(first)) {
			first = until
		}
	}
	return first
}

func ownedBy(object *v1alpha1.GPUNode, node types.UID) bool {
	owner := object.OwnerReferences
	return len(owner) == 1 && owner[0].Kind == "Node" && owner[0].UID == node
}

func (o *Object) status() v1alpha1.GPUNodeStatus {
	return Status(o.facts())
}

func (o *Object) facts() Facts {
	facts := Facts{
		Mode: o.config.Mode, Limits: o.config.Limits, OfferedToPods: o.config.OfferedToPods, Excluded: o.config.Excluded, Generation: o.view.acting().Generation,
		Inventory: o.config.Inventory.Inventory(), Holds: o.config.Ledger.Holds(), Conflicts: o.config.Ledger.Conflicts(),
		Allocatable: o.view.kubelet(),
	}
	if o.config.Sharing != nil {
		facts.Daemons, facts.UnknownDaemons = o.config.Sharing.Daemons(), o.config.Sharing.UnknownDaemons()
	}
	return facts
}

// leave writes that the device plugin is no longer served. kubelet reports up to ten seconds later that the plugin is gone, and
// fails every pod that the scheduler sends until then. The next agent overwrites it. leave does not wait for an API server that
// does not answer.
func (o *Object) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	facts := o.facts()
	facts.Limits = device.Resources{}
	status := Status(facts)
	for range 2 {
		object, _ := o.view.current()
		if object == nil || object.DeletionTimestamp != nil || object.Status.ExtendedResource == "" {
			return
		}
		_, err := o.updateStatus(ctx, object, status)
		if err == nil {
			return
		}
		// The last write of before may have been cut short, and stored.
		if !overtaken(err) || o.refresh(ctx) != nil {
			klog.FromContext(ctx).Info("Leaving a GPUNode that says that limits are served", "reason", err.Error())
			return
		}
	}
}

// leaveTimeout is for one write, perhaps a second.
const leaveTimeout = 2 * time.Second

func pause(ctx context.Context, length time.Duration) {
	timer := time.NewTimer(length)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// failed returns when to retry. After a conflict with another writer it reads the object and retries at once, the first time.
func (w *writer) failed(ctx context.Context, err error) time.Time {
	if ctx.Err() != nil {
		return time.Time{}
	}
	w.failures++
	if overtaken(err) && w.refresh(ctx) == nil && w.failures == 1 {
		return time.Now()
	}
	if !w.said {
		w.said = true
		klog.FromContext(ctx).Info("Cannot write the node's GPUNode, trying again", "reason", err.Error())
	}
	longest := w.times.lastRetry
	if overtaken(err) || apierrors.IsForbidden(err) || apierrors.IsInvalid(err) {
		longest = w.times.lastRefused
	}
	delay := longest
	if doublings := w.failures - 1; doublings < 16 {
		delay = min(longest, w.times.firstRetry<<doublings)
	}
	// All agents of the cluster lose one API server at once.
	w.retry = time.Now().Add(wait.Jitter(delay, 0.2))
	return w.retry
}

// overtaken says that the object is not what it was taken for.
func overtaken(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err)
}

func (o *Object) refresh(ctx context.Context) error {
	object, err := o.get(ctx)
	switch {
	case apierrors.IsNotFound(err):
		o.view.adopt(nil)
	case err != nil:
		return err
	default:
		o.view.adopt(object)
	}
	return nil
}

func latest(moments ...time.Time) time.Time { return slices.MaxFunc(moments, time.Time.Compare) }
