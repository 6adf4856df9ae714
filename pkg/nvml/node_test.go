// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/models"
)

func scan(t *testing.T, node *nvml.Node) device.Inventory {
	t.Helper()
	if err := node.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	return node.Inventory()
}

func reasons(inv device.Inventory) []string {
	var all []string
	for _, g := range inv.GPUs {
		all = append(all, g.Health.Reason)
	}
	return all
}

func healthyBut(n int, which int, reason string) []string {
	all := make([]string, n)
	all[which] = reason
	return all
}

func TestInventoryOfEveryProfile(t *testing.T) {
	for _, name := range simulated.Names() {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, name)
			inv := m.open(t).Inventory()
			if len(inv.GPUs) != len(m.profile.GPUs) {
				t.Fatalf("%d GPUs, profile has %d", len(inv.GPUs), len(m.profile.GPUs))
			}
			for i, g := range inv.GPUs {
				if i > 0 && inv.GPUs[i-1].Minor >= g.Minor {
					t.Errorf("GPU %d (minor %d) not sorted by minor", i, g.Minor)
				}
				for what, value := range map[string]string{
					"UUID": g.UUID, "PCI bus id": g.PCIBusID, "PCIe root": g.PCIeRoot, "name": g.ProductName,
					"brand": g.Brand, "architecture": g.Architecture, "capability": g.ComputeCapability,
					"driver": g.DriverVersion, "CUDA": g.CUDADriverVersion,
				} {
					if value == "" {
						t.Errorf("%s has no %s", g.Name(), what)
					}
				}
				if g.MemoryBytes == 0 || !g.Health.Healthy() {
					t.Errorf("%s: %d bytes, health %+v", g.Name(), g.MemoryBytes, g.Health)
				}
				for j := range inv.GPUs {
					if inv.Links[i][j] != inv.Links[j][i] {
						t.Errorf("links %d-%d are not symmetric: %v, %v", i, j, inv.Links[i][j], inv.Links[j][i])
					}
				}
			}
		})
	}
}

func TestH100(t *testing.T) {
	inv := newMachine(t, "h100x8").open(t).Inventory()
	g := inv.GPUs[3]
	ecc := true
	model, _ := models.Named("H100-80GB")
	profiles := model.Offered()
	slices.SortFunc(profiles, func(a, b device.Profile) int { return a.ID - b.ID })
	want := device.GPU{
		UUID: g.UUID, Index: 3, Minor: 3, PCIBusID: g.PCIBusID, PCIeRoot: g.PCIeRoot, NUMANode: 0, PCIClass: device.PCIClass3D,
		ProductName: "NVIDIA H100 80GB HBM3", Brand: "Nvidia", Architecture: "Hopper", ComputeCapability: "9.0",
		DriverVersion: inv.DriverVersion, CUDADriverVersion: g.CUDADriverVersion, AddressingMode: "HMM",
		ECCEnabled: &ecc, MemoryBytes: g.MemoryBytes, MIGCapable: true, Profiles: profiles,
		NVLinkDomain: "nvlink-" + inv.GPUs[0].PCIBusID, Recovery: device.RecoveryNone,
	}
	if diff := cmp.Diff(want, g); diff != "" {
		t.Errorf("GPU (-want +got):\n%s", diff)
	}
	if got := inv.GPUs[7].NUMANode; got != 1 {
		t.Errorf("GPU 7 is on NUMA node %d, want 1", got)
	}
	want01 := device.Pair{PCIe: device.LinkNode, NVLinks: 18}
	if got := inv.Links[0][1]; got != want01 {
		t.Errorf("0-1 is %+v, want %+v", got, want01)
	}
	want07 := device.Pair{PCIe: device.LinkSystem, NVLinks: 18}
	if got := inv.Links[0][7]; got != want07 {
		t.Errorf("0-7 is %+v, want %+v", got, want07)
	}
}

func TestGPUsWithoutNVLinkAreInNoDomain(t *testing.T) {
	for _, g := range newMachine(t, "l4x4").open(t).Inventory().GPUs {
		if g.NVLinkDomain != "" {
			t.Errorf("%s is in domain %q", g.Name(), g.NVLinkDomain)
		}
	}
}

