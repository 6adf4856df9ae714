// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/hack/progress"
)

func TestValueArgs(t *testing.T) {
	args := valueArgs(Options{Profile: "l4x4", Values: []string{"logVerbosity=6"}, ValuesFiles: []string{"a.yaml"}}, "sha256:abc")
	for _, want := range []string{"--set=simulated.profile=l4x4", "--set=image.repository=docker.io/local/tandem", "--set=image.tag=dev",
		`--set=podAnnotations.tandem-gpu\.dev/image=sha256-abc`, "--values=a.yaml", "--set=logVerbosity=6"} {
		if !slices.Contains(args, want) {
			t.Errorf("%q lacks %s", args, want)
		}
	}
	if args := valueArgs(Options{Profile: RealGPUs}, ""); slices.ContainsFunc(args, func(a string) bool { return strings.Contains(a, "simulated") }) {
		t.Errorf("a simulated machine beside real GPUs: %q", args)
	}
	if args := valueArgs(Options{Profile: "l4x4"}, ""); slices.ContainsFunc(args, func(a string) bool { return strings.Contains(a, "podAnnotations") }) {
		t.Errorf("an annotation without a digest: %q", args)
	}
}

func TestRolledOut(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*appsv1.DaemonSet)
		want   bool
	}{
		"all ready":          {func(*appsv1.DaemonSet) {}, true},
		"new generation":     {func(s *appsv1.DaemonSet) { s.Generation++ }, false},
		"one old pod":        {func(s *appsv1.DaemonSet) { s.Status.UpdatedNumberScheduled-- }, false},
		"one not ready":      {func(s *appsv1.DaemonSet) { s.Status.NumberReady-- }, false},
		"nothing to run yet": {func(s *appsv1.DaemonSet) { s.Status = appsv1.DaemonSetStatus{ObservedGeneration: 2} }, false},
	} {
		t.Run(name, func(t *testing.T) {
			set := appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Generation: 2}, Status: appsv1.DaemonSetStatus{
				ObservedGeneration: 2, DesiredNumberScheduled: 3, UpdatedNumberScheduled: 3, NumberReady: 3}}
			test.change(&set)
			if got := rolledOut(set); got != test.want {
				t.Errorf("rolled out: %t", got)
			}
		})
	}
}

func TestControllerMissing(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*appsv1.Deployment)
		leader string
		want   string // "" for none
	}{
		"ready":          {func(*appsv1.Deployment) {}, "c-1", ""},
		"not ready":      {func(d *appsv1.Deployment) { d.Status.ReadyReplicas = 0 }, "c-1", "0 of 1 controllers ready, 1 of them new"},
		"an old one":     {func(d *appsv1.Deployment) { d.Status.Replicas = 2 }, "c-1", "1 of 1 controllers ready"},
		"none is new":    {func(d *appsv1.Deployment) { d.Status.UpdatedReplicas = 0 }, "c-1", "0 of them new"},
		"not looked at":  {func(d *appsv1.Deployment) { d.Generation++ }, "c-1", "1 of 1 controllers ready"},
		"not there":      {func(d *appsv1.Deployment) { d.Labels = nil }, "c-1", "no Deployment"},
		"none leads yet": {func(*appsv1.Deployment) {}, "", "is gone"},
		"leader is gone": {func(*appsv1.Deployment) {}, "c-0", `the controller that leads ("c-0") is gone`},
		"leader ends":    {func(*appsv1.Deployment) {}, "c-2", `the controller that leads ("c-2") is gone`},
		"none is wanted": {func(d *appsv1.Deployment) {
			d.Spec.Replicas, d.Status = ptr.To[int32](0), appsv1.DeploymentStatus{ObservedGeneration: 2}
		}, "c-0", ""},
	} {
		t.Run(name, func(t *testing.T) {
			deployment := &appsv1.Deployment{
				ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: Namespace, Generation: 2, Labels: map[string]string{"app.kubernetes.io/instance": Release}},
				Status:     appsv1.DeploymentStatus{ObservedGeneration: 2, Replicas: 1, UpdatedReplicas: 1, ReadyReplicas: 1},
			}
			test.change(deployment)
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "c-1", Namespace: Namespace}}
			ending := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
				Name: "c-2", Namespace: Namespace, DeletionTimestamp: ptr.To(metav1.Now()), Finalizers: []string{"example.com/f"},
			}}
			lease := &coordinationv1.Lease{
				ObjectMeta: metav1.ObjectMeta{Name: leaseName, Namespace: Namespace}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &test.leader},
			}
			missing, err := controllerMissing(t.Context(), fake.NewClientset(deployment, pod, ending, lease))
			if err != nil || (missing == "") != (test.want == "") || !strings.Contains(missing, test.want) {
				t.Errorf("missing %q, %v; want %q", missing, err, test.want)
			}
		})
	}
}

