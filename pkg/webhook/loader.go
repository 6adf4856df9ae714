// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// loader is every replica's: it serves what the Secret says from now on.
type loader struct {
	client client.Reader
	config Config
	served *Served
}

func (l *loader) register(m manager.Manager) error {
	err := builder.ControllerManagedBy(m).Named("webhook-loader").For(&corev1.Secret{}).WithOptions(options(false)).Complete(l)
	if err != nil {
		return fmt.Errorf("add webhook loader: %w", err)
	}
	return nil
}

// Reconcile implements reconcile.Reconciler. What was served before is, until there is something better: replacing what is
// unusable is the leader's.
func (l *loader) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	var secret corev1.Secret
	if err := l.client.Get(ctx, request.NamespacedName, &secret); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	s, err := open(secret.Data, l.config.names(), l.config.Now())
	if s.serving == nil {
		klog.FromContext(ctx).Info("The webhook's certificate cannot be used", "secret", klog.KObj(&secret), "reason", err.Error())
		return reconcile.Result{}, nil
	}
	if before := l.served.certificate.Swap(&s.serving.tls); before == nil || !before.Leaf.Equal(s.serving.leaf()) {
		klog.FromContext(ctx).V(2).Info("The webhook has a certificate", "secret", klog.KObj(&secret), "expires", s.serving.leaf().NotAfter)
	}
	return reconcile.Result{}, nil
}
