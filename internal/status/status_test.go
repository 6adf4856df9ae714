// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

func TestEndpoints(t *testing.T) {
	metrics := prometheus.NewRegistry()
	counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "tandem_test_total", Help: "x"})
	metrics.MustRegister(counter)
	s := New("", metrics)
	server := httptest.NewServer(s.handler())
	defer server.Close()
	want := func(path string, code int, texts ...string) {
		t.Helper()
		got, body := get(t, server.URL+path)
		if got != code {
			t.Errorf("%s: code is %d, want %d (%s)", path, got, code, body)
		}
		for _, text := range texts {
			if !strings.Contains(body, text) {
				t.Errorf("%s: %q lacks %q", path, body, text)
			}
		}
	}
	want("/healthz", 200, "ok")
	want("/readyz", 200, "ok")
	want("/metrics", 200, "tandem_test_total 0")
	want("/other", 404)
	s.Waiting("driver", errors.New("no NVIDIA driver"))
	s.Check("claims", func() error { return errors.New("not registered") })
	want("/healthz", 200)
	want("/readyz", 503, "claims: not registered\ndriver: no NVIDIA driver")
	s.Waiting("driver", nil)
	want("/readyz", 503, "claims")
	s.Check("claims", func() error { return nil })
	want("/readyz", 200, "ok")
}

func TestRun(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	if err := New(address, prometheus.NewRegistry()).Run(t.Context()); err == nil || !strings.Contains(err.Error(), address) {
		t.Errorf("on an address in use: got %v", err)
	}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	for _, address := range []string{address, ""} {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- New(address, prometheus.NewRegistry()).Run(ctx) }()
		if address != "" {
			for {
				response, err := http.Get(fmt.Sprintf("http://%s/healthz", address)) //nolint:noctx // until it listens
				if err == nil {
					response.Body.Close()
					break
				}
			}
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("stopped at %q: %v", address, err)
		}
	}
}
