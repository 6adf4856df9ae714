// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

func daemonPods() DaemonPods {
	return DaemonPods{
		Template: &corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app.kubernetes.io/component": "mps-daemon"}},
			Spec: corev1.PodSpec{
				PriorityClassName: "system-node-critical",
				Containers:        []corev1.Container{{Name: "mps-daemon", Image: "image", Env: []corev1.EnvVar{{Name: "OWN", Value: "1"}}}},
			},
		},
		Namespace: "tandem", RunDir: "/run/tandem", KubeletDir: "/var/lib/kubelet",
		DriverRoots:  []string{"/run/nvidia/driver", "/"},
		SharedMemory: ptr.To(resource.MustParse("1Gi")),
	}
}

func mpsDaemon(name string) v1alpha1.MPSDaemon {
	return v1alpha1.MPSDaemon{Name: name, MPSSettings: v1alpha1.MPSSettings{
		Devices: []string{"GPU-1"}, ActiveThreadPercentage: ptr.To(int32(50)), PinnedMemoryMiB: []int64{1024}, DriverRoot: "/run/nvidia/driver",
	}}
}

func wanting(names ...string) func(*v1alpha1.GPUNodeStatus) {
	return func(s *v1alpha1.GPUNodeStatus) {
		s.Daemons = nil
		for _, name := range names {
			s.Daemons = append(s.Daemons, mpsDaemon(name))
		}
	}
}

// daemonWorld is a world whose clock agrees with the ages of pods.
func daemonWorld(t *testing.T, funcs interceptor.Funcs, objects ...client.Object) (*world, *daemons) {
	t.Helper()
	var w *world
	if funcs.Create == nil {
		funcs.Create = func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			o.SetCreationTimestamp(metav1.NewTime(w.clock))
			return c.Create(ctx, o, opts...)
		}
	}
	w = newWorld(t, funcs, objects...)
	return w, &daemons{cluster: w.cluster(), pods: w.client, config: daemonPods()}
}

func (w *world) daemonPod(name string) *corev1.Pod {
	w.t.Helper()
	var list corev1.PodList
	if err := w.client.List(w.t.Context(), &list, client.InNamespace("tandem"), client.MatchingLabels{daemonLabel: name}); err != nil {
		w.t.Fatal(err)
	}
	if len(list.Items) != 1 {
		w.t.Fatalf("daemon %s has %d pods", name, len(list.Items))
	}
	return &list.Items[0]
}

func (w *world) names() []string {
	w.t.Helper()
	var list corev1.PodList
	if err := w.client.List(w.t.Context(), &list, client.InNamespace("tandem")); err != nil {
		w.t.Fatal(err)
	}
	var names []string
	for _, pod := range list.Items {
		names = append(names, pod.Labels[daemonLabel])
	}
	slices.Sort(names)
	return names
}

func (w *world) setPod(name string, change func(*corev1.PodStatus)) {
	w.t.Helper()
	pod := w.daemonPod(name)
	change(&pod.Status)
	if err := w.client.Status().Update(w.t.Context(), pod); err != nil {
		w.t.Fatal(err)
	}
}

func readyPod(s *corev1.PodStatus) {
	*s = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
}

// measured is what a counter or a gauge has.
func measured(t *testing.T, of prometheus.Metric) float64 {
	t.Helper()
	var m dto.Metric
	if err := of.Write(&m); err != nil {
		t.Fatal(err)
	}
	return m.GetCounter().GetValue() + m.GetGauge().GetValue()
}

func TestDaemonsGetOnePodEach(t *testing.T) {
	w, d := daemonWorld(t, interceptor.Funcs{}, gpuNode(wanting("a", "b")))
	w.twice(d, "node-1")
	w.want(map[string]int{"create Pod": 2})
	if diff := cmp.Diff([]string{"a", "b"}, w.names()); diff != "" {
		t.Error(diff)
	}
	w.setPod("a", readyPod)
	w.setPod("b", readyPod)
	if result := w.twice(d, "node-1"); result.RequeueAfter != 0 {
		t.Errorf("looks again in %s for nothing", result.RequeueAfter)
	}
	w.set(wanting("b"))
	w.twice(d, "node-1")
	if diff := cmp.Diff([]string{"b"}, w.names()); diff != "" {
		t.Error(diff)
	}
	w.want(map[string]int{"create Pod": 2})
	if created, deleted := measured(t, w.metrics.daemonPods.WithLabelValues("created")),
		measured(t, w.metrics.daemonPods.WithLabelValues("deleted")); created != 2 || deleted != 1 {
		t.Errorf("created %v, deleted %v", created, deleted)
	}
}

