// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Names of the driver under observation.
const (
	driverName   = "gpu.nvidia.com"
	resourceName = "nvidia.com/gpu"
	// sharedSuffix may follow the resource name of replicas.
	sharedSuffix = ".shared"
	// memoryCapacity and sharesCapacity are the capacities of a device of which the scheduler can give claims a part.
	memoryCapacity = "memory"
	sharesCapacity = "shares"
	// partitionResources begins the names of what limits ask for partitions by.
	partitionResources = "nvidia.com/mig-"
)

// objects are the objects of the API server.
type objects struct {
	// pods by UID; claims by namespace and name, in all versions that are known.
	pods   map[string]corev1.Pod
	claims map[string][]resourceapi.ResourceClaim
}

// readObjects reads pods before claims: a pod that is listed has its claims until it is gone.
func readObjects(ctx context.Context, client kubernetes.Interface) (objects, error) {
	pods, err := client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return objects{}, fmt.Errorf("list pods: %w", err)
	}
	claims, err := client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return objects{}, fmt.Errorf("list ResourceClaims: %w", err)
	}
	known := objects{pods: map[string]corev1.Pod{}, claims: map[string][]resourceapi.ResourceClaim{}}
	for _, pod := range pods.Items {
		known.addPod(pod)
	}
	for _, claim := range claims.Items {
		known.addClaim(claim)
	}
	return known, nil
}

// explain finds the container of each process, and the claim or request that gave it its devices.
func (o objects) explain(found []sighting) Picture {
	containers := map[string]*Container{}
	for _, seen := range found {
		pod, known := o.pods[seen.pod]
		if known && isOurs(pod) {
			continue
		}
		container := containers[seen.container]
		if container == nil {
			container = &Container{Node: seen.node, PodUID: seen.pod, ID: seen.container}
			if known {
				container.Namespace, container.Pod, container.Name = pod.Namespace, pod.Name, containerName(pod, seen.container)
			}
			containers[seen.container] = container
		}
		container.PIDs = append(container.PIDs, seen.pid)
		for _, device := range seen.devices {
			if !slices.ContainsFunc(container.Devices, func(d Device) bool { return d.Number == device.Number }) {
				container.Devices = append(container.Devices, o.attribute(device, seen, pod))
			}
		}
	}
	var picture Picture
	for _, container := range containers {
		container.shareOut(asksOf(o.pods[container.PodUID], container.Name).limits)
		// A sandbox: its only process sleeps, and no user's program runs in it.
		if container.Pod != "" && container.Name == "" && len(container.Devices) == 0 {
			continue
		}
		slices.SortFunc(container.Devices, func(a, b Device) int { return a.Number.compare(b.Number) })
		slices.Sort(container.PIDs)
		picture.Containers = append(picture.Containers, *container)
	}
	slices.SortFunc(picture.Containers, func(a, b Container) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
			cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	return picture
}

// isOurs recognizes the pods of Tandem that see GPUs and have none, by their labels: agents, and the MPS daemons of claims.
func isOurs(pod corev1.Pod) bool {
	component := pod.Labels["app.kubernetes.io/component"]
	return pod.Labels["app.kubernetes.io/name"] == "tandem" && (component == "kubelet-plugin" || component == "mps-daemon")
}

func containerName(pod corev1.Pod, id string) string {
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses, pod.Status.EphemeralContainerStatuses) {
		if strings.HasSuffix(status.ContainerID, "://"+id) {
			return status.Name
		}
	}
	return ""
}

// attribute fills in by what the container has the device; pod is zero where it is unknown.
func (o objects) attribute(device Device, seen sighting, pod corev1.Pod) Device {
	device.API, device.Holder = Unexplained, "pod/"+seen.pod
	asks := asksOf(pod, containerName(pod, seen.container))
	admin := false
	for _, name := range asks.claims {
		for _, claim := range o.claims[pod.Namespace+"/"+name] {
			allocated, adminAccess, share := allocates(claim, seen.node, device)
			if !allocated || adminAccess {
				admin = admin || allocated
				continue
			}
			if device.API != Claim {
				device.API, device.Holder, device.Share = Claim, "claim/"+string(claim.UID), share
				device.ClaimUID, device.ClaimName = string(claim.UID), claim.Name
			}
			// It is unknown from outside which of several allocations was prepared. The smallest one causes no false accusation.
			if device.ClaimUID == string(claim.UID) {
				device.Share = device.Share.least(share)
			}
		}
	}
	switch {
	case device.API == Claim:
	case asks.limits > 0:
		// With admin access beside it, it is unknown which one gave the device: assume the one that holds it.
		device.API = Limits
	case admin:
		device.API, device.Holder = Admin, ""
	case slices.ContainsFunc(asks.claims, func(name string) bool { return !o.seenAllocated(pod.Namespace + "/" + name) }):
		device.API = Unseen
	}
	return device
}

