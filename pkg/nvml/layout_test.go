// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/golden"
	"github.com/tandem-gpu/tandem/simulated"
)

const driverVersion = "580.95.05"

// layouts are how nodes have the driver, as far as it matters to where things are found.
var layouts = map[string]struct {
	// libraries is where they lie; links are "link -> target"; files are others, copied from the driver's usual places.
	libraries string
	links     []string
	files     map[string]string
	// nodes is the directory with the device nodes.
	nodes string

	driverRoot, devRoot string
}{
	"host-debian": {
		libraries: "/usr/lib/x86_64-linux-gnu/nvidia/current",
		links: []string{
			// Debian's alternatives are absolute links: followed as they are, they lead out of the host's root.
			"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1 -> /etc/alternatives/glx--libnvidia-ml.so.1-x86_64-linux-gnu",
			"/etc/alternatives/glx--libnvidia-ml.so.1-x86_64-linux-gnu -> /usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1",
			"/lib -> usr/lib", "/sbin -> usr/sbin",
		},
		files: map[string]string{
			"/usr/bin/nvidia-smi":      "usr/bin/nvidia-smi",
			"/usr/sbin/ldconfig":       "usr/bin/nvidia-smi",
			"/run/nvidia-persistenced": "",
		},
		nodes: "/dev", driverRoot: "/", devRoot: "/",
	},
	"host-rhel": {
		libraries: "/usr/lib64",
		links:     []string{"/lib64 -> usr/lib64", "/lib -> usr/lib", "/sbin -> usr/sbin"},
		files: map[string]string{
			"/usr/bin/nvidia-smi": "usr/bin/nvidia-smi",
			"/usr/sbin/ldconfig":  "usr/bin/nvidia-smi",
			"/usr/lib/firmware/nvidia/" + driverVersion + "/gsp_ga10x.bin": "lib/firmware/nvidia/" + driverVersion + "/gsp_ga10x.bin",
		},
		nodes: "/dev", driverRoot: "/", devRoot: "/",
	},
	"gpu-operator": {
		libraries: "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
		files: map[string]string{
			"/run/nvidia/driver/usr/bin/nvidia-smi":      "usr/bin/nvidia-smi",
			"/run/nvidia/driver/run/nvidia-persistenced": "",
			"/sbin/ldconfig": "usr/bin/nvidia-smi",
		},
		nodes: "/run/nvidia/driver/dev", driverRoot: "/run/nvidia/driver", devRoot: "/run/nvidia/driver",
	},
	"gpu-operator-host-dev": {
		libraries: "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
		files: map[string]string{
			"/run/nvidia/driver/usr/bin/nvidia-smi": "usr/bin/nvidia-smi",
			"/sbin/ldconfig":                        "usr/bin/nvidia-smi",
		},
		nodes: "/dev", driverRoot: "/run/nvidia/driver", devRoot: "/",
	},
	"gke-cos": {
		libraries: "/home/kubernetes/bin/nvidia/lib64",
		files: map[string]string{
			"/home/kubernetes/bin/nvidia/bin/nvidia-smi":               "usr/bin/nvidia-smi",
			"/home/kubernetes/bin/nvidia/vulkan/icd.d/nvidia_icd.json": "usr/bin/nvidia-smi",
			"/sbin/ldconfig": "usr/bin/nvidia-smi",
		},
		nodes: "/dev", driverRoot: "/home/kubernetes/bin/nvidia", devRoot: "/",
	},
	"bottlerocket": {
		libraries: "/x86_64-bottlerocket-linux-gnu/sys-root/usr/lib",
		links: []string{
			"/usr -> ./x86_64-bottlerocket-linux-gnu/sys-root/usr", "/lib -> ./usr/lib", "/sbin -> ./usr/sbin",
		},
		files: map[string]string{
			"/x86_64-bottlerocket-linux-gnu/sys-root/usr/bin/nvidia-smi": "usr/bin/nvidia-smi",
			"/x86_64-bottlerocket-linux-gnu/sys-root/usr/sbin/ldconfig":  "usr/bin/nvidia-smi",
		},
		nodes: "/dev", driverRoot: "/x86_64-bottlerocket-linux-gnu/sys-root", devRoot: "/",
	},
	"bottlerocket-tesla": {
		libraries: "/x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla",
		links: []string{
			"/usr -> ./x86_64-bottlerocket-linux-gnu/sys-root/usr", "/lib -> ./usr/lib", "/sbin -> ./usr/sbin",
		},
		files: map[string]string{
			"/x86_64-bottlerocket-linux-gnu/sys-root/usr/bin/nvidia-smi": "usr/bin/nvidia-smi",
			"/x86_64-bottlerocket-linux-gnu/sys-root/usr/sbin/ldconfig":  "usr/bin/nvidia-smi",
		},
		nodes: "/dev", driverRoot: "/x86_64-bottlerocket-linux-gnu/sys-root", devRoot: "/",
	},
	// The accelerated AMI of Amazon Linux 2023 has packages (awslabs/amazon-eks-ami, templates/al2023/provisioners/install-nvidia-driver.sh).
	"eks-al2023": {
		libraries: "/usr/lib64",
		links:     []string{"/lib64 -> usr/lib64", "/lib -> usr/lib", "/sbin -> usr/sbin"},
		files: map[string]string{
			"/usr/bin/nvidia-smi":      "usr/bin/nvidia-smi",
			"/usr/sbin/ldconfig":       "usr/bin/nvidia-smi",
			"/run/nvidia-persistenced": "",
		},
		nodes: "/dev", driverRoot: "/", devRoot: "/",
	},
	"talos": {
		libraries: "/usr/local/glibc/usr/lib",
		files: map[string]string{
			"/usr/local/bin/nvidia-smi":      "usr/bin/nvidia-smi",
			"/usr/local/glibc/sbin/ldconfig": "usr/bin/nvidia-smi",
		},
		nodes: "/dev", driverRoot: "/", devRoot: "/",
	},
}