func TestTwoLeadersMakeOnePod(t *testing.T) {
	w, first := daemonWorld(t, interceptor.Funcs{}, gpuNode(wanting("a")))
	second := &daemons{cluster: w.cluster(), pods: nothing{w.client}, config: daemonPods()}
	w.once(first, types.NamespacedName{Name: "node-1"})
	w.once(second, types.NamespacedName{Name: "node-1"})
	if diff := cmp.Diff([]string{"a"}, w.names()); diff != "" {
		t.Error(diff)
	}
	w.want(map[string]int{"create Pod": 2}) // of which one was refused
}

// nothing is a cache that has not heard of any pod.
type nothing struct{ client.Reader }

func (nothing) List(context.Context, client.ObjectList, ...client.ListOption) error { return nil }

func TestAPodOfOtherSettingsIsReplaced(t *testing.T) {
	for name, change := range map[string]func(d *v1alpha1.MPSDaemon){
		"settings":             func(d *v1alpha1.MPSDaemon) { d.MultiUser = true },
		"the next of its name": func(d *v1alpha1.MPSDaemon) { d.Generation++ },
	} {
		t.Run(name, func(t *testing.T) {
			w, d := daemonWorld(t, interceptor.Funcs{}, gpuNode(wanting("a")))
			w.twice(d, "node-1")
			before := w.daemonPod("a")
			w.set(func(s *v1alpha1.GPUNodeStatus) { change(&s.Daemons[0]) })
			w.twice(d, "node-1")
			w.want(map[string]int{"create Pod": 2})
			after := w.daemonPod("a")
			if after.Annotations[settingsAnnotation] == before.Annotations[settingsAnnotation] {
				t.Error("the pod is as before")
			}
			// kube-scheduler exits if it sees an unbound pod in the place of a bound one of the same name.
			if after.Name == before.Name {
				t.Errorf("both pods are named %s", after.Name)
			}
		})
	}
}

