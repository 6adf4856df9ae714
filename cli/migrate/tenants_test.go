// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// forged returns a tenant's pod with an agent's labels and owner. Only its namespace tells that it is not one.
func forged(node string, owner *appsv1.DaemonSet) *corev1.Pod {
	pod := podOn(node, "innocent", owner)
	pod.Namespace = "aaa-tenant"
	return pod
}

// A tenant's pod is no agent. If it is ready and Tandem's agent is not, migrate does not go on. If it does not run, it stops nothing.
func TestTenantsPodsAreNoAgents(t *testing.T) {
	w := newWorld(t, plugin)
	for _, node := range []string{"a", "b", "c"} {
		w.stuck[node] = true
		if err := w.client.Tracker().Add(forged(node, &tandem)); err != nil {
			t.Fatal(err)
		}
	}
	w.wantError(w.migrate(w.nodes(false)), "node a: gave up", "Tandem's agent agent-a to be ready")
	w.wantMoved("a=true")

	w = newWorld(t, plugin)
	pod := forged("a", &tandem)
	pod.Status.Phase = corev1.PodPending
	if err := w.client.Tracker().Add(pod); err != nil {
		t.Fatal(err)
	}
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Error(err)
	}
}

// A pod of another namespace is not NVIDIA's, although it names NVIDIA's DaemonSet as its owner: it neither keeps a node from moving, nor shows that
// NVIDIA's software has returned.
func TestTenantsPodsAreNotNVIDIAs(t *testing.T) {
	w := newWorld(t, plugin)
	if err := w.client.Tracker().Add(forged("a", &plugin)); err != nil {
		t.Fatal(err)
	}
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	w.moved = nil
	w.interfere = func(node string) {
		_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "nvidia", "plugin-a")
	}
	w.wantError(w.migrate(w.nodes(true)), "node a: gave up", "a ready pod of DaemonSet nvidia/plugin")
	w.wantMoved("a=back")
}

// A tenant's DaemonSet with NVIDIA's container names neither keeps a migration from starting, nor is changed, nor counts on the way back. The plan
// names it, and what to do if it is NVIDIA's.
func TestTenantsDaemonSets(t *testing.T) {
	fake := *plugin.DeepCopy()
	fake.ObjectMeta = metav1.ObjectMeta{Namespace: "aaa-tenant", Name: "mine", UID: "mine", Labels: map[string]string{"argocd.argoproj.io/instance": "x"}}
	fake.OwnerReferences = []metav1.OwnerReference{{Kind: "ClusterPolicy", Name: "\x1b[2J", Controller: ptr.To(true)}}
	dra := appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "aaa-tenant", Name: "dra", UID: "dra"}}
	dra.Spec.Template.Spec.Containers = []corev1.Container{{Name: "gpus", Args: []string{"gpu-kubelet-plugin"}}}
	w := newWorld(t, plugin, fake, dra)
	// Its pods run, and mount what tenants may mount.
	for i, volume := range []corev1.VolumeSource{
		{EmptyDir: &corev1.EmptyDirVolumeSource{}}, {HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet"}}, {HostPath: &corev1.HostPathVolumeSource{Path: "/scratch/device-plugins"}},
	} {
		pod := podOn("a", fmt.Sprintf("mine-%d", i), &fake)
		pod.Spec.Volumes = []corev1.Volume{{VolumeSource: volume}}
		if err := w.client.Tracker().Add(pod); err != nil {
			t.Fatal(err)
		}
	}
	plan, err := w.nodes(false).Plan(t.Context())
	must(w, plan, err)
	if text := plan.String(); !strings.Contains(text, "DaemonSet aaa-tenant/mine (device plugin) is left alone: no pod of its namespace mounts") ||
		!strings.Contains(text, "--daemonset=aaa-tenant/mine") {
		t.Error(text)
	}
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	if err := w.migrate(w.nodes(true)); err != nil {
		t.Fatal(err)
	}
	for _, set := range []appsv1.DaemonSet{fake, dra} {
		object, err := w.client.AppsV1().DaemonSets(set.Namespace).Get(t.Context(), set.Name, metav1.GetOptions{})
		if must(w, object, err).ResourceVersion != set.ResourceVersion || object.Annotations[strategyAnnotation] != "" {
			t.Errorf("DaemonSet %s was changed", set.Name)
		}
	}

	// Without NVIDIA's, a tenant's does not count as it.
	w = newWorld(t, fake)
	w.wantError(w.migrate(w.nodes(false)), "no DaemonSet of NVIDIA's device plugin or DRA driver was found: name it with --daemonset")
	// The administrator can point to it.
	n := w.nodes(false)
	n.DaemonSets = []types.NamespacedName{{Namespace: "aaa-tenant", Name: "mine"}}
	w.wantError(w.migrate(n), "is managed by ClusterPolicy")
}