// fixture builds a layout as the host root of an agent, with two GPUs.
func fixture(t *testing.T, name string) Options {
	t.Helper()
	l := layouts[name]
	host, machine := t.TempDir(), t.TempDir()
	profile := load(t, "l4x4")
	profile.GPUs = profile.GPUs[:2]
	// The number of nvidia-uvm is one that this machine has free: here always the same.
	proc := t.TempDir()
	writeFile(t, filepath.Join(proc, "devices"), "Character devices:\n  1 mem\n\nBlock devices:\n")
	writeFile(t, filepath.Join(proc, "meminfo"), "MemTotal: 16777216 kB\n")
	if err := simulated.Materialize(machine, profile, simulated.MaterializeOptions{HostProc: proc}); err != nil {
		t.Fatal(err)
	}
	driver := filepath.Join(machine, simulated.DriverDir)
	// What the kernel lists once the driver's modules are loaded. The simulation takes the first of the free numbers.
	writeFile(t, filepath.Join(machine, "proc/devices"), "Character devices:\n195 nvidia\n510 nvidia-caps\n511 nvidia-uvm\n\nBlock devices:\n")
	for _, link := range l.links {
		from, to, _ := strings.Cut(link, " -> ")
		symlink(t, to, filepath.Join(host, from))
	}
	libraries := filepath.Join(host, l.libraries)
	for _, pattern := range []string{"libcuda.so*", "libnvidia-ml.so*", "libnvidia-ptxjitcompiler.so*"} {
		matches, err := filepath.Glob(filepath.Join(driver, "usr/lib/*", pattern))
		if err != nil || len(matches) == 0 {
			t.Fatalf("simulated driver has no %s (%v)", pattern, err)
		}
		for _, match := range matches {
			copyFile(t, match, filepath.Join(libraries, filepath.Base(match)))
		}
	}
	for to, from := range l.files {
		if from == "" {
			copyFile(t, os.DevNull, filepath.Join(host, to, "socket"))
			continue
		}
		copyFile(t, filepath.Join(driver, from), filepath.Join(host, to))
	}
	for _, node := range deviceNodes(driver) {
		copyNode(t, node, filepath.Join(host, l.nodes, filepath.Base(node)))
	}
	return Options{
		Host: Host{
			HostRoot:  host,
			SysfsRoot: filepath.Join(machine, simulated.SysfsDir),
			ProcRoot:  filepath.Join(machine, "proc"),
		},
		HookPath: "/var/lib/kubelet/plugins/gpu.nvidia.com/nvidia-cdi-hook",
		OpenLibrary: func() (gonvml.Interface, error) {
			return simulated.New(profile), nil
		},
	}
}

