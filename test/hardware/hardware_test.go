// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/pkg/nvml/record"
)

// Environment variables besides the agent's, such as DRIVER_ROOT.
const (
	// programsVariable is the directory with the programs that make hardware has built; that of the test binary when unset.
	programsVariable = "TANDEM_HARDWARE_PROGRAMS"
	// outVariable is a directory for what the tests record.
	outVariable = "TANDEM_HARDWARE_OUT"
	// loaderVariable is the command that runs a program where this machine's C library is too old for it.
	loaderVariable = "TANDEM_HARDWARE_LOADER"
	// changesVariable allows the tests to change settings of GPUs.
	changesVariable = "TANDEM_HARDWARE_CHANGES"
	// standInVariable says that the driver is the stand-in of hack/hardware: there is no GPU.
	standInVariable = "TANDEM_HARDWARE_STAND_IN"
)

// bench is the machine under test.
type bench struct {
	programs, out string
	options       nvml.Options
	node          *nvml.Node
	report        nvml.Report
}

func TestHardware(t *testing.T) {
	b := open(t)
	for _, test := range []struct {
		name string
		run  func(*testing.T, *bench)
	}{
		{"Facts", facts},
		{"Discover", discover},
		{"Cost", cost},
		{"CostUnderLoad", costUnderLoad},
		{"ReturnCodes", returnCodes},
		{"Nodes", nodes},
		{"Spec", spec},
		{"Container", container},
		{"MPS", mpsDaemon},
		{"XID", xid},
		{"Changes", changes},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, b) })
	}
}

// open finds the driver, or skips the test.
func open(t *testing.T) *bench {
	t.Helper()
	c, err := config.LoadInspect(nil, os.LookupEnv, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{programs: os.Getenv(programsVariable), out: os.Getenv(outVariable)}
	if b.programs == "" {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		b.programs = filepath.Dir(self)
	}
	if b.out == "" {
		b.out = t.TempDir()
	}
	if err := os.MkdirAll(b.out, 0o755); err != nil {
		t.Fatal(err)
	}
	b.options = nvml.Options{
		Host:     nvml.Host{HostRoot: c.HostRoot, DriverRoot: c.DriverRoot, DevRoot: c.DevRoot, Library: c.NVML, SysfsRoot: c.SysfsRoot},
		HookPath: filepath.Join(b.programs, "nvidia-cdi-hook"),
	}
	b.report = nvml.Inspect(t.Context(), b.options)
	if err := b.report.Err(); err != nil {
		t.Skipf("no hardware to test: %v", err)
	}
	b.node = nvml.New(b.options)
	if err := b.node.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("driver %s, %d GPUs, driver root %s, records in %s", b.node.Inventory().DriverVersion, len(b.node.Inventory().GPUs),
		b.report.Layout.DriverRoot, b.out)
	return b
}

func (b *bench) first() device.GPU { return b.node.Inventory().GPUs[0] }

// record writes a file for the reader of the results.
func (b *bench) record(t *testing.T, name string, data []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(b.out, name), data, 0o644); err != nil {
		t.Error(err)
	}
}

// command runs a program of the bundle, or of the driver, with the driver's libraries.
func (b *bench) command(ctx context.Context, program string, args ...string) *exec.Cmd {
	var dirs []string
	for _, dir := range b.report.Layout.LibraryDirs {
		dirs = append(dirs, filepath.Join(b.options.HostRoot, dir))
	}
	libraries := strings.Join(dirs, ":")
	all := append([]string{program}, args...)
	if !strings.HasPrefix(program, "/") {
		all[0] = filepath.Join(b.programs, program)
		if loader := strings.Fields(os.Getenv(loaderVariable)); len(loader) > 0 && !isStatic(program) {
			// It ends with the directory of the bundle's libraries, and ignores LD_LIBRARY_PATH.
			loader[len(loader)-1] += ":" + libraries
			all = append(loader, all...)
		}
	}
	cmd := exec.CommandContext(ctx, all[0], all[1:]...)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+libraries, "LC_ALL=C")
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

func isStatic(program string) bool {
	return slices.Contains([]string{"runc", "nvidia-cdi-hook", "mps-daemon"}, program)
}

