// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// exporter is a ready pod with the labels of GPU Operator's dcgm-exporter.
func exporter(namespace, node string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: "dcgm-exporter-" + node, UID: types.UID("uid-exporter-" + node), Labels: map[string]string{"app": "nvidia-dcgm-exporter"},
		},
		Spec: corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue},
		}},
	}
}

// measured is the world with an exporter on node-1 and node-2.
func measured(w world) world {
	w.objects = append(slices.Clone(w.objects), runtime.Object(exporter("gpu-operator", "node-1")), exporter("gpu-operator", "node-2"))
	w.scrape = func(_ context.Context, pod *corev1.Pod) ([]byte, error) {
		for _, m := range w.machines {
			if m.name == pod.Spec.NodeName {
				return []byte(m.metrics()), nil
			}
		}
		return nil, fmt.Errorf("no machine %s", pod.Spec.NodeName)
	}
	return w
}

// metrics is the page of dcgm-exporter. It has no samples of a GPU in MIG mode, only those of its GPU instances.
func (m *machine) metrics() string {
	var page strings.Builder
	sample := func(field, labels string, value float64) {
		fmt.Fprintf(&page, "# HELP %[1]s A field of DCGM.\n# TYPE %[1]s gauge\n%[1]s{%[2]s,Hostname=%[4]q} %[3]g\n", field, labels, value, m.name)
	}
	for i, g := range m.gpus {
		if !g.Health.Healthy() {
			continue
		}
		gpu := fmt.Sprintf("gpu=\"%d\",UUID=%q", i, g.UUID)
		refs, labels, total := []device.Ref{g.Ref()}, []string{gpu}, []float64{81080}
		if g.MIGEnabled {
			refs, labels, total = nil, nil, nil
			for at, p := range g.Partitions {
				refs, total = append(refs, p.Ref), append(total, float64(p.Capacity.MemoryBytes>>20))
				labels = append(labels, fmt.Sprintf("%s,GPU_I_PROFILE=%q,GPU_I_ID=\"%d\"", gpu, p.Profile, at+1))
			}
		}
		for at, of := range labels {
			busy := 0.0
			if slices.ContainsFunc(m.holds, func(h ledger.Hold) bool { return h.Device == refs[at] }) {
				busy = float64((i*37 + at*43) % 98)
			}
			heat := busy
			if g.MIGEnabled {
				sample("DCGM_FI_PROF_GR_ENGINE_ACTIVE", of, busy/100)
				heat = 40
			} else {
				sample("DCGM_FI_DEV_GPU_UTIL", of, busy)
			}
			used := 4 + math.Round(busy/100*total[at]*0.8)
			sample("DCGM_FI_DEV_FB_USED", of, used)
			sample("DCGM_FI_DEV_FB_FREE", of, total[at]-used)
			sample("DCGM_FI_DEV_POWER_USAGE", of, 72.4+heat*5)
			sample("DCGM_FI_DEV_GPU_TEMP", of, 31+heat/3)
		}
	}
	return page.String()
}

// TestTopUsesTheProxy: top reads the page through the pod proxy, with the flags of the connection and as the user that they name.
func TestTopUsesTheProxy(t *testing.T) {
	m := h100s("node-1", 1)
	pods := corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}, Items: []corev1.Pod{*exporter("gpu-operator", "node-1")}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user := r.Header.Get("Impersonate-User"); user != "jane" {
			t.Errorf("%s as %q", r.URL, user)
		}
		w.Header().Set("Content-Type", "application/json")
		var err error
		switch r.URL.Path {
		case "/apis/tandem-gpu.dev/v1alpha1/gpunodes/node-1":
			err = json.NewEncoder(w).Encode(m.gpuNode())
		case "/api/v1/pods":
			if of := r.URL.Query().Get("fieldSelector"); of != "spec.nodeName=node-1" {
				t.Errorf("pods of %q", of)
			}
			err = json.NewEncoder(w).Encode(pods)
		case "/api/v1/namespaces/gpu-operator/pods/dcgm-exporter-node-1:9400/proxy/metrics":
			_, err = fmt.Fprint(w, m.metrics())
		default:
			t.Errorf("%s %s", r.Method, r.URL)
		}
		if err != nil {
			t.Error(err)
		}
	}))
	defer server.Close()
	if got := runAgainst(t, server.URL, "top", "node-1", "--as", "jane"); !strings.Contains(got, "Free    0%     4/81080 MiB") {
		t.Error(got)
	}
}