func TestLostGPU(t *testing.T) {
	m := newMachine(t, "h100x8")
	node := m.open(t)
	before := node.Inventory()

	m.fault(t, simulated.GPUFaults{GPU: "3", Lost: true})
	got := scan(t, node)
	if diff := cmp.Diff(healthyBut(8, 3, device.ReasonLost), reasons(got)); diff != "" {
		t.Fatalf("health (-want +got):\n%s", diff)
	}
	if n := node.Unidentified(); n != 0 {
		t.Errorf("%d unidentified GPUs, want none: the lost one is known", n)
	}
	got.GPUs[3].Health = device.Health{}
	if diff := cmp.Diff(before, got); diff != "" {
		t.Errorf("a lost GPU keeps what was known (-before +after):\n%s", diff)
	}

	m.fault(t)
	if diff := cmp.Diff(before, scan(t, node)); diff != "" {
		t.Errorf("after recovery (-before +after):\n%s", diff)
	}
}

func TestGPUThatFellOffTheBus(t *testing.T) {
	m := newMachine(t, "h100x8")
	node := m.open(t)
	m.fault(t, simulated.GPUFaults{GPU: "3", Absent: true})
	got := scan(t, node)
	if diff := cmp.Diff(healthyBut(8, 3, device.ReasonMissing), reasons(got)); diff != "" {
		t.Fatalf("health (-want +got):\n%s", diff)
	}
	if got.GPUs[4].Index != 3 || got.GPUs[4].Minor != 4 {
		t.Errorf("GPU behind it: index %d minor %d, want 3 and 4", got.GPUs[4].Index, got.GPUs[4].Minor)
	}
	m.fault(t)
	if diff := cmp.Diff(make([]string, 8), reasons(scan(t, node))); diff != "" {
		t.Errorf("after recovery (-want +got):\n%s", diff)
	}
}

func TestGPULostBeforeStart(t *testing.T) {
	m := newMachine(t, "h100x8")
	m.fault(t, simulated.GPUFaults{GPU: "0", Lost: true})
	node := m.open(t)
	if got := len(node.Inventory().GPUs); got != 7 {
		t.Errorf("%d GPUs, want the 7 that say who they are", got)
	}
	if got := node.Unidentified(); got != 1 {
		t.Errorf("%d unidentified, want 1", got)
	}
	m.fault(t)
	inv := scan(t, node)
	if got := node.Unidentified(); got != 0 || len(inv.GPUs) != 8 {
		t.Errorf("after recovery %d GPUs, %d unidentified", len(inv.GPUs), got)
	}
	if got := inv.Links[0][7].NVLinks; got != 18 {
		t.Errorf("topology was not read again: %d NVLinks", got)
	}
	if got, want := inv.GPUs[7].NVLinkDomain, "nvlink-"+inv.GPUs[0].PCIBusID; got != want {
		t.Errorf("domain %q, want %q", got, want)
	}
}