// need skips a test without a program of the bundle.
func (b *bench) need(t *testing.T, programs ...string) {
	t.Helper()
	for _, program := range programs {
		if _, err := os.Stat(filepath.Join(b.programs, program)); err != nil {
			t.Skipf("make hardware builds what this test needs: %v", err)
		}
	}
}

// needCUDA skips a test on a machine where a CUDA program does not run at all, and says why.
func (b *bench) needCUDA(t *testing.T) {
	t.Helper()
	b.need(t, "cuda")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if out, err := b.command(ctx, "cuda", "run").CombinedOutput(); err != nil {
		t.Skipf("no CUDA program runs on this machine itself: %v: %s", err, out)
	}
}

// facts records what NVIDIA's tools and the kernel say, for a comparison with what Tandem reads.
func facts(t *testing.T, b *bench) {
	if smi := b.report.Layout.SMI; smi == "" {
		t.Log("the driver has no nvidia-smi")
	} else {
		for name, args := range map[string]string{
			"smi-L.txt": "-L", "smi-q.txt": "-q", "smi-topo.txt": "topo -m", "smi-lgip.txt": "mig -lgip", "smi-lgipp.txt": "mig -lgipp",
			"smi-mig-L.txt": "mig -lgi",
		} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			out, err := b.command(ctx, filepath.Join(b.options.HostRoot, smi), strings.Fields(args)...).CombinedOutput()
			cancel()
			if err != nil {
				// Without MIG, and in the stand-in, it answers few questions.
				t.Logf("nvidia-smi %s: %v", args, err)
				out = fmt.Appendf(out, "\n%v\n", err)
			}
			b.record(t, name, out)
		}
	}
	for _, path := range []string{
		"/proc/devices", "/proc/driver/nvidia/version", "/proc/driver/nvidia/params", "/proc/driver/nvidia-caps/mig-minors", "/proc/version",
	} {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Log(err)
			continue
		}
		b.record(t, strings.ReplaceAll(strings.TrimPrefix(path, "/"), "/", "-")+".txt", data)
	}
}

// discover requires that the agent finds GPUs it can use, and keeps the report: it is the recording for package recording.
func discover(t *testing.T, b *bench) {
	data, err := json.MarshalIndent(b.report, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	b.record(t, "inspect.json", data)
	var text bytes.Buffer
	if err := b.report.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	b.record(t, "inspect.txt", text.Bytes())
	for _, g := range b.node.Inventory().GPUs {
		if !g.Health.Healthy() {
			t.Errorf("%s (%s) is unhealthy: %+v", g.Name(), g.UUID, g.Health)
		}
		for what, value := range map[string]string{
			"product": g.ProductName, "PCI address": g.PCIBusID, "architecture": g.Architecture, "compute capability": g.ComputeCapability,
			"CUDA version": g.CUDADriverVersion, "driver version": g.DriverVersion,
		} {
			if value == "" {
				t.Errorf("%s (%s): the %s is not known", g.Name(), g.UUID, what)
			}
		}
		if g.MemoryBytes == 0 {
			t.Errorf("%s (%s): the memory is not known", g.Name(), g.UUID)
		}
	}
	for _, c := range b.report.Calls {
		if c.Code == record.NoAnswer {
			t.Errorf("NVML does not answer %s on %s", c.Method, c.On)
		}
	}
}

// measure scans so often, and returns the durations in order.
func (b *bench) measure(t *testing.T, scans int) []time.Duration {
	t.Helper()
	var all []time.Duration
	for range scans {
		start := time.Now()
		if err := b.node.Scan(t.Context()); err != nil {
			t.Fatal(err)
		}
		all = append(all, time.Since(start))
	}
	slices.Sort(all)
	return all
}

func percentiles(all []time.Duration) string {
	return fmt.Sprintf("p50 %s, p99 %s, longest %s", all[len(all)/2], all[len(all)*99/100], all[len(all)-1])
}

// openNodes are the GPU's nodes that a process has open, by its directory in /proc.
func openNodes(t *testing.T, proc string) (open []string) {
	t.Helper()
	links, err := filepath.Glob(filepath.Join(proc, "fd/*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil && strings.Contains(target, "/dev/nvidia") {
			open = append(open, target)
		}
	}
	return open
}

// resident is this process's resident memory in KiB.
func resident(t *testing.T) int {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(status), "VmRSS:")
	kib, err := strconv.Atoi(strings.Fields(after)[0])
	if err != nil {
		t.Fatal(err)
	}
	return kib
}

