// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

var testKey = types.NamespacedName{Namespace: "tandem-system", Name: "tandem-webhook"}

const testServerName = "tandem-webhook.tandem-system.svc"

// world is a cluster in memory.
type world struct {
	t        *testing.T
	client   client.WithWatch
	recorder *events.FakeRecorder
}

// timed runs a test with a clock of its own.
func timed(test func(t *testing.T)) func(t *testing.T) {
	return func(t *testing.T) { synctest.Test(t, test) }
}

func newWorld(t *testing.T) *world {
	t.Helper()
	types := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, admissionregistrationv1.AddToScheme} {
		if err := add(types); err != nil {
			t.Fatal(err)
		}
	}
	return &world{
		t: t, recorder: events.NewFakeRecorder(1000),
		client: fake.NewClientBuilder().WithScheme(types).WithObjects(newConfiguration()).Build(),
	}
}

func newConfiguration() *admissionregistrationv1.ValidatingWebhookConfiguration {
	return &admissionregistrationv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: testKey.Name, UID: "uid-configuration"},
		Webhooks:   []admissionregistrationv1.ValidatingWebhook{{Name: "parameters.tandem-gpu.dev"}},
	}
}

func (w *world) config() Config {
	return Config{Namespace: testKey.Namespace, Name: testKey.Name, DriverName: testDriver, Registerer: prometheus.NewRegistry()}
}

func (w *world) replica() *Webhook {
	r := New(w.config())
	r.client, r.recorder = w.client, w.recorder
	return r
}

// reconcile runs a replica, and once more for the watch that reports its writes.
func (w *world) reconcile(r *Webhook) reconcile.Result {
	w.t.Helper()
	w.once(r)
	return w.once(r)
}

func (w *world) once(r *Webhook) reconcile.Result {
	w.t.Helper()
	result, err := r.Reconcile(w.t.Context(), reconcile.Request{NamespacedName: testKey})
	if err != nil {
		w.t.Fatal(err)
	}
	return result
}

func (w *world) secret() *corev1.Secret {
	w.t.Helper()
	secret := &corev1.Secret{}
	if err := w.client.Get(w.t.Context(), testKey, secret); err != nil {
		w.t.Fatal(err)
	}
	return secret
}

// bundle is whom the API server trusts.
func (w *world) bundle() []byte {
	w.t.Helper()
	configuration := &admissionregistrationv1.ValidatingWebhookConfiguration{}
	if err := w.client.Get(w.t.Context(), types.NamespacedName{Name: testKey.Name}, configuration); err != nil {
		w.t.Fatal(err)
	}
	return configuration.Webhooks[0].ClientConfig.CABundle
}

// trusts checks that a client that trusts a bundle accepts what a replica serves.
func (w *world) trusts(bundle []byte, replica *Webhook) error {
	served, err := replica.certificate(nil)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(bundle)
	_, err = served.Leaf.Verify(x509.VerifyOptions{DNSName: testServerName, Roots: roots})
	return err
}

func (w *world) event() string {
	select {
	case e := <-w.recorder.Events:
		return e
	default:
		return ""
	}
}

func TestFirstCertificate(t *testing.T) { synctest.Test(t, firstCertificate) }

func firstCertificate(t *testing.T) {
	w := newWorld(t)
	k, l := w.replica(), w.replica()
	if _, err := l.certificate(nil); !errors.Is(err, errNoCertificate) {
		t.Errorf("served before there is one: %v", err)
	}
	if left := l.left(); left != 0 {
		t.Errorf("good for %s without a certificate", left)
	}
	if result := w.reconcile(k); result.RequeueAfter <= 0 {
		t.Error("its age is not checked")
	}
	secret := w.secret()
	if secret.Type != corev1.SecretTypeTLS || len(secret.OwnerReferences) != 1 || secret.OwnerReferences[0].UID != "uid-configuration" {
		t.Errorf("%s of %v", secret.Type, secret.OwnerReferences)
	}
	for key := range secret.Data {
		if block, _ := pem.Decode(secret.Data[key]); block == nil || strings.HasSuffix(block.Type, "KEY") != (key == corev1.TLSPrivateKeyKey) {
			t.Errorf("%s has %v", key, block)
		}
	}
	w.reconcile(l)
	if err := w.trusts(w.bundle(), l); err != nil {
		t.Error(err)
	}
	if left := l.left(); left != 365*24*time.Hour-time.Hour {
		t.Errorf("good for %s", left)
	}
	if e := w.event(); !strings.Contains(e, "CertificateRotated") {
		t.Errorf("event %q", e)
	}
	// Nothing is written without need.
	before := w.secret().ResourceVersion
	w.reconcile(k)
	if w.secret().ResourceVersion != before || w.event() != "" {
		t.Error("written again")
	}
}

