// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"
	fakediscovery "k8s.io/client-go/discovery/fake"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/internal/golden"
	buildversion "github.com/tandem-gpu/tandem/internal/version"
	"github.com/tandem-gpu/tandem/pkg/availability"
)

var now = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }

func meta(name, component string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "tandem-system", Name: name, Labels: map[string]string{
		"app.kubernetes.io/part-of": "tandem", "app.kubernetes.io/component": component, versionLabel: "0.2.0",
	}}
}

func agent(node string, ready corev1.ConditionStatus, since time.Duration) corev1.Pod {
	pod := corev1.Pod{
		ObjectMeta: meta("tandem-"+node, "kubelet-plugin"), Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "kubelet-plugin"}}},
		Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready, LastTransitionTime: ago(since)}}},
	}
	pod.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", UID: "agents", Controller: ptr.To(true)}}
	return pod
}

func event(node, reason, message string, before time.Duration) corev1.Event {
	return corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: node + reason}, InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: node},
		Reason: reason, Message: message, LastTimestamp: ago(before), Source: corev1.EventSource{Component: "tandem", Host: node}, Type: corev1.EventTypeWarning,
	}
}

// clean is an installation without a problem.
func clean() Facts {
	daemonSet := appsv1.DaemonSet{ObjectMeta: meta("tandem", "kubelet-plugin"), Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: 2, CurrentNumberScheduled: 2}}
	daemonSet.UID, daemonSet.Spec.Template.Spec.ServiceAccountName = "agents", "tandem"
	controller := appsv1.Deployment{ObjectMeta: meta("tandem-controller", "controller"), Status: appsv1.DeploymentStatus{AvailableReplicas: 1}}
	controller.Spec.Template.Spec.ServiceAccountName = "tandem-controller"
	f := Facts{
		Now: now, Client: "0.2.0", Kubernetes: "v1.37.1", ServesClaims: true, Definition: &Definition{"0.2.0", true},
		DaemonSets:  []appsv1.DaemonSet{daemonSet},
		Agents:      []corev1.Pod{agent("node-1", corev1.ConditionTrue, time.Hour), agent("node-2", corev1.ConditionTrue, time.Hour)},
		Deployments: []appsv1.Deployment{controller},
		Leases: map[string]coordinationv1.Lease{"tandem-system/tandem-controller": {
			ObjectMeta: metav1.ObjectMeta{Namespace: "tandem-system", Name: "tandem-controller"},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: ptr.To("tandem-controller-x"), RenewTime: &metav1.MicroTime{Time: now.Add(-time.Second)}},
		}},
		GPUNodes: []v1alpha1.GPUNode{{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}, {ObjectMeta: metav1.ObjectMeta{Name: "node-2"}}},
		Withheld: map[string]bool{}, Endpoints: map[string]int{"tandem-system/tandem-webhook": 1},
		Webhooks: []admissionv1.ValidatingWebhookConfiguration{{ObjectMeta: meta("tandem-webhook", "controller"), Webhooks: []admissionv1.ValidatingWebhook{{
			Name: "parameters.tandem-gpu.dev", ClientConfig: admissionv1.WebhookClientConfig{
				CABundle: []byte("x"), Service: &admissionv1.ServiceReference{Namespace: "tandem-system", Name: "tandem-webhook"}},
		}}}},
	}
	for _, node := range []string{"node-1", "node-2"} {
		f.Nodes = append(f.Nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node, Labels: map[string]string{"nvidia.com/gpu.present": "true"}}})
	}
	for _, suffix := range guards {
		f.Policies = append(f.Policies, admissionv1.ValidatingAdmissionPolicy{ObjectMeta: meta("tandem"+suffix, "x")})
		f.Bindings = append(f.Bindings, admissionv1.ValidatingAdmissionPolicyBinding{
			ObjectMeta: meta("tandem"+suffix, "x"), Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: "tandem" + suffix}})
	}
	return f
}

