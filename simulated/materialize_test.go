// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/info"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"golang.org/x/sys/unix"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/simulated/simdriver"
)

// requireMknod skips where device nodes cannot be made, as in a user namespace.
func requireMknod(t *testing.T) {
	t.Helper()
	if err := unix.Mknod(filepath.Join(t.TempDir(), "node"), unix.S_IFCHR|0o600, int(unix.Mkdev(majorNVIDIA, 0))); err != nil {
		t.Skipf("device nodes cannot be made here: %v", err)
	}
}

func materialize(t *testing.T, dir, profile string, options MaterializeOptions) Profile {
	t.Helper()
	p, err := Load(profile)
	if err != nil {
		t.Fatal(err)
	}
	if err := Materialize(dir, p, options); err != nil {
		t.Fatal(err)
	}
	return p.WithIdentity(options.Seed)
}

// lines is a logger for nvcdi that keeps what it is told.
type lines struct {
	mu       sync.Mutex
	warnings []string
}

func (l *lines) Warningf(format string, args ...any) { l.Warning(fmt.Sprintf(format, args...)) }
func (l *lines) Errorf(format string, args ...any)   { l.Warning(fmt.Sprintf(format, args...)) }
func (l *lines) Error(args ...any)                   { l.Warning(args...) }
func (l *lines) Debugf(string, ...any)               {}
func (l *lines) Infof(string, ...any)                {}
func (l *lines) Info(...any)                         {}
func (l *lines) Tracef(string, ...any)               {}
func (l *lines) Warning(args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.warnings = append(l.warnings, fmt.Sprint(args...))
}

type uuidNamer struct{}

func (uuidNamer) GetDeviceName(_ int, d nvcdi.UUIDer) (string, error) { return d.GetUUID() }
func (uuidNamer) GetMigDeviceName(_ int, _ nvcdi.UUIDer, _ int, m nvcdi.UUIDer) (string, error) {
	return m.GetUUID()
}

func generate(t *testing.T, dir string, lib *Library) (*specs.Spec, []string) {
	t.Helper()
	log := &lines{}
	root := filepath.Join(dir, DriverDir)
	generator, err := nvcdi.New(
		nvcdi.WithMode(nvcdi.ModeNvml), nvcdi.WithNvmlLib(lib), nvcdi.WithLogger(log),
		nvcdi.WithDriverRoot(root), nvcdi.WithDevRoot(root), nvcdi.WithNVIDIACDIHookPath("/usr/bin/nvidia-cdi-hook"),
		nvcdi.WithDeviceNamers(uuidNamer{}),
	)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := generator.GetSpec()
	if err != nil {
		t.Fatal(err)
	}
	return spec.Raw(), log.warnings
}

func TestNVCDIAcceptsTheDriverRoot(t *testing.T) {
	requireMknod(t)
	for _, name := range []string{"h100x8", "mixed", "bench256", "gb200x4", "t4x4"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			p := materialize(t, dir, name, MaterializeOptions{Seed: "n1"})
			spec, warnings := generate(t, dir, start(t, name, WithSeed("n1")))
			nodes := map[string][]string{}
			for _, d := range spec.Devices {
				for _, n := range d.ContainerEdits.DeviceNodes {
					nodes[d.Name] = append(nodes[d.Name], fmt.Sprintf("%s %d:%d", n.Path, n.Major, n.Minor))
				}
			}
			for _, g := range p.GPUs {
				want := []string{fmt.Sprintf("/dev/nvidia%d %d:%d", *g.Minor, majorNVIDIA, *g.Minor)}
				if !slices.Equal(nodes[g.UUID], want) {
					t.Errorf("device nodes of %s: %v, want %v", g.UUID, nodes[g.UUID], want)
				}
			}
			if len(nodes) != len(p.GPUs) {
				t.Errorf("%d devices, want %d", len(nodes), len(p.GPUs))
			}
			checkCommonEdits(t, spec)
			for _, w := range warnings {
				if missing, found := strings.CutPrefix(w, "Could not locate "); found && required(missing) {
					t.Errorf("nvcdi: %s", w)
				}
			}
		})
	}
}