// TestRotation: over four years, whatever a replica or an API server has not heard of yet, every request is answered: both may be
// minutes behind.
func TestRotation(t *testing.T) { synctest.Test(t, rotation) }

func rotation(t *testing.T) {
	w := newWorld(t)
	k, current, lagging := w.replica(), w.replica(), w.replica()
	w.reconcile(k)
	w.reconcile(current)
	w.reconcile(lagging)
	serials, seen := map[string]bool{}, [][]byte{w.bundle()}
	step := time.Hour
	for day := time.Duration(0); day < 4*365*24*time.Hour; day += step {
		time.Sleep(step)
		for range 3 { // something else has changed
			w.reconcile(k)
		}
		for _, bundle := range [][]byte{w.bundle(), seen[len(seen)-1]} {
			for name, replica := range map[string]*Webhook{"the one before": lagging, "the new one": current} {
				if name == "the new one" {
					w.reconcile(replica)
				}
				if err := w.trusts(bundle, replica); err != nil {
					t.Fatalf("on %s, with %s: %v", time.Now(), name, err)
				}
			}
		}
		w.reconcile(lagging)
		seen = append(seen, w.bundle())
		// Most of the time nothing happens.
		if step = 96 * time.Hour; w.secret().Data[nextCert] != nil {
			step = time.Hour
		}
		serials[current.serving.Load().Leaf.SerialNumber.String()] = true
		if left := current.left(); left < 90*24*time.Hour {
			t.Fatalf("on %s the certificate is good for %s only", time.Now(), left)
		}
		if n := bytes.Count(w.bundle(), []byte("BEGIN")); n > 3 {
			t.Fatalf("on %s %d authorities are trusted", time.Now(), n)
		}
	}
	if len(serials) < 5 || len(serials) > 7 {
		t.Errorf("%d certificates in four years", len(serials))
	}
	for e := w.event(); e != ""; e = w.event() {
		if !strings.Contains(e, "CertificateRotated") {
			t.Errorf("event %q", e)
		}
	}
}

// The next certificate is served once its authority was trusted for a day, and not while the bundle is missing.
func TestNextWaitsUntilItIsTrusted(t *testing.T) { synctest.Test(t, nextWaitsUntilItIsTrusted) }

func nextWaitsUntilItIsTrusted(t *testing.T) {
	w := newWorld(t)
	k, l := w.replica(), w.replica()
	w.reconcile(k)
	first := string(w.secret().Data[corev1.TLSCertKey])
	time.Sleep(lifetime/3*2 + time.Hour)
	w.reconcile(k)
	if next := w.secret().Data[nextCert]; len(next) == 0 {
		t.Fatal("no next certificate")
	}
	time.Sleep(settle - time.Second)
	w.reconcile(k)
	w.reconcile(w.replica())
	if string(w.secret().Data[corev1.TLSCertKey]) != first {
		t.Error("served before it was trusted for long enough")
	}
	w.forget()
	time.Sleep(time.Second)
	w.once(k) // gives the bundle back
	if string(w.secret().Data[corev1.TLSCertKey]) != first {
		t.Error("served though it was not trusted in between")
	}
	if err := w.trusts(w.bundle(), k); err != nil {
		t.Error(err)
	}
	w.once(k)
	if s := w.secret(); string(s.Data[corev1.TLSCertKey]) == first || s.Data[nextCert] != nil || s.Data[nextKey] != nil {
		t.Error("the next one is not served")
	}
	w.reconcile(l)
	if err := w.trusts(w.bundle(), l); err != nil {
		t.Error(err)
	}
}

