// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	fakediscovery "k8s.io/client-go/discovery/fake"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/simulated/models"
)

const (
	testResource = "nvidia.com/gpu"
	gib          = 1 << 30
)

// machine is a node with GPUs. Its GPUNode and its ResourceSlices are those that an agent writes.
type machine struct {
	name    string
	gpus    []device.GPU
	holds   []ledger.Hold
	claims  []v1alpha1.AllocatedClaim
	limits  device.Resources
	waiting string
	// seen is when the agent wrote the GPUNode, and since when it has waited.
	seen, since *metav1.Time
	// taints and labels are those of the Node; conflicts those of the ledger.
	taints    []corev1.Taint
	labels    map[string]string
	conflicts []ledger.Conflict
	excluded  string
	// maintenance are the entries of the GPUNode's spec.
	maintenance []v1alpha1.GPUMaintenance
	// rules are the DeviceTaintRules in the GPUNode's spec.
	rules []v1alpha1.RuleTaint
}

// h100s returns a machine with so many GPUs on two NUMA nodes, connected by NVLink.
func h100s(name string, n int) *machine {
	model, _ := models.Named("H100-80GB")
	m := &machine{name: name, limits: device.Resources{GPU: testResource}, labels: map[string]string{"nvidia.com/gpu.present": "true"}}
	for i := range n {
		m.gpus = append(m.gpus, device.GPU{
			UUID: fmt.Sprintf("GPU-%s-0000-4000-8000-%012d", fmt.Sprintf("%08x", len(name)), i), Index: i, Minor: i,
			NUMANode: i * 2 / n, ProductName: model.Product, MemoryBytes: model.Total.MemoryBytes, Profiles: model.Offered(), MIGCapable: true,
			ComputeCapability: "9.0", NVLinkDomain: "domain-" + name, PCIBusID: fmt.Sprintf("0000:%02x:00.0", 0x10+i),
		})
	}
	return m
}

func (m *machine) gpu(i int) *device.GPU { return &m.gpus[i] }

// pod lets a pod hold GPUs by limits.
func (m *machine) pod(namespace, name string, gpus ...int) *machine {
	for _, i := range gpus {
		m.holds = append(m.holds, ledger.Hold{
			Holder: ledger.Holder{Kind: ledger.KindPod, ID: m.gpus[i].UUID}, Device: m.gpus[i].Ref(), State: ledger.StateHeld, Resource: testResource,
			Pods: []ledger.Pod{{UID: "uid-" + name, Namespace: namespace, Name: name}},
		})
	}
	return m
}

// claim lets a claim of a pod hold devices.
func (m *machine) claim(namespace, name, pod string, refs ...device.Ref) *machine {
	for _, ref := range refs {
		m.holds = append(m.holds, ledger.Hold{
			Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "uid-" + name}, Device: ref, State: ledger.StateHeld, Namespace: namespace, Name: name,
			Pods: []ledger.Pod{{UID: "uid-" + pod, Namespace: namespace, Name: pod}},
		})
	}
	return m.allocated(namespace, name, refs...)
}

// allocated lets the scheduler allocate devices to a claim.
func (m *machine) allocated(namespace, name string, refs ...device.Ref) *machine {
	of := v1alpha1.AllocatedClaim{UID: types.UID("uid-" + name), Namespace: namespace, Name: name, Pools: []string{m.name}}
	for _, ref := range refs {
		d, _ := device.Inventory{GPUs: m.gpus}.ByRef(ref)
		of.Devices = append(of.Devices, d.Name())
		if d.GPU.Dynamic {
			of.Pools = []string{device.OwnPool(m.name, d.GPU)}
		}
	}
	m.claims = append(m.claims, of)
	return m
}

