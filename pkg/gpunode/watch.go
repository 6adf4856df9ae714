// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// watch follows the node's own object, and no other, until ctx is done.
func (o *Object) watch(ctx context.Context) error {
	list := cache.NewListWatchFromClient(o.client, resource, metav1.NamespaceAll,
		fields.OneTermEqualSelector(metav1.ObjectNameField, o.config.NodeName))
	informer := cache.NewSharedIndexInformerWithOptions(list, &v1alpha1.GPUNode{}, cache.SharedIndexInformerOptions{})
	if err := informer.SetTransform(func(object any) (any, error) {
		if known, ok := object.(*v1alpha1.GPUNode); ok {
			return stripped(known), nil
		}
		return object, nil
	}); err != nil {
		return fmt.Errorf("watch GPUNode: %w", err)
	}
	if err := informer.SetWatchErrorHandlerWithContext(o.watchFailed()); err != nil {
		return fmt.Errorf("watch GPUNode: %w", err)
	}
	handler, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(object any) { o.observe(object) },
		UpdateFunc: func(before, object any) {
			// An object that was replaced by another while the watch was interrupted.
			if was, ok := before.(*v1alpha1.GPUNode); ok && was.UID != uidOf(object) {
				o.view.vanish(was)
			}
			o.observe(object)
		},
		DeleteFunc: func(object any) {
			if tombstone, ok := object.(cache.DeletedFinalStateUnknown); ok {
				object = tombstone.Obj
			}
			if known, ok := object.(*v1alpha1.GPUNode); ok {
				o.view.vanish(known)
			}
		},
	})
	if err != nil {
		return fmt.Errorf("watch GPUNode: %w", err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		informer.RunWithContext(ctx)
	}()
	// The informer syncs before its handler has received everything.
	if cache.WaitFor(ctx, "", handler.HasSyncedChecker()) {
		klog.FromContext(ctx).V(1).Info("GPUNodes are served")
		o.metrics.served.Set(1)
		o.view.sync()
	}
	<-done
	return nil
}

func (o *Object) observe(object any) {
	if known, ok := object.(*v1alpha1.GPUNode); ok {
		o.metrics.served.Set(1)
		o.view.observe(known)
	}
}

func uidOf(object any) types.UID {
	if known, ok := object.(*v1alpha1.GPUNode); ok {
		return known.UID
	}
	return ""
}

// watchFailed says once that the cluster has no GPUNodes, or none for us: it may stay so, and then the agent steers less well
// and is as safe. The informer tries again, less and less often, up to once in half a minute.
func (o *Object) watchFailed() cache.WatchErrorHandlerWithContext {
	said := false
	return func(ctx context.Context, r *cache.Reflector, err error) {
		if !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
			cache.DefaultWatchErrorHandler(ctx, r, err)
			return
		}
		o.metrics.served.Set(0)
		if !said {
			said = true
			klog.FromContext(ctx).Info("Going on without GPUNodes: the API server does not serve them to this agent", "reason", err.Error())
		}
	}
}
