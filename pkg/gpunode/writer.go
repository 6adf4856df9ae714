// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

const (
	// requestTimeout bounds each request: a dead connection to an API server must not delay the next request.
	requestTimeout = 10 * time.Second
	// leaveTimeout bounds the last write, which is repeated once.
	leaveTimeout = 2 * time.Second
)

var resource = v1alpha1.Resource.Resource

// A status is written once an interval on average. A node that was quiet may write this many statuses at once. The last of them is for
// bad news, since a pod fails for every 30 ms that the scheduler does not know it. More of them would delay good news: the controller
// assumes that a status is at most two seconds old.
const (
	aheadOrdinary = 2
	aheadUrgent   = 3
)

// Pace limits the writes of a status to one an interval on average. It is for the agent and for simulations, and not safe for concurrent
// use.
type Pace struct {
	Interval time.Duration
	paid     time.Time
}

// Due returns when the next write is allowed.
func (p *Pace) Due(urgent bool) time.Time {
	ahead := aheadOrdinary
	if urgent {
		ahead = aheadUrgent
	}
	return p.paid.Add(-time.Duration(ahead) * p.Interval)
}

// Took records a write.
func (p *Pace) Took(now time.Time) { p.paid = latest(p.paid, now).Add(p.Interval) }

// Urgent reports whether a device became unhealthy, or pods lose a device that they can use by the written status, for a reason other than
// a claim: the controller already knows the claims. It is a pure function.
func Urgent(written, status v1alpha1.GPUNodeStatus) bool {
	node := availability.NewNode(status, nil)
	now := make(map[string]v1alpha1.DeviceStatus, len(status.Devices))
	for _, d := range status.Devices {
		now[d.UUID] = d
	}
	return slices.ContainsFunc(written.Devices, func(before v1alpha1.DeviceStatus) bool {
		d, known := now[before.UUID]
		if known && before.UnhealthyReason == "" && d.UnhealthyReason != "" {
			return true
		}
		if before.ExtendedResourceState != v1alpha1.ExtendedResourceAllocatable {
			return false
		}
		if !known || d.ExtendedResourceState != v1alpha1.ExtendedResourceWithdrawn {
			return !known
		}
		// A claim may hold the device, or hardware that overlaps it.
		reason := node.Check(true, availability.Use[availability.Name]{Device: availability.StatusName(d)})
		return reason != availability.HeldByClaim && reason != availability.Draining
	})
}

// writer creates the object and writes its status, one request at a time.
type writer struct {
	*Object
	pace Pace
	// dirty is when the status first differed from the object; zero if it does not.
	dirty time.Time
	// failures since the last success. retry is when to try again; zero after a success. backoff is the delay after the next failure.
	failures int
	retry    time.Time
	backoff  wait.Backoff
	// sent is the last status that was written, and answered the object's version in the response.
	sent     v1alpha1.GPUNodeStatus
	answered string
	// beat is when to write an unchanged status; zero after the start, because an earlier agent wrote it.
	beat time.Time
	// pruned logs once that the API server dropped a part of the status.
	pruned sync.Once
	// missed is what was reported of the rules that do not select what they seem to mean.
	missed map[string]string
	// told are the devices that an event has called tainted, by rule and taint without its time; nil before the first write.
	told map[v1alpha1.DeviceTaint][]string
}

// write follows everything that the object depends on until ctx is done.
func (o *Object) write(ctx context.Context) {
	w := writer{Object: o, pace: Pace{Interval: o.times.interval}}
	w.succeeded()
	for ctx.Err() == nil {
		node, book, inventory := o.config.Node.Changed(), o.config.Ledger.Changed(), o.config.Inventory.Changed()
		daemons, view := o.config.Sharing.Changed(), o.view.Changed()
		var due <-chan time.Time
		if again := w.look(ctx, time.Now()); !again.IsZero() {
			due = time.After(time.Until(again))
		}
		select {
		case <-ctx.Done():
		case <-node:
		case <-book:
		case <-inventory:
		case <-daemons:
		case <-view:
		case <-due:
		}
	}
}

