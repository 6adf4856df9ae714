// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"bytes"
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/config"
)

// world is a cluster in which the DaemonSet controller, kubelets and Tandem's agents act at once when a node's labels change.
type world struct {
	*testing.T
	client *fake.Clientset
	out    bytes.Buffer

	mu sync.Mutex
	// gpuNodes by name; stuck nodes have agents that never become ready.
	gpuNodes map[string]*v1alpha1.GPUNode
	stuck    map[string]bool
	// moved are the changes of the nodes' Label, in order.
	moved []string
	// interfere is called after each reaction.
	interfere func(node string)
}

var pluginVolumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/device-plugins/"}}}}

var plugin = appsv1.DaemonSet{
	ObjectMeta: metav1.ObjectMeta{Namespace: "nvidia", Name: "plugin", UID: "plugin"},
	Spec: appsv1.DaemonSetSpec{
		UpdateStrategy: appsv1.DaemonSetUpdateStrategy{Type: appsv1.RollingUpdateDaemonSetStrategyType},
		Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "nvidia-device-plugin-ctr"}},
			Volumes:    pluginVolumes,
			Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{
					{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "absent", Operator: corev1.NodeSelectorOpExists}}},
					{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "gpu", Operator: corev1.NodeSelectorOpExists}}},
				},
			}}},
		}},
	},
}

// newWorld has GPU nodes a, b and c, and d without a GPU. Two pods by limits run on each GPU node, where NVIDIA's software serves.
func newWorld(t *testing.T, sets ...appsv1.DaemonSet) *world {
	w := &world{T: t, gpuNodes: map[string]*v1alpha1.GPUNode{}, stuck: map[string]bool{}}
	objects := []runtime.Object{tandem.DeepCopy(), binding.DeepCopy()}
	for _, set := range sets {
		objects = append(objects, set.DeepCopy())
	}
	for _, name := range []string{"a", "b", "c", "d"} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}, Annotations: map[string]string{"other": ""}}}
		objects = append(objects, node)
		if name == "d" {
			continue
		}
		node.Labels["gpu"], node.Labels[operatorLabel] = "yes", "true"
		w.gpuNodes[name] = &v1alpha1.GPUNode{Status: v1alpha1.GPUNodeStatus{Mode: "Dual"}}
		objects = append(objects, agentOn(name))
		for i := range 2 {
			pod := podOn(name, fmt.Sprintf("train-%d", i), nil)
			pod.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}}}}
			objects = append(objects, pod)
		}
	}
	w.client = fake.NewClientset(objects...)
	for _, name := range []string{"a", "b", "c"} {
		w.react(name)
	}
	w.client.PrependReactor("patch", "nodes", func(action k8stesting.Action) (bool, runtime.Object, error) {
		name := action.(k8stesting.PatchAction).GetName()
		before := w.node(name).Labels[Label]
		handled, object, err := k8stesting.ObjectReaction(w.client.Tracker())(action)
		if after := w.node(name).Labels[Label]; after != before {
			w.mu.Lock()
			w.moved = append(w.moved, name+"="+after)
			w.mu.Unlock()
		}
		w.react(name)
		return handled, object, err
	})
	return w
}

// movedWorld is newWorld after its nodes have moved to Tandem.
func movedWorld(t *testing.T, sets ...appsv1.DaemonSet) *world {
	t.Helper()
	w := newWorld(t, sets...)
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	w.moved = nil
	return w
}

var agentLabels = map[string]string{"app.kubernetes.io/part-of": "tandem", "app.kubernetes.io/component": "kubelet-plugin"}

// tandem is the DaemonSet of Tandem's agents. binding gives its ServiceAccount rights.
var (
	tandem = appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "tandem-system", Name: "agent", UID: "tandem", Labels: agentLabels},
		Spec:       appsv1.DaemonSetSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{ServiceAccountName: "tandem"}}},
	}
	binding = rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "tandem", Labels: agentLabels},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "tandem-system", Name: "tandem"}},
	}
)

