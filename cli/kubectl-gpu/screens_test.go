// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/internal/golden"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// busy is a node on which each GPU has another state.
func busy() *machine {
	m := h100s("node-1", 8)
	m.pod("ml", "infer", 1).pod("web", "chat", 5)
	m.claim("ml", "train-0-gpu", "train-0", m.gpu(0).Ref(), m.gpu(2).Ref())
	m.allocated("ml", "train-1-gpu", m.gpu(3).Ref())
	m.claim("web", "old-gpu", "old", m.gpu(4).Ref())
	ending := &m.holds[len(m.holds)-1]
	ending.State, ending.WaitsFor = ledger.StateDraining, "process 4711 (python)"
	m.gpu(6).Health = device.Health{Reason: device.ReasonXID, XID: 79, Message: "XID 79: GPU has fallen off the bus"}
	return m
}

// partitioned is a node with static partitions on a GPU, and shared GPUs.
func partitioned() *machine {
	m := h100s("node-2", 4)
	m.limits.Strategy = device.MIGStrategyMixed
	m.claim("ml", "part-gpu", "part", m.partition(0, "3g.40gb", 0, false))
	m.partition(0, "1g.10gb", 6, false)
	two := m.partition(0, "2g.20gb", 4, false)
	m.holds = append(m.holds, ledger.Hold{
		Holder: ledger.Holder{Kind: ledger.KindPod, ID: "MIG"}, Device: two, State: ledger.StateHeld, Resource: "nvidia.com/mig-2g.20gb",
		Pods: []ledger.Pod{{UID: "uid-small", Namespace: "web", Name: "small"}},
	})
	m.share(1)
	m.shareOf("ml", "notebook-gpu", "notebook", 1, 10*gib)
	m.shareOf("web", "demo-gpu", "demo", 1, 20*gib)
	m.excluded = "gpu-3"
	return m
}

// share lets claims share a GPU by memory.
func (m *machine) share(gpu int) {
	m.gpu(gpu).Sharing = device.Sharing{Strategy: device.TimeSlicing, Claims: device.ByMemory}
}

func (m *machine) shareOf(namespace, name, pod string, gpu int, bytes uint64) {
	ref := m.gpu(gpu).Ref()
	m.claim(namespace, name, pod, ref)
	m.holds[len(m.holds)-1].Share = device.ShareOf(bytes, m.gpu(gpu).MemoryBytes)
	m.claims[len(m.claims)-1].Shares = append(m.claims[len(m.claims)-1].Shares, v1alpha1.AllocatedShare{Device: m.gpu(gpu).Name(), Memory: int64(bytes)})
}

func waiting(name string) *machine {
	m := h100s(name, 0)
	m.waiting = "no NVIDIA driver: /usr/lib, /run/nvidia/driver and /home/kubernetes/bin/nvidia have none"
	return m
}

// away is a node with GPUs and without an agent; cpu is one without GPUs.
func away(name string) *machine {
	return &machine{name: name, labels: map[string]string{"nvidia.com/gpu.present": "true"}}
}
func cpu(name string) *machine { return &machine{name: name} }

// full is a node whose GPUs all have a pod as holder.
func full(name string, n int) *machine {
	m := h100s(name, n)
	for i := range n {
		m.pod("ml", fmt.Sprintf("%s-pod-%d", name, i), i)
	}
	return m
}

func quota(name, key string, used, hard int64) *corev1.ResourceQuota {
	of := func(n int64) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceName(key): *resource.NewQuantity(n, resource.DecimalSI)}
	}
	return &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name}, Status: corev1.ResourceQuotaStatus{Hard: of(hard), Used: of(used)},
	}
}

// dynamicGPU is a node with one GPU that Tandem partitions, of which claims have two halves.
func dynamicGPU() *machine {
	m := h100s("node-1", 1)
	m.gpu(0).Dynamic = true
	m.claim("ml", "half-a", "a", m.partition(0, "3g.40gb", 0, true))
	m.claim("web", "half-b", "b", m.partition(0, "3g.40gb", 4, true))
	return m
}

