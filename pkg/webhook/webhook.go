// SPDX-License-Identifier: Apache-2.0

// Package webhook reports mistakes in the parameters of a claim, a template or a DeviceClass when it is applied. It uses the node's
// decoder. Every replica of the controller serves it over HTTPS with one certificate, which the replicas renew. Nothing depends on
// it: the node refuses a claim that the webhook missed.
package webhook

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
)

// Path is the path of the webhook. The chart's ValidatingWebhookConfiguration names it.
const Path = "/parameters"

// Config of the webhook.
type Config struct {
	// Name is the name of the Service, the Secret and the ValidatingWebhookConfiguration. The first two are in Namespace.
	Namespace, Name string
	Port            int
	// DriverName selects the parameters to validate.
	DriverName string
	Registerer prometheus.Registerer
}

// serverName returns the name by which the API server calls the Service.
func (c Config) serverName() string { return c.Name + "." + c.Namespace + ".svc" }

// Webhook serves the webhook and reconciles its certificate. Make it with New.
type Webhook struct {
	// server listens once the manager runs.
	server   *server
	config   Config
	client   client.Client
	recorder events.EventRecorder
	// serving is the certificate in use.
	serving atomic.Pointer[tls.Certificate]
}

// New is called once by the controller. It starts nothing, and panics if its metrics are registered already.
func New(c Config) *Webhook {
	w := &Webhook{config: c}
	promauto.With(c.Registerer).NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tandem_controller_webhook_certificate_expires_in_seconds",
		Help: "Time until the certificate that this replica's webhook serves expires; 0 while it has none.",
	}, func() float64 { return w.left().Seconds() })
	requests := newRequests(c.Registerer)
	w.server = newServer(c.Port, w.certificate, &admission.Webhook{
		Handler: &validator{driver: c.DriverName, requests: requests},
		// After a panic the connection breaks, which the API server ignores. An error status would deny the request.
		RecoverPanic: ptr.To(false),
	}, requests.WithLabelValues(refused))
	return w
}

// Watched returns the objects for the manager's cache: one Secret and one configuration. The roles allow no others.
func (w *Webhook) Watched() map[client.Object]cache.ByObject {
	byName := fields.OneTermEqualSelector("metadata.name", w.config.Name)
	return map[client.Object]cache.ByObject{
		&corev1.Secret{}: {Namespaces: map[string]cache.Config{w.config.Namespace: {FieldSelector: byName}}},
		&admissionregistrationv1.ValidatingWebhookConfiguration{}: {Field: byName},
	}
}

// Register is called once, for a manager that caches Watched. It starts nothing.
func (w *Webhook) Register(m manager.Manager, options ctrlcontroller.Options) error {
	if err := m.Add(w.server); err != nil {
		return fmt.Errorf("add webhook server: %w", err)
	}
	w.client, w.recorder = m.GetClient(), m.GetEventRecorder("tandem-controller")
	one := reconcile.Request{NamespacedName: types.NamespacedName{Namespace: w.config.Namespace, Name: w.config.Name}}
	toOne := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return []reconcile.Request{one} })
	options.NeedLeaderElection = ptr.To(false)
	err := builder.ControllerManagedBy(m).Named("webhook").
		Watches(&corev1.Secret{}, toOne).
		Watches(&admissionregistrationv1.ValidatingWebhookConfiguration{}, toOne).
		WithOptions(options).
		Complete(w)
	if err != nil {
		return fmt.Errorf("register webhook: %w", err)
	}
	return nil
}

var errNoCertificate = errors.New("the webhook has no certificate yet")

func (w *Webhook) certificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if c := w.serving.Load(); c != nil {
		return c, nil
	}
	return nil, errNoCertificate
}

// left returns the time until the certificate expires; zero without one.
func (w *Webhook) left() time.Duration {
	if c := w.serving.Load(); c != nil {
		return time.Until(c.Leaf.NotAfter)
	}
	return 0
}

// Results of a request, for the metric.
const (
	allowed    = "allowed"
	denied     = "denied"
	unreadable = "unreadable"
	refused    = "refused"
)

func newRequests(registerer prometheus.Registerer) *prometheus.CounterVec {
	requests := promauto.With(registerer).NewCounterVec(prometheus.CounterOpts{
		Name: "tandem_controller_webhook_requests_total",
		Help: "Claims, templates and classes validated at admission: allowed, denied, allowed because they were unreadable, " +
			"or refused because of their size or too many others.",
	}, []string{"result"})
	for _, result := range []string{allowed, denied, unreadable, refused} {
		requests.WithLabelValues(result)
	}
	return requests
}