// podOn returns a running pod, which is ready if a DaemonSet owns it.
func podOn(node, name string, owner *appsv1.DaemonSet) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name + "-" + node, UID: types.UID(name + "-" + node)},
		Spec:       corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	if owner != nil {
		pod.Namespace, pod.Labels, pod.Spec.Volumes = owner.Namespace, owner.Labels, owner.Spec.Template.Spec.Volumes
		pod.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", UID: owner.UID, Controller: ptr.To(true)}}
		setReady(pod, true)
	}
	return pod
}

// agentOn returns Tandem's agent on a node, which is not ready.
func agentOn(node string) *corev1.Pod {
	pod := podOn(node, "agent", &tandem)
	pod.Status.Conditions = nil
	return pod
}

func setReady(pod *corev1.Pod, ready bool) {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}
}

func must[T any](w *world, object T, err error) T {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
	return object
}

func (w *world) node(name string) *corev1.Node {
	object, err := w.client.Tracker().Get(corev1.SchemeGroupVersion.WithResource("nodes"), "", name)
	return must(w, object, err).(*corev1.Node)
}

func (w *world) label(node, key, value string) {
	object := w.node(node).DeepCopy()
	object.Labels[key] = value
	if err := w.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), object, ""); err != nil {
		w.Fatal(err)
	}
}

func (w *world) set(name string) *appsv1.DaemonSet {
	set, err := w.client.AppsV1().DaemonSets("nvidia").Get(w.Context(), name, metav1.GetOptions{})
	return must(w, set, err)
}

