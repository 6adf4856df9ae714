// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/broadcast"
)

// life is a pod on the node, from its binding to its removal.
type life struct {
	kubelet *Kubelet
	// ctx ends with kubelet.
	ctx context.Context
	// end is closed when the pod is to end; changed gets an item when its metadata changed.
	end     chan struct{}
	changed chan struct{}

	// Kubelet.mu guards these. active says that the pod's resources count. kept, if set, is closed when its containers may end.
	pod    *corev1.Pod
	active bool
	kept   chan struct{}

	mu       sync.Mutex
	ip       string
	phase    corev1.PodPhase
	reason   string
	message  string
	statuses map[string]*corev1.ContainerStatus
	procs    map[string]Process

	// writing guards written, the last status that the API server accepted, and lets one goroutine at a time write the status.
	writing sync.Mutex
	written string
}

func (k *Kubelet) observe(ctx context.Context, pod *corev1.Pod) {
	k.mu.Lock()
	defer k.mu.Unlock()
	l := k.lives[pod.UID]
	switch {
	case l == nil && (pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed):
		return
	case l == nil:
		l = &life{
			kubelet: k, ctx: ctx, end: make(chan struct{}), changed: make(chan struct{}, 1), pod: pod, phase: corev1.PodPending,
			statuses: map[string]*corev1.ContainerStatus{}, procs: map[string]Process{},
		}
		k.lives[pod.UID] = l
		k.done.Go(func() { l.run(ctx) })
	case !maps.Equal(l.pod.Annotations, pod.Annotations) || !maps.Equal(l.pod.Labels, pod.Labels):
		l.wake()
	}
	l.pod = pod
	if pod.DeletionTimestamp != nil {
		l.stop()
	}
}

// wake has a pod prepared again. Kubelet.mu is held.
func (l *life) wake() {
	select {
	case l.changed <- struct{}{}:
	default:
	}
}

// stop tells the pod to end. Kubelet.mu is held.
func (l *life) stop() {
	select {
	case <-l.end:
	default:
		close(l.end)
	}
}

// Keep lets the containers of a pod run on after the pod is told to end, whatever its grace period, until release is called. Call it before the pod
// is told to end. It does nothing for a pod that is not on the node.
func (k *Kubelet) Keep(pod types.UID) (release func()) {
	kept := make(chan struct{})
	k.change(func() {
		if l := k.lives[pod]; l != nil {
			l.kept = kept
		}
	})
	return sync.OnceFunc(func() { close(kept) })
}

// keeps returns a channel that is closed when the pod's containers may end.
func (l *life) keeps() <-chan struct{} {
	l.kubelet.mu.Lock()
	defer l.kubelet.mu.Unlock()
	if l.kept != nil {
		return l.kept
	}
	return l.end
}

// forget ends the life of a pod that the API server has removed.
func (k *Kubelet) forget(o any) {
	if tombstone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = tombstone.Obj
	}
	if pod, ok := o.(*corev1.Pod); ok {
		k.mu.Lock()
		defer k.mu.Unlock()
		if l := k.lives[pod.UID]; l != nil {
			l.stop()
		}
	}
}

// PrepareAgain has kubelet prepare again, at once, the claims of all pods that it could not prepare.
func (k *Kubelet) PrepareAgain() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, l := range k.lives {
		l.wake()
	}
}

// Processes returns the running containers of a pod by name; one without a process is nil.
func (k *Kubelet) Processes(pod types.UID) map[string]Process {
	k.mu.Lock()
	l := k.lives[pod]
	k.mu.Unlock()
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.procs)
}

// run takes a pod from its binding to its end.
func (l *life) run(ctx context.Context) {
	k, pod := l.kubelet, l.current()
	if err := l.admit(ctx, pod); err != nil {
		l.set(func() {
			l.phase, l.reason, l.message = corev1.PodFailed, "UnexpectedAdmissionError", "Allocate failed due to "+err.Error()+", which is unexpected"
		})
		l.write(ctx)
	} else {
		work, cancel := context.WithCancel(ctx)
		stop := make(chan struct{})
		k.done.Go(func() {
			select {
			case <-l.end:
			case <-ctx.Done():
			case <-stop:
			}
			select {
			case <-l.keeps():
			case <-ctx.Done():
			case <-stop:
			}
			cancel()
		})
		l.containers(work, pod)
		close(stop)
		l.finish(ctx)
	}
	select {
	case <-ctx.Done():
		return
	case <-l.end:
	}
	k.persist(ctx, pod, "remove", func() error {
		return k.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0), Preconditions: &metav1.Preconditions{UID: &pod.UID}})
	})
	k.change(func() { delete(k.lives, pod.UID) })
}

