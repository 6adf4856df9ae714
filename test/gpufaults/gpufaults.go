// SPDX-License-Identifier: Apache-2.0

// Package gpufaults has the faults of GPUs by which tests and the benchmark judge how soon a fault is seen, and how soon its end.
package gpufaults

import (
	"strconv"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
)

// Fault is a fault of one GPU.
type Fault struct {
	Name string
	// Reason is that of the unhealthy device. Others are possible at first where the fault has an XID: the kernel's log is read at once.
	Reason string
	// XID is reported together with the state; zero for none.
	XID uint64
	// State is what the driver reports while the fault lasts. Its field GPU is set by Raise.
	State simulated.GPUFaults
}

func condition(c simulated.Condition) simulated.GPUFaults { return simulated.GPUFaults{Condition: c} }

func recovery(action string) simulated.GPUFaults {
	return condition(simulated.Condition{RecoveryAction: action})
}

// Applications are the XIDs that change nothing (device.FaultApplication).
var Applications = []uint64{13, 31, 43, 45, 68, 109}

// Lost and XID79 are those of a GPU that NVML reports lost, without and with the XID of a GPU that has fallen off the bus. RowRemapFailed is that of
// a GPU with memory that it cannot replace.
var (
	Lost           = Fault{"lost", device.ReasonLost, 0, simulated.GPUFaults{Lost: true}}
	XID79          = Fault{"XID 79", device.ReasonLost, 79, simulated.GPUFaults{Lost: true}}
	RowRemapFailed = Fault{"row remap failed", device.ReasonRowRemapFailure, 0, condition(simulated.Condition{RowRemap: simulated.RowRemap{Failure: true}})}
)

// All are the faults.
var All = []Fault{
	Lost,
	{"fallen off the bus", device.ReasonMissing, 0, simulated.GPUFaults{Absent: true}},
	{"no answer", device.ReasonUnreachable, 0, simulated.GPUFaults{Calls: map[string]simulated.CallFault{"GetMemoryInfo": {Return: "ERROR_UNKNOWN"}}}},
	{"reset required", device.ReasonResetRequired, 0, recovery("reset")},
	{"bus reset required", device.ReasonResetRequired, 0, recovery("busReset")},
	{"drain and reset", device.ReasonResetRequired, 0, recovery("drainAndReset")},
	{"drain peers", device.ReasonDrainP2P, 0, recovery("drainP2P")},
	{"reboot required", device.ReasonRebootRequired, 0, recovery("reboot")},
	{"IMEX domain", device.ReasonFabric, 0, recovery("recoverIMEXDomain")},
	RowRemapFailed,
	{"ECC, old driver", device.ReasonUncorrectableECC, 0, condition(simulated.Condition{
		ECC: simulated.ECCErrors{Volatile: simulated.ECCCounts{Uncorrected: 2}}, Fields: map[string]string{"230": "ERROR_NOT_SUPPORTED"},
	})},
	{"no fabric manager", device.ReasonFabric, 0, condition(simulated.Condition{Fabric: &simulated.FabricState{State: "notStarted"}})},
	{"fabric in progress", device.ReasonFabric, 0, condition(simulated.Condition{Fabric: &simulated.FabricState{State: "inProgress"}})},
	{"fabric failed", device.ReasonFabric, 0, condition(simulated.Condition{Fabric: &simulated.FabricState{State: "completed", Status: "ERROR_UNKNOWN"}})},
	{"XID 48", device.ReasonXID, 48, recovery("reset")},
	{"XID 64", device.ReasonXID, 64, condition(simulated.Condition{RecoveryAction: "reset", RowRemap: simulated.RowRemap{Failure: true}})},
	{"XID 74", device.ReasonXID, 74, recovery("drainAndReset")},
	XID79,
	{"XID 95", device.ReasonXID, 95, recovery("reset")},
	{"XID 119", device.ReasonXID, 119, recovery("reset")},
}

// Raise begins the fault on GPUs of the machine in dir, in place of other faults.
func (f Fault) Raise(dir string, gpus ...int) error {
	var faults simulated.Faults
	for _, gpu := range gpus {
		f.State.GPU = strconv.Itoa(gpu)
		faults.GPUs = append(faults.GPUs, f.State)
	}
	if err := simulated.WriteFaults(dir, faults); err != nil || f.XID == 0 {
		return err
	}
	return RaiseXID(dir, f.XID, gpus...)
}

// RaiseXID reports an XID of GPUs of the machine in dir.
func RaiseXID(dir string, xid uint64, gpus ...int) error {
	for _, gpu := range gpus {
		if err := simulated.RaiseXID(dir, simulated.Event{GPU: strconv.Itoa(gpu), XID: xid}); err != nil {
			return err
		}
	}
	return nil
}

// Clear ends all faults of the machine in dir.
func Clear(dir string) error { return simulated.WriteFaults(dir, simulated.Faults{}) }
