// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// allocationsTimeout is how long after a start a GPU stays in its pool if the controller does not report which claims are
// allocated from it (TestPoolsStayUntilClaimsAreKnown).
const allocationsTimeout = 30 * time.Second

// publisher keeps the node's ResourceSlices equal to what inventory, ledger and allocations require: run builds the pools (Offer),
// compares them with those it wrote last, and hands changes to the slice controller of k8s.io/dynamic-resource-allocation, which
// compares with the API server, writes, and repairs what another process changes.
//
// It starts that controller itself, not through kubeletplugin.Helper.PublishResources: the helper's controller waits 30 s before
// it repairs slices that kubelet removed (TestRepublishAfterKubeletRestart), and does not notice that the node object was replaced
// (TestSlicesFollowTheNodeObject).
type publisher struct {
	*Driver

	// kept are the fields that the API server kept in the last probe, if known.
	kept  Capabilities
	known bool
	// probeAt is when the next probe is due, after probeWait if it fails; zero if none is.
	probeAt   time.Time
	probeWait time.Duration
	// dropsFields is set once the API server dropped a field that it kept in the probe. fieldsDropped reports it.
	dropsFields   atomic.Bool
	fieldsDropped broadcast.Signal
}

func newPublisher(d *Driver) *publisher {
	p := &publisher{Driver: d, probeWait: probeRetryFirst}
	if !d.PublishNothing {
		p.probeAt = time.Now()
	}
	return p
}

// run publishes until ctx is done. Failures are retried; Ready reports them.
func (p *publisher) run(ctx context.Context) error {
	if existing, ok := p.listSlices(ctx); ok {
		p.publish(ctx, existing)
	}
	return nil
}

// publish builds, compares and writes after each change, until ctx is done.
func (p *publisher) publish(ctx context.Context, existing []resourceapi.ResourceSlice) {
	offer := Offer{NodeName: p.NodeName, ReturnDelay: p.ReturnDelay, Offered: p.OfferedToClaims, Strict: p.Strict}
	offer.SetPublished(existing)
	writer := sliceWriter{publisher: p, existing: existing}
	defer writer.stop()
	var (
		excludedBefore  []excluded
		countersMissing bool
		allocationsDue  = time.Now().Add(allocationsTimeout)
		node            types.UID
		claimsChanged   <-chan struct{}
	)
	for {
		// Changes are awaited from before anything is read.
		inventoryChanged, ledgerChanged := p.Inventory.Changed(), p.Ledger.Changed()
		fieldsDropped, registered := p.fieldsDropped.Changed(), p.kubeletRegistered.Changed()
		nodeChanged := p.Node.Changed()
		node = p.nodeUID(ctx, node)
		kept := p.keptFields(ctx)
		facts := Facts{Inventory: p.Inventory.Inventory(), Holds: p.Ledger.Holds(), Kept: kept, Now: time.Now()}
		if p.Allocations != nil {
			claimsChanged = p.Allocations.Changed()
			facts.Claims = p.Allocations.Claims()
			facts.ClaimsLate = !p.Allocations.Synced() && facts.Now.Before(allocationsDue)
		}
		dynamic := dynamicGPUs(facts.Inventory)
		next := p.probeAt
		// Without the API server's answer a dynamic GPU would go to the node pool, and back a moment later.
		if p.known || len(dynamic) == 0 || p.PublishNothing {
			built := offer.build(facts)
			if !slices.Equal(excludedBefore, built.excluded) {
				excludedBefore = built.excluded
				for _, e := range built.excluded {
					klog.FromContext(ctx).Info("A device is not published", "device", e.device, "reason", e.reason)
				}
			}
			p.metrics.countDevices(built.counts)
			writer.write(ctx, node, built.pools)
			if len(dynamic) > 0 && !kept.Counters && !p.PublishNothing && !countersMissing {
				countersMissing = true
				p.reportMissingCounters(ctx, dynamic)
			}
			next = earlier(next, built.next)
			if facts.ClaimsLate {
				next = earlier(next, allocationsDue)
			}
		}

		timer := newTimer(next)
		select {
		case <-ctx.Done():
		case <-nodeChanged:
		case <-inventoryChanged:
		case <-ledgerChanged:
		case <-claimsChanged:
		case <-fieldsDropped:
		case <-timer.C:
		case <-registered:
			// A kubelet that starts removes all slices of its node before it registers drivers.
			writer.written = nil
		}
		timer.Stop()
		if ctx.Err() != nil {
			return
		}
	}
}

// newTimer fires at the given time, and practically never for zero.
func newTimer(at time.Time) *time.Timer {
	if at.IsZero() {
		return time.NewTimer(24 * time.Hour)
	}
	return time.NewTimer(time.Until(at))
}

// dynamicGPUs returns the names of the GPUs that Tandem can partition.
func dynamicGPUs(inv device.Inventory) []string {
	var names []string
	for _, g := range inv.GPUs {
		if g.Dynamic && len(g.Profiles) > 0 {
			names = append(names, g.Name())
		}
	}
	return names
}