func symlink(t *testing.T, target, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	if target, err := os.Readlink(from); err == nil {
		symlink(t, target, to)
		return
	}
	data, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, to, string(data))
}

func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
}

func copyNode(t *testing.T, from, to string) {
	t.Helper()
	info, err := os.Stat(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		t.Fatal(err)
	}
	sys := info.Sys().(*syscall.Stat_t)
	if err := syscall.Mknod(to, sys.Mode, int(sys.Rdev)); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(to, 0o666); err != nil {
		t.Fatal(err)
	}
}

func TestContainerEditsOfLayouts(t *testing.T) {
	// The toolkit looks for programs where PATH says, and for data where XDG_DATA_DIRS says.
	t.Setenv("PATH", "/usr/sbin:/usr/bin")
	t.Setenv("XDG_DATA_DIRS", "")
	for name, layout := range layouts {
		t.Run(name, func(t *testing.T) {
			options := fixture(t, name)
			node := mustOpen(t, options)
			if node.layout.driverRoot != layout.driverRoot || node.layout.devRoot != layout.devRoot {
				t.Errorf("driver root %s, device root %s; want %s and %s",
					node.layout.driverRoot, node.layout.devRoot, layout.driverRoot, layout.devRoot)
			}
			edits := mustEdit(t, node)
			if len(edits.Failed) > 0 {
				t.Errorf("failed: %v", edits.Failed)
			}
			got := encodeSpec(t, edits.Common, edits.Devices)
			if strings.Contains(string(got), options.HostRoot) {
				t.Errorf("the agent's view of the host's root is in the spec:\n%s", got)
			}
			golden.Compare(t, filepath.Join("testdata/cdi", name+".json"), got)
		})
	}
}

// encodeSpec writes a spec as a runtime would read it, and checks that it can.
func encodeSpec(t *testing.T, common specs.ContainerEdits, devices []specs.Device) []byte {
	t.Helper()
	spec := &specs.Spec{Kind: "k8s.gpu.nvidia.com/gpu", ContainerEdits: common, Devices: devices}
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		t.Fatal(err)
	}
	spec.Version = version
	data, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "spec.json")
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := cdilib.ReadSpec(path, 0); err != nil {
		t.Errorf("spec is not valid: %v", err)
	}
	return append(data, '\n')
}

func TestHooks(t *testing.T) {
	tests := map[string]struct {
		path     string
		disabled []string
		hooks    bool
		ldcache  bool
	}{
		"on":             {path: "/hook", hooks: true, ldcache: true},
		"one disabled":   {path: "/hook", disabled: []string{"update-ldcache"}, hooks: true},
		"all disabled":   {path: "/hook", disabled: []string{"all"}},
		"none installed": {path: ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			options := fixture(t, "host-rhel")
			options.HookPath, options.DisabledHooks = test.path, test.disabled
			node := mustOpen(t, options)
			edits := mustEdit(t, node)
			if got := len(edits.Common.Hooks) > 0; got != test.hooks {
				t.Errorf("common hooks: %v, want %v", got, test.hooks)
			}
			updates := func(h *specs.Hook) bool { return slices.Contains(h.Args, "update-ldcache") }
			if got := slices.ContainsFunc(edits.Common.Hooks, updates); got != test.ldcache {
				t.Errorf("update-ldcache: %v, want %v", got, test.ldcache)
			}
			for _, d := range edits.Devices {
				if got := len(d.ContainerEdits.Hooks) > 0; got != test.hooks {
					t.Errorf("hooks of %s: %v, want %v", d.Name, got, test.hooks)
				}
			}
		})
	}
}

