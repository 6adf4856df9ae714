// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/broadcast"
)

const (
	// reportEvery is how often kubelet writes its node's status and its Lease. A change of the capacity is written at once.
	reportEvery = 10 * time.Second
	// wipeAfter is how long a driver may be away until kubelet removes its slices.
	wipeAfter = 30 * time.Second
)

// join registers the node, and plays kubelet's part in the cluster until running ends.
func (k *Kubelet) join(ctx, running context.Context) error {
	if err := k.wipe(ctx, resourceapi.ResourceSliceSelectorNodeName+"="+k.Node.Name); err != nil {
		return err
	}
	if _, err := k.Client.CoreV1().Nodes().Create(ctx, k.Node, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("register node %s: %w", k.Node.Name, err)
	}
	if err := k.report(ctx, nil, nil); err != nil {
		return err
	}
	k.done.Go(func() { k.reportAlways(running) })
	k.done.Go(func() { k.reportHealth(running) })
	k.watchPods(running)
	return nil
}

// wipe removes slices of the node, as kubelet does when it starts and when a driver has gone.
func (k *Kubelet) wipe(ctx context.Context, selector string) error {
	err := k.Client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		return fmt.Errorf("remove slices of %s: %w", k.Node.Name, err)
	}
	return nil
}

// wipeLater removes a driver's slices unless it is back in time. k.mu is held.
func (k *Kubelet) wipeLater(ctx context.Context, name string) {
	if k.Client == nil {
		return
	}
	k.done.Go(func() {
		if !broadcast.Sleep(ctx, wipeAfter) {
			return
		}
		if _, back := k.Driver(name); back {
			return
		}
		selector := fields.Set{resourceapi.ResourceSliceSelectorNodeName: k.Node.Name, resourceapi.ResourceSliceSelectorDriver: name}
		if err := k.wipe(ctx, selector.AsSelector().String()); err != nil && ctx.Err() == nil {
			k.fail(err)
		}
	})
}

// reportAlways writes status and Lease again and again.
func (k *Kubelet) reportAlways(ctx context.Context) {
	ticker := time.NewTicker(reportEvery)
	defer ticker.Stop()
	var reported map[string]int
	for due := true; ; {
		changed := k.Changed()
		capacity, allocatable := k.counts()
		if due || !maps.Equal(capacity, reported) {
			err := k.report(ctx, capacity, allocatable)
			if due && err == nil {
				err = k.renew(ctx)
			}
			if err == nil {
				reported, due = capacity, false
			} else if ctx.Err() == nil {
				k.mu.Lock()
				k.failures = append(k.failures, err)
				k.mu.Unlock()
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-ticker.C:
			due = true
		}
	}
}

// report writes the node's status.
func (k *Kubelet) report(ctx context.Context, capacity, allocatable map[string]int) error {
	now := metav1.Now()
	status := k.Node.Status.DeepCopy()
	if status.Allocatable == nil {
		status.Allocatable = status.Capacity.DeepCopy()
	}
	for name, n := range capacity {
		status.Capacity[corev1.ResourceName(name)] = *resource.NewQuantity(int64(n), resource.DecimalSI)
		status.Allocatable[corev1.ResourceName(name)] = *resource.NewQuantity(int64(allocatable[name]), resource.DecimalSI)
	}
	status.Conditions = []corev1.NodeCondition{{
		Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", Message: "kubelet is posting ready status",
		LastHeartbeatTime: now, LastTransitionTime: now,
	}}
	patch, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		return fmt.Errorf("encode status of node %s: %w", k.Node.Name, err)
	}
	if _, err := k.Client.CoreV1().Nodes().Patch(ctx, k.Node.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
		return fmt.Errorf("report node %s: %w", k.Node.Name, err)
	}
	return nil
}

// renew renews the node's Lease, without which the node would not be ready for long.
func (k *Kubelet) renew(ctx context.Context) error {
	leases := k.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	spec := coordinationv1.LeaseSpec{HolderIdentity: &k.Node.Name, LeaseDurationSeconds: ptr.To[int32](40), RenewTime: ptr.To(metav1.NowMicro())}
	lease, err := leases.Get(ctx, k.Node.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err = leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: k.Node.Name}, Spec: spec}, metav1.CreateOptions{})
	} else if err == nil {
		lease.Spec = spec
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("renew Lease of node %s: %w", k.Node.Name, err)
	}
	return nil
}

// watchPods follows the pods that are bound to the node.
func (k *Kubelet) watchPods(ctx context.Context) {
	factory := informers.NewSharedInformerFactoryWithOptions(k.Client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", k.Node.Name).String()
	}))
	observe := func(o any) {
		if pod, ok := o.(*corev1.Pod); ok {
			k.observe(ctx, pod)
		}
	}
	informer := factory.Core().V1().Pods().Informer()
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: observe, UpdateFunc: func(_, o any) { observe(o) }, DeleteFunc: k.forget}); err != nil {
		k.fail(fmt.Errorf("watch pods: %w", err))
	}
	factory.StartWithContext(ctx)
	// Until the handlers have ended, they may start more lives.
	k.done.Go(func() { <-ctx.Done(); factory.Shutdown() })
}
