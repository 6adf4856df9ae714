// SPDX-License-Identifier: Apache-2.0

package page

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/overview"
)

const (
	// nodesEvery is how often nodes are listed to find those without an agent.
	nodesEvery = 5 * time.Minute
	// asksEvery is how often a viewer's rights are asked for who may list no pods.
	asksEvery = time.Minute
	// slicesFor is how long the ResourceSlices of a node are used: they change with the node's partitions.
	slicesFor = 30 * time.Second
	// refusedFor is how long a refused watch of pods is reported. If the API server still refuses it, the informer notices at least once a
	// minute (client-go tools/cache, NewReflectorWithOptions: 30 s and up to 30 s of jitter).
	refusedFor = 90 * time.Second
	// mostSlices bounds the nodes whose slices are kept.
	mostSlices = 256
)

// fleet is the newest state of the cluster. One watch of GPUNodes and one of waiting pods serve all requests.
type fleet struct {
	cluster   overview.Cluster
	namespace string
	rights    *overview.Rights

	mu    sync.Mutex
	nodes map[string]seen
	// listed is set once all GPUNodes are in nodes.
	listed bool
	// without are the nodes with GPUs at the last list, as they are shown while they have no GPUNode.
	without map[string]overview.Node
	pods    cache.Store
	slices  map[string]published
	// notes say what is missing, by what they are about: aboutGPUNodes and so on.
	notes map[string]string
	// refused says why the API server last refused the watch of pods, and refusedAt when.
	refused   string
	refusedAt time.Time
}

// seen is a GPUNode as the page keeps it, and the node as it is shown.
type seen struct {
	gpus       v1alpha1.GPUNode
	node       overview.Node
	namespaces []string
}

type published struct {
	slices []resourceapi.ResourceSlice
	err    error
	until  time.Time
}

const (
	aboutGPUNodes = "GPUNodes"
	aboutNodes    = "nodes"
	aboutPods     = "pods"
	aboutWatch    = "watch of pods"
)

func newFleet(cluster overview.Cluster, namespace string) *fleet {
	return &fleet{
		cluster: cluster, namespace: namespace, rights: overview.NewRights(cluster, namespace), nodes: map[string]seen{},
		slices: map[string]published{}, notes: map[string]string{},
	}
}

func (f *fleet) run(ctx context.Context, group *errgroup.Group) {
	group.Go(func() error {
		return f.cluster.Watch(ctx, overview.Viewer{
			Show: f.show,
			Listed: func() {
				f.mu.Lock()
				defer f.mu.Unlock()
				f.listed = true
				delete(f.notes, aboutGPUNodes)
			},
			Failed: func(err error) { f.note(aboutGPUNodes, fmt.Sprintf("The nodes are not up to date: %v", err)) },
		})
	})
	group.Go(func() error { return f.findWithoutAgent(ctx) })
	group.Go(func() error { return f.watchPods(ctx) })
}

func (f *fleet) note(about, text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.notes[about] = text
}

func (f *fleet) show(c overview.Change) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.Gone {
		delete(f.nodes, c.Name)
		return
	}
	node := overview.NodeOf(c.GPUNode)
	// A queue of pods needs the status, without the line of all holders.
	gpus := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: c.Name}, Status: c.Status}
	gpus.Status.Holders = ""
	f.nodes[c.Name] = seen{gpus, node, node.Namespaces()}
}

// findWithoutAgent lists the nodes that have GPUs, at once and then every nodesEvery.
func (f *fleet) findWithoutAgent(ctx context.Context) error {
	ticker := time.NewTicker(nodesEvery)
	defer ticker.Stop()
	for ctx.Err() == nil {
		found := map[string]overview.Node{}
		err := f.cluster.EachNodeWithGPUs(ctx, func(n *corev1.Node) { found[n.Name] = overview.WithoutAgent(n) })
		f.mu.Lock()
		if f.without = found; err != nil && ctx.Err() == nil {
			f.notes[aboutNodes] = fmt.Sprintf("Nodes without a GPUNode are not shown: %v", err)
		} else {
			delete(f.notes, aboutNodes)
		}
		f.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
	return nil
}

// watchPods watches pending pods, of all namespaces if the viewer may. While the viewer may list none, it asks again now and then: an error
// counts as no.
func (f *fleet) watchPods(ctx context.Context) error {
	namespace, may := f.podsOf(ctx)
	for ; !may; namespace, may = f.podsOf(ctx) {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(asksEvery):
		}
	}
	factory := informers.NewSharedInformerFactoryWithOptions(f.cluster.Client, 0, informers.WithNamespace(namespace), informers.WithTransform(trim),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("status.phase", string(corev1.PodPending)).String()
		}))
	informer := factory.Core().V1().Pods().Informer()
	if err := informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) {
		if apierrors.IsForbidden(err) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.refused, f.refusedAt = fmt.Sprintf("Waiting pods are not up to date: %v", err), time.Now()
		}
	}); err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	f.mu.Lock()
	f.pods = informer.GetStore()
	f.mu.Unlock()
	factory.StartWithContext(ctx)
	defer factory.Shutdown()
	<-ctx.Done()
	return nil
}

