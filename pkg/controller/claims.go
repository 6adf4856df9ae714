// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// claimReader reads the claims that have devices of Tandem's driver.
type claimReader interface {
	// on returns the claims with devices of a node.
	on(node string) []v1alpha1.AllocatedClaim
	// get returns a claim, which callers do not change. It is empty if the claim does not exist or has never had a device.
	get(namespace, name string) *resourceapi.ResourceClaim
}

// claimCache is the cache of the claims that have or had devices of Tandem's driver. A large cluster has many more claims that wait for
// a device. The manager's cache would keep them, because the API server cannot select claims by driver. It is a manager.Runnable.
type claimCache struct {
	driver   string
	informer toolscache.SharedIndexInformer
}

// nodeIndex finds claims by the nodes that they have devices of.
const nodeIndex = "tandem.node"

func newClaimCache(api kubernetes.Interface, driver string) (*claimCache, error) {
	filter := &allocatedClaims{driver: driver, passed: sets.New[types.UID]()}
	informer := toolscache.NewSharedIndexInformerWithOptions(filter.watch(api), &resourceapi.ResourceClaim{},
		toolscache.SharedIndexInformerOptions{Indexers: toolscache.Indexers{nodeIndex: func(o any) ([]string, error) {
			claim, ok := o.(*resourceapi.ResourceClaim)
			if !ok {
				return nil, nil
			}
			return nodesOf(claim, driver), nil
		}}})
	if err := informer.SetTransform(trim(func(c *resourceapi.ResourceClaim) { trimClaim(c, driver) })); err != nil {
		return nil, fmt.Errorf("make cache of claims: %w", err)
	}
	if _, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{DeleteFunc: filter.forget}); err != nil {
		return nil, fmt.Errorf("make cache of claims: %w", err)
	}
	return &claimCache{driver, informer}, nil
}

// claimClient returns a client with the manager's connections.
func claimClient(m manager.Manager) (kubernetes.Interface, error) {
	config := rest.CopyConfig(m.GetConfig())
	config.ContentType = runtime.ContentTypeProtobuf
	client, err := kubernetes.NewForConfigAndClient(config, m.GetHTTPClient())
	if err != nil {
		return nil, fmt.Errorf("make client for claims: %w", err)
	}
	return client, nil
}

// NeedLeaderElection implements manager.LeaderElectionRunnable: standby replicas fill the cache too.
func (c *claimCache) NeedLeaderElection() bool { return false }

// Start implements manager.Runnable.
func (c *claimCache) Start(ctx context.Context) error {
	c.informer.RunWithContext(ctx)
	return nil
}

// synced waits until the cache is filled. It returns false if ctx is done first.
func (c *claimCache) synced(ctx context.Context) bool {
	return toolscache.WaitForCacheSync(ctx.Done(), c.informer.HasSynced)
}

func (c *claimCache) on(node string) []v1alpha1.AllocatedClaim {
	objects, _ := c.informer.GetIndexer().ByIndex(nodeIndex, node) // the informer has this index
	claims := make([]resourceapi.ResourceClaim, 0, len(objects))
	for _, o := range objects {
		if claim, ok := o.(*resourceapi.ResourceClaim); ok {
			claims = append(claims, *claim)
		}
	}
	return Relay(claims, c.driver, node)
}

func (c *claimCache) get(namespace, name string) *resourceapi.ResourceClaim {
	o, _, _ := c.informer.GetIndexer().GetByKey(types.NamespacedName{Namespace: namespace, Name: name}.String()) // it is in memory
	if claim, ok := o.(*resourceapi.ResourceClaim); ok {
		return claim
	}
	return &resourceapi.ResourceClaim{}
}

// changes enqueues the nodes of claims whose allocation changed. The reconciler's workers start once the cache is filled.
func (c *claimCache) changes() source.SyncingSource {
	return filledSource{&source.Informer{
		Informer: c.informer, Handler: claimHandler(c.driver), Predicates: []predicate.Predicate{allocationChanged},
	}, "claims", c.synced}
}

// filledSource is an informer whose reconciler starts its workers once a cache is filled. synced returns false if ctx is done first.
type filledSource struct {
	*source.Informer
	what   string
	synced func(ctx context.Context) bool
}

// WaitForSync implements source.SyncingSource.
func (s filledSource) WaitForSync(ctx context.Context) error {
	if !s.synced(ctx) && !errors.Is(ctx.Err(), context.Canceled) {
		return fmt.Errorf("fill cache of %s: %w", s.what, context.Cause(ctx))
	}
	return nil
}

// allocatedClaims passes the claims that have or had devices of a driver, as the API server does for objects that a watch selects.
type allocatedClaims struct {
	driver string

	mu sync.Mutex
	// passed are the claims that were passed and that the cache has not deleted since. They are passed although they have no device
	// any more, so that their nodes are told.
	passed sets.Set[types.UID]
}

func (f *allocatedClaims) watch(api kubernetes.Interface) toolscache.ListerWatcher {
	claims := api.ResourceV1().ResourceClaims(metav1.NamespaceAll)
	return toolscache.ToListWatcherWithWatchListSemantics(&toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := claims.List(ctx, o)
			if err != nil {
				return nil, err // the informer compares it
			}
			list.Items = slices.DeleteFunc(list.Items, func(c resourceapi.ResourceClaim) bool { return !f.passes(watch.Added, &c) })
			return list, nil
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			all, err := claims.Watch(ctx, o)
			if err != nil {
				return nil, err // the informer compares it
			}
			return filteredWatch{watch.Filter(all, func(e watch.Event) (watch.Event, bool) {
				claim, is := e.Object.(*resourceapi.ResourceClaim)
				return e, !is || f.passes(e.Type, claim)
			})}, nil
		},
	}, api)
}

// filteredWatch ends the goroutine of watch.Filter when it is stopped. Otherwise that may wait forever for a reader of its next event.
type filteredWatch struct{ watch.Interface }

// Stop implements watch.Interface.
func (w filteredWatch) Stop() {
	w.Interface.Stop()
	go func() {
		for range w.ResultChan() { // it is closed soon
		}
	}()
}

func (f *allocatedClaims) passes(event watch.EventType, claim *resourceapi.ResourceClaim) bool {
	if event == watch.Bookmark {
		return true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if event != watch.Deleted && len(nodesOf(claim, f.driver)) > 0 {
		f.passed.Insert(claim.UID)
	}
	return f.passed.Has(claim.UID)
}

// forget is called when the cache has deleted a claim. The watch does not tell of all deletions: some are found by the next list.
func (f *allocatedClaims) forget(deleted any) {
	if missing, is := deleted.(toolscache.DeletedFinalStateUnknown); is {
		deleted = missing.Obj
	}
	if claim, is := deleted.(*resourceapi.ResourceClaim); is {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.passed.Delete(claim.UID)
	}
}
