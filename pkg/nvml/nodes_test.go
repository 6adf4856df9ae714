// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
)

// The numbers of the fixture's /proc/devices.
const (
	fixtureNVIDIA = 195
	fixtureUVM    = 511
)

// makeNode creates or replaces a character device below a fixture's root.
func makeNode(t *testing.T, root, path string, major, minor uint32) {
	t.Helper()
	full := filepath.Join(root, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(full); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mknod(full, unix.S_IFCHR|0o666, int(unix.Mkdev(major, minor))); err != nil {
		t.Fatal(err)
	}
}

func removeNodes(t *testing.T, root string, paths ...string) {
	t.Helper()
	for _, path := range paths {
		if err := os.Remove(filepath.Join(root, path)); err != nil {
			t.Fatal(err)
		}
	}
}

// numberOf is the device number of a node as "<major>:<minor>", or why there is none.
func numberOf(path string) string {
	var info unix.Stat_t
	if err := unix.Lstat(path, &info); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d:%d", unix.Major(info.Rdev), unix.Minor(info.Rdev))
}

// hostPathOf is the node of the host that a container gets at a path.
func hostPathOf(edits specs.ContainerEdits, path string) string {
	for _, d := range edits.DeviceNodes {
		if d.Path == path {
			return strings.TrimSpace(d.HostPath + " " + fmt.Sprint(d.Major, ":", d.Minor))
		}
	}
	return "none"
}

// nodeCreator creates nodes when NVML is opened, as libnvidia-ml.so.1 does for root.
type nodeCreator struct {
	gonvml.Interface
	create func()
}

func (c nodeCreator) Init() gonvml.Return {
	c.create()
	return c.Interface.Init()
}

// In a driver container all nodes are below the driver root. NVML creates its own ones in the /dev that the agent sees, and no others: the
// host's /dev then has nodes, but is incomplete.
func TestNodesThatNVMLCreates(t *testing.T) {
	options := fixture(t, "gpu-operator")
	open := options.OpenLibrary
	options.OpenLibrary = func() (gonvml.Interface, error) {
		library, err := open()
		return nodeCreator{library, func() {
			makeNode(t, options.HostRoot, "/dev/nvidiactl", fixtureNVIDIA, 255)
			for minor := range uint32(2) {
				makeNode(t, options.HostRoot, fmt.Sprint("/dev/nvidia", minor), fixtureNVIDIA, minor)
			}
		}}, err
	}
	node := mustOpen(t, options)
	for range 2 {
		if err := node.Scan(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got := node.layout.devRoot; got != "/run/nvidia/driver" {
		t.Errorf("device root %s, want the driver's", got)
	}
	edits := mustEdit(t, node)
	for path, want := range map[string]string{
		"/dev/nvidiactl":  "/run/nvidia/driver/dev/nvidiactl 195:255",
		"/dev/nvidia-uvm": "/run/nvidia/driver/dev/nvidia-uvm 511:0",
	} {
		if got := hostPathOf(edits.Common, path); got != want {
			t.Errorf("%s is %s, want %s", path, got, want)
		}
	}
	if got, want := hostPathOf(edits.Devices[0].ContainerEdits, "/dev/nvidia0"), "/run/nvidia/driver/dev/nvidia0 195:0"; got != want {
		t.Errorf("/dev/nvidia0 is %s, want %s", got, want)
	}
}

func TestDeviceRoot(t *testing.T) {
	const driver = "/run/nvidia/driver"
	all := []string{"nvidiactl 195:255", "nvidia-uvm 511:0", "nvidia-uvm-tools 511:1", "nvidia0 195:0", "nvidia1 195:1"}
	tests := map[string]struct {
		host, driver []string
		want         string
	}{
		"none":                                 {want: "/"},
		"the host's only":                      {host: all, want: "/"},
		"the driver's only":                    {driver: all, want: driver},
		"both":                                 {host: all, driver: all, want: driver},
		"the host's without nvidia-uvm":        {host: slices.Concat(all[:1], all[3:]), driver: all, want: driver},
		"the driver's without nvidia-uvm":      {host: all, driver: slices.Concat(all[:1], all[3:]), want: "/"},
		"both without nvidia-uvm":              {host: slices.Concat(all[:1], all[3:]), driver: slices.Concat(all[:1], all[3:]), want: driver},
		"the driver's from before a reload":    {host: all, driver: append([]string{"nvidia-uvm 509:0", "nvidia-uvm-tools 509:1"}, slices.Concat(all[:1], all[3:])...), want: "/"},
		"the host's from before a reload":      {host: append([]string{"nvidia-uvm 509:0", "nvidia-uvm-tools 509:1"}, slices.Concat(all[:1], all[3:])...), driver: all, want: driver},
		"the driver's without one of the GPUs": {host: all, driver: all[:4], want: "/"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			options := fixture(t, "gpu-operator").withDefaults()
			if err := os.RemoveAll(filepath.Join(options.HostRoot, driver, "dev")); err != nil {
				t.Fatal(err)
			}
			for root, nodes := range map[string][]string{"/": test.host, driver: test.driver} {
				for _, node := range nodes {
					var name string
					var major, minor uint32
					if _, err := fmt.Sscanf(node, "%s %d:%d", &name, &major, &minor); err != nil {
						t.Fatal(err)
					}
					makeNode(t, options.HostRoot, filepath.Join(root, "dev", name), major, minor)
				}
			}
			if got := options.findDevRoot(driver); got != test.want {
				t.Errorf("device root %s, want %s", got, test.want)
			}
		})
	}
}

// After a boot with a driver from packages, nothing has loaded nvidia-uvm or created its nodes.
func TestWithoutUVM(t *testing.T) {
	uvm := []string{"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
	unloaded := "Character devices:\n195 nvidia\n\nBlock devices:\n"
	loaded := "Character devices:\n195 nvidia\n511 nvidia-uvm\n\nBlock devices:\n"
	tests := map[string]struct {
		devices string
		create  bool
		// load is what loading the module does.
		load func(options Options) error
		// message is part of the health, empty for a healthy GPU.
		message string
	}{
		"the agent may not create nodes": {devices: loaded, message: "/dev/nvidia-uvm does not exist"},
		"the nodes are created":          {devices: loaded, create: true},
		"the module is loaded": {devices: unloaded, create: true, load: func(options Options) error {
			return os.WriteFile(filepath.Join(options.ProcRoot, "devices"), []byte(loaded), 0o644)
		}},
		"the module cannot be loaded": {
			devices: unloaded, create: true, load: func(Options) error { return errors.New("no such module") },
			message: "kernel module nvidia-uvm is not loaded; the agent cannot load nvidia-uvm: no such module",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			options := fixture(t, "host-rhel")
			removeNodes(t, options.HostRoot, uvm...)
			writeFile(t, filepath.Join(options.ProcRoot, "devices"), test.devices)
			options.CreateNodes = test.create
			writeFile(t, filepath.Join(options.HostRoot, "usr/sbin/modprobe"), "")
			options.loadModule = func(root, module string) error {
				if root != options.HostRoot || module != "nvidia-uvm" {
					t.Errorf("loads %s below %s", module, root)
				}
				return test.load(options)
			}
			node := mustOpen(t, options)
			g := node.Inventory().GPUs[0]
			edits, err := node.ContainerEdits(t.Context())
			if test.message == "" {
				if !g.Health.Healthy() || err != nil {
					t.Fatalf("health %+v, edits: %v", g.Health, err)
				}
				for minor, path := range uvm {
					want := fmt.Sprint(fixtureUVM, ":", minor)
					if got := numberOf(filepath.Join(options.HostRoot, path)); got != want {
						t.Errorf("%s has number %s, want %s", path, got, want)
					}
					if got := hostPathOf(edits.Common, path); got != want {
						t.Errorf("%s in containers: %s, want %s", path, got, want)
					}
				}
				return
			}
			if g.Health.Reason != gpu.ReasonNoNode || !strings.Contains(g.Health.Message, test.message) {
				t.Errorf("health %+v, want %q", g.Health, test.message)
			}
			if err == nil || !strings.Contains(err.Error(), "nvidia-uvm") {
				t.Errorf("container edits: %v, want an error about nvidia-uvm", err)
			}
		})
	}
}

// What the agent creates has the driver's number and mode, in place of a node from before the driver was loaded again.
func TestCreatedNodes(t *testing.T) {
	options := fixture(t, "host-rhel")
	options.CreateNodes = true
	for path, stale := range map[string]uint32{"/dev/nvidia-uvm": 509, "/dev/nvidia-uvm-tools": 509} {
		makeNode(t, options.HostRoot, path, stale, 0)
	}
	removeNodes(t, options.HostRoot, "/dev/nvidia1")
	node := mustOpen(t, options)
	for _, g := range node.Inventory().GPUs {
		if !g.Health.Healthy() {
			t.Errorf("%s: %+v", g.Name(), g.Health)
		}
	}
	for path, want := range map[string]string{
		"/dev/nvidia-uvm": "511:0", "/dev/nvidia-uvm-tools": "511:1", "/dev/nvidia1": "195:1",
	} {
		full := filepath.Join(options.HostRoot, path)
		info, err := os.Stat(full)
		if err != nil {
			t.Fatal(err)
		}
		if got := numberOf(full); got != want || info.Mode().Perm() != 0o666 {
			t.Errorf("%s has number %s and mode %o, want %s and 666", path, got, info.Mode().Perm(), want)
		}
	}
	if left, err := filepath.Glob(filepath.Join(options.HostRoot, "dev/.tandem*")); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestNodesOfTheAdministrator(t *testing.T) {
	options := fixture(t, "host-rhel")
	options.CreateNodes = true
	writeFile(t, filepath.Join(options.ProcRoot, "driver/nvidia/params"), "DeviceFileMode: 438\nModifyDeviceFiles: 0\n")
	removeNodes(t, options.HostRoot, "/dev/nvidia1")
	node := mustOpen(t, options)
	health := node.Inventory().GPUs[1].Health
	if health.Reason != gpu.ReasonNoNode || !strings.Contains(health.Message, "NVreg_ModifyDeviceFiles=0") {
		t.Errorf("health %+v", health)
	}
	if got := numberOf(filepath.Join(options.HostRoot, "/dev/nvidia1")); got != unix.ENOENT.Error() {
		t.Errorf("the node is %s", got)
	}
}

// Without these links, older versions of runc and systemd take a container's GPU away after a daemon-reload.
func TestLinksOfDevices(t *testing.T) {
	for layout, want := range map[string]map[string]string{
		"host-rhel": {"195:0": "../nvidia0", "195:255": "../nvidiactl", "511:0": "../nvidia-uvm"},
		"gpu-operator": {
			"195:0": "/run/nvidia/driver/dev/nvidia0", "195:255": "/run/nvidia/driver/dev/nvidiactl", "511:0": "/run/nvidia/driver/dev/nvidia-uvm",
		},
	} {
		t.Run(layout, func(t *testing.T) {
			options := fixture(t, layout)
			links := filepath.Join(options.HostRoot, "dev/char")
			// A link of an earlier driver, which leads nowhere, and one of another kind to the same node.
			symlink(t, "../nvidia-before", filepath.Join(links, "195:255"))
			symlink(t, filepath.Join("/", layouts[layout].nodes, "nvidia1"), filepath.Join(links, "195:1"))
			read := func() map[string]string {
				all := map[string]string{}
				entries, err := os.ReadDir(links)
				if err != nil {
					t.Fatal(err)
				}
				for _, entry := range entries {
					if all[entry.Name()], err = os.Readlink(filepath.Join(links, entry.Name())); err != nil {
						t.Fatal(err)
					}
				}
				return all
			}
			before := read()
			if _, err := Open(t.Context(), options); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, read()); diff != "" {
				t.Errorf("without the right to create nodes (-before +after):\n%s", diff)
			}
			options.CreateNodes = true
			node := mustOpen(t, options)
			want["511:1"], want["195:1"] = want["511:0"]+"-tools", before["195:1"]
			if diff := cmp.Diff(want, read()); diff != "" {
				t.Errorf("links (-want +got):\n%s", diff)
			}
			if err := node.Scan(t.Context()); err != nil || !node.Inventory().GPUs[0].Health.Healthy() {
				t.Error(err, node.Inventory().GPUs[0].Health)
			}
		})
	}
}

func TestLoadModule(t *testing.T) {
	root, source := t.TempDir(), filepath.Join(t.TempDir(), "main.go")
	writeFile(t, source, `package main

import (
	"fmt"
	"os"
)

func main() {
	if os.Args[1] != "nvidia-uvm" {
		fmt.Println("Module " + os.Args[1] + " not found.")
		os.Exit(1)
	}
	if err := os.WriteFile("/loaded", nil, 0o600); err != nil {
		panic(err)
	}
}
`)
	build := exec.Command("go", "build", "-o", filepath.Join(root, modprobe), source)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	if err := loadModule(root, "nvidia-uvm"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(root, "loaded")); err != nil {
		t.Errorf("the program did not run in the root directory: %v", err)
	}
	if err := loadModule(root, "nvidia-none"); err == nil || !strings.Contains(err.Error(), "Module nvidia-none not found.") {
		t.Errorf("error %v", err)
	}
}

// swapped is the fixture's library with the two GPUs' minor numbers exchanged.
func swapped(t *testing.T) func() (gonvml.Interface, error) {
	t.Helper()
	profile, err := simulated.Load("l4x4")
	if err != nil {
		t.Fatal(err)
	}
	profile.GPUs = slices.Clone(profile.GPUs[:2])
	for i := range profile.GPUs {
		minor := 1 - i
		profile.GPUs[i].Minor = &minor
	}
	return func() (gonvml.Interface, error) { return simulated.New(profile), nil }
}

// The driver numbers GPUs in the order in which it finds them. After it was loaded again, or a GPU was bound again, the numbers may have
// changed.
func TestMinorsThatSwap(t *testing.T) {
	options := fixture(t, "host-rhel")
	open := options.OpenLibrary
	options.OpenLibrary = func() (gonvml.Interface, error) { return open() }
	node := mustOpen(t, options)
	uuid := node.Inventory().GPUs[0].UUID
	open = swapped(t)
	touch(t, node.layout.library)
	if err := node.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	g, known := node.Inventory().ByUUID(uuid)
	if !known || g.Minor != 1 || len(node.Inventory().GPUs) != 2 {
		t.Errorf("GPU %s has minor %d among %d, want 1 among 2", uuid, g.Minor, len(node.Inventory().GPUs))
	}
	edits, err := node.ContainerEdits(t.Context())
	if err != nil || len(edits.Failed) > 0 {
		t.Fatal(err, edits.Failed)
	}
	for _, d := range edits.Devices {
		g, _ := node.Inventory().ByUUID(d.Name)
		if got, want := hostPathOf(d.ContainerEdits, fmt.Sprint("/dev/nvidia", g.Minor)), fmt.Sprint("195:", g.Minor); got != want {
			t.Errorf("%s is given %s, want %s", d.Name, got, want)
		}
	}
}

func touch(t *testing.T, path string) {
	t.Helper()
	later := time.Now().Add(time.Hour)
	if err := os.Chtimes(path, later, later); err != nil {
		t.Fatal(err)
	}
}

// An administrator who unloads the driver's modules one by one must not find one of them loaded again.
func TestUnloadedModuleIsNotLoadedAtOnce(t *testing.T) {
	const without = "Character devices:\n195 nvidia\n\nBlock devices:\n"
	for name, test := range map[string]struct {
		paused, loadedBefore bool
		want                 int
	}{
		"not loaded since boot": {want: 1},
		"unloaded since":        {loadedBefore: true},
		"paused":                {paused: true, want: 1},
	} {
		t.Run(name, func(t *testing.T) {
			options := fixture(t, "host-rhel")
			options.CreateNodes = true
			writeFile(t, filepath.Join(options.HostRoot, "usr/sbin/modprobe"), "")
			loads := 0
			options.loadModule = func(string, string) error { loads++; return errors.New("no such module") }
			if !test.loadedBefore {
				writeFile(t, filepath.Join(options.ProcRoot, "devices"), without)
			}
			node := mustOpen(t, options)
			writeFile(t, filepath.Join(options.ProcRoot, "devices"), without)
			if test.paused {
				if err := node.Pause(t.Context(), "label=paused"); err != nil {
					t.Fatal(err)
				}
				node.loadTried = time.Time{} // long ago
			}
			if err := node.Scan(t.Context()); (err != nil) != test.paused {
				t.Fatal(err)
			}
			if loads != test.want {
				t.Errorf("loaded %d times, want %d", loads, test.want)
			}
		})
	}
}
