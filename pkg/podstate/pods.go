// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Pods judges holds by the pods of this node: what the API server says of them, and whether their cgroups live. It is the
// ledger's Evidence. Until its first list of pods has arrived, everything is Running. It is safe for concurrent use.
type Pods struct {
	cgroups *Cgroups
	// kubeletDir is kubelet's root directory.
	kubeletDir string
	factory    informers.SharedInformerFactory
	handler    cache.ResourceEventHandlerRegistration

	changed broadcast.Signal

	mu sync.Mutex
	// synced is when the first list was asked for, once all of it is in pods.
	synced time.Time
	// pods by the UID that kubelet uses. A deleted pod is kept until its cgroup is gone too.
	pods map[types.UID]seenPod
}

// seenPod is a pod as the API server had it last.
type seenPod struct {
	*corev1.Pod
	// deleted means that the API server does not have it any more.
	deleted bool
	// ended is when it was first seen to be terminal or deleted; zero before.
	ended time.Time
	// arrived is set once its cgroup was seen.
	arrived bool
}

var _ ledger.PodStates = (*Pods)(nil)

// NewPods prepares an informer on the pods of one node, whose kubelet has its root directory there. Nothing is asked before Run.
func NewPods(client kubernetes.Interface, node string, cgroups *Cgroups, kubeletDir string) (*Pods, error) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
		}),
		informers.WithTransform(trim))
	p := &Pods{
		cgroups: cgroups, kubeletDir: kubeletDir, factory: factory,
		pods: map[types.UID]seenPod{},
	}
	handler, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { p.store(o) },
		UpdateFunc: func(before, o any) {
			// A pod that was replaced by one of the same name while the watch was interrupted.
			if uidOf(before) != uidOf(o) {
				p.forget(before)
			}
			p.store(o)
		},
		DeleteFunc: func(o any) { p.forget(o) },
	})
	if err != nil {
		return nil, fmt.Errorf("watch the node's pods: %w", err)
	}
	p.handler = handler
	return p, nil
}

// Run watches until ctx is done.
func (p *Pods) Run(ctx context.Context) error {
	started := time.Now()
	p.factory.StartWithContext(ctx)
	defer p.factory.Shutdown()
	// The informer syncs before its handler has received everything.
	if cache.WaitFor(ctx, "", p.handler.HasSyncedChecker()) {
		p.Listed(started)
	}
	<-ctx.Done()
	return nil
}

// AwaitSync waits for the first list of pods, while Run runs elsewhere. It reports whether it has arrived; otherwise ctx is
// done.
func (p *Pods) AwaitSync(ctx context.Context) bool {
	for {
		changed := p.Changed()
		if p.Synced() {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		}
	}
}

// Changed returns a channel that is closed when the node's pods next change.
func (p *Pods) Changed() <-chan struct{} { return p.changed.Changed() }

// runningUID is the UID by which kubelet knows a pod: that of the manifest where the pod is the mirror of a static one.
func runningUID(pod *corev1.Pod) types.UID {
	if static, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		return types.UID(static)
	}
	return pod.UID
}

func uidOf(o any) types.UID {
	if pod, ok := o.(*corev1.Pod); ok {
		return pod.UID
	}
	return ""
}

// Observe receives what an informer would report: a pod that was added or updated (after), replaced by one of the same name or
// deleted (before). Only simulations call it; they do not call Run.
func (p *Pods) Observe(before, after *corev1.Pod) {
	if before != nil && (after == nil || before.UID != after.UID) {
		p.forget(before)
	}
	if after != nil {
		p.store(trimmed(after))
	}
}

// Listed means that all pods of a moment have been reported. Run calls it; simulations call it themselves.
func (p *Pods) Listed(at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
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
	if before.deleted {
		before, known = seenPod{}, false
	}
	seen := seenPod{Pod: pod, ended: before.ended, arrived: before.arrived}
	switch {
	case !isTerminal(pod):
		seen.ended = time.Time{}
	case seen.ended.IsZero():
		seen.ended = time.Now()
	}
	p.pods[uid] = seen
	if !known || !sameState(before.Pod, pod) {
		p.changed.Notify()
	}
}

// sameState compares what is left after trim: most updates of a pod say nothing new here.
func sameState(a, b *corev1.Pod) bool {
	a, b = a.DeepCopy(), b.DeepCopy()
	a.ResourceVersion, b.ResourceVersion = "", ""
	return equality.Semantic.DeepEqual(a, b)
}

func isTerminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
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
		current.deleted = true
		if current.ended.IsZero() {
			current.ended = time.Now()
		}
		p.pods[uid] = current
	}
	p.changed.Notify()
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

// Known reports whether the watch has reported a pod with that UID.
func (p *Pods) Known(uid string) bool { return p.Name(uid).Name != "" }

