// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/simulated"
)

// place is where a profile of a GPU goes that starts at a slice.
func place(t *testing.T, g device.GPU, profile string, start int) (device.Ref, device.Profile) {
	t.Helper()
	i := slices.IndexFunc(g.Profiles, func(p device.Profile) bool { return p.Name == profile })
	if i < 0 {
		t.Fatalf("%s has no %s", g.Name(), profile)
	}
	size := g.Profiles[i].Placements[0].Size
	return device.Ref{GPU: g.UUID, Placement: device.Placement{Start: start, Size: size}}, g.Profiles[i]
}

func create(t *testing.T, node *nvml.Node, g device.GPU, profile string, start int) device.Partition {
	t.Helper()
	ref, p := place(t, g, profile, start)
	made, err := node.Create(t.Context(), ref, p)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func partitions(t *testing.T, node *nvml.Node, uuid string) []device.Partition {
	t.Helper()
	all, err := node.Partitions(t.Context(), uuid)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestCreateAndDestroy(t *testing.T) {
	m := newMachine(t, "h100x8")
	node := m.open(t)
	uuid := node.Inventory().GPUs[3].UUID
	off, whole := place(t, node.Inventory().GPUs[3], "7g.80gb", 0)
	if _, err := node.Create(t.Context(), off, whole); err == nil || !strings.Contains(err.Error(), "MIG mode is off") {
		t.Errorf("with MIG off: %v", err)
	}
	now := func() device.GPU { return node.Inventory().GPUs[3] }
	for range 2 {
		if err := node.EnableMIG(t.Context(), uuid); err != nil {
			t.Fatal(err)
		}
	}
	if !now().MIGEnabled {
		t.Fatal("the inventory does not know that MIG is on")
	}
	changed := node.Changed()
	first := create(t, node, now(), "3g.40gb", 4)
	<-changed
	second := create(t, node, now(), "1g.10gb+me", 2)
	if diff := cmp.Diff([]device.Partition{second, first}, now().Partitions, indices); diff != "" {
		t.Errorf("inventory (-made +known):\n%s", diff)
	}
	want := []string{"2+1 1g.10gb+me gi9 ci0 16 SM", "4+4 3g.40gb gi2 ci0 60 SM"}
	if diff := cmp.Diff(want, describe(partitions(t, node, uuid))); diff != "" {
		t.Errorf("partitions (-want +got):\n%s", diff)
	}
	known := now()
	if diff := cmp.Diff(known, scan(t, node).GPUs[3]); diff != "" {
		t.Errorf("a scan differs (-known +scanned):\n%s", diff)
	}
	ref, profile := place(t, now(), "2g.20gb", 4)
	if _, err := node.Create(t.Context(), ref, profile); err == nil || !strings.Contains(err.Error(), "2g.20gb") {
		t.Errorf("in the place of another: %v", err)
	}
	if err := node.DisableMIG(t.Context(), uuid); err == nil || !strings.Contains(err.Error(), second.Name()) {
		t.Errorf("MIG off with partitions: %v", err)
	}
	for range 2 {
		if err := node.Destroy(t.Context(), first.Ref); err != nil {
			t.Fatal(err)
		}
	}
	again := create(t, node, now(), "3g.40gb", 4)
	if again.UUID != first.UUID || again.Ref != first.Ref || again.GPUInstance != first.GPUInstance {
		t.Errorf("made again: %+v, before %+v", again, first)
	}
	for _, ref := range []device.Ref{again.Ref, second.Ref} {
		if err := node.Destroy(t.Context(), ref); err != nil {
			t.Fatal(err)
		}
	}
	if err := node.DisableMIG(t.Context(), uuid); err != nil || now().MIGEnabled || len(now().Partitions) > 0 {
		t.Errorf("MIG off: %v, inventory %+v", err, now())
	}
	if got := partitions(t, node, uuid); len(got) > 0 {
		t.Errorf("partitions without MIG: %v", got)
	}
}

// indices of others change when a partition comes or goes.
var indices = cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".Index" }, cmp.Ignore())