// partition makes a partition of a GPU, and returns its reference.
func (m *machine) partition(gpu int, profile string, start int, made bool) device.Ref {
	g := &m.gpus[gpu]
	g.MIGEnabled = true
	for _, p := range g.Possible() {
		if p.Profile == profile && p.Ref.Placement.Start == start {
			p.UUID, p.Made = fmt.Sprintf("MIG-%08d-0000-4000-8000-%012d", gpu, start), made
			g.Partitions = append(g.Partitions, p)
			slices.SortFunc(g.Partitions, func(a, b device.Partition) int { return a.Ref.Placement.Start - b.Ref.Placement.Start })
			return p.Ref
		}
	}
	panic("no such partition: " + profile)
}

func (m *machine) gpuNode() *v1alpha1.GPUNode {
	inventory := device.Inventory{GPUs: m.gpus}
	allocatable := map[string][]string{}
	offers, _ := m.limits.Offers(slices.DeleteFunc(slices.Clone(m.gpus), func(g device.GPU) bool { return g.Name() == m.excluded }))
	for _, o := range offers {
		held := slices.ContainsFunc(m.holds, func(h ledger.Hold) bool {
			return h.Device.Overlaps(o.Device.Ref()) && (h.Holder.Kind == ledger.KindClaim || h.State == ledger.StateDraining)
		})
		if !held && o.Device.Health().Healthy() {
			allocatable[o.Resource] = append(allocatable[o.Resource], o.ID())
		} else if allocatable[o.Resource] == nil {
			allocatable[o.Resource] = []string{}
		}
	}
	node := &v1alpha1.GPUNode{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "GPUNode"},
		ObjectMeta: metav1.ObjectMeta{Name: m.name},
		Spec:       v1alpha1.GPUNodeSpec{Claims: m.claims, Maintenance: m.maintenance, Taints: m.rules},
		Status: gpunode.Status(gpunode.Facts{
			Mode: "Dual", Limits: m.limits, Inventory: inventory, Holds: m.holds, Allocatable: allocatable, Waiting: m.waiting, Conflicts: m.conflicts,
			Maintenance:   m.maintenance,
			Taints:        m.tainted,
			Excluded:      func(g device.GPU) bool { return g.Name() == m.excluded },
			OfferedToPods: func(g device.GPU) bool { return g.Name() != m.excluded },
		}),
	}
	node.Status.Seen, node.Status.WaitingSince = m.seen, m.since
	return node
}

// maintain takes a GPU out of service.
func (m *machine) maintain(gpu int, reason string) *machine {
	since := metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	m.maintenance = append(m.maintenance, v1alpha1.GPUMaintenance{UUID: m.gpus[gpu].UUID, Reason: reason, Since: &since})
	return m
}

// taint adds what the controller writes of a DeviceTaintRule. Without a pool or a device the rule selects all of them.
func (m *machine) taint(rule string, effect v1alpha1.TaintEffect, pool, device string) *machine {
	since := metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	m.rules = append(m.rules, v1alpha1.RuleTaint{Rule: rule, Pool: pool, Device: device, Taint: v1alpha1.Taint{
		Key: "example.com/repair", Value: "fan", Effect: effect, Since: &since,
	}})
	return m
}

// tainted is what the agent makes of it.
func (m *machine) tainted(gpu device.GPU, name string) (taints []v1alpha1.DeviceTaint) {
	pool := m.name
	if gpu.Dynamic {
		pool = device.OwnPool(m.name, gpu)
	}
	for _, t := range m.rules {
		if t.Selects(pool, name) {
			taints = append(taints, v1alpha1.DeviceTaint{Rule: t.Rule, Taint: t.Taint})
		}
	}
	return taints
}

func (m *machine) maintained() map[string]bool {
	uuids := map[string]bool{}
	for _, entry := range m.maintenance {
		uuids[entry.UUID] = true
	}
	return uuids
}

func (m *machine) node() *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: m.name, Labels: m.labels}, Spec: corev1.NodeSpec{Taints: m.taints},
		Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("500Gi")}},
	}
}

