// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/internal/owner"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Settling is how long after an Allocate no hold of a pod ends. kubelet's checkpoint may name the previous pod even in a file that was
// written later: kubelet collects the content before it writes, and one write may overtake another (k8s.io/kubernetes
// pkg/kubelet/cm/devicemanager, writeCheckpoint).
const Settling = 2 * time.Second

// Unsettled returns how long the hold of a pod is still within Settling.
func Unsettled(h ledger.Hold) time.Duration {
	if h.State == ledger.StateRestored {
		return 0
	}
	return max(0, Settling-time.Since(h.Began))
}

// clockTick is longer than the clock of file stamps is ever behind (10 ms, CONFIG_HZ=100).
const clockTick = 20 * time.Millisecond

// Predates reports whether kubelet wrote its checkpoint before a hold was taken, by the clock that stamps files. If that clock was set back
// since, the hold's age decides: otherwise no later checkpoint would count until the clock has caught up. A checkpoint of the same tick
// counts as later: kubelet writes one at once after each Allocate.
func (p *Pods) Predates(checkpoint DeviceCheckpoint, h ledger.Hold) bool {
	since := h.Since
	if taken := p.Stamp().Add(-time.Since(h.Began)); taken.Add(clockTick).Before(since) {
		since = taken
	}
	return checkpoint.Written.Before(since)
}

// PodState implements ledger.PodStates.
func (p *Pods) PodState(h ledger.Hold) ledger.PodState {
	if !p.Synced() {
		return ledger.Running
	}
	if h.Holder.Kind == ledger.KindClaim {
		return p.claimState(h, p.podsOf(h.Namespace, h.Name, h.Pods))
	}
	if len(h.Pods) == 0 {
		return ledger.Running
	}
	since := h.Began
	if h.State == ledger.StateRestored {
		since = time.Time{} // it is older than the restart
	}
	podState := ledger.Gone
	for _, pod := range h.Pods {
		podState = min(podState, p.podState(types.UID(pod.UID), since))
	}
	if podState == ledger.Gone && Unsettled(h) > 0 {
		return ledger.Terminating
	}
	return podState
}

// podState returns the state of one pod. kubelet starts no container of a pod with a terminal phase, so an empty cgroup ends it, also once
// it is deleted. Any other deleted pod must have lost its cgroup. A pod that the watch has not reported counts as deleted only if its hold is
// older than the first list. For a newer hold, kubelet may have received the pod before our watch. If the kernel gives no answer, containers
// may still run.
func (p *Pods) podState(uid types.UID, since time.Time) ledger.PodState {
	p.mu.Lock()
	pod, known := p.pods[uid]
	synced := p.synced
	p.mu.Unlock()
	deleted := pod.deleted || !known && since.Before(synced)
	terminal := known && podstatus.Ended(pod.Pod)
	switch {
	case synced.IsZero(), !known && !deleted:
		return ledger.Running
	case !deleted && !terminal && pod.DeletionTimestamp != nil:
		return ledger.Terminating
	case !deleted && !terminal:
		return ledger.Running
	}
	cgroup, err := p.cgroups.Pod(string(uid))
	switch {
	case err != nil, cgroup == CgroupAbsent && p.mayStart(uid, since):
		return ledger.Orphaned
	case cgroup == CgroupAbsent, cgroup == CgroupEmpty && (!deleted || terminal):
		return ledger.Gone
	}
	p.recordCgroup(uid)
	return ledger.Orphaned
}

// mayStart reports whether kubelet may still start a deleted pod that had started nothing: a frozen kubelet continues where it
// stopped, and receives the deletion later. For a pod that was deleted before the watch began only the time of its admission is known
// (TestForceDeletedBeforeItStarted, TestForceDeletedBeforeTheWatch).
func (p *Pods) mayStart(uid types.UID, admitted time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod, known := p.pods[uid]
	if !known {
		return isRecent(admitted)
	}
	return pod.deleted && !pod.hadCgroup && len(pod.Status.ContainerStatuses) == 0 &&
		(pod.Status.Phase == corev1.PodPending || pod.Status.Phase == "") && time.Since(pod.ended) < reportDelay
}

