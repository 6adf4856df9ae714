// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/fileclock"
	"github.com/tandem-gpu/tandem/internal/owner"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Pods determines the pod state of holds from the node's pods in the API server and their cgroups. It implements
// ledger.PodStates. Until the first list of pods has arrived, every state is Running. It is safe for concurrent use.
type Pods struct {
	client  kubernetes.Interface
	node    string
	cgroups *Cgroups
	// kubeletDir is kubelet's root directory.
	kubeletDir string
	// Stamp is the clock that stamps the files of kubeletDir. The default is the kernel's; a simulation has its own.
	Stamp   func() time.Time
	factory informers.SharedInformerFactory
	handler cache.ResourceEventHandlerRegistration

	changed broadcast.Signal

	mu sync.Mutex
	// synced is when the first list was requested; it is set once all of the list is in pods.
	synced time.Time
	// leftover are the pods that had a cgroup before the first list was requested, and that it did not contain: they were deleted.
	leftover map[types.UID]bool
	// missing is since when CheckCgroups has found no cgroup of a running pod.
	missing map[types.UID]time.Time
	// pods by the UID that kubelet uses. A deleted pod is kept until its cgroup is gone as well.
	pods map[types.UID]seenPod
}

// seenPod is the last version of a pod from the API server.
type seenPod struct {
	*corev1.Pod
	// claims are the names of the claims that it uses. Each hold of a claim is compared with all pods (podsOf).
	claims map[string]bool
	// deleted means that the API server does not have the pod any more.
	deleted bool
	// ended is when the watch first reported the pod as terminal or deleted; zero before.
	ended time.Time
	// hadCgroup is set once its cgroup was seen.
	hadCgroup bool
}

var _ ledger.PodStates = (*Pods)(nil)

// NewPods returns Pods of one node and its kubelet's root directory. It makes no request before Run.
func NewPods(client kubernetes.Interface, node string, cgroups *Cgroups, kubeletDir string) (*Pods, error) {
	p := &Pods{
		client: client, node: node, cgroups: cgroups, kubeletDir: kubeletDir, Stamp: fileclock.Now, factory: newFactory(client, podNodeName, node, trim),
		pods: map[types.UID]seenPod{},
	}
	handler, err := p.factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: p.store,
		UpdateFunc: func(before, o any) {
			// The pod was replaced by one of the same name while the watch was interrupted.
			if uidOf(before) != uidOf(o) {
				p.forget(before)
			}
			p.store(o)
		},
		DeleteFunc: p.forget,
	})
	if err != nil {
		return nil, fmt.Errorf("watch the node's pods: %w", err)
	}
	p.handler = handler
	return p, nil
}

// podNodeName is the field selector of a node's pods.
const podNodeName = "spec.nodeName"

// newFactory returns a factory of informers for the objects whose field has the value.
func newFactory(client kubernetes.Interface, field, value string, trim cache.TransformFunc) informers.SharedInformerFactory {
	return informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(trim),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = fields.OneTermEqualSelector(field, value).String() }))
}

const (
	// askInterval is how often an API server that does not answer is asked again; the interval is longer by up to its length, so that
	// not all nodes ask at once.
	askInterval = 500 * time.Millisecond
	// askTimeout bounds one such request.
	askTimeout = 5 * time.Second
)

// awaitAnswer asks the API server for one object until it answers, or ctx is done. An informer that cannot list waits up to a minute
// before it tries again (client-go, tools/cache, defaultBackoffMax): pods that are bound in that minute would find no device.
func awaitAnswer(ctx context.Context, field, value string, ask func(context.Context, metav1.ListOptions) error) {
	options := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(field, value).String(), Limit: 1, ResourceVersion: "0"}
	intervals := wait.Backoff{Duration: askInterval, Jitter: 1, Steps: math.MaxInt32}
	said := ""
	_ = intervals.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (done bool, _ error) {
		call, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		err := ask(call, options)
		if err != nil && err.Error() != said && ctx.Err() == nil {
			said = err.Error()
			klog.FromContext(ctx).Info("The API server does not answer", "reason", said)
		}
		return err == nil, nil
	}) // the error is that of ctx
}

// Run watches until ctx is done.
func (p *Pods) Run(ctx context.Context) error {
	awaitAnswer(ctx, podNodeName, p.node, func(ctx context.Context, o metav1.ListOptions) error {
		_, err := p.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, o)
		return err
	})
	// Without an answer no pod counts as deleted before.
	before, _ := p.cgroups.UIDs()
	started := time.Now()
	p.factory.StartWithContext(ctx)
	defer p.factory.Shutdown()
	// The informer counts as synced before its handler has received everything.
	if cache.WaitFor(ctx, "", p.handler.HasSyncedChecker()) {
		p.listed(started, before)
	}
	<-ctx.Done()
	return nil
}

