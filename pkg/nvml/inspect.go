// SPDX-License-Identifier: Apache-2.0

// Reads what kubelet-plugin inspect reports of a machine.

package nvml

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/driverroot"
	gpu "github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nvml/record"
)

// ReportFormat is the Format of reports of this version.
const ReportFormat = 1

// Report is what "kubelet-plugin inspect" prints: all that the agent reads of a node's driver, and how the driver answered. It is also the
// recording from which package replay makes a machine profile. It has no names of the cluster and no contents of files.
type Report struct {
	Format int `json:"format"`
	// Version is Tandem's; the caller sets it.
	Version string `json:"version"`
	// Problem is why there is no inventory.
	Problem string `json:"problem,omitempty"`
	// Unidentified is the number of GPUs that are not in the inventory, because they do not report their UUID.
	Unidentified int     `json:"unidentified,omitempty"`
	Layout       Layout  `json:"layout"`
	Machine      Machine `json:"machine"`
	// Inventory is a device.Inventory, with JSON's usual names.
	Inventory any `json:"inventory"`
	// Settings has by UUID what the agent would restore between two holders.
	Settings map[string]any `json:"settings,omitempty"`
	// CDI is the spec that the agent would write, CDIProblem why there is none, CDIFailed by UUID why a device is not in it.
	CDI        json.RawMessage   `json:"cdi,omitempty"`
	CDIProblem string            `json:"cdiProblem,omitempty"`
	CDIFailed  map[string]string `json:"cdiFailed,omitempty"`
	// Calls are the calls of NVML.
	Calls []record.Call `json:"calls"`

	inventory gpu.Inventory
	settings  map[string]string
}

// Layout is where the driver is. Paths are the host's.
type Layout struct {
	DriverRoot string `json:"driverRoot,omitempty"`
	DevRoot    string `json:"devRoot,omitempty"`
	Library    string `json:"library,omitempty"`
	// LibraryVersion is that of the file's name.
	LibraryVersion string   `json:"libraryVersion,omitempty"`
	LibraryDirs    []string `json:"libraryDirs,omitempty"`
	SMI            string   `json:"nvidiaSMI,omitempty"`
	Ldconfig       string   `json:"ldconfig,omitempty"`
	Hook           string   `json:"cdiHook,omitempty"`
	// Looked has "<path>: <result>" for each place in which a driver may be.
	Looked []string `json:"looked"`
}

// Machine is what the kernel says about the node's GPUs without NVML.
type Machine struct {
	Kernel string `json:"kernel"`
	// Module is the version of the loaded kernel module; empty for none.
	Module string `json:"module,omitempty"`
	// UID and SysAdmin are this process's: NVML answers some calls only to the administrator.
	UID      int  `json:"uid"`
	SysAdmin bool `json:"sysAdmin"`
	// Nodes are /dev/nvidia* and /dev/nvidia-caps/* below the host's root and below the driver root.
	Nodes []DeviceNode `json:"nodes"`
	// Majors are the driver's in /proc/devices.
	Majors map[string]uint32 `json:"majors,omitempty"`
	// MIGCapabilities is the number of capabilities in /proc/driver/nvidia-caps/mig-minors.
	MIGCapabilities int           `json:"migCapabilities"`
	PCI             []PCIFunction `json:"pci"`
}

// DeviceNode is a file in /dev. Path is the host's.
type DeviceNode struct {
	Path  string `json:"path"`
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
	// Mode is as in ls -l.
	Mode string `json:"mode"`
}

// PCIFunction is an NVIDIA device on the PCI bus: a GPU, an NVSwitch.
type PCIFunction struct {
	Address string `json:"address"`
	// Path is its place below /sys/devices, with all bridges: "pci0000:15/0000:15:01.0/0000:1b:00.0".
	Path  string `json:"path"`
	Class string `json:"class"`
	// Device and Subsystem are "vendor:device" in hexadecimal.
	Device    string `json:"device"`
	Subsystem string `json:"subsystem"`
	NUMANode  int    `json:"numaNode"`
}