// forget takes the bundle away, as an upgrade by a careless tool does.
func (w *world) forget() {
	w.t.Helper()
	configuration := &admissionregistrationv1.ValidatingWebhookConfiguration{}
	if err := w.client.Get(w.t.Context(), types.NamespacedName{Name: testKey.Name}, configuration); err != nil {
		w.t.Fatal(err)
	}
	configuration.Webhooks[0].ClientConfig.CABundle = nil
	if err := w.client.Update(w.t.Context(), configuration); err != nil {
		w.t.Fatal(err)
	}
}

func TestBundleIsGivenBack(t *testing.T) {
	w := newWorld(t)
	k := w.replica()
	w.reconcile(k)
	before, secret := w.bundle(), w.secret()
	w.forget()
	w.reconcile(k)
	if !bytes.Equal(w.bundle(), before) || len(before) == 0 {
		t.Error("the bundle is not back")
	}
	if w.secret().ResourceVersion != secret.ResourceVersion {
		t.Error("the certificates were touched")
	}
}

// A concurrent change of the configuration stays.
func TestOthersChangeStays(t *testing.T) {
	w := newWorld(t)
	k, key := w.replica(), types.NamespacedName{Name: testKey.Name}
	configuration := &admissionregistrationv1.ValidatingWebhookConfiguration{}
	change := sync.OnceFunc(func() {
		if err := w.client.Get(t.Context(), key, configuration); err != nil {
			t.Fatal(err)
		}
		configuration.Webhooks[0].TimeoutSeconds = ptr.To[int32](7)
		if err := w.client.Update(t.Context(), configuration); err != nil {
			t.Fatal(err)
		}
	})
	k.client = interceptor.NewClient(w.client, interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
			change()
			return c.Patch(ctx, o, patch, opts...)
		},
	})
	w.once(k)
	if len(w.bundle()) > 0 {
		t.Error("patched over a concurrent change")
	}
	w.reconcile(k)
	if err := w.client.Get(t.Context(), key, configuration); err != nil {
		t.Fatal(err)
	}
	if hook := configuration.Webhooks[0]; len(hook.ClientConfig.CABundle) == 0 || ptr.Deref(hook.TimeoutSeconds, 0) != 7 {
		t.Errorf("%+v", hook)
	}
}

