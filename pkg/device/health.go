// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Health is the last known health of a device. The zero value is healthy.
type Health struct {
	// Reason is empty for a healthy device, otherwise one of the Reason constants.
	Reason string
	// Message describes the problem in a sentence.
	Message string
	// XID is the worst XID of the device that has not ended; zero for none. The reason may be a worse one than ReasonXID.
	XID int
	// Evict is set if the node configuration ends the pods that have the device.
	Evict bool
	// Needs is set if another fault of the device than the reason needs a worse repair.
	Needs Repair
}

// Reasons for which a device is unhealthy.
const (
	ReasonLost        = "Lost"         // NVML reports the GPU lost or fallen off the bus
	ReasonMissing     = "Missing"      // seen before, no longer enumerated
	ReasonNoNode      = "NoDeviceNode" // its /dev/nvidia<minor> does not exist
	ReasonNotClean    = "NotClean"     // what an earlier holder has left cannot be cleaned (pkg/handover)
	ReasonUnreachable = "Unreachable"  // NVML answers with an error for a query that it must support

	ReasonXID              = "XID"              // the driver reported an XID that is no fault of an application
	ReasonResetRequired    = "ResetRequired"    // the driver says that the GPU must be reset
	ReasonRebootRequired   = "RebootRequired"   // the driver says that the node must be rebooted
	ReasonDrainP2P         = "DrainP2P"         // the driver says that peers must stop using the GPU's memory
	ReasonRowRemapFailure  = "RowRemapFailure"  // a row of its memory could not be replaced
	ReasonRowRemapPending  = "RowRemapPending"  // a row of its memory is replaced at the next reset
	ReasonRetiredPages     = "RetiredPages"     // a page of its memory is retired at the next reset
	ReasonUncorrectableECC = "UncorrectableECC" // uncorrectable ECC errors since the driver was loaded
	ReasonFabric           = "Fabric"           // its NVLink fabric is not configured: CUDA fails with error 802

	ReasonPaused        = "Paused"        // the agent has let go of the driver, because the node's labels ask for it
	ReasonNotRead       = "NotRead"       // held, and the agent has read no GPU since it started: the driver is away
	ReasonNotInjectable = "NotInjectable" // no container can be given the device: its CDI entry, the hook or a required IMEX channel is missing
	ReasonNotRecordable = "NotRecordable" // the ledger could not record a new holder
)

// Healthy reports whether the device can run work.
func (h Health) Healthy() bool { return h.Reason == "" }

// forHolder drops the reasons for which only a new holder cannot get the device: it works.
func (h Health) forHolder() Health {
	switch h.Reason {
	case ReasonNotClean, ReasonPaused, ReasonNotInjectable, ReasonNotRecordable:
		return Health{}
	default:
		return h
	}
}

// String returns the reason and the message. The message of an XID begins with the reason, which is not repeated.
func (h Health) String() string {
	if h.Healthy() || h.Message == "" {
		return h.Reason
	}
	return h.Reason + ": " + strings.TrimPrefix(h.Message, h.Reason+" ")
}

// ParseHealth undoes String, but for a prefix of the message.
func ParseHealth(text string) Health {
	var h Health
	h.Reason, h.Message, _ = strings.Cut(text, ": ")
	if h.Reason == ReasonXID {
		number, _, _ := strings.Cut(strings.TrimPrefix(h.Message, ReasonXID+" "), " ")
		h.XID, _ = strconv.Atoi(strings.TrimSuffix(number, ":"))
	}
	return h
}

// MayEndByReset reports whether a reset may end a fault.
func (h Health) MayEndByReset() bool { return h.Reason != ReasonRowRemapFailure }

