// SPDX-License-Identifier: Apache-2.0

// Package gpunode is the agent's side of this node's GPUNode. It creates the object, writes the holders of each GPU into its status,
// and reads from its spec which GPUs the scheduler has allocated to claims. The object may be late or missing. The agent serves both
// APIs without it: the ledger alone decides who owns a GPU.
package gpunode

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Node is this node's own object.
type Node interface {
	// UID is empty while there is no node object.
	UID() types.UID
	// Changed returns a channel that is closed at the next change. Take it before reading.
	Changed() <-chan struct{}
}

// Ledger returns the holders of devices and the claims in conflict.
type Ledger interface {
	Holds() []ledger.Hold
	Conflicts() []ledger.Conflict
	Changed() <-chan struct{}
}

// Sharing returns the MPS daemons to run. *sharing.Manager implements it.
type Sharing interface {
	Daemons() []sharing.Daemon
	// UnknownDaemons are the names of daemons that may run too.
	UnknownDaemons() []string
	Changed() <-chan struct{}
}

// Config of an Object. All fields are required. Those of Facts may be zero.
type Config struct {
	// REST is the configuration for the API server. Its content type is ignored.
	REST *rest.Config
	// Claims returns the reader of a namespace.
	Claims     func(namespace string) Claims
	DriverName string
	NodeName   string
	// Facts contains the facts that do not change: Mode, Limits, OfferedToPods, Excluded and BootID. The Object sets the others.
	Facts Facts
	// Waiting returns why new pods and claims get no GPU, in one line; empty while they get GPUs. It is called after changes of the others.
	Waiting func() string
	// Unread, where set, reports whether no GPU can be read now. It is called after the same changes.
	Unread func() bool

	Node      Node
	Ledger    Ledger
	Inventory device.Source
	Sharing   Sharing
	// Recorder receives events on the node.
	Recorder   record.EventRecorder
	Registerer prometheus.Registerer
}

// times are the durations, which tests shorten.
type times struct {
	settle      time.Duration // from the first of several changes to one write of all of them
	interval    time.Duration // between two writes of the status, on average
	firstRetry  time.Duration // after a failed write; it doubles up to the last
	lastRetry   time.Duration // if the API server may be back at any moment
	lastRefused time.Duration // if an administrator has to change something first
	verify      time.Duration // between two checks of a claim that no hold confirms
	heartbeat   time.Duration // between two writes of an unchanged status, less a fifth
}

// Object is this node's GPUNode. Make it with New and use it with Run. Its other methods are safe for concurrent use, answer from
// memory and do not block. While the API server is unavailable they answer what it said last.
type Object struct {
	config  Config
	times   times
	client  rest.Interface
	metrics *metrics
	view
}

// New makes no request. It panics if its metrics are registered already.
func New(c Config) (*Object, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("configure GPUNode: %w", err)
	}
	config := rest.CopyConfig(c.REST)
	config.APIPath, config.GroupVersion = "/apis", &v1alpha1.GroupVersion
	// Custom resources have no other content type.
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	client, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("configure GPUNode: %w", err)
	}
	return &Object{config: c, client: client, metrics: newMetrics(c.Registerer), times: times{
		settle: 50 * time.Millisecond, interval: time.Second,
		firstRetry: 500 * time.Millisecond, lastRetry: 5 * time.Second, lastRefused: 30 * time.Second,
		verify: time.Minute, heartbeat: time.Minute,
	}}, nil
}

// Run keeps the object up to date until ctx is done. It then writes that the agent has stopped and serves no extended resource, and leaves
// the rest of the status. Call it once. An API server that is unavailable, serves no GPUNodes or refuses them is not an error.
func (o *Object) Run(ctx context.Context) error {
	group, running := errgroup.WithContext(ctx)
	group.Go(func() error { return o.watch(running) })
	group.Go(func() error { o.write(running); return nil })
	group.Go(func() error { o.verify(running); return nil })
	err := group.Wait()
	o.leave(context.WithoutCancel(ctx))
	return err
}

