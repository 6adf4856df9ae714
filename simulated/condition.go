// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/simulated/programs"
)

// Condition is what a GPU reports of its health while its calls work. The zero value is a GPU in good health.
type Condition struct {
	// RecoveryAction is what the driver recommends (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION): "none", "reset", "reboot", "drainP2P",
	// "drainAndReset", "recoverIMEXDomain", "busReset" or "systemReboot"; empty is "none".
	RecoveryAction string `json:"recoveryAction,omitempty"`
	// RowRemap is the state of row remapping, on Ampere and later.
	RowRemap RowRemap `json:"rowRemap,omitzero"`
	// RetiredPages is the state of page retirement, before Ampere.
	RetiredPages RetiredPages `json:"retiredPages,omitzero"`
	// ECC counts memory errors.
	ECC ECCErrors `json:"ecc,omitzero"`
	// Fabric is the state of the registration with the fabric manager, on a GPU that has one.
	Fabric *FabricState `json:"fabric,omitempty"`
	// Slowdown names why the clocks are lower than they could be: "swPower", "swThermal", "hw", "hwThermal", "hwPowerBrake". The
	// two hw... ones imply "hw".
	Slowdown []string `json:"slowdown,omitempty"`
	// Fields are field values (NVML_FI_*) that answer with an error, by number: {230: ERROR_NOT_SUPPORTED} is a driver that does
	// not know the recovery action.
	Fields map[string]string `json:"fields,omitempty"`
	// EndsWithReset has a GPU reset (nvidia-smi --gpu-reset) end all of the above, if it comes after the faults file was written.
	EndsWithReset bool `json:"endsWithReset,omitempty"`
}

// RowRemap is the state of row remapping (nvmlDeviceGetRemappedRows).
type RowRemap struct {
	// Correctable and Uncorrectable count remapped rows by the kind of error.
	Correctable   uint32 `json:"correctable,omitempty"`
	Uncorrectable uint32 `json:"uncorrectable,omitempty"`
	// Pending: the next reset remaps a row. Failure: a row could not be remapped.
	Pending bool `json:"pending,omitempty"`
	Failure bool `json:"failure,omitempty"`
}

// RetiredPages is the state of page retirement (nvmlDeviceGetRetiredPages).
type RetiredPages struct {
	// SingleBit and DoubleBit count retired pages by their cause.
	SingleBit int `json:"singleBit,omitempty"`
	DoubleBit int `json:"doubleBit,omitempty"`
	// Pending: the next reset retires a page.
	Pending bool `json:"pending,omitempty"`
}

// ECCErrors are those since the driver was loaded (volatile) and in the GPU's life (aggregate).
type ECCErrors struct {
	Volatile  ECCCounts `json:"volatile,omitzero"`
	Aggregate ECCCounts `json:"aggregate,omitzero"`
}

// ECCCounts count errors. All of them are in the device's memory, but for those in SRAM.
type ECCCounts struct {
	Corrected       uint64 `json:"corrected,omitempty"`
	Uncorrected     uint64 `json:"uncorrected,omitempty"`
	SRAMUncorrected uint64 `json:"sramUncorrected,omitempty"`
}

// FabricState is what a GPU reports of the fabric (nvmlDeviceGetGpuFabricInfoV).
type FabricState struct {
	// State is "notStarted", "inProgress" or "completed". Without a fabric manager a GPU stays in "notStarted".
	State string `json:"state"`
	// Status is the outcome of a completed registration, "ERROR_UNKNOWN"; empty is success.
	Status string `json:"status,omitempty"`
	// HealthMask is NVML_GPU_FABRIC_HEALTH_MASK_*; that of a GPU in good health where it is nil.
	HealthMask *uint32 `json:"healthMask,omitempty"`
}

