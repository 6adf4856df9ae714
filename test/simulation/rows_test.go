// SPDX-License-Identifier: Apache-2.0

package simulation

// row is a line of the table of races (docs/design/0007-coexistence.md). A run proves something only if it meets each row often.
type row string

const (
	claimLosesToPod          row = "claim-conflicts-with-pod"
	podLosesToClaim          row = "pod-refused-for-claim"
	podFindsOrphan           row = "pod-refused-for-force-deleted-holder"
	reuseInPod               row = "reuse-by-init-container"
	containerRestarts        row = "container-restarts"
	unprepareInUse           row = "unprepare-of-a-claim-in-use"
	attachDuringUnprepare    row = "attach-during-unprepare"
	prepareAgain             row = "prepare-while-draining"
	prepareWaits             row = "prepare-waits-for-a-holder"
	prepareCancelled         row = "prepare-cancelled-by-unprepare"
	prepareRetried           row = "prepare-retried-by-kubelet"
	rebootReclaims           row = "reboot-claim-gets-its-gpu-back"
	rebootPodsFail           row = "reboot-pods-fail-admission"
	restoredBlocksPod        row = "restored-claim-kept-from-pods"
	agentDiesBeforeAnswer    row = "agent-dies-between-record-and-answer"
	agentDiesOnDisk          row = "agent-dies-in-the-middle-of-a-record"
	agentRestarts            row = "agent-restarts-with-holds"
	kubeletRestarts          row = "kubelet-restarts-with-pods"
	kubeletDiesInCall        row = "kubelet-dies-during-a-call"
	allocateUnknownPod       row = "admission-fails-after-allocate"
	oldStreamEndsNew         row = "old-stream-ends-new-client"
	listForgetsInFlight      row = "list-forgets-ids-in-flight"
	staleAllocatable         row = "pod-bound-by-stale-allocatable"
	staleSlice               row = "claim-allocated-by-stale-slice"
	forceDeletedRuns         row = "force-deleted-pod-still-runs"
	forceDeletedUnseen       row = "pod-refused-for-running-holder"
	stateDeleted             row = "kubelets-claim-state-deleted"
	checkpointDeleted        row = "kubelets-device-checkpoint-deleted"
	checkpointIsOld          row = "checkpoint-names-previous-pod"
	checkpointLate           row = "checkpoint-waits-for-an-earlier-write"
	checkpointStale          row = "checkpoint-of-before-lands-after-an-allocate"
	clockSetBack             row = "clock-set-back"
	apiAway                  row = "api-server-away"
	gpuFault                 row = "gpu-has-a-fault"
	prepareWithoutAPI        row = "prepare-while-api-server-is-away"
	sharedClaimOutlives      row = "shared-claim-outlives-a-pod"
	emptyCgroupEnds          row = "finished-pod-with-empty-cgroup"
	unprepareByReconcileLoop row = "unprepare-by-kubelets-reconcile-loop"
	allocatableLowered       row = "allocatable-lowered-before-kubelet"
	pendingEvicted           row = "pending-eviction-pod-evicted"
	evictionOvertaken        row = "eviction-overtaken-by-a-change-of-the-pod"
	retried                  row = "retry-makes-kubelet-prepare"
	latecomerRetried         row = "retry-for-pod-of-prepared-claim"
	pendingRefused           row = "pending-eviction-refused"
	keptByNewAllocation      row = "reallocated-claim-keeps-device"
	keptByReadmission        row = "readmitted-pod-keeps-device"
	countedTwice             row = "draining-share-counts-twice-without-controller"
	claimWaitsForPods        row = "claim-waits-for-bound-pods"
	severalPrepared          row = "several-claims-prepared"
	severalUnprepared        row = "several-claims-unprepared"
	refusedTogether          row = "claim-refused-for-another-of-its-pod"
	someClaimsPrepared       row = "some-claims-of-a-pod-prepared-before"
	attachedInPart           row = "kubelet-attaches-a-pod-to-some-claims"
	reservedInPart           row = "scheduler-reserves-some-claims-of-a-pod"
	claimBesideLimit         row = "claim-beside-a-limit"
	clientStarts             row = "mps-client-starts"
	daemonAwaited            row = "claim-waits-for-its-daemon"
	daemonNotReady           row = "claim-refused-without-its-daemon"
	podWithoutDaemon         row = "pod-refused-without-its-daemon"
	daemonStopped            row = "daemon-ended-for-a-holder-of-the-whole-gpu"
	daemonLosesClients       row = "daemon-dies-with-clients"
	daemonPodDeleted         row = "pod-of-a-daemon-deleted"
	daemonOutlivesAgent      row = "agent-restarts-with-mps-clients"
	daemonsControllerDies    row = "controller-dies-while-a-daemon-is-requested"
	policyChangesInUse       row = "policy-changes-with-mps-clients"
	keptByOldPolicy          row = "gpu-waits-for-a-change-of-policy"
	clientDeviceMissing      row = "client-device-missing"
	shareBesideShare         row = "claims-share-one-gpu"
	shareBesideReplica       row = "claim-and-pod-share-one-gpu"
	replicaBesideReplica     row = "pods-share-one-gpu"
	equalBesideEqual         row = "claims-with-equal-shares-of-one-gpu"
	equalBesideReplica       row = "claim-and-pod-with-equal-shares"
	noLimitBesideShare       row = "claim-without-a-limit-beside-another"
	partitionCreated         row = "partition-created"
	partitionDestroyed       row = "partition-destroyed"
	partitionCallFails       row = "driver-fails-to-change-a-partition"
	partitionLeftIncomplete  row = "agent-dies-with-an-incomplete-partition"
	partitionForeign         row = "administrator-makes-a-partition"
	partitionBesidePartition row = "claims-with-partitions-of-one-gpu"
	wholeAfterPartition      row = "whole-gpu-after-a-partition-of-it"
	foreignAllocates         row = "foreign-plugin-allocates"
	foreignPrepares          row = "foreign-driver-prepares"
	foreignAwaited           row = "agent-waits-for-a-foreign-driver"
	foreignAdopted           row = "holder-adopted-from-a-foreign-driver"
	foreignUnknown           row = "pod-with-a-device-of-unknown-gpu"
)