// The agent cannot read what one of its daemons is to be: clients of that one go on, and nothing is made for it.
func TestAPodOfADoubtfulDaemonIsLeft(t *testing.T) {
	w, d := daemonWorld(t, interceptor.Funcs{}, gpuNode(wanting("a")))
	w.twice(d, "node-1")
	w.set(func(s *v1alpha1.GPUNodeStatus) { s.Daemons, s.UnknownDaemons = nil, []string{"a", "b"} })
	w.twice(d, "node-1")
	if diff := cmp.Diff([]string{"a"}, w.names()); diff != "" {
		t.Error(diff)
	}
	w.set(func(s *v1alpha1.GPUNodeStatus) { s.UnknownDaemons = nil })
	w.twice(d, "node-1")
	if left := w.names(); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

// A pod of a GPUNode that was made anew is not the new one's: the garbage collector is about to delete it.
func TestAPodOfAnotherGPUNodeIsReplaced(t *testing.T) {
	w, d := daemonWorld(t, interceptor.Funcs{}, gpuNode(wanting("a")))
	w.twice(d, "node-1")
	if err := w.client.Delete(t.Context(), w.gpuNode()); err != nil {
		t.Fatal(err)
	}
	w.twice(d, "node-1")
	if diff := cmp.Diff([]string{"a"}, w.names()); diff != "" {
		t.Errorf("what belongs to a node that is gone is the garbage collector's: %s", diff)
	}
	again := gpuNode(wanting("a"))
	again.UID = "uid-again"
	if err := w.client.Create(t.Context(), again); err != nil {
		t.Fatal(err)
	}
	w.twice(d, "node-1")
	if owner := metav1.GetControllerOf(w.daemonPod("a")); owner == nil || owner.UID != "uid-again" {
		t.Errorf("owner %+v", owner)
	}
}

func TestOtherNodesPodsAreLeftAlone(t *testing.T) {
	w, d := daemonWorld(t, interceptor.Funcs{}, gpuNode(wanting("a")))
	other := gpuNode(wanting("x"))
	other.Name, other.UID = "node-2", "uid-2"
	if err := w.client.Create(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	w.twice(d, "node-2")
	w.twice(d, "node-1")
	if diff := cmp.Diff([]string{"a", "x"}, w.names()); diff != "" {
		t.Error(diff)
	}
}

// A reconcile reads the pods of its node only: a fleet has thousands of daemons.
func TestReconcileReadsItsNodesPodsOnly(t *testing.T) {
	w, d := daemonWorld(t, interceptor.Funcs{}, gpuNode(wanting("a")))
	other := gpuNode(wanting("x", "y", "z"))
	other.Name, other.UID = "node-2", "uid-2"
	if err := w.client.Create(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	w.twice(d, "node-2")
	w.twice(d, "node-1")
	read := &counted{Reader: d.pods}
	d.pods = read
	w.twice(d, "node-1")
	if read.items != 2 {
		t.Errorf("two reconciles of a node with one daemon read %d pods", read.items)
	}
}

// counted counts the listed pods.
type counted struct {
	client.Reader
	items int
}

func (c *counted) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	err := c.Reader.List(ctx, list, opts...)
	if pods, ok := list.(*corev1.PodList); ok {
		c.items += len(pods.Items)
	}
	return err
}

func TestWhatDoesNotRunIsTold(t *testing.T) {
	crashed := func(s *corev1.PodStatus) {
		*s = corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{{
			State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "back-off 10s"}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
				ExitCode: 1, Message: "I0101 starting\nmps-daemon: find nvidia-cuda-mps-control\n",
			}},
		}}}
	}
	for name, c := range map[string]struct {
		status func(*corev1.PodStatus)
		age    time.Duration
		want   string
	}{
		"unscheduled": {status: func(s *corev1.PodStatus) {
			s.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "too many pods"}}
		}, want: "does not run: Unschedulable: too many pods"},
		"no image": {status: func(s *corev1.PodStatus) {
			s.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull", Message: "no such\nimage"}}}}
		}, want: "does not run: ErrImagePull: no such image"},
		"crashed":   {status: crashed, want: "does not run: its container ended with code 1: mps-daemon: find nvidia-cuda-mps-control"},
		"just made": {status: func(*corev1.PodStatus) {}},
		"long made": {status: func(*corev1.PodStatus) {}, age: 15 * time.Second, want: "is not ready 15s after it was created"},
		"turned away": {status: func(s *corev1.PodStatus) {
			s.Phase, s.Reason, s.Message = corev1.PodFailed, "OutOfpods", "Node is full"
		}, want: "has failed: OutOfpods: Node is full"},
	} {
		t.Run(name, func(t *testing.T) {
			w, d := daemonWorld(t, interceptor.Funcs{}, gpuNode(wanting("a")))
			w.twice(d, "node-1")
			w.setPod("a", c.status)
			w.clock = w.daemonPod("a").CreationTimestamp.Add(c.age)
			result := w.twice(d, "node-1")
			told := w.gpuNode().Spec.Daemons
			if c.want == "" {
				if len(told) > 0 || result.RequeueAfter != 15*time.Second {
					t.Errorf("told %+v, again in %s", told, result.RequeueAfter)
				}
				w.want(map[string]int{"create Pod": 1})
				return
			}
			if len(told) != 1 || told[0].Name != "a" || !strings.Contains(told[0].Message, c.want) {
				t.Errorf("told %+v", told)
			}
			w.want(map[string]int{"create Pod": 1, "patch GPUNode": 1})
			if n := measured(t, w.metrics.daemonsWaiting.WithLabelValues("node-1")); n != 1 {
				t.Errorf("%v daemons do not run", n)
			}
			w.setPod("a", readyPod)
			w.twice(d, "node-1")
			if told := w.gpuNode().Spec.Daemons; len(told) > 0 {
				t.Errorf("told still: %+v", told)
			}
			if n := measured(t, w.metrics.daemonsWaiting.WithLabelValues("node-1")); n != 0 {
				t.Errorf("%v daemons do not run", n)
			}
		})
	}
}