// NVIDIA's DaemonSets are known by the namespace that only administrators use, and where all their pods have left, by what the nodes keep.
func TestAdministratorsNamespaces(t *testing.T) {
	static := *plugin.DeepCopy()
	static.Namespace, static.Spec.Template.Spec.Volumes = metav1.NamespaceSystem, nil
	w := newWorld(t, static)
	sets, doubtful, err := w.nodes(false).daemonSets(t.Context())
	if len(sets) != 1 || len(doubtful) > 0 || err != nil {
		t.Errorf("in kube-system: %v, %v, %v", sets, doubtful, err)
	}

	w = newWorld(t, plugin)
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	pods, err := w.client.CoreV1().Pods("nvidia").List(t.Context(), metav1.ListOptions{})
	if len(must(w, pods, err).Items) > 0 {
		t.Fatal("NVIDIA's pods are still there")
	}
	if got := w.node("a").Annotations[setsAnnotation]; got != "nvidia/plugin" {
		t.Errorf("%s=%s", setsAnnotation, got)
	}
	if err := w.migrate(w.nodes(true)); err != nil {
		t.Error(err)
	}
	w.wantNoAnnotation("a")
}

// Text of others does not control the terminal.
func TestProgressIsPlain(t *testing.T) {
	w := newWorld(t, plugin)
	w.gpuNodes["a"].Status.Mode = "" // as without a driver
	w.gpuNodes["a"].Status.Waiting = "x\x1b[2J\u009b2J\u202e\nnode a: done"
	w.wantError(w.migrate(w.nodes(false)), "node a: Tandem cannot take over")
	plan, err := w.nodes(false).Plan(t.Context())
	must(w, plan, err)
	for line := range strings.Lines(plan.String()) {
		if strings.HasPrefix(strings.TrimSpace(line), "node a: done") {
			t.Errorf("a forged line:\n%s", plan)
		}
	}
	w.nodes(false).say("%s", w.gpuNodes["a"].Status.Waiting)
	if got := w.out.String(); strings.ContainsAny(got, "\x1b\u009b\u202e") || strings.Count(got, "\n") != 1 {
		t.Errorf("%q", got)
	}
}

// NVIDIA's plugin does not return where pods use GPUs that kubelet believes free: the plugin would give them to others.
func TestBackWaitsForEndedPods(t *testing.T) {
	for name, c := range map[string]struct {
		change func(h *v1alpha1.DeviceHolder)
		// planned is whether the plan refuses already.
		planned bool
	}{
		"deleted by force, in state D": {func(h *v1alpha1.DeviceHolder) {
			h.State, h.WaitsFor = v1alpha1.HoldDraining, "process 4711 (python3, state D)"
		}, true},
		"just ended":      {func(h *v1alpha1.DeviceHolder) { h.State = v1alpha1.HoldDraining }, false},
		"its pod is gone": {func(h *v1alpha1.DeviceHolder) { h.Pods[0].UID = "gone" }, false},
		"not identified":  {func(h *v1alpha1.DeviceHolder) { h.Pods = nil }, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := movedWorld(t, plugin)
			w.interfere = func(node string) { c.change(&w.gpuNodes[node].Status.Devices[0].Holders[0]) }
			w.react("a")
			n := w.nodes(true)
			n.Only = "a"
			err := w.migrate(n)
			if c.planned {
				w.wantError(err, "node a: GPUs are still used although kubelet no longer knows the pods: gpu-0 (by process 4711 (python3, state D))")
			} else {
				w.wantError(err, "node a: gave up", "GPUs that are still used although kubelet no longer knows the pods: gpu-0")
			}
			w.wantMoved()
			w.wantModeRestored("a")
			w.interfere = nil
			w.react("a")
			if err := w.migrate(n); err != nil {
				t.Error(err)
			}
			w.wantMoved("a=back", "a=")
		})
	}
	// A pod that has ended, and whose object is still there.
	w := newWorld(t, plugin)
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	pods := corev1.SchemeGroupVersion.WithResource("pods")
	pod, err := w.client.CoreV1().Pods("default").Get(t.Context(), "train-0-a", metav1.GetOptions{})
	must(w, pod, err).Status.Phase = corev1.PodFailed
	if err := w.client.Tracker().Update(pods, pod, "default"); err != nil {
		t.Fatal(err)
	}
	w.wantError(w.migrate(w.nodes(true)), "node a: gave up", "gpu-0")
}

