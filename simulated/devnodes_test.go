// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"
)

// machineWith makes a machine of h100x8-mig with other nodes.
func machineWith(t *testing.T, dir string, nodes Nodes, options MaterializeOptions) Profile {
	t.Helper()
	p, err := Load("h100x8-mig")
	if err != nil {
		t.Fatal(err)
	}
	p.Nodes = nodes
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	if err := Materialize(dir, p, options); err != nil {
		t.Fatal(err)
	}
	return p
}

func listDev(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestNodesThatAreMissingAndOthers(t *testing.T) {
	dir := t.TempDir()
	plain := MaterializeOptions{PlainDeviceFiles: true}
	dev := filepath.Join(dir, DriverDir, "dev")
	machineWith(t, dir, Nodes{}, plain)
	everything := listDev(t, dev)
	machineWith(t, dir, Nodes{
		Missing: []string{"nvidia-uvm*", "nvidia[1-7]", "nvidia-caps/*"}, IMEXChannels: 2,
		Other: []string{"gdrdrv", "infiniband/uverbs0"},
	}, plain)
	want := []string{"gdrdrv", "infiniband", "nvidia-caps-imex-channels", "nvidia-modeset", "nvidia0", "nvidiactl"}
	if got := listDev(t, dev); !slices.Equal(got, want) {
		t.Errorf("/dev has %v, want %v", got, want)
	}
	if minors, err := os.ReadFile(filepath.Join(dir, ProcDir, "driver/nvidia-caps/mig-minors")); err != nil || !strings.Contains(string(minors), "gpu3/gi0/access") {
		t.Errorf("mig-minors: %v", err)
	}
	machineWith(t, dir, Nodes{}, plain)
	if got := listDev(t, dev); !slices.Equal(got, everything) {
		t.Errorf("/dev has %v, want %v again", got, everything)
	}
}

func TestListOfDeviceNumbers(t *testing.T) {
	requireMknod(t)
	dir := t.TempDir()
	machineWith(t, dir, Nodes{IMEXChannels: 1, Other: []string{"nvidia-fs0"}}, MaterializeOptions{})
	text, err := os.ReadFile(filepath.Join(dir, ProcDir, "devices"))
	if err != nil {
		t.Fatal(err)
	}
	characters, blocks, ok := strings.Cut(string(text), "\n\nBlock devices:\n")
	if !ok || !strings.HasPrefix(characters, "Character devices:\n") || blocks == "" {
		t.Fatalf("devices:\n%s", text)
	}
	number := map[string]int{}
	for line := range strings.Lines(characters) {
		if fields := strings.Fields(line); len(fields) == 2 {
			number[fields[1]] = majorOf(line)
		}
	}
	if number["mem"] != 1 {
		t.Errorf("the host's drivers are missing: %v", number)
	}
	for node, driver := range map[string]string{
		"nvidia0": "nvidia", "nvidiactl": "nvidiactl", "nvidia-uvm": "nvidia-uvm", "nvidia-uvm-tools": "nvidia-uvm",
		"nvidia-caps/nvidia-cap1": "nvidia-caps", "nvidia-caps-imex-channels/channel0": "nvidia-caps-imex-channels", "nvidia-fs0": "nvidia-fs0",
	} {
		var stat unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, DriverDir, "dev", node), &stat); err != nil || int(unix.Major(stat.Rdev)) != number[driver] {
			t.Errorf("%s has major %d, and %s has %d: %v", node, unix.Major(stat.Rdev), driver, number[driver], err)
		}
	}
}

func TestNVMLMakesNodes(t *testing.T) {
	requireMknod(t)
	dir, dev := t.TempDir(), t.TempDir()
	p := machineWith(t, dir, Nodes{MadeByNVML: true}, MaterializeOptions{PlainDeviceFiles: true})
	inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: "7", Absent: true}}})
	lib := New(p, WithDir(dir), WithDev(dev))
	if got := listDev(t, dev); len(got) > 0 {
		t.Errorf("before Init there are %v", got)
	}
	if ret := lib.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	defer lib.Shutdown()
	want := []string{"nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidia4", "nvidia5", "nvidia6", "nvidiactl"}
	if got := listDev(t, dev); !slices.Equal(got, want) {
		t.Errorf("/dev has %v, want %v", got, want)
	}
	var stat unix.Stat_t
	if err := unix.Stat(filepath.Join(dev, "nvidia6"), &stat); err != nil || stat.Rdev != unix.Mkdev(majorNVIDIA, 6) || stat.Mode != unix.S_IFCHR|0o666 {
		t.Errorf("nvidia6 is %d:%d mode %o, %v", unix.Major(stat.Rdev), unix.Minor(stat.Rdev), stat.Mode, err)
	}
	other := t.TempDir()
	p.Nodes.MadeByNVML = false
	quiet := New(p, WithDir(dir), WithDev(other))
	quiet.Init()
	defer quiet.Shutdown()
	if got := listDev(t, other); len(got) > 0 {
		t.Errorf("NVML that makes no nodes made %v", got)
	}
}

func TestMinorsSwapWhenTheDriverIsLoadedAgain(t *testing.T) {
	dir := t.TempDir()
	lib := start(t, "l4x4", WithDir(dir))
	a, b := handle(t, lib, 0), handle(t, lib, 3)
	uuid, _ := a.GetUUID()
	one, four := 0, 3
	inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: "0", Minor: &four}, {GPU: "3", Minor: &one}}})
	if minor, ret := a.GetMinorNumber(); minor != 0 || ret != nvml.SUCCESS {
		t.Errorf("minor before the next Init = %d, %v", minor, ret)
	}
	lib.Shutdown()
	lib.Init()
	for d, want := range map[nvml.Device]int{a: 3, b: 0, handle(t, lib, 1): 1} {
		if minor, ret := d.GetMinorNumber(); minor != want || ret != nvml.SUCCESS {
			t.Errorf("minor after the next Init = %d, %v, want %d", minor, ret, want)
		}
	}
	if now, _ := a.GetUUID(); now != uuid {
		t.Errorf("UUID was %s and is %s", uuid, now)
	}
}

func TestMinorsThatAreTaken(t *testing.T) {
	p, err := Load("l4x4")
	if err != nil {
		t.Fatal(err)
	}
	p = p.WithIdentity("")
	for _, minor := range []int{1, -1, minorCtl} {
		if _, err := (Faults{GPUs: []GPUFaults{{GPU: "0", Minor: &minor}}}).compile(p); err == nil || !strings.Contains(err.Error(), "minor") {
			t.Errorf("minor %d: %v", minor, err)
		}
	}
}

func TestNodesThatAreNone(t *testing.T) {
	p, err := Load("l4x4")
	if err != nil {
		t.Fatal(err)
	}
	p.Nodes = Nodes{Missing: []string{"nvidia["}, IMEXChannels: -1, Other: []string{"../etc", "gdrdrv", "gdrdrv"}}
	err = p.Validate()
	for _, want := range []string{"nodes.missing[0]: ", "nodes.imexChannels: ", "nodes.other[0]: ", "nodes.other[2]: "} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %q", err, want)
		}
	}
}