// recordCgroup records that kubelet has created the cgroup of a pod: once that is gone, kubelet starts nothing more of the pod.
func (p *Pods) recordCgroup(uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pod, known := p.pods[uid]; known {
		pod.hadCgroup = true
		p.pods[uid] = pod
	}
}

// isRecent reports whether the moment is less than a minute ago, so that kubelet or our watch may not have received a change made then.
func isRecent(moment time.Time) bool {
	age := time.Since(moment)
	return age >= 0 && age < reportDelay
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
			if p.podState(uid, h.Began) == ledger.Running {
				return ledger.Running
			}
		}
		if len(uids) == 0 {
			return ledger.Running
		}
		return ledger.Terminating
	}
	return p.evidenceOf(h, uids).state()
}

// evidence is what may keep the hold of a claim that drains.
type evidence struct {
	pods map[types.UID]ledger.PodState
	// prepared is set if kubelet's state has the claim's devices, or could not be read; unknown if not all pods are known.
	prepared, unknown bool
}

func (e evidence) state() ledger.PodState {
	podState := ledger.Gone
	if e.prepared || e.unknown {
		podState = ledger.Orphaned
	}
	for _, state := range e.pods {
		podState = min(podState, state)
	}
	return podState
}

// evidenceOf looks at the pods with these UIDs, at those that the hold or kubelet's state names, and at those that kubelet may be starting.
func (p *Pods) evidenceOf(h ledger.Hold, uids map[types.UID]bool) evidence {
	remembered, added, err := p.AddedPods(h)
	e := p.evidenceOfPods(h, uids, added)
	e.prepared = remembered || err != nil
	return e
}

// evidenceOfPods is evidenceOf with the pods that kubelet's state names.
func (p *Pods) evidenceOfPods(h ledger.Hold, uids map[types.UID]bool, added []ledger.Pod) evidence {
	e := evidence{pods: map[types.UID]ledger.PodState{}}
	prepared := map[types.UID]bool{}
	for _, pod := range slices.Concat(h.Pods, added) {
		prepared[types.UID(pod.UID)], uids[types.UID(pod.UID)] = true, true
	}
	// Without pods, kubelet never received an answer to Prepare.
	recent := isRecent(h.Began) && len(h.Pods) > 0
	if recent {
		unseen, err := p.unreported(func(seenPod) bool { return true })
		e.unknown = err != nil
		for _, uid := range unseen {
			uids[types.UID(uid)] = true
		}
	}
	for uid := range uids {
		e.pods[uid] = p.claimPodState(h, uid, prepared[uid], recent)
	}
	return e
}