// react is what the cluster does after a change of a node.
func (w *world) react(name string) {
	pods := corev1.SchemeGroupVersion.WithResource("pods")
	node, serves := w.node(name), false
	listed, err := w.client.Tracker().List(appsv1.SchemeGroupVersion.WithResource("daemonsets"), appsv1.SchemeGroupVersion.WithKind("DaemonSet"), "nvidia")
	for _, set := range must(w, listed, err).(*appsv1.DaemonSetList).Items {
		runs, err := daemonSet{DaemonSet: set}.runsOn(node)
		must(w, runs, err)
		pod := podOn(name, set.Name, &set)
		if runs {
			serves = true
			_ = w.client.Tracker().Add(pod)
		} else {
			_ = w.client.Tracker().Delete(pods, pod.Namespace, pod.Name)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	object, err := w.client.Tracker().Get(pods, "tandem-system", "agent-"+name)
	if err == nil {
		agent := object.(*corev1.Pod).DeepCopy()
		setReady(agent, !serves && !w.stuck[name])
		if err := w.client.Tracker().Update(pods, agent, "tandem-system"); err != nil {
			w.Fatal(err)
		}
	}
	gpuNode := w.gpuNodes[name]
	gpuNode.Status.Mode = "Dual"
	if mode := node.Labels[config.ModeLabel]; mode != "" {
		gpuNode.Status.Mode = mode
	}
	if !serves {
		gpuNode.Status.Devices = nil
		for i := range 2 {
			gpuNode.Status.Devices = append(gpuNode.Status.Devices, v1alpha1.DeviceStatus{
				Name: fmt.Sprintf("gpu-%d", i), ExtendedResource: "nvidia.com/gpu", Holders: []v1alpha1.DeviceHolder{{
					Kind: v1alpha1.HolderPod, State: v1alpha1.HoldHeld, Pods: []v1alpha1.PodReference{{UID: types.UID(fmt.Sprintf("train-%d-%s", i, name))}},
				}},
			})
		}
	}
	if w.interfere != nil {
		w.interfere(name)
	}
}

func (w *world) nodes(back bool) *Nodes {
	return &Nodes{
		Client: w.client, DriverName: "gpu.nvidia.com", Back: back, Patience: time.Minute, Progress: &w.out,
		GPUNode: func(_ context.Context, name string) (*v1alpha1.GPUNode, error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			object, ok := w.gpuNodes[name]
			if !ok {
				return nil, apierrors.NewNotFound(v1alpha1.Resource.GroupResource(), name)
			}
			return object.DeepCopy(), nil
		},
	}
}

// migrate plans and applies, on a clock that skips waiting.
func (w *world) migrate(n *Nodes) (err error) {
	w.Helper()
	synctest.Test(w.T, func(t *testing.T) {
		plan, failed := n.Plan(t.Context())
		must(w, plan, failed)
		err = n.Apply(t.Context(), plan)
	})
	return err
}

func (w *world) wantMoved(want ...string) {
	w.Helper()
	if diff := cmp.Diff(want, w.moved); diff != "" {
		w.Errorf("moved (-want +got)\n%s\n%s", diff, w.out.String())
	}
	w.moved = nil
}

// wantNoAnnotation: migrate's are gone, others stay.
func (w *world) wantNoAnnotation(node string) {
	w.Helper()
	if diff := cmp.Diff(map[string]string{"other": ""}, w.node(node).Annotations); diff != "" {
		w.Errorf("annotations of %s\n%s", node, diff)
	}
}

func (w *world) wantError(err error, parts ...string) {
	w.Helper()
	for _, part := range parts {
		if err == nil || !strings.Contains(err.Error(), part) {
			w.Errorf("got error %v, want %s", err, part)
		}
	}
}

// TestThereAndBack: nodes move one after the other, in both directions; afterwards everything is as before.
func TestThereAndBack(t *testing.T) {
	w := newWorld(t, plugin)
	w.label("b", config.ModeLabel, "Split")
	labels := w.node("b").Labels
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	w.wantMoved("a=true", "b=true", "c=true")
	set := w.set("plugin")
	terms := requiredTerms(&set.Spec.Template.Spec)
	if set.Spec.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType || len(terms) != 2 || !isExclusion(terms[0].MatchExpressions[1]) || !isExclusion(terms[1].MatchExpressions[1]) {
		t.Errorf("DaemonSet %+v", set.Spec)
	}
	// Once more, nothing changes.
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	w.wantMoved()
	if !reflect.DeepEqual(set, w.set("plugin")) {
		t.Error("the second run changed the DaemonSet")
	}
	if err := w.migrate(w.nodes(true)); err != nil {
		t.Fatal(err)
	}
	w.wantMoved("a=back", "a=", "b=back", "b=", "c=back", "c=")
	if diff := cmp.Diff(plugin.Spec, w.set("plugin").Spec); diff != "" {
		t.Errorf("DaemonSet (-before +after)\n%s", diff)
	}
	if diff := cmp.Diff(labels, w.node("b").Labels); diff != "" {
		t.Errorf("labels (-before +after)\n%s", diff)
	}
	w.wantNoAnnotation("b")
}

// TestPlanChangesNothing, and says what would change.
func TestPlanChangesNothing(t *testing.T) {
	w := newWorld(t, plugin)
	w.client.ClearActions()
	plan, err := w.nodes(false).Plan(t.Context())
	must(w, plan, err)
	for _, action := range w.client.Actions() {
		if !slices.Contains([]string{"get", "list"}, action.GetVerb()) {
			t.Errorf("%s %s", action.GetVerb(), action.GetResource().Resource)
		}
	}
	for _, want := range []string{"move 3 nodes to Tandem", "DaemonSet nvidia/plugin (device plugin): add {key: tandem-gpu.dev/migrated, operator: NotIn", "node c: 2 running pods"} {
		if !strings.Contains(plan.String(), want) {
			t.Errorf("%s\nlacks %s", plan, want)
		}
	}
}

// TestAbortAndResume: a node that does not become healthy stops the migration; the next run continues with it.
func TestAbortAndResume(t *testing.T) {
	w := newWorld(t, plugin)
	w.stuck["b"] = true
	w.wantError(w.migrate(w.nodes(false)), "node b: gave up", "Tandem's agent agent-b to be ready", "run migrate --apply again", "running pods keep running")
	w.wantMoved("a=true", "b=true")
	delete(w.stuck, "b")
	w.react("b")
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	w.wantMoved("c=true")

	// The same on the way back, interrupted while NVIDIA's plugin starts.
	w.interfere = func(node string) {
		if node == "a" && w.node("a").Labels[Label] == returning {
			_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "nvidia", "plugin-a")
		}
	}
	w.wantError(w.migrate(w.nodes(true)), "node a: gave up", "a ready pod of DaemonSet nvidia/plugin", "run migrate --back --apply again")
	w.wantMoved("a=back")
	w.interfere = nil
	w.react("a")
	if err := w.migrate(w.nodes(true)); err != nil {
		t.Fatal(err)
	}
	w.wantMoved("a=", "b=back", "b=", "c=back", "c=")
}

// TestChangeOfMind: a way back that was interrupted turns round, and the mode is as before.
func TestChangeOfMind(t *testing.T) {
	w := movedWorld(t, plugin)
	w.interfere = func(node string) { w.gpuNodes[node].Status.Mode = "Dual" } // the agent is slow
	w.wantError(w.migrate(w.nodes(true)), "node a: gave up", "the agent to use mode DevicePluginOnly; it is Dual")
	w.interfere = nil
	w.wantModeRestored("a")

	// A run that was killed has restored nothing.
	mode := map[string]any{config.ModeLabel: "DevicePluginOnly"}
	if err := w.nodes(true).patchNode(t.Context(), "a", mode, map[string]any{modeAnnotation: ""}); err != nil {
		t.Fatal(err)
	}
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	w.wantModeRestored("a")
	w.wantMoved()
}

// wantModeRestored: the node stays with Tandem, in the mode that it had.
func (w *world) wantModeRestored(name string) {
	w.Helper()
	node := w.node(name)
	if node.Labels[config.ModeLabel] != "" || node.Labels[Label] != withTandem {
		w.Errorf("labels %v", node.Labels)
	}
	if _, saved := node.Annotations[modeAnnotation]; saved {
		w.Error("the mode is kept")
	}
}

func TestOneNode(t *testing.T) {
	w := newWorld(t, plugin)
	n := w.nodes(false)
	n.Only = "b"
	if err := w.migrate(n); err != nil {
		t.Fatal(err)
	}
	w.wantMoved("b=true")
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	w.wantMoved("a=true", "c=true")
	n = w.nodes(true)
	n.Only = "b"
	if err := w.migrate(n); err != nil {
		t.Fatal(err)
	}
	w.wantMoved("b=back", "b=")
	if !(daemonSet{DaemonSet: *w.set("plugin")}).isPatched() {
		t.Error("the DaemonSet may return to the other nodes")
	}
	n.Only = "absent"
	_, err := n.Plan(t.Context())
	w.wantError(err, "node absent does not exist")
}

// TestMissingHolder: Tandem is ready, but does not know a running pod.
func TestMissingHolder(t *testing.T) {
	w := newWorld(t, plugin)
	w.interfere = func(node string) {
		if devices := w.gpuNodes[node].Status.Devices; len(devices) > 1 {
			w.gpuNodes[node].Status.Devices = devices[:1]
		}
	}
	w.wantError(w.migrate(w.nodes(false)), "node a: gave up", "these pods as holders: default/train-1-a")
	w.wantMoved("a=true")
}

// TestTandemGoesOn: NVIDIA's plugin is back, and Tandem's agent still serves.
func TestTandemGoesOn(t *testing.T) {
	w := movedWorld(t, plugin)
	w.interfere = func(node string) {
		pods := corev1.SchemeGroupVersion.WithResource("pods")
		agent := agentOn(node)
		setReady(agent, true)
		if err := w.client.Tracker().Update(pods, agent, "tandem-system"); err != nil {
			t.Error(err)
		}
	}
	w.wantError(w.migrate(w.nodes(true)), "node a: gave up", "Tandem's agent agent-a to find NVIDIA's software")
	w.wantMoved("a=back")
}

func claimOn(node string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim-" + node},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Driver: "gpu.nvidia.com", Pool: node + "/gpu-0", Device: "gpu-0"}},
		}}},
	}
}