// nodeUID returns the UID of the node object, which owns the slices; empty while there is none. A node object that is deleted and
// created again is another owner: the garbage collector removes the slices of the first one.
func (p *publisher) nodeUID(ctx context.Context, before types.UID) types.UID {
	uid := p.Node.UID()
	if before != "" && uid != before {
		klog.FromContext(ctx).Info("The node object was replaced, its slices get a new owner", "node", p.NodeName, "nodeUID", uid)
	}
	p.mu.Lock()
	p.nodeKnown = uid != ""
	p.mu.Unlock()
	return uid
}

// listSlices returns the slices that earlier agents published. It retries until ctx is done, and returns false then.
func (p *publisher) listSlices(ctx context.Context) ([]resourceapi.ResourceSlice, bool) {
	for wait := probeRetryFirst; ; wait = min(2*wait, probeRetryMost) {
		found, err := p.slicesOfNode(ctx)
		if err == nil {
			return found.Items, true
		}
		p.publishFailed(ctx, err, "list the node's slices")
		if !pause(ctx, wait) {
			return nil, false
		}
	}
}

// keptFields returns which fields the API server keeps. It probes until the API server answers, and again some time after it
// dropped a field: while a control plane is upgraded, its servers have different versions (TestTaintsAreTriedAgain).
func (p *publisher) keptFields(ctx context.Context) Capabilities {
	if now := time.Now(); !p.probeAt.IsZero() && !now.Before(p.probeAt) {
		if kept, err := p.probe(ctx); err == nil {
			p.kept, p.known, p.probeAt, p.probeWait = kept, true, time.Time{}, probeRetryFirst
			p.dropsFields.Store(false)
		} else {
			p.probeAt, p.probeWait = now.Add(p.probeWait), min(2*p.probeWait, probeRetryMost)
		}
	}
	kept := p.kept
	if p.dropsFields.Load() {
		kept.Taints, kept.Counters = false, false
		if p.probeAt.IsZero() {
			p.probeAt = time.Now().Add(p.probeAgain)
		}
	}
	return kept
}

// sliceWriter writes the pools of one owner. After the start it uses the library's slice controller.
type sliceWriter struct {
	*publisher
	// existing are the slices that earlier agents published. Only the first write uses them.
	existing   []resourceapi.ResourceSlice
	started    bool
	controller *resourceslice.Controller
	owner      types.UID
	// written is what the controller was given last; nil makes the next write compare with the API server again.
	written map[string]resourceslice.Pool
}

// write makes pools the content of the API server. Without an owner it publishes nothing: the garbage collector would remove it.
func (w *sliceWriter) write(ctx context.Context, owner types.UID, pools map[string]resourceslice.Pool) {
	if owner != w.owner {
		w.stop()
	}
	if w.PublishNothing {
		pools = map[string]resourceslice.Pool{} // the controller removes the existing slices
	}
	switch {
	case owner == "":
	case w.controller == nil:
		if !w.started {
			w.started = true
			w.createMissing(ctx, owner, pools)
			w.existing = nil
		}
		w.owner, w.written = owner, pools
		w.controller = w.startController(ctx, owner, pools)
	case w.written == nil || !reflect.DeepEqual(w.written, pools):
		w.written = pools
		w.controller.Update(&resourceslice.DriverResources{Pools: pools})
	}
}

func (w *sliceWriter) stop() {
	w.controller.Stop()
	w.controller, w.owner, w.written = nil, "", nil
}

// createMissing creates the pools of which no slice exists, before the slice controller starts. StartController first waits for
// its informer in a loop of one second (initInformer), and has no option for that: the scheduler would see the GPUs of a new node
// 1.1 s after the agent's start (TestPublishedSoonAfterStart). Slices get the names and numbers that the controller gives them
// (resourceslice.Pool.Slices), so it finds them unchanged. It retries what fails here, and deletes the duplicates that it would
// create if its informer were more than that second behind. Pools that exist are left to it: only it can update them atomically.
func (w *sliceWriter) createMissing(ctx context.Context, owner types.UID, pools map[string]resourceslice.Pool) {
	created := 0
	for _, name := range slices.Sorted(maps.Keys(pools)) {
		if slices.ContainsFunc(w.existing, func(s resourceapi.ResourceSlice) bool { return s.Spec.Pool.Name == name }) {
			continue
		}
		for i, slice := range pools[name].Slices {
			object := &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{
					GenerateName:    fmt.Sprintf("%05x-%s-%s-", i, w.DriverName, w.NodeName),
					OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: w.NodeName, UID: owner, Controller: ptr.To(true)}},
				},
				Spec: resourceapi.ResourceSliceSpec{
					Driver: w.DriverName, NodeName: &w.NodeName, Devices: slice.Devices, SharedCounters: slice.SharedCounters,
					Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(pools[name].Slices))},
				},
			}
			if _, err := w.KubeClient.ResourceV1().ResourceSlices().Create(ctx, object, metav1.CreateOptions{}); err != nil {
				w.publishFailed(ctx, err, "create slices")
				return
			}
		}
		created++
	}
	if created > 0 && created == len(pools) {
		w.setPublished()
	}
}