// look makes at most one request if one is due. It returns when to look again if nothing changes; zero for never.
func (w *writer) look(ctx context.Context, now time.Time) time.Time {
	w.reportMissed()
	request, urgent := w.next()
	if request == nil {
		w.dirty = time.Time{}
		w.succeeded()
		if expires := w.expire(); !w.beat.After(now) || !expires.IsZero() && expires.Before(w.beat) {
			return expires
		}
		return w.beat
	}
	if w.dirty.IsZero() {
		w.dirty = now
	}
	due := latest(w.pace.Due(urgent), w.retry)
	if !urgent {
		due = latest(due, w.dirty.Add(w.times.settle))
	}
	if due.After(now) {
		return due
	}
	if err := request(ctx); err != nil {
		return w.failed(ctx, err)
	}
	w.succeeded()
	return time.Now()
}

// next returns the next request; nil if none is needed or possible. An urgent one is not delayed for other changes.
func (w *writer) next() (request func(context.Context) error, urgent bool) {
	object, synced := w.view.current()
	switch {
	case !synced || w.config.Node.UID() == "" || object != nil && object.DeletionTimestamp != nil:
		return nil, false
	case object == nil:
		return w.create, false
	}
	all := Status(w.facts())
	status := bounded(all)
	status.Devices = withSince(status.Devices, object.Status.Devices, w.sent.Devices)
	w.metrics.outOfService.Store(&status)
	// The API server may have dropped a part of what was sent, and would do so again.
	if same(object.Status, status) || object.ResourceVersion == w.answered && same(w.sent, status) {
		if time.Now().Before(w.beat) {
			return nil, false
		}
		return func(ctx context.Context) error {
			updated, err := w.updateSeen(ctx, object)
			if err == nil {
				w.wrote(updated)
			}
			return err
		}, false
	}
	return func(ctx context.Context) error {
		updated, err := w.updateStatus(ctx, object, status)
		if err != nil {
			return err
		}
		w.pace.Took(time.Now())
		w.sent = status
		w.wrote(updated)
		w.reportMaintenance(object.Status, updated.Status)
		w.reportTaints(object.Status, all)
		if !same(updated.Status, status) {
			w.pruned.Do(func() {
				klog.FromContext(ctx).Info("The API server does not keep all of the GPUNode's status: its CustomResourceDefinition has another version")
			})
		}
		return nil
	}, Urgent(object.Status, status)
}

// wrote records what the API server answered to a write.
func (w *writer) wrote(updated *v1alpha1.GPUNode) {
	w.dirty, w.answered = time.Time{}, updated.ResourceVersion
	// The jitter separates agents that reach an API server again at the same time.
	w.beat = time.Now().Add(w.nextBeat())
}

// nextBeat returns how long an unchanged status is not written again.
func (o *Object) nextBeat() time.Duration { return wait.Jitter(o.times.heartbeat*4/5, 0.2) }

// same reports whether two statuses differ in nothing but when the agent wrote them and since when it waits.
func same(a, b v1alpha1.GPUNodeStatus) bool {
	a.Seen, a.WaitingSince = b.Seen, b.WaitingSince
	return apiequality.Semantic.DeepEqual(a, b)
}

// expire returns when the first conflict of the ledger expires; zero for never. No change announces that.
func (w *writer) expire() time.Time {
	var first time.Time
	for _, conflict := range w.config.Ledger.Conflicts() {
		if until := conflict.Until(); !until.IsZero() && (first.IsZero() || until.Before(first)) {
			first = until
		}
	}
	return first
}