// persistent reports whether all GPUs stay initialised without a client: only then the agent lets go of them between scans.
func (b *bench) persistent() bool {
	all := true
	for _, c := range b.report.Calls {
		if c.Method == "GetPersistenceMode" {
			all = all && c.Return == 0 && string(c.Values) == "[1]"
		}
	}
	return all
}

const leak = 16 << 10 // KiB that 200 scans may add to the process

// cost measures 200 times Init, scan and Shutdown.
func cost(t *testing.T, b *bench) {
	b.measure(t, 5)
	before := resident(t)
	times := b.measure(t, 200)
	after := resident(t)
	left := openNodes(t, "/proc/self")
	t.Logf("200 scans: %s; resident memory %d KiB, before %d KiB; persistence mode %t; open between scans: %v",
		percentiles(times), after, before, b.persistent(), left)
	if b.persistent() && len(left) > 0 {
		t.Errorf("between scans the process has %v open, although persistence mode is on", left)
	}
	if after-before > leak {
		t.Errorf("200 scans added %d KiB to the process", after-before)
	}
}

// costUnderLoad is the same while a program uses the GPU.
func costUnderLoad(t *testing.T, b *bench) {
	b.needCUDA(t)
	load := b.command(t.Context(), "cuda", "loop", "20")
	if err := load.Start(); err != nil {
		t.Fatal(err)
	}
	times := b.measure(t, 50)
	_ = load.Process.Kill()
	_ = load.Wait()
	t.Logf("50 scans under load: %s", percentiles(times))
	for _, g := range b.node.Inventory().GPUs {
		if !g.Health.Healthy() {
			t.Errorf("%s is unhealthy under load: %+v", g.Name(), g.Health)
		}
	}
}

// returnCodes compares what NVML answers to the administrator, to root without SYS_ADMIN, and to another user.
func returnCodes(t *testing.T, b *bench) {
	b.need(t, "kubelet-plugin")
	if os.Geteuid() != 0 {
		t.Skip("needs root, to run with fewer rights")
	}
	type row struct{ on, method, args string }
	table := map[row][]string{}
	var rows []row
	modes := []string{"root", "root without SYS_ADMIN", "user 65534"}
	for i, mode := range modes {
		cmd := b.command(t.Context(), "kubelet-plugin", "inspect", "-o", "json")
		switch i {
		case 1:
			cmd = within(t, cmd, "without-sys-admin")
		case 2:
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		}
		out, err := cmd.Output()
		var report nvml.Report
		if jsonErr := json.Unmarshal(out, &report); jsonErr != nil {
			t.Errorf("inspect as %s: %v, %v", mode, err, jsonErr)
			continue
		}
		if i == 0 && report.Problem != "" {
			t.Errorf("inspect as root: %s", report.Problem)
		}
		if i == 1 && report.Machine.SysAdmin {
			t.Error("SYS_ADMIN was not dropped")
		}
		for _, c := range report.Calls {
			key := row{c.On, c.Method, string(c.Args)}
			if table[key] == nil {
				table[key] = make([]string, len(modes))
				rows = append(rows, key)
			}
			table[key][i] = c.Code
		}
	}
	var differ strings.Builder
	for _, key := range rows {
		if codes := table[key]; codes[0] != codes[1] || codes[0] != codes[2] {
			fmt.Fprintf(&differ, "%s %s%s: %s\n", key.on, key.method, key.args, strings.Join(codes, ", "))
		}
	}
	t.Logf("%d calls; these answer %s differently:\n%s", len(rows), strings.Join(modes, ", "), differ.String())
	b.record(t, "return-codes.txt", []byte(differ.String()))
}

