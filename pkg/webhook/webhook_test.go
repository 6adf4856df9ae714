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
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
)

func TestMain(m *testing.M) {
	ctrllog.SetLogger(klog.Background())
	os.Exit(m.Run())
}

// replica is a process of the controller, as far as the webhook goes, on a port of its own.
type replica struct {
	*loader
	address string
}

func (w *world) replica() replica {
	w.t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	address := listener.Addr().(*net.TCPAddr)
	if err := listener.Close(); err != nil {
		w.t.Fatal(err)
	}
	server, served := NewServer(address.Port)
	server.Register(Path, newHook(testDriver, newRequests()))
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- server.Start(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			w.t.Error(err)
		}
	})
	for started := server.StartedChecker(); ; {
		// Without a certificate it listens and shakes no hands.
		if err := started(nil); err == nil || strings.Contains(err.Error(), "internal error") {
			break
		}
		select {
		case err := <-ended:
			w.t.Fatal(err)
		case <-time.After(time.Millisecond):
		}
	}
	l := w.loader()
	l.served = served
	return replica{l, address.String()}
}

// apiServer asks as one does that trusts a bundle: by the Service's name, in a new connection.
func (w *world) apiServer(bundle []byte) *http.Client {
	w.t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(bundle)
	transport := &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: roots, ServerName: testServerName, Time: func() time.Time { return w.clock }},
		ForceAttemptHTTP2: true, DisableKeepAlives: true,
	}
	w.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// ask posts a body and answers the response's.
func (w *world) ask(from *http.Client, to replica, body []byte) ([]byte, error) {
	request, err := http.NewRequestWithContext(w.t.Context(), http.MethodPost, "https://"+to.address+Path+"?timeout=3s", bytes.NewReader(body))
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
// UID come back, a denial is a status, and what is no review gets no verdict.
func TestContract(t *testing.T) {
	w := newWorld(t)
	r := w.replica()
	w.reconcile(w.keeper())
	if _, err := w.ask(w.apiServer(w.bundle()), r, reviewOf(t, kindClaim, placed(t, kindClaim, testDriver, good))); err == nil {
		t.Error("answered without a certificate")
	}
	w.reconcile(r)
	from := w.apiServer(w.bundle())
	for kind, place := range places {
		for parameters, want := range map[string]string{good: "", bad: place.path + ".sharing.strategy"} {
			body, err := w.ask(from, r, reviewOf(t, kind, placed(t, kind, testDriver, parameters)))
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
		body, err := w.ask(from, r, []byte(rubbish))
		if err != nil {
			continue
		}
		var answer admissionv1.AdmissionReview
		// Without the request's UID the API server takes it for no answer at all.
		if err := json.Unmarshal(body, &answer); err != nil || answer.Response.UID != "" {
			t.Errorf("%q: %v: %s", rubbish, err, body)
		}
	}
	if _, err := w.ask(w.apiServer(nil), r, reviewOf(t, kindClaim, []byte("{}"))); err == nil {
		t.Error("somebody who trusts nobody was answered")
	}
}

// TestTwoReplicas serve the same, the one that does not lead as well, and a new certificate without a restart.
func TestTwoReplicas(t *testing.T) {
	w := newWorld(t)
	k, leader, standby := w.keeper(), w.replica(), w.replica()
	w.reconcile(k)
	body := reviewOf(t, kindClaim, placed(t, kindClaim, testDriver, good))
	var old []byte
	for round := range 3 {
		for _, r := range []replica{leader, standby} {
			w.reconcile(r)
			if _, err := w.ask(w.apiServer(w.bundle()), r, body); err != nil {
				t.Errorf("round %d: %v", round, err)
			}
		}
		if serving := w.secret().Data["tls.crt"]; bytes.Equal(serving, old) {
			t.Errorf("round %d: the same certificate", round)
		} else {
			old = serving
		}
		w.clock = w.clock.Add(lifetime/3*2 + time.Hour)
		w.reconcile(k)
		w.reconcile(k)
		w.clock = w.clock.Add(settle)
		w.reconcile(k)
		// Neither has heard of it.
		for _, r := range []replica{leader, standby} {
			if _, err := w.ask(w.apiServer(w.bundle()), r, body); err != nil {
				t.Errorf("round %d, before the replica knows: %v", round, err)
			}
		}
	}
}
