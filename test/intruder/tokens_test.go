// SPDX-License-Identifier: Apache-2.0

package intruder

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/pkg/nodelabels"
)

var dry = []string{metav1.DryRunAll}

// ofCore is an event of the core API, which the agent's recorder writes.
func ofCore(component, host, kind, namespace, name string) *corev1.Event {
	e := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{GenerateName: "forged-", Namespace: namespace},
		InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: kind, Name: name, Namespace: namespace},
		Reason:         "Forged", Message: "m", Type: corev1.EventTypeWarning,
		Source:         corev1.EventSource{Component: component, Host: host},
		FirstTimestamp: metav1.Now(), LastTimestamp: metav1.Now(), Count: 1, ReportingController: component, ReportingInstance: host,
	}
	if kind == "Node" {
		e.InvolvedObject.Namespace = ""
	}
	return e
}

// ofEvents is one of events.k8s.io, which the controller's recorder writes.
func ofEvents(component, instance string) *eventsv1.Event {
	return &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "forged-", Namespace: "default"}, EventTime: metav1.NowMicro(),
		ReportingController: component, ReportingInstance: instance, Action: "Forge", Reason: "Forged", Type: corev1.EventTypeWarning, Note: "m",
		Regarding: corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Name: "victim", Namespace: "default"},
	}
}

func createCore(t *testing.T, client kubernetes.Interface, e *corev1.Event) func() error {
	return func() error {
		_, err := client.CoreV1().Events(e.Namespace).Create(t.Context(), e, metav1.CreateOptions{DryRun: dry})
		return err
	}
}

func createEvents(t *testing.T, client kubernetes.Interface, e *eventsv1.Event) func() error {
	return func() error {
		_, err := client.EventsV1().Events(e.Namespace).Create(t.Context(), e, metav1.CreateOptions{DryRun: dry})
		return err
	}
}

