// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// lister is kubelet's pod resources endpoint.
type lister struct {
	podresources.UnimplementedPodResourcesListerServer
	kubelet *Kubelet
}

// List implements podresources.PodResourcesListerServer.
func (l *lister) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	response := &podresources.ListPodResourcesResponse{}
	for _, pod := range l.kubelet.active() {
		response.PodResources = append(response.PodResources, l.kubelet.resources(pod))
	}
	return response, nil
}

// Get implements podresources.PodResourcesListerServer.
func (l *lister) Get(_ context.Context, r *podresources.GetPodResourcesRequest) (*podresources.GetPodResourcesResponse, error) {
	for _, pod := range l.kubelet.active() {
		if pod.Namespace == r.GetPodNamespace() && pod.Name == r.GetPodName() {
			return &podresources.GetPodResourcesResponse{PodResources: l.kubelet.resources(pod)}, nil
		}
	}
	return nil, fmt.Errorf("pod %s in namespace %s not found", r.GetPodName(), r.GetPodNamespace())
}

// GetAllocatableResources implements podresources.PodResourcesListerServer.
func (l *lister) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	k := l.kubelet
	k.mu.Lock()
	defer k.mu.Unlock()
	response := &podresources.AllocatableResourcesResponse{}
	for resource, p := range k.plugins {
		for _, id := range p.healthy() {
			response.Devices = append(response.Devices, &podresources.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}})
		}
	}
	return response, nil
}

// active are the pods that have been admitted and have not ended.
func (k *Kubelet) active() (pods []*corev1.Pod) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, l := range k.lives {
		if l.active {
			pods = append(pods, l.pod)
		}
	}
	return pods
}

// resources are what the containers and sidecars of a pod have.
func (k *Kubelet) resources(pod *corev1.Pod) *podresources.PodResources {
	all := &podresources.PodResources{Namespace: pod.Namespace, Name: pod.Name}
	granted := k.Granted()
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		if slices.ContainsFunc(pod.Spec.InitContainers, func(i corev1.Container) bool { return i.Name == c.Name && i.RestartPolicy == nil }) {
			continue
		}
		of := &podresources.ContainerResources{Name: c.Name}
		for _, g := range granted {
			if g.Pod == pod.UID && g.Container == c.Name {
				of.Devices = append(of.Devices, &podresources.ContainerDevices{ResourceName: g.Resource, DeviceIds: g.IDs})
			}
		}
		for _, d := range k.claimDevices(pod, c) {
			r := &podresources.ClaimResource{DriverName: d.Driver, PoolName: d.Pool, DeviceName: d.Device}
			for _, name := range d.CDI {
				r.CdiDevices = append(r.CdiDevices, &podresources.CDIDevice{Name: name})
			}
			of.DynamicResources = append(of.DynamicResources, &podresources.DynamicResource{
				ClaimName: d.Name, ClaimNamespace: pod.Namespace, ClaimResources: []*podresources.ClaimResource{r},
			})
		}
		all.Containers = append(all.Containers, of)
	}
	return all
}