// claimPodState returns the state of one pod of a draining claim. prepared means that the hold or kubelet's state names the pod, recent
// that the claim began to drain less than a minute ago. A cgroup without a process proves something for that minute only: kubelet
// may leave it for long, when it was killed before it had removed the pod's volumes.
func (p *Pods) claimPodState(h ledger.Hold, uid types.UID, prepared, recent bool) ledger.PodState {
	p.mu.Lock()
	pod, known := p.pods[uid]
	// The pod was deleted before the first list. It is like a deleted pod that is known, unless the claim was draining already.
	leftover := p.leftover[uid] && (prepared || h.Began.After(p.synced))
	p.mu.Unlock()
	started := known && len(pod.Status.ContainerStatuses) > 0
	ended := known && podstatus.Ended(pod.Pod)
	alive := known && !pod.deleted && pod.DeletionTimestamp == nil && !ended
	if alive && (prepared || started) {
		return ledger.Running
	}
	mayStart := !known || !prepared && !started && !ended
	cgroup, err := p.cgroups.Pod(string(uid))
	switch {
	case err != nil, cgroup == CgroupBusy:
		return ledger.Orphaned
	case cgroup == CgroupEmpty && mayStart && recent && !leftover:
		return ledger.Orphaned
	default:
		return ledger.Gone
	}
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

// Keepers returns the pods that keep the hold of a holder that has ended, and reports whether kubelet's state still has the claim's
// devices, or could not be read. The reconciler calls it to describe the hold. It is safe for concurrent use.
func (p *Pods) Keepers(h ledger.Hold) (pods []ledger.Pod, prepared bool) {
	if h.Holder.Kind != ledger.KindClaim {
		return p.Users(h), false
	}
	h.State = ledger.StateDraining
	e := p.evidenceOf(h, p.podsOf(h.Namespace, h.Name, h.Pods))
	for uid, state := range e.pods {
		if state != ledger.Gone {
			pods = append(pods, p.Name(string(uid)))
		}
	}
	slices.SortFunc(pods, func(a, b ledger.Pod) int { return strings.Compare(a.UID, b.UID) })
	return pods, e.prepared
}

// Users returns the pods recorded with the hold of a claim that may still use it.
func (p *Pods) Users(h ledger.Hold) []ledger.Pod {
	return slices.DeleteFunc(slices.Clone(h.Pods), func(pod ledger.Pod) bool {
		return p.podState(types.UID(pod.UID), h.Began) == ledger.Gone
	})
}

// Uses reports whether a pod of a claim still uses its devices, although no driver will unprepare them. kubelet cannot end such a pod: it
// keeps the pod's cgroup, and the API server keeps the pod. So a pod that is to end, or that is deleted or terminal, uses them while it
// has a process. The DRA front-end asks about claims of another driver. It is safe for concurrent use.
func (p *Pods) Uses(h ledger.Hold) bool {
	return slices.ContainsFunc(h.Pods, func(pod ledger.Pod) bool {
		_, alive, _ := p.lifeOf(pod.UID)
		return alive || p.mayHaveProcess(pod.UID)
	})
}

// Deserted reports whether the API server has no pod left that uses a claim's hold: each pod that is recorded with it or names the claim
// is deleted or terminal. Kubernetes then deallocates the claim, so that the scheduler believes the device free, while kubelet still
// ends containers (k8s.io/kubernetes pkg/controller/resourceclaim, syncClaim). The reconciler calls it. It reads memory only, so it
// is true at once, also while the controller is away. It is safe for concurrent use.
func (p *Pods) Deserted(h ledger.Hold) bool {
	uids := p.podsOf(h.Namespace, h.Name, h.Pods)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.synced.IsZero() {
		return false
	}
	for uid := range uids {
		pod, known := p.pods[uid]
		older := h.State == ledger.StateRestored || h.Began.Before(p.synced)
		if known && !pod.deleted && !podstatus.Ended(pod.Pod) || !known && !older {
			return false
		}
	}
	// Without a pod it is not known who uses the hold.
	return len(uids) > 0
}

// StateWithoutClaim returns the state of the pods of a claim that the API server no longer has under that UID. Existing pods that name
// the claim use its successor, unless they are recorded with the hold.
func (p *Pods) StateWithoutClaim(h ledger.Hold) ledger.PodState {
	if !p.Synced() {
		return ledger.Running
	}
	h.State = ledger.StateDraining
	return p.claimState(h, p.withoutLater(h))
}

// StateBefore returns the state of the pods of a claim's hold whose claim was deallocated since, allocated other devices and prepared with
// these. Kubernetes deallocates a claim that no existing pod uses. So existing pods that name it use the other devices, unless they are
// recorded with the hold, and so do the pods that kubelet's state names.
func (p *Pods) StateBefore(h ledger.Hold) ledger.PodState {
	if !p.Synced() {
		return ledger.Running
	}
	h.State = ledger.StateDraining
	return p.evidenceOfPods(h, p.withoutLater(h), nil).state()
}

// withoutLater returns the pods that the hold of a claim names or that name the claim, without existing ones that the hold does not name.
func (p *Pods) withoutLater(h ledger.Hold) map[types.UID]bool {
	uids := p.podsOf(h.Namespace, h.Name, h.Pods)
	p.mu.Lock()
	defer p.mu.Unlock()
	for uid := range uids {
		pod, known := p.pods[uid]
		if known && !pod.deleted && !slices.ContainsFunc(h.Pods, func(pod ledger.Pod) bool { return pod.UID == string(uid) }) {
			delete(uids, uid)
		}
	}
	return uids
}

// Started implements ledger.PodStates. If the kernel gives no answer, the pod may have started. For a hold without a pod it reads
// kubelet's checkpoint: an agent that was frozen may receive the next request before it has read the checkpoint
// (TestStartedBeforeAnybodyLooked).
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
			if d.ID == h.Holder.ID && d.Resource == h.Resource && !p.Predates(checkpoint, h) {
				uids = append(uids, d.PodUID)
			}
		}
	}
	if len(uids) == 0 {
		// kubelet may have admitted a deleted pod and have removed it from its checkpoint since (TestStartedAndStruckOff).
		uids = p.wanting(func(resource string) bool { return resource == h.Resource }, all, func(seenPod) bool { return true })
		if !p.watchedSince(h.Began) {
			// A pod that was deleted before our watch began has left a cgroup only (TestStartedBeforeTheWatch).
			unknownPods, err := p.UnknownPods()
			if err != nil {
				return true
			}
			uids = append(uids, unknownPods...)
		}
	}
	return slices.ContainsFunc(uids, p.mayHaveProcess)
}

