// SPDX-License-Identifier: Apache-2.0

package page

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/internal/broadcast"
)

const (
	// nodesEvery is how often nodes are listed to find those without an agent.
	nodesEvery = 5 * time.Minute
	// asksEvery is how often the API server is asked again who the viewer is, and, if the viewer may not list pods, whether that has changed.
	asksEvery = time.Minute
	// slicesFor is how long the ResourceSlices of a node are used: they change with the node's partitions. metricsFor is how long metrics are
	// used: dcgm-exporter samples every 30 s (its option --collect-interval).
	slicesFor  = 30 * time.Second
	metricsFor = 15 * time.Second
	// refusedFor is how long a refused watch of pods is reported. If the API server still refuses it, the informer notices at least once a
	// minute (client-go tools/cache, NewReflectorWithOptions: 30 s and up to 30 s of jitter).
	refusedFor = 90 * time.Second
	// mostKept bounds the nodes of which something is kept.
	mostKept = 256
)

// fleet is the newest state of the cluster. One watch of GPUNodes and one of waiting pods serve all requests.
type fleet struct {
	cluster   overview.Cluster
	namespace string
	// exporters is the namespace of dcgm-exporter; empty for all.
	exporters string
	rights    *overview.Rights
	objects   *overview.Objects
	// slices and metrics are what was read of nodes, for some time.
	slices, metrics *utilcache.LRUExpireCache

	mu    sync.Mutex
	nodes map[string]seen
	// listed is set once all GPUNodes are in nodes. failed is when the watch of them was interrupted; zero if it goes on.
	listed bool
	failed time.Time
	// user is the viewer's name; empty until the API server has told it.
	user string
	// without are the nodes with GPUs at the last list, as they are shown while they have no GPUNode.
	without map[string]overview.Node
	pods    cache.Store
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
}

// measured are the metrics of a node's devices by their names, and why there are none.
type measured struct {
	of   map[string]*overview.Metrics
	note string
}

// kept returns what is known of a node, or reads it. What is read after ctx is done is not kept.
func kept[T any](ctx context.Context, known *utilcache.LRUExpireCache, node string, lasts time.Duration, read func() T) T {
	if value, ok := known.Get(node); ok {
		return value.(T)
	}
	value := read()
	if ctx.Err() == nil {
		known.Add(node, value, lasts)
	}
	return value
}

const (
	aboutGPUNodes = "GPUNodes"
	aboutNodes    = "nodes"
	aboutPods     = "pods"
	aboutWatch    = "watch of pods"
)

func newFleet(cluster overview.Cluster, of Options) *fleet {
	return &fleet{
		cluster: cluster, namespace: of.Namespace, exporters: of.ExporterNamespace, rights: overview.NewRights(cluster, of.Namespace),
		objects: overview.NewObjects(cluster), nodes: map[string]seen{}, notes: map[string]string{},
		slices: utilcache.NewLRUExpireCache(mostKept), metrics: utilcache.NewLRUExpireCache(mostKept),
	}
}

func (f *fleet) run(ctx context.Context, group *errgroup.Group) {
	group.Go(func() error {
		return f.cluster.Watch(ctx, overview.Viewer{
			Show: f.show,
			Listed: func() {
				f.mu.Lock()
				defer f.mu.Unlock()
				f.listed, f.failed = true, time.Time{}
				delete(f.notes, aboutGPUNodes)
			},
			Failed: f.fail,
		})
	})
	group.Go(func() error { return f.askUser(ctx) })
	group.Go(func() error { return f.findWithoutAgent(ctx) })
	group.Go(func() error { return f.watchPods(ctx) })
}

// fail notes that the watch of GPUNodes is interrupted.
func (f *fleet) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.notes[aboutGPUNodes] = fmt.Sprintf("The nodes are not up to date: %v", err)
	if f.failed.IsZero() {
		f.failed = f.cluster.Clock.Now()
	}
}

// askUser asks the API server who the viewer is, until it answers.
func (f *fleet) askUser(ctx context.Context) error {
	for {
		review, err := f.cluster.Client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		if err == nil {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.user = review.Status.UserInfo.Username
			return nil
		}
		if !broadcast.Sleep(ctx, asksEvery) {
			return nil
		}
	}
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

// viewer returns the viewer's name; empty until it is known.
func (f *fleet) viewer() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.user
}

// watchPods watches pending pods, of all namespaces if the viewer may. While the viewer may list none, it asks again now and then: an error
// counts as no.
func (f *fleet) watchPods(ctx context.Context) error {
	namespace, may := f.podsOf(ctx)
	for ; !may; namespace, may = f.podsOf(ctx) {
		if !broadcast.Sleep(ctx, asksEvery) {
			return nil
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
		Status: corev1.PodStatus{Phase: from.Status.Phase, ResourceClaimStatuses: from.Status.ResourceClaimStatuses},
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
	// at is when it was so.
	at     time.Time
	user   string
	listed bool
	nodes  []overview.Node
	gpus   []v1alpha1.GPUNode
	// pending are pods, the oldest first.
	pending []*corev1.Pod
	notes   map[string]string
}

// now returns the state of the named nodes, or of all.
func (f *fleet) now(ctx context.Context, names ...string) state {
	f.mu.Lock()
	s := state{at: f.cluster.Clock.Now(), user: f.user, listed: f.listed, notes: maps.Clone(f.notes)}
	if !f.failed.IsZero() {
		s.at = f.failed
	}
	if f.refused != "" && time.Since(f.refusedAt) < refusedFor {
		s.notes[aboutWatch] = f.refused
	}
	var found []seen
	if len(names) == 0 {
		found = make([]seen, 0, len(f.nodes))
	}
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
	s.gpus, s.nodes = slices.Grow(s.gpus, len(found)), slices.Grow(s.nodes, len(found))
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
	slices.SortFunc(s.pending, func(a, b *corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return s
}

// picture returns a node with its ResourceSlices. note says what is missing.
func (f *fleet) picture(ctx context.Context, node overview.Node) (_ overview.Picture, note string) {
	known := kept(ctx, f.slices, node.Name, slicesFor, func() (read published) {
		read.slices, read.err = f.cluster.SlicesOf(ctx, node.Name)
		return read
	})
	if known.err != nil {
		note = overview.NotPublished(known.err)
	}
	return overview.PictureOf(node, known.slices, f.cluster.DriverName), note
}

// measure returns a node with its metrics. note says why they are missing.
func (f *fleet) measure(ctx context.Context, node overview.Node) (_ overview.Node, note string) {
	if len(node.Devices) == 0 {
		return node, ""
	}
	node.Devices = slices.Clone(node.Devices) // others have the same
	known := kept(ctx, f.metrics, node.Name, metricsFor, func() measured {
		nodes := []overview.Node{node}
		if err := f.cluster.ReadMetrics(ctx, nodes, f.exporters); err != nil {
			return measured{}
		}
		read := measured{of: map[string]*overview.Metrics{}, note: strings.Join(overview.MissingMetrics(nodes), "; ")}
		for _, d := range nodes[0].Devices {
			read.of[d.Name] = d.Metrics
		}
		return read
	})
	for i := range node.Devices {
		node.Devices[i].Metrics = known.of[node.Devices[i].Name]
	}
	return node, known.note
}
