// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// A GPUNode ends after its Node and its agent, and never while a GPU is under maintenance.
func TestEndOfAGPUNode(t *testing.T) {
	noon := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	of := func(seen time.Duration, entries ...string) *v1alpha1.GPUNode {
		node := gpuNode()
		node.CreationTimestamp = metav1.NewTime(noon.Add(-time.Hour))
		if seen != 0 {
			at := metav1.NewTime(noon.Add(-seen))
			node.Status.Seen = &at
		}
		for _, uuid := range entries {
			node.Spec.Maintenance = append(node.Spec.Maintenance, v1alpha1.GPUMaintenance{UUID: uuid})
		}
		return node
	}
	young := of(0)
	young.CreationTimestamp = metav1.NewTime(noon.Add(-time.Minute))
	there := coreNode("8", "8")
	for name, c := range map[string]struct {
		object        *v1alpha1.GPUNode
		cached, live  *corev1.Node
		stale         *v1alpha1.GPUNode // what the cache has
		deleted       bool
		again         time.Duration
		maintainedNow bool // between the last look and the deletion
		justGone      bool // the Node, which may be back soon
	}{
		"its Node is there":                  {object: of(time.Hour), cached: there, live: there},
		"its Node is not in the cache":       {object: of(time.Hour), live: there},
		"its agent is there":                 {object: of(30 * time.Second), again: 2 * time.Minute},
		"its agent's clock is ahead":         {object: of(-time.Hour), again: 150 * time.Second},
		"its agent is silent":                {object: of(3 * time.Minute), deleted: true},
		"its Node has just gone":             {object: of(time.Hour), justGone: true, again: goneFor},
		"no agent has ever seen it":          {object: of(0), deleted: true},
		"it is new":                          {object: young, again: 90 * time.Second},
		"a GPU is under maintenance":         {object: of(time.Hour, "GPU-1")},
		"one is, and the cache does not say": {object: of(time.Hour, "GPU-1"), stale: of(time.Hour)},
		"one is from now on":                 {object: of(time.Hour), maintainedNow: true},
	} {
		t.Run(name, func(t *testing.T) {
			var w *world
			w = newWorld(t, interceptor.Funcs{Delete: func(ctx context.Context, under client.WithWatch, o client.Object, options ...client.DeleteOption) error {
				if c.maintainedNow {
					now := w.gpuNode()
					now.Spec.Maintenance = []v1alpha1.GPUMaintenance{{UUID: "GPU-1"}}
					if err := under.Update(ctx, now); err != nil {
						t.Fatal(err)
					}
				}
				return under.Delete(ctx, o, options...)
			}}, c.object)
			read := func(core *corev1.Node, gpus *v1alpha1.GPUNode) client.WithWatch {
				return interceptor.NewClient(w.client, interceptor.Funcs{
					Get: func(ctx context.Context, under client.WithWatch, key client.ObjectKey, into client.Object, options ...client.GetOption) error {
						switch o := into.(type) {
						case *corev1.Node:
							if core == nil {
								return apierrors.NewNotFound(corev1.Resource("nodes"), key.Name)
							}
							core.DeepCopyInto(o)
							return nil
						case *v1alpha1.GPUNode:
							if gpus != nil {
								gpus.DeepCopyInto(o)
								return nil
							}
						}
						return under.Get(ctx, key, into, options...)
					},
				})
			}
			r := &lifecycle{
				cluster: cluster{client: read(c.cached, c.stale), live: read(c.live, nil), now: func() time.Time { return noon }},
				gone:    map[string]time.Time{},
			}
			if !c.justGone {
				r.gone["node-1"] = noon.Add(-time.Hour)
			}
			result, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: "node-1"}})
			if apierrors.IsConflict(err) != c.maintainedNow || err != nil && !c.maintainedNow || result.RequeueAfter != c.again {
				t.Errorf("again after %s, %v", result.RequeueAfter, err)
			}
			if _, known := r.gone["node-1"]; known && (c.live != nil || c.deleted) {
				t.Error("the record of the gone Node is kept: if the Node goes again, its minute does not start anew")
			}
			err = w.client.Get(t.Context(), types.NamespacedName{Name: "node-1"}, &v1alpha1.GPUNode{})
			if apierrors.IsNotFound(err) != c.deleted {
				t.Errorf("after it: %v", err)
			}
		})
	}
}

// The garbage collector would delete a GPUNode with its Node. Other owners stay.
func TestNoNodeOwnsAGPUNode(t *testing.T) {
	other := metav1.OwnerReference{APIVersion: "example.com/v1", Kind: "Machine", Name: "m", UID: "uid-machine"}
	ofNode := metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: "node-1", UID: "gone"}
	object := gpuNode()
	object.OwnerReferences = []metav1.OwnerReference{ofNode, other}
	object.Spec.Maintenance = []v1alpha1.GPUMaintenance{{UUID: "GPU-1"}}
	w := newWorld(t, interceptor.Funcs{}, object)
	w.twice(&lifecycle{cluster: w.cluster(), gone: map[string]time.Time{}}, "node-1")
	now := w.gpuNode()
	if diff := cmp.Diff([]metav1.OwnerReference{other}, now.OwnerReferences); diff != "" || len(now.Spec.Maintenance) != 1 {
		t.Errorf("owners (-want +got):\n%s, spec %+v", diff, now.Spec)
	}
	w.want(map[string]int{"patch GPUNode": 1})
}
