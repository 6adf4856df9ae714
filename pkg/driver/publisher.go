// SPDX-License-Identifier: Apache-2.0

// When slices are written, and what is done if the API server drops a field.

package driver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// allocationsTimeout is how long after a start a GPU stays in its pool if the controller does not report which claims are
// allocated from it (TestPoolsStayUntilClaimsAreKnown).
const allocationsTimeout = 30 * time.Second

// ErrNoAPI is returned by Ready while the API server does not serve claims.
var ErrNoAPI = errors.New("the API server does not serve resource.k8s.io/v1: enable it (Kubernetes 1.34 or newer, not disabled by " +
	"kube-apiserver's --runtime-config), or set mode DevicePluginOnly")

// requestTimeout bounds one request to the API server.
const requestTimeout = 5 * time.Second

// listSlices returns the slices that earlier agents published. It retries until ctx is done, also while the API server does not
// serve the DRA API, which an administrator may enable later (TestServerWithoutClaims).
func (d *Driver) listSlices(ctx context.Context) (existing []resourceapi.ResourceSlice) {
	retry(ctx, klog.FromContext(ctx), "", func() error {
		call, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		found, err := d.KubeClient.ResourceV1().ResourceSlices().List(call, metav1.ListOptions{FieldSelector: fields.Set{
			resourceapi.ResourceSliceSelectorNodeName: d.NodeName, resourceapi.ResourceSliceSelectorDriver: d.DriverName,
		}.String()})
		switch {
		case err == nil:
			existing = found.Items
			d.setWaiting(ctx, "", nil)
		case apierrors.IsNotFound(err):
			reason := "NoClaimsAPI"
			if d.PublishNothing {
				reason = ""
			}
			d.setWaiting(ctx, reason, ErrNoAPI)
		default:
			d.publishFailed(ctx, err, "list the existing slices")
		}
		return err
	})
	return existing
}

// NewOffer returns an Offer by the Driver's configuration. The publisher has one, and so have simulations.
func (d *Driver) NewOffer() Offer {
	return Offer{NodeName: d.NodeName, ReturnDelay: d.ReturnDelay, Offered: d.OfferedToClaims, Strict: d.Strict, PartitionUUIDs: d.PartitionUUIDs}
}

// Facts returns what the slices are made from now, except ClaimsLate. kept are the fields that the API server keeps.
func (d *Driver) Facts(kept Capabilities, now time.Time) Facts {
	return Facts{
		Inventory: d.Inventory.Inventory(), Holds: d.Ledger.Holds(), Claims: d.Allocations.Claims(), Maintenance: d.Allocations.Maintenance(),
		Withheld: d.Ledger.Withheld() != nil, Kept: kept, Now: now,
	}
}

