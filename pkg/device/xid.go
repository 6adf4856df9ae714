// SPDX-License-Identifier: Apache-2.0

package device

import "slices"

// XID is what is known about an XID.
type XID struct {
	Number int
	Class  FaultClass
	// Meaning is NVIDIA's description, Action its "Resolution Bucket (Immediate Action)".
	Meaning, Action string
}

// XIDSource is where the meanings and actions of the table come from. The XIDs of FaultApplication are those that NVIDIA's device plugin
// ignores (NVIDIA/k8s-device-plugin, internal/rm/health.go).
const XIDSource = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"

// XIDs are the known XIDs by number. Two rows differ from NVIDIA's action. XID 109 counts as the application's, as in NVIDIA's device
// plugin. XID 154 is no fault of its own: it says that the recovery action changed, which the agent reads.
var XIDs = []XID{
	{8, FaultContained, "GPU stopped processing", "RESTART_APP"},
	{11, FaultContained, "Invalid or corrupted push buffer stream", "RESTART_APP"},
	{13, FaultApplication, "Graphics engine exception", "RESTART_APP"},
	{25, FaultContained, "Invalid or illegal push buffer stream", "RESTART_APP"},
	{31, FaultApplication, "GPU memory page fault", "RESTART_APP"},
	{32, FaultContained, "Invalid or corrupted push buffer stream", "RESTART_APP"},
	{43, FaultApplication, "GPU stopped processing", "IGNORE"},
	{45, FaultApplication, "Preemptive cleanup, due to previous errors", "WORKFLOW_XID_45"},
	{46, FaultReset, "GPU stopped processing", "RESET_GPU"},
	{48, FaultReset, "Double bit ECC error", "WORKFLOW_XID_48"},
	{54, FaultReboot, "Auxiliary power is not connected", "CHECK_MECHANICALS"},
	{62, FaultReset, "Internal micro-controller halt", "RESET_GPU"},
	{63, FaultContained, "GPU memory remapping event", "IGNORE"},
	{64, FaultReset, "GPU memory remapping failure", "RESET_GPU"},
	{68, FaultApplication, "NVDEC0 exception", "RESTART_APP"},
	{74, FaultReset, "NVLink error", "WORKFLOW_NVLINK_ERR"},
	{79, FaultReboot, "GPU has fallen off the bus", "RESTART_BM"},
	{92, FaultContained, "High single-bit ECC error rate", "IGNORE"},
	{94, FaultContained, "Contained memory error", "RESTART_APP"},
	{95, FaultReset, "Uncontained memory error", "RESET_GPU"},
	{109, FaultApplication, "Context switch timeout error", "RESET_GPU"},
	{110, FaultReset, "Security fault error", "RESET_GPU"},
	{119, FaultReset, "GSP RPC timeout", "RESET_GPU"},
	{120, FaultReset, "GSP error", "RESET_GPU"},
	{136, FaultReset, "Link training failed", "RESET_GPU"},
	{137, FaultContained, "NVLink privilege error", "IGNORE"},
	{140, FaultReset, "Unrecovered ECC error", "RESET_GPU"},
	{142, FaultReboot, "NVENC3 error", "CONTACT_SUPPORT"},
	{143, FaultReset, "GPU initialization error", "RESET_GPU"},
	{151, FaultReboot, "Key rotation error", "RESTART_VM"},
	{154, FaultNone, "GPU recovery action changed", "XID_154_EVAL"},
	{155, FaultReset, "NVLink error that software defines", "RESET_GPU"},
	{156, FaultReset, "Resource retirement event", "RESET_GPU"},
	{157, FaultContained, "Resource retirement failure", "IGNORE"},
	{158, FaultReset, "GPU fatal timeout", "RESET_GPU"},
}

// XIDByNumber returns what is known about an XID. One that is not in the table needs a reset: NVIDIA's device plugin treats every XID that
// it does not ignore alike.
func XIDByNumber(number int) XID {
	if i, found := slices.BinarySearchFunc(XIDs, number, func(x XID, n int) int { return x.Number - n }); found {
		return XIDs[i]
	}
	return XID{Number: number, Class: FaultReset, Meaning: "not in Tandem's table of XIDs"}
}

// XIDClass returns the class of an XID.
func XIDClass(number int) FaultClass { return XIDByNumber(number).Class }