// Contents of the Secret that cannot be used are replaced. Replicas serve what they have until then.
func TestUnusableSecret(t *testing.T) {
	made := func() map[string][]byte {
		w := newWorld(t)
		w.reconcile(w.replica())
		return w.secret().Data
	}
	others := made()
	elsewhere := func() map[string][]byte {
		data := contents{}
		if _, _, err := data.rotate(Config{Namespace: "other", Name: "webhook"}, false, time.Now()); err != nil {
			t.Fatal(err)
		}
		return data
	}()
	for name, c := range map[string]struct {
		change func(map[string][]byte)
		says   string
	}{
		"emptied":                    {func(d map[string][]byte) { clear(d) }, "ca.crt"},
		"no certificate":             {func(d map[string][]byte) { delete(d, corev1.TLSCertKey) }, "tls.crt"},
		"no key":                     {func(d map[string][]byte) { d[corev1.TLSPrivateKeyKey] = nil }, "tls.crt"},
		"another's key":              {func(d map[string][]byte) { d[corev1.TLSPrivateKeyKey] = others[corev1.TLSPrivateKeyKey] }, "private key does not match"},
		"another's pair":             {func(d map[string][]byte) { maps.Copy(d, pick(others, corev1.TLSCertKey, corev1.TLSPrivateKeyKey)) }, "unknown authority"},
		"another's authority":        {func(d map[string][]byte) { maps.Copy(d, pick(others, corev1.ServiceAccountRootCAKey)) }, "unknown authority"},
		"for other names":            {func(d map[string][]byte) { maps.Copy(d, elsewhere) }, "not tandem-webhook"},
		"cut off":                    {func(d map[string][]byte) { d[corev1.TLSCertKey] = d[corev1.TLSCertKey][:100] }, "tls.crt"},
		"rubbish":                    {func(d map[string][]byte) { d[corev1.TLSCertKey] = []byte("x") }, "tls.crt"},
		"rubbish for authorities":    {func(d map[string][]byte) { d[corev1.ServiceAccountRootCAKey] = []byte("x") }, "ca.crt"},
		"no authority's certificate": {func(d map[string][]byte) { d[corev1.ServiceAccountRootCAKey] = d[corev1.TLSCertKey] }, "not a certificate authority"},
		"rubbish to come":            {func(d map[string][]byte) { d[nextKey] = []byte("x") }, "next.crt"},
		"another's to come": {func(d map[string][]byte) {
			d[nextCert], d[nextKey] = others[corev1.TLSCertKey], others[corev1.TLSPrivateKeyKey]
		}, "next.crt"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			k, l, fresh := w.replica(), w.replica(), w.replica()
			w.reconcile(k)
			w.reconcile(l)
			w.event()
			secret := w.secret()
			c.change(secret.Data)
			if err := w.client.Update(t.Context(), secret); err != nil {
				t.Fatal(err)
			}
			forbidden := interceptor.Funcs{Update: func(context.Context, client.WithWatch, client.Object, ...client.UpdateOption) error {
				return errors.New("no")
			}}
			for _, replica := range []*Webhook{l, fresh} {
				replica.client = interceptor.NewClient(w.client, forbidden)
				if _, err := replica.Reconcile(t.Context(), reconcile.Request{NamespacedName: testKey}); err == nil {
					t.Error("replaced nothing")
				}
				replica.client = w.client
			}
			if err := w.trusts(w.bundle(), l); err != nil {
				t.Errorf("a replica with a good certificate: %v", err)
			}
			w.reconcile(k)
			if e := w.event(); !strings.Contains(e, "Warning CertificateReplaced") || !strings.Contains(e, c.says) {
				t.Errorf("event %q, want %q", e, c.says)
			}
			for _, replica := range []*Webhook{l, fresh} {
				w.reconcile(replica)
				if err := w.trusts(w.bundle(), replica); err != nil {
					t.Error(err)
				}
			}
			w.reconcile(k)
			if e := w.event(); e != "" {
				t.Errorf("and again: %q", e)
			}
		})
	}
}

func pick(data map[string][]byte, keys ...string) map[string][]byte {
	picked := map[string][]byte{}
	for _, key := range keys {
		picked[key] = data[key]
	}
	return picked
}

// After a year without a replica, with or without a next certificate, there is one at once.
func TestExpired(t *testing.T) {
	for name, staged := range map[string]bool{"nothing to come": false, "one to come": true} {
		t.Run(name, timed(func(t *testing.T) {
			w := newWorld(t)
			k := w.replica()
			w.reconcile(k)
			if staged {
				time.Sleep(lifetime/3*2 + time.Hour)
				w.reconcile(k)
				time.Sleep(lifetime / 3)
			} else {
				time.Sleep(lifetime + time.Second)
			}
			next := w.secret().Data[nextCert]
			k, l := w.replica(), w.replica()
			w.reconcile(k)
			w.reconcile(l)
			if err := w.trusts(w.bundle(), l); err != nil {
				t.Error(err)
			}
			if staged && !bytes.Equal(next, w.secret().Data[corev1.TLSCertKey]) {
				t.Error("the next one is not served")
			}
			if n := bytes.Count(w.bundle(), []byte("BEGIN")); n != 1 {
				t.Errorf("%d authorities are trusted", n)
			}
		}))
	}
}

