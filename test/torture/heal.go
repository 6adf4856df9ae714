// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/cache"
)

// gpuNodes are read without the product's own types, like by kubectl.
var gpuNodes = schema.GroupVersionResource{Group: "tandem-gpu.dev", Version: "v1alpha1", Resource: "gpunodes"}

// heals measures from outside the time from a permanent conflict of a claim until its owner's next pod runs. A heal that had
// to wait for a GPU or for an owner that makes no other pod at once, or with which a user meddled, is counted and not timed: it
// measures something else.
type heals struct {
	statistics *statistics
	trace      *trace
	// userOf answers a pod that uses a claim; nil while unknown.
	userOf func(namespace, claim string) *podHistory

	mu   sync.Mutex
	open []*loss
	// known are the claims whose loss was seen.
	known map[string]bool
	// roomy is set while GPUs are free, so that waiting for one is no excuse for a slow heal.
	roomy bool
}

// loss is a claim pending eviction whose owner has not replaced its pod yet.
type loss struct {
	owner, workload string
	since           time.Time
	// changedByUser: a user has scaled or deleted something of the workload since.
	changedByUser bool
}

// run watches GPUNodes until ctx is done; it returns at once where there are none.
func (h *heals) run(ctx context.Context, client dynamic.Interface) error {
	_, err := client.Resource(gpuNodes).List(ctx, metav1.ListOptions{Limit: 1})
	if apierrors.IsNotFound(err) {
		return nil
	}
	factory := dynamicinformer.NewDynamicSharedInformerFactory(client, 0)
	_, err = factory.ForResource(gpuNodes).Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(object any) { h.seen(object) }, UpdateFunc: func(_, object any) { h.seen(object) },
	})
	if err != nil {
		return fmt.Errorf("watch GPUNodes: %w", err)
	}
	factory.Start(ctx.Done())
	<-ctx.Done()
	factory.Shutdown()
	return nil
}

// conflict is an entry of GPUNode.status.conflicts.
type conflict struct {
	uid, namespace, name string
	since                time.Time
	pendingEviction      bool
}

func conflictsOf(node *unstructured.Unstructured) []conflict {
	entries, _, _ := unstructured.NestedSlice(node.Object, "status", "conflicts")
	var found []conflict
	for _, entry := range entries {
		fields, ok := entry.(map[string]any)
		if !ok {
			continue
		}
		text := func(key string) string { value, _ := fields[key].(string); return value }
		since, err := time.Parse(time.RFC3339Nano, text("since"))
		if err != nil {
			continue
		}
		pendingEviction, _ := fields["pendingEviction"].(bool)
		found = append(found, conflict{text("uid"), text("namespace"), text("name"), since, pendingEviction})
	}
	return found
}

func (h *heals) seen(object any) {
	node, ok := object.(*unstructured.Unstructured)
	if !ok {
		return
	}
	for _, l := range conflictsOf(node) {
		if !l.pendingEviction {
			continue
		}
		if conflict := h.userOf(l.namespace, l.name); conflict != nil && conflict.owner != "" {
			h.lost(l, conflict)
		}
	}
}

func (h *heals) lost(l conflict, pod *podHistory) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.known[l.uid] {
		return
	}
	h.known[l.uid] = true
	h.statistics.add(func(c *Counters) { c.PendingEviction++ })
	// A replacement pod that is in conflict too heals nothing yet: the loss continues.
	if h.healedBy(pod) < 0 {
		h.open = append(h.open, &loss{owner: pod.owner, workload: pod.pod.Labels[workloadLabel], since: l.since})
	}
}

// healedBy is the loss that a pod makes good if it runs: the first of its owner that is older than the pod. Under mu.
func (h *heals) healedBy(pod *podHistory) int {
	return slices.IndexFunc(h.open, func(o *loss) bool { return o.owner == pod.owner && o.since.Before(pod.since) })
}

// noteUserChange notes that a user changes a workload.
func (h *heals) noteUserChange(workload string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, o := range h.open {
		o.changedByUser = o.changedByUser || o.workload == workload
	}
}

func (h *heals) room(roomy bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.roomy = roomy
}

// placed is called for each pod that got its GPUs. The first pod of an owner that was created after a loss heals it.
func (h *heals) placed(l *podHistory, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	at := h.healedBy(l)
	if at < 0 {
		return
	}
	healed := h.open[at]
	h.open = slices.Delete(h.open, at, at+1)
	h.trace.note("healed: %s after %s, by a pod made after %s", healed.workload, now.Sub(healed.since).Round(time.Millisecond),
		l.since.Sub(healed.since).Round(time.Millisecond))
	h.statistics.healed(healed.since, l.since, now, l.replaced && !healed.changedByUser && (h.roomy || !l.unschedulable))
}

// forget drops the losses of owners that are gone.
func (h *heals) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.open, h.known = nil, map[string]bool{}
}
