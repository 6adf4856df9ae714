// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

// Back does not go on without the agents of nodes that Tandem serves: it would neither set the mode nor wait until Tandem serves nothing.
func TestBackWithoutSeeingTheAgents(t *testing.T) {
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "a-gpus"}, Spec: resourceapi.ResourceSliceSpec{Driver: "gpu.nvidia.com", NodeName: ptr.To("a")},
	}
	for name, c := range map[string]struct {
		slices, limits bool
		want           string
	}{
		"Dual":             {true, true, "its GPUNode offers nvidia.com/gpu"},
		"DevicePluginOnly": {false, true, "its GPUNode offers nvidia.com/gpu"},
		"ClaimsOnly":       {true, false, "it has 1 ResourceSlices of gpu.nvidia.com"},
	} {
		t.Run(name, func(t *testing.T) {
			w := movedWorld(t, plugin)
			if c.slices {
				must[any](w, nil, w.client.Tracker().Add(slice.DeepCopy()))
			}
			if c.limits {
				w.gpuNodes["a"].Status.ExtendedResource = "nvidia.com/gpu"
			}
			w.withoutBinding()
			n := w.nodes(true)
			n.Only = "a"
			w.wantError(w.planned(n), "node a: no agent of Tandem is found there, although "+c.want, "give its namespace with --namespace")
			w.wantError(w.migrate(n), c.want)
			n.Namespace = "a-typo"
			w.wantError(w.migrate(n), c.want)
			w.wantModeRestored("a")
			w.wantMoved()

			n.Namespace = "tandem-system"
			w.interfere = func(string) {
				_ = w.client.Tracker().Delete(resourceapi.SchemeGroupVersion.WithResource("resourceslices"), "", "a-gpus")
			}
			if err := w.migrate(n); err != nil {
				t.Error(err)
			}
			w.wantMoved("a=back", "a=")
		})
	}

	// The same where an earlier run had the namespace, and while NVIDIA's software returns. ResourceSlices are NVIDIA's then.
	w := movedWorld(t, plugin)
	must[any](w, nil, w.client.Tracker().Add(slice.DeepCopy()))
	w.label("a", Label, returning)
	w.react("a")
	w.gpuNodes["a"].Status.ExtendedResource = "nvidia.com/gpu"
	w.withoutBinding()
	n := w.nodes(true)
	n.Only = "a"
	w.wantError(w.planned(n), "node a: no agent of Tandem is found there, although its GPUNode offers nvidia.com/gpu")
	missing, err := n.nvidiaMissing(t.Context(), []daemonSet{{*w.set("plugin"), devicePlugin}}, "a")
	if must(w, missing, err); !strings.Contains(missing, "give its namespace with --namespace") {
		t.Errorf("waits for %q", missing)
	}
	w.gpuNodes["a"].Status.ExtendedResource = ""
	if err := w.migrate(n); err != nil {
		t.Error(err)
	}
	w.wantMoved("a=")

	// The agent is missed after the plan.
	w = movedWorld(t, plugin)
	n = w.nodes(true)
	plan, err := n.Plan(t.Context())
	must(w, plan, err)
	must[any](w, nil, w.client.Tracker().Add(slice.DeepCopy()))
	w.withoutBinding()
	synctest.Test(t, func(t *testing.T) {
		w.wantError(n.Apply(t.Context(), plan), "node a: no agent of Tandem is found there")
	})
	w.wantMoved()
}

// Where nothing shows that Tandem serves a node, its agent is missed in the plan only.
func TestBackWithoutAgents(t *testing.T) {
	w := movedWorld(t, plugin)
	plan, err := w.nodes(true).Plan(t.Context())
	if text := must(w, plan, err).String(); strings.Contains(text, "no agent") {
		t.Error(text)
	}
	w.withoutBinding()
	plan, err = w.nodes(true).Plan(t.Context())
	if text := must(w, plan, err).String(); !strings.Contains(text, "node a: 2 running pods with GPUs by limits, no agent of Tandem is found") ||
		!strings.Contains(text, "give its namespace with --namespace") || plan.Err() != nil {
		t.Error(text)
	}
	if err := w.migrate(w.nodes(true)); err != nil {
		t.Error(err)
	}
	w.wantMoved("a=back", "a=", "b=back", "b=", "c=back", "c=")
}

// The mode is restored when the time for the move has passed. The fake client ignores contexts.
func TestRestoreModeAfterTheTimeout(t *testing.T) {
	patched := false
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		patched = patched || r.Method == http.MethodPatch
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(&corev1.Node{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
			ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: map[string]string{modeAnnotation: ""}},
		})
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := (&Nodes{Client: client}).restoreMode(ctx, "a"); err != nil || !patched {
		t.Errorf("patched: %t, %v", patched, err)
	}
}
