// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"cmp"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/regarding"
)

// reportMaintenance reports in events on the node which GPUs have been taken out of service or back between two written statuses. So a
// restart of the agent repeats no event.
func (o *Object) reportMaintenance(before, now v1alpha1.GPUNodeStatus) {
	known := map[string]v1alpha1.DeviceStatus{}
	for _, d := range before.Devices {
		known[d.UUID] = d
	}
	for _, d := range now.Devices {
		was, there := known[d.UUID]
		switch {
		case d.Parent != "":
		case d.Maintenance != nil && was.Maintenance == nil:
			o.event("GPUMaintenance", "%s (%s) is under maintenance: %s. No new claim or pod gets it, and its holders keep it. "+
				"kubectl gpu undrain %s/%s ends the maintenance", d.Name, d.UUID, cmp.Or(d.Maintenance.Reason, "no reason given"), o.config.NodeName, d.Name)
		case d.Maintenance == nil && there && was.Maintenance != nil:
			o.event("GPUInService", "%s (%s) is in service again: its maintenance has ended", d.Name, d.UUID)
		}
	}
}

// event records an event on the node.
func (o *Object) event(reason, format string, args ...any) {
	o.config.Recorder.Eventf(regarding.Node(o.config.NodeName), corev1.EventTypeNormal, reason, format, args...)
}

// setMaintenance sets the gauge of GPUs under maintenance. The writer calls it.
func (m *metrics) setMaintenance(status v1alpha1.GPUNodeStatus) {
	next := map[maintained]bool{}
	for _, d := range status.Devices {
		if d.Maintenance != nil && d.Parent == "" {
			next[maintained{d.Name, d.UUID}] = true
			m.maintenance.With(maintained{d.Name, d.UUID}.labels()).Set(1)
		}
	}
	for gpu := range m.maintained {
		if !next[gpu] {
			m.maintenance.Delete(gpu.labels())
		}
	}
	m.maintained = next
}

// maintained is a GPU under maintenance.
type maintained struct{ device, uuid string }

func (g maintained) labels() prometheus.Labels {
	return prometheus.Labels{"device": g.device, "uuid": g.uuid}
}