// required tells what a compute installation must have from what nvcdi looks for on other machines as well.
func required(missing string) bool {
	for _, prefix := range []string{"/dev/", "libcuda", "libnvidia-ml", "libnvidia-ptx", "libnvidia-nvvm", "nvidia-smi", "nvidia-debug",
		"nvidia-pers", "nvidia-cuda", "OpenCL", "nvidia/580.95.05/gsp"} {
		if strings.HasPrefix(missing, prefix) {
			return true
		}
	}
	return false
}

func checkCommonEdits(t *testing.T, spec *specs.Spec) {
	t.Helper()
	var have []string
	for _, n := range spec.ContainerEdits.DeviceNodes {
		have = append(have, fmt.Sprintf("%s %d:%d", n.Path, n.Major, n.Minor))
	}
	for _, m := range spec.ContainerEdits.Mounts {
		have = append(have, filepath.Base(m.ContainerPath))
	}
	var hooks []string
	for _, h := range spec.ContainerEdits.Hooks {
		hooks = append(hooks, strings.Join(h.Args, " "))
	}
	for _, want := range []string{
		"/dev/nvidiactl 195:255", "/dev/nvidia-modeset 195:254", "libcuda.so.580.95.05", "libnvidia-ml.so.580.95.05", "nvidia-smi", "gsp_ga10x.bin",
	} {
		if !slices.Contains(have, want) {
			t.Errorf("the edits lack %s", want)
		}
	}
	all := strings.Join(hooks, "\n")
	for _, want := range []string{"libcuda.so.1::", "libnvidia-ml.so.580.95.05::", "update-ldcache"} {
		if !strings.Contains(all, want) {
			t.Errorf("the hooks lack %s", want)
		}
	}
}

// Without the privilege to make device nodes everything but them is there.
func TestNVCDIWithoutDeviceNodes(t *testing.T) {
	dir := t.TempDir()
	materialize(t, dir, "l4x4", MaterializeOptions{PlainDeviceFiles: true})
	spec, warnings := generate(t, dir, start(t, "l4x4"))
	if len(spec.ContainerEdits.DeviceNodes) != 0 || len(spec.ContainerEdits.Mounts) == 0 {
		t.Errorf("%d device nodes, %d mounts", len(spec.ContainerEdits.DeviceNodes), len(spec.ContainerEdits.Mounts))
	}
	if !slices.ContainsFunc(warnings, func(w string) bool { return strings.HasPrefix(w, "Could not locate /dev/nvidia0") }) {
		t.Error("nvcdi took a plain file for a device node")
	}
	if info, err := os.Lstat(filepath.Join(dir, DriverDir, "dev/nvidia0")); err != nil || !info.Mode().IsRegular() {
		t.Errorf("dev/nvidia0: %v, %v", info, err)
	}
}

// go-nvlib takes the tree for a driver root.
func TestNVLibFindsTheDriver(t *testing.T) {
	dir := t.TempDir()
	materialize(t, dir, "l4x4", MaterializeOptions{PlainDeviceFiles: true})
	i := info.New(info.WithRoot(filepath.Join(dir, DriverDir)), info.WithNvmlLib(start(t, "l4x4")))
	if has, reason := i.HasNvml(); !has {
		t.Error(reason)
	}
	if platform := i.ResolvePlatform(); platform != info.PlatformNVML {
		t.Errorf("platform %s", platform)
	}
}

