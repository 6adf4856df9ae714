// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func TestPrivilegesThatCallsNeed(t *testing.T) {
	for _, privileges := range []Privileges{NoPrivileges, MonitorPrivileges, ConfigPrivileges, AllPrivileges} {
		lib := start(t, "h100x8-mig", WithPrivileges(privileges))
		d, empty := handle(t, lib, 4), handle(t, lib, 0)
		info, ret := d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_1_SLICE)
		is(t, ret, nvml.SUCCESS)
		// Nothing but these needs any.
		_, _, ret = d.GetMigMode()
		is(t, ret, nvml.SUCCESS)
		partition := gotten[nvml.Device](t)(d.GetMigDeviceHandleByIndex(0))
		gotten[int](t)(partition.GetGpuInstanceId())
		for _, call := range []struct {
			name  string
			needs Privileges
			ret   nvml.Return
		}{
			{"placements", MonitorPrivileges, second(d.GetGpuInstancePossiblePlacements(&info))},
			{"instance by ID", MonitorPrivileges, second(d.GetGpuInstanceById(1))},
			{"creation", ConfigPrivileges, second(d.CreateGpuInstance(&info))},
			{"compute mode", AllPrivileges, empty.SetComputeMode(nvml.COMPUTEMODE_DEFAULT)},
			{"MIG mode", AllPrivileges, second(empty.SetMigMode(nvml.DEVICE_MIG_ENABLE))},
		} {
			want := nvml.SUCCESS
			if privileges < call.needs {
				want = nvml.ERROR_NO_PERMISSION
			}
			if call.ret != want {
				t.Errorf("privileges %d: %s: %v, want %v", privileges, call.name, call.ret, want)
			}
		}
	}
}

func TestPrivilegesOfAProcess(t *testing.T) {
	dir := t.TempDir()
	status, caps := filepath.Join(dir, "status"), filepath.Join(dir, "nvidia-caps")
	if err := os.Mkdir(caps, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		effective, node string
		want            Privileges
	}{
		{"000001ffffffffff", "", AllPrivileges},
		{"0000000000200000", "", AllPrivileges},
		{"0000000000000000", "", NoPrivileges},
		{"00000000a80425fb", "", NoPrivileges},
		{"00000000a80425fb", "nvidia-cap2", MonitorPrivileges},
		{"00000000a80425fb", "nvidia-cap1", ConfigPrivileges},
	} {
		if err := os.WriteFile(status, []byte("Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t"+test.effective+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if test.node != "" {
			if err := os.WriteFile(filepath.Join(caps, test.node), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := ProcessPrivileges(status, dir); got != test.want || err != nil {
			t.Errorf("CapEff %s, %s: %d, %v, want %d", test.effective, test.node, got, err, test.want)
		}
	}
	if _, err := ProcessPrivileges(filepath.Join(dir, "none"), dir); err == nil {
		t.Error("there is no process")
	}
}
