// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

func TestMain(m *testing.M) {
	ctrllog.SetLogger(klog.Background())
	os.Exit(m.Run())
}

// dialer connects to a replica's server.
type dialer func(ctx context.Context, network, address string) (net.Conn, error)

// listen runs the server of a replica on a port, as the manager does.
func (w *world) listen() (*Webhook, dialer) {
	w.t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	r := w.replica()
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.server.serve(ctx, listener) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			w.t.Error(err)
		}
	})
	return r, func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, listener.Addr().String())
	}
}

// pipes is a listener for connections in memory, for tests with a clock of their own.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if c, open := <-p; open {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (p pipes) Close() error   { return nil }
func (p pipes) Addr() net.Addr { return &net.UnixAddr{} }

// listenInMemory runs the handler of a replica with the server's TLS settings.
func (w *world) listenInMemory() (*Webhook, dialer) {
	w.t.Helper()
	r := w.replica()
	connections := make(pipes)
	go func() {
		_ = (&http.Server{Handler: r.server.handler, ErrorLog: log.New(io.Discard, "", 0)}).Serve(tls.NewListener(connections, r.server.tls))
	}()
	w.t.Cleanup(func() {
		close(connections)
		time.Sleep(time.Minute) // both sides of a pipe wait to say that they close
	})
	return r, func(context.Context, string, string) (net.Conn, error) {
		theirs, ours := net.Pipe()
		connections <- theirs
		return ours, nil
	}
}

// ask posts a body as an API server does that trusts a bundle: by the Service's name, in a new connection.
func (w *world) ask(bundle []byte, dial dialer, body []byte) ([]byte, error) {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(bundle)
	from := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: testServerName},
		DialContext:     dial, ForceAttemptHTTP2: true, DisableKeepAlives: true,
	}}
	defer from.CloseIdleConnections()
	request, err := http.NewRequestWithContext(w.t.Context(), http.MethodPost, "https://webhook"+Path+"?timeout=3s", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := from.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("status %d", response.StatusCode)
	}
	return io.ReadAll(response.Body)
}

func reviewOf(t *testing.T, kind string, object []byte) []byte {
	t.Helper()
	body, err := json.Marshal(&admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request: &admissionv1.AdmissionRequest{
			UID: "e911857d-c318-11e8-bbad-025000000001", Operation: admissionv1.Create, Name: "o", Namespace: "ns",
			Kind: metav1.GroupVersionKind{Group: "resource.k8s.io", Version: "v1", Kind: kind}, Object: runtime.RawExtension{Raw: object},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return body
}

// TestContract is what the API server holds a webhook to (k8s.io/apiserver, admission/plugin/webhook/request): the same version and
// UID come back, a denial is a status, and what is no review is not allowed.
func TestContract(t *testing.T) {
	w := newWorld(t)
	r, dial := w.listen()
	w.reconcile(w.replica())
	if _, err := w.ask(w.bundle(), dial, reviewOf(t, kindClaim, placed(t, kindClaim, testDriver, good))); err == nil {
		t.Error("answered without a certificate")
	}
	w.reconcile(r)
	bundle := w.bundle()
	for kind, place := range places {
		for parameters, want := range map[string]string{good: "", bad: place.path + ".sharing.strategy"} {
			body, err := w.ask(bundle, dial, reviewOf(t, kind, placed(t, kind, testDriver, parameters)))
			if err != nil {
				t.Fatal(err)
			}
			var answer admissionv1.AdmissionReview
			if err := json.Unmarshal(body, &answer); err != nil {
				t.Fatalf("%v: %s", err, body)
			}
			if answer.APIVersion != "admission.k8s.io/v1" || answer.Kind != "AdmissionReview" || answer.Response.UID != "e911857d-c318-11e8-bbad-025000000001" ||
				answer.Response.Patch != nil || answer.Response.PatchType != nil {
				t.Errorf("%s: %s", kind, body)
			}
			if answer.Response.Allowed != (want == "") {
				t.Errorf("%s: %s", kind, body)
			}
			if want != "" && (answer.Response.Result.Code != http.StatusUnprocessableEntity || answer.Response.Result.Status != metav1.StatusFailure ||
				!slices.ContainsFunc(answer.Response.Result.Details.Causes, func(c metav1.StatusCause) bool { return c.Field == want })) {
				t.Errorf("%s: %s", kind, body)
			}
		}
	}
	for _, rubbish := range []string{"", "{", "[]", `{"apiVersion":"v1","kind":"Pod"}`, `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}`} {
		body, err := w.ask(bundle, dial, []byte(rubbish))
		if err != nil {
			continue
		}
		var answer admissionv1.AdmissionReview
		// Without the request's UID the API server takes it for no answer at all.
		if err := json.Unmarshal(body, &answer); err != nil || answer.Response.UID != "" {
			t.Errorf("%q: %v: %s", rubbish, err, body)
		}
	}
	if _, err := w.ask(nil, dial, reviewOf(t, kindClaim, []byte("{}"))); err == nil {
		t.Error("a client that trusts no authority was answered")
	}
}

// TestTwoReplicas: both serve the same, and a new certificate without a restart.
func TestTwoReplicas(t *testing.T) { synctest.Test(t, twoReplicas) }

func twoReplicas(t *testing.T) {
	w := newWorld(t)
	k := w.replica()
	one, toOne := w.listenInMemory()
	other, toOther := w.listenInMemory()
	w.reconcile(k)
	body := reviewOf(t, kindClaim, placed(t, kindClaim, testDriver, good))
	var old []byte
	for round := range 3 {
		for r, dial := range map[*Webhook]dialer{one: toOne, other: toOther} {
			w.reconcile(r)
			if _, err := w.ask(w.bundle(), dial, body); err != nil {
				t.Errorf("round %d: %v", round, err)
			}
		}
		if serving := w.secret().Data["tls.crt"]; bytes.Equal(serving, old) {
			t.Errorf("round %d: the same certificate", round)
		} else {
			old = serving
		}
		time.Sleep(lifetime/3*2 + time.Hour)
		w.reconcile(k)
		time.Sleep(settle)
		w.reconcile(k)
		// The watch has not reported it to either.
		for _, dial := range []dialer{toOne, toOther} {
			if _, err := w.ask(w.bundle(), dial, body); err != nil {
				t.Errorf("round %d, before the replica knows: %v", round, err)
			}
		}
	}
}

// started records what a manager is to run.
type started struct {
	manager.Manager
	runnables []manager.Runnable
}

func (s *started) Add(r manager.Runnable) error {
	s.runnables = append(s.runnables, r)
	return nil
}

// The API server may call any replica. So each serves and has the certificate, not only the leader.
func TestEachReplicaServes(t *testing.T) {
	m, err := manager.New(&rest.Config{}, manager.Options{
		Metrics:        metricsserver.Options{BindAddress: "0"},
		MapperProvider: func(*rest.Config, *http.Client) (meta.RESTMapper, error) { return meta.NewDefaultRESTMapper(nil), nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	to := &started{Manager: m}
	if err := newWorld(t).replica().Register(to, ctrlcontroller.Options{NeedLeaderElection: new(true), SkipNameValidation: new(true)}); err != nil {
		t.Fatal(err)
	}
	if len(to.runnables) != 2 {
		t.Fatalf("registered %d", len(to.runnables))
	}
	for _, r := range to.runnables {
		if of, ok := r.(manager.LeaderElectionRunnable); !ok || of.NeedLeaderElection() {
			t.Errorf("%T runs in the leader only", r)
		}
	}
}