func TestAPodThatHasFailedIsReplacedInAWhile(t *testing.T) {
	w, d := daemonWorld(t, interceptor.Funcs{}, gpuNode(wanting("a")))
	w.twice(d, "node-1")
	w.setPod("a", func(s *corev1.PodStatus) { s.Phase = corev1.PodFailed })
	made := w.daemonPod("a").CreationTimestamp
	w.clock = made.Add(4 * time.Second)
	if result := w.twice(d, "node-1"); result.RequeueAfter != 6*time.Second {
		t.Errorf("looks again in %s", result.RequeueAfter)
	}
	w.want(map[string]int{"create Pod": 1, "patch GPUNode": 1})
	w.clock = made.Add(failsFor)
	w.twice(d, "node-1")
	if phase := w.daemonPod("a").Status.Phase; phase == corev1.PodFailed {
		t.Error("the failed pod is still there")
	}
}

// Two pods of one daemon never run beside each other: the next one is made when the one before is gone.
func TestAPodThatEndsIsAwaited(t *testing.T) {
	for name, change := range map[string]func(s *v1alpha1.GPUNodeStatus){
		"same settings":  func(*v1alpha1.GPUNodeStatus) {},
		"other settings": func(s *v1alpha1.GPUNodeStatus) { s.Daemons[0].Generation++ },
	} {
		t.Run(name, func(t *testing.T) {
			w, d := daemonWorld(t, interceptor.Funcs{}, gpuNode(wanting("a")))
			w.twice(d, "node-1")
			pod := w.daemonPod("a")
			pod.Finalizers = []string{"example.com/finalizer"}
			if err := errors.Join(w.client.Update(t.Context(), pod), w.client.Delete(t.Context(), pod)); err != nil {
				t.Fatal(err)
			}
			w.set(change)
			w.twice(d, "node-1")
			w.want(map[string]int{"create Pod": 1, "update Pod": 1})
			pod = w.daemonPod("a")
			pod.Finalizers = nil
			if err := w.client.Update(t.Context(), pod); err != nil {
				t.Fatal(err)
			}
			w.twice(d, "node-1")
			if again := w.daemonPod("a"); again.DeletionTimestamp != nil {
				t.Error("no pod was made after the one that ended")
			}
		})
	}
}

// A pod of a controller that chose names otherwise serves on. Of two pods one stays, whichever comes first in the list.
func TestAPodOfAnotherNameIsKept(t *testing.T) {
	node := gpuNode(wanting("a"))
	pod, err := daemonPods().Pod(node, node.Status.Daemons[0])
	if err != nil {
		t.Fatal(err)
	}
	readyPod(&pod.Status)
	other := pod.DeepCopy()
	other.Name = "tandem-mps-a-00000000"
	if plan := PlanDaemons(node, []*corev1.Pod{other}, daemonPods(), time.Now()); len(plan.Create)+len(plan.Delete)+len(plan.Waiting) > 0 {
		t.Errorf("plan for a pod of another name: %+v", plan)
	}
	for _, pods := range [][]*corev1.Pod{{pod, other}, {other, pod}} {
		plan := PlanDaemons(node, pods, daemonPods(), time.Now())
		if len(plan.Create) > 0 || len(plan.Delete) != 1 || plan.Delete[0] != pod {
			t.Fatalf("plan for two pods: %+v", plan)
		}
	}
	pod.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	for _, pods := range [][]*corev1.Pod{{pod, other}, {other, pod}} {
		if plan := PlanDaemons(node, pods, daemonPods(), time.Now()); len(plan.Create)+len(plan.Delete) > 0 {
			t.Errorf("plan for two pods of which one ends: %+v", plan)
		}
	}
}

func TestARefusedPodIsTold(t *testing.T) {
	refused := errors.New("exceeded quota")
	w, d := daemonWorld(t, interceptor.Funcs{Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
		if _, isPod := o.(*corev1.Pod); isPod {
			return refused
		}
		return c.Create(ctx, o, opts...)
	}}, gpuNode(wanting("a")))
	_, err := d.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: "node-1"}})
	if !errors.Is(err, refused) {
		t.Errorf("reconcile: %v", err)
	}
	if told := w.gpuNode().Spec.Daemons; len(told) != 1 || !strings.Contains(told[0].Message, "exceeded quota") {
		t.Errorf("told %+v", told)
	}
}

