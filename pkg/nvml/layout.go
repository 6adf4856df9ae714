// SPDX-License-Identifier: Apache-2.0

// Where the driver's root and library are on the host, and its devices and the kernel's files.

package nvml

import (
	"cmp"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/driverroot"
)

// Host is where the agent finds the host's files. Its methods look at files only; they call no function of the driver.
type Host struct {
	// HostRoot is the mount of the host's root directory; "/" when empty.
	HostRoot string
	// DriverRoot is Auto (or empty), or the host path of the driver's root directory.
	DriverRoot string
	// DevRoot is Auto (or empty), or the host path of the directory whose dev/ has the device nodes.
	DevRoot string
	// Library is Auto (or empty) for the driver's own libnvidia-ml.so.1, or the path of another one.
	Library string
	// SysfsRoot is the mount of sysfs; "/sys" when empty.
	SysfsRoot string
	// ProcRoot is the mount of proc; "/proc" when empty.
	ProcRoot string
}

func (h Host) withDefaults() Host {
	h.HostRoot = cmp.Or(h.HostRoot, "/")
	h.DriverRoot = cmp.Or(h.DriverRoot, Auto)
	h.DevRoot = cmp.Or(h.DevRoot, Auto)
	h.Library = cmp.Or(h.Library, Auto)
	h.SysfsRoot = cmp.Or(h.SysfsRoot, "/sys")
	h.ProcRoot = cmp.Or(h.ProcRoot, "/proc")
	return h
}

// onHost returns the agent's path of a host path.
func (h Host) onHost(path string) string { return filepath.Join(h.HostRoot, path) }

const libraryName = "libnvidia-ml.so.1"

// layout is the driver's paths on this node. Its fingerprint makes it comparable.
type layout struct {
	// driverRoot and devRoot are host paths.
	driverRoot, devRoot string
	// library is the agent's path of the resolved libnvidia-ml.so.1.
	library string
	// version is the version in the library's file name, or empty.
	version string
	// libraryDirs are the agent's paths of the directories with files of that version.
	libraryDirs []string
}

// locate finds the driver. Without one it returns a *NoDriverError.
func (h Host) locate() (layout, error) {
	var looked []string
	var found []layout
	for _, root := range h.candidateRoots() {
		l, err := h.lookBelow(root)
		if err != nil {
			looked = append(looked, fmt.Sprintf("%s: %v", root, err))
			continue
		}
		found = append(found, l)
	}
	if len(found) == 0 && h.Library != Auto {
		// A library that is set by path suffices for the inventory; ContainerEdits reports what is missing.
		found = append(found, layout{driverRoot: "/", library: h.Library})
	}
	if len(found) == 0 {
		return layout{}, &NoDriverError{Looked: looked, NoHardware: !h.hasHardware()}
	}
	l := h.choose(found)
	if h.Library != Auto {
		if _, err := os.Stat(h.Library); err != nil {
			return layout{}, &NoDriverError{Looked: looked, Cause: err}
		}
		l.library = h.Library
	}
	l.devRoot = h.findDevRoot(l.driverRoot)
	return l, nil
}

func (h Host) candidateRoots() []string {
	switch {
	case h.DriverRoot != Auto:
		return []string{h.DriverRoot}
	case h.Library != Auto:
		return append(h.rootsOf(h.Library), driverroot.Known...)
	}
	return driverroot.Known
}

// rootsOf derives the driver root from the path of a library in one of the usual directories.
func (h Host) rootsOf(library string) []string {
	dir, err := filepath.Rel(h.HostRoot, filepath.Dir(library))
	if err != nil || strings.HasPrefix(dir, "..") {
		return nil
	}
	dir = "/" + dir
	for _, sub := range driverroot.LibraryDirs {
		if root, ok := strings.CutSuffix(dir, "/"+sub); ok {
			return []string{filepath.Join("/", root)}
		}
	}
	return nil
}