// Remedy says what an administrator can do about a fault, without a full stop. after follows the advice to reset a GPU with an XID.
func (h Health) Remedy(after string) string {
	if h.Repair() == RepairReplace {
		return "Replace the GPU"
	}
	switch h.Class() {
	case FaultReset:
		return "Drain the GPU and reset it (nvidia-smi --gpu-reset), or reboot the node" + after
	case FaultReboot:
		return "Drain the node and reboot it"
	case FaultMemory:
		return "Drain the GPU and reset it. If the fault comes again, replace the GPU"
	case FaultFabric:
		return "Start nvidia-fabricmanager (or nvidia-imex) on the node and read its log"
	case FaultContained, FaultApplication:
		return "If it stays unhealthy, drain the GPU and reset it (nvidia-smi --gpu-reset)" + after
	default:
		return "Read the kernel's log of the node (dmesg). If the GPU does not come back, reboot the node"
	}
}

// Repair is what ends a fault, for tools that repair nodes. It is part of the API (GPUNode.status.devices[].repair and the node condition
// GPURepairNeeded).
type Repair string

// The repairs, from the least to the worst.
const (
	// RepairNone means that the device works or that nothing is wrong with the hardware.
	RepairNone    Repair = ""
	RepairReset   Repair = "Reset"
	RepairReboot  Repair = "Reboot"
	RepairReplace Repair = "Replace"
)

// repairs are all repairs, from the least to the worst.
var repairs = []Repair{RepairNone, RepairReset, RepairReboot, RepairReplace}

// WorstRepair returns the worse of two repairs. One that is not known, as of a newer version, is the least. Pure.
func WorstRepair(a, b Repair) Repair {
	if slices.Index(repairs, a) > slices.Index(repairs, b) {
		return a
	}
	return b
}

// Repair returns the worst repair that the faults of a device need. It is RepairNone for what neither a reset nor another GPU ends: a service
// of the node's fabric, or peers that use the GPU's memory.
func (h Health) Repair() Repair { return WorstRepair(h.Needs, h.ownRepair()) }

// ownRepair is that of the reason.
func (h Health) ownRepair() Repair {
	switch class := h.Class(); {
	case h.Reason == ReasonDrainP2P:
		return RepairNone
	case !h.MayEndByReset():
		return RepairReplace
	case class == FaultReset, class == FaultMemory, class == FaultContained:
		return RepairReset
	case class == FaultReboot, class == FaultLost:
		return RepairReboot
	default:
		return RepairNone
	}
}

// Keys of the taints of an unhealthy device. They are part of the API: users write tolerations and dashboards for them.
const (
	// TaintUnhealthy marks a device that cannot run work; the value is the reason.
	TaintUnhealthy = "tandem-gpu.dev/unhealthy"
	// TaintXID and TaintGPULost are those of NVIDIA's driver (kubernetes-sigs/dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin/device_health.go),
	// beside TaintUnhealthy. The value of the first is the worst XID that has not ended; the second has none.
	TaintXID     = "gpu.nvidia.com/xid"
	TaintGPULost = "gpu.nvidia.com/gpu-lost"
)

// Taint is a taint of a device. Its effect is NoExecute if Health.Evict is set, otherwise NoSchedule.
type Taint struct{ Key, Value string }

// Taints returns those of an unhealthy device, for both APIs.
func (h Health) Taints() (taints []Taint) {
	if h.Healthy() {
		return nil
	}
	taints = append(taints, Taint{TaintUnhealthy, h.Reason})
	if h.XID != 0 {
		taints = append(taints, Taint{TaintXID, strconv.Itoa(h.XID)})
	}
	if h.Reason == ReasonLost || h.Reason == ReasonMissing {
		taints = append(taints, Taint{TaintGPULost, ""})
	}
	return taints
}

// FaultClass groups faults by what ends them. The node configuration has an action for each class.
type FaultClass string

// Fault classes, from the least to the worst.
const (
	// FaultNone is no fault of the hardware.
	FaultNone FaultClass = ""
	// FaultApplication is an XID that a program causes on a GPU that works.
	FaultApplication FaultClass = "application"
	// FaultContained is an XID after which the GPU still works: the driver ended the programs that it hit.
	FaultContained FaultClass = "contained"
	FaultFabric    FaultClass = "fabric"
	FaultMemory    FaultClass = "memory"
	FaultReset     FaultClass = "reset"
	FaultReboot    FaultClass = "reboot"
	// FaultLost is a GPU that does not work at all.
	FaultLost FaultClass = "lost"
)

