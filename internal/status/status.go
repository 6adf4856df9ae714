// SPDX-License-Identifier: Apache-2.0

// Package status answers /healthz, /readyz and /metrics over HTTP. Its callers report what is not ready.
package status

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Server serves the node agent's own state. All methods are safe for concurrent use.
type Server struct {
	address string
	metrics prometheus.Gatherer

	mu     sync.Mutex
	checks map[string]func() error
}

// New does nothing visible. An empty address serves nothing.
func New(address string, metrics prometheus.Gatherer) *Server {
	return &Server{address: address, metrics: metrics, checks: map[string]func() error{}}
}

// Check adds or replaces what must be nil for the agent to be ready. It must answer from memory.
func (s *Server) Check(name string, check func() error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checks[name] = check
}

// Waiting makes the agent not ready for a reason, until Check or Waiting replaces it; nil makes the check pass.
func (s *Server) Waiting(name string, reason error) {
	s.Check(name, func() error { return reason })
}

// Ready is nil, or names every check that fails, of some checks or of all.
func (s *Server) Ready(of ...string) error {
	s.mu.Lock()
	checks := maps.Clone(s.checks)
	s.mu.Unlock()
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(checks)) {
		if len(of) > 0 && !slices.Contains(of, name) {
			continue
		}
		if err := checks[name](); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// Run serves until ctx is done.
func (s *Server) Run(ctx context.Context) error {
	if s.address == "" {
		<-ctx.Done()
		return nil
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.address)
	if err != nil {
		return fmt.Errorf("serve status: %w", err)
	}
	// Every pod may connect.
	bounded := &connections{open: map[net.Conn]connection{}}
	server := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 5 * time.Second, WriteTimeout: 10 * time.Second,
		IdleTimeout: 30 * time.Second, MaxHeaderBytes: 8 << 10, ConnState: bounded.changed,
	}
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(closed)
		// Nothing here is worth waiting for.
		_ = server.Close()
	})
	err = server.Serve(listener)
	if stop() {
		return fmt.Errorf("serve status on %s: %w", s.address, err)
	}
	<-closed
	return nil
}

// scrapesMax bounds the memory for answers to /metrics.
const scrapesMax = 4

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := s.Ready(); err != nil {
			http.Error(w, strings.TrimSpace(err.Error()), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.metrics, promhttp.HandlerOpts{MaxRequestsInFlight: scrapesMax}))
	return mux
}
