// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/models"
)

// administrator is NVML in another process of the machine.
func (m machine) administrator(t *testing.T) *simulated.Library {
	t.Helper()
	library, err := simulated.Machine(m.dir, func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	must(t, library.Init())
	t.Cleanup(func() { library.Shutdown() })
	return library
}

func must(t *testing.T, ret gonvml.Return) {
	t.Helper()
	if ret != gonvml.SUCCESS {
		t.Fatal(ret)
	}
}

func got[T any](t *testing.T) func(T, gonvml.Return) T {
	return func(value T, ret gonvml.Return) T {
		t.Helper()
		must(t, ret)
		return value
	}
}

// gpu is the one at an index as an administrator gets at it.
func gpu(t *testing.T, library gonvml.Interface, index int) gonvml.Device {
	t.Helper()
	return got[gonvml.Device](t)(library.DeviceGetHandleByIndex(index))
}

// cut makes a GPU instance of the profile with that enum, and a compute instance of that many slices in it.
func cut(t *testing.T, d gonvml.Device, number, start, slices int) gonvml.GpuInstance {
	t.Helper()
	info := got[gonvml.GpuInstanceProfileInfo](t)(d.GetGpuInstanceProfileInfo(number))
	places := got[[]gonvml.GpuInstancePlacement](t)(d.GetGpuInstancePossiblePlacements(&info))
	place := gonvml.GpuInstancePlacement{Start: uint32(start), Size: places[0].Size}
	instance := got[gonvml.GpuInstance](t)(d.CreateGpuInstanceWithPlacement(&info, &place))
	part(t, instance, slices)
	return instance
}

func part(t *testing.T, instance gonvml.GpuInstance, slices int) {
	t.Helper()
	for number := range gonvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		info, ret := instance.GetComputeInstanceProfileInfo(number, 0)
		if ret == gonvml.SUCCESS && int(info.SliceCount) == slices {
			got[gonvml.ComputeInstance](t)(instance.CreateComputeInstance(&info))
			return
		}
	}
	if slices > 0 {
		t.Fatalf("no compute instance of %d slices", slices)
	}
}

// describe is a line a partition, without UUIDs.
func describe(partitions []device.Partition) []string {
	var lines []string
	for _, p := range partitions {
		place := strings.TrimPrefix(p.Ref.String(), p.Ref.GPU+"@")
		lines = append(lines, strings.TrimSpace(fmt.Sprintf("%s %s gi%d ci%d %d SM %s",
			place, p.Profile, p.GPUInstance, p.ComputeInstance, p.Capacity.Multiprocessors, p.Health.Reason)))
	}
	return lines
}

func TestStaticPartitions(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	inv := m.open(t).Inventory()
	want := [][]string{
		{"0+2 2g.20gb gi3 ci0 28 SM", "2+1 1g.10gb gi9 ci0 14 SM", "3+1 1g.10gb+me gi10 ci0 14 SM", "4+4 3g.40gb gi2 ci0 42 SM"},
		{"0+4 3g.40gb gi1 ci0 42 SM", "4+4 3g.40gb gi2 ci0 42 SM"},
		{"0+4.0+2 2c.3g.40gb gi1 ci0 28 SM", "0+4.2+1 1c.3g.40gb gi1 ci1 14 SM", "6+2 1g.20gb gi6 ci0 14 SM"},
		{"0+4 4g.40gb gi1 ci0 56 SM", "4+4 3g.40gb gi2 ci0 42 SM"},
		{
			"0+1 1g.10gb gi7 ci0 14 SM", "1+1 1g.10gb gi8 ci0 14 SM", "2+1 1g.10gb gi9 ci0 14 SM", "3+1 1g.10gb gi10 ci0 14 SM",
			"4+1 1g.10gb gi11 ci0 14 SM", "5+1 1g.10gb gi12 ci0 14 SM", "6+1 1g.10gb gi13 ci0 14 SM",
		},
		nil, nil, nil,
	}
	uuids := map[string]bool{}
	for i, g := range inv.GPUs {
		if diff := cmp.Diff(want[i], describe(g.Partitions)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", g.Name(), diff)
		}
		if !g.MIGCapable || g.MIGEnabled != (i < 6) {
			t.Errorf("%s: MIG capable %v, enabled %v", g.Name(), g.MIGCapable, g.MIGEnabled)
		}
		for _, p := range g.Partitions {
			if p.Parent != g.Minor || !strings.HasPrefix(p.UUID, "MIG-") || uuids[p.UUID] || p.Capacity.MemoryBytes == 0 {
				t.Errorf("%s: %+v", g.Name(), p)
			}
			uuids[p.UUID] = true
		}
	}
	if got, want := inv.GPUs[0].Partitions[2].Name(), "gpu-0-mig-1g10gb-me-20-3"; got != want {
		t.Errorf("name is %s, want %s", got, want)
	}
}

