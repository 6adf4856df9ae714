// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	values "github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mig"
	"github.com/tandem-gpu/tandem/simulated/models"
)

func is(t *testing.T, got, want nvml.Return) {
	t.Helper()
	if got != want {
		t.Fatalf("answer %d, want %d", got, want)
	}
}

func gotten[T any](t *testing.T) func(T, nvml.Return) T {
	return func(value T, ret nvml.Return) T {
		t.Helper()
		is(t, ret, nvml.SUCCESS)
		return value
	}
}

// profileOf is a GPU's profile by its NVML_GPU_INSTANCE_PROFILE_*.
func profileOf(t *testing.T, d nvml.Device, number int) *nvml.GpuInstanceProfileInfo {
	t.Helper()
	info := gotten[nvml.GpuInstanceProfileInfo](t)(d.GetGpuInstanceProfileInfo(number))
	return &info
}

func computeOf(t *testing.T, i nvml.GpuInstance, number int) *nvml.ComputeInstanceProfileInfo {
	t.Helper()
	info := gotten[nvml.ComputeInstanceProfileInfo](t)(i.GetComputeInstanceProfileInfo(number, 0))
	return &info
}

func enable(t *testing.T, d nvml.Device) {
	t.Helper()
	activation, ret := d.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	is(t, ret, nvml.SUCCESS)
	is(t, activation, nvml.SUCCESS)
}

func TestInstancesOfAGPU(t *testing.T) {
	d := handle(t, start(t, "h100x8"), 0)
	three := profileOf(t, d, nvml.GPU_INSTANCE_PROFILE_3_SLICE)
	if _, ret := d.CreateGpuInstance(three); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("with MIG off: %v", ret)
	}
	if count, ret := d.GetMaxMigDeviceCount(); count != 0 || ret != nvml.SUCCESS {
		t.Errorf("with MIG off: %d MIG devices (%v)", count, ret)
	}
	enable(t, d)
	if count, ret := d.GetMaxMigDeviceCount(); count != 7 || ret != nvml.SUCCESS {
		t.Errorf("%d MIG devices (%v)", count, ret)
	}
	at := func(start, size uint32) *nvml.GpuInstancePlacement {
		return &nvml.GpuInstancePlacement{Start: start, Size: size}
	}
	_, ret := d.CreateGpuInstanceWithPlacement(three, at(2, 4))
	is(t, ret, nvml.ERROR_INVALID_ARGUMENT)
	_, ret = d.CreateGpuInstanceWithPlacement(three, at(4, 3))
	is(t, ret, nvml.ERROR_INVALID_ARGUMENT)
	i := gotten[nvml.GpuInstance](t)(d.CreateGpuInstanceWithPlacement(three, at(4, 4)))
	one := profileOf(t, d, nvml.GPU_INSTANCE_PROFILE_1_SLICE)
	_, ret = d.CreateGpuInstanceWithPlacement(one, at(5, 1))
	is(t, ret, nvml.ERROR_INSUFFICIENT_RESOURCES)
	me := profileOf(t, d, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1)
	gotten[nvml.GpuInstance](t)(d.CreateGpuInstance(me))
	_, ret = d.CreateGpuInstance(me)
	is(t, ret, nvml.ERROR_INSUFFICIENT_RESOURCES)
	if left := gotten[int](t)(d.GetGpuInstanceRemainingCapacity(one)); left != 3 {
		t.Errorf("%d more 1g fit, want 3", left)
	}
	if left := gotten[int](t)(d.GetGpuInstanceRemainingCapacity(three)); left != 0 {
		t.Errorf("%d more 3g fit, want none", left)
	}
	activation, ret := d.SetMigMode(nvml.DEVICE_MIG_DISABLE)
	is(t, ret, nvml.SUCCESS)
	is(t, activation, nvml.ERROR_IN_USE)
	info := gotten[nvml.GpuInstanceInfo](t)(i.GetInfo())
	if info.Id != 2 || info.ProfileId != 9 || info.Placement != *at(4, 4) {
		t.Errorf("instance %+v", info)
	}
	is(t, i.Destroy(), nvml.SUCCESS)
	is(t, i.Destroy(), nvml.ERROR_INVALID_ARGUMENT)
	if again := gotten[nvml.GpuInstance](t)(d.CreateGpuInstanceWithPlacement(three, at(4, 4))); again != nil {
		info := gotten[nvml.GpuInstanceInfo](t)(again.GetInfo())
		if info.Id != 2 {
			t.Errorf("made again it has ID %d, want the same", info.Id)
		}
	}
}