func (o *Object) facts() Facts {
	facts := o.config.Facts
	// Before the inventory, which is full once there is a driver: held GPUs of an inventory of before would count as lost.
	facts.Unread = o.config.Unread != nil && o.config.Unread()
	facts.Inventory, facts.Allocatable = o.config.Inventory.Inventory(), o.view.kubelet()
	facts.Holds, facts.Conflicts = o.config.Ledger.Holds(), o.config.Ledger.Conflicts()
	facts.Daemons, facts.UnknownDaemons = o.config.Sharing.Daemons(), o.config.Sharing.UnknownDaemons()
	if object, _ := o.view.current(); object != nil {
		facts.Generation, facts.Maintenance = object.Generation, object.Spec.Maintenance
	}
	facts.Taints = o.view.taints()
	facts.Waiting = o.config.Waiting()
	return facts
}

// leave writes that the agent has stopped, and that the device plugin is no longer served. kubelet reports that up to ten seconds later, and
// fails every pod that the scheduler sends until then. The next agent overwrites it.
func (o *Object) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	facts := o.facts()
	facts.Limits, facts.Waiting = device.Resources{}, availability.Stopped
	status := bounded(Status(facts))
	for range 2 {
		object, _ := o.view.current()
		if object == nil || object.DeletionTimestamp != nil {
			return
		}
		stopped := status
		stopped.Devices = withSince(status.Devices, object.Status.Devices, nil)
		_, err := o.updateStatus(ctx, object, stopped)
		if err == nil {
			return
		}
		// The previous write may have been interrupted and stored.
		if !outdated(err) || o.refresh(ctx) != nil {
			klog.FromContext(ctx).Info("Cannot write to the GPUNode that the agent has stopped: the GPUNode shows free GPUs for up to three minutes", "reason", err.Error())
			return
		}
	}
}

// create creates the object, unless there is one, for whatever Node it was made. Its Node does not own it: the garbage collector would delete
// it with the Node, and with it what administrators wrote into the spec.
func (o *Object) create(ctx context.Context) error {
	_, err := o.request(ctx, "create", o.client.Post(), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: o.config.NodeName}})
	return err
}

// updateStatus replaces the status of this version of the object, with its times.
func (o *Object) updateStatus(ctx context.Context, object *v1alpha1.GPUNode, status v1alpha1.GPUNodeStatus) (*v1alpha1.GPUNode, error) {
	now := metav1.Now().Rfc3339Copy()
	status.Seen, status.WaitingSince = &now, nil
	if status.Waiting != "" {
		status.WaitingSince = cmp.Or(object.Status.WaitingSince, &now)
	}
	next := *object
	next.Status, next.ManagedFields = status, nil // the API server keeps its own
	return o.request(ctx, "status", o.client.Put().Name(object.Name).SubResource("status"), &next)
}

// withSince returns a copy of the devices with the times since when they are unhealthy and have the taints of faults: those that the API server
// has, or was sent, or now.
func withSince(devices, stored, sent []v1alpha1.DeviceStatus) []v1alpha1.DeviceStatus {
	now := metav1.Now().Rfc3339Copy()
	before := map[string][]v1alpha1.DeviceStatus{}
	for _, d := range slices.Concat(stored, sent) {
		key := cmp.Or(d.UUID, d.Name) // the name of a lost GPU changes with a restart
		before[key] = append(before[key], d)
	}
	devices = slices.Clone(devices)
	for i := range devices {
		d := &devices[i]
		d.Taints = slices.Clone(d.Taints)
		known := before[cmp.Or(d.UUID, d.Name)]
		if d.UnhealthyReason != "" {
			for _, was := range known {
				d.UnhealthySince = cmp.Or(d.UnhealthySince, was.UnhealthySince)
			}
			d.UnhealthySince = cmp.Or(d.UnhealthySince, &now)
		}
		for j, t := range d.Taints {
			if t.Rule != "" {
				continue // the rule has its time
			}
			for _, was := range known {
				t.Since = cmp.Or(t.Since, sinceOf(was.Taints, t))
			}
			d.Taints[j].Since = cmp.Or(t.Since, &now)
		}
	}
	return devices
}

// sinceOf returns the time of a taint of a fault among those of before; nil if there is none.
func sinceOf(before []v1alpha1.DeviceTaint, taint v1alpha1.DeviceTaint) *metav1.Time {
	for _, t := range before {
		if taint.Since = t.Since; t == taint {
			return t.Since
		}
	}
	return nil
}