// withoutNVLink is a node with a GPU that has no attribute for NVLink.
func withoutNVLink(name string) *machine {
	m := h100s(name, 1)
	m.gpu(0).NVLinkDomain, m.gpu(0).ProductName = "", "NVIDIA L4"
	return m
}

func (m *machine) slices() (objects []runtime.Object) {
	offer := driver.Offer{NodeName: m.name}
	pools, _ := offer.Pools(driver.Facts{
		Inventory: device.Inventory{GPUs: m.gpus}, Holds: m.holds, Claims: m.claims, Now: time.Now(), Maintenance: m.maintained(),
		Kept: driver.Capabilities{Taints: true, Counters: true, Shares: true},
	})
	for name, pool := range pools {
		for i, s := range pool.Slices {
			objects = append(objects, &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", strings.ReplaceAll(name, "/", "-"), i)},
				Spec: resourceapi.ResourceSliceSpec{
					Driver: config.Defaults().DriverName, NodeName: ptr.To(m.name), Devices: s.Devices, SharedCounters: s.SharedCounters,
					Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(pool.Slices))},
				},
			})
		}
	}
	return objects
}

// world is a cluster, and what its viewer may do.
type world struct {
	machines []*machine
	objects  []runtime.Object
	// denied are resources that the viewer may not read, namespaces those whose pods the viewer may list; "" is all.
	denied []string
	// deniedAll are resources that the viewer may not list in all namespaces.
	deniedAll   []string
	deniedVerbs []string
	namespaces  []string
	namespace   string
	given       bool
	style       overview.Style
	// scrape answers in place of the exporters' pods.
	scrape overview.Scraper
}

func deviceClass(name, expression string) *resourceapi.DeviceClass {
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.DeviceClassSpec{
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}},
	}}
}

// classes are those of the chart.
func classes() []runtime.Object {
	gpu := deviceClass("gpu.nvidia.com", "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'")
	quota := deviceClass("extended-resource.nvidia.com", "false")
	gpu.Spec.ExtendedResourceName, quota.Spec.ExtendedResourceName = ptr.To(testResource), ptr.To(testResource)
	return []runtime.Object{gpu, quota,
		deviceClass("mig.nvidia.com", "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig'")}
}

// plugin returns the plugin as a viewer of the world runs it.
func (w world) plugin(t *testing.T) (p *plugin, stdout, stderr *bytes.Buffer) {
	t.Helper()
	objects := slices.Concat(w.objects, classes())
	var nodes []runtime.Object
	for _, m := range w.machines {
		objects = append(objects, m.node())
		if m.limits.GPU == "" {
			continue
		}
		objects = append(objects, m.slices()...)
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(m.gpuNode())
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, &unstructured.Unstructured{Object: content})
	}
	client := fake.NewClientset(objects...)
	client.Discovery().(*fakediscovery.FakeDiscovery).FakedServerVersion = &version.Info{GitVersion: "v1.37.1"}
	client.Resources = []*metav1.APIResourceList{{GroupVersion: "resource.k8s.io/v1"}}
	definition, err := os.ReadFile("../../deployments/helm/tandem/files/tandem-gpu.dev_gpunodes.yaml")
	if err != nil {
		t.Fatal(err)
	}
	crd := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(definition, &crd.Object); err != nil {
		t.Fatal(err)
	}
	nodes = append(nodes, crd)
	objectsByKind := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{
		v1alpha1.Resource: "GPUNodeList",
		{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}: "CustomResourceDefinitionList",
	}, nodes...)
	client.PrependReactor("create", "selfsubjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		review := action.(clienttesting.CreateAction).GetObject().(*authorizationv1.SelfSubjectAccessReview)
		namespace := review.Spec.ResourceAttributes.Namespace
		review.Status.Allowed = slices.Contains(w.namespaces, namespace) || slices.Contains(w.namespaces, "")
		return true, review, nil
	})
	client.PrependReactor("create", "selfsubjectreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		review := action.(clienttesting.CreateAction).GetObject().(*authenticationv1.SelfSubjectReview)
		review.Status.UserInfo.Username = "jane"
		return true, review, nil
	})
	deny := func(action clienttesting.Action) (bool, runtime.Object, error) {
		of := action.GetResource()
		everywhere := slices.Contains(w.deniedAll, of.Resource) && action.GetVerb() == "list" && action.GetNamespace() == ""
		if !everywhere && !slices.Contains(w.denied, of.Resource) && !slices.Contains(w.deniedVerbs, action.GetVerb()) {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(of.GroupResource(), "", fmt.Errorf(
			"User %q cannot %s resource %q in API group %q at the cluster scope", "jane", action.GetVerb(), of.Resource, of.Group))
	}
	client.PrependReactor("*", "*", deny)
	objectsByKind.PrependReactor("*", "*", deny)
	streams, _, stdout, stderr := genericiooptions.NewTestIOStreams()
	namespace := w.namespace
	if namespace == "" {
		namespace = "ml"
	}
	return &plugin{streams: streams, style: w.style, errors: w.style, connect: func() (connection, error) {
		return connection{
			cluster: overview.Cluster{Client: client, Dynamic: objectsByKind, Scrape: w.scrape}, namespace: namespace, given: w.given,
			context: "production", server: "10.0.0.1:6443",
		}, nil
	}}, stdout, stderr
}