// An agent says what Tandem's agent on its node has to say, and nothing in another's name.
func TestForgedEvents(t *testing.T) {
	agent, controller := clientOf(t, as(t, agentAccount, agentPods[ownNode])), clientOf(t, as(t, controllerAccount, nil))
	unbound := clientOf(t, as(t, agentAccount, nil))
	kubelets, err := theClient.CoreV1().Events("default").Create(t.Context(), ofCore("kubelet", otherNode, "Pod", "default", "victim"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	oldStyle := ofCore("tandem", ownNode, "Pod", "default", "p")
	oldStyle.Source = corev1.EventSource{Component: "kubelet", Host: otherNode}
	combined, combinedElsewhere := ofCore("tandem", ownNode, "Node", "default", ownNode), ofCore("tandem", otherNode, "Node", "default", ownNode)
	for _, e := range []*corev1.Event{combined, combinedElsewhere} { // as client-go combines similar events
		e.ReportingController, e.ReportingInstance = "", ""
	}
	sourceless, hostless := combined.DeepCopy(), combined.DeepCopy()
	sourceless.Source = corev1.EventSource{}
	hostless.Source.Host = ""
	const ofAgents, ofControllers = "may write events of itself only", "the controller may write events of itself only"
	for name, c := range map[string]struct {
		try  func() error
		want string
	}{
		"of a pod":                  {createCore(t, agent, ofCore("tandem", ownNode, "Pod", "default", "p")), ""},
		"of a claim":                {createCore(t, agent, ofCore("tandem", ownNode, "ResourceClaim", "default", "c")), ""},
		"of its node":               {createCore(t, agent, ofCore("tandem", ownNode, "Node", "default", ownNode)), ""},
		"that combines others":      {createCore(t, agent, combined), ""},
		"that combines another's":   {createCore(t, agent, combinedElsewhere), ofAgents},
		"without a source":          {createCore(t, agent, sourceless), ofAgents},
		"without a host":            {createCore(t, agent, hostless), ofAgents},
		"as kubelet":                {createCore(t, agent, ofCore("kubelet", ownNode, "Pod", "default", "p")), ofAgents},
		"as kubelet, old style":     {createCore(t, agent, oldStyle), ofAgents},
		"as the scheduler":          {createCore(t, agent, ofCore("default-scheduler", "", "Pod", "default", "p")), ofAgents},
		"as another node's agent":   {createCore(t, agent, ofCore("tandem", otherNode, "Pod", "default", "p")), ofAgents},
		"of another node":           {createCore(t, agent, ofCore("tandem", ownNode, "Node", "default", otherNode)), "events of its node"},
		"of a Secret":               {createCore(t, agent, ofCore("tandem", ownNode, "Secret", "default", "s")), "events of its node"},
		"with a token of no pod":    {createCore(t, unbound, ofCore("tandem", "", "Pod", "default", "p")), "bound to its pod"},
		"of the controller":         {createEvents(t, controller, ofEvents("tandem-controller", "tandem-controller-x")), ""},
		"as the controller's agent": {createEvents(t, controller, ofEvents("tandem", ownNode)), ofControllers},
		"another's event": {func() error {
			_, err := agent.CoreV1().Events("default").Patch(t.Context(), kubelets.Name, types.MergePatchType, []byte(`{"message":"forged"}`), metav1.PatchOptions{DryRun: dry})
			return err
		}, ofAgents},
		"take over another's event": {func() error {
			_, err := agent.CoreV1().Events("default").Patch(t.Context(), kubelets.Name, types.MergePatchType,
				[]byte(`{"source":{"component":"tandem","host":"`+ownNode+`"},"reportingComponent":"tandem","reportingInstance":"`+ownNode+`"}`), metav1.PatchOptions{DryRun: dry})
			return err
		}, ofAgents},
	} {
		until(t, name, c.want, c.try)
	}
}

var gpunodes = schema.GroupVersionResource{Group: "tandem-gpu.dev", Version: "v1alpha1", Resource: "gpunodes"}

// createGPUNode creates the GPUNode of ownNode. It is no error that there is one: policies are asked first.
func createGPUNode(t *testing.T, client dynamic.Interface, dryRun []string, change func(map[string]any)) error {
	node := map[string]any{"apiVersion": "tandem-gpu.dev/v1alpha1", "kind": "GPUNode", "metadata": map[string]any{"name": ownNode}}
	if change != nil {
		change(node)
	}
	_, err := client.Resource(gpunodes).Create(t.Context(), &unstructured.Unstructured{Object: node}, metav1.CreateOptions{DryRun: dryRun})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// An agent does not end the maintenance of a GPU: neither by a write, nor by another GPUNode in place of the one that has it.
func TestMaintenanceStays(t *testing.T) {
	config := as(t, agentAccount, agentPods[ownNode])
	agent, err := dynamic.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	patch := func(patch string, subresources ...string) func() error {
		return func() error {
			options := metav1.PatchOptions{DryRun: dry}
			_, err := agent.Resource(gpunodes).Patch(t.Context(), ownNode, types.MergePatchType, []byte(patch), options, subresources...)
			return err
		}
	}
	create := func(change func(map[string]any)) func() error {
		return func() error { return createGPUNode(t, agent, dry, change) }
	}
	ownedBy := func(apiVersion, kind, name string) func() error {
		return create(func(o map[string]any) {
			o["metadata"].(map[string]any)["ownerReferences"] = []any{map[string]any{"apiVersion": apiVersion, "kind": kind, "name": name, "uid": "u"}}
		})
	}
	remove := func() error {
		return agent.Resource(gpunodes).Delete(t.Context(), ownNode, metav1.DeleteOptions{DryRun: dry})
	}
	until(t, "create its GPUNode", "", func() error { return createGPUNode(t, agent, nil, nil) })
	const (
		spec, owner   = "may not write the spec of a GPUNode", "may not write the owner"
		maintain, own = `{"spec":{"maintenance":[{"uuid":"GPU-0"}]}}`, `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"gone","uid":"u"}]}}`
	)
	for name, c := range map[string]struct {
		try  func() error
		want string
	}{
		"write the status":    {patch(`{"status":{"mode":"Dual"}}`, "status"), ""},
		"write the spec":      {patch(maintain), `cannot patch resource "gpunodes"`},
		"write the owner":     {patch(own), `cannot patch resource "gpunodes"`},
		"delete it":           {remove, `cannot delete resource "gpunodes"`},
		"create as its agent": {create(nil), ""},
		"create with a spec": {create(func(o map[string]any) {
			o["spec"] = map[string]any{"maintenance": []any{map[string]any{"uuid": "GPU-0"}}}
		}), spec},
		"create for its node":  {ownedBy("v1", "Node", ownNode), owner},
		"create for its slice": {ownedBy("resource.k8s.io/v1", "ResourceSlice", "own"), owner},
	} {
		until(t, name, c.want, c.try)
	}
	// The policy forbids the same where the account has a role of the user's own, with more rights.
	role := &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "gpunodes"},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{gpunodes.Group}, Resources: []string{gpunodes.Resource}, Verbs: []string{"*"}}},
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role.Name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: install.Namespace, Name: agentAccount}},
	}
	ctx, roles := context.WithoutCancel(t.Context()), theClient.RbacV1()
	t.Cleanup(func() {
		err := errors.Join(roles.ClusterRoleBindings().Delete(ctx, role.Name, metav1.DeleteOptions{}),
			roles.ClusterRoles().Delete(ctx, role.Name, metav1.DeleteOptions{}))
		if err != nil {
			t.Error(err)
		}
	})
	if _, err := roles.ClusterRoles().Create(ctx, role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := roles.ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, "write a label", "", patch(`{"metadata":{"labels":{"a":"b"}}}`))
	until(t, "write the spec, with the right", spec, patch(maintain))
	until(t, "write the owner, with the right", owner, patch(own))
	until(t, "delete it, with the right", "may not delete a GPUNode", remove)
	until(t, "delete all, with the right", "may not delete a GPUNode", func() error {
		return agent.Resource(gpunodes).DeleteCollection(t.Context(), metav1.DeleteOptions{DryRun: dry}, metav1.ListOptions{})
	})
}

