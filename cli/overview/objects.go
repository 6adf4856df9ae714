// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/tandem-gpu/tandem/cli/explain"
)

const (
	// objectsFor is how long classes, claims and templates are used.
	objectsFor = 30 * time.Second
	// mostObjects bounds the claims and templates that are read in that time. A Deployment has one template.
	mostObjects = 64
	// requestsAtOnce bounds the requests at the same time.
	requestsAtOnce = 8
)

// Objects read what the claims of waiting pods request, with a bounded number of requests. They are safe for concurrent use.
type Objects struct {
	cluster Cluster

	mu  sync.Mutex
	now *read
}

// read is what was read in objectsFor. Objects.mu guards it, apart from the classes, which do not change.
type read struct {
	classes []resourceapi.DeviceClass
	known   map[object]*request
	left    int
	expires time.Time
}

func newRead(classes []resourceapi.DeviceClass, expires time.Time) *read {
	return &read{classes, map[object]*request{}, mostObjects, expires}
}

// NewObjects returns the objects of a cluster.
func NewObjects(c Cluster) *Objects { return &Objects{cluster: c, now: newRead(nil, time.Time{})} }

// Of returns what the claims of the pods request. Namespaces take turns where there are too many claims. What the viewer may not read
// is missing.
func (o *Objects) Of(ctx context.Context, pods []*corev1.Pod) explain.Requested {
	known := explain.Requested{
		Driver: o.cluster.DriverName, Claims: map[types.NamespacedName]*resourceapi.ResourceClaim{},
		Templates: map[types.NamespacedName]*resourceapi.ResourceClaimTemplate{},
	}
	if !slices.ContainsFunc(pods, mayHaveClass) {
		return known
	}
	now := o.refreshed(ctx)
	var first, claims []object
	for _, pod := range pods {
		for i := range pod.Spec.ResourceClaims[:min(explain.MostClaims, len(pod.Spec.ResourceClaims))] {
			ref := &pod.Spec.ResourceClaims[i]
			var claim object
			if name, _, err := resourceclaim.Name(pod, ref); err == nil && name != nil {
				claim = object{types.NamespacedName{Namespace: pod.Namespace, Name: *name}, true}
			}
			if name := ref.ResourceClaimTemplateName; name != nil {
				template := object{types.NamespacedName{Namespace: pod.Namespace, Name: *name}, false}
				first, claims = append(first, template), append(claims, claim)
			} else if claim.claim {
				first, claims = append(first, claim), append(claims, claim)
			}
		}
	}
	o.read(ctx, now, first, known)
	// The template of a claim may have been deleted since. Many pods have the same.
	var second []object
	for i, of := range first {
		if claims[i].claim && !of.claim && known.Templates[of.NamespacedName] == nil {
			second = append(second, claims[i])
		}
	}
	o.read(ctx, now, second, known)
	known.Classes = now.classes
	return known
}

// mayHaveClass reports whether a pod has claims, or extended resources that a class may serve.
func mayHaveClass(pod *corev1.Pod) bool {
	for name := range resourcehelper.PodLimits(pod, resourcehelper.PodResourcesOptions{}) {
		if strings.Contains(string(name), "/") {
			return true
		}
	}
	return len(pod.Spec.ResourceClaims) > 0
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
	case apierrors.IsNotFound(err): // the API server does not serve claims
		classes = []resourceapi.DeviceClass{}
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

// object names a claim or a template.
type object struct {
	types.NamespacedName
	claim bool
}

// request reads an object. What it has read is nil if the object does not exist.
type request struct {
	object
	turn     int
	claimed  *resourceapi.ResourceClaim
	template *resourceapi.ResourceClaimTemplate
	err      error
}

// read adds objects to what is known and copies them, apart from those for which too many were asked. Namespaces take turns. A nil object does
// not exist. A request that ends with ctx does not count.
func (o *Objects) read(ctx context.Context, now *read, objects []object, into explain.Requested) {
	var requests []*request
	turns, seen := map[string]int{}, map[object]bool{}
	o.mu.Lock()
	for _, of := range objects {
		if !seen[of] && now.known[of] == nil {
			requests = append(requests, &request{object: of, turn: turns[of.Namespace]})
			turns[of.Namespace]++
		}
		seen[of] = true
	}
	slices.SortStableFunc(requests, func(a, b *request) int { return cmp.Compare(a.turn, b.turn) })
	requests = requests[:min(len(requests), now.left)]
	now.left -= len(requests)
	o.mu.Unlock()

	api := o.cluster.Client.ResourceV1()
	var group errgroup.Group
	group.SetLimit(requestsAtOnce)
	for _, r := range requests {
		group.Go(func() error {
			if r.err = ctx.Err(); r.err != nil {
				return nil
			}
			if r.claim {
				r.claimed, r.err = api.ResourceClaims(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
			} else {
				r.template, r.err = api.ResourceClaimTemplates(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
			}
			if apierrors.IsNotFound(r.err) {
				r.claimed, r.template, r.err = nil, nil, nil
			}
			return nil
		})
	}
	_ = group.Wait() // each request has its error

	o.mu.Lock()
	defer o.mu.Unlock()
	for _, r := range requests {
		if r.err == nil {
			now.known[r.object] = r
		} else if ctx.Err() != nil {
			now.left++
		}
	}
	for of := range seen {
		switch r := now.known[of]; {
		case r == nil:
		case of.claim:
			into.Claims[of.NamespacedName] = r.claimed
		default:
			into.Templates[of.NamespacedName] = r.template
		}
	}
}
