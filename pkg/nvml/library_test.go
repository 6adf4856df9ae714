// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// A process binds one NVML library for good, so each test of a real one runs in a process of its own: this test binary
// again, with the library's host root in the environment.
const libraryHost = "TANDEM_TEST_LIBRARY_HOST"

// inOwnProcess runs the test that calls it in a process of its own, with prepare's host root. It returns false in the
// parent, where all has been said by then.
func inOwnProcess(t *testing.T, prepare func(host string)) (host string, child bool) {
	t.Helper()
	if host := os.Getenv(libraryHost); host != "" {
		return host, true
	}
	host = t.TempDir()
	prepare(host)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.count=1", "-test.v")
	cmd.Env = append(os.Environ(), libraryHost+"="+host)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	} else if !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Fatalf("the test did not run:\n%s", out)
	}
	return "", false
}

func buildLibrary(t *testing.T, path, version string, defines ...string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	args := []string{"-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", fmt.Sprintf("-DVERSION=%q", version), "-o", path}
	for _, d := range defines {
		args = append(args, "-D"+d)
	}
	args = append(args, "testdata/library/nvml.c")
	if out, err := exec.CommandContext(t.Context(), "cc", args...).CombinedOutput(); err != nil {
		t.Fatalf("build library: %v\n%s", err, out)
	}
}

// installLibrary puts the library where a host has it.
func installLibrary(t *testing.T, host, version string, defines ...string) {
	t.Helper()
	dir := filepath.Join(host, "usr/lib64")
	buildLibrary(t, filepath.Join(dir, "libnvidia-ml.so."+version), version, defines...)
	_ = os.Remove(filepath.Join(dir, "libnvidia-ml.so.1"))
	symlink(t, "libnvidia-ml.so."+version, filepath.Join(dir, "libnvidia-ml.so.1"))
}

func libraryOptions(host string) Options {
	return Options{Host: Host{HostRoot: host, SysfsRoot: filepath.Join(host, "sys")}, Interval: 20 * time.Millisecond}
}

func TestLibraryWithHardlyAnyFunction(t *testing.T) {
	host, child := inOwnProcess(t, func(host string) {
		installLibrary(t, host, "570.1.2")
		for _, name := range []string{"nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"} {
			copyNode(t, os.DevNull, filepath.Join(host, "dev", name))
		}
	})
	if !child {
		return
	}
	node, err := Open(t.Context(), libraryOptions(host))
	if err != nil {
		t.Fatal(err)
	}
	inv := node.Inventory()
	if inv.DriverVersion != "570.1.2" || len(inv.GPUs) != 2 {
		t.Fatalf("driver %q, %d GPUs", inv.DriverVersion, len(inv.GPUs))
	}
	if !inv.GPUs[0].Health.Healthy() || inv.GPUs[1].Health.Reason != gpu.ReasonNoNode {
		t.Errorf("health %+v and %+v; only the second has no device node", inv.GPUs[0].Health, inv.GPUs[1].Health)
	}
	if err := node.Scan(t.Context()); err != nil {
		t.Error(err)
	}
	edits := mustEdit(t, node)
	if len(edits.Failed) != 2 {
		t.Errorf("failed %v; without nvmlDeviceGetHandleByUUID nvcdi can say nothing of either", edits.Failed)
	}
}

func TestLibraryWithoutWhatIsNeeded(t *testing.T) {
	host, child := inOwnProcess(t, func(host string) { installLibrary(t, host, "570.1.2", "NO_ERROR_STRING") })
	if !child {
		return
	}
	_, err := Open(t.Context(), libraryOptions(host))
	if !errors.Is(err, ErrNoDriver) || !strings.Contains(err.Error(), "nvmlErrorString") {
		t.Errorf("error %v, want ErrNoDriver that names nvmlErrorString", err)
	}
}

func TestLibraryThatIsNone(t *testing.T) {
	host, child := inOwnProcess(t, func(host string) {
		writeFile(t, filepath.Join(host, "usr/lib64/libnvidia-ml.so.1"), "not a library")
	})
	if !child {
		return
	}
	if _, err := Open(t.Context(), libraryOptions(host)); !errors.Is(err, ErrNoDriver) {
		t.Errorf("error %v, want ErrNoDriver", err)
	}
}

func TestLibraryByPath(t *testing.T) {
	host, child := inOwnProcess(t, func(host string) { buildLibrary(t, filepath.Join(host, "anywhere/nvml.so"), "570.1.2") })
	if !child {
		return
	}
	options := libraryOptions(host)
	options.Library = filepath.Join(host, "anywhere/nvml.so")
	node := mustOpen(t, options)
	if got := len(node.Inventory().GPUs); got != 2 {
		t.Errorf("%d GPUs, want 2", got)
	}
	if _, err := node.ContainerEdits(t.Context()); err == nil {
		t.Error("container edits without any driver file, want an error")
	}
}

func TestReplacedLibraryNeedsANewProcess(t *testing.T) {
	host, child := inOwnProcess(t, func(host string) { installLibrary(t, host, "570.1.2") })
	if !child {
		return
	}
	node, err := Open(t.Context(), libraryOptions(host))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(host, "usr/lib64/libnvidia-ml.so.570.1.2")); err != nil {
		t.Fatal(err)
	}
	installLibrary(t, host, "580.3.4")
	if err := node.Run(t.Context()); !errors.Is(err, ErrDriverReplaced) {
		t.Errorf("Run: %v, want ErrDriverReplaced", err)
	}
	if _, err := Open(t.Context(), libraryOptions(host)); !errors.Is(err, ErrDriverReplaced) {
		t.Errorf("Open: %v, want ErrDriverReplaced", err)
	}
}

// The same library under a new inode, as after a driver container's restart, can be used on.
func TestLibraryMountedAnew(t *testing.T) {
	host, child := inOwnProcess(t, func(host string) { installLibrary(t, host, "570.1.2") })
	if !child {
		return
	}
	node, err := Open(t.Context(), libraryOptions(host))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(host, "usr/lib64/libnvidia-ml.so.570.1.2")
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	copyFile(t, path, path+".new")
	if err := os.Chtimes(path+".new", info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	changed := node.Changed()
	if err := node.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	default:
		t.Error("no signal that container edits changed")
	}
}