// updateSeen writes no more than that the agent is there.
func (o *Object) updateSeen(ctx context.Context, object *v1alpha1.GPUNode) (*v1alpha1.GPUNode, error) {
	patch := fmt.Appendf(nil, `{"metadata":{"uid":%q},"status":{"seen":%q}}`, object.UID, metav1.Now().UTC().Format(time.RFC3339))
	return o.request(ctx, "seen", o.client.Patch(types.MergePatchType).Name(object.Name).SubResource("status"), patch)
}

// request sends an object or a patch, records the result and returns the stored object.
func (o *Object) request(ctx context.Context, operation string, r *rest.Request, body any) (*v1alpha1.GPUNode, error) {
	stored := &v1alpha1.GPUNode{}
	err := r.Resource(resource).Timeout(requestTimeout).Body(body).Do(ctx).Into(stored)
	o.metrics.wrote(operation, err)
	if err != nil {
		return nil, err
	}
	o.view.observe(stored)
	return stored, nil
}

func (o *Object) refresh(ctx context.Context) error {
	object := &v1alpha1.GPUNode{}
	err := o.client.Get().Resource(resource).Name(o.config.NodeName).Timeout(requestTimeout).Do(ctx).Into(object)
	if apierrors.IsNotFound(err) {
		o.view.update(func() { o.view.object = nil })
		return nil
	}
	if err == nil {
		o.view.observe(object)
	}
	return err
}

// failed returns when to retry. The first time that the object turns out to be outdated, it is read and the request repeated at once.
func (w *writer) failed(ctx context.Context, err error) time.Time {
	if ctx.Err() != nil {
		return time.Time{}
	}
	w.failures++
	if outdated(err) && w.refresh(ctx) == nil && w.failures == 1 {
		return time.Now()
	}
	if w.retry.IsZero() {
		klog.FromContext(ctx).Info("Cannot write the node's GPUNode, trying again", "reason", err.Error())
	}
	delay := w.backoff.Step()
	if !outdated(err) && !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
		delay = min(delay, w.times.lastRetry)
	}
	w.retry = time.Now().Add(delay)
	return w.retry
}

// succeeded resets the delay. Its jitter separates the agents of a cluster, which all lose an API server at the same time.
func (w *writer) succeeded() {
	w.failures, w.retry = 0, time.Time{}
	w.backoff = wait.Backoff{Duration: w.times.firstRetry, Factor: 2, Jitter: 0.2, Steps: 16, Cap: w.times.lastRefused}
}

// outdated reports whether the object is not what the request assumed.
func outdated(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err)
}

func latest(moments ...time.Time) time.Time { return slices.MaxFunc(moments, time.Time.Compare) }

type metrics struct {
	writes       *prometheus.CounterVec
	served       prometheus.Gauge
	outOfService outOfService
}

// newMetrics panics if the metrics are registered already.
func newMetrics(registerer prometheus.Registerer) *metrics {
	factory := promauto.With(registerer)
	m := &metrics{
		writes: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_gpunode_writes_total",
			Help: "Requests to change this node's GPUNode (create, status, seen: that the agent is there) by result: ok, conflict (another client wrote first), error.",
		}, []string{"operation", "result"}),
		served: factory.NewGauge(prometheus.GaugeOpts{
			Name: "tandem_gpunode_served",
			Help: "1 while the API server serves GPUNodes to this agent, 0 while it does not: " +
				"GPUs allocated to claims are then withdrawn from pods only once they are prepared.",
		}),
	}
	registerer.MustRegister(&m.outOfService)
	return m
}

func (m *metrics) wrote(operation string, err error) {
	result := "ok"
	switch {
	case apierrors.IsConflict(err):
		result = "conflict"
	case err != nil:
		result = "error"
	}
	m.writes.WithLabelValues(operation, result).Inc()
}