// A fault at any call leaves what was there, and once it is gone the same succeeds.
func TestFaultsOfCreate(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	node := m.open(t)
	before := node.Inventory()
	g := before.GPUs[1]
	m.fault(t)
	if err := node.Destroy(t.Context(), g.Partitions[1].Ref); err != nil {
		t.Fatal(err)
	}
	rest := partitions(t, node, g.UUID)
	ref, profile := place(t, g, "2g.20gb", 4)
	failures := 0
	for _, call := range []string{
		"GetMigMode", "CreateGpuInstanceWithPlacement", "GpuInstance.GetInfo",
		"GpuInstance.GetComputeInstanceProfileInfo", "GpuInstance.CreateComputeInstance", "GetMaxMigDeviceCount",
		"GetMigDeviceHandleByIndex", "MigDevice.GetUUID", "MigDevice.GetGpuInstanceId", "MigDevice.GetComputeInstanceId",
		"MigDevice.GetIndex", "ComputeInstance.GetInfo",
	} {
		for _, ret := range []string{"ERROR_UNKNOWN", "ERROR_GPU_IS_LOST", "ERROR_INSUFFICIENT_RESOURCES"} {
			// No call is made more often than once for each MIG device that there can be.
			for skip := range 7 {
				m.fault(t, simulated.GPUFaults{GPU: "1", Calls: map[string]simulated.CallFault{call: {Return: ret, Skip: skip, Times: 1}}})
				_, err := node.Create(t.Context(), ref, profile)
				m.fault(t)
				if err == nil {
					if err := node.Destroy(t.Context(), ref); err != nil {
						t.Fatal(err)
					}
				}
				if diff := cmp.Diff(rest, partitions(t, node, g.UUID)); diff != "" {
					t.Fatalf("%s %s at call %d (%v): (-before +after):\n%s", call, ret, skip, err, diff)
				}
				if err != nil {
					failures++
				}
			}
		}
	}
	if failures < 3*12 {
		t.Errorf("only %d faults struck", failures)
	}
	after := scan(t, node)
	after.GPUs[1], before.GPUs[1] = device.GPU{}, device.GPU{}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("other GPUs (-before +after):\n%s", diff)
	}
}

// A destroy that fails leaves the rest of the partition where it was, and visible; the next one removes it.
func TestFaultsOfDestroy(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	node := m.open(t)
	g := node.Inventory().GPUs[0]
	victim, others := g.Partitions[3], g.Partitions[:3]
	failures := 0
	for _, call := range []string{
		"GetMigMode", "GetGpuInstanceProfileInfo", "GetGpuInstances", "GpuInstance.GetInfo",
		"GpuInstance.GetComputeInstanceProfileInfo", "GpuInstance.GetComputeInstances", "ComputeInstance.Destroy",
		"GpuInstance.Destroy",
	} {
		for skip := 0; ; skip++ {
			faults := map[string]simulated.CallFault{
				"GetGpuInstanceById": {Return: "ERROR_UNKNOWN"}, // so that it looks at all instances
				call:                 {Return: "ERROR_UNKNOWN", Skip: skip, Times: 1},
			}
			m.fault(t, simulated.GPUFaults{GPU: "0", Calls: faults})
			err := node.Destroy(t.Context(), victim.Ref)
			m.fault(t)
			left := partitions(t, node, g.UUID)
			if err != nil {
				failures++
				if !slices.ContainsFunc(left, func(p device.Partition) bool { return p.Ref == victim.Ref }) {
					t.Fatalf("%s at call %d failed (%v), and what is left cannot be seen", call, skip, err)
				}
				if err := node.Destroy(t.Context(), victim.Ref); err != nil {
					t.Fatalf("%s at call %d: again without the fault: %v", call, skip, err)
				}
			}
			if diff := cmp.Diff(others, partitions(t, node, g.UUID), indices); diff != "" {
				t.Fatalf("%s at call %d: others (-before +after):\n%s", call, skip, diff)
			}
			create(t, node, g, victim.Profile, victim.Ref.Placement.Start)
			if err == nil {
				break
			}
		}
	}
	if failures < 8 {
		t.Errorf("only %d faults struck", failures)
	}
}