// newDRADriver returns a DaemonSet of NVIDIA's DRA driver.
func newDRADriver() appsv1.DaemonSet {
	dra := appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "nvidia", Name: "dra", UID: "dra"}}
	dra.Spec.Template.Spec.Containers = []corev1.Container{{Name: "gpus", Args: []string{"gpu-kubelet-plugin -v 4"}}}
	dra.Spec.Template.Spec.Volumes = pluginVolumes
	dra.Spec.Template.Spec.NodeSelector = map[string]string{"gpu": "yes"}
	return dra
}

// TestClaims: neither direction takes a node while claims have GPUs there, and no other node moves then.
func TestClaims(t *testing.T) {
	w := newWorld(t, newDRADriver())
	if err := w.client.Tracker().Add(claimOn("b")); err != nil {
		t.Fatal(err)
	}
	w.wantError(w.migrate(w.nodes(false)), "node b: NVIDIA's DRA driver serves claims", "default/claim-b", "Drain the node")
	w.wantMoved()
	if w.set("dra").Spec.Template.Spec.Affinity != nil {
		t.Error("the DaemonSet was changed")
	}
	claims := resourceapi.SchemeGroupVersion.WithResource("resourceclaims")
	if err := w.client.Tracker().Delete(claims, "default", "claim-b"); err != nil {
		t.Fatal(err)
	}
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	w.wantMoved("a=true", "b=true", "c=true")

	// The driver knows nothing of pods with limits.
	w.wantError(w.migrate(w.nodes(true)), "node a: NVIDIA's DRA driver would give the GPUs of pods with limits to claims: gpu-0, gpu-1")
	w.wantMoved()

	w = movedWorld(t, plugin)
	w.gpuNodes["c"].Status.Devices = append(w.gpuNodes["c"].Status.Devices, v1alpha1.DeviceStatus{
		Holders: []v1alpha1.DeviceHolder{{Kind: v1alpha1.HolderClaim, Namespace: "default", Name: "held"}},
	})
	w.wantError(w.migrate(w.nodes(true)), "node c: claims have GPUs", "default/held")
	w.wantMoved()
	w.gpuNodes["c"].Status.Devices = nil
	w.react("c")

	// A claim that gets its GPU after the plan.
	w.interfere = func(node string) {
		if node == "a" && w.node("a").Labels[config.ModeLabel] != "" && w.node("a").Labels[Label] == withTandem {
			_ = w.client.Tracker().Add(claimOn("a"))
		}
	}
	w.wantError(w.migrate(w.nodes(true)), "node a: claims have GPUs", "default/claim-a")
	w.wantMoved()
	w.wantModeRestored("a")
}

