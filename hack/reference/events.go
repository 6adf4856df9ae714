// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// event is one reason of events.
type event struct {
	reason, kind string
	// when says what has happened, do what the reader should do about it.
	when, do string
}

// What an event is about, and who reports it: the titles of the sections.
const (
	onClaims = "On claims, by the agent"
	onNodes  = "On nodes, by the agent"
	onOthers = "By the controller"
)

const (
	normal  = "Normal"
	warning = "Warning"
	// both: a problem is a Warning, and what may be intended is Normal.
	both = "Normal or Warning"
)

const nothing = "Nothing."

// events are all that the agent and the controller report. TestEvents compares them with the sources.
var events = map[string][]event{
	onClaims: {
		{"DeviceHeld", warning, "Another claim or pod has a device that the claim was allocated. The message says whether the pod is evicted or waits.",
			"Nothing if the pod is evicted. Otherwise wait, or delete the pod so that the next one is placed elsewhere."},
		{"ClaimPendingEviction", warning, "The controller is evicting the pod of a claim that was reported with `DeviceHeld` before.",
			"Nothing. If it lasts longer than a minute, check that the controller runs: `kubectl -n tandem-system get deployments`."},
		{"DeviceUnhealthy", warning, "The claim was allocated an unhealthy device. A claim with admin access is prepared without that device.",
			"Nothing if the pod is evicted. Otherwise delete the pod and create it again. The event `GPUUnhealthy` on the node has the fault, `GPUTainted` the rule."},
		{"UnknownDevice", warning, "The claim was allocated a device that the node does not have, or that is in MIG mode now.",
			"Nothing if the pod is evicted. Otherwise delete the pod and create it again."},
		{"DeviceNotClean", warning, "The device is used by a process outside all pods or of a pod that does not hold it, or could not be restored or reset after its last holder.",
			"End the processes that the event names. kubelet tries again."},
		{"DevicesWithheld", warning, "The node gives no device to new holders, because another driver serves its GPUs or because the agent does not know their holders.",
			"One of these events on the node says what to do: `OtherDevicePlugin`, `ConflictingDriver`, `DeviceOfUnknownGPU` or `HoldersUnknown`."},
		{"InvalidParameters", warning, "The parameters of the claim or its class are wrong. kubelet tries again, but cannot succeed.",
			"Correct the claim, its template or its class, and create the claim again."},
		{"DaemonNotReady", warning, "The MPS daemon of the claim did not become ready in time. The message says what it waits for.",
			"Read the events and the log of the pod that the event names. kubelet tries again."},
		{"SharingNotApplied", warning, "The driver refused a time slice or a compute mode, or the claim asks for what one MPS daemon cannot give.",
			"Read the reason in the message. kubelet tries again."},
		{"SharingNotEnded", warning, "The claim has ended, but its MPS daemon does not stop, or the driver does not restore the settings of the device. The device stays withdrawn.",
			"Find the pod of the daemon (`tandem-mps-…` in `kubectl get pods -A`) and check the driver. The agent tries again."},
		{"PartitionNotMade", warning, "The driver did not create the partition of the claim.", "Nothing at first: kubelet tries again within 90 seconds. Check the GPU if the event is repeated."},
		{"PartitionInUse", warning, "The claim has ended, but a process still uses its partition.", "End the process that the event names."},
		{"PartitionNotDestroyed", warning, "The claim has ended, but the driver does not destroy its partition.", "Check the GPU if the event is repeated. The agent tries again."},
		{"UnmanagedPartition", warning, "An administrator has created a partition at the placement of the claim's partition.",
			"Create no partitions on GPUs with `mig: dynamic`, or configure these GPUs as `mig: static`."},
	},
	onNodes: {
		{"NoDriver", warning, "The agent finds no NVIDIA driver. The message lists where it looked.", "Install the driver, or set `driverRoot`."},
		{"NoGPU", warning, "The driver reports no GPU, or none with a UUID.", "Check the kernel's log and `nvidia-smi`. The agent continues by itself when a GPU appears."},
		{"DriverPaused", both, "GPU Operator changes the driver or MIG, and the agent makes no call to the driver meanwhile. No GPU is given to new pods and " +
			"claims. Type Warning means that a call to the driver does not return, so that the driver cannot be unloaded.",
			"Nothing for type Normal. For type Warning, look in the kernel's log for the GPU that hangs, then reset it or reboot the node."},
		{"DriverResumed", normal, "The agent uses the driver again.", nothing},
		{"OtherDevicePlugin", warning, "Another process registers the same extended resource with kubelet. No GPU is given to new pods and claims.",
			"Uninstall the other device plugin: the event names its socket."},
		{"ConflictingDriver", warning, "Another process registers the same DRA driver name with kubelet, or a DRA driver of another name publishes GPUs of this node. No GPU is given to new pods and claims.",
			"Uninstall one of the two DRA drivers: the event names the socket or the ResourceSlice of the other one. If that has another name, end the pods with its claims first. If the event names a claim, end the pods that use it."},
		{"DeviceOfUnknownGPU", warning, "A pod has a device of another device plugin, and the ID of the device does not say which GPU it is.",
			"End the pods that the event names, or make the missing GPU available again."},
		{"HoldersUnknown", warning, "The agent has started and cannot read which GPUs kubelet has given to pods.",
			"Usually nothing: the agent reads them once kubelet has written its state again. Restart kubelet if the event is repeated."},
		{"LedgerLocked", warning, "Another agent process runs on the node.", "End that process. Usually it belongs to an agent's pod whose deletion was forced."},
		{"NoClaimsAPI", warning, "The API server does not serve `resource.k8s.io/v1`.", "Enable it, or set the mode `DevicePluginOnly`."},
		{"NoPartitionsOnDemand", warning, "The API server drops the shared counters of ResourceSlices. A GPU with `mig: dynamic` is offered as a whole, or as the partitions that exist.",
			"Use Kubernetes 1.36 or newer, or enable the feature gate `DRAPartitionableDevices`."},
		{"InvalidResourceSlice", warning, "The API server refuses a ResourceSlice of the agent. The devices of the slice are not offered to claims.",
			"Report a bug with the message."},
		{"RuntimeWithoutCDI", warning, "The container runtime does not support CDI, so that containers start without the GPUs of their claims.",
			"Enable CDI, or upgrade the container runtime."},
		{"RuntimeMayLackCDI", warning, "The container runtime supports CDI only with a setting that the agent cannot read.",
			"Check the setting that the event names. Ignore the event if CDI is enabled."},
		{"RuntimeTrustsImages", warning, "The container runtime has a known vulnerability: it restores containers from checkpoint images with the devices or privileges that the image names. Without CRIU on the node it restores none. Where images can name CDI devices, those of Tandem get secret names (`cdiDeviceNames`).",
			"Upgrade the container runtime to a version that the event names. The agent looks again when the node reports another version. Ignore the event if the node has no CRIU, or if your distribution has fixed its version."},
		{"NoPodCgroups", warning, "kubelet makes no cgroups for pods, so that the agent cannot see when their last process has ended. GPUs of pods that have ended stay taken. The agent may also be unable to read the cgroups; the message says why.",
			"Drain the node, set `cgroupsPerQOS: true` (the default) in kubelet's configuration, and reboot the node. If kubelet has that setting, correct the chart's `cgroupRoot`."},
		{"ConfigRejected", warning, "The node configuration or a label that selects it is wrong. The previous configuration stays in use.",
			"Correct what the event names."},
		{"ConfigPostponed", warning, "The node configuration has changed, and a call of the agent to the driver does not return. The previous configuration stays in use, because the agent cannot start again.",
			"Look for the GPU that hangs (`kubectl gpu node`, `dmesg`). Reset it, or reboot the node."},
		{"RestartPostponed", warning, "The driver was replaced, so the agent has to start again. It cannot, because one of its calls to the driver does not return. No GPU is given to new pods.",
			"Look for the GPU that hangs (`kubectl gpu node`, `dmesg`). Reset it, or reboot the node."},
		{"ConfigWithoutEffect", warning, "The configuration has settings that Tandem accepts and ignores. The message gives the reason for each.", "Remove them, or ignore the event."},
		{"ConfigMatchesNothing", both, "A rule of the node configuration matches no GPU of the node, or has no effect on those that it matches.",
			"Correct the rule. Ignore type Normal if the rule is for other nodes."},
		{"DevicesExcluded", warning, "Some devices of the node belong to no extended resource, so pods with limits cannot get them.", "Nothing if this is intended. Otherwise set another MIG strategy, or replicas."},
		{"NodeLabelsNotWritten", both, "Another field manager owns labels of GPU Feature Discovery, or the API server does not serve NodeFeatures.",
			"For labels, uninstall GPU Feature Discovery or set `gfd.enabled=false`. For NodeFeatures, install Node Feature Discovery or set `nfd.enableNodeFeatureApi=false`."},
		{"GPUUnhealthy", warning, "A GPU or a partition has a fault. The message has the reason and what follows from it.",
			"Do what the message says. [Health](../user/health.md#reasons) has all reasons."},
		{"GPUHealthy", normal, "The fault has ended.", nothing},
		{"GPUReset", normal, "The agent has reset a GPU because of a fault (`ResetWhenIdle`).", nothing},
		{"GPUResetFailed", warning, "The driver refused to reset a GPU with a fault, or the reset did not end the fault.",
			"End the processes that the event names. Replace the GPU if three resets have not ended the fault."},
		{"GPUNotClean", warning, "A process of no pod or of a pod without a claim or limit for it uses a GPU that has no holder, or the GPU could not be restored or reset. The message names the pods; those on claims have UIDs only.",
			"End the processes or pods that the event names, or add the namespace of a monitor to `tandem.handover.monitorNamespaces`. The chart's `podPolicy.exemptNamespaces` count as well. Otherwise drain the node and reboot it."},
		{"GPUMaintenance", normal, "An administrator has taken a GPU out of service (`kubectl gpu drain`).", nothing},
		{"GPUInService", normal, "The GPU is in service again.", nothing},
		{"GPUTainted", normal, "A DeviceTaintRule taints devices of the node. The message names the devices, the rule and its taint.", nothing},
		{"GPUTaintEnded", normal, "A DeviceTaintRule does not taint these devices any more.", nothing},
		{"TaintRuleMisses", normal, "A DeviceTaintRule does not select what it seems to mean: a dynamic GPU has a pool of its own, partitions are devices of their own, or the node has no such device.",
			"Change the rule as the message says."},
		{"DeviceNotFreed", warning, "The holder of a device has ended, but the device is not free yet: it waits for a process or for kubelet.",
			"Find the process that the event names. If the process stays in state D, reset the GPU or reboot the node."},
		{"HeldDeviceChanged", warning, "Another program has put a GPU into MIG mode, or has removed a partition, also one that Tandem created, although a pod or claim has it. The message names the device and its holder. No other holder gets the device.",
			"Delete the pods of the holder, or restore the GPU. Drain GPUs before their MIG configuration is changed: `kubectl gpu drain`."},
		{"DeviceNotInjectable", warning, "The agent cannot write the CDI spec or the hook, or a required IMEX channel does not exist, so the devices are not offered.",
			"Make the path in the event writable, and free space or inodes on its disk. If an IMEX channel is missing, create it."},
		{"DeviceNotRecordable", warning, "The agent cannot write its run directory, so the devices are not offered.",
			"Make the path in the event writable, and free inodes on its file system."},
		{"PodConflict", warning, "A pod with limits was refused because another holder has its GPU. kubelet fails the pod.",
			"Nothing if a controller owns the pod. Otherwise create it again."},
	},
	onOthers: {
		{"EvictedAfterConflict", normal, "On a pod and its claim: the controller evicted the pod, because the claim was in conflict.", nothing},
		{"EvictedByTaint", normal, "On a pod: it had a GPU by a limit, and the controller evicted it because the GPU has a taint with effect NoExecute: a fault, or a DeviceTaintRule.",
			"Nothing. The event `GPUUnhealthy` on the node has the fault, `GPUTainted` the rule."},
		{"NotEvicted", warning, "On a pod: it has such a GPU and is not evicted, because it is static or of a DaemonSet, or because a PodDisruptionBudget or an admission policy does not allow it.",
			"The message has the reason. Delete the pod if it cannot use the GPU any more."},
		{"CertificateRotated", normal, "On the Secret of the webhook: its certificates were renewed.", nothing},
		{"CertificateReplaced", warning, "On the Secret of the webhook: the controller could not use its certificates and replaced them.",
			"Nothing, unless another program writes the Secret."},
	},
}

// eventsPage has a heading for each event, so that pages and tools can link to it.
func eventsPage(string) (string, error) {
	var page strings.Builder
	page.WriteString(header("Events", "hack/reference/events.go",
		"`kubectl describe node` and `kubectl describe resourceclaim` show the events of an object. `kubectl get events -A --field-selector source=tandem` lists the "+
			"events of the agents, and `source=tandem-controller` those of the controller. Messages on claims name no objects of other namespaces. "+
			"[Troubleshooting](../user/troubleshooting.md) starts from symptoms, and says more about many of these events."))
	for _, section := range []string{onClaims, onNodes, onOthers} {
		fmt.Fprintf(&page, "\n## %s\n", section)
		for _, e := range slices.SortedFunc(slices.Values(events[section]), func(a, b event) int { return cmp.Compare(a.reason, b.reason) }) {
			fmt.Fprintf(&page, "\n### %s\n\n%s\n\n%s\n", e.reason, wrap(e.kind+". "+e.when), wrap("**What to do:** "+e.do))
		}
	}
	return page.String(), nil
}