// AwaitSync waits for the first list of pods, while Run runs in another goroutine. It returns false if ctx is done before.
func (p *Pods) AwaitSync(ctx context.Context) bool {
	return p.await(ctx, p.Synced)
}

// await waits until a change of the node's pods makes done true. It returns false if ctx is done before.
func (p *Pods) await(ctx context.Context, done func() bool) bool {
	return broadcast.Await(ctx, p.Changed, done)
}

// Changed returns a channel that is closed when the node's pods next change.
func (p *Pods) Changed() <-chan struct{} { return p.changed.Changed() }

// runningUID returns the UID that kubelet uses for a pod: for the mirror of a static pod that of the manifest.
func runningUID(pod *corev1.Pod) types.UID {
	if static := pod.Annotations[corev1.MirrorPodAnnotationKey]; static != "" {
		return types.UID(static)
	}
	return pod.UID
}

// isReplacedBy reports whether a pod takes the place of one that the watch reported before under the same running UID. Every user who may
// create pods can make one with a mirror's annotation and any UID (k8s.io/kubernetes pkg/apis/core/validation asks for spec.nodeName
// only). So a mirror replaces neither a pod that has this UID itself, nor the living mirror of another pod.
func (s seenPod) isReplacedBy(pod *corev1.Pod) bool {
	uid := runningUID(pod)
	return uid == pod.UID || s.UID != uid && (s.deleted || s.Namespace == pod.Namespace && s.Name == pod.Name)
}

func uidOf(o any) types.UID {
	if pod, ok := o.(*corev1.Pod); ok {
		return pod.UID
	}
	return ""
}

// Observe receives an informer's events: an added or updated pod (after), a replaced or deleted one (before). Only simulations
// call it; they do not call Run.
func (p *Pods) Observe(before, after *corev1.Pod) {
	if before != nil && (after == nil || before.UID != after.UID) {
		p.forget(before)
	}
	if after != nil {
		p.store(trimmed(after))
	}
}

// Listed marks the first list as complete. Only simulations call it.
func (p *Pods) Listed(at time.Time) { p.listed(at, nil) }

// listed has the UIDs of the pods that had a cgroup before.
func (p *Pods) listed(at time.Time, cgroups []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leftover = map[types.UID]bool{}
	for _, uid := range cgroups {
		if _, known := p.pods[types.UID(uid)]; !known {
			p.leftover[types.UID(uid)] = true
		}
	}
	p.synced = at
	p.changed.Notify()
}

func (p *Pods) store(o any) {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	uid := runningUID(pod)
	before, known := p.pods[uid]
	if known && !before.isReplacedBy(pod) {
		return
	}
	if before.deleted {
		before, known = seenPod{}, false
	}
	seen := seenPod{Pod: pod, claims: claimsOf(pod), ended: before.ended, hadCgroup: before.hadCgroup}
	switch {
	case !podstatus.Ended(pod):
		seen.ended = time.Time{}
	case seen.ended.IsZero():
		seen.ended = time.Now()
	}
	p.pods[uid] = seen
	if !known || !sameState(before.Pod, pod) {
		p.changed.Notify()
	}
}

// sameState compares trimmed pods: most updates of a pod change nothing that matters here.
func sameState(a, b *corev1.Pod) bool {
	a, b = a.DeepCopy(), b.DeepCopy()
	a.ResourceVersion, b.ResourceVersion = "", ""
	return equality.Semantic.DeepEqual(a, b)
}

func (p *Pods) forget(o any) {
	if unknown, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = unknown.Obj
	}
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	uid := runningUID(pod)
	// A re-created mirror pod has the same running UID, and the watch may have reported its addition already.
	if current, ok := p.pods[uid]; ok && current.UID == pod.UID {
		current.deleted = true
		if current.ended.IsZero() {
			current.ended = time.Now()
		}
		p.pods[uid] = current
	}
	p.changed.Notify()
}

// Name returns the pod of a UID with its name, and without it if the API server does not have the pod.
func (p *Pods) Name(uid string) ledger.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pod, ok := p.pods[types.UID(uid)]; ok {
		return ledger.Pod{UID: uid, Namespace: pod.Namespace, Name: pod.Name}
	}
	return ledger.Pod{UID: uid}
}

// Known reports whether the watch has reported a pod with that UID.
func (p *Pods) Known(uid string) bool { return p.Name(uid).Name != "" }

