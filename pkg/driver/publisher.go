// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// claimsPatience is how long GPUs wait after a start to go to another pool, if nobody says which claims have devices from the one
// they are in.
const claimsPatience = 30 * time.Second

// publisher keeps the node's ResourceSlices as inventory and ledger want them. It drives the library's slice controller
// itself, not through the helper, whose controller waits 30 s before it repairs what kubelet wiped and never notices that the
// node object was replaced.
type publisher struct {
	*Driver
	// wake is signalled when something below changed.
	wake chan struct{}

	mu      sync.Mutex
	nodeUID types.UID
	// kept is what the API server is known to keep; nil until it has answered.
	kept *Capabilities
	// dropped is set once it was seen to drop one, until it was asked again.
	dropped bool
	// dropping is signalled when it is.
	dropping chan struct{}
}

func newPublisher(d *Driver) *publisher {
	return &publisher{Driver: d, wake: make(chan struct{}, 1), dropping: make(chan struct{}, 1)}
}

// run publishes until ctx is done. Failures are retried and show in Ready.
func (p *publisher) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		p.followNode(ctx)
		return nil
	})
	group.Go(func() error {
		if !p.PublishNothing {
			p.followCapabilities(ctx)
		}
		return nil
	})
	group.Go(func() error {
		p.publish(ctx)
		return nil
	})
	return group.Wait()
}

// followCapabilities asks what the API server keeps, and again, slowly, after it has dropped it: while a control plane is
// upgraded, its servers are of two versions.
func (p *publisher) followCapabilities(ctx context.Context) {
	for {
		p.learnCapabilities(ctx, func(kept Capabilities) { p.set(func() { p.kept, p.dropped = &kept, false }) })
		select {
		case <-ctx.Done():
			return
		case <-p.dropping:
		}
		if !pause(ctx, p.probeAgain) {
			return
		}
	}
}

// set changes what publish depends on.
func (p *publisher) set(change func()) {
	p.mu.Lock()
	change()
	p.mu.Unlock()
	signal(p.wake)
}

// signal wakes whoever waits for the channel, now or next.
func signal(channel chan struct{}) {
	select {
	case channel <- struct{}{}:
	default: // one is waiting already
	}
}

// followNode keeps up with the UID of the node's object until ctx is done. A node that is deleted and registered again is
// another owner: what belonged to the old one is garbage-collected.
func (p *publisher) followNode(ctx context.Context) {
	for p.Node != nil && ctx.Err() == nil {
		changed := p.Node.Changed()
		p.nodeChanged(ctx, p.Node.UID())
		select {
		case <-ctx.Done():
		case <-changed:
		}
	}
}

func (p *publisher) nodeChanged(ctx context.Context, uid types.UID) {
	p.mu.Lock()
	before := p.nodeUID
	p.mu.Unlock()
	if uid == before {
		return
	}
	if before != "" {
		klog.FromContext(ctx).Info("The node object was replaced, its slices get a new owner", "node", p.NodeName, "nodeUID", uid)
	}
	p.Driver.mu.Lock()
	p.nodeKnown = uid != ""
	p.Driver.mu.Unlock()
	p.set(func() { p.nodeUID = uid })
}

// publish is the loop: look at everything, tell the controller, wait for a change.
func (p *publisher) publish(ctx context.Context) {
	var (
		running sliceController
		left    []excluded
		missing missingCounters
	)
	patience := time.Now().Add(claimsPatience)
	offer := Offer{NodeName: p.NodeName, ReturnDelay: p.ReturnDelay, Offered: p.OfferedToClaims, Strict: p.Strict}
	if !p.findPublished(ctx, &offer) {
		return
	}
	defer func() { running.stop() }()
	for {
		inventoryChanged, ledgerChanged, claimsChanged := p.Inventory.Changed(), p.Ledger.Changed(), p.claimsChanged()
		uid, kept, known := p.conditions()

		facts := Facts{Inventory: p.Inventory.Inventory(), Holds: p.Ledger.Holds(), Claims: p.claims(), Kept: kept, Now: time.Now()}
		facts.ClaimsLate = p.Allocations != nil && !p.Allocations.Synced() && facts.Now.Before(patience)
		dynamic := dynamicGPUs(facts.Inventory)
		var next time.Time
		// A GPU that is partitioned on demand must not go from one pool to the other and back for want of an answer. Who
		// publishes nothing does not ask.
		if known || len(dynamic) == 0 || p.PublishNothing {
			look := offer.look(facts)
			if !slices.Equal(left, look.left) {
				left = look.left
				logExcluded(ctx, left)
			}
			p.metrics.countDevices(look.counts)
			running.update(ctx, p, uid, look.pools)
			missing.say(ctx, p.Driver, dynamic, kept)
			next = look.next
			if facts.ClaimsLate {
				next = earlier(next, patience)
			}
		}

		timer := newTimer(next)
		select {
		case <-ctx.Done():
		case <-inventoryChanged:
		case <-ledgerChanged:
		case <-claimsChanged:
		case <-p.wake:
		case <-p.refresh:
			running.again()
		case <-timer.C:
		}
		timer.Stop()
		if ctx.Err() != nil {
			return
		}
	}
}

