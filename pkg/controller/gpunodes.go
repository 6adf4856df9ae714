// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
)

var gpuNodeDescription = prometheus.NewDesc("tandem_controller_gpunode",
	"1 for each Node whose GPUNode lists a GPU. If such a node has no metric tandem_config_rejected, its agent does not answer.", []string{"node"}, nil)

// gpuNodes reports the nodes with GPUs when metrics are collected: an alert compares them with the agents that answer. GPUNodes stay when
// an agent ends, and those with GPUs under maintenance when their Node ends. It reports none until the caches are filled.
type gpuNodes struct {
	cache  client.Reader
	synced func() bool
}

func (g gpuNodes) Describe(descriptions chan<- *prometheus.Desc) { descriptions <- gpuNodeDescription }

func (g gpuNodes) Collect(metrics chan<- prometheus.Metric) {
	if !g.synced() {
		return
	}
	var list v1alpha1.GPUNodeList
	if err := g.cache.List(context.Background(), &list, client.UnsafeDisableDeepCopy); err != nil {
		metrics <- prometheus.NewInvalidMetric(gpuNodeDescription, err)
		return
	}
	for _, node := range list.Items {
		err := g.cache.Get(context.Background(), client.ObjectKeyFromObject(&node), &corev1.Node{}, client.UnsafeDisableDeepCopy)
		if len(node.Status.Devices) > 0 && err == nil {
			metrics <- prometheus.MustNewConstMetric(gpuNodeDescription, prometheus.GaugeValue, 1, node.Name)
		}
	}
}

// goneFor is how long a Node has to be gone before its GPUNode is deleted. Kubernetes deletes the pods of a Node that is gone after forty seconds.
const goneFor = time.Minute

// lifecycle deletes the GPUNodes whose Node is gone and whose agent is silent, except those with GPUs under maintenance: a Node is often
// deleted and registered again during the very repair that the maintenance is for. The garbage collector would delete these as well, so
// lifecycle removes their Node from the owners. Agents of earlier versions wrote it.
type lifecycle struct {
	cluster
	// gone is since when a Node has been found gone, by name. A Node that is created again soon keeps its GPUNode, and so its MPS daemons.
	gone map[string]time.Time
}

func (r *lifecycle) register(m manager.Manager) error {
	concerns := changed(func(n *v1alpha1.GPUNode) any { return []any{n.UID, n.OwnerReferences, len(n.Spec.Maintenance)} })
	never := predicate.NewPredicateFuncs(func(client.Object) bool { return false })
	never.DeleteFunc = nil // every deletion
	return forGPUNodes(m, "lifecycle", 1, concerns).
		Watches(&corev1.Node{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(never)).
		Complete(r)
}

// Reconcile implements reconcile.Reconciler for one node. It is idempotent.
func (r *lifecycle) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	object := &v1alpha1.GPUNode{}
	if err := r.client.Get(ctx, request.NamespacedName, object); err != nil {
		delete(r.gone, request.Name)
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if slices.ContainsFunc(object.OwnerReferences, isNode) {
		return reconcile.Result{}, r.disown(ctx, object)
	}
	// The cache has no times, and may be old.
	for _, from := range []client.Reader{r.client, r.live} {
		if err := from.Get(ctx, request.NamespacedName, &corev1.Node{}); !apierrors.IsNotFound(err) {
			delete(r.gone, request.Name)
			return reconcile.Result{}, err
		}
	}
	since, known := r.gone[request.Name]
	if !known {
		since = r.now()
		r.gone[request.Name] = since
	}
	if err := r.live.Get(ctx, request.NamespacedName, object); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if len(object.Spec.Maintenance) > 0 {
		return reconcile.Result{}, nil
	}
	seen := ptr.Deref(object.Status.Seen, object.CreationTimestamp)
	silent, left := seen.Add(availability.SilentAfter).Sub(r.now()), since.Add(goneFor).Sub(r.now())
	if wait := max(silent, left); wait > 0 {
		return reconcile.Result{RequeueAfter: min(wait, availability.SilentAfter)}, nil
	}
	unchanged := client.Preconditions{UID: ptr.To(object.UID), ResourceVersion: ptr.To(object.ResourceVersion)}
	if err := r.client.Delete(ctx, object, unchanged); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("delete GPUNode %s, whose Node is gone: %w", object.Name, err))
	}
	delete(r.gone, request.Name)
	klog.FromContext(ctx).Info("Deleted the GPUNode of a Node that is gone", "node", object.Name)
	return reconcile.Result{}, nil
}

// disown removes Nodes from the owners of a GPUNode.
func (r *lifecycle) disown(ctx context.Context, object *v1alpha1.GPUNode) error {
	patch := jsonPatch{types.MergePatchType, map[string]any{"metadata": map[string]any{
		"uid": object.UID, "resourceVersion": object.ResourceVersion,
		"ownerReferences": slices.DeleteFunc(slices.Clone(object.OwnerReferences), isNode),
	}}}
	if err := r.client.Patch(ctx, object, patch); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("remove the Node from the owners of GPUNode %s: %w", object.Name, err))
	}
	return nil
}

func isNode(owner metav1.OwnerReference) bool {
	return owner.Kind == "Node" && owner.APIVersion == "v1"
}
