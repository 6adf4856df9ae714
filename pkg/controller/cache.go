// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"slices"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

func scheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	all := runtime.NewSchemeBuilder(corev1.AddToScheme, resourceapi.AddToScheme, policyv1.AddToScheme, batchv1.AddToScheme,
		admissionregistrationv1.AddToScheme, v1alpha1.AddToScheme)
	if err := all.AddToScheme(s); err != nil {
		return nil, fmt.Errorf("register API types: %w", err)
	}
	return s, nil
}

// mapper maps the kinds that the reconcilers use. Discovery would fail while the API server is unavailable, and until the
// CustomResourceDefinition of GPUNode exists.
func mapper(types *runtime.Scheme) meta.RESTMapper {
	m := meta.NewDefaultRESTMapper(nil)
	for kind := range types.AllKnownTypes() {
		scope := meta.RESTScopeNamespace
		if slices.Contains([]string{"DeviceTaintRule", "GPUNode", "Node", "ValidatingWebhookConfiguration"}, kind.Kind) {
			scope = meta.RESTScopeRoot
		}
		m.Add(kind, scope)
	}
	return m
}

// cacheOptions limits the caches to the fields that the reconcilers read. A large cluster has many more nodes and pods than GPUs.
func cacheOptions(limits device.Resources) cache.Options {
	return cache.Options{
		// Reading another kind is a mistake: it would be cached completely.
		ReaderFailOnMissingInformer: true,
		DefaultTransform:            cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&v1alpha1.GPUNode{}: {Transform: trim(trimGPUNode)},
			&corev1.Node{}:      {Transform: trim(func(n *corev1.Node) { trimNode(n, limits) })},
			&corev1.Pod{}: {
				// Many pods wait for a node in a cluster that is full, and no reconciler acts on them.
				Field: fields.AndSelectors(
					fields.OneTermEqualSelector("status.phase", string(corev1.PodPending)), fields.OneTermNotEqualSelector("spec.nodeName", ""),
				),
				Transform: trim(trimPod),
			},
		},
	}
}

// leftPending selects the events of pods that are no longer Pending. The watch selects Pending pods, so the API server reports the
// other pods as deleted.
func leftPending(of func(client.Object) bool) predicate.Predicate {
	deleted := predicate.NewPredicateFuncs(func(client.Object) bool { return false })
	deleted.DeleteFunc = func(e event.DeleteEvent) bool { return of(e.Object) }
	return deleted
}

// changed selects the updates that change a part of an object, and all other events.
func changed[T client.Object](part func(T) any) predicate.Funcs {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, known := e.ObjectOld.(T)
		after, ok := e.ObjectNew.(T)
		return known && ok && !apiequality.Semantic.DeepEqual(part(before), part(after))
	}}
}

// gpuNodeChanged leaves out that an agent wrote again what it wrote before, which each agent does every minute. The cache does not keep when.
var gpuNodeChanged = changed(func(n *v1alpha1.GPUNode) any { return []any{n.UID, n.Generation, n.Status} })

// trim returns a transform for one type. It leaves tombstones unchanged.
func trim[T client.Object](of func(T)) toolscache.TransformFunc {
	return func(o any) (any, error) {
		if object, ok := o.(T); ok {
			of(object)
		}
		return o, nil
	}
}

// identity keeps what tells an object and its versions apart.
func identity(m metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: m.Name, Namespace: m.Namespace, UID: m.UID, ResourceVersion: m.ResourceVersion}
}

// trimClaim keeps the capacity of the requests, the allocation of Tandem's devices with their parameters, and the pods that have the
// claim reserved. A request may contain 32 selectors of 10 KiB. Of a claim without such a device, which no reconciler acts on, it keeps
// the identity.
func trimClaim(claim *resourceapi.ResourceClaim, driver string) {
	if len(nodesOf(claim, driver)) == 0 {
		*claim = resourceapi.ResourceClaim{ObjectMeta: identity(claim.ObjectMeta)}
		return
	}
	claim.ObjectMeta = identity(claim.ObjectMeta)
	claim.Spec = resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: withCapacity(claim.Spec.Devices.Requests)}}
	allocation := claim.Status.Allocation
	allocation.NodeSelector = nil
	allocation.Devices.Results = slices.DeleteFunc(allocation.Devices.Results,
		func(r resourceapi.DeviceRequestAllocationResult) bool { return r.Driver != driver })
	allocation.Devices.Config = slices.DeleteFunc(allocation.Devices.Config,
		func(c resourceapi.DeviceAllocationConfiguration) bool {
			return c.Opaque == nil || c.Opaque.Driver != driver
		})
	claim.Status = resourceapi.ResourceClaimStatus{ReservedFor: claim.Status.ReservedFor, Allocation: allocation}
}