// allRows must all be met by a full run.
var allRows = []row{
	claimLosesToPod, podLosesToClaim, podFindsOrphan, reuseInPod, containerRestarts, unprepareInUse, attachDuringUnprepare,
	prepareAgain, prepareWaits, prepareCancelled, prepareRetried, rebootReclaims, rebootPodsFail, restoredBlocksPod,
	agentDiesBeforeAnswer, agentDiesOnDisk, agentRestarts, kubeletRestarts, kubeletDiesInCall, allocateUnknownPod, oldStreamEndsNew,
	listForgetsInFlight, staleAllocatable, staleSlice, forceDeletedRuns, forceDeletedUnseen, stateDeleted, checkpointDeleted,
	checkpointIsOld, checkpointLate, checkpointStale, clockSetBack, apiAway, gpuFault, prepareWithoutAPI, sharedClaimOutlives, emptyCgroupEnds, unprepareByReconcileLoop,
	allocatableLowered, pendingEvicted, evictionOvertaken, retried, latecomerRetried, pendingRefused, claimWaitsForPods,
	severalPrepared, severalUnprepared, refusedTogether, someClaimsPrepared, attachedInPart, reservedInPart, claimBesideLimit,
	clientStarts, daemonAwaited, daemonNotReady, podWithoutDaemon, daemonStopped, daemonLosesClients, daemonPodDeleted,
	daemonOutlivesAgent, daemonsControllerDies, policyChangesInUse,
	shareBesideShare, shareBesideReplica, replicaBesideReplica, equalBesideEqual, equalBesideReplica, noLimitBesideShare,
	partitionCreated, partitionDestroyed, partitionCallFails, partitionLeftIncomplete, partitionForeign, partitionBesidePartition, wholeAfterPartition,
	foreignAllocates, foreignPrepares, foreignAwaited, foreignAdopted, foreignUnknown,
}