// lookBelow finds the driver's libraries below one root.
func (h Host) lookBelow(root string) (layout, error) {
	hostRoot, err := driverroot.Resolve(h.HostRoot, root)
	if err != nil {
		return layout{}, cmp.Or(errors.Unwrap(err), err) // without the path, if it is missing
	}
	if strings.HasPrefix(hostRoot, "/nix/store/") {
		return layout{}, errNixOS
	}
	base := h.onHost(hostRoot)
	l := layout{driverRoot: hostRoot}
	for _, dir := range resolvedDirs(base) {
		library, err := driverroot.Resolve(base, filepath.Join(dir, libraryName))
		if err != nil {
			library = anyVersion(base, dir)
		}
		if library == "" || foreign(filepath.Join(base, library)) {
			continue
		}
		l.library = filepath.Join(base, library)
		l.version = versionOf(library)
		break
	}
	if l.library == "" {
		if _, err := driverroot.Resolve(base, nixOSDriver); err == nil {
			return layout{}, errNixOS
		}
		return layout{}, fmt.Errorf("no %s", libraryName)
	}
	l.libraryDirs = dirsWith(base, l)
	return l, nil
}

// nixOSDriver is where NixOS links its driver. The files are in /nix/store, each package below a directory of its own, and find each other there.
const nixOSDriver = "run/opengl-driver/lib/" + libraryName

var errNixOS = errors.New("NixOS has its driver in /nix/store, which Tandem does not support")

