// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/internal/podstatus"
)

// Metrics are the latest sample that dcgm-exporter has of a device. A value that it does not export is nil.
type Metrics struct {
	// UtilizationPercent is the part of the sample's period in which the device ran work.
	UtilizationPercent *float64 `json:"utilizationPercent,omitempty"`
	MemoryUsedBytes    *int64   `json:"memoryUsedBytes,omitempty"`
	// MemoryTotalBytes is the sum of used and free memory. It does not include the memory that the driver reserves.
	MemoryTotalBytes *int64 `json:"memoryTotalBytes,omitempty"`
	// PowerWatts and TemperatureCelsius are those of the whole GPU, and absent for a partition.
	PowerWatts         *float64 `json:"powerWatts,omitempty"`
	TemperatureCelsius *float64 `json:"temperatureCelsius,omitempty"`
}

// NoMetrics is why a node has no metrics. Several nodes can have the same Reason. Detail is about this node, such as the name of its pod.
type NoMetrics struct {
	Reason string `json:"reason"`
	Detail string `json:"detail,omitempty"`
}

// The fields of DCGM that are shown (NVIDIA/dcgm-exporter, etc/default-counters.csv and dcp-metrics-included.csv).
const (
	fieldUtilization = "DCGM_FI_DEV_GPU_UTIL"          // percent; a GPU in MIG mode has none
	fieldActive      = "DCGM_FI_PROF_GR_ENGINE_ACTIVE" // part of the time, from 0 to 1; partitions have it too
	fieldUsed        = "DCGM_FI_DEV_FB_USED"           // MiB
	fieldFree        = "DCGM_FI_DEV_FB_FREE"           // MiB
	fieldPower       = "DCGM_FI_DEV_POWER_USAGE"       // W
	fieldTemperature = "DCGM_FI_DEV_GPU_TEMP"          // degrees Celsius
)

// mostOf are the largest values that can be true. DCGM writes a larger one in place of a value that it does not have (NVIDIA/DCGM,
// dcgm_structs.h, DCGM_INT32_BLANK).
var mostOf = map[string]float64{
	fieldUtilization: 100, fieldActive: 1, fieldUsed: 1 << 24, fieldFree: 1 << 24, fieldPower: 1 << 16, fieldTemperature: 200,
}

// entity is what a sample belongs to: a GPU, or one of its GPU instances. Each sample has the UUID of the GPU. A sample of a GPU instance also
// has the instance's profile and ID (NVIDIA/dcgm-exporter, internal/pkg/rendermetrics/render_metrics.go).
type entity struct{ uuid, profile, instance string }

// samples are the values of each entity, by field.
type samples map[entity]map[string]float64