// persist repeats a call until the API server accepts it, or says that the pod is gone, as kubelet does. It does not repeat a call that the API
// server refuses: that is a failure of the test's kubelet.
func (k *Kubelet) persist(ctx context.Context, pod *corev1.Pod, what string, call func() error) {
	for {
		switch err := call(); {
		case err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) || ctx.Err() != nil:
			return
		case apierrors.IsBadRequest(err) || apierrors.IsInvalid(err) || apierrors.IsForbidden(err):
			k.fail(fmt.Errorf("%s pod %s: %w", what, pod.Name, err))
			return
		}
		broadcast.Sleep(ctx, time.Second)
	}
}

func (l *life) current() *corev1.Pod {
	l.kubelet.mu.Lock()
	defer l.kubelet.mu.Unlock()
	return l.pod
}

// admit gives the pod its devices and its cgroup.
func (l *life) admit(ctx context.Context, pod *corev1.Pod) error {
	k := l.kubelet
	k.admission.Lock()
	err := k.admit(ctx, pod)
	k.admission.Unlock()
	if err == nil && k.Cgroups != "" {
		if err = os.MkdirAll(l.cgroup(), 0o755); errors.Is(err, fs.ErrExist) {
			err = nil
		}
	}
	if err != nil {
		k.Release(pod.UID)
		return err
	}
	k.change(func() { l.active = true })
	return nil
}

func (l *life) cgroup() string {
	return filepath.Join(l.kubelet.Cgroups, "burstable", "pod"+string(l.current().UID))
}

// containers starts the pod's containers and returns when they have ended, which they do when ctx does.
func (l *life) containers(ctx context.Context, pod *corev1.Pod) {
	if !l.prepare(ctx, pod) {
		return
	}
	ip, err := l.kubelet.Runtime.StartPod(ctx, pod)
	if err != nil {
		if ctx.Err() == nil {
			l.kubelet.fail(fmt.Errorf("start pod %s: %w", pod.Name, err))
		}
		<-ctx.Done()
		return
	}
	l.set(func() { l.ip = ip })
	for _, c := range pod.Spec.InitContainers {
		if c.RestartPolicy != nil {
			continue // a sidecar is only said to run
		}
		for code := -1; code != 0; {
			if code = l.once(ctx, pod, c, true); ctx.Err() != nil {
				return
			}
		}
	}
	var group sync.WaitGroup
	for _, c := range pod.Spec.Containers {
		group.Go(func() { l.always(ctx, pod, c) })
	}
	group.Wait()
}

// prepare prepares the pod's claims until that succeeds: again when the pod changes, or after a while.
func (l *life) prepare(ctx context.Context, pod *corev1.Pod) bool {
	k := l.kubelet
	for {
		err := k.prepare(ctx, l.current())
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		_, eventErr := k.Client.CoreV1().Events(pod.Namespace).Create(ctx, &corev1.Event{
			ObjectMeta:     metav1.ObjectMeta{GenerateName: pod.Name + ".", Namespace: pod.Namespace},
			InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
			Reason:         "FailedPrepareDynamicResources", Message: "Failed to prepare dynamic resources: " + err.Error(), Type: corev1.EventTypeWarning,
			Source: corev1.EventSource{Component: "kubelet", Host: k.Node.Name}, FirstTimestamp: metav1.Now(), LastTimestamp: metav1.Now(), Count: 1,
		}, metav1.CreateOptions{})
		if eventErr != nil && ctx.Err() == nil {
			k.fail(fmt.Errorf("write event of pod %s: %w", pod.Name, eventErr))
		}
		select {
		case <-ctx.Done():
			return false
		case <-l.changed:
		case <-time.After(k.Retry):
		}
	}
}

// restartDelay is how long a container that has ended n times waits. kubelet's delays are ten times as long.
func restartDelay(n int32) time.Duration {
	if n <= 1 {
		return 0
	}
	return min(time.Second<<(n-2), 10*time.Second)
}

// always runs a container, again and again if its pod wants that, until ctx ends.
func (l *life) always(ctx context.Context, pod *corev1.Pod, c corev1.Container) {
	for n := int32(1); ctx.Err() == nil; n++ {
		code := l.once(ctx, pod, c, false)
		policy := pod.Spec.RestartPolicy
		if policy == corev1.RestartPolicyNever || policy == corev1.RestartPolicyOnFailure && code == 0 || ctx.Err() != nil {
			return
		}
		l.set(func() {
			s := l.statuses[c.Name]
			s.LastTerminationState, s.RestartCount = s.State, n
			s.State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "back-off restarting failed container"}}
		})
		l.write(ctx)
		broadcast.Sleep(ctx, restartDelay(n))
	}
}

