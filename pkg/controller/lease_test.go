// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

// leaseServer is an API server that serves one Lease and fails all other requests.
type leaseServer struct {
	*httptest.Server
	mu    sync.Mutex
	lease *coordinationv1.Lease
	// served is called for each request of the Lease, after a write and before the answer.
	served func(*http.Request)
}

func newLeaseServer(t *testing.T, lease *coordinationv1.Lease) *leaseServer {
	t.Helper()
	s := &leaseServer{lease: lease, served: func(*http.Request) {}}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

func (s *leaseServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !strings.Contains(r.URL.Path, "/leases") {
		http.Error(w, "not now", http.StatusServiceUnavailable)
		return
	}
	if r.Method != http.MethodGet {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		lease := &coordinationv1.Lease{}
		if _, _, err := clientscheme.Codecs.UniversalDeserializer().Decode(body, nil, lease); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		s.mu.Lock()
		s.lease = lease
		s.mu.Unlock()
	}
	s.served(r)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == nil {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	s.lease.TypeMeta = metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"}
	_ = json.NewEncoder(w).Encode(s.lease) // a client that has gone needs no answer
}

// holder returns who holds the Lease; nil without a Lease.
func (s *leaseServer) holder() *string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == nil {
		return nil
	}
	return ptr.To(ptr.Deref(s.lease.Spec.HolderIdentity, ""))
}

// TestStopDuringAcquisition: a controller that is stopped while its write of the Lease is in flight does not keep the Lease.
func TestStopDuringAcquisition(t *testing.T) {
	t.Parallel()
	meta := metav1.ObjectMeta{Namespace: "ns", Name: "l", ResourceVersion: "1"}
	tests := map[string]*coordinationv1.Lease{
		"first Lease":    nil,
		"released Lease": {ObjectMeta: meta, Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To("")}},
		"own Lease": {ObjectMeta: meta, Spec: coordinationv1.LeaseSpec{
			HolderIdentity: ptr.To("pod-1"), LeaseDurationSeconds: ptr.To(int32(30)), RenewTime: ptr.To(metav1.NowMicro()),
		}},
	}
	for name, lease := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := newLeaseServer(t, lease)
			ctx, stop := context.WithCancel(t.Context())
			var once sync.Once
			server.served = func(r *http.Request) {
				if r.Method == http.MethodGet {
					return
				}
				once.Do(func() {
					stop()
					// Not waiting long enough would only hide a failure.
					select {
					case <-r.Context().Done():
					case <-time.After(2 * time.Second):
					}
				})
			}
			if err := newController(t, server.URL, freePort(t)).Run(ctx); err != nil {
				t.Fatal(err)
			}
			if holder := server.holder(); holder == nil || *holder != "" {
				t.Errorf("the Lease is held by %q after the controller has stopped", ptr.Deref(holder, "nil"))
			}
		})
	}
}

// TestStandbyStops: a replica that waits for the Lease ends and leaves the Lease to its holder.
func TestStandbyStops(t *testing.T) {
	t.Parallel()
	server := newLeaseServer(t, &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "l", ResourceVersion: "1"},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity: ptr.To("pod-2"), LeaseDurationSeconds: ptr.To(int32(30)), RenewTime: ptr.To(metav1.NowMicro()),
		},
	})
	ctx, stop := context.WithTimeout(t.Context(), 3*retryPeriod)
	defer stop()
	server.served = func(r *http.Request) {
		if r.Method != http.MethodGet {
			t.Error("wrote the Lease of another replica")
		}
	}
	if err := newController(t, server.URL, freePort(t)).Run(ctx); err != nil {
		t.Fatal(err)
	}
	if holder := server.holder(); *holder != "pod-2" {
		t.Errorf("the Lease is held by %q", *holder)
	}
}

// TestBadCertificate: New returns an error for a configuration that no client can use.
func TestBadCertificate(t *testing.T) {
	bad := &rest.Config{Host: "https://127.0.0.1:1", TLSClientConfig: rest.TLSClientConfig{CAData: []byte("bad")}}
	_, err := New(Config{REST: bad, Namespace: "ns", LeaseName: "l", Identity: "pod-1", Registerer: prometheus.NewRegistry()})
	if err == nil || !strings.Contains(err.Error(), "make client of lease ns/l") {
		t.Error(err)
	}
}

// TestHandOver: when the leader is stopped, a standby leads long before the Lease would expire.
func TestHandOver(t *testing.T) {
	t.Parallel()
	server := newLeaseServer(t, nil)
	reads := make(chan struct{}, 100)
	server.served = func(r *http.Request) {
		if r.Method == http.MethodGet {
			reads <- struct{}{}
		}
	}
	held := func(by string, patience time.Duration) {
		t.Helper()
		ticker := time.NewTicker(10 * time.Millisecond)
		defer ticker.Stop()
		for deadline := time.Now().Add(patience); ptr.Deref(server.holder(), "") != by; <-ticker.C {
			if time.Now().After(deadline) {
				t.Fatalf("after %s the Lease is held by %q, want %q", patience, ptr.Deref(server.holder(), ""), by)
			}
		}
	}
	run := func(pod string) (stop func()) {
		c := newControllerOf(t, pod, server.URL, freePort(t))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- c.Run(ctx) }()
		return func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	stopLeader := run("pod-1")
	held("pod-1", time.Minute)
	<-reads
	defer run("pod-2")()
	<-reads // a leader that has the Lease only writes it, so the standby has looked
	stopLeader()
	held("pod-2", leaseDuration/2)
}
