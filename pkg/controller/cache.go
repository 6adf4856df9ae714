// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"sync"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

func scheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, resourceapi.AddToScheme, policyv1.AddToScheme, batchv1.AddToScheme, admissionregistrationv1.AddToScheme, v1alpha1.AddToScheme,
	} {
		if err := add(s); err != nil {
			return nil, fmt.Errorf("register API types: %w", err)
		}
	}
	return s, nil
}

// mapper knows what the reconcilers use, so that nothing has to be asked for: neither at start, when the API server may be away,
// nor when the definition of GPUNode comes later than this process.
func mapper() meta.RESTMapper {
	m := meta.NewDefaultRESTMapper(nil)
	for kind, scope := range map[schema.GroupVersionKind]meta.RESTScope{
		v1alpha1.GroupVersion.WithKind("GPUNode"):                                             meta.RESTScopeRoot,
		corev1.SchemeGroupVersion.WithKind("Node"):                                            meta.RESTScopeRoot,
		corev1.SchemeGroupVersion.WithKind("Pod"):                                             meta.RESTScopeNamespace,
		corev1.SchemeGroupVersion.WithKind("PodList"):                                         meta.RESTScopeNamespace, // asked for by a cache of one namespace
		corev1.SchemeGroupVersion.WithKind("Secret"):                                          meta.RESTScopeNamespace,
		admissionregistrationv1.SchemeGroupVersion.WithKind("ValidatingWebhookConfiguration"): meta.RESTScopeRoot,
		batchv1.SchemeGroupVersion.WithKind("Job"):                                            meta.RESTScopeNamespace,
		resourceapi.SchemeGroupVersion.WithKind("DeviceClass"):                                meta.RESTScopeRoot,
		resourceapi.SchemeGroupVersion.WithKind("ResourceClaim"):                              meta.RESTScopeNamespace,
	} {
		m.Add(kind, scope)
	}
	return m
}

// cacheOptions keep of the cluster what the reconcilers read and nothing else: a large one has more claims, nodes and pods
// than GPUs.
func cacheOptions(driver string, limits device.Resources) cache.Options {
	return cache.Options{
		// What is not listed here is a mistake: it would be watched and kept whole.
		ReaderFailOnMissingInformer: true,
		DefaultTransform:            cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&v1alpha1.GPUNode{}:          {},
			&resourceapi.ResourceClaim{}: {Transform: trim(func(c *resourceapi.ResourceClaim) { trimClaim(c, driver) })},
			&corev1.Node{}:               {Transform: trim(func(n *corev1.Node) { trimNode(n, limits) })},
			&resourceapi.DeviceClass{}:   {Transform: trim(trimClass)},
			&corev1.Pod{}: {
				Field:     fields.OneTermEqualSelector("status.phase", string(corev1.PodPending)),
				Transform: trim(trimPod),
			},
		},
	}
}

// leftPending are the events of pods that are not Pending any more: only Pending ones are watched, and the others leave the watch as
// if they were deleted.
func leftPending(of func(client.Object) bool) predicate.Funcs {
	return predicate.Funcs{
		CreateFunc:  func(event.CreateEvent) bool { return false },
		UpdateFunc:  func(event.UpdateEvent) bool { return false },
		GenericFunc: func(event.GenericEvent) bool { return false },
		DeleteFunc:  func(e event.DeleteEvent) bool { return of(e.Object) },
	}
}

// trim is a transform for one type; tombstones pass as they are.
func trim[T client.Object](of func(T)) toolscache.TransformFunc {
	return func(o any) (any, error) {
		if object, ok := o.(T); ok {
			of(object)
		}
		return o, nil
	}
}

// trimMeta keeps what tells one object from another, and who made it.
func trimMeta(m *metav1.ObjectMeta) {
	*m = metav1.ObjectMeta{
		Name: m.Name, Namespace: m.Namespace, UID: m.UID, ResourceVersion: m.ResourceVersion,
		CreationTimestamp: m.CreationTimestamp, DeletionTimestamp: m.DeletionTimestamp, OwnerReferences: m.OwnerReferences,
	}
}