func TestDeviceNodesHaveTheRealNumbers(t *testing.T) {
	requireMknod(t)
	dir := t.TempDir()
	materialize(t, dir, "mixed", MaterializeOptions{})
	for name, want := range map[string]uint64{
		"nvidia0": unix.Mkdev(195, 0), "nvidia5": unix.Mkdev(195, 5), "nvidiactl": unix.Mkdev(195, 255), "nvidia-modeset": unix.Mkdev(195, 254),
	} {
		var stat unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, DriverDir, "dev", name), &stat); err != nil || stat.Rdev != want || stat.Mode != unix.S_IFCHR|0o666 {
			t.Errorf("%s: %d:%d mode %o, %v", name, unix.Major(stat.Rdev), unix.Minor(stat.Rdev), stat.Mode, err)
		}
	}
	var uvm, tools unix.Stat_t
	if err := errors.Join(unix.Stat(filepath.Join(dir, DriverDir, "dev/nvidia-uvm"), &uvm), unix.Stat(filepath.Join(dir, DriverDir, "dev/nvidia-uvm-tools"), &tools)); err != nil {
		t.Fatal(err)
	}
	if unix.Major(uvm.Rdev) != unix.Major(tools.Rdev) || unix.Major(uvm.Rdev) < 384 {
		t.Errorf("uvm is %d:%d", unix.Major(uvm.Rdev), unix.Minor(uvm.Rdev))
	}
}

func TestFreeMajorsAreNotInUse(t *testing.T) {
	devices := []byte("Character devices:\n  1 mem\n510 aux\n511 nvme\n\nBlock devices:\n509 zram\n")
	if free, err := freeMajors(devices); err != nil || free[0] != 509 || free[1] != 508 {
		t.Errorf("free majors %v, %v", free, err)
	}
}