func TestComputeInstancesShareAGPUInstance(t *testing.T) {
	lib := start(t, "h100x8")
	d := handle(t, lib, 0)
	enable(t, d)
	i := gotten[nvml.GpuInstance](t)(d.CreateGpuInstance(profileOf(t, d, nvml.GPU_INSTANCE_PROFILE_3_SLICE)))
	two, one := computeOf(t, i, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE), computeOf(t, i, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE)
	first := gotten[nvml.ComputeInstance](t)(i.CreateComputeInstance(two))
	second := gotten[nvml.ComputeInstance](t)(i.CreateComputeInstance(one))
	_, ret := i.CreateComputeInstance(one)
	is(t, ret, nvml.ERROR_INSUFFICIENT_RESOURCES)
	is(t, i.Destroy(), nvml.ERROR_IN_USE)
	a, b := gotten[nvml.Device](t)(d.GetMigDeviceHandleByIndex(0)), gotten[nvml.Device](t)(d.GetMigDeviceHandleByIndex(1))
	if _, ret := d.GetMigDeviceHandleByIndex(2); ret != nvml.ERROR_NOT_FOUND {
		t.Errorf("a third MIG device: %v", ret)
	}
	uuid := gotten[string](t)(b.GetUUID())
	if name := gotten[string](t)(b.GetName()); name != "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb" {
		t.Errorf("name %q", name)
	}
	attributes := gotten[nvml.DeviceAttributes](t)(a.GetAttributes())
	if attributes.MultiprocessorCount != 32 || attributes.GpuInstanceSliceCount != 3 || attributes.ComputeInstanceSliceCount != 2 {
		t.Errorf("attributes %+v", attributes)
	}
	parent := gotten[nvml.Device](t)(b.GetDeviceHandleFromMigDeviceHandle())
	if parent != d {
		t.Error("the parent is another GPU")
	}
	if is, _ := b.IsMigDeviceHandle(); !is {
		t.Error("it says that it is none")
	}
	if found := gotten[nvml.Device](t)(lib.DeviceGetHandleByUUID(uuid)); gotten[string](t)(found.GetUUID()) != uuid {
		t.Error("found another by UUID")
	}

	is(t, second.Destroy(), nvml.SUCCESS)
	_, ret = b.GetUUID()
	is(t, ret, nvml.ERROR_INVALID_ARGUMENT)
	_, ret = lib.DeviceGetHandleByUUID(uuid)
	is(t, ret, nvml.ERROR_NOT_FOUND)
	second = gotten[nvml.ComputeInstance](t)(i.CreateComputeInstance(one))
	if again := gotten[nvml.Device](t)(d.GetMigDeviceHandleByIndex(1)); gotten[string](t)(again.GetUUID()) != uuid {
		t.Error("made again it has another UUID")
	}
	_, ret = b.GetUUID()
	is(t, ret, nvml.SUCCESS)
	is(t, second.Destroy(), nvml.SUCCESS)
	is(t, first.Destroy(), nvml.SUCCESS)
}

// What is another instance has another UUID: on another GPU, at another place, or of another profile at the same place.
func TestUUIDsOfPartitions(t *testing.T) {
	lib := start(t, "h100x8")
	seen := map[string]bool{}
	for _, place := range []int{0, 1} {
		d := handle(t, lib, place)
		enable(t, d)
		for _, shape := range []struct {
			profile, compute int
			start            uint32
		}{
			{nvml.GPU_INSTANCE_PROFILE_3_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE, 0},
			{nvml.GPU_INSTANCE_PROFILE_3_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 0},
			{nvml.GPU_INSTANCE_PROFILE_3_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE, 4},
			{nvml.GPU_INSTANCE_PROFILE_4_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 0},
		} {
			info := profileOf(t, d, shape.profile)
			at := nvml.GpuInstancePlacement{Start: shape.start, Size: 4}
			i := gotten[nvml.GpuInstance](t)(d.CreateGpuInstanceWithPlacement(info, &at))
			compute := gotten[nvml.ComputeInstance](t)(i.CreateComputeInstance(computeOf(t, i, shape.compute)))
			uuid := gotten[string](t)(gotten[nvml.Device](t)(d.GetMigDeviceHandleByIndex(0)).GetUUID())
			if seen[uuid] {
				t.Errorf("GPU %d, %+v: another partition has UUID %s", place, shape, uuid)
			}
			seen[uuid] = true
			is(t, compute.Destroy(), nvml.SUCCESS)
			is(t, i.Destroy(), nvml.SUCCESS)
		}
	}
}