// parseMetrics reads the fields that are shown from an exporter's page. The parser gets empty lines for all others, because one bad line or a
// repeated TYPE makes it refuse the whole page. Its errors still have the number of the line. If an entity has several samples of a field, the
// first valid one counts: dcgm-exporter repeats a sample for each pod that shares the GPU.
func parseMetrics(text []byte) (samples, error) {
	var shown bytes.Buffer
	for line := range bytes.Lines(text) {
		name, _, _ := bytes.Cut(line, []byte("{"))
		if _, known := mostOf[string(name)]; known {
			shown.Write(bytes.TrimRight(line, "\r\n"))
		}
		shown.WriteByte('\n')
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(&shown)
	if err != nil {
		return nil, err
	}
	found := samples{}
	for field, family := range families {
		for _, m := range family.GetMetric() {
			value, of := m.GetUntyped().GetValue(), entityOf(m)
			if of.uuid == "" || math.IsNaN(value) || value < 0 || value > mostOf[field] {
				continue
			}
			if found[of] == nil {
				found[of] = map[string]float64{}
			}
			if _, repeated := found[of][field]; !repeated {
				found[of][field] = value
			}
		}
	}
	return found, nil
}

func entityOf(m *dto.Metric) (of entity) {
	for _, label := range m.GetLabel() {
		switch label.GetName() {
		case "UUID":
			of.uuid = label.GetValue()
		case "GPU_I_PROFILE":
			of.profile = label.GetValue()
		case "GPU_I_ID":
			of.instance = label.GetValue()
		}
	}
	return of
}

// measure sets the metrics of the node's devices, and returns how many devices have metrics. It ignores samples of other GPUs. A GPUNode does
// not have the IDs of GPU instances. So a partition gets metrics only if no other partition of its GPU has its profile.
func (n *Node) measure(found samples) (measured int) {
	uuids, partitions := map[string]string{}, map[[2]string]int{}
	for _, d := range n.Devices {
		if d.Parent == "" {
			uuids[d.Name] = d.UUID
		}
		partitions[[2]string{d.Parent, d.Profile}]++
	}
	for i := range n.Devices {
		d := &n.Devices[i]
		if d.Parent == "" {
			d.Metrics = metricsOf(found.ofGPU(d.UUID))
		} else if partitions[[2]string{d.Parent, d.Profile}] == 1 {
			d.Metrics = metricsOf(found.ofPartition(uuids[d.Parent], d.Profile))
		}
		measured += explain.Count(d.Metrics != nil)
	}
	return measured
}

// ofGPU returns the values of a GPU. dcgm-exporter has no samples of a GPU in MIG mode itself, unless its flag --devices asks for them. But the
// samples of each of its GPU instances have the GPU's power and temperature.
func (s samples) ofGPU(uuid string) map[string]float64 {
	values := map[string]float64{}
	for of, sampled := range s {
		for field, value := range sampled {
			whole := of == entity{uuid: uuid}
			if whole || of.uuid == uuid && (field == fieldPower || field == fieldTemperature) {
				values[field] = max(values[field], value)
			}
		}
	}
	return values
}

// ofPartition returns the values of the GPU instance with the profile; none if several have it.
func (s samples) ofPartition(uuid, profile string) map[string]float64 {
	var values map[string]float64
	for of, sampled := range s {
		if of.uuid != uuid || of.profile != profile || of.instance == "" {
			continue
		}
		if values != nil {
			return nil
		}
		values = map[string]float64{}
		for field, value := range sampled {
			if field != fieldPower && field != fieldTemperature {
				values[field] = value
			}
		}
	}
	return values
}

// metricsOf returns nil if there are no values.
func metricsOf(values map[string]float64) *Metrics {
	if len(values) == 0 {
		return nil
	}
	of := func(field string, unit float64) *float64 {
		value, ok := values[field]
		if !ok {
			return nil
		}
		return ptr.To(value * unit)
	}
	fromMiB := func(mib float64) *int64 { return ptr.To(int64(mib) << 20) }
	m := &Metrics{UtilizationPercent: of(fieldUtilization, 1), PowerWatts: of(fieldPower, 1), TemperatureCelsius: of(fieldTemperature, 1)}
	if m.UtilizationPercent == nil {
		m.UtilizationPercent = of(fieldActive, 100)
	}
	if used, ok := values[fieldUsed]; ok {
		m.MemoryUsedBytes = fromMiB(used)
		if free, ok := values[fieldFree]; ok {
			m.MemoryTotalBytes = fromMiB(used + free)
		}
	}
	return m
}

// cells are the metrics in a table, in the order of metricsHeader.
func (m *Metrics) cells() []string {
	if m == nil {
		m = &Metrics{}
	}
	number := func(value *float64, unit string) string {
		if value == nil {
			return "-"
		}
		return fmt.Sprintf("%.0f%s", *value, unit)
	}
	memory := "-"
	switch used, total := m.MemoryUsedBytes, m.MemoryTotalBytes; {
	case total != nil:
		memory = fmt.Sprintf("%d/%s", *used>>20, explain.Mebibytes(*total))
	case used != nil:
		memory = explain.Mebibytes(*used)
	}
	return []string{number(m.UtilizationPercent, "%"), memory, number(m.PowerWatts, " W"), number(m.TemperatureCelsius, " C")}
}

// String is the metrics in one line, without those that are missing.
func (m *Metrics) String() string {
	return strings.Join(slices.DeleteFunc(m.cells(), func(text string) bool { return text == "-" }), ", ")
}

// key returns the value that rows are sorted by, and -1 if there is none.
func (m *Metrics) key(by string) float64 {
	switch {
	case m == nil:
	case by == "util" && m.UtilizationPercent != nil:
		return *m.UtilizationPercent
	case by == "memory" && m.MemoryUsedBytes != nil:
		return float64(*m.MemoryUsedBytes)
	}
	return -1
}

// chooseExporter returns the pod of dcgm-exporter among the pods of a node that have its labels. A tenant can give these labels to a pod. So it
// returns none if pods of several namespaces have them, even while only one is ready.
func chooseExporter(pods []*corev1.Pod) (*corev1.Pod, *NoMetrics) {
	// A user can name a node twice: its pods are read by two goroutines.
	pods = slices.DeleteFunc(slices.Clone(pods), podstatus.Ended)
	if len(pods) == 0 {
		return nil, &NoMetrics{Reason: "no pod of dcgm-exporter found"}
	}
	name := func(p *corev1.Pod) string { return p.Namespace + "/" + p.Name }
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { return cmp.Compare(name(a), name(b)) })
	first, last := pods[0], pods[len(pods)-1]
	if first.Namespace != last.Namespace {
		return nil, &NoMetrics{"pods of several namespaces have the labels of dcgm-exporter: give its namespace with --exporter-namespace",
			fmt.Sprintf("pods %s and %s", name(first), name(last))}
	}
	ready := slices.IndexFunc(pods, func(p *corev1.Pod) bool { return p.DeletionTimestamp == nil && podstatus.Ready(p) })
	if ready < 0 {
		return nil, &NoMetrics{"dcgm-exporter is not ready", fmt.Sprintf("pod %s is %s", name(first), cmp.Or(first.Status.Phase, "Unknown"))}
	}
	return pods[ready], nil
}

