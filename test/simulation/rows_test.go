// SPDX-License-Identifier: Apache-2.0

package simulation

// row is a line of the table of races: a thing that has to happen often before the run proves anything.
type row string

const (
	claimLosesToPod          row = "claim-loses-to-limit"
	podLosesToClaim          row = "limit-loses-to-claim"
	podFindsOrphan           row = "limit-finds-force-deleted-holder"
	reuseInPod               row = "reuse-by-init-container"
	containerRestarts        row = "container-restarts"
	unprepareInUse           row = "unprepare-of-a-claim-in-use"
	attachDuringUnprepare    row = "attach-during-unprepare"
	prepareAgain             row = "prepare-while-draining"
	prepareWaits             row = "prepare-waits-for-a-holder"
	prepareCancelled         row = "prepare-cancelled-by-unprepare"
	prepareRetried           row = "prepare-retried-by-kubelet"
	rebootReclaims           row = "reboot-claim-gets-its-gpu-back"
	rebootPodsFail           row = "reboot-limits-pods-fail"
	restoredBlocksPod        row = "expected-claim-kept-from-limits"
	agentDiesBeforeAnswer    row = "agent-dies-between-record-and-answer"
	agentDiesOnDisk          row = "agent-dies-in-the-middle-of-a-record"
	agentRestarts            row = "agent-restarts-with-holds"
	kubeletRestarts          row = "kubelet-restarts-with-pods"
	kubeletDiesInCall        row = "kubelet-dies-during-a-call"
	allocateUnknownPod       row = "admission-fails-after-allocate"
	oldStreamEndsNew         row = "old-stream-ends-new-client"
	listForgetsInFlight      row = "list-forgets-ids-in-flight"
	staleAllocatable         row = "limits-pod-bound-by-stale-allocatable"
	staleSlice               row = "claim-allocated-by-stale-slice"
	forceDeletedRuns         row = "force-deleted-pod-still-runs"
	forceDeletedUnseen       row = "limit-finds-holder-that-still-runs"
	stateDeleted             row = "kubelets-claim-state-deleted"
	checkpointDeleted        row = "kubelets-device-checkpoint-deleted"
	checkpointIsOld          row = "checkpoint-names-the-pod-before"
	apiAway                  row = "api-server-away"
	prepareWithoutAPI        row = "prepare-while-api-server-is-away"
	sharedClaimOutlives      row = "shared-claim-outlives-a-pod"
	emptyCgroupEnds          row = "finished-pod-with-empty-cgroup"
	unprepareByReconcileLoop row = "unprepare-by-kubelets-reconcile-loop"
	allocatableLowered       row = "allocatable-lowered-before-kubelet"
	pendingEvicted           row = "pending-eviction-pod-evicted"
	evictionOvertaken        row = "eviction-overtaken-by-a-change-of-the-pod"
	retried                  row = "kubelet-nudged-to-prepare"
	latecomerRetried         row = "pod-of-a-prepared-claim-nudged"
	pendingRefused           row = "pending-eviction-refused"
	keptByNewAllocation      row = "device-kept-by-a-claim-allocated-anew"
	keptByReadmission        row = "device-kept-by-a-pod-admitted-anew"
	claimWaitsForPods        row = "claim-lets-bound-limits-go-first"
	shareBesideShare         row = "claims-have-parts-of-one-gpu"
	shareBesideReplica       row = "claim-and-limit-have-parts-of-one-gpu"
	replicaBesideReplica     row = "limits-have-parts-of-one-gpu"
)

// allRows are those that a full run must meet.
var allRows = []row{
	claimLosesToPod, podLosesToClaim, podFindsOrphan, reuseInPod, containerRestarts, unprepareInUse, attachDuringUnprepare,
	prepareAgain, prepareWaits, prepareCancelled, prepareRetried, rebootReclaims, rebootPodsFail, restoredBlocksPod,
	agentDiesBeforeAnswer, agentDiesOnDisk, agentRestarts, kubeletRestarts, kubeletDiesInCall, allocateUnknownPod, oldStreamEndsNew,
	listForgetsInFlight, staleAllocatable, staleSlice, forceDeletedRuns, forceDeletedUnseen, stateDeleted, checkpointDeleted,
	checkpointIsOld, apiAway, prepareWithoutAPI, sharedClaimOutlives, emptyCgroupEnds, unprepareByReconcileLoop,
	allocatableLowered, pendingEvicted, evictionOvertaken, retried, latecomerRetried, pendingRefused, claimWaitsForPods,
	shareBesideShare, shareBesideReplica, replicaBesideReplica,
}