// once runs a container until it or ctx ends, and returns its exit status.
func (l *life) once(ctx context.Context, pod *corev1.Pod, c corev1.Container, initial bool) int {
	k := l.kubelet
	devices := Devices{Env: map[string]string{}}
	for _, g := range k.Granted() {
		if g.Pod == pod.UID && g.Container == c.Name {
			devices.CDI = append(devices.CDI, g.CDI...)
			maps.Copy(devices.Env, g.Env)
		}
	}
	for _, d := range k.claimDevices(l.current(), c) {
		devices.CDI = append(devices.CDI, d.CDI...)
	}
	slices.Sort(devices.CDI)
	devices.CDI = slices.Compact(devices.CDI)
	process, err := k.Runtime.Start(ctx, pod, c, devices)
	started := metav1.Now()
	l.set(func() {
		s := l.statuses[c.Name]
		if s == nil {
			s = &corev1.ContainerStatus{Name: c.Name, Image: c.Image, ImageID: c.Image}
			l.statuses[c.Name] = s
		}
		if err != nil {
			s.State, s.Ready = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CreateContainerError", Message: err.Error()}}, false
			return
		}
		l.procs[c.Name] = process
		s.ContainerID = fmt.Sprintf("played://%s/%s/%d", pod.UID, c.Name, s.RestartCount)
		s.State = corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: started}}
		s.Ready, s.Started = c.ReadinessProbe == nil && !initial, ptr.To(true)
		if !initial {
			l.phase = corev1.PodRunning
		}
	})
	l.write(ctx)
	if err != nil {
		broadcast.Sleep(ctx, time.Second)
		return -1
	}
	exited := make(chan Exit, 1)
	probing, cancel := context.WithCancel(ctx)
	switch {
	case process == nil && initial:
		exited <- Exit{}
	case process != nil:
		k.done.Go(func() { exited <- process.Wait() })
		if c.ReadinessProbe != nil && !initial {
			k.done.Go(func() { l.probe(probing, c) })
		}
	}
	var exit Exit
	select {
	case exit = <-exited:
	case <-ctx.Done():
		exit = Exit{Code: 137}
		if process != nil {
			process.Stop(l.grace())
			exit = <-exited
		}
	}
	cancel()
	l.set(func() {
		s := l.statuses[c.Name]
		delete(l.procs, c.Name)
		reason := "Completed"
		if exit.Code != 0 {
			reason = "Error"
		}
		s.Ready, s.Started = false, ptr.To(false)
		s.State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
			ExitCode: int32(exit.Code), Reason: reason, Message: exit.Message, StartedAt: started, FinishedAt: metav1.Now(), ContainerID: s.ContainerID,
		}}
	})
	return exit.Code
}

// grace is how long the pod's containers may take to end.
func (l *life) grace() time.Duration {
	pod := l.current()
	seconds := ptr.Deref(pod.DeletionGracePeriodSeconds, ptr.Deref(pod.Spec.TerminationGracePeriodSeconds, 30))
	return time.Duration(max(seconds, 1)) * time.Second
}

// probe writes whether the container is ready, until ctx ends.
func (l *life) probe(ctx context.Context, c corev1.Container) {
	const soon = 100 * time.Millisecond
	get := c.ReadinessProbe.HTTPGet
	if get == nil {
		l.setReady(ctx, c.Name, true)
		return
	}
	port := get.Port.IntValue()
	if get.Port.Type == intstr.String {
		for _, p := range c.Ports {
			if p.Name == get.Port.StrVal {
				port = int(p.ContainerPort)
			}
		}
	}
	l.mu.Lock()
	address := "http://" + net.JoinHostPort(l.ip, strconv.Itoa(port)) + get.Path
	l.mu.Unlock()
	client := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	if dialer, ok := l.kubelet.Runtime.(interface {
		DialContext(ctx context.Context, network, address string) (net.Conn, error)
	}); ok {
		client.Transport.(*http.Transport).DialContext = dialer.DialContext
	}
	failed, ready := int32(0), false
	for ctx.Err() == nil {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
		if err != nil {
			l.kubelet.fail(fmt.Errorf("probe %s: %w", address, err))
			return
		}
		response, err := client.Do(request)
		if err == nil {
			response.Body.Close()
		}
		ok := err == nil && response.StatusCode < http.StatusBadRequest
		if failed++; ok {
			failed = 0
		}
		switch {
		case ok && !ready:
			ready = true
			l.setReady(ctx, c.Name, true)
		case !ok && ready && failed >= max(c.ReadinessProbe.FailureThreshold, 1):
			ready = false
			l.setReady(ctx, c.Name, false)
		}
		pause := soon
		if ready {
			pause = time.Duration(max(c.ReadinessProbe.PeriodSeconds, 1)) * time.Second
		}
		broadcast.Sleep(ctx, pause)
	}
}

