// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
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
)

func TestParseCgroup(t *testing.T) {
	const uid = "ff95bd60-078f-47f4-98fd-97596655dbeb"
	container := strings.Repeat("81b5c529", 8)
	for name, test := range map[string]struct{ groups, pod, container string }{
		"v1":               {"9:name=systemd:/machine/kubepods/burstable/pod" + uid + "/" + container + "\n8:pids:/x\n", uid, container},
		"v2":               {"0::/kubepods/pod" + uid + "/" + container + "\n", uid, container},
		"systemd":          {"0::/kubepods.slice/kubepods-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice/cri-containerd-" + container + ".scope\n", uid, container},
		"group of its own": {"0::/kubepods/pod" + uid + "/" + container + "/inner\n", uid, container},
		"static pod":       {"0::/kubepods/pod" + strings.Repeat("0a", 16) + "/" + container, strings.Repeat("0a", 16), container},
		"pod's own group":  {"0::/kubepods/pod" + uid + "\n", "", ""},
		"system":           {"0::/system/kubelet\n", "", ""},
		"empty":            {"", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			if pod, id := parseCgroup(test.groups); pod != test.pod || id != test.container {
				t.Errorf("got %q, %q", pod, id)
			}
		})
	}
}

func mknod(t *testing.T, path string, major, minor uint32) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(major, minor)))
	if errors.Is(err, unix.EPERM) {
		t.Skip("makes device nodes: needs root")
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestDevicesBelow(t *testing.T) {
	root, outside := t.TempDir(), t.TempDir()
	mknod(t, filepath.Join(root, "dev/nvidia3"), 195, 3)
	mknod(t, filepath.Join(root, "dev/nvidiactl"), 195, 255)
	mknod(t, filepath.Join(root, "dev/nvidia-modeset"), 195, 254)
	mknod(t, filepath.Join(root, "dev/null"), 1, 3)
	mknod(t, filepath.Join(root, "dev/dri/by another name"), 195, 253)
	mknod(t, filepath.Join(root, "dev/pts/0"), 195, 1)
	mknod(t, filepath.Join(outside, "nvidia5"), 195, 5)
	for link, target := range map[string]string{"dev/out": outside, "dev/fd": "/proc/self/fd", "dev/nvidia9": filepath.Join(outside, "nvidia5")} {
		if err := os.Symlink(target, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	found, _, err := devicesBelow(root)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, device := range found {
		got = append(got, device.Path+" "+device.Number.String())
	}
	if want := []string{"/dev/dri/by another name 195:253", "/dev/nvidia3 195:3"}; !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
}

func TestDevicesBelowWithoutDev(t *testing.T) {
	if found, _, err := devicesBelow(t.TempDir()); err != nil || found != nil {
		t.Errorf("found %v, %v", found, err)
	}
	root := t.TempDir()
	if err := os.Symlink("/dev", filepath.Join(root, "dev")); err != nil {
		t.Fatal(err)
	}
	if found, _, _ := devicesBelow(root); found != nil { //nolint:errcheck // whether a link out is an error or nothing is all one
		t.Errorf("followed a link out of the root: %v", found)
	}
}

func TestReadGPUs(t *testing.T) {
	root := t.TempDir()
	machine := filepath.Join(root, simulatedMachine)
	if found, err := readGPUs(root); err != nil || found != nil {
		t.Errorf("without a machine: %v, %v", found, err)
	}
	mknod(t, filepath.Join(machine, "driver/dev/nvidia0"), 195, 0)
	mknod(t, filepath.Join(machine, "driver/dev/nvidia1"), 195, 1)
	for path, text := range map[string]string{
		"profile.yaml":            "gpus:\n- {minor: 0, uuid: GPU-a, pci: \"0000:9d:00.0\"}\n- {minor: 1, uuid: GPU-b, pci: \"0000:1b:00.0\"}\n- {minor: 2, uuid: GPU-c, pci: \"0000:43:00.0\"}\n",
		"sys/devices/a/numa_node": "1\n",
	} {
		path = filepath.Join(machine, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	pci := filepath.Join(machine, "sys/bus/pci/devices")
	if err := errors.Join(os.MkdirAll(pci, 0o755), os.Symlink("../../../devices/a", filepath.Join(pci, "0000:9d:00.0"))); err != nil {
		t.Fatal(err)
	}
	found, err := readGPUs(root)
	if err != nil {
		t.Fatal(err)
	}
	for minor, want := range []GPU{
		{UUID: "GPU-a", PCIBusID: "0000:9d:00.0", Index: 1, Minor: 0, NUMANode: 1},
		{UUID: "GPU-b", PCIBusID: "0000:1b:00.0", Index: 0, Minor: 1, NUMANode: -1},
		{Index: -1, Minor: 2, NUMANode: -1},
	} {
		if got := found.find(Number{nvidiaMajor, uint32(minor)}); got != want {
			t.Errorf("minor %d: %+v, want %+v", minor, got, want)
		}
	}
}

// sleeper starts a process that runs until the test ends.
func sleeper(t *testing.T, flags uintptr) int {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags, Pdeathsig: syscall.SIGKILL}
	err := cmd.Start()
	if errors.Is(err, unix.EPERM) {
		t.Skip("makes namespaces: needs root")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Kill(); err != nil {
			t.Error(err)
		}
		// It was killed, so it ends with an error.
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}

func proc(pid int) string { return filepath.Join("/proc", strconv.Itoa(pid)) }

func TestViewpointContains(t *testing.T) {
	here, below, beside := os.Getpid(), sleeper(t, unix.CLONE_NEWPID), sleeper(t, unix.CLONE_NEWPID)
	for name, test := range map[string]struct {
		from, pid int
		want      bool
	}{
		"itself":           {here, here, true},
		"below":            {here, below, true},
		"above":            {below, here, false},
		"beside":           {below, beside, false},
		"below, by itself": {below, below, true},
	} {
		t.Run(name, func(t *testing.T) {
			v, err := newViewpoint(proc(test.from))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := v.contains(proc(test.pid)); err != nil || got != test.want {
				t.Errorf("contains: %t, %v", got, err)
			}
		})
	}
}

func TestLookPassesOverOthers(t *testing.T) {
	v, err := newViewpoint("/proc/self")
	if err != nil {
		t.Fatal(err)
	}
	if seen, err := v.look(sleeper(t, 0)); err != nil || seen != nil {
		t.Errorf("a process outside any container: %+v, %v", seen, err)
	}
}

func TestEndedProcessIsGone(t *testing.T) {
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	started, err := startTime(proc(pid))
	if err != nil {
		t.Fatal(err)
	}
	if !(sighting{pid: pid, started: started}).alive() {
		t.Error("a live process counts as gone")
	}
	if (sighting{pid: pid, started: started + "0"}).alive() {
		t.Error("another process of the same number counts as this one")
	}
	in.Close()
	// Not collected yet: a zombie.
	for deadline := time.Now().Add(10 * time.Second); ; {
		stat, err := os.ReadFile(filepath.Join(proc(pid), "stat"))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(stat, []byte(") Z ")) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("did not end: %s", stat)
		}
	}
	v, err := newViewpoint("/proc/self")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.look(pid); !gone(err) {
		t.Errorf("a zombie: %v", err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if _, err := v.look(pid); !gone(err) {
		t.Errorf("a collected process: %v", err)
	}
}

func TestARefusalAboutAnEndedProcess(t *testing.T) {
	refused := &fs.PathError{Op: "open", Path: "ns/pid", Err: unix.EACCES}
	pid := sleeper(t, 0)
	if err := unlessEnded(proc(pid), refused); !errors.Is(err, unix.EACCES) {
		t.Errorf("a live process: %v", err)
	}
	if err := unlessEnded(filepath.Join(t.TempDir(), "4636"), refused); !gone(err) {
		t.Errorf("a process that has ended: %v", err)
	}
}

func TestWithPartitions(t *testing.T) {
	root := t.TempDir()
	machine := filepath.Join(root, simulatedMachine)
	for minor := range 3 {
		mknod(t, filepath.Join(machine, fmt.Sprintf("driver/dev/nvidia%d", minor)), 195, uint32(minor))
	}
	for path, text := range map[string]string{
		"profile.yaml":                       "gpus:\n- {minor: 0, uuid: GPU-a, pci: a}\n- {minor: 1, uuid: GPU-b, pci: b}\n- {minor: 2, uuid: GPU-c, pci: c}\n",
		"proc/driver/nvidia-caps/mig-minors": "config 1\nmonitor 2\ngpu1/gi7/access 201\ngpu1/gi7/ci0/access 202\ngpu1/gi7/ci1/access 203\ngpu2/gi1/ci0/access 340\n",
		"mig/state.json":                     `{"gpus": [{"uuid": "GPU-b", "instances": [{"id": 7, "profile": 9, "start": 4, "size": 4, "compute": [{"id": 0, "start": 0}, {"id": 1, "start": 2}]}]}]}`,
	} {
		path = filepath.Join(machine, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	container := t.TempDir()
	for path, number := range map[string][2]uint32{
		"nvidia0": {195, 0}, "nvidia1": {195, 1}, "nvidia-caps/nvidia-cap201": {235, 201}, "nvidia-caps/nvidia-cap203": {235, 203}, "nvidia-caps/nvidia-cap2": {235, 2},
	} {
		mknod(t, filepath.Join(container, "dev", path), number[0], number[1])
	}
	gpus, rights, err := devicesBelow(container)
	if err != nil {
		t.Fatal(err)
	}
	got, err := withPartitions(root, gpus, rights)
	if err != nil {
		t.Fatal(err)
	}
	want := []Device{
		{Number: Number{195, 0}, Path: "/dev/nvidia0"},
		{Number: Number{235, 203}, Path: "/dev/nvidia-caps/nvidia-cap203", Partition: Partition{
			Instance: "gi7/ci1", GPU: Number{195, 1}, Start: 4, Size: 4, Published: [2]string{"-9-4", "-9-4-2"},
		}},
	}
	if !slices.Equal(got, want) {
		t.Errorf("sees %+v, want %+v", got, want)
	}
}