// EndedBefore reports whether a pod is known to have been terminal or deleted already at a moment.
func (p *Pods) EndedBefore(uid string, moment time.Time) bool {
	ended := p.EndedAt(uid)
	return !ended.IsZero() && ended.Before(moment)
}

// EndedAt returns when the watch first reported the pod as terminal or deleted; zero for a living or unknown pod.
func (p *Pods) EndedAt(uid string) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pods[types.UID(uid)].ended
}

// isNews reports whether a moment is so short a time ago that kubelet, or our watch, may still be about to hear of it.
func isNews(moment time.Time) bool {
	age := time.Since(moment)
	return age >= 0 && age < unseen
}

// UnknownPods are the UIDs of pods that have a cgroup and that the API server does not know: whatever they hold, no list of
// pods tells.
func (p *Pods) UnknownPods() ([]string, error) {
	uids, err := p.cgroups.UIDs()
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(uids, func(uid string) bool {
		pod, known := p.pods[types.UID(uid)]
		return known && !pod.deleted
	}), nil
}

// ClaimNames are the claims that the node's pods name.
func (p *Pods) ClaimNames() []types.NamespacedName {
	p.mu.Lock()
	defer p.mu.Unlock()
	names := map[types.NamespacedName]bool{}
	for _, pod := range p.pods {
		if pod.deleted {
			continue
		}
		for claim := range claimsOf(pod.Pod) {
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
	pod, known := p.pods[types.UID(uid)]
	switch {
	case p.synced.IsZero():
		return live
	case pod.deleted, !known && since.Before(p.synced):
		return absent
	case !known:
		return live
	case isTerminal(pod.Pod):
		return terminal
	case pod.DeletionTimestamp != nil:
		return deleting
	default:
		return live
	}
}

// Settling is how long after an Allocate a limit is not judged to have ended. Kubelet's checkpoint may name the pod before
// for a moment even in a file written later: it takes what it writes from memory first, and two such writes may overtake
// each other (k8s.io/kubernetes pkg/kubelet/cm/devicemanager, writeCheckpoint).
const Settling = 2 * time.Second

// PodState implements ledger.Evidence.
func (p *Pods) PodState(h ledger.Hold) ledger.PodState {
	if !p.Synced() {
		return ledger.Running
	}
	if h.Holder.Kind == ledger.KindClaim {
		return p.claimState(h, p.podsOf(h))
	}
	if len(h.Pods) == 0 {
		return ledger.Running
	}
	since := h.Since
	if h.State == ledger.StateRestored {
		since = time.Time{} // it is older than the restart in which it was found
	}
	podState := ledger.Gone
	for _, pod := range h.Pods {
		podState = min(podState, p.podState(pod.UID, since))
	}
	// Unsettled pods of an ended claim are orphans: another holder of the device would be a second owner.
	if podState == ledger.Gone && Unsettled(h) > 0 {
		return ledger.Terminating
	}
	return podState
}

// Started implements ledger.PodStates. If the kernel gives no answer, the pod may have started. The holder of a hold without a
// pod is in kubelet's checkpoint: an agent that was frozen may get the next request before it has read it.
func (p *Pods) Started(h ledger.Hold, all []ledger.Hold) bool {
	uids := make([]string, 0, 1)
	for _, pod := range h.Pods {
		uids = append(uids, pod.UID)
	}
	if len(uids) == 0 {
		checkpoint, err := ReadDeviceCheckpoint(p.kubeletDir)
		if err != nil {
			return true
		}
		for _, d := range checkpoint.Devices {
			if d.ID == h.Holder.ID && d.Resource == h.Resource && !checkpoint.Written.Before(h.Since) {
				uids = append(uids, d.PodUID)
			}
		}
	}
	if len(uids) == 0 {
		// Kubelet may have admitted a pod that our watch knew to be gone, and has struck it off its checkpoint since.
		uids = p.wanting(func(resource string) bool { return resource == h.Resource }, all, func(seenPod) bool { return true })
		if !p.watchedSince(h.Since) {
			// Or one that was gone before our watch began: all that is left of it is a cgroup.
			unknownPods, err := p.UnknownPods()
			if err != nil {
				return true
			}
			uids = append(uids, unknownPods...)
		}
	}
	return slices.ContainsFunc(uids, func(uid string) bool {
		cgroup, err := p.cgroups.Pod(uid)
		return err != nil || cgroup == CgroupBusy
	})
}

// Busy reports whether a pod of a hold has a process, or may have one because the kernel gives no answer or the pod is unknown.
// The reconciler calls it before it takes away what a running container needs.
func (p *Pods) Busy(h ledger.Hold) bool {
	uids := p.podsOf(h)
	for uid := range uids {
		if cgroup, err := p.cgroups.Pod(string(uid)); err != nil || cgroup == CgroupBusy {
			return true
		}
	}
	return len(uids) == 0
}

// watchedSince reports whether every pod that was there at a time, or came later, has been seen.
func (p *Pods) watchedSince(at time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.synced.IsZero() && !at.Before(p.synced)
}

// Unsettled is how long the hold of a limit is still within Settling.
func Unsettled(h ledger.Hold) time.Duration {
	age := time.Since(h.Since)
	if h.State == ledger.StateRestored || age < 0 {
		return 0 // a clock that was set back must not make this long
	}
	return max(0, Settling-age)
}

// podState judges one pod. Kubelet never starts another container of a pod whose phase is terminal,
// so an empty cgroup ends it; one that was removed from the API server in any other way must have lost its cgroup. Where the
// kernel does not tell, containers may still run.
func (p *Pods) podState(uid string, since time.Time) ledger.PodState {
	standing := p.standing(uid, since)
	switch standing {
	case live:
		return ledger.Running
	case deleting:
		return ledger.Terminating
	}
	cgroup, err := p.cgroups.Pod(uid)
	if err == nil && cgroup != CgroupAbsent {
		p.arrive(types.UID(uid))
	}
	switch {
	case err != nil:
		return ledger.Orphaned
	case cgroup == CgroupAbsent && p.mayStart(types.UID(uid), since):
		return ledger.Orphaned
	case cgroup == CgroupAbsent, cgroup == CgroupEmpty && standing == terminal:
		return ledger.Gone
	default:
		return ledger.Orphaned
	}
}

// claimState returns the state of a claim's pods. A claim ends with Unprepare and not with its pods. Unprepare alone proves
// nothing: kubelet before 1.37 calls it for claims that running pods share (docs/design/0002-ledger.md). So a draining claim waits
// for these pods:
//   - a live pod that was prepared or has started a container. CRI-O keeps no pause process, so such a pod may have no process
//     between two starts of a container, and kubelet does not prepare before the second start.
//   - a pod with a process.
//   - a pod with a cgroup that is unknown, or that names the claim and has not started anything, for a minute. Until it receives the
//     Unprepare response, kubelet before 1.37 starts further pods of the claim without a Prepare call
//     (TestStartedWithoutAsking, TestPodThatComesDuringUnprepare). kubelet creates the cgroup first.
func (p *Pods) claimState(h ledger.Hold, uids map[types.UID]bool) ledger.PodState {
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
	podState := ledger.Gone
	remembered, added, err := p.AddedPods(h)
	if remembered || err != nil {
		podState = ledger.Orphaned
	}
	prepared := map[types.UID]bool{}
	for _, pod := range slices.Concat(h.Pods, added) {
		prepared[types.UID(pod.UID)], uids[types.UID(pod.UID)] = true, true
	}
	// Without pods, kubelet never received an answer to Prepare.
	recent := isNews(h.Since) && len(h.Pods) > 0
	if recent {
		unseen, err := p.unseenPods()
		if err != nil {
			podState = ledger.Orphaned
		}
		for _, uid := range unseen {
			uids[uid] = true
		}
	}
	for uid := range uids {
		podState = min(podState, p.claimPodState(uid, prepared[uid], recent))
	}
	return podState
}

// claimPodState returns the state of one pod of a draining claim. prepared means that the hold or kubelet's state names the pod, recent
// that the claim began to drain less than a minute ago.
func (p *Pods) claimPodState(uid types.UID, prepared, recent bool) ledger.PodState {
	p.mu.Lock()
	pod, known := p.pods[uid]
	p.mu.Unlock()
	started := known && len(pod.Status.ContainerStatuses) > 0
	ended := known && isTerminal(pod.Pod)
	if known && !pod.deleted && pod.DeletionTimestamp == nil && !ended && (prepared || started) {
		return ledger.Running
	}
	mayStart := !known || recent && !prepared && !started && !ended
	cgroup, err := p.cgroups.Pod(string(uid))
	if err != nil || cgroup == CgroupBusy || cgroup == CgroupEmpty && mayStart {
		return ledger.Orphaned
	}
	return ledger.Gone
}

// unseenPods returns the pods with a cgroup that the watch has never reported.
func (p *Pods) unseenPods() ([]types.UID, error) {
	all, err := p.cgroups.UIDs()
	p.mu.Lock()
	defer p.mu.Unlock()
	var uids []types.UID
	for _, uid := range all {
		if _, known := p.pods[types.UID(uid)]; !known {
			uids = append(uids, types.UID(uid))
		}
	}
	return uids, err
}

// AddedPods reports whether kubelet's state contains devices of the claim, and returns the pods that it names for the claim and that
// are not in the hold's record. The reconciler records them. kubelet removes the devices when it receives the Unprepare response. If
// the agent died before that, kubelet gives them to the claim's next pod without a Prepare call (1.34 to 1.36,
// k8s.io/kubernetes pkg/kubelet/cm/dra, prepareResources) and unprepares again later. It is safe for concurrent use.
func (p *Pods) AddedPods(h ledger.Hold) (remembered bool, added []ledger.Pod, err error) {
	remembered, uids, err := claimDevices(p.kubeletDir, h.Holder.ID)
	for _, uid := range uids {
		if !slices.ContainsFunc(h.Pods, func(pod ledger.Pod) bool { return pod.UID == uid }) {
			added = append(added, p.Name(uid))
		}
	}
	return remembered, added, err
}

// Users are those pods recorded with the hold of a claim that may still use it.
func (p *Pods) Users(h ledger.Hold) []ledger.Pod {
	return slices.DeleteFunc(slices.Clone(h.Pods), func(pod ledger.Pod) bool {
		return p.podState(pod.UID, h.Since) == ledger.Gone
	})
}

// StateWithoutClaim judges a claim that the API server no longer has under that UID. Pods that name it and live mean its
// successor, unless they are recorded with the hold.
func (p *Pods) StateWithoutClaim(h ledger.Hold) ledger.PodState {
	if !p.Synced() {
		return ledger.Running
	}
	h.State = ledger.StateDraining
	uids := p.podsOf(h)
	p.mu.Lock()
	for uid := range uids {
		pod, known := p.pods[uid]
		if known && !pod.deleted && !slices.ContainsFunc(h.Pods, func(pod ledger.Pod) bool { return pod.UID == string(uid) }) {
			delete(uids, uid)
		}
	}
	p.mu.Unlock()
	return p.claimState(h, uids)
}

// mayStart reports whether kubelet may still start a pod that was force-deleted before it had started anything: a kubelet that
// is frozen or busy between the admission and the pod's cgroup hears of the deletion afterwards. Of one that was deleted before
// our watch began, only the time of the admission tells.
func (p *Pods) mayStart(uid types.UID, admitted time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod, known := p.pods[uid]
	if !known {
		return isNews(admitted)
	}
	return pod.deleted && !pod.arrived && len(pod.Status.ContainerStatuses) == 0 &&
		(pod.Status.Phase == corev1.PodPending || pod.Status.Phase == "") && time.Since(pod.ended) < unseen
}

// arrive notes that kubelet has made a pod's cgroup: once that is gone, kubelet is done with the pod.
func (p *Pods) arrive(uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pod, known := p.pods[uid]; known {
		pod.arrived = true
		p.pods[uid] = pod
	}
}

// podsOf are the pods recorded with the hold, and those of this node that name its claim or did until they were deleted.
func (p *Pods) podsOf(h ledger.Hold) map[types.UID]bool {
	uids := map[types.UID]bool{}
	for _, pod := range h.Pods {
		uids[types.UID(pod.UID)] = true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for uid, pod := range p.pods {
		if pod.Namespace == h.Namespace && claimsOf(pod.Pod)[h.Name] {
			uids[uid] = true
		}
	}
	return uids
}

// claimsOf are the names of the claims that a pod uses: by its spec, made for it from a template, or made for its extended
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

// Sweep forgets pods that were deleted a while ago, have no cgroup any more, and that no hold names. It forgets none while there
// is a limit whose pod is not known yet: forgotten, that pod would pass for one that has not been seen so far, and live for ever.
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
		if pod.deleted && !named[uid] && time.Since(pod.ended) > unseen {
			candidates = append(candidates, uid)
		}
	}
	p.mu.Unlock()
	for _, uid := range candidates {
		if cgroup, err := p.cgroups.Pod(string(uid)); err == nil && cgroup == CgroupAbsent {
			p.mu.Lock()
			delete(p.pods, uid)
			p.mu.Unlock()
		}
	}
}

// trim keeps of a pod what is asked about it here: every agent keeps all pods of its node in memory. Of its containers'
// statuses that is one, without content, if any container was ever started.
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
		Spec: corev1.PodSpec{ResourceClaims: pod.Spec.ResourceClaims, Containers: limitsOf(pod)},
		Status: corev1.PodStatus{
			Phase: pod.Status.Phase, StartTime: pod.Status.StartTime, ResourceClaimStatuses: pod.Status.ResourceClaimStatuses,
			ExtendedResourceClaimStatus: pod.Status.ExtendedResourceClaimStatus,
		},
	}
	if slices.ContainsFunc(slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses), wasStarted) {
		kept.Status.ContainerStatuses = []corev1.ContainerStatus{{ContainerID: "started"}}
	}
	if static, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		kept.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: static}
	}
	return kept
}

func wasStarted(s corev1.ContainerStatus) bool { return s.ContainerID != "" }