// condition is a Condition, checked.
type condition struct {
	recovery      nvml.DeviceGpuRecoveryAction
	rows          RowRemap
	pages         RetiredPages
	ecc           ECCErrors
	fabric        *fabricState
	slowdown      uint64
	fields        map[uint32]nvml.Return
	endsWithReset bool
}

type fabricState struct {
	state      uint8
	status     nvml.Return
	healthMask *uint32
}

var recoveryActions = map[string]nvml.DeviceGpuRecoveryAction{
	"": nvml.GPU_RECOVERY_ACTION_NONE, "none": nvml.GPU_RECOVERY_ACTION_NONE,
	"reset": nvml.GPU_RECOVERY_ACTION_GPU_RESET, "reboot": nvml.GPU_RECOVERY_ACTION_NODE_REBOOT,
	"drainP2P": nvml.GPU_RECOVERY_ACTION_DRAIN_P2P, "drainAndReset": nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET,
	"recoverIMEXDomain": nvml.GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN,
	"busReset":          nvml.GPU_RECOVERY_ACTION_BUS_RESET, "systemReboot": nvml.GPU_RECOVERY_ACTION_SYSTEM_REBOOT,
}

var fabricStates = map[string]uint8{
	"notStarted": nvml.GPU_FABRIC_STATE_NOT_STARTED, "inProgress": nvml.GPU_FABRIC_STATE_IN_PROGRESS,
	"completed": nvml.GPU_FABRIC_STATE_COMPLETED,
}

// slowdowns are the reasons by name. A GPU that the hardware slows down for heat or power reports the general reason as well
// (assumed: nvidia-smi -q shows both as active).
var slowdowns = map[string]uint64{
	"swPower":      nvml.ClocksEventReasonSwPowerCap,
	"swThermal":    nvml.ClocksEventReasonSwThermalSlowdown,
	"hw":           nvml.ClocksThrottleReasonHwSlowdown,
	"hwThermal":    nvml.ClocksThrottleReasonHwThermalSlowdown | nvml.ClocksThrottleReasonHwSlowdown,
	"hwPowerBrake": nvml.ClocksThrottleReasonHwPowerBrakeSlowdown | nvml.ClocksThrottleReasonHwSlowdown,
}

// compile checks a condition; the error names the field.
func (c Condition) compile(path string) (condition, error) {
	made := condition{
		rows: c.RowRemap, pages: c.RetiredPages, ecc: c.ECC, endsWithReset: c.EndsWithReset, fields: map[uint32]nvml.Return{},
	}
	var problems []error
	complain := func(field, format string, args ...any) {
		problems = append(problems, fmt.Errorf("%s.%s: %s", path, field, fmt.Sprintf(format, args...)))
	}
	var known bool
	if made.recovery, known = recoveryActions[c.RecoveryAction]; !known {
		complain("recoveryAction", "%q is no recovery action", c.RecoveryAction)
	}
	if c.RetiredPages.SingleBit < 0 || c.RetiredPages.DoubleBit < 0 {
		complain("retiredPages", "the number of pages cannot be negative")
	}
	if c.Fabric != nil {
		made.fabric = &fabricState{healthMask: c.Fabric.HealthMask}
		if made.fabric.state, known = fabricStates[c.Fabric.State]; !known {
			complain("fabric.state", "%q is not notStarted, inProgress or completed", c.Fabric.State)
		}
		if made.fabric.status, known = returnByName(c.Fabric.Status); !known {
			complain("fabric.status", "%q is no NVML return code", c.Fabric.Status)
		}
	}
	for i, name := range c.Slowdown {
		reason, known := slowdowns[name]
		if !known {
			complain(fmt.Sprintf("slowdown[%d]", i), "%q is no slowdown", name)
		}
		made.slowdown |= reason
	}
	for number, name := range c.Fields {
		field, err := strconv.ParseUint(number, 10, 32)
		ret, known := returnByName(name)
		if err != nil || !known {
			complain("fields."+number, "%q is not the number of a field, or %q no NVML return code", number, name)
		}
		made.fields[uint32(field)] = ret
	}
	return made, errors.Join(problems...)
}

