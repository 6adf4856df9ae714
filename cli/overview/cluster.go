// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/availability"
)

// Cluster reads what the views need. It writes nothing but reviews of the viewer's own rights, apart from PatchGPUNode. It is safe for
// concurrent use.
type Cluster struct {
	Client  kubernetes.Interface
	Dynamic dynamic.Interface
	// DriverName is that of Tandem's DRA driver.
	DriverName string
	// Scrape reads metrics for ReadMetrics. Nothing else needs it.
	Scrape Scraper
	// Clock tells which agents are silent. Nil is the machine's.
	Clock *Clock
}

// DeniedError says that the viewer may not read or change objects, and which RBAC rule is missing.
type DeniedError struct {
	Verb, Group, Resource string
	err                   error
}

// Error has the rule on lines of its own, so that it can be copied.
func (e *DeniedError) Error() string {
	verbs := "get, list, watch"
	if !strings.Contains(verbs, e.Verb) {
		verbs = "get, " + e.Verb
	}
	const rule = "- apiGroups: [%q]\n  resources: [%s]\n  verbs: [%s]"
	return fmt.Sprintf("%v\nThis rule of a ClusterRole is missing:\n"+rule, e.err, e.Group, e.Resource, verbs)
}

// Unwrap returns the API server's error.
func (e *DeniedError) Unwrap() error { return e.err }

// withoutRule returns an error without the lines of a missing rule.
func withoutRule(err error) error {
	if denied, is := errors.AsType[*DeniedError](err); is {
		return denied.err
	}
	return err
}

func (c Cluster) gpuNodes() dynamic.ResourceInterface { return c.Dynamic.Resource(v1alpha1.Resource) }

// gpuNodesError adds to an error about GPUNodes what the user can do.
func gpuNodesError(verb string, err error) error {
	switch {
	case err == nil:
		return nil
	case apierrors.IsForbidden(err):
		return &DeniedError{verb, v1alpha1.GroupVersion.Group, v1alpha1.Resource.Resource, fmt.Errorf("%s GPUNodes: %w", verb, err)}
	case apierrors.IsNotFound(err) && verb != "get" && verb != "patch", meta.IsNoMatchError(err):
		return fmt.Errorf("%s GPUNodes: the cluster does not serve %s, is Tandem installed? %w", verb, v1alpha1.GroupVersion, err)
	default:
		return fmt.Errorf("%s GPUNodes: %w", verb, err)
	}
}

// decodeGPUNode returns a GPUNode as of now.
func (c Cluster) decodeGPUNode(object runtime.Object) (node v1alpha1.GPUNode, err error) {
	from, ok := object.(*unstructured.Unstructured)
	if !ok {
		return node, fmt.Errorf("decode GPUNode: unexpected %T", object)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(from.Object, &node); err != nil {
		return node, fmt.Errorf("decode GPUNode %s: %w", from.GetName(), err)
	}
	node.ManagedFields = nil // nothing here shows them, and Watch keeps the nodes
	return availability.AsOf(c.Clock.Now(), node), nil
}

// GPUNode returns the GPUNode of a node.
func (c Cluster) GPUNode(ctx context.Context, name string) (v1alpha1.GPUNode, error) {
	node, err := c.gpuNode(ctx, name)
	if apierrors.IsNotFound(err) {
		return node, fmt.Errorf("get GPUNode %s: Tandem's agent does not run there, it has served no GPU there yet, or the cluster has no such node: %w", name, err)
	}
	return node, err
}

// PatchGPUNode applies a merge patch to a GPUNode and returns the result. A patch with a resource version fails with a conflict if the
// object has changed.
func (c Cluster) PatchGPUNode(ctx context.Context, name string, patch []byte) (v1alpha1.GPUNode, error) {
	object, err := c.gpuNodes().Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "kubectl-gpu"})
	switch {
	case apierrors.IsConflict(err):
		return v1alpha1.GPUNode{}, err
	case err != nil:
		return v1alpha1.GPUNode{}, gpuNodesError("patch", err)
	}
	return c.decodeGPUNode(object)
}

// gpuNode returns the GPUNode of a node. An error that it does not exist is the API server's own, for the caller to decide.
func (c Cluster) gpuNode(ctx context.Context, name string) (v1alpha1.GPUNode, error) {
	object, err := c.gpuNodes().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return v1alpha1.GPUNode{}, err
	}
	if err != nil {
		return v1alpha1.GPUNode{}, gpuNodesError("get", err)
	}
	return c.decodeGPUNode(object)
}

// EachGPUNode calls visit for all GPUNodes, one page after the other. It returns the resource version of the list, for a watch.
func (c Cluster) EachGPUNode(ctx context.Context, visit func(v1alpha1.GPUNode)) (version string, err error) {
	page := func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		list, err := c.gpuNodes().List(ctx, options)
		if err != nil {
			return nil, gpuNodesError("list", err)
		}
		version = list.GetResourceVersion()
		return list, nil
	}
	err = pager.New(page).EachListItem(ctx, metav1.ListOptions{}, func(object runtime.Object) error {
		node, err := c.decodeGPUNode(object)
		if err == nil {
			visit(node)
		}
		return err
	})
	return version, err
}