// faults are changes of a clean installation, each with what is found.
var faults = map[string]struct {
	change func(*Facts)
	// want are severity and object of the findings, in their order.
	want []string
}{
	"clean":         {func(*Facts) {}, nil},
	"not installed": {func(f *Facts) { *f = Facts{Kubernetes: "v1.37.1", ServesClaims: true} }, []string{"error cluster"}},
	"no binding": {func(f *Facts) {
		f.DaemonSets, f.Agents, f.Deployments, f.NoBinding = nil, nil, nil, []explain.Kind{KindDaemonSets, KindDeployments}
	}, []string{"error cluster"}},
	"no binding of the controller": {func(f *Facts) { f.Deployments, f.NoBinding = nil, []explain.Kind{KindDeployments} }, []string{"error cluster"}},
	"no DaemonSet":                 {func(f *Facts) { f.DaemonSets, f.Agents = nil, nil }, []string{"error cluster"}},
	"a named namespace": {func(f *Facts) {
		f.Agents, f.GPUNodes, f.NotRead = f.Agents[:1], f.GPUNodes[:1], []explain.NotRead{{Kind: KindOtherPods, Error: "no"}}
	}, nil},
	"old Kubernetes":      {func(f *Facts) { f.Kubernetes, f.ServesClaims = "v1.33.4-gke.1", false }, []string{"error cluster"}},
	"no claims":           {func(f *Facts) { f.ServesClaims = false }, []string{"error cluster"}},
	"another plugin":      {func(f *Facts) { f.Client = "0.3.0" }, []string{"warning daemonset tandem-system/tandem"}},
	"a development build": {func(f *Facts) { f.Client = "dev" }, nil},
	"an old controller": {func(f *Facts) { f.Deployments[0].Labels = map[string]string{versionLabel: "0.1.0"} },
		[]string{"warning deployment tandem-system/tandem-controller"}},
	"no definition": {func(f *Facts) { f.Definition = nil }, []string{"error customresourcedefinition gpunodes.tandem-gpu.dev"}},
	"an old definition": {func(f *Facts) { f.Definition = &Definition{Version: "0.1.0"} },
		[]string{"warning customresourcedefinition gpunodes.tandem-gpu.dev"}},
	"no node is selected": {func(f *Facts) { f.DaemonSets[0].Status = appsv1.DaemonSetStatus{}; f.Agents, f.GPUNodes = nil, nil },
		[]string{"error daemonset tandem-system/tandem", "error node node-1", "error node node-2"}},
	"pods are not created": {func(f *Facts) { f.DaemonSets[0].Status.CurrentNumberScheduled = 1 }, []string{"error daemonset tandem-system/tandem"}},
	"an init container fails": {func(f *Facts) {
		f.Agents[1] = agent("node-2", corev1.ConditionFalse, 20*time.Second)
		f.Agents[1].Status.InitContainerStatuses = []corev1.ContainerStatus{
			{Name: "done", Ready: true, LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1}}},
			{Name: "check", RestartCount: 2, State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 2, Reason: "Error"}}}}
		f.Agents[1].Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "kubelet-plugin", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "PodInitializing"}}}}
		f.GPUNodes[1].Status.Waiting = "the agent has stopped"
	}, []string{"error node node-2"}},
	"an agent crashes": {func(f *Facts) {
		f.Agents[1] = agent("node-2", corev1.ConditionFalse, time.Second)
		f.Agents[1].Status.ContainerStatuses = []corev1.ContainerStatus{{
			Name: "kubelet-plugin", RestartCount: 1, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, Reason: "OOMKilled"}},
		}}
	}, []string{"error node node-2"}},
	"an agent is silent": {func(f *Facts) {
		seen := ago(time.Hour)
		f.GPUNodes[1].Status.Seen = &seen
		f.GPUNodes[1] = availability.AsOf(f.Now, f.GPUNodes[1])
	}, []string{"error node node-2"}},
	"an agent is not ready": {func(f *Facts) {
		f.Agents[1] = agent("node-2", corev1.ConditionFalse, time.Hour)
		f.Events = []corev1.Event{event("node-2", "NoDriver", "no NVIDIA driver", time.Hour), event("node-2", "LedgerLocked", "another agent", 2*time.Hour)}
	}, []string{"error node node-2"}},
	"a kubelet without cgroups": {func(f *Facts) {
		f.Agents[1] = agent("node-2", corev1.ConditionFalse, time.Hour)
		f.Events = []corev1.Event{event("node-2", "NoPodCgroups", "GPUs of pods that have ended stay taken until the node reboots", time.Hour)}
	}, []string{"error node node-2"}},
	"an agent pulls its image": {func(f *Facts) {
		f.Agents[1] = agent("node-2", corev1.ConditionFalse, time.Hour)
		f.Agents[1].Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "kubelet-plugin", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff"}}}}
	}, []string{"error node node-2"}},
	"an agent starts": {func(f *Facts) { f.Agents[1] = agent("node-2", corev1.ConditionFalse, time.Minute) }, []string{"warning node node-2"}},
	"an agent does not end": {func(f *Facts) {
		seen := ago(time.Hour)
		f.Agents[1] = agent("node-2", corev1.ConditionFalse, time.Hour)
		f.Agents[1].DeletionTimestamp = ptr.To(ago(30 * time.Minute))
		f.GPUNodes[1].Status.Seen = &seen
		f.GPUNodes[1] = availability.AsOf(f.Now, f.GPUNodes[1])
	}, []string{"error node node-2"}},
	"an agent ends": {func(f *Facts) {
		f.Agents[1].DeletionTimestamp, f.GPUNodes[1].Status.Waiting = ptr.To(ago(time.Second)), availability.Stopped
	}, nil},
	"an agent without a GPUNode": {func(f *Facts) { f.GPUNodes = f.GPUNodes[:1] }, []string{"warning node node-2"}},
	"an agent is gone": {func(f *Facts) {
		f.Agents, f.GPUNodes[1].Spec.Maintenance = f.Agents[:1], []v1alpha1.GPUMaintenance{{UUID: "GPU-0"}}
	}, []string{"error node node-2"}},
	"no agent":  {func(f *Facts) { f.Agents, f.GPUNodes = f.Agents[:1], f.GPUNodes[:1] }, []string{"error node node-2"}},
	"no driver": {func(f *Facts) { f.GPUNodes[0].Status.Waiting = "no NVIDIA driver" }, []string{"error node node-1"}},
	"another driver": {func(f *Facts) {
		f.Withheld["node-1"] = true
		f.Events = []corev1.Event{event("node-1", "OtherDevicePlugin", "nvidia.sock serves GPUs", time.Minute)}
	}, []string{"error node node-1"}},
	"a rejected config": {func(f *Facts) {
		f.Events = []corev1.Event{event("node-1", "ConfigRejected", "sharing.replicas: -1", time.Minute)}
	}, []string{"warning node node-1"}},
	"runtimes that trust images": {func(f *Facts) {
		f.Nodes = append(f.Nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-3"}})
		for i, of := range []string{"containerd://2.2.4", "cri-o://1.34.3", "containerd://2.2.4"} {
			f.Nodes[i].Status.NodeInfo.ContainerRuntimeVersion = of
		}
	}, []string{"warning node node-1", "warning node node-2"}},
	"a runtime without the flaw": {func(f *Facts) { f.Nodes[0].Status.NodeInfo.ContainerRuntimeVersion = "containerd://2.4.2" }, nil},
	"a pause on request": {func(f *Facts) {
		paused := event("node-1", "DriverPaused", "No GPU is given to new pods and claims", time.Minute)
		paused.Type = corev1.EventTypeNormal
		f.Events = []corev1.Event{paused, event("node-2", "ConfigRejected", "sharing.replicas: -1", 2*time.Minute)}
	}, []string{"warning node node-2"}},
	"a config that was rejected before a restart": {func(f *Facts) { f.Events = []corev1.Event{event("node-1", "ConfigRejected", "x", 2*time.Hour)} }, nil},
	"an event of no interest":                     {func(f *Facts) { f.Events = []corev1.Event{event("node-1", "GPUUnhealthy", "x", time.Minute)} }, nil},
	"a fault": {func(f *Facts) {
		const reason = "XID: 79 at 2026-01-02T10:00:00Z: GPU has fallen off the bus (RESTART_BM)"
		f.GPUNodes[0].Status.Devices = []v1alpha1.DeviceStatus{
			{Name: "gpu-3", UnhealthyReason: reason},
			{Name: "gpu-3-mig", Parent: "gpu-3", UnhealthyReason: reason, Holders: []v1alpha1.DeviceHolder{{Pods: []v1alpha1.PodReference{{Namespace: "ml", Name: "train"}}}}},
		}
	}, []string{"warning gpu-3 of node node-1"}},
	"a fault of a partition": {func(f *Facts) {
		f.GPUNodes[0].Status.Devices = []v1alpha1.DeviceStatus{
			{Name: "gpu-3"}, {Name: "gpu-3-mig", Parent: "gpu-3", UnhealthyReason: "XID: 48 at 2026-01-02T10:00:00Z: Double bit ECC error"},
		}
	}, []string{"warning gpu-3-mig of node node-1"}},
	"no fault of the hardware": {func(f *Facts) {
		f.GPUNodes[0].Status.Devices = []v1alpha1.DeviceStatus{{Name: "gpu-3", UnhealthyReason: "NotRecordable: no space left"}}
	}, []string{"warning gpu-3 of node node-1"}},
	"maintenance": {func(f *Facts) {
		for i := range 8 {
			d := v1alpha1.DeviceStatus{Name: fmt.Sprintf("gpu-%d", i), Maintenance: &v1alpha1.DeviceMaintenance{Reason: "new firmware", Since: ptr.To(ago(time.Hour))}}
			if i == 3 {
				d.Maintenance = &v1alpha1.DeviceMaintenance{}
			}
			f.GPUNodes[0].Status.Devices = append(f.GPUNodes[0].Status.Devices, d)
		}
	}, []string{"note node node-1", "note node node-1"}},
	"taints": {func(f *Facts) {
		fan := v1alpha1.DeviceTaint{Rule: "fans", Taint: v1alpha1.Taint{Key: "example.com/repair", Effect: v1alpha1.TaintNoSchedule}}
		f.GPUNodes[0].Status.Devices = []v1alpha1.DeviceStatus{
			{Name: "gpu-0", Taints: []v1alpha1.DeviceTaint{fan}}, {Name: "gpu-1", Taints: []v1alpha1.DeviceTaint{fan}}, {Name: "gpu-2"},
		}
	}, []string{"note node node-1"}},
	"an old conflict": {func(f *Facts) {
		f.GPUNodes[0].Status.Conflicts = []v1alpha1.ConflictingClaim{
			{Namespace: "ml", Name: "old", Since: metav1.MicroTime{Time: now.Add(-time.Hour)}}, {Namespace: "ml", Name: "new", Since: metav1.MicroTime{Time: now}},
		}
	}, []string{"warning claim ml/old"}},
	"no controller":       {func(f *Facts) { f.Deployments = nil }, []string{"error cluster"}},
	"controller is away":  {func(f *Facts) { f.Deployments[0].Status.AvailableReplicas = 0 }, []string{"error deployment tandem-system/tandem-controller"}},
	"no controller leads": {func(f *Facts) { f.Leases = nil }, []string{"error deployment tandem-system/tandem-controller"}},
	"the leader is gone":  {func(f *Facts) { f.Leases["tandem-system/tandem-controller"].Spec.RenewTime.Time = now.Add(-time.Hour) }, []string{"error deployment tandem-system/tandem-controller"}},
	"no caBundle":         {func(f *Facts) { f.Webhooks[0].Webhooks[0].ClientConfig.CABundle = nil }, []string{"warning validatingwebhookconfiguration tandem-webhook"}},
	"no endpoint":         {func(f *Facts) { f.Endpoints = nil }, []string{"warning validatingwebhookconfiguration tandem-webhook"}},
	"no webhook":          {func(f *Facts) { f.Webhooks = nil }, nil},
	"no policies":         {func(f *Facts) { f.Policies, f.Bindings = nil, nil }, []string{"warning cluster"}},
	"a policy without":    {func(f *Facts) { f.Policies, f.Bindings = f.Policies[1:], f.Bindings[1:] }, []string{"warning cluster"}},
	"a policy not bound":  {func(f *Facts) { f.Bindings = f.Bindings[1:] }, []string{"warning validatingadmissionpolicy tandem-resourceslices"}},
	"policies not readable": {func(f *Facts) {
		f.Policies, f.Bindings, f.NotRead = nil, nil, []explain.NotRead{{Kind: KindPolicies, Error: "no"}}
	}, nil},
	"pods not readable":   {func(f *Facts) { f.Agents, f.NotRead = nil, []explain.NotRead{{Kind: KindPods, Error: "no"}} }, nil},
	"leases not readable": {func(f *Facts) { f.Leases, f.NotRead = nil, []explain.NotRead{{Kind: KindLeases, Error: "no"}} }, nil},
	"two": {func(f *Facts) { f.Deployments[0].Status.AvailableReplicas = 0; f.Endpoints = nil },
		[]string{"error deployment tandem-system/tandem-controller", "warning validatingwebhookconfiguration tandem-webhook"}},
}

