// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/simulated/programs"
)

// fields reads field values as numbers; the return code is that of the field.
func fields(t *testing.T, d nvml.Device, ids ...uint32) map[uint32]any {
	t.Helper()
	var values []nvml.FieldValue
	for _, id := range ids {
		values = append(values, nvml.FieldValue{FieldId: id})
	}
	if ret := d.GetFieldValues(values); ret != nvml.SUCCESS {
		t.Fatalf("GetFieldValues = %v", ret)
	}
	read := map[uint32]any{}
	for _, v := range values {
		switch {
		case nvml.Return(v.NvmlReturn) != nvml.SUCCESS:
			read[v.FieldId] = nvml.Return(v.NvmlReturn)
		case v.ValueType == uint32(nvml.VALUE_TYPE_UNSIGNED_INT):
			read[v.FieldId] = int(binary.NativeEndian.Uint32(v.Value[:]))
		case v.ValueType == uint32(nvml.VALUE_TYPE_UNSIGNED_LONG_LONG):
			read[v.FieldId] = int(binary.NativeEndian.Uint64(v.Value[:]))
		default:
			t.Errorf("field %d has type %d", v.FieldId, v.ValueType)
		}
	}
	return read
}

func checkFields(t *testing.T, d nvml.Device, want map[uint32]any) {
	t.Helper()
	var ids []uint32
	for id := range want {
		ids = append(ids, id)
	}
	for id, value := range fields(t, d, ids...) {
		if value != want[id] {
			t.Errorf("field %d = %v, want %v", id, value, want[id])
		}
	}
}

func TestConditionOfAHealthyGPU(t *testing.T) {
	d := handle(t, start(t, "h100x8"), 0)
	checkFields(t, d, map[uint32]any{
		nvml.FI_DEV_GET_GPU_RECOVERY_ACTION: 0, nvml.FI_DEV_ECC_DBE_VOL_TOTAL: 0, nvml.FI_DEV_REMAPPED_FAILURE: 0,
		nvml.FI_DEV_RETIRED_PENDING: nvml.ERROR_NOT_SUPPORTED, nvml.FI_MAX: nvml.ERROR_NOT_SUPPORTED,
	})
	if info, ret := d.GetGpuFabricInfo(); info.State != nvml.GPU_FABRIC_STATE_COMPLETED || ret != nvml.SUCCESS {
		t.Errorf("fabric %+v, %v", info, ret)
	}
	if reasons, ret := d.GetCurrentClocksEventReasons(); reasons != nvml.ClocksEventReasonGpuIdle || ret != nvml.SUCCESS {
		t.Errorf("clocks event reasons %#x, %v", reasons, ret)
	}
	if ret := d.GetFieldValues(nil); ret != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("no field values: %v", ret)
	}
}

func TestConditionOfTheFaultsFile(t *testing.T) {
	dir := t.TempDir()
	lib := start(t, "h100x8", WithDir(dir))
	sick, fine := handle(t, lib, 0), handle(t, lib, 1)
	mask := uint32(1)
	inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: "0", Condition: Condition{
		RecoveryAction: "drainAndReset",
		RowRemap:       RowRemap{Correctable: 2, Uncorrectable: 1, Pending: true, Failure: true},
		ECC: ECCErrors{
			Volatile:  ECCCounts{Corrected: 7, Uncorrected: 1},
			Aggregate: ECCCounts{Corrected: 9, Uncorrected: 3, SRAMUncorrected: 2},
		},
		Fabric:   &FabricState{State: "completed", Status: "ERROR_UNKNOWN", HealthMask: &mask},
		Slowdown: []string{"hwThermal", "swPower"},
	}}}})
	checkFields(t, sick, map[uint32]any{
		nvml.FI_DEV_GET_GPU_RECOVERY_ACTION: 4,
		nvml.FI_DEV_ECC_SBE_VOL_TOTAL:       7, nvml.FI_DEV_ECC_DBE_VOL_TOTAL: 1,
		nvml.FI_DEV_ECC_SBE_AGG_TOTAL: 9, nvml.FI_DEV_ECC_DBE_AGG_TOTAL: 5,
		nvml.FI_DEV_REMAPPED_COR: 2, nvml.FI_DEV_REMAPPED_UNC: 1, nvml.FI_DEV_REMAPPED_PENDING: 1, nvml.FI_DEV_REMAPPED_FAILURE: 1,
	})
	if info, ret := sick.GetGpuFabricInfo_v4(); info.Status != uint32(nvml.ERROR_UNKNOWN) || info.HealthMask != 1 || ret != nvml.SUCCESS {
		t.Errorf("fabric %+v, %v", info, ret)
	}
	const slow = nvml.ClocksThrottleReasonHwThermalSlowdown | nvml.ClocksThrottleReasonHwSlowdown | nvml.ClocksEventReasonSwPowerCap
	if reasons, ret := sick.GetCurrentClocksThrottleReasons(); reasons != slow || ret != nvml.SUCCESS {
		t.Errorf("clocks event reasons %#x, %v", reasons, ret)
	}
	checkFields(t, fine, map[uint32]any{nvml.FI_DEV_GET_GPU_RECOVERY_ACTION: 0, nvml.FI_DEV_ECC_DBE_AGG_TOTAL: 0})
}

