// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"
)

// TestIdleWithoutClaims: a cluster whose API server knows no claims is asked once, and the controller is ready.
func TestIdleWithoutClaims(t *testing.T) {
	asked := make(chan string, 100)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.URL.Path
		http.NotFound(w, r)
	}))
	defer server.Close()
	c, err := New(Config{
		REST: &rest.Config{Host: server.URL}, DriverName: "gpu.nvidia.com", ResourceName: "nvidia.com/gpu",
		Namespace: "tandem-system", LeaseName: "tandem-controller", Identity: "test", Registerer: prometheus.NewRegistry(),
	})
	if err != nil {
		t.Fatal(err)
	}
	if c.Ready() == nil {
		t.Error("ready before it runs")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	for deadline := time.Now().Add(time.Minute); c.Ready() != nil; <-ticker.C {
		if time.Now().After(deadline) {
			t.Fatal(c.Ready())
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if len(asked) != 1 {
		t.Errorf("asked %d times", len(asked))
	}
}