func TestClientsKeepInstances(t *testing.T) {
	dir := t.TempDir()
	lib := start(t, "h100x8", WithDir(dir))
	d := handle(t, lib, 0)
	faults := func(clients ...Client) {
		t.Helper()
		if err := WriteFaults(dir, Faults{GPUs: []GPUFaults{{GPU: "0", Clients: clients}}}); err != nil {
			t.Fatal(err)
		}
	}
	faults(Client{PID: 7})
	activation, _ := d.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	is(t, activation, nvml.ERROR_IN_USE)
	if current, pending, _ := d.GetMigMode(); current != 0 || pending != 1 {
		t.Errorf("mode %d, pending %d", current, pending)
	}
	faults()
	enable(t, d)
	i := gotten[nvml.GpuInstance](t)(d.CreateGpuInstance(profileOf(t, d, nvml.GPU_INSTANCE_PROFILE_2_SLICE)))
	one := computeOf(t, i, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE)
	first := gotten[nvml.ComputeInstance](t)(i.CreateComputeInstance(one))
	second := gotten[nvml.ComputeInstance](t)(i.CreateComputeInstance(one))
	faults(Client{PID: 8, Partition: "0+2.1+1"})
	is(t, first.Destroy(), nvml.SUCCESS)
	is(t, second.Destroy(), nvml.ERROR_IN_USE)
	m := gotten[nvml.Device](t)(d.GetMigDeviceHandleByIndex(0))
	if processes := gotten[[]nvml.ProcessInfo](t)(m.GetComputeRunningProcesses()); len(processes) != 1 || processes[0].Pid != 8 {
		t.Errorf("processes %+v", processes)
	}
	faults()
	is(t, second.Destroy(), nvml.SUCCESS)
	faults(Client{PID: 9, Partition: "0+2"})
	is(t, i.Destroy(), nvml.ERROR_IN_USE)
	faults()
	is(t, i.Destroy(), nvml.SUCCESS)
}

// A library of another process sees the same, and what one leaves half made another finds.
func TestProcessesShareTheState(t *testing.T) {
	dir := os.Getenv("SIMULATED_MIG_DIR")
	if dir != "" {
		lib := start(t, "h100x8", WithDir(dir))
		d := handle(t, lib, 3)
		if current, _, _ := d.GetMigMode(); current != nvml.DEVICE_MIG_ENABLE {
			t.Fatal("the mode of another process does not count here")
		}
		gotten[nvml.GpuInstance](t)(d.CreateGpuInstance(profileOf(t, d, nvml.GPU_INSTANCE_PROFILE_4_SLICE)))
		os.Exit(0) // as one that is killed before it can make a compute instance
	}
	dir = t.TempDir()
	lib := start(t, "h100x8", WithDir(dir))
	d := handle(t, lib, 3)
	enable(t, d)
	other := exec.Command(os.Args[0], "-test.run=^TestProcessesShareTheState$")
	other.Env = append(os.Environ(), "SIMULATED_MIG_DIR="+dir)
	if out, err := other.CombinedOutput(); err != nil {
		t.Fatalf("other process: %v\n%s", err, out)
	}
	found := gotten[[]nvml.GpuInstance](t)(d.GetGpuInstances(profileOf(t, d, nvml.GPU_INSTANCE_PROFILE_4_SLICE)))
	if len(found) != 1 {
		t.Fatalf("%d instances, want the other process's", len(found))
	}
	if _, ret := d.CreateGpuInstance(profileOf(t, d, nvml.GPU_INSTANCE_PROFILE_7_SLICE)); ret != nvml.ERROR_INSUFFICIENT_RESOURCES {
		t.Errorf("over the other process's: %v", ret)
	}
	is(t, found[0].Destroy(), nvml.SUCCESS)
}

func TestStateOfAnotherBootIsVoid(t *testing.T) {
	dir := t.TempDir()
	d := handle(t, start(t, "h100x8", WithDir(dir)), 0)
	enable(t, d)
	path := filepath.Join(dir, MIGDir, MIGStateFile)
	state, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	edited := strings.Replace(string(state), bootID(), "another", 1)
	if err := os.WriteFile(path, []byte(edited), 0o644); err != nil {
		t.Fatal(err)
	}
	if current, _, ret := d.GetMigMode(); current != nvml.DEVICE_MIG_DISABLE || ret != nvml.SUCCESS {
		t.Errorf("mode %d (%v) after a boot", current, ret)
	}
	for what, content := range map[string]string{"damaged": "{", "of a later version": `{"boots": "x"}`} {
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, _, ret := d.GetMigMode(); ret != nvml.ERROR_UNKNOWN {
			t.Errorf("%s: %v", what, ret)
		}
	}
}

