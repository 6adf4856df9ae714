// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
)

func newController(t *testing.T, host string, webhookPort int) *Controller {
	t.Helper()
	return newControllerOf(t, "pod-1", host, webhookPort)
}

// setLogger is not safe for concurrent use, and tests run in parallel.
var setLogger = sync.OnceFunc(func() { ctrllog.SetLogger(klog.Background()) })

func newControllerOf(t *testing.T, pod, host string, webhookPort int) *Controller {
	t.Helper()
	setLogger()
	c, err := New(Config{
		REST: &rest.Config{Host: host}, DriverName: testDriver, ResourceName: testResource,
		Namespace: "ns", LeaseName: "l", Identity: pod, WebhookName: "w", WebhookPort: webhookPort, Registerer: prometheus.NewRegistry(),
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func freePort(t *testing.T) int {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port
}

// An API server that is away is awaited, and being stopped meanwhile is no error and leaves nothing running.
func TestRunAwaitsTheAPIServer(t *testing.T) {
	asked := make(chan struct{}, 1000)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked <- struct{}{}
		http.Error(w, "not now", http.StatusServiceUnavailable)
	}))
	defer server.Close()
	port := freePort(t)
	c := newController(t, server.URL, port)
	select {
	case <-asked:
		t.Error("New made a request")
	case <-time.After(50 * time.Millisecond):
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	<-asked
	if c.Ready() == nil {
		t.Error("ready without an API server")
	}
	// The webhook listens: its certificate comes later.
	for {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			conn.Close()
			break
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case err := <-done:
			t.Fatalf("ended without a webhook: %v", err)
		}
	}
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("does not stop")
	}
	server.Close()
	var left string
	for range 200 {
		if left = goroutines(); left == "" {
			return
		}
		time.Sleep(10 * time.Millisecond) // those that were told to end take a moment
	}
	t.Errorf("still running:\n%s", left)
}

// goroutines are those of this package and of what it starts.
func goroutines() string {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	var own []string
	for stack := range strings.SplitSeq(string(stacks), "\n\n") {
		if strings.Contains(stack, "sigs.k8s.io/controller-runtime") && !strings.Contains(stack, "testing.tRunner") {
			own = append(own, stack)
		}
	}
	return strings.Join(own, "\n\n")
}

func TestMetricsAreRegisteredOnce(t *testing.T) {
	registry := prometheus.NewRegistry()
	newMetrics(registry)
	defer func() {
		if err, is := recover().(error); !is || !strings.Contains(err.Error(), "duplicate metrics") {
			t.Errorf("got %v", err)
		}
	}()
	newMetrics(registry)
}