// nodes finds out which device nodes NVML creates, and which CUDA, in a /dev without any.
func nodes(t *testing.T, b *bench) {
	b.need(t, "kubelet-plugin", "cuda")
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a /dev of its own")
	}
	agent := b.command(t.Context(), "kubelet-plugin", "inspect", "-o", "json", "--dev-root=/")
	out, err := within(t, agent, "private-dev").Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == 3 {
		t.Skipf("no /dev of its own here: %s", exit.Stderr)
	}
	made, body := splitNodes(out)
	t.Logf("NVML creates: %s", made)
	var report nvml.Report
	if err := json.Unmarshal(body, &report); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	for _, g := range healthyOf(t, report) {
		if node := fmt.Sprintf("/dev/nvidia%d", g); !strings.Contains(made+" ", node+" ") {
			t.Errorf("the GPU with minor %d is healthy without %s", g, node)
		}
	}
	out, err = within(t, b.command(t.Context(), "cuda", "run"), "private-dev").Output()
	made, body = splitNodes(out)
	t.Logf("CUDA creates: %s (%v: %s)", made, err, bytes.TrimSpace(body))
}

// splitNodes separates the nodes that a program left in its /dev from its output.
func splitNodes(out []byte) (made string, body []byte) {
	body, after, _ := bytes.Cut(out, []byte(nodesMark))
	return strings.TrimSpace(string(after)), body
}

// healthyOf are the minors of the healthy GPUs in a report that was read.
func healthyOf(t *testing.T, report nvml.Report) (minors []int) {
	t.Helper()
	data, err := json.Marshal(report.Inventory)
	if err != nil {
		t.Fatal(err)
	}
	var inventory struct {
		GPUs []struct {
			Minor  int `json:"minor"`
			Health struct {
				Reason string `json:"reason"`
			} `json:"health"`
		} `json:"gpus"`
	}
	if err := json.Unmarshal(data, &inventory); err != nil {
		t.Fatal(err)
	}
	for _, g := range inventory.GPUs {
		if g.Health.Reason == "" {
			minors = append(minors, g.Minor)
		}
	}
	return minors
}

// spec requires that everything in the CDI spec exists on the host, with the numbers that the spec has.
func spec(t *testing.T, b *bench) {
	edits, err := b.node.ContainerEdits(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for uuid, err := range edits.Failed {
		t.Errorf("no edits of %s: %v", uuid, err)
	}
	all := []specs.ContainerEdits{edits.Common}
	for _, d := range edits.Devices {
		all = append(all, d.ContainerEdits)
	}
	host := func(path string) string { return filepath.Join(b.options.HostRoot, path) }
	hooks := false
	for _, e := range all {
		for _, m := range e.Mounts {
			if _, err := os.Stat(host(m.HostPath)); err != nil {
				t.Errorf("source of a mount: %v", err)
			}
		}
		for _, h := range e.Hooks {
			hooks = true
			if _, err := os.Stat(host(h.Path)); err != nil && h.Path != b.options.HookPath {
				t.Errorf("hook: %v", err)
			}
		}
		for _, d := range e.DeviceNodes {
			path := d.HostPath
			if path == "" {
				path = d.Path
			}
			var file unix.Stat_t
			if err := unix.Stat(host(path), &file); err != nil {
				t.Errorf("device node %s: %v", path, err)
				continue
			}
			if int64(unix.Major(file.Rdev)) != d.Major || int64(unix.Minor(file.Rdev)) != d.Minor {
				t.Errorf("device node %s has the numbers %d:%d, the spec %d:%d", path, unix.Major(file.Rdev), unix.Minor(file.Rdev), d.Major, d.Minor)
			}
			for _, name := range driversOf(path) {
				if major := b.report.Machine.Majors[name]; major != 0 && int64(major) != int64(d.Major) {
					t.Errorf("device node %s has major %d, /proc/devices has %d for %s", path, d.Major, major, name)
				}
			}
		}
	}
	if !hooks {
		t.Error("the spec has no hook: containers would not find the driver's libraries")
	}
	if !slices.ContainsFunc(edits.Common.DeviceNodes, func(d *specs.DeviceNode) bool { return d.Path == "/dev/nvidia-uvm" }) {
		t.Error("the spec lacks /dev/nvidia-uvm, without which no CUDA program works")
	}
	t.Logf("%d devices; common edits: %d mounts, %d device nodes, %d hooks", len(edits.Devices), len(edits.Common.Mounts),
		len(edits.Common.DeviceNodes), len(edits.Common.Hooks))
}

// driversOf are the names that /proc/devices may have for the driver of a node. Those of GPUs differ between drivers.
func driversOf(path string) []string {
	switch base := filepath.Base(path); {
	case strings.HasPrefix(base, "nvidia-uvm"):
		return []string{"nvidia-uvm"}
	case strings.Contains(path, "/nvidia-caps/"):
		return []string{"nvidia-caps"}
	case strings.HasPrefix(base, "nvidia"):
		return []string{"nvidia-frontend", "nvidia"}
	default:
		return nil
	}
}

// container runs nvidia-smi and a CUDA program in a container of runc, with the device and without.
func container(t *testing.T, b *bench) {
	b.need(t, "runc", "rootfs", "nvidia-cdi-hook", "cuda")
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a container")
	}
	c := newContainer(t, b)
	if out, err := c.run(t, process{args: []string{"/usr/bin/cuda", "none"}}); err != nil {
		t.Skipf("runc starts no container at all here: %v: %s", err, out)
	}
	g := b.first()
	if smi := b.smiInContainer(t); smi != "" {
		out, err := c.run(t, process{args: []string{smi, "-L"}, device: g.UUID})
		if err != nil || !bytes.Contains(out, []byte(g.UUID)) {
			t.Errorf("nvidia-smi -L in the container: %v: %s", err, out)
		}
	}
	for _, uid := range []uint32{0, 1000} {
		out, err := c.run(t, process{args: []string{"/usr/bin/cuda", "run"}, device: g.UUID, uid: uid})
		if err != nil || !bytes.Contains(out, []byte("kernel ok")) || !bytes.Contains(out, []byte(g.UUID)) {
			t.Errorf("CUDA program as user %d: %v: %s", uid, err, out)
		}
		if seen := bytes.Count(out, []byte("device ")); seen != 1 {
			t.Errorf("CUDA program as user %d sees %d devices, want 1", uid, seen)
		}
	}
	out, err := c.run(t, process{args: []string{"/usr/bin/cuda", "run"}})
	if err == nil {
		t.Errorf("without the device a CUDA program works: %s", out)
	}
	t.Logf("without the device: %s", bytes.TrimSpace(out))
}

