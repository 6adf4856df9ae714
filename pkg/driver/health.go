// SPDX-License-Identifier: Apache-2.0

// The health of devices for kubelet (KEP-4680).

package driver

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tandem-gpu/tandem/pkg/device"
)

const (
	// healthInterval is how often the health of all devices is sent to kubelet again, and healthTimeout how long kubelet believes it.
	healthInterval = 10 * time.Second
	healthTimeout  = 30 * time.Second
)

// WatchHealthStatus is called by the helper for each kubelet that watches the health of devices (KEP-4680). kubelet writes it to the
// status of the pods whose claims have the devices. It sends the health of all devices at once, after each change, and at intervals.
func (s *session) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	ticker := time.NewTicker(healthInterval)
	defer ticker.Stop()
	var sent []kubeletplugin.DeviceHealth
	for again := true; ; {
		changed := s.Inventory.Changed()
		health := s.deviceHealth(s.Inventory.Inventory())
		if again || !reflect.DeepEqual(sent, health) {
			sent = health
			report, now := kubeletplugin.DeviceHealthReport{Devices: slices.Clone(health)}, time.Now()
			for i := range report.Devices {
				report.Devices[i].LastUpdated = now
			}
			select {
			case reports <- report:
			case <-ctx.Done():
				return nil
			case <-s.ctx.Done():
				return nil
			}
		}
		again = false
		select {
		case <-ctx.Done():
			return nil
		case <-s.ctx.Done():
			return nil
		case <-changed:
		case <-ticker.C:
			again = true
		}
	}
}

// deviceHealth returns the health of all devices that exist, for their holders. A GPU that is partitioned on demand may have been
// allocated from the node's pool or from its own; kubelet ignores devices that no claim has.
func (d *Driver) deviceHealth(inv device.Inventory) (all []kubeletplugin.DeviceHealth) {
	for _, of := range inv.Devices() {
		health := kubeletplugin.DeviceHealth{
			PoolName: d.NodeName, DeviceName: of.Name(), Health: kubeletplugin.HealthStatusHealthy, HealthCheckTimeout: healthTimeout,
		}
		if now := of.HealthForHolder(); !now.Healthy() {
			health.Health, health.Message = kubeletplugin.HealthStatusUnhealthy, bounded(now.Reason+": "+now.Message)
		}
		all = append(all, health)
		if len(of.GPU.Profiles) > 0 {
			health.PoolName = device.OwnPool(d.NodeName, of.GPU)
			all = append(all, health)
		}
	}
	return all
}

// bounded returns as much of a message as the API accepts.
func bounded(text string) string {
	return strings.ToValidUTF8(text[:min(len(text), corev1.ResourceHealthMessageMaxLength)], "")
}
