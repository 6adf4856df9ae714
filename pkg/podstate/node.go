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

	"github.com/tandem-gpu/tandem/internal/broadcast"
)

// Node is this node's object: its UID, which changes when the object is deleted and registered again (the garbage collector
// removes the objects that the earlier one owned), its labels and its container runtime. It is safe for concurrent use.
type Node struct {
	client  kubernetes.Interface
	name    string
	changed broadcast.Signal

	mu sync.Mutex
	// node is empty while there is no object.
	node corev1.Node
}

// NewNode returns a Node that makes no request before Run.
func NewNode(client kubernetes.Interface, name string) *Node {
	return &Node{client: client, name: name}
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
			DeleteFunc: func(any) { n.store(&corev1.Node{}) },
		},
	})
	controller.RunWithContext(ctx)
	return nil
}

// trimNode keeps what Node returns: the object names every image of the machine.
func trimNode(object any) (any, error) {
	node, ok := object.(*corev1.Node)
	if !ok {
		return object, nil
	}
	trimmed := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion, Labels: node.Labels,
	}}
	trimmed.Status.NodeInfo.ContainerRuntimeVersion = node.Status.NodeInfo.ContainerRuntimeVersion
	return trimmed, nil
}

func (n *Node) store(object any) {
	next, ok := object.(*corev1.Node)
	if !ok {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.node.UID != next.UID || !maps.Equal(n.node.Labels, next.Labels) || n.node.Status.NodeInfo != next.Status.NodeInfo {
		n.changed.Notify()
	}
	n.node = *next
}

func (n *Node) current() corev1.Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.node
}

// UID returns the UID of the node's object; empty while there is none.
func (n *Node) UID() types.UID { return n.current().UID }

// Label returns a label of the node's object and whether it has that label.
func (n *Node) Label(key string) (value string, ok bool) {
	value, ok = n.current().Labels[key]
	return value, ok
}

// RuntimeVersion returns the container runtime as kubelet reports it, "containerd://2.1.4"; empty while it is unknown.
func (n *Node) RuntimeVersion() string { return n.current().Status.NodeInfo.ContainerRuntimeVersion }

// Changed returns a channel that is closed when the UID, the labels or the runtime next change; take it before reading.
func (n *Node) Changed() <-chan struct{} { return n.changed.Changed() }
