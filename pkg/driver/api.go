// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/klog/v2"
)

// ErrNoAPI is why claims are not served where the API server does not know them. Ready returns it.
var ErrNoAPI = errors.New("the API server does not serve resource.k8s.io/v1: enable it (Kubernetes 1.34 or newer, and nothing in " +
	"kube-apiserver's --runtime-config against it), or set mode DevicePluginOnly")

const (
	apiTimeout    = 5 * time.Second
	apiRetryFirst = 2 * time.Second
	apiRetryMost  = time.Minute
)

// awaitAPI waits until the API server serves the DRA API, and asks ever more rarely: switching it on takes a restart of the API
// server. It returns false when ctx is done.
func (d *Driver) awaitAPI(ctx context.Context) bool {
	said := false
	for wait := apiRetryFirst; ; wait = min(2*wait, apiRetryMost) {
		served := d.apiServed(ctx)
		d.mu.Lock()
		d.noAPI = !served
		d.mu.Unlock()
		if served {
			return ctx.Err() == nil
		}
		if !said {
			said = true
			klog.FromContext(ctx).Info("Serving no claims", "reason", ErrNoAPI.Error())
			if !d.PublishNothing {
				d.Recorder.Eventf(d.nodeRef, corev1.EventTypeWarning, "NoClaimsAPI", "claims are not served: %v", ErrNoAPI)
			}
		}
		if !pause(ctx, wait) {
			return false
		}
	}
}

// apiServed takes an API server that does not answer for one that will: everything else here waits for it, too.
func (d *Driver) apiServed(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	_, err := d.KubeClient.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorNodeName, d.NodeName).String(), Limit: 1,
	})
	return !apierrors.IsNotFound(err)
}