// smiInContainer is where a container has nvidia-smi, or empty. It is not in /usr/bin where the driver has directories of its own.
func (b *bench) smiInContainer(t *testing.T) string {
	t.Helper()
	edits, err := b.node.ContainerEdits(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range edits.Common.Mounts {
		if filepath.Base(m.ContainerPath) == "nvidia-smi" {
			return m.ContainerPath
		}
	}
	if b.report.Layout.SMI != "" {
		t.Errorf("the driver has %s, and the CDI spec does not mount it", b.report.Layout.SMI)
	}
	return ""
}

// specDir writes the CDI spec, and returns its directory.
func (b *bench) specDir(t *testing.T) string {
	t.Helper()
	edits, err := b.node.ContainerEdits(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	data, err := edits.Spec()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, cdi.SpecFile), data, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := cdilib.ReadSpec(filepath.Join(dir, cdi.SpecFile), 0); err != nil {
		t.Fatal(err)
	}
	return dir
}

// mpsDaemon runs NVIDIA's MPS as Tandem does: users share it, memory limits are enforced, it ends and starts again.
func mpsDaemon(t *testing.T, b *bench) {
	b.needCUDA(t)
	if os.Geteuid() != 0 {
		t.Skip("needs root, to be two users")
	}
	m := newMPS(t, b)
	m.start(t)
	for _, uid := range []uint32{1000, 1001} {
		if out, err := m.client(t, uid, "", "run"); err != nil {
			t.Errorf("client as user %d: %v: %s", uid, err, out)
		}
	}
	if out, err := m.client(t, 1000, "0=1G", "memory", "256"); err != nil {
		t.Errorf("256 MiB under a limit of 1 GiB: %v: %s", err, out)
	}
	if out, err := m.client(t, 1000, "0=1G", "memory", "2048"); err == nil {
		t.Errorf("2 GiB under a limit of 1 GiB were allocated: %s", out)
	}
	m.quitWithClient(t)
	m.start(t)
	if out, err := m.client(t, 1000, "", "run"); err != nil {
		t.Errorf("client after a restart: %v: %s", err, out)
	}
	m.quit(t)
}

// xid has a program fail by its own fault. Tandem must report that XID, of that GPU, as the application's, and no fault of the GPU.
func xid(t *testing.T, b *bench) {
	b.needCUDA(t)
	ctx, cancel := context.WithCancel(t.Context())
	events, ended := make(chan device.XIDEvent, 1000), make(chan error, 1)
	go func() {
		ended <- b.node.WatchXIDs(ctx, func(e device.XIDEvent) {
			if e.XID != 0 {
				events <- e
			}
		})
	}()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	// The kernel's log begins with the XIDs since boot, and NVML takes a moment to register a GPU for events.
	for quiet := false; !quiet; {
		select {
		case <-events:
		case <-time.After(2 * time.Second):
			quiet = true
		}
	}
	g := b.first()
	start := time.Now()
	program := b.command(t.Context(), "cuda", "fault")
	program.Env = append(program.Environ(), "CUDA_VISIBLE_DEVICES="+g.UUID)
	out, err := program.CombinedOutput()
	if err != nil {
		t.Fatalf("a kernel with an illegal address: %v: %s", err, out)
	}
	t.Logf("%s (%s after the start of the program)", bytes.TrimSpace(out), time.Since(start))
	after := time.Now()
	select {
	case e := <-events:
		t.Logf("reported %s after the program's end: %+v", time.Since(after), e)
		if !strings.HasPrefix(g.PCIBusID, e.PCI+".") {
			t.Errorf("the XID is of %s, want %s", e.PCI, g.PCIBusID)
		}
		if class := device.XIDClass(e.XID); class != device.FaultApplication {
			t.Errorf("XID %d has the class %s, want %s", e.XID, class, device.FaultApplication)
		}
	case <-time.After(5 * time.Second):
		if os.Getenv(standInVariable) == "" {
			t.Error("no XID within 5 s")
		} else {
			t.Log("the stand-in reports no XID")
		}
	}
	if err := b.node.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, g := range b.node.Inventory().GPUs {
		if !g.Health.Healthy() || len(g.Faults) > 0 {
			t.Errorf("%s is unhealthy by the fault of a program: %+v, faults %+v", g.Name(), g.Health, g.Faults)
		}
	}
}

// changes changes settings of the first GPU, and changes them back.
func changes(t *testing.T, b *bench) {
	if os.Getenv(changesVariable) != "1" {
		t.Skipf("changes settings of a GPU: set %s=1 to allow that", changesVariable)
	}
	g := b.first()
	ctx := t.Context()
	// An answer that the GPU has no such setting is one.
	report := func(what string, err error) bool {
		switch {
		case errors.Is(err, device.ErrUnsupported), err != nil && os.Getenv(standInVariable) != "":
			t.Logf("%s: %v", what, err)
		case err != nil:
			t.Errorf("%s: %v", what, err)
		default:
			t.Logf("%s: ok", what)
			return true
		}
		return false
	}
	before, err := b.node.SetComputeMode(ctx, g.UUID, device.ComputeModeExclusiveProcess)
	if report("set compute mode", err) {
		_, err = b.node.SetComputeMode(ctx, g.UUID, before)
		report("restore compute mode", err)
	}
	if report("set time slice", b.node.SetTimeSlice(ctx, g.UUID, 1)) {
		report("restore time slice", b.node.SetTimeSlice(ctx, g.UUID, 0))
	}
	if !g.MIGCapable || g.MIGEnabled {
		t.Logf("MIG is not tried: capable %t, enabled %t", g.MIGCapable, g.MIGEnabled)
		return
	}
	if !report("switch MIG mode on", b.node.EnableMIG(ctx, g.UUID)) {
		return
	}
	defer func() { report("switch MIG mode off", b.node.DisableMIG(context.WithoutCancel(ctx), g.UUID)) }()
	g, _ = b.node.Inventory().ByUUID(g.UUID)
	for _, p := range g.Profiles {
		ref := device.Ref{GPU: g.UUID, Placement: p.Placements[0]}
		start := time.Now()
		partition, err := b.node.Create(ctx, ref, p)
		made := time.Since(start)
		if !report("create "+p.Name, err) {
			continue
		}
		_, err = b.node.PartitionEdits(ctx, partition)
		report("container edits of "+partition.UUID, err)
		start = time.Now()
		report("destroy "+p.Name, b.node.Destroy(ctx, ref))
		t.Logf("%s: created in %s, destroyed in %s", p.Name, made, time.Since(start))
	}
}