// EndedBy reports whether the pod was terminal or deleted at a moment, by this process's clock.
func (p *Pods) EndedBy(uid string, moment time.Time) bool {
	ended := p.EndedAt(uid)
	return !ended.IsZero() && !ended.After(moment)
}

// EndedAt returns when the watch first reported the pod as terminal or deleted; zero for a living or unknown pod.
func (p *Pods) EndedAt(uid string) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pods[types.UID(uid)].ended
}

// UnwantedSince returns since when a pod should have ended: the end of its grace period, when the watch reported its deletion, or the
// time of the first list if that did not contain it. It is zero for other pods, and until the first list has arrived. An agent asks for
// its own pod.
func (p *Pods) UnwantedSince(uid string) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod, known := p.pods[types.UID(uid)]
	switch {
	case p.synced.IsZero():
		return time.Time{}
	case !known:
		return p.synced
	case pod.deleted:
		return pod.ended
	case pod.DeletionTimestamp != nil:
		return pod.DeletionTimestamp.Time
	}
	return time.Time{}
}

// UnknownPods returns the UIDs of pods that have a cgroup and that the API server does not have. No list of pods contains what
// they hold.
func (p *Pods) UnknownPods() ([]string, error) {
	return p.unreported(func(pod seenPod) bool { return !pod.deleted })
}

// unreported returns the UIDs of pods that have a cgroup, without those that the watch has reported and for which counts is true.
func (p *Pods) unreported(counts func(seenPod) bool) ([]string, error) {
	uids, err := p.cgroups.UIDs()
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(uids, func(uid string) bool {
		pod, known := p.pods[types.UID(uid)]
		return known && counts(pod)
	}), nil
}

// ClaimNames returns the claims that the node's pods name.
func (p *Pods) ClaimNames() []types.NamespacedName {
	p.mu.Lock()
	defer p.mu.Unlock()
	names := map[types.NamespacedName]bool{}
	for _, pod := range p.pods {
		if pod.deleted {
			continue
		}
		for claim := range pod.claims {
			names[types.NamespacedName{Namespace: pod.Namespace, Name: claim}] = true
		}
	}
	return slices.SortedFunc(maps.Keys(names), func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) })
}

// Synced reports whether the first list of pods has arrived.
func (p *Pods) Synced() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.synced.IsZero()
}

// podsOf returns the recorded pods, and the pods of this node that name the claim or did so until they were deleted.
func (p *Pods) podsOf(namespace, claim string, recorded []ledger.Pod) map[types.UID]bool {
	uids := map[types.UID]bool{}
	for _, pod := range recorded {
		uids[types.UID(pod.UID)] = true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for uid, pod := range p.pods {
		if pod.Namespace == namespace && pod.claims[claim] {
			uids[uid] = true
		}
	}
	return uids
}

// claimsOf returns the names of the claims that a pod uses: from its spec, created from a template, or created for its extended
// resources.
func claimsOf(pod *corev1.Pod) map[string]bool {
	names := map[string]bool{}
	for _, reference := range pod.Spec.ResourceClaims {
		if reference.ResourceClaimName != nil {
			names[*reference.ResourceClaimName] = true
		}
	}
	for _, status := range pod.Status.ResourceClaimStatuses {
		if status.ResourceClaimName != nil {
			names[*status.ResourceClaimName] = true
		}
	}
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil {
		names[extended.ResourceClaimName] = true
	}
	delete(names, "")
	return names
}

// Sweep forgets pods that were deleted a while ago, have no cgroup any more, and that no hold names. While any pod's hold names no pod,
// Sweep forgets none: a forgotten pod would look like one that the watch has not reported yet, and its hold would never end.
func (p *Pods) Sweep(holds []ledger.Hold) {
	named := map[types.UID]bool{}
	for _, h := range holds {
		if h.Holder.Kind == ledger.KindPod && len(h.Pods) == 0 {
			return
		}
		for _, pod := range h.Pods {
			named[types.UID(pod.UID)] = true
		}
	}
	p.mu.Lock()
	var candidates []types.UID
	for uid, pod := range p.pods {
		if pod.deleted && !named[uid] && time.Since(pod.ended) > reportDelay {
			candidates = append(candidates, uid)
		}
	}
	p.mu.Unlock()
	for _, uid := range candidates {
		if cgroup, err := p.cgroups.Pod(string(uid)); err == nil && cgroup == CgroupAbsent {
			p.mu.Lock()
			if p.pods[uid].deleted { // a static pod may be back
				delete(p.pods, uid)
			}
			p.mu.Unlock()
		}
	}
}

// trim removes the fields of a pod that this package does not read: the agent has all pods of its node in memory. It keeps one empty
// container status if any container was ever started.
func trim(o any) (any, error) {
	if pod, ok := o.(*corev1.Pod); ok {
		return trimmed(pod), nil
	}
	return o, nil
}

func trimmed(pod *corev1.Pod) *corev1.Pod {
	kept := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: pod.Name, Namespace: pod.Namespace, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
			DeletionTimestamp: pod.DeletionTimestamp, OwnerReferences: controllerOf(pod),
		},
		Spec: corev1.PodSpec{ResourceClaims: pod.Spec.ResourceClaims, Containers: append(limitsOf(pod), claimUsers(pod)...), InitContainers: askers(pod)},
		Status: corev1.PodStatus{
			Phase: pod.Status.Phase, StartTime: pod.Status.StartTime, ResourceClaimStatuses: pod.Status.ResourceClaimStatuses,
			ExtendedResourceClaimStatus: pod.Status.ExtendedResourceClaimStatus,
		},
	}
	if slices.ContainsFunc(slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses), wasStarted) {
		kept.Status.ContainerStatuses = []corev1.ContainerStatus{{ContainerID: "started"}}
	}
	for _, key := range []string{corev1.MirrorPodAnnotationKey, owner.SafeToEvict} {
		if value, ok := pod.Annotations[key]; ok {
			metav1.SetMetaDataAnnotation(&kept.ObjectMeta, key, value)
		}
	}
	return kept
}