// Migrate checks a node again before it moves, because the plan may be out of date.
func TestNodeChangesAfterThePlan(t *testing.T) {
	pods := corev1.SchemeGroupVersion.WithResource("pods")
	for name, c := range map[string]struct {
		change func(w *world)
		want   string
	}{
		"a claim of NVIDIA's driver": {func(w *world) { _ = w.client.Tracker().Add(claimOn("c")) }, "node c: NVIDIA's DRA driver serves claims"},
		"a ComputeDomain": {func(w *world) {
			claim := claimOn("c")
			claim.Status.Allocation.Devices.Results[0].Driver = computeDomains
			_ = w.client.Tracker().Add(claim)
		}, "node c: NVIDIA's DRA driver serves claims"},
		"no agent": {func(w *world) { _ = w.client.Tracker().Delete(pods, "tandem-system", "agent-c") }, "node c: no agent of Tandem runs on this node"},
		"an agent without an image": {func(w *world) {
			agent := agentOn("c")
			agent.Status.Phase = corev1.PodPending
			_ = w.client.Tracker().Update(pods, agent, "tandem-system")
		}, "node c: Tandem cannot take over this node yet: it waits for a running agent: pod tandem-system/agent-c is Pending"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, newDRADriver())
			w.interfere = func(node string) {
				if node == "a" {
					w.interfere = nil
					c.change(w)
				}
			}
			w.wantError(w.migrate(w.nodes(false)), c.want)
			w.wantMoved("a=true", "b=true")
		})
	}
}

// On the way back NVIDIA's plugin returns only after the scheduler can no longer allocate devices of the node. Claims that get devices
// afterwards have them from NVIDIA's DRA driver.
func TestSlicesAndClaimsOnTheWayBack(t *testing.T) {
	w := movedWorld(t, plugin)
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "a-gpus"}, Spec: resourceapi.ResourceSliceSpec{Driver: "gpu.nvidia.com", NodeName: ptr.To("a")}}
	if err := w.client.Tracker().Add(slice); err != nil {
		t.Fatal(err)
	}
	w.wantError(w.migrate(w.nodes(true)), "node a: gave up", "1 ResourceSlices of the node to be deleted")
	w.wantMoved()
	slices := resourceapi.SchemeGroupVersion.WithResource("resourceslices")
	if err := w.client.Tracker().Delete(slices, "", "a-gpus"); err != nil {
		t.Fatal(err)
	}
	w.interfere = func(node string) {
		if node == "a" && w.node("a").Labels[Label] == returning {
			w.interfere = nil
			_ = w.client.Tracker().Add(claimOn("a"))
			_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "nvidia", "plugin-a")
		}
	}
	w.wantError(w.migrate(w.nodes(true)), "node a: gave up", "a ready pod of DaemonSet nvidia/plugin")
	w.react("a")
	if err := w.migrate(w.nodes(true)); err != nil {
		t.Fatal(err)
	}
	w.wantMoved("a=back", "a=", "b=back", "b=", "c=back", "c=")
}