func TestWhatNoPodIsMadeFor(t *testing.T) {
	for name, c := range map[string]struct {
		daemon func(*v1alpha1.MPSDaemon)
		config func(*DaemonPods)
		want   string
	}{
		"no devices":               {daemon: func(d *v1alpha1.MPSDaemon) { d.Devices = nil }, want: "no devices"},
		"a program of the agent's": {daemon: func(d *v1alpha1.MPSDaemon) { d.DriverRoot = "/run/tandem/mine" }, want: noDriver},
		"files of a container":     {daemon: func(d *v1alpha1.MPSDaemon) { d.DriverRoot = "/run/containerd/x/rootfs" }, want: noDriver},
		"images":                   {daemon: func(d *v1alpha1.MPSDaemon) { d.DriverRoot = "/var/lib/containerd" }, want: noDriver},
		"configuration":            {daemon: func(d *v1alpha1.MPSDaemon) { d.DriverRoot = "/etc" }, want: noDriver},
		"below a driver":           {daemon: func(d *v1alpha1.MPSDaemon) { d.DriverRoot = "/run/nvidia/driver/tmp" }, want: noDriver},
		"under another name":       {daemon: func(d *v1alpha1.MPSDaemon) { d.DriverRoot = "/var/run/nvidia/driver" }, want: noDriver},
		"by a process":             {daemon: func(d *v1alpha1.MPSDaemon) { d.DriverRoot = "/proc/1/root" }, want: noDriver},
		"a way around":             {daemon: func(d *v1alpha1.MPSDaemon) { d.DriverRoot = "/run/nvidia/driver/../x" }, want: "not a clean absolute path"},
		"all daemons":              {daemon: func(d *v1alpha1.MPSDaemon) { d.Name = "" }, want: "is no name of a daemon"},
		"another directory":        {daemon: func(d *v1alpha1.MPSDaemon) { d.Name = ".." }, want: "is no name of a daemon"},
		"a long name":              {daemon: func(d *v1alpha1.MPSDaemon) { d.Name = strings.Repeat("a", 53) }, want: "is no name of a daemon"},
		"two devices in one":       {daemon: func(d *v1alpha1.MPSDaemon) { d.Devices = []string{"GPU-1,GPU-2"} }, want: "is no UUID of a device"},
		"a long UUID":              {daemon: func(d *v1alpha1.MPSDaemon) { d.Devices = []string{strings.Repeat("a", 1<<20)} }, want: "is no UUID of a device"},
		"very many devices":        {daemon: func(d *v1alpha1.MPSDaemon) { d.Devices = slices.Repeat([]string{"GPU-1"}, 1000) }, want: "1000 devices, more than 64"},
		"none are run":             {config: func(p *DaemonPods) { p.Template = nil }, want: "mps.enabled"},
	} {
		t.Run(name, func(t *testing.T) {
			w, d := daemonWorld(t, interceptor.Funcs{}, gpuNode(wanting("a")))
			if c.daemon != nil {
				w.set(func(s *v1alpha1.GPUNodeStatus) { c.daemon(&s.Daemons[0]) })
			}
			if c.config != nil {
				c.config(&d.config)
			}
			w.twice(d, "node-1")
			w.want(map[string]int{"patch GPUNode": 1})
			if told := w.gpuNode().Spec.Daemons; len(told) != 1 || !strings.Contains(told[0].Message, c.want) {
				t.Errorf("told %+v", told)
			}
		})
	}
}

// noDriver is what is said of a driver root that is not on the list.
const noDriver = "is none of /run/nvidia/driver, /: set driverRoot of the chart"