func TestNoConfiguration(t *testing.T) {
	w := newWorld(t)
	if err := w.client.Delete(t.Context(), newConfiguration()); err != nil {
		t.Fatal(err)
	}
	w.reconcile(w.replica())
	if err := w.client.Get(t.Context(), testKey, &corev1.Secret{}); !apierrors.IsNotFound(err) {
		t.Errorf("a Secret without a configuration: %v", err)
	}
}

// Two that both believe they lead, each with a view of the world that may be old, agree in the end, without an error.
func TestTwoLeaders(t *testing.T) {
	w := newWorld(t)
	stale := &staleReader{WithWatch: w.client}
	one, two := w.replica(), w.replica()
	two.client = stale
	// Two has not seen what one has made.
	stale.keep(t)
	w.reconcile(one)
	made := w.secret()
	w.reconcile(two)
	if got := w.secret(); got.ResourceVersion != made.ResourceVersion {
		t.Error("overwritten by one who had not seen it")
	}
	// Both at once, and again when what they wrote has arrived.
	stale.fresh()
	for range 5 {
		w.forget()
		secret := w.secret()
		clear(secret.Data)
		if err := w.client.Update(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		for _, k := range []*Webhook{one, two} {
			group.Go(func() {
				if _, err := k.Reconcile(t.Context(), reconcile.Request{NamespacedName: testKey}); err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
		w.reconcile(one)
		w.reconcile(two)
		l := w.replica()
		w.reconcile(l)
		if err := w.trusts(w.bundle(), l); err != nil {
			t.Fatal(err)
		}
		before := w.secret().ResourceVersion
		w.reconcile(one)
		w.reconcile(two)
		if w.secret().ResourceVersion != before {
			t.Fatal("they do not agree")
		}
	}
}

// staleReader answers what was there when it was told to keep it.
type staleReader struct {
	client.WithWatch
	secret *corev1.Secret
	old    bool
}

func (s *staleReader) keep(t *testing.T) {
	t.Helper()
	s.old = true
	secret := &corev1.Secret{}
	if err := s.WithWatch.Get(t.Context(), testKey, secret); err == nil {
		s.secret = secret
	}
}

func (s *staleReader) fresh() { s.old = false }

func (s *staleReader) Get(ctx context.Context, key client.ObjectKey, into client.Object, o ...client.GetOption) error {
	secret, ok := into.(*corev1.Secret)
	if !ok || !s.old {
		return s.WithWatch.Get(ctx, key, into, o...)
	}
	if s.secret == nil {
		return apierrors.NewNotFound(corev1.Resource("secrets"), key.Name)
	}
	s.secret.DeepCopyInto(secret)
	return nil
}

// What the API server refuses is tried again and says what failed.
func TestRefused(t *testing.T) {
	for want, funcs := range map[string]interceptor.Funcs{
		"create or update secret tandem-system/tandem-webhook: not created": {
			Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error {
				return errors.New("not created")
			}},
		"patch CA bundle of tandem-webhook: no": {
			Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
				return errors.New("no")
			}},
		"create or update secret tandem-system/tandem-webhook: not read": {
			Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
				if _, ok := o.(*corev1.Secret); ok {
					return errors.New("not read")
				}
				return c.Get(ctx, key, o, opts...)
			}},
	} {
		w := newWorld(t)
		k := w.replica()
		k.client = interceptor.NewClient(w.client, funcs)
		if _, err := k.Reconcile(t.Context(), reconcile.Request{NamespacedName: testKey}); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// Every write of a certificate is one that a server can start with.
func TestPairsServe(t *testing.T) {
	w := newWorld(t)
	w.reconcile(w.replica())
	data := w.secret().Data
	pair, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	if err != nil {
		t.Fatal(err)
	}
	if names := fmt.Sprint(pair.Leaf.DNSNames); !slices.Contains(pair.Leaf.DNSNames, testServerName) || len(pair.Leaf.DNSNames) != 3 {
		t.Errorf("for %s", names)
	}
	if pair.Leaf.IsCA {
		t.Error("what is served is an authority")
	}
}