// NixOS is named, and not half supported.
func TestNixOS(t *testing.T) {
	options := fixture(t, "host-rhel")
	host := t.TempDir()
	options.HostRoot = host
	for _, dir := range []string{"nix/store/abc-graphics-drivers/lib", "nix/store/def-nvidia/lib", "run", "dev"} {
		if err := os.MkdirAll(filepath.Join(host, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	library := "/nix/store/def-nvidia/lib/libnvidia-ml.so.1"
	if err := errors.Join(
		os.WriteFile(filepath.Join(host, library), nil, 0o644), os.Symlink("/nix/store/abc-graphics-drivers", filepath.Join(host, "run/opengl-driver")),
		os.Symlink(library, filepath.Join(host, "nix/store/abc-graphics-drivers/lib/libnvidia-ml.so.1")),
	); err != nil {
		t.Fatal(err)
	}
	for _, root := range []string{Auto, "/", "/run/opengl-driver"} {
		options.DriverRoot = root
		if _, err := Open(t.Context(), options); !errors.Is(err, ErrNoDriver) || !strings.Contains(err.Error(), "NixOS has its driver in /nix/store, which Tandem does not support") {
			t.Errorf("%s: %v", root, err)
		}
	}
}

func TestSettingsOverrideDiscovery(t *testing.T) {
	options := fixture(t, "gpu-operator")
	options.DriverRoot = "/opt/driver"
	if _, err := Open(t.Context(), options); !errors.Is(err, ErrNoDriver) {
		t.Errorf("error %v, want ErrNoDriver: the driver is elsewhere", err)
	}
	options.DriverRoot = "/run/nvidia/driver"
	options.DevRoot = "/"
	node := mustOpen(t, options)
	if g := node.Inventory().GPUs[0]; g.Health.Reason != "NoDeviceNode" {
		t.Errorf("health %+v, want no device node: they are below the driver root", g.Health)
	}
	if _, err := node.ContainerEdits(t.Context()); err == nil || !strings.Contains(err.Error(), "/dev/nvidiactl") {
		t.Errorf("error %v, want one about /dev/nvidiactl", err)
	}
}

// A host may have leftovers of a package beside the driver that is loaded.
func TestKernelModuleDecidesBetweenDrivers(t *testing.T) {
	options := fixture(t, "gpu-operator")
	copyFile(t, os.DevNull, filepath.Join(options.HostRoot, "usr/lib64/libnvidia-ml.so.535.54.03"))
	symlink(t, "libnvidia-ml.so.535.54.03", filepath.Join(options.HostRoot, "usr/lib64/libnvidia-ml.so.1"))
	options = options.withDefaults()
	options.SysfsRoot = t.TempDir()
	for loaded, want := range map[string]string{
		"":            "/run/nvidia/driver",
		"580.95.05\n": "/run/nvidia/driver",
		"535.54.03\n": "/",
		"999.1\n":     "/run/nvidia/driver",
	} {
		writeFile(t, filepath.Join(options.SysfsRoot, "module/nvidia/version"), loaded)
		l, err := options.locate()
		if err != nil {
			t.Fatal(err)
		}
		if l.driverRoot != want {
			t.Errorf("module %q: driver root %s, want %s", loaded, l.driverRoot, want)
		}
	}
}

// Sockets come and go with their servers, and a container does not start with a mount whose source is gone. CUDA needs none of them. A
// daemon of the administrator's at /tmp/nvidia-mps would take the place of Tandem's.
func TestNoSocketsInEdits(t *testing.T) {
	for name := range layouts {
		t.Run(name, func(t *testing.T) {
			options := fixture(t, name)
			root := layouts[name].driverRoot
			for _, socket := range []string{"run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket", "tmp/nvidia-mps/control"} {
				writeFile(t, filepath.Join(options.HostRoot, root, socket), "")
			}
			node := mustOpen(t, options)
			edits := mustEdit(t, node)
			for _, m := range edits.Common.Mounts {
				if strings.HasSuffix(m.HostPath, "/socket") || strings.Contains(m.HostPath, "/tmp/nvidia-mps") {
					t.Errorf("mounts %s", m.HostPath)
				}
			}
		})
	}
}