func TestTheHostsRootIsMountedReadOnly(t *testing.T) {
	for root, want := range map[string]bool{"/": true, "/home/kubernetes/bin/nvidia": false} {
		d := mpsDaemon("a")
		d.DriverRoot = root
		pod, err := daemonPods().Pod(gpuNode(), d)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range pod.Spec.Containers[0].VolumeMounts {
			if m.ReadOnly != (want && m.Name == "driver-root") {
				t.Errorf("driver root %s: mount %+v", root, m)
			}
			// Also /run, /dev and others, which are mounted below it.
			if recursive := m.RecursiveReadOnly; (recursive != nil) != m.ReadOnly || recursive != nil && *recursive != corev1.RecursiveReadOnlyIfPossible {
				t.Errorf("driver root %s: mount %+v", root, m)
			}
		}
	}
}

// What is refused now may have been made before: to end it ends its clients. When it ends by itself none is made in its place.
func TestAPodOfARefusedDaemonIsLeft(t *testing.T) {
	w, d := daemonWorld(t, interceptor.Funcs{}, gpuNode(wanting("a")))
	w.twice(d, "node-1")
	w.setPod("a", readyPod)
	d.config.DriverRoots = []string{"/opt/nvidia"}
	w.twice(d, "node-1")
	w.want(map[string]int{"create Pod": 1})
	if told := w.gpuNode().Spec.Daemons; len(told) > 0 {
		t.Errorf("told %+v of one that runs", told)
	}
	w.setPod("a", func(s *corev1.PodStatus) { s.Phase = corev1.PodFailed })
	w.clock = w.daemonPod("a").CreationTimestamp.Add(failsFor)
	w.twice(d, "node-1")
	if names := w.names(); len(names) > 0 {
		t.Errorf("pods %v", names)
	}
	if told := w.gpuNode().Spec.Daemons; len(told) != 1 || !strings.Contains(told[0].Message, "is none of /opt/nvidia") {
		t.Errorf("told %+v", told)
	}
}

// The two writers of the spec leave each other's list alone.
func TestDaemonsAndClaimsAreWrittenApart(t *testing.T) {
	w, d := daemonWorld(t, interceptor.Funcs{}, gpuNode(wanting("a")), newClaim("c", "gpu-0"))
	d.config.Template = nil
	r := w.relay()
	w.twice(r, "node-1")
	w.twice(d, "node-1")
	w.twice(r, "node-1")
	if spec := w.gpuNode().Spec; len(spec.Claims) != 1 || len(spec.Daemons) != 1 {
		t.Errorf("spec %+v", spec)
	}
	w.want(map[string]int{"patch GPUNode": 2})
}