func shared() *machine {
	m := h100s("node-1", 2)
	m.share(0)
	m.share(1)
	m.shareOf("ml", "a-gpu", "a", 0, 60*gib)
	m.shareOf("ml", "b-gpu", "b", 1, 50*gib)
	return m
}

func conflicted() *machine {
	m := full("node-1", 2)
	m.claims = nil
	m.allocated("ml", "late-gpu", m.gpu(0).Ref())
	m.conflicts = []ledger.Conflict{{
		UID: "uid-late-gpu", Namespace: "ml", Name: "late-gpu", Devices: []device.Ref{m.gpu(0).Ref()}, Names: []string{"gpu-0"}, PendingEviction: true,
		Message: "device gpu-0 of claim ml/late-gpu is held by a pod by its nvidia.com/gpu limit (held)",
	}}
	return m
}

// queued is a full cluster in which pods of several owners wait.
func queued() world {
	m := h100s("node-1", 8)
	for i := range 8 {
		m.claim("ml", fmt.Sprintf("train-%d-gpu", i), fmt.Sprintf("train-%d", i), m.gpu(i).Ref())
	}
	const all = "0/1 nodes are available: 1 cannot allocate all claims. still not schedulable, preemption: 0/1 nodes are available."
	age := func(d time.Duration) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(time.Now().Add(-d)) }
	}
	in := func(namespace string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Namespace = namespace } }
	w := world{machines: []*machine{m}, namespaces: []string{""}, objects: []runtime.Object{
		template("single", spec("gpu.nvidia.com")), template("b200", spec("gpu.nvidia.com", selector(`device.attributes["gpu.nvidia.com"].productName == "NVIDIA B200"`))),
		pending("notebook", byLimits(testResource, 1), in("web"), age(26*time.Hour)),
		pending("lost", byTemplate("singel", ""), age(20*time.Minute)),
		pending("big-0", byTemplate("b200", ""), scheduler(all), owned("StatefulSet", "big"), age(10*time.Minute)),
		pending("cpu", requesting("cpu", "1")),
	}}
	for i := range 5 {
		w.objects = append(w.objects, pending(fmt.Sprint("sweep-", i), byTemplate("single", ""), scheduler(all), owned("ReplicaSet", "sweep-77f"), age(3*time.Hour),
			func(p *corev1.Pod) { p.Labels = map[string]string{"pod-template-hash": "77f"} }))
	}
	return w
}

// whileHeld is a drain whose GPU is held at first.
func whileHeld(t *testing.T) string {
	m := h100s("node-1", 8).pod("ml", "infer", 3).maintain(3, "")
	p, stdout, stderr := world{machines: []*machine{m}}.plugin(t)
	c, err := p.open()
	if err != nil {
		t.Fatal(err)
	}
	looks := 0
	c.cluster.Dynamic.(*dynamicfake.FakeDynamicClient).PrependReactor("get", "gpunodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		if looks++; looks > 2 { // the first read is for the entry
			m.holds = nil
		}
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(m.gpuNode())
		return true, &unstructured.Unstructured{Object: content}, err
	})
	root := p.command()
	root.SetArgs([]string{"drain", "node-1/3", "--reason", "replace the fan"})
	if err := root.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	return stdout.String() + stderr.String()
}