// A node that has moved, and is healthy, is not in the plan. Where nothing moves, no DaemonSet changes.
func TestNothingToMove(t *testing.T) {
	w := newWorld(t, plugin)
	n := w.nodes(false)
	n.Only = "d"
	if err := w.migrate(n); err != nil {
		t.Fatal(err)
	}
	if w.set("plugin").Annotations[strategyAnnotation] != "" {
		t.Error("the DaemonSet was changed")
	}
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	plan, err := w.nodes(false).Plan(t.Context())
	if err != nil || len(plan.nodes) > 0 {
		t.Errorf("after the move the plan is\n%s, %v", plan, err)
	}
}

// If the API server does not serve ResourceClaims, migrate finds no claims and continues.
func TestWithoutTheClaimsAPI(t *testing.T) {
	w := newWorld(t, plugin)
	w.client.PrependReactor("list", "resourceclaims", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), "")
	})
	for _, back := range []bool{false, true} {
		if err := w.migrate(w.nodes(back)); err != nil {
			t.Fatal(err)
		}
	}
}

// A missing right ends the wait at once.
func TestForbidden(t *testing.T) {
	w := newWorld(t, plugin)
	n, seen := w.nodes(false), 0
	get := n.GPUNode
	n.GPUNode = func(ctx context.Context, name string) (*v1alpha1.GPUNode, error) {
		if seen++; w.node("a").Labels[Label] == withTandem {
			return nil, apierrors.NewForbidden(v1alpha1.Resource.GroupResource(), name, nil)
		}
		return get(ctx, name)
	}
	w.wantError(w.migrate(n), "node a: get GPUNode a:", "forbidden")
	if seen > 10 {
		t.Errorf("asked %d times", seen)
	}
}

func TestMPSClients(t *testing.T) {
	w := newWorld(t, plugin)
	w.label("a", "nvidia.com/mps.capable", "true")
	w.wantError(w.migrate(w.nodes(false)), "node a: pods use NVIDIA's MPS daemon", "default/train-0-a")
	w.label("a", "nvidia.com/mps.capable", "false")
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	w.gpuNodes["b"].Status.Daemons = []v1alpha1.MPSDaemon{{Name: "mps"}}
	w.wantError(w.migrate(w.nodes(true)), "node b: pods use Tandem's MPS daemons")
}

// TestOperator: GPU Operator's own label moves its DaemonSet, which stays unchanged.
func TestOperator(t *testing.T) {
	set := *plugin.DeepCopy()
	set.OwnerReferences = []metav1.OwnerReference{{Kind: "ClusterPolicy", Name: "cluster-policy", Controller: ptr.To(true)}}
	set.Spec.Template.Spec.NodeSelector = map[string]string{operatorLabel: "true"}
	w := newWorld(t, set)
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	w.wantMoved("a=true", "b=true", "c=true")
	if got := w.node("a").Labels[operatorLabel]; got != "false" {
		t.Errorf("%s=%s", operatorLabel, got)
	}
	if err := w.migrate(w.nodes(true)); err != nil {
		t.Fatal(err)
	}
	if got := w.node("a").Labels[operatorLabel]; got != "true" {
		t.Errorf("%s=%s", operatorLabel, got)
	}
	if diff := cmp.Diff(set.Spec, w.set("plugin").Spec); diff != "" {
		t.Error(diff)
	}
	w.wantNoAnnotation("a")

	// A node that the Operator did not serve keeps its label.
	w.label("c", operatorLabel, "false")
	node := w.node("c").DeepCopy()
	node.Labels[Label] = withTandem
	if err := w.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), node, ""); err != nil {
		t.Fatal(err)
	}
	if err := w.nodes(true).leave(t.Context(), nil, w.node("c")); err != nil {
		t.Fatal(err)
	}
	if got := w.node("c").Labels; got[operatorLabel] != "false" || got[Label] != returning {
		t.Errorf("labels %v", got)
	}
}