func TestDaemonPod(t *testing.T) {
	config := daemonPods()
	pod, err := config.Pod(gpuNode(), mpsDaemon("a"))
	if err != nil {
		t.Fatal(err)
	}
	if pod.Spec.Containers[0].Env[0].Name != "OWN" || config.Template.Spec.Containers[0].Command != nil {
		t.Error("the template's own is lost, or it was changed")
	}
	volumes := map[string]corev1.Volume{}
	for _, v := range pod.Spec.Volumes {
		volumes[v.Name] = v
		if v.HostPath != nil && *v.HostPath.Type != corev1.HostPathDirectory {
			t.Errorf("%s may be made by the container runtime", v.HostPath.Path)
		}
	}
	for name, path := range map[string]string{
		"daemon": "/run/tandem/mps/a", "driver-root": "/run/nvidia/driver",
	} {
		if volumes[name].HostPath == nil || volumes[name].HostPath.Path != path {
			t.Errorf("volume %s: %+v", name, volumes[name])
		}
	}
	// What clients write to is no directory of the host.
	for name, size := range map[string]string{mps.ShmVolume: "1Gi", mps.PipeVolume: "64Mi", mps.LogVolume: "64Mi", "tmp": "64Mi"} {
		if v := volumes[name].EmptyDir; v == nil || v.Medium != corev1.StorageMediumMemory || v.SizeLimit.String() != size {
			t.Errorf("volume %s: %+v", name, volumes[name])
		}
	}
	c := pod.Spec.Containers[0]
	paths := map[string]string{}
	for _, m := range c.VolumeMounts {
		if _, ok := volumes[m.Name]; !ok {
			t.Errorf("%s is no volume", m.Name)
		}
		if paths[m.MountPath] != "" {
			t.Errorf("two volumes at %s", m.MountPath)
		}
		paths[m.MountPath] = m.Name
	}
	for path, name := range map[string]string{
		"/daemon": "daemon", "/driver-root": "driver-root", "/tmp/nvidia-mps": "pipe", "/driver-root/tmp/nvidia-mps": "pipe",
		"/dev/shm": "shm", "/driver-root/dev/shm": "shm",
	} {
		if paths[path] != name {
			t.Errorf("at %s is %q", path, paths[path])
		}
	}
	if of := pod.Annotations["cluster-autoscaler.kubernetes.io/daemonset-pod"]; of != "true" {
		t.Errorf("the pod keeps a node that the cluster autoscaler would remove: annotation %q", of)
	}
	// What the supervisor makes of its environment is what the agent waits for.
	for _, e := range c.Env {
		if e.ValueFrom != nil {
			e.Value = "uid-pod"
		}
		t.Setenv(e.Name, e.Value)
	}
	d, err := mps.FromEnvironment()
	if err != nil {
		t.Fatal(err)
	}
	if hash := mps.Settings(mpsDaemon("a").MPSSettings).Hash(); d.Settings.Hash() != hash || pod.Annotations[settingsAnnotation] != hash {
		t.Errorf("hash %s, annotation %s, want %s", d.Settings.Hash(), pod.Annotations[settingsAnnotation], hash)
	}
	if !strings.HasPrefix(d.Volumes, "/var/lib/kubelet/pods/uid-pod/") {
		t.Errorf("volumes at %s", d.Volumes)
	}
	if *pod.Spec.AutomountServiceAccountToken || !pod.Spec.HostPID || *pod.Spec.TerminationGracePeriodSeconds <= int64(mps.MostGrace.Seconds()) {
		t.Errorf("pod %+v", pod.Spec)
	}
	field := pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchFields[0]
	if field.Key != "metadata.name" || field.Values[0] != "node-1" {
		t.Errorf("affinity %+v", field)
	}
	two := gpuNode(wanting("a"))
	two.Name = "node-2"
	if one := gpuNode(wanting("a")); podName(one, one.Status.Daemons[0]) == podName(two, two.Status.Daemons[0]) {
		t.Error("two nodes' daemons of one name have one pod")
	}
}

func TestDaemonsAreReconciledWhenTheyChange(t *testing.T) {
	before := gpuNode(wanting("a"))
	for name, c := range map[string]struct {
		change func(*v1alpha1.GPUNode)
		want   bool
	}{
		"a holder":       {func(n *v1alpha1.GPUNode) { n.Status.Holders = "x" }, false},
		"a claim":        {func(n *v1alpha1.GPUNode) { n.Spec.Claims = []v1alpha1.AllocatedClaim{{}} }, false},
		"a daemon":       {func(n *v1alpha1.GPUNode) { n.Status.Daemons = nil }, true},
		"a doubtful one": {func(n *v1alpha1.GPUNode) { n.Status.UnknownDaemons = []string{"b"} }, true},
		"a message":      {func(n *v1alpha1.GPUNode) { n.Spec.Daemons = []v1alpha1.WaitingDaemon{{}} }, true},
		"all of it":      {func(n *v1alpha1.GPUNode) { n.UID = "new" }, true},
	} {
		after := before.DeepCopy()
		c.change(after)
		if got := daemonsChanged.Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after}); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestSettingsTravelAsJSON(t *testing.T) {
	text, err := json.Marshal(mps.Settings(v1alpha1.MPSSettings{Devices: []string{"GPU-1"}, DriverRoot: "/", Generation: 7}))
	if want := `{"devices":["GPU-1"],"driverRoot":"/","generation":7}`; err != nil || string(text) != want {
		t.Errorf("%s, %v", text, err)
	}
}

func TestDaemonTemplate(t *testing.T) {
	for text, want := range map[string]string{
		`{"spec":{"containers":[{"name":"a","image":"i"}]}}`:             "",
		`{"spec":{"containers":[{"name":"a","image":"i","imaeg":"i"}]}}`: `unknown field "spec.containers[0].imaeg"`,
		`{"spec":{"containers":[]}}`:                                     "it has 0 containers, not one",
		`{"spec":`:                                                       "unexpected end",
	} {
		if _, err := DaemonTemplate(text); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