func TestFailedCalls(t *testing.T) {
	tests := map[string]struct {
		call, answer string
		reason       string
	}{
		"memory":                {"GetMemoryInfo", "ERROR_UNKNOWN", device.ReasonUnreachable},
		"memory not supported":  {"GetMemoryInfo", "ERROR_NOT_SUPPORTED", ""},
		"reset required":        {"GetMemoryInfo", "ERROR_RESET_REQUIRED", device.ReasonUnreachable},
		"ECC":                   {"GetEccMode", "ERROR_UNKNOWN", ""},
		"MIG mode":              {"GetMigMode", "ERROR_UNKNOWN", ""},
		"name":                  {"GetName", "ERROR_UNKNOWN", ""},
		"brand":                 {"GetBrand", "ERROR_NOT_SUPPORTED", ""},
		"architecture":          {"GetArchitecture", "ERROR_FUNCTION_NOT_FOUND", ""},
		"addressing mode":       {"GetAddressingMode", "ERROR_UNKNOWN", ""},
		"NVLink":                {"GetNvLinkState", "ERROR_UNKNOWN", ""},
		"topology":              {"GetTopologyCommonAncestor", "ERROR_UNKNOWN", ""},
		"persistence":           {"GetPersistenceMode", "ERROR_NOT_SUPPORTED", ""},
		"lost in the middle":    {"GetMemoryInfo", "ERROR_GPU_IS_LOST", device.ReasonLost},
		"PCI":                   {"GetPciInfo", "ERROR_UNKNOWN", ""},
		"compute capability":    {"GetCudaComputeCapability", "ERROR_NOT_SUPPORTED", ""},
		"fabric":                {"GetGpuFabricInfo", "ERROR_UNKNOWN", ""},
		"remote device type":    {"GetNvLinkRemoteDeviceType", "ERROR_NOT_SUPPORTED", ""},
		"remote device address": {"GetNvLinkRemotePciInfo", "ERROR_UNKNOWN", ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, "a100x8")
			calls := map[string]simulated.CallFault{test.call: {Return: test.answer}}
			m.fault(t, simulated.GPUFaults{GPU: "2", Calls: calls})
			node := m.open(t)
			if diff := cmp.Diff(healthyBut(8, 2, test.reason), reasons(node.Inventory())); diff != "" {
				t.Errorf("health (-want +got):\n%s", diff)
			}
			m.fault(t)
			want := m.open(t).Inventory()
			got := scan(t, node)
			got.GPUs[2].AddressingMode, want.GPUs[2].AddressingMode = "", ""
			got.GPUs[2].FabricClique, want.GPUs[2].FabricClique = "", ""
			if test.call == "GetPciInfo" || test.call == "GetName" {
				if diff := cmp.Diff(want.GPUs, got.GPUs); diff != "" {
					t.Errorf("after recovery (-fresh +recovered):\n%s", diff)
				}
			}
		})
	}
}