// condition is the one in force.
func (g *gpu) condition() condition {
	c := g.sys.faults.current().gpus[g.place].condition
	if c.endsWithReset && g.sys.faults.resetSince(g.uuid) {
		return condition{}
	}
	return c
}

// resetSince reports whether a GPU was reset after the faults in force were written.
func (s *faultSource) resetSince(uuid string) bool {
	if s.path == "" {
		return false
	}
	reset := stampOf(filepath.Join(filepath.Dir(s.path), MIGDir, programs.ResetsFile(uuid)))
	return reset != fileStamp{} && reset.changed.After(stampOf(s.path).changed)
}

// remapsRows: GPUs from Ampere on remap rows, earlier ones retire pages (nvml.h; NVIDIA, GPU Memory Error Management).
func (g *gpu) remapsRows() bool { return g.model.ECC && g.model.Architecture != "Turing" }

func (g *gpu) retiresPages() bool { return g.model.ECC && !g.remapsRows() }

func (g *gpu) rowsReadable() nvml.Return {
	if !g.remapsRows() {
		return nvml.ERROR_NOT_SUPPORTED
	}
	if !g.hasMIG() {
		return nvml.SUCCESS
	}
	own, ret := g.migState()
	if ret == nvml.SUCCESS && own.Enabled && len(own.Instances) > 0 {
		return nvml.ERROR_NOT_SUPPORTED
	}
	return ret
}

// eccCounts are the errors that a counter counts.
func (g *gpu) eccCounts(counter nvml.EccCounterType) (ECCCounts, nvml.Return) {
	ecc := g.condition().ecc
	switch {
	case !g.model.ECC:
		return ECCCounts{}, nvml.ERROR_NOT_SUPPORTED
	case counter == nvml.VOLATILE_ECC:
		return ecc.Volatile, nvml.SUCCESS
	case counter == nvml.AGGREGATE_ECC:
		return ecc.Aggregate, nvml.SUCCESS
	}
	return ECCCounts{}, nvml.ERROR_INVALID_ARGUMENT
}

func (g *gpu) eccErrors(kind nvml.MemoryErrorType, counter nvml.EccCounterType) (uint64, nvml.Return) {
	counts, ret := g.eccCounts(counter)
	if kind == nvml.MEMORY_ERROR_TYPE_CORRECTED {
		return counts.Corrected, ret
	}
	return counts.Uncorrected + counts.SRAMUncorrected, ret
}

func flag(yes bool) uint32 {
	if yes {
		return 1
	}
	return 0
}

// GetCurrentClocksEventReasons is "idle" for a GPU without clients that nothing slows down.
func (g *gpu) GetCurrentClocksEventReasons() (uint64, nvml.Return) {
	reasons := g.condition().slowdown
	if reasons == 0 && len(g.clients()) == 0 {
		reasons = nvml.ClocksEventReasonGpuIdle
	}
	return reasons, nvml.SUCCESS
}

// GetCurrentClocksThrottleReasons is the call's name before R535.
func (g *gpu) GetCurrentClocksThrottleReasons() (uint64, nvml.Return) {
	return g.GetCurrentClocksEventReasons()
}

// recoveryActionSince is the first driver branch that knows the recovery action (assumed: nvidia-smi -q shows it from R570 on).
const recoveryActionSince = 570