func TestExamine(t *testing.T) {
	var all strings.Builder
	for _, name := range slices.Sorted(maps.Keys(faults)) {
		c := faults[name]
		f := clean()
		c.change(&f)
		found := Examine(f)
		var got []string
		for _, finding := range found {
			got = append(got, string(finding.Severity)+" "+finding.Object)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		fmt.Fprintf(&all, "== %s\n%s", name, Text(f, found))
	}
	golden.Compare(t, filepath.Join("testdata", "findings.txt"), []byte(all.String()))
}

var notInAnchor = regexp.MustCompile(`[^a-z0-9 -]`)

// Each page and each heading that a finding names exists, and so does each event that it would quote.
func TestPagesExist(t *testing.T) {
	pages := map[string]bool{}
	for _, c := range faults {
		f := clean()
		c.change(&f)
		for _, finding := range Examine(f) {
			page, ours := strings.CutPrefix(finding.Page, buildversion.Page(f.Client, ""))
			if !ours {
				t.Errorf("%s is not of version %s", finding.Page, f.Client)
			}
			pages[page] = true
		}
	}
	for _, page := range []string{pageInstallation, pagePods, pageInstall, pageVersions, pageHealth, pageTaints, pageDrain} {
		if !pages[page] {
			t.Errorf("no finding of TestExamine names %s", page)
		}
	}
	for page := range pages {
		path, anchor, _ := strings.Cut(page, "#")
		text, err := os.ReadFile(filepath.Join("..", "..", path))
		if err != nil {
			t.Fatal(err)
		}
		found := anchor == ""
		for line := range strings.Lines(string(text)) {
			heading, is := strings.CutPrefix(strings.TrimLeft(line, "#"), " ")
			found = found || is && strings.HasPrefix(line, "#") &&
				strings.ReplaceAll(notInAnchor.ReplaceAllString(strings.ToLower(strings.TrimSpace(heading)), ""), " ", "-") == anchor
		}
		if !found {
			t.Errorf("%s has no heading %s", path, anchor)
		}
	}
	table, err := os.ReadFile(filepath.Join("..", "..", "docs/user/troubleshooting.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, reason := range telling {
		if !strings.Contains(string(table), "`"+reason+"`") {
			t.Errorf("troubleshooting.md has no event %s", reason)
		}
	}
}

// Read finds a clean installation clean, and says what it may not read.
func TestRead(t *testing.T) {
	f := clean()
	for _, label := range explain.GPULabels {
		metav1.SetMetaDataLabel(&f.Nodes[0].ObjectMeta, label, "true") // read once
	}
	var objects []runtime.Object
	for i := range f.DaemonSets {
		objects = append(objects, &f.DaemonSets[i], &f.Deployments[i])
	}
	for i := range f.Agents {
		objects = append(objects, &f.Agents[i], &f.Nodes[i])
	}
	for i := range f.Policies {
		objects = append(objects, &f.Policies[i], &f.Bindings[i])
	}
	for _, lease := range f.Leases {
		objects = append(objects, &lease)
	}
	for name, component := range map[string]string{"tandem": "kubelet-plugin", "tandem-controller": "controller"} {
		objects = append(objects, &rbacv1.ClusterRoleBinding{ObjectMeta: meta(name, component), Subjects: []rbacv1.Subject{
			{Kind: rbacv1.ServiceAccountKind, Namespace: "tandem-system", Name: name}}})
	}
	// What a tenant creates with Tandem's labels is not Tandem's.
	pod, set, deployment := agent("node-9", corev1.ConditionFalse, time.Hour), f.DaemonSets[0].DeepCopy(), f.Deployments[0].DeepCopy()
	pod.Namespace, set.Namespace, deployment.Namespace = "aaa-tenant", "aaa-tenant", "aaa-tenant"
	deployment.Status.AvailableReplicas = 0
	unowned := agent("node-8", corev1.ConditionFalse, time.Hour)
	unowned.OwnerReferences = nil
	objects = append(objects, &pod, set, deployment, &unowned)
	stray := event("node-1", "OtherDevicePlugin", "nvidia.sock", time.Minute)
	objects = append(objects, &f.Webhooks[0], &stray, &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "tandem-system", Name: "tandem-webhook-1", Labels: map[string]string{"kubernetes.io/service-name": "tandem-webhook"}},
		Endpoints:  []discoveryv1.Endpoint{{Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}}, {Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(false)}}},
	}, &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "s"}, Spec: resourceapi.ResourceSliceSpec{
		Driver: "gpu.nvidia.com", NodeName: ptr.To("node-1"), Devices: []resourceapi.Device{{Name: "gpu-0", Taints: []resourceapi.DeviceTaint{{Key: withheldTaint, Value: withheld}}}},
	}})
	definition, err := os.ReadFile("../../deployments/helm/tandem/files/tandem-gpu.dev_gpunodes.yaml")
	if err != nil {
		t.Fatal(err)
	}
	client := fake.NewClientset(objects...)
	client.Discovery().(*fakediscovery.FakeDiscovery).FakedServerVersion = &version.Info{GitVersion: "v1.37.1"}
	client.Resources = []*metav1.APIResourceList{{GroupVersion: "resource.k8s.io/v1"}}
	crd := decode(t, definition)
	crd.SetLabels(map[string]string{versionLabel: "0.2.0"})
	dynamic := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{
		v1alpha1.Resource: "GPUNodeList", definitions: "CustomResourceDefinitionList",
	}, crd, decode(t, []byte("{apiVersion: tandem-gpu.dev/v1alpha1, kind: GPUNode, metadata: {name: node-1}}")),
		decode(t, []byte("{apiVersion: tandem-gpu.dev/v1alpha1, kind: GPUNode, metadata: {name: node-2}}")))
	c := overview.Cluster{Client: client, Dynamic: dynamic, DriverName: "gpu.nvidia.com", Clock: clockAt(t, now)}
	got, err := Read(t.Context(), c, "", "0.2.0")
	if err != nil || len(got.NotRead) > 0 {
		t.Fatal(err, got.NotRead)
	}
	if len(got.DaemonSets) != 1 || len(got.Deployments) != 1 || len(got.Agents) != 2 || len(got.Nodes) != 2 || len(got.Leases) != 1 || got.Endpoints["tandem-system/tandem-webhook"] != 1 || *got.Definition != *f.Definition || !got.Withheld["node-1"] {
		t.Errorf("read %+v", got)
	}
	// Any user who may create events in namespace default could have written the event: doctor quotes it, and takes no advice from it.
	found := Examine(got)
	if len(found) != 1 || found[0].Object != "node node-1" || !strings.Contains(found[0].Problem, "an event says OtherDevicePlugin: nvidia.sock (not only agents can") ||
		!strings.Contains(found[0].Action, "that the log of the node's agent names") {
		t.Errorf("found %+v", found)
	}
	named, err := Read(t.Context(), c, "tandem-system", "0.2.0")
	if err != nil || len(named.DaemonSets) != 1 || len(named.Agents) != 2 || len(named.Deployments) != 1 || !slices.ContainsFunc(named.NotRead, func(n explain.NotRead) bool {
		return n.Kind == KindOtherPods
	}) {
		t.Errorf("read %+v, %v", named, err)
	}
	if _, err := Read(t.Context(), c, "default", "0.2.0"); err == nil || err.Error() != "namespace default has no agents of Tandem" {
		t.Errorf("a namespace without agents: %v", err)
	}
	deny := func(action clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(action.GetResource().GroupResource(), "", errors.New("no"))
	}
	client.PrependReactor("list", "*", deny)
	dynamic.PrependReactor("*", "*", deny)
	got, err = Read(t.Context(), c, "", "0.2.0")
	if found := Examine(got); err != nil || len(got.NotRead) < 9 || len(found) > 0 {
		t.Errorf("without rights: %v, not read %v, found %+v", err, got.NotRead, found)
	}
}