// each calls visit for the items of a list, one page after the other. what names them in an error.
func each[T any, L runtime.Object](
	ctx context.Context, what string, options metav1.ListOptions, list func(context.Context, metav1.ListOptions) (L, error), visit func(T),
) error {
	page := func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		return list(ctx, options)
	}
	err := pager.New(page).EachListItem(ctx, options, func(object runtime.Object) error {
		item, ok := object.(T)
		if !ok {
			return fmt.Errorf("unexpected %T", object)
		}
		visit(item)
		return nil
	})
	if err != nil {
		return fmt.Errorf("list %s: %w", what, err)
	}
	return nil
}

// Nodes returns the named nodes, or all with GPUs. notes says what is left out because the viewer may not read it.
func (c Cluster) Nodes(ctx context.Context, names ...string) (nodes []Node, notes []string, err error) {
	for i, name := range names {
		if slices.Contains(names[:i], name) {
			continue
		}
		node, err := c.gpuNode(ctx, name)
		of := NodeOf(node)
		if apierrors.IsNotFound(err) {
			of, err = c.nodeWithoutAgent(ctx, name, err)
		}
		if err != nil {
			return nil, nil, err
		}
		nodes = append(nodes, of)
	}
	if len(names) > 0 {
		return nodes, nil, nil
	}
	has := map[string]bool{}
	if _, err := c.EachGPUNode(ctx, func(n v1alpha1.GPUNode) {
		has[n.Name] = true
		nodes = append(nodes, NodeOf(n))
	}); err != nil {
		return nil, nil, err
	}
	err = c.EachNodeWithGPUs(ctx, func(n *corev1.Node) {
		if !has[n.Name] {
			nodes = append(nodes, WithoutAgent(n))
		}
	})
	if err != nil {
		return nodes, []string{fmt.Sprintf("nodes without a GPUNode are not shown: %v", err)}, nil
	}
	return nodes, nil, nil
}

// nodeWithoutAgent describes a node whose GPUNode does not exist, as missing says.
func (c Cluster) nodeWithoutAgent(ctx context.Context, name string, missing error) (Node, error) {
	node, err := c.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return Node{}, fmt.Errorf("get GPUNode %s: %w, and get node %s: %w", name, missing, name, err)
	}
	return WithoutAgent(node), nil
}