// installed are the objects of a chart with an agent on node-1.
func installed() []runtime.Object {
	of := func(name, component string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "tandem-system", Name: name, Labels: map[string]string{
			"app.kubernetes.io/part-of": "tandem", "app.kubernetes.io/component": component, "app.kubernetes.io/version": "0.2.0",
		}}
	}
	ready := corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
	agent := &corev1.Pod{ObjectMeta: of("tandem-x7k2p", "kubelet-plugin"), Spec: corev1.PodSpec{NodeName: "node-1"}, Status: ready}
	agent.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", UID: "agents", Controller: ptr.To(true)}}
	set := &appsv1.DaemonSet{ObjectMeta: of("tandem", "kubelet-plugin"), Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: 1, CurrentNumberScheduled: 1}}
	set.UID, set.Spec.Template.Spec.ServiceAccountName = "agents", "tandem"
	controller := &appsv1.Deployment{ObjectMeta: of("tandem-controller", "controller"), Status: appsv1.DeploymentStatus{AvailableReplicas: 1}}
	controller.Spec.Template.Spec.ServiceAccountName = "tandem-controller"
	objects := []runtime.Object{agent, set, controller,
		&coordinationv1.Lease{ObjectMeta: of("tandem-controller", "controller"), Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To("tandem-controller-0")}},
	}
	for name, component := range map[string]string{"tandem": "kubelet-plugin", "tandem-controller": "controller"} {
		objects = append(objects, &rbacv1.ClusterRoleBinding{ObjectMeta: of(name, component), Subjects: []rbacv1.Subject{
			{Kind: rbacv1.ServiceAccountKind, Namespace: "tandem-system", Name: name}}})
	}
	for _, suffix := range []string{"-resourceslices", "-gpunode-status", "-gpunode-maintenance", "-resourceclaims", "-agent-events", "-node-labels", "-controller-gpunodes",
		"-controller-gpunode-taints", "-controller-pods", "-controller-evictions", "-controller-nodes", "-controller-leases", "-controller-protected", "-controller-events"} {
		objects = append(objects, &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: of("tandem"+suffix, "policy")}, &admissionv1.ValidatingAdmissionPolicyBinding{
			ObjectMeta: of("tandem"+suffix, "policy"), Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: "tandem" + suffix}})
	}
	return objects
}

