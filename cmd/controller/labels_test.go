// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/pkg/nodelabels"
)

func TestRemoveLabels(t *testing.T) {
	node := func(name, manager string) corev1.Node {
		return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "u", Labels: map[string]string{"nvidia.com/gpu.count": "4"}, ManagedFields: []metav1.ManagedFieldsEntry{{
			Manager: manager, Operation: metav1.ManagedFieldsOperationApply, APIVersion: "v1", FieldsType: "FieldsV1",
			FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{"f:nvidia.com/gpu.count":{}}}}`),
		}}}}
	}
	nodes := corev1.NodeList{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"},
		Items:    []corev1.Node{node("ours", nodelabels.Manager), node("theirs", "gfd"), node("healthy", "gfd")},
	}
	nodes.Items[2].Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady}, {Type: "GPUsHealthy"}}
	patched := map[string]string{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var answer any = nodes
		if r.Method == http.MethodPatch {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			patched[r.URL.Path+"?"+r.URL.RawQuery] = r.Header.Get("Content-Type") + " " + string(body)
			answer = corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}}
		}
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	defer server.Close()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	text := "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: \"" + server.URL + "\"}}]\ncontexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n"
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	err := run(t.Context(), []string{"remove-labels", "--kubeconfig=" + kubeconfig}, &out, io.Discard)
	if err != nil || !strings.Contains(out.String(), "from 1 nodes, and the conditions GPUsHealthy and GPURepairNeeded from 1") || len(patched) != 2 {
		t.Errorf("%q, %v, patched %v", out.String(), err, patched)
	}
	const request = "/api/v1/nodes/healthy/status?"
	if want := `application/strategic-merge-patch+json {"status":{"conditions":[{"$patch":"delete","type":"GPUsHealthy"},{"$patch":"delete","type":"GPURepairNeeded"}]}}`; patched[request] != want {
		t.Errorf("the condition is removed by %q, want %q", patched[request], want)
	}
	delete(patched, request)
	for request, body := range patched {
		// No force: it must not take labels of others.
		if !strings.HasPrefix(request, "/api/v1/nodes/ours?fieldManager="+nodelabels.Manager) || strings.Contains(request, "force=true") ||
			!strings.HasPrefix(body, "application/apply-patch+yaml ") || strings.Contains(body, "labels") {
			t.Errorf("%s: %s", request, body)
		}
	}
	server.Close()
	for _, test := range []struct{ arg, want string }{
		{"x", `unexpected argument "x"`}, {"--kubeconfig=/absent", "configure API client"}, {"--kubeconfig=" + kubeconfig, "remove labels: list nodes"},
	} {
		if err := run(t.Context(), []string{"remove-labels", test.arg}, io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %s", test.arg, err, test.want)
		}
	}
	if err := run(t.Context(), []string{"remove-labels", "-h"}, io.Discard, io.Discard); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("help: %v", err)
	}
}