// TestMaintenanceKeepsItsGPUNode from all users until it ends. The definition of GPUNode can be deleted all the same.
func TestMaintenanceKeepsItsGPUNode(t *testing.T) {
	config, err := theCluster.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	admin, err := dynamic.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	until(t, "create a GPUNode", "", func() error { return createGPUNode(t, admin, nil, nil) })
	write := func(entries string) error {
		patch := []byte(`{"spec":{"maintenance":[` + entries + `]}}`)
		_, err := admin.Resource(gpunodes).Patch(t.Context(), ownNode, types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	}
	until(t, "drain", "", func() error { return write(`{"uuid":"GPU-0"}`) })
	const want = "to end it, run: kubectl gpu undrain " + ownNode
	remove := func(dry []string) error {
		return admin.Resource(gpunodes).Delete(t.Context(), ownNode, metav1.DeleteOptions{DryRun: dry})
	}
	dry := []string{metav1.DryRunAll}
	until(t, "delete it", want, func() error { return remove(dry) })
	until(t, "delete all", want, func() error {
		return admin.Resource(gpunodes).DeleteCollection(t.Context(), metav1.DeleteOptions{DryRun: dry}, metav1.ListOptions{})
	})

	definitions := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	name := gpunodes.GroupResource().String()
	definition, err := admin.Resource(definitions).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := admin.Resource(definitions).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, "delete the definition", "not found", func() error {
		_, err := admin.Resource(definitions).Get(t.Context(), name, metav1.GetOptions{})
		return err
	})
	definition.SetResourceVersion("")
	definition.SetUID("")
	delete(definition.Object, "status")
	if _, err := admin.Resource(definitions).Create(t.Context(), definition, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, "create a GPUNode again", "", func() error { return createGPUNode(t, admin, nil, nil) })
	until(t, "drain again", "", func() error { return write(`{"uuid":"GPU-0"}`) })
	until(t, "delete it again", want, func() error { return remove(dry) })
	until(t, "undrain", "", func() error { return write("") })
	until(t, "delete it after undrain", "", func() error { return remove(nil) })
}

