// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// reportMaintenance reports in events on the node which GPUs have come under maintenance or back into service between two written statuses. So a
// restart of the agent repeats no event, unless the agent did not have the GPU in between.
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

// reportTaints reports in events on the node which devices rules taint. before is the status of an earlier agent, or of this one. A device that
// is gone for a time, as a partition is, keeps its taint: the rule is still there. now has all taints, also those that are not written.
func (w *writer) reportTaints(before, now v1alpha1.GPUNodeStatus) {
	if w.told == nil {
		w.told = tainted(before).devices
	}
	// One event for a rule, which may select each partition of the node.
	has := tainted(now)
	for _, t := range has.order {
		if names := without(has.devices[t], w.told[t]); len(names) > 0 {
			w.told[t] = append(w.told[t], names...)
			w.event("GPUTainted", "%s: taint %s. No new pod with limits gets a device with a taint, and no claim that does not tolerate it. "+
				"The taint ends with the rule", regarding.Some(names), t)
		}
	}
	var there []string
	for _, d := range now.Devices {
		there = append(there, d.Name)
	}
	rules := map[v1alpha1.DeviceTaint]bool{}
	if object, _ := w.view.current(); object != nil {
		for _, t := range object.Spec.Taints {
			t.Since = nil
			rules[v1alpha1.DeviceTaint{Rule: t.Rule, Taint: t.Taint}] = true
		}
	}
	for _, t := range slices.SortedFunc(maps.Keys(w.told), func(a, b v1alpha1.DeviceTaint) int { return cmp.Compare(a.Rule, b.Rule) }) {
		left := without(w.told[t], has.devices[t])
		gone := without(left, there)
		if ended := without(left, gone); len(ended) > 0 {
			w.told[t] = without(w.told[t], ended)
			w.event("GPUTaintEnded", "%s: taint %s has ended", regarding.Some(ended), t)
		}
		if len(has.devices[t]) == 0 && !rules[t] {
			delete(w.told, t)
		}
	}
}

// taintedDevices are the names of the devices that rules taint, by rule and taint without its time.
type taintedDevices struct {
	order   []v1alpha1.DeviceTaint
	devices map[v1alpha1.DeviceTaint][]string
}

func tainted(status v1alpha1.GPUNodeStatus) taintedDevices {
	found := taintedDevices{devices: map[v1alpha1.DeviceTaint][]string{}}
	for _, d := range status.Devices {
		for _, t := range d.RuleTaints() {
			t.Since = nil
			if found.devices[t] == nil {
				found.order = append(found.order, t)
			}
			found.devices[t] = append(found.devices[t], d.Name)
		}
	}
	return found
}

func without(names, others []string) (left []string) {
	for _, name := range names {
		if !slices.Contains(others, name) {
			left = append(left, name)
		}
	}
	return left
}

// reportMissed reports rules that do not select what they seem to mean, once each. It reports nothing before the driver has placed the GPUs.
func (w *writer) reportMissed() {
	w.view.mu.Lock()
	object, pools := w.view.object, w.view.pools
	w.view.mu.Unlock()
	if object == nil || pools == nil {
		return
	}
	missed, gpus := map[string]string{}, w.config.Inventory.Inventory().GPUs
	for _, t := range object.Spec.Taints {
		text := missedBy(t, w.config.NodeName, gpus, pools)
		if missed[t.Rule] = text; text != "" && w.missed[t.Rule] != text {
			w.event("TaintRuleMisses", "DeviceTaintRule %s %s", t.Rule, text)
		}
	}
	w.missed = missed
}

// missedBy returns what a rule does not select although it seems to mean it; empty if there is nothing. A dynamic GPU has a pool of its own, so
// that a rule with the name of the node selects none.
func missedBy(t v1alpha1.RuleTaint, node string, gpus []device.GPU, pools map[string]string) string {
	var missed []string
	in, known := "", false
	for _, g := range gpus {
		pool := cmp.Or(pools[g.UUID], node)
		known = known || device.GPUName(t.Device) == g.Name()
		if t.Device == g.Name() && isStatic(g) {
			return fmt.Sprintf("selects %s and not its partitions, which are devices of their own: write one rule for each partition, or use "+
				"kubectl gpu drain %s/%s", g.Name(), node, g.Name())
		}
		meant := t.Device != "" && device.GPUName(t.Device) == g.Name() || t.Device == "" && t.Pool == node
		if t.Pool != "" && t.Pool != pool && meant {
			missed, in = append(missed, g.Name()), cmp.Or(in, pool)
		}
	}
	switch {
	case t.Device != "" && t.Pool != "" && !known:
		return fmt.Sprintf("selects no device: this node has no %s", t.Device)
	case len(missed) == 0:
		return ""
	}
	return fmt.Sprintf("has pool %s and so does not select %s: write pool: %s, one rule for each pool. A dynamic GPU has a pool of its own. "+
		"A rule without a pool selects devices of all nodes", t.Pool, regarding.Some(missed), in)
}

func (o *Object) event(reason, format string, args ...any) {
	o.config.Recorder.Eventf(regarding.Node(o.config.NodeName), corev1.EventTypeNormal, reason, format, args...)
}

var (
	maintenanceDescription = prometheus.NewDesc("tandem_gpu_maintenance",
		"1 for each GPU that an administrator has taken out of service (kubectl gpu drain).", []string{"device", "uuid"}, nil)
	taintDescription = prometheus.NewDesc("tandem_device_taint",
		"1 for each taint of a device: no new pod with limits gets the device. rule is the DeviceTaintRule that the taint is from; empty for a fault with action NoExecute.",
		[]string{"device", "uuid", "rule", "key", "value", "effect"}, nil)
)

// outOfService reports the devices of the last status that are out of service when metrics are collected. It is empty before the first status.
type outOfService struct {
	atomic.Pointer[v1alpha1.GPUNodeStatus]
}

// Describe implements prometheus.Collector.
func (s *outOfService) Describe(descriptions chan<- *prometheus.Desc) {
	descriptions <- maintenanceDescription
	descriptions <- taintDescription
}

// Collect implements prometheus.Collector.
func (s *outOfService) Collect(metrics chan<- prometheus.Metric) {
	status := s.Load()
	if status == nil {
		return
	}
	for _, d := range status.Devices {
		if d.Maintenance != nil && d.Parent == "" {
			metrics <- prometheus.MustNewConstMetric(maintenanceDescription, prometheus.GaugeValue, 1, d.Name, d.UUID)
		}
		for _, t := range d.Taints {
			metrics <- prometheus.MustNewConstMetric(taintDescription, prometheus.GaugeValue, 1, d.Name, d.UUID, t.Rule, t.Key, t.Value, string(t.Effect))
		}
	}
}
