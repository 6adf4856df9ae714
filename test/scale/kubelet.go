// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/hack/install"
	pkgcontroller "github.com/tandem-gpu/tandem/pkg/controller"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// kubelets play the kubelets of all machines from one watch of all pods. As kubelet does, they allocate the devices of limits one pod
// at a time, prepare claims, report that a pod runs, and remove a deleted pod after they unprepared its claims.
type kubelets struct {
	client   kubernetes.Interface
	machines map[string]*machine
	group    *errgroup.Group

	mu sync.Mutex
	// lives are the pods that were bound to a machine.
	lives map[types.UID]*life

	// retried counts the calls of Prepare for a pod after its first.
	retried atomic.Int64

	// failed counts the pods that could not be admitted.
	failed atomic.Int64
}

// life is a pod on a machine. kubelets.mu guards its annotation.
type life struct {
	// end is closed when the pod is to end.
	end chan struct{}
	// changed gets an item when the controller asks for another try.
	changed chan struct{}
	// annotation is the controller's last.
	annotation string
}

// run plays until ctx is done.
func (k *kubelets) run(ctx context.Context) error {
	k.group, ctx = errgroup.WithContext(ctx)
	factory := informers.NewSharedInformerFactory(k.client, 0)
	observe := func(o any) {
		if pod, ok := o.(*corev1.Pod); ok {
			k.observe(ctx, pod)
		}
	}
	if _, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: observe, UpdateFunc: func(_, o any) { observe(o) }, DeleteFunc: k.forget,
	}); err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	factory.StartWithContext(ctx)
	// Until the handlers have ended, they may start more lives.
	k.group.Go(func() error { <-ctx.Done(); factory.Shutdown(); return nil })
	return k.group.Wait()
}

func (k *kubelets) observe(ctx context.Context, pod *corev1.Pod) {
	m := k.machines[pod.Spec.NodeName]
	if m == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	l := k.lives[pod.UID]
	if l == nil {
		l = &life{end: make(chan struct{}), changed: make(chan struct{}, 1), annotation: pod.Annotations[pkgcontroller.RetryAnnotation]}
		k.lives[pod.UID] = l
		k.group.Go(func() error { return k.live(ctx, m, pod, l) })
	}
	if annotation := pod.Annotations[pkgcontroller.RetryAnnotation]; annotation != l.annotation {
		l.annotation = annotation
		select {
		case l.changed <- struct{}{}:
		default:
		}
	}
	if pod.DeletionTimestamp != nil {
		l.stop()
	}
}

// stop tells the pod to end. kubelets.mu is held.
func (l *life) stop() {
	if !closed(l.end) {
		close(l.end)
	}
}

// forget ends the life of a pod that the API server has removed: it does so itself with one that has failed.
func (k *kubelets) forget(o any) {
	if tombstone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = tombstone.Obj
	}
	if pod, ok := o.(*corev1.Pod); ok {
		k.mu.Lock()
		defer k.mu.Unlock()
		if l := k.lives[pod.UID]; l != nil {
			l.stop()
		}
		delete(k.lives, pod.UID)
	}
}

// live takes a pod from its binding to its end.
func (k *kubelets) live(ctx context.Context, m *machine, pod *corev1.Pod, l *life) error {
	var prepared []kubeletplugin.NamespacedObject
	var err error
	if refused := m.admit(ctx, pod); refused != nil {
		k.failed.Add(1)
		err = k.report(ctx, pod, corev1.PodFailed, refused.Error())
	} else if prepared = k.prepare(ctx, m, pod, l); prepared != nil {
		err = k.report(ctx, pod, corev1.PodRunning, "")
	}
	if err != nil {
		return quiet(ctx, err)
	}
	select {
	case <-ctx.Done():
		return nil
	case <-l.end:
	}
	if err := m.unprepare(ctx, prepared); err != nil {
		return quiet(ctx, err)
	}
	err = k.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0), Preconditions: &metav1.Preconditions{UID: &pod.UID}})
	m.free(pod.UID)
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // it was removed, perhaps for another of the name
	}
	return quiet(ctx, err)
}

// quiet drops the errors of calls that the end of the run interrupted.
func quiet(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// report writes the phase as kubelet does.
func (k *kubelets) report(ctx context.Context, pod *corev1.Pod, phase corev1.PodPhase, message string) error {
	next := pod.DeepCopy()
	next.ResourceVersion = ""
	next.Status.Phase, next.Status.Message = phase, message
	next.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", ContainerID: "played://" + string(pod.UID), Ready: phase == corev1.PodRunning}}
	if phase == corev1.PodRunning {
		next.Status.ContainerStatuses[0].State.Running = &corev1.ContainerStateRunning{}
		next.Status.Conditions = append(next.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue},
			corev1.PodCondition{Type: corev1.PodReadyToStartContainers, Status: corev1.ConditionTrue})
	}
	_, err := k.client.CoreV1().Pods(pod.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("report that pod %s is %s: %w", pod.Name, phase, err)
	}
	return nil
}

