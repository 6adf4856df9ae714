// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/cli/workloads"
)

const (
	ours = "app.kubernetes.io/part-of=tandem"
	// withheldTaint is the taint of devices that no new holder gets (pkg/device: TaintUnhealthy and its value Withheld).
	withheldTaint, withheld = "tandem-gpu.dev/unhealthy", "Withheld"
	// mostEvents bounds the events that are read.
	mostEvents = 5000
)

var definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// Read reads what Examine needs. It writes nothing. What the viewer may not read is in NotRead. namespace is that of the release. If it is
// empty, Read finds the releases. A namespace without agents is an error: whatever Examine said about it would mislead.
func Read(ctx context.Context, c overview.Cluster, namespace, client string) (Facts, error) {
	f := Facts{Client: client, Leases: map[string]coordinationv1.Lease{}, Withheld: map[string]bool{}, Endpoints: map[string]int{}}
	server, err := c.Client.Discovery().ServerVersion()
	if err != nil {
		return f, fmt.Errorf("read the API server's version: %w", err)
	}
	f.Kubernetes, f.Now = server.GitVersion, c.Clock.Now()
	_, err = c.Client.Discovery().ServerResourcesForGroupVersion("resource.k8s.io/v1")
	f.ServesClaims = err == nil
	read := func(kind explain.Kind, err error) bool {
		if err != nil {
			f.NotRead = append(f.NotRead, explain.NotRead{Kind: kind, Error: explain.OneLine(err.Error())})
		}
		return err == nil
	}
	f.DaemonSets, err = workloads.DaemonSets(ctx, c.Client, namespace)
	switch {
	case err == nil && namespace != "" && len(f.DaemonSets) == 0:
		return f, fmt.Errorf("namespace %s has no agents of Tandem", namespace)
	case err == nil:
		f.Agents, err = workloads.Pods(ctx, c.Client, f.DaemonSets, "")
		read(KindPods, err)
	case errors.Is(err, workloads.ErrNoBinding):
		f.NoBinding = append(f.NoBinding, KindDaemonSets)
	default:
		read(KindDaemonSets, err)
		read(KindPods, err)
	}
	if namespace != "" {
		f.NotRead = append(f.NotRead, explain.NotRead{Kind: KindOtherPods, Error: "--namespace names one, so that nodes without an agent are not found"})
	}
	f.readController(ctx, c, namespace, read)
	if list, err := c.Client.CoreV1().Events("").List(ctx, metav1.ListOptions{
		Limit: mostEvents, FieldSelector: fields.Set{"involvedObject.kind": "Node", "type": corev1.EventTypeWarning}.String(),
	}); read(explain.KindEvents, err) {
		for _, event := range list.Items {
			if event.Source.Component == "tandem" && event.InvolvedObject.Kind == "Node" {
				f.Events = append(f.Events, event)
			}
		}
	}
	f.readAdmission(ctx, c, read)
	f.readNodes(ctx, c, read)
	return f, nil
}

func (f *Facts) readController(ctx context.Context, c overview.Cluster, namespace string, read func(explain.Kind, error) bool) {
	var err error
	if f.Deployments, err = workloads.Deployments(ctx, c.Client, namespace); errors.Is(err, workloads.ErrNoBinding) {
		f.NoBinding = append(f.NoBinding, KindDeployments)
		return
	}
	if !read(KindDeployments, err) {
		return
	}
	for _, d := range f.Deployments {
		lease, err := c.Client.CoordinationV1().Leases(d.Namespace).Get(ctx, d.Name, metav1.GetOptions{})
		if err == nil {
			f.Leases[d.Namespace+"/"+d.Name] = *lease
		} else if !apierrors.IsNotFound(err) {
			read(KindLeases, err)
		}
	}
}

func (f *Facts) readAdmission(ctx context.Context, c overview.Cluster, read func(explain.Kind, error) bool) {
	admission, selected := c.Client.AdmissionregistrationV1(), metav1.ListOptions{LabelSelector: ours}
	if list, err := admission.ValidatingWebhookConfigurations().List(ctx, selected); read(KindWebhooks, err) {
		f.Webhooks = list.Items
	}
	for _, configuration := range f.Webhooks {
		for _, w := range configuration.Webhooks {
			if w.ClientConfig.Service == nil {
				continue
			}
			of := *w.ClientConfig.Service
			list, err := c.Client.DiscoveryV1().EndpointSlices(of.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=" + of.Name})
			if !read(KindEndpoints, err) {
				continue
			}
			for _, slice := range list.Items {
				for _, endpoint := range slice.Endpoints {
					if ptr.Deref(endpoint.Conditions.Ready, true) {
						f.Endpoints[of.Namespace+"/"+of.Name]++
					}
				}
			}
		}
	}
	if list, err := admission.ValidatingAdmissionPolicies().List(ctx, selected); read(KindPolicies, err) {
		f.Policies = list.Items
	}
	if list, err := admission.ValidatingAdmissionPolicyBindings().List(ctx, selected); read(KindBindings, err) {
		f.Bindings = list.Items
	}
}

func (f *Facts) readNodes(ctx context.Context, c overview.Cluster, read func(explain.Kind, error) bool) {
	object, err := c.Dynamic.Resource(definitions).Get(ctx, "gpunodes."+v1alpha1.GroupVersion.Group, metav1.GetOptions{})
	if err == nil {
		f.Definition = &Definition{Version: object.GetLabels()[versionLabel], Maintenance: hasMaintenance(object)}
	} else if !apierrors.IsNotFound(err) {
		read(KindDefinitions, err)
	}
	if f.Definition != nil || err != nil && !apierrors.IsNotFound(err) {
		_, err := c.EachGPUNode(ctx, func(n v1alpha1.GPUNode) { f.GPUNodes = append(f.GPUNodes, n) })
		read(explain.KindGPUNodes, err)
	}
	read(explain.KindNodes, c.EachNodeWithGPUs(ctx, func(n *corev1.Node) { f.Nodes = append(f.Nodes, *n) }))
	if !f.ServesClaims {
		return
	}
	read(explain.KindSlices, c.EachSlice(ctx, func(slice resourceapi.ResourceSlice) {
		for _, d := range slice.Spec.Devices {
			for _, taint := range d.Taints {
				if taint.Key == withheldTaint && taint.Value == withheld && slice.Spec.NodeName != nil {
					f.Withheld[*slice.Spec.NodeName] = true
				}
			}
		}
	}))
}

// hasMaintenance reports whether a version of the definition has spec.maintenance.
func hasMaintenance(definition *unstructured.Unstructured) bool {
	versions, _, _ := unstructured.NestedSlice(definition.Object, "spec", "versions")
	for _, v := range versions {
		of, ok := v.(map[string]any)
		if !ok || of["name"] != v1alpha1.GroupVersion.Version {
			continue
		}
		_, found, _ := unstructured.NestedMap(of, "schema", "openAPIV3Schema", "properties", "spec", "properties", "maintenance")
		return found
	}
	return false
}