// seenAllocated reports whether a version of the claim with an allocation is known.
func (o objects) seenAllocated(claim string) bool {
	return slices.ContainsFunc(o.claims[claim], func(c resourceapi.ResourceClaim) bool { return c.Status.Allocation != nil })
}

// asks is what a container's specification asks for.
type asks struct {
	// claims are names of ResourceClaims in the pod's namespace.
	claims []string
	// limits is how many devices.
	limits int64
}

// asksOf answers for all containers together where the name is of none: its status may not be written yet.
func asksOf(pod corev1.Pod, name string) asks {
	claims := claimsByReference(pod)
	var found asks
	containers := slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)
	known := slices.ContainsFunc(containers, func(c corev1.Container) bool { return c.Name == name })
	for _, container := range containers {
		if known && container.Name != name {
			continue
		}
		for _, reference := range container.Resources.Claims {
			found.claims = append(found.claims, claims[reference.Name])
		}
		limits := int64(0)
		for resource, quantity := range container.Resources.Limits {
			if ofLimits(string(resource)) {
				limits += quantity.Value()
			}
		}
		// Containers that run one after the other have the same.
		found.limits = max(found.limits, limits)
	}
	if status := pod.Status.ExtendedResourceClaimStatus; status != nil && found.limits > 0 {
		found.claims = append(found.claims, status.ResourceClaimName)
	}
	return found
}

// claimsByReference maps the names under which a pod's containers refer to claims to the claims' own.
func claimsByReference(pod corev1.Pod) map[string]string {
	names := map[string]string{}
	for _, reference := range pod.Spec.ResourceClaims {
		if reference.ResourceClaimName != nil {
			names[reference.Name] = *reference.ResourceClaimName
		}
	}
	for _, status := range pod.Status.ResourceClaimStatuses {
		if status.ResourceClaimName != nil {
			names[status.Name] = *status.ResourceClaimName
		}
	}
	return names
}

// allocates reports whether a claim has been allocated a device of a node, whether by admin access only, and its share of the device. The
// share is all of the device, unless the scheduler counted a part (KEP-5075).
func allocates(claim resourceapi.ResourceClaim, node string, device Device) (allocated, adminAccess bool, share Share) {
	if claim.Status.Allocation == nil {
		return false, false, Share{}
	}
	whole := false
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != driverName || !device.published(result.Device) ||
			result.Pool != node && !strings.HasPrefix(result.Pool, node+"/") {
			continue
		}
		if result.AdminAccess != nil && *result.AdminAccess {
			adminAccess = adminAccess || !allocated
			allocated = true
			continue
		}
		allocated, adminAccess = true, false
		consumed, counted := result.ConsumedCapacity[memoryCapacity]
		whole = whole || result.ShareID == nil || !counted
		shares := result.ConsumedCapacity[sharesCapacity]
		share = Share{Part: true, Memory: share.Memory + consumed.Value(), Count: share.Count + shares.Value()}
	}
	if whole {
		share = Share{}
	}
	return allocated, adminAccess, share
}

// shareOut sets the container's share of each shared GPU that it has by its limits. asked is the number in its limits. The container has at
// least one replica of each GPU. If it has only one shared GPU, the rest of asked is replicas of that GPU.
func (c *Container) shareOut(asked int64) {
	var shared []int
	others := int64(0)
	for i, device := range c.Devices {
		switch {
		case device.API != Limits:
		case device.GPU.Replicas > 1 && device.Whole():
			shared = append(shared, i)
		default:
			others++
		}
	}
	for _, i := range shared {
		gpu, replicas := c.Devices[i].GPU, int64(1)
		if len(shared) == 1 {
			replicas = min(max(asked-others, 1), int64(gpu.Replicas))
		}
		c.Devices[i].Share = Share{Part: true, Memory: replicas * (gpu.Memory / int64(gpu.Replicas) >> 20 << 20)}
		if gpu.Shares > 0 {
			// If claims get equal shares of the GPU, a replica is one or more of these shares.
			c.Devices[i].Share = Share{Part: true, Count: replicas * int64(max(1, gpu.Shares/gpu.Replicas))}
		}
	}
}

// published reports whether a device is published under a name: gpu-<minor> in a pool that is, or begins with, the node's name,
// or gpu-<minor>-mig-<profile>-<profile ID>-<start>.
func (d Device) published(name string) bool {
	if d.Whole() {
		return name == fmt.Sprintf("gpu-%d", d.Number.Minor)
	}
	return strings.HasPrefix(name, fmt.Sprintf("gpu-%d-mig-", d.Partition.GPU.Minor)) && slices.ContainsFunc(d.Partition.Published[:], func(end string) bool {
		return end != "" && strings.HasSuffix(name, end)
	})
}