// run runs a command line and returns what a user sees.
func (w world) run(t *testing.T, args ...string) string {
	t.Helper()
	p, stdout, stderr := w.plugin(t)
	_ = p.execute(t.Context(), p.command(), args) // it prints the error
	return stdout.String() + stderr.String()
}

// pending returns a pod of namespace ml that waits.
func pending(name string, changes ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name, UID: types.UID("uid-" + name)},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}},
		Status:     corev1.PodStatus{Phase: corev1.PodPending},
	}
	for _, change := range changes {
		change(p)
	}
	return p
}

func byLimits(name string, n int64) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(name): *resource.NewQuantity(n, resource.DecimalSI)}
	}
}

func requesting(name corev1.ResourceName, amount string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{name: resource.MustParse(amount)}
	}
}

// byTemplate lets a pod have a claim of a template; made is the claim's name, empty while it does not exist.
func byTemplate(template, made string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To(template)}}
		if made != "" {
			p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: ptr.To(made)}}
		}
	}
}

func scheduler(message string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: message}}
	}
}

func owned(kind, name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind, Name: name, Controller: ptr.To(true)}}
	}
}

func on(node string, phase corev1.PodPhase) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.NodeName, p.Status.Phase = node, phase }
}

// spec requests devices of a class.
func spec(class string, change ...func(*resourceapi.ExactDeviceRequest)) resourceapi.ResourceClaimSpec {
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: class, Count: 1, AllocationMode: resourceapi.DeviceAllocationModeExactCount}
	for _, c := range change {
		c(exactly)
	}
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: exactly}}}}
}

func selector(expression string) func(*resourceapi.ExactDeviceRequest) {
	return func(r *resourceapi.ExactDeviceRequest) {
		r.Selectors = append(r.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: expression}})
	}
}

func memory(bytes int64) func(*resourceapi.ExactDeviceRequest) {
	return func(r *resourceapi.ExactDeviceRequest) {
		r.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
			"memory": *resource.NewQuantity(bytes, resource.BinarySI)}}
	}
}

func template(name string, s resourceapi.ResourceClaimSpec) *resourceapi.ResourceClaimTemplate {
	return &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name}, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: s},
	}
}

func claim(name string, s resourceapi.ResourceClaimSpec) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name, UID: types.UID("uid-" + name)}, Spec: s}
}

func event(kind, name, reason, message string) *corev1.Event {
	return &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name + "." + reason}, Reason: reason, Message: message,
		InvolvedObject: corev1.ObjectReference{Kind: kind, Namespace: "ml", Name: name, UID: types.UID("uid-" + name)},
	}
}
