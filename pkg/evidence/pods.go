// SPDX-License-Identifier: Apache-2.0

package evidence

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Pods judges holds by the pods of this node: what the API server says of them, and whether their cgroups live. It is the
// ledger's Evidence. Until its first list of pods has arrived, everything is Running.
type Pods struct {
	cgroups  *Cgroups
	informer cache.SharedIndexInformer
	factory  informers.SharedInformerFactory

	mu      sync.Mutex
	changed chan struct{}
	synced  time.Time // when the first list was asked for, once it has arrived
	pods    map[types.UID]*corev1.Pod
	// deleted are pods that were seen and are gone from the API server; kept until their cgroups are gone too.
	deleted map[types.UID]bool
}

var _ ledger.Evidence = (*Pods)(nil)

// NewPods prepares an informer on the pods of one node. Nothing is asked before Run.
func NewPods(client kubernetes.Interface, node string, cgroups *Cgroups) (*Pods, error) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
		}),
		informers.WithTransform(trim))
	p := &Pods{
		cgroups: cgroups, factory: factory, informer: factory.Core().V1().Pods().Informer(),
		changed: make(chan struct{}), pods: map[types.UID]*corev1.Pod{}, deleted: map[types.UID]bool{},
	}
	_, err := p.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { p.store(o) },
		UpdateFunc: func(_, o any) { p.store(o) },
		DeleteFunc: func(o any) { p.forget(o) },
	})
	if err != nil {
		return nil, fmt.Errorf("watch the node's pods: %w", err)
	}
	return p, nil
}

// Run watches until ctx is done.
func (p *Pods) Run(ctx context.Context) error {
	started := time.Now()
	p.factory.StartWithContext(ctx)
	defer p.factory.Shutdown()
	if cache.WaitForCacheSync(ctx.Done(), p.informer.HasSynced) {
		p.mu.Lock()
		p.synced = started
		p.announce()
		p.mu.Unlock()
	}
	<-ctx.Done()
	return nil
}

// Changed returns a channel that is closed when the node's pods next change.
func (p *Pods) Changed() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changed
}

func (p *Pods) announce() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// runningUID is the UID by which kubelet knows a pod: that of the manifest where the pod is the mirror of a static one.
func runningUID(pod *corev1.Pod) types.UID {
	if static, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		return types.UID(static)
	}
	return pod.UID
}

func (p *Pods) store(o any) {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pods[runningUID(pod)] = pod
	delete(p.deleted, runningUID(pod))
	p.announce()
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
	// A re-created mirror pod has the same running UID, and its addition may have been seen already.
	if current, ok := p.pods[uid]; ok && current.UID == pod.UID {
		delete(p.pods, uid)
		p.deleted[uid] = true
	}
	p.announce()
}

// Name completes a pod known by UID; it is returned as it is when the API server does not know it.
func (p *Pods) Name(uid string) ledger.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pod, ok := p.pods[types.UID(uid)]; ok {
		return ledger.Pod{UID: uid, Namespace: pod.Namespace, Name: pod.Name}
	}
	return ledger.Pod{UID: uid}
}

// Synced reports whether the first list of pods has arrived.
func (p *Pods) Synced() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.synced.IsZero()
}

// standing is what the API server says of a pod.
type standing int

const (
	live     standing = iota
	deleting          // deletionTimestamp is set
	terminal          // Succeeded or Failed
	absent
)

// standing judges by UID. A pod that was never seen is absent only if it should have been in the first list: one that
// kubelet has just admitted may reach kubelet before us.
func (p *Pods) standing(uid string, since time.Time) standing {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod, ok := p.pods[types.UID(uid)]
	switch {
	case p.synced.IsZero():
		return live
	case ok && (pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed):
		return terminal
	case ok && pod.DeletionTimestamp != nil:
		return deleting
	case ok:
		return live
	case p.deleted[types.UID(uid)] || since.Before(p.synced):
		return absent
	default:
		return live
	}
}

// Verdict implements ledger.Evidence.
func (p *Pods) Verdict(h ledger.Hold) ledger.Verdict {
	if !p.Synced() {
		return ledger.Running
	}
	if h.Holder.Kind == ledger.KindClaim {
		return p.claimVerdict(h)
	}
	if len(h.Pods) == 0 {
		return ledger.Running
	}
	since := h.Since
	if h.State == ledger.StateExpected {
		since = time.Time{} // it is older than the restart in which it was found
	}
	verdict := ledger.Gone
	for _, pod := range h.Pods {
		verdict = min(verdict, p.podVerdict(pod.UID, since))
	}
	return verdict
}