// screens are what users see, by the name of the golden file.
func screens() map[string]func(*testing.T) string {
	const none = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/3 nodes are available."
	whole := world{machines: []*machine{busy(), partitioned(), waiting("node-3"), away("node-4"), cpu("cpu-1")}}
	in := func(w world, namespaces ...string) world {
		w.namespaces = namespaces
		return w
	}
	of := func(m *machine, objects ...runtime.Object) world {
		return world{machines: []*machine{m, cpu("cpu-1"), cpu("cpu-2")}, objects: objects, namespaces: []string{""}}
	}
	show := func(w world, args ...string) func(*testing.T) string {
		return func(t *testing.T) string { return w.run(t, args...) }
	}
	with := func(w world, change func(*world)) world {
		change(&w)
		return w
	}
	gone := h100s("node-1", 2).pod("ml", "infer", 1)
	gone.seen = &metav1.Time{Time: time.Date(2026, 1, 2, 18, 57, 0, 0, time.UTC)}
	failed := pending("infer-7xk2q", byLimits(testResource, 1), on("node-1", corev1.PodFailed), owned("ReplicaSet", "infer"), func(p *corev1.Pod) {
		p.Status.Reason, p.Status.Message = "UnexpectedAdmissionError", "Pod was rejected: Allocate failed due to rpc error: code = FailedPrecondition desc = "+
			"device GPU-0 is held by claim 5f2c (held), which is unexpected"
	})
	unhealthy := h100s("node-1", 1)
	unhealthy.gpu(0).Health = device.Health{Reason: device.ReasonXID, XID: 79, Message: "XID 79: GPU has fallen off the bus"}
	tainted := h100s("node-1", 2)
	tainted.taints = []corev1.Taint{{Key: "team", Value: "web", Effect: corev1.TaintEffectNoSchedule}}
	claimed := h100s("node-1", 2)
	claimed.claim("ml", "a-gpu", "a", claimed.gpu(0).Ref()).claim("web", "b-gpu", "b", claimed.gpu(1).Ref())
	maintained := full("node-1", 2).maintain(1, "replace the fan")
	maintained.holds = maintained.holds[1:]
	idle := h100s("node-1", 4).pod("web", "chat", 2)
	idle.claim("ml", "train-gpu", "train-0", idle.gpu(0).Ref(), idle.gpu(1).Ref())
	service := busy().maintain(0, "").maintain(7, "replace the fan")
	forged := h100s("node-1", 2).pod("ml", "infer", 0).pod("ml", "cache", 1).maintain(0, "").maintain(1, "")
	parts := partitioned().maintain(0, "firmware").maintain(1, "firmware")
	fans := h100s("node-1", 3).pod("ml", "infer", 0).taint("fans", v1alpha1.TaintNoSchedule, "", "gpu-1").
		taint("bus", v1alpha1.TaintNoExecute, "node-1", "gpu-2").taint("fans-2", v1alpha1.TaintNoSchedule, "", "gpu-2")
	slicesOf := partitioned()
	slicesOf.taint("fans", v1alpha1.TaintNoSchedule, "", "gpu-0-mig-1g10gb-19-6").taint("fans-2", v1alpha1.TaintNoSchedule, "", "gpu-1")
	possible := h100s("node-1", 1).taint("fans", v1alpha1.TaintNoSchedule, "node-1/gpu-00", "")
	possible.gpu(0).Dynamic = true
	draining := h100s("node-1", 1)
	draining.claim("ml", "old-gpu", "old", draining.gpu(0).Ref())
	draining.claims, draining.holds[0].State, draining.holds[0].WaitsFor = nil, ledger.StateDraining, "process 4711 (python, state D) of pod ml/old"
	return map[string]func(*testing.T) string{
		"ls":           show(whole, "ls"),
		"ls-wide":      show(whole, "ls", "node-1", "node-2", "-o", "wide"),
		"ls-yaml":      show(whole, "ls", "node-2", "-o", "yaml"),
		"ls-json":      show(whole, "ls", "node-3", "-o", "json"),
		"ls-namespace": show(with(whole, func(w *world) { w.given = true }), "ls"),
		"ls-node":      show(whole, "ls", "node-1"),
		"ls-all":       show(with(whole, func(w *world) { w.given = true }), "ls", "node-1", "-A"),
		"ls-colour":    show(with(whole, func(w *world) { w.style = overview.Style{Colour: true, UTF8: true} }), "ls", "node-1"),
		"ls-empty":     show(world{}, "ls"),
		"ls-idle":      show(of(h100s("node-1", 2)), "ls", "node-1"),
		"ls-denied":    show(with(whole, func(w *world) { w.denied = []string{"gpunodes"} }), "ls"),
		"ls-no-nodes":  show(with(whole, func(w *world) { w.denied = []string{"nodes"} }), "ls"),
		"ls-unknown":   show(whole, "ls", "node-9"),

		"top":           show(measured(whole), "top"),
		"top-node":      show(measured(world{machines: []*machine{idle}}), "top", "node-1"),
		"top-mig":       show(measured(whole), "top", "node-2"),
		"top-wide":      show(measured(whole), "top", "node-2", "-o", "wide"),
		"top-sort":      show(measured(whole), "top", "node-1", "node-2", "--sort-by", "util"),
		"top-json":      show(measured(world{machines: []*machine{h100s("node-1", 1), h100s("node-5", 1)}}), "top", "-o", "json"),
		"top-namespace": show(with(measured(whole), func(w *world) { w.given = true }), "top"),
		"top-none":      show(whole, "top", "node-1"),
		"top-no-pods":   show(with(measured(whole), func(w *world) { w.denied = []string{"pods"} }), "top", "node-1", "node-2"),
		"top-no-proxy": show(with(measured(whole), func(w *world) {
			w.scrape = func(context.Context, *corev1.Pod) ([]byte, error) {
				return nil, apierrors.NewForbidden(corev1.Resource("pods"), "dcgm-exporter-node-1", errors.New(`User "jane" cannot get resource "pods/proxy"`))
			}
		}), "top", "node-1"),
		"top-impostor": show(with(measured(whole), func(w *world) {
			w.objects = append(w.objects, exporter("web", "node-2"))
		}), "top", "node-1", "node-2"),
		"top-exporter-namespace": show(with(measured(whole), func(w *world) {
			w.objects = append(w.objects, exporter("web", "node-1"))
		}), "top", "node-1", "--exporter-namespace", "gpu-operator"),

		"node":         show(with(whole, func(w *world) { w.style = overview.Style{UTF8: true} }), "node", "node-1"),
		"node-mig":     show(with(whole, func(w *world) { w.style = overview.Style{UTF8: true} }), "node", "node-2"),
		"node-ascii":   show(whole, "node", "node-2"),
		"node-colour":  show(with(whole, func(w *world) { w.style = overview.Style{UTF8: true, Colour: true} }), "node", "node-2"),
		"node-dynamic": show(of(dynamicGPU()), "node", "node-1"),
		"node-waiting": show(whole, "node", "node-3"),
		"node-gone":    show(world{machines: []*machine{gone}}, "node", "node-1"),
		"node-away":    show(whole, "node", "node-4"),
		"node-denied":  show(with(whole, func(w *world) { w.denied = []string{"resourceslices"} }), "node", "node-1"),

		"ls-maintenance":      show(of(service), "ls", "node-1", "-o", "wide"),
		"ls-maintenance-yaml": show(of(maintained), "ls", "node-1", "-o", "yaml"),
		"node-maintenance":    show(with(of(parts), func(w *world) { w.style = overview.Style{UTF8: true} }), "node", "node-2"),
		"why-maintenance":     show(of(maintained, pending("late", byLimits(testResource, 2), scheduler(none))), "why", "late"),
		"why-maintenance-claim": show(of(h100s("node-1", 1).maintain(0, ""), pending("late", byTemplate("single", "late-gpu")),
			claim("late-gpu", spec("gpu.nvidia.com"))), "why", "late"),

		"ls-tainted":      show(of(fans), "ls", "node-1", "-o", "wide"),
		"ls-tainted-yaml": show(of(fans), "ls", "node-1", "-o", "yaml"),
		"top-tainted":     show(measured(of(fans)), "top", "node-1", "-o", "wide"),
		"node-tainted":    show(with(of(slicesOf), func(w *world) { w.style = overview.Style{UTF8: true} }), "node", "node-2"),
		"pending-tainted": show(of(fans, pending("late", byLimits(testResource, 1), scheduler(none))), "pending"),
		"doctor-tainted":  show(world{machines: []*machine{fans}, objects: installed()}, "doctor"),
		"why-tainted":     show(of(fans, pending("late", byLimits(testResource, 1), scheduler(none))), "why", "late"),
		"why-tainted-claim": show(of(fans, pending("late", byTemplate("single", "late-gpu")), claim("late-gpu", spec("gpu.nvidia.com"))),
			"why", "late"),
		"why-tainted-tolerant": show(of(fans, pending("late", byTemplate("single", "late-gpu")),
			claim("late-gpu", spec("gpu.nvidia.com", func(r *resourceapi.ExactDeviceRequest) {
				r.Tolerations = []resourceapi.DeviceToleration{{Key: "example.com/repair", Operator: resourceapi.DeviceTolerationOpExists}}
			}))), "why", "late"),
		"why-tainted-partition": show(of(possible, pending("late", byTemplate("part", "late-gpu")), claim("late-gpu", spec("mig.nvidia.com"))), "why", "late"),

		"drain":         show(of(service), "drain", "node-1/7"),
		"drain-held":    whileHeld,
		"drain-no-wait": show(of(busy()), "drain", "node-1", "--wait=false"),
		"drain-timeout": show(of(service), "drain", "node-1/gpu-0", "--timeout", "10ms"),
		"drain-refused": show(of(forged, pending("infer", byLimits(testResource, 1), on("node-2", corev1.PodRunning), owned("ReplicaSet", "infer")),
			pending("cache", on("node-1", corev1.PodRunning), owned("ReplicaSet", "cache"))), "drain", "node-1", "--evict"),
		"drain-unknown":    show(of(busy()), "drain", "node-1/8"),
		"drain-part":       show(of(partitioned()), "drain", "node-2/gpu-0-mig-1g10gb-19-6"),
		"drain-waiting":    show(whole, "drain", "node-3"),
		"drain-away":       show(whole, "drain", "node-4"),
		"drain-get-denied": show(with(of(busy()), func(w *world) { w.deniedVerbs = []string{"get"} }), "drain", "node-1/0"),
		"drain-denied":     show(with(of(busy()), func(w *world) { w.deniedVerbs = []string{"patch"} }), "drain", "node-1/0"),
		"undrain":          show(of(service), "undrain", "node-1"),
		"undrain-twice":    show(of(service), "undrain", "node-1/1"),

		"doctor":        show(world{machines: []*machine{busy(), away("node-4")}, objects: installed()}, "doctor"),
		"doctor-clean":  show(world{machines: []*machine{h100s("node-1", 8)}, objects: installed()}, "doctor"),
		"doctor-json":   show(world{machines: []*machine{away("node-4")}, objects: installed()}, "doctor", "-o", "json"),
		"doctor-denied": show(with(world{machines: []*machine{busy()}, objects: installed()}, func(w *world) { w.denied = []string{"pods", "leases"} }), "doctor"),

		"pending":             show(queued(), "pending"),
		"pending-wide":        show(queued(), "pending", "-o", "wide"),
		"pending-empty":       show(of(busy()), "pending"),
		"pending-own":         show(with(queued(), func(w *world) { w.deniedAll = []string{"pods"} }), "pending"),
		"pending-denied":      show(with(queued(), func(w *world) { w.denied = []string{"pods"} }), "pending"),
		"pending-no-gpunodes": show(with(queued(), func(w *world) { w.denied = []string{"gpunodes"} }), "pending"),
		"why-json":            show(of(full("node-1", 1), pending("late", byLimits(testResource, 1), scheduler(none))), "why", "late", "-o", "json"),
		"node-yaml":           show(of(h100s("node-1", 1)), "node", "node-1", "-o", "yaml"),
		"doctor-yaml":         show(world{machines: []*machine{away("node-4")}, objects: installed()}, "doctor", "-o", "yaml"),

		"why-full-limits":  show(of(full("node-1", 8), pending("late", byLimits(testResource, 1), scheduler(none))), "why", "late"),
		"why-full-claims":  show(of(claimed, pending("late", byTemplate("single", "late-gpu")), claim("late-gpu", spec("gpu.nvidia.com"))), "why", "late"),
		"why-other-users":  show(in(of(claimed, pending("late", byTemplate("single", "late-gpu")), claim("late-gpu", spec("gpu.nvidia.com"))), "ml"), "why", "late"),
		"why-taint":        show(of(tainted, pending("late", byLimits(testResource, 1), scheduler(none))), "why", "late"),
		"why-too-many":     show(of(h100s("node-1", 8), pending("late", byLimits(testResource, 16))), "why", "late"),
		"why-two-requests": show(of(h100s("node-1", 2), pending("late", byLimits(testResource, 2), byTemplate("single", "")), template("single", spec("gpu.nvidia.com"))), "why", "late"),
		"why-quota": show(of(h100s("node-1", 8), pending("late", byTemplate("single", "")), template("single", spec("gpu.nvidia.com")),
			quota("gpus", "requests."+testResource, 3, 3), pending("train", byLimits(testResource, 2), on("node-1", corev1.PodRunning)),
			pending("done", byLimits(testResource, 2), on("node-1", corev1.PodSucceeded)), claim("notebook", spec("gpu.nvidia.com")),
			event("Pod", "late", "FailedResourceClaimCreation",
				`(combined from similar events): PodResourceClaim gpu: failed to create ResourceClaim: resourceclaims "late-gpu-" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=3, limited: requests.nvidia.com/gpu=3`)), "why", "late"),
		"why-class": show(of(h100s("node-1", 8), pending("late", byTemplate("single", "late-gpu")), claim("late-gpu", spec("gpu.nvidia.co"))), "why", "late"),
		"why-selector": show(of(h100s("node-1", 8), pending("late", byTemplate("single", "late-gpu")),
			claim("late-gpu", spec("gpu.nvidia.com", selector(`device.attributes["gpu.nvidia.com"].productName == "NVIDIA B200"`)))), "why", "late"),
		"why-fails": show(of(h100s("node-1", 8), pending("late", byTemplate("single", "late-gpu")),
			claim("late-gpu", spec("gpu.nvidia.com", selector(`device.attributes["gpu.nvidia.com"].productNam == "NVIDIA H100"`)))), "why", "late"),
		"why-fails-some": show(world{machines: []*machine{h100s("node-1", 8), withoutNVLink("node-2")}, namespaces: []string{""}, objects: []runtime.Object{
			pending("late", byTemplate("single", "late-gpu")),
			claim("late-gpu", spec("gpu.nvidia.com", selector(`device.attributes["gpu.nvidia.com"].nvlinkDomain == "domain-node-1"`)))}}, "why", "late"),
		"why-constraint": show(of(h100s("node-1", 8), pending("late", byTemplate("single", "late-gpu")), claim("late-gpu", func() resourceapi.ResourceClaimSpec {
			s := spec("gpu.nvidia.com", func(r *resourceapi.ExactDeviceRequest) { r.Count = 8 })
			s.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: ptr.To[resourceapi.FullyQualifiedName]("resource.kubernetes.io/numaNode")}}
			return s
		}())), "why", "late"),
		"why-mig-limits": show(of(h100s("node-1", 8), pending("late", byLimits("nvidia.com/mig-1g.10gb", 1))), "why", "late"),
		"why-shares": show(of(h100s("node-1", 8), pending("late", byTemplate("share", "late-gpu")),
			claim("late-gpu", spec("gpu.nvidia.com", selector("device.allowMultipleAllocations"), memory(10*gib)))), "why", "late"),
		"why-misspelled":     show(of(h100s("node-1", 8), pending("late", byLimits("nvidia.com/gpus", 1))), "why", "late"),
		"why-other-resource": show(of(h100s("node-1", 8), pending("late", byLimits(testResource, 1), requesting("memory", "900Gi"), scheduler("0/3 nodes are available: 3 Insufficient memory. no new claims to deallocate."))), "why", "late"),
		"why-mistake":        show(of(h100s("node-1", 8), pending("late", byTemplate("single", "late-gpu")), claim("late-gpu", spec("gpu.nvidia.com", selector(`device.attributes[`)))), "why", "late"),
		"why-template":       show(of(h100s("node-1", 8), pending("late", byTemplate("singel", ""))), "why", "late"),
		"why-mig": show(of(dynamicGPU(), pending("late", byTemplate("half", "late-gpu")),
			claim("late-gpu", spec("mig.nvidia.com", selector(`device.attributes["gpu.nvidia.com"].profile == "2g.20gb"`)))), "why", "late"),
		"why-mig-never": show(of(dynamicGPU(), pending("late", byTemplate("half", "late-gpu")),
			claim("late-gpu", spec("mig.nvidia.com", selector(`device.attributes["gpu.nvidia.com"].profile == "5g.50gb"`)))), "why", "late"),
		"why-memory":    show(of(shared(), pending("late", byTemplate("share", "late-gpu")), claim("late-gpu", spec("gpu.nvidia.com", memory(40*gib)))), "why", "late"),
		"why-unhealthy": show(of(unhealthy, pending("late", byLimits(testResource, 1), scheduler(none))), "why", "late"),
		"why-draining":  show(of(draining, pending("late", byLimits(testResource, 1), scheduler(none))), "why", "late"),
		"why-conflict": show(of(conflicted(), pending("late", byTemplate("single", "late-gpu"), on("node-1", corev1.PodPending), owned("ReplicaSet", "late")),
			claim("late-gpu", spec("gpu.nvidia.com")), event("ResourceClaim", "late-gpu", "DeviceHeld", "device gpu-0 is held by a pod by its nvidia.com/gpu limit (held): the pod is evicted")), "why", "late"),
		"why-agent":  show(world{machines: []*machine{waiting("node-3"), away("node-4"), cpu("cpu-1")}, objects: []runtime.Object{pending("late", byLimits(testResource, 1))}}, "why", "late"),
		"why-failed": show(of(busy(), failed), "why", "infer-7xk2q"),
		"why-bare":   show(of(busy(), pending("infer-7xk2q", func(p *corev1.Pod) { *p = *failed; p.OwnerReferences = nil })), "why", "infer-7xk2q"),
		"why-running": show(of(busy(), pending("train-0", byTemplate("pair", "train-0-gpu"), on("node-1", corev1.PodRunning)), claim("train-0-gpu", spec("gpu.nvidia.com"))),
			"why", "train-0"),
		"why-starting": show(of(busy(), pending("late", byLimits(testResource, 1), on("node-1", corev1.PodPending), func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{
				Reason: "ImagePullBackOff", Message: "Back-off pulling image \"trainer:1\""}}}}
		})), "why", "late"),
		"why-not-served": show(of(busy(), pending("late", byLimits(testResource, 1), on("cpu-1", corev1.PodPending))), "why", "late"),
		"why-room":       show(of(h100s("node-1", 8), pending("late", byLimits(testResource, 1), scheduler("0/3 nodes are available: 3 Insufficient cpu."))), "why", "late"),
		"why-no-gpu":     show(of(h100s("node-1", 8), pending("late")), "why", "late"),
		"why-gated": show(of(h100s("node-1", 8), pending("late", byLimits(testResource, 1), func(p *corev1.Pod) {
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
		})), "why", "late"),
		"why-finished": show(of(h100s("node-1", 8), pending("late", byLimits(testResource, 1), on("node-1", corev1.PodSucceeded))), "why", "late"),
		"why-denied": show(with(of(full("node-1", 2), pending("late", byLimits(testResource, 1), scheduler(none)), quota("gpus", "requests."+testResource, 1, 4)), func(w *world) {
			w.denied, w.namespaces = []string{"gpunodes", "nodes", "resourceslices", "deviceclasses"}, []string{"ml"}
		}), "why", "late"),
		"why-unknown": show(of(busy()), "why", "nothing"),
	}
}