// GPU Operator pauses its plugin on a node after the plan, and would start it again beside Tandem.
func TestPausedByOperator(t *testing.T) {
	set := *plugin.DeepCopy()
	set.Spec.Template.Spec.NodeSelector = map[string]string{operatorLabel: "true"}
	w := newWorld(t, set)
	w.interfere = func(node string) {
		if node == "a" {
			w.label("b", operatorLabel, "paused-for-driver-upgrade")
			_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "nvidia", "plugin-b")
		}
	}
	w.wantError(w.migrate(w.nodes(false)), "node b: GPU Operator has paused its device plugin there", operatorLabel+"=paused-for-driver-upgrade")
	w.wantMoved("a=true")
	w.interfere = nil
	w.label("b", operatorLabel, "true")
	w.react("b")
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	w.wantMoved("b=true", "c=true")
}

// TestRefusals: what keeps a migration from starting, and what the administrator can do.
func TestRefusals(t *testing.T) {
	with := func(change func(*appsv1.DaemonSet)) []appsv1.DaemonSet {
		set := plugin.DeepCopy()
		change(set)
		return []appsv1.DaemonSet{*set}
	}
	for _, test := range []struct {
		name string
		sets []appsv1.DaemonSet
		want string
	}{
		{"none", nil, "no DaemonSet of NVIDIA's device plugin or DRA driver was found: name it with --daemonset"},
		{"Argo CD", with(func(set *appsv1.DaemonSet) {
			set.Annotations = map[string]string{"argocd.argoproj.io/tracking-id": "x"}
		}), "is managed by Argo CD"},
		{"Flux", with(func(set *appsv1.DaemonSet) { set.Labels = map[string]string{"helm.toolkit.fluxcd.io/name": "x"} }), "is managed by Flux, which would undo a change. Add {key: tandem-gpu.dev/migrated"},
		{"operator", with(func(set *appsv1.DaemonSet) {
			set.OwnerReferences = []metav1.OwnerReference{{Kind: "Thing", Name: "x", Controller: ptr.To(true)}}
		}), "is managed by Thing x"},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, test.sets...)
			w.wantError(w.migrate(w.nodes(false)), test.want)
			w.wantMoved()
		})
	}
	t.Run("Flux with the exclusion in Git", func(t *testing.T) {
		w := newWorld(t, with(func(set *appsv1.DaemonSet) {
			set.Labels = map[string]string{"helm.toolkit.fluxcd.io/name": "x"}
			if err := exclude(set); err != nil {
				t.Fatal(err)
			}
			set.Annotations = nil
		})...)
		before := w.set("plugin")
		if err := w.migrate(w.nodes(false)); err != nil {
			t.Fatal(err)
		}
		if err := w.migrate(w.nodes(true)); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, w.set("plugin")); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("no agent", func(t *testing.T) {
		w := newWorld(t, plugin)
		if err := w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "tandem-system", "agent-b"); err != nil {
			t.Fatal(err)
		}
		w.wantError(w.migrate(w.nodes(false)), "node b: no agent of Tandem runs on this node: install Tandem's chart")
		w.wantMoved()
	})
}

// TestFurtherDaemonSet: --daemonset names one that is not recognised.
func TestFurtherDaemonSet(t *testing.T) {
	set := *plugin.DeepCopy()
	set.Spec.Template.Spec.Containers[0].Name = "mine"
	w := newWorld(t, set)
	n := w.nodes(false)
	n.DaemonSets = []types.NamespacedName{{Namespace: "nvidia", Name: "plugin"}}
	if err := w.migrate(n); err != nil {
		t.Fatal(err)
	}
	w.wantMoved("a=true", "b=true", "c=true")
	n.DaemonSets[0].Name = "absent"
	_, err := n.Plan(t.Context())
	w.wantError(err, "--daemonset: nvidia/absent does not exist")
}

