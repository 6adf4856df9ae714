// SPDX-License-Identifier: Apache-2.0

// What of the hardware is a fault.

package nvml

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// healthFields are read in one call. NVML answers each with a code of its own (nvml.h, nvmlFieldValue_t).
var healthFields = []uint32{
	gonvml.FI_DEV_GET_GPU_RECOVERY_ACTION, gonvml.FI_DEV_REMAPPED_FAILURE, gonvml.FI_DEV_REMAPPED_PENDING,
	gonvml.FI_DEV_RETIRED_PENDING, gonvml.FI_DEV_ECC_DBE_VOL_TOTAL,
}

// recoveryActions are NVML's (nvml.h, nvmlDeviceGpuRecoveryAction_t).
var recoveryActions = map[gonvml.DeviceGpuRecoveryAction]gpu.RecoveryAction{
	gonvml.GPU_RECOVERY_ACTION_NONE: gpu.RecoveryNone, gonvml.GPU_RECOVERY_ACTION_GPU_RESET: gpu.RecoveryReset,
	gonvml.GPU_RECOVERY_ACTION_NODE_REBOOT: gpu.RecoveryReboot, gonvml.GPU_RECOVERY_ACTION_DRAIN_P2P: gpu.RecoveryDrainP2P,
	gonvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET:     gpu.RecoveryDrainAndReset,
	gonvml.GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN: gpu.RecoveryIMEXDomain,
	gonvml.GPU_RECOVERY_ACTION_BUS_RESET:           gpu.RecoveryBusReset,
	gonvml.GPU_RECOVERY_ACTION_SYSTEM_REBOOT:       gpu.RecoveryReboot,
}

// recoveryFaults are the faults that the recovery actions stand for.
var recoveryFaults = map[gpu.RecoveryAction]gpu.Health{
	gpu.RecoveryReset:         {Reason: gpu.ReasonResetRequired, Message: "the driver requires a reset of the GPU"},
	gpu.RecoveryBusReset:      {Reason: gpu.ReasonResetRequired, Message: "the driver requires a reset of the GPU's bus"},
	gpu.RecoveryReboot:        {Reason: gpu.ReasonRebootRequired, Message: "the driver requires a reboot of the node"},
	gpu.RecoveryDrainP2P:      {Reason: gpu.ReasonDrainP2P, Message: "the driver requires that no peer uses the memory of the GPU: end the programs that use it with other GPUs"},
	gpu.RecoveryDrainAndReset: {Reason: gpu.ReasonResetRequired, Message: "the driver requires a reset of the GPU, once its programs have ended"},
	gpu.RecoveryIMEXDomain:    {Reason: gpu.ReasonFabric, Message: "the driver requires that its IMEX domain recovers: check nvidia-imex on the nodes of the domain"},
}

// condition is what a GPU last answered about its faults.
type condition struct {
	// fields has the values of healthFields that the driver and the GPU have.
	fields map[uint32]uint64
	// fabric is fabricProblem's answer.
	fabric string
	// unread is set if the last reading of the recovery action failed.
	unread bool
}

// readFaults reads the faults of a GPU that answers. A value that the driver lacks is no fault. One that cannot be read is as it was.
func readFaults(known *knownGPU, d gonvml.Device) {
	g, before := &known.gpu, known.condition
	g.Faults = nil
	add := func(reason, format string, args ...any) {
		g.Faults = append(g.Faults, gpu.Health{Reason: reason, Message: fmt.Sprintf(format, args...)})
	}
	values, unread := fieldValues(d, healthFields, before.fields)
	_, recovers := values[gonvml.FI_DEV_GET_GPU_RECOVERY_ACTION]
	known.condition = condition{
		fields: values, fabric: fabricProblem(g, d, before.fabric), unread: unread[gonvml.FI_DEV_GET_GPU_RECOVERY_ACTION],
	}
	g.Recovery = ""
	if action, known := values[gonvml.FI_DEV_GET_GPU_RECOVERY_ACTION]; known {
		// An action that this version does not know needs at least a reset.
		g.Recovery = cmp.Or(recoveryActions[gonvml.DeviceGpuRecoveryAction(action)], gpu.RecoveryReset)
		if fault, needed := recoveryFaults[g.Recovery]; needed {
			g.Faults = append(g.Faults, fault)
		}
	}
	if values[gonvml.FI_DEV_REMAPPED_FAILURE] != 0 {
		add(gpu.ReasonRowRemapFailure, "a row of its memory failed and could not be replaced: the GPU has to be replaced")
	}
	if values[gonvml.FI_DEV_REMAPPED_PENDING] != 0 && values[gonvml.FI_DEV_REMAPPED_FAILURE] == 0 {
		add(gpu.ReasonRowRemapPending, "a row of its memory failed and is replaced at the next reset of the GPU")
	}
	if values[gonvml.FI_DEV_RETIRED_PENDING] != 0 {
		add(gpu.ReasonRetiredPages, "a page of its memory failed and is retired when the driver is loaded again")
	}
	if errors := values[gonvml.FI_DEV_ECC_DBE_VOL_TOTAL]; errors != 0 && !recovers && !known.condition.unread {
		add(gpu.ReasonUncorrectableECC, "%d uncorrectable ECC errors since the driver was loaded: the GPU has to be reset", errors)
	}
	if state := known.condition.fabric; state != "" {
		add(gpu.ReasonFabric, "its NVLink fabric is %s, so that CUDA fails with error 802: check nvidia-fabricmanager on the node", state)
	}
	slices.SortStableFunc(g.Faults, gpu.Health.Compare)
}

