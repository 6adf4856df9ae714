// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/device"
)

type metrics struct {
	unusable, unhealthy, slowdown *prometheus.GaugeVec
	xids, resets                  *prometheus.CounterVec
	// shown are the values of unhealthy and slowdown by their labels.
	shown map[shown]bool
}

// shown is a gauge and the labels of one value of it, which is 1.
type shown struct {
	gauge                     *prometheus.GaugeVec
	device, uuid, reason, xid string
}

func (s shown) labels() prometheus.Labels {
	labels := prometheus.Labels{"device": s.device, "uuid": s.uuid, "reason": s.reason}
	if s.xid != none {
		labels["xid"] = s.xid
	}
	return labels
}

// none is for a gauge without the label.
const none = "-"

func newMetrics(registerer prometheus.Registerer) *metrics {
	factory := promauto.With(registerer)
	m := &metrics{
		unusable: factory.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tandem_unusable_devices",
			Help: "Devices that work and are not offered, by reason: NotInjectable (their CDI device or the hook cannot be written, or a required " +
				"IMEX channel is missing), NotRecordable (the run directory cannot be written).",
		}, []string{"reason"}),
		unhealthy: factory.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tandem_unhealthy_device",
			Help: "1 for each unhealthy GPU, and for each unhealthy partition of a healthy GPU, with the reason and the worst XID.",
		}, []string{"device", "uuid", "reason", "xid"}),
		slowdown: factory.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tandem_gpu_slowdown",
			Help: "1 for each GPU that runs below its clocks because of heat or the power brake. It stays healthy.",
		}, []string{"device", "uuid", "reason"}),
		xids: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_gpu_xids_total",
			Help: "XIDs that the driver reported, since the boot if the agent reads the kernel's log, by the GPU's PCI address.",
		}, []string{"pci", "xid"}),
		resets: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_gpu_fault_resets_total",
			Help: "Resets of GPUs because of a fault, by result.",
		}, []string{"result"}),
	}
	for _, result := range []string{"done", "failed"} {
		m.resets.WithLabelValues(result) // starts at zero, so that the first reset is an increase
	}
	return m
}

func (m *metrics) set(inventory device.Inventory) {
	next := map[shown]bool{}
	for _, d := range inventory.Devices() {
		if health := ownHealth(d); !health.Healthy() {
			xid := ""
			if health.XID != 0 {
				xid = fmt.Sprint(health.XID)
			}
			next[shown{m.unhealthy, d.Name(), d.UUID(), health.Reason, xid}] = true
		}
		if d.Whole() && d.GPU.Slowdown != "" {
			next[shown{m.slowdown, d.Name(), d.UUID(), d.GPU.Slowdown, none}] = true
		}
	}
	for value := range m.shown {
		if !next[value] {
			value.gauge.Delete(value.labels())
		}
	}
	for value := range next {
		value.gauge.With(value.labels()).Set(1)
	}
	m.shown = next
}

// ownHealth returns the health of a device. A partition of an unhealthy GPU has none of its own.
func ownHealth(d device.Device) device.Health {
	switch {
	case d.Whole():
		return d.GPU.Health
	case d.GPU.Health.Healthy():
		return d.Partition.Health
	default:
		return device.Health{}
	}
}

// healthOfAll returns the unhealthy devices.
func healthOfAll(inventory device.Inventory) map[device.Ref]device.Health {
	all := map[device.Ref]device.Health{}
	for _, d := range inventory.Devices() {
		if health := ownHealth(d); !health.Healthy() {
			all[d.Ref()] = health
		}
	}
	return all
}

// reportHealth reports each device whose health has another reason than before in an event on the node.
func (i *Inventory) reportHealth(ctx context.Context, inventory device.Inventory, before map[device.Ref]device.Health) {
	for _, d := range inventory.Devices() {
		now, was := ownHealth(d), before[d.Ref()]
		what := fmt.Sprintf("%s (%s)", d.Name(), d.UUID())
		switch {
		case now.Reason == was.Reason && now.XID == was.XID:
		case now.Class() != device.FaultNone:
			klog.FromContext(ctx).Info("Device is unhealthy", "device", d.Name(), "uuid", d.UUID(), "reason", now.Reason, "xid", now.XID,
				"message", now.Message)
			i.config.Recorder.Eventf(i.node(), corev1.EventTypeWarning, "GPUUnhealthy", "%s is unhealthy (%s): %s. %s",
				what, now.Reason, strings.TrimSuffix(now.Message, "."), i.remedy(d, now))
		case now.Healthy() && was.Class() != device.FaultNone:
			klog.FromContext(ctx).Info("Device is healthy again", "device", d.Name(), "uuid", d.UUID(), "before", was.Reason)
			i.config.Recorder.Eventf(i.node(), corev1.EventTypeNormal, "GPUHealthy",
				"%s is healthy again. It was unhealthy with reason %s", what, was.Reason)
		}
	}
}

// remedy says what happens to an unhealthy device, and what to do.
func (i *Inventory) remedy(d device.Device, health device.Health) string {
	text := "No new claim or pod gets it until it has recovered. "
	if health.Evict {
		text = "Its pods are evicted, and no new claim or pod gets it until it has recovered. "
	}
	after := ""
	if health.Reason == device.ReasonXID && d.GPU.Recovery == "" {
		after = ". The driver does not report a reset: after it, remove " + i.config.Records.Path(slotOf(d.GPU)) + " on the node"
	}
	switch health.Class() {
	case device.FaultReset, device.FaultMemory, device.FaultContained, device.FaultApplication:
		if i.action(d.GPU, health) == device.FaultResetWhenIdle && health.Repair() != device.RepairReplace {
			return text + "Tandem resets the GPU once it has no holder"
		}
	}
	return text + health.Remedy(after)
}