// What the door reads is what the table says, for all models and with MIG off and on.
func TestProfilesOfEveryModel(t *testing.T) {
	for _, model := range models.All() {
		t.Run(model.Name, func(t *testing.T) {
			m := newMachine(t, "a30x4")
			for name, of := range m.profile.Models {
				of.MIG, of.MemoryMiB = model.Name, model.Total.MemoryBytes>>20
				m.profile.Models[name] = of
			}
			for i := range m.profile.GPUs {
				m.profile.GPUs[i].Partitions = nil
			}
			m.materialize(t)
			want := model.Offered()
			slices.SortFunc(want, func(a, b device.Profile) int { return a.ID - b.ID })
			for _, g := range m.open(t).Inventory().GPUs[:2] {
				if diff := cmp.Diff(want, g.Profiles); diff != "" {
					t.Errorf("MIG enabled %v (-want +got):\n%s", g.MIGEnabled, diff)
				}
			}
		})
	}
}

func TestPartitionsAreFollowed(t *testing.T) {
	m := newMachine(t, "a30x4")
	node := m.open(t)
	d := gpu(t, m.administrator(t), 1)
	check := func(what string, want ...string) []device.Partition {
		t.Helper()
		changed := node.Changed()
		partitions := scan(t, node).GPUs[1].Partitions
		if diff := cmp.Diff(want, describe(partitions)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
		select {
		case <-changed:
		default:
			t.Errorf("%s: no signal", what)
		}
		return partitions
	}
	instance := cut(t, d, gonvml.GPU_INSTANCE_PROFILE_2_SLICE, 2, 2)
	first := check("made", "2+2 2g.12gb gi2 ci0 28 SM")[0]

	info := got[gonvml.ComputeInstanceProfileInfo](t)(
		instance.GetComputeInstanceProfileInfo(gonvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 0))
	all := got[[]gonvml.ComputeInstance](t)(instance.GetComputeInstances(&info))
	must(t, all[0].Destroy())
	check("without its compute instance", "2+2 2g.12gb gi2 ci0 28 SM")
	part(t, instance, 2)
	if again := check("made again", "2+2 2g.12gb gi2 ci0 28 SM")[0]; again.UUID != first.UUID || again.Ref != first.Ref {
		t.Errorf("made again: %s %s, before %s %s", again.UUID, again.Ref, first.UUID, first.Ref)
	}
	all = got[[]gonvml.ComputeInstance](t)(instance.GetComputeInstances(&info))
	must(t, all[0].Destroy())
	if empty := check("without a compute instance", "2+2 2g.12gb gi2 ci0 28 SM")[0]; empty.UUID != "" {
		t.Errorf("without a compute instance: %+v", empty)
	}
	must(t, instance.Destroy())
	check("removed")
	if activation, ret := d.SetMigMode(gonvml.DEVICE_MIG_DISABLE); activation != gonvml.SUCCESS || ret != gonvml.SUCCESS {
		t.Fatal(activation, ret)
	}
	check("MIG off")
}

// Without a call: the function that runs the node gets the change.
func TestRunNoticesPartitions(t *testing.T) {
	m := newMachine(t, "a30x4")
	m.options.Interval = 20 * time.Millisecond
	node := m.open(t)
	ctx, stop := context.WithCancel(t.Context())
	ran := make(chan error)
	go func() { ran <- node.Run(ctx) }()
	changed := node.Changed()
	cut(t, gpu(t, m.administrator(t), 1), gonvml.GPU_INSTANCE_PROFILE_2_SLICE, 2, 2)
	<-changed
	if got := node.Inventory().GPUs[1].Partitions; len(got) != 1 {
		t.Errorf("partitions %v", describe(got))
	}
	stop()
	if err := <-ran; err != nil {
		t.Error(err)
	}
}

// One that cannot be read takes nothing with it, and is not gone.
func TestOddPartitions(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	for call, unhealthy := range map[string]int{
		"GetMigMode": 0, "GetMaxMigDeviceCount": 2, "GetMigDeviceHandleByIndex": 1, "GetGpuInstanceById": 1,
		"MigDevice.GetUUID": 1, "MigDevice.GetGpuInstanceId": 1, "MigDevice.GetComputeInstanceId": 1,
		"GpuInstance.GetInfo": 1, "GpuInstance.GetComputeInstanceById": 1, "ComputeInstance.GetInfo": 1,
		"GetGpuInstances": 0, "GetGpuInstanceProfileInfo": 0, "GetGpuInstancePossiblePlacements": 0,
	} {
		t.Run(call, func(t *testing.T) {
			m.fault(t)
			node := m.open(t)
			before := node.Inventory()
			fault := simulated.CallFault{Return: "ERROR_UNKNOWN", Times: 1}
			m.fault(t, simulated.GPUFaults{GPU: "1", Calls: map[string]simulated.CallFault{call: fault}})
			after := scan(t, node)
			var ill int
			for i, p := range after.GPUs[1].Partitions {
				if !p.Health.Healthy() {
					ill++
					after.GPUs[1].Partitions[i].Health = device.Health{}
				}
			}
			if ill != unhealthy {
				t.Errorf("%d partitions are unhealthy, want %d", ill, unhealthy)
			}
			if diff := cmp.Diff(before, after); diff != "" {
				t.Errorf("besides the health (-before +after):\n%s", diff)
			}
			if diff := cmp.Diff(before, scan(t, node)); diff != "" {
				t.Errorf("after it (-before +after):\n%s", diff)
			}
		})
	}
}

// GPU instances without compute instances are in the way of others, and stay so while they cannot be listed.
func TestEmptyInstances(t *testing.T) {
	m := newMachine(t, "a30x4")
	node := m.open(t)
	d := gpu(t, m.administrator(t), 1)
	cut(t, d, gonvml.GPU_INSTANCE_PROFILE_2_SLICE, 0, 0)
	cut(t, d, gonvml.GPU_INSTANCE_PROFILE_1_SLICE, 3, 0)
	want := []string{"0+2 2g.12gb gi1 ci0 28 SM", "3+1 1g.6gb gi6 ci0 14 SM"}
	for _, call := range []string{"none", "GetGpuInstances", "GetMaxMigDeviceCount"} {
		fault := simulated.CallFault{Return: "ERROR_UNKNOWN"}
		m.fault(t, simulated.GPUFaults{GPU: "1", Calls: map[string]simulated.CallFault{call: fault}})
		if diff := cmp.Diff(want, describe(scan(t, node).GPUs[1].Partitions)); diff != "" {
			t.Errorf("without %s (-want +got):\n%s", call, diff)
		}
	}
}

// A profile that the driver cannot describe at the moment does not hide that partitions were removed.
func TestUnreadableProfileHidesNoRemoval(t *testing.T) {
	m := newMachine(t, "a30x4")
	d := gpu(t, m.administrator(t), 1)
	empty := cut(t, d, gonvml.GPU_INSTANCE_PROFILE_1_SLICE, 3, 0)
	node := m.open(t)
	if got := describe(scan(t, node).GPUs[1].Partitions); len(got) != 1 {
		t.Fatal(got)
	}
	must(t, empty.Destroy())
	m.fault(t, simulated.GPUFaults{GPU: "1", Calls: map[string]simulated.CallFault{"GetGpuInstanceProfileInfo": {Return: "ERROR_UNKNOWN"}}})
	if got := describe(scan(t, node).GPUs[1].Partitions); len(got) != 0 {
		t.Errorf("still there: %v", got)
	}
}

func TestProfilesAreReadAgainAfterAFault(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	fault := simulated.CallFault{Return: "ERROR_UNKNOWN", Skip: 2, Times: 1}
	m.fault(t, simulated.GPUFaults{GPU: "1", Calls: map[string]simulated.CallFault{"GetGpuInstancePossiblePlacements": fault}})
	node := m.open(t)
	inv := node.Inventory()
	if got := len(inv.GPUs[1].Profiles); got != len(inv.GPUs[0].Profiles)-1 {
		t.Errorf("%d profiles", got)
	}
	if inv = scan(t, node); !cmp.Equal(inv.GPUs[0].Profiles, inv.GPUs[1].Profiles) {
		t.Errorf("profiles are not read again: %v", inv.GPUs[1].Profiles)
	}
}

func TestPartitionsShareTheirGPUsHealth(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	node := m.open(t)
	m.fault(t, simulated.GPUFaults{GPU: "0", Lost: true})
	partitions := scan(t, node).GPUs[0].Partitions
	edits, err := node.ContainerEdits(t.Context())
	if err != nil || len(partitions) == 0 {
		t.Fatal(partitions, err)
	}
	for _, p := range partitions {
		if edits.Failed[p.UUID] == nil {
			t.Errorf("%s has container edits", p.Name())
		}
	}
}

func TestMissingCapabilityNode(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	node := m.open(t)
	// gpu1/gi2/ci0/access.
	// Without the number, only a node of the host says which device it is.
	m.procDevices(t, "")
	if err := os.Remove(filepath.Join(m.dir, "driver/dev/nvidia-caps/nvidia-cap157")); err != nil {
		t.Fatal(err)
	}
	want := []string{"0+4 3g.40gb gi1 ci0 42 SM", "4+4 3g.40gb gi2 ci0 42 SM NoDeviceNode"}
	if diff := cmp.Diff(want, describe(scan(t, node).GPUs[1].Partitions)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// An agent without privileges cannot read partitions, and says what it lacks.
func TestPartitionsWithoutPrivileges(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	profile, err := simulated.Load(filepath.Join(m.dir, simulated.ProfileFile))
	if err != nil {
		t.Fatal(err)
	}
	for privileges, readable := range map[simulated.Privileges]bool{simulated.NoPrivileges: false, simulated.MonitorPrivileges: true} {
		m.options.OpenLibrary = func() (gonvml.Interface, error) {
			return simulated.New(profile, simulated.WithDir(m.dir), simulated.WithPrivileges(privileges)), nil
		}
		node := m.open(t)
		g := node.Inventory().GPUs[1]
		_, err := node.Partitions(t.Context(), g.UUID)
		if (err == nil) != readable || (len(g.Partitions) > 0) != readable {
			t.Errorf("privileges %d: %d partitions, %v; readable should be %t", privileges, len(g.Partitions), err, readable)
		}
		if !readable && !strings.Contains(fmt.Sprint(err), "migAccess") {
			t.Errorf("error %v does not say what is lacking", err)
		}
	}
}