func wasStarted(s corev1.ContainerStatus) bool { return s.ContainerID != "" }

// Node is this node's object: its UID, which changes when the object is deleted and registered again (the garbage collector
// removes the objects that the earlier one owned), its labels and its container runtime. It is safe for concurrent use.
type Node struct {
	client  kubernetes.Interface
	name    string
	changed broadcast.Signal

	mu sync.Mutex
	// node is empty while there is no object.
	node corev1.Node
}

// NewNode returns a Node that makes no request before Run.
func NewNode(client kubernetes.Interface, name string) *Node {
	return &Node{client: client, name: name}
}

// Run watches until ctx is done. Call it once.
func (n *Node) Run(ctx context.Context) error {
	factory := newFactory(n.client, metav1.ObjectNameField, n.name, trimNode)
	_, err := factory.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    n.store,
		UpdateFunc: func(_, object any) { n.store(object) },
		DeleteFunc: func(any) { n.store(&corev1.Node{}) },
	})
	if err != nil {
		return fmt.Errorf("watch the node: %w", err)
	}
	awaitAnswer(ctx, metav1.ObjectNameField, n.name, func(ctx context.Context, o metav1.ListOptions) error {
		_, err := n.client.CoreV1().Nodes().List(ctx, o)
		return err
	})
	factory.StartWithContext(ctx)
	defer factory.Shutdown()
	<-ctx.Done()
	return nil
}

// trimNode keeps what Node returns: the object names every image of the machine.
func trimNode(object any) (any, error) {
	node, ok := object.(*corev1.Node)
	if !ok {
		return object, nil
	}
	trimmed := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion, Labels: node.Labels,
	}}
	trimmed.Status.NodeInfo.ContainerRuntimeVersion = node.Status.NodeInfo.ContainerRuntimeVersion
	return trimmed, nil
}

func (n *Node) store(object any) {
	next, ok := object.(*corev1.Node)
	if !ok {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.node.UID != next.UID || !maps.Equal(n.node.Labels, next.Labels) || n.node.Status.NodeInfo != next.Status.NodeInfo {
		n.changed.Notify()
	}
	n.node = *next
}

func (n *Node) current() corev1.Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.node
}

// UID returns the UID of the node's object; empty while there is none.
func (n *Node) UID() types.UID { return n.current().UID }

// Label returns a label of the node's object and whether it has that label.
func (n *Node) Label(key string) (value string, ok bool) {
	value, ok = n.current().Labels[key]
	return value, ok
}

// Labels returns the labels of the node's object, not to be changed; nil while there is no object.
func (n *Node) Labels() map[string]string { return n.current().Labels }

// RuntimeVersion returns the container runtime as kubelet reports it, "containerd://2.1.4"; empty while it is unknown.
func (n *Node) RuntimeVersion() string { return n.current().Status.NodeInfo.ContainerRuntimeVersion }

// Changed returns a channel that is closed when the UID, the labels or the runtime next change; take it before reading.
func (n *Node) Changed() <-chan struct{} { return n.changed.Changed() }