func TestStateGoesWithTheProfile(t *testing.T) {
	dir := t.TempDir()
	profile, err := Load("h100x8")
	if err != nil {
		t.Fatal(err)
	}
	options := MaterializeOptions{PlainDeviceFiles: true}
	mode := func(what string, want int) nvml.Device {
		t.Helper()
		if err := Materialize(dir, profile, options); err != nil {
			t.Fatal(err)
		}
		lib := New(profile, WithDir(dir))
		is(t, lib.Init(), nvml.SUCCESS)
		d := handle(t, lib, 0)
		if current, _, ret := d.GetMigMode(); current != want || ret != nvml.SUCCESS {
			t.Errorf("%s: mode %d (%v), want %d", what, current, ret, want)
		}
		return d
	}
	enable(t, mode("at first", 0))
	mode("with the same profile", 1)
	profile.GPUs[1].MIGEnabled = true
	mode("with another", 0)
}

func TestAmpereWithoutReset(t *testing.T) {
	d := handle(t, start(t, "a30x4"), 3)
	activation, ret := d.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	is(t, ret, nvml.SUCCESS)
	is(t, activation, nvml.ERROR_RESET_REQUIRED)
	if current, pending, _ := d.GetMigMode(); current != 0 || pending != 1 {
		t.Errorf("mode %d, pending %d", current, pending)
	}
}

// Random instances on every model: what the simulator has room for is what package mig says fits, and what go-nvlib calls the
// partitions is what the tables call them.
func TestRoomIsThatOfPackageMIG(t *testing.T) {
	for _, model := range models.All() {
		t.Run(model.Name, func(t *testing.T) {
			profile, err := Load("a30x4")
			if err != nil {
				t.Fatal(err)
			}
			a30 := profile.Models["a30"]
			a30.MIG, a30.MemoryMiB = model.Name, model.Total.MemoryBytes/mebibyte
			profile.Models["a30"] = a30
			for i := range profile.GPUs {
				profile.GPUs[i].Partitions = nil
			}
			lib := New(profile)
			is(t, lib.Init(), nvml.SUCCESS)
			defer lib.Shutdown()
			d := handle(t, lib, 1)
			uuid, _ := d.GetUUID()
			random := rand.New(rand.NewPCG(1, 2))
			var taken []mig.Instance
			geometry := mig.NewGeometry(model.Offered())
			for range 3000 {
				if len(taken) > 0 && random.IntN(5) < 2 {
					i := random.IntN(len(taken))
					destroyAt(t, d, taken[i].Placement)
					taken = slices.Delete(taken, i, i+1)
					continue
				}
				p := model.Profiles[random.IntN(len(model.Profiles))]
				place := p.Placements[random.IntN(len(p.Placements))]
				slot := mig.Instance{ProfileID: p.ID, Placement: place}
				want := geometry.Fits(taken, slot)
				at := nvml.GpuInstancePlacement{Start: uint32(place.Start), Size: uint32(place.Size)}
				i, ret := d.CreateGpuInstanceWithPlacement(profileOf(t, d, p.Enum), &at)
				if (ret == nvml.SUCCESS) != want {
					t.Fatalf("%s at %s beside %v: simulator %v, package mig %v", p.Name, place, taken, ret, want)
				}
				if ret != nvml.SUCCESS {
					continue
				}
				taken = append(taken, slot)
				gotten[nvml.ComputeInstance](t)(i.CreateComputeInstance(computeOf(t, i, p.ComputeID)))
			}
			dev, err := device.New(lib).NewDeviceByUUID(uuid)
			if err != nil {
				t.Fatal(err)
			}
			partitions, err := dev.GetMigDevices()
			if err != nil || len(partitions) != len(taken) {
				t.Fatalf("%d MIG devices (%v), want %d", len(partitions), err, len(taken))
			}
			var got, want []string
			for _, p := range partitions {
				name, err := p.GetProfile()
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, name.String())
			}
			for _, slot := range taken {
				i := slices.IndexFunc(model.Profiles, func(p models.Profile) bool { return p.ID == slot.ProfileID })
				want = append(want, model.Profiles[i].Name)
			}
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("go-nvlib names %v, want %v", got, want)
			}
		})
	}
}

func destroyAt(t *testing.T, d nvml.Device, place values.Placement) {
	t.Helper()
	for id := range migInstances {
		i, ret := d.GetGpuInstanceById(id)
		if ret == nvml.ERROR_NOT_FOUND {
			continue
		}
		is(t, ret, nvml.SUCCESS)
		info := gotten[nvml.GpuInstanceInfo](t)(i.GetInfo())
		if int(info.Placement.Start) != place.Start || int(info.Placement.Size) != place.Size {
			continue
		}
		c := gotten[nvml.ComputeInstance](t)(i.GetComputeInstanceById(0))
		is(t, c.Destroy(), nvml.SUCCESS)
		is(t, i.Destroy(), nvml.SUCCESS)
		return
	}
	t.Fatalf("nothing at %s", place)
}
