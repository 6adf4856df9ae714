// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1"
)

// followHealth follows what a driver reports of its devices until its connection ends.
func (k *Kubelet) followHealth(ctx context.Context, d *driver) {
	stream, err := drahealth.NewDRAResourceHealthClient(d.conn).NodeWatchResources(ctx, &drahealth.NodeWatchResourcesRequest{})
	for err == nil {
		var report *drahealth.NodeWatchResourcesResponse
		if report, err = stream.Recv(); err != nil {
			return // a driver need not have the service
		}
		k.change(func() {
			for _, of := range report.GetDevices() {
				health := corev1.ResourceHealthStatusUnknown
				switch of.GetHealth() {
				case drahealth.HealthStatus_HEALTHY:
					health = corev1.ResourceHealthStatusHealthy
				case drahealth.HealthStatus_UNHEALTHY:
					health = corev1.ResourceHealthStatusUnhealthy
				}
				d.health[of.GetDevice().GetPoolName()+"/"+of.GetDevice().GetDeviceName()] = health
			}
		})
	}
}

// reportHealth writes the status of pods whenever the health of devices changes, until ctx ends.
func (k *Kubelet) reportHealth(ctx context.Context) {
	for {
		changed := k.Changed()
		k.mu.Lock()
		var lives []*life
		for _, l := range k.lives {
			if l.active {
				lives = append(lives, l)
			}
		}
		k.mu.Unlock()
		for _, l := range lives {
			l.mu.Lock()
			running := l.phase == corev1.PodRunning
			l.mu.Unlock()
			if running {
				l.write(ctx)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// health is that of the devices of a container, as kubelet writes it to the pod's status.
func (k *Kubelet) health(pod *corev1.Pod, c corev1.Container) []corev1.ResourceStatus {
	byName := map[string][]corev1.ResourceHealth{}
	for _, d := range k.claimDevices(pod, c) {
		k.mu.Lock()
		health := corev1.ResourceHealthStatusUnknown
		if driver := k.drivers[d.Driver]; driver != nil && driver.health[d.Pool+"/"+d.Device] != "" {
			health = driver.health[d.Pool+"/"+d.Device]
		}
		k.mu.Unlock()
		id := d.Pool + "/" + d.Device
		if len(d.CDI) > 0 {
			id = d.CDI[0]
		}
		byName["claim:"+d.Reference] = append(byName["claim:"+d.Reference], corev1.ResourceHealth{ResourceID: corev1.ResourceID(id), Health: health})
	}
	for _, g := range k.Granted() {
		if g.Pod != pod.UID || g.Container != c.Name {
			continue
		}
		k.mu.Lock()
		for _, id := range g.IDs {
			health := corev1.ResourceHealthStatusUnknown
			for _, d := range k.plugins[g.Resource].devices {
				if d.GetID() == id {
					health = corev1.ResourceHealthStatusUnhealthy
					if d.GetHealth() == pluginapi.Healthy {
						health = corev1.ResourceHealthStatusHealthy
					}
				}
			}
			byName[g.Resource] = append(byName[g.Resource], corev1.ResourceHealth{ResourceID: corev1.ResourceID(id), Health: health})
		}
		k.mu.Unlock()
	}
	var all []corev1.ResourceStatus
	for name, resources := range byName {
		all = append(all, corev1.ResourceStatus{Name: corev1.ResourceName(name), Resources: resources})
	}
	slices.SortFunc(all, func(a, b corev1.ResourceStatus) int { return strings.Compare(string(a.Name), string(b.Name)) })
	return all
}