// What an operation has done is known, also where the driver does not say afterwards what is on the GPU.
func TestDriverThatDoesNotSayWhatIsThere(t *testing.T) {
	m := newMachine(t, "h100x8")
	node := m.open(t)
	uuid := node.Inventory().GPUs[0].UUID
	now := func() device.GPU { return node.Inventory().GPUs[0] }
	// unhealthy does something with faults from one more call of each name on, until all calls that it needs itself are spared.
	unhealthy := func(do func() error, calls ...string) {
		t.Helper()
		for skip := 0; ; skip++ {
			faults := map[string]simulated.CallFault{}
			for _, call := range calls {
				faults[call] = simulated.CallFault{Return: "ERROR_UNKNOWN", Skip: skip}
			}
			m.fault(t, simulated.GPUFaults{GPU: "0", Calls: faults})
			if do() == nil {
				return
			}
			m.fault(t)
		}
	}
	unhealthy(func() error { return node.EnableMIG(t.Context(), uuid) }, "GetMigMode")
	if !now().MIGEnabled {
		t.Error("the inventory does not know that MIG is on")
	}
	m.fault(t)
	profiles := len(scan(t, node).GPUs[0].Profiles)

	ref, profile := place(t, now(), "3g.40gb", 4)
	var made device.Partition
	unhealthy(func() (err error) {
		made, err = node.Create(t.Context(), ref, profile)
		return err
	}, "GetMaxMigDeviceCount")
	if known := now().Partitions; len(known) != 1 || known[0].UUID != made.UUID {
		t.Errorf("the inventory has %v, made was %s", describe(known), made.Name())
	}
	m.fault(t)
	scan(t, node)
	for _, calls := range [][]string{
		{"GetMaxMigDeviceCount"}, {"GetGpuInstances"}, {"GetMigMode"}, {"GetMaxMigDeviceCount", "GetGpuInstances"},
	} {
		unhealthy(func() error { return node.Destroy(t.Context(), ref) }, calls...)
		for _, known := range []device.Inventory{node.Inventory(), scan(t, node)} {
			if got := known.GPUs[0].Partitions; len(got) > 0 {
				t.Errorf("without %v: the inventory has %v, which is destroyed", calls, describe(got))
			}
		}
		m.fault(t)
		create(t, node, now(), "3g.40gb", 4)
	}
	if got := len(scan(t, node).GPUs[0].Profiles); got != profiles {
		t.Errorf("%d profiles, want %d", got, profiles)
	}
}