// retryPrepare is after how long kubelet prepares claims again by itself. It takes 60 to 90 s (k8s.io/kubernetes pkg/kubelet, the resync
// interval with its jitter).
const retryPrepare = 75 * time.Second

// prepare prepares the pod's claims until that succeeds: again when the pod changes, or after a while. It returns them, or nil if the pod is
// to end.
func (k *kubelets) prepare(ctx context.Context, m *machine, pod *corev1.Pod, l *life) []kubeletplugin.NamespacedObject {
	for {
		prepared, err := m.prepare(ctx, pod)
		if err == nil {
			return prepared
		}
		klog.FromContext(ctx).Info("A pod is not prepared", "pod", klog.KObj(pod), "reason", err.Error())
		select {
		case <-ctx.Done():
			return nil
		case <-l.end:
			return nil
		case <-l.changed:
		case <-time.After(retryPrepare):
		}
		k.retried.Add(1)
	}
}

// claimNames are the claims of a pod, whose UIDs kubelet reads as well.
func claimNames(pod *corev1.Pod) ([]string, error) {
	var names []string
	for i := range pod.Spec.ResourceClaims {
		name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i])
		if err != nil {
			return nil, err
		}
		if name != nil {
			names = append(names, *name)
		}
	}
	return names, nil
}

// prepare asks the driver for all claims of a pod, after the GETs that the plugin helper makes.
func (m *machine) prepare(ctx context.Context, pod *corev1.Pod) ([]kubeletplugin.NamespacedObject, error) {
	names, err := claimNames(pod)
	if err != nil {
		return nil, err
	}
	prepared := []kubeletplugin.NamespacedObject{}
	var claims []*resourceapi.ResourceClaim
	for _, name := range names {
		claim, err := m.Client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		// The plugin helper refuses them before it calls the driver.
		if claim.Status.Allocation == nil || !resourceclaim.IsReservedForPod(pod, claim, false) {
			return nil, fmt.Errorf("claim %s is not allocated, or not reserved for pod %s", name, pod.Name)
		}
		claims = append(claims, claim)
		prepared = append(prepared, kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: pod.Namespace, Name: name}, UID: claim.UID})
	}
	if len(claims) == 0 {
		return prepared, nil
	}
	results, err := m.Claims.PrepareResourceClaims(ctx, claims)
	for _, result := range results {
		err = errors.Join(err, result.Err)
	}
	return prepared, err
}

// unprepare ends what prepare began, also where it failed.
func (m *machine) unprepare(ctx context.Context, claims []kubeletplugin.NamespacedObject) error {
	if len(claims) == 0 {
		return nil
	}
	failed, err := m.Claims.UnprepareResourceClaims(ctx, claims)
	for _, of := range failed {
		err = errors.Join(err, of)
	}
	return err
}

// admit gives a pod the devices of its limit, as kubelet's device manager does: from the healthy ones of the newest list, those that
// the plugin prefers.
func (m *machine) admit(ctx context.Context, pod *corev1.Pod) error {
	limit := pod.Spec.Containers[0].Resources.Limits[install.ResourceName]
	n := int(limit.Value())
	if n == 0 {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var available []string
	for _, d := range m.list {
		if _, taken := m.owner[d.GetID()]; !taken && d.GetHealth() == pluginapi.Healthy {
			available = append(available, d.GetID())
		}
	}
	if len(available) < n {
		return fmt.Errorf("%d devices of %s are available, %d requested", len(available), install.ResourceName, n)
	}
	preferred := m.Limits.Preferred(install.ResourceName, &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: available, AllocationSize: int32(n)},
	}})
	ids := preferred.GetContainerResponses()[0].GetDeviceIDs()
	request := &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}}
	if _, err := m.Limits.Allocate(ctx, install.ResourceName, request); err != nil {
		return err
	}
	for _, id := range ids {
		m.owner[id] = pod.UID
	}
	// The reconciler reads it in kubelet's checkpoint.
	for _, h := range m.Ledger.Holds() {
		if h.Holder.Kind == ledger.KindPod && m.owner[h.Holder.ID] == pod.UID {
			if err := m.Ledger.Identify(h, ledger.Pod{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name}); err != nil {
				return err
			}
		}
	}
	return nil
}

// free returns the devices of a pod's limit.
func (m *machine) free(uid types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, owner := range m.owner {
		if owner == uid {
			delete(m.owner, id)
		}
	}
}