// startController returns nil if ctx ends before the controller listed the existing slices.
func (w *sliceWriter) startController(ctx context.Context, owner types.UID, pools map[string]resourceslice.Pool) *resourceslice.Controller {
	ctx = klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "slices"))
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName:   w.DriverName,
		KubeClient:   w.KubeClient,
		Owner:        &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: w.NodeName, UID: owner},
		Resources:    &resourceslice.DriverResources{Pools: pools},
		Queue:        newSyncQueue(w.setPublished),
		SyncDelay:    ptr.To(repairDelay),
		ErrorHandler: w.publishFailed,
	})
	if err != nil {
		if ctx.Err() == nil {
			w.publishFailed(ctx, err, "start controller")
		}
		return nil
	}
	return controller
}

// setPublished makes Ready report that the API server has all pools.
func (p *publisher) setPublished() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.published, p.publishError = true, nil
}

// publishFailed reports an error of a write, which is retried. The slice controller calls it.
func (p *publisher) publishFailed(ctx context.Context, err error, msg string) {
	if dropped, ok := errors.AsType[*resourceslice.DroppedFieldsError](err); ok {
		// The controller accepts the slice as stored, which may offer devices that are held.
		klog.FromContext(ctx).Info("The API server dropped fields, withdrawing devices by omitting them", "features", dropped.DisabledFeatures())
		p.dropsFields.Store(true)
		p.fieldsDropped.Notify()
		return
	}
	p.metrics.publishErrors.Inc()
	p.mu.Lock()
	p.publishError = fmt.Errorf("%s: %w", msg, err)
	p.mu.Unlock()
	if apierrors.IsInvalid(err) {
		p.Recorder.Eventf(p.nodeRef, corev1.EventTypeWarning, "InvalidResourceSlice",
			"the API server refuses the ResourceSlices of node %s: %v", p.NodeName, err)
	}
	if ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Cannot publish ResourceSlices, trying again", "message", msg)
	}
}

const (
	// repairDelay is how long after the last event on a slice the controller compares a pool with the API server. The library's
	// default is 30 s. A removal of several slices should be seen whole; a restart of kubelet should not be noticed
	// (TestManyPoolsAreBackSoon).
	repairDelay = 100 * time.Millisecond

	// A process that keeps changing our slices (an agent with this node's name) gets at most repairBurst answers at once
	// (TestRepairsOfOnePoolDoNotDelayOthers).
	repairBurst       = 10
	repairInterval    = 2 * time.Second
	limitedRepairWait = 3 * time.Second

	// A failed write is retried between these delays. The library's default grows to 1000 s, and a GPU that a pod took while the
	// API server was away would be offered for so long after its return (TestRetriesStayFrequent).
	firstRetry = 100 * time.Millisecond
	lastRetry  = 20 * time.Second
)

func newRetries() workqueue.TypedRateLimiter[string] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry)
}

// syncQueue is the slice controller's queue of pools. It reports when all are written (TestReadyWhenAllPoolsArePublished), which the
// controller does not, and limits repairs.
type syncQueue struct {
	workqueue.TypedRateLimitingInterface[string]
	synced func()

	mu sync.Mutex
	// failed pools wait for a retry.
	failed  map[string]bool
	repairs map[string]*rate.Limiter
}

func newSyncQueue(synced func()) *syncQueue {
	return &syncQueue{
		TypedRateLimitingInterface: workqueue.NewTypedRateLimitingQueueWithConfig(
			newRetries(), workqueue.TypedRateLimitingQueueConfig[string]{Name: "node_resource_slices"}),
		synced: synced, failed: map[string]bool{}, repairs: map[string]*rate.Limiter{},
	}
}

// Forget is called after a pool was written.
func (q *syncQueue) Forget(pool string) {
	q.TypedRateLimitingInterface.Forget(pool)
	q.mu.Lock()
	delete(q.failed, pool)
	done := len(q.failed) == 0 && q.Len() == 0
	q.mu.Unlock()
	if done {
		q.synced()
	}
}

// AddRateLimited is called after a failure.
func (q *syncQueue) AddRateLimited(pool string) {
	q.mu.Lock()
	q.failed[pool] = true
	q.mu.Unlock()
	q.TypedRateLimitingInterface.AddRateLimited(pool)
}

// AddAfter is called with repairDelay after each event on a slice, also after those of the controller's own writes.
func (q *syncQueue) AddAfter(pool string, delay time.Duration) {
	if delay == repairDelay && !q.repair(pool) {
		delay = limitedRepairWait
	}
	q.TypedRateLimitingInterface.AddAfter(pool, delay)
}

func (q *syncQueue) repair(pool string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.repairs[pool] == nil {
		q.repairs[pool] = rate.NewLimiter(rate.Every(repairInterval), repairBurst)
	}
	return q.repairs[pool].Allow()
}
