// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// watchNodeUID calls changed with the UID of a node whenever it changes, "" once the node is gone, until ctx is done. A node
// that is deleted and registered again is another owner: what belonged to the old one is garbage-collected.
func watchNodeUID(ctx context.Context, client kubernetes.Interface, name string, changed func(types.UID)) {
	selector := fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
	_, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: &cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
				options.FieldSelector = selector
				return client.CoreV1().Nodes().List(ctx, options)
			},
			WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
				options.FieldSelector = selector
				return client.CoreV1().Nodes().Watch(ctx, options)
			},
		},
		ObjectType: &corev1.Node{},
		// A Node carries every image of the machine; only its identity is needed.
		Transform: func(object any) (any, error) {
			node, ok := object.(*corev1.Node)
			if !ok {
				return object, nil
			}
			return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion}}, nil
		},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(object any) { changed(uidOf(object)) },
			UpdateFunc: func(_, object any) { changed(uidOf(object)) },
			DeleteFunc: func(any) { changed("") },
		},
	})
	controller.RunWithContext(ctx)
}

func uidOf(object any) types.UID {
	if node, ok := object.(*corev1.Node); ok {
		return node.UID
	}
	return types.UID(fmt.Sprint(object)) // cannot happen: the informer holds nodes only
}