// NVIDIA's plugin does not return where it may list the GPUs of pods under other resources or IDs, by which kubelet would not know them.
func TestBackWithOtherDeviceIDs(t *testing.T) {
	sharing := *plugin.DeepCopy()
	sharing.Spec.Template.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "CONFIG_FILE", Value: "/config/config.yaml"}}
	operator := *plugin.DeepCopy()
	operator.Spec.Template.Spec.Containers = append(operator.Spec.Template.Spec.Containers, corev1.Container{Name: "config-manager"})
	argument := *plugin.DeepCopy()
	argument.Spec.Template.Spec.Containers[0].Args = []string{"--config-file=/x"}
	for name, c := range map[string]struct {
		set    appsv1.DaemonSet
		change func(d *v1alpha1.DeviceStatus)
		// idle is whether no pod holds the device.
		idle bool
	}{
		"a replica": {plugin, func(d *v1alpha1.DeviceStatus) {
			d.Sharing = &v1alpha1.DeviceSharing{Replicas: 4}
			d.Holders[0].Shared = true
		}, false},
		"a replica of a GPU that is no longer shared": {plugin, func(d *v1alpha1.DeviceStatus) { d.Holders[0].Shared = true }, false},
		"a partition":                  {plugin, func(d *v1alpha1.DeviceStatus) { d.Parent = "gpu-9" }, false},
		"another resource":             {plugin, func(d *v1alpha1.DeviceStatus) { d.ExtendedResource = "example.com/gpu" }, false},
		"not offered":                  {plugin, func(d *v1alpha1.DeviceStatus) { d.ExtendedResource = "" }, false},
		"offered as replicas":          {plugin, func(d *v1alpha1.DeviceStatus) { d.Sharing, d.Holders = &v1alpha1.DeviceSharing{Replicas: 4}, nil }, true},
		"a configuration":              {sharing, func(*v1alpha1.DeviceStatus) {}, false},
		"a configuration (args)":       {argument, func(*v1alpha1.DeviceStatus) {}, false},
		"GPU Operator's configuration": {operator, func(*v1alpha1.DeviceStatus) {}, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := movedWorld(t, c.set)
			w.interfere = func(node string) { c.change(&w.gpuNodes[node].Status.Devices[0]) }
			w.react("a")
			n := w.nodes(true)
			n.Only = "a"
			want := "node a: NVIDIA's plugin may give the GPUs of pods to others"
			if c.idle {
				want = "node a: pods may get GPUs before NVIDIA's plugin returns"
			}
			w.wantError(w.migrate(n), want, ": gpu-0", "add --same-config")
			w.wantMoved()
			n.SameConfig = true
			if err := w.migrate(n); err != nil {
				t.Error(err)
			}
			w.wantMoved("a=back", "a=")
		})
	}

	// A drained node has no pods, and gets none.
	w := movedWorld(t, sharing)
	w.interfere = func(node string) {
		for i := range w.gpuNodes[node].Status.Devices {
			w.gpuNodes[node].Status.Devices[i].Holders = nil
		}
	}
	w.react("a")
	n := w.nodes(true)
	n.Only = "a"
	w.wantError(w.migrate(n), "Cordon the node with kubectl cordon", "add --same-config")
	w.cordon("a")
	if err := w.migrate(n); err != nil {
		t.Error(err)
	}
	w.wantMoved("a=back", "a=")
}

// NVIDIA's plugin does not return where the GPUNode does not tell who uses what.
func TestBackWithoutAWholeReport(t *testing.T) {
	for want, change := range map[string]func(*v1alpha1.GPUNodeStatus){
		"its GPUNode does not list all devices and holders": func(s *v1alpha1.GPUNodeStatus) { s.Omitted = 1 },
		"pods use Tandem's MPS daemons":                     func(s *v1alpha1.GPUNodeStatus) { s.UnknownDaemons = []string{"mps"} },
	} {
		w := newWorld(t, plugin)
		if err := w.migrate(w.nodes(false)); err != nil {
			t.Fatal(err)
		}
		change(&w.gpuNodes["b"].Status)
		w.wantError(w.migrate(w.nodes(true)), "node b: "+want)
	}
}