// Inspect reads what an agent with these options would read, once. It needs no Kubernetes and changes nothing; NVML itself may create
// missing device nodes when root opens it (nvidia-modprobe(1)). A driver that does not answer delays it by some of the agent's time limits,
// and is in the report. The command inspect and the tests of hardware call it. WrapLibrary and CreateNodes are ignored.
func Inspect(ctx context.Context, options Options) Report {
	recorder := &record.Recorder{}
	options.WrapLibrary, options.CreateNodes = recorder.Wrap, false
	n := New(options)
	r := Report{Format: ReportFormat, Machine: n.options.machine()}
	if err := n.Scan(ctx); err != nil {
		r.Problem = err.Error()
	} else if err := n.Missing(); err != nil {
		r.Problem = err.Error()
	}
	n.mu.Lock()
	r.inventory, r.Unidentified = n.inventory, n.unidentified
	n.mu.Unlock()
	r.Inventory = record.Document(reflect.ValueOf(r.inventory), lowerCamel)
	n.inspectGPUs(ctx, &r)
	n.inspectEdits(ctx, &r)
	n.release()
	r.Layout = n.inspectLayout()
	r.Machine.Nodes = n.options.nodes(r.Layout.DriverRoot)
	r.Calls = recorder.Calls()
	return r
}

// Devices returns what Inspect found. A report that was decoded has none. The command inspect makes the node's slices of them.
func (r Report) Devices() gpu.Inventory { return r.inventory }

// Err returns an error if there is no inventory.
func (r Report) Err() error {
	if r.Problem == "" {
		return nil
	}
	return fmt.Errorf("%s", r.Problem)
}

// inspectGPUs makes the calls that read a GPU and are not part of a scan: for its next holder, and before its partitions change.
func (n *Node) inspectGPUs(ctx context.Context, r *Report) {
	r.Settings, r.settings = map[string]any{}, map[string]string{}
	for _, g := range r.inventory.GPUs {
		if !readable(g) {
			continue
		}
		ctx, cancel := context.WithTimeoutCause(ctx, n.options.patience, errNoAnswer)
		settings, err := n.Settings(ctx, g.UUID)
		if err != nil {
			r.Settings[g.UUID], r.settings[g.UUID] = err.Error(), err.Error()
		} else {
			r.Settings[g.UUID] = record.Document(reflect.ValueOf(settings), lowerCamel)
			r.settings[g.UUID] = fmt.Sprintf("compute mode %s, application clocks %d MHz (memory) and %d MHz (graphics)",
				cmp.Or(settings.ComputeMode, "not supported"), settings.MemoryClock, settings.GraphicsClock)
		}
		// Their results are in the recording. Processes belong to tenants and are in no report.
		_, _ = n.Partitions(ctx, g.UUID)
		_, _, _ = n.Processes(ctx, g.UUID)
		cancel()
	}
}

func (n *Node) inspectEdits(ctx context.Context, r *Report) {
	if n.session == nil {
		return
	}
	edits, err := n.ContainerEdits(ctx)
	if err == nil {
		r.CDI, err = edits.Spec()
		r.CDIFailed = map[string]string{}
		for uuid, failure := range edits.Failed {
			r.CDIFailed[uuid] = failure.Error()
		}
	}
	if err != nil {
		r.CDIProblem = err.Error()
	}
}

// release closes a session that is held open between scans.
func (n *Node) release() {
	n.scanning.Lock()
	defer n.scanning.Unlock()
	if n.session != nil && n.whyNoCall() == nil {
		n.endSessionUse(func(s *session) { s.setHold(false) })
	}
}

func (n *Node) inspectLayout() Layout {
	n.mu.Lock()
	found, o := n.layout, n.options
	n.mu.Unlock()
	l := Layout{Hook: o.HookPath, Ldconfig: o.ldconfig()}
	for _, root := range o.candidateRoots() {
		var result string
		if below, err := o.lookBelow(root); err != nil {
			result = err.Error()
		} else {
			result = cmp.Or(below.version, "version unknown") + " in " + o.host(filepath.Dir(below.library))
		}
		l.Looked = append(l.Looked, root+": "+result)
	}
	if n.session == nil {
		return l
	}
	l.DriverRoot, l.DevRoot, l.Library, l.LibraryVersion = found.driverRoot, found.devRoot, o.host(found.library), found.version
	for _, dir := range found.libraryDirs {
		l.LibraryDirs = append(l.LibraryDirs, o.host(dir))
	}
	if smi, err := driverroot.Find(o.onHost(found.driverRoot), "nvidia-smi"); err == nil {
		l.SMI = filepath.Join(found.driverRoot, smi)
	}
	return l
}