// withCapacity returns the names and the capacity of the requests that have one. Few do.
func withCapacity(requests []resourceapi.DeviceRequest) (kept []resourceapi.DeviceRequest) {
	for _, r := range requests {
		k := resourceapi.DeviceRequest{Name: r.Name}
		if r.Exactly != nil && r.Exactly.Capacity != nil {
			k.Exactly = &resourceapi.ExactDeviceRequest{Capacity: r.Exactly.Capacity}
		}
		for _, s := range r.FirstAvailable {
			if s.Capacity != nil {
				k.FirstAvailable = append(k.FirstAvailable, resourceapi.DeviceSubRequest{Name: s.Name, Capacity: s.Capacity})
			}
		}
		if k.Exactly != nil || k.FirstAvailable != nil {
			kept = append(kept, k)
		}
	}
	return kept
}

// isNamedByUUID reports whether a GPUNode names a device by its UUID, as one that is held and not in the agent's inventory. The cache keeps the
// UUIDs of these devices only.
func isNamedByUUID(d v1alpha1.DeviceStatus) bool { return d.Name == d.UUID }

// trimGPUNode drops what only people read. It copies the slices because the JSON decoder makes room for four elements, and most have one.
func trimGPUNode(node *v1alpha1.GPUNode) {
	generation, owners := node.Generation, node.OwnerReferences
	node.ObjectMeta = identity(node.ObjectMeta)
	node.Generation, node.OwnerReferences, node.Status.Seen = generation, owners, nil
	node.Spec.Claims = slices.Clone(node.Spec.Claims)
	for i := range node.Spec.Claims {
		c := &node.Spec.Claims[i]
		c.Devices, c.Pools = slices.Clone(c.Devices), slices.Clone(c.Pools)
		for j, pool := range c.Pools {
			if pool == node.Name {
				c.Pools[j] = node.Name // shares the memory
			}
		}
	}
	node.Status.BootID, node.Status.Holders = "", ""
	node.Status.Devices = slices.Clone(node.Status.Devices)
	for i := range node.Status.Devices {
		d := &node.Status.Devices[i]
		if !isNamedByUUID(*d) {
			d.UUID = ""
		}
		d.Model, d.Profile, d.Slowdown = "", "", ""
		d.Holders = slices.Clone(d.Holders)
		ends := endsPods(*d)
		for j := range d.Holders {
			h := &d.Holders[j]
			h.Namespace, h.Name, h.WaitsFor, h.WaitsSince = "", "", "", nil
			if !ends {
				h.Pods = nil
			}
		}
	}
}

// trimNode keeps the numbers of Tandem's resources and its conditions.
func trimNode(node *corev1.Node, limits device.Resources) {
	node.ObjectMeta = identity(node.ObjectMeta)
	node.Spec = corev1.NodeSpec{}
	conditions := slices.DeleteFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool { return !isOurs(c) })
	node.Status = corev1.NodeStatus{
		Allocatable: only(node.Status.Allocatable, limits), Capacity: only(node.Status.Capacity, limits), Conditions: slices.Clone(conditions),
	}
}

// only returns the numbers of Tandem's resources. A map does not shrink when entries are deleted, so it makes a new one.
func only(all corev1.ResourceList, limits device.Resources) corev1.ResourceList {
	var kept corev1.ResourceList
	for name, number := range all {
		if limits.Has(string(name)) {
			if kept == nil {
				kept = corev1.ResourceList{}
			}
			kept[name] = number
		}
	}
	return kept
}

// trimPod keeps the owners, the node, the claims and the limits of a pod, and whether the scheduler bound it.
func trimPod(pod *corev1.Pod) {
	owners, deleted := pod.OwnerReferences, pod.DeletionTimestamp
	pod.ObjectMeta = identity(pod.ObjectMeta)
	pod.OwnerReferences, pod.DeletionTimestamp = owners, deleted
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i, c := range containers {
			containers[i] = corev1.Container{Name: c.Name, Resources: corev1.ResourceRequirements{Limits: c.Resources.Limits}}
		}
	}
	pod.Spec = corev1.PodSpec{
		NodeName: pod.Spec.NodeName, ResourceClaims: pod.Spec.ResourceClaims,
		InitContainers: pod.Spec.InitContainers, Containers: pod.Spec.Containers,
	}
	pod.Status = corev1.PodStatus{
		Phase: pod.Status.Phase, ResourceClaimStatuses: pod.Status.ResourceClaimStatuses,
		ExtendedResourceClaimStatus: pod.Status.ExtendedResourceClaimStatus, Conditions: scheduled(pod),
	}
}

// podsOf returns the existing pods that have the claim reserved. If only is set, it reads just the pod with that UID.
func podsOf(ctx context.Context, reader client.Reader, claim *resourceapi.ResourceClaim, only types.UID) ([]*corev1.Pod, error) {
	var pods []*corev1.Pod
	for _, consumer := range claim.Status.ReservedFor {
		if only != "" && only != consumer.UID {
			continue
		}
		pod := &corev1.Pod{}
		key := client.ObjectKey{Namespace: claim.Namespace, Name: consumer.Name}
		if err := reader.Get(ctx, key, pod); client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("get pod %s: %w", key, err)
		}
		if pod.UID != "" && pod.UID == consumer.UID {
			pods = append(pods, pod)
		}
	}
	return pods, nil
}
