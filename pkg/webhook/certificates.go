// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/cert"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	// lifetime of a certificate and its authority. It starts an hour before they are made, for clocks that are late.
	lifetime = 365 * 24 * time.Hour
	backdate = time.Hour
	// settle is how long every API server may take to trust a new authority. Only then is its certificate served.
	settle        = 24 * time.Hour
	checkInterval = 10 * time.Minute
)

// Keys of the Secret.
const (
	caCert   = corev1.ServiceAccountRootCAKey
	tlsCert  = corev1.TLSCertKey
	tlsKey   = corev1.TLSPrivateKeyKey
	nextCert = "next.crt"
	nextKey  = "next.key"
)

// contents are the Secret's: the authorities to trust, the certificate to serve, and at times the next one.
type contents map[string][]byte

// authorities returns the authorities that have not expired.
func (c contents) authorities(now time.Time) ([]*x509.Certificate, error) {
	all, err := cert.ParseCertsPEM(c[caCert])
	if err == nil && slices.ContainsFunc(all, func(c *x509.Certificate) bool { return !c.IsCA }) {
		err = errors.New("a certificate is not a certificate authority")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", caCert, err)
	}
	return slices.DeleteFunc(all, func(c *x509.Certificate) bool { return now.After(c.NotAfter) }), nil
}

// pair returns a certificate if it is valid for the name and signed by one of the authorities.
func (c contents) pair(at, key string, trusted []*x509.Certificate, name string, now time.Time) (*tls.Certificate, error) {
	pair, err := tls.X509KeyPair(c[at], c[key])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", at, err)
	}
	roots := x509.NewCertPool()
	for _, authority := range trusted {
		roots.AddCert(authority)
	}
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots, CurrentTime: now}); err != nil {
		return nil, fmt.Errorf("%s: %w", at, err)
	}
	return &pair, nil
}

// rotate returns the certificate to serve, nil if there is none, and takes one step of the rotation. The next certificate, which has
// another authority, is made at two thirds of the life of the current one. It replaces that one a day later, if the configuration
// trusts all authorities then. Without that delay an API server that is late would trust only the earlier authority. unusable is why
// contents are replaced.
func (c contents) rotate(config Config, trusts bool, now time.Time) (serving *tls.Certificate, unusable, err error) {
	trusted, invalid := c.authorities(now)
	var invalidServing, invalidNext error
	serving, invalidServing = c.pair(tlsCert, tlsKey, trusted, config.serverName(), now)
	var next *tls.Certificate
	if len(c[nextCert])+len(c[nextKey]) > 0 {
		next, invalidNext = c.pair(nextCert, nextKey, trusted, config.serverName(), now)
	}
	switch {
	case next != nil && (serving == nil || trusts && now.Sub(next.Leaf.NotBefore) >= backdate+settle):
		next = nil
		c[tlsCert], c[tlsKey] = c[nextCert], c[nextKey]
	case serving == nil:
		_, trusted, err = c.issue(tlsCert, tlsKey, trusted, config)
	case next == nil && now.After(serving.Leaf.NotBefore.Add(lifetime/3*2)):
		next, trusted, err = c.issue(nextCert, nextKey, trusted, config)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("make certificate for %s: %w", config.serverName(), err)
	}
	if next == nil {
		delete(c, nextCert)
		delete(c, nextKey)
	}
	c[caCert], err = cert.EncodeCertificates(trusted...)
	return serving, errors.Join(invalid, invalidServing, invalidNext), err
}

// issue makes a certificate with an authority, whose key is discarded.
func (c contents) issue(at, key string, trusted []*x509.Certificate, config Config) (*tls.Certificate, []*x509.Certificate, error) {
	var err error
	c[at], c[key], err = cert.GenerateSelfSignedCertKeyWithOptions(cert.SelfSignedCertKeyOptions{
		Host: config.serverName(), AlternateDNS: []string{config.Name, config.Name + "." + config.Namespace}, MaxAge: lifetime,
	})
	if err != nil {
		return nil, nil, err
	}
	pair, err := tls.X509KeyPair(c[at], c[key])
	if err != nil {
		return nil, nil, err
	}
	// The authority follows the certificate.
	authority, err := x509.ParseCertificate(pair.Certificate[1])
	return &pair, append(trusted, authority), err
}