func TestScreens(t *testing.T) {
	for name, show := range screens() {
		t.Run(name, func(t *testing.T) { golden.Compare(t, filepath.Join("testdata", name+".txt"), []byte(show(t))) })
	}
}

// TestScreensInDocs: each screen of these pages is one of TestScreens, whose name the comment above it has.
func TestScreensInDocs(t *testing.T) {
	for _, page := range []string{"kubectl-gpu", "questions"} {
		t.Run(page, func(t *testing.T) { compareScreens(t, "../../docs/user/"+page+".md") })
	}
}

func compareScreens(t *testing.T, path string) {
	const begin = "<!-- screen: "
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	all := screens()
	var now bytes.Buffer
	parts := strings.Split(string(page), begin)
	now.WriteString(parts[0])
	for _, part := range parts[1:] {
		name, rest, _ := strings.Cut(part, " -->\n\n```\n")
		command, rest, _ := strings.Cut(rest, "\n")
		_, after, found := strings.Cut("\n"+rest, "\n```\n")
		if all[name] == nil || !found || !strings.HasPrefix(command, "$ kubectl gpu ") {
			t.Fatalf("%s: no screen after %q", path, name)
		}
		fmt.Fprintf(&now, "%s%s -->\n\n```\n%s\n%s```\n%s", begin, name, command, all[name](t), after)
	}
	if len(parts) < 5 {
		t.Errorf("%s has %d screens", path, len(parts)-1)
	}
	golden.Compare(t, path, now.Bytes())
}
