// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"context"
	"errors"
	"fmt"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// watch follows the node's own object, and no other, until ctx is done.
func (o *Object) watch(ctx context.Context) error {
	list := cache.NewListWatchFromClient(o.client, resource, metav1.NamespaceAll,
		fields.OneTermEqualSelector(metav1.ObjectNameField, o.config.NodeName))
	informer := cache.NewSharedIndexInformerWithOptions(list, &v1alpha1.GPUNode{}, cache.SharedIndexInformerOptions{})
	if err := errors.Join(informer.SetTransform(stripped), informer.SetWatchErrorHandlerWithContext(o.watchFailed())); err != nil {
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

// stripped drops the managed fields, which a status is larger with. The API server keeps its own.
func stripped(object any) (any, error) {
	if known, ok := object.(*v1alpha1.GPUNode); ok {
		known.ManagedFields = nil
	}
	return object, nil
}

// watchFailed logs once that the cluster has no GPUNodes, or none for this agent, which may be permanent. The informer retries, up to
// once in half a minute.
func (o *Object) watchFailed() cache.WatchErrorHandlerWithContext {
	var once sync.Once
	return func(ctx context.Context, r *cache.Reflector, err error) {
		if !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
			cache.DefaultWatchErrorHandler(ctx, r, err)
			return
		}
		o.metrics.served.Set(0)
		once.Do(func() {
			klog.FromContext(ctx).Info("Going on without GPUNodes: the API server does not serve them to this agent", "reason", err.Error())
		})
	}
}