// faultClasses are all classes, from the least to the worst.
var faultClasses = []FaultClass{
	FaultNone, FaultApplication, FaultContained, FaultFabric, FaultMemory, FaultReset, FaultReboot, FaultLost,
}

// Class returns the class of a fault.
func (h Health) Class() FaultClass {
	switch h.Reason {
	case ReasonXID:
		return XIDClass(h.XID)
	case ReasonFabric:
		return FaultFabric
	case ReasonRowRemapFailure, ReasonRowRemapPending, ReasonRetiredPages, ReasonUncorrectableECC:
		return FaultMemory
	case ReasonResetRequired, ReasonDrainP2P:
		return FaultReset
	case ReasonRebootRequired:
		return FaultReboot
	case ReasonLost, ReasonMissing, ReasonNoNode, ReasonUnreachable:
		return FaultLost
	default:
		return FaultNone
	}
}

// Worst returns the worst of several faults, with the worst XID of all of them; the zero value for none. Equal faults keep their order.
func Worst(faults ...Health) Health {
	var worst, xid Health
	var needs Repair
	evict := false
	for _, f := range faults {
		if f.Healthy() {
			continue
		}
		if worst.Healthy() || f.Compare(worst) < 0 {
			worst = f
		}
		if f.XID != 0 && (xid.XID == 0 || (Health{Reason: ReasonXID, XID: f.XID}).Compare(xid) < 0) {
			xid = Health{Reason: ReasonXID, XID: f.XID}
		}
		evict, needs = evict || f.Evict, WorstRepair(needs, f.Repair())
	}
	worst.XID, worst.Evict = xid.XID, evict
	if worst.Needs = needs; needs == worst.ownRepair() {
		worst.Needs = RepairNone
	}
	return worst
}

// Compare orders faults by class, the worst first.
func (h Health) Compare(other Health) int {
	return cmp.Compare(slices.Index(faultClasses, other.Class()), slices.Index(faultClasses, h.Class()))
}

// FaultAction is what the node does about a fault.
type FaultAction string

// The actions. In all but FaultIgnore the device is unhealthy in both APIs.
const (
	FaultIgnore FaultAction = "Ignore"
	// FaultNoSchedule gives the device to no new holder.
	FaultNoSchedule FaultAction = "NoSchedule"
	// FaultNoExecute also ends the pods that have the device.
	FaultNoExecute FaultAction = "NoExecute"
	// FaultResetWhenIdle is FaultNoSchedule, and resets the GPU once it has no holder.
	FaultResetWhenIdle FaultAction = "ResetWhenIdle"
)

// RecoveryAction is what a GPU needs before it works again, as the driver says (nvml.h, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION).
type RecoveryAction string

// The recovery actions.
const (
	RecoveryNone          RecoveryAction = "None"
	RecoveryReset         RecoveryAction = "Reset"
	RecoveryReboot        RecoveryAction = "Reboot"
	RecoveryDrainP2P      RecoveryAction = "DrainP2P"
	RecoveryDrainAndReset RecoveryAction = "DrainAndReset"
	RecoveryBusReset      RecoveryAction = "BusReset"
	RecoveryIMEXDomain    RecoveryAction = "RecoverIMEXDomain"
)

// XIDEvent is an XID that the driver reported, or the end of earlier ones.
type XIDEvent struct {
	// PCI is the address of the GPU without its function, "0000:3b:00"; empty for all GPUs of the node.
	PCI string
	// XID is zero if the hardware was reset, so that its earlier XIDs do not count any more.
	XID int
	// GPUInstance and ComputeInstance are those of the partition that it concerns, NoInstance for the GPU.
	GPUInstance, ComputeInstance int
	// Sequence is its number in the kernel's log of this boot; zero for an event from elsewhere.
	Sequence uint64
	// Time is when it was reported.
	Time time.Time
	// Message is the driver's text, which may be empty.
	Message string
}

// NoInstance is the ID of no GPU instance or compute instance.
const NoInstance = -1