func slice(node, pool string, generation, count int64, devices int) resourceapi.ResourceSlice {
	return resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Driver: DriverName, NodeName: &node, Devices: make([]resourceapi.Device, devices),
		Pool: resourceapi.ResourcePool{Name: pool, Generation: generation, ResourceSliceCount: count}}}
}

func TestPublished(t *testing.T) {
	for name, test := range map[string]struct {
		slices []resourceapi.ResourceSlice
		want   bool
	}{
		"none":           {nil, false},
		"another node's": {[]resourceapi.ResourceSlice{slice("b", "b", 1, 1, 8)}, false},
		"complete":       {[]resourceapi.ResourceSlice{slice("a", "a", 1, 1, 8)}, true},
		"empty":          {[]resourceapi.ResourceSlice{slice("a", "a", 1, 1, 0)}, false},
		"half":           {[]resourceapi.ResourceSlice{slice("a", "a", 1, 2, 8)}, false},
		"two":            {[]resourceapi.ResourceSlice{slice("a", "a", 1, 2, 8), slice("a", "a", 1, 2, 8)}, true},
		"no node":        {[]resourceapi.ResourceSlice{{}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := published(test.slices, "a"); got != test.want {
				t.Errorf("published: %t", got)
			}
		})
	}
}

func TestDescribeAgentsNamesTheReason(t *testing.T) {
	client := fake.NewClientset(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "agent", Namespace: Namespace, Labels: map[string]string{"app.kubernetes.io/instance": Release}},
		Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "kubelet-plugin",
			State:                corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "back-off"}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Message: "no such flag\n"}},
		}}},
	}, &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "tandem", Namespace: Namespace, Labels: map[string]string{"app.kubernetes.io/instance": Release}},
		Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: 1}})
	missing, err := agentsMissing(t.Context(), client)
	if want := "0 of 1 agents ready; agent/kubelet-plugin: CrashLoopBackOff back-off; agent/kubelet-plugin ended before: no such flag"; err != nil || missing != want {
		t.Errorf("missing %q, %v; want %q", missing, err, want)
	}
}

func TestUntil(t *testing.T) {
	looks := 0
	err := until(t.Context(), progress.New(nil), "it", func(context.Context) (string, error) {
		if looks++; looks < 2 {
			return "something", errors.New("not now")
		}
		return "", nil
	})
	if err != nil || looks != 2 {
		t.Errorf("%d looks, %v", looks, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err = until(ctx, progress.New(nil), "it", func(context.Context) (string, error) { return "a reason", nil })
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "wait for it") || !strings.Contains(err.Error(), "a reason") {
		t.Errorf("cancelled wait: %v", err)
	}
}

func TestStepsTakeLinesOfOthers(t *testing.T) {
	var out bytes.Buffer
	if _, err := progress.New(&out).Write([]byte("one\ntwo\n")); err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`^ *0\.0s  one\n *0\.0s  two\n$`).MatchString(out.String()) {
		t.Errorf("got %q", out.String())
	}
}
