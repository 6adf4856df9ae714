// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// measuredNode has a whole GPU a, a GPU b with partitions, and a GPU whose UUID is not known.
func measuredNode(profiles ...string) Node {
	n := Node{Name: "node-1", Devices: []Device{{Name: "gpu-0", UUID: "GPU-a"}, {Name: "gpu-1", UUID: "GPU-b"}, {Name: "gpu-2"}}}
	for i, profile := range profiles {
		n.Devices = append(n.Devices, Device{Name: fmt.Sprintf("gpu-1-mig-%d", i), UUID: "MIG-" + profile, Parent: "gpu-1", Profile: profile})
	}
	return n
}

// TestMeasure: which values of a page are shown, and for which device.
func TestMeasure(t *testing.T) {
	for name, c := range map[string]struct {
		page     string
		profiles []string
		want     string
	}{
		"all fields": {page: `
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",pci_bus_id="00000000:1B:00.0",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="node-1",container="main",namespace="ml",pod="train-0"} 87
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a"} 40960
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a"} 40120
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a"} 612.4
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a"} 61
`, want: "gpu-0: 87% 40960/81080 MiB 612 W 61 C"},
		"nothing":             {},
		"a web page":          {page: "<html>\n<p>hello {\n"},
		"some fields":         {page: `DCGM_FI_DEV_FB_USED{UUID="GPU-a"} 7`, want: "gpu-0: - 7 MiB - -"},
		"free alone":          {page: `DCGM_FI_DEV_FB_FREE{UUID="GPU-a"} 7`, want: "gpu-0: - - - -"},
		"a busy engine":       {page: `DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-a"} 0.714`, want: "gpu-0: 71% - - -"},
		"both":                {page: "DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID=\"GPU-a\"} 0.714\nDCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-a\"} 100", want: "gpu-0: 100% - - -"},
		"zero":                {page: `DCGM_FI_DEV_GPU_UTIL{UUID="GPU-a"} 0`, want: "gpu-0: 0% - - -"},
		"other fields":        {page: "up 1\nDCGM_FI_DEV_SM_CLOCK{UUID=\"GPU-a\"} 1\nDCGM_FI_DEV_GPU_UTILS{UUID=\"GPU-a\"} 1\nxDCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-a\"} 1"},
		"foreign labels":      {page: "DCGM_FI_DEV_GPU_UTIL{uuid=\"GPU-a\",gpu_uuid=\"GPU-a\",x=\"\x1b[2J\"} 1"},
		"another node's":      {page: `DCGM_FI_DEV_GPU_UTIL{UUID="GPU-z"} 1`},
		"without labels":      {page: "DCGM_FI_DEV_GPU_UTIL 1\nDCGM_FI_DEV_GPU_UTIL{} 2"},
		"a partition's UUID":  {page: `DCGM_FI_DEV_GPU_UTIL{UUID="MIG-1g.10gb"} 1`, profiles: []string{"1g.10gb"}},
		"not a number":        {page: `DCGM_FI_DEV_GPU_UTIL{UUID="GPU-a"} NaN`},
		"infinite":            {page: "DCGM_FI_DEV_POWER_USAGE{UUID=\"GPU-a\"} +Inf\nDCGM_FI_DEV_GPU_TEMP{UUID=\"GPU-a\"} -Inf"},
		"negative":            {page: `DCGM_FI_DEV_FB_USED{UUID="GPU-a"} -1`},
		"blank":               {page: "DCGM_FI_DEV_GPU_TEMP{UUID=\"GPU-a\"} 2147483632\nDCGM_FI_DEV_POWER_USAGE{UUID=\"GPU-a\"} 140737488355328\nDCGM_FI_DEV_FB_USED{UUID=\"GPU-a\"} 9.223372036854775e+18"},
		"shared by pods":      {page: "DCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-a\",pod=\"a\"} 30\nDCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-a\",pod=\"b\"} 40", want: "gpu-0: 30% - - -"},
		"blank, then a value": {page: "DCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-a\"} 2147483632\nDCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-a\"} 40", want: "gpu-0: 40% - - -"},
		"repeated comments":   {page: strings.Repeat("# TYPE DCGM_FI_DEV_GPU_UTIL gauge\n# HELP DCGM_FI_DEV_GPU_UTIL x\n", 2) + "DCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-a\"} 1\r\n", want: "gpu-0: 1% - - -"},
		"partitions": {page: `
DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-b",GPU_I_PROFILE="3g.40gb",GPU_I_ID="1"} 0.5
DCGM_FI_DEV_FB_USED{UUID="GPU-b",GPU_I_PROFILE="3g.40gb",GPU_I_ID="1"} 100
DCGM_FI_DEV_POWER_USAGE{UUID="GPU-b",GPU_I_PROFILE="3g.40gb",GPU_I_ID="1"} 300
DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-b",GPU_I_PROFILE="1g.10gb",GPU_I_ID="9"} 0.25
DCGM_FI_DEV_POWER_USAGE{UUID="GPU-b",GPU_I_PROFILE="1g.10gb",GPU_I_ID="9"} 300`,
			profiles: []string{"3g.40gb", "1g.10gb", "2g.20gb"}, want: "gpu-1: - - 300 W -, gpu-1-mig-0: 50% 100 MiB - -, gpu-1-mig-1: 25% - - -"},
		"a GPU and its partition": {page: "DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID=\"GPU-b\"} 0.1\nDCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID=\"GPU-b\",GPU_I_PROFILE=\"3g.40gb\",GPU_I_ID=\"1\"} 0.2",
			profiles: []string{"3g.40gb"}, want: "gpu-1: 10% - - -, gpu-1-mig-0: 20% - - -"},
		"two partitions of a profile": {page: "DCGM_FI_DEV_FB_USED{UUID=\"GPU-b\",GPU_I_PROFILE=\"3g.40gb\",GPU_I_ID=\"1\"} 1",
			profiles: []string{"3g.40gb", "3g.40gb"}},
		"two GPU instances of a profile": {page: "DCGM_FI_DEV_FB_USED{UUID=\"GPU-b\",GPU_I_PROFILE=\"3g.40gb\",GPU_I_ID=\"1\"} 1\nDCGM_FI_DEV_FB_USED{UUID=\"GPU-b\",GPU_I_PROFILE=\"3g.40gb\",GPU_I_ID=\"2\"} 2",
			profiles: []string{"3g.40gb"}},
		"a GPU instance of another GPU": {page: "DCGM_FI_DEV_FB_USED{UUID=\"GPU-a\",GPU_I_PROFILE=\"3g.40gb\",GPU_I_ID=\"1\"} 1", profiles: []string{"3g.40gb"}},
		"a partition without a profile": {page: `DCGM_FI_DEV_FB_USED{UUID="GPU-b"} 1`, profiles: []string{""}, want: "gpu-1: - 1 MiB - -"},
		"not closed":                    {page: `DCGM_FI_DEV_GPU_UTIL{UUID="GPU-a`, want: "error in line 1"},
		"no value":                      {page: "# TYPE\nup 1\r\nDCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-a\"} high\n", want: "error in line 3"},
	} {
		n := measuredNode(c.profiles...)
		found, err := parseMetrics([]byte(c.page))
		measured := n.measure(found)
		var shown []string
		for _, d := range n.Devices {
			if d.Metrics != nil {
				shown = append(shown, d.Name+": "+strings.Join(d.Metrics.cells(), " "))
			}
		}
		got := strings.Join(shown, ", ")
		if err != nil {
			got, _, _ = strings.Cut(strings.TrimPrefix(err.Error(), "text format parsing "), ":")
		}
		if got != c.want || measured != len(shown) {
			t.Errorf("%s: %q, want %q (%d measured, %v)", name, got, c.want, measured, err)
		}
	}
}