// podsOf returns the namespace whose pods the viewer may list; "" is all. It notes which pods are not shown.
func (f *fleet) podsOf(ctx context.Context) (namespace string, may bool) {
	is := f.rights.MayName(ctx, []string{f.namespace})
	note := ""
	switch {
	case is(metav1.NamespaceAll):
		may = true
	case is(f.namespace):
		namespace, may = f.namespace, true
		note = fmt.Sprintf("Waiting pods are those of namespace %s: you may not list the pods of all namespaces.", namespace)
	default:
		note = fmt.Sprintf("Waiting pods are not shown: you may list neither the pods of all namespaces nor those of %s.", f.namespace)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.notes[aboutPods] = note; note == "" {
		delete(f.notes, aboutPods)
	}
	return namespace, may
}

// trim keeps what a list of waiting pods shows.
func trim(object any) (any, error) {
	from, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil // the last state of a deleted pod
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: from.Namespace, Name: from.Name, UID: from.UID, ResourceVersion: from.ResourceVersion,
			CreationTimestamp: from.CreationTimestamp},
		Spec: corev1.PodSpec{NodeName: from.Spec.NodeName, ResourceClaims: from.Spec.ResourceClaims, SchedulingGates: from.Spec.SchedulingGates,
			Resources: from.Spec.Resources},
		Status: corev1.PodStatus{Phase: from.Status.Phase},
	}
	if controller := metav1.GetControllerOf(from); controller != nil {
		pod.OwnerReferences = []metav1.OwnerReference{*controller}
	}
	if hash := from.Labels[appsv1.DefaultDeploymentUniqueLabelKey]; hash != "" {
		pod.Labels = map[string]string{appsv1.DefaultDeploymentUniqueLabelKey: hash}
	}
	only := func(containers []corev1.Container) (kept []corev1.Container) {
		for _, c := range containers {
			kept = append(kept, corev1.Container{Resources: c.Resources, RestartPolicy: c.RestartPolicy})
		}
		return kept
	}
	pod.Spec.InitContainers, pod.Spec.Containers = only(from.Spec.InitContainers), only(from.Spec.Containers)
	for _, c := range from.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			pod.Status.Conditions = append(pod.Status.Conditions, c)
		}
	}
	waits := func(statuses []corev1.ContainerStatus) (kept []corev1.ContainerStatus) {
		for _, s := range statuses {
			kept = append(kept, corev1.ContainerStatus{Name: s.Name, State: corev1.ContainerState{Waiting: s.State.Waiting}})
		}
		return kept
	}
	pod.Status.InitContainerStatuses = waits(from.Status.InitContainerStatuses)
	pod.Status.ContainerStatuses = waits(from.Status.ContainerStatuses)
	return pod, nil
}

// state is the fleet at one moment, as the viewer may see it.
type state struct {
	listed bool
	nodes  []overview.Node
	gpus   []v1alpha1.GPUNode
	// pending are pods in no order.
	pending []*corev1.Pod
	notes   map[string]string
}

// now returns the state of the named nodes, or of all.
func (f *fleet) now(ctx context.Context, names ...string) state {
	f.mu.Lock()
	s := state{listed: f.listed, notes: maps.Clone(f.notes)}
	if f.refused != "" && time.Since(f.refusedAt) < refusedFor {
		s.notes[aboutWatch] = f.refused
	}
	var found []seen
	var namespaces []string
	for name, n := range f.nodes {
		if len(names) == 0 || slices.Contains(names, name) {
			found = append(found, n)
			namespaces = append(namespaces, n.namespaces...)
		}
	}
	for name, n := range f.without {
		if _, has := f.nodes[name]; f.listed && !has && (len(names) == 0 || slices.Contains(names, name)) {
			s.nodes = append(s.nodes, n)
		}
	}
	pods := f.pods
	f.mu.Unlock()
	slices.Sort(namespaces)
	namespaces = slices.Compact(namespaces)
	may := f.rights.MayName(ctx, namespaces)
	for _, n := range found {
		s.gpus = append(s.gpus, n.gpus)
		if slices.ContainsFunc(n.namespaces, func(namespace string) bool { return !may(namespace) }) {
			n.node = n.node.Naming(may)
		}
		s.nodes = append(s.nodes, n.node)
	}
	if pods == nil {
		return s
	}
	for _, object := range pods.List() {
		if pod, ok := object.(*corev1.Pod); ok && pod.Status.Phase == corev1.PodPending {
			s.pending = append(s.pending, pod)
		}
	}
	return s
}

// picture returns a node with its ResourceSlices. note says what is missing.
func (f *fleet) picture(ctx context.Context, node overview.Node) (_ overview.Picture, note string) {
	f.mu.Lock()
	known, ok := f.slices[node.Name]
	f.mu.Unlock()
	if now := time.Now(); !ok || now.After(known.until) {
		known = published{until: now.Add(slicesFor)}
		known.slices, known.err = f.cluster.SlicesOf(ctx, node.Name)
		f.mu.Lock()
		if len(f.slices) >= mostSlices {
			clear(f.slices)
		}
		if ctx.Err() == nil {
			f.slices[node.Name] = known
		}
		f.mu.Unlock()
	}
	if known.err != nil {
		note = overview.NotPublished(known.err)
	}
	return overview.PictureOf(node, known.slices, f.cluster.DriverName), note
}