// What a GPU does not have, its driver does not know, or MIG hides, is not supported.
func TestConditionThatIsNotReported(t *testing.T) {
	dir := t.TempDir()
	inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: "0", Condition: Condition{Fields: map[string]string{"230": "ERROR_NO_PERMISSION"}}}}})
	checkFields(t, handle(t, start(t, "h100x8", WithDir(dir)), 0), map[uint32]any{
		nvml.FI_DEV_GET_GPU_RECOVERY_ACTION: nvml.ERROR_NO_PERMISSION, nvml.FI_DEV_REMAPPED_COR: 0,
	})
	partitioned := handle(t, start(t, "h100x8-mig"), 4)
	checkFields(t, partitioned, map[uint32]any{nvml.FI_DEV_REMAPPED_PENDING: nvml.ERROR_NOT_SUPPORTED})

	p, err := Load("l4x4")
	if err != nil {
		t.Fatal(err)
	}
	p.Driver.Version = "535.183.01"
	old := New(p)
	old.Init()
	defer old.Shutdown()
	checkFields(t, handle(t, old, 0), map[uint32]any{
		nvml.FI_DEV_GET_GPU_RECOVERY_ACTION: nvml.ERROR_NOT_SUPPORTED, nvml.FI_DEV_REMAPPED_COR: 0,
	})
	if _, ret := handle(t, old, 0).GetGpuFabricInfo(); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("fabric of an L4: %v", ret)
	}
}

// GPUs before Ampere retire pages and do not remap rows.
func TestRetiredPages(t *testing.T) {
	dir := t.TempDir()
	inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: "0", Condition: Condition{
		RetiredPages: RetiredPages{SingleBit: 2, DoubleBit: 1, Pending: true}, RowRemap: RowRemap{Failure: true},
	}}}})
	d := handle(t, start(t, "t4x4", WithDir(dir)), 0)
	checkFields(t, d, map[uint32]any{
		nvml.FI_DEV_RETIRED_SBE: 2, nvml.FI_DEV_RETIRED_DBE: 1, nvml.FI_DEV_RETIRED_PENDING: 1,
		nvml.FI_DEV_REMAPPED_FAILURE: nvml.ERROR_NOT_SUPPORTED,
	})
}

func TestResetEndsTheCondition(t *testing.T) {
	dir := t.TempDir()
	d := handle(t, start(t, "l4x4", WithDir(dir)), 0)
	uuid, _ := d.GetUUID()
	inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: "0", Condition: Condition{RecoveryAction: "reset", EndsWithReset: true}}}})
	reset := func(at time.Time) {
		path := filepath.Join(dir, MIGDir, programs.ResetsFile(uuid))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("boot\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
	}
	reset(time.Now().Add(-time.Hour))
	checkFields(t, d, map[uint32]any{nvml.FI_DEV_GET_GPU_RECOVERY_ACTION: 1})
	reset(time.Now().Add(time.Second))
	checkFields(t, d, map[uint32]any{nvml.FI_DEV_GET_GPU_RECOVERY_ACTION: 0})
}

func TestConditionsThatAreNone(t *testing.T) {
	p, err := Load("l4x4")
	if err != nil {
		t.Fatal(err)
	}
	_, err = Faults{GPUs: []GPUFaults{{GPU: "0", Condition: Condition{
		RecoveryAction: "pray", RetiredPages: RetiredPages{DoubleBit: -1}, Fabric: &FabricState{Status: "ERROR_SOON"},
		Slowdown: []string{"hw", "tired"}, Fields: map[string]string{"x": ""},
	}}}}.compile(p)
	for _, want := range []string{
		"gpus[0].recoveryAction: ", "gpus[0].retiredPages: ", "gpus[0].fabric.state: ", "gpus[0].fabric.status: ",
		"gpus[0].slowdown[1]: ", "gpus[0].fields.x: ",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %q", err, want)
		}
	}
}