// host returns the host's path of a path of the agent.
func (h Host) host(path string) string {
	if below, err := filepath.Rel(h.HostRoot, path); err == nil && !strings.HasPrefix(below, "..") {
		return filepath.Join("/", below)
	}
	return path
}

func (h Host) machine() Machine {
	m := Machine{Module: h.moduleVersion(), UID: os.Geteuid(), Majors: h.majors(), PCI: h.pci()}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	m.SysAdmin = hasSysAdmin()
	if caps, err := readCapabilities(h.ProcRoot); err == nil {
		m.MIGCapabilities = len(caps)
	}
	return m
}

// hasSysAdmin reports whether this process has CAP_SYS_ADMIN in effect.
func hasSysAdmin() bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	return unix.Capget(&header, &data[0]) == nil && data[0].Effective&(1<<unix.CAP_SYS_ADMIN) != 0
}

// pci lists NVIDIA's functions on the PCI bus, by address.
func (h Host) pci() []PCIFunction {
	bus := filepath.Join(h.SysfsRoot, "bus/pci/devices")
	entries, err := os.ReadDir(bus)
	if err != nil {
		return nil
	}
	devices, err := filepath.EvalSymlinks(filepath.Join(h.SysfsRoot, "devices"))
	if err != nil {
		return nil
	}
	hexadecimal := func(dir, file string) string { return strings.TrimPrefix(contents(dir, file), "0x") }
	var all []PCIFunction
	for _, entry := range entries {
		dir := filepath.Join(bus, entry.Name())
		if contents(dir, "vendor") != vendorNVIDIA {
			continue
		}
		f := PCIFunction{
			Address: entry.Name(), Class: contents(dir, "class"), NUMANode: gpu.UnknownNUMANode,
			Device:    hexadecimal(dir, "vendor") + ":" + hexadecimal(dir, "device"),
			Subsystem: hexadecimal(dir, "subsystem_vendor") + ":" + hexadecimal(dir, "subsystem_device"),
		}
		if numa, err := strconv.Atoi(contents(dir, "numa_node")); err == nil {
			f.NUMANode = numa
		}
		if target, err := filepath.EvalSymlinks(dir); err == nil {
			f.Path = strings.TrimPrefix(target, devices+"/")
		}
		all = append(all, f)
	}
	return all
}

// nodes lists the driver's device nodes below the host's root and below another root.
func (h Host) nodes(root string) []DeviceNode {
	var all []DeviceNode
	seen := map[string]bool{}
	for _, below := range []string{"/", root} {
		for _, pattern := range []string{"dev/nvidia*", "dev/nvidia-caps/*", "dev/nvidia-caps-imex-channels/*"} {
			matches, _ := filepath.Glob(filepath.Join(h.onHost(below), pattern)) //nolint:errcheck // the patterns are right
			for _, match := range matches {
				var file unix.Stat_t
				if unix.Lstat(match, &file) != nil || file.Mode&unix.S_IFMT != unix.S_IFCHR || seen[match] {
					continue
				}
				seen[match] = true
				all = append(all, DeviceNode{
					Path: h.host(match), Major: unix.Major(file.Rdev), Minor: unix.Minor(file.Rdev),
					Mode: "c" + os.FileMode(file.Mode & 0o777).String()[1:],
				})
			}
		}
	}
	return all
}

// lowerCamel returns the usual JSON name of a field: "uuid", "pciBusID", "gpus".
func lowerCamel(name string) string {
	if rest, ok := strings.CutPrefix(name, "GPUs"); ok {
		return "gpus" + rest
	}
	letters := []rune(name)
	for i := range letters {
		if !unicode.IsUpper(letters[i]) || i > 0 && i+1 < len(letters) && unicode.IsLower(letters[i+1]) {
			break
		}
		letters[i] = unicode.ToLower(letters[i])
	}
	return string(letters)
}

// handlesOf returns the handles of calls, each once and "gpu2" before "gpu10".
func handlesOf(calls []record.Call) (handles []string) {
	for _, c := range calls {
		if c.On != "" {
			handles = append(handles, c.On)
		}
	}
	slices.SortFunc(handles, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b)) })
	return slices.Compact(handles)
}
