// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"context"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/tandem-gpu/tandem/cli/explain"
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

	mu  sync.Mutex
	now *read
}

// read is what was read in objectsFor. Objects.mu guards it, apart from the classes, which do not change.
type read struct {
	known   explain.Requested
	left    int
	expires time.Time
}

func newRead(classes []resourceapi.DeviceClass, expires time.Time) *read {
	return &read{left: mostObjects, expires: expires, known: explain.Requested{
		Classes: classes, Claims: map[types.NamespacedName]*resourceapi.ResourceClaim{},
		Templates: map[types.NamespacedName]*resourceapi.ResourceClaimTemplate{},
	}}
}

// NewObjects returns the objects of a cluster.
func NewObjects(c Cluster) *Objects { return &Objects{cluster: c, now: newRead(nil, time.Time{})} }

// Of returns what the claims of the pods request. The first pods come first where there are too many claims. What the viewer may not read
// is missing.
func (o *Objects) Of(ctx context.Context, pods []*corev1.Pod) explain.Requested {
	known := newRead(nil, time.Time{}).known
	known.Driver = o.cluster.DriverName
	if !slices.ContainsFunc(pods, func(pod *corev1.Pod) bool { return len(pod.Spec.ResourceClaims) > 0 }) {
		return known
	}
	now, api := o.refreshed(ctx), o.cluster.Client.ResourceV1()
	for _, pod := range pods {
		for i := range pod.Spec.ResourceClaims[:min(explain.MostClaims, len(pod.Spec.ResourceClaims))] {
			ref := &pod.Spec.ResourceClaims[i]
			if template := ref.ResourceClaimTemplateName; template != nil &&
				readOne(ctx, o, now, now.known.Templates, known.Templates, pod.Namespace, *template, api.ResourceClaimTemplates(pod.Namespace).Get) != nil {
				continue // many pods have the same
			}
			// The template of a claim may have been deleted since.
			if name, _, err := resourceclaim.Name(pod, ref); err == nil && name != nil {
				readOne(ctx, o, now, now.known.Claims, known.Claims, pod.Namespace, *name, api.ResourceClaims(pod.Namespace).Get)
			}
		}
	}
	known.Classes = now.known.Classes
	return known
}

// refreshed reads the classes again when they expire, and forgets the rest. After an error, other than that the viewer may not read them,
// nothing expires: the next call tries again.
func (o *Objects) refreshed(ctx context.Context) *read {
	o.mu.Lock()
	now := o.now
	o.mu.Unlock()
	if time.Now().Before(now.expires) {
		return now
	}
	var classes []resourceapi.DeviceClass
	switch list, err := o.cluster.Client.ResourceV1().DeviceClasses().List(ctx, metav1.ListOptions{}); {
	case err == nil:
		classes = append([]resourceapi.DeviceClass{}, list.Items...)
	case !apierrors.IsForbidden(err):
		return now
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.now == now { // no other call was faster
		o.now = newRead(classes, time.Now().Add(objectsFor))
	}
	return o.now
}

// readOne returns an object and puts it into a map. It sends a request if the object is not in known. A nil object does not exist. A request that
// ends with ctx does not count.
func readOne[T any](ctx context.Context, o *Objects, now *read, known, into map[types.NamespacedName]*T, namespace, name string,
	get func(context.Context, string, metav1.GetOptions) (*T, error),
) *T {
	of := types.NamespacedName{Namespace: namespace, Name: name}
	o.mu.Lock()
	defer o.mu.Unlock()
	object, ok := known[of]
	if !ok && now.left > 0 && ctx.Err() == nil {
		now.left--
		o.mu.Unlock()
		found, err := get(ctx, name, metav1.GetOptions{})
		o.mu.Lock()
		switch ok = err == nil || apierrors.IsNotFound(err); {
		case err == nil:
			object, known[of] = found, found
		case ok:
			known[of] = nil
		case ctx.Err() != nil:
			now.left++
		}
	}
	if ok {
		into[of] = object
	}
	return object
}