// watchedSince reports whether the watch has reported every pod that existed at a moment or was created later.
func (p *Pods) watchedSince(at time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.synced.IsZero() && !at.Before(p.synced)
}

// Busy reports whether a pod of a hold has a process, or may have one because the kernel gives no answer or the pod is unknown.
// The reconciler calls it before it takes away what a running container needs.
func (p *Pods) Busy(h ledger.Hold) bool {
	uids := p.podsOf(h.Namespace, h.Name, h.Pods)
	for uid := range uids {
		if p.mayHaveProcess(string(uid)) {
			return true
		}
	}
	return len(uids) == 0
}

// mayHaveProcess reports whether a pod has a process, or the kernel gives no answer.
func (p *Pods) mayHaveProcess(uid string) bool {
	cgroup, err := p.cgroups.Pod(uid)
	return err != nil || cgroup == CgroupBusy
}

// watchDelay is how long Movable waits for the watch to report a pod that kubelet already has.
const watchDelay = time.Second

// Movable reports whether every pod of a claim has an owner that is known to replace it, and none has ever started a container: such
// pods may be evicted. Pods that are being deleted do not count; a claim without another pod is not movable. It waits a moment
// for pods that kubelet received before the watch, at most until ctx is done.
func (p *Pods) Movable(ctx context.Context, claim ledger.ClaimRequest) bool {
	ctx, cancel := context.WithTimeout(ctx, watchDelay)
	defer cancel()
	movable, unknown := false, false
	known := p.await(ctx, func() bool {
		movable, unknown = p.movable(claim)
		return !unknown
	})
	return known && movable
}

func (p *Pods) movable(claim ledger.ClaimRequest) (movable, unknown bool) {
	uids := p.podsOf(claim.Namespace, claim.Name, claim.Pods)
	p.mu.Lock()
	defer p.mu.Unlock()
	for uid := range uids {
		pod, known := p.pods[uid]
		switch {
		case !known:
			unknown = true
		case pod.deleted, podstatus.Ended(pod.Pod), pod.DeletionTimestamp != nil:
		case owner.Replaces(pod.Pod) && len(pod.Status.ContainerStatuses) == 0:
			movable = true
		default:
			return false, false
		}
	}
	return movable, unknown
}

// reportDelay is how long the watch may take to report a pod. Until then a conflict does not end while one of its pods is unknown. Deleted
// pods are kept longer.
const reportDelay = time.Minute

// Ended reports whether no pod is left that could use the claim of a conflict.
func (p *Pods) Ended(conflict ledger.Conflict) bool {
	uids := p.podsOf(conflict.Namespace, conflict.Name, conflict.Pods)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.synced.IsZero() {
		return false
	}
	for uid := range uids {
		pod, known := p.pods[uid]
		if known && !pod.deleted && !podstatus.Ended(pod.Pod) || !known && isRecent(conflict.Since) {
			return false
		}
	}
	return true
}

// controllerOf returns what owner.Replaces reads of the pod's owner.
func controllerOf(pod *corev1.Pod) []metav1.OwnerReference {
	i := slices.IndexFunc(pod.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Controller != nil && *o.Controller })
	if i < 0 {
		return nil
	}
	of, controller := pod.OwnerReferences[i], true
	return []metav1.OwnerReference{{APIVersion: of.APIVersion, Kind: of.Kind, Controller: &controller}}
}
