// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"fmt"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	// lookAgain is how often the age of the certificates is looked at.
	lookAgain  = settle
	firstRetry = 5 * time.Millisecond
	lastRetry  = 10 * time.Second
)

// options are those of a reconciler that one of several replicas runs, or each of them.
func options(leader bool) ctrlcontroller.Options {
	return ctrlcontroller.Options{
		NeedLeaderElection: ptr.To(leader),
		RateLimiter:        workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, lastRetry),
	}
}

// keeper is the leader's: it makes and rotates the certificates, and tells the API server whom to trust. It has one worker.
type keeper struct {
	client   client.Client
	config   Config
	recorder events.EventRecorder

	// trusted is the bundle that the configuration has had since then.
	trusted []byte
	since   time.Time
}

func (k *keeper) register(m manager.Manager) error {
	one := reconcile.Request{NamespacedName: types.NamespacedName{Namespace: k.config.Namespace, Name: k.config.Name}}
	toOne := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return []reconcile.Request{one} })
	err := builder.ControllerManagedBy(m).Named("webhook-keeper").
		Watches(&corev1.Secret{}, toOne).
		Watches(&admissionregistrationv1.ValidatingWebhookConfiguration{}, toOne).
		WithOptions(options(true)).
		Complete(k)
	if err != nil {
		return fmt.Errorf("add webhook keeper: %w", err)
	}
	return nil
}

// Reconcile implements reconcile.Reconciler.
func (k *keeper) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	configuration := &admissionregistrationv1.ValidatingWebhookConfiguration{}
	if err := k.client.Get(ctx, types.NamespacedName{Name: request.Name}, configuration); err != nil {
		// Without a configuration the API server does not call the webhook, and garbage collection removes the Secret.
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	bundle, err := k.keep(ctx, request.NamespacedName, configuration)
	if err == nil {
		err = k.trust(ctx, configuration, bundle)
	}
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		// An earlier leader wrote first. The watch reports its change, which triggers the next reconciliation.
		klog.FromContext(ctx).V(2).Info("Another replica has written first", "err", err)
		return reconcile.Result{}, nil
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: lookAgain}, nil
}

// keep brings the Secret a step further and answers the authorities to be trusted.
func (k *keeper) keep(ctx context.Context, key types.NamespacedName, configuration *admissionregistrationv1.ValidatingWebhookConfiguration) ([]byte, error) {
	now := k.config.Now()
	secret := &corev1.Secret{}
	err := k.client.Get(ctx, key, secret)
	absent := apierrors.IsNotFound(err)
	if err != nil && !absent {
		return nil, fmt.Errorf("get secret %s: %w", key, err)
	}
	var have store
	var unusable error
	if !absent {
		have, unusable = open(secret.Data, k.config.names(), now)
	}
	then, story, err := have.advance(k.config.names(), k.settled(have, configuration, now), now)
	if err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	bundle, err := then.bundle()
	if err != nil {
		return nil, fmt.Errorf("encode authorities: %w", err)
	}
	if story == "" && unusable == nil {
		return bundle, nil
	}
	if err := k.write(ctx, key, secret, then, configuration, absent); err != nil {
		return nil, err
	}
	k.tell(ctx, secret, story, unusable)
	return bundle, nil
}

// settled reports whether all authorities have been trusted for a while.
func (k *keeper) settled(s store, configuration *admissionregistrationv1.ValidatingWebhookConfiguration, now time.Time) bool {
	bundle, err := s.bundle()
	if err != nil || !trusts(configuration, bundle) {
		k.trusted = nil
		return false
	}
	if !bytes.Equal(k.trusted, bundle) {
		k.trusted, k.since = bundle, now
	}
	return now.Sub(k.since) >= settle
}

func trusts(configuration *admissionregistrationv1.ValidatingWebhookConfiguration, bundle []byte) bool {
	for _, w := range configuration.Webhooks {
		if !bytes.Equal(w.ClientConfig.CABundle, bundle) {
			return false
		}
	}
	return true
}

// write makes or updates the Secret. It ends with the configuration, for which alone it is there.
func (k *keeper) write(ctx context.Context, key types.NamespacedName, secret *corev1.Secret, s store,
	configuration *admissionregistrationv1.ValidatingWebhookConfiguration, absent bool) error {
	data, err := s.data()
	if err != nil {
		return err
	}
	secret.Data = data
	if !absent {
		if err := k.client.Update(ctx, secret); err != nil {
			return fmt.Errorf("update secret %s: %w", key, err)
		}
		return nil
	}
	secret.ObjectMeta = metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name, Labels: map[string]string{
		"app.kubernetes.io/part-of": "tandem", "app.kubernetes.io/managed-by": "tandem-controller",
	}}
	secret.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: admissionregistrationv1.SchemeGroupVersion.String(), Kind: "ValidatingWebhookConfiguration",
		Name: configuration.Name, UID: configuration.UID,
	}}
	secret.Type = corev1.SecretTypeTLS
	if err := k.client.Create(ctx, secret); err != nil {
		return fmt.Errorf("create secret %s: %w", key, err)
	}
	return nil
}

func (k *keeper) tell(ctx context.Context, secret *corev1.Secret, story string, unusable error) {
	logger := klog.FromContext(ctx)
	if unusable == nil {
		logger.Info("The webhook's certificates have changed", "secret", klog.KObj(secret), "reason", story)
		k.recorder.Eventf(secret, nil, corev1.EventTypeNormal, "CertificateRotated", "Rotate", "%s", story)
		return
	}
	logger.Info("The webhook's certificates were unusable and are replaced", "secret", klog.KObj(secret), "reason", unusable.Error())
	k.recorder.Eventf(secret, nil, corev1.EventTypeWarning, "CertificateReplaced", "Replace", "what was there could not be used: %.512s", unusable.Error())
}

// trust sets the caBundle of the configuration, also if another client removed it.
func (k *keeper) trust(ctx context.Context, configuration *admissionregistrationv1.ValidatingWebhookConfiguration, bundle []byte) error {
	if trusts(configuration, bundle) {
		return nil
	}
	before := configuration.DeepCopy()
	for i := range configuration.Webhooks {
		configuration.Webhooks[i].ClientConfig.CABundle = bundle
	}
	// The patch replaces the whole list, so it must not overwrite a concurrent change.
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := k.client.Patch(ctx, configuration, patch); err != nil {
		return fmt.Errorf("patch CA bundle of %s: %w", configuration.Name, err)
	}
	klog.FromContext(ctx).Info("The API server is told whom to trust", "configuration", configuration.Name)
	return nil
}