// podVerdict judges a pod that holds by a limit. Kubelet never starts another container of a pod whose phase is terminal,
// so an empty cgroup ends it; one that was removed from the API server in any other way must have lost its cgroup.
func (p *Pods) podVerdict(uid string, since time.Time) ledger.Verdict {
	standing := p.standing(uid, since)
	switch standing {
	case live:
		return ledger.Running
	case deleting:
		return ledger.Terminating
	}
	cgroup, err := p.cgroups.Pod(uid)
	switch {
	case err != nil:
		return ledger.Running
	case cgroup == CgroupAbsent, cgroup == CgroupEmpty && standing == terminal:
		return ledger.Gone
	default:
		return ledger.Orphaned
	}
}

// claimVerdict: a claim ends by Unprepare, not by the end of its pods; but Unprepare alone proves nothing, since kubelets
// before 1.37 call it for claims that running pods share (docs/design/0002-ledger.md).
func (p *Pods) claimVerdict(h ledger.Hold) ledger.Verdict {
	uids := p.podsOf(h)
	if h.State != ledger.StateDraining {
		for uid := range uids {
			if p.standing(string(uid), h.Since) == live {
				return ledger.Running
			}
		}
		if len(uids) == 0 {
			return ledger.Running
		}
		return ledger.Terminating
	}
	for uid := range uids {
		if cgroup, err := p.cgroups.Pod(string(uid)); err != nil || cgroup == CgroupBusy {
			return ledger.Orphaned
		}
	}
	return ledger.Gone
}

// podsOf are the pods recorded with the hold and those of this node that name its claim.
func (p *Pods) podsOf(h ledger.Hold) map[types.UID]bool {
	uids := map[types.UID]bool{}
	for _, pod := range h.Pods {
		uids[types.UID(pod.UID)] = true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for uid, pod := range p.pods {
		if pod.Namespace == h.Namespace && usesClaim(pod, h.Name) {
			uids[uid] = true
		}
	}
	return uids
}

func usesClaim(pod *corev1.Pod, claim string) bool {
	for _, reference := range pod.Spec.ResourceClaims {
		if reference.ResourceClaimName != nil && *reference.ResourceClaimName == claim {
			return true
		}
	}
	for _, status := range pod.Status.ResourceClaimStatuses {
		if status.ResourceClaimName != nil && *status.ResourceClaimName == claim {
			return true
		}
	}
	extended := pod.Status.ExtendedResourceClaimStatus
	return extended != nil && extended.ResourceClaimName == claim
}

// Sweep forgets deleted pods that have no cgroup any more and that no hold names.
func (p *Pods) Sweep(holds []ledger.Hold) {
	named := map[types.UID]bool{}
	for _, h := range holds {
		for _, pod := range h.Pods {
			named[types.UID(pod.UID)] = true
		}
	}
	p.mu.Lock()
	candidates := make([]types.UID, 0, len(p.deleted))
	for uid := range p.deleted {
		if !named[uid] {
			candidates = append(candidates, uid)
		}
	}
	p.mu.Unlock()
	for _, uid := range candidates {
		if cgroup, err := p.cgroups.Pod(string(uid)); err == nil && cgroup == CgroupAbsent {
			p.mu.Lock()
			delete(p.deleted, uid)
			p.mu.Unlock()
		}
	}
}

// trim keeps of a pod what a verdict needs: every agent keeps all pods of its node in memory.
func trim(o any) (any, error) {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	kept := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: pod.Name, Namespace: pod.Namespace, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
			DeletionTimestamp: pod.DeletionTimestamp,
		},
		Spec: corev1.PodSpec{ResourceClaims: pod.Spec.ResourceClaims},
		Status: corev1.PodStatus{
			Phase: pod.Status.Phase, ResourceClaimStatuses: pod.Status.ResourceClaimStatuses,
			ExtendedResourceClaimStatus: pod.Status.ExtendedResourceClaimStatus,
		},
	}
	if static, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		kept.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: static}
	}
	return kept, nil
}
