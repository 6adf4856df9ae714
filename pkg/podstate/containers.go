// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// PodContainer is a container of a pod. Container is empty if the pod uses a device and no container of it is known to.
type PodContainer struct{ Namespace, Pod, Container string }

// Compare orders containers by namespace, pod and name.
func (c PodContainer) Compare(other PodContainer) int {
	return cmp.Or(strings.Compare(c.Namespace, other.Namespace), strings.Compare(c.Pod, other.Pod), strings.Compare(c.Container, other.Container))
}

// Containers returns the containers that use a hold, sorted, without pods that are deleted or terminal. They are those for which kubelet's
// pod resources endpoint lists the device: containers and sidecars, but no other init container, and all that name the claim, whichever
// request of it they name (k8s.io/kubernetes pkg/kubelet/apis/podresources, pkg/kubelet/cm/dra). It does not call kubelet: List makes
// kubelet recount what is allocated. Instead the caller reads kubelet's two checkpoints once for many holds. It is safe for concurrent use.
func (p *Pods) Containers(h ledger.Hold, devices DeviceCheckpoint, claims []KubeletClaim) []PodContainer {
	uids := make([]string, 0, 1)
	for _, pod := range h.Pods {
		uids = append(uids, pod.UID)
	}
	// kubelet does not prepare a claim again for the next pod that shares it, so the hold may not name that pod.
	if i := slices.IndexFunc(claims, func(c KubeletClaim) bool { return c.UID == h.Holder.ID }); h.Holder.Kind == ledger.KindClaim && i >= 0 {
		uids = claims[i].PodUIDs
	}
	var users []PodContainer
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, uid := range uids {
		pod, known := p.pods[types.UID(uid)]
		if !known || pod.deleted || podstatus.Ended(pod.Pod) {
			continue
		}
		var names []string
		if h.Holder.Kind == ledger.KindClaim {
			names = claimants(pod.Pod, h.Name)
		} else {
			names = allocatedTo(pod.Pod, uid, h, devices)
		}
		if len(names) == 0 {
			names = []string{""}
		}
		for _, name := range names {
			users = append(users, PodContainer{Namespace: pod.Namespace, Pod: pod.Name, Container: name})
		}
	}
	slices.SortFunc(users, PodContainer.Compare)
	return slices.Compact(users)
}

// allocatedTo returns the containers of a trimmed pod that kubelet allocated the device of a limit to.
func allocatedTo(pod *corev1.Pod, uid string, h ledger.Hold, checkpoint DeviceCheckpoint) (names []string) {
	for _, d := range checkpoint.Devices {
		if d.PodUID == uid && d.Resource == h.Resource && d.ID == h.Holder.ID && !leavesDevices(pod, d.Container) {
			names = append(names, d.Container)
		}
	}
	return names
}

// claimants returns the containers of a trimmed pod that use a claim of its namespace.
func claimants(pod *corev1.Pod, claim string) (names []string) {
	for _, c := range pod.Spec.Containers {
		if slices.ContainsFunc(c.Resources.Claims, func(r corev1.ResourceClaim) bool { return claimNamed(pod, r.Name) == claim }) {
			names = append(names, c.Name)
		}
	}
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil && extended.ResourceClaimName == claim {
		for _, m := range extended.RequestMappings {
			if !leavesDevices(pod, m.ContainerName) {
				names = append(names, m.ContainerName)
			}
		}
	}
	return names
}

// claimNamed returns the claim that a pod has under a name of its spec; empty if there is none yet.
func claimNamed(pod *corev1.Pod, name string) string {
	for _, reference := range pod.Spec.ResourceClaims {
		if reference.Name == name && reference.ResourceClaimName != nil {
			return *reference.ResourceClaimName
		}
	}
	for _, status := range pod.Status.ResourceClaimStatuses {
		if status.Name == name && status.ResourceClaimName != nil {
			return *status.ResourceClaimName
		}
	}
	return ""
}

// leavesDevices reports whether a container of a trimmed pod is an init container that leaves its devices to a later one.
func leavesDevices(pod *corev1.Pod, name string) bool {
	return slices.ContainsFunc(pod.Spec.InitContainers, func(c corev1.Container) bool { return c.Name == name && c.RestartPolicy == nil })
}

// claimUsers returns the containers and sidecars of a pod that use claims, and of them only that. trimmed must be idempotent.
func claimUsers(pod *corev1.Pod) (users []corev1.Container) {
	add := func(c corev1.Container) {
		if len(c.Resources.Claims) > 0 {
			users = append(users, corev1.Container{Name: c.Name, Resources: corev1.ResourceRequirements{Claims: c.Resources.Claims}})
		}
	}
	for _, c := range pod.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == keeps {
			add(c)
		}
	}
	for _, c := range pod.Spec.Containers {
		add(c)
	}
	return users
}
