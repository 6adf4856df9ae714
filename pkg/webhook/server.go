// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/net/netutil"
	"k8s.io/klog/v2"
)

// Bounds of what callers can make the server hold. Every pod of the cluster may reach the port, and an API server presents a client
// certificate only if its administrator configured one, so callers are not authenticated. TestWebhookFlood of test/intruder measures the
// worst case: some 40 MiB for each body that is decoded, garbage included. A request beyond a bound gets an HTTP error, which the API server
// ignores (failurePolicy Ignore): the node checks the parameters.
const (
	// bodyMax is enough for two claims with 32 configurations of 10 KiB each. The API server sends the old object too.
	bodyMax = 1 << 20
	// reviewsMax bounds the bodies in memory. A review takes less than a millisecond for a usual claim.
	reviewsMax = 2
	// turnMax is how long a request waits for a review. The API server waits for three seconds.
	turnMax = time.Second
	// bodyTime is how long the body of a request may take to arrive, while it occupies a review.
	bodyTime = time.Second

	connectionsMax = 64
	headerMax      = 8 << 10
	headerTime     = 2 * time.Second
	requestTime    = 5 * time.Second
	idleTime       = 30 * time.Second
	drainTime      = 10 * time.Second
)

// server serves one handler over HTTPS while the manager runs. It is controller-runtime's server with bounds.
type server struct {
	port int
	tls  *tls.Config
	// handler is within the bounds.
	handler http.Handler
}

// newServer starts nothing. The server completes no handshake while certificate returns an error; the API server treats such a webhook
// as unavailable. HTTP/1.1 only: with HTTP/2 each connection could have many bodies in buffers.
func newServer(port int, certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error), handler http.Handler, refused prometheus.Counter) *server {
	mux := http.NewServeMux()
	mux.Handle(Path, bounded(handler, refused))
	return &server{port: port, handler: mux, tls: &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, GetCertificate: certificate,
	}}
}

// NeedLeaderElection implements manager.LeaderElectionRunnable. Every replica serves.
func (*server) NeedLeaderElection() bool { return false }

// Start implements manager.Runnable. It blocks until ctx is done and the requests in progress are answered.
func (s *server) Start(ctx context.Context) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort("", strconv.Itoa(s.port)))
	if err != nil {
		return fmt.Errorf("listen for webhook: %w", err)
	}
	return s.serve(ctx, listener)
}

func (s *server) serve(ctx context.Context, listener net.Listener) error {
	server := &http.Server{
		Handler: s.handler, ReadHeaderTimeout: headerTime, ReadTimeout: requestTime, WriteTimeout: requestTime, IdleTimeout: idleTime,
		MaxHeaderBytes: headerMax, ErrorLog: klog.NewStandardLogger("INFO"),
	}
	drained := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		timed, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
		defer cancel()
		drained <- server.Shutdown(timed)
	})
	err := server.Serve(tls.NewListener(netutil.LimitListener(listener, connectionsMax), s.tls))
	if stop() {
		return fmt.Errorf("serve webhook on %s: %w", listener.Addr(), err)
	}
	if err := <-drained; err != nil {
		return fmt.Errorf("shut webhook down: %w", err)
	}
	return nil
}

// bounded hands the handler whole bodies within the bounds. It reads none before it is the request's turn.
func bounded(handler http.Handler, refused prometheus.Counter) http.Handler {
	reviews := make(chan struct{}, reviewsMax)
	refuse := func(w http.ResponseWriter, code int) {
		refused.Inc()
		w.Header().Set("Connection", "close")
		http.Error(w, http.StatusText(code), code)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength > bodyMax {
			refuse(w, http.StatusRequestEntityTooLarge)
			return
		}
		turn := time.NewTimer(turnMax)
		defer turn.Stop()
		select {
		case reviews <- struct{}{}:
			defer func() { <-reviews }()
		case <-turn.C:
			refuse(w, http.StatusServiceUnavailable)
			return
		case <-r.Context().Done():
			return
		}
		// Fails only for a connection that has gone.
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime))
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, bodyMax))
		if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
			refuse(w, http.StatusRequestEntityTooLarge)
			return
		}
		if err != nil {
			refuse(w, http.StatusRequestTimeout)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		handler.ServeHTTP(w, r)
	})
}