// publish keeps the node's ResourceSlices equal to what inventory, ledger and allocations require, until ctx is done: it builds the
// pools (Offer), compares them with those it wrote last, and hands changes to the slice controller of
// k8s.io/dynamic-resource-allocation, which compares with the API server, writes, and repairs what another process changes. Failures
// are retried; Ready reports them until the API server had all pools once.
//
// It starts that controller itself, not through kubeletplugin.Helper.PublishResources: the helper's controller waits 30 s before
// it repairs slices that kubelet removed (TestRepublishAfterKubeletRestart), and does not notice that the node object was replaced
// (TestSlicesFollowTheNodeObject).
func (d *Driver) publish(ctx context.Context) error {
	existing := d.listSlices(ctx)
	var kept Capabilities
	if !d.PublishNothing {
		// Without an answer a dynamic GPU would go to the node pool, and back a moment later (TestPublishWaitsForTheProbe).
		retry(ctx, klog.FromContext(ctx), "", func() (err error) {
			if kept, err = d.probe(ctx); err != nil {
				d.publishFailed(ctx, err, "publish nothing yet")
			}
			return err
		})
	}
	offer := d.NewOffer()
	offer.SetPublished(existing)
	writer := sliceWriter{Driver: d, existing: existing}
	defer writer.stop()
	var (
		excludedBefore  []excluded
		countersMissing bool
		probeAt         time.Time
		allocationsDue  = time.Now().Add(allocationsTimeout)
	)
	for ctx.Err() == nil {
		// Changes are awaited from before anything is read.
		inventoryChanged, ledgerChanged := d.Inventory.Changed(), d.Ledger.Changed()
		claimsChanged, nodeChanged, again := d.Allocations.Changed(), d.Node.Changed(), d.publishAgain.Changed()
		if d.kubeletRegistered.Swap(false) {
			// A kubelet that starts removes all slices of its node before it registers drivers.
			writer.written = nil
		}
		// While a control plane is upgraded, its servers have different versions (TestTaintsAreTriedAgain).
		if d.dropsFields.Swap(false) && probeAt.IsZero() {
			kept.Taints, kept.Counters = false, false
			probeAt = time.Now().Add(d.probeAgain)
		}
		if !probeAt.IsZero() && !time.Now().Before(probeAt) {
			probeAt = time.Now().Add(d.probeAgain)
			if found, err := d.probe(ctx); err == nil {
				kept, probeAt = found, time.Time{}
			}
		}
		facts := d.Facts(kept, time.Now())
		next := probeAt
		if facts.ClaimsLate = !d.Allocations.Synced() && facts.Now.Before(allocationsDue); facts.ClaimsLate {
			next = earlier(next, allocationsDue)
		}
		built := offer.build(facts)
		next = earlier(next, built.next)
		if !slices.Equal(excludedBefore, built.excluded) {
			excludedBefore = built.excluded
			for _, e := range built.excluded {
				klog.FromContext(ctx).Info("A device is not published", "device", e.device, "reason", e.reason)
			}
		}
		d.metrics.countDevices(built.counts)
		d.Placed(built.own)
		writer.write(ctx, built.pools)
		if !countersMissing && !kept.Counters && !d.PublishNothing {
			countersMissing = d.reportMissingCounters(ctx, facts.Inventory)
		}

		var due <-chan time.Time
		if !next.IsZero() {
			due = time.After(time.Until(next))
		}
		select {
		case <-ctx.Done():
		case <-nodeChanged:
		case <-inventoryChanged:
		case <-ledgerChanged:
		case <-claimsChanged:
		case <-again:
		case <-due:
		}
	}
	return nil
}

// probe returns which fields the API server keeps. A server of 1.34 with the feature DRAPartitionableDevices refuses counters in a
// slice of their own, so that probe is invalid. A server that refuses all of the fields keeps none.
func (d *Driver) probe(ctx context.Context) (Capabilities, error) {
	kept, err := d.probeWith(ctx, []resourceapi.DeviceCounterConsumption{{
		CounterSet: "probe", Counters: map[string]resourceapi.Counter{"probe": {Value: *resource.NewQuantity(1, resource.BinarySI)}},
	}})
	if apierrors.IsInvalid(err) {
		kept, err = d.probeWith(ctx, nil)
	}
	if err != nil && !apierrors.IsInvalid(err) {
		return Capabilities{}, err
	}
	if !kept.Taints {
		klog.FromContext(ctx).Info("The API server drops device taints, withdrawing devices by omitting them")
	}
	if d.Strict && !kept.BindingConditions {
		klog.FromContext(ctx).Info("The API server drops binding conditions, strict has no effect (it needs Kubernetes 1.36)")
	}
	return kept, nil
}

