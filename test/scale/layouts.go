// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/test/figure"
)

// layoutDriver publishes the slices that are compared. No agent has that name.
const layoutDriver = "layout.example.com"

// layouts makes the slices of one node from those that Tandem publishes.
var layouts = []struct {
	name   string
	change func([]resourceapi.ResourceSlice) []resourceapi.ResourceSlice
}{
	{"ours", func(published []resourceapi.ResourceSlice) []resourceapi.ResourceSlice { return published }},
	{"nvidia", onePool},
}

// onePool is the layout of NVIDIA's driver: one pool a node, with a slice of all counters and a slice of the devices of each GPU
// (kubernetes-sigs/dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin/driver.go, generateSplitResourceSlices). Whole GPUs without counters are
// in one slice, as ours are.
func onePool(published []resourceapi.ResourceSlice) []resourceapi.ResourceSlice {
	var merged []resourceapi.ResourceSlice
	add := func(devices []resourceapi.Device, counters []resourceapi.CounterSet) {
		s := published[0].DeepCopy()
		s.Spec.Devices, s.Spec.SharedCounters, s.Spec.Pool.Name = devices, counters, *s.Spec.NodeName
		merged = append(merged, *s)
	}
	var counters []resourceapi.CounterSet
	for _, s := range published {
		counters = append(counters, s.Spec.SharedCounters...)
	}
	for set := range slices.Chunk(counters, resourceapi.ResourceSliceMaxCounterSets) {
		add(nil, set)
	}
	for _, s := range published {
		if len(s.Spec.Devices) > 0 {
			add(s.Spec.Devices, nil)
		}
	}
	for i := range merged {
		merged[i].GenerateName = fmt.Sprintf("%05x-%s-", i, *merged[i].Spec.NodeName)
		merged[i].Spec.Pool.ResourceSliceCount = int64(len(merged))
	}
	return merged
}

// compareLayouts measures how many pods with a claim the scheduler binds in a second: for whole GPUs, and for partitions on demand with
// Tandem's slices and with the same devices in NVIDIA's layout, in turns. The layouts of whole GPUs are the same.
func (r *run) compareLayouts(ctx context.Context) error {
	if err := r.removePending(ctx); err != nil {
		return err
	}
	if err := r.removeSlices(ctx); err != nil {
		return err
	}
	class := &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: layoutDriver},
		Spec:       resourceapi.DeviceClassSpec{Selectors: cel("device.driver == '" + layoutDriver + "'")},
	}
	if _, err := r.client.ResourceV1().DeviceClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create device class: %w", err)
	}
	ours, nvidia := layouts[0], layouts[1]
	pods := min(3*r.Nodes, 1500)
	whole, err := r.schedule(ctx, false, ours.change, nil, pods)
	if err != nil {
		return fmt.Errorf("schedule whole GPUs: %w", err)
	}
	r.add(figure.Figure{Name: "scheduler_pods_per_second", Value: whole, Unit: "1/s", N: pods})
	attributes := "device.attributes['" + layoutDriver + "']"
	partition := cel(attributes + ".type == 'mig' && " + attributes + ".profile == '1g.10gb'")
	pods = min(r.Nodes, 500)
	rates, rounds := map[string][]float64{}, 3
	if r.Nodes > 500 {
		rounds = 1 // to create the slices of so many nodes takes minutes
	}
	for round := range rounds {
		for i := range layouts {
			l := layouts[(round+i)%len(layouts)]
			rate, err := r.schedule(ctx, true, l.change, partition, pods)
			if err != nil {
				return fmt.Errorf("schedule partitions with layout %s: %w", l.name, err)
			}
			r.say("partitions, layout %s, round %d of %d: %.1f pods a second", l.name, round+1, rounds, rate)
			rates[l.name] = append(rates[l.name], rate)
		}
	}
	r.add(
		figure.Figure{Name: "scheduler_mig_pods_per_second", Value: median(rates[ours.name]), Unit: "1/s", N: rounds},
		figure.Figure{Name: "scheduler_ratio", Value: median(rates[ours.name]) / median(rates[nvidia.name]), Unit: "ratio", N: rounds}.AtLeast(0.95),
	)
	return nil
}

func median(values []float64) float64 { return slices.Sorted(slices.Values(values))[len(values)/2] }

func cel(expression string) []resourceapi.DeviceSelector {
	return []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
}

