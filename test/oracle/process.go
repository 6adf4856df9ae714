// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/hack/cluster"
)

// nvidiaMajor is the major number of NVIDIA's character devices, registered with the kernel (admin-guide/devices.txt);
// minors from 254 up are control devices.
const (
	nvidiaMajor  = 195
	firstControl = 254
)

// sighting is one live process of a container and the device nodes it can see.
type sighting struct {
	node      string
	pid       int
	started   string
	pod       string
	container string
	devices   []Device
}

// lookAt lists the container processes of a node.
func lookAt(ctx context.Context, node *cluster.Node) ([]sighting, error) {
	root, err := node.Root()
	if err != nil {
		// Nothing runs on a machine without a first process.
		return nil, nil //nolint:nilerr // that is an answer
	}
	own, err := newViewpoint(filepath.Dir(root))
	if gone(unlessEnded(filepath.Dir(root), err)) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	gpus, err := readGPUs(root)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var found []sighting
	for _, entry := range entries {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		seen, err := own.look(pid)
		if gone(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if seen == nil {
			continue
		}
		seen.node = node.Name()
		for i, d := range seen.devices {
			if d.Whole() {
				seen.devices[i].GPU = gpus.find(d.Number)
			} else {
				seen.devices[i].GPU = gpus.find(d.Partition.GPU)
			}
		}
		found = append(found, *seen)
	}
	return found, nil
}

// viewpoint is a node's first process: what others are compared with.
type viewpoint struct {
	pidNamespace inode
	root         inode
	// path of the root directory.
	path string
}

type inode struct{ device, number uint64 }

func newViewpoint(proc string) (viewpoint, error) {
	namespace, err := os.Open(filepath.Join(proc, "ns", "pid"))
	if err != nil {
		return viewpoint{}, fmt.Errorf("open PID namespace: %w", err)
	}
	defer namespace.Close()
	pids, err := inodeOf(namespace)
	if err != nil {
		return viewpoint{}, err
	}
	root, err := os.Open(filepath.Join(proc, "root"))
	if err != nil {
		return viewpoint{}, fmt.Errorf("open root directory: %w", err)
	}
	defer root.Close()
	files, err := inodeOf(root)
	return viewpoint{pidNamespace: pids, root: files, path: root.Name()}, err
}

func inodeOf(file *os.File) (inode, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &stat); err != nil {
		return inode{}, fmt.Errorf("look at %s: %w", file.Name(), err)
	}
	return inode{stat.Dev, stat.Ino}, nil
}

// look answers nil for a process that is none of a container on this node.
func (v viewpoint) look(pid int) (*sighting, error) {
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	seen, err := v.examine(pid, proc)
	return seen, unlessEnded(proc, err)
}

// unlessEnded turns a refusal into the news that the process has ended, where that is why. The kernel answers EACCES about the
// links of a process that ends at this moment too (fs/proc: proc_ns_get_link, proc_pid_get_link).
func unlessEnded(proc string, err error) error {
	if !errors.Is(err, fs.ErrPermission) {
		return err
	}
	if _, after := startTime(proc); gone(after) {
		return after
	}
	return err
}

func (v viewpoint) examine(pid int, proc string) (*sighting, error) {
	started, err := startTime(proc)
	if err != nil {
		return nil, err
	}
	pod, container, err := cgroupOf(proc)
	if err != nil || pod == "" {
		return nil, err
	}
	if mine, err := v.contains(proc); err != nil || !mine {
		return nil, err
	}
	root, err := os.Open(filepath.Join(proc, "root"))
	if err != nil {
		return nil, err
	}
	defer root.Close()
	// The runtime's own process, which becomes the container's: it has not entered the container's file system yet.
	if files, err := inodeOf(root); err != nil || files == v.root {
		return nil, err
	}
	devices, rights, err := devicesBelow(filepath.Join(proc, "root"))
	if err == nil && len(rights) > 0 {
		devices, err = withPartitions(v.path, devices, rights)
	}
	if err != nil {
		return nil, err
	}
	seen := &sighting{pid: pid, started: started, pod: pod, container: container, devices: devices}
	if !seen.alive() {
		// The number may belong to another process by now, and so may what was read.
		return nil, fmt.Errorf("process %d: %w", pid, fs.ErrNotExist)
	}
	return seen, nil
}

// contains reports whether a process lives in the node's PID namespace or one below it.
func (v viewpoint) contains(proc string) (bool, error) {
	namespace, err := os.Open(filepath.Join(proc, "ns", "pid"))
	if err != nil {
		return false, err
	}
	defer func() { namespace.Close() }()
	for {
		found, err := inodeOf(namespace)
		if err != nil || found == v.pidNamespace {
			return err == nil, err
		}
		// ioctl_ns(2): EPERM where the parent is not below the caller's own namespace.
		fd, err := unix.IoctlRetInt(int(namespace.Fd()), unix.NS_GET_PARENT)
		if errors.Is(err, unix.EPERM) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("find parent of PID namespace: %w", err)
		}
		namespace.Close()
		namespace = os.NewFile(uintptr(fd), "parent of PID namespace")
	}
}

func (s sighting) alive() bool {
	started, err := startTime(filepath.Join("/proc", strconv.Itoa(s.pid)))
	return err == nil && started == s.started
}

// startTime tells processes of one number apart. It is an error where the process has ended, collected or not.
func startTime(proc string) (string, error) {
	stat, err := os.ReadFile(filepath.Join(proc, "stat"))
	if err != nil {
		return "", err
	}
	// The command's name between the parentheses may hold anything (proc_pid_stat(5)).
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 || fields[0][0] == 'Z' || fields[0][0] == 'X' {
		return "", fmt.Errorf("%s: %w", proc, fs.ErrNotExist)
	}
	return string(fields[19]), nil
}

// inPod matches a control group of a container: kubelet names the pod's after its UID (with underscores under systemd) and
// the runtime the container's after its ID.
var inPod = regexp.MustCompile(`pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?/(?:cri-containerd-)?([0-9a-f]{64})`)

// podGroup matches the name of a pod's control group.
var podGroup = regexp.MustCompile(`pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?$`)

func cgroupOf(proc string) (pod, container string, err error) {
	groups, err := os.ReadFile(filepath.Join(proc, "cgroup"))
	if err != nil {
		return "", "", err
	}
	pod, container = parseCgroup(string(groups))
	return pod, container, nil
}

func parseCgroup(groups string) (pod, container string) {
	match := inPod.FindStringSubmatch(groups)
	if match == nil {
		return "", ""
	}
	return strings.ReplaceAll(match[1], "_", "-"), match[2]
}

// devicesBelow lists the GPUs' nodes below the /dev of a root directory, whatever they are called, and those of rights to use
// partitions.
func devicesBelow(path string) (found, rights []Device, err error) {
	// Kept open as a root, no link in the container's /dev leads out of it.
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, nil, err
	}
	defer root.Close()
	err = fs.WalkDir(root.FS(), "dev", func(name string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if entry.IsDir() && (name == "dev/pts" || name == "dev/shm" || name == "dev/mqueue") {
			return fs.SkipDir
		}
		if entry.Type()&fs.ModeCharDevice == 0 {
			return nil
		}
		info, err := root.Lstat(name)
		if err != nil {
			return err
		}
		if number, ok := gpuNumber(info); ok {
			found = append(found, Device{Number: number, Path: "/" + name})
		} else if strings.HasPrefix(name, "dev/nvidia-caps/") {
			rights = append(rights, Device{Number: number, Path: "/" + name})
		}
		return nil
	})
	return found, rights, err
}

func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
}