// probeWith creates a slice in a dry run. The API server returns it without the fields that it drops.
func (d *Driver) probeWith(ctx context.Context, consumption []resourceapi.DeviceCounterConsumption) (Capabilities, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	probe := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "probe-" + d.DriverName + "-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   d.DriverName,
			NodeName: ptr.To(d.NodeName),
			Pool:     resourceapi.ResourcePool{Name: d.NodeName, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{withBindingConditions(resourceapi.Device{
				Name:                     "probe",
				ConsumesCounters:         consumption,
				AllowMultipleAllocations: ptr.To(true),
				Taints:                   []resourceapi.DeviceTaint{{Key: TaintHeldByPod, Value: "true", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
			})},
		},
	}
	stored, err := d.KubeClient.ResourceV1().ResourceSlices().Create(ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return Capabilities{}, fmt.Errorf("probe which device fields the API server keeps: %w", err)
	}
	if len(stored.Spec.Devices) != 1 {
		return Capabilities{}, nil
	}
	kept := stored.Spec.Devices[0]
	return Capabilities{
		Taints: len(kept.Taints) == 1, BindingConditions: len(kept.BindingConditions) == 1, Counters: len(kept.ConsumesCounters) == 1,
		Shares: ptr.Deref(kept.AllowMultipleAllocations, false),
	}, nil
}

// reportMissingCounters reports that the API server drops the counters that dynamic GPUs need. It returns false without a dynamic GPU.
func (d *Driver) reportMissingCounters(ctx context.Context, inv device.Inventory) bool {
	var names []string
	for _, g := range inv.GPUs {
		if g.Dynamic && len(g.Profiles) > 0 {
			names = append(names, g.Name())
		}
	}
	if len(names) == 0 {
		return false
	}
	klog.FromContext(ctx).Info("The API server drops shared counters, GPUs are not partitioned on demand", "devices", names)
	d.Recorder.Eventf(regarding.Node(d.NodeName), corev1.EventTypeWarning, "NoPartitionsOnDemand",
		"%s cannot be partitioned on demand, because the API server drops shared counters. "+
			"Existing partitions and whole GPUs are offered instead. Use Kubernetes 1.36 or newer with the feature gate DRAPartitionableDevices",
		strings.Join(names, ", "))
	return true
}

// sliceWriter writes the pools of one owner. After the start it uses the library's slice controller.
type sliceWriter struct {
	*Driver
	// existing are the slices that earlier agents published. Only the first write uses them.
	existing   []resourceapi.ResourceSlice
	started    bool
	controller *resourceslice.Controller
	owner      types.UID
	// written is what the controller was given last; nil makes the next write compare with the API server again.
	written map[string]resourceslice.Pool
}

// write makes pools the content of the API server. The node object owns the slices; without one it publishes nothing, because the
// garbage collector would remove them. A node object that was deleted and created again is another owner.
func (w *sliceWriter) write(ctx context.Context, pools map[string]resourceslice.Pool) {
	owner := w.Node.UID()
	var unknown error
	if owner == "" {
		unknown = fmt.Errorf("node %s is not known to the API server (is the node name right?)", w.NodeName)
	}
	w.set(&w.node, unknown)
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
		for _, object := range objectsOf(w.DriverName, w.NodeName, name, pools[name]) {
			object.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: w.NodeName, UID: owner, Controller: ptr.To(true)}}
			call, cancel := context.WithTimeout(ctx, requestTimeout)
			_, err := w.KubeClient.ResourceV1().ResourceSlices().Create(call, &object, metav1.CreateOptions{})
			cancel()
			if err != nil {
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

// objectsOf returns the slices of a pool without their owner, with the names and numbers of resourceslice.Pool.Slices.
func objectsOf(driverName, nodeName, name string, pool resourceslice.Pool) (objects []resourceapi.ResourceSlice) {
	for i, slice := range pool.Slices {
		objects = append(objects, resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{GenerateName: fmt.Sprintf("%05x-%s-%s-", i, driverName, nodeName)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: driverName, NodeName: &nodeName, Devices: slice.Devices, SharedCounters: slice.SharedCounters,
				Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(pool.Slices))},
			},
		})
	}
	return objects
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
func (d *Driver) setPublished() { d.set(&d.slices, nil) }

// publishFailed reports an error of a write, which is retried. The slice controller calls it.
func (d *Driver) publishFailed(ctx context.Context, err error, msg string) {
	if dropped, ok := errors.AsType[*resourceslice.DroppedFieldsError](err); ok {
		// The controller accepts the slice as stored, which may offer devices that are held.
		klog.FromContext(ctx).Info("The API server dropped fields, withdrawing devices by omitting them", "features", dropped.DisabledFeatures())
		d.dropsFields.Store(true)
		d.publishAgain.Notify()
		return
	}
	d.metrics.publishErrors.Inc()
	d.mu.Lock()
	if d.slices != nil {
		d.slices = fmt.Errorf("publish ResourceSlices of node %s: %s: %w", d.NodeName, msg, err)
	}
	d.mu.Unlock()
	if apierrors.IsInvalid(err) {
		d.Recorder.Eventf(regarding.Node(d.NodeName), corev1.EventTypeWarning, "InvalidResourceSlice",
			"the API server refuses the ResourceSlices of node %s: %v", d.NodeName, err)
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