// fieldValues answer a field, by number. The recovery action is an unsigned int, the others are unsigned long longs: those of remapped rows
// and of pending retired pages in a recording of an H100 (pkg/nvml/testdata/recordings), the rest by assumption.
var fieldValues = map[uint32]func(*gpu) (any, nvml.Return){
	nvml.FI_DEV_ECC_SBE_VOL_TOTAL: eccField(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC),
	nvml.FI_DEV_ECC_DBE_VOL_TOTAL: eccField(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC),
	nvml.FI_DEV_ECC_SBE_AGG_TOTAL: eccField(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.AGGREGATE_ECC),
	nvml.FI_DEV_ECC_DBE_AGG_TOTAL: eccField(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.AGGREGATE_ECC),
	nvml.FI_DEV_RETIRED_SBE:       pagesField(func(p RetiredPages) uint32 { return uint32(p.SingleBit) }),
	nvml.FI_DEV_RETIRED_DBE:       pagesField(func(p RetiredPages) uint32 { return uint32(p.DoubleBit) }),
	nvml.FI_DEV_RETIRED_PENDING:   pagesField(func(p RetiredPages) uint32 { return flag(p.Pending) }),
	nvml.FI_DEV_REMAPPED_COR:      rowsField(func(r RowRemap) uint32 { return r.Correctable }),
	nvml.FI_DEV_REMAPPED_UNC:      rowsField(func(r RowRemap) uint32 { return r.Uncorrectable }),
	nvml.FI_DEV_REMAPPED_PENDING:  rowsField(func(r RowRemap) uint32 { return flag(r.Pending) }),
	nvml.FI_DEV_REMAPPED_FAILURE:  rowsField(func(r RowRemap) uint32 { return flag(r.Failure) }),
	nvml.FI_DEV_GET_GPU_RECOVERY_ACTION: func(g *gpu) (any, nvml.Return) {
		if branch, _ := majorMinor(g.sys.profile.Driver.Version); branch < recoveryActionSince {
			return nil, nvml.ERROR_NOT_SUPPORTED
		}
		return uint32(g.condition().recovery), nvml.SUCCESS
	},
}

func eccField(kind nvml.MemoryErrorType, counter nvml.EccCounterType) func(*gpu) (any, nvml.Return) {
	return func(g *gpu) (any, nvml.Return) { return g.eccErrors(kind, counter) }
}

func pagesField(read func(RetiredPages) uint32) func(*gpu) (any, nvml.Return) {
	return func(g *gpu) (any, nvml.Return) {
		if !g.retiresPages() {
			return uint64(0), nvml.ERROR_NOT_SUPPORTED
		}
		return uint64(read(g.condition().pages)), nvml.SUCCESS
	}
}

func rowsField(read func(RowRemap) uint32) func(*gpu) (any, nvml.Return) {
	return func(g *gpu) (any, nvml.Return) {
		if ret := g.rowsReadable(); ret != nvml.SUCCESS {
			return uint64(0), ret
		}
		return uint64(read(g.condition().rows)), nvml.SUCCESS
	}
}

// GetFieldValues answers each field with a return code of its own (nvml.h). A field that the driver or the GPU does not know is
// NOT_SUPPORTED.
func (g *gpu) GetFieldValues(values []nvml.FieldValue) nvml.Return {
	if len(values) == 0 {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	failing := g.condition().fields
	for i := range values {
		v := &values[i]
		v.ValueType, v.Value = 0, [8]byte{}
		read, known := fieldValues[v.FieldId]
		ret := cmp.Or(failing[v.FieldId], nvml.ERROR_NOT_SUPPORTED)
		if known && failing[v.FieldId] == nvml.SUCCESS {
			var value any
			value, ret = read(g)
			putField(v, value)
		}
		v.NvmlReturn = uint32(ret)
	}
	return nvml.SUCCESS
}

// putField has a value also where the field is not supported: NVML then answers its type.
func putField(into *nvml.FieldValue, value any) {
	switch value := value.(type) {
	case uint32:
		into.ValueType = uint32(nvml.VALUE_TYPE_UNSIGNED_INT)
		binary.NativeEndian.PutUint32(into.Value[:], value)
	case uint64:
		into.ValueType = uint32(nvml.VALUE_TYPE_UNSIGNED_LONG_LONG)
		binary.NativeEndian.PutUint64(into.Value[:], value)
	}
}