// An agent's objects end with it: no finalizer keeps them.
func TestFinalizers(t *testing.T) {
	config := as(t, agentAccount, agentPods[ownNode])
	agent := clientOf(t, config)
	dynamicAgent, err := dynamic.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "own"},
		Spec: resourceapi.ResourceSliceSpec{Driver: install.DriverName, NodeName: ptr.To(ownNode), Pool: resourceapi.ResourcePool{Name: ownNode, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "gpu-0"}}},
	}
	until(t, "own slice", "", func() error {
		_, err := agent.ResourceV1().ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{})
		return err
	})
	until(t, "own GPUNode", "", func() error { return createGPUNode(t, dynamicAgent, nil, nil) })
	patch := []byte(`{"metadata":{"finalizers":["example.com/stay"]}}`)
	const want = "may not set finalizers"
	until(t, "on a slice", want, func() error {
		_, err := agent.ResourceV1().ResourceSlices().Patch(t.Context(), slice.Name, types.MergePatchType, patch, metav1.PatchOptions{DryRun: dry})
		return err
	})
	until(t, "on a GPUNode", `cannot patch resource "gpunodes"`, func() error {
		_, err := dynamicAgent.Resource(gpunodes).Patch(t.Context(), ownNode, types.MergePatchType, patch, metav1.PatchOptions{DryRun: dry})
		return err
	})
	until(t, "on a new GPUNode", want, func() error {
		return createGPUNode(t, dynamicAgent, dry, func(o map[string]any) {
			o["metadata"].(map[string]any)["finalizers"] = []any{"example.com/stay"}
		})
	})
	until(t, "on a new slice", want, func() error {
		fresh := slice.DeepCopy()
		fresh.Name, fresh.Finalizers = "fresh", []string{"example.com/stay"}
		_, err := agent.ResourceV1().ResourceSlices().Create(t.Context(), fresh, metav1.CreateOptions{DryRun: dry})
		return err
	})
	// An agent goes on writing a slice that has another's finalizer.
	if _, err := theClient.ResourceV1().ResourceSlices().Patch(t.Context(), slice.Name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	for what, patch := range map[string]string{"write with another's finalizer": `{"metadata":{"labels":{"a":"b"}}}`, "remove it": `{"metadata":{"finalizers":[]}}`} {
		until(t, what, "", func() error {
			_, err := agent.ResourceV1().ResourceSlices().Patch(t.Context(), slice.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{DryRun: dry})
			return err
		})
	}
	if _, err := theClient.ResourceV1().ResourceSlices().Patch(t.Context(), slice.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":[]}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// The agent labels its own node with the labels of GPU Feature Discovery, and writes nothing else of nodes.
func TestNodeLabels(t *testing.T) {
	agent := clientOf(t, as(t, agentAccount, agentPods[ownNode]))
	patch := func(node, patch string) func() error {
		return func() error {
			_, err := agent.CoreV1().Nodes().Patch(t.Context(), node, types.MergePatchType, []byte(patch), metav1.PatchOptions{DryRun: dry})
			return err
		}
	}
	apply := func(node string) func() error {
		return func() error {
			labels := applycorev1.Node(node).WithLabels(map[string]string{"nvidia.com/gpu.count": "8"})
			_, err := agent.CoreV1().Nodes().Apply(t.Context(), labels, metav1.ApplyOptions{FieldManager: nodelabels.Manager, DryRun: dry})
			return err
		}
	}
	const others = "no labels of a node but those of GPU Feature Discovery"
	until(t, "apply its own", "", apply(ownNode))
	until(t, "apply another's", "may write labels of that node only", apply(otherNode))
	until(t, "create a node", `cannot create resource "nodes"`, apply("absent"))
	for what, c := range map[string]struct{ patch, want string }{
		"role":          {`{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`, others},
		"MIG manager":   {`{"metadata":{"labels":{"nvidia.com/mig.config":"all-disabled"}}}`, others},
		"GPU Operator":  {`{"metadata":{"labels":{"nvidia.com/gpu.deploy.driver":"false"}}}`, others},
		"configuration": {`{"metadata":{"labels":{"nvidia.com/device-plugin.config":"x"}}}`, others},
		"annotation":    {`{"metadata":{"annotations":{"a":"b"}}}`, "nothing of a node but labels"},
		"taint":         {`{"spec":{"taints":[{"key":"a","effect":"NoExecute"}]}}`, "nothing of a node but labels"},
	} {
		until(t, what, c.want, patch(ownNode, c.patch))
	}
	until(t, "status", "forbidden", func() error {
		_, err := agent.CoreV1().Nodes().Patch(t.Context(), ownNode, types.MergePatchType, []byte(`{"status":{"allocatable":{"nvidia.com/gpu":"0"}}}`), metav1.PatchOptions{DryRun: dry}, "status")
		return err
	})
}

// The controller makes its own Lease and no other: RBAC cannot restrict the creation to a name.
func TestLeases(t *testing.T) {
	controller := clientOf(t, as(t, controllerAccount, nil))
	create := func(name string) func() error {
		return func() error {
			lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}}
			_, err := controller.CoordinationV1().Leases(install.Namespace).Create(t.Context(), lease, metav1.CreateOptions{DryRun: dry})
			if apierrors.IsAlreadyExists(err) {
				return nil
			}
			return err
		}
	}
	until(t, "its own", "", create(controllerAccount))
	until(t, "another", "may create no Lease but "+controllerAccount, create("other"))
}

