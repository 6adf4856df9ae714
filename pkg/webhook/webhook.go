// SPDX-License-Identifier: Apache-2.0

// Package webhook tells the author of a claim, a template or a DeviceClass what is wrong with its parameters when it is applied, in
// the words of the node's own decoder. It serves the API server over HTTPS from every replica of the controller, with
// certificates that the leader makes and rotates. Nothing depends on it: what slips through is refused by the node.
package webhook

import (
	"crypto/tls"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	ctrlwebhook "sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
)

// Path is where parameters are judged; the chart's ValidatingWebhookConfiguration names it.
const Path = "/parameters"

// Config of the webhook.
type Config struct {
	// Name is that of the Service, of the Secret and of the ValidatingWebhookConfiguration, Namespace that of the first two.
	Namespace, Name string
	// DriverName is whose parameters are judged.
	DriverName string
	Registerer prometheus.Registerer
	Now        func() time.Time
}

// names are those by which the Service is called: the API server says the last.
func (c Config) names() []string {
	return []string{c.Name, c.Name + "." + c.Namespace, c.Name + "." + c.Namespace + ".svc"}
}

// Watched is what has to be in the manager's cache: one Secret and one configuration, which is what the roles allow. A pure function.
func (c Config) Watched() map[client.Object]cache.ByObject {
	byName := fields.OneTermEqualSelector("metadata.name", c.Name)
	return map[client.Object]cache.ByObject{
		&corev1.Secret{}: {Namespaces: map[string]cache.Config{c.Namespace: {FieldSelector: byName}}},
		&admissionregistrationv1.ValidatingWebhookConfiguration{}: {Field: byName},
	}
}

// NewServer makes the server that the manager is to have, and what Register needs of it. It listens once the manager runs, and
// refuses connections as long as there is no certificate, which the API server takes for a webhook that is away.
func NewServer(port int) (ctrlwebhook.Server, *Served) {
	served := &Served{}
	return ctrlwebhook.NewServer(ctrlwebhook.Options{
		Port:    port,
		TLSOpts: []func(*tls.Config){func(c *tls.Config) { c.GetCertificate = served.get }},
	}), served
}

// Served is the certificate in use. It is safe for concurrent use.
type Served struct {
	certificate atomic.Pointer[tls.Certificate]
}

var errNoCertificate = errors.New("the webhook has no certificate yet")

func (s *Served) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if c := s.certificate.Load(); c != nil {
		return c, nil
	}
	return nil, errNoCertificate
}

// left is how long the certificate is still good for.
func (s *Served) left(now time.Time) time.Duration {
	c := s.certificate.Load()
	if c == nil {
		return 0
	}
	return c.Leaf.NotAfter.Sub(now)
}

// Register is called once for a manager that has the server of NewServer and watches what Watched says. It starts nothing.
func Register(m manager.Manager, c Config, served *Served) error {
	requests := newRequests()
	expiry := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tandem_controller_webhook_certificate_expires_in_seconds",
		Help: "Time until the certificate that this replica's webhook serves expires; 0 while it has none.",
	}, func() float64 { return served.left(c.Now()).Seconds() })
	for _, collector := range []prometheus.Collector{requests, expiry} {
		if err := c.Registerer.Register(collector); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	m.GetWebhookServer().Register(Path, newHook(c.DriverName, requests))
	if err := (&loader{client: m.GetClient(), config: c, served: served}).register(m); err != nil {
		return err
	}
	return (&keeper{client: m.GetClient(), config: c, recorder: m.GetEventRecorder("tandem-controller")}).register(m)
}

func newHook(driver string, requests *prometheus.CounterVec) *admission.Webhook {
	return &admission.Webhook{
		Handler: &judge{driver: driver, requests: requests},
		// An answer that says that something failed would be a denial. A broken connection is not.
		RecoverPanic: ptr.To(false),
	}
}

// What became of a request.
const (
	allowed    = "allowed"
	denied     = "denied"
	unreadable = "unreadable"
)

func newRequests() *prometheus.CounterVec {
	requests := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tandem_controller_webhook_requests_total",
		Help: "Claims, templates and classes judged at admission: allowed, denied, or allowed because they were unreadable.",
	}, []string{"result"})
	for _, result := range []string{allowed, denied, unreadable} {
		requests.WithLabelValues(result)
	}
	return requests
}