// resolvedDirs returns the existing library directories, with links resolved, each once.
func resolvedDirs(base string) []string {
	var dirs []string
	for _, sub := range driverroot.LibraryDirs {
		dir, err := driverroot.Resolve(base, sub)
		if err == nil && !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// anyVersion finds a library whose soname link is missing.
func anyVersion(base, dir string) string {
	matches, err := filepath.Glob(filepath.Join(base, dir, "libnvidia-ml.so.*.*"))
	if err != nil || len(matches) == 0 {
		return ""
	}
	return filepath.Join(dir, filepath.Base(matches[len(matches)-1]))
}

func dirsWith(base string, l layout) []string {
	dirs := []string{filepath.Dir(l.library)}
	if l.version == "" {
		return dirs
	}
	for _, dir := range resolvedDirs(base) {
		full := filepath.Join(base, dir)
		matches, err := filepath.Glob(filepath.Join(full, "lib*.so."+l.version))
		if err == nil && len(matches) > 0 && !foreign(matches[0]) && !slices.Contains(dirs, full) {
			dirs = append(dirs, full)
		}
	}
	return dirs
}

var versionPattern = regexp.MustCompile(`\.so\.(\d+\.\d+(?:\.\d+)*)$`)

func versionOf(library string) string {
	if m := versionPattern.FindStringSubmatch(library); m != nil {
		return m[1]
	}
	return ""
}

// foreign reports whether a library is for another machine, such as the 32-bit ones that some distributions put in /usr/lib. It
// returns false for a file that is not ELF: opening it gives a better error.
func foreign(path string) bool {
	f, err := elf.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	want, known := machine[runtime.GOARCH]
	return known && f.Machine != want
}

// choose prefers the root whose library matches the loaded kernel module: a host may have both a driver container and the remains
// of a package.
func (h Host) choose(found []layout) layout {
	loaded := h.moduleVersion()
	matching := slices.IndexFunc(found, func(l layout) bool { return loaded != "" && l.version == loaded })
	return found[max(matching, 0)]
}

// moduleLoad identifies the load of the kernel module: each has a new directory in sysfs, whose inode number the kernel does not use again
// before it has used all others (Linux, fs/kernfs/dir.c, __kernfs_new_node). It returns zero while the module is not loaded, and before, the
// last answer, if sysfs cannot be read.
func (h Host) moduleLoad(before uint64) uint64 {
	info, err := os.Stat(filepath.Join(h.SysfsRoot, "module/nvidia"))
	switch {
	case err == nil:
		return info.Sys().(*syscall.Stat_t).Ino
	case errors.Is(err, fs.ErrNotExist):
		return 0
	default:
		return before
	}
}

// moduleVersion returns the version of the loaded kernel module, empty for none.
func (h Host) moduleVersion() string { return contents(h.SysfsRoot, "module/nvidia/version") }

// contents returns the trimmed text of a sysfs file; empty if it cannot be read.
func contents(dir, file string) string {
	text, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// deviceNodes returns /dev/nvidia* below a root of the agent.
func deviceNodes(root string) []string {
	nodes, err := filepath.Glob(filepath.Join(root, "dev", "nvidia*"))
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(nodes, func(path string) bool {
		info, err := os.Lstat(path)
		return err != nil || info.Mode()&os.ModeCharDevice == 0
	})
}

// ldconfigPaths are the host's paths of ldconfig, which the update-ldcache hook runs.
var ldconfigPaths = []string{
	"/sbin/ldconfig",
	"/usr/sbin/ldconfig",
	"/usr/bin/ldconfig",
	"/usr/local/glibc/sbin/ldconfig",
}

// ldconfig returns the host's ldconfig; empty leaves the choice to the hook.
func (h Host) ldconfig() string {
	for _, path := range ldconfigPaths {
		if _, err := driverroot.Resolve(h.HostRoot, path); err == nil {
			return path
		}
	}
	return ""
}

// DriverRoot returns the host path of the driver's root directory. It changes only with the driver.
func (n *Node) DriverRoot() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.layout.driverRoot
}

// DevRoot returns the directory whose dev/ has the device nodes, as a path of the host and of the agent. It changes only with the
// driver.
func (n *Node) DevRoot() (host, agent string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.layout.devRoot, n.options.onHost(n.layout.devRoot)
}

// PCI identifiers (PCI-SIG vendor list; PCI Code and ID Assignment, base class 03h).
const (
	vendorNVIDIA       = "0x10de"
	classDisplayPrefix = "0x03"
)

// hasHardware reports whether sysfs shows an NVIDIA GPU, with or without a driver. It returns true if sysfs cannot be read.
func (h Host) hasHardware() bool {
	devices := filepath.Join(h.SysfsRoot, "bus/pci/devices")
	entries, err := os.ReadDir(devices)
	if err != nil {
		return !os.IsNotExist(err)
	}
	for _, entry := range entries {
		device := filepath.Join(devices, entry.Name())
		if contents(device, "vendor") == vendorNVIDIA && strings.HasPrefix(contents(device, "class"), classDisplayPrefix) {
			return true
		}
	}
	return false
}

// Auto in place of a path makes Scan search for it.
const Auto = "auto"

// Options of a Node. Paths are absolute (internal/config checks them), and the agent's unless they are called host paths.
type Options struct {
	Host

	// OpenLibrary replaces the library that was found, also after each driver upgrade. Nil opens the file. Tests and simulated
	// machines set it.
	OpenLibrary func() (gonvml.Interface, error)
	// WrapLibrary, if not nil, returns what is called instead of the library (record.Recorder).
	WrapLibrary func(gonvml.Interface) gonvml.Interface
	// OpenKernelLog opens the log with the driver's XIDs, which is read as /dev/kmsg is. Nil opens that, unless OpenLibrary is set: then
	// NVML's events report XIDs. Tests and simulated machines set it.
	OpenKernelLog func() (io.ReadCloser, error)
	// CreateNodes lets the package create missing device nodes of the driver below the device root, link them below the host's /dev/char,
	// and load nvidia-uvm. It needs a privileged agent.
	CreateNodes bool

	// Extras are devices of other drivers for every container with a GPU.
	Extras Extras

	// HookPath is the host path of nvidia-cdi-hook. If it is empty, container edits have no hooks.
	HookPath string
	// DisabledHooks are left out of container edits; "all" is all of them. Features are feature flags of nvcdi. Names that nvcdi does not know
	// have no effect.
	DisabledHooks, Features []string

	// Interval is the time between scans that read everything; 4 s when zero, so that an administrator's change is noticed within 5 s.
	Interval time.Duration

	// patience is how long a GPU may take to answer; tests shorten it.
	patience time.Duration
	// loadModule loads a kernel module from a root directory; tests replace it.
	loadModule func(root, module string) error
	// runTool runs a program of the driver and returns its output; tests replace it.
	runTool func(*exec.Cmd) ([]byte, error)
}

// defaultPatience is longer than the initialisation of a GPU takes (some seconds without persistence mode).
const defaultPatience = 10 * time.Second

func (o Options) withDefaults() Options {
	o.Host = o.Host.withDefaults()
	if o.OpenKernelLog == nil {
		o.OpenKernelLog = openKernelLog
		if o.OpenLibrary != nil {
			o.OpenKernelLog = func() (io.ReadCloser, error) { return nil, errors.New("the driver is simulated without a kernel log") }
		}
	}
	o.Interval = cmp.Or(o.Interval, 4*time.Second)
	o.patience = cmp.Or(o.patience, defaultPatience)
	if o.runTool == nil {
		o.runTool = (*exec.Cmd).CombinedOutput
	}
	if o.loadModule == nil {
		o.loadModule = loadModule
	}
	return o
}