// TestInterrupted: a signal ends the wait at once, and the error says how to go on.
func TestInterrupted(t *testing.T) {
	w := newWorld(t, plugin)
	w.stuck["a"] = true
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		n := w.nodes(false)
		plan, err := n.Plan(ctx)
		must(w, plan, err)
		w.interfere = func(string) { cancel() }
		w.wantError(n.Apply(ctx, plan), "node a: ", "context canceled", "run migrate --apply again")
	})
}

// TestExcludeInclude: include undoes exclude for every form of affinity, and no empty term begins to match.
func TestExcludeInclude(t *testing.T) {
	exists := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "a", Operator: corev1.NodeSelectorOpExists}}}
	preferred := []corev1.PreferredSchedulingTerm{{Weight: 1, Preference: exists}}
	for _, affinity := range []*corev1.Affinity{
		nil,
		{PodAffinity: &corev1.PodAffinity{}},
		{NodeAffinity: &corev1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: preferred}},
		{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{exists, {}}}}},
	} {
		set := plugin.DeepCopy()
		set.Spec.Template.Spec.Affinity = affinity.DeepCopy()
		before := set.DeepCopy()
		for range 2 { // both are idempotent
			if err := exclude(set); err != nil {
				t.Fatal(err)
			}
		}
		served := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "", Label: withTandem}}}
		other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "", Label: returning}}}
		without := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{}}}
		d := daemonSet{DaemonSet: *set.DeepCopy()}
		admitsWithout, err := daemonSet{DaemonSet: *before}.runsOn(without)
		if err != nil {
			t.Fatal(err)
		}
		for node, want := range map[*corev1.Node]bool{served: false, other: true, without: admitsWithout} {
			if got, err := d.runsOn(node); err != nil || got != want {
				t.Errorf("%v: runs on %v: %t, %v", affinity, node.Labels, got, err)
			}
		}
		if !d.isPatched() {
			t.Errorf("%v: not recognised as patched", affinity)
		}
		for range 2 {
			if err := include(set); err != nil {
				t.Fatal(err)
			}
		}
		// A Helm upgrade restores the strategy and the template, and keeps the annotation.
		upgraded := before.DeepCopy()
		upgraded.Annotations = d.Annotations
		if err := exclude(upgraded); err != nil || upgraded.Spec.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType {
			t.Errorf("after an upgrade: %v, %v", upgraded.Spec.UpdateStrategy, err)
		}
		// Where it keeps the template, the strategy that it has set stays.
		newer := appsv1.DaemonSetUpdateStrategy{Type: appsv1.RollingUpdateDaemonSetStrategyType, RollingUpdate: &appsv1.RollingUpdateDaemonSet{MaxUnavailable: ptr.To(intstr.FromInt32(7))}}
		upgraded.Spec.UpdateStrategy = newer
		if err := include(upgraded); err != nil || !reflect.DeepEqual(upgraded.Spec.UpdateStrategy, newer) {
			t.Errorf("after an upgrade and back: %v, %v", upgraded.Spec.UpdateStrategy, err)
		}
		before.Annotations, set.Annotations = nil, nil
		if diff := cmp.Diff(before, set); diff != "" {
			t.Errorf("(-before +after)\n%s", diff)
		}
	}
}

// A DaemonSet runs on a node only if it tolerates the administrator's taints. Taints of Kubernetes itself are ignored.
func TestTaints(t *testing.T) {
	set := daemonSet{}
	set.Spec.Template.Spec.Tolerations = []corev1.Toleration{{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists}}
	for key, want := range map[string]bool{"nvidia.com/gpu": true, "team": false, "node.kubernetes.io/unschedulable": true} {
		for effect, keepsOff := range map[corev1.TaintEffect]bool{
			corev1.TaintEffectNoSchedule: true, corev1.TaintEffectNoExecute: true, corev1.TaintEffectPreferNoSchedule: false,
		} {
			node := &corev1.Node{Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: key, Effect: effect}}}}
			if got, err := set.runsOn(node); err != nil || got != (want || !keepsOff) {
				t.Errorf("taint %s:%s: runs %t, %v", key, effect, got, err)
			}
		}
	}
}
