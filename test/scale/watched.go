// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"context"
	"errors"
	"fmt"
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
	// visitors are the pods of the traffic, by name.
	visitors map[string]*visitor
	// allocated is when a claim got devices, relayed when its node's GPUNode had it.
	allocated, relayed map[types.UID]time.Time
	// holders is the number of devices with a holder by node, slices the devices in ResourceSlices.
	holders, slices map[string]int
}

// visitor is a pod of the traffic.
type visitor struct {
	created time.Time
	// started is closed when it runs or has failed, gone when the API server has removed it.
	started, gone chan struct{}
	// ran is when it was seen to run; zero if it failed.
	ran time.Time
}

// expect records that a pod of the traffic is created now.
func (w *watched) expect(name string) *visitor {
	w.mu.Lock()
	defer w.mu.Unlock()
	v := &visitor{created: time.Now(), started: make(chan struct{}), gone: make(chan struct{})}
	w.visitors[name] = v
	return v
}

// watch follows pods, claims, GPUNodes and slices in group until ctx is done. It returns when it has their lists.
func (r *run) watch(ctx context.Context, group *errgroup.Group) (*watched, error) {
	w := &watched{
		phases: map[types.UID]corev1.PodPhase{}, visitors: map[string]*visitor{},
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
	v := w.visitors[pod.Name]
	if v == nil || pod.Status.Phase == corev1.PodPending || closed(v.started) {
		return
	}
	if pod.Status.Phase == corev1.PodRunning {
		v.ran = time.Now()
	}
	close(v.started)
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
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
	if v := w.visitors[pod.Name]; v != nil && !closed(v.gone) {
		close(v.gone)
	}
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