func (l *life) setReady(ctx context.Context, container string, ready bool) {
	l.set(func() { l.statuses[container].Ready = ready })
	l.write(ctx)
}

// finish unprepares the claims of a pod whose containers have ended, and reports its end.
func (l *life) finish(ctx context.Context) {
	k, pod := l.kubelet, l.current()
	if err := k.Runtime.StopPod(pod); err != nil {
		k.fail(fmt.Errorf("stop pod %s: %w", pod.Name, err))
	}
	if ctx.Err() != nil {
		return
	}
	for {
		err := k.unprepare(ctx, pod.UID)
		if err == nil || ctx.Err() != nil {
			break
		}
		broadcast.Sleep(ctx, time.Second)
	}
	k.change(func() { l.active = false })
	k.Release(pod.UID)
	if k.Cgroups != "" {
		if err := os.Remove(l.cgroup()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			k.fail(fmt.Errorf("remove cgroup of pod %s: %w", pod.Name, err))
		}
	}
	l.set(func() {
		l.phase = corev1.PodSucceeded
		for _, c := range pod.Spec.Containers {
			if s := l.statuses[c.Name]; s == nil || s.State.Terminated == nil || s.State.Terminated.ExitCode != 0 {
				l.phase = corev1.PodFailed
			}
		}
	})
	l.write(ctx)
}

func (l *life) set(change func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change()
}

// write writes the pod's status, if it has changed. It does not wait for an API server that is away: the status is written later.
func (l *life) write(ctx context.Context) {
	k, pod := l.kubelet, l.current()
	if l.report(ctx, pod) != nil {
		// Not ctx, which may end with the pod's containers.
		k.done.Go(func() { k.persist(l.ctx, pod, "report", func() error { return l.report(l.ctx, pod) }) })
	}
}

func (l *life) report(ctx context.Context, pod *corev1.Pod) error {
	k := l.kubelet
	l.writing.Lock()
	defer l.writing.Unlock()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID}, "status": l.status(pod)})
	if err != nil {
		k.fail(fmt.Errorf("encode status of pod %s: %w", pod.Name, err))
		return nil
	}
	if l.written == string(patch) {
		return nil
	}
	_, err = k.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err == nil {
		l.written = string(patch)
	}
	return err
}

func (l *life) status(pod *corev1.Pod) map[string]any {
	k := l.kubelet
	l.mu.Lock()
	defer l.mu.Unlock()
	status := map[string]any{"phase": l.phase, "hostIP": k.nodeIP()}
	if l.reason != "" {
		status["reason"], status["message"] = l.reason, l.message
	}
	if l.ip != "" {
		status["podIP"], status["podIPs"] = l.ip, []corev1.PodIP{{IP: l.ip}}
	}
	ready := l.phase == corev1.PodRunning
	list := func(of []corev1.Container, initial bool) []corev1.ContainerStatus {
		all := []corev1.ContainerStatus{}
		for _, c := range of {
			s := l.statuses[c.Name]
			if s == nil {
				s = &corev1.ContainerStatus{Name: c.Name, Image: c.Image, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "PodInitializing"}}}
			}
			ready = ready && (initial || s.Ready)
			written := *s
			written.AllocatedResourcesStatus = k.health(pod, c)
			all = append(all, written)
		}
		return all
	}
	status["initContainerStatuses"], status["containerStatuses"] = list(pod.Spec.InitContainers, true), list(pod.Spec.Containers, false)
	is := func(holds bool) corev1.ConditionStatus {
		if holds {
			return corev1.ConditionTrue
		}
		return corev1.ConditionFalse
	}
	var conditions []map[string]any
	for kind, holds := range map[corev1.PodConditionType]bool{
		corev1.PodReady: ready, corev1.ContainersReady: ready, corev1.PodReadyToStartContainers: l.phase == corev1.PodRunning, corev1.PodInitialized: l.phase == corev1.PodRunning,
	} {
		conditions = append(conditions, map[string]any{"type": kind, "status": is(holds)})
	}
	// Equal states are to be equal text.
	slices.SortFunc(conditions, func(a, b map[string]any) int {
		return cmp.Compare(a["type"].(corev1.PodConditionType), b["type"].(corev1.PodConditionType))
	})
	status["conditions"] = conditions
	return status
}

func (k *Kubelet) nodeIP() string {
	for _, address := range k.Node.Status.Addresses {
		if address.Type == corev1.NodeInternalIP {
			return address.Address
		}
	}
	return ""
}
