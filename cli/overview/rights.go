// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"context"
	"slices"
	"sync"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
)

const (
	// mostReviews bounds the questions about rights in rightsFor. Namespaces beyond it count as forbidden.
	mostReviews = 64
	// rightsFor is how long an answer is used.
	rightsFor = time.Minute
)

// Rights know in which namespaces the viewer may list pods. They are safe for concurrent use.
type Rights struct {
	cluster Cluster
	own     string

	mu sync.Mutex
	// asked are the answers by namespace, until they expire. "" is all namespaces.
	asked   map[string]bool
	expires time.Time
}

// NewRights returns the rights of the cluster's viewer. They ask for their own namespace however many others there are.
func NewRights(c Cluster, own string) *Rights { return &Rights{cluster: c, own: own} }

// MayName returns a function that reports whether the viewer may list the pods of one of these namespaces. It asks the API server for what
// it has not asked in the last minute, and remembers the answers. An error counts as no.
func (r *Rights) MayName(ctx context.Context, namespaces []string) func(namespace string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); !now.Before(r.expires) {
		r.asked, r.expires = map[string]bool{}, now.Add(rightsFor)
	}
	if r.mayList(ctx, metav1.NamespaceAll) {
		return func(string) bool { return true }
	}
	may := map[string]bool{}
	for _, namespace := range namespaces {
		may[namespace] = namespace != "" && r.mayList(ctx, namespace)
	}
	return func(namespace string) bool { return may[namespace] }
}

// mayList must be called with the lock held: concurrent callers wait for the same answers.
func (r *Rights) mayList(ctx context.Context, namespace string) bool {
	may, known := r.asked[namespace]
	if known || len(r.asked) > mostReviews && namespace != r.own {
		return may
	}
	review, err := r.cluster.Client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
			Namespace: namespace, Verb: "list", Resource: "pods",
		}},
	}, metav1.CreateOptions{})
	if ctx.Err() != nil {
		return false // the caller has gone: this is no answer for others
	}
	r.asked[namespace] = err == nil && review.Status.Allowed
	return r.asked[namespace]
}

// Namespaces returns those of which the node has names, sorted and each once.
func (n Node) Namespaces() (namespaces []string) {
	for _, d := range n.Devices {
		for _, h := range d.Holders {
			namespaces = append(namespaces, h.namespace())
		}
		for _, c := range d.Allocated {
			namespaces = append(namespaces, c.Namespace)
		}
	}
	for _, c := range n.Conflicts {
		namespaces = append(namespaces, c.Namespace)
	}
	slices.Sort(namespaces)
	return slices.Compact(namespaces)
}

// Naming returns the node with names of only those namespaces that may be named, as Why names them. Other holders keep their kinds, states
// and shares.
func (n Node) Naming(may func(namespace string) bool) Node {
	n.Devices, n.Conflicts = slices.Clone(n.Devices), slices.Clone(n.Conflicts)
	for i := range n.Devices {
		d := &n.Devices[i]
		d.Holders, d.Allocated = slices.Clone(d.Holders), slices.Clone(d.Allocated)
		for j, h := range d.Holders {
			if !may(h.namespace()) {
				d.Holders[j] = h.unnamed()
			}
		}
		for j, c := range d.Allocated {
			if !may(c.Namespace) {
				d.Allocated[j] = Claimed{}
			}
		}
	}
	for i, c := range n.Conflicts {
		if !may(c.Namespace) {
			// The message has the claim's name.
			n.Conflicts[i] = Conflict{Devices: c.Devices, Since: c.Since, PendingEviction: c.PendingEviction}
		}
	}
	return n
}

// namespace of a holder; empty if it is not known.
func (h Holder) namespace() string {
	if h.Claim != nil && h.Claim.Namespace != "" {
		return h.Claim.Namespace
	}
	for _, p := range h.Pods {
		if p.Namespace != "" {
			return p.Namespace
		}
	}
	return ""
}

func (h Holder) unnamed() Holder {
	of := Holder{Kind: h.Kind, State: h.State, Shared: h.Shared, MemoryBytes: h.MemoryBytes, Shares: h.Shares, share: h.share}
	of.text = explain.Unnamed(v1alpha1.HolderKind(h.Kind))
	if h.WaitsFor != "" {
		of.WaitsFor = explain.UnnamedProcess
	}
	return of
}