// schedule returns how many pods the scheduler binds in a second, from the first to the last. The scheduler starts when the pods exist.
func (r *run) schedule(ctx context.Context, dynamic bool, layout func([]resourceapi.ResourceSlice) []resourceapi.ResourceSlice,
	selectors []resourceapi.DeviceSelector, pods int,
) (rate float64, err error) {
	scheduler := r.cluster.Component(cluster.Scheduler)
	if err := scheduler.Stop(ctx); err != nil {
		return 0, err
	}
	all := func(device.GPU) bool { return true }
	if err := r.each(ctx, r.fleet.names, func(ctx context.Context, node string) error {
		gpus, err := inventory(node, dynamic)
		if err != nil {
			return err
		}
		for _, slice := range layout(driver.Template(layoutDriver, node, gpus, all, false)) {
			if _, err := r.client.ResourceV1().ResourceSlices().Create(ctx, &slice, metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("create slice of %s: %w", node, err)
			}
		}
		return nil
	}); err != nil {
		return 0, err
	}
	names := make([]string, pods)
	for i := range names {
		names[i] = fmt.Sprintf("layout-%d", i)
	}
	if err := r.each(ctx, names, func(ctx context.Context, name string) error {
		if _, err := r.createClaim(ctx, layoutNamespace, name, claimSpec(layoutDriver, selectors...)); err != nil {
			return err
		}
		_, err := r.createPod(ctx, layoutNamespace, podWithClaim(name, corev1.PodResourceClaim{Name: "gpu", ResourceClaimName: &name}))
		return err
	}); err != nil {
		return 0, err
	}
	took, err := r.bindings(ctx, pods, func() error { return scheduler.Start(ctx) })
	if err != nil {
		return 0, err
	}
	return float64(pods-1) / took.Seconds(), r.removeLayout(ctx, names)
}

// layoutNamespace has the pods by which layouts are compared. The namespace kube-public exists in every cluster.
const layoutNamespace = "kube-public"

// bindings returns the time from the first binding to the last of so many pods, which begin after start.
func (r *run) bindings(ctx context.Context, pods int, start func() error) (time.Duration, error) {
	var mu sync.Mutex
	var first, last time.Time
	bound := map[types.UID]bool{}
	observe := func(o any) {
		pod, ok := o.(*corev1.Pod)
		if !ok || pod.Spec.NodeName == "" {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if bound[pod.UID] {
			return
		}
		bound[pod.UID], last = true, time.Now()
		if first.IsZero() {
			first = last
		}
	}
	factory := informers.NewSharedInformerFactoryWithOptions(r.client, 0, informers.WithNamespace(layoutNamespace))
	informer := factory.Core().V1().Pods().Informer()
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: observe, UpdateFunc: func(_, o any) { observe(o) }}); err != nil {
		return 0, fmt.Errorf("watch pods: %w", err)
	}
	watching, stop := context.WithCancel(ctx)
	defer factory.Shutdown()
	defer stop()
	factory.StartWithContext(watching)
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		return 0, context.Cause(ctx)
	}
	if err := start(); err != nil {
		return 0, err
	}
	err := r.await(ctx, "pods to be bound", func() (int, int) {
		mu.Lock()
		defer mu.Unlock()
		return len(bound), pods
	})
	return last.Sub(first), err
}

// removePending removes the fleet's gated pods. kube-scheduler 1.37 checks each pod that waits for each slice that it hears of, also at
// its start: 1,000 nodes with partitions on demand and 4,000 gated pods kept it from binding anything for more than four minutes.
func (r *run) removePending(ctx context.Context) error {
	now := int64(0)
	return r.each(ctx, r.fleet.names, func(ctx context.Context, node string) error {
		for i := range pendingANode {
			name := pendingPod(node, i)
			if err := r.client.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
				return fmt.Errorf("remove pod %s: %w", name, err)
			}
		}
		return nil
	})
}

func (r *run) removeLayout(ctx context.Context, names []string) error {
	now := int64(0)
	if err := r.each(ctx, names, func(ctx context.Context, name string) error {
		return errors.Join(
			r.client.CoreV1().Pods(layoutNamespace).Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &now}),
			r.client.ResourceV1().ResourceClaims(layoutNamespace).Delete(ctx, name, metav1.DeleteOptions{}))
	}); err != nil {
		return fmt.Errorf("remove what was scheduled: %w", err)
	}
	if err := r.removeSlices(ctx); err != nil {
		return err
	}
	return r.await(ctx, "claims to be gone", func() (int, int) {
		claims, err := r.client.ResourceV1().ResourceClaims(layoutNamespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return -1, 0
		}
		return -len(claims.Items), 0
	})
}

// removeSlices removes all slices, one by one: one request for 16,000 of them takes longer than the API server allows.
func (r *run) removeSlices(ctx context.Context) error {
	published := r.client.ResourceV1().ResourceSlices()
	for {
		page, err := published.List(ctx, metav1.ListOptions{Limit: 500})
		if err != nil {
			return fmt.Errorf("list slices: %w", err)
		}
		if len(page.Items) == 0 {
			return nil
		}
		names := make([]string, len(page.Items))
		for i := range page.Items {
			names[i] = page.Items[i].Name
		}
		if err := r.each(ctx, names, func(ctx context.Context, name string) error {
			if err := published.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
				return err
			}
			return nil
		}); err != nil {
			return fmt.Errorf("delete slices: %w", err)
		}
	}
}