// conditions are what publish depends on besides inventory and ledger. known is false until the API server has said what it
// keeps.
func (p *publisher) conditions() (node types.UID, kept Capabilities, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	known = p.kept != nil
	if known {
		kept = *p.kept
	}
	if p.dropped {
		kept.Taints, kept.Counters = false, false
	}
	return p.nodeUID, kept, known
}

func (p *publisher) claims() []v1alpha1.AllocatedClaim {
	if p.Allocations == nil {
		return nil
	}
	return p.Allocations.Claims()
}

func (p *publisher) claimsChanged() <-chan struct{} {
	if p.Allocations == nil {
		return nil
	}
	return p.Allocations.Changed()
}

// findPublished tells offer what earlier agents have published. Without an API server there is nothing to do anyway. It returns
// false when ctx is done.
func (p *publisher) findPublished(ctx context.Context, offer *Offer) bool {
	for wait := probeRetryFirst; ; wait = min(2*wait, probeRetryMost) {
		limited, cancel := context.WithTimeout(ctx, probeTimeout)
		found, err := p.KubeClient.ResourceV1().ResourceSlices().List(limited, metav1.ListOptions{FieldSelector: fields.Set{
			resourceapi.ResourceSliceSelectorNodeName: p.NodeName, resourceapi.ResourceSliceSelectorDriver: p.DriverName,
		}.String()})
		cancel()
		if err == nil {
			offer.Found(found.Items)
			return true
		}
		p.publishFailed(ctx, err, "list the slices that are there")
		if !pause(ctx, wait) {
			return false
		}
	}
}

func logExcluded(ctx context.Context, left []excluded) {
	for _, e := range left {
		klog.FromContext(ctx).Info("A device is not published", "device", e.device, "reason", e.reason)
	}
}

// newTimer fires at a moment, and for zero never in practice.
func newTimer(at time.Time) *time.Timer {
	if at.IsZero() {
		return time.NewTimer(24 * time.Hour)
	}
	return time.NewTimer(time.Until(at))
}

// sliceController is the library's controller for one owner.
type sliceController struct {
	controller *resourceslice.Controller
	owner      types.UID
	desired    map[string]resourceslice.Pool
}

// update makes desired the wish of a controller for this owner. Without an owner (no node object) nothing is published:
// the garbage collector would take it away again at once.
func (c *sliceController) update(ctx context.Context, p *publisher, owner types.UID, desired map[string]resourceslice.Pool) {
	if owner != c.owner {
		c.stop()
	}
	switch {
	case owner == "":
		return
	case c.controller == nil:
		c.owner, c.desired = owner, desired
		c.controller = p.startController(ctx, owner, p.resources(desired))
	case !apiequality.Semantic.DeepEqual(c.desired, desired):
		c.desired = desired
		c.controller.Update(ptr.To(p.resources(desired)))
	}
}

// again makes the controller compare with the API server even though nothing changed here.
func (c *sliceController) again() { c.desired = nil }

func (c *sliceController) stop() {
	c.controller.Stop()
	*c = sliceController{}
}

func (p *publisher) resources(desired map[string]resourceslice.Pool) resourceslice.DriverResources {
	if p.PublishNothing {
		return resourceslice.DriverResources{} // the controller removes what is there
	}
	return resourceslice.DriverResources{Pools: desired}
}

// startController returns nil if ctx ends before the controller has seen the slices that exist. It takes at least a second,
// which the library waits in one piece.
func (p *publisher) startController(ctx context.Context, owner types.UID, resources resourceslice.DriverResources) *resourceslice.Controller {
	ctx = klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "slices"))
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName:   p.DriverName,
		KubeClient:   p.KubeClient,
		Owner:        &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: p.NodeName, UID: owner},
		Resources:    &resources,
		Queue:        newSyncQueue(p.synced),
		SyncDelay:    ptr.To(repairDelay),
		ErrorHandler: p.publishFailed,
	})
	if err != nil {
		if ctx.Err() == nil {
			p.publishFailed(ctx, err, "start controller")
		}
		return nil
	}
	return controller
}

// synced is called when the API server has what it should have.
func (p *publisher) synced() {
	p.Driver.mu.Lock()
	defer p.Driver.mu.Unlock()
	p.published, p.publishError = true, nil
}

// publishFailed is called by the controller, which retries by itself.
func (p *publisher) publishFailed(ctx context.Context, err error, msg string) {
	var dropped *resourceslice.DroppedFieldsError
	if errors.As(err, &dropped) {
		// The controller has made its peace with the slice as stored, which offers GPUs that are held.
		klog.FromContext(ctx).Info("The API server dropped fields, withdrawing GPUs by leaving them out of their slice", "features", dropped.DisabledFeatures())
		p.set(func() { p.dropped = true })
		signal(p.dropping)
		return
	}
	p.metrics.publishErrors.Inc()
	p.Driver.mu.Lock()
	p.publishError = fmt.Errorf("%s: %w", msg, err)
	p.Driver.mu.Unlock()
	if apierrors.IsInvalid(err) {
		p.Recorder.Eventf(p.nodeRef, corev1.EventTypeWarning, "InvalidResourceSlice", "the API server refuses the node's ResourceSlices: %v", err)
	}
	if ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Cannot publish ResourceSlices, trying again", "message", msg)
	}
}