func TestMissingDeviceNode(t *testing.T) {
	m := newMachine(t, "h100x8")
	node := m.open(t)
	path := filepath.Join(m.dir, "driver/dev/nvidia5")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(healthyBut(8, 5, device.ReasonNoNode), reasons(scan(t, node))); diff != "" {
		t.Fatalf("health (-want +got):\n%s", diff)
	}
	edits, err := node.ContainerEdits(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	uuid := node.Inventory().GPUs[5].UUID
	if len(edits.Devices) != 7 || edits.Failed[uuid] == nil {
		t.Errorf("%d devices, failed %v; want 7 and GPU 5", len(edits.Devices), edits.Failed)
	}
	m.materialize(t)
	if diff := cmp.Diff(make([]string, 8), reasons(scan(t, node))); diff != "" {
		t.Errorf("after recovery (-want +got):\n%s", diff)
	}
}

func TestDisplayIsSkipped(t *testing.T) {
	m := newMachine(t, "l4x4")
	for name, model := range m.profile.Models {
		model.ProductName = "NVIDIA DGX Display"
		m.profile.Models[name] = model
	}
	m.materialize(t)
	node := m.open(t)
	if got := node.Inventory().GPUs; len(got) != 0 || node.Unidentified() != 0 {
		t.Errorf("%d GPUs, %d unidentified; want none", len(got), node.Unidentified())
	}
}

func TestChangedIsClosedOnlyByChanges(t *testing.T) {
	m := newMachine(t, "h100x8")
	node := m.open(t)
	changed := node.Changed()
	scan(t, node)
	select {
	case <-changed:
		t.Fatal("closed though nothing changed")
	default:
	}
	before := node.Inventory()
	copied := before
	m.fault(t, simulated.GPUFaults{GPU: "1", Lost: true})
	scan(t, node)
	select {
	case <-changed:
	default:
		t.Fatal("not closed by a lost GPU")
	}
	if !reflect.DeepEqual(before, copied) || !before.GPUs[1].Health.Healthy() {
		t.Error("an inventory that was handed out has changed")
	}
}

func TestRunNotices(t *testing.T) {
	m := newMachine(t, "h100x8")
	m.options.Interval = time.Hour // so that only the watch of device nodes can have noticed
	node := m.open(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- node.Run(ctx) }()
	path := filepath.Join(m.dir, "driver/dev/nvidia5")
	changed := node.Changed()
	// Run may not watch yet at the first time.
	for noticed := false; !noticed; {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		select {
		case <-changed:
			noticed = true
		case <-time.After(500 * time.Millisecond):
			m.materialize(t)
		case <-t.Context().Done():
			t.Fatal("never noticed")
		}
	}
	if diff := cmp.Diff(healthyBut(8, 5, device.ReasonNoNode), reasons(node.Inventory())); diff != "" {
		t.Errorf("health (-want +got):\n%s", diff)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
}

func TestNoDriver(t *testing.T) {
	m := newMachine(t, "h100x8")
	if err := os.RemoveAll(filepath.Join(m.dir, "driver")); err != nil {
		t.Fatal(err)
	}
	_, err := nvml.Open(t.Context(), m.options)
	var missing *nvml.NoDriverError
	if !errors.Is(err, nvml.ErrNoDriver) || !errors.As(err, &missing) {
		t.Fatalf("error %v, want ErrNoDriver", err)
	}
	if len(missing.Looked) != 1 || !strings.Contains(missing.Looked[0], "/run/nvidia/simulated/driver") {
		t.Errorf("looked at %q, want the driver root", missing.Looked)
	}
}

func TestLateDriver(t *testing.T) {
	m := newMachine(t, "h100x8")
	if err := os.RemoveAll(filepath.Join(m.dir, "driver")); err != nil {
		t.Fatal(err)
	}
	node := nvml.New(m.options)
	if err := node.Missing(); !errors.Is(err, nvml.ErrNoDriver) {
		t.Errorf("before the first scan: %v, want ErrNoDriver", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	looked := node.Changed()
	go func() { done <- node.Run(ctx) }()
	<-looked
	if err := node.Missing(); !errors.Is(err, nvml.ErrNoDriver) || !strings.Contains(err.Error(), "looked at") {
		t.Errorf("without a driver: %v, want where it was looked for", err)
	}
	const gpu = "GPU-0"
	if _, err := node.ComputeMode(ctx, gpu); err == nil {
		t.Error("a GPU without a driver has a compute mode")
	}
	if _, err := node.ContainerEdits(ctx); !errors.Is(err, nvml.ErrNoDriver) {
		t.Errorf("container edits without a driver: %v, want ErrNoDriver", err)
	}
	if host, agent := node.DevRoot(); host != "" || agent != m.options.HostRoot || node.DriverRoot() != "" {
		t.Errorf("roots without a driver: %q, %q, %q", host, agent, node.DriverRoot())
	}
	arrived := node.Changed()
	m.materialize(t)
	<-arrived
	if err := node.Missing(); err != nil || len(node.Inventory().GPUs) != 8 {
		t.Errorf("missing: %v, with %d GPUs, want 8", err, len(node.Inventory().GPUs))
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
}

func TestRunEndsWithoutADriver(t *testing.T) {
	m := newMachine(t, "h100x8")
	if err := os.RemoveAll(filepath.Join(m.dir, "driver")); err != nil {
		t.Fatal(err)
	}
	node := nvml.New(m.options)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := node.Run(ctx); err != nil {
		t.Errorf("Run: %v", err)
	}
}

func TestDriverGoesAndComesBackUpgraded(t *testing.T) {
	m := newMachine(t, "h100x8")
	node := m.open(t)
	before := node.Inventory()

	if err := os.RemoveAll(filepath.Join(m.dir, "driver")); err != nil {
		t.Fatal(err)
	}
	if err := node.Scan(t.Context()); !errors.Is(err, nvml.ErrNoDriver) {
		t.Fatalf("scan without driver: %v, want ErrNoDriver", err)
	}
	for _, g := range node.Inventory().GPUs {
		if g.Health.Reason != device.ReasonUnreachable {
			t.Errorf("%s is %+v, want unreachable", g.Name(), g.Health)
		}
	}

	m.profile = node590(m.profile)
	changed := node.Changed()
	m.materialize(t)
	after := scan(t, node)
	<-changed
	for i := range before.GPUs {
		before.GPUs[i].DriverVersion = "590.10.02"
		before.GPUs[i].CUDADriverVersion = "13.1"
	}
	before.DriverVersion = "590.10.02"
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("after the upgrade (-want +got):\n%s", diff)
	}
	edits, err := node.ContainerEdits(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, mount := range edits.Common.Mounts {
		if strings.Contains(mount.HostPath, ".so.") && !strings.HasSuffix(mount.HostPath, "590.10.02") {
			t.Errorf("%s is not of the new driver", mount.HostPath)
		}
	}
}

// A driver container starts on a node that has a driver of the same version: its driver is used, although the other one has not changed.
func TestADriverElsewhereIsFound(t *testing.T) {
	m := newMachine(t, "h100x8")
	host := m.options.HostRoot
	m.options.DriverRoot, m.options.DevRoot = nvml.Auto, nvml.Auto
	if err := os.MkdirAll(filepath.Join(host, "home/kubernetes/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/run/nvidia/simulated/driver", filepath.Join(host, "home/kubernetes/bin/nvidia")); err != nil {
		t.Fatal(err)
	}
	node := m.open(t)
	if root := node.DriverRoot(); root != "/run/nvidia/simulated/driver" {
		t.Fatalf("the driver is in %s", root)
	}
	if out, err := exec.CommandContext(t.Context(), "cp", "-a", filepath.Join(m.dir, "driver"), filepath.Join(host, "run/nvidia/driver")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	scan(t, node)
	if root := node.DriverRoot(); root != "/run/nvidia/driver" {
		t.Errorf("the driver is in %s", root)
	}
}

// A scan of health, once a second, notices that the kernel module was unloaded or loaded again. Nothing else announces that.
func TestAnotherModuleIsNoticedWithinASecond(t *testing.T) {
	m := newMachine(t, "h100x8")
	module := filepath.Join(m.options.SysfsRoot, "module/nvidia")
	load := func() {
		t.Helper()
		if err := os.MkdirAll(module, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(module, "version"), []byte(m.profile.Driver.Version), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	load()
	node := m.open(t)
	noticed := func() bool {
		changed := node.Changed()
		_ = node.ScanHealth(t.Context())
		return broadcast.Happened(changed)
	}
	if noticed() {
		t.Error("a scan without a change announces one")
	}
	if err := os.Rename(module, module+".unloaded"); err != nil {
		t.Fatal(err)
	}
	if !noticed() {
		t.Error("the module was unloaded, and nothing is announced")
	}
	load()
	if !noticed() {
		t.Error("the module was loaded again, and nothing is announced")
	}
}

func node590(p simulated.Profile) simulated.Profile {
	p.Driver.Version, p.Driver.CUDA = "590.10.02", "13.1"
	return p
}

// A GPU without memory of its own has the node's. The library says so, or the node's memory is not known.
func TestMemoryOfTheNode(t *testing.T) {
	for meminfo, want := range map[string]uint64{"MemTotal:       127600360 kB\nMemFree: 1 kB\n": 127600360 << 10, "MemTotal:\n": 0} {
		m := newMachine(t, "l4x4")
		m.options.ProcRoot = filepath.Join(m.dir, simulated.ProcDir)
		if err := os.WriteFile(filepath.Join(m.options.ProcRoot, "meminfo"), []byte(meminfo), 0o644); err != nil {
			t.Fatal(err)
		}
		m.fault(t, simulated.GPUFaults{GPU: "1", Calls: map[string]simulated.CallFault{"GetMemoryInfo": {Return: "ERROR_NOT_SUPPORTED"}}})
		gpus := m.open(t).Inventory().GPUs
		if gpus[1].MemoryBytes != want || !gpus[1].Health.Healthy() || gpus[0].MemoryBytes == want {
			t.Errorf("%d and %d bytes, %+v; want %d", gpus[0].MemoryBytes, gpus[1].MemoryBytes, gpus[1].Health, want)
		}
		// Who may not read the memory, or whose driver cannot, does not know it.
		for _, answer := range []string{"ERROR_NO_PERMISSION", "ERROR_FUNCTION_NOT_FOUND"} {
			m.fault(t, simulated.GPUFaults{GPU: "1", Calls: map[string]simulated.CallFault{"GetMemoryInfo": {Return: answer}}})
			if g := m.open(t).Inventory().GPUs[1]; g.MemoryBytes != 0 || !g.Health.Healthy() {
				t.Errorf("%s: %d bytes, %+v", answer, g.MemoryBytes, g.Health)
			}
		}
	}
}