// fieldValues returns the values of the fields that the driver and the GPU have; those before for fields that cannot be read.
func fieldValues(d gonvml.Device, ids []uint32, before map[uint32]uint64) (values map[uint32]uint64, unread map[uint32]bool) {
	fields := make([]gonvml.FieldValue, len(ids))
	for i, id := range ids {
		fields[i].FieldId = id
	}
	values, unread = map[uint32]uint64{}, map[uint32]bool{}
	all := d.GetFieldValues(fields)
	for i, f := range fields {
		ret := cmp.Or(all, gonvml.Return(f.NvmlReturn))
		value, known := before[ids[i]]
		switch {
		case ret == gonvml.SUCCESS:
			values[ids[i]] = integer(f)
		case lacking(ret):
		default:
			unread[ids[i]] = true
			if known {
				values[ids[i]] = value
			}
		}
	}
	return values, unread
}

// lacking reports whether the driver does not know what it was asked for.
func lacking(ret gonvml.Return) bool { return unsupported(ret) || ret == gonvml.ERROR_INVALID_ARGUMENT }

// integer returns the value of a field with an integer type. NVML writes the machine's byte order, which is little-endian wherever NVIDIA
// has a driver.
func integer(f gonvml.FieldValue) uint64 {
	switch gonvml.ValueType(f.ValueType) {
	case gonvml.VALUE_TYPE_UNSIGNED_INT, gonvml.VALUE_TYPE_SIGNED_INT:
		return uint64(binary.LittleEndian.Uint32(f.Value[:4]))
	case gonvml.VALUE_TYPE_UNSIGNED_SHORT:
		return uint64(binary.LittleEndian.Uint16(f.Value[:2]))
	default:
		return binary.LittleEndian.Uint64(f.Value[:])
	}
}

// fabricProblem returns the state of a fabric that the GPU supports and has not joined; that before if it cannot be read. In MIG mode a
// GPU has no NVLink (NVIDIA Multi-Instance GPU User Guide, "Application Considerations").
func fabricProblem(g *gpu.GPU, d gonvml.Device, before string) string {
	if g.MIGEnabled {
		return ""
	}
	info, ret := d.GetGpuFabricInfo()
	switch {
	case ret == gonvml.SUCCESS:
	case lacking(ret):
		return ""
	default:
		return before
	}
	switch info.State {
	case gonvml.GPU_FABRIC_STATE_NOT_STARTED:
		return "not started"
	case gonvml.GPU_FABRIC_STATE_IN_PROGRESS:
		return "still being configured"
	case gonvml.GPU_FABRIC_STATE_COMPLETED:
		if ret := gonvml.Return(info.Status); ret != gonvml.SUCCESS {
			return fmt.Sprintf("not configured (NVML status %d)", int(ret))
		}
	}
	return ""
}

// slowdowns are the clock event reasons that are shown. The software power cap is normal under load.
var slowdowns = []struct {
	reason uint64
	text   string
}{
	{gonvml.ClocksThrottleReasonHwThermalSlowdown, "thermal (hardware)"},
	{gonvml.ClocksEventReasonSwThermalSlowdown, "thermal"},
	{gonvml.ClocksThrottleReasonHwPowerBrakeSlowdown, "power brake"},
}

// readSlowdown reads why the GPU runs below its clocks.
func readSlowdown(g *gpu.GPU, d gonvml.Device) {
	reasons, ret := d.GetCurrentClocksEventReasons()
	if ret != gonvml.SUCCESS {
		reasons = 0
	}
	var texts []string
	for _, s := range slowdowns {
		if reasons&s.reason != 0 {
			texts = append(texts, s.text)
		}
	}
	g.Slowdown = strings.Join(texts, ", ")
}

// LastRead returns when the last successful reading of a GPU began that the inventory has; zero if it is not known. pkg/health calls it. Safe for concurrent use;
// it never waits.
func (n *Node) LastRead(uuid string) time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.reads[uuid]
}

const (
	// lightScans is how many scans run in an interval at most. All but the first read only health.
	lightScans = 4
	// xidDelay is how long after an XID a scan begins: the driver decides meanwhile what the GPU needs, and may report more XIDs.
	xidDelay = 200 * time.Millisecond
	// xidInterval is the time between scans that XIDs cause: a broken GPU may report many.
	xidInterval = time.Second
	// Scans may take 1/share of a core.
	share = 250
)

// pacer decides how soon the next scan begins. On a real node a scan opens and closes NVML, which costs more with each GPU.
type pacer struct {
	costs [lightScans]time.Duration
	at    int
}

// wait takes the CPU time of the process during a scan, and returns how long to wait for the next one. The cheapest of the last scans
// counts, because the process does other things as well.
func (p *pacer) wait(cost, interval time.Duration) time.Duration {
	p.costs[p.at%len(p.costs)] = cost
	p.at++
	cheapest := slices.Min(p.costs[:min(p.at, len(p.costs))])
	return min(max(share*cheapest, interval/lightScans), interval)
}

// cpuTime returns the CPU time of the process so far; zero if it is not known.
func cpuTime() time.Duration {
	var usage unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &usage) != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