// The first scan after a change sees what an administrator has changed since.
func TestScanAfterAChange(t *testing.T) {
	m := newMachine(t, "a30x4")
	node := m.open(t)
	g := node.Inventory().GPUs[1]
	create(t, node, g, "2g.12gb", 0)
	cut(t, gpu(t, m.administrator(t), 1), gonvml.GPU_INSTANCE_PROFILE_2_SLICE, 2, 2)
	want := []string{"0+2 2g.12gb gi1 ci0 28 SM", "2+2 2g.12gb gi2 ci0 28 SM"}
	if diff := cmp.Diff(want, describe(scan(t, node).GPUs[1].Partitions)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Who has given up before it is begun gets nothing made.
func TestCreateWithoutCaller(t *testing.T) {
	node := newMachine(t, "a30x4").open(t)
	g := node.Inventory().GPUs[1]
	ref, profile := place(t, g, "2g.12gb", 2)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	changed := node.Changed()
	for range 20 {
		if _, err := node.Create(ctx, ref, profile); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
	}
	partitions(t, node, g.UUID)
	select {
	case <-changed:
		t.Error("something was made")
	default:
	}
}

// What can be undone is, and what cannot be is said and can be seen.
func TestCreateThatCannotBeUndone(t *testing.T) {
	m := newMachine(t, "a30x4")
	node := m.open(t)
	g := node.Inventory().GPUs[1]
	ref, profile := place(t, g, "2g.12gb", 2)
	m.fault(t, simulated.GPUFaults{GPU: "1", Calls: map[string]simulated.CallFault{
		"GpuInstance.CreateComputeInstance": {Return: "ERROR_UNKNOWN"}, "GpuInstance.Destroy": {Return: "ERROR_UNKNOWN"},
	}})
	_, err := node.Create(t.Context(), ref, profile)
	if err == nil || !strings.Contains(err.Error(), "instance remains") {
		t.Errorf("error %v", err)
	}
	m.fault(t)
	want := []string{"2+2 2g.12gb gi2 ci0 28 SM"}
	half := partitions(t, node, g.UUID)
	if diff := cmp.Diff(want, describe(half)); diff != "" || half[0].UUID != "" {
		t.Errorf("half made %+v (-want +got):\n%s", half, diff)
	}
	// It excludes other partitions, so all callers must see it.
	for _, known := range []device.Inventory{node.Inventory(), scan(t, node)} {
		if diff := cmp.Diff(half, known.GPUs[1].Partitions); diff != "" {
			t.Errorf("inventory (-there +known):\n%s", diff)
		}
	}
	edits, err := node.ContainerEdits(t.Context())
	if err != nil || len(edits.Devices) != len(node.Inventory().Devices())-1 || len(edits.Failed) > 0 {
		t.Errorf("%d container edits, failed %v: %v", len(edits.Devices), edits.Failed, err)
	}
	if err := node.Destroy(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	if got := node.Inventory().GPUs[1].Partitions; len(got) > 0 {
		t.Errorf("the inventory still has %v", got)
	}
	if left := partitions(t, node, g.UUID); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

func TestDestroyWhileInUse(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	node := m.open(t)
	g := node.Inventory().GPUs[1]
	p := g.Partitions[1]
	clients := []simulated.Client{{PID: 4243, Partition: "4+4"}, {PID: 4242, Partition: "4+4"}}
	m.fault(t, simulated.GPUFaults{GPU: "1", Clients: clients})
	err := node.Destroy(t.Context(), p.Ref)
	var inUse *nvml.InUseError
	if !errors.As(err, &inUse) {
		t.Fatalf("error %v", err)
	}
	if diff := cmp.Diff(nvml.InUseError{Partition: p, Processes: []int{4242, 4243}}, *inUse); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if !strings.Contains(err.Error(), "by process 4242, 4243") {
		t.Errorf("error %v", err)
	}
	if diff := cmp.Diff(g.Partitions, partitions(t, node, g.UUID)); diff != "" {
		t.Errorf("partitions (-before +after):\n%s", diff)
	}
	m.fault(t)
	if err := node.Destroy(t.Context(), p.Ref); err != nil {
		t.Error(err)
	}
}

func TestDestroyOfWhatSeveralShare(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	node := m.open(t)
	g := node.Inventory().GPUs[2]
	shared := g.Partitions[0].Ref
	if err := node.Destroy(t.Context(), shared); err == nil {
		t.Error("a part of a GPU instance was destroyed")
	}
	if err := node.Destroy(t.Context(), g.Ref()); err == nil {
		t.Error("a whole GPU was destroyed")
	}
	// Exactly in the place: what only overlaps stays.
	if err := node.Destroy(t.Context(), device.Ref{GPU: g.UUID, Placement: device.Placement{Size: 2}}); err != nil {
		t.Error(err)
	}
	if got := len(partitions(t, node, g.UUID)); got != 3 {
		t.Errorf("%d partitions, want 3", got)
	}
	shared.Compute = device.Placement{}
	if err := node.Destroy(t.Context(), shared); err != nil {
		t.Error(err)
	}
	if got := len(partitions(t, node, g.UUID)); got != 1 {
		t.Errorf("%d partitions, want 1", got)
	}
}

func TestModeThatCannotBeSwitched(t *testing.T) {
	machines := map[string]machine{}
	for _, profile := range []string{"h100x8", "a30x4", "l4x4"} {
		machines[profile] = newMachine(t, profile)
	}
	for name, test := range map[string]struct {
		profile string
		index   int
		client  bool
		want    string
	}{
		"in use on Hopper": {"h100x8", 1, true, "in use by process 4242"},
		"in use on Ampere": {"a30x4", 0, true, "in use by process 4242"},
		"needs a reset":    {"a30x4", 3, false, "must be reset"},
		"has none":         {"l4x4", 0, false, "no MIG"},
		"is not there":     {"l4x4", -1, false, "the driver has no such GPU"},
	} {
		t.Run(name, func(t *testing.T) {
			m := machines[test.profile]
			m.fault(t)
			node := m.open(t)
			uuid := "GPU-1"
			if test.index >= 0 {
				uuid = node.Inventory().GPUs[test.index].UUID
			}
			if test.client {
				m.fault(t, simulated.GPUFaults{GPU: fmt.Sprint(test.index), Clients: []simulated.Client{{PID: 4242}}})
			}
			err := node.EnableMIG(t.Context(), uuid)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
			if test.index < 0 {
				return
			}
			d := gpu(t, m.administrator(t), test.index)
			if current, pending, ret := d.GetMigMode(); current != 0 || pending != 0 {
				t.Errorf("mode %d, pending %d (%v)", current, pending, ret)
			}
		})
	}
}

// hang makes a call of a GPU slow, and waits until a caller waits in it.
func hang(t *testing.T, m machine, gpu, call string) {
	t.Helper()
	m.fault(t, simulated.GPUFaults{GPU: gpu, Calls: map[string]simulated.CallFault{call: {Delay: simulated.Duration(time.Hour)}}})
}

// Neither other GPUs nor scans wait for a slow one, and who waits for it can stop.
func TestSlowGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, "a30x4")
		for i := range m.profile.GPUs {
			m.profile.GPUs[i].MIGEnabled, m.profile.GPUs[i].Partitions = true, nil
		}
		m.materialize(t)
		node := m.open(t)
		inv := node.Inventory()
		slow, other := inv.GPUs[1], inv.GPUs[2]
		// The other GPU, too: its call is refused while the slow one's waits.
		hang(t, m, "1", "GpuInstance.CreateComputeInstance")
		ref, profile := place(t, slow, "2g.12gb", 0)
		ctx, stop := context.WithCancelCause(t.Context())
		failed := make(chan error)
		go func() {
			_, err := node.Create(ctx, ref, profile)
			failed <- err
		}()
		d := gpu(t, m.administrator(t), 1)
		for {
			if _, ret := d.GetGpuInstanceById(1); ret == gonvml.SUCCESS {
				break
			}
			if t.Context().Err() != nil {
				t.Fatal("never begun")
			}
		}
		began := time.Now()
		create(t, node, other, "2g.12gb", 0)
		got := scan(t, node)
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("the other GPU and a scan took %s", took)
		}
		if diff := cmp.Diff(slow, got.GPUs[1]); diff != "" {
			t.Errorf("the slow GPU (-before +meanwhile):\n%s", diff)
		}

		impatient := errors.New("enough")
		late, cancel := context.WithCancelCause(t.Context())
		cancel(impatient)
		if _, err := node.Partitions(late, slow.UUID); !errors.Is(err, impatient) {
			t.Errorf("another waiting caller: %v", err)
		}
		stop(impatient)
		if err := <-failed; !errors.Is(err, impatient) {
			t.Errorf("who waits: %v", err)
		}
		m.fault(t) // which also ends the call
		// The caller gave the partition up, and a caller that requests another one at its placement waits until it is gone.
		again := create(t, node, slow, profile.Name, ref.Placement.Start)
		if err := node.Destroy(t.Context(), again.Ref); err != nil {
			t.Error(err)
		}
		if left := partitions(t, node, slow.UUID); len(left) > 0 {
			t.Errorf("left %v", describe(left))
		}
		if diff := cmp.Diff(slow, node.Inventory().GPUs[1]); diff != "" {
			t.Errorf("the slow GPU (-before +after):\n%s", diff)
		}
	})
}
