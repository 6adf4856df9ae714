// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"maps"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// Node is what the API server says of this node's object: its UID, which is another one after the object was deleted and
// registered again (what belonged to the old one is garbage-collected), and its labels. It is safe for concurrent use.
type Node struct {
	client kubernetes.Interface
	name   string

	mu      sync.Mutex
	synced  bool
	uid     types.UID
	labels  map[string]string
	changed chan struct{}
}

// NewNode prepares to watch one node. Nothing is asked before Run.
func NewNode(client kubernetes.Interface, name string) *Node {
	return &Node{client: client, name: name, changed: make(chan struct{})}
}

// Run watches until ctx is done. Call it once.
func (n *Node) Run(ctx context.Context) error {
	selector := fields.OneTermEqualSelector(metav1.ObjectNameField, n.name).String()
	_, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
				options.FieldSelector = selector
				return n.client.CoreV1().Nodes().List(ctx, options)
			},
			WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
				options.FieldSelector = selector
				return n.client.CoreV1().Nodes().Watch(ctx, options)
			},
		}, n.client),
		ObjectType: &corev1.Node{}, Transform: trimNode,
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    n.store,
			UpdateFunc: func(_, object any) { n.store(object) },
			DeleteFunc: func(any) { n.set("", nil) },
		},
	})
	controller.RunWithContext(ctx)
	return nil
}

// trimNode keeps what Node tells: a Node carries every image of the machine.
func trimNode(object any) (any, error) {
	node, ok := object.(*corev1.Node)
	if !ok {
		return object, nil
	}
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion, Labels: node.Labels,
	}}, nil
}

func (n *Node) store(object any) {
	if node, ok := object.(*corev1.Node); ok {
		n.set(node.UID, node.Labels)
	}
}

func (n *Node) set(uid types.UID, labels map[string]string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.synced && n.uid == uid && maps.Equal(n.labels, labels) {
		return
	}
	n.synced, n.uid, n.labels = true, uid, labels
	close(n.changed)
	n.changed = make(chan struct{})
}

// UID of the node's object; empty while none has been seen, and once it is gone.
func (n *Node) UID() types.UID {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.uid
}

// Label returns a label of the node's object and whether it is there. Synced says whether that means anything yet.
func (n *Node) Label(key string) (value string, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	value, ok = n.labels[key]
	return value, ok
}

// Synced reports whether the node's object has been seen.
func (n *Node) Synced() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.synced
}

// Changed returns a channel that is closed when UID or labels next change; take it before reading.
func (n *Node) Changed() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.changed
}