// Allocated returns the devices or shares of the claims, as holds that the claims will have.
func (o *Object) Allocated() []ledger.Hold {
	inventory := o.config.Inventory.Inventory()
	var holds []ledger.Hold
	for _, claim := range o.Claims() {
		for _, name := range claim.Devices {
			d, known := inventory.ByName(name)
			if !known {
				continue
			}
			h := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: string(claim.UID)}, Device: d.Ref()}
			if share, shared := claim.ShareOf(name); shared {
				h.Share = d.Share(device.Consumed{Memory: share.Memory, Shares: share.Shares})
			}
			holds = append(holds, h)
		}
	}
	return holds
}

// DaemonTrouble returns why the pod of an MPS daemon does not run, as the controller reports it; empty if it reports nothing.
func (o *Object) DaemonTrouble(name string) string {
	object, _ := o.view.current()
	if object == nil {
		return ""
	}
	for _, d := range object.Spec.Daemons {
		if d.Name == name {
			return d.Message
		}
	}
	return ""
}

// Synced reports whether the API server has returned the object, or that there is none. It stays false if the API server does not
// serve GPUNodes, and once true it stays true.
func (o *Object) Synced() bool {
	_, synced := o.view.current()
	return synced
}

// AwaitSpec waits until the spec is known, or that there is no object yet, or that the API server does not serve GPUNodes to this agent. It
// returns false if ctx ends before. The agent calls it before it offers devices, which may be out of service.
func (o *Object) AwaitSpec(ctx context.Context) bool {
	return broadcast.Await(ctx, o.Changed, func() bool {
		o.view.mu.Lock()
		defer o.view.mu.Unlock()
		return o.view.synced || o.view.unserved
	})
}

// watch follows the node's own object, and no other, until ctx is done.
func (o *Object) watch(ctx context.Context) error {
	list := cache.NewListWatchFromClient(o.client, resource, metav1.NamespaceAll,
		fields.OneTermEqualSelector(metav1.ObjectNameField, o.config.NodeName))
	informer := cache.NewSharedIndexInformerWithOptions(list, &v1alpha1.GPUNode{}, cache.SharedIndexInformerOptions{})
	var once sync.Once
	err := informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		if !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
			cache.DefaultWatchErrorHandler(ctx, r, err)
			return
		}
		// The cluster may never serve GPUNodes to this agent, so log once. The informer retries, up to once in half a minute.
		o.metrics.served.Set(0)
		o.view.update(func() { o.view.unserved = true })
		once.Do(func() {
			klog.FromContext(ctx).Info("Going on without GPUNodes: the API server does not serve them to this agent", "reason", err.Error())
		})
	})
	if err != nil {
		return fmt.Errorf("watch GPUNode: %w", err)
	}
	observe := func(object any) {
		if known, ok := object.(*v1alpha1.GPUNode); ok {
			o.metrics.served.Set(1)
			o.view.observe(known)
		}
	}
	handler, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    observe,
		UpdateFunc: func(_, object any) { observe(object) },
		DeleteFunc: func(object any) {
			if tombstone, ok := object.(cache.DeletedFinalStateUnknown); ok {
				object = tombstone.Obj
			}
			if known, ok := object.(*v1alpha1.GPUNode); ok {
				o.view.vanish(known.UID)
			}
		},
	})
	if err != nil {
		return fmt.Errorf("watch GPUNode: %w", err)
	}
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { informer.RunWithContext(ctx) })
	// The informer syncs before its handler has received everything.
	if cache.WaitFor(ctx, "", handler.HasSyncedChecker()) {
		klog.FromContext(ctx).V(1).Info("The API server serves GPUNodes")
		o.metrics.served.Set(1)
		o.view.update(func() { o.view.synced = true })
	}
	return nil
}