// The controller evicts the pod that it read, and none of the namespaces that keep the cluster alive.
func TestEvictions(t *testing.T) {
	controller := clientOf(t, as(t, controllerAccount, nil))
	grace := func(seconds int64) func(*metav1.DeleteOptions) {
		return func(o *metav1.DeleteOptions) { o.GracePeriodSeconds = &seconds }
	}
	asRead := func(*metav1.DeleteOptions) {}
	evict := func(namespace, name string, change func(*metav1.DeleteOptions)) func() error {
		pod := podIn(namespace, name)
		pod, err := theClient.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		eviction := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: pod.Name}, DeleteOptions: &metav1.DeleteOptions{
			DryRun: dry, Preconditions: &metav1.Preconditions{UID: &pod.UID},
		}}
		change(eviction.DeleteOptions)
		return func() error { return controller.CoreV1().Pods(namespace).EvictV1(t.Context(), eviction) }
	}
	until(t, "as read", "", evict("default", "as-read", asRead))
	until(t, "any of the name", "only with its UID as a precondition", evict("default", "of-the-name", func(o *metav1.DeleteOptions) { o.Preconditions = nil }))
	until(t, "at once", "own grace period", evict("default", "at-once", grace(0)))
	until(t, "later", "own grace period", evict("default", "later", grace(3600)))
	for _, namespace := range append([]string{install.Namespace}, systemNamespaces...) {
		until(t, namespace, "may evict no pod in the namespace "+namespace, evict(namespace, "victim", asRead))
	}
	until(t, "delete instead", "no pods but those of MPS daemons", func() error {
		return controller.CoreV1().Pods(install.Namespace).Delete(t.Context(), agentPods[otherNode].Name, metav1.DeleteOptions{DryRun: dry})
	})
}

// flowOf returns the UID of the FlowSchema by which a token's requests are queued.
func flowOf(t *testing.T, config *rest.Config) string {
	t.Helper()
	var uid string
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			answer, err := next.RoundTrip(r)
			if err == nil {
				uid = answer.Header.Get("X-Kubernetes-Pf-Flowschema-Uid")
			}
			return answer, err
		})
	})
	if _, err := clientOf(t, config).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	return uid
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Agents that send many requests delay neither the controller nor other accounts.
func TestFlows(t *testing.T) {
	for account, name := range map[string]string{agentAccount: "tandem", controllerAccount: "tandem-controller"} {
		schema, err := theClient.FlowcontrolV1().FlowSchemas().Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Error(err)
			continue
		}
		until(t, account, "", func() error {
			if got := flowOf(t, as(t, account, nil)); got != string(schema.UID) {
				return fmt.Errorf("requests are in the flow %s, not %s", got, schema.UID)
			}
			return nil
		})
	}
}

// TestWhatIsLeft is some of what SECURITY.md says that an attacker can still do. It fails when the page promises too little.
func TestWhatIsLeft(t *testing.T) {
	agent, controller := clientOf(t, as(t, agentAccount, agentPods[ownNode])), clientOf(t, as(t, controllerAccount, nil))
	all := metav1.ListOptions{}
	for name, try := range map[string]func() error{
		"agent: read pods of all namespaces": func() error { _, err := agent.CoreV1().Pods("").List(t.Context(), all); return err },
		"agent: read nodes":                  func() error { _, err := agent.CoreV1().Nodes().List(t.Context(), all); return err },
		"agent: say something of any pod":    createCore(t, agent, ofCore("tandem", ownNode, "Pod", "kube-system", "victim")),
		"controller: read claims":            func() error { _, err := controller.ResourceV1().ResourceClaims("").List(t.Context(), all); return err },
	} {
		until(t, name, "", try)
	}
	for name, client := range map[string]kubernetes.Interface{"agent": agent, "controller": controller} {
		if _, err := client.CoreV1().Secrets("default").List(t.Context(), all); !apierrors.IsForbidden(err) {
			t.Errorf("%s lists Secrets: %v", name, err)
		}
	}
}
