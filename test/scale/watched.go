// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// watched is what the API server reports to the harness, with the time of each event.
type watched struct {
	mu sync.Mutex
	// phases are those of all pods by UID.
	phases map[types.UID]corev1.PodPhase
	// of the pods of the traffic, by name.
	ran, failed, gone map[string]time.Time
	// allocated is when a claim got devices, relayed when its node's GPUNode had it.
	allocated, relayed map[types.UID]time.Time
	// holders is the number of devices with a holder by node, slices the devices in ResourceSlices.
	holders, slices map[string]int
}

// traffic is the prefix of the pods whose times are taken.
const trafficPrefix = "traffic-"

// watch follows pods, claims, GPUNodes and slices in group until ctx is done. It returns when it has their lists.
func (r *run) watch(ctx context.Context, group *errgroup.Group) (*watched, error) {
	w := &watched{
		phases: map[types.UID]corev1.PodPhase{}, ran: map[string]time.Time{}, failed: map[string]time.Time{}, gone: map[string]time.Time{},
		allocated: map[types.UID]time.Time{}, relayed: map[types.UID]time.Time{}, holders: map[string]int{}, slices: map[string]int{},
	}
	custom, err := dynamic.NewForConfig(r.api)
	if err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	typed := informers.NewSharedInformerFactory(r.client, 0)
	dynamics := dynamicinformer.NewDynamicSharedInformerFactory(custom, 0)
	var synced []cache.InformerSynced
	for informer, on := range map[cache.SharedIndexInformer]cache.ResourceEventHandlerFuncs{
		typed.Core().V1().Pods().Informer():                {AddFunc: w.pod, UpdateFunc: func(_, o any) { w.pod(o) }, DeleteFunc: w.podGone},
		typed.Resource().V1().ResourceClaims().Informer():  {AddFunc: w.claim, UpdateFunc: func(_, o any) { w.claim(o) }},
		typed.Resource().V1().ResourceSlices().Informer():  {AddFunc: w.slice, UpdateFunc: func(_, o any) { w.slice(o) }},
		dynamics.ForResource(v1alpha1.Resource).Informer(): {AddFunc: w.gpuNode, UpdateFunc: func(_, o any) { w.gpuNode(o) }},
	} {
		if _, err := informer.AddEventHandler(on); err != nil {
			return nil, fmt.Errorf("watch: %w", err)
		}
		synced = append(synced, informer.HasSynced)
	}
	typed.StartWithContext(ctx)
	dynamics.Start(ctx.Done())
	group.Go(func() error {
		<-ctx.Done()
		typed.Shutdown()
		dynamics.Shutdown()
		return nil
	})
	if !cache.WaitForCacheSync(ctx.Done(), synced...) {
		return nil, errors.Join(errors.New("watch: no list"), context.Cause(ctx))
	}
	return w, nil
}

func (w *watched) pod(o any) {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.phases[pod.UID] = pod.Status.Phase
	if !strings.HasPrefix(pod.Name, trafficPrefix) {
		return
	}
	switch pod.Status.Phase {
	case corev1.PodRunning:
		first(w.ran, pod.Name)
	case corev1.PodFailed:
		first(w.failed, pod.Name)
	}
}

// first records the first time of a key.
func first[K comparable](times map[K]time.Time, key K) {
	if _, known := times[key]; !known {
		times[key] = time.Now()
	}
}

func (w *watched) podGone(o any) {
	if tombstone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = tombstone.Obj
	}
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.phases, pod.UID)
	first(w.gone, pod.Name)
}

func (w *watched) claim(o any) {
	claim, ok := o.(*resourceapi.ResourceClaim)
	if !ok || claim.Status.Allocation == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	first(w.allocated, claim.UID)
}

func (w *watched) slice(o any) {
	slice, ok := o.(*resourceapi.ResourceSlice)
	if !ok || slice.Spec.NodeName == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.slices[*slice.Spec.NodeName] = len(slice.Spec.Devices)
}

func (w *watched) gpuNode(o any) {
	object, ok := o.(*unstructured.Unstructured)
	if !ok {
		return
	}
	node := &v1alpha1.GPUNode{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, node); err != nil {
		return // what an agent wrote; it is missing in every count
	}
	holders := 0
	for _, d := range node.Status.Devices {
		if len(d.Holders) > 0 {
			holders++
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range node.Spec.Claims {
		first(w.relayed, c.UID)
	}
	w.holders[node.Name] = holders
}

// has reports whether one of the maps of pods has a name.
func (w *watched) has(name string, in ...map[string]time.Time) (int, int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, times := range in {
		if _, known := times[name]; known {
			return 1, 1
		}
	}
	return 0, 1
}

// published reports whether all GPUs of a node are in slices and in its GPUNode.
func (w *watched) published(node string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, reported := w.holders[node]
	return reported && w.slices[node] == gpusANode
}

// count is how many pods have a phase.
func (w *watched) count(phase corev1.PodPhase) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.phases {
		if p == phase {
			n++
		}
	}
	return n
}

// relays is how many claims GPUNodes have had.
func (w *watched) relays() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.relayed)
}

// held is how many nodes report that number of devices with a holder.
func (w *watched) held(n int) (nodes int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, holders := range w.holders {
		if holders == n {
			nodes++
		}
	}
	return nodes
}
