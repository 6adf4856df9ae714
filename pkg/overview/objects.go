// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/pkg/explain"
)

const (
	// objectsFor is how long classes, claims and templates are used.
	objectsFor = 30 * time.Second
	// mostObjects bounds the claims and templates that are read in that time. A Deployment has one template.
	mostObjects = 64
)

// Objects read what the claims of waiting pods request, with a bounded number of requests. They are safe for concurrent use.
type Objects struct {
	cluster Cluster

	mu      sync.Mutex
	known   explain.Objects
	left    int
	expires time.Time
}

// NewObjects returns the objects of a cluster.
func NewObjects(c Cluster) *Objects { return &Objects{cluster: c} }

// Of returns what the claims of the pods request. The first pods come first where there are too many claims. What the viewer may not read
// is missing.
func (o *Objects) Of(ctx context.Context, pods []*corev1.Pod) explain.Objects {
	o.mu.Lock()
	defer o.mu.Unlock()
	known := explain.Objects{
		Driver: o.cluster.DriverName, Claims: map[types.NamespacedName]*resourceapi.ResourceClaim{},
		Templates: map[types.NamespacedName]*resourceapi.ResourceClaimTemplate{},
	}
	api := o.cluster.Client.ResourceV1()
	for _, pod := range pods {
		for i := range pod.Spec.ResourceClaims[:min(explain.MostClaims, len(pod.Spec.ResourceClaims))] {
			o.refresh(ctx)
			switch ref := &pod.Spec.ResourceClaims[i]; {
			case ref.ResourceClaimTemplateName != nil:
				read(o, o.known.Templates, known.Templates, pod.Namespace, *ref.ResourceClaimTemplateName, func(name string) (*resourceapi.ResourceClaimTemplate, error) {
					return api.ResourceClaimTemplates(pod.Namespace).Get(ctx, name, metav1.GetOptions{})
				})
			case ref.ResourceClaimName != nil:
				read(o, o.known.Claims, known.Claims, pod.Namespace, *ref.ResourceClaimName, func(name string) (*resourceapi.ResourceClaim, error) {
					return api.ResourceClaims(pod.Namespace).Get(ctx, name, metav1.GetOptions{})
				})
			}
		}
	}
	known.Classes = o.known.Classes
	return known
}

// refresh reads the classes again when they expire, and forgets the rest.
func (o *Objects) refresh(ctx context.Context) {
	if now := time.Now(); now.After(o.expires) {
		o.left, o.expires = mostObjects, now.Add(objectsFor)
		o.known = explain.Objects{
			Claims: map[types.NamespacedName]*resourceapi.ResourceClaim{}, Templates: map[types.NamespacedName]*resourceapi.ResourceClaimTemplate{},
		}
		if classes, err := o.cluster.Client.ResourceV1().DeviceClasses().List(ctx, metav1.ListOptions{}); err == nil {
			o.known.Classes = append([]resourceapi.DeviceClass{}, classes.Items...)
		}
	}
}

// read copies an object from what is known, which it completes by a request. A nil object does not exist.
func read[T any](o *Objects, known, into map[types.NamespacedName]*T, namespace, name string, get func(string) (*T, error)) {
	of := types.NamespacedName{Namespace: namespace, Name: name}
	object, ok := known[of]
	if !ok && o.left > 0 {
		o.left--
		found, err := get(name)
		switch ok = err == nil || apierrors.IsNotFound(err); {
		case err == nil:
			object, known[of] = found, found
		case ok:
			known[of] = nil
		}
	}
	if ok {
		into[of] = object
	}
}