func FuzzParseMetrics(f *testing.F) {
	f.Add([]byte("DCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-a\",GPU_I_ID=\"\\n\"} 1e3\n"))
	f.Fuzz(func(t *testing.T, page []byte) {
		found, err := parseMetrics(page)
		if err != nil {
			return
		}
		n := measuredNode("1g.10gb")
		n.measure(found)
		for _, d := range n.Devices {
			if text := strings.Join(d.Metrics.cells(), ""); len(text) > 64 || strings.Contains(text, "NaN") {
				t.Errorf("%q", text)
			}
		}
	})
}

func exporterPod(namespace, name string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": "nvidia-dcgm-exporter"}},
		Spec:       corev1.PodSpec{NodeName: "node-1"},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func notReady(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }
func ending(p *corev1.Pod)   { p.DeletionTimestamp = &metav1.Time{} }
func failed(p *corev1.Pod) {
	p.Status.Phase, p.Status.Conditions[0].Status = corev1.PodFailed, corev1.ConditionFalse
}

func TestChooseExporter(t *testing.T) {
	for name, c := range map[string]struct {
		pods []*corev1.Pod
		want string
	}{
		"none":          {nil, "no pod of dcgm-exporter found"},
		"one":           {[]*corev1.Pod{exporterPod("gpu-operator", "a")}, "gpu-operator/a"},
		"not ready":     {[]*corev1.Pod{exporterPod("gpu-operator", "a", notReady)}, "dcgm-exporter is not ready: pod gpu-operator/a is Running"},
		"an update":     {[]*corev1.Pod{exporterPod("gpu-operator", "a", ending), exporterPod("gpu-operator", "b")}, "gpu-operator/b"},
		"two charts":    {[]*corev1.Pod{exporterPod("gpu-operator", "b"), exporterPod("gpu-operator", "a")}, "gpu-operator/a"},
		"an impostor":   {[]*corev1.Pod{exporterPod("gpu-operator", "a"), exporterPod("evil", "z")}, "several namespaces: pods evil/z and gpu-operator/a"},
		"one not ready": {[]*corev1.Pod{exporterPod("gpu-operator", "a", notReady), exporterPod("evil", "z")}, "several namespaces: pods evil/z and gpu-operator/a"},
		"one evicted":   {[]*corev1.Pod{exporterPod("evil", "z", failed), exporterPod("gpu-operator", "a"), exporterPod("gpu-operator", "0", failed)}, "gpu-operator/a"},
		"all evicted":   {[]*corev1.Pod{exporterPod("gpu-operator", "a", failed)}, "no pod of dcgm-exporter found"},
	} {
		before := slices.Clone(c.pods)
		pod, none := chooseExporter(c.pods)
		if !slices.Equal(c.pods, before) {
			t.Errorf("%s: the pods are sorted in place, and a node that is named twice has them twice", name)
		}
		var got string
		switch {
		case pod != nil:
			got = pod.Namespace + "/" + pod.Name
		case none.Detail == "":
			got = none.Reason
		default:
			got = strings.ReplaceAll(none.Reason, "pods of several namespaces have the labels of dcgm-exporter: give its namespace with --exporter-namespace", "several namespaces") + ": " + none.Detail
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// TestMissingMetrics: there is one note for each reason, however many nodes have it.
func TestMissingMetrics(t *testing.T) {
	nodes := []Node{{Name: "ok"}, {Name: "slow", NoMetrics: &NoMetrics{"too slow", "pod a/b"}}}
	for i := range 5 {
		nodes = append(nodes, Node{Name: fmt.Sprintf("n-%d", i), NoMetrics: &NoMetrics{Reason: "none there"}})
	}
	want := []string{"no metrics for 1 node (slow): too slow (slow: pod a/b)", "no metrics for 5 nodes (n-0, n-1, n-2, 2 more): none there"}
	if got := MissingMetrics(nodes); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}