// mostNamed bounds the nodes that a note names.
const mostNamed = 3

// MissingMetrics returns a note for each reason why nodes have no metrics. The note names some of these nodes. It is pure.
func MissingMetrics(nodes []Node) (notes []string) {
	var reasons []string
	by := map[string][]Node{}
	for _, n := range nodes {
		if n.NoMetrics == nil {
			continue
		}
		reason := n.NoMetrics.Reason
		if by[reason] == nil {
			reasons = append(reasons, reason)
		}
		by[reason] = append(by[reason], n)
	}
	for _, reason := range reasons {
		var names []string
		for _, n := range by[reason] {
			names = append(names, n.Name)
		}
		named := strings.Join(explain.FirstOf(names, mostNamed, "%d more"), ", ")
		note := fmt.Sprintf("no metrics for %s (%s): %s", explain.Number(len(names), "node"), named, reason)
		if first := by[reason][0]; first.NoMetrics.Detail != "" {
			note += fmt.Sprintf(" (%s: %s)", first.Name, first.NoMetrics.Detail)
		}
		notes = append(notes, note)
	}
	return notes
}

// exporters says how many nodes have metrics, and from which namespaces.
func (o Overview) exporters() string {
	nodes, namespaces := 0, []string{}
	for _, n := range o.Nodes {
		if n.Exporter != nil {
			nodes++
			namespaces = append(namespaces, n.Exporter.Namespace)
		}
	}
	if nodes == 0 {
		return "no metrics"
	}
	slices.Sort(namespaces)
	return fmt.Sprintf("metrics for %s from dcgm-exporter in %s", explain.Number(nodes, "node"), strings.Join(slices.Compact(namespaces), ", "))
}