// snapshot is what a tree consists of: contents, targets, modes and numbers, and the inodes that tell whether a file was
// replaced.
func snapshot(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		var stat unix.Stat_t
		if err := unix.Lstat(path, &stat); err != nil {
			return err
		}
		target, _ := os.Readlink(path)
		relative, err := filepath.Rel(dir, path)
		files[relative] = fmt.Sprintf("%o %d %d %s", stat.Mode, stat.Rdev, stat.Ino, target)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestMaterializeAgainChangesNothing(t *testing.T) {
	requireMknod(t)
	dir := t.TempDir()
	host := hostWith(t, "0-1") // a real one's memory can grow between the two runs
	materialize(t, dir, "mixed", host)
	if err := WriteFaults(dir, Faults{GPUs: []GPUFaults{{GPU: "0", Lost: true}}}); err != nil {
		t.Fatal(err)
	}
	before := snapshot(t, dir)
	materialize(t, dir, "mixed", host)
	if after := snapshot(t, dir); !maps.Equal(before, after) {
		t.Error("a second run changed files")
	}
}

func TestMaterializeRepairs(t *testing.T) {
	requireMknod(t)
	dir := t.TempDir()
	materialize(t, dir, "mixed", MaterializeOptions{})
	want := snapshot(t, dir)
	library := filepath.Join(dir, DriverDir, "usr/lib/*/libcuda.so.580.95.05")
	found, err := filepath.Glob(library)
	if err != nil || len(found) != 1 {
		t.Fatalf("%v, %v", found, err)
	}
	node := filepath.Join(dir, DriverDir, "dev/nvidia2")
	for _, step := range []error{
		os.WriteFile(found[0], nil, 0o644),
		os.Remove(node),
		os.WriteFile(node, []byte("no device"), 0o600),
		os.RemoveAll(filepath.Join(dir, SysfsDir, "devices")),
		os.Remove(filepath.Join(dir, SysfsDir, "bus/pci/devices/0000:1b:00.0")),
		os.Symlink("nowhere", filepath.Join(dir, SysfsDir, "bus/pci/devices/0000:1b:00.0")),
	} {
		if step != nil {
			t.Fatal(step)
		}
	}
	materialize(t, dir, "mixed", MaterializeOptions{})
	got := snapshot(t, dir)
	for path, is := range got {
		if withoutInode(is) != withoutInode(want[path]) {
			t.Errorf("%s is %s, want %s", path, is, want[path])
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d files, want %d", len(got), len(want))
	}
}

func withoutInode(description string) string {
	fields := strings.Fields(description)
	if len(fields) < 3 {
		return description
	}
	return strings.Join(slices.Delete(fields, 2, 3), " ")
}

func TestMaterializeAnotherProfileLeavesNothingOfTheFirst(t *testing.T) {
	requireMknod(t)
	dir, fresh := t.TempDir(), t.TempDir()
	materialize(t, dir, "h100x8", MaterializeOptions{})
	p, err := Load("l4x4")
	if err != nil {
		t.Fatal(err)
	}
	p.Driver.Version = "590.10"
	for _, d := range []string{dir, fresh} {
		if err := Materialize(d, p, MaterializeOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	got, want := snapshot(t, dir), snapshot(t, fresh)
	for path := range got {
		if _, ok := want[path]; !ok {
			t.Errorf("%s is left over", path)
		}
	}
}

func TestMaterializeErrors(t *testing.T) {
	p, err := Load("l4x4")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		dir     string
		options MaterializeOptions
		want    string
	}{
		"architecture": {t.TempDir(), MaterializeOptions{Architecture: "riscv64"}, `no driver for architecture "riscv64"`},
		"directory":    {filepath.Join(file, "below"), MaterializeOptions{PlainDeviceFiles: true}, "not a directory"},
		"host":         {t.TempDir(), MaterializeOptions{HostSysfs: file}, "read online CPUs"},
	} {
		if err := Materialize(test.dir, p, test.options); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The helpers that DRA drivers take standard attributes from read the sysfs tree.
func TestStandardAttributes(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"h100x8", "a100x8", "l4x4", "mixed"} {
		t.Run(name, func(t *testing.T) {
			p := materialize(t, dir, name, MaterializeOptions{PlainDeviceFiles: true})
			sysfs := deviceattribute.WithFSFromRoot(filepath.Join(dir, SysfsDir))
			for _, g := range p.GPUs {
				root, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(g.PCI, sysfs)
				if err != nil || *root.Value.StringValue != g.Root {
					t.Errorf("PCIe root of %s: %+v, %v", g.PCI, root.Value, err)
				}
				node, err := deviceattribute.GetNUMANodeAttributeByPCIBusID(g.PCI, deviceattribute.ScalarAttribute, sysfs)
				if g.NUMANode < 0 {
					if err == nil {
						t.Errorf("NUMA node of %s: %+v", g.PCI, node.Value)
					}
					continue
				}
				if err != nil || *node.Value.IntValue != int64(g.NUMANode) {
					t.Errorf("NUMA node of %s: %+v, %v", g.PCI, node.Value, err)
				}
				if list, err := deviceattribute.GetNUMANodeAttributeByPCIBusID(g.PCI, deviceattribute.ListAttribute, sysfs); err != nil || list.Value.IntValues[0] != int64(g.NUMANode) {
					t.Errorf("NUMA nodes of %s: %+v, %v", g.PCI, list.Value, err)
				}
				for _, link := range []string{"driver", "numa_node", "local_cpulist"} {
					if _, err := os.Stat(filepath.Join(dir, SysfsDir, "bus/pci/devices", g.PCI, link)); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
}

// hostWith is a host of those CPUs, of two cores, and 4000 KiB of memory.
func hostWith(t *testing.T, online string) MaterializeOptions {
	t.Helper()
	host := t.TempDir()
	for path, content := range map[string]string{
		"sys/devices/system/cpu/online":                            online + "\n",
		"sys/devices/system/cpu/cpu0/topology/core_id":             "0\n",
		"sys/devices/system/cpu/cpu1/topology/core_id":             "1\n",
		"sys/devices/system/cpu/cpu2/topology/core_id":             "0\n",
		"sys/devices/system/cpu/cpu3/topology/core_id":             "1\n",
		"sys/devices/system/cpu/cpu3/topology/physical_package_id": "0\n",
		"proc/meminfo": "MemTotal:        4000 kB\nMemFree: 1 kB\n",
		"proc/devices": "Character devices:\n  1 mem\n\nBlock devices:\n",
	} {
		path = filepath.Join(host, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	return MaterializeOptions{HostSysfs: filepath.Join(host, "sys"), HostProc: filepath.Join(host, "proc")}
}

// Each node has a whole core and half of the memory.
func TestNUMANodesDivideTheMachine(t *testing.T) {
	dir := t.TempDir()
	options := hostWith(t, "0-3")
	options.PlainDeviceFiles, options.Architecture = true, "arm64"
	materialize(t, dir, "l4x4", options)
	if _, err := os.Stat(filepath.Join(dir, DriverDir, "usr/lib/aarch64-linux-gnu/libcuda.so.1")); err != nil {
		t.Error(err)
	}
	for path, want := range map[string]string{
		"devices/system/node/online":                                        "0-1",
		"devices/system/node/node0/cpulist":                                 "0,2",
		"devices/system/node/node1/cpulist":                                 "1,3",
		"devices/system/node/node1/cpumap":                                  "0000000a",
		"devices/system/node/node1/distance":                                "21 10",
		"devices/system/node/node0/cpu2/topology/core_id":                   "0",
		"devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages": "0",
		"bus/pci/devices/0000:af:00.0/local_cpulist":                        "1,3",
		"bus/pci/devices/0000:af:00.0/class":                                "0x030200",
		"bus/pci/devices/0000:af:00.0/device":                               "0x27b8",
	} {
		got, err := os.ReadFile(filepath.Join(dir, SysfsDir, path))
		if err != nil || strings.TrimSpace(string(got)) != want {
			t.Errorf("%s = %q, %v, want %q", path, got, err, want)
		}
	}
	memory, err := os.ReadFile(filepath.Join(dir, SysfsDir, "devices/system/node/node1/meminfo"))
	if err != nil || !strings.Contains(string(memory), "Node 1 MemTotal:       2000 kB") {
		t.Errorf("meminfo %q, %v", memory, err)
	}
}

// nvidia-smi, in a root that has some of the nodes, lists those GPUs.
func TestNVIDIASMIListsTheNodesThatAreThere(t *testing.T) {
	requireMknod(t)
	dir := t.TempDir()
	p := materialize(t, dir, "mixed", MaterializeOptions{Programs: simdriver.Build(t)})
	smi := func() string {
		cmd := exec.Command(filepath.Join(dir, DriverDir, "usr/bin/nvidia-smi"), "-L")
		cmd.Env = []string{"SIMULATED_ROOT=" + filepath.Join(dir, DriverDir)}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if err := os.Remove(filepath.Join(dir, DriverDir, "dev/nvidia2")); err != nil {
		t.Fatal(err)
	}
	out := smi()
	got := strings.Split(strings.TrimSpace(out), "\n")
	want := fmt.Sprintf("GPU 0: NVIDIA H100 80GB HBM3 (UUID: %s)", p.GPUs[1].UUID)
	if len(got) != 5 || got[0] != want {
		t.Errorf("output %s", out)
	}

	// As in a container with a partition of the second GPU: the nodes of gi2 and of its ci1.
	caps := filepath.Join(dir, DriverDir, "dev/nvidia-caps")
	nodes, err := os.ReadDir(caps)
	if err != nil {
		t.Fatal(err)
	}
	first := 3 + 135*3 + 9*2
	for _, node := range nodes {
		if name := node.Name(); name != fmt.Sprintf("nvidia-cap%d", first) && name != fmt.Sprintf("nvidia-cap%d", first+2) {
			if err := os.Remove(filepath.Join(caps, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if want += "\n  MIG Device 0: GPU instance 2, compute instance 1\nGPU 1: "; !strings.HasPrefix(smi(), want) {
		t.Errorf("output %s", smi())
	}
}