// trimClaim keeps the classes that are asked for, and what is allocated of our driver, with its parameters.
func trimClaim(claim *resourceapi.ResourceClaim, driver string) {
	trimMeta(&claim.ObjectMeta)
	requests := claim.Spec.Devices.Requests
	claim.Spec = resourceapi.ResourceClaimSpec{}
	for _, r := range requests {
		kept := resourceapi.DeviceRequest{Name: r.Name}
		if r.Exactly != nil {
			kept.Exactly = &resourceapi.ExactDeviceRequest{
				DeviceClassName: r.Exactly.DeviceClassName, AllocationMode: r.Exactly.AllocationMode, Count: r.Exactly.Count,
				Capacity: r.Exactly.Capacity,
			}
		}
		for _, f := range r.FirstAvailable {
			kept.FirstAvailable = append(kept.FirstAvailable, resourceapi.DeviceSubRequest{
				Name: f.Name, DeviceClassName: f.DeviceClassName, AllocationMode: f.AllocationMode, Count: f.Count, Capacity: f.Capacity,
			})
		}
		claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, kept)
	}
	status := claim.Status
	claim.Status = resourceapi.ResourceClaimStatus{ReservedFor: status.ReservedFor}
	if status.Allocation == nil {
		return
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{}
	for _, r := range status.Allocation.Devices.Results {
		if r.Driver == driver {
			claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
				Request: r.Request, Driver: r.Driver, Pool: r.Pool, Device: r.Device, AdminAccess: r.AdminAccess,
				ShareID: r.ShareID, ConsumedCapacity: r.ConsumedCapacity,
			})
		}
	}
	for _, c := range status.Allocation.Devices.Config {
		if c.Opaque != nil && c.Opaque.Driver == driver {
			claim.Status.Allocation.Devices.Config = append(claim.Status.Allocation.Devices.Config, c)
		}
	}
}

// trimClass keeps which driver's devices the class selects, and the resource that stands for it.
func trimClass(class *resourceapi.DeviceClass) {
	trimMeta(&class.ObjectMeta)
	class.Spec = resourceapi.DeviceClassSpec{Selectors: class.Spec.Selectors, ExtendedResourceName: class.Spec.ExtendedResourceName}
}

// trimNode keeps how many GPUs there are for limits, and which pods may come.
func trimNode(node *corev1.Node, limits device.Resources) {
	labels := node.Labels
	trimMeta(&node.ObjectMeta)
	node.Labels = labels
	node.Spec = corev1.NodeSpec{Taints: node.Spec.Taints}
	node.Status = corev1.NodeStatus{Allocatable: only(node.Status.Allocatable, limits), Capacity: only(node.Status.Capacity, limits)}
}

// trimPod keeps what the pod asks for, where it may run and is bound to, and whether the scheduler has given up on it.
func trimPod(pod *corev1.Pod) {
	trimMeta(&pod.ObjectMeta)
	containers := func(of []corev1.Container) []corev1.Container {
		var kept []corev1.Container
		for _, c := range of {
			kept = append(kept, corev1.Container{Name: c.Name, RestartPolicy: c.RestartPolicy,
				Resources: corev1.ResourceRequirements{Limits: c.Resources.Limits}})
		}
		return kept
	}
	pod.Spec = corev1.PodSpec{
		NodeName: pod.Spec.NodeName, ResourceClaims: pod.Spec.ResourceClaims,
		NodeSelector: pod.Spec.NodeSelector, Affinity: requiredNodes(pod.Spec.Affinity), Tolerations: pod.Spec.Tolerations,
		InitContainers: containers(pod.Spec.InitContainers), Containers: containers(pod.Spec.Containers),
	}
	status := corev1.PodStatus{
		Phase: pod.Status.Phase, ResourceClaimStatuses: pod.Status.ResourceClaimStatuses,
		ExtendedResourceClaimStatus: pod.Status.ExtendedResourceClaimStatus,
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			status.Conditions = []corev1.PodCondition{c}
		}
	}
	pod.Status = status
}

func requiredNodes(affinity *corev1.Affinity) *corev1.Affinity {
	if affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil
	}
	return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution,
	}}
}

// claimReader reads claims from the cache, by the nodes that they have devices of.
type claimReader struct {
	client client.Reader
	driver string
	// index makes that possible. It is done once, when the first reconciler starts that wants it: a cache that is indexed
	// before would have to be filled before the manager runs.
	index func() error
}

func newClaimReader(reader client.Reader, indexer client.FieldIndexer, driver string) claimReader {
	return claimReader{reader, driver, sync.OnceValue(func() error {
		err := indexer.IndexField(context.Background(), &resourceapi.ResourceClaim{}, nodeIndex, func(o client.Object) []string {
			if claim, ok := o.(*resourceapi.ResourceClaim); ok {
				return nodesOf(claim, driver)
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("index claims: %w", err)
		}
		return nil
	})}
}

// source is one without events, which makes a reconciler's workers start after the claims are indexed.
func (r claimReader) source() source.Source {
	return source.Func(func(context.Context, workqueue.TypedRateLimitingInterface[reconcile.Request]) error { return r.index() })
}

// on are the claims with devices of a node, for Relay.
func (r claimReader) on(ctx context.Context, node string) ([]v1alpha1.AllocatedClaim, error) {
	var list resourceapi.ResourceClaimList
	if err := r.client.List(ctx, &list, client.MatchingFields{nodeIndex: node}); err != nil {
		return nil, fmt.Errorf("list claims on node %s: %w", node, err)
	}
	return Relay(list.Items, r.driver, node), nil
}
