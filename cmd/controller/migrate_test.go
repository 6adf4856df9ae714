// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestMigrateErrors(t *testing.T) {
	for args, want := range map[string]string{
		"x":                        `unexpected argument "x"`,
		"--back":                   "--back needs --plan or --apply",
		"--node=a":                 "--node needs --plan or --apply",
		"-f=a --apply":             "-f excludes --plan and --apply",
		"--apply --timeout=0s":     "--timeout: 0s is not positive",
		"--daemonset=a":            "want namespace/name",
		"-f=/absent":               "read values: open /absent",
		"--kubeconfig=/absent":     "configure API client",
		"--apply --context=absent": "configure API client",
	} {
		err := runMigrate(t.Context(), strings.Fields(args), strings.NewReader(""), io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("migrate %s: got %v, want %s", args, err, want)
		}
	}
}

func TestMigrateValues(t *testing.T) {
	var out bytes.Buffer
	if err := runMigrate(t.Context(), []string{"-f", "nvidia-device-plugin=-"}, strings.NewReader("nvidiaDriverRoot: /run/nvidia/driver"), &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(out.String(), "\ndriverRoot: /run/nvidia/driver\n") {
		t.Errorf("values:\n%s", out.String())
	}
}

// TestMigrateReadsTheCluster: an API server without anything of NVIDIA's. The plan refuses, and nothing is written.
func TestMigrateReadsTheCluster(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			t.Errorf("%s %s", r.Method, r.URL)
		}
		w.Header().Set("Content-Type", "application/json")
		list := map[string]metav1.TypeMeta{
			"daemonsets": {APIVersion: "apps/v1", Kind: "DaemonSetList"}, "nodes": {APIVersion: "v1", Kind: "NodeList"},
			"secrets": {APIVersion: "v1", Kind: "SecretList"}, "resourceclaims": {APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaimList"},
		}[filepath.Base(r.URL.Path)]
		if err := json.NewEncoder(w).Encode(list); err != nil {
			t.Error(err)
		}
	}))
	defer server.Close()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	text := "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: \"" + server.URL + "\"}}]\ncontexts: [{name: c, context: {cluster: c}}]\n"
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"":        "the cluster has no Helm release of NVIDIA's device plugin",
		"--apply": "no DaemonSet of NVIDIA's device plugin or DRA driver was found",
	} {
		var out bytes.Buffer
		err := runMigrate(t.Context(), append(strings.Fields(args), "--context=c", "--kubeconfig="+kubeconfig), nil, &out, io.Discard)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("migrate %s: got %v, want %s", args, err, want)
		}
		if args != "" && !strings.Contains(out.String(), "Plan: move 0 nodes") {
			t.Errorf("plan:\n%s", out.String())
		}
	}
}