// EachNodeWithGPUs calls visit once for each node that has GPUs by its labels. A large cluster has many other nodes.
func (c Cluster) EachNodeWithGPUs(ctx context.Context, visit func(*corev1.Node)) error {
	seen := map[string]bool{}
	for _, label := range explain.GPULabels {
		err := c.eachNode(ctx, label+"=true", func(n *corev1.Node) {
			if !seen[n.Name] {
				seen[n.Name] = true
				visit(n)
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (c Cluster) eachNode(ctx context.Context, selector string, visit func(*corev1.Node)) error {
	return each(ctx, "nodes", metav1.ListOptions{LabelSelector: selector}, c.Client.CoreV1().Nodes().List, visit)
}

// EachSlice calls visit for all of the driver's ResourceSlices, one page after the other.
func (c Cluster) EachSlice(ctx context.Context, visit func(resourceapi.ResourceSlice)) error {
	return c.eachSlice(ctx, fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorDriver, c.DriverName), visit)
}

func (c Cluster) eachSlice(ctx context.Context, selector fields.Selector, visit func(resourceapi.ResourceSlice)) error {
	options, list := metav1.ListOptions{FieldSelector: selector.String()}, c.Client.ResourceV1().ResourceSlices().List
	return each(ctx, "ResourceSlices", options, list, func(slice *resourceapi.ResourceSlice) {
		if slice.Spec.Driver == c.DriverName {
			visit(*slice)
		}
	})
}

// EachClaim calls visit for the ResourceClaims of all namespaces, one page after the other.
func (c Cluster) EachClaim(ctx context.Context, visit func(*resourceapi.ResourceClaim)) error {
	return each(ctx, "ResourceClaims", metav1.ListOptions{}, c.Client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List, visit)
}

// Change is a newer state of a GPUNode.
type Change struct {
	v1alpha1.GPUNode
	// Gone is set if it was deleted. Then it has only its name.
	Gone bool
}

// Viewer is who watches. Watch calls its functions one at a time.
type Viewer struct {
	Show func(Change)
	// Listed is called when all GPUNodes have been shown, and again after each interruption. Failed is called when an interruption begins. Both
	// may be nil.
	Listed func()
	Failed func(error)
}

// refusals is how many refusals in a row end Watch. One does not prove that the viewer lacks the right: an API server that is starting refuses
// everything until it has read the roles.
const refusals = 5

// silentEvery is how often Watch looks for agents that have become silent: no event says so.
const silentEvery = 15 * time.Second

// Watch shows the named nodes, or all: first those that exist, then each change, and each node whose agent becomes silent. It returns nil when
// ctx is done. It returns an error if the first list fails, or if the viewer may not list or watch any more: see refusals.
func (c Cluster) Watch(ctx context.Context, v Viewer, names ...string) error {
	show := v.Show
	wanted := func(name string) bool { return len(names) == 0 || slices.Contains(names, name) }
	last := map[string]v1alpha1.GPUNode{}
	refused := 0
	for first := true; ctx.Err() == nil; first = false {
		now := map[string]v1alpha1.GPUNode{}
		version, err := c.EachGPUNode(ctx, func(n v1alpha1.GPUNode) {
			if wanted(n.Name) {
				now[n.Name] = n
				show(Change{GPUNode: n})
			}
		})
		if err != nil && first {
			return err
		}
		if err == nil {
			for name := range last {
				if _, still := now[name]; !still {
					show(gone(name))
				}
			}
			last = now
			if v.Listed != nil {
				v.Listed()
			}
			if err = c.watchFrom(ctx, version, wanted, last, show); apierrors.IsForbidden(err) {
				err = gpuNodesError("watch", err)
			}
		}
		if !apierrors.IsForbidden(err) {
			refused = 0
		} else if refused++; refused == refusals {
			return err
		}
		if err != nil && v.Failed != nil && ctx.Err() == nil {
			v.Failed(err)
		}
		// The API server ends watches after some minutes, and may be away: list again after a moment.
		broadcast.Sleep(ctx, time.Second)
	}
	return nil
}

func gone(name string) Change {
	return Change{GPUNode: v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}}, Gone: true}
}

func (c Cluster) watchFrom(ctx context.Context, version string, wanted func(string) bool, last map[string]v1alpha1.GPUNode, show func(Change)) error {
	ticker := time.NewTicker(silentEvery)
	defer ticker.Stop()
	watcher, err := c.gpuNodes().Watch(ctx, metav1.ListOptions{ResourceVersion: version})
	if err != nil {
		return err
	}
	defer watcher.Stop()
	for {
		var event watch.Event
		var more bool
		select {
		case event, more = <-watcher.ResultChan():
		case <-ctx.Done():
		case <-ticker.C:
			for name, n := range last {
				if n = availability.AsOf(c.Clock.Now(), n); n.Status.Waiting != last[name].Status.Waiting {
					last[name] = n
					show(Change{GPUNode: n})
				}
			}
			continue
		}
		if !more {
			return nil
		}
		if event.Type == watch.Error {
			return apierrors.FromObject(event.Object)
		}
		node, err := c.decodeGPUNode(event.Object)
		switch {
		case err != nil || !wanted(node.Name):
		case event.Type == watch.Deleted:
			delete(last, node.Name)
			show(gone(node.Name))
		default:
			last[node.Name] = node
			show(Change{GPUNode: node})
		}
	}
}

// Picture reads what is shown of one node.
func (c Cluster) Picture(ctx context.Context, name string) (Picture, []string, error) {
	node, err := c.gpuNode(ctx, name)
	if apierrors.IsNotFound(err) {
		node, err := c.nodeWithoutAgent(ctx, name, err)
		return Picture{Node: node}, nil, err
	}
	if err != nil {
		return Picture{}, nil, err
	}
	var notes []string
	published, err := c.SlicesOf(ctx, name)
	if err != nil {
		notes = append(notes, NotPublished(err))
	}
	return PictureOf(NodeOf(node), published, c.DriverName), notes, nil
}

// NotPublished is the note of a picture without the node's slices.
func NotPublished(err error) string {
	return fmt.Sprintf("NUMA nodes and NVLink are not known: %v", err)
}

// SlicesOf returns the driver's ResourceSlices of a node.
func (c Cluster) SlicesOf(ctx context.Context, node string) (published []resourceapi.ResourceSlice, err error) {
	selector := fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorNodeName, node)
	err = c.eachSlice(ctx, selector, func(s resourceapi.ResourceSlice) {
		if s.Spec.NodeName != nil && *s.Spec.NodeName == node {
			published = append(published, s)
		}
	})
	return published, err
}

// mostCompletions bounds what a shell completes.
const mostCompletions = 500

// NodeNames returns names of nodes with an agent that begin with the prefix, for completion.
func (c Cluster) NodeNames(ctx context.Context, prefix string) ([]string, error) {
	list, err := c.gpuNodes().List(ctx, metav1.ListOptions{Limit: mostCompletions})
	if err != nil {
		return nil, gpuNodesError("list", err)
	}
	return namesOf(list, prefix)
}

// PodNames returns names of pods that begin with the prefix, for completion.
func (c Cluster) PodNames(ctx context.Context, namespace, prefix string) ([]string, error) {
	list, err := c.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{Limit: mostCompletions})
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	return namesOf(list, prefix)
}

func namesOf(list runtime.Object, prefix string) (names []string, err error) {
	err = meta.EachListItem(list, func(item runtime.Object) error {
		object, err := meta.Accessor(item)
		if err == nil && strings.HasPrefix(object.GetName(), prefix) {
			names = append(names, object.GetName())
		}
		return err
	})
	return names, err
}