// Reconcile implements reconcile.Reconciler. It serves the certificate of the Secret, rotates it, and writes its authorities to the
// configuration. It is idempotent, has one worker and runs in every replica: the API server rejects the later of two writes.
func (w *Webhook) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	configuration := &admissionregistrationv1.ValidatingWebhookConfiguration{}
	if err := w.client.Get(ctx, types.NamespacedName{Name: request.Name}, configuration); err != nil {
		// Without a configuration the API server does not call the webhook, and garbage collection removes the Secret.
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	bundle, err := w.renew(ctx, configuration)
	if err == nil {
		err = w.trust(ctx, configuration, bundle)
	}
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		// The watch reports the other replica's change, which triggers the next reconciliation.
		klog.FromContext(ctx).V(2).Info("Another replica wrote first", "err", err)
		return reconcile.Result{}, nil
	}
	return reconcile.Result{RequeueAfter: checkInterval}, err
}

// renew serves the certificate of the Secret, takes one step of the rotation and returns the authorities to trust. The watch reports
// what it wrote, which triggers the next reconciliation.
func (w *Webhook) renew(ctx context.Context, configuration *admissionregistrationv1.ValidatingWebhookConfiguration) ([]byte, error) {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.config.Namespace, Name: w.config.Name}}
	var unusable error
	done, err := controllerutil.CreateOrUpdate(ctx, w.client, secret, func() error {
		if secret.Data == nil {
			secret.Data = contents{}
		}
		serving, invalid, err := contents(secret.Data).rotate(w.config, trusts(configuration, secret.Data[caCert]), time.Now())
		if serving != nil {
			w.serving.Store(serving)
		}
		if err != nil || secret.ResourceVersion != "" {
			unusable = invalid
			return err
		}
		secret.Type = corev1.SecretTypeTLS
		secret.Labels = map[string]string{"app.kubernetes.io/part-of": "tandem", "app.kubernetes.io/managed-by": "tandem-controller"}
		return controllerutil.SetOwnerReference(configuration, secret, w.client.Scheme())
	})
	if err != nil {
		return nil, fmt.Errorf("create or update secret %s/%s: %w", w.config.Namespace, w.config.Name, err)
	}
	if done != controllerutil.OperationResultNone {
		kind, reason, note := corev1.EventTypeNormal, "CertificateRotated", "The webhook's certificates were renewed"
		if unusable != nil {
			kind, reason = corev1.EventTypeWarning, "CertificateReplaced"
			note = fmt.Sprintf("The certificates in the Secret could not be used and were replaced: %.512s", unusable)
		}
		klog.FromContext(ctx).Info(note, "secret", klog.KObj(secret), "result", done)
		w.recorder.Eventf(secret, nil, kind, reason, "Renew", "%s", note)
	}
	return secret.Data[caCert], nil
}

func trusts(configuration *admissionregistrationv1.ValidatingWebhookConfiguration, bundle []byte) bool {
	return !slices.ContainsFunc(configuration.Webhooks, func(h admissionregistrationv1.ValidatingWebhook) bool {
		return !bytes.Equal(h.ClientConfig.CABundle, bundle)
	})
}

// trust sets the caBundle of the configuration, also if another client removed it.
func (w *Webhook) trust(ctx context.Context, configuration *admissionregistrationv1.ValidatingWebhookConfiguration, bundle []byte) error {
	if trusts(configuration, bundle) {
		return nil
	}
	// The patch replaces the whole list, so it must not overwrite a concurrent change.
	patch := client.MergeFromWithOptions(configuration.DeepCopy(), client.MergeFromWithOptimisticLock{})
	for i := range configuration.Webhooks {
		configuration.Webhooks[i].ClientConfig.CABundle = bundle
	}
	if err := w.client.Patch(ctx, configuration, patch); err != nil {
		return fmt.Errorf("patch CA bundle of %s: %w", configuration.Name, err)
	}
	klog.FromContext(ctx).Info("Wrote the webhook's authorities to its configuration", "configuration", configuration.Name)
	return nil
}