// TestReadWithoutBinding: the CRD and GPUNodes are there, and the agents are not found by their rights: their binding was deleted, the chart was
// uninstalled, or it was installed with rbac.create=false.
func TestReadWithoutBinding(t *testing.T) {
	definition, err := os.ReadFile("../../deployments/helm/tandem/files/tandem-gpu.dev_gpunodes.yaml")
	if err != nil {
		t.Fatal(err)
	}
	f := clean()
	f.GPUNodes[0].TypeMeta = metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "GPUNode"}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&f.GPUNodes[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, binding := range []string{"", "kubelet-plugin", "controller"} {
		objects := []runtime.Object{&f.DaemonSets[0], &f.Deployments[0], &f.Agents[0], &f.Nodes[0]}
		for name, component := range map[string]string{"tandem": "kubelet-plugin", "tandem-controller": "controller"} {
			if component == binding {
				objects = append(objects, &rbacv1.ClusterRoleBinding{ObjectMeta: meta(name, component), Subjects: []rbacv1.Subject{
					{Kind: rbacv1.ServiceAccountKind, Namespace: "tandem-system", Name: name}}})
			}
		}
		client := fake.NewClientset(objects...)
		client.Discovery().(*fakediscovery.FakeDiscovery).FakedServerVersion = &version.Info{GitVersion: "v1.37.1"}
		client.Resources = []*metav1.APIResourceList{{GroupVersion: "resource.k8s.io/v1"}}
		dynamic := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{
			v1alpha1.Resource: "GPUNodeList", definitions: "CustomResourceDefinitionList",
		}, decode(t, definition), &unstructured.Unstructured{Object: content})
		read, err := Read(t.Context(), overview.Cluster{Client: client, Dynamic: dynamic, DriverName: "gpu.nvidia.com"}, "", "0.2.0")
		if err != nil || len(read.GPUNodes) != 1 {
			t.Fatalf("read %+v, %v", read, err)
		}
		found := Examine(read)
		if !slices.ContainsFunc(found, func(f Finding) bool {
			return f.Severity == Error && strings.HasPrefix(f.Problem, "no ClusterRoleBinding has the labels of Tandem's") && strings.Contains(f.Action, "add -n")
		}) || slices.ContainsFunc(found, func(f Finding) bool { return strings.Contains(f.Action, "delete gpunode") }) {
			t.Errorf("binding of %q: found %+v", binding, found)
		}
	}
}

func decode(t *testing.T, definition []byte) *unstructured.Unstructured {
	t.Helper()
	object := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(definition, &object.Object); err != nil {
		t.Fatal(err)
	}
	return object
}

// clockAt is the clock of an API server that answered at that time.
func clockAt(t *testing.T, at time.Time) *overview.Clock {
	t.Helper()
	answer := httptest.NewRecorder()
	answer.Header().Set("Date", at.UTC().Format(http.TimeFormat))
	clock := &overview.Clock{}
	if _, err := clock.Watch(answered{answer.Result()}).RoundTrip(nil); err != nil {
		t.Fatal(err)
	}
	return clock
}

// answered is a transport with one answer.
type answered struct{ response *http.Response }

func (a answered) RoundTrip(*http.Request) (*http.Response, error) { return a.response, nil }
